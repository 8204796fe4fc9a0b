"""What a rule must meet to run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_runtime import BOOK, CANCEL

from envace_jax.worldbook import records as R
from envace_jax.worldbook.criteria import executable

pytestmark = pytest.mark.quick

FOUND = replace(CANCEL, provenance=(R.SourceRef("traces", "e", ("e.1",)),))
BANK = replace(
    BOOK,
    actions=(R.ActionSpec("cancel", arguments={"order": R.ArgumentSpec("string")}),),
    state_fields=(*BOOK.state_fields, R.StateField('world.orders["*"].born', "integer", mutable=False)),
)
ORDER = ["world", "orders", {"$arg": ["order"]}]


def merge(**fields: Any) -> tuple[R.StateMutation, ...]:
    return (R.StateMutation("merge", ORDER, fields),)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"status": "tentative"}, "status tentative"),
        ({"render": None}, "no observation template"),
        ({"confidence": 0.5}, "confidence 0.50"),
        ({"provenance": (R.SourceRef("traces", "e"),)}, "no citation"),
        ({"scope": {"environment": "desk"}}, ""),
        ({"scope": {"environment": "bank"}}, "scope 'bank': the traces come from desk"),
        ({"effects": (R.StateMutation("set", [*ORDER, "status"], 3),)}, "does not fit string"),
        ({"effects": (R.StateMutation("set", [*ORDER, "colour"], "red"),)}, "not declared"),
        ({"effects": merge(status={"$out": ["status"]})}, ""),
        ({"effects": merge(born=3)}, "not mutable"),
        ({"effects": merge(colour="red")}, "not declared"),
        ({"effects": merge(status=3)}, "does not fit string"),
        ({"render": {"who": {"$arg": ["owner"]}}}, "argument 'owner' of cancel is not declared"),
        ({"render": {"c": {"$state": [*ORDER, "colour"]}}}, "is not declared"),
        ({"render": {"c": {"$count": {"$state": ["world", "orders"]}}}}, ""),
        ({"render": {"c": {"$const": {"$arg": ["owner"]}}}}, ""),
        ({"conditions": ({"left": "action.arguments.owner", "op": "exists"},)}, "argument 'owner'"),
        ({"render": None, "observation_template": "{action.arguments.owner}"}, "argument 'owner'"),
        ({"render": None, "observation_template": "{state.world.nothing}"}, "world.nothing is not declared"),
    ],
)
def test_a_rule_runs_only_where_it_meets_every_criterion(changes: dict[str, Any], reason: str) -> None:
    found = executable(replace(FOUND, **changes), BANK, frozenset(["desk"]))
    assert (reason in found) if reason else found == ""
