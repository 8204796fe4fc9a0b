"""Token masks: what a shape lets through, and schemas that must not get far."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from envace_jax.config import UserError
from envace_jax.text import constrain
from envace_jax.text.constrain import Constrainer
from envace_jax.text.tokenizer import load_tokenizer
from envace_jax.text.tool_calls import parse_assistant, parse_execution_result
from envace_jax.text.tool_schema import check_call

pytestmark = pytest.mark.quick
TOKENIZER = load_tokenizer(Path(__file__).parents[2] / "data" / "quickstart" / "tokenizer")
ORDER = {"type": "object", "properties": {"order": {"type": "integer"}}, "required": ["order"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "x" * 9000, "parameters": ORDER}}
    for name in ("get_order", "cancel_order")
]
CALL = '<tool_call>\n{"name": "get_order", "arguments": {"order": 12}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def make() -> Constrainer:
    return Constrainer(TOKENIZER, (TOKENIZER.eos_id,))


def lets_through(guide, text: str) -> bool:
    for token in [*TOKENIZER.encode(text), TOKENIZER.eos_id]:
        if not guide.allowed()[token]:
            return False
        guide.accept(token)
    assert guide.failure is None
    return True


def test_calls_fit_their_tools(make):
    for text in (CALL, "One moment.\n" + CALL, f"<think>\nhm\n</think>\n\n{CALL}\n{CALL}", "Just text.", ""):
        assert lets_through(make.calls(TOOLS), text), text
    for text in (CALL.replace("12", '"12"'), CALL.replace("get_order", "no_tool"), "<tool_response>", CALL[:-12]):
        assert not lets_through(make.calls(TOOLS), text), text
    assert not lets_through(make.calls(TOOLS, required=True), "Just text.")
    assert not lets_through(make.calls(TOOLS, parallel=False), f"{CALL}\n{CALL}")
    assert not lets_through(make.calls(TOOLS, required=True, name="cancel_order"), CALL)
    head, tail = CALL[: CALL.index("{", 14)], CALL[CALL.index("{", 14) :]
    assert lets_through(make.calls(TOOLS, required=True, after=head), tail)


def test_replies_meet_their_schema(make):
    assert lets_through(make.reply(SCHEMA), '{"a": 3}')
    assert lets_through(make.reply({"type": "object"}), '{"b": {"c": [1, "<tool_call"]}}')
    for text in ('{"a": "3"}', '{"a":3}', '{"a": 3, "b": 1}', "three"):
        assert not lets_through(make.reply(SCHEMA), text), text
    assert lets_through(make.calls(TOOLS, schema=SCHEMA), '{"a": 3}')
    assert lets_through(make.calls(TOOLS, schema=SCHEMA), CALL)
    assert not lets_through(make.calls(TOOLS, schema=SCHEMA), "hello")
    tree = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    assert lets_through(make.reply(tree), '{"next": {"next": {}}}')


def test_results_stand_between_their_tags(make):
    for value in ('{"a": [1, 2.5, null], "b": "é"}', "[]", "3", '"x"'):
        assert lets_through(make.result(), f"<tool_response>\n{value}\n</tool_response>")
    assert not lets_through(make.result(objects_only=True), "<tool_response>\n3\n</tool_response>")
    assert lets_through(make.result("execution_result"), "<execution_result>\n{}\n</execution_result>")
    assert not lets_through(make.result(), "no tags")


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_drawn_parses(make, seed):
    """Uniform draws over what is allowed, until the turn ends: a worse policy there is not."""
    rng = np.random.default_rng(seed)

    def draw(guide) -> str | None:
        ids: list[int] = []
        while len(ids) < 400:
            weights = guide.allowed() * np.where(np.arange(TOKENIZER.vocab_size) == TOKENIZER.eos_id, 40.0, 1.0)
            token = int(rng.choice(len(weights), p=weights / weights.sum()))
            if token == TOKENIZER.eos_id:
                return TOKENIZER.decode(ids)
            guide.accept(token)
            ids.append(token)
        return None  # too long: cut off, as an output at its limit is

    if (said := draw(make.calls(TOOLS, required=True, parallel=False))) is not None:
        output = parse_assistant(said)
        assert output.error_code is None and check_call(output.calls[0], TOOLS) is None
    if (said := draw(make.result(objects_only=False))) is not None:
        # what no float can hold is JSON all the same
        assert parse_execution_result(said).error_code is None or re.search(r"[eE][+]?\d{3}", said)


def test_a_token_that_was_not_allowed_ends_the_output(make):
    guide = make.reply(SCHEMA)
    guide.accept(TOKENIZER.encode("x")[0])
    assert guide.failure and np.flatnonzero(guide.allowed()).tolist() == [TOKENIZER.eos_id]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "#"}, "back to itself"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}]}}}, "back to itself"),
        ({"$ref": "http://example.org/x"}, "not a local one"),
        ({"$ref": "#/$defs/none"}, "leads nowhere"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"type": "dict"}, "dict"),
        ({"const": "x" * 30_000, "type": "string", "pattern": "y" * 3_000}, "characters"),
        ({"type": "object", "properties": {f"p{i}": {} for i in range(5_000)}}, "keys"),
        (
            {"anyOf": [{"type": "object", "properties": {f"p{i}{j}": {} for i in range(400)}} for j in range(60)]},
            "parts",
        ),
        ({"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}, "nsatisfiable"),
    ],
)
def test_schemas_that_cannot_be_followed_are_refused(make, schema, message):
    with pytest.raises(UserError, match=message):
        make.reply(schema)


def test_a_lenient_shape_takes_any_object_instead(make):
    odd = [{"function": {"name": "f", "parameters": {"type": "object", "not": {"required": ["y"]}}}}]
    with pytest.raises(UserError, match="not"):
        make.calls(odd)
    said = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert lets_through(make.calls(odd, lenient=True), said)


def test_a_compiler_that_runs_away_is_stopped_in_its_child(monkeypatch):
    guarded = Constrainer(TOKENIZER, (TOKENIZER.eos_id,), guarded=True)
    assert lets_through(guarded.reply(SCHEMA), '{"a": 3}')
    monkeypatch.setattr(
        constrain, "_CHILD", constrain._CHILD.replace("matcher.compute", "while True: pass\nmatcher.compute")
    )
    monkeypatch.setattr(constrain, "_CHILD", constrain._CHILD.replace("(2, 2)", "(1, 1)"))
    with pytest.raises(UserError, match="too long or too much memory"):
        guarded.reply({"type": "object"})
