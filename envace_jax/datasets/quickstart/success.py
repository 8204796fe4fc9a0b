"""Real success: what an episode's calls do in the real environment, and what its replies state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from envace_jax.datasets.quickstart.environment import QuickstartEnvironment
from envace_jax.datasets.quickstart.generator import accepted_write
from envace_jax.datasets.records import Task
from envace_jax.rewards.verifiers import turn_calls, verify
from envace_jax.text.transcript import Transcript, canonical_json


def success(task: Task, transcript: Transcript) -> bool:
    """Whether an episode did what its task asked for, judged in the real environment.

    The calls are replayed from the task's initial state, whatever their observations were. Success needs all
    turns, the final state of the recorded dialogue, exactly its accepted writes (no other one, none twice),
    and in every turn a reply that states the required values.
    """
    if len(transcript) != len(task.user_turns):
        return False
    made = [(call.name, call.arguments) for turn in transcript for call, _ in turn_calls(turn)]
    wanted = [(call.name, call.arguments) for call in task.recorded_calls]
    if _outcome(task, made) != _outcome(task, wanted):
        return False
    rules = [item.rule for items in task.checklists[0] for item in items if item.rule and item.rule["kind"] == "reply"]
    return all(verify(rule, transcript, turn) for turn, rule in enumerate(rules))


def _outcome(task: Task, calls: Iterable[tuple[str, Any]]) -> tuple[str, Counter[str]]:
    """The state that calls lead to, and the writes among them that were accepted."""
    environment = QuickstartEnvironment(task.meta["initial_state"])
    accepted: Counter[str] = Counter()
    for name, arguments in calls:
        if accepted_write(name, environment.step(name, arguments)):
            accepted[canonical_json([name, dict(sorted(arguments.items()))])] += 1
    return environment.state_hash(), accepted
