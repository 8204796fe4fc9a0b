"""The records every source of tasks is turned into: tasks, their checklists, their recorded calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from envace_jax.text.transcript import Message, ToolCall

Item = TypeVar("Item")


@dataclass(frozen=True)
class ChecklistItem:
    """One yes/no criterion of a user turn.

    ``focus_on`` names the parts of a step that it is judged on, ``dependence`` the ids of items of the same turn
    it builds on, ``weight`` its share of the turn score; ``rule`` is the machine-readable form, if there is one.
    """

    id: str
    question: str
    pass_condition: str
    focus_on: tuple[str, ...]
    evidence: tuple[dict[str, Any], ...] = ()
    failure_examples: tuple[str, ...] = ()
    required_for_next_turn: bool = False
    dependence: tuple[str, ...] = ()
    weight: float = 1.0
    rule: dict[str, Any] | None = None


@dataclass(frozen=True)
class RecordedCall:
    """A call of the reference dialogue and what it got back (JSON text); positions count from 0."""

    name: str
    arguments: dict[str, Any]
    result: str
    turn: int
    step: int
    index: int


@dataclass(frozen=True)
class Task:
    """One training or evaluation item: dialogue, tools, ``checklists[variant][turn][item]``, metadata."""

    uuid: str
    source: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    checklists: tuple[tuple[tuple[ChecklistItem, ...], ...], ...]
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def system(self) -> str | None:
        """The system text, or None."""
        first = self.messages[0] if self.messages else None
        return first.content if first is not None and first.role == "system" else None

    @property
    def user_turns(self) -> tuple[str, ...]:
        """The user messages in order: one a turn."""
        return tuple(m.content for m in self.messages if m.role == "user")

    @cached_property
    def late_tools(self) -> dict[int, tuple[dict[str, Any], ...]]:
        """Tools that only a later turn offers (``meta["late_tools"]``), by turn."""
        offers = self.meta.get("late_tools") or {}
        return {int(turn): tuple(tools) for turn, tools in offers.items()}

    def tools_at(self, turn: int) -> tuple[dict[str, Any], ...]:
        """The tools on offer in a turn: `tools`, and late ones offered up to then."""
        late = (tool for offer, tools in sorted(self.late_tools.items()) if offer <= turn for tool in tools)
        return (*self.tools, *late)

    @property
    def tool_names(self) -> tuple[str, ...]:
        """Names of all functions that are ever on offer."""
        every = (*self.tools, *(tool for tools in self.late_tools.values() for tool in tools))
        return tuple(tool["function"]["name"] for tool in every)

    @cached_property
    def recorded_calls(self) -> tuple[RecordedCall, ...]:
        """All calls of the reference dialogue, later turns included, each with its recorded response."""
        calls: list[RecordedCall] = []
        turn, step = -1, -1
        pending: list[ToolCall] = []
        for message in self.messages:
            if message.role == "user":
                turn, step = turn + 1, -1
            elif message.role == "assistant":
                step += 1
                pending = list(message.tool_calls)
                count = len(pending)
            elif message.role == "tool":
                call = pending.pop(0)
                index = count - len(pending) - 1
                calls.append(RecordedCall(call.name, call.arguments, message.content, turn, step, index))
        return tuple(calls)


def spread(items: Sequence[Item], limit: int) -> list[Item]:
    """At most ``limit`` items (0: all), evenly over the list: the order of a source runs through its domains."""
    if not limit or limit >= len(items):
        return list(items)
    return [items[k * len(items) // limit] for k in range(limit)]
