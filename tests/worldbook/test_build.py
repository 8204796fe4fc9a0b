"""Building: language stages with a scripted model, repairs, budget, resuming; the folder and its versions."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ledger
import pytest

from envace_jax.config import UserError
from envace_jax.datasets.quickstart.generator import generate_tasks
from envace_jax.datasets.records import Task
from envace_jax.datasets.traces import TraceEpisode, TraceEvent, episode_from_task, make_episode, write_traces
from envace_jax.evaluation.replay import ReadingAgent, ReferenceDomain, replay
from envace_jax.worldbook import build
from envace_jax.worldbook import records as R
from envace_jax.worldbook.baselines import CopyingCompleter, SystemConfig, make_system
from envace_jax.worldbook.build import BuildConfig, BuildReport, build_worldbook, load_episodes, write_build
from envace_jax.worldbook.compile import diff_worldbooks, replay_rules
from envace_jax.worldbook.completer import (
    BudgetExceeded,
    Completion,
    EndpointFailure,
    ScriptedCompleter,
    in_parallel,
)
from envace_jax.worldbook.patch import apply_patch
from envace_jax.worldbook.service import WorldbookEnvironment, simulate
from envace_jax.worldbook.store import Worldbook, load_worldbook, save_worldbook, verify_folder
from envace_jax.worldbook.symbolic import induce_rules

MADE_UP = [{"source_id": "x", "event_ids": ["made up"]}]
FACT = {"subject": "world.accounts", "predicate": "exists", "provenance": MADE_UP}
EXTRACT = json.dumps({"outcome": "unknown", "confidence": 0.4, "mutations": [], "preconditions": [FACT]})


def script(episodes: Sequence[TraceEpisode]) -> dict[str, Any]:
    """A scripted model for these traces: the rules it proposes were found in them, nothing else was looked at."""
    found = induce_rules(episodes)
    answers: list[dict[str, Any]] = []
    for name in sorted({r.action_type for r in found.rules}):
        rules = []
        for rule in found.rules:
            if rule.action_type == name and rule.render is not None:
                body = R.to_json(rule)
                ids = [f"t-{p.event_ids[0]}" for p in rule.provenance]
                kept = {k: body[k] for k in ("conditions", "effects", "outcome", "render", "description") if k in body}
                # The model boasts; code does not listen.
                rules.append({**kept, "evidence": ids, "confidence": 1.0, "status": "supported"})
        # A rule that is wrong, and one that is not well formed, are proposed as well.
        cited = rules[0]["evidence"] if rules else []
        false = {"conditions": [], "outcome": "success", "render": {"made": "up"}, "evidence": cited}
        # An invariant that the traces bear out, and one that they refute.
        entries = {"in": {"$state": ["world", "accounts"]}}
        invariants = [
            {"description": text, "severity": "error", "evidence": cited,
             "condition": {"every": {**entries, "where": [{"left": {"$entry": ["balance"]}, "op": op, "right": 0}]}}}
            for text, op in (("no overdraft", "gte"), ("all are in debt", "lt"))
        ] if name == "withdraw" else []  # fmt: skip
        text = json.dumps({"rules": [*rules, false], "invariants": invariants})
        answers.append({"contains": ["stage: rules", f"item: {name}\n"], "texts": [text]})
        answers.append({"contains": ["stage: revise", f"item: {name}\n"], "texts": ['{"rules": []}']})
    answers += [
        {"contains": ["stage: extract"], "texts": [EXTRACT]},
        {"contains": ["stage: schema"], "texts": [json.dumps({
            "actions": [{"name": "withdraw", "description": "Take money out.", "aliases": ["take", "deposit"]}],
            "state_fields": [{"path": "world.accounts.*.balance", "type": "string", "description": "in cents"}],
        })]},
        {"contains": ["stage: contracts"], "texts": ['{"content_type": "json", "required_fields": ["nowhere"]}']},
        {"contains": ["stage: notes", "item: freeze\n"], "texts": [
            json.dumps({"notes": [{"kind": "constraint", "statement": "A frozen account stays frozen."}]})]},
        {"contains": ["stage: notes"], "texts": ['{"notes": []}']},
    ]  # fmt: skip
    return {"answers": answers}


@pytest.fixture(scope="module")
def traces() -> list[TraceEpisode]:
    return ledger.episodes(60, 11)


@pytest.fixture(scope="module")
def scripted(traces: list[TraceEpisode]) -> dict[str, Any]:
    return script([e for e in traces if e.group])


CONFIG = BuildConfig(folds=3, symbolic=False, parallel=2)


@pytest.fixture(scope="module")
def modelled(traces: list[TraceEpisode], scripted: dict[str, Any]) -> Worldbook:
    return build_worldbook(traces, config=CONFIG, completer=ScriptedCompleter(script=scripted))


def test_rules_of_a_model_are_believed_only_as_far_as_replay_bears_them_out(
    modelled: Worldbook, traces: list[TraceEpisode]
) -> None:
    assert len(modelled.rules) >= 8
    assert all(
        r.replay and r.confidence == (r.replay["right"] + 1) / (sum(r.replay.values()) + 2) for r in modelled.rules
    )
    made_up = [r for r in (*modelled.rules, *modelled.candidates) if r.render == {"made": "up"}]
    assert not [r for r in made_up if r in modelled.rules]
    count = replay_rules(modelled, ledger.episodes(40, 12), floor=0.9)
    assert sum(count.wrong.values()) == 0 and sum(count.right.values()) > 0.3 * count.transitions


def test_quickstart_rules_that_a_model_proposes_answer_the_held_out_desk() -> None:
    build = [episode_from_task(t) for t in generate_tasks("train", 400)]
    model = ScriptedCompleter(script=script(build))
    book = build_worldbook(build, config=BuildConfig(folds=2, symbolic=False, parallel=1), completer=model)
    held_out = [episode_from_task(t) for t in generate_tasks("heldout", 200)]
    count = replay_rules(book, held_out, floor=R.EXECUTABLE_CONFIDENCE)
    assert sum(count.wrong.values()) == 0, count.examples
    assert sum(count.right.values()) >= 0.95 * count.transitions, count.to_json()
    # The whole chain: what is decided in this world holds in the real one.
    report = replay(
        generate_tasks("heldout", 30), ReferenceDomain("quickstart"), ReadingAgent("quickstart"), world(book)
    )
    assert report.summary()["Real"] == 1.0 and report.summary()["CR"] >= 0.9 and not report.errors


def world(book: Worldbook) -> Callable[[Task], WorldbookEnvironment]:
    harness = make_system(book, CopyingCompleter(), SystemConfig(loop=False, parallel=1))

    def make(task: Task) -> WorldbookEnvironment:
        environment = WorldbookEnvironment(harness)
        environment.reset(task)
        return environment

    return make


@pytest.mark.long
def test_the_whole_chain_from_bfcl_traces_with_a_scripted_model() -> None:
    pytest.importorskip("bfcl_eval")
    from envace_jax.datasets.bfcl import load_bfcl

    build = [episode_from_task(t) for t in load_bfcl(("base",), "train", limit=20)]
    scripted = script(build)
    scripted["default"] = '{"rules": []}'  # actions for which nothing was found in the traces
    book = build_worldbook(build, config=replace(CONFIG, folds=2), completer=ScriptedCompleter(script=scripted))
    assert book.artifacts["language_model"] and len(book.local) > 0 and len(book.evidence) > 50
    assert not [r for r in book.rules if not r.replay]
    said: list[str] = []
    simulate(make_system(book, CopyingCompleter(), SystemConfig(loop=False)), ["pwd", ":state"], said.append)
    assert said
    held_out = load_bfcl(("base",), "heldout", limit=5)
    report = replay(held_out, ReferenceDomain("bfcl"), ReadingAgent("bfcl"), world(book))
    figures = report.summary()
    assert figures["Real"] == 1.0 and not report.errors and figures["CR"] == figures["W2R"] and report.steps


def test_what_was_observed_wins_over_what_the_model_says(modelled: Worldbook) -> None:
    # The model calls a balance a text and writes its path in another form: one place, as observed, with its meaning.
    (field,) = [f for f in modelled.state_fields if f.path.endswith("balance")]
    assert field.type == "integer" and field.description == "in cents" and field.path == 'world.accounts["*"].balance'
    withdraw = next(a for a in modelled.actions if a.name == "withdraw")
    assert withdraw.description == "Take money out." and withdraw.aliases == ("take",)  # deposit is an action itself
    assert all("nowhere" not in c.required_fields for c in modelled.contracts)
    (note,) = modelled.notes
    assert note.status == "untested"  # it cites nothing
    # What a fact rests on is said by code.
    (fact,) = modelled.local[0].preconditions
    assert fact.subject == "world.accounts" and fact.provenance == modelled.local[0].provenance
    (kept,) = modelled.invariants
    assert kept.description == "no overdraft" and kept.severity == "error"
    (gone,) = [r for r in modelled.rejected if r["kind"] == "invariant"]
    assert "does not hold after" in gone["reason"]


def test_malformed_output_gets_two_repairs_and_then_is_an_explicit_unknown(
    traces: list[TraceEpisode], scripted: dict[str, Any]
) -> None:
    good = next(a for a in scripted["answers"] if a["contains"][:2] == ["stage: rules", "item: freeze\n"])
    others = [a for a in scripted["answers"] if a is not good]
    repaired = {"answers": [{**good, "texts": ["no", '{"rules": [{"conditions": 3}]}', good["texts"][0]]}, *others]}
    hopeless = {"answers": [{**good, "texts": ["no"]}, *others]}
    few = traces[:12]
    one, two = (
        build_worldbook(few, config=replace(CONFIG, folds=0), completer=ScriptedCompleter(script=s))
        for s in (repaired, hopeless)
    )
    names = [r.action_type for r in (*one.rules, *one.candidates)]
    assert "freeze" in names
    assert "freeze" not in [r.action_type for r in (*two.rules, *two.candidates)]
    assert [u for u in two.unresolved if u["kind"] == "rules" and u["id"] == "freeze"]


class Dying:
    """A model that is cut off after some calls, as a killed build is."""

    def __init__(self, inner: ScriptedCompleter, calls: int):
        self.inner, self.left = inner, calls

    def complete(self, messages: Any, **options: Any) -> Completion:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return self.inner.complete(messages, **options)


def test_a_killed_build_goes_on_at_the_item(
    tmp_path: Path, traces: list[TraceEpisode], scripted: dict[str, Any]
) -> None:
    few = traces[:10]
    config = replace(CONFIG, folds=0, parallel=1)
    whole = ScriptedCompleter(script=scripted)
    expected = build_worldbook(few, config=config, completer=whole)
    work = tmp_path / "work"
    with pytest.raises(KeyboardInterrupt):
        build_worldbook(few, config=config, completer=Dying(ScriptedCompleter(script=scripted), 40), work=work)
    with (work / "calls.jsonl").open("a") as file:
        file.write('{"key": "cut o')  # the kill came in the middle of a line
    rest = ScriptedCompleter(script=scripted)
    report = BuildReport()
    book = build_worldbook(few, config=config, completer=rest, work=work, report=report)
    assert book.digest == expected.digest
    assert len(rest.asked) == len(whole.asked) - 40 == report.model_calls


def test_a_budget_stops_the_build_and_a_larger_one_goes_on_with_what_was_answered(
    tmp_path: Path, traces: list[TraceEpisode], scripted: dict[str, Any]
) -> None:
    few = traces[:10]
    config = replace(CONFIG, folds=0, parallel=1)
    whole = ScriptedCompleter(script=scripted)
    expected = build_worldbook(few, config=config, completer=whole)

    def start(model: Any, **limits: Any) -> tuple[Worldbook | None, BuildReport]:
        report = BuildReport()
        try:
            book = build_worldbook(
                few, config=replace(config, **limits), completer=model, work=tmp_path / "w", report=report
            )
        except BudgetExceeded as error:
            assert "start again with a larger one" in str(error)
            return None, report
        return book, report

    class Priced(ScriptedCompleter):
        def complete(self, messages: Any, **options: Any) -> Completion:
            return replace(super().complete(messages, **options), cost=0.5)

    first = start(Priced(script=scripted), max_calls=25)
    assert first[0] is None and first[1].model_calls == 25 and first[1].prompt_tokens > 0
    # The budget is the whole build's: the same one again buys nothing.
    again = start(Priced(script=scripted), max_calls=25)
    assert again[0] is None and again[1].model_calls == 0 and again[1].earlier_calls == 25
    assert start(Priced(script=scripted), max_cost=12.0)[1].model_calls == 0  # 25 calls cost 12.5
    rest = Priced(script=scripted)
    book, report = start(rest, max_calls=10_000, parallel=2)
    assert book is not None and book.digest == expected.digest
    assert len(rest.asked) == len(whole.asked) - 25 == report.model_calls and report.cost == len(whole.asked) / 2
    # Other settings begin anew, but no paid answer is thrown away.
    third = Priced(script=scripted)
    build_worldbook(few, config=replace(config, seed=1), completer=third, work=tmp_path / "w")
    assert not third.asked


@pytest.mark.quick
def test_an_endpoint_that_fails_stops_the_build_in_one_line_and_asks_no_more() -> None:
    asked = []

    def work(k: int) -> int:
        asked.append(k)
        if k == 0:
            raise EndpointFailure("timeout: no answer")
        time.sleep(0.01)
        return k

    with pytest.raises(UserError, match="no answer"):
        in_parallel(work, range(1_000), 2)
    assert len(asked) < 500


@pytest.mark.quick
def test_a_folder_is_written_once_verified_on_load_and_never_changed(
    tmp_path: Path, small_bank_book: Worldbook
) -> None:
    path = save_worldbook(small_bank_book, tmp_path / "wb")
    again = load_worldbook(path)
    assert again == small_bank_book and again.digest == small_bank_book.digest
    with pytest.raises(UserError, match="exists already"):
        save_worldbook(small_bank_book, path)
    for name in json.loads((path / "manifest.json").read_text())["files"]:
        file = path / name
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if data else b"x")
        assert [p for p in verify_folder(path) if name in p], name
        with pytest.raises(UserError, match="not intact"):
            load_worldbook(path)
        file.write_bytes(data)
    (path / "notes.txt").write_text("added")
    assert verify_folder(path) == ["notes.txt is not in the manifest"]


@pytest.mark.quick
def test_patches_make_new_versions_that_diff_readably(small_bank_book: Worldbook) -> None:
    rule = small_bank_book.candidates[0]
    note = {"id": "note-1", "kind": "fact", "statement": "Banks close on Sundays."}
    edits = [
        {"op": "add", "kind": "note", "value": note},
        {"op": "replace", "kind": "candidate", "value": {**R.to_json(rule), "description": "as corrected"}},
        {"op": "remove", "kind": "candidate", "id": small_bank_book.candidates[1].id},
    ]
    new = apply_patch(small_bank_book, {"base": small_bank_book.digest, "edits": edits})
    assert new.parent == small_bank_book.digest and new.status == "authored"
    text = diff_worldbooks(small_bank_book, new)
    assert (
        "+ note-1 Banks close on Sundays." in text
        and "as corrected" in text
        and f"- {small_bank_book.candidates[1].id}" in text
    )
    assert diff_worldbooks(new, new) == "no difference"
    invariant = {"id": "i", "description": "d"}
    malformed = {"id": "r", "action_type": "x", "conditions": [{"left": 1}]}
    for edit in (
        {"op": "add", "kind": "candidate", "value": R.to_json(rule)},
        {"op": "remove", "kind": "note", "id": "no"},
        {"op": "add", "kind": "rule", "value": malformed},
        {"op": "add", "kind": "note", "value": {**note, "path": "../../x"}},
        {"op": "add", "kind": "field", "value": {"path": "elsewhere.x"}},
        {"op": "add", "kind": "invariant", "value": {**invariant, "condition": {"left": {"$nope": 1}}}},
    ):
        with pytest.raises(UserError):
            apply_patch(small_bank_book, {"base": small_bank_book.digest, "edits": [edit]})
    with pytest.raises(UserError, match="make it anew"):
        apply_patch(small_bank_book, {"base": "x", "edits": []})


def test_only_training_traces_build_and_sources_are_hashed(tmp_path: Path) -> None:
    episodes = ledger.episodes(3, 4)
    write_traces(tmp_path / "t.jsonl", [replace(episodes[0], split="test"), *episodes[1:]])
    with pytest.raises(UserError, match="not train"):
        load_episodes([tmp_path / "t.jsonl"])
    kept, report, sources = load_episodes([tmp_path / "t.jsonl"], on_bad="skip")
    assert len(kept) == 2 and len(report.bad) == 1 and len(sources[0]["sha256"]) == 64


def test_long_observations_are_held_in_part_and_no_rule_gives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the bound on memory; ids and what is aligned stay, and a page that was cut off is never an answer."""
    pages = []
    for k, episode in enumerate(ledger.episodes(12, 4)):
        ask = TraceEvent("agent", "action", {"type": "page", "arguments": {"n": 1}, "raw": ""}, {"call_id": "p"})
        page = TraceEvent("environment", "observation", "word " * 4_000, {"call_id": "p"})
        events = [*episode.events, ask, page]
        pages.append(make_episode(events, where="t", episode_id=f"e{k}", initial_state=episode.initial_state))
    write_traces(tmp_path / "t.jsonl", pages)
    monkeypatch.setattr(build, "WHOLE_CHARS", 30_000)
    kept, _, _ = load_episodes([tmp_path / "t.jsonl"])
    lengths = [len(e.events[-1].content) for e in kept]
    assert lengths[:2] == [20_000, 20_000] and all(9_000 <= n < 9_100 for n in lengths[2:])
    assert kept[5].events[-1].metadata["clipped_from"] == 20_000
    assert [[v.id for v in e.events] for e in kept] == [[v.id for v in e.events] for e in pages]
    book = build_worldbook(kept, config=BuildConfig(folds=2))
    assert not [r for r in (*book.rules, *book.candidates) if r.action_type == "page" and r.render is not None]
    assert [r for r in (*book.rules, *book.candidates) if r.action_type == "balance" and r.render is not None]
    assert replay_rules(book, kept).by_action["page"] == [0, 0, 12]  # type: ignore[index]


def test_the_deterministic_build_resumes_and_rejects_other_settings(tmp_path: Path) -> None:
    episodes = ledger.episodes(12, 4)
    lines: list[str] = []
    config = BuildConfig(folds=0)
    first = build_worldbook(episodes, config=config, work=tmp_path / "w", log=lines.append)
    again = build_worldbook(episodes, config=config, work=tmp_path / "w", log=lines.append)
    assert first.digest == again.digest and "induce: done before" in lines
    file = tmp_path / "w" / "induce.json"
    file.write_text(file.read_text().replace('"supported"', '"tentative"', 1))
    build_worldbook(episodes, config=config, work=tmp_path / "w", log=lines.append)
    assert "induce: earlier output is not whole: running again" in lines or lines.count("induce: done before") == 1
    build_worldbook(episodes, config=replace(config, seed=1), work=tmp_path / "w", log=lines.append)
    assert any("other settings" in line for line in lines)
    write_build(first, tmp_path / "out", tmp_path / "w")
    assert not (tmp_path / "w").exists()


HOSTILE_RULES = [
    {"id": "r", "action_type": "balance", "conditions": [{"left": "__import__('os')", "op": "system"}]},
    {"id": "r", "action_type": "balance", "render": {"$eval": "1"}},
    {"id": "r", "action_type": "balance", "effects": [{"op": "set", "path": ["world", {"$nope": 1}], "value": 1}]},
    {"id": "r", "action_type": "balance", "effects": [{"op": "exec", "path": "world.x"}]},
]


@pytest.mark.quick
@pytest.mark.parametrize("data", HOSTILE_RULES)
def test_rules_that_are_not_in_the_language_are_rejected_with_their_name(data: dict[str, Any]) -> None:
    from envace_jax.worldbook.rulebook import check_rule

    with pytest.raises(R.RecordError):
        check_rule(R.from_json(R.TransitionRule, data, "rules[0]"))


@pytest.mark.quick
def test_template_text_in_a_rule_is_inserted_as_data() -> None:
    from envace_jax.worldbook.rulebook import compile_rules
    from envace_jax.worldbook.state import freeze, state_from_json
    from envace_jax.worldbook.terms import Scope

    rule = R.TransitionRule(
        "r", "echo", observation_template="{action.arguments.text} {0.__class__} {state.world.secret.__class__}"
    )
    scope = Scope(state_from_json({"secret": {"__class__": "s"}}).root, freeze({"text": "{state.world.secret}"}))
    assert compile_rules([rule])["echo"].choose(scope).text == "{state.world.secret} {0.__class__} s"


@pytest.mark.quick
def test_a_model_s_malformed_invariants_are_repaired_and_a_stored_one_is_named() -> None:
    from envace_jax.worldbook.harness import Harness
    from envace_jax.worldbook.induce import _decode_rules

    for bad in (3, {"description": "d", "condition": {"left": {"$nope": 1}}}, {"description": "d", "condition": []}):
        with pytest.raises(R.RecordError, match="invariant"):
            _decode_rules("pay", {"rules": [], "invariants": [bad]}, {})
    with pytest.raises(R.RecordError, match="invariant i-7"):
        Harness(Worldbook(invariants=(R.Invariant("i-7", "d", {"left": {"$nope": 1}}),)))
