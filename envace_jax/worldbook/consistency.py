"""Does an episode's answer agree with the worldbook and with the episode's own earlier answers?

Each answer is set against the state that the answers before it imply. Where a rule fires, its answer is the one that
agrees. Else an answer *contradicts* where a rule of its action has answers of this form, but none can have given this
one: a place that it reads is known to differ, or a guard is known to fail. It *agrees* where a rule can have given it
and something that was known bears that out. Nothing is said where no rule has answers of this form, or nothing was
known that could have told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from envace_jax.datasets.records import Task
from envace_jax.datasets.traces import task_group
from envace_jax.text.transcript import Observation, ToolCall, Transcript
from envace_jax.worldbook.conditions import compile_condition
from envace_jax.worldbook.harness import Harness, HarnessConfig
from envace_jax.worldbook.ingest import observation_value
from envace_jax.worldbook.matching import match
from envace_jax.worldbook.retrieve import is_novelty
from envace_jax.worldbook.state import StateError, empty_state, freeze, frozen_arguments, json_equal
from envace_jax.worldbook.store import Worldbook
from envace_jax.worldbook.terms import Scope
from envace_jax.worldbook.workspace import Session, open_session


@dataclass(frozen=True)
class Consistency:
    """How the answers of an episode stand to a worldbook: by call, whether its answer contradicts (True), agrees
    (False), or cannot be judged (None; so are answers of the host)."""

    marks: tuple[bool | None, ...]

    @property
    def calls(self) -> int:
        return len(self.marks)

    @property
    def judged(self) -> int:
        return sum(mark is not None for mark in self.marks)

    @property
    def contradictions(self) -> int:
        return sum(mark is True for mark in self.marks)


class ConsistencyWatch:
    """Counts answers that contradict a worldbook. The tracked state follows the answers, so that one lapse counts once.

    Args:
        explicit: start from the task's explicit initial state. Off, nothing but the transcript is looked at, as in
            training, where a reward may rest on nothing else.
    """

    def __init__(self, book: Worldbook, *, explicit: bool = False):
        self.harness = Harness(book, None, HarnessConfig())
        self.explicit = explicit
        # Conditions that only keep a rule to values the traces showed are no guards: a new value is no contradiction.
        self._rules: dict[str, list[tuple[Any, list[Any]]]] = {}
        for rule in book.rules:
            if rule.render is not None:
                guards = [compile_condition(c) for c in rule.conditions if not is_novelty(c)]
                self._rules.setdefault(rule.action_type, []).append((rule.render, guards))

    def check(self, task: Task, transcript: Transcript) -> Consistency:
        """The marks of one finished episode, in the order of its answered calls."""
        initial = task.meta.get("initial_state") if self.explicit else None
        session = open_session(initial, group=task_group(task))
        marks: list[bool | None] = []
        for call, observation in answered(transcript):
            if observation.source == "error":
                marks.append(None)
                continue
            marks.append(self.mark(session, call, observation.text))
            session = self.harness.observe(session, call.name, call.arguments, observation.text)
        return Consistency(tuple(marks))

    def mark(self, session: Session, call: ToolCall, text: str) -> bool | None:
        """Whether an answer contradicts rules and tracked state; None where that cannot be told."""
        _, result = self.harness.step(session, call.name, call.arguments)
        if result.source == "rule":
            same = "".join(result.text.split()) == "".join(text.split())
            return not (same or json_equal(result.value, observation_value(text)))
        name = self.harness.worldbook.canonical_names.get(call.name, call.name)
        value = observation_value(text)
        try:
            args, out = frozen_arguments(call.arguments), freeze(value)
        except StateError:
            return None
        here = Scope(session.state.advance().root, args, out)
        nowhere = Scope(empty_state().root, args, out)
        known_form = possible = told = False
        for render, guards in self._rules.get(name, ()):
            known_form |= match(render, value, nowhere) is not None
            verdicts = [guard(here) for guard in guards]
            reveals = match(render, value, here)
            if reveals is None or False in verdicts:
                continue
            possible = True
            everything = match(render, value, nowhere) or []
            told |= len(reveals) < len(everything) or (bool(verdicts) and None not in verdicts)
        if possible:
            return False if told else None
        return True if known_form else None


def answered(transcript: Transcript) -> list[tuple[ToolCall, Observation]]:
    """The calls of a transcript with what each got back, the host's errors included."""
    return [pair for turn in transcript for s in turn.steps for pair in zip(s.output.calls, s.observations)]


def consistency_metrics(found: Sequence[Consistency]) -> dict[str, float]:
    """Figures of a step: answered calls an episode, the share of them that was judged, contradictions an episode, and
    their share of what was judged (left out where nothing was)."""
    calls, judged = sum(c.calls for c in found), sum(c.judged for c in found)
    against = sum(c.contradictions for c in found)
    n = max(1, len(found))
    out = {
        "worldbook/calls": calls / n,
        "worldbook/judged": judged / calls if calls else 0.0,
        "worldbook/contradictions": against / n,
    }
    return out | ({"worldbook/contradiction_share": against / judged} if judged else {})
