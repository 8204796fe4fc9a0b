"""Fidelity where there is no environment to ask: recorded calls after the recorded history (teacher-forced).

Each recorded call is asked twice: under the run's own grounding, where an oracle shows the very record (*reuse*), and
with the records of that call withheld (*knowledge*). The truth is the recorded result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from envace_jax.datasets.records import Task
from envace_jax.evaluation.fidelity import Pair, summarise
from envace_jax.evaluation.quickstart import FidelityCase, ask_rehearse
from envace_jax.rehearsal.grounding import Brief, Grounding, OracleGrounding
from envace_jax.rehearsal.settings import RolloutConfig
from envace_jax.rehearsal.teacher import demonstrate
from envace_jax.rewards.verifiers import json_equal, turn_calls
from envace_jax.text.transcript import Role, ToolCall

METRICS = ("json_equal", "leaf_f1", "reject_f1")


@dataclass(frozen=True)
class Withheld:
    """Another grounding without the records of the call that is asked about."""

    inner: Grounding

    def brief(self, task: Task, state: Any, call: ToolCall) -> Brief:
        brief = self.inner.brief(task, state, call)
        same = [c.name == call.name and json_equal(c.arguments, call.arguments) for c in brief.examples]
        return replace(brief, examples=tuple(c for c, is_it in zip(brief.examples, same) if not is_it))


def recorded_cases(
    tasks: Sequence[Task], chat: Any, cfg: RolloutConfig, grounding: Grounding | None
) -> list[FidelityCase]:
    """Every recorded call that fits its prompt, with its recorded result. A task of which a call does not fit is left
    out from that call on."""
    everything = replace(cfg.episode, checks=())  # the host answers nothing
    cases = []
    for task in tasks:
        played = demonstrate(task, chat, everything, grounding=grounding)
        answered = [pair for turn in played.transcript for pair in turn_calls(turn)]
        asked = [segment for segment in played.segments if segment.role is Role.REHEARSE]
        for k, (segment, (call, observation)) in enumerate(zip(asked, answered)):
            if observation is None or observation.source != "rehearsed":
                break
            pair = Pair(tool=call.name, predicted=None, actual=observation.text, distance=k, group=task.uuid)
            cases.append(FidelityCase(played.rows[segment.row].ids[: segment.start], pair))
    return cases


def recorded_fidelity(
    tasks: Sequence[Task], engine: Any, chat: Any, cfg: RolloutConfig, grounding: Grounding | None = None
) -> dict[str, float]:
    """`fidelity_*` under the run's grounding and `fidelity_new_*` with the call's own records withheld: how many calls
    (`n`), JSON-equal, leaf F1, F1 of rejecting; what nothing decides is left out."""
    out: dict[str, float] = {}
    for name, source in (("fidelity", grounding), ("fidelity_new", Withheld(grounding or OracleGrounding()))):
        cases = recorded_cases(tasks, chat, cfg, source)
        limit = cfg.episode.max_rehearse_tokens
        summary = summarise(ask_rehearse(cases, engine, chat, max_tokens=limit, param_set=cfg.rehearse_params))
        out[f"{name}_n"] = float(len(cases))
        out |= {f"{name}_{metric}": summary[metric] for metric in METRICS if summary[metric] == summary[metric]}
    return out
