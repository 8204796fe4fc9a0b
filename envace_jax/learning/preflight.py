"""What can be known of a run before its weights are read and its programs compiled: for `train`, which stops at the
first thing wrong, and for the dry run, which collects all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from ml_collections import ConfigDict

from envace_jax.build import (
    chat_format,
    check_cache,
    check_judge_cut,
    checked_spec,
    judge_config,
    longest_row,
    mesh_for,
)
from envace_jax.config import UserError
from envace_jax.datasets.pipeline import TaskIterator, task_iterator
from envace_jax.datasets.records import Task
from envace_jax.datasets.sources import load_tasks
from envace_jax.distributed import Processes
from envace_jax.environments import check_environments
from envace_jax.learning import overlap
from envace_jax.model.spec import Qwen3Spec
from envace_jax.rehearsal.fit import within_limit
from envace_jax.rehearsal.grounding import Grounding, make_grounding
from envace_jax.text.chat import ChatFormat
from envace_jax.worldbook.consistency import ConsistencyWatch
from envace_jax.worldbook.grounding import load_grounding


@dataclass(frozen=True)
class Ground:
    """What a run stands on; a part is None where it is among the things wrong (of one device the mesh is None too)."""

    train: list[Task]
    held_out: list[Task]
    chat: ChatFormat
    mesh: jax.sharding.Mesh | None
    spec: Qwen3Spec | None
    grounding: Grounding | None
    watch: ConsistencyWatch | None
    data: TaskIterator | None


def preflight(
    cfg: ConfigDict,
    processes: Processes,
    say: Callable[[str], None],
    wrong: list[str] | None = None,
    *,
    rollouts: bool = True,
) -> Ground:
    """Data, prompts, mesh, shape and headers of the weights, judge's folder, grounding, batches.

    Args:
        cfg: a configuration that holds by itself.
        processes: this process among the run's.
        say: is told what is left out.
        wrong: collects what is wrong; without it the first thing is raised. Data, or a tokenizer, that cannot be read
            are raised in either case: there is nothing to go on with.
        rollouts: whether tasks are played, not only learned from (`warmstart`).

    Raises:
        UserError: what is wrong and what to do about it.
    """
    found: dict[str, Any] = {}

    @contextlib.contextmanager
    def part() -> Iterator[None]:
        try:
            yield
        except UserError as error:
            if wrong is None:
                raise
            if str(error) not in wrong:  # the worldbook is looked at for two ends
                wrong.append(str(error))

    if rollouts:
        for check in (lambda: constrained(cfg), lambda: overlap.check(cfg)):
            with part():
                check()
    train, held_out = load_tasks(cfg.data)
    chat = chat_format(cfg)
    train = within_limit(train, chat, cfg.data.max_head_tokens, "training", say)
    held_out = within_limit(held_out, chat, cfg.data.max_head_tokens, "held-out", say)
    e = cfg.evaluation
    if rollouts and not held_out and (e.at_start or e.at_end or e.every):
        say("there are no held-out tasks, so nothing is evaluated (data.eval_path gives some)")
    if rollouts and cfg.learning.arm == "real_env":
        with part():
            try:
                check_environments(train)
            except UserError as error:
                raise UserError(f"learning.arm=real_env: {error}; data.source={cfg.data.source}") from error
    with part():
        found["mesh"] = mesh_for(cfg)
    with part():
        found["spec"] = checked_spec(cfg, chat)
    if rollouts and (spec := found.get("spec")) is not None:
        with part():
            check_cache(cfg, spec, found.get("mesh"))
        if longest_row(cfg) > spec.max_positions:
            say(f"rows may reach {longest_row(cfg)} tokens, the model was made for {spec.max_positions} positions")
    with part():
        found["grounding"] = make_grounding(cfg.rollout.grounding, cfg.rollout.worldbook)
    if rollouts:
        with part():
            if cfg.rollout.worldbook:
                found["watch"] = ConsistencyWatch(load_grounding(cfg.rollout.worldbook).book)
        with part():
            if cfg.rewards.judge == "policy":
                judge = judge_config(cfg)
                check_judge_cut(cfg, checked_spec(judge, chat_format(judge)))
        with part():
            found["data"] = task_iterator(
                train,
                seed=cfg.seed,
                batch_size=cfg.learning.prompts_per_step,
                process_index=processes.index,
                process_count=processes.count,
            )
    parts = {name: found.get(name) for name in ("mesh", "spec", "grounding", "watch", "data")}
    return Ground(train, held_out, chat, **parts)


def constrained(cfg: ConfigDict) -> None:
    """Raises `UserError` where masked samples would be learned from as if they were not masked."""
    if cfg.rollout.constrain != "none" and not cfg.learning.importance_cap:
        raise UserError(
            f"rollout.constrain={cfg.rollout.constrain} samples from a masked distribution, which is not the one that "
            "the update computes: set learning.importance_cap (1 corrects the difference), or rollout.constrain=none"
        )
