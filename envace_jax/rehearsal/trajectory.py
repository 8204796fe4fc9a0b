"""The record of a finished rollout, and its JSON line.

One line carries everything that is needed to look at a trajectory, to score it again or to train on it: the task, the
rows and segments with role, text, ids and log-probabilities, the observations and where they came from, the verdicts,
the reward and why it ended.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from envace_jax.config import UserError
from envace_jax.datasets.cm2 import Task, task_from_record, task_to_record
from envace_jax.faults import point
from envace_jax.json_files import read_lines
from envace_jax.rehearsal.ledger import Row, Segment
from envace_jax.text.transcript import AssistantOutput, Observation, Role, Step, ToolCall, Transcript, Turn

Verdicts = tuple[tuple[tuple[tuple[bool | None, ...], ...], ...], ...]
"""`verdicts[variant][turn][item][step]`."""


@dataclass(frozen=True)
class Trajectory:
    """One rollout of a task.

    Attributes:
        task_id: the task's uuid.
        group: which group it belongs to (the task's place in the step's batch).
        member: its place in the group.
        rows: the ledgers, in the order in which they were opened.
        segments: the sampled outputs, in order.
        transcript: turns, steps and observations as text.
        verdicts: `verdicts[variant][turn][item][step]` of the turns that began; a turn that was not judged has one
            empty row an item.
        turn_scores: the score of each turn of the task, None where it is open.
        reward: None when the trajectory is masked: it enters neither a baseline nor the loss.
        masked_cause: why it is masked, None when it is not.
        end_reason: one of `episode.END_REASONS`.
        error_codes: the code of every fault on the way, in order, as `role:CODE`.
        counters: numbers for the metrics (observations by source, lengths, checks).
        task: the task itself, for whoever scores or shows the trajectory.
    """

    task_id: str
    group: int
    member: int
    rows: tuple[Row, ...]
    segments: tuple[Segment, ...]
    transcript: Transcript = ()
    verdicts: Verdicts = ()
    turn_scores: tuple[float | None, ...] = ()
    reward: float | None = None
    masked_cause: str | None = None
    end_reason: str = ""
    error_codes: tuple[str, ...] = ()
    counters: Mapping[str, float] = field(default_factory=dict)
    task: Task | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `from_json` gives an equal trajectory back (a NaN log-probability aside, kept as null)."""
        return {
            "task_id": self.task_id,
            "group": self.group,
            "member": self.member,
            "reward": self.reward,
            "masked_cause": self.masked_cause,
            "end_reason": self.end_reason,
            "turn_scores": list(self.turn_scores),
            "error_codes": list(self.error_codes),
            "counters": dict(self.counters),
            "transcript": [_turn_json(turn) for turn in self.transcript],
            "verdicts": self.verdicts,
            "segments": [_segment_json(segment) for segment in self.segments],
            # What of a row was sampled, and its log-probabilities, stand in the segments.
            "rows": [{"role": row.role.value, "ids": list(row.ids)} for row in self.rows],
            "task": None if self.task is None else task_to_record(self.task),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any], *, where: str = "trajectory") -> Trajectory:
        """The trajectory of a JSON object.

        Raises:
            UserError: when a field is missing or does not have its form, naming `where`.
        """
        try:
            segments = tuple(_segment(entry) for entry in value["segments"])
            task = value.get("task")
            return Trajectory(
                task_id=str(value["task_id"]),
                group=int(value["group"]),
                member=int(value["member"]),
                rows=tuple(_row(entry, k, segments) for k, entry in enumerate(value["rows"])),
                segments=segments,
                transcript=tuple(_turn(entry) for entry in value["transcript"]),
                verdicts=_tuples(value["verdicts"]),
                turn_scores=tuple(value["turn_scores"]),
                reward=value["reward"],
                masked_cause=value["masked_cause"],
                end_reason=str(value["end_reason"]),
                error_codes=tuple(value["error_codes"]),
                counters=dict(value["counters"]),
                task=None if task is None else task_from_record(task, where=f"{where}: task"),
            )
        except UserError:
            raise
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, RecursionError) as error:
            raise UserError(f"{where}: not a trajectory record ({type(error).__name__}: {error})") from None


class TrajectoryWriter:
    """Appends trajectories to a JSONL file, each line whole and flushed, so that an interrupted run keeps its share."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = self.path.open("a", encoding="utf-8")

    def write(self, trajectory: Trajectory, **extra: Any) -> None:
        """Writes one line; `extra` fields (such as the step) stand beside the trajectory's."""
        point("write")
        self._file.write(json.dumps(trajectory.to_json() | extra, ensure_ascii=True, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_trajectories(path: str | Path) -> Iterator[Trajectory]:
    """The trajectories of a JSONL file, one at a time; see `read_steps`."""
    return (trajectory for _, trajectory in read_steps(path))


def read_steps(path: str | Path) -> Iterator[tuple[int | None, Trajectory]]:
    """The trajectories of a JSONL file, one at a time, each with the training step it was played for, where it says.

    A last line that was cut off by a killed run is left out; a broken line anywhere else raises `UserError`.
    """
    for where, value in read_lines(path):
        trajectory = Trajectory.from_json(value, where=where)
        yield value.get("step"), trajectory


# --- parts ------------------------------------------------------------------------------------------------------


def _segment_json(segment: Segment) -> dict[str, Any]:
    return {
        "role": segment.role.value,
        "index": segment.index,
        "text": segment.text,
        "ids": list(segment.ids),
        "logprobs": [value if math.isfinite(value) else None for value in segment.logprobs],
        "finish": segment.finish,
        "row": segment.row,
        "start": segment.start,
        **({"experts": base64.b64encode(segment.experts).decode()} if segment.experts else {}),
    }


def _segment(value: Mapping[str, Any]) -> Segment:
    return Segment(
        role=Role(value["role"]),
        index=int(value["index"]),
        ids=tuple(value["ids"]),
        logprobs=tuple(math.nan if number is None else float(number) for number in value["logprobs"]),
        finish=str(value["finish"]),
        text=str(value["text"]),
        row=int(value["row"]),
        start=int(value["start"]),
        experts=base64.b64decode(value.get("experts", "")),
    )


def _row(value: Mapping[str, Any], index: int, segments: tuple[Segment, ...]) -> Row:
    ids = tuple(value["ids"])
    sampled = [False] * len(ids)
    logprobs = [0.0] * len(ids)
    for segment in segments:
        if segment.row == index:
            end = segment.start + len(segment.ids)
            sampled[segment.start : end] = [True] * len(segment.ids)
            logprobs[segment.start : end] = segment.logprobs
    return Row(Role(value["role"]), ids, tuple(sampled), tuple(logprobs))


def _turn_json(turn: Turn) -> dict[str, Any]:
    return {"user": turn.user, "steps": [_step_json(step) for step in turn.steps]}


def _step_json(step: Step) -> dict[str, Any]:
    output = step.output
    return {
        "output": {
            "raw": output.raw,
            "thinking": output.thinking,
            "reply": output.reply,
            "calls": [{"name": c.name, "arguments": c.arguments, "id": c.id} for c in output.calls],
            "error_code": output.error_code,
            "error_message": output.error_message,
            "truncated": output.truncated,
            "dropped": list(output.dropped),
        },
        "observations": [{"text": o.text, "source": o.source, "error_code": o.error_code} for o in step.observations],
    }


def _turn(value: Mapping[str, Any]) -> Turn:
    return Turn(value["user"], tuple(_step(entry) for entry in value["steps"]))


def _step(value: Mapping[str, Any]) -> Step:
    output = value["output"]
    calls = tuple(ToolCall(c["name"], c["arguments"], c["id"]) for c in output["calls"])
    observations = tuple(Observation(o["text"], o["source"], o["error_code"]) for o in value["observations"])
    return Step(
        AssistantOutput(
            raw=output["raw"],
            thinking=output["thinking"],
            reply=output["reply"],
            calls=calls,
            error_code=output["error_code"],
            error_message=output["error_message"],
            truncated=output["truncated"],
            dropped=tuple(output["dropped"]),
        ),
        observations,
    )


def _tuples(value: Any) -> Any:
    return tuple(_tuples(entry) for entry in value) if isinstance(value, (list, tuple)) else value
