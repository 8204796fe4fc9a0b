"""Several processes as one run: how they find each other, what they exchange, and who names the one that hangs.

The launchers set `ENVACE_COORDINATOR` (host:port of process 0), `ENVACE_PROCESSES` and `ENVACE_PROCESS`, or
`ENVACE_DISTRIBUTED=auto` where jax finds all three itself (Cloud TPU, GKE, SLURM).  Without them there is one process,
and everything here is free.

Programs over all devices run in the same order everywhere.  What differs by process (trajectories, verdicts) goes
through `Processes.gather` first: a barrier that no slow rollout trips, then one collective over the bytes.  Each
process posts a beat once in a while; whoever waits reads the others' beats, and when one has not moved for
`hang_timeout` seconds it is named and the waiting process ends with status `LOST`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from envace_jax.config import UserError

LOST = 76  # exit status when another process is gone or hangs: start all of them again
FOR_EVER = 7 * 24 * 3600 * 1000  # milliseconds: a limit for what is ended by the watch
GRACE = 30.0  # seconds that a process which was told to stop waits for the others
_CUT_OFF = ("Gloo", "NCCL", "UNAVAILABLE", "Connection", "coordination")  # in messages of collectives
SMALLEST_MESSAGE = 1 << 16  # bytes; longer messages are padded to powers of two, so that few shapes exist
COORDINATOR, PROCESSES, PROCESS, AUTO = (
    "ENVACE_COORDINATOR",
    "ENVACE_PROCESSES",
    "ENVACE_PROCESS",
    "ENVACE_DISTRIBUTED",
)


def initialize(environment: Mapping[str, str] = os.environ) -> bool:
    """Joins the processes that the environment names; called before any device is touched.

    Returns whether there are several.  Raises `UserError` for variables that contradict each other, and when the
    coordinator does not answer.
    """
    given = {name: environment[name] for name in (COORDINATOR, PROCESSES, PROCESS) if environment.get(name)}
    auto = environment.get(AUTO, "")
    if auto not in ("", "auto"):
        raise UserError(f"{AUTO}='{auto}': expected 'auto', or nothing")
    if not given and not auto:
        return False
    arguments: dict[str, Any] = {}
    if given:
        missing = [name for name in (COORDINATOR, PROCESSES, PROCESS) if name not in given]
        if missing:
            raise UserError(f"{', '.join(given)} set without {', '.join(missing)}: a process needs all three")
        try:
            count, index = int(given[PROCESSES]), int(given[PROCESS])
        except ValueError:
            raise UserError(f"{PROCESSES}={given[PROCESSES]}, {PROCESS}={given[PROCESS]}: expected numbers") from None
        if not 0 <= index < count:
            raise UserError(f"{PROCESS}={index}: expected a number from 0 to {count - 1} ({PROCESSES}={count})")
        if count == 1:
            return False
        arguments = {"coordinator_address": given[COORDINATOR], "num_processes": count, "process_id": index}
        arguments["cluster_detection_method"] = "deactivate"
    import jax

    # Collectives between processes on CPU; other platforms have their own.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # SIGTERM is ours: jax's own service would take it and end nothing.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(**arguments)
    except (RuntimeError, ValueError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"the processes of this run did not find each other: {line}") from None
    return jax.process_count() > 1


@contextlib.contextmanager
def session() -> Iterator[None]:
    """Joins the other processes for the time of a command.

    A process of several that fails leaves at once: the usual farewell waits for the others, which wait for it.
    """
    if not initialize():
        yield
        return
    try:
        yield
    except BaseException as error:
        _leave(error)
        raise


def _leave(error: BaseException) -> None:
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else 1
    elif isinstance(error, UserError):
        print(f"envace_jax: {error}", file=sys.stderr)
        status = 2
    elif type(error).__name__ == "JaxRuntimeError" and any(word in str(error) for word in _CUT_OFF):
        line = str(error).splitlines()[0][:300]
        print(
            f"envace_jax: a program over all processes failed, another process is probably gone ({line}); the last "
            "whole checkpoint stays: start all processes again",
            file=sys.stderr,
        )
        status = LOST
    elif isinstance(error, KeyboardInterrupt):
        print("envace_jax: interrupted", file=sys.stderr)
        status = 130
    else:
        import traceback

        traceback.print_exception(error)
        status = 1
    exit_now(status)


def exit_now(status: int) -> None:
    """Ends this process without farewell; what was written is flushed already."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Store(Protocol):
    """What is used of the coordinator's key-value store."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = ...) -> None: ...
    def key_value_dir_get(self, key: str, /) -> list[tuple[str, str]]: ...
    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None: ...


@dataclasses.dataclass(frozen=True)
class Beat:
    """What a process says of itself: `beats` grows while it lives, `moves` while its main thread does something."""

    host: str
    beats: int
    moves: int
    phase: str
    waiting: bool
    stop: bool = False

    def to_text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_text(text: str) -> Beat:
        return Beat(**json.loads(text))


class Watch:
    """Posts this process's beats, reads the others' while the main thread waits, and names who is lost.

    A process is lost when its beats stop (killed, stopped, cut off), or when its main thread neither moves nor waits
    for the others, for `timeout` seconds.  `lost` is called with one line that names it and does not return.
    """

    def __init__(
        self,
        store: Store,
        index: int,
        count: int,
        timeout: float,
        lost: Callable[[str], Any],
        stop: Callable[[], Any] = lambda: os.kill(os.getpid(), signal.SIGTERM),
    ):
        self.store, self.index, self.count = store, index, count
        self.timeout, self.lost, self.stop = timeout, lost, stop
        self.interval = min(2.0, max(0.2, timeout / 10))
        self.moves, self.phase_name, self.waiting_since = 0, "start", None  # type: int, str, float | None
        self.stopping = False  # this process was told to stop, by a signal or by another process
        self.progress: Callable[[], object] = lambda: None  # changes while the main thread gets on
        self._beats, self._progress = 0, None  # type: int, object
        self._looked = time.monotonic()
        self._host = socket.gethostname()
        self._seen: dict[int, tuple[Beat, float, float]] = {}  # last beat, when beats grew, when moves grew
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def move(self, phase: str | None = None) -> None:
        """The main thread has done something, or begins another phase."""
        self.moves += 1
        self.phase_name = phase or self.phase_name

    @contextlib.contextmanager
    def wait(self, phase: str) -> Iterator[None]:
        """The main thread waits for the others in here, or for a compiler or a disk that may take as long as it likes:
        its beats alone tell that this process lives."""
        before = self.waiting_since
        self.move(phase)
        self.waiting_since = time.monotonic()
        try:
            yield
        finally:
            self.waiting_since = before and time.monotonic()
            self.move()

    def _run(self) -> None:
        while not self._end.wait(self.interval):
            # A coordinator that is busy answers the next time; when it is gone jax itself ends the process.
            with contextlib.suppress(Exception):
                self.look()

    def look(self, now: float | None = None) -> None:
        """One round: post, read, judge."""
        now = time.monotonic() if now is None else now
        asleep, self._looked = now - self._looked > self.timeout / 2, now
        if asleep:  # this process itself was stopped or starved: it cannot tell how long the others were silent
            self._seen.clear()
            if self.waiting_since is not None:
                self.waiting_since = now
        self._beats += 1
        progress = self.progress()
        if progress != self._progress:
            self._progress = progress
            self.moves += 1
        waiting = self.waiting_since is not None
        own = Beat(self._host, self._beats, self.moves, self.phase_name, waiting, self.stopping)
        self.store.key_value_set(f"envace/beat/{self.index}", own.to_text(), allow_overwrite=True)
        for key, text in self.store.key_value_dir_get("envace/beat/"):
            process, beat = int(key.rpartition("/")[2]), Beat.from_text(text)
            if process == self.index:
                continue
            before = self._seen.get(process)
            alive, moved = (before[1], before[2]) if before else (now, now)
            if before is not None and beat.beats != before[0].beats:
                alive = now
            if before is not None and (beat.moves != before[0].moves or beat.waiting):
                moved = now
            self._seen[process] = beat, alive, moved
            if beat.stop and not self.stopping:
                self.stopping = True
                self.stop()
        if self.waiting_since is not None:
            line = self.who_is_lost(now)
            if line is not None:
                self.lost(line)

    def who_is_lost(self, now: float) -> str | None:
        """One line that names the processes which have not moved for too long, or None."""
        assert self.waiting_since is not None
        limit = min(self.timeout, GRACE) if self.stopping else self.timeout
        found = []
        for process in range(self.count):
            if process == self.index:
                continue
            if process not in self._seen:
                if now - self.waiting_since > limit:
                    found.append(f"process {process} has never been heard of")
                continue
            beat, alive, moved = self._seen[process]
            silent = now - min(alive, moved) if not beat.waiting else now - alive
            if silent > limit:
                how = "is gone or stopped" if now - alive > limit else "hangs"
                found.append(f"process {process} on {beat.host} {how}: last seen {silent:.0f} s ago in {beat.phase}")
        if not found:
            return None
        return f"{'; '.join(found)} (process {self.index} waits in {self.phase_name})"


class Processes:
    """This process among all of them; `index` and `count` are 0 and 1 where there is one."""

    def __init__(self, index: int = 0, count: int = 1, watch: Watch | None = None):
        self.index, self.count, self.watch = index, count, watch
        self._exchanges = 0

    @property
    def main(self) -> bool:
        """Whether this is the process that writes."""
        return self.index == 0

    @property
    def alone(self) -> bool:
        return self.count == 1

    def phase(self, name: str) -> None:
        """For the beats: what is going on."""
        if self.watch is not None:
            self.watch.move(name)

    def follow(self, progress: Callable[[], object]) -> None:
        """For the beats: something whose change says that the main thread gets on."""
        if self.watch is not None:
            self.watch.progress = progress

    def stopping(self) -> None:
        """This process was told to stop: the others will hear of it."""
        if self.watch is not None:
            self.watch.stopping = True

    def waits(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Around what needs all processes (their programs, their barriers), and around compiling and loading."""
        return contextlib.nullcontext() if self.watch is None else self.watch.wait(name)

    def meet(self, name: str) -> None:
        """Waits until every process is here, however long the slowest takes as long as it moves."""
        if self.watch is None:
            return
        self._exchanges += 1
        with self.waits(name):
            # The watch names who is missing; the barrier's own limit is only there to have an end.  Its id is a number
            # alone: one process may come to stop where another comes with its trajectories.
            self.watch.store.wait_at_barrier(f"envace/{self._exchanges}", FOR_EVER)

    def gather(self, value: Any, name: str) -> list[Any]:
        """The JSON values of all processes, by process, in every process."""
        if self.watch is None:
            return [value]
        self.meet(name)
        with self.waits(name):
            data = zlib.compress(json.dumps(value).encode(), 1)
            lengths = _allgather(np.asarray([len(data)], np.int64))[:, 0]
            size = max(SMALLEST_MESSAGE, 1 << int(lengths.max() - 1).bit_length())
            padded = np.zeros(size, np.uint8)
            padded[: len(data)] = np.frombuffer(data, np.uint8)
            rows = _allgather(padded)
        return [json.loads(zlib.decompress(row[:length].tobytes())) for row, length in zip(rows, lengths)]

    def first(self, act: Callable[[], Any], name: str) -> Any:
        """What `act` returns in process 0 (JSON), in every process; a `UserError` there is raised in all."""
        answer: dict[str, Any] = {}
        if self.main:
            try:
                answer = {"value": act()}
            except UserError as error:
                if self.alone:
                    raise
                answer = {"error": str(error)}
        answer = self.gather(answer, name)[0]
        if "error" in answer:
            raise UserError(answer["error"])
        return answer["value"]

    def close(self) -> None:
        if self.watch is not None:
            self.watch.close()


def agree(value: Any, name: str) -> list[Any]:
    """The JSON values of all processes, by process, through the coordinator's store: small ones, from any thread.

    It runs no program, so it may come at another time in each process; waits as long as the slowest takes.  `name` is
    used once in a run's life.
    """
    import jax

    if jax.process_count() == 1:
        return [value]
    from envace_jax.compat import key_value_store

    store = key_value_store()
    store.key_value_set(f"envace/{name}/{jax.process_index()}", json.dumps(value))
    texts = [store.blocking_key_value_get(f"envace/{name}/{i}", FOR_EVER) for i in range(jax.process_count())]
    return [json.loads(text) for text in texts]


def _allgather(array: np.ndarray) -> np.ndarray:
    from jax.experimental import multihost_utils

    if array.dtype == np.int64:  # jax would make it 32 bits
        return np.asarray(multihost_utils.process_allgather(array.view(np.uint32))).view(np.int64)
    return np.asarray(multihost_utils.process_allgather(array))


def processes(hang_timeout: float = 300.0) -> Processes:
    """This process's place among those that `initialize` joined, with its watch running."""
    import jax

    if jax.process_count() == 1:
        return Processes()

    def lost(line: str) -> None:
        print(
            f"envace_jax: {line}; this process ends (status {LOST}), the last whole checkpoint stays: start all "
            "processes again",
            file=sys.stderr,
        )
        exit_now(LOST)

    from envace_jax.compat import key_value_store

    watch = Watch(key_value_store(), jax.process_index(), jax.process_count(), hang_timeout, lost)
    watch.start()
    return Processes(jax.process_index(), jax.process_count(), watch)
