"""The harness, its agents, the service, and the systems that are compared."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import ledger
import pytest

from envace_jax.datasets.quickstart.generator import generate_tasks
from envace_jax.datasets.traces import task_group, write_traces
from envace_jax.text.transcript import canonical_json
from envace_jax.worldbook import commands
from envace_jax.worldbook import records as R
from envace_jax.worldbook.agent import (
    AgentConfig,
    LoopAgent,
    SingleShotAgent,
    parse_object,
    predicted_text,
)
from envace_jax.worldbook.baselines import SYSTEMS, CopyingCompleter, SystemConfig, make_system
from envace_jax.worldbook.completer import ScriptedCompleter
from envace_jax.worldbook.harness import Harness, HarnessConfig, Prediction
from envace_jax.worldbook.retrieve import Retriever
from envace_jax.worldbook.service import WorldbookEnvironment, WorldbookService, simulate
from envace_jax.worldbook.state import ABSENT, UNKNOWN
from envace_jax.worldbook.store import Worldbook, save_worldbook
from envace_jax.worldbook.workspace import open_session

CANCEL = R.TransitionRule(
    "cancel-paid",
    "cancel",
    conditions=({"left": {"$state": ["world", "orders", {"$arg": ["order"]}, "status"]}, "op": "eq", "right": "paid"},),
    effects=(R.StateMutation("set", ["world", "orders", {"$arg": ["order"]}, "status"], "gone"),),
    render={"ok": True},
    confidence=0.95,
    status="supported",
)
LOOK = R.TransitionRule(
    "look",
    "look",
    conditions=({"left": {"$state": ["world", "orders", {"$arg": ["order"]}]}, "op": "exists"},),
    render={"status": {"$state": ["world", "orders", {"$arg": ["order"]}, "status"]}},
    confidence=0.95,
    status="supported",
)
MISSING = R.TransitionRule(
    "look-missing",
    "look",
    conditions=({"left": {"$state": ["world", "orders", {"$arg": ["order"]}]}, "op": "not_exists"},),
    render={"error": "none"},
    outcome="failure",
    confidence=0.95,
    status="supported",
)
FIELDS = (R.StateField("world.orders", "object"), R.StateField('world.orders["*"].status', "string"))
NEVER_LOST = R.Invariant(
    "never-lost", "no order is lost",
    {"every": {"in": {"$state": ["world", "orders"]},
               "where": [{"left": {"$entry": ["status"]}, "op": "ne", "right": "lost"}]}},
    "error",
)  # fmt: skip
BOOK = Worldbook(
    actions=(R.ActionSpec("cancel"), R.ActionSpec("look", aliases=("peek",))),
    state_fields=FIELDS,
    rules=(CANCEL, LOOK, MISSING),
    invariants=(NEVER_LOST,),
)
STATE = {"orders": {"1": {"status": "paid"}, "2": {"status": "shipped"}}}

pytestmark = pytest.mark.quick


def test_a_batch_keeps_its_order_and_sessions_are_values() -> None:
    harness = Harness(BOOK)
    session = open_session(STATE)
    other = open_session({"orders": {}})
    calls = [(session, "cancel", {"order": "1"}), (other, "look", {"order": "1"}), (session, "look", {"order": "2"})]
    (after, first), (_, second), (_, third) = harness.step_batch(calls)
    assert [first.text, second.text, third.text] == ['{"ok": true}', '{"error": "none"}', '{"status": "shipped"}']
    assert harness.step(session, "look", {"order": "1"})[1].text == '{"status": "paid"}'
    assert harness.step(after.fork(), "peek", {"order": "1"})[1].text == '{"status": "gone"}'


def test_unknown_goes_to_the_agent_never_to_a_rule() -> None:
    harness = Harness(BOOK)
    session, result = harness.step(open_session(), "look", {"order": "1"})
    assert result.source == "none" and result.cause == "unknown"
    session = harness.observe(open_session(), "look", {"order": "1"}, '{"status": "paid"}')
    assert harness.step(session, "look", {"order": "1"})[1].text == '{"status": "paid"}'
    assert harness.step(session, "look", {"order": "2"})[1].cause == "unknown"
    session = harness.observe(session, "look", {"order": "2"}, '{"error": "none"}')
    assert session.state.get(("world", "orders", "2")) is ABSENT
    assert harness.step(session, "look", {"order": "2"})[1].text == '{"error": "none"}'


def test_what_no_rule_explains_leaves_nothing_certain_and_contradictions_are_counted() -> None:
    harness = Harness(BOOK)
    session = harness.observe(open_session(STATE), "cancel", {"order": "1"}, "the system is down")
    assert session.state.get(("world", "orders", "1", "status")) is UNKNOWN
    assert session.state.get(("world", "orders", "2", "status")) == "shipped"
    assert session.unexplained == (0,) and session.contradictions == 1
    session = harness.observe(open_session(STATE), "shout", {}, "!")
    assert harness.step(session, "look", {"order": "2"})[1].source == "none"


ORDER_2 = "world.orders.2.status"


@pytest.mark.parametrize(
    ("effect", "rule_ids", "reason"),
    [
        (("set", ORDER_2, "gone"), (), ""),
        (("set", ORDER_2, "lost"), (), "invariant never-lost"),
        (("set", ORDER_2, 3), (), "does not fit string"),
        (("set", "world.nothing", 1), (), "not declared"),
        (("increment", ORDER_2, 1), (), "increment on string"),
        (("set", "world..x", 1), (), "not well formed"),
        (None, ("cancel-paid",), "not known to hold"),
        (None, ("no-rule",), "not an executable rule"),
    ],
)
def test_predictions_are_validated(effect: Any, rule_ids: tuple[str, ...], reason: str) -> None:
    effects = () if effect is None else (R.StateMutation(*effect),)
    prediction = Prediction("x", "success", effects, rule_ids)
    found, _, _ = Harness(BOOK).validate(open_session(STATE).state, "cancel", {"order": "2"}, prediction)
    assert (reason in found) if reason else found == ""


def test_rules_only_refuses_uncited_effects_and_policies_differ_in_what_they_keep() -> None:
    effect = (R.StateMutation("set", "world.orders.2.status", "lost"),)

    class Fixed:
        def predict(self, requests: Any) -> list[Prediction]:
            return [Prediction("kept", "success", effect) for _ in requests]

    for policy, text in (("fail", ""), ("keep_observation", "kept")):
        harness = Harness(BOOK, Fixed(), HarnessConfig(on_reject=policy))
        session, result = harness.step(open_session(STATE), "cancel", {"order": "2"})
        assert result.text == text and "never-lost" in result.rejected
        assert session.state.get(("world", "orders", "2", "status")) == "shipped"
    strict = Harness(BOOK, None, HarnessConfig(trust="rules_only"))
    ok = Prediction("x", "success", (R.StateMutation("set", "world.orders.2.status", "gone"),))
    assert "no cited rule" in strict.validate(open_session(STATE).state, "cancel", {"order": "2"}, ok)[0]


def scripted(*texts: str) -> ScriptedCompleter:
    return ScriptedCompleter(script={"answers": [{"contains": [], "texts": list(texts)}]})


def loop(model: ScriptedCompleter, **options: Any) -> Harness:
    harness = Harness(BOOK)
    harness.agent = LoopAgent(harness, Retriever(BOOK), model, AgentConfig(parallel=1, **options))
    return harness


def test_the_loop_looks_things_up_and_submits() -> None:
    submit = {"observation": "it is gone", "outcome": "success", "citations": ["nowhere"],
              "effects": [{"op": "set", "path": "world.orders.2.status", "value": "gone"}]}  # fmt: skip
    model = scripted(
        '{"tool": "read_state", "arguments": {"path": "world.orders.2.status"}}',
        '{"tool": "dry_run", "arguments": {"effects": '
        '[{"op": "set", "path": "world.orders.2.status", "value": "lost"}]}}',
        '{"tool": "no_such_tool", "arguments": {}}',
        '<think>{"submit": 1}</think> ' + json.dumps({"submit": submit}),
    )
    harness = loop(model)
    session, result = harness.step(open_session(STATE), "cancel", {"order": "2"})
    assert result.text == "it is gone" and result.source == "agent" and result.calls == 4 and not result.rejected
    assert session.state.get(("world", "orders", "2", "status")) == "gone"
    assert (
        '"value": "shipped"' in model.asked[1] and "never-lost" in model.asked[2] and "error: no tool" in model.asked[3]
    )


def test_the_loop_ends_at_its_budget_after_one_reminder() -> None:
    model = scripted('{"tool": "list_actions"}')
    _, result = loop(model, tool_budget=2).step(open_session(STATE), "cancel", {"order": "2"})
    assert result.source == "none" and "budget" in result.rejected and len(model.asked) == 4
    idle = loop(scripted('{"tool": "list_actions"}'), tool_budget=0)
    _, nothing = idle.step(open_session(STATE), "cancel", {"order": "2"})
    assert nothing.source == "none" and "budget" in nothing.rejected
    bad = scripted('{"submit": {"outcome": "perhaps"}}')
    _, result = loop(bad).step(open_session(STATE), "cancel", {"order": "2"})
    assert "invalid submissions" in result.rejected and len(bad.asked) == 3


@pytest.mark.parametrize(
    "output",
    [
        '{"submit": {"observation": "x", "effects": 5}}',
        '{"submit": {"observation": "x", "effects": [{"op": "set", "path": 5, "value": 1}]}}',
        '{"submit": {"observation": "x", "outcome": ["x"]}}',
        '{"tool": "read_turn", "arguments": {"turn": 99}}',
        '{"tool": "read_turn", "arguments": {"turn": 1e999}}',
        '{"tool": "recall", "arguments": {"query": 5}}',
        '{"tool": "inspect_action", "arguments": {"action_type": "no such"}}',
        '{"tool": "dry_run", "arguments": {"effects": 5}}',
        '{"tool": "state_schema", "arguments": {"prefix": 5}}',
        '{"tool": "read_state", "arguments": {"path": "world.[1"}}',
    ],
)
def test_whatever_a_model_asks_for_the_loop_goes_on(output: str) -> None:
    model = scripted(output, '{"submit": {"observation": "fine"}}')
    _, result = loop(model).step(open_session(STATE), "cancel", {"order": "2"})
    assert result.text == "fine" and result.calls == 2
    assert "error: " in model.asked[1] or "not accepted" in model.asked[1]


def test_arguments_that_no_state_can_hold_spoil_their_own_step_only() -> None:
    deep: dict[str, Any] = {}
    for _ in range(90):
        deep = {"a": deep}
    harness = loop(scripted('{"submit": {"observation": "fine"}}'))
    calls = [(open_session(STATE), "look", deep), (open_session(STATE), "look", {"order": "1"})]
    assert [r.text for _, r in harness.step_batch(calls)] == ["fine", '{"status": "paid"}']
    assert Harness(BOOK).observe(open_session(STATE), "cancel", deep, "down").unexplained == (0,)


def test_what_a_caller_does_with_his_arguments_later_changes_no_memory() -> None:
    arguments = {"order": "1"}
    session, _ = Harness(BOOK).step(open_session(STATE), "look", arguments)
    arguments["order"] = "2"
    assert session.memory.recent(1)[0].arguments == {"order": "1"}


def test_an_entry_that_is_known_in_part_is_no_answer() -> None:
    """Unknown is not absent inside an answer either: what was never seen of an order is not left out of it."""
    whole = replace(LOOK, render={"order": {"$state": ["world", "orders", {"$arg": ["order"]}]}})
    text = replace(LOOK, render={"$concat": ["order: ", {"$state": ["world", "orders", {"$arg": ["order"]}]}]})
    state = {"orders": {"1": {"status": "paid", "total": 3}}}
    for rule, answer in ((whole, '{"order": {"status": "paid", "total": 3}}'),
                         (text, 'order: {"status": "paid", "total": 3}')):  # fmt: skip
        harness = Harness(replace(BOOK, rules=(rule,)))
        known = open_session(state)
        assert harness.step(known, "look", {"order": "1"})[1].text == answer
        hazy = known.with_state(known.state.apply("forget", ("world", "orders", "1", "status")))
        assert harness.step(hazy, "look", {"order": "1"})[1].source == "none"
        partly = open_session().with_state(open_session().state.apply("set", ("world", "orders", "1", "total"), 3))
        assert harness.step(partly, "look", {"order": "1"})[1].source == "none"


def test_an_answer_with_its_keys_in_another_order_is_the_same_answer() -> None:
    both = replace(LOOK, render={"id": {"$arg": ["order"]}, **LOOK.render})
    harness = Harness(replace(BOOK, rules=(both,)))
    session = harness.observe(open_session(), "look", {"order": "1"}, '{"status": "paid", "id": "1"}')
    assert session.state.get(("world", "orders", "1", "status")) == "paid" and not session.unexplained
    session = harness.observe(session, "look", {"order": "1"}, '{"status": "paid", "id": "1"}')
    assert session.contradictions == 0


def test_a_cited_rule_binds_effects_and_text_and_contracts_bind_fields() -> None:
    contract = R.RenderContract("c", ("cancel",), "json", required_fields=("ok",))
    book = replace(BOOK, contracts=(contract,))
    state = open_session(STATE).state
    gone = R.StateMutation("set", "world.orders.1.status", "gone")
    cited = Prediction("in other words", "success", (gone,), ("cancel-paid",))
    harness = Harness(book)
    assert harness.validate(state, "cancel", {"order": "1"}, cited)[0] == ""
    for effects in ((), (R.StateMutation("set", "world.orders.1.status", "lost?"),)):
        assert "cited rules" in harness.validate(state, "cancel", {"order": "1"}, replace(cited, effects=effects))[0]
    plain = Prediction('{"nothing": 1}', "success", (gone,))
    assert "lacks ok" in harness.validate(state, "cancel", {"order": "1"}, plain)[0]
    assert harness.validate(state, "cancel", {"order": "1"}, replace(plain, outcome="failure"))[0] == ""

    class Fixed:
        def predict(self, requests: Any) -> list[Prediction]:
            return [cited for _ in requests]

    slow = Harness(book, Fixed(), HarnessConfig(fast_path=1.0))
    assert slow.step(open_session(STATE), "cancel", {"order": "1"})[1].text == '{"ok": true}'
    # A caller's own prompt that speaks of the action decides the form.
    assert slow.step(open_session(STATE), "cancel", {"order": "1"}, "cancel says OK")[1].text == "in other words"


def test_single_shot_asks_once_and_a_batch_goes_out_together() -> None:
    class Many:
        sizes: list[int] = []

        def complete_many(self, prompts: Any, **options: Any) -> list[Any]:
            self.sizes.append(len(prompts))
            from envace_jax.worldbook.completer import Completion

            return [Completion("<think>x</think><predicted_observation>\nno\n</predicted_observation>")] * len(prompts)

    harness = Harness(BOOK)
    harness.agent = SingleShotAgent(harness, Retriever(BOOK), Many())  # type: ignore[arg-type]
    calls = [(open_session(STATE), n, {"order": o}) for n, o in (("cancel", "2"), ("look", "1"), ("cancel", "9"))]
    texts = [r.text for _, r in harness.step_batch(calls)]
    assert texts == ["no", '{"status": "paid"}', "no"] and Many.sizes == [2]


def test_model_output_is_parsed_as_data() -> None:
    assert parse_object('x {"a": {"b": 1}} y') == {"a": {"b": 1}}
    assert parse_object("{" * 5_000) is None
    assert parse_object('<think>{"a": 1}</think> no') is None
    assert predicted_text("<think>no</think>\nyes\n") == "yes"


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_answers_through_the_same_interface(system: str) -> None:
    book = replace(BOOK, evidence=())
    model = scripted('{"submit": {"observation": "hm", "outcome": "unknown"}}')
    harness = make_system(book, model, SystemConfig(system=system, parallel=1, rules=False))
    session, result = harness.step(open_session(STATE), "look", {"order": "1"})
    assert result.text == "hm" and result.calls == 1 and session.turn == 1
    prompt = model.asked[0]
    assert ("# Rules" in prompt) == (system in ("static_worldbook", "full"))
    assert ("# State as tracked" in prompt) == (system == "full")


def test_ablations_take_away_what_they_name() -> None:
    model = scripted('{"submit": {"observation": "hm"}}')
    for content, rules in (("schema", False), ("evidence", False), ("abstraction", True)):
        harness = make_system(BOOK, model, SystemConfig(content=content, rules=False, parallel=1))
        harness.step(open_session(STATE), "look", {"order": "1"})
        assert ("# Rules" in model.asked[-1]) == rules
    harness = make_system(BOOK, model, SystemConfig(state=False, parallel=1))
    _, result = harness.step(open_session(STATE), "look", {"order": "1"})
    assert result.source == "agent" and "# State as tracked" not in model.asked[-1]
    plain = make_system(BOOK, CopyingCompleter(), SystemConfig(loop=False, rules=False, parallel=1))
    assert plain.step(open_session(STATE), "look", {"order": "1"})[1].text == "{}"


def test_the_environment_says_when_nothing_answers() -> None:
    environment = WorldbookEnvironment(Harness(BOOK), open_session(STATE))
    fork = environment.fork()
    assert environment.step("cancel", {"order": "1"}) == {"ok": True}
    assert environment.step("cancel", {"order": "1"})["error"] == "NO_WORLDBOOK_ANSWER"
    assert fork.step("look", {"order": "1"}) == {"status": "paid"}
    assert environment.state_hash() != fork.state_hash()


def test_a_session_at_the_terminal() -> None:
    shown: list[str] = []
    lines = [
        "look order=1",
        ":fork",
        '{"name": "look", "arguments": {"order": "1"}}',
        ":state",
        ":back",
        ":actions",
        ":x",
        ":quit",
        "look",
    ]
    session = simulate(Harness(BOOK), lines, shown.append, STATE)
    assert session.turn == 1 and '{"status": "paid"}' in shown and any("commands:" in s for s in shown)


def test_the_commands_from_traces_to_replay(tmp_path: Path) -> None:
    import argparse

    write_traces(tmp_path / "train.jsonl", ledger.episodes(30, 1))
    write_traces(tmp_path / "test.jsonl", ledger.episodes(10, 2))
    parser = argparse.ArgumentParser()
    commands.add_arguments(parser)

    def run(*argv: str) -> tuple[int, str]:
        out = io.StringIO()
        with redirect_stdout(out):
            status = commands.run_worldbook(parser.parse_args(argv))
        return status, out.getvalue()

    book = str(tmp_path / "wb")
    status, text = run("build", "--traces", str(tmp_path / "train.jsonl"), "--out", book, "--folds", "2")
    assert status == 0 and "30 traces" in text
    assert run("verify", book)[0] == 0
    assert "accounts_of" in run("show", book)[1] and "answers" in run("show", book, "accounts_of")[1]
    status, text = run("replay", book, "--traces", str(tmp_path / "test.jsonl"))
    assert status == 0 and "0 wrongly" in text
    assert run("diff", book, book) == (0, "no difference\n")
    with pytest.raises(ValueError, match="not promoted"):
        run("replay", book, "--traces", str(tmp_path / "train.jsonl"), "--promote", str(tmp_path / "v"))
    (tmp_path / "s.json").write_text(
        json.dumps({"accounts": {"A001": {"owner": "ann", "balance": 9, "frozen": False}}})
    )
    out = io.StringIO()
    with redirect_stdout(out):
        args = parser.parse_args(["simulate", book, "--state", str(tmp_path / "s.json")])
        assert commands.run_worldbook_simulate(args, ["accounts_of owner=ann"]) == 0
    assert '["A001"]' in out.getvalue()


@pytest.mark.quick
def test_numbers_that_are_no_json_never_get_into_a_session() -> None:
    said: list[str] = []
    lines = ['{"name": "look", "arguments": {"order": NaN}}', "look order=1e999", "look order=NaN", ":memory"]
    session = simulate(Harness(BOOK), lines, said.append, STATE)
    assert [canonical_json(m.arguments) for m in session.memory.recent(3)] == [
        '{"text": "{\\"name\\": \\"look\\", \\"arguments\\": {\\"order\\": NaN}}"}',
        '{"order": "1e999"}',
        '{"order": "NaN"}',
    ]
    service = WorldbookService(Harness(BOOK))
    key = service._answer("/reset", {})["session"]
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON"):
            service._answer("/step", {"session": key, "name": "look", "arguments": {"order": value}})
    assert service.sessions[key].session.turn == 0
    service.server.server_close()


def test_a_task_opens_its_own_group() -> None:
    task = generate_tasks("train", 1)[0]
    environment = WorldbookEnvironment(Harness(BOOK))
    environment.reset(task)
    assert environment.session.group == task_group(task)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["simulate", "BOOK", "--state", "LIST"], "expected an object"),
        (["replay", "BOOK", "--traces", "T", "--floor", "7"], "from 0 to 1"),
        (["compare", "BOOK", "--traces", "T", "--metric", "beauty"], "invalid choice"),
        (["compare", "BOOK", "--traces", "T", "--systems", "oracle"], "invalid choice"),
        (["build", "--traces", "T", "--out", "new", "--domain", "BYTES"], "not UTF-8"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_in_one_line(
    more: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from envace_jax import cli

    save_worldbook(BOOK, tmp_path / "wb")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "bytes").write_bytes(b"\xff\xa4")
    files = {"BOOK": str(tmp_path / "wb"), "LIST": str(tmp_path / "list.json"), "BYTES": str(tmp_path / "bytes")}
    try:
        status = cli.main(["worldbook", *(files.get(m, m) for m in more)])
    except SystemExit as stop:
        status = stop.code
    err = capsys.readouterr().err
    assert status == 2 and says in err and "Traceback" not in err
