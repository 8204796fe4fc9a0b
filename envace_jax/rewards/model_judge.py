"""Judging by a language model: an endpoint, or a frozen policy in this process.

A turn is judged step by step: an item that passed at a step is not asked again at later ones (it has passed), and
nothing waits: `submit` starts the first round, `poll` starts the next where one has come in. What does not come
back as a verdict is `None` with its cause, never a fail.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from envace_jax.endpoint import Completion
from envace_jax.rewards.checklist import Verdict
from envace_jax.rewards.judge import JudgeRequest, JudgeResult
from envace_jax.rewards.judge_prompts import judge_messages, read_verdicts, verdict_schema, wrong_verdicts


class Backend(Protocol):
    """Anything that answers chat messages later: an `Endpoint`, or an engine in this process."""

    def submit(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        schema: Mapping[str, Any] | None = None,
        schema_name: str = "answer",
        check: Callable[[str], str | None] | None = None,
        **sampling: Any,
    ) -> concurrent.futures.Future[Completion]: ...


Place = tuple[int, int]
"""(variant, item)."""


@dataclasses.dataclass
class _Job:
    request: JudgeRequest
    verdicts: dict[tuple[int, int, int], Verdict]
    causes: dict[tuple[int, int, int], str]
    usage: dict[str, float]
    step: int = -1
    asked: list[tuple[tuple[Place, ...], concurrent.futures.Future[Completion]]] = dataclasses.field(
        default_factory=list
    )
    passed: set[Place] = dataclasses.field(default_factory=set)


class ModelJudge:
    """`Judge` over a backend. `batch_items` asks all open items of a step in one request (the paper: one each).

    `pump` is called on every poll: an in-process backend advances its engine there.
    """

    def __init__(self, backend: Backend, *, batch_items: bool = False, pump: Callable[[], None] | None = None):
        self._backend = backend
        self._batch = batch_items
        self._pump = pump
        self._jobs: list[_Job] = []

    def judge(self, request: JudgeRequest) -> JudgeResult:
        """Asks and waits. Other requests' results stay for their own `poll`."""
        job = self._start(request)
        while not self._advance(job):
            if self._pump:
                self._pump()
            else:
                concurrent.futures.wait([f for _, f in job.asked], timeout=1.0)
        return _result(job)

    def submit(self, request: JudgeRequest) -> str:
        self._jobs.append(self._start(request))
        return request.id

    def poll(self) -> list[JudgeResult]:
        """Results that are complete; never waits."""
        if self._pump and self._jobs:
            self._pump()
        done = [job for job in self._jobs if self._advance(job)]
        self._jobs = [job for job in self._jobs if job not in done]
        return [_result(job) for job in done]

    def _start(self, request: JudgeRequest) -> _Job:
        return _Job(request, {}, {}, {"requests": 0, "prompt_tokens": 0, "completion_tokens": 0, "cache_hits": 0})

    def _advance(self, job: _Job) -> bool:
        """Takes in a finished round and starts the next; True when the turn is judged."""
        while all(future.done() for _, future in job.asked):
            for places, future in job.asked:
                self._take(job, places, future.result())
            job.asked = []
            job.step += 1
            if job.step >= job.request.n_steps:
                return True
            self._ask(job)
        return False

    def _ask(self, job: _Job) -> None:
        open_places = []
        for v, items in enumerate(job.request.items):
            for k in range(len(items)):
                if (v, k) in job.passed:
                    job.verdicts[v, k, job.step] = True
                else:
                    open_places.append((v, k))
        groups = [tuple(open_places)] if self._batch and open_places else [(place,) for place in open_places]
        for places in groups:
            asked = [job.request.items[v][k] for v, k in places]
            future = self._backend.submit(
                judge_messages(job.request, job.step, asked),
                schema=verdict_schema(len(asked)),
                schema_name="verdict",
                check=functools.partial(wrong_verdicts, n_items=len(asked)),
            )
            job.asked.append((places, future))

    def _take(self, job: _Job, places: tuple[Place, ...], done: Completion) -> None:
        job.usage["requests"] += done.attempts
        job.usage["prompt_tokens"] += done.prompt_tokens
        job.usage["completion_tokens"] += done.completion_tokens
        job.usage["cache_hits"] += done.cached
        read = read_verdicts(done.text, len(places)) if done.text is not None else ""
        for i, (v, k) in enumerate(places):
            if isinstance(read, tuple):
                job.verdicts[v, k, job.step] = read[i]
                if read[i]:
                    job.passed.add((v, k))
            else:
                job.verdicts[v, k, job.step] = None
                job.causes[v, k, job.step] = done.cause or "malformed"


def _result(job: _Job) -> JudgeResult:
    table = tuple(
        tuple(tuple(job.verdicts[v, k, s] for s in range(job.request.n_steps)) for k in range(len(items)))
        for v, items in enumerate(job.request.items)
    )
    return JudgeResult(job.request.id, table, job.causes, job.usage)
