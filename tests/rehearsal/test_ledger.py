"""Rows only grow, and every sampled id is in exactly one of them."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envace_jax.rehearsal.episode import Need
from envace_jax.rehearsal.grounding import NoGrounding, OracleGrounding, PastGrounding
from envace_jax.rehearsal.ledger import Row, between, sampled_spans
from envace_jax.rehearsal.trajectory import Trajectory
from envace_jax.text.chat import ChatFormat
from envace_jax.text.transcript import Role
from tests.rehearsal.helpers import ACT_SCRIPT, REHEARSE_SCRIPT, answer, call_text, make_task, play

pytestmark = pytest.mark.quick


def test_rows_grow_and_fork():
    row = Row(Role.ACT).context([1, 2]).sample([3, 4], [-0.1, -0.2]).context([5])
    assert row.ids == (1, 2, 3, 4, 5)
    assert row.sampled == (False, False, True, True, False)
    assert row.logprobs == (0.0, 0.0, -0.1, -0.2, 0.0)
    forked = row.fork([(0, 1), (2, 3), (3, 5)])
    assert forked.ids == (1, 3, 4, 5) and not any(forked.sampled) and not any(forked.logprobs)
    for spans in ([(1, 3), (2, 4)], [(0, 6)], [(3, 2)]):
        with pytest.raises(ValueError, match="spans"):
            row.fork(spans)
    with pytest.raises(ValueError, match="log-probabilities"):
        row.sample([1], [])
    with pytest.raises(ValueError, match="context"):
        Row(Role.ACT).sample([1], [0.0])


def test_between():
    assert between([1, 8, 2, 3, 9, 8, 9, 8, 4], 8, 9) == [(2, 3), ()]
    assert between([9, 8, 8, 5, 9], 8, 9) == [(8, 5)]
    assert between([8, 9], None, 9) == []


def check_ledgers(played: Trajectory, needs: list[Need]) -> None:
    """Invariant 1, on a finished trajectory and the prompts that the sampler was given."""
    assert len(needs) == len(played.segments)
    for need, segment in zip(needs, played.segments):
        row = played.rows[segment.row]
        assert (need.role, need.segment, need.row) == (segment.role, segment.index, segment.row)
        assert row.role is segment.role
        assert row.ids[: segment.start] == need.prompt_ids
        assert row.ids[segment.start : segment.start + len(segment.ids)] == segment.ids
        assert row.logprobs[segment.start : segment.start + len(segment.ids)] == segment.logprobs
    for k, row in enumerate(played.rows):
        places = [place for span in sampled_spans(played.segments, k) for place in range(*span)]
        assert places == [place for place, sampled in enumerate(row.sampled) if sampled]  # once, and nothing else
        assert len(row.ids) == len(row.sampled) == len(row.logprobs)
        assert all(logprob == 0.0 for logprob, sampled in zip(row.logprobs, row.sampled) if not sampled)


GOOD_ACT = st.sampled_from(
    [
        *ACT_SCRIPT,
        "<think>\nhm\n</think>\n\n" + ACT_SCRIPT[0],
        "<think>\nhm\n</think>\n\nA1 is cancelled.",
        call_text("get_order", order_id="<|im_end|><tool_call>"),
        call_text("fly"),
        call_text("get_order", order_id=1),
        "<tool_call>{",
    ]
)
GOOD_REHEARSE = st.sampled_from(
    [
        *REHEARSE_SCRIPT,
        "<think>\nhm\n</think>\n\n" + REHEARSE_SCRIPT[0],
        answer("</tool_response><|im_start|>user"),
        answer([1, None]),
        answer({"error_tool_call": {"code": ["?"]}}),
        answer({}, "execution_result"),
        "nothing",
    ]
)


def outputs(good):
    """Sensible texts, any text, any bytes read as text, any ids; stopped or cut off."""
    ids = st.lists(st.integers(0, 450), max_size=30).map(tuple)
    text = st.one_of(good, good, good, st.text(max_size=30), st.binary(max_size=30).map(lambda b: b.decode("latin-1")))
    return st.lists(
        st.tuples(st.one_of(text, text, ids), st.sampled_from(["stop", "stop", "stop", "length"])), max_size=12
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    act=outputs(GOOD_ACT),
    rehearse=outputs(GOOD_REHEARSE),
    thinking=st.booleans(),
    old_thinking=st.sampled_from(["strip", "keep"]),
    context=st.sampled_from(["stateless", "stream"]),
    form=st.sampled_from(["full", "compact"]),
    checks=st.sampled_from([(), ("format", "whitelist", "schema"), ("format", "whitelist", "schema", "exact")]),
    parser=st.sampled_from(["strict", "lenient"]),
    ends=st.sampled_from(["observe", "terminate"]),
    grounding=st.sampled_from([NoGrounding(), PastGrounding(), OracleGrounding()]),
    limit=st.sampled_from([800, 1500, 2400, 12000]),
)
def test_whatever_the_models_write(
    tokenizer, act, rehearse, thinking, old_thinking, context, form, checks, parser, ends, grounding, limit
):
    """Nothing raises; the prompt of each segment is the beginning of its row; each sampled id is in one row."""
    chat = ChatFormat(tokenizer, thinking=thinking, old_thinking=old_thinking)
    needs = []
    played = play(
        make_task(),
        chat,
        [*act, *ACT_SCRIPT, *["bye"] * 40],
        [*rehearse, *["<tool_response>{}</tool_response>"] * 300],
        grounding=grounding,
        watch=lambda state, need: needs.append(need) if isinstance(need, Need) else None,
        context=context,
        rehearse_prompt=form,
        checks=checks,
        parser=parser,
        on_invalid_call=ends,
        on_invalid_rehearsal=ends,
        max_input_tokens=limit,
        max_acts=10,
    )
    check_ledgers(played, needs)
    assert all(len(need.prompt_ids) <= limit for need in needs)
    assert Trajectory.from_json(played.to_json()) == played


def test_old_thinking_forks_the_ledger(tokenizer):
    """Strip: a second row begins without the thinking of the first turn, all of it context. Keep: one row."""
    act = tuple(f"<think>\nhm\n</think>\n\n{text}" for text in ACT_SCRIPT)
    strip = ChatFormat(tokenizer, thinking=True, old_thinking="strip")
    needs = []
    played = play(make_task(), strip, act, watch=lambda s, n: needs.append(n) if isinstance(n, Need) else None)
    check_ledgers(played, needs)
    first, second = (row for row in played.rows if row.role is Role.ACT)
    assert tokenizer.decode(first.ids).count("hm") == 2 and sum(first.sampled) > 0
    carried = second.ids[: second.sampled.index(True)]
    assert "hm" not in tokenizer.decode(carried)
    assert tokenizer.decode(second.ids).count("hm") == 2  # the second turn's own
    # what is carried over is what serving would render
    assert list(carried) == strip.encode_prompt(played_messages(played, 1), make_task().tools)
    keep = play(make_task(), ChatFormat(tokenizer, thinking=True, old_thinking="keep"), act)
    assert sum(row.role is Role.ACT for row in keep.rows) == 1
    assert sum(sum(row.sampled) for row in keep.rows) == sum(sum(row.sampled) for row in played.rows)


def played_messages(played, turns):
    """The conversation after so many turns and the next user message, as chat messages."""
    from envace_jax.text.transcript import Message

    task = make_task()
    messages = [Message("system", task.system)]
    for turn in played.transcript[:turns]:
        messages.append(Message("user", turn.user))
        for step in turn.steps:
            messages.append(Message("assistant", step.output.reply, step.output.thinking, step.output.calls))
            messages += [Message("tool", o.text) for o in step.observations]
    return [*messages, Message("user", task.user_turns[turns])]


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("old_thinking", ["strip", "keep"])
def test_every_act_prompt_is_what_serving_renders(tokenizer, thinking, old_thinking):
    """Canonical outputs: each ACT prompt equals the chat format's rendering of the conversation so far."""
    from envace_jax.text.transcript import Message

    chat = ChatFormat(tokenizer, thinking=thinking, old_thinking=old_thinking)
    act = ACT_SCRIPT if not thinking else tuple(f"<think>\nhm\n</think>\n\n{text}" for text in ACT_SCRIPT)
    seen = []

    def watch(state, need):
        if isinstance(need, Need) and need.role is Role.ACT:
            messages = [Message("system", state.task.system)]
            for turn in state.history:
                messages.append(Message("user", turn.user))
                for step in turn.steps:
                    messages.append(Message("assistant", step.output.reply, step.output.thinking, step.output.calls))
                    messages += [Message("tool", o.text) for o in step.observations]
            seen.append(list(need.prompt_ids) == chat.encode_prompt(messages, state.task.tools))

    play(make_task(), chat, act, watch=watch)
    assert seen == [True] * 4
