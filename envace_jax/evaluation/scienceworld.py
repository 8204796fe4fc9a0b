"""ScienceWorld as a benchmark: tasks out of the simulator, its own score.

One tool, ``do(action)``, whose text the simulator reads; the score is its 0 to 100 after the calls of a transcript.
Held-out tasks are the first 10 test variations of every task type, as is usual; ``all`` are all test variations.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from envace_jax.config import UserError
from envace_jax.datasets.records import Task, spread
from envace_jax.evaluation.text_worlds import ScienceWorldEnvironment, scienceworld_missing
from envace_jax.rewards.verifiers import turn_calls
from envace_jax.text.transcript import Message, ToolCall, Transcript, canonical_json

SOURCE = "scienceworld"
USUAL = 10
TOOL = {
    "type": "function",
    "function": {
        "name": "do",
        "description": (
            "Does one action in the world and tells what is seen. Actions are short commands, such as: look around; "
            "look at OBJ; open OBJ; go to LOC; pick up OBJ; put OBJ in OBJ; pour OBJ in OBJ; mix OBJ; activate OBJ; "
            "deactivate OBJ; use OBJ on OBJ; connect OBJ to OBJ; focus on OBJ; read OBJ; inventory; wait."
        ),
        "parameters": {
            "type": "object",
            "properties": {"action": {"type": "string", "description": "The command."}},
            "required": ["action"],
        },
    },
}
RULES = "You act in a small simulated world through the tool do, one action at a time, until the task is done."
_lock = threading.Lock()


@functools.cache
def _world() -> Any:
    """One simulator for what needs no episode of its own: lists, descriptions, gold paths, scores."""
    if problem := scienceworld_missing():
        raise UserError(problem)
    from scienceworld import ScienceWorldEnv

    return ScienceWorldEnv("", envStepLimit=10_000)


def load_scienceworld(split: str = "heldout", limit: int = 0, categories: Sequence[str] = ()) -> list[Task]:
    """Tasks by type and variation.

    Raises:
        UserError: the package or Java is missing, or there is no such task type.
    """
    with _lock:
        world = _world()
        names = sorted(world.get_task_names())
        if unknown := sorted(set(categories) - set(names)):
            raise UserError(f"ScienceWorld task {unknown[0]!r}: expected one of {', '.join(names)}")
        chosen = []
        for name in categories or names:
            world.load(name, 0, "easy")
            numbers = world.get_variations_train() if split == "train" else world.get_variations_test()
            chosen += [(name, int(n)) for n in (numbers if split == "all" else numbers[:USUAL])]
        return [_task(world, *item, split) for item in spread(chosen, limit)]


def _task(world: Any, name: str, variation: int, split: str) -> Task:
    world.load(name, variation, "easy")
    meta = {
        "environment": SOURCE,
        "split": "train" if split == "train" else "heldout",
        "category": name,
        "simulation": {"task": name, "variation": variation},
    }
    messages = (Message("system", RULES), Message("user", world.get_task_description()))
    return Task(f"scienceworld-{name}-{variation}", SOURCE, messages, (TOOL,), (), meta)


def with_gold_path(task: Task) -> Task:
    """The task with the simulator's own solution as its reference dialogue, one action an output."""
    state = task.meta["simulation"]
    with _lock:
        world = _world()
        world.load(state["task"], state["variation"], "easy", generateGoldPath=True)
        actions = list(world.get_gold_action_sequence())
    environment = ScienceWorldEnvironment()
    environment.reset(task)
    messages = list(task.messages)
    try:
        for action in actions:
            answer = environment.step("do", {"action": action})
            messages.append(Message("assistant", "", None, (ToolCall("do", {"action": action}),)))
            messages.append(Message("tool", canonical_json(answer)))
    finally:
        environment.close()
    return replace(task, messages=(*messages, Message("assistant", "Done.")))


def score(task: Task, transcript: Transcript) -> dict[str, float]:
    """The simulator's score after the transcript's calls, in 0..1; below zero (a wrong focus ends a task so) is 0."""
    calls = [call for turn in transcript for call, _ in turn_calls(turn)]
    state = task.meta["simulation"]
    reached = 0
    with _lock:
        world = _world()
        world.load(state["task"], state["variation"], "easy")
        world.reset()
        for call in calls:
            action = call.arguments.get("action")
            if call.name != "do" or not isinstance(action, str):
                continue
            _, _, over, info = world.step(action)
            reached = int(info.get("score", reached))
            if over:
                break
    return {"score": max(0, reached) / 100, "solved": float(reached >= 100)}
