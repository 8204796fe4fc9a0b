"""Rehearsed against real success on the same tasks: whether ACT and REHEARSE have learned to please each other.

One policy writes the actions and the world that judges them, so training can raise rehearsed success by making the
world kinder instead of the actor better. The watch plays the same tasks at the same temperature in both worlds. The
gap, rehearsed less real, is 0 for a faithful world; a gap that grows with training is the sign of collusion. Replaying
the rehearsed episodes' calls in the real environment gives a second gap, of the very same episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from envace_jax.config import UserError
from envace_jax.datasets.records import Task
from envace_jax.evaluation.stats import paired_cluster_bootstrap
from envace_jax.rehearsal.grounding import Grounding
from envace_jax.rehearsal.observers import RealObserver
from envace_jax.rehearsal.rollout import Play, rollout
from envace_jax.rehearsal.settings import RolloutConfig
from envace_jax.rewards.judge import RuleJudge
from envace_jax.rewards.verifiers import turn_calls
from envace_jax.text.transcript import Transcript

ENVIRONMENTS = ("quickstart", "bfcl")
"""Environments in which success can be told for the calls of any episode."""


def succeeded(task: Task, transcript: Transcript) -> bool:
    """Whether an episode's calls do in the real environment what the task asked for.

    Raises:
        UserError: when the task's environment is none of `ENVIRONMENTS`.
    """
    name = task.meta.get("environment")
    if name == "quickstart":
        from envace_jax.datasets.quickstart.success import success

        return success(task, transcript)
    if name == "bfcl":
        from envace_jax.datasets.bfcl import bfcl_success

        return bfcl_success(task, [[call for call, _ in turn_calls(turn)] for turn in transcript])
    raise UserError(f"task {task.uuid}: real success can be told in {', '.join(ENVIRONMENTS)}, not in {name!r}")


@dataclass(frozen=True)
class Outcomes:
    """Per episode, in the order of tasks and members."""

    rehearsed: tuple[bool, ...]
    replayed: tuple[bool, ...]
    rewards: tuple[float | None, ...]


def real_success(
    tasks: Sequence[Task],
    engine: Any,
    chat: Any,
    cfg: RolloutConfig,
    *,
    temperature: float,
    seed: int = 0,
    group_size: int = 1,
    play: Play = rollout,
) -> tuple[bool, ...]:
    """Whether each episode succeeds when ACT's calls are answered by the real environment.

    Args:
        tasks: quickstart or BFCL tasks.
        engine, chat: as for `rollout`.
        temperature: 0 is greedy.
        group_size: episodes a task; results are in the order of tasks, then members.
    """
    config = replace(cfg, temperature=temperature, top_p=1.0, top_k=0)
    played = play(
        tasks,
        engine=engine,
        chat=chat,
        cfg=config,
        judge=None,
        seed=seed,
        group_size=group_size,
        observe=RealObserver(),
    )
    results = {(t.group, t.member): succeeded(tasks[t.group], t.transcript) for t in played}
    return tuple(results[key] for key in sorted(results))


def rehearsed_success(
    tasks: Sequence[Task],
    engine: Any,
    chat: Any,
    cfg: RolloutConfig,
    *,
    temperature: float,
    seed: int = 0,
    group_size: int = 1,
    grounding: Grounding | None = None,
    play: Play = rollout,
) -> Outcomes:
    """Whether each episode passes its whole checklist in rehearsal, and whether its calls succeed when
    replayed."""
    config = replace(cfg, temperature=temperature, top_p=1.0, top_k=0)
    played = play(
        tasks,
        engine=engine,
        chat=chat,
        cfg=config,
        judge=RuleJudge(),
        seed=seed,
        group_size=group_size,
        grounding=grounding,
    )
    done = sorted(played, key=lambda trajectory: (trajectory.group, trajectory.member))
    rewards = tuple(trajectory.reward for trajectory in done)
    return Outcomes(
        rehearsed=tuple(reward is not None and reward > 1 - 1e-6 for reward in rewards),
        replayed=tuple(succeeded(tasks[trajectory.group], trajectory.transcript) for trajectory in done),
        rewards=rewards,
    )


@dataclass(frozen=True)
class Watch:
    """The same tasks in both worlds, one entry a task: success in rehearsal, of its calls replayed, and in reality."""

    rehearsed: tuple[bool, ...]
    replayed: tuple[bool, ...]
    real: tuple[bool, ...]

    def figures(self) -> dict[str, float]:
        """`rehearsed`, `replayed`, `real_sampled`, and the gaps: `gap` (rehearsed less replayed) and `gap_real`
        (rehearsed less real) with `gap_real_low` and `gap_real_high`, a 95% bootstrap interval over tasks."""
        n = len(self.real)
        interval = paired_cluster_bootstrap(self.rehearsed, self.real, range(n), resamples=2000)
        rehearsed, replayed, real = (sum(x) / n for x in (self.rehearsed, self.replayed, self.real))
        return {
            "real_sampled": real,
            "rehearsed": rehearsed,
            "replayed": replayed,
            "gap": rehearsed - replayed,
            "gap_real": interval.mean,
            "gap_real_low": interval.low,
            "gap_real_high": interval.high,
        }


def both_worlds(
    tasks: Sequence[Task],
    engine: Any,
    chat: Any,
    cfg: RolloutConfig,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    grounding: Grounding | None = None,
    play: Play = rollout,
) -> Watch:
    """Plays every task once in reality and once in rehearsal; `play` is `rollout`, or what shares it out."""
    common: dict[str, Any] = {"temperature": temperature, "seed": seed, "play": play}
    real = real_success(tasks, engine, chat, cfg, **common)
    outcomes = rehearsed_success(tasks, engine, chat, cfg, grounding=grounding, **common)
    return Watch(outcomes.rehearsed, outcomes.replayed, real)
