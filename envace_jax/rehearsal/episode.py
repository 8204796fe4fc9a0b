"""The episode: a pure state machine from a task to a trajectory.

    ACT --calls--> settle each in order --all answered--> ACT
     |               | REHEARSE writes the answer, or an outside source does (OBSERVE)
     | no call
     v
    VERDICTS --> next user message --> ACT, or DONE

`start` gives the first state, `next_request` says what it waits for, and the `receive*` functions take the answer and
return the next state. Nothing here samples, judges, waits or keeps time. States, caps and error codes follow the
EnvACE reference where it is right; the options that reproduce it elsewhere are those of `EpisodeConfig`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from envace_jax.config import UserError
from envace_jax.datasets.cm2 import Task
from envace_jax.rehearsal.grounding import closest, exact_record
from envace_jax.rehearsal.ledger import Row, Segment, between
from envace_jax.rehearsal.prompts import Scene, call_block, call_text
from envace_jax.rehearsal.record import score, trajectory
from envace_jax.rehearsal.state import (
    END_REASONS,
    KNOWN_REHEARSED,
    LENGTH_EXCEEDED,
    REHEARSAL_TRUNCATED,
    REHEARSE_PROMPT_TOO_LONG,
    REHEARSED_ERROR,
    TOO_LONG,
    Done,
    EpisodeState,
    Need,
    NeedObservation,
    NeedVerdicts,
    Phase,
    Setting,
)
from envace_jax.rewards.checklist import votes_to_stop
from envace_jax.rewards.judge import JudgeResult
from envace_jax.text import tool_calls
from envace_jax.text.tool_schema import check_call
from envace_jax.text.transcript import Observation, Role, Step, ToolCall, Turn, canonical_json

__all__ = [
    "END_REASONS",
    "Done",
    "EpisodeState",
    "Need",
    "NeedObservation",
    "NeedVerdicts",
    "Phase",
    "Setting",
    "error_observation",
    "mask",
    "next_request",
    "receive",
    "receive_observation",
    "receive_verdicts",
    "scene",
    "start",
    "times_called",
    "trajectory",
]


def start(setting: Setting, task: Task, *, group: int = 0, member: int = 0) -> EpisodeState:
    """The first state of an episode.

    Raises:
        UserError: when the checklists do not have one turn a user message.
    """
    state = EpisodeState(setting, task, group, member)
    checklists = state.checklists
    if not task.user_turns or (setting.cfg.judged and not any(items for turns in checklists for items in turns)):
        return mask(state, "empty_checklist").but(end_reason="empty_checklist")
    if setting.cfg.judged and any(len(turns) != len(task.user_turns) for turns in checklists):
        raise UserError(f"task {task.uuid}: every checklist must have {len(task.user_turns)} turns, one a user message")
    head = Row(Role.ACT).context(setting.writer.act_head(task))
    return _want_act(state.but(rows=(head,), news=setting.writer.user_entry(task.user_turns[0])))


def next_request(state: EpisodeState) -> Need | NeedObservation | NeedVerdicts | Done:
    """What the state waits for."""
    cfg = state.setting.cfg
    if state.phase is Phase.ACT:
        row = state.rows[state.act_row]
        return Need(Role.ACT, row.ids, cfg.max_act_tokens, len(state.segments), state.act_row, True)
    if state.phase is Phase.REHEARSE:
        assert state.rehearse_row is not None
        row = state.rows[state.rehearse_row]
        stream = cfg.context == "stream"
        return Need(Role.REHEARSE, row.ids, cfg.max_rehearse_tokens, len(state.segments), state.rehearse_row, stream)
    if state.phase is Phase.OBSERVE:
        assert state.call is not None
        return NeedObservation(state.call)
    if state.phase is Phase.VERDICTS:
        turn = len(state.transcript) - 1
        return NeedVerdicts(state.transcript, tuple(turns[turn] for turns in state.checklists))
    return Done()


def mask(state: EpisodeState, cause: str) -> EpisodeState:
    """The episode cut short from outside: its trajectory has no reward and trains nothing."""
    ended = state.but(phase=Phase.DONE, end_reason="masked", masked_cause=cause)
    return _close_turn(ended) if state.steps or state.output is not None else ended


# --- a segment came in --------------------------------------------------------------------------------------------


def receive(
    state: EpisodeState, ids: Sequence[int], logprobs: Sequence[float], finish: str, experts: bytes = b""
) -> EpisodeState:
    """The sampled output of the role that the state waits for."""
    need = next_request(state)
    assert isinstance(need, Need), f"no segment is awaited in phase {state.phase}"
    ids, logprobs = tuple(ids), tuple(logprobs)
    chat = state.setting.chat
    stopped = finish == "stop" and ids and ids[-1] in chat.stop_ids
    text = chat.tokenizer.decode(ids[:-1] if stopped else ids)
    row = state.rows[need.row]
    segment = Segment(need.role, need.segment, ids, logprobs, finish, text, need.row, len(row), experts)
    state = _with_row(state, need.row, row.sample(ids, logprobs))
    state = state.but(segments=(*state.segments, segment))
    if finish in ("cancelled", "nan"):
        return mask(state, finish)
    return _receive_act(state, segment) if need.role is Role.ACT else _receive_rehearsal(state, segment)


def _receive_act(state: EpisodeState, segment: Segment) -> EpisodeState:
    cfg = state.setting.cfg
    truncated = segment.finish == "length"
    output = tool_calls.parse_assistant(segment.text, mode=cfg.parser, truncated=truncated)
    state = state.but(output=output, observations=(), pieces=())
    if truncated:
        return _end(_with_codes(state, Role.ACT, tool_calls.OUTPUT_TRUNCATED), "truncated")
    state = _with_codes(state, Role.ACT, *output.dropped)
    if output.error_code is not None:
        state = _with_codes(state, Role.ACT, output.error_code)
        if "format" not in cfg.checks and not state.setting.outside:
            return _want_rehearsal(state)
        return _after_invalid_call(state, output.error_code, output.error_message or "")
    if not output.calls:
        return _end_turn(state)
    if cfg.on_invalid_call == "terminate":  # nothing is rehearsed for an output that ends the episode anyway
        for call in output.calls:
            error = _check(state, call)
            if error is not None:
                return _after_invalid_call(_with_codes(state, Role.ACT, error.code), error.code, error.message)
    return _settle(state)


def _receive_rehearsal(state: EpisodeState, segment: Segment) -> EpisodeState:
    if segment.finish == "length":
        return _invalid_rehearsal(state, REHEARSAL_TRUNCATED, "the response was cut off at its length limit")
    parsed = tool_calls.parse_execution_result(segment.text, objects_only=state.setting.cfg.objects_only)
    if parsed.error_code is not None:
        return _invalid_rehearsal(state, parsed.error_code, parsed.message or "")
    code = rehearsed_error(parsed.value)
    spliced = _spliced(state.setting.chat.tokenizer, segment.ids, parsed.value_text)
    text = canonical_json(parsed.value) if spliced is None else parsed.value_text
    piece = text if spliced is None else spliced
    state = _observe(state, Observation(text, "rehearsed", code), piece)
    if code is not None:
        state = _with_codes(state, Role.ACT, code)
        if state.setting.cfg.on_invalid_call == "terminate":
            return _end(state, "invalid_call")
    return _settle(state)


def rehearsed_error(value: Any) -> str | None:
    """The code of a result that is an `error_tool_call` object, or None; unknown codes count as one."""
    if not isinstance(value, dict) or "error_tool_call" not in value:
        return None
    error = value["error_tool_call"]
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, str) and code in KNOWN_REHEARSED else REHEARSED_ERROR


def _spliced(tokenizer: Any, ids: tuple[int, ...], text: str) -> tuple[int, ...] | None:
    """The ids between single-token answer tags that hold `text`; None when there are none, or a tag is among them."""
    blocks = between(ids, tokenizer.token_id("<tool_response>"), tokenizer.token_id("</tool_response>"))
    # A tag inside would speak to the chat protocol from ACT's row: such an answer goes in as plain data instead.
    tags = set(tokenizer.tags.values())
    plain = (block for block in blocks if not tags & set(block))
    return next((block for block in plain if tokenizer.decode(block).strip(" \t\r\n") == text), None)


def _invalid_rehearsal(state: EpisodeState, code: str, message: str) -> EpisodeState:
    state = _observe(_with_codes(state, Role.REHEARSE, code), *_error(code, message))
    if state.setting.cfg.on_invalid_rehearsal == "terminate":
        return _end(state, "invalid_rehearsal")
    return _settle(state)


# --- settling calls -----------------------------------------------------------------------------------------------


def receive_observation(state: EpisodeState, observation: Observation) -> EpisodeState:
    """The outside source's answer to the call that the state waits for."""
    assert state.phase is Phase.OBSERVE, f"no observation is awaited in phase {state.phase}"
    if observation.error_code is not None:
        state = _with_codes(state, Role.ACT, observation.error_code)
    return _settle(_observe(state, observation, observation.text))


def _settle(state: EpisodeState) -> EpisodeState:
    """Answers calls in order until one needs REHEARSE or the outside source, or none is left."""
    output = state.output
    assert output is not None
    while len(state.observations) < len(output.calls):
        call = output.calls[len(state.observations)]
        error = _check(state, call)
        if error is not None:
            state = _observe(_with_codes(state, Role.ACT, error.code), *_error(error.code, error.message))
        elif (record := _recorded(state, call)) is not None:
            state = _observe(state, Observation(record, "recorded"), record)
        elif state.setting.outside:
            return state.but(phase=Phase.OBSERVE)
        else:
            return _want_rehearsal(state)
    step = Step(output, state.observations)
    pieces = state.setting.chat.observation_ids(state.pieces)
    state = state.but(steps=(*state.steps, step), output=None, observations=(), pieces=())
    return _want_act(_append(state, pieces, "observation"))


def _check(state: EpisodeState, call: ToolCall) -> Any:
    """The host's complaint about a call, or None. A call that is recorded as it stands needs no schema."""
    checks = [name for name in ("whitelist",) if name in state.setting.cfg.checks]
    if "schema" in state.setting.cfg.checks and _recorded(state, call) is None:
        checks += ["arguments", "schema"]
    return check_call(call, state.task.tools_at(state.turn), checks=tuple(checks)) if checks else None


def _recorded(state: EpisodeState, call: ToolCall) -> str | None:
    if "exact" not in state.setting.cfg.checks:
        return None
    record = exact_record(state.task, call, seen=times_called(state, call))
    return None if record is None else record.result


def times_called(state: EpisodeState, call: ToolCall) -> int:
    """How often the same call has been answered before in this episode."""
    answered = [c for turn in state.history for step in turn.steps for c in step.output.calls]
    answered += state.output.calls[: len(state.observations)] if state.output else ()
    return sum(c.name == call.name and c.arguments == call.arguments for c in answered)


def _after_invalid_call(state: EpisodeState, code: str, message: str) -> EpisodeState:
    state = _observe(state, *_error(code, message))
    return _end(state, "invalid_call") if state.setting.cfg.on_invalid_call == "terminate" else _settle(state)


def _want_rehearsal(state: EpisodeState) -> EpisodeState:
    """Opens REHEARSE's row for the current call, or continues the stream."""
    if len(state.segments) >= state.setting.cfg.max_segments:
        return _end(state, "max_segments")
    writer, cfg = state.setting.writer, state.setting.cfg
    asked = scene(state)
    examples = (writer.example(record) for record in asked.brief.examples)
    given = [*writer.late_tools(asked), *asked.brief.notes, *examples]
    row = state.rows[state.rehearse_row] if state.rehearse_row is not None else None
    if cfg.context == "stream" and row is not None:
        news = [*(text for text in given if text not in state.told), *state.news]
        # An answer that was cut off has no turn end of its own.
        eos = state.setting.chat.tokenizer.eos_id
        ids = (() if row.ids[-1] == eos else (eos,)) + writer.follow_up(news, asked.call)
        if len(row) + len(ids) < cfg.max_input_tokens:
            state = _with_row(state, state.rehearse_row, row.context(ids))
            told = state.told.union(given)
            return state.but(phase=Phase.REHEARSE, news=(), told=told)
    prompt = writer.prompt(asked)
    if prompt is None:
        return _invalid_rehearsal(state, REHEARSE_PROMPT_TOO_LONG, TOO_LONG)
    rows = (*state.rows, Row(Role.REHEARSE).context(prompt))
    told = frozenset(given)
    return state.but(phase=Phase.REHEARSE, rows=rows, rehearse_row=len(rows) - 1, news=(), told=told)


def scene(state: EpisodeState) -> Scene:
    """What a prompt for the current call is about.

    A stream is told what it cannot know from its own row: what users said and what others answered. When it begins
    anew because it became too long, it is told the whole conversation.
    """
    writer, cfg, output, call = state.setting.writer, state.setting.cfg, state.output, state.call
    assert output is not None
    brief = state.setting.grounding.brief(state.task, state, call or ToolCall("", {}))
    stream = cfg.context == "stream"
    if call is not None and not stream:
        limit = cfg.max_examples if cfg.max_examples >= 0 else 2 if writer.compact else 0
        brief = replace(brief, examples=closest(brief.examples, call, limit))
    first = stream and state.rehearse_row is None
    results = writer.results(output, state.observations) if output.calls else ()
    return Scene(
        task=state.task,
        brief=brief,
        entries=state.news if first else writer.entries(state.history),
        latest="" if stream else writer.latest(output),
        results=() if first else results,
        call=_call_piece(state),
        turn=state.turn,
    )


def _call_piece(state: EpisodeState) -> str | tuple[int, ...]:
    """The call to answer by the ids that ACT sampled for it, else as text."""
    output = state.output
    assert output is not None
    if not output.calls:
        return call_block(state.setting.writer.latest(output))
    call = state.call
    assert call is not None
    tokenizer = state.setting.chat.tokenizer
    sampled = next(segment for segment in reversed(state.segments) if segment.role is Role.ACT).ids
    blocks = between(sampled, tokenizer.token_id("<tool_call>"), tokenizer.token_id("</tool_call>"))
    same = [block for block in blocks if _says(tokenizer, block, call)]
    if not same:
        return call_block(call_text(call))
    earlier = sum(other == call for other in output.calls[: len(state.observations)])
    return same[min(earlier, len(same) - 1)]


def _says(tokenizer: Any, block: tuple[int, ...], call: ToolCall) -> bool:
    """Whether the ids of one block hold exactly this call, and no tag."""
    if set(block) & set(tokenizer.tags.values()):
        return False
    text = f"<tool_call>{tokenizer.decode(block)}</tool_call>"
    return tool_calls.parse_assistant(text).calls == (call,)


def _observe(state: EpisodeState, observation: Observation, piece: str | tuple[int, ...]) -> EpisodeState:
    """One more call answered. What REHEARSE did not write itself is news to its stream."""
    news = state.news
    if observation.source != "rehearsed":
        assert state.output is not None
        answered = len(state.observations)
        calls = state.output.calls[answered : answered + 1]
        part = replace(state.output, calls=calls)
        news = (*news, *state.setting.writer.results(part, [observation]))
    return state.but(observations=(*state.observations, observation), pieces=(*state.pieces, piece), news=news)


def error_observation(code: str, message: str) -> Observation:
    """What stands in the history for a call that got no result."""
    text = canonical_json({"error_tool_call": {"code": code, "message": message}})
    return Observation(text, "error", code)


def _error(code: str, message: str) -> tuple[Observation, str]:
    observation = error_observation(code, message)
    return observation, observation.text


# --- turns --------------------------------------------------------------------------------------------------------


def _want_act(state: EpisodeState) -> EpisodeState:
    cfg = state.setting.cfg
    if state.acts >= cfg.max_acts and (cfg.cap_acts == "always" or not state.steps):
        return _end(state, "max_acts")
    if len(state.segments) >= cfg.max_segments:
        return _end(state, "max_segments")
    if len(state.rows[state.act_row]) >= cfg.max_input_tokens:
        return _end(_with_codes(state, Role.ACT, LENGTH_EXCEEDED), "length")
    return state.but(phase=Phase.ACT)


def _end_turn(state: EpisodeState) -> EpisodeState:
    """ACT has replied: the turn is over and goes to the judge."""
    last = state.turn + 1 == len(state.task.user_turns)
    state = _close_turn(state)
    if state.setting.cfg.judged:
        return state.but(phase=Phase.VERDICTS, ending="completed" if last else None)
    return _finish(state, "completed") if last else next_turn(state)


def _end(state: EpisodeState, reason: str) -> EpisodeState:
    """The episode ends inside a turn, which scores nothing unless partial turns are judged."""
    state = _close_turn(state)
    cfg = state.setting.cfg
    if cfg.judged and cfg.judge_partial_turns and state.transcript[-1].steps:
        return state.but(phase=Phase.VERDICTS, ending=reason)
    return _finish(state, reason)


def _close_turn(state: EpisodeState) -> EpisodeState:
    """Moves the current turn, with what there is of its last step, into the transcript."""
    steps = state.steps
    if state.output is not None:
        steps = (*steps, Step(state.output, state.observations))
    turn = Turn(state.task.user_turns[state.turn], steps)
    return state.but(transcript=(*state.transcript, turn), steps=(), output=None, observations=(), pieces=())


def receive_verdicts(state: EpisodeState, result: JudgeResult) -> EpisodeState:
    """The judge's answer for the turn that has just ended."""
    assert state.phase is Phase.VERDICTS, f"no verdicts are awaited in phase {state.phase}"
    tables = state.verdicts or ((),) * len(state.checklists)
    verdicts = tuple((*table, turn) for table, turn in zip(tables, result.verdicts, strict=True))
    counts = Counter({f"judge_{name}": number for name, number in result.usage.items()})
    counts.update(f"no_verdict_{cause}" for cause in result.causes.values())
    counts.update(state.judged)
    state = state.but(verdicts=verdicts, judged=dict(counts))
    scored = score(state)
    if scored.turn_scores[len(state.transcript) - 1] is None:
        # No verdict is never a fail: the trajectory is masked, and going on would be wasted work.
        causes = Counter(result.causes.values())
        cause = causes.most_common(1)[0][0] if causes else "no_verdict"
        return state.but(phase=Phase.DONE, end_reason="judge", masked_cause=f"judge:{cause}")
    if state.ending is not None:
        return _finish(state, state.ending)
    items = [turns[state.turn] for turns in state.checklists]
    if votes_to_stop(items, result.verdicts, honour_dependence=state.setting.cfg.dependence):
        return _finish(state, "vote")
    return next_turn(state)


def next_turn(state: EpisodeState) -> EpisodeState:
    """The next user message goes into ACT's ledger, which forks where old thinking is dropped."""
    text = state.task.user_turns[state.turn + 1]
    state = state.but(turn=state.turn + 1, news=(*state.news, *state.setting.writer.user_entry(text)))
    return _want_act(_append(state, state.setting.chat.user_ids(text), "user"))


def _append(state: EpisodeState, ids: Sequence[int], boundary: str) -> EpisodeState:
    """Context for ACT's ledger, which forks first where the chat format drops thinking at such a boundary.

    Serving renders the conversation without it from here on, so the rows that are trained on must not have it either.
    """
    row = state.rows[state.act_row]
    keep = state.setting.chat.strip_thinking(row.ids, boundary)
    if sum(end - begin for begin, end in keep) == len(row):
        return _with_row(state, state.act_row, row.context(ids))
    forked = row.fork(keep).context(ids)
    return state.but(rows=(*state.rows, forked), act_row=len(state.rows))


def _finish(state: EpisodeState, reason: str) -> EpisodeState:
    cause = None if state.setting.cfg.judged else "not_judged"
    return state.but(phase=Phase.DONE, end_reason=reason, masked_cause=cause)


# --- small updates ------------------------------------------------------------------------------------------------


def _with_row(state: EpisodeState, index: int | None, row: Row) -> EpisodeState:
    assert index is not None
    return state.but(rows=(*state.rows[:index], row, *state.rows[index + 1 :]))


def _with_codes(state: EpisodeState, role: Role, *codes: str) -> EpisodeState:
    return state.but(error_codes=(*state.error_codes, *(f"{role}:{code}" for code in codes)))
