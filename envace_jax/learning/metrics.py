"""What a step did, as numbers: computed from its trajectories, written to JSONL and TensorBoard, shown while it runs.

One flat dictionary of floats per step.  `red_flags` compares it with healthy ranges and says what to try.  Files are
written so that a resumed run continues them as if it had never stopped: a checkpoint holds their lengths, and what a
killed run wrote behind them is cut off.
"""

from __future__ import annotations

import json
import math
import os
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from envace_jax.config import UserError
from envace_jax.faults import point
from envace_jax.json_files import parse
from envace_jax.learning.advantage import Credit, advantages_of, group_spread
from envace_jax.learning.trackers import Trackers
from envace_jax.text.transcript import Role

Metrics = dict[str, float]


def clean(text: str, limit: int = 200) -> str:
    """Text fit for a terminal: control, format and unpaired surrogate characters replaced, cut to `limit`."""
    text = "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co") else c for c in text[: limit + 1])
    return text if len(text) <= limit else text[:limit] + "…"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def trajectory_metrics(trajectories: Sequence[Any], advantages: Sequence[Credit] = ()) -> Metrics:
    """Figures of one step's trajectories: rewards, groups, lengths, how outputs and episodes ended, errors."""
    scored = [t for t in trajectories if t.reward is not None]
    n = max(len(trajectories), 1)
    out: Metrics = {
        "reward/mean": _mean([t.reward for t in scored]),
        "reward/full": _mean([float(t.reward > 1 - 1e-6) for t in scored]),
        "trajectories": float(len(trajectories)),
        "masked/share": 1 - len(scored) / n,
        "act/parsed": _mean(
            [
                float(step.output.error_code is None and not step.output.truncated)
                for t in trajectories
                for turn in t.transcript
                for step in turn.steps
            ]
        ),
        "turns/mean": _mean([float(len(t.transcript)) for t in trajectories]),
    }
    out |= {f"groups/{name.removeprefix('groups_')}": v for name, v in group_spread(trajectories).items()}
    for cause, count in Counter(t.masked_cause for t in trajectories if t.reward is None).items():
        out[f"masked/{cause or 'no_reward'}"] = float(count)
    for role in Role:
        segments = [s for t in trajectories for s in t.segments if s.role == role]
        weighted = [t.reward for t in scored for s in t.segments if s.role == role]
        out[f"reward/{role}"] = _mean(weighted)
        out[f"outputs/{role}"] = len(segments) / n
        out[f"length/{role}"] = _mean([float(len(s.ids)) for s in segments])
        out[f"length_max/{role}"] = float(max((len(s.ids) for s in segments), default=0))
        for finish, count in Counter(s.finish for s in segments).items():
            out[f"finish/{role}/{finish}"] = count / len(segments)
        values = [abs(v) for t, a in zip(trajectories, advantages) for v in advantages_of(t, a, role)]
        out[f"advantage_abs/{role}"] = _mean(values)
    rows = [float(len(r.ids)) for t in trajectories for r in t.rows]
    out["row_length/mean"], out["row_length/max"] = _mean(rows), max(rows, default=0.0)
    for reason, count in Counter(t.end_reason for t in trajectories).items():
        out[f"end/{reason}"] = count / n
    for code, count in Counter(code for t in trajectories for code in t.error_codes).items():
        out[f"error/{code}"] = float(count)
    for name in sorted({name for t in trajectories for name in t.counters}):
        out[f"count/{name}"] = sum(float(t.counters.get(name, 0.0)) for t in trajectories) / n
    return out


# Red flags: (when, what it means and what to try).  Figures that a step lacks raise none.
_FLAGS: tuple[tuple[Callable[[Callable[[str], float]], bool], str], ...] = (
    (
        lambda m: m("groups/without_spread") > 0.8,
        "{groups/without_spread:.0%} of groups have no spread and teach nothing: use harder or easier tasks, a larger "
        "learning.group_size, or learning.dynamic_sampling",
    ),
    (
        lambda m: m("masked/share") > 0.25,
        "{masked/share:.0%} of trajectories have no verdict: see the masked/* figures; check the judge's endpoint and "
        "its output limit",
    ),
    (
        lambda m: m("finish/act/length") > 0.2,
        "{finish/act/length:.0%} of ACT outputs were cut off: raise rollout.max_act_tokens, or look for loops",
    ),
    (
        lambda m: m("finish/rehearse/length") > 0.2,
        "{finish/rehearse/length:.0%} of REHEARSE outputs were cut off: raise rollout.max_rehearse_tokens",
    ),
    (
        lambda m: m("kl") > 0.5,
        "KL to the reference is {kl:.2f} a token: the policy has moved far; lower learning.lr, or raise kl_coef",
    ),
    (
        lambda m: m("exp_drift_max") > 10.0,
        "one token's probability differs {exp_drift_max:.0f}-fold between sampler and learner: compare model.dtype and "
        "attention of both; learning.importance_cap=2 bounds its weight",
    ),
    (
        lambda m: 0 < m("entropy") < 0.01 and m("groups/without_spread") > 0.5,
        "entropy is {entropy:.3f} a token and most groups are alike: the policy has become nearly deterministic; lower "
        "learning.lr, or raise rollout.temperature",
    ),
    (
        lambda m: m("length/act") > 4 * m("length_first/act") > 0,
        "ACT outputs are {length/act:.0f} tokens long, over four times the first step's: rewards may favour length",
    ),
    (
        lambda m: m("grad_norm") > 100.0,
        "the gradient norm is {grad_norm:.0f} before clipping: lower learning.lr, or look at the step's trajectories",
    ),
    (
        lambda m: m("clipped") > 0.3,
        "{clipped:.0%} of tokens are clipped: fewer learning.updates_per_batch, or a lower learning.lr",
    ),
    (
        lambda m: m("nonfinite") > 0,
        "the gradient was not finite: the step was skipped and its batch kept for inspection",
    ),
)


def red_flags(metrics: Mapping[str, float]) -> list[str]:
    """One line for every figure that has left its healthy range, with what to try."""

    def get(name: str) -> float:
        return float(metrics.get(name, 0.0))

    class Values(dict):
        def __missing__(self, key: str) -> float:
            return 0.0

    values = Values(metrics)
    return [_fill(text, values) for when, text in _FLAGS if when(get)]


def _fill(text: str, values: Mapping[str, float]) -> str:
    # str.format reads a name with "/" as a plain key of format_map.
    return text.format_map(values)


class JsonlFile:
    """An append-only JSONL file whose length is part of a checkpoint.

    `length` is where the file ended when the checkpoint was made: what lies behind it belongs to steps that will be
    done again, and is cut off.
    """

    def __init__(self, path: str | Path, length: int = 0):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO | None = None
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < length:
            raise UserError(
                f"{self.path} has {size} bytes, the checkpoint counts {length}: lines have been lost; give the file "
                "back, or start anew with --config.overwrite=true"
            )
        if size > length:
            os.truncate(self.path, length)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes one line and flushes it, so that a killed process loses at most the line it was writing."""
        assert self._file is not None
        point("write")
        self._file.write(json.dumps(record, ensure_ascii=True, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> int:
        """Brings what was written to the disk; returns the length."""
        assert self._file is not None
        self._file.flush()
        point("fsync")
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics for JSON: a number that is not finite becomes null."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


class Sink:
    """Where metrics go: `metrics.jsonl` and, if asked, TensorBoard and trackers."""

    def __init__(
        self, run_dir: Path, *, tensorboard: bool, length: int = 0, step: int = 0, trackers: Trackers | None = None
    ):
        self.trackers = trackers
        self.jsonl = JsonlFile(run_dir / "metrics.jsonl", length)
        self.board: Any = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            self.board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step, flush_secs=30)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.jsonl.write({"step": step} | finite(metrics))
        if self.board is not None:
            for name, value in metrics.items():
                if math.isfinite(value):
                    self.board.add_scalar(name, value, step)
        if self.trackers is not None:
            self.trackers.log(step, metrics)

    def text(self, step: int, name: str, text: str) -> None:
        """A text (such as a trajectory) for TensorBoard."""
        if self.board is not None:
            self.board.add_text(name, text, step)

    def sync(self) -> int:
        return self.jsonl.sync()

    def close(self) -> None:
        self.jsonl.close()
        if self.board is not None:
            self.board.close()
        if self.trackers is not None:
            self.trackers.close()


class NoSink:
    """The sink of a process that does not write."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None: ...

    def sync(self) -> int:
        return 0

    def close(self) -> None: ...


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The steps of `metrics.jsonl`; a last line cut off by a kill is left out."""
    records = []
    for line in (Path(run_dir) / "metrics.jsonl").read_bytes().splitlines():
        try:
            records.append(parse(line, "metrics.jsonl"))
        except UserError:
            break
    return records


class Display:
    """The run on the terminal: a progress bar with the reward, or one plain line a step where there is no terminal."""

    def __init__(self, total: int, done: int = 0, enabled: bool = True, file: TextIO | None = None):
        self.file = file or sys.stderr
        self.total = total
        self.bar: Any = None
        if enabled and self.file.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns, console=Console(file=self.file))
            self.task = self.bar.add_task("train", total=total, completed=done, figures="")
            self.bar.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows that `step` steps are done."""
        figures = (
            f"reward {metrics.get('reward/mean', 0):.3f} (act {metrics.get('reward/act', 0):.3f}, "
            f"rehearse {metrics.get('reward/rehearse', 0):.3f})"
        )
        if self.bar is not None:
            self.bar.update(self.task, completed=step, figures=figures)
            return
        self.say(
            f"step {step}/{self.total} {figures} spread {metrics.get('groups/reward_spread', 0):.3f} "
            f"loss {metrics.get('loss', 0):+.4f} grad {metrics.get('grad_norm', 0):.3f} "
            f"{metrics.get('time/step', 0):.2f} s"
        )

    def phase(self, text: str) -> None:
        """Says what is going on beside the steps (shown in the bar's place, or as a line)."""
        if self.bar is not None:
            self.bar.update(self.task, figures=clean(text))
        else:
            self.say(text)

    def say(self, text: str) -> None:
        """One line, free of terminal control characters."""
        if self.bar is not None:
            self.bar.console.print(clean(text, 1000), markup=False, highlight=False)
        else:
            print(clean(text, 1000), file=self.file, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
