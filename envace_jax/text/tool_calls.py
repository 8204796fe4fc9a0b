"""Reading what a model wrote: an ACT output (thinking, reply, calls) and a REHEARSE output (one result).

Text from a model is data: JSON is parsed with limits on size and depth, nothing is evaluated. Every failure has one
code and a message that can be shown to the model. The codes are those of the reference training code where it has one.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from envace_jax.text.transcript import AssistantOutput, ToolCall, clean_text

MAX_CHARS = 4_000_000  # of one output
MAX_DEPTH = 64  # of nested JSON containers
MAX_CONTAINERS = 100_000  # objects and lists of one JSON text: each costs Python far more than its two characters
MAX_CALLS = 128  # of one output, good and bad

NO_TOOL_CALL_FOUND = "NO_TOOL_CALL_FOUND"  # a <tool_call> that is never closed
JSON_DECODE_ERROR = "JSON_DECODE_ERROR"
NO_ARGUMENTS = "NO_ARGUMENTS"
NON_SERIALIZABLE_ARGUMENTS = "NON_SERIALIZABLE_ARGUMENTS"
INVALID_TOOL_NAME = "INVALID_TOOL_NAME"
INVALID_PARAMETERS = "INVALID_PARAMETERS"  # arguments that are no JSON object
FABRICATED_RESPONSE = "FABRICATED_RESPONSE"  # the model wrote a tool response itself
UNCLOSED_THINKING = "UNCLOSED_THINKING"
OUTPUT_TRUNCATED = "OUTPUT_TRUNCATED"
OUTPUT_TOO_LARGE = "OUTPUT_TOO_LARGE"
JSON_TOO_DEEP = "JSON_TOO_DEEP"
TOO_MANY_CALLS = "TOO_MANY_CALLS"

EMPTY_SIMULATOR_OUTPUT = "EMPTY_SIMULATOR_OUTPUT"
NO_EXECUTION_RESULT_TAG_FOUND = "NO_EXECUTION_RESULT_TAG_FOUND"
EXECUTION_RESULT_TAG_MALFORMED = "EXECUTION_RESULT_TAG_MALFORMED"
SIMULATOR_JSON_DECODE_ERROR = "SIMULATOR_JSON_DECODE_ERROR"
INVALID_EXECUTION_RESULT_TYPE = "INVALID_EXECUTION_RESULT_TYPE"
NON_SERIALIZABLE_EXECUTION_RESULT = "NON_SERIALIZABLE_EXECUTION_RESULT"

CALL, END_CALL = "<tool_call>", "</tool_call>"
RESPONSE, TURN_START, TURN_END = "<tool_response>", "<|im_start|>", "<|im_end|>"
THINK, END_THINK = "<think>", "</think>"
_TAG = re.compile("|".join(map(re.escape, (THINK, END_THINK, CALL, RESPONSE, TURN_START, TURN_END))))
_BLOCK_EDGE = re.compile(f"{CALL}|{END_CALL}")
_RESULT_TAG = re.compile("<think>|<(tool_response|execution_result)>")
_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')
_BRACKETS = bytes.maketrans(b"{[}]", b"\x01\x01\xff\xff")  # one step down, one step up
_NO_BRACKETS = bytes(c for c in range(256) if c not in b"{[}]")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class ParsedResult:
    """A parsed REHEARSE output.

    `value_text` is the result as written, without white space around it; `value` is what it decodes to. When
    `error_code` is set there is no value and `message` can be shown.
    """

    value_text: str
    error_code: str | None = None
    message: str | None = None
    value: Any = None


class _Fault(Exception):
    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code, self.message = code, message


def parse_assistant(text: str, *, mode: str = "strict", truncated: bool = False) -> AssistantOutput:
    """Parse one ACT output; what follows its turn-end tag, if that stands in the text, is not read.

    mode: "strict" lets one bad part void every call of the output; "lenient" keeps the good calls and names what it
      left out in `dropped` (an error only when no call is left).
    truncated: the output hit its length limit; none of its calls count.

    A tool response or a turn that the model writes itself is a bad part, and nothing after it is read.
    """
    if mode not in ("strict", "lenient"):
        raise ValueError(f"mode={mode!r}: expected 'strict' or 'lenient'")
    clean = clean_text(text)
    if len(clean) > MAX_CHARS:
        message = f"The output has {len(clean)} characters; at most {MAX_CHARS} are read. Write less."
        return AssistantOutput(text, None, "", (), OUTPUT_TOO_LARGE, message, truncated)
    scan = _Scan(clean)
    thinking, reply, faults = scan.thinking(), scan.reply(), scan.faults
    if truncated:
        message = "The output was cut off at its length limit. Write a shorter one."
        return AssistantOutput(text, thinking, reply, (), OUTPUT_TRUNCATED, message, True)
    if faults and (mode == "strict" or not scan.calls):
        return AssistantOutput(text, thinking, reply, (), faults[0].code, faults[0].message)
    return AssistantOutput(text, thinking, reply, tuple(scan.calls), dropped=tuple(f.code for f in faults))


def after_thinking(text: str) -> str:
    """What an output says once its thinking, if any, is over; nothing where a thought that it began never ends."""
    said = text.rpartition(END_THINK)[2]
    return "" if said.lstrip().startswith(THINK) else said


def parse_execution_result(text: str, *, objects_only: bool = False) -> ParsedResult:
    """Parse one REHEARSE output: the first `<tool_response>` or `<execution_result>` block outside thinking.

    objects_only: accept a non-empty object or a list only, as the reference does; else any JSON value.
    """
    try:
        return _result(clean_text(text), objects_only)
    except _Fault as fault:
        return ParsedResult("", fault.code, fault.message)


class _Scan:
    """One pass over an output, tag by tag: thoughts, visible text, calls and faults in order."""

    def __init__(self, text: str):
        self.calls: list[ToolCall] = []
        self.faults: list[_Fault] = []
        self._thoughts: list[str] = []
        self._visible: list[str] = []
        self._last_close = text.rfind(END_CALL)
        try:
            self._run(text)
        except _Fault as fault:  # nothing after it is read
            self.faults.append(fault)

    def thinking(self) -> str | None:
        """Contents of all thinking blocks, or None when there is none."""
        return "\n".join(t.strip("\n") for t in self._thoughts) if self._thoughts else None

    def reply(self) -> str:
        """What is left for a user to see."""
        return "\n".join(part for part in (p.strip() for p in self._visible) if part)

    def _run(self, text: str) -> None:
        at = blocks = 0
        while tag := _TAG.search(text, at):
            before, at = text[at : tag.start()], tag.end()
            if tag[0] == END_THINK and not self._thoughts and not blocks:
                # It closes thinking that the prompt opened.
                self._thoughts, self._visible = [before], []
                continue
            self._visible.append(before)
            if tag[0] == THINK:
                at = self._think(text, at)
            elif tag[0] == CALL:
                if not blocks:
                    _limit_containers(text[at:])
                blocks += 1
                if blocks > MAX_CALLS:
                    raise _Fault(TOO_MANY_CALLS, f"At most {MAX_CALLS} calls are read from one output.")
                try:
                    at = self._call(text, at)
                except _Fault as fault:
                    if fault.code == TOO_MANY_CALLS:
                        raise
                    self.faults.append(fault)
                    at = _resume(text, at)
            elif tag[0] in (RESPONSE, TURN_START):
                raise _Fault(
                    FABRICATED_RESPONSE,
                    f"An output must not contain {tag[0]}: only the environment answers. End the turn after the calls.",
                )
            elif tag[0] == TURN_END:
                return
        self._visible.append(text[at:])

    def _think(self, text: str, at: int) -> int:
        close = text.find(END_THINK, at)
        if close < 0:
            self._thoughts.append(text[at:])
            raise _Fault(UNCLOSED_THINKING, f"The thinking is never closed. End it with {END_THINK}, then answer.")
        self._thoughts.append(text[at:close])
        return close + len(END_THINK)

    def _call(self, text: str, at: int) -> int:
        """Read the block that begins at `at`; return where it ends."""
        if at > self._last_close:
            raise _Fault(NO_TOOL_CALL_FOUND, f"A {CALL} is never closed. End every call with {END_CALL}.")
        try:
            value, _, stop = _json_block(text, at, END_CALL)
        except ValueError as err:
            raise _Fault(JSON_DECODE_ERROR, f"The text between {CALL} and {END_CALL} is not JSON: {err}.") from None
        except OverflowError as err:
            raise _Fault(NON_SERIALIZABLE_ARGUMENTS, f"The call holds {err}.") from None
        calls = [_one_call(item) for item in (value if isinstance(value, list) else [value])]
        if len(self.calls) + len(calls) > MAX_CALLS:
            raise _Fault(TOO_MANY_CALLS, f"At most {MAX_CALLS} calls are read from one output.")
        self.calls += calls
        return stop


def _resume(text: str, at: int) -> int:
    """Where to go on after a bad block: behind its closing tag, or at the next opening one if that comes first."""
    edge = _BLOCK_EDGE.search(text, at)
    if edge is None:
        return len(text)
    return edge.start() if edge[0] == CALL else edge.end()


def _one_call(item: Any) -> ToolCall:
    if not isinstance(item, dict):
        raise _Fault(NO_ARGUMENTS, 'A call must be a JSON object with "name" and "arguments".')
    arguments = item.get("parameters")
    if arguments is None:
        arguments = item.get("arguments")
    if arguments is None:
        raise _Fault(NO_ARGUMENTS, 'The call has no "arguments". Give a JSON object, {} if the tool needs none.')
    if isinstance(arguments, str):  # JSON text inside JSON: decoded once, strings inside it stay strings
        try:
            arguments = _whole(arguments.strip())
        except ValueError as err:
            raise _Fault(JSON_DECODE_ERROR, f'The "arguments" string is not JSON: {err}.') from None
        except OverflowError as err:
            raise _Fault(NON_SERIALIZABLE_ARGUMENTS, f'The "arguments" string holds {err}.') from None
    name = item.get("name")
    if not isinstance(name, str) or not name.strip():
        raise _Fault(INVALID_TOOL_NAME, 'The call has no tool name. Give "name" as a string.')
    if not isinstance(arguments, dict):
        raise _Fault(INVALID_PARAMETERS, f'The "arguments" of {name[:80]} must be a JSON object.')
    return ToolCall(name, arguments)


def _result(text: str, objects_only: bool) -> ParsedResult:
    if not text.strip():
        raise _Fault(EMPTY_SIMULATOR_OUTPUT, "The output is empty.")
    if len(text) > MAX_CHARS:
        raise _Fault(OUTPUT_TOO_LARGE, f"The output has {len(text)} characters; at most {MAX_CHARS} are read.")
    at = 0
    while True:
        tag = _RESULT_TAG.search(text, at)
        if tag is None:
            raise _Fault(NO_EXECUTION_RESULT_TAG_FOUND, f"The output has no {RESPONSE} outside its thinking.")
        if tag[1]:
            break
        close = text.find(END_THINK, tag.end())
        at = len(text) if close < 0 else close + len(END_THINK)
    end_tag = f"</{tag[1]}>"
    if text.find(end_tag, tag.end()) < 0:
        raise _Fault(EXECUTION_RESULT_TAG_MALFORMED, f"{tag[0]} is never closed. End the result with {end_tag}.")
    _limit_containers(text[tag.end() :])
    try:
        value, value_text, _ = _json_block(text, tag.end(), end_tag)
    except ValueError as err:
        raise _Fault(SIMULATOR_JSON_DECODE_ERROR, f"The text in {tag[0]} is not JSON: {err}.") from None
    except OverflowError as err:
        raise _Fault(NON_SERIALIZABLE_EXECUTION_RESULT, f"The result holds {err}.") from None
    if objects_only and not (isinstance(value, list) or (isinstance(value, dict) and value)):
        raise _Fault(INVALID_EXECUTION_RESULT_TYPE, "The result must be a non-empty JSON object or a list.")
    return ParsedResult(value_text, value=value)


def no_constant(name: str) -> Any:
    """For `parse_constant`: NaN and the infinities, which Python reads and JSON does not have, are errors."""
    raise ValueError(f"{name} is no JSON value")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise OverflowError("a number too large for JSON")
    return value


_DECODER = json.JSONDecoder(parse_constant=no_constant, parse_float=_finite)


def _json_block(text: str, at: int, end_tag: str) -> tuple[Any, str, int]:
    """The JSON value at `at`, its text, and the position after `end_tag`, which must follow it.

    The value itself says where it ends, so a tag inside one of its strings ends nothing. Raises ValueError or
    OverflowError with a short text, and a fault when the value is nested too deep.
    """
    start = _SPACE.match(text, at).end()  # type: ignore[union-attr]
    value, stop = _decode(text, start)
    after = _SPACE.match(text, stop).end()  # type: ignore[union-attr]
    if not text.startswith(end_tag, after):
        raise ValueError("something follows the first value")
    return value, text[start:stop], after + len(end_tag)


def _whole(text: str) -> Any:
    value, stop = _decode(text, 0)
    if stop < len(text):
        raise ValueError("something follows the first value")
    return value


def _decode(text: str, start: int) -> tuple[Any, int]:
    """Decode the JSON value at `start` and say where it ends; raises as `_json_block` does."""
    too_deep = _Fault(JSON_TOO_DEEP, f"The JSON is nested deeper than {MAX_DEPTH} levels.")
    try:
        value, stop = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as err:
        raise ValueError(f"{err.msg} at character {err.pos - start}") from None
    except RecursionError:
        raise too_deep from None
    own = text[start:stop]
    # Without that many opening brackets there is no such depth.
    if own.count("{") + own.count("[") > MAX_DEPTH and _depth(own) > MAX_DEPTH:
        raise too_deep
    if _SURROGATE_ESCAPE.search(own):
        value = _DECODER.decode(clean_text(json.dumps(value, ensure_ascii=False)))
    return value, stop


def _limit_containers(text: str) -> None:
    if text.count("{") + text.count("[") > MAX_CONTAINERS:
        raise _Fault(OUTPUT_TOO_LARGE, f"The output holds more than {MAX_CONTAINERS} objects and lists.")


def _depth(text: str) -> int:
    """How deep the containers of a valid JSON text are nested (at least one)."""
    brackets = _STRING.sub("", text).encode().translate(_BRACKETS, _NO_BRACKETS)
    return int(np.cumsum(np.frombuffer(brackets, np.int8), dtype=np.int32).max(initial=0))
