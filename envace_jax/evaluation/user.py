"""A user simulated by an endpoint: what the tau2 harness does with a user model, in our own words.

The simulator gets the task's note and the conversation as it was heard, never the policy's thinking, its calls or
their results. It ends the conversation by a mark of its own; without an answer (an outage) the episode has no
result rather than a zero.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from envace_jax.datasets.records import Task
from envace_jax.rehearsal.episode import EpisodeState
from envace_jax.text.tool_calls import after_thinking
from envace_jax.text.transcript import Transcript

END = "[[END]]"
GREETING = "Hello. How can I help you today?"
MAX_TURNS = 40

RULES = """\
You are the customer in a conversation with a service agent. A note tells you who you are, what you want and how you \
behave. Speak as that person, one message at a time, in natural, short sentences.
- Say only what the note says or what follows from it; when asked for something it does not tell you, say that you do \
not know.
- Give away information when it is asked for, not all at once.
- Do not do the agent's work, and do not mention the note.
- When your request is settled, or the agent hands you over to a human, or the agent cannot help, say goodbye and \
write [[END]] at the end of your message.

# Note
"""


class SimulatorFailed(RuntimeError):
    """The user model gave no answer."""


class EndpointUser:
    """Simulated users over one endpoint; `user(task)` is one of them."""

    def __init__(self, endpoint: Any) -> None:
        self.endpoint = endpoint

    def __call__(self, task: Task) -> Any:
        """The user of one task: asked with None it opens, else it answers the turns so far; None is the end."""
        note = task.meta.get("note") or task.user_turns[0]
        over = False

        def user(state: EpisodeState | None) -> Generator[Any, Any, str | None]:
            nonlocal over
            turns = () if state is None else state.transcript
            if over or len(turns) >= MAX_TURNS:
                return None
            done = yield self.endpoint.submit(messages(note, turns))
            if done.text is None:
                raise SimulatorFailed(f"{done.cause}: {done.detail}")
            said = after_thinking(done.text)
            if done.text.strip() and not said.strip():
                raise SimulatorFailed("the user model only thought; let it think less, or not at all")
            text, mark, _ = said.partition(END)
            over = bool(mark)
            # A goodbye that ends the conversation gets no answer; an empty one would be no turn at all.
            return None if over and state is not None else text.strip() or "Hello."

        return user


def messages(note: str, turns: Transcript) -> list[dict[str, str]]:
    """The simulator's side of a conversation: the agent speaks as `user`, the customer as `assistant`."""
    out = [{"role": "system", "content": RULES + note}, {"role": "user", "content": GREETING}]
    for turn in turns:
        out.append({"role": "assistant", "content": turn.user})
        said = "\n".join(step.output.reply for step in turn.steps if step.output.reply)
        out.append({"role": "user", "content": said or "(no answer)"})
    return out
