"""The record of an episode that is over: scores, verdicts and counters."""

from __future__ import annotations

from collections import Counter

from envace_jax.rehearsal.state import EpisodeState, Phase
from envace_jax.rehearsal.trajectory import Trajectory, Verdicts
from envace_jax.rewards.checklist import Score, score_checklist


def trajectory(state: EpisodeState) -> Trajectory:
    """The record of an episode that is over."""
    assert state.phase is Phase.DONE, f"the episode waits in phase {state.phase}"
    judged = state.setting.cfg.judged and state.end_reason != "empty_checklist"
    scored = score(state) if judged else None
    return Trajectory(
        task_id=state.task.uuid,
        group=state.group,
        member=state.member,
        rows=state.rows,
        segments=state.segments,
        transcript=state.transcript,
        verdicts=_full_verdicts(state) if judged else (),
        turn_scores=scored.turn_scores if scored else (),
        reward=scored.reward if scored and state.masked_cause is None else None,
        masked_cause=state.masked_cause,
        end_reason=state.end_reason,
        error_codes=state.error_codes,
        counters=_counters(state),
        task=state.task,
    )


def _full_verdicts(state: EpisodeState) -> Verdicts:
    """The verdicts of all turns that began, empty rows for those that were not judged."""
    tables = state.verdicts or ((),) * len(state.checklists)
    return tuple(
        (*table, *(((),) * len(items) for items in turns[len(table) : len(state.transcript)]))
        for table, turns in zip(tables, state.checklists)
    )


def score(state: EpisodeState) -> Score:
    """The score of the verdicts so far."""
    return score_checklist(
        state.checklists,
        _full_verdicts(state),
        len(state.task.user_turns),
        honour_dependence=state.setting.cfg.dependence,
    )


def _counters(state: EpisodeState) -> dict[str, float]:
    counters: Counter[str] = Counter(state.judged)
    for segment in state.segments:
        counters[f"{segment.role}_outputs"] += 1
        counters[f"{segment.role}_tokens"] += len(segment.ids)
        counters[f"{segment.role}_{segment.finish}"] += 1
    for turn in state.transcript:
        for step in turn.steps:
            counters["calls"] += len(step.output.calls)
            for observation in step.observations:
                counters[f"observations_{observation.source}"] += 1
    counters["turns"] = len(state.transcript)
    counters["rows"] = len(state.rows)
    counters["longest_row"] = max((len(row) for row in state.rows), default=0)
    return {name: float(number) for name, number in counters.items()}
