"""BFCL multi-turn: conversion, environment, splits, and agreement with the package's own check."""

from __future__ import annotations

import json
import time

import pytest

pytest.importorskip("bfcl_eval", reason="bfcl-eval is not installed (pip install --no-deps bfcl-eval==2026.3.23)")

from envace_jax.config import UserError
from envace_jax.datasets.bfcl import (
    VARIANTS,
    WRITES,
    BfclEnvironment,
    bfcl_check,
    bfcl_success,
    load_bfcl,
    parse_call,
    split_of,
)
from envace_jax.datasets.cm2 import task_from_record, task_to_record
from envace_jax.environments import is_rejection, make_environment
from envace_jax.rewards.verifiers import verify
from envace_jax.text.transcript import ToolCall, canonical_json
from tests.datasets.transcripts import reference_transcript, silent_transcript


@pytest.fixture(scope="module")
def everything():
    return load_bfcl()


@pytest.fixture(scope="module")
def sample():
    return load_bfcl(limit=24)


def gold(task):
    return [[ToolCall(c["name"], c["arguments"]) for c in turn] for turn in task.meta["gold"]]


def test_all_reference_trajectories_are_valid(everything):
    assert len(everything) == 800
    assert sum(len(task.recorded_calls) for task in everything) == 4625
    assert [task.uuid for task in everything if not bfcl_success(task, gold(task))] == []
    # The reference never meets a refusal, so every rejection that rehearsal shows is its own.
    assert not any(is_rejection("bfcl", json.loads(c.result)) for t in everything for c in t.recorded_calls)


def test_every_record_reads_back_and_scores_full(everything):
    for task in everything[::4]:  # each of the four variants, a quarter of the scenarios
        assert task_from_record(json.loads(canonical_json(task_to_record(task))), where="x") == task
        transcript = reference_transcript(task)
        for turn, items in enumerate(task.checklists[0]):
            for item in items:
                assert verify(item.rule, transcript, turn), (task.uuid, turn, item.id)


def test_whatever_changes_the_state_is_a_write(everything):
    for task in everything:
        if task.meta["variant"] != "base":
            continue
        environment = make_environment(task)
        before = environment.state_hash()
        for call in task.recorded_calls:
            environment.step(call.name, call.arguments)
            after = environment.state_hash()
            assert before == after or call.name in WRITES, call
            before = after


@pytest.mark.quick
def test_a_sample_is_valid_and_its_rules_tell_good_from_nothing(sample):
    assert {task.meta["variant"] for task in sample} == set(VARIANTS)
    for task in sample:
        assert bfcl_success(task, gold(task))
        assert not bfcl_success(task, [[] for _ in gold(task)])
        good, silent = reference_transcript(task), silent_transcript(task)
        verdicts = [
            (verify(item.rule, good, turn), verify(item.rule, silent, turn))
            for turn, items in enumerate(task.checklists[0])
            for item in items
        ]
        assert all(first for first, _ in verdicts)
        assert not all(second for _, second in verdicts)


@pytest.mark.quick
def test_agrees_with_the_packages_own_check(sample):
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

    def text(call):
        return f"{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})"

    for number, task in enumerate(sample[:12]):
        reference = gold(task)
        entry = {
            "id": task.uuid.removeprefix("bfcl-"),
            "initial_config": task.meta["initial_state"],
            "involved_classes": task.meta["classes"],
        }
        without_one = [list(turn) for turn in reference]
        without_one[-1] = without_one[-1][1:]
        twice = [turn + turn[-1:] for turn in reference]
        for kind, attempt in (("gold", reference), ("short", without_one), ("twice", twice)):
            decoded = [[[text(call)] for call in turn] for turn in attempt]
            answers = [[text(call) for call in turn] for turn in reference]
            name = f"agree-{number}-{kind}-{time.time_ns()}"  # instances outlive an episode under one name
            theirs = multi_turn_checker(decoded, answers, entry, "multi_turn", name)["valid"]
            assert bfcl_success(task, attempt) == theirs, (task.uuid, kind)


@pytest.mark.quick
def test_splits_take_a_scenario_with_all_its_variants():
    sides = {(variant, n): split_of(f"multi_turn_{variant}_{n}") for variant in VARIANTS for n in range(200)}
    for n in range(200):
        assert len({sides[variant, n] for variant in VARIANTS}) == 1
    for start in range(0, 200, 50):  # each domain has its share
        assert 12 <= sum(sides["base", n] == "heldout" for n in range(start, start + 50)) <= 13
    held = load_bfcl(["base"], "heldout", limit=5)
    assert all(t.meta["split"] == "heldout" and t.source == "bfcl_multi_turn" for t in held)


@pytest.mark.quick
def test_why_an_attempt_fails():
    (task,) = load_bfcl(["base"], limit=1)
    reference = gold(task)
    assert bfcl_check(task, reference[:-1]) == (False, f"{len(reference) - 1} turns of {len(reference)}")
    assert bfcl_check(task, [[], *reference[1:]]) == (False, "turn 0: no call")
    assert bfcl_check(task, [reference[0][:1], *reference[1:]])[1].startswith("turn 0: another state")
    pwd = [ToolCall("pwd", {})]
    assert bfcl_check(task, [reference[0], pwd, *reference[2:]])[1].startswith("turn 1: results")


@pytest.mark.quick
def test_environment_steps_forks_and_hashes():
    (task,) = load_bfcl(["base"], limit=1)
    environment = make_environment(task)
    fresh = environment.state_hash()
    assert environment.step("cd", {"folder": "document"}) == {"current_working_directory": "document"}
    assert environment.state_hash() == fresh  # a change of folder is not compared
    other = environment.fork()
    assert other.step("mkdir", {"dir_name": "temp"}) is None
    assert other.state_hash() != fresh and environment.state_hash() == fresh
    assert is_rejection("bfcl", other.step("mkdir", {"dir_name": "temp"}))
    environment.reset(task)
    assert environment.state_hash() == fresh == make_environment(task).state_hash()
    config = json.dumps(task.meta)
    other.step("rm", {"file_name": "temp"})
    assert json.dumps(task.meta) == config


@pytest.mark.quick
@pytest.mark.parametrize(
    "name, arguments",
    [
        ("__init__", {}),
        ("_load_scenario", {"scenario": {}}),
        ("get_method_called", {}),
        ("import os", {}),
        ("cd", {"folder": "document", "extra": 1}),
        ("cd", {}),
        ("mkdir", {"dir_name": {"a": 1}}),
    ],
)
def test_only_documented_functions_with_fitting_arguments_run(name, arguments):
    (task,) = load_bfcl(["base"], limit=1)
    environment = make_environment(task)
    before = environment.state_hash()
    value = environment.step(name, arguments)
    assert is_rejection("bfcl", value) and json.dumps(value)
    assert environment.state_hash() == before


@pytest.mark.quick
def test_arithmetic_cannot_stall_the_run():
    environment = BfclEnvironment()
    environment.load(
        {"classes": ["MathAPI"], "initial_state": {}, "long_context": False},
        ("power", "logarithm", "square_root", "round_number", "add"),
    )
    start = time.monotonic()
    for name, arguments in [
        ("power", {"base": 9, "exponent": 10**9}),
        ("power", {"base": 10**4000, "exponent": 1000}),
        ("logarithm", {"value": 2, "base": 10, "precision": 10**9}),
        ("square_root", {"number": 2, "precision": 10**9}),
        ("round_number", {"number": 5, "decimal_places": -(10**9)}),
        ("power", {"base": "9", "exponent": 2}),
    ]:
        assert is_rejection("bfcl", environment.step(name, arguments)), name
    assert environment.step("power", {"base": 2, "exponent": 10}) == {"result": 1024}
    assert environment.step("add", {"a": 0.5, "b": 1}) == {"result": 1.5}
    assert isinstance(environment.step("square_root", {"number": 2, "precision": 5}), str)  # as BFCL shows it
    assert time.monotonic() - start < 5


@pytest.mark.quick
def test_withheld_functions_are_offered_late(sample):
    late = next(t for t in load_bfcl(["miss_func"], limit=3) if any(t.late_tools.values()))
    ((turn, tools),) = late.late_tools.items()
    name = tools[0]["function"]["name"]
    assert name not in {t["function"]["name"] for t in late.tools_at(turn - 1)}
    assert name in {t["function"]["name"] for t in late.tools_at(turn)}
    assert f'"name": "{name}"' in late.user_turns[turn]
    (item,) = late.checklists[0][turn - 1]
    assert item.rule["kind"] == "no_call"


@pytest.mark.quick
@pytest.mark.parametrize("text", ["cd(open('x'))", "cd(folder=f())", "x = 1", "os.remove('x')", "cd(", "rm2(a=1)"])
def test_reference_calls_are_read_not_run(text):
    with pytest.raises(UserError, match="BFCL reference call"):
        parse_call(text, {"cd": {"class": "GorillaFileSystem"}})


@pytest.mark.quick
def test_positional_arguments_get_their_names():
    docs = {"sort": {"class": "GorillaFileSystem"}}
    assert parse_call("sort('a.txt')", docs) == ToolCall("sort", {"file_name": "a.txt"})
