"""A rollout shared out to processes: each plays its own tasks, all get all trajectories.

What a process gathers it reads back from JSON, its own part too, so that every process computes the same rows from
the same numbers; by group and member the result does not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from envace_jax.datasets.records import Task
from envace_jax.distributed import Processes
from envace_jax.interrupts import Interrupts, Preempted
from envace_jax.rehearsal.rollout import Play, rollout
from envace_jax.rehearsal.trajectory import Trajectory


class Agreed(Preempted):
    """Another process was told to stop: all of them do, after the same step."""


def in_order(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    return sorted(trajectories, key=lambda t: (t.group, t.member))


def share(
    processes: Processes,
    interrupts: Interrupts,
    engine: Any,
    played: Iterable[Trajectory],
    timings: dict[str, float],
    what: str,
) -> list[Trajectory]:
    """All processes' trajectories by group and member; returns with interrupts held back."""
    processes.phase(f"the rollout of {what}")
    follow(processes, engine, timings)
    mine = in_order(played)
    interrupts.hold()
    return exchange(processes, mine, what)


def follow(processes: Processes, engine: Any, timings: dict[str, float]) -> None:
    """For the beats: while this engine plays, or the parts of the rollout take up time, this process gets on."""
    stats = getattr(engine, "stats", dict)
    processes.follow(lambda: (*stats().values(), *timings.values()))


def exchange(processes: Processes, mine: Sequence[Trajectory], what: str) -> list[Trajectory]:
    """Gathers trajectories; raises `Agreed` when a process came here to stop."""
    if processes.alone:
        return list(mine)
    parts = processes.gather({"trajectories": [t.to_json() for t in mine]}, what)
    if any("stop" in part for part in parts):
        raise Agreed
    return in_order(Trajectory.from_json(value, where=what) for part in parts for value in part["trajectories"])


def agree_to_stop(processes: Processes, interrupts: Interrupts, error: KeyboardInterrupt) -> None:
    """Brings the other processes to the same place; what interrupts now waits until this process has saved."""
    interrupts.done()
    if not processes.alone and not isinstance(error, Agreed):
        processes.gather({"stop": True}, "stopping")


def shared_rollout(processes: Processes, interrupts: Interrupts) -> Play:
    """`rollout` over a list of tasks of which each process plays its part; yields all trajectories."""
    if processes.alone:
        return rollout

    def play(tasks: Sequence[Task], *, engine: Any, **options: Any) -> Iterator[Trajectory]:
        begin, end = (len(tasks) * (processes.index + k) // processes.count for k in (0, 1))
        timings: dict[str, float] = {}
        first = options.pop("first_group", 0) + begin
        played = rollout(tasks[begin:end], engine=engine, first_group=first, timings=timings, **options)
        found = share(processes, interrupts, engine, played, timings, "an evaluation")
        interrupts.let()
        yield from found

    return play
