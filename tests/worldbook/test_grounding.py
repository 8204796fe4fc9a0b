"""Grounding for training: nothing of a task's own group, in whatever place of the worldbook it stands."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_runtime import BOOK, FIELDS

from envace_jax.datasets.records import Task
from envace_jax.text.transcript import AssistantOutput, Observation, Step, ToolCall, Turn
from envace_jax.worldbook import records as R
from envace_jax.worldbook.baselines import StaticBlock
from envace_jax.worldbook.brief import make_brief
from envace_jax.worldbook.grounding import WorldbookGrounding
from envace_jax.worldbook.retrieve import Retriever
from envace_jax.worldbook.store import EvidenceItem, Worldbook
from envace_jax.worldbook.workspace import open_session

pytestmark = pytest.mark.quick

SECRET = "ZEBRA-7741"
OWN, OTHER = R.SourceRef("traces", "own", ("own.1",)), R.SourceRef("traces", "other", ("other.1",))
BOTH = (OWN, OTHER)


def planted() -> Worldbook:
    """A worldbook that has the secret of one group in every place where a build can put it, beside other sources."""
    render = {"status": {"$state": ["world", "orders", {"$arg": ["order"]}, "status"]}}
    order = {"left": {"$state": ["world", "orders", {"$arg": ["order"]}]}, "op": "exists"}
    seen = {"left": {"$arg": ["by"]}, "op": "in", "right": {"$const": ["ann", SECRET]}}
    place = {"left": {"$state": ["world", "orders", SECRET, "status"]}, "op": "exists"}
    plain = R.TransitionRule("plain", "look", f"as {SECRET} found", 0, (order, seen), render=render, confidence=0.95,
                             status="supported", provenance=BOTH)  # fmt: skip
    told = replace(plain, id="told", conditions=(order, {"left": {"$arg": ["by"]}, "op": "eq", "right": SECRET}))
    named = replace(plain, id="named", conditions=(order, place))
    writes = replace(
        plain, id="writes", action_type="mark", conditions=(order,), render={"ok": True},
        effects=(R.StateMutation("set", ["world", "orders", {"$arg": ["order"]}, "status"], SECRET),),
    )  # fmt: skip
    return replace(
        BOOK,
        actions=(R.ActionSpec("look", f"Looks, as {SECRET} does."), R.ActionSpec("mark")),
        state_fields=(*FIELDS, R.StateField(f'world.orders["{SECRET}"].status', "string")),
        rules=(plain, told, named, writes),
        invariants=(R.Invariant("i", f"never without {SECRET}", order, "warning", BOTH),),
        notes=(R.Note("n", "fact", f"look asks {SECRET} first", ("look",), status="supported", provenance=BOTH),),
        contracts=(R.RenderContract("c", ("look",), "json", required_fields=("status", SECRET),
                                    instructions=f"begins with {SECRET}", examples=(f'{{"by": "{SECRET}"}}',),
                                    provenance=BOTH),),
        demonstrations=(R.Demonstration("d", {"type": "look", "arguments": {}}, SECRET, "success", group="own"),),
        evidence=tuple(EvidenceItem(f"t-{group}", group, group, 0, "look", {"order": "1"},
                                    f'{{"by": "{by}", "status": "paid"}}')
                       for group, by in (("own", SECRET), ("other", "ann"))),
        episodes=tuple({"episode_id": e, "trajectory_group": e} for e in ("own", "other")),
    )  # fmt: skip


@pytest.mark.parametrize("gate", [True, False])
def test_what_one_group_alone_showed_is_told_to_every_other_and_never_to_itself(gate: bool) -> None:
    book = planted()
    retriever = Retriever(book, gate=gate)
    for exclude, leaks in (("own", False), ("", True)):
        session = open_session()
        found = retriever.retrieve(session, "look", {"order": "1", "by": "x"}, exclude=exclude)
        texts = [
            make_brief(book, session, "look", {"order": "1"}, found),
            StaticBlock(book).text(session, "look", {"order": "1"}, exclude),
            str(retriever.search_knowledge(f"look {SECRET} first paid", exclude=exclude)),
            str(retriever.visible_fields(exclude)),
        ]
        assert [SECRET in text for text in texts] == [leaks] * 4, exclude
    own = retriever.retrieve(open_session(), "look", {"order": "1"}, exclude="own")
    assert [r.id for r in own.rules] == ["plain"] and own.action is not None and not own.action.description


def test_grounding_keeps_the_secret_out_of_the_tracked_state_as_well() -> None:
    """A rule that the group must not see does not track its state: what it would have written is unknown there."""
    steps = [
        Step(AssistantOutput("", None, "", (ToolCall(name, {"order": "1"}),)), (Observation(text, "rehearsed"),))
        for name, text in (("look", '{"status": "paid"}'), ("mark", '{"ok": true}'))
    ]
    history = (Turn("", tuple(steps)),)
    call = ToolCall("look", {"order": "1", "by": "x"})
    for hint in (False, True):
        grounding = WorldbookGrounding(planted(), hint=hint)
        for uuid, leaks in (("own", False), ("other", True), ("third", True)):
            brief = grounding.brief(Task(uuid, "x", (), (), ()), history, call)
            assert (SECRET in "\n".join(brief.notes)) is leaks, uuid
        # Harnesses are shared: one without the hidden rules, one with all.
        assert len(grounding._harnesses) == 2


def test_a_long_history_that_was_never_seen_before_is_followed_turn_by_turn() -> None:
    turns = tuple(("look", '{"order": "1"}', '{"status": "paid"}') for _ in range(600))
    grounding = WorldbookGrounding(BOOK)
    session = grounding.session(Task("t", "x", (), (), ()), turns)
    assert session.turn == 600
    assert grounding.session(Task("t", "x", (), (), ()), (*turns, turns[0])).turn == 601
