"""Demonstrations as ledgers: the episode played with its answers given, so that a warm start sees what a rollout sees.

ACT's targets are the assistant messages, REHEARSE's the recorded results under the very prompt that a rollout would
write, whatever the grounding and context. What the host would refuse in a rollout it refuses here as well, so error
observations and what the demonstration did about them are part of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from envace_jax.datasets.cm2 import Task
from envace_jax.rehearsal import episode
from envace_jax.rehearsal.episode import Need, Setting
from envace_jax.rehearsal.grounding import Grounding
from envace_jax.rehearsal.ledger import Row
from envace_jax.rehearsal.settings import EpisodeConfig
from envace_jax.rehearsal.trajectory import Trajectory
from envace_jax.text.transcript import Message, Role, Transcript

Demonstration = Sequence[Message] | Transcript
"""A dialogue as messages (user, assistant, tool), or as a transcript whose outputs are taken as they were sampled."""


@dataclass(frozen=True)
class _Shown:
    """One assistant output: its ids, and the results of its calls as text."""

    ids: tuple[int, ...]
    results: tuple[str, ...]


def teacher_rows(
    task: Task,
    chat: Any,
    cfg: EpisodeConfig,
    demonstration: Demonstration | None = None,
    *,
    grounding: Grounding | None = None,
) -> tuple[Row, ...]:
    """The ledger rows of a demonstration that hold something to learn: `sampled` marks the targets of the row's role.

    Args:
        task: the task; its own messages are the demonstration unless another one is given.
        chat: the chat format.
        cfg: context, prompt form and checks as in the rollouts that follow.
        grounding: oracle unless given.
    """
    played = demonstrate(task, chat, cfg, demonstration, grounding=grounding)
    return tuple(row for row in played.rows if any(row.sampled))


def demonstrate(
    task: Task,
    chat: Any,
    cfg: EpisodeConfig,
    demonstration: Demonstration | None = None,
    *,
    grounding: Grounding | None = None,
) -> Trajectory:
    """The whole record of a demonstration; log-probabilities are 0 and there is no reward.

    A demonstration that is shorter than the task ends the episode where it ends.
    """
    setting = Setting.make(chat, replace(cfg, judged=False), grounding)
    shown = _shown(task.messages if demonstration is None else demonstration, chat)
    state = episode.start(setting, task)
    results: tuple[str, ...] = ()
    while isinstance(need := episode.next_request(state), Need):
        if need.role is Role.ACT:
            if not shown[state.turn : state.turn + 1] or len(state.steps) >= len(shown[state.turn]):
                state = episode.mask(state, "demonstration_over")
                break
            output = shown[state.turn][len(state.steps)]
            ids, results = output.ids, output.results
        else:
            answered = len(state.observations)
            if answered >= len(results):
                state = episode.mask(state, "demonstration_over")
                break
            ids = setting.writer.answer_ids(results[answered])
        state = episode.receive(state, ids, (0.0,) * len(ids), "stop")
    return episode.trajectory(state)


def _shown(demonstration: Demonstration, chat: Any) -> list[list[_Shown]]:
    """The outputs of a demonstration by turn."""
    turns: list[list[_Shown]] = []
    for entry in demonstration:
        if not isinstance(entry, Message):
            turns.append(
                [
                    _Shown(
                        tuple(chat.said_ids(step.output.raw)),
                        tuple(observation.text for observation in step.observations),
                    )
                    for step in entry.steps
                ]
            )
        elif entry.role == "user":
            turns.append([])
        elif entry.role == "assistant":
            turns[-1].append(_Shown(tuple(chat.output_ids(entry)), ()))
        elif entry.role == "tool":
            last = turns[-1][-1]
            turns[-1][-1] = replace(last, results=(*last.results, entry.content))
    return turns
