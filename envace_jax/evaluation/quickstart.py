"""What a policy is worth at the service desk: success in the real environment, in its own rehearsal, and
fidelity.

*Real success* lets ACT talk to the real environment. *Rehearsed success* lets it talk to REHEARSE and is
judged by the checklist alone, as in training; the same calls replayed in the real environment give *replayed
success*, and the gap between the two shows how far the rehearsals flatter; so does the gap between rehearsed and
real success of the same tasks (`evaluation/collusion.py`). *Fidelity* asks REHEARSE for the
answers to a fixed set of calls after a true history and compares them with the environment's own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from envace_jax.datasets.quickstart.demonstrations import probe_messages
from envace_jax.datasets.quickstart.environment import WRITES
from envace_jax.datasets.quickstart.generator import accepted_write
from envace_jax.datasets.records import Task
from envace_jax.evaluation.collusion import both_worlds, real_success
from envace_jax.evaluation.fidelity import Keep, Pair, nothing, parse, summarise
from envace_jax.evaluation.shown import Watched, Withheld
from envace_jax.rehearsal.grounding import Grounding, OracleGrounding
from envace_jax.rehearsal.prompts import PromptWriter
from envace_jax.rehearsal.rollout import Play, rollout, sampling_key
from envace_jax.rehearsal.settings import EpisodeConfig, RolloutConfig
from envace_jax.rehearsal.teacher import demonstrate
from envace_jax.rewards.verifiers import turn_calls
from envace_jax.sampling.engine import Request, SamplingParams
from envace_jax.text.tool_calls import parse_execution_result
from envace_jax.text.transcript import Role

FIDELITY_SEED = 0
"""Decides which calls the fixed set asks beyond the recorded ones."""


@dataclass(frozen=True)
class FidelityCase:
    """One call after a true history: REHEARSE's prompt, and the environment's answer with what is known
    about it."""

    prompt_ids: tuple[int, ...]
    pair: Pair


def fidelity_cases(
    tasks: Sequence[Task], chat: Any, cfg: EpisodeConfig, *, grounding: Grounding | None = None
) -> list[FidelityCase]:
    """The fixed set of calls: each task's recorded ones, then two that need no record, each after the true
    history.

    A call counts as copyable when its prompt shows a recorded call of the same name and arguments with exactly its
    answer; a repeated cancellation, whose record says that it was accepted, is not.
    """
    watched, writer = Watched(grounding or OracleGrounding()), PromptWriter(chat, cfg)
    everything = replace(cfg, checks=())  # the host answers nothing
    cases = []
    for task in tasks:
        rng = random.Random(f"fidelity/{FIDELITY_SEED}/{task.uuid}")
        played = demonstrate(task, chat, everything, probe_messages(task, rng), grounding=watched)
        answered = [pair for turn in played.transcript for pair in turn_calls(turn)]
        asked = [segment for segment in played.segments if segment.role is Role.REHEARSE]
        for k, (segment, (call, observation)) in enumerate(zip(asked, answered, strict=True)):
            assert observation is not None
            prompt = played.rows[segment.row].ids[: segment.start]
            pair = Pair(
                tool=call.name,
                predicted=None,
                actual=observation.text,
                writes=call.name in WRITES,
                copyable=watched.shows(prompt, call, observation.text, writer),
                distance=k,
                group=task.uuid,
                changed=accepted_write(call.name, parse(observation.text)[1]),
            )
            cases.append(FidelityCase(prompt, pair))
    return cases


def ask_rehearse(
    cases: Sequence[FidelityCase], engine: Any, chat: Any, *, max_tokens: int, param_set: str = "policy"
) -> list[Pair]:
    """REHEARSE's greedy answers to a fixed set of calls; an answer that does not parse is None."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_ids=chat.stop_ids)
    waiting = {}
    for k, case in enumerate(cases):
        key = sampling_key(0, 0, k, 0, Role.REHEARSE, 0)
        waiting[engine.submit(Request(case.prompt_ids, params, key, None, param_set))] = k
    answers: dict[int, str | None] = {}
    while waiting:
        for completion in engine.step():
            ids = completion.ids[:-1] if completion.finish == "stop" else completion.ids
            parsed = parse_execution_result(chat.tokenizer.decode(ids))
            unread = parsed.error_code is not None or completion.finish != "stop"
            answers[waiting.pop(completion.request_id)] = None if unread else parsed.value_text
    return [replace(case.pair, predicted=answers[k]) for k, case in enumerate(cases)]


def evaluate(
    tasks: Sequence[Task],
    engine: Any,
    chat: Any,
    cfg: RolloutConfig,
    *,
    seed: int = 0,
    fidelity_tasks: int = 100,
    grounding: Grounding | None = None,
    play: Play = rollout,
    keep: Keep = nothing,
) -> dict[str, float]:
    """The figures of one policy on held-out tasks; `play` is `rollout`, or what shares it out to processes.

    `real_greedy`, `real_sampled` (T = 1): success in the real environment. `rehearsed`, `replayed`: success
    of the same sampled episodes in rehearsal and replayed; `gap`: their difference; `gap_real`: `rehearsed` less
    `real_sampled`, with a 95% interval over tasks. `fidelity_*`:
    json_equal, leaf_f1, reject_f1 on the fixed calls of the first `fidelity_tasks` tasks; `fidelity_new_*`:
    the same calls with their own records withheld. `keep` is given the pairs behind both, by name.
    """
    greedy = real_success(tasks, engine, chat, cfg, temperature=0.0, seed=seed, play=play)
    out = {"real_greedy": _mean(greedy)}
    out |= both_worlds(tasks, engine, chat, cfg, seed=seed, grounding=grounding, play=play).figures()
    limit = cfg.episode.max_rehearse_tokens
    for name, source in (("fidelity", grounding), ("fidelity_new", Withheld(grounding or OracleGrounding()))):
        cases = fidelity_cases(tasks[:fidelity_tasks], chat, cfg.episode, grounding=source)
        pairs = ask_rehearse(cases, engine, chat, max_tokens=limit, param_set=cfg.rehearse_params)
        keep(name, pairs)
        summary = summarise(pairs)
        out |= {f"{name}_{metric}": summary[metric] for metric in ("n", "json_equal", "leaf_f1", "reject_f1")}
    return out


def _mean(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else float("nan")
