"""Plays a benchmark in process: the policy on our engine, its calls answered by the real environment."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from envace_jax.datasets.records import Task
from envace_jax.environments import Environment, make_environment
from envace_jax.evaluation.benchmarks import Benchmark
from envace_jax.evaluation.results import Result
from envace_jax.rehearsal import episode
from envace_jax.rehearsal.episode import Setting
from envace_jax.rehearsal.flow import Flow, User, Voice, real_run, run_flows
from envace_jax.rehearsal.grounding import NoGrounding
from envace_jax.rehearsal.settings import EpisodeConfig
from envace_jax.rehearsal.trajectory import Trajectory

Counted = dict[str, Any]
Method = Callable[[Task, Voice], Flow[tuple[Trajectory, Counted]]]
"""Plays one task and says beside the trajectory what it took: at least `tokens`, all that were generated."""


@dataclass(frozen=True)
class RealPlay:
    """The plain method: one committed run in the real environment."""

    chat: Any
    cfg: EpisodeConfig
    turn_steps: int = 0
    user: User | None = None
    make: Callable[[Task], Environment] = make_environment

    def __call__(self, task: Task, voice: Voice) -> Flow[tuple[Trajectory, Counted]]:
        trajectory = yield from self.run(task, voice)
        return trajectory, {"tokens": generated(trajectory)}

    def run(self, task: Task, voice: Voice, environment: Environment | None = None) -> Flow[Trajectory]:
        """The committed run alone, in a fresh environment unless one is given."""
        setting = Setting.make(self.chat, self.cfg, NoGrounding(), outside=True)
        state = episode.start(setting, task)
        environment = environment or self.make(task)
        return (yield from real_run(state, voice, environment, user=self.user, turn_steps=self.turn_steps))


def generated(trajectory: Trajectory) -> int:
    """Tokens that the engine generated for a trajectory, over both roles."""
    return sum(len(segment.ids) for segment in trajectory.segments)


def real_config(cfg: EpisodeConfig, benchmark: Benchmark) -> EpisodeConfig:
    """Episode rules of an evaluation: nothing is judged or refused by the host but what it cannot read."""
    return replace(
        cfg,
        checks=("format",),
        parser="lenient",
        on_invalid_call="observe",
        judged=False,
        max_acts=max(cfg.max_acts, benchmark.max_acts),
        max_segments=max(cfg.max_segments, 4 * benchmark.max_acts),
    )


def play(
    benchmark: Benchmark,
    tasks: Sequence[Task],
    method: Method,
    engine: Any,
    voice: Voice,
    *,
    trials: int = 1,
    done: Container[tuple[str, int]] = (),
    live: int = 64,
) -> Iterator[Result]:
    """Plays every task `trials` times, except what is `done`, and yields each result as it ends.

    Args:
        method: how a task is played; see `RealPlay`.
        voice: its path begins every sampling key; task and trial follow.
    """
    started: dict[tuple[int, int], float] = {}

    def timed(key: tuple[int, int], flow: Flow) -> Flow:
        started[key] = time.perf_counter()
        return (yield from flow)

    flows = (
        ((number, trial), timed((number, trial), method(task, voice.at(number, trial))))
        for trial in range(trials)
        for number, task in enumerate(tasks)
        if (task.uuid, trial) not in done
    )
    for (number, trial), (trajectory, counted) in run_flows(flows, engine, live=live):
        seconds = time.perf_counter() - started.pop((number, trial))
        yield result_of(benchmark, tasks[number], trial, trajectory, counted, seconds)


def result_of(
    benchmark: Benchmark, task: Task, trial: int, trajectory: Trajectory, counted: Counted, seconds: float
) -> Result:
    """The scored line of one episode."""
    parts: dict[str, Any] = dict(benchmark.score(task, trajectory.transcript))
    score = float(parts.pop("score"))
    end = trajectory.end_reason if trajectory.end_reason != "masked" else str(trajectory.masked_cause)
    if benchmark.must_end and end != "completed":
        score = 0.0
    counters = trajectory.counters
    return Result(
        task=task.uuid,
        trial=trial,
        category=benchmark.category(task),
        score=score,
        floor=benchmark.floor(task),
        end=end,
        tokens=int(counted["tokens"]),
        acts=int(counters.get("act_outputs", 0)),
        calls=int(counters.get("calls", 0)),
        seconds=round(seconds, 3),
        errors=trajectory.error_codes,
        parts=parts | {name: value for name, value in counted.items() if name != "tokens"},
        transcript=trajectory.to_json()["transcript"],
    )
