"""World model against world: act in one, replay in the other.

*Real*: the agent acts in the real environment. *WM*: it acts in the world model, and the world model's own answers say
whether the task was done. *W2R*: the calls it made there are replayed, unchanged, in a fresh real episode, and that is
judged. CR (consistency ratio) = W2R / Real. A task that nothing could be replayed of counts as a failure, and is
counted separately as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from envace_jax.datasets.records import Task
from envace_jax.environments import Environment, is_rejection, make_environment
from envace_jax.text.transcript import canonical_json
from envace_jax.worldbook.state import UNKNOWN, PMap, State, freeze, truth_equal

MAX_STEPS = 50

Call = tuple[str, dict[str, Any]]
Turn = tuple[str, dict[str, Any], Any]


class ReplayAgent(Protocol):
    """Chooses the next call of a task from what was answered so far; None ends the episode."""

    def act(self, task: Task, history: Sequence[Turn]) -> Call | None: ...


class ReplayDomain(Protocol):
    """Tasks with a real environment and two judgements: of a real end state, and of a transcript alone."""

    name: str

    def make(self, task: Task) -> Environment: ...

    def solved(self, task: Task, environment: Environment, history: Sequence[Turn]) -> bool: ...

    def claimed(self, task: Task, history: Sequence[Turn]) -> bool: ...


class ReferenceDomain:
    """Tasks whose recorded calls say what must come about: the state that they lead to in the real environment.

    Solved: the real state equals it. Claimed: the accepted calls that changed it (found by the real hash) were accepted
    in the transcript as well, in any order.
    """

    def __init__(self, name: str):
        self.name = name
        self._goals: dict[str, tuple[str, list[str]]] = {}

    def make(self, task: Task) -> Environment:
        return make_environment(task)

    def _goal(self, task: Task) -> tuple[str, list[str]]:
        if task.uuid not in self._goals:
            environment = self.make(task)
            writes, before = [], environment.state_hash()
            for call in task.recorded_calls:
                environment.step(call.name, call.arguments)
                after = environment.state_hash()
                if after != before:
                    writes.append(canonical_json([call.name, dict(sorted(call.arguments.items()))]))
                before = after
            self._goals[task.uuid] = (before, sorted(writes))
        return self._goals[task.uuid]

    def solved(self, task: Task, environment: Environment, history: Sequence[Turn]) -> bool:
        return environment.state_hash() == self._goal(task)[0]

    def claimed(self, task: Task, history: Sequence[Turn]) -> bool:
        wanted = self._goal(task)[1]
        done = [
            canonical_json([name, dict(sorted(arguments.items()))])
            for name, arguments, value in history
            if not is_rejection(self.name, value)
        ]
        return all(wanted.count(w) <= done.count(w) for w in set(wanted))


class RecordedAgent:
    """Makes the recorded calls of the task, in order, whatever is answered."""

    def act(self, task: Task, history: Sequence[Turn]) -> Call | None:
        calls = task.recorded_calls
        return (calls[len(history)].name, calls[len(history)].arguments) if len(history) < len(calls) else None


class CautiousAgent:
    """The recorded agent, except that it stops after a refusal that the recording does not have."""

    def __init__(self, name: str):
        self.name = name

    def act(self, task: Task, history: Sequence[Turn]) -> Call | None:
        calls = task.recorded_calls
        if len(history) >= len(calls):
            return None
        if history:
            recorded = json.loads(calls[len(history) - 1].result)
            if is_rejection(self.name, history[-1][2]) and not is_rejection(self.name, recorded):
                return None
        return calls[len(history)].name, calls[len(history)].arguments


class ReadingAgent(CautiousAgent):
    """The cautious agent, except that it knows only what it was told: it stops after an empty answer where the recorded
    one is not, and before a call with a word that the recording first shows in an answer and that nothing it saw has
    shown (so it could not have made the call)."""

    def act(self, task: Task, history: Sequence[Turn]) -> Call | None:
        call = super().act(task, history)
        if call is None:
            return None
        results = [json.loads(c.result) for c in task.recorded_calls[: len(history)]]
        if history and not words(history[-1][2]) and words(results[-1]):
            return None
        # What is in the request, or in no answer (the agent's own choice of words), needs no answer.
        known = set().union(*map(words, task.user_turns), *(words([made, value]) for _, made, value in history))
        return None if words(call[1]) & set().union(*map(words, results)) - known else call


def words(value: Any) -> set[str]:
    """Words and numbers of a JSON value or a text, in lower case."""
    text = value if isinstance(value, str) else re.sub(r"\\[nrt]", " ", canonical_json(value))
    return set(_WORD.findall(text.lower()))


_WORD = re.compile(r"[a-z0-9]{2,}")


def play(agent: ReplayAgent, task: Task, environment: Environment, max_steps: int = MAX_STEPS) -> list[Turn]:
    """The episode of an agent in an environment: (name, arguments, value) of every call."""
    history: list[Turn] = []
    while len(history) < max_steps:
        call = agent.act(task, history)
        if call is None:
            break
        history.append((call[0], call[1], environment.step(call[0], call[1])))
    return history


@dataclass
class ReplayReport:
    """Success by task in the three settings, with the first step at which world model and world part."""

    tasks: list[str] = field(default_factory=list)
    real: list[bool] = field(default_factory=list)
    wm: list[bool] = field(default_factory=list)
    w2r: list[bool] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    divergence: list[int | None] = field(default_factory=list)
    steps: int = 0
    equal_steps: int = 0
    state: list[tuple[int, int, int]] = field(default_factory=list)  # `projected` at the end, where it can be

    def summary(self) -> dict[str, Any]:
        """Real, WM, W2R as shares, CR, and how far world model and world agree step by step."""
        n = max(1, len(self.tasks))
        real, w2r = sum(self.real) / n, sum(self.w2r) / n
        return {
            "tasks": len(self.tasks),
            "Real": real,
            "WM": sum(self.wm) / n,
            "W2R": w2r,
            "CR": w2r / real if real else None,
            "errors": len(self.errors),
            "diverged": sum(d is not None for d in self.divergence),
            "first_divergence": _median([d for d in self.divergence if d is not None]),
            "steps_equal": self.equal_steps / self.steps if self.steps else None,
            **self._state(),
        }

    def _state(self) -> dict[str, float | None]:
        """Shares of the true state's values that the world model has right, has wrong, and knows not to know."""
        totals = [sum(part) for part in zip(*self.state)] if self.state else [0, 0, 0]
        names = ("state_right", "state_wrong", "state_unknown")
        return {name: n / sum(totals) if sum(totals) else None for name, n in zip(names, totals)}

    def interval(self, resamples: int = 10_000, seed: int = 0) -> tuple[float, float]:
        """95% interval of CR by resampling tasks."""
        rng = np.random.default_rng(seed)
        real, w2r = np.array(self.real, float), np.array(self.w2r, float)
        if not len(real) or not real.any():
            return (float("nan"), float("nan"))
        picks = rng.integers(0, len(real), (resamples, len(real)))
        below = real[picks].sum(1)
        ratios = w2r[picks].sum(1)[below > 0] / below[below > 0]
        low, high = np.percentile(ratios, [2.5, 97.5])
        return float(low), float(high)


def replay(
    tasks: Sequence[Task],
    domain: ReplayDomain,
    agent: ReplayAgent,
    make_model: Callable[[Task], Environment],
    max_steps: int = MAX_STEPS,
) -> ReplayReport:
    """Real, WM and W2R of an agent on tasks; ``make_model`` opens the world model's episode of a task."""
    report = ReplayReport()
    for task in tasks:
        real = domain.make(task)
        history = play(agent, task, real, max_steps)
        report.tasks.append(task.uuid)
        report.real.append(domain.solved(task, real, history))
        _close(real)
        try:
            model = make_model(task)
            imagined = play(agent, task, model, max_steps)
        except Exception as error:  # a harness that fails is a failed task, not the end of the evaluation
            report.errors.append(f"{task.uuid}: {type(error).__name__}: {error}"[:300])
            report.wm.append(False)
            report.w2r.append(False)
            report.divergence.append(0)
            continue
        report.wm.append(domain.claimed(task, imagined))
        fresh = domain.make(task)
        again, parted = [], None
        for step, (name, arguments, value) in enumerate(imagined):
            truth = fresh.step(name, arguments)
            again.append((name, arguments, truth))
            report.steps += 1
            if truth == value:
                report.equal_steps += 1
            elif parted is None:
                parted = step
        report.w2r.append(domain.solved(task, fresh, again))
        report.divergence.append(parted)
        session, truth = getattr(model, "session", None), getattr(fresh, "state", None)
        if session is not None and isinstance(truth, dict):
            report.state.append(projected(session.state, truth))
        _close(fresh)
    return report


def projected(tracked: State, truth: dict[str, Any]) -> tuple[int, int, int]:
    """How many values of the true state a tracked one has right, has wrong, and does not know.

    Values are what stands at the ends of paths through objects. One that only the tracked state has is wrong.
    """
    right = wrong = unknown = 0
    there = dict(_values(freeze(truth), ()))
    for path, value in there.items():
        found = tracked.get(("world", *path))
        answer = truth_equal(found, value)
        right, wrong, unknown = right + (answer is True), wrong + (answer is False), unknown + (answer is None)
    extra = [path for path, _ in _values(tracked.get(("world",)), ()) if path not in there]
    return right, wrong + len(extra), unknown


def _values(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(node, PMap):
        for key, value in node.items():
            yield from _values(value, (*path, key))
    elif node is not UNKNOWN:
        yield path, node


def _close(environment: Any) -> None:
    close = getattr(environment, "close", None)
    if close is not None:
        close()


def _median(values: list[int]) -> float | None:
    return float(np.median(values)) if values else None
