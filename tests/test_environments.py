"""Environments are found by what the task says, and follow one protocol."""

from __future__ import annotations

import dataclasses

import pytest

from envace_jax.config import UserError
from envace_jax.datasets.quickstart.generator import generate_tasks
from envace_jax.environments import is_rejection, make_environment

pytestmark = pytest.mark.quick


def test_a_task_gets_its_own_environment():
    (task,) = generate_tasks("train", 1)
    environment = make_environment(task)
    before = environment.state_hash()
    other = environment.fork()
    for call in task.recorded_calls:
        other.step(call.name, call.arguments)
    assert environment.state_hash() == before == make_environment(task).state_hash()


@pytest.mark.parametrize("name", [None, "moon"])
def test_unknown_environments_are_named(name):
    (task,) = generate_tasks("train", 1)
    meta = {key: value for key, value in task.meta.items() if key != "environment"}
    if name:
        meta["environment"] = name
    with pytest.raises(UserError, match=rf"meta\.environment is {name!r}, expected quickstart, bfcl"):
        make_environment(dataclasses.replace(task, meta=meta))


@pytest.mark.parametrize(
    "name, value, rejected",
    [
        ("quickstart", {"error": "no such order"}, True),
        ("quickstart", {"status": "paid"}, False),
        ("bfcl", "Error during execution: x", True),
        ("bfcl", "Error rates are low.", False),
        ("tau2_airline", "Error: Reservation not found", True),
        ("tau2_airline", "Errors were found.", False),
        ("quickstart", {"error_tool_call": {"code": "X"}}, True),
        ("quickstart", None, False),
        ("quickstart", [], False),
    ],
)
def test_rejections(name, value, rejected):
    assert is_rejection(name, value) is rejected
