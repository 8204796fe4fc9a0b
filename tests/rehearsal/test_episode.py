"""The state machine, table by table: every end, every code, every option."""

from __future__ import annotations

import dataclasses
import json

import pytest

from envace_jax.config import UserError
from envace_jax.rehearsal import episode
from envace_jax.rehearsal.episode import Done, Need, NeedVerdicts, Phase, Setting
from envace_jax.rehearsal.grounding import NoGrounding
from envace_jax.rehearsal.settings import EpisodeConfig
from envace_jax.rewards.judge import JudgeResult, RuleJudge
from envace_jax.text.chat import ChatFormat
from envace_jax.text.transcript import Role
from tests.rehearsal.helpers import ACT_SCRIPT, REHEARSE_SCRIPT, answer, call_text, item, make_task, play

pytestmark = pytest.mark.quick

LOOK = call_text("get_order", order_id="A1")
CANCEL = call_text("cancel_order", order_id="A1")
OPEN, CANCELLED = answer({"id": "A1", "status": "open"}), answer({"id": "A1", "status": "cancelled"})
DONE = "A1 is cancelled."
SECOND = (call_text("get_order", order_id="A2"), "A2 is sent.")
SENT = answer({"id": "A2", "status": "sent"})
REFUSED = answer({"error_tool_call": {"code": "TOOL_NOT_AVAILABLE", "message": "no"}})


def test_the_plain_course(chat):
    phases = []
    played = play(make_task(), chat, watch=lambda state, need: phases.append(state.phase))
    assert phases == [
        *(Phase.ACT, Phase.REHEARSE, Phase.REHEARSE, Phase.ACT, Phase.VERDICTS),
        *(Phase.ACT, Phase.REHEARSE, Phase.ACT, Phase.VERDICTS, Phase.DONE),
    ]
    assert (played.reward, played.turn_scores, played.end_reason) == (1.0, (1.0, 1.0), "completed")
    assert played.masked_cause is None and played.error_codes == ()
    assert [len(step.output.calls) for turn in played.transcript for step in turn.steps] == [2, 0, 1, 0]
    texts = [o.text for turn in played.transcript for step in turn.steps for o in step.observations]
    assert texts == [
        '{"id": "A1", "status": "open"}',
        '{"id": "A1", "status": "cancelled"}',
        '{"id": "A2", "status": "sent"}',
    ]
    # first turn: C0 passes at its last step, C1 too; the table is [variant][turn][item][step]
    assert played.verdicts == ((((False, True), (False, True)), ((False, True),)),)
    assert played.counters["act_outputs"] == 4 and played.counters["observations_rehearsed"] == 3


# What ACT and REHEARSE write, under which options -> end, reward, codes, sources of the observations.
# Turn 1 is worth 1/2 in all; when a fault does not end the episode, the rest is played to its good end.
REST_ACT, REST_REHEARSE = (DONE, *SECOND), (SENT,)
CASES = {
    "malformed, observed": (
        ("<tool_call>\n{bad\n</tool_call>", LOOK + CANCEL, *REST_ACT), (OPEN, CANCELLED, *REST_REHEARSE), {},
        "completed", 1.0, ("act:JSON_DECODE_ERROR",), ("error", "rehearsed", "rehearsed", "rehearsed")),
    "malformed, terminates": (
        ("<tool_call>\n{bad\n</tool_call>",), (), {"on_invalid_call": "terminate"},
        "invalid_call", 0.0, ("act:JSON_DECODE_ERROR",), ("error",)),
    "malformed, left to REHEARSE": (
        ("<tool_call>\n{bad\n</tool_call>", CANCEL, *REST_ACT), (REFUSED, CANCELLED, *REST_REHEARSE), {"checks": ()},
        "completed", 1.0, ("act:JSON_DECODE_ERROR", "act:TOOL_NOT_AVAILABLE"), ("rehearsed",) * 3),
    "never closed": (
        ("<tool_call>\n{}", CANCEL, *REST_ACT), (CANCELLED, *REST_REHEARSE), {},
        "completed", 1.0, ("act:NO_TOOL_CALL_FOUND",), ("error", "rehearsed", "rehearsed")),
    "no arguments": (
        ('<tool_call>\n{"name": "get_order"}\n</tool_call>', CANCEL, *REST_ACT), (CANCELLED, *REST_REHEARSE), {},
        "completed", 1.0, ("act:NO_ARGUMENTS",), ("error", "rehearsed", "rehearsed")),
    "no name": (
        ('<tool_call>\n{"name": " ", "arguments": {}}\n</tool_call>', CANCEL, *REST_ACT), (CANCELLED, SENT), {},
        "completed", 1.0, ("act:INVALID_TOOL_NAME",), ("error", "rehearsed", "rehearsed")),
    "fabricated response": (
        (LOOK + OPEN, CANCEL, *REST_ACT), (CANCELLED, *REST_REHEARSE), {},
        "completed", 1.0, ("act:FABRICATED_RESPONSE",), ("error", "rehearsed", "rehearsed")),
    "lenient keeps the good call": (
        ("<tool_call>\n{bad\n</tool_call>\n" + CANCEL, *REST_ACT), (CANCELLED, *REST_REHEARSE), {"parser": "lenient"},
        "completed", 1.0, ("act:JSON_DECODE_ERROR",), ("rehearsed", "rehearsed")),
    "unknown tool, observed": (
        (call_text("fly") + CANCEL, *REST_ACT), (CANCELLED, *REST_REHEARSE), {},
        "completed", 1.0, ("act:TOOL_NOT_AVAILABLE",), ("error", "rehearsed", "rehearsed")),
    "unknown tool ends it before its sibling is rehearsed": (
        (CANCEL + call_text("fly"),), (), {"on_invalid_call": "terminate"},
        "invalid_call", 0.0, ("act:TOOL_NOT_AVAILABLE",), ("error",)),
    "unknown tool, not checked": (
        (call_text("fly") + CANCEL, *REST_ACT), (REFUSED, CANCELLED, *REST_REHEARSE), {"checks": ("format", "schema")},
        "completed", 1.0, ("act:TOOL_NOT_AVAILABLE",), ("rehearsed",) * 3),
    "arguments against the schema": (
        (call_text("get_order", order_id=7) + CANCEL, *REST_ACT), (CANCELLED, *REST_REHEARSE), {},
        "completed", 1.0, ("act:SCHEMA_VALIDATION_FAILED",), ("error", "rehearsed", "rehearsed")),
    "arguments, not checked": (
        (call_text("get_order", order_id=7) + CANCEL, *REST_ACT), (OPEN, CANCELLED, *REST_REHEARSE),
        {"checks": ("format", "whitelist")}, "completed", 1.0, (), ("rehearsed",) * 3),
    "exact records": (
        ACT_SCRIPT, (), {"checks": ("format", "whitelist", "schema", "exact")},
        "completed", 1.0, (), ("recorded",) * 3),
    "rehearsed refusal, observed": (
        (LOOK, CANCEL, *REST_ACT), (REFUSED, CANCELLED, *REST_REHEARSE), {},
        "completed", 1.0, ("act:TOOL_NOT_AVAILABLE",), ("rehearsed",) * 3),
    "rehearsed refusal with a code of its own, terminates": (
        (LOOK + CANCEL,), (answer({"error_tool_call": {"code": "ODD"}}),), {"on_invalid_call": "terminate"},
        "invalid_call", 0.0, ("act:REHEARSED_ERROR",), ("rehearsed",)),
    "an error of the tool itself is a result": (
        (LOOK, CANCEL, *REST_ACT), (answer({"error": "NOT_FOUND"}), CANCELLED, *REST_REHEARSE),
        {"on_invalid_call": "terminate"}, "completed", 1.0, (), ("rehearsed",) * 3),
    "no answer tag": (
        (LOOK + CANCEL, *REST_ACT), ("open", CANCELLED, *REST_REHEARSE), {},
        "completed", 1.0, ("rehearse:NO_EXECUTION_RESULT_TAG_FOUND",), ("error", "rehearsed", "rehearsed")),
    "empty answer": (
        (LOOK + CANCEL, *REST_ACT), ("", CANCELLED, *REST_REHEARSE), {},
        "completed", 1.0, ("rehearse:EMPTY_SIMULATOR_OUTPUT",), ("error", "rehearsed", "rehearsed")),
    "unclosed answer": (
        (LOOK + CANCEL, *REST_ACT), ("<tool_response>\n{}", CANCELLED, *REST_REHEARSE), {},
        "completed", 1.0, ("rehearse:EXECUTION_RESULT_TAG_MALFORMED",), ("error", "rehearsed", "rehearsed")),
    "answer is no JSON": (
        (LOOK + CANCEL, *REST_ACT), ("<tool_response>open</tool_response>", CANCELLED, *REST_REHEARSE), {},
        "completed", 1.0, ("rehearse:SIMULATOR_JSON_DECODE_ERROR",), ("error", "rehearsed", "rehearsed")),
    "answer of the wrong type": (
        (LOOK + CANCEL, *REST_ACT), (answer(3), CANCELLED, *REST_REHEARSE), {"objects_only": True},
        "completed", 1.0, ("rehearse:INVALID_EXECUTION_RESULT_TYPE",), ("error", "rehearsed", "rehearsed")),
    "a number is a result": (
        (LOOK + CANCEL, *REST_ACT), (answer(3), CANCELLED, *REST_REHEARSE), {},
        "completed", 1.0, (), ("rehearsed",) * 3),
    "answer cut off": (
        (LOOK + CANCEL, *REST_ACT), ((OPEN, "length"), CANCELLED, *REST_REHEARSE), {},
        "completed", 1.0, ("rehearse:REHEARSAL_TRUNCATED",), ("error", "rehearsed", "rehearsed")),
    "bad answer terminates": (
        (LOOK + CANCEL,), ("open",), {"on_invalid_rehearsal": "terminate"},
        "invalid_rehearsal", 0.0, ("rehearse:NO_EXECUTION_RESULT_TAG_FOUND",), ("error",)),
    "other tag": (
        ACT_SCRIPT, tuple(text.replace("tool_response", "execution_result") for text in REHEARSE_SCRIPT),
        {"rehearse_tag": "execution_result"}, "completed", 1.0, (), ("rehearsed",) * 3),
    "cut-off ACT output keeps earlier credit": (
        (LOOK + CANCEL, DONE, ("thinking aloud", "length")), (OPEN, CANCELLED), {},
        "truncated", 0.5, ("act:OUTPUT_TRUNCATED",), ("rehearsed",) * 2),
    "cap on ACT outputs": (
        (LOOK, LOOK, LOOK), (OPEN, OPEN, OPEN), {"max_acts": 3}, "max_acts", 0.0, (), ("rehearsed",) * 3),
    "cap on ACT outputs, looked at between turns": (
        (LOOK, LOOK, LOOK, CANCEL, DONE), (OPEN, OPEN, OPEN, CANCELLED), {"max_acts": 3, "cap_acts": "between_turns"},
        "max_acts", 0.5, (), ("rehearsed",) * 4),
    "cap on segments before ACT": (
        (LOOK, LOOK), (OPEN, OPEN), {"max_segments": 4}, "max_segments", 0.0, (), ("rehearsed",) * 2),
    "cap on segments before REHEARSE": (
        (LOOK + CANCEL,), (OPEN,), {"max_segments": 2}, "max_segments", 0.0, (), ("rehearsed",)),
    "caps reached at the end do not matter": (
        ACT_SCRIPT, REHEARSE_SCRIPT, {"max_acts": 4, "max_segments": 7}, "completed", 1.0, (), ("rehearsed",) * 3),
    "the checklist votes to stop": (
        (LOOK, DONE), (OPEN,), {}, "vote", 0.25, (), ("rehearsed",)),
    "an empty reply ends the turn": (
        (LOOK + CANCEL, ""), (OPEN, CANCELLED), {}, "completed", None, (), ("rehearsed",) * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("context", ["stateless", "stream"])
def test_ends_and_codes(chat, name, context):
    act, rehearse, options, end, reward, codes, sources = CASES[name]
    if reward is None:  # the second turn fails as well
        act, rehearse, reward = (*act, ""), rehearse, 0.25
    played = play(make_task(), chat, act, rehearse, context=context, **options)
    assert (played.end_reason, played.reward, played.error_codes) == (end, reward, codes)
    found = tuple(o.source for turn in played.transcript for step in turn.steps for o in step.observations)
    assert found == sources
    assert len(played.segments) == sum(s.finish in ("stop", "length") for s in played.segments)


def test_every_script_was_used_up(chat):
    """None of the outputs of the table may be left over, or a case shows less than it says."""
    for act, rehearse, options, *_ in CASES.values():
        act = (*act, "") if options == {} and act[-1] == "" else act
        played = play(make_task(), chat, act, rehearse, **options)
        roles = [segment.role for segment in played.segments]
        assert (roles.count(Role.ACT), roles.count(Role.REHEARSE)) == (len(act), len(rehearse))


def test_error_observations_are_shown_to_the_model(chat):
    played = play(make_task(), chat, (call_text("fly") + CANCEL, *REST_ACT), (CANCELLED, SENT))
    first = played.transcript[0].steps[0].observations[0]
    error = json.loads(first.text)["error_tool_call"]
    assert error["code"] == "TOOL_NOT_AVAILABLE" and "get_order" in error["message"]
    assert first.text in chat.tokenizer.decode(played.rows[0].ids)


def test_context_limit(chat):
    prompts = []
    play(
        make_task(), chat, watch=lambda state, need: prompts.append(need.prompt_ids) if isinstance(need, Need) else None
    )
    limit = len(prompts[0]) + 1  # enough for the first output, not for what follows
    options = {"max_input_tokens": limit, "rehearse_prompt": "compact"}
    played = play(make_task(), chat, (LOOK + CANCEL,), (OPEN, CANCELLED), **options)
    assert (played.end_reason, played.error_codes) == ("length", ("act:LENGTH_EXCEEDED",))
    played = play(make_task(), chat, (), (), max_input_tokens=20)
    assert (played.end_reason, played.reward, played.segments) == ("length", 0.0, ())


@pytest.mark.parametrize("context", ["stateless", "stream"])
def test_rehearse_prompt_that_cannot_be_trimmed_to_fit(chat, context):
    """The whole act row fits 900 tokens, REHEARSE's rules alone do not."""
    played = play(make_task(), chat, ACT_SCRIPT, (), max_input_tokens=900, context=context)
    assert played.error_codes == ("rehearse:REHEARSE_PROMPT_TOO_LONG",) * 2
    assert played.end_reason == "vote"  # the cancellation was never accepted
    ended = play(
        make_task(), chat, (LOOK,), (), max_input_tokens=900, on_invalid_rehearsal="terminate", context=context
    )
    assert ended.end_reason == "invalid_rehearsal"


def test_partial_turns_are_judged_on_request(chat):
    task = make_task(checklists=(((item("C0", {"kind": "call", "name": "cancel_order"}),), (item("C0", None),)),))
    act, rehearse = (LOOK + CANCEL, ("...", "length")), (OPEN, CANCELLED)
    assert play(task, chat, act, rehearse).turn_scores == (0.0, 0.0)
    judged = play(task, chat, act, rehearse, judge_partial_turns=True)
    assert (judged.turn_scores, judged.reward, judged.end_reason) == ((1.0, 0.0), 0.5, "truncated")
    # a turn without a single step has nothing to judge
    assert play(task, chat, (), (), max_input_tokens=20, judge_partial_turns=True).reward == 0.0


@pytest.mark.parametrize(
    ("dependence", "partial", "scores", "reward"),
    [
        (False, False, (0.5, 0.0), 0.25),  # EnvACE
        (False, True, (0.5, 0.6), 0.55),  # CM2
        (True, False, (0.0, 0.0), 0.0),  # the default
        (True, True, (0.0, 0.6), 0.3),
    ],
)
def test_the_published_scorings(chat, dependence, partial, scores, reward):
    """Turn 0 says what it did not do: C0 (the call, .5) fails, C1 (the reply, .5, depends on C0) passes. Turn 1 calls
    (C0, .6) and is cut off before it replies (C1, .4)."""
    call, told = {"kind": "call", "name": "get_order"}, {"kind": "reply", "contains": ["cancelled"]}
    first = (item("C0", call, weight=0.5), item("C1", told, weight=0.5, dependence=("C0",)))
    second = (item("C0", call, weight=0.6), item("C1", {"kind": "reply", "contains": ["sent"]}, weight=0.4))
    task, act = make_task(checklists=((first, second),)), (DONE, SECOND[0], ("A2 is", "length"))
    played = play(task, chat, act, (SENT,), dependence=dependence, judge_partial_turns=partial)
    assert played.turn_scores == pytest.approx(scores) and played.reward == pytest.approx(reward)
    assert played.end_reason == "truncated"


class SilentJudge:
    def judge(self, request):
        none = tuple(tuple((None,) * request.n_steps for _ in items) for items in request.items)
        causes = {
            (v, k, s): "outage" for v, items in enumerate(none) for k, row in enumerate(items) for s in range(len(row))
        }
        return JudgeResult(request.id, none, causes, {"requests": 2.0})


def test_no_verdict_masks(chat):
    played = play(make_task(), chat, ACT_SCRIPT[:2], REHEARSE_SCRIPT[:2], judge=SilentJudge())
    assert (played.reward, played.masked_cause, played.end_reason) == (None, "judge:outage", "judge")
    assert played.counters["judge_requests"] == 2 and played.counters["no_verdict_outage"] == 4
    assert (
        play(make_task(checklists=(((item("C0", None),), (item("C0", None),)),)), chat).masked_cause == "judge:no_rule"
    )


@pytest.mark.parametrize("finish", ["cancelled", "nan"])
def test_broken_segments_mask(chat, finish):
    played = play(make_task(), chat, (LOOK,), ((OPEN, finish),))
    assert (played.reward, played.masked_cause, played.end_reason) == (None, finish, "masked")
    assert played.segments[-1].finish == finish


def test_mask_in_every_phase(chat):
    states = []
    play(make_task(), chat, watch=lambda state, need: states.append(state))
    for state in states[:-1]:
        cut = episode.mask(state, "deadline")
        assert isinstance(episode.next_request(cut), Done)
        record = episode.trajectory(cut)
        assert (record.reward, record.masked_cause, record.end_reason) == (None, "deadline", "masked")
        assert sum(any(row.sampled) for row in record.rows) <= len(record.rows)


def test_without_checklist_or_judge(chat):
    empty = play(make_task(checklists=()), chat, (), ())
    assert (empty.end_reason, empty.masked_cause, empty.segments) == ("empty_checklist", "empty_checklist", ())
    free = play(make_task(checklists=()), chat, judged=False)
    assert (free.end_reason, free.masked_cause, free.reward) == ("completed", "not_judged", None)
    with pytest.raises(UserError, match="2 turns"):
        play(make_task(checklists=(((item("C0", None),),),)), chat)


def test_checklist_variants_vote_by_majority(chat):
    strict = make_task().checklists[0]
    loose = tuple((item("C0", {"kind": "reply", "excludes": ["never said"]}),) for _ in range(2))
    act, rehearse = (LOOK, DONE, *SECOND), (OPEN, SENT)
    played = play(make_task(checklists=(strict, loose)), chat, act, rehearse, max_checklists=2)
    assert played.end_reason == "completed"  # one of two is no majority
    assert played.turn_scores == (0.75, 1.0)
    assert play(make_task(checklists=(strict, loose)), chat, act[:2], rehearse[:1]).end_reason == "vote"


def test_parallel_calls_see_the_results_before_them(chat):
    prompts = []

    def watch(state, need):
        if isinstance(need, Need) and need.role is Role.REHEARSE:
            prompts.append(chat.tokenizer.decode(need.prompt_ids))

    play(make_task(), chat, grounding=NoGrounding(), watch=watch)
    assert '"status": "open"' not in prompts[0] and '"status": "open"' in prompts[1]
    assert prompts[1].index('"status": "open"') < prompts[1].rindex('"cancel_order"')


def test_need_verdicts_names_the_items_of_the_turn(chat):
    needs = []
    play(make_task(), chat, watch=lambda state, need: needs.append(need) if isinstance(need, NeedVerdicts) else None)
    assert [[[i.id for i in v] for v in need.items] for need in needs] == [[["C0", "C1"]], [["C0"]]]
    assert [len(need.transcript) for need in needs] == [1, 2]


def test_thinking_is_kept_from_rehearse_unless_asked(tokenizer):
    chat = ChatFormat(tokenizer, thinking=True)
    act = (f"<think>\nsecret plan\n</think>\n\n{LOOK}", DONE)
    for shown in (False, True):
        prompts = []

        def watch(state, need, prompts=prompts):
            if isinstance(need, Need) and need.role is Role.REHEARSE:
                prompts.append(tokenizer.decode(need.prompt_ids))

        play(make_task(), chat, act, (OPEN,), show_thinking=shown, watch=watch)
        assert ("secret plan" in prompts[0]) is shown


def test_config_tree_reads_into_the_records():
    from envace_jax.config import apply_preset, default_config
    from envace_jax.rehearsal.settings import RolloutConfig

    cfg = default_config()
    rollout = RolloutConfig.from_config(cfg, act_params="policy")
    assert rollout.episode == EpisodeConfig.from_config(cfg)
    assert rollout.episode.checks == ("format", "whitelist", "schema") and rollout.episode.max_input_tokens == 12000
    paper = default_config()
    with paper.unlocked():
        paper.preset = "reference_code"
    reference = EpisodeConfig.from_config(apply_preset(paper))
    assert reference.rehearse_tag == "execution_result" and reference.on_invalid_call == "terminate"
    assert (reference.cap_acts, reference.max_acts, reference.max_segments) == ("between_turns", 30, 200)


def test_states_are_values(chat):
    """A state can be gone on from twice, with different answers."""
    setting = Setting.make(chat, EpisodeConfig())
    state = episode.start(setting, make_task())
    before = dataclasses.astuple(dataclasses.replace(state, setting=None, task=None))
    one = episode.receive(state, [5, 6], [0.0, 0.0], "length")
    two = episode.receive(state, [7], [0.0], "length")
    assert one.rows[0].ids[:-2] == two.rows[0].ids[:-1] == state.rows[0].ids
    assert dataclasses.astuple(dataclasses.replace(state, setting=None, task=None)) == before
    assert RuleJudge().poll() == []
