"""Persistent state and three-valued conditions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envace_jax.config import UserError
from envace_jax.worldbook.conditions import compile_condition
from envace_jax.worldbook.notation import TermError, format_path, parse_path, template_term
from envace_jax.worldbook.state import (
    ABSENT,
    UNKNOWN,
    PMap,
    StateError,
    empty_state,
    freeze,
    state_from_json,
    thaw,
)
from envace_jax.worldbook.terms import Scope, compile_term
from envace_jax.worldbook.workspace import open_session

KEYS = st.text(alphabet='abc.["0/', min_size=0, max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(alphabet="ab", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.quick
@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(-1, 9)), max_size=120))
def test_a_persistent_map_is_a_dict_that_remembers_every_version(writes: list[tuple[int, int]]) -> None:
    model: dict[int, int] = {}
    versions: list[tuple[PMap, dict[int, int]]] = []
    node = PMap(closed=True)
    for key, value in writes:
        if value < 0:
            node = node.set(key, ABSENT)
            model.pop(key, None)
        else:
            node = node.set(key, value)
            model[key] = value
        versions.append((node, dict(model)))
    for kept, expected in versions:
        assert dict(kept.items()) == expected and len(kept) == len(expected)
        for key in range(61):
            assert kept.get(key) == expected[key] if key in expected else kept.get(key) is ABSENT


@pytest.mark.quick
@settings(max_examples=100, deadline=None)
@given(st.dictionaries(KEYS, JSON, max_size=4))
def test_freezing_keeps_the_value_and_equal_content_has_an_equal_digest(value: dict[str, Any]) -> None:
    frozen = freeze(value)
    assert thaw(frozen) == value
    again = PMap(closed=True)
    for key in reversed(list(value)):
        again = again.set(key, freeze(value[key]))
    assert again.digest() == frozen.digest()


@pytest.mark.quick
@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(alphabet='ab.[]"/ü', max_size=4) | st.integers(0, 9), min_size=1, max_size=5))
def test_a_path_survives_its_text_form(path: list[Any]) -> None:
    assert parse_path(format_path(path)) == tuple(path)


def test_file_paths_and_addresses_stay_one_segment() -> None:
    assert parse_path("world.files./etc/a.conf") == ("world", "files", "/etc/a.conf")
    assert parse_path("surface.tabs.https://a.b/c.d") == ("surface", "tabs", "https://a.b/c.d")
    with pytest.raises(TermError):
        parse_path("world..x")


IS_X = {"left": {"$entry": ["status"]}, "op": "eq", "right": "x"}
CONDITIONS = [
    {"left": {"$state": ["world", "orders", "7"]}, "op": "exists"},
    {"left": {"$state": ["world", "orders", "7"]}, "op": "not_exists"},
    {"left": {"$state": ["world", "orders", {"$arg": ["order"]}, "status"]}, "op": "eq", "right": "paid"},
    {"left": {"$state": ["world", "orders", "7", "total"]}, "op": "gt", "right": 3},
    {"left": {"$state": ["world", "flag"]}, "op": "ne", "right": True},
    {"some": {"in": {"$state": ["world", "orders"]}, "where": [IS_X]}},
    {"every": {"in": {"$state": ["world", "orders"]}, "where": [IS_X]}},
    {"left": {"$count": {"$state": ["world", "orders"]}}, "op": "eq", "right": 0},
    {"left": {"$state": ["world", "orders", "7"]}, "op": "eq", "right": {"$state": ["world", "last"]}},
    {"left": {"$state": ["world", "orders", "7"]}, "op": "ne", "right": {"$state": ["world", "other"]}},
    {"left": {"$state": ["world", "last"]}, "op": "in", "right": {"$state": ["world", "list"]}},
]  # fmt: skip


@pytest.mark.quick
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(range(len(CONDITIONS))), min_size=1, max_size=3), st.integers(0, 4))
def test_unknown_is_never_absent(picks: list[int], shape: int) -> None:
    """On a state in which nothing was observed no condition over it is decided, however it is combined."""
    parts: list[Any] = [CONDITIONS[p] for p in picks]
    condition: Any = parts[0]
    if shape == 1:
        condition = {"not": parts[0]}
    elif shape == 2:
        condition = {"all": parts}
    elif shape == 3:
        condition = {"any": parts}
    elif shape == 4:
        condition = {"agree": parts}
    args = freeze({"order": "7"})
    assert compile_condition(condition)(Scope(empty_state().root, args)) is None
    # The same in a map that is known in part: what is not listed is not known.
    partly = state_from_json({"orders": {}}, complete=False)
    if "orders" in str(condition) and "count" not in str(condition) and "flag" not in str(condition):
        assert compile_condition(condition)(Scope(partly.root, args)) is None


def test_what_is_known_to_be_absent_is_decided() -> None:
    known = state_from_json({"orders": {"8": {"status": "paid"}}})
    args = freeze({"order": "7"})
    assert compile_condition(CONDITIONS[1])(Scope(known.root, args)) is True
    assert compile_condition(CONDITIONS[2])(Scope(known.root, args)) is False
    partly = state_from_json({"orders": {"7": {"status": "paid"}}}, complete=False)
    assert compile_condition(CONDITIONS[2])(Scope(partly.root, args)) is True
    gone = partly.apply("delete", ("world", "orders", "7"))
    assert compile_condition(CONDITIONS[1])(Scope(gone.root, args)) is True
    assert gone.get(("world", "orders", "9")) is UNKNOWN
    hazy = known.apply("forget", ("world", "orders", "8", "status"))
    assert hazy.get(("world", "orders", "8", "status")) is UNKNOWN


@pytest.mark.quick
@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["set", "forget"]), st.integers(0, 5)), max_size=8))
def test_knowing_more_never_turns_a_decided_condition_over(steps: list[tuple[str, int]]) -> None:
    """Three-valued answers are monotone: an answer on a partly known state holds on every way to fill it in."""
    last, other = {"status": "paid", "total": 5}, {"status": "paid"}
    state = {"orders": {"7": last}, "flag": False, "last": last, "other": other, "list": [other, last]}
    full = state_from_json(state)
    partial = full
    for _, n in steps:
        path = [("world", "orders", "7", "status"), ("world", "orders", "7", "total"), ("world", "flag"),
                ("world", "orders", "7"), ("world", "last", "total"), ("world", "other", "status")][n]  # fmt: skip
        partial = partial.apply("forget", path)
    args = freeze({"order": "7"})
    for condition in CONDITIONS:
        test = compile_condition(condition)
        answer = test(Scope(partial.root, args))
        assert answer is None or answer is test(Scope(full.root, args))


def test_forgetting_below_what_is_not_there_makes_no_phantom() -> None:
    known = state_from_json({"orders": {"8": {"status": "paid"}}})
    # Nor does forgetting ever fail: a place that a scalar or a list bars may be anything, the bar included.
    barred = state_from_json({"a": "x", "l": [1]})
    for path in (("world", "a", "b", "c"), ("world", "l", "b"), ("world", "l", 5, "b")):
        assert barred.apply("forget", path).get(path[:2]) is UNKNOWN
    hazy = known.apply("forget", ("world", "orders", "9", "status"))
    assert hazy.get(("world", "orders", "9")) is UNKNOWN and len(hazy.get(("world", "orders"))) == 1
    count = compile_term({"$count": {"$state": ["world", "orders"]}})
    assert count(Scope(known.root, freeze({}))) == 1 and count(Scope(hazy.root, freeze({}))) is UNKNOWN


def test_operations_and_their_journal() -> None:
    state = state_from_json({"n": 3, "tags": ["a"], "m": {"x": 1}})
    state = state.apply("increment", ("world", "n"), 2, "r1")
    state = state.apply("append", ("world", "tags"), "b", "r1")
    state = state.apply("merge", ("world", "m"), freeze({"y": 2}), "r2")
    state = state.apply("remove", ("world", "tags"), "a", "r2")
    assert thaw(state.root.get("world")) == {"n": 5, "tags": ["b"], "m": {"x": 1, "y": 2}}
    assert [e.cause for e in state.journal] == ["r2", "r2", "r1", "r1"] and state.revision == 4
    with pytest.raises(StateError):
        state.apply("create", ("world", "n"), 1)
    with pytest.raises(StateError):
        state.apply("set", ("world", "n", "deeper"), 1)


@pytest.mark.quick
def test_a_world_may_use_the_names_of_namespaces() -> None:
    """Only objects under the four names are the namespaces; a world that has such a key of its own is a world."""
    assert thaw(state_from_json({"session": "abc"}).get(("world", "session"))) == "abc"
    assert thaw(state_from_json({"session": {"cwd": "/"}}).get(("session", "cwd"))) == "/"
    assert state_from_json({"world": {"a": 1}, "session": {}}).get(("world", "a")) == 1
    assert thaw(state_from_json({"world": {"a": 1}, "orders": {}}).get(("world", "world", "a"))) == 1
    with pytest.raises(UserError, match="expected an object"):
        state_from_json([1])  # type: ignore[arg-type]


def test_scheduled_effects_come_due() -> None:
    state = state_from_json({"door": "open"}).schedule(2, "set", ("world", "door"), "shut", "timer")
    state = state.advance()
    assert state.get(("world", "door")) == "open"
    state = state.advance()
    assert state.get(("world", "door")) == "shut" and not state.pending


def test_a_fork_of_ten_thousand_entries_copies_nothing_and_is_independent() -> None:
    """What it costs is on record in benchmarks/worldbook.py; here, that a fork shares all, and a write next to all."""
    session = open_session({"orders": {str(i): {"status": "paid", "total": i} for i in range(10_000)}})
    left, right = session.fork().state, session.fork().state
    assert left.root is right.root is session.state.root
    left = left.apply("set", ("world", "orders", "5", "status"), "gone")
    assert right.get(("world", "orders", "5", "status")) == "paid"
    assert left.get(("world", "orders", "5", "status")) == "gone"
    assert left.get(("world", "orders", "6")) is right.get(("world", "orders", "6"))
    assert left.get(("world", "orders"))._base is right.get(("world", "orders"))._base


def test_templates_insert_values_once_and_never_look_into_them() -> None:
    term = template_term("Order {action.arguments.order} {x} for {state.world.owner}")
    state = state_from_json({"owner": "{action.arguments.order} {state.world.secret}", "secret": "S"})
    text = compile_term(term)(Scope(state.root, freeze({"order": "{state.world.secret}"})))
    assert text == "Order {state.world.secret} {x} for {action.arguments.order} {state.world.secret}"


def test_terms_beyond_bounds_are_refused() -> None:
    deep: Any = 1
    for _ in range(40):
        deep = {"$sum": [deep]}
    loop: list[Any] = []
    loop.append(loop)
    for bad in (deep, loop, {"$nope": 1}, {"$state": [None]}, {"$select": {"from": 1}}):
        with pytest.raises(TermError):
            compile_term(bad)
    with pytest.raises(StateError):
        freeze(loop)
    with pytest.raises(StateError):
        freeze({"a": float("nan")})
