"""Rewards beyond the checklist, one number an output; all are off by default.

The reward of output m of trajectory i becomes R_i + e_{i,m}, with e the sum of

- fidelity: w (F_m - mean F) for a REHEARSE output whose call is recorded, F the leaf F1 of its answer against the
  record (0 where it cannot be read) and the mean taken over all such outputs of the group. The term has this baseline
  of its own so that a call that is not recorded is neither paid nor punished. It pays the role that writes the world
  for truth, where R pays it for the actor's success;
- format: minus a penalty for an output that cannot be read (malformed or cut off), by role;
- contradiction: minus a penalty for a REHEARSE output that a worldbook's rule and the tracked state contradict;
- empty: minus a penalty for an output that says nothing (the published code's 0.1);
- length: minus a penalty that grows from 0 to its whole over the last fifth of an output's token limit (the soft
  overlong punishment of DAPO).

A record says what was true when it was made: where an episode has changed the state before it asks, the record may be
wrong for it. A call that was made more often than it is recorded counts as not recorded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from envace_jax.evaluation.fidelity import Pair, compare
from envace_jax.rehearsal.grounding import exact_record
from envace_jax.rehearsal.observers import NO_RECORDED_RESPONSE
from envace_jax.rehearsal.state import REHEARSE_PROMPT_TOO_LONG
from envace_jax.rehearsal.trajectory import Trajectory
from envace_jax.text.transcript import Observation, Role, Step, ToolCall

Marks = tuple[bool | None, ...]
"""By answered call of an episode, whether its answer contradicts a worldbook; None where no rule could tell."""

SOFT_SHARE = 0.2
"""Share of the token limit over which the length penalty grows."""

NOT_REHEARSED = frozenset(
    ("TOOL_NOT_AVAILABLE", "INVALID_PARAMETERS", "SCHEMA_VALIDATION_FAILED", REHEARSE_PROMPT_TOO_LONG)
    + (NO_RECORDED_RESPONSE,)
)
"""Codes of error observations that an output with calls gets without REHEARSE having been asked."""


@dataclasses.dataclass(frozen=True)
class Shaping:
    """What is paid beside the checklist; names are those of the configuration's `rewards` section."""

    fidelity_weight: float = 0.0
    act_format_penalty: float = 0.0
    rehearse_format_penalty: float = 0.0
    empty_penalty: float = 0.0
    length_penalty: float = 0.0
    contradiction_penalty: float = 0.0
    max_act_tokens: int = 8000
    max_rehearse_tokens: int = 8000

    @staticmethod
    def from_config(cfg: Any) -> Shaping:
        names = [field.name for field in dataclasses.fields(Shaping)]
        return Shaping(**{name: cfg.rewards[name] if name in cfg.rewards else cfg.rollout[name] for name in names})

    @property
    def active(self) -> bool:
        """Whether anything is paid at all."""
        return any(
            (
                self.fidelity_weight,
                self.act_format_penalty,
                self.rehearse_format_penalty,
                self.empty_penalty,
                self.length_penalty,
                self.contradiction_penalty,
            )
        )


@dataclasses.dataclass(frozen=True)
class Output:
    """What the shaping needs to know of one output.

    `readable`: it was parsed and not cut off. `fidelity`: leaf F1 against the record; None for ACT and for calls that
    are not recorded. `contradicts`: a rule says otherwise.
    """

    role: Role
    length: int
    empty: bool
    readable: bool
    fidelity: float | None = None
    contradicts: bool = False


def outputs(trajectory: Trajectory, marks: Marks = ()) -> list[Output]:
    """The outputs of a trajectory, in the order of its segments; a masked trajectory may lack its last ones.

    `marks`: what a worldbook says of the answers.
    """
    found: list[Output] = []
    answered: list[ToolCall] = []
    segments = trajectory.segments
    for step in (step for turn in trajectory.transcript for step in turn.steps):
        segment = segments[len(found)]
        if segment.role is not Role.ACT:
            raise ValueError(f"task {trajectory.task_id}: output {len(found)} is not the ACT output of its step")
        readable = step.output.error_code is None and not step.output.truncated
        found.append(Output(Role.ACT, len(segment.ids), not segment.text.strip(), readable))
        for k, observation in enumerate(step.observations):
            call = step.output.calls[k] if k < len(step.output.calls) else None
            following = segments[len(found)] if len(found) < len(segments) else None
            if following is not None and following.role is Role.REHEARSE and _rehearsed(step, observation):
                truth = _record(trajectory, call, answered)
                text = observation.text if observation.source == "rehearsed" else None
                fidelity = None
                if call is not None and truth is not None:
                    fidelity = compare(Pair(call.name, text, truth)).leaf_f1
                empty = not following.text.strip()
                against = call is not None and text is not None and marks[len(answered) : len(answered) + 1] == (True,)
                found.append(Output(Role.REHEARSE, len(following.ids), empty, text is not None, fidelity, against))
            if call is not None:
                answered.append(call)
    return found


def _rehearsed(step: Step, observation: Observation) -> bool:
    """Whether an observation that a REHEARSE output may have written was: host errors have codes of their own."""
    if observation.source == "rehearsed" or not step.output.calls:
        return True  # an output without calls has one observation, and the next output tells who wrote it
    return observation.source == "error" and observation.error_code not in NOT_REHEARSED


def _record(trajectory: Trajectory, call: ToolCall | None, answered: Sequence[ToolCall]) -> str | None:
    if call is None or trajectory.task is None:
        return None
    seen = sum(c.name == call.name and c.arguments == call.arguments for c in answered)
    record = exact_record(trajectory.task, call, seen)
    if record is None or (seen and record is exact_record(trajectory.task, call, seen - 1)):
        return None
    return record.result


def additions(
    trajectories: Sequence[Trajectory], shaping: Shaping, marks: Sequence[Marks] = ()
) -> tuple[list[list[float]], dict[str, float]]:
    """e_{i,m} by trajectory and output, and figures for the metrics.

    A masked trajectory enters no mean and gets zeros. `marks`: see `outputs`, one entry a trajectory, or none at all.
    """
    against = marks or [()] * len(trajectories)
    known = [outputs(t, m) if t.reward is not None else [] for t, m in zip(trajectories, against, strict=True)]
    truths: dict[int, list[float]] = {}
    for t, of_one in zip(trajectories, known):
        truths.setdefault(t.group, []).extend(o.fidelity for o in of_one if o.fidelity is not None)
    means = {group: math.fsum(values) / len(values) for group, values in truths.items() if values}
    result = [
        [_addition(o, shaping, means.get(t.group, 0.0)) for o in of_one] if of_one else [0.0] * len(t.segments)
        for t, of_one in zip(trajectories, known)
    ]
    everything = [o for of_one in known for o in of_one]
    rehearsed = [o for o in everything if o.role is Role.REHEARSE]
    recorded = [o.fidelity for o in rehearsed if o.fidelity is not None]
    figures = {
        "shaping/fidelity": math.fsum(recorded) / len(recorded) if recorded else 0.0,
        "shaping/recorded": len(recorded) / max(len(rehearsed), 1),
    }
    for role in Role:
        added = [e for of_one, row in zip(known, result) for o, e in zip(of_one, row, strict=False) if o.role is role]
        figures[f"shaping/added/{role}"] = math.fsum(added) / max(len(added), 1)
    return result, figures


def _addition(output: Output, shaping: Shaping, mean_fidelity: float) -> float:
    act = output.role is Role.ACT
    total = 0.0
    if output.fidelity is not None:
        total += shaping.fidelity_weight * (output.fidelity - mean_fidelity)
    if not output.readable:
        total -= shaping.act_format_penalty if act else shaping.rehearse_format_penalty
    if output.empty:
        total -= shaping.empty_penalty
    if output.contradicts:
        total -= shaping.contradiction_penalty
    limit = shaping.max_act_tokens if act else shaping.max_rehearse_tokens
    over = (output.length - (1 - SOFT_SHARE) * limit) / (SOFT_SHARE * limit)
    return total - shaping.length_penalty * min(max(over, 0.0), 1.0)
