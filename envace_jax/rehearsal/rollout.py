"""Rollouts: many episodes over one engine, none of which waits for another.

Whenever an episode is ready its next request goes to the engine, the judge or the observation source; whatever comes
back moves its episode on. The engine advances all rows by a chunk at a time, and the text work of one chunk's finished
segments is done between two chunks. Sampling keys name the segment, so results do not depend on who came first.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from envace_jax.config import UserError
from envace_jax.datasets.cm2 import Task
from envace_jax.rehearsal import episode
from envace_jax.rehearsal.episode import EpisodeState, Need, NeedObservation, NeedVerdicts, Setting
from envace_jax.rehearsal.grounding import Grounding
from envace_jax.rehearsal.guides import guide_for
from envace_jax.rehearsal.observers import Observer
from envace_jax.rehearsal.settings import RolloutConfig
from envace_jax.rehearsal.trajectory import Trajectory
from envace_jax.rewards.judge import Judge, JudgeRequest
from envace_jax.sampling.engine import Completion, Engine, Request, SamplingParams
from envace_jax.text.transcript import ROLE_CODES, Observation, Role

LONGEST_NAP = 0.05
Play = Callable[..., Iterable[Trajectory]]
"""What `rollout` is to its callers: tasks and options in, trajectories out."""


def sampling_key(seed: int, step: int, group: int, member: int, role: Role, segment: int) -> tuple[int, ...]:
    """What is folded into the key of one segment (the engine adds its own seed, the program the position)."""
    return (seed, step, group, member, ROLE_CODES[role], segment)


def rollout(
    tasks: Iterable[Task],
    *,
    engine: Any,
    chat: Any,
    cfg: RolloutConfig,
    judge: Judge | None,
    step: int = 0,
    seed: int = 0,
    group_size: int = 1,
    first_group: int = 0,
    observe: Observer | None = None,
    grounding: Grounding | None = None,
    timings: dict[str, float] | None = None,
    interrupted: Callable[[], bool] = lambda: False,
) -> Iterator[Trajectory]:
    """Plays `group_size` episodes of every task and yields each trajectory as soon as it is finished, all in the end.

    Args:
        tasks: taken one by one as room becomes free, so that a long iterator does not fill memory.
        engine: a `sampling.engine.Engine`, or a `ScriptedEngine`.
        chat: the chat format.
        judge: None plays every turn and gives no reward. A judge that samples from the same engine has a method
            `receive(completion)`, which gets every completion that is not this rollout's and ignores unknown ones.
        step, seed: part of the sampling keys.
        first_group: number of the first task's group; with several processes each has its own range.
        observe: answers the calls in place of REHEARSE.
        grounding: what REHEARSE may look at; oracle unless given.
        timings: filled with seconds by phase ("wall", "engine", "waiting"; the rest is host work).

    With `cfg.control="device"` whole episodes are played on the device (`rehearsal.device_control`), to the same
    trajectories; where an outside source observes, the host has control all the same.

    On Ctrl-C the episodes under way are cancelled, yielded as masked trajectories, and the interrupt goes on. One that
    comes while the caller is at work on a trajectory is raised there and ends the rollout without them; a caller that
    wants them all the same catches the signal itself and says so by `interrupted`, which is asked between two steps.

    Raises:
        UserError: when the engine's rows cannot hold the configured prompts.
    """
    config = replace(cfg, episode=replace(cfg.episode, judged=cfg.episode.judged and judge is not None))
    room = getattr(getattr(engine, "config", None), "max_length", None)
    if room is not None and room <= config.episode.max_input_tokens:
        raise UserError(
            f"rollout.max_input_tokens={config.episode.max_input_tokens} does not fit the engine's rows of {room} "
            "tokens: lower it, or make the rows longer"
        )
    setting = Setting.make(chat, config.episode, grounding, outside=observe is not None)
    if config.control == "device" and observe is None and isinstance(engine, Engine):
        from envace_jax.rehearsal.device_control import DeviceControl

        engine = DeviceControl(engine, setting, config, step, seed)
    loop = _Loop(engine, config, judge, setting, step, seed, observe, interrupted)
    starts = (
        episode.start(setting, task, group=first_group + g, member=member)
        for g, task in enumerate(tasks)
        for member in range(group_size)
    )
    return loop.run(starts, timings if timings is not None else {})


def warm_up_control(engine: Engine, cfg: RolloutConfig) -> None:
    """Compiles what control on the device runs besides the engine's programs; nothing under host control."""
    if cfg.control == "device":
        from envace_jax.rehearsal.device_control import stage_for

        engine.compiled_beside(lambda: stage_for(engine, cfg).warm_up(engine.params(cfg.act_params)))


@dataclass(eq=False)
class _Live:
    """An episode under way: `request` is its engine request, `rows` the ledgers that the engine keeps for it."""

    state: EpisodeState
    started: float
    request: int | None = None
    rows: set[int] = field(default_factory=set)


class _Loop:
    def __init__(
        self,
        engine: Any,
        cfg: RolloutConfig,
        judge: Judge | None,
        setting: Setting,
        step: int,
        seed: int,
        observe: Observer | None,
        interrupted: Callable[[], bool],
    ) -> None:
        self.interrupted = interrupted
        self.engine, self.cfg, self.judge, self.observe = engine, cfg, judge, observe
        self.setting, self.step, self.seed = setting, step, seed
        self.live: dict[tuple[int, int], _Live] = {}
        self.ready: deque[_Live] = deque()
        self.sampling: dict[int, _Live] = {}
        self.judging: dict[str, _Live] = {}
        self.observing: dict[Future[Observation], _Live] = {}
        workers = cfg.observe_workers if observe is not None else 0
        self.pool = ThreadPoolExecutor(workers) if workers else None
        self.finished: list[Trajectory] = []

    def run(self, starts: Iterator[EpisodeState], timings: dict[str, float]) -> Iterator[Trajectory]:
        begin = time.perf_counter()
        timings |= dict.fromkeys(("wall", "engine", "waiting"), 0.0)
        nap = 0.0
        try:
            while True:
                if self.interrupted():
                    raise KeyboardInterrupt
                self._admit(starts)
                while self.ready:
                    self._advance(self.ready.popleft())
                yield from self._take_finished()
                if not self.live:
                    more = next(starts, None)  # all that were admitted may have ended at once
                    if more is None:
                        return
                    self._begin(more)
                    continue
                moved = False
                if self.sampling or not self.engine.idle:
                    before = time.perf_counter()
                    completions = self.engine.step()
                    timings["engine"] += time.perf_counter() - before
                    moved = self._completed(completions)
                moved |= self._judged() | self._observed() | self._overdue()
                # Nothing to do but wait for a judge or a simulator: look again soon, then ever less often.
                nap = 0.0 if moved or not self.engine.idle else min(LONGEST_NAP, max(0.001, 2 * nap))
                if nap:
                    timings["waiting"] += nap
                    time.sleep(nap)
        except KeyboardInterrupt:
            for live in list(self.live.values()):
                live.state = episode.mask(live.state, "interrupted")
                self._finish(live)
            yield from self._take_finished()
            raise
        finally:
            self._clean_up()
            timings["wall"] = time.perf_counter() - begin

    # --- episodes -------------------------------------------------------------------------------------------------

    def _admit(self, starts: Iterator[EpisodeState]) -> None:
        for state in itertools.islice(starts, max(0, self.cfg.live_episodes - len(self.live))):
            self._begin(state)

    def _begin(self, state: EpisodeState) -> None:
        live = _Live(state, time.monotonic())
        self.live[state.group, state.member] = live
        begin = getattr(self.engine, "begin", None)
        if begin is not None and state.phase is episode.Phase.ACT:
            begin(state)
        self.ready.append(live)

    def _advance(self, live: _Live) -> None:
        """Hands what the episode waits for to whoever can give it."""
        need = episode.next_request(live.state)
        if isinstance(need, Need):
            self._submit(live, need)
        elif isinstance(need, NeedVerdicts):
            self._ask_judge(live, need)
        elif isinstance(need, NeedObservation):
            self._ask_observer(live, need)
        else:
            self._finish(live)

    def _submit(self, live: _Live, need: Need) -> None:
        state, cfg = live.state, self.cfg
        affinity = None
        if need.continues:
            affinity = (self.step, state.group, state.member, need.row)
            live.rows.add(need.row)
        params = SamplingParams(cfg.temperature, cfg.top_p, cfg.top_k, need.max_tokens, self.setting.chat.stop_ids)
        key = sampling_key(self.seed, self.step, state.group, state.member, need.role, need.segment)
        param_set = cfg.act_params if need.role is Role.ACT else cfg.rehearse_params
        guide = guide_for(state, need)
        live.request = self.engine.submit(Request(need.prompt_ids, params, key, affinity, param_set, guide))
        self.sampling[live.request] = live
        # Ledgers that were closed by a fork, or by a stream that began anew, need their keys and values no longer.
        for row in live.rows - {state.act_row, state.rehearse_row}:
            self._release(live, row)

    def _release(self, live: _Live, row: int) -> None:
        live.rows.discard(row)
        self.engine.release((self.step, live.state.group, live.state.member, row))

    def _finish(self, live: _Live) -> None:
        state = live.state
        del self.live[state.group, state.member]
        if live.request is not None:
            self.sampling.pop(live.request, None)
            self.engine.cancel(live.request)
        for row in list(live.rows):
            self._release(live, row)
        finish = getattr(self.engine, "finish", None)
        if finish is not None:
            finish(state)
        forget = getattr(self.observe, "forget", None)
        if forget is not None:
            forget(state)
        self.finished.append(episode.trajectory(state))

    def _take_finished(self) -> Iterator[Trajectory]:
        while self.finished:
            yield self.finished.pop(0)

    def _clean_up(self) -> None:
        for live in self.live.values():
            if live.request is not None:
                self.engine.cancel(live.request)
            for row in list(live.rows):
                self._release(live, row)
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)

    # --- answers --------------------------------------------------------------------------------------------------

    def _completed(self, completions: list[Completion]) -> bool:
        for completion in completions:
            live = self.sampling.pop(completion.request_id, None)
            if live is None:  # cancelled, or the request of a judge that shares the engine
                receive = getattr(self.judge, "receive", None)
                if receive is not None:
                    receive(completion)
                continue
            live.request = None
            said = (completion.ids, completion.logprobs, completion.finish, completion.experts)
            live.state = episode.receive(live.state, *said)
            self.ready.append(live)
        return bool(completions)

    def _ask_judge(self, live: _Live, need: NeedVerdicts) -> None:
        assert self.judge is not None
        state = live.state
        request = JudgeRequest(
            id=f"{self.step}/{state.group}/{state.member}/{len(need.transcript) - 1}",
            task_id=state.task.uuid,
            system=state.task.system,
            transcript=need.transcript,
            items=need.items,
        )
        self.judging[request.id] = live
        try:
            self.judge.submit(request)
        except UserError:
            raise
        except Exception as error:  # whatever a judge can die of must not take the batch along
            del self.judging[request.id]
            self._cut(live, f"judge:{type(error).__name__}")

    def _judged(self) -> bool:
        results = self.judge.poll() if self.judging and self.judge is not None else []
        for result in results:
            live = self.judging.pop(result.request_id, None)
            if live is not None and live.state.phase is episode.Phase.VERDICTS:
                live.state = episode.receive_verdicts(live.state, result)
                self.ready.append(live)
        return bool(results)

    def _ask_observer(self, live: _Live, need: NeedObservation) -> None:
        assert self.observe is not None
        arguments = (live.state.task, need.call, live.state)
        if self.pool is not None:
            self.observing[self.pool.submit(self.observe, *arguments)] = live
            return
        future: Future[Observation] = Future()
        try:
            future.set_result(self.observe(*arguments))
        except UserError:
            raise
        except Exception as error:
            future.set_exception(error)
        self._take_observation(live, future)

    def _observed(self) -> bool:
        done = [future for future in self.observing if future.done()]
        for future in done:
            live = self.observing.pop(future)
            if live.state.phase is episode.Phase.OBSERVE:
                self._take_observation(live, future)
        return bool(done)

    def _take_observation(self, live: _Live, future: Future[Observation]) -> None:
        error = future.exception()
        if isinstance(error, UserError):
            raise error
        if error is not None:
            self._cut(live, f"observation:{type(error).__name__}")
            return
        live.state = episode.receive_observation(live.state, future.result())
        self.ready.append(live)

    def _overdue(self) -> bool:
        if not self.cfg.deadline:
            return False
        late = [x for x in self.live.values() if time.monotonic() - x.started > self.cfg.deadline]
        for live in late:
            self._cut(live, "deadline")
        return bool(late)

    def _cut(self, live: _Live, cause: str) -> None:
        """Masks an episode and ends it; what is still on its way to it is ignored when it comes."""
        live.state = episode.mask(live.state, cause)
        if live.request is not None:
            self.sampling.pop(live.request, None)
        if live not in self.ready:
            self.ready.append(live)
