"""What a judge is, and the judge that needs no model: rules checked against the transcript.

A judge is asked once a turn, when the turn ends, and answers for every item of every checklist variant at
every step of the turn. Slow judges answer later: `submit` returns at once and `poll` hands out what has come
in, so that other episodes go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from envace_jax.datasets.cm2 import ChecklistItem
from envace_jax.rewards.checklist import Verdict
from envace_jax.rewards.verifiers import verify
from envace_jax.text.transcript import Transcript

NO_RULE = "no_rule"
"""Cause of a missing verdict: the item carries no machine-readable rule."""


@dataclass(frozen=True)
class JudgeRequest:
    """One turn to judge.

    Attributes:
        id: the caller's name for the request, returned with the result.
        task_id: the task's uuid.
        system: the system prompt of the conversation, if any.
        transcript: the turns so far, the judged one last.
        items: `items[variant][item]`, the checklist items of the judged turn.
    """

    id: str
    task_id: str
    system: str | None
    transcript: Transcript
    items: tuple[tuple[ChecklistItem, ...], ...]

    @property
    def turn(self) -> int:
        """Index of the judged turn."""
        return len(self.transcript) - 1

    @property
    def n_steps(self) -> int:
        """How many steps the judged turn has."""
        return len(self.transcript[-1].steps)


@dataclass(frozen=True)
class JudgeResult:
    """The answer to one request.

    Attributes:
        request_id: the request's id.
        verdicts: `verdicts[variant][item][step]`.
        causes: why verdicts are missing, `(variant, item, step) -> cause`; one entry for every `None`.
        usage: what the judge counted (tokens, requests, cache hits), summed by the caller.
    """

    request_id: str
    verdicts: tuple[tuple[tuple[Verdict, ...], ...], ...]
    causes: Mapping[tuple[int, int, int], str] = field(default_factory=dict)
    usage: Mapping[str, float] = field(default_factory=dict)


class Judge(Protocol):
    """Answers checklist items. `judge` waits for the answer; `submit` and `poll` do not."""

    def judge(self, request: JudgeRequest) -> JudgeResult: ...

    def submit(self, request: JudgeRequest) -> str: ...

    def poll(self) -> list[JudgeResult]: ...


class RuleJudge:
    """Judges by the items' rules. A rule speaks about a whole turn, so its verdict stands at the turn's last
    step and earlier steps are fails: a state that held halfway and was spoilt afterwards does not pass."""

    def __init__(self) -> None:
        self._done: list[JudgeResult] = []

    def judge(self, request: JudgeRequest) -> JudgeResult:
        """Verify every item now.

        Raises:
            UserError: when a rule is malformed.
        """
        causes: dict[tuple[int, int, int], str] = {}
        verdicts: list[tuple[tuple[Verdict, ...], ...]] = []
        for v, items in enumerate(request.items):
            table: list[tuple[Verdict, ...]] = []
            for k, item in enumerate(items):
                if item.rule is None:
                    table.append((None,) * request.n_steps)
                    causes.update({(v, k, step): NO_RULE for step in range(request.n_steps)})
                elif request.n_steps:
                    holds = verify(item.rule, request.transcript, request.turn)
                    table.append((False,) * (request.n_steps - 1) + (holds,))
                else:
                    table.append(())
            verdicts.append(tuple(table))
        return JudgeResult(request.id, tuple(verdicts), causes)

    def submit(self, request: JudgeRequest) -> str:
        """Verify now, hand out at the next `poll`."""
        self._done.append(self.judge(request))
        return request.id

    def poll(self) -> list[JudgeResult]:
        """The results since the last call."""
        done, self._done = self._done, []
        return done
