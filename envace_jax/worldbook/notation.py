"""How paths, terms and conditions read as text, and the two text forms that stand for terms."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from envace_jax.worldbook.state import Path, Segment


class TermError(ValueError):
    """A path, term or condition that is not well formed."""


_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_\-]*\Z")


def format_path(path: Sequence[Segment]) -> str:
    """A path as text: ``world.orders["O.1"][0].status``; `parse_path` is its inverse."""
    out = ""
    for segment in path:
        if isinstance(segment, str) and _PLAIN.match(segment):
            out += ("." if out else "") + segment
        else:
            out += f"[{json.dumps(segment, ensure_ascii=False)}]"
    return out


def parse_path(text: str) -> Path:
    """The segments of a path text. File paths and addresses stay one segment: from a segment that begins with ``/``
    or ``~/`` or contains ``://`` on, further dots belong to it.

    Raises:
        TermError: unbalanced brackets or an empty segment.
    """
    out: list[Segment] = []
    i = 0
    decoder = json.JSONDecoder()
    while i < len(text):
        if text[i] == "[":
            try:
                segment, end = decoder.raw_decode(text, i + 1)
            except ValueError:
                raise TermError(f"path {text!r}: expected a JSON string or number in brackets") from None
            if isinstance(segment, bool) or not isinstance(segment, (str, int)) or text[end : end + 1] != "]":
                raise TermError(f"path {text!r}: expected a JSON string or number in brackets")
            out.append(segment)
            i = end + 1
            continue
        if text[i] == "." and out:
            i += 1
        end = i
        while end < len(text) and text[end] not in ".[":
            end += 1
        if text.startswith(("/", "~/"), i) or "://" in text[i:].split(".")[0]:
            end = len(text)
        if end == i:
            raise TermError(f"path {text!r}: empty segment")
        out.append(text[i:end])
        i = end
    return tuple(out)


def operand(value: Any) -> Any:
    """The left side of a condition: a string names an argument (``action.arguments.x``) or a state path."""
    if not isinstance(value, str):
        return value
    path = parse_path(value)
    if path[:2] == ("action", "arguments"):
        return {"$arg": list(path[2:])}
    return {"$state": list(path)}


_TOKEN = re.compile(r"\{(action\.arguments\.[^{}]{1,200}|state\.[^{}]{1,200})\}")


def template_term(text: str) -> Any:
    """A text with ``{action.arguments.x}`` and ``{state.path}`` tokens as a term; other braces are plain text.

    What a token yields is inserted once and never looked into again, so text in a value cannot become a token.
    """
    parts: list[Any] = []
    end = 0
    for match in _TOKEN.finditer(text):
        if match.start() > end:
            parts.append(text[end : match.start()])
        path = parse_path(match.group(1))
        parts.append({"$arg": list(path[2:])} if path[0] == "action" else {"$state": list(path[1:])})
        end = match.end()
    if end < len(text):
        parts.append(text[end:])
    return {"$concat": parts}


def describe(term: Any) -> str:
    """A term as a short readable text, for prompts, diffs and pages."""
    if isinstance(term, dict) and len(term) == 1:
        (name, value) = next(iter(term.items()))
        if name == "$arg":
            return "arg." + format_path([value] if isinstance(value, (str, int)) else value)
        if name in ("$state", "$entry", "$out"):
            body = "".join(
                f"[{describe(s)}]" if isinstance(s, dict) else ("." if i else "") + format_path([s])
                for i, s in enumerate(value if isinstance(value, (list, tuple)) else [value])
            )
            return body if name == "$state" else name[1:] + "." + body
        if name == "$const":
            return json.dumps(value, ensure_ascii=False)
        if name in ("$sum", "$diff", "$product"):
            sign = {"$sum": " + ", "$diff": " - ", "$product": " * "}[name]
            return "(" + sign.join(describe(v) for v in value) + ")"
        if name == "$agree":
            return describe(value[0])
        if name == "$concat":
            return "text(" + ", ".join(describe(v) for v in value) + ")"
        if name in ("$text", "$int", "$round", "$pad"):
            return describe(value[0] if isinstance(value, (list, tuple)) else value)
        if name == "$key":
            return "key"
        if name == "$count":
            return f"count({describe(value)})"
        if name == "$select":
            where = " and ".join(describe_condition(c) for c in value.get("where", ()))
            return f"{describe(value['take'])} of {describe(value['from'])}" + (f" where {where}" if where else "")
    if isinstance(term, dict):
        return "{" + ", ".join(f"{k}: {describe(v)}" for k, v in term.items()) + "}"
    if isinstance(term, (list, tuple)):
        return "[" + ", ".join(describe(v) for v in term) + "]"
    return json.dumps(term, ensure_ascii=False)


_SIGNS = {
    "eq": "=",
    "ne": "≠",
    "gt": ">",
    "gte": "≥",
    "lt": "<",
    "lte": "≤",
    "in": "in",
    "contains": "contains",
}


def describe_condition(condition: Any) -> str:
    if "not" in condition:
        return f"not ({describe_condition(condition['not'])})"
    for kind, word in (("all", " and "), ("any", " or ")):
        if kind in condition:
            return "(" + word.join(describe_condition(c) for c in condition[kind]) + ")"
    if "agree" in condition:
        return describe_condition(condition["agree"][0])
    for kind in ("some", "every"):
        if kind in condition:
            where = " and ".join(describe_condition(c) for c in condition[kind]["where"])
            return f"{kind} of {describe(condition[kind]['in'])} with {where}"
    left = describe(operand(condition["left"]))
    if condition["op"] in ("exists", "not_exists"):
        return f"{left} {'exists' if condition['op'] == 'exists' else 'does not exist'}"
    return f"{left} {_SIGNS.get(condition['op'], condition['op'])} {describe(condition.get('right'))}"
