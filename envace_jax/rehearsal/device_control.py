"""Control on the device, seen from the host: what lies ready for it, and the check of what it played.

The rollout loop runs as it does over an engine. Episodes that begin are put into lanes of `sampling.automaton` and
played there to their end; what was sampled is then told to the loop segment by segment, when the episode asks for a
segment with exactly the prompt that the device sampled it from. Sampling keys name the segment, so trajectories are
those of host control. Where the episode asks for something else (the host settled a call, or ended the turn), or the
automaton could not decide, the rest of that episode is played by the engine; what the device sampled beyond is counted.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from envace_jax.config import UserError
from envace_jax.rehearsal.episode import EpisodeState, Setting
from envace_jax.rehearsal.prompts import PromptWriter, Scene
from envace_jax.rehearsal.settings import RolloutConfig
from envace_jax.sampling import automaton
from envace_jax.sampling.automaton import Stage
from envace_jax.sampling.engine import Completion, Engine, Request
from envace_jax.sampling.lanes import (
    ACT,
    COUNTERS,
    DONE,
    EMPTY,
    FRAME,
    GOING,
    HANDED,
    MAX_ACT,
    MAX_ROW,
    N_TAGS,
    NOBODY,
    REHEARSE,
    Lanes,
    Protocol,
    Sizes,
    empty_book,
    empty_lanes,
    empty_protocol,
)
from envace_jax.sampling.programs import FINISH, NAN
from envace_jax.sampling.sampler import request_key
from envace_jax.text.transcript import ToolCall

Name = tuple[int, int]
"""Group and member of a trajectory."""
REFILL = 0.125
"""Share of the lanes that must have ended before a program returns for more while episodes wait."""


@dataclass
class _Told:
    """What a lane sampled, as far as it has not been told."""

    segments: deque[tuple[int, int, int, str]]  # role, start, end, finish
    tokens: tuple[list[int], list[int]]
    logps: tuple[list[float], list[float]]
    heard: int = 0


@dataclass
class _Script:
    """What lies ready for a task: heads of both ledgers, and pieces; None where a lane has no room for it."""

    act_head: tuple[int, ...]
    rehearse_head: tuple[int, ...]
    store: list[int] = field(default_factory=list)
    user: np.ndarray = field(default_factory=lambda: np.zeros(0))
    lead: np.ndarray = field(default_factory=lambda: np.zeros(0))


def stage_for(engine: Engine, cfg: RolloutConfig) -> Stage:
    """The device programs for an engine and a configuration."""
    return Stage(engine.run, Sizes.of(engine.config, cfg.episode), engine.config.patience)


class DeviceControl:
    """Stands between the rollout loop and its engine, with the engine's interface and `begin`.

    Raises:
        UserError: when the configuration or the tokenizer asks for what the automaton does not do.
    """

    def __init__(self, engine: Engine, setting: Setting, cfg: RolloutConfig, step: int, seed: int) -> None:
        check(setting, cfg)
        self.engine, self.setting, self.cfg, self.step_number, self.seed = engine, setting, cfg, step, seed
        self.stage = stage_for(engine, cfg)
        sizes = self.sizes = self.stage.sizes
        self.lanes, self.book = empty_lanes(sizes), empty_book(sizes)
        self.protocol = _protocol(setting, cfg, engine.config.max_length)
        self.scripts = _Scripts(setting, sizes)
        self.main = self.stage.cache(sizes.lengths[0])
        self.names: list[Name | None] = [None] * sizes.lanes
        self.heads: list[tuple[tuple[int, ...], tuple[int, ...]] | None] = [None] * sizes.lanes
        self.waiting: deque[tuple[Name, _Script]] = deque()
        self.unplayed: set[Name] = set()
        self.held: dict[Name, tuple[int, Request]] = {}  # asked before it was played
        self.asked: dict[int, Name] = {}
        self.passed: dict[int, int] = {}  # the engine's number of a request, and ours
        self.told: dict[Name, _Told] = {}
        self.done: list[Completion] = []
        self.flying: tuple[Lanes, jax.Array] | None = None
        self._ids = itertools.count(-1, -1)

    # --- the engine's interface -----------------------------------------------------------------------------------

    @property
    def config(self) -> Any:
        return self.engine.config

    @property
    def idle(self) -> bool:
        return not (self.done or self.waiting or self.flying or self.held) and self.engine.idle

    def begin(self, state: EpisodeState) -> None:
        """An episode begins; it is played as soon as a lane is free."""
        script = self.scripts.of(state)
        if script is None:
            self._count("device_refused")
            return
        name = (state.group, state.member)
        self.waiting.append((name, script))
        self.unplayed.add(name)
        self.told[name] = _Told(deque(), ([], []), ([], []))

    def submit(self, request: Request) -> int:
        name = (request.key[2], request.key[3])
        if name not in self.told:
            return self.engine.submit(request)
        number = next(self._ids)
        self.asked[number] = name
        self.held[name] = number, request
        self._answer(name)
        return number

    def step(self) -> list[Completion]:
        """Takes up what the device has played, starts it anew and returns the segments that were asked for."""
        if self.flying is not None:
            self._collect()
        self._load()
        self._launch()
        done, self.done = self.done, []
        for completion in [] if self.engine.idle else self.engine.step():
            number = self.passed.pop(completion.request_id, None)
            done.append(completion if number is None else replace(completion, request_id=number))
        return done

    def cancel(self, request_id: int) -> None:
        name = self.asked.pop(request_id, None)
        if name is not None:
            del self.held[name]
            self._drop(name)
            return
        numbers = {number: at_engine for at_engine, number in self.passed.items()}
        self.engine.cancel(numbers.get(request_id, request_id))

    def release(self, affinity: Any) -> None:
        self.engine.release(affinity)

    def finish(self, state: EpisodeState) -> None:
        """The episode is over: what was played beyond its end is dropped."""
        self._drop((state.group, state.member))

    # --- lanes ----------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Puts waiting episodes into free lanes; heads that a lane holds already are copied, others prefilled once."""
        lanes = self.lanes
        for lane, name in enumerate(self.names):
            if name is not None and name not in self.unplayed:  # dropped while it was played
                self.names[lane], lanes.status[lane] = None, EMPTY
        holds = {heads: lane for lane, heads in enumerate(self.heads) if heads is not None}
        made: dict[Any, int] = {}
        before: list[tuple[int, int]] = []
        after: list[tuple[int, int]] = []
        for lane, occupant in enumerate(self.names):
            if occupant is not None or not self.waiting:
                continue
            name, script = self.waiting.popleft()
            heads = (script.act_head, script.rehearse_head)
            filled = True
            if heads in made:
                after.append((made[heads], lane))
            elif heads in holds:
                if self.heads[lane] != heads:
                    before.append((holds[heads], lane))
            else:
                made[heads], filled = lane, False
            self._place(lane, name, script, filled=filled)
        # What lanes held before this is read before any of it is overwritten.
        if before:
            self.main = self.stage.copy(self.main, before)
        if made:
            self._fit(max(sum(map(len, heads)) for heads in made))
            wanted = np.isin(np.arange(self.sizes.lanes), list(made.values()))
            params = self.engine.params(self.cfg.act_params)
            self.main, filled_lanes, counters = self.stage.prepare(params, self.main, lanes, wanted)
            self.lanes = Lanes(*jax.tree.map(np.array, filled_lanes))
            self._count_up(counters)
        if after:
            self.main = self.stage.copy(self.main, after)
        self.engine.count(tokens_reused=sum(int(self.lanes.used[lane]) for _, lane in before + after))

    def _place(self, lane: int, name: Name, script: _Script, *, filled: bool) -> None:
        lanes, book = self.lanes, self.book
        act, rehearse = script.act_head, script.rehearse_head
        sizes, caps = self.sizes, self.protocol.caps
        used = len(act) - 1 + len(rehearse)
        self.names[lane], self.heads[lane] = name, (act, rehearse)
        self._count("device_episodes")
        for role, ids in ((ACT, act), (REHEARSE, rehearse)):
            lanes.tokens[role][lane, : len(ids)] = ids
            lanes.logps[role][lane] = 0.0
            lanes.known[lane, role] = len(ids)
        lanes.valid[lane] = (len(act) - 1, len(rehearse)) if filled else (0, 0)
        lanes.owner[lane] = NOBODY
        if filled:
            lanes.owner[lane, : len(act) - 1] = ACT
            lanes.owner[lane, len(act) - 1 : used] = REHEARSE
        lanes.used[lane] = used if filled else 0
        lanes.status[lane], lanes.role[lane] = GOING, ACT
        lanes.n_turns[lane] = len(script.user)
        for counter in (lanes.turn, lanes.told, lanes.acts, lanes.n_segments, lanes.call, lanes.n_calls):
            counter[lane] = 0
        lanes.start[lane] = len(act)
        lanes.limit[lane] = min(caps[MAX_ACT], caps[MAX_ROW] - len(act))
        book.store[lane, : len(script.store)] = script.store
        book.user[lane, : len(script.user)] = script.user
        turns = len(script.user)
        book.lead[lane, : turns + 1, :turns] = script.lead
        group, member = name
        for segment in range(sizes.segments):
            for role in (ACT, REHEARSE):
                key = (self.seed, self.step_number, group, member, role, segment)
                book.keys[lane, segment, role] = request_key(self.engine.seed, key)

    def _fit(self, needed: int) -> None:
        """Makes the cache rows long enough for `needed` positions and every lane's next rounds."""
        lengths, fill = self.sizes.lengths, self.sizes.fill[1]
        for length in lengths:
            # With room for some rounds: else the program would be back at once for more.
            crowded = automaton.crowded(self.lanes, length - length // 8, self.sizes).any()
            if length == lengths[-1] or (length >= needed + fill and not crowded):
                break
        if length > self.main.length:
            self.main = self.stage.resize(self.main, length)

    def _launch(self) -> None:
        if not (self.lanes.status == GOING).any():
            return
        self._fit(0)
        enough = max(1, int(REFILL * self.sizes.lanes)) if self.waiting else self.sizes.lanes
        params = self.engine.params(self.cfg.act_params)
        self.main, lanes, counters = self.stage.play(
            params, self.main, self.lanes, self.book, self.protocol, self.cfg.device_steps, enough
        )
        self.flying = lanes, counters

    def _collect(self) -> None:
        """Waits for the program and takes up the lanes that have ended."""
        assert self.flying is not None
        (device_lanes, counters), self.flying = self.flying, None
        start = time.perf_counter()
        jax.block_until_ready(counters)
        self.engine.count(seconds_waiting=time.perf_counter() - start)
        self.lanes = lanes = Lanes(*jax.tree.map(np.array, device_lanes))
        self._count_up(counters)
        broken = []
        for lane, name in enumerate(self.names):
            if name is None:
                continue
            if name in self.told:
                self._hear(lane, self.told[name])
            if lanes.status[lane] in (DONE, HANDED):
                if lanes.status[lane] == HANDED:
                    self._count("device_handed_over")
                if lanes.segments[lane, max(0, lanes.n_segments[lane] - 1), 3] == NAN:
                    self._count("rows_nan")
                    self.heads[lane] = None
                    broken.append(lane)
                self.names[lane], lanes.status[lane] = None, EMPTY
                self.unplayed.discard(name)
            self._answer(name)
        if broken:
            self.main = self.stage.wipe(self.main, broken)

    def _hear(self, lane: int, told: _Told) -> None:
        """Notes the segments that have ended since the last time."""
        lanes = self.lanes
        for role, start, count, code in lanes.segments[lane, told.heard : lanes.n_segments[lane]].tolist():
            told.segments.append((role, start, start + count, FINISH[code]))
        told.heard = int(lanes.n_segments[lane])
        for role in (ACT, REHEARSE):
            new = slice(len(told.tokens[role]), lanes.known[lane, role])
            told.tokens[role].extend(lanes.tokens[role][lane, new].tolist())
            told.logps[role].extend(lanes.logps[role][lane, new].tolist())

    def _answer(self, name: Name) -> None:
        """Gives an episode the segment that it asked for, if that is what was played; else the engine samples it."""
        if name not in self.held:
            return
        told, (number, request) = self.told[name], self.held[name]
        if not told.segments and name in self.unplayed:
            return  # it is still to come
        del self.held[name], self.asked[number]
        if told.segments:
            role, start, end, finish = told.segments[0]
            tokens, logps = told.tokens[role], told.logps[role]
            if role == request.key[4] and tuple(tokens[:start]) == tuple(request.prompt_ids):
                told.segments.popleft()
                self._count("device_tokens_told", end - start)
                self.done.append(Completion(number, tuple(tokens[start:end]), tuple(logps[start:end]), finish))
                return
            self._count("device_diverged")
        self._drop(name)
        self.passed[self.engine.submit(request)] = number

    def _drop(self, name: Name) -> None:
        """Nothing more of what the device plays of this episode is wanted."""
        told = self.told.pop(name, None)
        if told is not None:
            self._count("device_tokens_dropped", sum(end - start for _, start, end, _ in told.segments))
        if name in self.unplayed:
            self.unplayed.discard(name)
            self.waiting = deque(item for item in self.waiting if item[0] != name)

    def _count(self, counter: str, n: int = 1) -> None:
        self.engine.count(**{counter: n})

    def _count_up(self, counters: jax.Array) -> None:
        counted = dict(zip(COUNTERS, np.asarray(counters).tolist()))
        iterations = counted.pop("iterations")
        self.engine.count(slot_iterations=iterations * self.sizes.lanes, chunks=1, **counted)


def check(setting: Setting, cfg: RolloutConfig) -> None:
    """Raises `UserError` for what device control does not do; the words are those of the configuration."""
    rules, chat = cfg.episode, setting.chat
    if rules.context != "stream":
        raise UserError(f"rollout.context='{rules.context}': rollout.control=device needs 'stream'")
    if rules.rehearse_tag != "tool_response":
        raise UserError(f"rollout.rehearse_tag='{rules.rehearse_tag}': rollout.control=device needs 'tool_response'")
    if chat.old_thinking != "keep":
        raise UserError(f"chat.old_thinking='{chat.old_thinking}': rollout.control=device needs 'keep'")
    if cfg.act_params != cfg.rehearse_params:
        raise UserError("learning.arm: rollout.control=device needs an arm whose roles share their parameters")
    missing = [tag for tag in TAGS if tag not in chat.tokenizer.tags]
    if missing:
        raise UserError(f"model.tokenizer: rollout.control=device needs {', '.join(missing)} as single tokens")
    if len(chat.tokenizer.tags) > N_TAGS:
        raise UserError(f"model.tokenizer: {len(chat.tokenizer.tags)} tags; rollout.control=device takes 32")


TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
THINK_TAGS = ("<think>", "</think>")


def _protocol(setting: Setting, cfg: RolloutConfig, max_length: int) -> Protocol:
    chat, rules = setting.chat, cfg.episode
    protocol = empty_protocol()
    one = chat.observation_ids([(-1,)])
    two = chat.observation_ids([(-1,), (-2,)])
    before, behind = one[: one.index(-1)], one[one.index(-1) + 1 :]
    between = two[two.index(-1) + 1 : two.index(-2)]
    _, after_call = ends(setting.writer)
    for i, ids in enumerate((before, between, behind, after_call)):
        if len(ids) > FRAME:
            raise UserError(f"chat: a piece of {len(ids)} tokens; rollout.control=device takes {FRAME}")
        protocol.frame[i, : len(ids)] = ids
        protocol.frame_lengths[i] = len(ids)
    ids = [chat.tokenizer.tags.get(tag, -1) for tag in (*TAGS, *THINK_TAGS)]
    protocol.tags[:] = ids
    protocol.all_tags[: len(chat.tokenizer.tags)] = list(chat.tokenizer.tags.values())
    protocol.stops[: len(chat.stop_ids)] = chat.stop_ids
    protocol.caps[:] = (
        rules.max_act_tokens,
        rules.max_rehearse_tokens,
        rules.max_input_tokens,
        max_length,
        rules.max_acts,
        rules.max_segments,
    )
    return protocol._replace(
        top_k=np.int32(cfg.top_k), temperature=np.float32(cfg.temperature), top_p=np.float32(cfg.top_p)
    )


def ends(writer: PromptWriter) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What stands before a call in a stream that has no news, and after it."""
    whole = writer.follow_up((), (-1,))
    at = whole.index(-1)
    return whole[:at], whole[at + 1 :]


class _Scripts:
    """Scripts of tasks, made once for all members of a group."""

    def __init__(self, setting: Setting, sizes: Sizes) -> None:
        self.setting, self.sizes = setting, sizes
        # Without a limit: a head that has to be trimmed is too long for a lane.
        self.writer = PromptWriter(setting.chat, replace(setting.cfg, max_input_tokens=1 << 30))
        self._last: tuple[Any, _Script | None] = (None, None)

    def of(self, state: EpisodeState) -> _Script | None:
        if self._last[0] is not state.task:
            self._last = state.task, self._make(state)
        return self._last[1]

    def _make(self, state: EpisodeState) -> _Script | None:
        task, sizes, setting = state.task, self.sizes, self.setting
        turns = len(task.user_turns)
        if turns > sizes.turns or not state.rows:
            return None
        news = [setting.writer.user_entry(text) for text in task.user_turns]
        given = [self._given(state, turn) for turn in range(turns)]
        after = len(ends(self.writer)[1])
        first = [self._first(state, turn, news[: turn + 1])[:-after] for turn in range(turns)]
        shared = _common(first)
        pieces = _Pieces(sizes)
        user = [(0, 0), *(pieces.add(setting.chat.user_ids(text)) for text in task.user_turns[1:])]
        lead = np.zeros((turns + 1, turns, 2), np.int32)
        for turn in range(turns):
            lead[0, turn] = pieces.add(first[turn][shared:])
            for told in range(turn + 1):
                seen = {text for texts in given[: told + 1] for text in texts}
                fresh = [text for text in given[turn] if text not in seen]
                said = [entry for entries in news[told + 1 : turn + 1] for entry in entries]
                piece = self.writer.follow_up([*fresh, *said], (-1,))
                lead[told + 1, turn] = pieces.add(piece[: piece.index(-1)])
        head = state.rows[state.act_row].ids
        room = setting.cfg.max_input_tokens
        if min(size for _, size in user) < 0 or len(head) >= room or shared >= room:
            return None
        return _Script(head, first[0][:shared], pieces.store, np.array(user, np.int32), lead)

    def _scene(self, state: EpisodeState, turn: int, entries: Sequence[str]) -> Scene:
        at = state.but(turn=turn)
        brief = self.setting.grounding.brief(state.task, at, ToolCall("", {}))
        return Scene(state.task, brief, tuple(entries), "", (), (), turn)

    def _first(self, state: EpisodeState, turn: int, news: Sequence[Sequence[str]]) -> tuple[int, ...]:
        entries = [entry for entries in news for entry in entries]
        prompt = self.writer.prompt(self._scene(state, turn, entries))
        assert prompt is not None
        return prompt

    def _given(self, state: EpisodeState, turn: int) -> list[str]:
        scene = self._scene(state, turn, ())
        examples = (self.writer.example(record) for record in scene.brief.examples)
        return [*self.writer.late_tools(scene), *scene.brief.notes, *examples]


class _Pieces:
    """Pieces of one lane, equal ones stored once; a piece without room has length -1."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.store: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}

    def add(self, ids: Sequence[int]) -> tuple[int, int]:
        ids = tuple(ids)
        if len(ids) > self.sizes.piece:
            return 0, -1
        if ids not in self._places:
            if len(self.store) + len(ids) > self.sizes.store:
                return 0, -1
            self._places[ids] = len(self.store)
            self.store.extend(ids)
        return self._places[ids], len(ids)


def _common(rows: Sequence[tuple[int, ...]]) -> int:
    """How many ids all rows begin with."""
    n = 0
    for ids in zip(*rows):
        if len(set(ids)) > 1:
            break
        n += 1
    return n
