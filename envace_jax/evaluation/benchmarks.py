"""Benchmarks that are played in process, in their real environments: which tasks, how an episode is scored.

A benchmark here is what its tasks, its environment and its judge-free score are; the program that plays is
`evaluation/play.py`. Each says in `handler` what differs from its official harness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from envace_jax.config import UserError
from envace_jax.datasets.records import Task
from envace_jax.rewards.verifiers import turn_calls
from envace_jax.text.transcript import AssistantOutput, Step, Transcript, Turn

POLITE = "Thank you for your patience. I have nothing further to add. Goodbye."


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
        name: as on the command line.
        load: `(split, limit, categories)` -> tasks; split is heldout, train or all.
        category: the part of the benchmark that a task belongs to.
        score: `(task, transcript)` -> its named parts, `score` among them, all in 0..1.
        sources: names of task sources whose presence in training makes the result no held-out one.
        handler: what plays, and what differs from the official harness.
        turn_steps: ACT outputs a turn may take, 0: no limit of the benchmark's own.
        max_acts: ACT outputs of an episode.
        live: episodes at once, where each takes a process of its own; 0: as configured.
        reference: adds the reference dialogue to a task that comes without one (fidelity needs it).
        must_end: whether an episode that was cut off scores 0 whatever it did.
        notes: caveats for every number.
        packages: whose versions a result names, beside those that all results name.
    """

    name: str
    load: Callable[[str, int, Sequence[str]], list[Task]]
    category: Callable[[Task], str]
    score: Callable[[Task, Transcript], dict[str, float]]
    sources: tuple[str, ...]
    handler: str
    turn_steps: int = 0
    max_acts: int = 100
    must_end: bool = False
    notes: tuple[str, ...] = ()
    live: int = 0
    reference: Callable[[Task], Task] = lambda task: task
    packages: tuple[str, ...] = ()

    def floor(self, task: Task) -> float:
        """The score of an agent that calls nothing and says goodbye in every turn."""
        return self.score(task, polite_transcript(task))["score"]


def polite_transcript(task: Task) -> Transcript:
    """Every turn answered with a polite sentence, nothing called."""
    output = AssistantOutput(POLITE, None, POLITE, ())
    return tuple(Turn(user, (Step(output, ()),)) for user in task.user_turns)


def calls_by_turn(transcript: Transcript) -> list[list[Any]]:
    """The calls of every turn, in order."""
    return [[call for call, _ in turn_calls(turn)] for turn in transcript]


def replies(transcript: Transcript) -> list[str]:
    """All that the user could read."""
    return [step.output.reply for turn in transcript for step in turn.steps if step.output.reply]


# --- quickstart -------------------------------------------------------------------------------------------------------


def _load_quickstart(split: str, limit: int, categories: Sequence[str]) -> list[Task]:
    from envace_jax.datasets.quickstart.generator import generate_tasks

    if categories:
        raise UserError("--category: quickstart has no parts")
    if split == "all":
        raise UserError("--split all: quickstart generates its tasks; choose heldout or train")
    return generate_tasks(split, limit or 200)


def _score_quickstart(task: Task, transcript: Transcript) -> dict[str, float]:
    from envace_jax.datasets.quickstart.success import success

    return {"score": float(success(task, transcript))}


# --- BFCL multi-turn --------------------------------------------------------------------------------------------------


def _load_bfcl(split: str, limit: int, categories: Sequence[str]) -> list[Task]:
    from envace_jax.datasets.bfcl import VARIANTS, load_bfcl

    chosen = [name.removeprefix("multi_turn_") for name in categories] or list(VARIANTS)
    return load_bfcl(chosen, None if split == "all" else split, limit)


def _score_bfcl(task: Task, transcript: Transcript) -> dict[str, float]:
    from envace_jax.datasets.bfcl import bfcl_success

    return {"score": float(bfcl_success(task, calls_by_turn(transcript)))}


# --- BFCL single-turn -------------------------------------------------------------------------------------------------


def _load_single(split: str, limit: int, categories: Sequence[str]) -> list[Task]:
    from envace_jax.datasets.bfcl_single import CATEGORIES, load_bfcl_single

    if split == "train":
        raise UserError(
            "--split train: BFCL's single-turn categories are never trained on here; heldout and all are one"
        )
    return load_bfcl_single(tuple(categories) or CATEGORIES, limit)


def _score_single(task: Task, transcript: Transcript) -> dict[str, float]:
    from envace_jax.datasets.bfcl_single import check_single

    first = transcript[0].steps[0].output.calls if transcript and transcript[0].steps else ()
    return {"score": float(check_single(task, first)[0])}


# --- tau2 -------------------------------------------------------------------------------------------------------------


def _load_tau2(split: str, limit: int, categories: Sequence[str]) -> list[Task]:
    from envace_jax.datasets.tau2 import DOMAINS, load_tau2

    return load_tau2(tuple(categories) or DOMAINS, None if split == "all" else split, limit)


def _score_tau2(task: Task, transcript: Transcript) -> dict[str, float]:
    from envace_jax.datasets.tau2 import tau2_success

    calls = calls_by_turn(transcript)
    database = tau2_success(task, calls)
    both = database and tau2_success(task, calls, replies(transcript))
    said = tau2_success(task, task.meta["gold"] and _gold(task), replies(transcript))
    return {"score": float(both), "database": float(database), "communicate": float(said)}


def _gold(task: Task) -> list[list[Any]]:
    from envace_jax.text.transcript import ToolCall

    return [[ToolCall(call["name"], call["arguments"]) for call in turn] for turn in task.meta["gold"]]


# --- ScienceWorld -----------------------------------------------------------------------------------------------------


def _load_scienceworld(split: str, limit: int, categories: Sequence[str]) -> list[Task]:
    from envace_jax.evaluation.scienceworld import load_scienceworld

    return load_scienceworld(split, limit, categories)


def _score_scienceworld(task: Task, transcript: Transcript) -> dict[str, float]:
    from envace_jax.evaluation.scienceworld import score

    return score(task, transcript)


def _scienceworld_reference(task: Task) -> Task:
    from envace_jax.evaluation.scienceworld import with_gold_path

    return with_gold_path(task)


BENCHMARKS: dict[str, Benchmark] = {
    "quickstart": Benchmark(
        "quickstart",
        _load_quickstart,
        lambda task: "quickstart",
        _score_quickstart,
        ("quickstart",),
        "in process, real service desk; state, writes and replies of every turn are checked",
        max_acts=12,
    ),
    "bfcl": Benchmark(
        "bfcl",
        _load_bfcl,
        lambda task: f"multi_turn_{task.meta['variant']}",
        _score_bfcl,
        ("bfcl_multi_turn",),
        "in process, BFCL v4 multi-turn classes with their state and response checks",
        turn_steps=20,
        notes=(
            "late functions are documented in the user message that offers them; the official harness adds them to "
            "the tool list",
            "an output that cannot be read gets an error and counts as a step; in the official harness it ends the "
            "turn",
            "multi-turn alone is no BFCL overall: that needs single-turn, irrelevance and agentic categories",
        ),
    ),
    "bfcl-single": Benchmark(
        "bfcl-single",
        _load_single,
        lambda task: task.meta["category"],
        _score_single,
        ("bfcl_single_turn",),
        "in process, BFCL v4 single-turn categories (non-live, live, relevance) with their own checker; calls keep the "
        "dots of their names",
        turn_steps=1,
        notes=(
            "an earlier exchange, which 9 of live_irrelevance have, is told in the user message",
            "single-turn alone is no BFCL overall: `evaluate bfcl-average` says what is missing",
        ),
    ),
    "tau2": Benchmark(
        "tau2",
        _load_tau2,
        lambda task: task.meta["environment"].removeprefix("tau2_"),
        _score_tau2,
        ("tau2_airline", "tau2_retail"),
        "in process, judge-free score of release 0.2.0 (database and communicated values)",
        must_end=True,
        notes=(
            "tasks are those of release 1.0.1 scored judge-free as in 0.2.0: numbers with NL_ASSERTION in them are "
            "other numbers",
        ),
    ),
    "scienceworld": Benchmark(
        "scienceworld",
        _load_scienceworld,
        lambda task: task.meta["category"],
        _score_scienceworld,
        ("scienceworld",),
        "in process, ScienceWorld simulator (simplifications: easy), one tool do(action), its own score / 100",
        max_acts=60,
        live=4,
        reference=_scienceworld_reference,
        packages=("scienceworld",),
    ),
}
