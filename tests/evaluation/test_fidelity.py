"""Fidelity metrics against tables worked by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envace_jax.evaluation.fidelity import (
    Pair,
    compare,
    error_class,
    json_equal,
    rejection_intervals,
    rejection_scores,
    report,
    summarise,
)

pytestmark = pytest.mark.quick
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


def pair(predicted: str | None, actual: str, **kwargs: object) -> Pair:
    return Pair("f", predicted, actual, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("predicted", "actual", "expected"),
    [
        # parseable, exact, json_equal, key_f1, leaf_f1
        ('{"a": 1, "b": 2}', '{"a": 1, "b": 2}', (True, True, True, 1, 1)),
        ('{"b": 2, "a": 1}', '{"a": 1, "b": 2}', (True, False, True, 1, 1)),
        ('{"a": 1.0}', '{"a": 1}', (True, False, True, 1, 1)),
        ('{"a": true}', '{"a": 1}', (True, False, False, 1, 0)),
        ('{"a": "1"}', '{"a": 1}', (True, False, False, 1, 0)),
        # one of two leaves right, keys equal: key F1 1, leaf F1 2*1/(2+2)
        ('{"a": 1, "b": 3}', '{"a": 1, "b": 2}', (True, False, False, 1, 0.5)),
        # keys {a} against {a, b}: 2*1/(1+2)
        ('{"a": 1}', '{"a": 1, "b": 2}', (True, False, False, 2 / 3, 2 / 3)),
        # list order matters for leaves: positions 0 and 1 differ
        ("[1, 2]", "[2, 1]", (True, False, False, 1, 0)),
        ("{}", "{}", (True, True, True, 1, 1)),
        ("{", '{"a": 1}', (False, False, False, 0, 0)),
        (None, '{"a": 1}', (False, False, False, 0, 0)),
        ("hello", "hello", (True, True, True, 1, 1)),
    ],
)
def test_one_pair_by_hand(predicted: str | None, actual: str, expected: tuple) -> None:
    f = compare(pair(predicted, actual))
    got = (f.parseable, f.exact, f.json_equal, f.key_f1, f.leaf_f1)
    assert got[:3] == expected[:3] and got[3:] == pytest.approx(expected[3:])


def test_tolerance_forgives_order_case_and_rounding_only() -> None:
    assert compare(pair('["B  b", "a"]', '["a", "b b"]')).tolerant_f1 == 1
    assert compare(pair('{"x": 10.004}', '{"x": 10}')).tolerant_f1 == 1
    assert compare(pair('{"x": 11}', '{"x": 10}')).tolerant_f1 == 0


def test_rejection_scores_by_hand() -> None:
    # 3 true rejections: 2 found, 1 missed; 1 of 7 acceptances wrongly rejected
    decisions = [(True, True)] * 2 + [(False, True)] + [(True, False)] + [(False, False)] * 6
    got = rejection_scores(decisions)
    assert got["reject_precision"] == pytest.approx(2 / 3) and got["reject_recall"] == pytest.approx(2 / 3)
    assert got["reject_f1"] == pytest.approx(2 / 3)
    # (2*6 - 1*1) / sqrt(3*3*7*7) = 11/21
    assert got["reject_mcc"] == pytest.approx(11 / 21)
    assert math.isnan(rejection_scores([(False, False)])["reject_f1"])


def test_rejection_intervals_resample_trajectories() -> None:
    same = [(True, True), (False, False), (False, False)]
    got = rejection_intervals(same * 4, [f"t{k}" for k in range(4) for _ in same])
    assert got["reject_f1_low"] == got["reject_f1_high"] == got["reject_mcc_low"] == 1.0
    mixed = rejection_intervals([*same * 3, (False, True)], [*(f"t{k}" for k in range(3) for _ in same), "t9"])
    assert 0 <= mixed["reject_f1_low"] < 1.0 == mixed["reject_f1_high"]
    assert math.isnan(rejection_intervals([(False, False)], ["t"])["reject_mcc_low"])


def test_always_accepting_has_no_rejection_skill() -> None:
    pairs = [pair("{}", '{"error": "order not found"}')] + [pair("{}", "{}")] * 9
    got = summarise(pairs)
    assert got["reject_recall"] == 0 and math.isnan(got["reject_precision"]) and math.isnan(got["reject_mcc"])


def test_error_classes() -> None:
    assert error_class({"error": "order 17 not found"}) == "not_found"
    assert error_class({"error": {"code": "TOOL_NOT_AVAILABLE"}}) == "unknown_tool"
    assert error_class({"error": "already refunded"}) == "state"
    assert error_class("zzz") == "other"


def test_the_report_tells_reuse_from_knowledge() -> None:
    pairs = [
        pair('{"a": 1}', '{"a": 1}', copyable=True, distance=0),
        pair('{"a": 2}', '{"a": 1}', distance=4, writes=True, changed=True),
        pair('{"error": "no"}', '{"a": 1}', distance=1, writes=True, changed=True),
    ]
    got = report(pairs)
    assert got["copyable"]["json_equal"] == 1 and got["not_copyable"]["json_equal"] == 0
    assert got["all"]["n"] == 3 and got["distance:3-5"]["n"] == 1
    # of two real changes the accepted write predicts one, the rejected write does not
    assert got["writes"]["state_change_accuracy"] == 0.5


@given(JSON, JSON)
def test_leaf_f1_is_1_exactly_for_equal_values(a: object, b: object) -> None:
    import json

    f = compare(pair(json.dumps(a), json.dumps(b)))
    assert 0 <= f.leaf_f1 <= f.key_f1 <= 1
    assert (f.leaf_f1 == 1) == f.json_equal == json_equal(a, b)
