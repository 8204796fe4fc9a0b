"""Checking a call against the tools on offer: known name, object arguments, JSON schema.

`jsonschema-rs` with its linear-time regex engine does the validating: a tool's schema is data from outside, and a
hostile pattern must not stall a rollout. References to other documents are never fetched.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema_rs

from envace_jax.config import UserError
from envace_jax.text.tool_calls import INVALID_PARAMETERS, MAX_DEPTH
from envace_jax.text.transcript import ToolCall, canonical_json

TOOL_NOT_AVAILABLE = "TOOL_NOT_AVAILABLE"
SCHEMA_VALIDATION_FAILED = "SCHEMA_VALIDATION_FAILED"
CHECKS = ("whitelist", "arguments", "schema")

MAX_SCHEMA_CHARS = 200_000
_MAX_SHOWN = 5  # errors listed in one message
_MAX_ERROR_CHARS = 200
_TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
_TYPE_ALIASES = {"dict": "object", "float": "number", "tuple": "array"}  # as tool docs made from Python write them
_SCHEMA = frozenset(
    "items additionalProperties additionalItems contains propertyNames not if then else unevaluatedProperties "
    "unevaluatedItems".split()
)
_SCHEMA_LIST = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMA_MAP = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SAYS_WHAT_ELSE = frozenset(
    "additionalProperties patternProperties unevaluatedProperties allOf anyOf oneOf $ref".split()
)


@dataclass(frozen=True)
class CallError:
    """Why a call is refused; `path` is a JSON pointer into the arguments ("" for the call as a whole)."""

    code: str
    message: str
    path: str = ""


def tool_function(tool: dict) -> dict:
    """The {name, description, parameters} part of a tool, wrapped in {"type": "function", …} or bare."""
    inner = tool.get("function")
    return inner if isinstance(inner, dict) else tool


def check_call(call: ToolCall, tools: Sequence[dict], *, checks: Sequence[str] = CHECKS) -> CallError | None:
    """The first failing check, or None.

    whitelist: the name is one of the tools' (`TOOL_NOT_AVAILABLE`); arguments: they are a JSON object
    (`INVALID_PARAMETERS`); schema: they fit the tool's parameters (`SCHEMA_VALIDATION_FAILED`). A key that the schema
    does not name is an error too, unless the tool says `strict: false` or the schema says what else it allows.

    Raises UserError when the tool's own schema cannot be used (see `check_tools`).
    """
    unknown = set(checks) - set(CHECKS)
    if unknown:
        raise ValueError(f"checks={tuple(checks)!r}: expected some of {CHECKS}")
    tool = next((t for t in tools if tool_function(t).get("name") == call.name), None)
    if tool is None:
        if "whitelist" not in checks:
            return None
        names = ", ".join(str(tool_function(t).get("name")) for t in tools) or "none"
        return CallError(TOOL_NOT_AVAILABLE, f"There is no tool {_short(call.name)}. Available tools: {names}.")
    arguments: Any = call.arguments
    if not isinstance(arguments, dict):
        if not {"arguments", "schema"} & set(checks):
            return None
        return CallError(INVALID_PARAMETERS, f"The arguments of {call.name} must be a JSON object.")
    if "schema" not in checks:
        return None
    try:
        errors = sorted(
            (_pointer(e.instance_path), _short(e.message))
            for e in _validator(canonical_json(tool)).iter_errors(arguments)
        )
    except UserError:
        raise
    except ValueError as err:  # nested past the validator's own limit, or not JSON
        return CallError(INVALID_PARAMETERS, f"The arguments of {call.name} cannot be checked: {_short(str(err))}")
    if not errors:
        return None
    shown = "; ".join(f"{path or 'arguments'}: {message}" for path, message in errors[:_MAX_SHOWN])
    more = f"; and {len(errors) - _MAX_SHOWN} more" if len(errors) > _MAX_SHOWN else ""
    return CallError(
        SCHEMA_VALIDATION_FAILED, f"The arguments of {call.name} do not fit its schema: {shown}{more}.", errors[0][0]
    )


def check_tools(tools: Sequence[Any]) -> None:
    """Raise UserError listing every tool that cannot be offered: no name, a name twice, a schema that is broken."""
    problems, seen = [], set()
    for index, tool in enumerate(tools):
        function = tool_function(tool) if isinstance(tool, dict) else {}
        name = function.get("name")
        if not isinstance(name, str) or not name.strip():
            problems.append(f"tools[{index}]: no name")
            continue
        if name in seen:
            problems.append(f"tools[{index}]: a second tool named {name}")
        seen.add(name)
        try:
            _validator(canonical_json(tool))
        except ValueError as err:
            problems.append(str(err))
    if problems:
        raise UserError("; ".join(problems))


@functools.lru_cache(maxsize=2048)
def _validator(tool_text: str) -> Any:
    function = tool_function(json.loads(tool_text))
    where = f"tool {function.get('name')}: parameters"
    if len(tool_text) > MAX_SCHEMA_CHARS:
        raise UserError(f"{where}: the tool has {len(tool_text)} characters, at most {MAX_SCHEMA_CHARS} are taken")
    schema = arguments_schema(function)
    try:
        return jsonschema_rs.validator_for(schema, offline=True, pattern_options=jsonschema_rs.RegexOptions())
    except ValueError as err:
        raise UserError(f"{where}: not a usable JSON schema: {_short(str(err).splitlines()[0])}") from None


def arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema that a function's arguments are checked against; raises `UserError` where there is none."""
    where = f"tool {function.get('name')}: parameters"
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise UserError(f"{where}: expected a JSON schema (an object)")
    schema = _usable(parameters, where, 0)
    if "properties" in schema and function.get("strict") is not False and not any(k in schema for k in _SAYS_WHAT_ELSE):
        schema["additionalProperties"] = False
    return schema


def _usable(schema: Any, where: str, depth: int) -> Any:
    """A copy with Python's type names put right; type names that JSON schema does not know constrain nothing."""
    if depth > MAX_DEPTH:
        raise UserError(f"{where}: nested deeper than {MAX_DEPTH} levels")
    if not isinstance(schema, dict):
        return schema
    out = dict(schema)
    if "type" in out:
        names = out["type"] if isinstance(out["type"], list) else [out["type"]]
        known = [_TYPE_ALIASES.get(n, n) if isinstance(n, str) else n for n in names]
        if any(isinstance(n, str) and n not in _TYPES for n in known):
            del out["type"]
        elif all(isinstance(n, str) for n in known):  # else the validator says what is wrong with it
            out["type"] = list(dict.fromkeys(known)) if isinstance(schema["type"], list) else known[0]
    for key, value in schema.items():
        if key in _SCHEMA_MAP and isinstance(value, dict):
            out[key] = {name: _usable(part, where, depth + 1) for name, part in value.items()}
        elif key in _SCHEMA_LIST and isinstance(value, list):
            out[key] = [_usable(part, where, depth + 1) for part in value]
        elif key in _SCHEMA:
            out[key] = _usable(value, where, depth + 1)
    return out


def _pointer(path: Sequence[str | int]) -> str:
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def _short(text: str) -> str:
    return text if len(text) <= _MAX_ERROR_CHARS else text[: _MAX_ERROR_CHARS - 1] + "…"
