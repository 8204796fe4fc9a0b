"""An episode inside a worldbook: its state, its memory, and what happened at each turn.

A `Session` is a value like the state it holds: a step returns a new one, a fork is the session itself, so that the
members of a group share everything up to the point where they part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from envace_jax.worldbook.state import NAMESPACES, State, empty_state, state_from_json


class MemoryItem(NamedTuple):
    """One remembered turn: ``kind`` is ``predicted`` or ``observed``; ``source`` rule, agent or observation."""

    turn: int
    kind: str
    action: str
    arguments: dict[str, Any]
    observation: str
    source: str
    outcome: str = "unknown"
    effects: tuple[Any, ...] = ()
    citations: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Memory:
    """A persistent list of turns, newest first: appending and forking are O(1)."""

    item: MemoryItem | None = None
    before: Memory | None = None
    length: int = 0

    def append(self, item: MemoryItem) -> Memory:
        return Memory(item, self, self.length + 1)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[MemoryItem]:
        """From the newest to the oldest."""
        node: Memory | None = self
        while node is not None and node.item is not None:
            yield node.item
            node = node.before

    def recent(self, limit: int) -> list[MemoryItem]:
        """The last turns, oldest first."""
        return [item for _, item in zip(range(limit), self)][::-1]


@dataclass(frozen=True, slots=True)
class Session:
    """One episode: state, memory, the group that retrieval must leave out, the instruction, and counters."""

    state: State
    memory: Memory = field(default_factory=Memory)
    group: str = ""
    instruction: str = ""
    contradictions: int = 0
    explicit: bool = False
    unexplained: tuple[int, ...] = ()  # observed turns that no rule explained and no tracker has read yet

    def fork(self) -> Session:
        """A session that goes its own way from here. Costs nothing: sessions never change."""
        return self

    @property
    def turn(self) -> int:
        return self.memory.length

    def remember(self, item: MemoryItem, state: State) -> Session:
        return Session(
            state,
            self.memory.append(item),
            self.group,
            self.instruction,
            self.contradictions,
            self.explicit,
            self.unexplained,
        )

    def with_state(self, state: State) -> Session:
        return replace(self, state=state)

    def contradicted(self, n: int = 1) -> Session:
        return replace(self, contradictions=self.contradictions + n)


def open_session(initial_state: Mapping[str, Any] | None = None, *, group: str = "", instruction: str = "") -> Session:
    """A fresh episode.

    Args:
        initial_state: the whole state at the start (``world`` alone, or the four namespaces), or None: then nothing is
            known and nothing is assumed; schema defaults never stand in for it.
        group: the trajectory group that the episode belongs to; retrieval leaves it out.
        instruction: what the user wants, for the brief.
    """
    state = empty_state() if initial_state is None else state_from_json(initial_state)
    return Session(state, Memory(), group, instruction, 0, initial_state is not None)


def summarize_state(state: State, limit: int = 4000) -> str:
    """What is known, one path a line, cut at a number of characters with a count of what is left out."""
    from envace_jax.text.transcript import canonical_json
    from envace_jax.worldbook.notation import format_path
    from envace_jax.worldbook.state import ABSENT, UNKNOWN, PMap, thaw

    lines: list[str] = []

    def walk(path: tuple[Any, ...], node: Any, depth: int) -> None:
        if isinstance(node, PMap) and depth < 3 and len(node):
            for key, value in node.raw_items():
                walk((*path, key), value, depth + 1)
        elif node is ABSENT:
            lines.append(f"{format_path(path)}: known to be absent")
        elif node is UNKNOWN:
            lines.append(f"{format_path(path)}: not known")
        else:
            lines.append(f"{format_path(path)} = {canonical_json(thaw(node))}")

    for name in NAMESPACES:
        space = state.root.get(name)
        if isinstance(space, PMap) and len(space):
            walk((name,), space, 0)
    out, used = [], 0
    for i, line in enumerate(lines):
        if used + len(line) > limit:
            out.append(f"... and {len(lines) - i} more")
            break
        out.append(line)
        used += len(line) + 1
    return "\n".join(out) or "nothing is known yet"
