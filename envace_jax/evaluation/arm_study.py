"""The `study` command: trains arms over seeds, measures each on the same held-out tasks, and writes one page.

One JSON file a run holds what was measured, by task, so that the page can be made again without training. A run whose
file is there is not made again; a run that was interrupted goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from envace_jax.config import UserError
from envace_jax.config_file import value_of
from envace_jax.evaluation.stats import (
    Interval,
    detectable,
    paired_cluster_bootstrap,
    two_level_bootstrap,
    two_level_difference,
)
from envace_jax.json_files import read_json
from envace_jax.options import whole

SEED = 20_011
"""Seed of the final evaluation's samples, the same for all runs."""
BEGIN, END = "<!-- made by the study command -->", "<!-- end -->"
REFERENCE = "envace"


@dataclass(frozen=True)
class ArmStudy:
    """What is compared.

    Attributes:
        arms: how many seeds each arm gets.
        configs: the configuration of an arm.
        simulator: the configuration whose policy is served to the arm `act_only_endpoint`.
        tasks: held-out tasks of the final evaluation.
        fidelity_tasks: of these, the first so many give the calls by which fidelity is measured.
        page: the page, below the repository's root; the plots lie beside it.
        overrides: configuration values that stand above the arms' own.
    """

    arms: Mapping[str, int]
    configs: str
    simulator: str
    tasks: int
    fidelity_tasks: int
    page: str
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def runs(self) -> list[tuple[str, int]]:
        """(arm, seed), first seeds of all arms first, so that a part of the study is a small study."""
        every = [(arm, seed) for arm, n in self.arms.items() for seed in range(n)]
        return sorted(every, key=lambda run: run[1])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", help="study file (configs/studies/*.py)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and results (resumable)")
    parser.add_argument("--page", type=Path, help="page to write (default: the study's own)")
    parser.add_argument("--arms", default="", help="only these arms, comma-separated")
    parser.add_argument("--seeds", type=whole(0), default=0, help="at most so many seeds an arm")
    parser.add_argument("--tasks", type=whole(0), default=0, help="held-out tasks of the final evaluation")
    parser.add_argument("--steps", type=whole(0), default=0, help="training steps")
    parser.add_argument("--report", action="store_true", help="train nothing: write the page from what is there")


def run_study(args: argparse.Namespace) -> int:
    """Makes the runs that are missing, then the page."""
    study = value_of(args.study, "get_study")
    if not isinstance(study, ArmStudy):
        raise UserError(f"{args.study}: get_study() returned {type(study).__name__}; expected an ArmStudy")
    study = _narrowed(study, args)
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.report:
        from envace_jax.datasets.quickstart.generator import generate_tasks

        tasks = generate_tasks("heldout", study.tasks)
        for number, (arm, seed) in enumerate(study.runs, 1):
            path = args.out / f"{arm}-{seed}.json"
            if path.exists():
                _check(study, path)
                continue
            print(f"{arm}, seed {seed} ({number} of {len(study.runs)})", flush=True)
            result = one_run(study, arm, seed, tasks, args.out / "runs" / f"{arm}-{seed}")
            _write(path, result)
    found = {run: args.out / f"{run[0]}-{run[1]}.json" for run in study.runs}
    results = [read_json(path) for path in found.values() if path.exists()]
    if not results:
        raise UserError(f"--out {args.out}: holds no result of this study")
    page = args.page or Path(study.page)
    write_page(study, results, page, str(args.study))
    print(f"{page}: {len(results)} of {len(study.runs)} runs")
    return 0


def _narrowed(study: ArmStudy, args: argparse.Namespace) -> ArmStudy:
    """The study as the options cut it down."""
    arms = dict(study.arms)
    if args.arms:
        named = args.arms.split(",")
        if unknown := [arm for arm in named if arm not in arms]:
            raise UserError(f"--arms {unknown[0]}: expected some of {', '.join(arms)}")
        arms = {arm: arms[arm] for arm in named}
    if args.seeds:
        arms = {arm: min(n, args.seeds) for arm, n in arms.items()}
    overrides = dict(study.overrides) | ({"learning.steps": args.steps} if args.steps else {})
    tasks = args.tasks or study.tasks
    return replace(study, arms=arms, tasks=tasks, fidelity_tasks=min(study.fidelity_tasks, tasks), overrides=overrides)


def _check(study: ArmStudy, path: Path) -> None:
    """Refuses to mix results of different studies in one folder."""
    there = read_json(path)
    ours = {"tasks": study.tasks, "overrides": dict(study.overrides)}
    if not isinstance(there, dict) or not ours.keys() <= there.keys():
        raise UserError(f"{path}: not a result of a study; name another --out")
    if {name: there[name] for name in ours} != ours:
        raise UserError(f"{path}: was measured on {there['tasks']} tasks with {there['overrides']}; name another --out")


# --- one run ----------------------------------------------------------------------------------------------------------


def arm_config(study: ArmStudy, arm: str, seed: int, folder: Path, simulator: str = "") -> ConfigDict:
    """The configuration of one run: the arm's own, its seed and folder, and nothing measured on the way."""
    from envace_jax.cli import load_config
    from envace_jax.config import set_key
    from envace_jax.config_checks import validate

    cfg = load_config(study.configs.format(arm=arm))
    values: dict[str, Any] = {
        "seed": seed,
        "run_dir": str(folder),
        "evaluation.at_start": False,
        "evaluation.at_end": False,
        "metrics.progress": False,
        "metrics.tensorboard": False,
        "metrics.trajectories": False,
    }
    if arm == "act_only_endpoint":
        r = cfg.rollout
        values |= {
            "rollout.simulator.base_url": simulator,
            "rollout.simulator.model": Path(load_config(study.simulator).model.path).name,
            "rollout.simulator.temperature": r.temperature,
            "rollout.simulator.top_p": r.top_p,
            "rollout.simulator.max_tokens": r.max_rehearse_tokens,
        }
    for key, value in (values | dict(study.overrides)).items():
        set_key(cfg, key, value)
    validate(cfg)
    return cfg


def one_run(study: ArmStudy, arm: str, seed: int, tasks: Sequence[Any], folder: Path) -> dict[str, Any]:
    """Trains one seed of an arm (or goes on with it) and measures it."""
    from envace_jax.learning.run_dir import open_run_dir
    from envace_jax.learning.setup import prepare
    from envace_jax.learning.trainer import run_train

    started = time.perf_counter()
    served = simulator(study, folder) if arm == "act_only_endpoint" else contextlib.nullcontext("")
    with served as address:
        cfg = arm_config(study, arm, seed, folder, address)
        if status := run_train(cfg):
            raise SystemExit(status)
        trained = time.perf_counter() - started
        with open_run_dir(cfg) as run_dir, prepare(cfg, run_dir) as run:
            measured = measure(run, tasks, study.fidelity_tasks)
    return {
        "arm": arm,
        "seed": seed,
        "tasks": len(tasks),
        "overrides": dict(study.overrides),
        "steps": cfg.learning.steps,
        "seconds": {"training": trained, "all": time.perf_counter() - started},
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} x {platform.processor() or platform.machine()}",
    } | measured


def measure(run: Any, tasks: Sequence[Any], fidelity_tasks: int) -> dict[str, Any]:
    """By task: success in reality (greedy; T = 1), in rehearsal and replayed; by call: whether REHEARSE was right.

    Where an arm has a REHEARSE of its own, it is the one that is asked.
    """
    from envace_jax.evaluation.collusion import both_worlds, real_success
    from envace_jax.evaluation.fidelity import compare
    from envace_jax.evaluation.quickstart import ask_rehearse, fidelity_cases

    common = (tasks, run.engine, run.chat, run.rollout)
    greedy = real_success(*common, temperature=0.0, seed=SEED)
    watch = both_worlds(*common, seed=SEED, grounding=run.grounding)
    episode = run.rollout.episode
    cases = fidelity_cases(tasks[:fidelity_tasks], run.chat, episode, grounding=run.grounding)
    pairs = ask_rehearse(
        cases, run.engine, run.chat, max_tokens=episode.max_rehearse_tokens, param_set=run.rollout.rehearse_params
    )
    return {
        "real_greedy": [int(x) for x in greedy],
        "real_sampled": [int(x) for x in watch.real],
        "rehearsed": [int(x) for x in watch.rehearsed],
        "replayed": [int(x) for x in watch.replayed],
        "fidelity": [int(compare(pair).json_equal) for pair in pairs],
        "fidelity_task": [pair.group for pair in pairs],
        "copyable": [int(pair.copyable) for pair in pairs],
    }


@contextlib.contextmanager
def simulator(study: ArmStudy, folder: Path, patience: float = 600.0) -> Iterator[str]:
    """The initial policy behind an endpoint of its own, as an outside simulator; yields the address."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "envace_jax", "serve", "--config", study.simulator, "--port", str(port)]
    address = f"http://127.0.0.1:{port}/v1"
    with (folder / "simulator.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + patience
            while True:
                if process.poll() is not None or time.monotonic() > end:
                    raise UserError(f"the simulator did not start; see {folder / 'simulator.log'}")
                with contextlib.suppress(urllib.error.URLError, OSError):
                    urllib.request.urlopen(f"{address}/models", timeout=5).close()
                    break
                time.sleep(0.5)
            yield address
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _write(path: Path, value: Any) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value))
    partial.replace(path)


# --- the page ---------------------------------------------------------------------------------------------------------

FIGURES = (
    ("real_greedy", "real success, greedy"),
    ("real_sampled", "real success, T = 1"),
    ("fidelity", "fidelity"),
    ("gap", "rehearsed − real"),
)


def by_task(result: Mapping[str, Any], figure: str) -> np.ndarray:
    """One run's values by task: 0 or 1, for the gap -1 to 1, for fidelity the share of a task's calls."""
    if figure == "gap":
        return np.asarray(result["rehearsed"], float) - np.asarray(result["real_sampled"], float)
    if figure != "fidelity":
        return np.asarray(result[figure], float)
    calls: dict[str, list[int]] = {}
    for task, right in zip(result["fidelity_task"], result["fidelity"]):
        calls.setdefault(task, []).append(right)
    return np.asarray([np.mean(of_one) for of_one in calls.values()])


def arrays(results: Sequence[Mapping[str, Any]], figure: str) -> dict[str, np.ndarray]:
    """[seeds, tasks] by arm."""
    found: dict[str, list[np.ndarray]] = {}
    for result in results:
        found.setdefault(result["arm"], []).append(by_task(result, figure))
    return {arm: np.stack(rows) for arm, rows in found.items()}


@dataclass(frozen=True)
class Line:
    """One arm of the table: its figures, and for each its difference from the reference arm."""

    arm: str
    seeds: int
    figures: Mapping[str, Interval]
    differences: Mapping[str, Interval]


def analyse(results: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Means with 95% intervals over seeds and tasks, and differences from `envace` where it was run."""
    values = {name: arrays(results, name) for name, _ in FIGURES}
    lines = []
    for arm in dict.fromkeys(str(result["arm"]) for result in results):
        own = {name: two_level_bootstrap(values[name][arm]) for name, _ in FIGURES}
        apart = {}
        if arm != REFERENCE and REFERENCE in values["gap"]:
            apart = {name: two_level_difference(values[name][arm], values[name][REFERENCE]) for name, _ in FIGURES}
        lines.append(Line(arm, len(values["gap"][arm]), own, apart))
    return lines


def table(lines: Sequence[Line]) -> list[str]:
    """The figures of the arms as a markdown table."""
    cells = [[f"`{x.arm}`", str(x.seeds), *(str(x.figures[name]) for name, _ in FIGURES)] for x in lines]
    return _markdown(["arm", "seeds", *(title for _, title in FIGURES)], cells)


def difference_table(lines: Sequence[Line]) -> list[str]:
    """Every figure's difference from the reference arm, and the one that could have been found; empty without one."""
    cells = []
    for line in lines:
        if line.differences:
            apart = [line.differences[name] for name, _ in FIGURES]
            cells.append([f"`{line.arm}`", *(f"{x}; {detectable(x):.3f}" for x in apart)])
    return _markdown([f"less `{REFERENCE}`", *(title for _, title in FIGURES)], cells) if cells else []


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def together(results: Sequence[Mapping[str, Any]]) -> tuple[float, float, int]:
    """Correlation over runs of fidelity and real success: of all runs, and of their differences from their arm's mean;
    NaN where there is nothing to correlate. Third: the number of runs."""
    x = np.asarray([by_task(result, "fidelity").mean() for result in results])
    y = np.asarray([by_task(result, "real_greedy").mean() for result in results])
    arm = np.asarray([str(result["arm"]) for result in results])
    within = np.zeros((2, len(results)))
    for name in set(arm.tolist()):
        for row, value in enumerate((x, y)):
            within[row, arm == name] = value[arm == name] - value[arm == name].mean()
    return _correlation(x, y), _correlation(*within), len(results)


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    if len(x) < 3 or np.ptp(x) < 1e-12 or np.ptp(y) < 1e-12:
        return math.nan
    return float(np.corrcoef(x, y)[0, 1])


def write_page(study: ArmStudy, results: Sequence[Mapping[str, Any]], page: Path, command: str) -> None:
    """The page with its table between the marks (what stands around them is kept), and two plots beside it."""
    lines = analyse(results)
    overall, within, n = together(results)
    missing = len(study.runs) - len(results)
    first = results[0]
    said = [
        f"Made by `python -m envace_jax study {command}` on {max(str(r['date']) for r in results)}; machine: "
        f"{first['machine']}. {len(results)} runs of {first['steps']} steps, {first['tasks']} held-out tasks each, "
        f"{sum(r['seconds']['all'] for r in results) / 3600:.2f} hours in all."
        + (f" **{missing} runs of the study are missing.**" if missing else ""),
        "",
        *table(lines),
        "",
        *difference_table(lines),
        "",
        "Means with 95% intervals (two-level bootstrap over seeds and tasks). Fidelity: share of a fixed set of calls "
        "whose rehearsed answer equals the real one as JSON, by task. Second table: differences from "
        f"`{REFERENCE}` with their intervals; behind the semicolon what could have been found: the true difference "
        "that would be found in four of five such studies, from the width of the interval. An arm with few seeds has "
        "an interval that is too narrow.",
        "",
        *_gaps(results),
        f"Fidelity and real success over the {n} runs: correlation {overall:.2f}, within arms {within:.2f}.",
        "",
        f"![real success by arm]({page.stem}_success.png)",
        f"![fidelity and success of every run]({page.stem}_fidelity.png)",
    ]
    old = page.read_text() if page.exists() else f"# Arms\n\n{BEGIN}\n{END}\n"
    before, found, rest = old.partition(BEGIN)
    if not found or END not in rest:
        raise UserError(f"{page}: has no lines '{BEGIN}' and '{END}' between which the table could go")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join([before + BEGIN, *said, END]) + rest.partition(END)[2])
    draw(lines, results, page)


def _gaps(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether a run's rehearsals flatter it, by arm: share of runs whose gap's interval lies above 0."""
    above: dict[str, list[bool]] = {}
    for result in results:
        interval = paired_cluster_bootstrap(
            result["rehearsed"], result["real_sampled"], range(result["tasks"]), resamples=2000
        )
        above.setdefault(str(result["arm"]), []).append(interval.low > 0)
    shares = ", ".join(f"`{arm}` {sum(found)} of {len(found)}" for arm, found in above.items())
    return [f"Runs that succeed more often in rehearsal than in reality (95% interval above 0): {shares}.", ""]


def draw(lines: Sequence[Line], results: Sequence[Mapping[str, Any]], page: Path) -> None:
    """Two plots: real success by arm with intervals and single runs; fidelity against success of every run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 0.5 * len(lines) + 1.5), dpi=120)
    for row, line in enumerate(reversed(lines)):
        interval = line.figures["real_greedy"]
        axes.plot([interval.low, interval.high], [row, row], color="black")
        axes.plot([interval.mean], [row], "o", color="black")
        runs = [by_task(r, "real_greedy").mean() for r in results if r["arm"] == line.arm]
        axes.plot(runs, [row + 0.2] * len(runs), "|", color="tab:blue")
    axes.set_yticks(range(len(lines)), [line.arm for line in reversed(lines)])
    axes.set(xlabel="success in the real environment, greedy", ylim=(-0.5, len(lines) - 0.3))
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(page.with_name(f"{page.stem}_success.png"))
    pyplot.close(figure)

    figure, axes = pyplot.subplots(figsize=(6, 4.5), dpi=120)
    for line in lines:
        mine = [r for r in results if r["arm"] == line.arm]
        x, y = ([by_task(r, name).mean() for r in mine] for name in ("fidelity", "real_greedy"))
        axes.plot(x, y, "o", label=line.arm)
    axes.set(xlabel="fidelity (rehearsed = real)", ylabel="success in the real environment, greedy")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(page.with_name(f"{page.stem}_fidelity.png"))
    pyplot.close(figure)
