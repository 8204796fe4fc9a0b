"""The service desk: refusals that depend on state, seeded records, disjoint splits, checklists that gold
passes."""

from __future__ import annotations

import json
import re
from collections import Counter

import jsonschema
import pytest

from envace_jax.config import UserError
from envace_jax.datasets.cm2 import task_from_record, task_to_record
from envace_jax.datasets.quickstart.environment import TOOLS, WRITES, QuickstartEnvironment
from envace_jax.datasets.quickstart.generator import generate_task, generate_tasks, is_held_out
from envace_jax.environments import is_rejection, make_environment
from envace_jax.rewards.verifiers import check_rule

pytestmark = pytest.mark.quick
STATE = {
    "orders": {
        "1001": {"status": "paid", "total": 40, "city": "Oslo", "account": 101},
        "1002": {"status": "shipped", "total": 30, "city": "Rome", "account": 101},
        "1003": {"status": "delivered", "total": 50, "city": "Lima", "account": 102},
    },
    "accounts": {
        "101": {"status": "active", "balance": 0, "open_orders": 2},
        "102": {"status": "active", "balance": 20, "open_orders": 0},
    },
}


def play(*calls):
    environment = QuickstartEnvironment(STATE)
    return [environment.step(name, args) for name, args in calls], environment


def test_order_life():
    results, environment = play(
        ("cancel_order", {"order": 1001}),
        ("cancel_order", {"order": 1001}),
        ("set_city", {"order": 1001, "city": "Paris"}),
        ("refund_order", {"order": 1001, "amount": 10}),
        ("cancel_order", {"order": 1002}),
        ("refund_order", {"order": 1002, "amount": 10}),
        ("refund_order", {"order": 1003, "amount": 60}),
        ("refund_order", {"order": 1003, "amount": 30}),
        ("refund_order", {"order": 1003, "amount": 20}),
        ("cancel_order", {"order": 9999}),
    )
    assert results == [
        {"status": "cancelled", "account": 101, "open_orders": 1},
        {"error": "already cancelled"},
        {"error": "already cancelled"},
        {"error": "not delivered"},
        {"error": "already shipped"},
        {"error": "not delivered"},
        {"error": "above total"},
        {"status": "refunded", "amount": 30},
        {"error": "already refunded"},
        {"error": "no such order"},
    ]
    assert environment.state["accounts"]["101"]["open_orders"] == 1


def test_account_life():
    results, _ = play(
        ("list_orders", {"account": 101}),
        ("close_account", {"account": 101}),
        ("close_account", {"account": 102}),
        ("pay_balance", {"account": 102, "amount": 30}),
        ("pay_balance", {"account": 102, "amount": 10}),
        ("pay_balance", {"account": 102, "amount": 10}),
        ("close_account", {"account": 102}),
        ("close_account", {"account": 102}),
        ("pay_balance", {"account": 102, "amount": 10}),
        ("get_account", {"account": 102}),
        ("get_account", {"account": 999}),
    )
    assert results == [
        [1001, 1002],
        {"error": "open orders"},
        {"error": "balance due"},
        {"error": "above balance"},
        {"balance": 10},
        {"balance": 0},
        {"status": "closed"},
        {"error": "account closed"},
        {"error": "account closed"},
        {"status": "closed", "balance": 0, "open_orders": 0},
        {"error": "no such account"},
    ]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("step", {}), ("_put", {}), ("__class__", {}), ("cancel_order", {}), ("cancel_order", {"order": "1001"}),
     ("cancel_order", {"order": True}), ("cancel_order", {"order": 1001, "x": 1}), ("cancel_order", [1001]),
     ("set_city", {"order": 1001, "city": None}), ("refund_order", {"order": 1003, "amount": -5}),
     ("pay_balance", {"account": 102, "amount": 0})],
)  # fmt: skip
def test_bad_calls_are_refused_without_effect(name, arguments):
    environment = QuickstartEnvironment(STATE)
    before = environment.state_hash()
    assert is_rejection("quickstart", environment.step(name, arguments))
    assert environment.state_hash() == before


def test_fork_is_independent_and_hash_follows_the_state():
    environment = QuickstartEnvironment(STATE)
    fork = environment.fork()
    assert fork.state_hash() == environment.state_hash()
    fork.step("cancel_order", {"order": 1001})
    assert fork.state_hash() != environment.state_hash()
    assert environment.state["orders"]["1001"]["status"] == "paid" and STATE["orders"]["1001"]["status"] == "paid"
    answer = environment.step("get_order", {"order": 1001})
    answer["status"] = "spoilt"  # what a caller does to an answer is not the desk's state
    assert environment.state["orders"]["1001"]["status"] == "paid"


def test_tasks_are_seeded_and_a_longer_list_begins_with_the_shorter():
    five = generate_tasks("train", 5, seed=3)
    assert five == generate_tasks("train", 8, seed=3)[:5]
    assert five != generate_tasks("train", 5, seed=4)
    assert generate_task("train", 4, seed=3) == five[4]
    with pytest.raises(UserError, match="train, heldout"):
        generate_tasks("test", 1)


def test_records_are_valid_and_agree_with_the_environment():
    tasks = generate_tasks("train", 120) + generate_tasks("heldout", 60)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    for task in tasks:
        assert task_from_record(json.loads(json.dumps(task_to_record(task))), where="test") == task
        environment = make_environment(task)
        for record in task.recorded_calls:
            jsonschema.validate(record.arguments, schemas[record.name])
            assert environment.step(record.name, record.arguments) == json.loads(record.result)
        for items in task.checklists[0]:
            assert abs(sum(item.weight for item in items) - 1) < 1e-9
            for item in items:
                check_rule(item.rule)
    assert len({task.uuid for task in tasks}) == len(tasks)


def test_splits_have_disjoint_entities():
    def numbers(task):
        return {int(n) for n in re.findall(r"\d{3,}", json.dumps(task_to_record(task)["messages"]))}

    train = set().union(*map(numbers, generate_tasks("train")))
    held = set().union(*map(numbers, generate_tasks("heldout", 400)))
    assert train and held and not train & held
    assert all(map(is_held_out, held)) and not any(map(is_held_out, train))


def test_the_mix_has_what_it_promises():
    tasks = generate_tasks("train", 500)
    turns = Counter(len(task.user_turns) for task in tasks)
    assert set(turns) == {1, 2, 3}
    refused = Counter(c.name for t in tasks for c in t.recorded_calls if '"error"' in c.result)
    accepted = Counter(c.name for t in tasks for c in t.recorded_calls if '"error"' not in c.result)
    assert set(WRITES) <= set(refused) and set(accepted) == {tool["function"]["name"] for tool in TOOLS}
    share = sum(refused.values()) / (sum(refused.values()) + sum(accepted.values()))
    assert 0.1 < share < 0.35
    assert any(len(message.tool_calls) == n for t in tasks for message in t.messages for n in (2, 3))
    assert all(
        1 <= sum(c.turn == turn for c in t.recorded_calls) <= 3 for t in tasks for turn in range(len(t.user_turns))
    )
    # no reply after a refusal hides it
    for task in tasks:
        if '"error"' in task.recorded_calls[-1].result and task.recorded_calls[-1].name in WRITES:
            assert "Cannot" in task.messages[-1].content
