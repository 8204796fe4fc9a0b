"""The state tracker: what it writes down, what it does not believe, and where it stands in a step."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from test_runtime import BOOK, FIELDS, LOOK, STATE, scripted

from envace_jax.worldbook import records as R
from envace_jax.worldbook.baselines import SystemConfig, make_system
from envace_jax.worldbook.completer import EndpointFailure
from envace_jax.worldbook.harness import Harness
from envace_jax.worldbook.state import UNKNOWN
from envace_jax.worldbook.tracker import StateTracker, displayed
from envace_jax.worldbook.workspace import Session, open_session

pytestmark = pytest.mark.quick

LOST = "Order 1 was lost at sea."


def observed(harness: Harness) -> Session:
    return harness.observe(open_session(STATE), "cancel", {"order": "1"}, LOST)


def test_the_tracker_writes_down_what_no_rule_explains() -> None:
    harness = Harness(BOOK)
    answer = {"mutations": [{"op": "set", "path": "world.orders.1.status", "value": "at sea"},
                            {"op": "set", "path": "world.orders.1.nonsense", "value": 1}],
              "notes": ["ships sink"], "uncertain_paths": ["world.orders.2.status"]}  # fmt: skip
    tracker = StateTracker(harness, scripted(json.dumps(answer)))
    session = tracker.catch_up(observed(harness))
    assert session.state.get(("world", "orders", "1", "status")) == "at sea" and tracker.rejected == 1
    assert session.state.get(("world", "orders", "2", "status")) is UNKNOWN and not session.unexplained


@pytest.mark.parametrize(
    "mutation",
    [
        {"op": "set", "path": "world.orders.1.status", "value": "returned"},  # no turn displays it
        {"op": "set", "path": "world.orders", "value": {"1": {"status": "at sea"}}},  # the other orders would be gone
        {"op": "schedule", "path": "world.orders.1.status", "value": "at sea", "delay_steps": 2},
        {"op": "set", "path": "world.orders.1.status", "value": 1},
        {"op": "set", "path": ["world", {"$state": ["world"]}], "value": "at sea"},
        {"op": "explode"},
        7,
    ],
)
def test_what_a_turn_does_not_show_is_not_believed(mutation: Any) -> None:
    harness = Harness(BOOK)
    tracker = StateTracker(harness, scripted(json.dumps({"mutations": [mutation]})))
    before = observed(harness)
    session = tracker.catch_up(before)
    assert tracker.rejected == 1 and session.state.digest() == before.state.digest()


@pytest.mark.parametrize("text", ['{"mutations": 5, "notes": 5, "uncertain_paths": 5}', "no idea", "[1]"])
def test_unusable_output_leaves_what_was_touched_unknown(text: str) -> None:
    harness = Harness(BOOK)
    session = StateTracker(harness, scripted(text)).catch_up(observed(harness))
    assert session.state.get(("world", "orders", "1", "status")) is UNKNOWN and not session.unexplained

    class Down:
        def complete(self, messages: Any, **options: Any) -> Any:
            raise EndpointFailure("timeout")

    tracker = StateTracker(harness, Down())
    assert tracker.catch_up(observed(harness)).state.get(("world", "orders", "1", "status")) is UNKNOWN
    assert tracker.failed == 1


def test_what_is_displayed_is_a_word_of_its_own() -> None:
    assert displayed(12, "total 12.") and displayed(-3, "at -3 now") and displayed(1.5, "1.5 l") and displayed(True, "")
    assert not displayed(12, "total 125") and not displayed(12, "12.5") and not displayed("sea", "land")
    assert displayed('a "b"', '{"x": "a \\"b\\""}')


def test_a_step_reads_the_open_turns_first_and_then_a_rule_may_answer() -> None:
    """The full system with a model: what the tracker found settles the call, and the agent is not asked."""
    tracked = json.dumps({"mutations": [{"op": "set", "path": "world.orders.1.status", "value": "at sea"}]})
    book = replace(BOOK, rules=(LOOK, *BOOK.rules[:1]), state_fields=FIELDS)
    model = scripted(tracked, '{"submit": {"observation": "asked"}}')
    harness = make_system(book, model, SystemConfig(parallel=1))
    session = harness.observe(open_session(STATE), "cancel", {"order": "1"}, LOST)
    assert session.unexplained == (0,)
    after, result = harness.step(session, "look", {"order": "1"})
    assert result.text == '{"status": "at sea"}' and result.source == "rule" and len(model.asked) == 1
    assert not after.unexplained
    # Without tracked state there is no tracker, and its own predictions are never read back.
    assert make_system(book, model, SystemConfig(state=False)).tracker is None
    predicted = harness.step(open_session(STATE), "cancel", {"order": "2"})[0]
    asked = len(model.asked)
    assert StateTracker(harness, model).catch_up(predicted) == replace(predicted, unexplained=())
    assert len(model.asked) == asked


def test_a_scheduled_effect_that_no_longer_fits_leaves_its_place_unknown() -> None:
    tick = replace(LOOK, effects=(R.StateMutation("schedule", "world.n", 5, 1),), render={"ok": True})
    book = replace(BOOK, rules=(tick,), state_fields=(*FIELDS, R.StateField("world.n", "integer")))
    harness = Harness(book)
    session, _ = harness.step(open_session({**STATE, "n": 1}), "look", {"order": "1"})
    assert session.state.get(("world", "n")) == 1
    session, _ = harness.step(session, "shout", {})
    assert session.state.pending == () and session.state.get(("world", "n")) is UNKNOWN  # shout may change anything
    later = open_session({"n": 1}).state.schedule(1, "increment", ("world", "n"), 1, "r")
    later = later.apply("forget", ("world",)).advance()
    assert later.get(("world", "n")) is UNKNOWN
