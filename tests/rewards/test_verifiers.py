"""Rule verifiers on a hand-made transcript."""

from __future__ import annotations

import pytest

from envace_jax.config import UserError
from envace_jax.datasets.cm2 import ChecklistItem
from envace_jax.rewards.judge import NO_RULE, JudgeRequest, RuleJudge
from envace_jax.rewards.verifiers import check_rule, is_accepted, json_equal, states, verify
from envace_jax.text.transcript import AssistantOutput, Observation, Step, ToolCall, Turn

pytestmark = pytest.mark.quick


def step(reply: str = "", *calls: tuple[str, dict, str], **fault) -> Step:
    made = tuple(ToolCall(name, arguments) for name, arguments, _ in calls)
    output = AssistantOutput(raw="", thinking=None, reply=reply, calls=made, **fault)
    return Step(output, tuple(Observation(text, "rehearsed") for *_, text in calls))


# turn 0: look up order 17, cancel it (accepted), say so; turn 1: refund 18, refused twice, say so; turn 2: cut off
TRANSCRIPT = (
    Turn("cancel 17", (
        step("", ("get_order", {"id": "17"}, '{"status": "open", "total": 12.5}')),
        step("", ("cancel_order", {"id": "17", "why": "late"}, '{"status": "cancelled"}')),
        step("Order 17 is cancelled, 12.50 EUR come back."),
    )),
    Turn("refund 18", (
        step("", ("refund", {"id": "18", "amount": 5}, '{"error": "NOT_DELIVERED"}'),
             ("refund", {"id": "18", "amount": 4}, '{"error_tool_call": {"code": "X"}}')),
        step("I cannot refund 18: it is not delivered."),
    )),
    Turn("note", (step("", ("note", {"text": "hi"}, '{"ok": true}')), step("Done with", truncated=True))),
)  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "turn", "expected"),
    [
        ({"kind": "call", "name": "cancel_order",
          "arguments": {"id": "17"}}, 0, True),  # subset of the arguments
        ({"kind": "call", "name": "cancel_order", "arguments": {"id": "18"}}, 0, False),
        ({"kind": "call", "name": "cancel_order", "arguments": {"id": "17", "missing": 1}}, 0, False),
        ({"kind": "call", "name": "cancel_order"}, 1, False),  # another turn's call
        ({"kind": "call", "name": "refund", "accepted": True}, 1, False),
        ({"kind": "call", "name": "refund", "accepted": False}, 1, True),
        ({"kind": "call", "name": "refund", "arguments": {"amount": 5.0}}, 1, True),  # 5 equals 5.0
        ({"kind": "call", "name": "refund", "arguments": {"amount": "5"}}, 1, False),
        ({"kind": "call", "name": "refund", "max": 1}, 1, False),  # called twice
        ({"kind": "call", "name": "refund", "min": 2, "max": 2}, 1, True),
        ({"kind": "call", "name": "refund", "min": 0, "max": 0}, 0, True),
        ({"kind": "order", "calls": [{"name": "get_order"}, {"name": "cancel_order"}]}, 0, True),
        ({"kind": "order", "calls": [{"name": "cancel_order"}, {"name": "get_order"}]}, 0, False),
        ({"kind": "order", "calls": [{"name": "get_order"}, {"name": "get_order"}]}, 0, False),  # one call, once
        ({"kind": "state", "writes": ["cancel_order", "refund"], "effects": []}, 0, False),
        ({"kind": "state", "writes": ["cancel_order", "refund"],
          "effects": [{"name": "cancel_order", "arguments": {"id": "17"}}]}, 0, True),
        ({"kind": "state", "writes": ["cancel_order", "refund"],
          "effects": [{"name": "cancel_order", "arguments": {"id": "17"}}]}, 1, True),  # refused ones had no effect
        ({"kind": "state", "writes": ["refund"], "effects": []}, 1, True),
        ({"kind": "state", "writes": ["cancel_order"],
          "effects": [{"name": "cancel_order"}, {"name": "cancel_order"}]}, 0, False),
        ({"kind": "reply", "contains": ["17", ["cancelled", "canceled"]], "excludes": ["18"]}, 0, True),
        ({"kind": "reply", "contains": ["12.50"]}, 0, True),
        ({"kind": "reply", "contains": ["12"]}, 0, False),  # not the whole number
        ({"kind": "reply", "contains": ["CANCELLED"]}, 0, True),
        ({"kind": "reply", "contains": ["cancel"]}, 0, False),  # not the whole word
        ({"kind": "reply", "excludes": ["cancelled"]}, 0, False),
        ({"kind": "reply", "contains": ["done"]}, 2, False),  # a cut-off reply is no reply
        ({"kind": "refusal", "call": {"name": "refund",
          "arguments": {"id": "18"}},
          "contains": [["cannot"]]}, 1, True),
        ({"kind": "refusal", "call": {"name": "refund"}, "contains": ["sorry"]}, 1, False),
        ({"kind": "refusal", "call": {"name": "cancel_order"}}, 0, False),  # it was accepted
        ({"kind": "refusal", "call": {"name": "cancel_order"}}, 1, False),  # it was never tried
        ({"kind": "no_call", "names": ["refund", "note"]}, 0, True),
        ({"kind": "no_call", "names": ["refund", "note"]}, 1, False),
    ],
)  # fmt: skip
def test_rules(rule, turn, expected):
    assert verify(rule, TRANSCRIPT, turn) is expected


def test_effects_pair_up_one_to_one_even_when_a_loose_effect_comes_first():
    # wanted: any cancel, and cancel 1. Made: cancel 1, cancel 2. The loose one must take cancel 2.
    turn = Turn("", (step("", ("cancel", {"id": 1}, "{}"), ("cancel", {"id": 2}, "{}")),))
    rule = {"kind": "state", "writes": ["cancel"],
            "effects": [{"name": "cancel"}, {"name": "cancel", "arguments": {"id": 1}}]}  # fmt: skip
    assert verify(rule, (turn,), 0)
    assert not verify({**rule, "effects": [{"name": "cancel", "arguments": {"id": 1}}] * 2}, (turn,), 0)


def test_accepted_observations():
    for text, accepted in [('{"a": 1}', True), ('{"error": "X"}', False), ('{"error_tool_call": {}}', False),
                           ('[{"error": 1}]', True), ('{"error": null, "id": 3}', True), ('{"error": ""}', True),
                           ("plain text", True), ("null", True)]:  # fmt: skip
        assert is_accepted(Observation(text, "real")) is accepted, text
    assert not is_accepted(None)
    assert not is_accepted(Observation("{}", "error", error_code="X"))


def test_json_equality_tells_true_from_one():
    assert json_equal({"a": [1, 2.0]}, {"a": [1.0, 2]})
    assert not json_equal(True, 1) and not json_equal({"a": 0}, {"a": False}) and not json_equal([1], [1, 2])


def test_states_takes_texts_literally():
    assert states("price (a+b)*", "(a+b)*") and not states("aab", "a+b")
    assert states("It is $12.", "12") and not states("312", "12") and not states("1,200", "200")
    for text in ("-5", "balance is -5", "balance: -5", "(-5)", "x=-5"):
        assert states(text, "-5") and not states(text, "5"), text
    assert states("order A-12", "12") and states("3-5 days", "5") and states("a - 5", "5")


@pytest.mark.parametrize(
    "rule",
    [{}, {"kind": "vibes"}, {"kind": "call"}, {"kind": "call", "name": 3},
     {"kind": "reply", "contains": "17"},
     {"kind": "order", "calls": [{"arguments": {}}]}, {"kind": "state", "effects": []},
     {"kind": "call", "name": "x", "arguements": {}}, {"kind": "reply", "contains": [3]},
     {"kind": "no_call", "names": [["a"]]}, {"kind": ["call"]}, {"kind": "reply", "contains": 3}, {"kind": "reply"},
     {"kind": "reply", "contains": [""]}, {"kind": "reply", "contains": [[]]}, {"kind": "reply", "contains": []},
     {"kind": "call", "name": "x", "min": "2"}, {"kind": "call", "name": "x", "min": 3, "max": 2},
     {"kind": "call", "name": "x", "min": True}, {"kind": "call", "name": "x", "max": -1},
     {"kind": "call", "name": "x", "accepted": 1}, {"kind": "order", "calls": []}, {"kind": "no_call", "names": []}],
)  # fmt: skip
def test_malformed_rules_are_refused_with_their_place(rule):
    with pytest.raises(UserError, match="task 7"):
        check_rule(rule, where="task 7")


def test_rule_judge_speaks_at_the_last_step_and_has_no_verdict_without_a_rule():
    def item(rule):
        return ChecklistItem(
            id="C0", question="?", pass_condition="", focus_on=(), evidence=(), failure_examples=(),
            required_for_next_turn=False, dependence=(), weight=1.0, rule=rule,
        )  # fmt: skip

    rules = ({"kind": "call", "name": "get_order"}, {"kind": "no_call", "names": ["get_order"]}, None)
    items = (tuple(item(rule) for rule in rules),)
    judge = RuleJudge()
    result = judge.judge(JudgeRequest("r1", "t1", None, TRANSCRIPT[:1], items))
    assert result.verdicts == (((False, False, True), (False, False, False), (None, None, None)),)
    assert result.causes == {(0, 2, s): NO_RULE for s in range(3)}
    assert judge.submit(JudgeRequest("r2", "t1", None, TRANSCRIPT[:1], items)) == "r2"
    assert [done.request_id for done in judge.poll()] == ["r2"] and judge.poll() == []


def test_rule_judge_on_a_turn_without_steps():
    items = ((ChecklistItem("C0", "?", "", (), (), (), False, (), 1.0, {"kind": "reply"}),),)
    assert RuleJudge().judge(JudgeRequest("r", "t", None, (Turn("hi", ()),), items)).verdicts == (((),),)
