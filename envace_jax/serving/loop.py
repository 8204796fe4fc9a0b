"""The thread that owns the engine: requests of all clients share its batch, and no client can hold it up.

The asyncio side submits and cancels through a queue; the thread drains it between two chunks, advances the device
and reports what was sampled. Nothing else may touch the engine while the loop runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from envace_jax.config import UserError
from envace_jax.sampling.engine import Request


class Overloaded(RuntimeError):
    """The queue is full, or the server is draining; `retry_after` seconds is a fair time to come back."""

    def __init__(self, message: str, retry_after: int):
        super().__init__(message)
        self.retry_after = retry_after


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a request got since its last report.

    `finish` is None while it goes on; `error` is set when it could not run.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str | None = None
    error: str | None = None


Report = Callable[[Progress], None]

STREAM_SECONDS, EVENTS_A_SECOND = 0.05, 320
"""Reports of one stream come no closer than this, and those of all streams no faster. An event costs about a tenth of a
millisecond, most of it in the socket, and a small model has a chunk of tokens every few; twenty events a second read as
smoothly as more, and with many streams their events are to take a few hundredths of a core at most."""


@dataclasses.dataclass
class _Running:
    ticket: int
    request: Request
    report: Report
    stream: bool
    deadline: float
    engine_id: int | None = None
    reported: int = 0
    reported_at: float = 0.0


class EngineLoop:
    """One engine, many clients. `max_requests` bounds what is live and waiting; `time_limit` (seconds) one request.

    Reports come on the loop's thread: hand them over with `loop.call_soon_threadsafe`.
    """

    def __init__(self, engine: Any, *, max_requests: int = 256, time_limit: float = 600.0):
        self.engine, self.max_requests, self.time_limit = engine, max_requests, time_limit
        self._commands: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._tickets = itertools.count()
        self._lock = threading.Lock()
        self._open = 0
        self._draining = False
        self._stop = threading.Event()
        self.failure: str | None = None
        self.counts = {"requests": 0, "finished": 0, "cancelled": 0, "refused": 0, "timed_out": 0, "tokens": 0}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def open_requests(self) -> int:
        return self._open

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.failure is None

    def submit(self, request: Request, report: Report, stream: bool = False) -> int:
        """Queues a request and returns its ticket; raises `Overloaded` when there is no room."""
        with self._lock:
            if self._draining or self.failure:
                raise Overloaded(self.failure or "the server is shutting down", 30)
            if self._open >= self.max_requests:
                self.counts["refused"] += 1
                raise Overloaded(f"{self._open} requests are open, which is the limit", 2)
            self._open += 1
            self.counts["requests"] += 1
        ticket = next(self._tickets)
        deadline = time.monotonic() + self.time_limit
        self._commands.put(("submit", _Running(ticket, request, report, stream, deadline)))
        return ticket

    def cancel(self, ticket: int) -> None:
        """Frees a request's row at the next chunk; nothing more is reported."""
        self._commands.put(("cancel", ticket))

    def release(self, affinity: Any) -> None:
        """Lets go of a ledger whose row was kept."""
        self._commands.put(("release", affinity))

    def drain(self, seconds: float) -> bool:
        """Takes no new requests, waits for the open ones, stops the thread; False when some were cut off."""
        with self._lock:
            self._draining = True
        end = time.monotonic() + seconds
        while self._open and time.monotonic() < end and self._thread.is_alive():
            time.sleep(0.02)
        whole = self._open == 0
        self._stop.set()
        self._commands.put(("wake", None))
        self._thread.join(timeout=30)
        return whole

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        running: dict[int, _Running] = {}
        by_engine: dict[int, _Running] = {}
        try:
            while not self._stop.is_set():
                self._take_commands(running, by_engine, wait=not running and self.engine.idle)
                if not running and self.engine.idle:
                    continue
                for completion in self.engine.step():
                    job = by_engine.pop(completion.request_id, None)
                    if job is not None:
                        ids, logprobs = completion.ids[job.reported :], completion.logprobs[job.reported :]
                        self._end(running, job, Progress(ids, logprobs, completion.finish))
                self._stream(running, by_engine)
        except Exception as e:  # the device or the engine broke: every client is told, the health check fails
            self.failure = f"the engine stopped: {type(e).__name__}: {e}"
        finally:
            for job in list(running.values()):
                self._end(running, job, Progress((), (), "error", self.failure or "the server is shutting down"))
            while not self._commands.empty():
                name, value = self._commands.get()
                if name == "submit":
                    self._end(running, value, Progress((), (), "error", self.failure or "the server is shutting down"))

    def _take_commands(self, running: dict[int, _Running], by_engine: dict[int, _Running], wait: bool) -> None:
        while wait or not self._commands.empty():
            name, value = self._commands.get()
            wait = False
            if name == "submit":
                running[value.ticket] = value
                try:
                    value.engine_id = self.engine.submit(value.request)
                    by_engine[value.engine_id] = value
                except UserError as e:
                    self._end(running, value, Progress((), (), "error", str(e)))
            elif name == "cancel" and value in running:
                job = running[value]
                self._forget(job, by_engine)
                self.counts["cancelled"] += 1
                self._close(running, job)
            elif name == "release":
                self.engine.release(value)

    def _stream(self, running: dict[int, _Running], by_engine: dict[int, _Running]) -> None:
        """Reports what streams have got, and ends what has had its time."""
        now = time.monotonic()
        apart = max(STREAM_SECONDS, sum(job.stream for job in running.values()) / EVENTS_A_SECOND)
        due = {
            job.engine_id: job
            for job in running.values()
            if job.engine_id is not None
            and (now > job.deadline or (job.stream and job.reported_at + (apart if job.reported else 0.0) <= now))
        }
        news = self.engine.news({engine_id: job.reported for engine_id, job in due.items()}) if due else {}
        for engine_id, job in due.items():
            ids, logprobs = news.get(engine_id, ((), ()))
            progress = Progress(tuple(ids), tuple(logprobs), "length" if now > job.deadline else None)
            if progress.finish is not None:
                self._forget(job, by_engine)
                self.counts["timed_out"] += 1
                self._end(running, job, progress)
            elif ids:
                job.reported += len(ids)
                job.reported_at = now
                job.report(progress)

    def _forget(self, job: _Running, by_engine: dict[int, _Running]) -> None:
        if job.engine_id is not None:
            by_engine.pop(job.engine_id, None)
            self.engine.cancel(job.engine_id)

    def _end(self, running: dict[int, _Running], job: _Running, progress: Progress) -> None:
        self.counts["finished"] += 1
        self.counts["tokens"] += job.reported + len(progress.ids)
        self._close(running, job)
        job.report(progress)

    def _close(self, running: dict[int, _Running], job: _Running) -> None:
        running.pop(job.ticket, None)
        with self._lock:
            self._open -= 1
