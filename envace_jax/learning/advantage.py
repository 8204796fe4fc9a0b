"""Role-wise advantages: one number for every (trajectory, role), from the rewards of its group.

For output m of role r in trajectory i of task x the advantage is A_{i,m} = R_i - mu_{x,r}, the mean taken over the
outputs of the same role in the group (EnvACE, role-wise GRPO).  All outputs of one role in one trajectory share
it, so it is kept per trajectory and role.  Plain Python on small records: no arrays, no model.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from typing import Protocol

from envace_jax.text.transcript import Role

STD_FLOOR = 1e-6  # added to the standard deviation, as the published trainers do
POPULATIONS = ("outputs", "rows", "trajectories")
BASELINES = ("role", "single")


class SegmentLike(Protocol):
    """What the advantage needs of a sampled output: whose it is."""

    @property
    def role(self) -> Role: ...


class TrajectoryLike(Protocol):
    """What the advantage needs of a trajectory: its group, its outputs and its reward (None: masked)."""

    @property
    def group(self) -> int: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def segments(self) -> Sequence[SegmentLike]: ...


def output_counts(trajectory: TrajectoryLike, extra_copies: Sequence[int] | None = None) -> dict[Role, int]:
    """Number of sampled outputs by role; `extra_copies[k]` more of output k where given."""
    counts = dict.fromkeys(Role, 0)
    for k, segment in enumerate(trajectory.segments):
        counts[segment.role] += 1 + (extra_copies[k] if extra_copies is not None else 0)
    return counts


def duplicate_outputs(trajectories: Sequence[TrajectoryLike], multiple: int, seed: int) -> list[list[int]]:
    """Extra copies by trajectory and output that fill the number of outputs up to a multiple.

    The reference trainer keeps one row per output and repeats random rows until their number divides evenly over
    its devices; the copies enter group means and gradient.  Only the `reference_code` preset asks for it.
    """
    extra = [[0] * len(trajectory.segments) for trajectory in trajectories]
    places = [(i, k) for i, row in enumerate(extra) for k in range(len(row))]
    missing = -len(places) % multiple
    rng = random.Random(seed)
    chosen = rng.sample(places, missing) if missing <= len(places) else rng.choices(places, k=missing)
    for i, k in chosen:
        extra[i][k] += 1
    return extra


def role_advantages(
    trajectories: Sequence[TrajectoryLike],
    *,
    population: str = "outputs",
    baseline: str = "role",
    std_norm: bool = False,
    extra_copies: Sequence[Sequence[int]] | None = None,
) -> list[dict[Role, float]]:
    """Advantage of each role of each trajectory, in the order given.

    population: what the baseline is a mean of: `outputs` (the paper's mu_{x,r}), `rows` (outputs with their
    `extra_copies`, as the reference code counts) or `trajectories` (each that has an output of the role once).
    baseline: `role`, or `single` for one mean over both roles' population.  std_norm divides by the standard
    deviation of the same population.  A trajectory with reward None enters no mean and gets an empty dict; a
    role without outputs is left out of its dict.  A population without two different rewards gives exactly 0.
    """
    if population not in POPULATIONS or baseline not in BASELINES:
        raise ValueError(
            f"unknown population {population!r} (one of {POPULATIONS}) or baseline {baseline!r} (one of {BASELINES})"
        )
    copies = extra_copies if population == "rows" else None
    counts = [
        output_counts(trajectory, copies[i] if copies is not None else None)
        for i, trajectory in enumerate(trajectories)
    ]
    result: list[dict[Role, float]] = [{} for _ in trajectories]
    for members in _groups(trajectories):
        rewards = {i: float(trajectories[i].reward) for i in members}  # type: ignore[arg-type]
        for roles in [(role,) for role in Role] if baseline == "role" else [tuple(Role)]:
            weights = {i: sum(counts[i][role] for role in roles) for i in members}
            if population == "trajectories":
                weights = {i: min(weight, 1) for i, weight in weights.items()}
            mean, scale = _mean_and_scale([(weights[i], rewards[i]) for i in members if weights[i]], std_norm)
            for i in members:
                for role in roles:
                    if counts[i][role]:
                        result[i][role] = 0.0 if scale == 0.0 else (rewards[i] - mean) / scale
    return result


def _groups(trajectories: Sequence[TrajectoryLike]) -> Iterable[list[int]]:
    groups: dict[int, list[int]] = {}
    for i, trajectory in enumerate(trajectories):
        if trajectory.reward is not None:
            groups.setdefault(trajectory.group, []).append(i)
    return groups.values()


def _mean_and_scale(weighted: Sequence[tuple[int, float]], std_norm: bool) -> tuple[float, float]:
    """Mean of (weight, reward) pairs and what to divide by; scale 0 says that there is no spread."""
    if len({reward for _, reward in weighted}) < 2:
        return 0.0, 0.0
    total = sum(weight for weight, _ in weighted)
    mean = math.fsum(weight * reward for weight, reward in weighted) / total
    if not std_norm:
        return mean, 1.0
    variance = math.fsum(weight * (reward - mean) ** 2 for weight, reward in weighted) / (total - 1)
    return mean, math.sqrt(variance) + STD_FLOOR


def group_spread(trajectories: Sequence[TrajectoryLike]) -> dict[str, float]:
    """How many groups have nothing to learn from: figures for the metrics and the red flags."""
    groups = list(_groups(trajectories))
    all_groups = {trajectory.group for trajectory in trajectories}
    spreads = []
    for members in groups:
        rewards = [float(trajectories[i].reward) for i in members]  # type: ignore[arg-type]
        mean = sum(rewards) / len(rewards)
        spreads.append(math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards)))
    flat = sum(spread == 0.0 for spread in spreads) + len(all_groups) - len(groups)
    return {
        "groups": float(len(all_groups)),
        "groups_without_spread": flat / max(len(all_groups), 1),
        "reward_spread": sum(spreads) / max(len(spreads), 1),
    }
