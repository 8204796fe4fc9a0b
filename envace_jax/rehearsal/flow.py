"""Episodes as generators over one engine: what needs several of them in a row, or side by side, is written in order.

A *flow* yields what it waits for and is sent the answer:

    Request        -> Completion      a segment from the engine
    Future         -> its result      somebody outside (a user simulator)
    Together(...)  -> list            other flows, run side by side
    Release(...)   -> None            a ledger whose keys and values are needed no longer

`run_flows` moves any number of flows over one engine. Sampling keys are made of a flow's own path, so results do not
depend on what else is running.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from envace_jax.datasets.records import Task
from envace_jax.environments import Environment
from envace_jax.rehearsal import episode
from envace_jax.rehearsal.episode import EpisodeState, Need, NeedObservation, Setting
from envace_jax.rehearsal.guides import guide_for
from envace_jax.rehearsal.rollout import LONGEST_NAP
from envace_jax.sampling.engine import Completion, Guide, Request, SamplingParams
from envace_jax.text.transcript import ROLE_CODES, Message, Observation, Role, canonical_json

T = TypeVar("T")
Flow = Generator[Any, Any, T]


@dataclass(frozen=True)
class Together:
    """Flows to run side by side; the answer is the list of their results."""

    flows: Sequence[Flow]


@dataclass(frozen=True)
class Release:
    """A ledger is closed."""

    affinity: Hashable


@dataclass(frozen=True)
class Voice:
    """How a flow samples: its place in the sampling keys, temperature and nucleus, the parameter set of each role."""

    path: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    act_params: str = "policy"
    rehearse_params: str = "policy"

    def at(self, *more: int) -> Voice:
        """The voice of a part of the flow."""
        return replace(self, path=(*self.path, *more))

    def request(
        self,
        prompt_ids: Sequence[int],
        stop_ids: Sequence[int],
        max_tokens: int,
        *,
        role: Role = Role.ACT,
        segment: int = 0,
        affinity: Hashable = None,
        guide: Guide | None = None,
    ) -> Request:
        """The engine's request for one segment."""
        params = SamplingParams(self.temperature, self.top_p, self.top_k, max_tokens, tuple(stop_ids))
        name = self.act_params if role is Role.ACT else self.rehearse_params
        return Request(tuple(prompt_ids), params, (*self.path, ROLE_CODES[role], segment), affinity, name, guide)


User = Callable[[EpisodeState], "Flow[str | None]"]
"""What the user says after the turns so far; None ends the conversation."""

Act = Callable[[EpisodeState, Need, Voice], "Flow[Completion]"]
"""How ACT's next output comes about, where it is more than one sample."""


def rehearsal(
    state: EpisodeState, voice: Voice, *, user: User | None = None, until: Callable[[EpisodeState], bool] | None = None
) -> Flow[EpisodeState]:
    """An episode whose calls REHEARSE answers. There is nothing here through which an environment could be reached.

    `until` ends it early, asked before every output of ACT.
    """
    if state.setting.outside:
        raise ValueError("this episode's setting asks for outside observations: it is no rehearsal")
    return (yield from _episode(state, voice, _no_outside, user, 0, None, until))


def real_run(
    state: EpisodeState,
    voice: Voice,
    environment: Environment,
    *,
    user: User | None = None,
    turn_steps: int = 0,
    act: Act | None = None,
) -> Flow[EpisodeState]:
    """An episode whose calls a real environment answers.

    Args:
        state: started with a setting made `outside`.
        environment: this episode's own.
        user: speaks at the end of the task's last turn, so that the conversation goes on until it says nothing.
        turn_steps: ACT outputs that a turn may take; more end the episode as masked ("turn_steps"). 0 is no limit.
        act: makes ACT's outputs, in place of one sample each.
    """
    if not state.setting.outside:
        raise ValueError("this episode's setting does not ask for outside observations")

    def observe(state: EpisodeState, need: NeedObservation) -> Observation:
        return Observation(canonical_json(environment.step(need.call.name, need.call.arguments)), "real")

    return (yield from _episode(state, voice, observe, user, turn_steps, act, None))


def _no_outside(state: EpisodeState, need: NeedObservation) -> Observation:
    raise AssertionError("a rehearsal asked for an outside observation")


def sample(state: EpisodeState, need: Need, voice: Voice, affinity: Hashable = None) -> Flow[Completion]:
    """One sample of what the episode waits for."""
    return (
        yield voice.request(
            need.prompt_ids,
            state.setting.chat.stop_ids,
            need.max_tokens,
            role=need.role,
            segment=need.segment,
            affinity=affinity,
            guide=guide_for(state, need),
        )
    )


def _episode(
    state: EpisodeState,
    voice: Voice,
    observe: Callable[[EpisodeState, NeedObservation], Observation],
    user: User | None,
    turn_steps: int,
    act: Act | None,
    until: Callable[[EpisodeState], bool] | None,
) -> Flow[EpisodeState]:
    kept: set[int] = set()
    while True:
        need = episode.next_request(state)
        if isinstance(need, Need):
            acts = need.role is Role.ACT
            if acts and until is not None and until(state):
                break
            if acts and turn_steps and len(state.steps) >= turn_steps:
                state = episode.mask(state, "turn_steps")
                continue
            if acts and act is not None:
                done = yield from act(state, need, voice)
            else:
                affinity = (*voice.path, need.row) if need.continues else None
                kept |= {need.row} if need.continues else set()
                done = yield from sample(state, need, voice, affinity)
            state = episode.receive(state, done.ids, done.logprobs, done.finish)
            for row in kept - {state.act_row, state.rehearse_row}:
                yield Release((*voice.path, row))
            kept &= {state.act_row, state.rehearse_row}
        elif isinstance(need, NeedObservation):
            state = episode.receive_observation(state, observe(state, need))
        else:
            assert not isinstance(need, episode.NeedVerdicts), "flows play episodes that are not judged"
            text = None
            if user is not None and state.end_reason == "completed":
                text = yield from user(state)
            if text is None:
                break
            state = user_says(state, text)
    for row in kept:
        yield Release((*voice.path, row))
    return state


def begin(setting: Setting, task: Task, text: str) -> EpisodeState:
    """An episode that knows the task's tools and system prompt and has one user message, `text`, so far."""
    system = [message for message in task.messages[:1] if message.role == "system"]
    opened = replace(task, messages=(*system, Message("user", text)), checklists=())
    unjudged = replace(setting, cfg=replace(setting.cfg, judged=False))
    return episode.start(unjudged, opened)


def user_says(state: EpisodeState, text: str) -> EpisodeState:
    """An episode whose last turn is over, taken up again by one more user message."""
    task = replace(state.task, messages=(*state.task.messages, Message("user", text)))
    return episode.next_turn(state.but(task=task, end_reason="", masked_cause=None))


def scripted_user(task: Task) -> User:
    """Says the user messages of a task, in order."""

    def user(state: EpisodeState) -> Flow[str | None]:
        yield from ()
        said = len(state.transcript)
        return task.user_turns[said] if said < len(task.user_turns) else None

    return user


# --- running ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Node:
    """A flow under way; `slot` is its place among its parent's children, `left` how many of its own still run."""

    flow: Flow
    key: Any = None
    parent: _Node | None = None
    slot: int = 0
    left: int = 0
    results: list[Any] | None = None


def run_flows(flows: Iterable[tuple[Any, Flow]], engine: Any, *, live: int = 64) -> Iterator[tuple[Any, Any]]:
    """Runs keyed flows, at most `live` at once, and yields (key, result) as they end.

    What a flow raises ends the run: requests under way are cancelled, ledgers released, and the error goes on.
    """
    source = iter(flows)
    kept: set[Hashable] = set()
    ready: deque[tuple[_Node, Any]] = deque()
    asking: dict[int, _Node] = {}
    waiting: dict[Future, _Node] = {}
    finished: list[tuple[Any, Any]] = []
    running = 0

    def end(node: _Node, result: Any) -> None:
        nonlocal running
        parent = node.parent
        if parent is None:
            running -= 1
            finished.append((node.key, result))
            return
        assert parent.results is not None
        parent.results[node.slot] = result
        parent.left -= 1
        if parent.left == 0:
            ready.append((parent, parent.results))

    def move(node: _Node, answer: Any) -> None:
        try:
            wanted = node.flow.send(answer)
        except StopIteration as stop:
            end(node, stop.value)
            return
        if isinstance(wanted, Request):
            asking[engine.submit(wanted)] = node
            kept.add(wanted.affinity)
        elif isinstance(wanted, Release):
            engine.release(wanted.affinity)
            kept.discard(wanted.affinity)
            ready.append((node, None))
        elif isinstance(wanted, Future):
            waiting[wanted] = node
        else:
            node.results, node.left = [None] * len(wanted.flows), len(wanted.flows)
            ready.extend((_Node(flow, None, node, slot), None) for slot, flow in enumerate(wanted.flows))
            if not wanted.flows:
                ready.append((node, []))

    nap = 0.0
    try:
        while True:
            while running < live and (item := next(source, None)) is not None:
                running += 1
                ready.append((_Node(item[1], item[0]), None))
            while ready:
                move(*ready.popleft())
            yield from finished
            finished.clear()
            if not running:
                if (item := next(source, None)) is None:
                    return
                running += 1
                ready.append((_Node(item[1], item[0]), None))
                continue
            moved = False
            if not engine.idle:
                for completion in engine.step():
                    asker = asking.pop(completion.request_id, None)
                    if asker is not None:
                        ready.append((asker, completion))
                        moved = True
            for future in [future for future in waiting if future.done()]:
                ready.append((waiting.pop(future), future.result()))
                moved = True
            if moved or not engine.idle:
                nap = 0.0
            else:  # everybody waits for somebody outside
                nap = min(LONGEST_NAP, max(0.001, 2 * nap))
                time.sleep(nap)
    finally:
        for number in asking:
            engine.cancel(number)
        for affinity in kept - {None}:
            engine.release(affinity)


def say(
    voice: Voice, chat: Any, prompt_ids: Sequence[int], max_tokens: int, *, role: Role = Role.ACT, segment: int = 0
) -> Flow[tuple[str, Completion]]:
    """One output to a prompt of its own: its text without the turn end, and the completion."""
    done = yield voice.request(prompt_ids, chat.stop_ids, max_tokens, role=role, segment=segment)
    ids = done.ids[:-1] if done.finish == "stop" and done.ids and done.ids[-1] in chat.stop_ids else done.ids
    return chat.tokenizer.decode(ids), done
