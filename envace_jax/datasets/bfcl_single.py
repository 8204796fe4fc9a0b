"""BFCL's single-turn categories: one request, one output, its calls compared with the possible answers.

Tasks and checker are those of the installed ``bfcl-eval`` package; nothing of it is copied. Its module of model
handlers imports every vendor's client, so the checker is imported with a stand-in for that one module: all that it
reads there is whether a handler writes dots in function names as underscores, and ours does not. No call is executed.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

from envace_jax.config import UserError
from envace_jax.datasets.bfcl import NEEDS, json_schema
from envace_jax.datasets.records import Task, spread
from envace_jax.text.transcript import Message, ToolCall

SOURCE = "bfcl_single_turn"
ENVIRONMENT = "bfcl_single"
NON_LIVE = ("simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple")
LIVE = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")
RELEVANCE = ("irrelevance", "live_irrelevance", "live_relevance")
CATEGORIES = (*NON_LIVE, *LIVE, *RELEVANCE)
_MODEL = "envace"
_HANDLERS = "bfcl_eval.constants.model_config"


def load_bfcl_single(categories: Sequence[str] = CATEGORIES, limit: int = 0) -> list[Task]:
    """Tasks of the named categories; `limit` as in `load_bfcl`.

    Raises:
        UserError: the package is missing, or a category is unknown.
    """
    for category in categories:
        if category not in CATEGORIES:
            raise UserError(f"BFCL category {category!r}: expected one of {', '.join(CATEGORIES)}")
    return spread([task for category in categories for task in _tasks(category)], limit)


def check_single(task: Task, calls: Sequence[ToolCall]) -> tuple[bool, str]:
    """Whether the calls of an output are right by BFCL's own checker, and why not."""
    category = task.meta["category"]
    if category in RELEVANCE:
        wanted = category == "live_relevance"
        return bool(calls) == wanted, "" if bool(calls) == wanted else f"calls {'missing' if wanted else 'made'}"
    if not calls:
        return False, "no call"
    checker, languages = _checker()
    language = {"simple_java": "JAVA", "simple_javascript": "JAVASCRIPT"}.get(category, "PYTHON")
    made = [{call.name: call.arguments} for call in calls]
    found = checker(task.meta["functions"], made, task.meta["answer"], languages[language], category, _MODEL)
    return bool(found["valid"]), "" if found["valid"] else "; ".join(map(str, found["error"]))


class SingleTurnEnvironment:
    """Executes nothing: a category of one output never reads what its calls get back."""

    def reset(self, task: Task) -> None:
        pass

    def step(self, name: str, arguments: dict[str, Any]) -> Any:
        return {"note": "not executed"}

    def fork(self) -> SingleTurnEnvironment:
        return self

    def state_hash(self) -> str:
        return ""


# --- reading the package ---


@functools.cache
def _tasks(category: str) -> tuple[Task, ...]:
    try:
        utils = importlib.import_module("bfcl_eval.utils")
    except ModuleNotFoundError as error:
        raise UserError(f"{NEEDS} ({error})") from None
    shown = utils.load_dataset_entry(category)
    raw = utils.load_dataset_entry(category, include_language_specific_hint=False)
    answers = [None] * len(raw)
    if category not in RELEVANCE:
        answers = [row["ground_truth"] for row in utils.load_ground_truth_entry(category)]
    return tuple(_task(category, *parts) for parts in zip(shown, raw, answers, strict=True))


def _task(category: str, shown: dict[str, Any], raw: dict[str, Any], answer: Any) -> Task:
    messages = list(_messages(shown["question"][0]))
    tools = tuple(
        {
            "type": "function",
            "function": {
                "name": function["name"],
                "description": function.get("description", ""),
                "parameters": json_schema(function["parameters"]),
            },
        }
        for function in shown["function"]
    )
    meta = {
        "environment": ENVIRONMENT,
        "split": "heldout",
        "category": category,
        "functions": raw["function"],
        "answer": answer,
    }
    return Task(f"bfcl-{shown['id']}", SOURCE, tuple(messages), tools, (), meta)


def _messages(question: Sequence[dict[str, str]]) -> Iterator[Message]:
    """The system prompt and one user message; an earlier exchange (a few entries have one) is told in it."""
    system = [m["content"] for m in question if m["role"] == "system"]
    if system:
        yield Message("system", "\n\n".join(system))
    said = [m for m in question if m["role"] != "system"]
    if len(said) == 1:
        yield Message("user", said[0]["content"])
    else:
        yield Message("user", "\n\n".join(f"{m['role'].capitalize()}: {m['content']}" for m in said))


@functools.cache
def _checker() -> tuple[Any, Any]:
    name = "bfcl_eval.eval_checker.ast_eval.ast_checker"
    if name not in sys.modules:
        known = sys.modules.get(_HANDLERS)
        if known is None:
            stand_in = types.ModuleType(_HANDLERS)
            stand_in.MODEL_CONFIG_MAPPING = {}  # type: ignore[attr-defined]
            sys.modules[_HANDLERS] = stand_in
        try:
            importlib.import_module(name)
        finally:
            if known is None:
                del sys.modules[_HANDLERS]
    module = sys.modules[name]
    ours = types.SimpleNamespace(underscore_to_dot=False)
    module.MODEL_CONFIG_MAPPING = {**module.MODEL_CONFIG_MAPPING, _MODEL: ours}  # type: ignore[attr-defined]
    return module.ast_checker, module.Language
