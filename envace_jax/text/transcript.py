"""Records of a conversation, and the one place where a value becomes JSON text.

Everything here is pure data: no tokenizer, no template, no device.
"""

from __future__ import annotations

import enum
import json
import re
from dataclasses import dataclass
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


class Role(enum.StrEnum):
    """Who wrote a segment: the policy acting, or the same policy rehearsing the environment."""

    ACT = "act"
    REHEARSE = "rehearse"


ROLE_CODES = {Role.ACT: 0, Role.REHEARSE: 1}
"""Roles as numbers: in sampling keys and in training rows."""


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool. `arguments` is a JSON object (already decoded)."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(frozen=True)
class Message:
    """One chat message; `role` is system, user, assistant or tool.

    `thinking` is None when the message has no thinking of its own; `tool_calls` only stand in assistant messages.
    """

    role: str
    content: str
    thinking: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Observation:
    """What a tool call got back, as it stands in the history.

    `text` is canonical JSON text, or rehearsed text verbatim; `source` is rehearsed, recorded, real, endpoint or
    error (then `error_code` says which).
    """

    text: str
    source: str
    error_code: str | None = None


@dataclass(frozen=True)
class AssistantOutput:
    """One parsed ACT output. When `error_code` is set, `calls` is empty and `error_message` can be shown to the model.

    `raw` is the output as sampled; `reply` is what a user would see; `dropped` holds the codes of bad parts that the
    lenient mode left out beside good calls.
    """

    raw: str
    thinking: str | None
    reply: str
    calls: tuple[ToolCall, ...]
    error_code: str | None = None
    error_message: str | None = None
    truncated: bool = False
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """One ACT output and the observations it caused (one per call, in call order)."""

    output: AssistantOutput
    observations: tuple[Observation, ...]


@dataclass(frozen=True)
class Turn:
    """What happens between two user messages."""

    user: str
    steps: tuple[Step, ...]


Transcript = tuple[Turn, ...]


def clean_text(text: str) -> str:
    """Text that UTF-8 can hold: surrogate pairs are joined, every lone surrogate becomes U+FFFD."""
    if not _SURROGATE.search(text):
        return text
    text = _PAIR.sub(lambda pair: pair[0].encode("utf-16-le", "surrogatepass").decode("utf-16-le"), text)
    return _SURROGATE.sub("\ufffd", text)


def canonical_json(value: Any) -> str:
    """JSON text of a value, as chat templates write it: one line, ", " and ": ", key order and non-ASCII kept.

    Raises ValueError for what JSON cannot hold (NaN, infinities, bytes, sets, cycles, nesting past the stack).
    Lone surrogates inside strings become U+FFFD.
    """
    try:
        return clean_text(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as err:
        raise ValueError(f"not a JSON value: {err}") from None


def result_text(value: Any) -> str:
    """Text of a tool result: a string stands as it is, everything else becomes canonical JSON exactly once."""
    return clean_text(value) if isinstance(value, str) else canonical_json(value)
