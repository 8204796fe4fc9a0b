"""Real environments: the ground truth that rehearsal is measured against, and the observations of one arm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from envace_jax.config import UserError
from envace_jax.datasets.cm2 import Task


class Environment(Protocol):
    """A resettable, forkable, stateful tool backend.

    ``step`` takes JSON arguments and returns a JSON value; it never raises: a refused call returns a value that
    `is_rejection` recognises. ``state_hash`` is equal for equal states and stable between processes.
    """

    def reset(self, task: Task) -> None: ...

    def step(self, name: str, arguments: dict[str, Any]) -> Any: ...

    def fork(self) -> Environment: ...

    def state_hash(self) -> str: ...


def make_environment(task: Task) -> Environment:
    """A fresh environment of the task's own kind (``task.meta["environment"]``), reset to the task.

    Raises:
        UserError: the task names no environment, or one that does not exist or is not installed.
    """
    name = task.meta.get("environment")
    environment: Environment
    if name == "quickstart":
        from envace_jax.datasets.quickstart.environment import QuickstartEnvironment

        environment = QuickstartEnvironment()
    elif name == "bfcl":
        from envace_jax.datasets.bfcl import BfclEnvironment

        environment = BfclEnvironment()
    elif name == "bfcl_single":
        from envace_jax.datasets.bfcl_single import SingleTurnEnvironment

        environment = SingleTurnEnvironment()
    elif name == "scienceworld":
        from envace_jax.evaluation.text_worlds import ScienceWorldEnvironment

        environment = ScienceWorldEnvironment()
    elif name == "terminal":
        from envace_jax.evaluation.text_worlds import TerminalEnvironment

        environment = TerminalEnvironment()
    elif name in ("tau2_airline", "tau2_retail"):
        from envace_jax.datasets.tau2 import Tau2Environment

        environment = Tau2Environment()
    else:
        raise UserError(
            f"task {task.uuid}: meta.environment is {name!r}, expected quickstart, bfcl, bfcl_single, "
            "scienceworld, terminal, tau2_airline or tau2_retail"
        )
    environment.reset(task)
    return environment


def check_environments(tasks: Sequence[Task]) -> None:
    """Makes the environment of one task of each kind.

    Raises:
        UserError: as `make_environment`, for the first kind that cannot be made.
    """
    for task in {task.meta.get("environment"): task for task in reversed(tasks)}.values():
        make_environment(task)


_LOOKS = ("look", "examine", "read", "inventory", "task", "objects", "recipe")
"""First words of ScienceWorld's actions that only look."""


def may_write(environment_name: str, name: str, arguments: dict[str, Any]) -> bool:
    """Whether a call is of a kind that can change the state: by the tool's name alone, or by an action's verb, and so
    the same whatever came of it."""
    if environment_name == "quickstart":
        from envace_jax.datasets.quickstart.environment import WRITES

        return name in WRITES
    if environment_name == "bfcl":
        from envace_jax.datasets.bfcl import WRITES as BFCL_WRITES

        return name in BFCL_WRITES
    if environment_name.startswith("tau2_"):
        from envace_jax.datasets.tau2 import WRITES as TAU2_WRITES

        return name in TAU2_WRITES[environment_name.removeprefix("tau2_")]
    if environment_name == "scienceworld":
        words = str(arguments.get("action", "")).split()
        return bool(words) and words[0].lower() not in _LOOKS
    return environment_name == "terminal"


_SHELL_REFUSALS = (": No such file or directory", ": command not found", ": cannot ", ": Permission denied")


def is_rejection(environment_name: str, value: Any) -> bool:
    """Whether a result says that the call was refused: had no effect, because something about it was wrong."""
    if isinstance(value, dict) and ("error" in value or "error_tool_call" in value):
        return True
    if environment_name == "bfcl":
        return isinstance(value, str) and value.startswith("Error during execution")
    if environment_name == "terminal":
        return isinstance(value, str) and any(words in value for words in _SHELL_REFUSALS)
    if environment_name == "scienceworld":
        return isinstance(value, str) and value.startswith(("No known action matches", "It's not clear how"))
    if environment_name.startswith("tau2"):
        return isinstance(value, str) and value.startswith("Error:")
    return False
