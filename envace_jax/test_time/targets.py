"""Warm-start rows that teach a policy to judge its rehearsals, to remember them, and to act on a memory.

From a task's own dialogue, which is right, and another one of the same task, which is flawed: a self-evaluation of
each (what is missing, what was made too often), a memory of some of both (the calls that are right, in order), and both
roles' own rows once more with notes under each user message and without anything that grounds REHEARSE: so it is asked
at test time. The notes are that memory, or, since what is remembered in practice is not always right, the flawed
dialogue's calls, or the rehearsals themselves as sequential rehearsal tells them; what ACT then does is right in every
case.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from envace_jax.datasets.records import Task
from envace_jax.rehearsal.grounding import NoGrounding
from envace_jax.rehearsal.ledger import Row
from envace_jax.rehearsal.prompts import call_text
from envace_jax.rehearsal.settings import EpisodeConfig
from envace_jax.rehearsal.teacher import teacher_rows
from envace_jax.rewards.verifiers import turn_calls
from envace_jax.test_time.memory import Evaluation, Rehearsed, Reviewer
from envace_jax.text.transcript import AssistantOutput, Message, Observation, Role, Step, Turn

MAX_REHEARSALS = 3
NOTES = {"memory": 0.6, "flawed": 0.2, "told": 0.2}
"""What stands under a user message that ACT learns to answer, and how often."""


def review_rows(
    task: Task,
    chat: Any,
    cfg: EpisodeConfig,
    rng: random.Random,
    *,
    flawed: Sequence[Message] | None = None,
    memory_tokens: int = 512,
) -> list[Row]:
    """Ledgers of one task: self-evaluations, memories, and the dialogue with notes attached, played by both roles.

    Args:
        task: its messages are the right dialogue.
        flawed: a dialogue of the same user messages that went wrong somewhere.
        memory_tokens: as asked for in a full memory prompt.
    """
    reviewer = Reviewer(chat, compact=cfg.rehearse_prompt == "compact", max_input_tokens=cfg.max_input_tokens)
    rows = []
    memories = []
    wrong = turns_of(flawed) if flawed is not None else ()
    for k, turn in enumerate(turns_of(task.messages)):
        told = [Rehearsed((turn,), Evaluation(1.0, "All that was asked was done."))]
        if k < len(wrong) and (advice := difference(turn, wrong[k])):
            told.append(Rehearsed((wrong[k],), Evaluation(0.0, "Not all that was asked was done rightly.", advice)))
        for one in told:
            assert one.evaluation is not None
            rows.append(_row(chat, reviewer.evaluation_prompt(one.turns), reviewer.evaluation_answer(one.evaluation)))
        several = [rng.choice(told) for _ in range(rng.randint(1, MAX_REHEARSALS))]
        rows.append(_row(chat, reviewer.memory_prompt(several, memory_tokens), remembered(turn)))
        notes = {
            "memory": remembered(turn),
            "flawed": remembered(told[-1].turns[0]),
            "told": reviewer.within("\n\n".join(reviewer.tellings(several)), memory_tokens),
        }
        memories.append(notes[rng.choices(list(NOTES), list(NOTES.values()))[0]])
    messages = []
    users = iter(memories)
    for message in task.messages:
        if message.role == "user":
            message = replace(message, content=reviewer.attach(message.content, next(users)))
        messages.append(message)
    noted = replace(task, messages=tuple(messages))
    return [*rows, *teacher_rows(noted, chat, replace(cfg, judged=False), grounding=NoGrounding())]


def flawed_messages(task: Task, rng: random.Random) -> tuple[Message, ...] | None:
    """The task's dialogue with one output that makes calls left out, made twice, or made with one digit altered.

    None where no output makes a call.
    """
    messages = list(task.messages)
    places = [k for k, message in enumerate(messages) if message.tool_calls]
    if not places:
        return None
    begin = rng.choice(places)
    end = begin + 1
    while end < len(messages) and messages[end].role == "tool":
        end += 1
    kind = rng.choice(("left out", "twice", "altered"))
    if kind == "altered" and (altered := _altered(messages[begin:end], rng)):
        return (*messages[:begin], *altered, *messages[end:])
    again = messages[begin:end] if kind == "twice" else []
    return (*messages[:begin], *again, *again, *messages[end:])


def _altered(messages: Sequence[Message], rng: random.Random) -> list[Message]:
    """Calls and their results with one digit of one argument another one; empty where no argument has a digit."""
    first, *results = messages
    calls = list(first.tool_calls)
    numbers = [
        (k, name, value, found)
        for k, call in enumerate(calls)
        for name, value in call.arguments.items()
        if isinstance(value, str | int) and not isinstance(value, bool)
        for found in re.finditer("[0-9]", str(value))
    ]
    if not numbers:
        return []
    k, name, value, found = rng.choice(numbers)
    text = str(value)
    digit = rng.choice([d for d in "123456789" if d != found[0]])
    other = f"{text[: found.start()]}{digit}{text[found.end() :]}"
    calls[k] = replace(calls[k], arguments={**calls[k].arguments, name: type(value)(other)})
    return [
        replace(first, tool_calls=tuple(calls)),
        *(replace(m, content=m.content.replace(text, other)) for m in results),
    ]


def remembered(turn: Turn) -> str:
    """The memory that a right turn leaves: its calls, one a line."""
    return "\n".join(call_text(call) for call, _ in turn_calls(turn)) or "no call"


def difference(right: Turn, wrong: Turn) -> str:
    """What a flawed turn should have done otherwise; empty where the same calls were made."""
    wanted = Counter(call_text(call) for call, _ in turn_calls(right))
    made = Counter(call_text(call) for call, _ in turn_calls(wrong))
    missing = [f"also {text}" for text in (wanted - made).elements()]
    return "\n".join([*missing, *(f"not {text}" for text in (made - wanted).elements())])


def turns_of(messages: Sequence[Message]) -> tuple[Turn, ...]:
    """A recorded dialogue as turns."""
    turns: list[Turn] = []
    for message in messages:
        if message.role == "user":
            turns.append(Turn(message.content, ()))
        elif message.role == "assistant":
            output = AssistantOutput(message.content, message.thinking, message.content, message.tool_calls)
            turns[-1] = replace(turns[-1], steps=(*turns[-1].steps, Step(output, ())))
        elif message.role == "tool":
            *before, step = turns[-1].steps
            seen = (*step.observations, Observation(message.content, "recorded"))
            turns[-1] = replace(turns[-1], steps=(*before, replace(step, observations=seen)))
    return tuple(turns)


def _row(chat: Any, prompt: Sequence[int], answer: str) -> Row:
    ids = tuple(chat.output_ids(Message("assistant", answer)))
    return Row(Role.ACT).context(prompt).sample(ids, (0.0,) * len(ids))
