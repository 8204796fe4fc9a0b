"""The next step's rollouts while this step's update runs (`learning.max_staleness=1`).

The engine keeps the parameters that the update starts from, so what it plays is one update behind when it is learned
from; `learning.importance_cap` corrects the difference (truncated importance sampling).  A thread plays on this
process's devices alone; what all processes played is gathered when the update is done, by the thread that runs the
global programs.  It is part of the checkpoint: a resumed run learns from the trajectories of the unbroken one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ml_collections import ConfigDict

from envace_jax.config import UserError
from envace_jax.rehearsal.trajectory import Trajectory


@dataclasses.dataclass(frozen=True)
class Batch:
    """A step's trajectories by group and member, with the seconds that playing them took, whole and by part."""

    trajectories: list[Trajectory]
    seconds: float
    timings: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        values = [t.to_json() for t in self.trajectories]
        return {"trajectories": values, "seconds": self.seconds, "timings": self.timings}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Batch:
        where = "the batch played ahead, in the checkpoint"
        found = [Trajectory.from_json(t, where=where) for t in value["trajectories"]]
        return Batch(found, value["seconds"], dict(value["timings"]))

    def no_verdict_share(self) -> float:
        return sum(t.reward is None for t in self.trajectories) / max(len(self.trajectories), 1)


def check(cfg: ConfigDict) -> None:
    """Raises `UserError` where rollouts cannot run ahead."""
    if not cfg.learning.max_staleness:
        return
    if not cfg.learning.importance_cap:
        raise UserError(
            "learning.max_staleness=1 learns from samples of the parameters before: set learning.importance_cap "
            "(2 is usual), which corrects the difference"
        )


def timed(play: Callable[[dict[str, float]], list[Trajectory]]) -> Batch:
    """Plays a batch, which notes its parts' seconds in the dict it is given."""
    began, timings = time.perf_counter(), {}  # type: ignore[var-annotated]
    trajectories = play(timings)
    return Batch(trajectories, time.perf_counter() - began, timings)


@contextlib.contextmanager
def playing_ahead(
    play: Callable[[dict[str, float], threading.Event], list[Trajectory]], keep: Callable[[Batch], None]
) -> Iterator[None]:
    """Plays a batch in a thread while the block runs, and hands it to `keep` once both are done.

    When the block fails, `play` is told to stop by its event, and nothing is kept.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="rollout") as pool:
        future = pool.submit(timed, lambda timings: play(timings, stop))
        try:
            yield
        except BaseException:
            stop.set()
            raise
        keep(future.result())
