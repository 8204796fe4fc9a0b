"""Batches of tasks: shuffled by Grain, shared out to processes, resumed exactly.

The order is a function of (data set, seed, epoch) alone. A global batch is a run of that order, and each process takes
its contiguous share of it: with the shares put together in process order, any number of processes sees the same
batches. The state says how many tasks of which epoch the whole job has taken, so it fits any number of processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import grain
import numpy as np

from envace_jax.config import UserError
from envace_jax.datasets.cm2 import task_to_record
from envace_jax.datasets.records import Task
from envace_jax.text.transcript import canonical_json


class TaskSequence(Protocol):
    """Random access to tasks: a list, or a prepared data set (`envace_jax.datasets.prepared.PreparedTasks`)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Task: ...


def fingerprint(tasks: TaskSequence) -> str:
    """Digest of all records in order; equal for the same tasks in memory and prepared on disk."""
    own = getattr(tasks, "fingerprint", None)
    if isinstance(own, str):
        return own
    digest = hashlib.sha256()
    for index in range(len(tasks)):
        digest.update(canonical_json(task_to_record(tasks[index])).encode() + b"\n")
    return digest.hexdigest()


class TaskIterator(Iterator[list[Task]]):
    """Endless batches of distinct tasks; see `task_iterator`."""

    def __init__(self, tasks: TaskSequence, seed: int, batch_size: int, process_index: int, process_count: int):
        if batch_size < 1 or batch_size % process_count:
            raise UserError(f"a batch of {batch_size} tasks cannot be shared by {process_count} processes")
        if not 0 <= process_index < process_count:
            raise UserError(f"process {process_index} of {process_count}: no such process")
        if len(tasks) < batch_size:
            raise UserError(
                f"a batch takes {batch_size} tasks, the data set has {len(tasks)}: "
                "lower the batch size or give more tasks"
            )
        self._tasks = tasks
        self._seed = seed
        self._batch = batch_size
        share = batch_size // process_count
        self._share = slice(process_index * share, (process_index + 1) * share)
        self._fingerprint = fingerprint(tasks)
        self._epoch = self._index = 0
        self._batches: Iterator[list[Task]] | None = None

    def __next__(self) -> list[Task]:
        if self._index + self._batch > len(self._tasks):
            # The rest of an epoch is too short for a batch. It is left out rather than filled up with the next
            # epoch's first tasks: a task that stood twice in a batch would count twice, in two groups of which each
            # has its baseline from its own trajectories alone.
            self._epoch, self._index, self._batches = self._epoch + 1, 0, None
        if self._batches is None:
            self._batches = iter(self._epoch_batches())
        batch = next(self._batches)
        self._index += self._batch
        return batch

    def _epoch_batches(self) -> grain.IterDataset:
        share = self._share
        tasks = self._tasks
        seed = int(np.random.SeedSequence([self._seed, self._epoch]).generate_state(1)[0])
        order = grain.MapDataset.range(len(tasks)).shuffle(seed=seed)[self._index :]
        batches = order.batch(self._batch, drop_remainder=True)
        mine = batches.map(lambda indices: [tasks[int(i)] for i in indices[share]])
        # Tasks in memory need no reader threads.
        threads = 0 if isinstance(tasks, list) else 2
        return mine.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=4 * threads))

    def get_state(self) -> dict[str, Any]:
        """JSON object from which `set_state` goes on, in a job of any number of processes."""
        return {
            "fingerprint": self._fingerprint,
            "seed": self._seed,
            "epoch": self._epoch,
            "index": self._index,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken.

        Raises:
            UserError: it was taken over another data set, or under another seed.
        """
        if state["fingerprint"] != self._fingerprint:
            raise UserError(
                f"the saved position belongs to another data set (fingerprint {state['fingerprint'][:12]}…, "
                f"here {self._fingerprint[:12]}…): give the run its data back, or start a new run"
            )
        if state["seed"] != self._seed:
            raise UserError(f"the saved position was taken under seed {state['seed']}, this run has {self._seed}")
        self._epoch, self._index, self._batches = int(state["epoch"]), int(state["index"]), None


def task_iterator(
    tasks: TaskSequence,
    *,
    seed: int,
    batch_size: int,
    process_index: int = 0,
    process_count: int = 1,
    state: Mapping[str, Any] | None = None,
) -> TaskIterator:
    """This process's share of every global batch of ``batch_size`` distinct tasks, epoch after epoch.

    Args:
        tasks: a list of tasks, or a prepared data set.
        seed: orders the tasks, anew in every epoch.
        batch_size: tasks of a global batch.
        process_index: which process this is.
        process_count: how many there are; ``batch_size`` must be a multiple of it.
        state: of a former iterator's ``get_state()``.

    Raises:
        UserError: fewer tasks than a batch takes, a batch that does not divide, or a state that does not fit.
    """
    iterator = TaskIterator(tasks, seed, batch_size, process_index, process_count)
    if state is not None:
        iterator.set_state(state)
    return iterator
