"""The loop over one engine: nobody waits for anybody, nothing depends on who came first, nobody is lost."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import itertools
import os
import random
import signal
import threading
import time
import tracemalloc
from collections import Counter

import pytest

from envace_jax.config import UserError
from envace_jax.interrupts import Interrupts
from envace_jax.rehearsal.episode import scene
from envace_jax.rehearsal.observers import EndpointObserver, RealObserver, observe_recorded
from envace_jax.rehearsal.prompts import _Memo
from envace_jax.rehearsal.rollout import rollout, sampling_key
from envace_jax.rehearsal.scripted import Scripted, ScriptedEngine
from envace_jax.rehearsal.settings import EpisodeConfig, RolloutConfig
from envace_jax.rehearsal.trajectory import Trajectory, TrajectoryWriter, read_trajectories
from envace_jax.rewards.judge import RuleJudge
from envace_jax.text.transcript import ROLE_CODES, Role
from tests.rehearsal.helpers import ACT_SCRIPT, REHEARSE_SCRIPT, answer, call_text, make_task

SCRIPT = {Role.ACT: ACT_SCRIPT, Role.REHEARSE: REHEARSE_SCRIPT}


def tasks(n: int):
    return [make_task(uuid=f"task-{k}") for k in range(n)]


def play_all(chat, outputs=SCRIPT, n=3, *, delay=lambda request: 1, judge=None, engine=None, cfg=None, **options):
    engine = engine or ScriptedEngine(outputs, chat.tokenizer, delay=delay)
    cfg = cfg or RolloutConfig(EpisodeConfig())
    options = {"group_size": 2} | options
    return list(rollout(tasks(n), engine=engine, chat=chat, cfg=cfg, judge=judge or RuleJudge(), **options)), engine


def by_member(trajectories):
    return sorted(trajectories, key=lambda t: (t.group, t.member))


def luck(request) -> str:
    """What an engine would say: a function of the request's key alone."""
    seed = int.from_bytes(hashlib.sha256(repr(request.key).encode()).digest()[:8], "big")
    role = Role.ACT if request.key[-2] == ROLE_CODES[Role.ACT] else Role.REHEARSE
    good = (*ACT_SCRIPT, "garbage <tool_call>", call_text("fly")) if role is Role.ACT else (*REHEARSE_SCRIPT, "garbage")
    return random.Random(seed).choice(good)


@pytest.mark.quick
def test_all_are_played(chat):
    played, engine = play_all(chat)
    assert sorted((t.group, t.member, t.task_id) for t in played) == [
        (g, m, f"task-{g}") for g in range(3) for m in range(2)
    ]
    assert all(t.reward == 1.0 for t in played)
    assert len({request.key for request in engine.requests}) == len(engine.requests) == 6 * 7
    assert engine.requests[0].key == sampling_key(0, 0, 0, 0, Role.ACT, 0)
    kept = {request.affinity for request in engine.requests} - {None}
    assert set(engine.released) == kept  # every ledger was given back


@pytest.mark.quick
@pytest.mark.parametrize("context", ["stateless", "stream"])
def test_order_does_not_matter(chat, context):
    """Shuffled delays, other windows and other group ranges: equal trajectories."""
    results = []
    for window, spread in ((64, 1), (2, 1), (5, 7)):
        rng = random.Random(window)
        cfg = RolloutConfig(EpisodeConfig(context=context, max_acts=6), live_episodes=window)
        played, _ = play_all(chat, luck, delay=lambda request, r=rng, s=spread: r.randint(1, s), cfg=cfg, n=4)
        results.append(by_member(played))
    assert results[0] == results[1] == results[2]
    assert len({t.transcript for t in map(_frozen, results[0])}) > 1
    halves = [play_all(chat, luck, cfg=cfg, n=2, first_group=2 * h)[0] for h in range(2)]
    halves = by_member([*halves[0], *(dataclasses.replace(t, task_id="", task=None) for t in halves[1])])
    assert [t.segments for t in halves] == [t.segments for t in results[0]]


def _frozen(trajectory: Trajectory) -> Trajectory:
    return dataclasses.replace(trajectory, transcript=repr(trajectory.transcript))


@pytest.mark.quick
def test_memory_is_bounded_by_the_window(chat):
    """Tasks are taken as room becomes free, from an iterator that is never read ahead."""
    taken, finished = [], []

    def endless():
        for k in range(300):
            taken.append(k)
            yield make_task(uuid=str(k))

    engine = ScriptedEngine(SCRIPT, chat.tokenizer)
    cfg = RolloutConfig(EpisodeConfig(), live_episodes=8)
    for trajectory in rollout(endless(), engine=engine, chat=chat, cfg=cfg, judge=RuleJudge()):
        finished.append(trajectory.task_id)
        assert len(taken) - len(finished) <= 8
    assert sorted(finished, key=int) == [str(k) for k in range(300)]


class SlowJudge(RuleJudge):
    """Answers a request only after so many polls."""

    def __init__(self, polls: int) -> None:
        super().__init__()
        self.polls, self.waiting, self.steps_meanwhile = polls, [], 0

    def submit(self, request):
        self.waiting.append([self.polls, self.judge(request)])
        return request.id

    def poll(self):
        for entry in self.waiting:
            entry[0] -= 1
        done = [result for left, result in self.waiting if left <= 0]
        self.waiting = [entry for entry in self.waiting if entry[0] > 0]
        return done


@pytest.mark.quick
def test_a_slow_judge_does_not_stop_the_engine(chat):
    """Task 0 is ready for its judge at once; the others are sampled while it waits."""
    engine = ScriptedEngine(SCRIPT, chat.tokenizer, delay=lambda request: 1 if request.key[2] == 0 else 3)
    played, _ = play_all(chat, engine=engine, judge=SlowJudge(polls=12), group_size=1)
    assert all(t.reward == 1.0 for t in played)
    plain, _ = play_all(chat, group_size=1)
    assert by_member(played) == by_member(plain)


class BrokenJudge(RuleJudge):
    def submit(self, request):
        if request.task_id == "task-1":
            raise ConnectionError("no route")
        return super().submit(request)


@pytest.mark.quick
def test_a_judge_that_dies_masks(chat):
    played, _ = play_all(chat, judge=BrokenJudge())
    causes = {t.task_id: (t.masked_cause, t.reward) for t in played}
    assert causes == {"task-0": (None, 1.0), "task-1": ("judge:ConnectionError", None), "task-2": (None, 1.0)}


@pytest.mark.quick
def test_a_judge_may_share_the_engine(chat):
    """A completion that is nobody's here is handed to the judge."""
    from envace_jax.sampling.engine import Request, SamplingParams

    class Sharing(RuleJudge):
        def __init__(self, engine):
            super().__init__()
            self.engine, self.asked = engine, {}

        def submit(self, request):
            prompt = Request((1, 2), SamplingParams(max_tokens=9), (9, 9, 9), None, "judge")
            self.asked[self.engine.submit(prompt)] = request
            return request.id

        def receive(self, completion):
            super().submit(self.asked.pop(completion.request_id))

    said = ScriptedEngine(SCRIPT, chat.tokenizer)
    engine = ScriptedEngine(lambda r: "true" if r.param_set == "judge" else said._say(r), chat.tokenizer)
    played, _ = play_all(chat, engine=engine, judge=Sharing(engine))
    assert all(t.reward == 1.0 for t in played)


@pytest.mark.quick
def test_without_a_judge(chat):
    engine = ScriptedEngine(SCRIPT, chat.tokenizer)
    played = list(rollout(tasks(1), engine=engine, chat=chat, cfg=RolloutConfig(), judge=None))
    assert [(t.reward, t.masked_cause, t.end_reason) for t in played] == [(None, "not_judged", "completed")]


@pytest.mark.quick
def test_deadline_masks_what_it_cuts(chat):
    """A request that never comes back: its episode is cut, the others are whole."""
    slow = lambda request: 10**9 if request.key[2:4] == (1, 0) else 1  # noqa: E731
    cfg = RolloutConfig(EpisodeConfig(), deadline=0.3)
    played, engine = play_all(chat, delay=slow, cfg=cfg)
    cut = [t for t in played if t.masked_cause is not None]
    assert [(t.group, t.member, t.masked_cause, t.reward) for t in cut] == [(1, 0, "deadline", None)]
    assert engine.idle or not engine.step()[1:]


@pytest.mark.quick
def test_interrupt_keeps_what_there_is(chat, tmp_path):
    """Ctrl-C in the middle: finished ones are on disk, those under way come as masked, then the interrupt goes on."""

    class Interrupted(ScriptedEngine):
        def step(self):
            if sum(t.key[-1] == 6 for t in self.requests) == 4:  # four episodes have asked for their last segment
                raise KeyboardInterrupt
            return super().step()

    engine = Interrupted(SCRIPT, chat.tokenizer, delay=lambda request: 1 + request.key[2])
    path = tmp_path / "run" / "trajectories.jsonl"
    with pytest.raises(KeyboardInterrupt), TrajectoryWriter(path) as writer:
        for trajectory in rollout(
            tasks(4), engine=engine, chat=chat, cfg=RolloutConfig(), judge=RuleJudge(), group_size=2
        ):
            writer.write(trajectory, step=7)
    kept = list(read_trajectories(path))
    assert len(kept) == 8
    assert {t.masked_cause for t in kept} == {None, "interrupted"}
    assert all(t.reward == 1.0 for t in kept if t.masked_cause is None)
    assert not engine._live


@pytest.mark.quick
def test_interrupt_while_the_caller_works(chat, tmp_path):
    """Ctrl-C between two trajectories, in the writer's hands: nothing that was begun is missing in the file."""
    engine = ScriptedEngine(SCRIPT, chat.tokenizer, delay=lambda request: 1 + request.key[2])
    path = tmp_path / "trajectories.jsonl"
    interrupts, yielded = Interrupts(), 0
    asked = lambda: interrupts.pending is not None  # noqa: E731
    options = dict(engine=engine, chat=chat, cfg=RolloutConfig(), judge=RuleJudge(), group_size=2, interrupted=asked)
    with pytest.raises(KeyboardInterrupt), interrupts, TrajectoryWriter(path) as writer:
        interrupts.hold()
        for trajectory in rollout(tasks(4), **options):
            yielded += 1
            if yielded == 2:
                os.kill(os.getpid(), signal.SIGINT)
            writer.write(trajectory)
    kept = list(read_trajectories(path))
    assert len({(t.group, t.member) for t in kept}) == len(kept) == yielded == 8
    assert Counter(t.masked_cause for t in kept) == {None: 2, "interrupted": 6}
    assert engine.idle or not engine._live


@pytest.mark.quick
def test_leaving_early_cleans_up(chat):
    engine = ScriptedEngine(SCRIPT, chat.tokenizer, delay=lambda request: 1 + request.key[2])
    for _ in rollout(tasks(3), engine=engine, chat=chat, cfg=RolloutConfig(), judge=RuleJudge(), group_size=2):
        break
    assert not engine._live


@pytest.mark.quick
def test_engine_rows_must_hold_the_prompts(chat):
    engine = ScriptedEngine(SCRIPT, chat.tokenizer)
    engine.config = type("Config", (), {"max_length": 100})
    with pytest.raises(UserError, match="max_input_tokens=12000"):
        next(rollout(tasks(1), engine=engine, chat=chat, cfg=RolloutConfig(), judge=None))


@pytest.mark.quick
def test_parameter_sets_by_role(chat):
    cfg = RolloutConfig(EpisodeConfig(), act_params="a", rehearse_params="r")
    _, engine = play_all(chat, cfg=cfg)
    assert {(r.key[-2], r.param_set) for r in engine.requests} == {(0, "a"), (1, "r")}


@pytest.mark.quick
def test_output_limits(chat):
    cfg = RolloutConfig(EpisodeConfig(max_act_tokens=5))
    played, _ = play_all(chat, cfg=cfg)
    assert {t.end_reason for t in played} == {"truncated"} and {len(s.ids) for t in played for s in t.segments} == {5}
    played, _ = play_all(chat, lambda r: Scripted(ids=(5, 6), finish="nan"))
    assert {(t.masked_cause, t.reward) for t in played} == {("nan", None)}


# --- arms ---------------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_recorded_arm(chat):
    act = (call_text("get_order", order_id="A9"), *ACT_SCRIPT)
    played, engine = play_all(chat, {Role.ACT: act}, observe=observe_recorded, n=1, group_size=1)
    (trajectory,) = played
    assert trajectory.reward == 1.0 and trajectory.error_codes == ("act:NO_RECORDED_RESPONSE",)
    assert trajectory.counters["observations_recorded"] == 3 and trajectory.counters["observations_error"] == 1
    assert {r.key[-2] for r in engine.requests} == {ROLE_CODES[Role.ACT]}  # nothing is rehearsed


class Shop:
    """A real environment: orders that can be cancelled once."""

    made = 0

    def __init__(self) -> None:
        Shop.made += 1
        self.status: dict[str, str] = {}

    def step(self, name, arguments):
        order = arguments["order_id"]
        if name == "cancel_order":
            if self.status.get(order) == "cancelled":
                return {"error": "ALREADY_CANCELLED"}
            self.status[order] = "cancelled"
        return {"id": order, "status": self.status.get(order, "sent")}


@pytest.mark.quick
def test_real_arm(chat):
    """Each episode has its own environment, which is gone afterwards."""
    Shop.made = 0
    observe = RealObserver(lambda task: Shop())
    twice = (ACT_SCRIPT[0] + call_text("cancel_order", order_id="A1"), *ACT_SCRIPT[1:])
    played, _ = play_all(chat, {Role.ACT: twice}, observe=observe, n=2)
    assert Shop.made == 4 and not observe._live
    observations = [o for t in played for turn in t.transcript for step in turn.steps for o in step.observations]
    assert {o.source for o in observations} == {"real"}
    assert [o.text for o in observations].count('{"error": "ALREADY_CANCELLED"}') == 4
    assert all(t.reward == 1.0 for t in played)


@pytest.mark.quick
@pytest.mark.parametrize("workers", [0, 3])
def test_endpoint_arm(chat, workers):
    """An outside simulator gets the prompt as text; it may be slow, wrong, or gone."""
    seen = []

    def ask(system, user):
        time.sleep(0.002)
        seen.append((system, user, threading.current_thread() is threading.main_thread()))
        if '"A2"}}' in user.rpartition("# Call to answer")[2]:
            return "no idea"
        return f"thinking</think>{answer({'status': 'cancelled'})}"

    cfg = RolloutConfig(EpisodeConfig(), observe_workers=workers)
    played, _ = play_all(chat, {Role.ACT: ACT_SCRIPT}, observe=EndpointObserver(ask), cfg=cfg, n=2)
    assert all(t.error_codes == ("act:NO_EXECUTION_RESULT_TAG_FOUND",) and t.reward == 1.0 for t in played)
    assert all(t.counters["observations_endpoint"] == 2 for t in played)
    system, user, inline = seen[0]
    assert "Go through these checks" in system and "user: Cancel A1." in user and inline == (workers == 0)

    def gone(system, user):
        raise TimeoutError

    played, _ = play_all(chat, {Role.ACT: ACT_SCRIPT}, observe=EndpointObserver(gone), cfg=cfg, n=1)
    assert {t.masked_cause for t in played} == {"observation:TimeoutError"}


def test_an_endpoint_simulator_gets_the_trimmed_prompt(chat):
    """The text of what REHEARSE would be asked within the same limit, and the same refusal where nothing fits."""
    asked, texts = [], []

    def ask(system, user):
        asked.append((system, user))
        return answer({"status": "cancelled"})

    real = EndpointObserver(ask)

    def observe(task, call, state):
        prompt = state.setting.writer.prompt(scene(state))
        texts.append(None if prompt is None else chat.tokenizer.decode(prompt))
        return real(task, call, state)

    def play_within(limit):
        asked.clear(), texts.clear()
        cfg = RolloutConfig(EpisodeConfig(max_input_tokens=limit))
        return play_all(chat, {Role.ACT: ACT_SCRIPT}, observe=observe, cfg=cfg, n=1)[0][0]

    play_within(12_000)
    whole = len(chat.tokenizer.encode(texts[-1]))
    lengths = set()
    for limit in range(whole, 0, -25):
        played = play_within(limit)
        assert [f"{s}<|im_end|>\n<|im_start|>user\n{u}<|im_end|>" in t for (s, u), t in zip(asked, texts)] == [
            True for _ in asked
        ]
        assert len(asked) == sum(t is not None for t in texts)
        lengths.add(len(asked[-1][1]) if asked else 0)
        if None in texts:
            break
    assert len(lengths) > 2, lengths
    assert "act:REHEARSE_PROMPT_TOO_LONG" in played.error_codes


@pytest.mark.quick
def test_timings(chat):
    timings: dict[str, float] = {}
    play_all(chat, timings=timings, judge=SlowJudge(polls=3))
    assert timings["wall"] > timings["engine"] >= 0 and timings["waiting"] > 0


class Forgetful(ScriptedEngine):
    """Keeps no record of what it was asked: only the rollout's own memory is measured."""

    def submit(self, request):
        number = super().submit(request)
        self.requests.clear()
        self._said.clear()
        return number

    def release(self, affinity):
        pass


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_soak(chat):
    """2,000 episodes: every one accounted for; what the second thousand leaves behind is under 2% of what a rollout
    holds while it runs (live episodes come and go, so memory is compared where none is left)."""
    cfg = RolloutConfig(EpisodeConfig(rehearse_prompt="compact", max_acts=5), live_episodes=64)
    engine = Forgetful(luck, chat.tokenizer, delay=lambda request: 1 + request.key[2] % 5)
    left, held = [], 0
    tracemalloc.start()
    try:
        for _ in range(2):
            seen = set()
            for trajectory in rollout(
                itertools.repeat(make_task(), 1_000), engine=engine, chat=chat, cfg=cfg, judge=RuleJudge()
            ):
                seen.add(trajectory.group)
            assert seen == set(range(1_000))
            held = max(held, tracemalloc.get_traced_memory()[1])
            del seen, trajectory
            gc.collect()
            left.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert left[1] - left[0] <= 0.02 * held, (left, held)


@pytest.mark.quick
def test_what_is_kept_of_tasks_is_bounded():
    memo = _Memo(3)
    keys = [object() for _ in range(10)]
    assert [memo.of(key, id) for key in keys for _ in range(2)] == [id(key) for key in keys for _ in range(2)]
    assert len(memo._kept) <= 3
