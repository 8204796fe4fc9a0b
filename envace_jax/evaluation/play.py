"""Plays a benchmark in process: the policy on our engine, its calls answered by the real environment."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from typing import Any

from envace_jax.datasets.records import Task
from envace_jax.evaluation.benchmarks import Benchmark
from envace_jax.evaluation.results import Result
from envace_jax.evaluation.user import SimulatorFailed
from envace_jax.rehearsal.flow import Flow, Voice, run_flows
from envace_jax.rehearsal.settings import EpisodeConfig
from envace_jax.rehearsal.trajectory import Trajectory
from envace_jax.test_time.commit import Counted

Method = Callable[[Task, Voice], Flow[tuple[Trajectory, Counted]]]
"""Plays one task and says beside the trajectory what it took: at least `tokens`, all that were generated."""


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
    on_failure: Callable[[str], None] = lambda text: None,
) -> Iterator[Result]:
    """Plays every task `trials` times, except what is `done`, and yields each result as it ends.

    An episode whose simulated user gave no answer has no result, is told to `on_failure`, and is played when the
    evaluation is taken up again.

    Args:
        method: how a task is played; see `test_time.commit.Committed`.
        voice: its path begins every sampling key; task and trial follow.
    """
    started: dict[tuple[int, int], float] = {}

    def timed(key: tuple[int, int], flow: Flow) -> Flow:
        started[key] = time.perf_counter()
        try:
            return (yield from flow)
        except SimulatorFailed as error:
            return error

    flows = (
        ((number, trial), timed((number, trial), method(task, voice.at(number, trial))))
        for trial in range(trials)
        for number, task in enumerate(tasks)
        if (task.uuid, trial) not in done
    )
    for (number, trial), played in run_flows(flows, engine, live=live):
        seconds = time.perf_counter() - started.pop((number, trial))
        if isinstance(played, SimulatorFailed):
            on_failure(f"{tasks[number].uuid}, trial {trial}: {played}")
        else:
            trajectory, counted = played
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
