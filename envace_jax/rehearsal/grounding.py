"""What REHEARSE may look at besides the conversation: nothing, past recorded calls, all of them, or a provider's notes.

`oracle` shows every recorded call of the task's reference dialogue, those of later turns included; `past` only those of
turns that are over. Any other source (a worldbook) implements `Grounding`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from envace_jax.config import UserError
from envace_jax.datasets.cm2 import RecordedCall, Task
from envace_jax.text.transcript import ToolCall, canonical_json


@dataclass(frozen=True)
class Brief:
    """Grounding for one call.

    Attributes:
        examples: recorded calls with their results, in recording order.
        notes: free text (rules, contracts), the most important first.
    """

    examples: tuple[RecordedCall, ...] = ()
    notes: tuple[str, ...] = ()


class Grounding(Protocol):
    """A source of briefs. `state` is the `EpisodeState`; `turn` and `transcript` are what a source usually needs."""

    def brief(self, task: Task, state: Any, call: ToolCall) -> Brief: ...


class NoGrounding:
    """Nothing but the tools and the conversation."""

    def brief(self, task: Task, state: Any, call: ToolCall) -> Brief:
        return Brief()


class PastGrounding:
    """The recorded calls of the turns before the current one: nothing that was still to come."""

    def brief(self, task: Task, state: Any, call: ToolCall) -> Brief:
        return Brief(tuple(c for c in task.recorded_calls if c.turn < state.turn))


class OracleGrounding:
    """All recorded calls of the task, the future included, as in the paper. Runs that use it must say so."""

    def brief(self, task: Task, state: Any, call: ToolCall) -> Brief:
        return Brief(task.recorded_calls)


def make_grounding(name: str, worldbook: str = "") -> Grounding:
    """The grounding of a configuration's `rollout.grounding`; `worldbook` is the folder that `rollout.worldbook` names.

    Raises:
        UserError: no such grounding, or `worldbook` without a folder that holds one.
    """
    if name == "worldbook":
        from envace_jax.worldbook.grounding import load_grounding

        if not worldbook:
            raise UserError("rollout.worldbook='': rollout.grounding=worldbook needs a worldbook folder")
        return load_grounding(worldbook)
    kinds: dict[str, type[Grounding]] = {"none": NoGrounding, "past": PastGrounding, "oracle": OracleGrounding}
    if name not in kinds:
        raise UserError(f"rollout.grounding={name!r} is not one of {', '.join(kinds)}; other sources are passed in")
    return kinds[name]()


def closest(examples: tuple[RecordedCall, ...], call: ToolCall, n: int) -> tuple[RecordedCall, ...]:
    """The `n` examples closest to a call, in their order: same tool first, then most equal arguments, then latest."""
    if n <= 0 or len(examples) <= n:
        return examples

    def score(k: int) -> tuple[bool, int, int]:
        same = sum(1 for key, value in examples[k].arguments.items() if _equal(call.arguments, key, value))
        return examples[k].name == call.name, same, k

    chosen = sorted(sorted(range(len(examples)), key=score)[-n:])
    return tuple(examples[k] for k in chosen)


def exact_record(task: Task, call: ToolCall, seen: int = 0) -> RecordedCall | None:
    """The recorded call with this name and these arguments (key order aside), or None.

    `seen` earlier calls like it may have been answered already: the next record is taken, the last one again and again.
    """
    key = _key(call)
    matches = [c for c in task.recorded_calls if c.name == call.name and _key(c) == key]
    return matches[min(seen, len(matches) - 1)] if matches else None


def _key(call: ToolCall | RecordedCall) -> str:
    return canonical_json(_ordered(call.arguments))


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _ordered(value[key]) for key in sorted(value)}
    return [_ordered(entry) for entry in value] if isinstance(value, list) else value


def _equal(arguments: dict[str, Any], key: str, value: Any) -> bool:
    if key not in arguments:
        return False
    return canonical_json(_ordered(arguments[key])) == canonical_json(_ordered(value))
