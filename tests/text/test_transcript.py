from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envace_jax.text.transcript import canonical_json, clean_text, result_text

pytestmark = pytest.mark.quick
ANY_TEXT = st.text(alphabet=st.characters(exclude_categories=()), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
@settings(derandomize=True, deadline=None)
def test_canonical_json_is_valid_json_that_decodes_to_the_value(value):
    text = canonical_json(value)
    text.encode("utf-8")  # no lone surrogates
    again = json.loads(text)
    assert canonical_json(again) == text
    if text == json.dumps(value, ensure_ascii=False):  # nothing had to be cleaned
        assert again == value


def test_canonical_json_spelling():
    assert (
        canonical_json({"b": [1, 1.5, None, True], "a": "é\n<tag>"}) == '{"b": [1, 1.5, null, true], "a": "é\\n<tag>"}'
    )


@pytest.mark.parametrize("bad", [math.nan, {"a": math.inf}, {1, 2}, b"x", object()])
def test_canonical_json_refuses_what_json_cannot_hold(bad):
    with pytest.raises(ValueError, match="not a JSON value"):
        canonical_json(bad)


def test_canonical_json_refuses_cycles_and_towers():
    cycle: list = []
    cycle.append(cycle)
    tower: list = []
    for _ in range(100_000):
        tower = [tower]
    for bad in (cycle, tower):
        with pytest.raises(ValueError, match="not a JSON value"):
            canonical_json(bad)
    while tower:  # taken apart by hand: freeing it in one go would recurse
        tower = tower[0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"ok": True}, '{"ok": true}'),
        ([], "[]"),
        ([1, "a"], '[1, "a"]'),
        (3, "3"),
        (0.5, "0.5"),
        (False, "false"),
        (None, "null"),
        ('{"a":1}', '{"a":1}'),
        ("", ""),
    ],
)
def test_a_result_becomes_text_once(value, text):
    assert result_text(value) == text
    assert result_text(result_text(value)) == text


def test_lone_surrogates_are_replaced_and_pairs_joined():
    high, low = "\ud83d", "\ude00"
    assert clean_text("a" + high + "b" + low) == "a\ufffdb\ufffd"
    assert clean_text(high + low) == "😀"
    assert clean_text(high + high + low) == "\ufffd😀"
    assert clean_text("plain\0é") == "plain\0é"


@given(ANY_TEXT)
@settings(derandomize=True, deadline=None)
def test_clean_text_always_encodes_and_keeps_its_length_class(text):
    cleaned = clean_text(text)
    cleaned.encode("utf-8")
    assert clean_text(cleaned) == cleaned
    if not any("\ud800" <= c <= "\udfff" for c in text):
        assert cleaned == text
