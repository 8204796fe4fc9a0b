"""A task's reference dialogue as the transcript that an episode would leave."""

from __future__ import annotations

from envace_jax.datasets.records import Task
from envace_jax.text.transcript import AssistantOutput, Observation, Step, Transcript, Turn


def reference_transcript(task: Task) -> Transcript:
    results = iter(task.recorded_calls)
    turns: list[Turn] = []
    for message in task.messages:
        if message.role == "user":
            turns.append(Turn(message.content, ()))
        elif message.role == "assistant":
            output = AssistantOutput("", message.thinking, message.content, message.tool_calls)
            seen = tuple(Observation(next(results).result, "recorded") for _ in message.tool_calls)
            turns[-1] = Turn(turns[-1].user, (*turns[-1].steps, Step(output, seen)))
    return tuple(turns)


def silent_transcript(task: Task) -> Transcript:
    """Nothing called, nothing said."""
    return tuple(Turn(user, (Step(AssistantOutput("", None, "", ()), ()),)) for user in task.user_turns)
