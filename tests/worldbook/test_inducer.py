"""Rules from traces alone: what the inducer finds in the bank, in a renamed bank, and in the quickstart desk."""

from __future__ import annotations

import random
from dataclasses import replace

import ledger
import pytest

from envace_jax.datasets.quickstart.generator import generate_tasks
from envace_jax.datasets.traces import TraceEpisode, TraceEvent, episode_from_task, make_episode
from envace_jax.worldbook.build import BuildConfig, build_worldbook
from envace_jax.worldbook.compile import replay_rules
from envace_jax.worldbook.store import Worldbook, rule_text

RENAMED = {"withdraw": "take_out", "deposit": "pay_in", "freeze": "lock", "balance": "look_up", "transfer": "move"}


@pytest.mark.parametrize("renamed", [False, True], ids=["bank", "renamed bank"])
def test_held_out_bank_transitions_are_answered_by_rules_and_never_wrongly(renamed: bool, bank_book: Worldbook) -> None:
    names, limit, minimum = (RENAMED, 275, 12) if renamed else (None, 500, 5)
    book = bank_book
    if renamed:
        book = build_worldbook(ledger.episodes(240, 1, names, limit, minimum), config=BuildConfig(folds=2))
        text = "\n".join(rule_text(r) for r in book.rules if r.action_type == "take_out")
        assert "arg.amount > 275" in text and "500" not in text
    count = replay_rules(book, ledger.episodes(150, 2, names, limit, minimum), floor=0.9)
    assert sum(count.wrong.values()) == 0, count.examples
    assert sum(count.right.values()) >= 0.95 * count.transitions, count.to_json()


def test_effects_that_no_answer_states_are_found(bank_book: Worldbook) -> None:
    effects = {
        (r.action_type, e.op, str(e.path[-1])) for r in bank_book.rules for e in r.effects if r.outcome == "success"
    }
    assert ("withdraw", "decrement", "balance") in effects
    assert ("deposit", "increment", "balance") in effects
    assert ("freeze", "set", "frozen") in effects
    moves = [e for r in bank_book.rules if r.action_type == "transfer" for e in r.effects]
    assert {e.op for e in moves} == {"increment", "decrement"}


@pytest.mark.quick
def test_held_out_quickstart_transitions_are_answered_by_rules_and_never_wrongly(desk_book: Worldbook) -> None:
    held_out = [episode_from_task(t) for t in generate_tasks("heldout", 300)]
    count = replay_rules(desk_book, held_out, floor=0.9)
    assert sum(count.wrong.values()) == 0, count.examples
    assert sum(count.right.values()) >= 0.95 * count.transitions, count.to_json()


def test_without_the_initial_state_the_share_handed_over_is_reported_and_nothing_is_wrong(
    desk_book: Worldbook,
) -> None:
    held_out = [episode_from_task(t) for t in generate_tasks("heldout", 150)]
    count = replay_rules(desk_book, held_out, floor=0.9, with_state=False)
    assert sum(count.wrong.values()) == 0
    assert count.to_json()["handed_over"] > 0.5 * count.transitions


def renamed_desk(count: int, split: str) -> list[TraceEpisode]:
    """The desk under other names, with a ceiling on refunds that it does not have: executed, not edited."""
    from envace_jax.datasets.quickstart.environment import QuickstartEnvironment

    verbs = {"get_order": "order_info", "refund_order": "give_back", "cancel_order": "call_off"}
    out = []
    for task in generate_tasks(split, count):
        rng = random.Random(task.uuid)
        environment = QuickstartEnvironment(task.meta["initial_state"])
        events = []
        for k, call in enumerate(task.recorded_calls):
            arguments = dict(call.arguments)
            if call.name == "refund_order":
                arguments["amount"] = rng.choice([10, 30, 35, 36, 40, 60, 90])
            before = environment.fork()
            value = environment.step(call.name, arguments)
            if call.name == "refund_order" and "error" not in value and arguments["amount"] > 35:
                environment, value = before, {"error": "ask a manager"}
            content = {"type": verbs.get(call.name, call.name), "arguments": arguments, "raw": ""}
            events.append(TraceEvent("agent", "action", content, {"call_id": f"{k}"}))
            events.append(TraceEvent("environment", "observation", value, {"call_id": f"{k}"}))
        out.append(
            make_episode(events, where=task.uuid, episode_id=task.uuid, initial_state=task.meta["initial_state"])
        )
    return out


@pytest.mark.long
def test_a_variant_of_the_desk_with_other_names_and_another_ceiling_passes_too() -> None:
    book = build_worldbook(renamed_desk(500, "train"), config=BuildConfig(folds=2))
    count = replay_rules(book, renamed_desk(200, "heldout"), floor=0.9)
    assert sum(count.wrong.values()) == 0, count.examples
    assert sum(count.right.values()) >= 0.95 * count.transitions, count.to_json()
    assert any("> 35" in rule_text(r) for r in book.rules if r.action_type == "give_back")


def test_a_rule_that_one_trace_contradicts_is_no_rule() -> None:
    episodes = ledger.episodes(120, 3)
    victim = next(e for e in episodes if any(v.kind == "observation" and "owner" in v.content for v in e.events))
    events = [
        replace(v, content='{"account": "A001", "owner": "eve", "balance": -1}')
        if v.kind == "observation" and '"balance"' in v.content
        else v
        for v in victim.events
    ]
    spoilt = [replace(victim, events=tuple(events)) if e is victim else e for e in episodes]
    book = build_worldbook(spoilt, config=BuildConfig(folds=2))
    assert not [r for r in book.rules if r.action_type == "balance" and r.outcome == "success"]
    assert [r for r in book.candidates if r.action_type == "balance" and r.outcome == "success"]
