"""Warm-start rows for self-evaluation and memory, and what is read back from answers."""

from __future__ import annotations

import random

import pytest

from envace_jax.datasets.records import Task
from envace_jax.test_time.memory import Evaluation, Rehearsed, Reviewer
from envace_jax.test_time.targets import difference, flawed_messages, remembered, review_rows, turns_of
from envace_jax.text.transcript import Message, Role, ToolCall
from tests.test_time.conftest import CFG, TOOLS

pytestmark = pytest.mark.quick


def dialogue(*orders: int) -> tuple[Message, ...]:
    out = [Message("user", "Cancel 11 and 12.")]
    for order in orders:
        out.append(Message("assistant", "", None, (ToolCall("cancel_order", {"order": order}),)))
        out.append(Message("tool", '{"status": "cancelled"}'))
    return (*out, Message("assistant", "Done."))


def test_rows_teach_what_is_asked_at_test_time(chat):
    task = Task("t", "desk", dialogue(11, 12), TOOLS, ())
    rows = review_rows(task, chat, CFG, random.Random(0), flawed=dialogue(11, 11))
    assert all(row.role is Role.ACT for row in rows[:3])
    # REHEARSE answers every call once, the first from a prompt that does not hold its result.
    rehearsed = [row for row in rows if row.role is Role.REHEARSE]
    first = [i for i, sampled in zip(rehearsed[0].ids, rehearsed[0].sampled) if not sampled]
    assert len(rehearsed) == 2 and "cancelled" not in chat.tokenizer.decode(first)
    said = []
    for row in [row for row in rows if row.role is Role.ACT]:
        ids = [i for i, sampled in zip(row.ids, row.sampled) if sampled]
        assert ids[-1] == chat.tokenizer.eos_id
        said.append(chat.tokenizer.decode(ids))
    twelve = '{"name": "cancel_order", "arguments": {"order": 12}}'
    eleven = twelve.replace("12", "11")
    assert said[0].startswith("good") and said[1].startswith(f"bad\nalso {twelve}\nnot {eleven}")
    assert said[2].startswith(f"{eleven}\n{twelve}")
    # the prompt of a learnt evaluation is the very prompt that is asked at test time
    reviewer = Reviewer(chat, compact=True, max_input_tokens=CFG.max_input_tokens)
    good, bad = turns_of(task.messages), turns_of(dialogue(11, 11))
    for row, turns in zip(rows, (good, bad)):
        prompt = reviewer.evaluation_prompt(turns)
        assert list(row.ids[: len(prompt)]) == prompt and not any(row.sampled[: len(prompt)])
    act = chat.tokenizer.decode([row for row in rows if row.role is Role.ACT][-1].ids)
    assert "Cancel 11 and 12.\nmemory\n" in act and "Done." in act
    assert len(rows) >= 4  # a fork of the ledger is a row of its own


def test_a_dialogue_is_flawed_by_leaving_out_repeating_or_a_digit():
    task = Task("t", "desk", dialogue(11, 12), TOOLS, ())
    seen = set()
    for seed in range(40):
        flawed = flawed_messages(task, random.Random(seed))
        (right,), (wrong,) = turns_of(task.messages), turns_of(flawed)
        seen.add(tuple(line.split()[0] for line in difference(right, wrong).split("\n")))
        assert flawed[-1] == task.messages[-1]
    assert seen == {("also",), ("not",), ("also", "not")}
    assert flawed_messages(Task("t", "desk", task.messages[:1], TOOLS, ()), random.Random(0)) is None


def test_an_altered_digit_is_altered_in_the_results_too():
    messages = (
        Message("user", "Cancel B-7."),
        Message("assistant", "", None, (ToolCall("cancel_order", {"order": "B-7", "sure": True}),)),
        Message("tool", '{"cancelled": "B-7"}'),
        Message("assistant", "Done."),
    )
    task = Task("t", "desk", messages, TOOLS, ())
    found = [flawed_messages(task, random.Random(seed)) for seed in range(40)]
    altered = {m[1].tool_calls[0].arguments["order"] for m in found if len(m) == 4}
    assert altered and altered <= {f"B-{d}" for d in "12345689"}
    for m in found:
        if len(m) == 4:
            order = m[1].tool_calls[0].arguments
            assert order["sure"] is True and m[2].content == f'{{"cancelled": "{order["order"]}"}}'


def test_what_stands_under_a_message_is_sometimes_wrong_and_act_is_right(chat):
    task = Task("t", "desk", dialogue(11, 12), TOOLS, ())
    eleven = '{"name": "cancel_order", "arguments": {"order": 11}}'
    notes = {"right": 0, "flawed": 0, "told": 0}
    for seed in range(60):
        rows = review_rows(task, chat, CFG, random.Random(seed), flawed=dialogue(11, 11))
        rows = [row for row in rows if row.role is Role.ACT]
        text = chat.tokenizer.decode(rows[-1].ids)
        under = text.partition("\nmemory\n")[2]
        kind = "right" if under.startswith(f"{eleven}\n{eleven.replace('11', '12')}") else "told"
        kind = "flawed" if under.startswith(f"{eleven}\n{eleven}") else kind
        notes[kind] += 1
        learnt = "".join(
            chat.tokenizer.decode([i for i, sampled in zip(row.ids, row.sampled) if sampled])
            for row in rows[3:]  # after two evaluations and a memory
        )
        assert eleven.replace("11", "12") in learnt and "also" not in learnt
    assert all(abs(notes[kind] - 60 * share) <= 12 for kind, share in (("right", 0.6), ("flawed", 0.2), ("told", 0.2)))


def test_the_warm_start_shows_them(chat):
    from envace_jax.learning.warmstart import reviews

    task = Task("t", "desk", dialogue(11, 12), TOOLS, ())
    rows = reviews(task, chat, CFG, random.Random(1))
    assert len(rows) >= 4 and all(row.sampled.any() and len(row.ids) == len(row.role) for row in rows)


def test_differences_are_of_calls_alone():
    (right,), (same,) = turns_of(dialogue(11, 12)), turns_of(dialogue(12, 11))
    assert difference(right, same) == ""
    (nothing,) = turns_of((Message("user", "?"), Message("assistant", "No.")))
    assert remembered(nothing) == "no call"
    assert difference(nothing, right).count("not ") == 2


@pytest.mark.parametrize("compact", [True, False])
def test_answers_are_read_back(chat, compact):
    reviewer = Reviewer(chat, compact=compact, max_input_tokens=500)
    for evaluation in (Evaluation(1.0), Evaluation(0.0, "", "also x")):
        assert reviewer.read_evaluation(reviewer.evaluation_answer(evaluation)) == evaluation
    for text in ("", "fine", '{"score": "1"}', '{"score": 7}', '{"score": NaN}', "{" * 5000, '{"a": 1}'):
        assert reviewer.read_evaluation(text).score is None
    said = "<think>\nhm {\n</think>\n\n"
    if not compact:
        read = reviewer.read_evaluation(said + 'So: {"x": 1} {"score": true, "assessment": "a", "advice": "b"} end')
        assert read == Evaluation(1.0, "a", "b")


@pytest.mark.parametrize("compact", [True, False])
def test_prompts_keep_their_limit_and_the_newest(chat, compact):
    turns = turns_of(dialogue(*range(11, 31)))
    for limit in (400, 900):
        reviewer = Reviewer(chat, compact=compact, max_input_tokens=limit if compact else limit + 800)
        many = [Rehearsed(turns, Evaluation(0.0, "", f"advice {k}")) for k in range(4)]
        ids = reviewer.memory_prompt(many, 64)
        assert len(ids) < reviewer.max_input_tokens
        assert "advice 3" in chat.tokenizer.decode(ids)
    assert reviewer.within("one line\n" * 100, 20).count("\n") < 20
    assert len(chat.tokenizer.encode_data(reviewer.within("word " * 400, 30))) <= 30
    assert reviewer.attach("Hi.", "  \n ") == "Hi."
