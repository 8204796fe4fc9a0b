"""Fidelity where there is no environment to ask: recorded calls after the recorded history (teacher-forced).

Each recorded call is asked twice: under the run's own grounding, where an oracle shows the very record (*reuse*), and
with the records of that call withheld (*knowledge*). The truth is the recorded result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from envace_jax.datasets.records import Task
from envace_jax.evaluation.fidelity import Keep, Pair, nothing, summarise
from envace_jax.evaluation.quickstart import FidelityCase, ask_rehearse
from envace_jax.evaluation.shown import Watched, Withheld
from envace_jax.rehearsal.grounding import Grounding, OracleGrounding
from envace_jax.rehearsal.prompts import PromptWriter
from envace_jax.rehearsal.settings import RolloutConfig
from envace_jax.rehearsal.teacher import demonstrate
from envace_jax.rewards.verifiers import turn_calls
from envace_jax.text.transcript import Role

METRICS = ("json_equal", "leaf_f1", "reject_f1")


def recorded_cases(
    tasks: Sequence[Task], chat: Any, cfg: RolloutConfig, grounding: Grounding | None
) -> list[FidelityCase]:
    """Every recorded call that fits its prompt, with its recorded result. A task of which a call does not fit is left
    out from that call on."""
    everything = replace(cfg.episode, checks=())  # the host answers nothing
    watched, writer = Watched(grounding or OracleGrounding()), PromptWriter(chat, cfg.episode)
    cases = []
    for task in tasks:
        played = demonstrate(task, chat, everything, grounding=watched)
        answered = [pair for turn in played.transcript for pair in turn_calls(turn)]
        asked = [segment for segment in played.segments if segment.role is Role.REHEARSE]
        for k, (segment, (call, observation)) in enumerate(zip(asked, answered)):
            if observation is None or observation.source != "rehearsed":
                break
            prompt = played.rows[segment.row].ids[: segment.start]
            shown = watched.shows(prompt, call, observation.text, writer)
            pair = Pair(call.name, None, observation.text, copyable=shown, distance=k, group=task.uuid)
            cases.append(FidelityCase(prompt, pair))
    return cases


def recorded_fidelity(
    tasks: Sequence[Task],
    engine: Any,
    chat: Any,
    cfg: RolloutConfig,
    grounding: Grounding | None = None,
    keep: Keep = nothing,
) -> dict[str, float]:
    """`fidelity_*` under the run's grounding and `fidelity_new_*` with the call's own records withheld: how many calls
    (`n`), JSON-equal, leaf F1, F1 of rejecting; what nothing decides is left out. `keep` is given
    the pairs behind both, by name."""
    out: dict[str, float] = {}
    for name, source in (("fidelity", grounding), ("fidelity_new", Withheld(grounding or OracleGrounding()))):
        cases = recorded_cases(tasks, chat, cfg, source)
        limit = cfg.episode.max_rehearse_tokens
        pairs = ask_rehearse(cases, engine, chat, max_tokens=limit, param_set=cfg.rehearse_params)
        keep(name, pairs)
        summary = summarise(pairs)
        out[f"{name}_n"] = float(len(cases))
        out |= {f"{name}_{metric}": summary[metric] for metric in METRICS if summary[metric] == summary[metric]}
    return out
