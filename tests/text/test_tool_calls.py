from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envace_jax.text import tool_calls as tc
from envace_jax.text.chat import ChatFormat
from envace_jax.text.tool_calls import parse_assistant, parse_execution_result
from envace_jax.text.transcript import Message, ToolCall

pytestmark = pytest.mark.quick
RULES = settings(derandomize=True, deadline=None, max_examples=200)
G = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
F = ToolCall("f", {"a": 1})
H = ToolCall("h", {})
TOWER = "[" * 50_000


def block(text):
    return f"<tool_call>\n{text}\n</tool_call>"


GOOD = {
    "no call": ("Hello  there\n\nfriend", "Hello  there\n\nfriend", []),
    "empty output": ("", "", []),
    "one call": (G, "", [F]),
    "reply before": ("Let me look.\n" + G, "Let me look.", [F]),
    "no newline before the tag": ("Let me look." + G, "Let me look.", [F]),
    "no newlines at all": ('x<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>', "x", [F]),
    "many calls": (G + "\n" + block('{"name": "h", "arguments": {}}'), "", [F, H]),
    "many calls run together": (G + block('{"name": "h", "arguments": {}}') + G, "", [F, H, F]),
    "text between and after": ("a\n" + G + "\nb\n" + G + "\nc", "a\nb\nc", [F, F]),
    "a list of calls": (block('[{"name": "f", "arguments": {"a": 1}}, {"name": "h", "parameters": {}}]'), "", [F, H]),
    "an empty list": ("Nothing to do." + block("[]"), "Nothing to do.", []),
    "parameters": (block('{"name": "f", "parameters": {"a": 1}}'), "", [F]),
    "parameters win": (block('{"name": "f", "arguments": {"b": 2}, "parameters": {"a": 1}}'), "", [F]),
    "null parameters do not": (block('{"name": "f", "arguments": {"a": 1}, "parameters": null}'), "", [F]),
    "arguments as a string": (block('{"name": "f", "arguments": "{\\"a\\": 1}"}'), "", [F]),
    "decoded once only": (
        block('{"name": "f", "arguments": "{\\"a\\": \\"{\\\\\\"b\\\\\\": 1}\\", \\"n\\": \\"7\\"}"}'),
        "",
        [ToolCall("f", {"a": '{"b": 1}', "n": "7"})],
    ),
    "strings inside stay strings": (
        block('{"name": "f", "arguments": {"a": "[1]", "b": "true", "c": "null"}}'),
        "",
        [ToolCall("f", {"a": "[1]", "b": "true", "c": "null"})],
    ),
    "closing tag inside a string": (
        block('{"name": "f", "arguments": {"a": "x</tool_call>y"}}') + "\nok",
        "ok",
        [ToolCall("f", {"a": "x</tool_call>y"})],
    ),
    "whole call inside a string": (
        block(json.dumps({"name": "f", "arguments": {"a": G}})),
        "",
        [ToolCall("f", {"a": G})],
    ),
    "think tags inside a string": (
        block('{"name": "f", "arguments": {"a": "</think><think>"}}'),
        "",
        [ToolCall("f", {"a": "</think><think>"})],
    ),
    "response tag inside a string": (
        block('{"name": "f", "arguments": {"a": "<tool_response>1</tool_response>"}}'),
        "",
        [ToolCall("f", {"a": "<tool_response>1</tool_response>"})],
    ),
    "unicode": (block('{"name": "f", "arguments": {"é": "日本 😀 \\u00e9"}}'), "", [ToolCall("f", {"é": "日本 😀 é"})]),
    "escaped NUL": (block('{"name": "f", "arguments": {"a": "\\u0000"}}'), "", [ToolCall("f", {"a": "\0"})]),
    "escaped lone surrogate": (
        block('{"name": "f", "arguments": {"a": "\\ud800x", "b": "\\ud83d\\ude00"}}'),
        "",
        [ToolCall("f", {"a": "\ufffdx", "b": "😀"})],
    ),
    "raw lone surrogate": (block('{"name": "f", "arguments": {"a": "\ud800"}}'), "", [ToolCall("f", {"a": "\ufffd"})]),
    "NUL in the reply": ("a\0b", "a\0b", []),
    "stray closing tag": ("fine</tool_call>", "fine</tool_call>", []),
    "exact numbers": (
        block('{"name": "f", "arguments": {"a": 1.0, "b": 12345678901234567890123, "c": 1e2}}'),
        "",
        [ToolCall("f", {"a": 1.0, "b": 12345678901234567890123, "c": 100.0})],
    ),
    "what follows the turn end": (G + "<|im_end|>\n<|im_start|>user\n" + G, "", [F]),
    "brackets inside strings": (
        block('{"name": "f", "arguments": {"a": "' + '[\\"{' * 90 + '"}}'),
        "",
        [ToolCall("f", {"a": '["{' * 90})],
    ),
    "deep enough": (
        block('{"name": "f", "arguments": {"a": ' + "[" * 60 + "]" * 60 + "}}"),
        "",
        [ToolCall("f", {"a": json.loads("[" * 60 + "]" * 60)})],
    ),
}


@pytest.mark.parametrize("mode", ["strict", "lenient"])
@pytest.mark.parametrize("text, reply, calls", GOOD.values(), ids=GOOD)
def test_good_outputs(text, reply, calls, mode):
    for prefix, thinking in (("", None), ("<think>\nhm " + G + "\n</think>\n\n", "hm " + G)):
        out = parse_assistant(prefix + text, mode=mode)
        assert (out.error_code, out.error_message, out.dropped) == (None, None, ())
        assert out.calls == tuple(calls)
        # 1 == 1.0 == True in Python: the text tells them apart
        assert json.dumps([c.arguments for c in out.calls]) == json.dumps([c.arguments for c in calls])
        assert (out.reply, out.thinking, out.raw, out.truncated) == (reply, thinking, prefix + text, False)


BAD = {
    "not JSON": ("{name: f}", tc.JSON_DECODE_ERROR),
    "Python literals": ("{'name': 'f', 'arguments': {'a': True}}", tc.JSON_DECODE_ERROR),
    "code": ('__import__("os").system("true")', tc.JSON_DECODE_ERROR),
    "nothing": ("", tc.JSON_DECODE_ERROR),
    "trailing text": ('{"name": "f", "arguments": {}} and', tc.JSON_DECODE_ERROR),
    "two values": ('{"name": "f", "arguments": {}}\n{"name": "f", "arguments": {}}', tc.JSON_DECODE_ERROR),
    "raw control character": ('{"name": "f", "arguments": {"a": "\0"}}', tc.JSON_DECODE_ERROR),
    "NaN": ('{"name": "f", "arguments": {"a": NaN}}', tc.JSON_DECODE_ERROR),
    "Infinity": ('{"name": "f", "arguments": {"a": -Infinity}}', tc.JSON_DECODE_ERROR),
    "a number of 5000 digits": ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", tc.JSON_DECODE_ERROR),
    "overflowing number": ('{"name": "f", "arguments": {"a": 1e999}}', tc.NON_SERIALIZABLE_ARGUMENTS),
    "overflow inside a string": ('{"name": "f", "arguments": "{\\"a\\": 1e999}"}', tc.NON_SERIALIZABLE_ARGUMENTS),
    "no arguments": ('{"name": "f"}', tc.NO_ARGUMENTS),
    "null arguments": ('{"name": "f", "arguments": null}', tc.NO_ARGUMENTS),
    "a string": ('"f"', tc.NO_ARGUMENTS),
    "a number": ("3", tc.NO_ARGUMENTS),
    "a list of names": ('["f"]', tc.NO_ARGUMENTS),
    "string that is not JSON": ('{"name": "f", "arguments": "a=1"}', tc.JSON_DECODE_ERROR),
    "string with something after it": ('{"name": "f", "arguments": "{} x"}', tc.JSON_DECODE_ERROR),
    "string of a string": ('{"name": "f", "arguments": "\\"{}\\""}', tc.INVALID_PARAMETERS),
    "list arguments": ('{"name": "f", "arguments": [1]}', tc.INVALID_PARAMETERS),
    "number arguments": ('{"name": "f", "arguments": 0}', tc.INVALID_PARAMETERS),
    "false arguments": ('{"name": "f", "parameters": false}', tc.INVALID_PARAMETERS),
    "no name": ('{"arguments": {}}', tc.INVALID_TOOL_NAME),
    "blank name": ('{"name": " ", "arguments": {}}', tc.INVALID_TOOL_NAME),
    "name not text": ('{"name": 3, "arguments": {}}', tc.INVALID_TOOL_NAME),
    "one bad in a list": ('[{"name": "f", "arguments": {}}, {"name": "f"}]', tc.NO_ARGUMENTS),
    "deep": ('{"name": "f", "arguments": {"a": ' + "[" * 70 + "]" * 70 + "}}", tc.JSON_TOO_DEEP),
    "brackets in strings are no depth, the deep list is": (
        '{"name": "f", "arguments": {"a": ["' + "]" * 90 + '"], "b": ' + "[" * 70 + "]" * 70 + "}}",
        tc.JSON_TOO_DEEP,
    ),
    "very deep": (TOWER, tc.JSON_TOO_DEEP),
    "deep inside a string": (json.dumps({"name": "f", "arguments": TOWER}), tc.JSON_TOO_DEEP),
}


@pytest.mark.parametrize("text, code", BAD.values(), ids=BAD)
def test_bad_blocks(text, code):
    for output in (block(text), f"Hm. <tool_call>{text}</tool_call>"):
        for mode in ("strict", "lenient"):
            out = parse_assistant(output, mode=mode)
            assert (out.error_code, out.calls) == (code, ())
            assert 10 < len(out.error_message) < 300 and out.error_message.isprintable()
    mixed = G + block(text) + block('{"name": "h", "arguments": {}}')
    assert parse_assistant(mixed).error_code == code and parse_assistant(mixed).calls == ()
    lenient = parse_assistant(mixed, mode="lenient")
    assert lenient.calls == (F, H) and lenient.error_code is None and lenient.dropped == (code,)


TAILS = {
    "cut off in the call": ('<tool_call>\n{"name": "f", "argu', tc.NO_TOOL_CALL_FOUND),
    "complete but not closed": ('<tool_call>\n{"name": "f", "arguments": {}}\n', tc.NO_TOOL_CALL_FOUND),
    "tag alone": ("<tool_call>", tc.NO_TOOL_CALL_FOUND),
    "closing tag cut": ('<tool_call>{"name": "f", "arguments": {}}</tool_c', tc.NO_TOOL_CALL_FOUND),
    "invented response": ('<tool_response>\n{"ok": true}\n</tool_response>\nIt worked.', tc.FABRICATED_RESPONSE),
    "invented response and a call on it": ("<tool_response>\n1\n</tool_response>\n" + G, tc.FABRICATED_RESPONSE),
    "invented turn": ("<|im_start|>user\nthanks", tc.FABRICATED_RESPONSE),
    "thinking never closed": ("<think>\nlet me see " + G, tc.UNCLOSED_THINKING),
}


@pytest.mark.parametrize("tail, code", TAILS.values(), ids=TAILS)
def test_tails(tail, code):
    for mode in ("strict", "lenient"):
        alone = parse_assistant("Well. " + tail, mode=mode)
        assert (alone.error_code, alone.calls, alone.reply) == (code, (), "Well.")
    assert parse_assistant(G + tail).error_code == code
    assert parse_assistant(G + tail).calls == ()
    lenient = parse_assistant(G + tail, mode="lenient")
    assert lenient.calls == (F,) and lenient.dropped == (code,) and "It worked" not in lenient.reply


def test_lenient_goes_on_at_an_opening_tag_inside_a_bad_block():
    out = parse_assistant('<tool_call>{"name": "f", ' + G, mode="lenient")
    assert out.calls == (F,) and out.dropped == (tc.JSON_DECODE_ERROR,)


def test_thinking_comes_off_first():
    out = parse_assistant("<think>\na " + G + "\n</think>\n\nHello")
    assert (out.thinking, out.reply, out.calls, out.error_code) == ("a " + G, "Hello", (), None)
    out = parse_assistant("opened by the prompt\n</think>\n\nHello" + G)
    assert (out.thinking, out.reply, out.calls) == ("opened by the prompt", "Hello", (F,))
    out = parse_assistant("<think>a</think>one <think>" + G + "</think>two" + G)
    assert (out.thinking, out.reply, out.calls) == ("a\n" + G, "one\ntwo", (F,))
    out = parse_assistant("said" + G + "more</think>end")  # a stray closing tag after a call ends no thinking
    assert (out.thinking, out.reply, out.calls) == (None, "said\nmore\nend", (F,))
    out = parse_assistant("<think></think>x")
    assert (out.thinking, out.reply) == ("", "x")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a memory", "a memory"),
        ("", ""),
        ("<think>\nhm\n</think>\n\nA", "\n\nA"),
        ("opened by the prompt</think>A", "A"),
        ("<think>cut off", ""),
        ("\n<think>\ncut {\"score\": 1}", ""),
        ("<think>a</think>\n<think>cut off", ""),
        ("A <think> of the user's", "A <think> of the user's"),
    ],
)
def test_what_is_said_after_thinking(text, said):
    assert tc.after_thinking(text) == said


def test_truncated_output_has_no_calls():
    out = parse_assistant("<think>t</think>Text" + G + '<tool_call>{"na', truncated=True)
    assert (out.error_code, out.calls, out.truncated) == (tc.OUTPUT_TRUNCATED, (), True)
    assert (out.thinking, out.reply) == ("t", "Text")
    assert parse_assistant("<think>t", truncated=True).error_code == tc.OUTPUT_TRUNCATED


def test_limits():
    assert parse_assistant("x" * (tc.MAX_CHARS + 1)).error_code == tc.OUTPUT_TOO_LARGE
    many = G * tc.MAX_CALLS
    assert len(parse_assistant(many).calls) == tc.MAX_CALLS
    for more in (many + G, block("[" + ",".join(['{"name": "f", "arguments": {}}'] * (tc.MAX_CALLS + 1)) + "]")):
        assert parse_assistant(more).error_code == tc.TOO_MANY_CALLS
    assert len(parse_assistant(many + G, mode="lenient").calls) == tc.MAX_CALLS
    crowd = block('{"name": "f", "arguments": {"a": [' + "{}," * tc.MAX_CONTAINERS + "{}]}}")
    assert parse_assistant("[" * tc.MAX_CONTAINERS + crowd).error_code == tc.OUTPUT_TOO_LARGE
    assert parse_assistant("[" * 2 * tc.MAX_CONTAINERS + G).calls == (F,)  # brackets in a reply cost nothing
    result = parse_execution_result("<tool_response>[" + "{}," * tc.MAX_CONTAINERS + "{}]</tool_response>")
    assert result.error_code == tc.OUTPUT_TOO_LARGE
    with pytest.raises(ValueError, match="mode"):
        parse_assistant("x", mode="loose")


NAMES = st.from_regex(r"[a-z_][a-z0-9_.]{0,8}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=10) | st.sampled_from(
    ["</tool_call>", G, "<tool_response>", "</think>", "<think>", "<|im_end|>", "<|im_start|>", '"}', "\\"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(st.builds(ToolCall, NAMES, st.dictionaries(TEXTS, VALUES, max_size=3)), max_size=3).map(tuple)
WORDS = st.lists(st.sampled_from(["Order", "is", "naïve", "x\n\ny", "{", '"', "</tool_call"]), min_size=1).map(" ".join)


@given(st.none() | WORDS, st.just("") | WORDS, CALLS)
@settings(RULES, max_examples=60)
def test_what_chat_writes_is_read_back(sp, thinking, reply, calls):
    message = Message("assistant", reply, thinking, calls)
    text = ChatFormat(sp).output_text(message)
    for mode in ("strict", "lenient"):
        out = parse_assistant(text, mode=mode)
        assert (out.thinking, out.reply, out.calls, out.error_code) == (thinking, reply, calls, None)
        assert json.dumps([c.arguments for c in out.calls]) == json.dumps([c.arguments for c in calls])


PARTS = [
    G,
    block("{"),
    block("[]"),
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<tool_response>",
    "text",
    "\n",
]
PARTS += ['{"name": "f", "arguments": {}}', '"', "<|im_end|>", "<|im_start|>", "\ud800", "\0", "<tool_call>{", "}"]


@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join), st.booleans())
@RULES
def test_any_soup_of_tags_is_read_without_surprise(text, truncated):
    strict = parse_assistant(text, truncated=truncated)
    lenient = parse_assistant(text, mode="lenient", truncated=truncated)
    for out in (strict, lenient):
        assert (out.error_code is None) == (out.error_message is None)
        assert not (out.error_code and out.calls)
        json.dumps([c.arguments for c in out.calls], ensure_ascii=False).encode("utf-8")
        assert out.raw == text and out.truncated == truncated
    assert not strict.dropped
    if strict.error_code is None:  # nothing was bad: the modes agree
        assert lenient == strict
    elif not truncated:
        assert (lenient.dropped or (lenient.error_code,))[0] == strict.error_code


RESULTS = {
    "object": ('<tool_response>\n{"a": 1}\n</tool_response>', '{"a": 1}'),
    "old tag": ('<execution_result>\n{"a": 1}\n</execution_result>', '{"a": 1}'),
    "no newlines": ("<tool_response>[1,2]</tool_response>", "[1,2]"),
    "spacing is kept": ('<tool_response>\n\n {"a":1,\n "b" : []} \n</tool_response>', '{"a":1,\n "b" : []}'),
    "number": ("<tool_response>\n3.50\n</tool_response>", "3.50"),
    "boolean": ("<tool_response>false</tool_response>", "false"),
    "null": ("<tool_response>null</tool_response>", "null"),
    "string": ('<tool_response>"done"</tool_response>', '"done"'),
    "empty object": ("<tool_response>{}</tool_response>", "{}"),
    "after thinking": ("<think>\n<tool_response>1</tool_response>\n</think>\n\n<tool_response>2</tool_response>", "2"),
    "thinking opened by the prompt": ("hm</think>\n<tool_response>2</tool_response>", "2"),
    "text around": ("Here:\n<tool_response>2</tool_response>\nbye", "2"),
    "the first counts": ("<tool_response>1</tool_response><tool_response>2</tool_response>", "1"),
    "tag inside a string": ('<tool_response>{"a": "</tool_response>"}</tool_response>', '{"a": "</tool_response>"}'),
    "error of the tool": (
        '<tool_response>{"error_tool_call": {"code": "X"}}</tool_response>',
        '{"error_tool_call": {"code": "X"}}',
    ),
}


@pytest.mark.parametrize("text, value_text", RESULTS.values(), ids=RESULTS)
def test_good_results(text, value_text):
    got = parse_execution_result(text)
    assert (got.value_text, got.error_code, got.message) == (value_text, None, None)
    assert json.dumps(got.value) == json.dumps(json.loads(value_text))
    plain = isinstance(got.value, list) or (isinstance(got.value, dict) and got.value)
    strict = parse_execution_result(text, objects_only=True)
    assert strict.error_code == (None if plain else tc.INVALID_EXECUTION_RESULT_TYPE)


BAD_RESULTS = {
    "empty": ("", tc.EMPTY_SIMULATOR_OUTPUT),
    "white": (" \n", tc.EMPTY_SIMULATOR_OUTPUT),
    "no tag": ('{"a": 1}', tc.NO_EXECUTION_RESULT_TAG_FOUND),
    "only in thinking": ("<think><tool_response>1</tool_response></think>", tc.NO_EXECUTION_RESULT_TAG_FOUND),
    "thinking never closed": ("<think><tool_response>1</tool_response>", tc.NO_EXECUTION_RESULT_TAG_FOUND),
    "not closed": ('<tool_response>{"a": 1}', tc.EXECUTION_RESULT_TAG_MALFORMED),
    "closed by the other tag": ("<tool_response>1</execution_result>", tc.EXECUTION_RESULT_TAG_MALFORMED),
    "not JSON": ("<tool_response>{'a': 1}</tool_response>", tc.SIMULATOR_JSON_DECODE_ERROR),
    "plain text": ("<tool_response>Order found.</tool_response>", tc.SIMULATOR_JSON_DECODE_ERROR),
    "nothing inside": ("<tool_response></tool_response>", tc.SIMULATOR_JSON_DECODE_ERROR),
    "NaN": ("<tool_response>NaN</tool_response>", tc.SIMULATOR_JSON_DECODE_ERROR),
    "two values": ("<tool_response>1 2</tool_response>", tc.SIMULATOR_JSON_DECODE_ERROR),
    "overflow": ("<tool_response>[1e999]</tool_response>", tc.NON_SERIALIZABLE_EXECUTION_RESULT),
    "deep": (f"<tool_response>{TOWER}</tool_response>", tc.JSON_TOO_DEEP),
    "long": ("x" * (tc.MAX_CHARS + 1), tc.OUTPUT_TOO_LARGE),
}


@pytest.mark.parametrize("text, code", BAD_RESULTS.values(), ids=BAD_RESULTS)
def test_bad_results(text, code):
    got = parse_execution_result(text)
    assert (got.error_code, got.value_text, got.value) == (code, "", None)
    assert got.message and len(got.message) < 300
