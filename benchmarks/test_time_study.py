"""Does rehearsing help? Test-time rehearsal on quickstart: N = 0..3, parallel and sequential, two rehearsers, controls.

    python benchmarks/test_time_study.py --trained runs/trained --warm runs/warm --out runs/test_time

The acting policy is the trained one throughout. It rehearses itself (`trained`) or the warm-started policy rehearses
for it (`warm`). Controls get the tokens that parallel rehearsal took on the same task and seed (`best`, `vote`, and
`trials` in forks of the real environment), or a longer thinking budget; what each spent stands beside its score. Every
cell is one `evaluate quickstart` run with its own result file, so that a stopped study goes on where it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envace_jax.evaluation.command import TEST_TIME_SAMPLING
from envace_jax.evaluation.results import Result, read_results
from envace_jax.evaluation.stats import Interval, cluster_bootstrap, detectable, paired_cluster_bootstrap

CONTROLS = ("best", "vote", "trials", "think")
MATCHED = ("best", "vote", "trials")


@dataclass(frozen=True)
class Cell:
    """One setting of the study: method and N, who rehearses, seed."""

    method: str
    n: int
    rehearser: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-{self.n}-{self.rehearser}-seed{self.seed}"

    @property
    def plan(self) -> str:
        return "none" if self.n == 0 else f"{self.method}-{self.n}"


def cells(ns: Sequence[int], seeds: Sequence[int], controls: Sequence[str] = CONTROLS) -> Iterator[Cell]:
    """All cells; those whose tokens a control is matched to come before it, those of one engine in a row."""
    for seed in seeds:
        yield Cell("none", 0, "trained", seed)
        for rehearser in ("trained", "warm"):
            for n in ns:
                for method in ("rehearse-parallel", "rehearse-sequential"):
                    yield Cell(method, n, rehearser, seed)
                for control in controls if rehearser == "trained" else ():
                    yield Cell(control, n, rehearser, seed)


def arguments(cell: Cell, args: argparse.Namespace) -> list[str]:
    """The `evaluate` command of a cell."""
    out = [
        *("evaluate", "quickstart", "--config", args.config, f"--config.model.path={args.trained}"),
        *(f"--config.seed={cell.seed}", "--tasks", str(args.tasks), "--trials", "1"),
        *("--test_time", cell.plan, "--memory_tokens", str(args.memory_tokens)),
        *("--out", str(result_path(args.out, cell))),
    ]
    temperature, top_p = TEST_TIME_SAMPLING  # N = 0 as well, which by default is sampled colder
    out += [f"--config.evaluation.temperature={temperature}", f"--config.evaluation.top_p={top_p}"]
    if cell.rehearser == "warm":
        out += ["--rehearser", args.warm]
    if cell.method in MATCHED:
        matched = Cell("rehearse-parallel", cell.n, "trained", cell.seed)
        out += ["--match", str(result_path(args.out, matched))]
    return out


def result_path(folder: Path, cell: Cell) -> Path:
    return folder / f"{cell.name}.jsonl"


def run(args: argparse.Namespace, command: Callable[[list[str]], int]) -> None:
    """Plays every cell; raises `SystemExit` with the first failure's status."""
    for cell in cells(args.n, args.seeds, args.controls):
        print(f"== {cell.name}", flush=True)
        if status := command([*arguments(cell, args), *args.override]):
            raise SystemExit(status)


def evaluator() -> Callable[[list[str]], int]:
    """The `evaluate` command in this process; cells in a row with the same models, settings and seed share an engine.

    What one of them left in its rows is forgotten before the next.
    """
    from envace_jax.cli import build_parser, load_config
    from envace_jax.compat import set_up_jax
    from envace_jax.config import flat
    from envace_jax.config_checks import validate
    from envace_jax.evaluation.command import policy_engine, run_evaluate

    set_up_jax()
    kept: dict[str, Any] = {}

    def engine(cfg: Any, args: argparse.Namespace, chat: Any) -> Any:
        key = repr((list(flat(cfg)), args.rehearser))
        if key not in kept:
            kept.clear()
            kept[key] = policy_engine(cfg, args, chat)
        kept[key].forget()
        return kept[key]

    def evaluate(argv: list[str]) -> int:
        rest = [word for word in argv[1:] if not word.startswith("--config.")]
        args = build_parser("evaluate").parse_args(rest)
        cfg = load_config(args.config, [word for word in argv if word.startswith("--config.")])
        validate(cfg)
        run_evaluate(cfg, args, engine)
        return 0

    return evaluate


@dataclass(frozen=True)
class Line:
    """One row of the table, over all seeds.

    Attributes:
        success: in the real environment, with its interval (tasks resampled).
        gain: over N = 0 on the same tasks and seeds; None for N = 0 itself.
        by_seed: success of every seed.
        tokens: generated tokens a task, private ones included.
        evaluations: self-evaluations of rehearsals: how many said good, bad, and nothing that could be read.
        where: of the rehearsing rows, number of runs and gain of those whose rehearsals were all judged good, of the
            other ones, of those with one user turn, and of those with several.
    """

    method: str
    n: int
    rehearser: str
    success: Interval
    gain: Interval | None
    by_seed: tuple[float, ...]
    tokens: float
    evaluations: tuple[int, int, int]
    where: tuple[tuple[int, Interval | None], ...] = ()


def _where(rows: Sequence[tuple[Result, float]]) -> tuple[tuple[int, Interval | None], ...]:
    """`Line.where` of results, each with the score of N = 0 on the same task and seed."""
    good = [bool(r.parts["evaluations"]) and all(x == 1.0 for x in r.parts["evaluations"]) for r, _ in rows]
    short = [len(r.transcript or ()) <= 1 for r, _ in rows]
    out: list[tuple[int, Interval | None]] = []
    for marks in (good, [not x for x in good], short, [not x for x in short]):
        part = [row for row, mark in zip(rows, marks) if mark]
        scores, before, tasks = [r.score for r, _ in part], [b for _, b in part], [r.task for r, _ in part]
        out.append((len(part), paired_cluster_bootstrap(scores, before, tasks) if part else None))
    return tuple(out)


def summary(folder: Path, ns: Sequence[int], seeds: Sequence[int], controls: Sequence[str] = CONTROLS) -> list[Line]:
    """The table's rows; a setting of which a seed, or N = 0 of a seed, is missing or not whole is left out."""
    found: dict[tuple[str, int, str], dict[int, list[Result]]] = {}
    for cell in cells(ns, seeds, controls):
        path = result_path(folder, cell)
        if path.is_file():
            header, results = read_results(path)
            if len(results) == header.tasks * header.trials:
                found.setdefault((cell.method, cell.n, cell.rehearser), {})[cell.seed] = results
    plain = {(seed, r.task): r.score for seed, run in found.get(("none", 0, "trained"), {}).items() for r in run}
    lines = []
    for (method, n, rehearser), runs in found.items():
        rows = [(seed, result) for seed, run in runs.items() for result in run]
        if len(runs) < len(seeds) or any((seed, result.task) not in plain for seed, result in rows):
            continue
        scores, tasks = [result.score for _, result in rows], [result.task for _, result in rows]
        before = [plain[seed, result.task] for seed, result in rows]
        said = [value for _, result in rows for value in result.parts.get("evaluations", ())]
        lines.append(
            Line(
                method,
                n,
                rehearser,
                cluster_bootstrap(scores, tasks),
                paired_cluster_bootstrap(scores, before, tasks) if n else None,
                tuple(sum(r.score for r in run) / len(run) for run in runs.values()),
                sum(result.tokens for _, result in rows) / len(rows),
                (said.count(1.0), said.count(0.0), said.count(None)),
                _where([(r, b) for (_, r), b in zip(rows, before)]) if said else (),
            )
        )
    return lines


def table(lines: Sequence[Line]) -> str:
    """The rows as a Markdown table, and below it what difference the study could have found."""
    out = [
        "| method | N | rehearser | success | gain over N = 0 | by seed | tokens a task | judged good / bad / unread |",
        "|---|---|---|---|---|---|---|---|",
    ]
    said = lambda gain: "" if gain is None else f"{gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"  # noqa: E731
    for x in lines:
        seeds = ", ".join(f"{value:.3f}" for value in x.by_seed)
        judged = " / ".join(map(str, x.evaluations)) if any(x.evaluations) else ""
        cell = f"{x.method} | {x.n} | {x.rehearser} | {x.success} | {said(x.gain)}"
        out.append(f"| {cell} | {seeds} | {x.tokens:.0f} | {judged} |")
    gains = [x.gain for x in lines if x.gain is not None]
    if any(x.where for x in lines):
        out += [
            "",
            "Gain over N = 0 by what rehearsals were judged, and by the user turns of the task (number of runs):",
            "",
            "| method | N | rehearser | all judged good | others | one turn | several turns |",
            "|---|---|---|---|---|---|---|",
        ]
    for x in lines:
        if x.where:
            parts = " | ".join(f"{said(gain)} ({n})" for n, gain in x.where)
            out.append(f"| {x.method} | {x.n} | {x.rehearser} | {parts} |")
    if gains:
        smallest = sorted(detectable(gain) for gain in gains if gain.low < gain.high) or [0.0]
        out += [
            "",
            f"{lines[0].success.n // len(lines[0].by_seed)} tasks, {len(lines[0].by_seed)} seeds; a true gain over "
            f"N = 0 found with 80% power at the 5% level: {smallest[0]:.3f} to {smallest[-1]:.3f} by row.",
        ]
    return "\n".join(out) + "\n"


def plot(lines: Sequence[Line], path: Path) -> None:
    """Success against tokens a task, one curve a method and rehearser, all from N = 0."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    start = [x for x in lines if x.n == 0]
    for method, rehearser in sorted({(x.method, x.rehearser) for x in lines if x.n}):
        curve = start + sorted(
            (x for x in lines if x.n and (x.method, x.rehearser) == (method, rehearser)), key=lambda x: x.n
        )
        means = [x.success.mean for x in curve]
        errors = [[x.success.mean - x.success.low for x in curve], [x.success.high - x.success.mean for x in curve]]
        label = f"{method}, {rehearser} rehearser" if method.startswith("rehearse") else f"{method} (control)"
        axes.errorbar([x.tokens for x in curve], means, errors, marker="o", capsize=2, label=label)
    axes.set_xlabel("generated tokens a task (log scale)")
    axes.set_ylabel("success in the real environment")
    axes.set_xscale("log")
    axes.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Test-time rehearsal on quickstart, with its controls.")
    parser.add_argument("--trained", required=True, help="folder of the trained policy, which acts")
    parser.add_argument("--warm", required=True, help="folder of the warm-started policy, the other rehearser")
    parser.add_argument("--config", default="configs/quickstart.py")
    parser.add_argument("--out", type=Path, default=Path("runs/test_time"), help="folder of the result files")
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--n", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--controls", nargs="*", choices=CONTROLS, default=list(CONTROLS))
    parser.add_argument("--memory_tokens", type=int, default=64)
    parser.add_argument("--only_table", action="store_true", help="play nothing, sum up what is there")
    args, args.override = parser.parse_known_args(argv)
    wrong = [word for word in args.override if not word.startswith("--config.")]
    if wrong:
        parser.error(f"{wrong[0]}: unknown")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if not args.only_table:
        run(args, evaluator())
    lines = summary(args.out, args.n, args.seeds, args.controls)
    (args.out / "table.md").write_text(table(lines))
    plot(lines, args.out / "test_time.svg")
    print(table(lines) + f"\nwritten: {args.out / 'table.md'}, {args.out / 'test_time.svg'}")


if __name__ == "__main__":
    main()
