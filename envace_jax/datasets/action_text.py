"""Actions written as text: a call, JSON, keystrokes for a terminal, or a command. Parsed as data, never run."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from envace_jax.config import UserError
from envace_jax.text.transcript import canonical_json


class BadTrace(UserError):
    """A trace that cannot be used; the message names it."""


def parse_call_text(text: str, where: str) -> tuple[str, dict[str, Any]]:
    """Name and keyword arguments of a call such as ``cd(folder='x')``; only literals are accepted.

    Raises:
        BadTrace: anything but one call of a plain name with literal keyword arguments.
    """
    try:
        node = ast.parse(text[:100_000].strip(), mode="eval").body
        if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name):
            raise ValueError("expected name(argument=literal, ...)")
        arguments = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords if k.arg}
        return node.func.id, json.loads(canonical_json(arguments))
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise BadTrace(f"{where}: call {text[:60]!r}: {short_error(error)}") from None


def text_action(body: str) -> dict[str, Any]:
    """An action from text: JSON with a name, keystrokes for a terminal (``[{"keystrokes", "duration"}]``), a call such
    as ``click(id=3)``, or a command whose first word is the type."""
    stripped = body.strip()
    if stripped.startswith(("{", "[")):
        try:
            value = json.loads(stripped)
            canonical_json(value)  # NaN and numbers too large for a float are no JSON
        except (ValueError, RecursionError):
            value = None
        typed = value.get("commands", [value]) if isinstance(value, dict) else value
        if isinstance(typed, list) and typed and all(isinstance(t, dict) and "keystrokes" in t for t in typed):
            return {**_terminal_action(typed), "raw": stripped}
        if isinstance(value, dict):
            name = value.get("name", value.get("type"))
            arguments = value.get("arguments", {})
            if isinstance(name, str) and isinstance(arguments, dict):
                return {"type": name, "arguments": arguments, "raw": stripped}
    if _CALL_TEXT.match(stripped):
        try:
            called, arguments = parse_call_text(stripped, "action")
            return {"type": called, "arguments": arguments, "raw": stripped}
        except BadTrace:
            pass  # a line that only looks like a call
    words = stripped.split()
    pairs = [w.partition("=") for w in words[1:]]
    if words and pairs and all(sep and key.isidentifier() for key, sep, _ in pairs):
        return {"type": words[0], "arguments": {k: _scalar(v) for k, _, v in pairs}, "raw": stripped}
    return {"type": words[0] if words else "command", "arguments": {"text": stripped}, "raw": stripped}


_CALL_TEXT = re.compile(r"[A-Za-z_]\w*\(.*\)\Z", re.S)
_SHELL = re.compile(r"[|;&<>`$(){}\\]|\n.")
_PROGRAM = re.compile(r"(?:\S*/)?([\w.+\-]+)(?:\s|\Z)")


def _terminal_action(typed: list[dict[str, Any]]) -> dict[str, Any]:
    """Keystrokes as an action: ``wait`` types nothing; a plain command line goes by its program, one that the shell has
    to read by ``shell``; what is typed without a newline, or is no text, by ``keys``."""
    keys = "".join(str(t["keystrokes"]) for t in typed)
    seconds = [t.get("duration") for t in typed]
    duration = sum(s for s in seconds if isinstance(s, (int, float)) and not isinstance(s, bool))
    line = keys[:-1] if keys.endswith("\n") else None
    found = _PROGRAM.match(line) if line is not None else None
    if not keys:
        name = "wait"
    elif line is None or any(ord(c) < 32 and c not in "\n\t" for c in keys):
        name = "keys"
    elif found is None or _SHELL.search(line):
        name = "shell"
    else:
        name = found.group(1)
    return {"type": name, "arguments": {"keystrokes": keys, "duration": duration}}


def _scalar(text: str) -> Any:
    try:
        value = json.loads(text)
        canonical_json(value)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, (bool, int, float, str)) or value is None else text


def short_error(error: BaseException) -> str:
    """An error as messages show it."""
    return f"{type(error).__name__}: {error}"[:160]
