"""Role-wise advantages: one number for every (trajectory, role), from the rewards of its group.

For output m of role r in trajectory i of task x the advantage is A_{i,m} = R_i - mu_{x,r}, the mean taken over the
outputs of the same role in the group (EnvACE, role-wise GRPO).  All outputs of one role in one trajectory share
it, so it is kept per trajectory and role; only where outputs are paid on their own (`shaping.py`) has each its
own.  Plain Python on small records: no arrays, no model.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from envace_jax.text.transcript import Role

SPREAD_FLOOR = 1e-9  # rewards closer than this are the same: sums of the same verdicts in another order
STD_FLOOR = 1e-6  # added to the standard deviation, as the published trainers do
POPULATIONS = ("outputs", "rows", "trajectories")
BASELINES = ("role", "single")
Credit = Mapping[Role, float] | Sequence[float]
"""Advantages of one trajectory: one a role, or one an output."""


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


def output_advantages(
    trajectories: Sequence[TrajectoryLike],
    additions: Sequence[Sequence[float]],
    *,
    population: str = "outputs",
    baseline: str = "role",
    std_norm: bool = False,
    extra_copies: Sequence[Sequence[int]] | None = None,
) -> list[list[float]]:
    """Advantage of each output where outputs are paid on their own: A_{i,m} = R_i + e_{i,m} - mu_{x,r}.

    The mean is taken over R_j + e_{j,n} of the same population as in `role_advantages` (which this equals when all
    additions are 0); with `trajectories` each trajectory's outputs of the role weigh 1 together.  A masked trajectory
    gets an empty list.  A group with one trajectory that is not masked has zero advantages.
    """
    if population not in POPULATIONS or baseline not in BASELINES:
        raise ValueError(
            f"unknown population {population!r} (one of {POPULATIONS}) or baseline {baseline!r} (one of {BASELINES})"
        )
    copies = extra_copies if population == "rows" else None
    result: list[list[float]] = [[0.0] * len(t.segments) if t.reward is not None else [] for t in trajectories]
    for members in _groups(trajectories):
        if len(members) < 2:
            continue
        for roles in [(role,) for role in Role] if baseline == "role" else [tuple(Role)]:
            pool = []  # (trajectory, output, weight, reward)
            for i in members:
                chosen = [k for k, segment in enumerate(trajectories[i].segments) if segment.role in roles]
                for k in chosen:
                    weight = 1.0 if copies is None else 1.0 + copies[i][k]
                    if population == "trajectories":
                        weight = 1.0 / len(chosen)
                    pool.append((i, k, weight, float(trajectories[i].reward) + additions[i][k]))  # type: ignore[arg-type]
            mean, scale = _mean_and_scale([(weight, reward) for _, _, weight, reward in pool], std_norm)
            for i, k, _, reward in pool:
                result[i][k] = 0.0 if scale == 0.0 else (reward - mean) / scale
    return result


def advantages_of(trajectory: TrajectoryLike, advantages: Credit, role: Role) -> list[float]:
    """The advantages of one role's outputs: one number where they share it, one an output where they do not."""
    if isinstance(advantages, Mapping):
        return [advantages[role]] if role in advantages else []
    return [a for segment, a in zip(trajectory.segments, advantages) if segment.role == role]


def _groups(trajectories: Sequence[TrajectoryLike]) -> Iterable[list[int]]:
    groups: dict[int, list[int]] = {}
    for i, trajectory in enumerate(trajectories):
        if trajectory.reward is not None:
            groups.setdefault(trajectory.group, []).append(i)
    return groups.values()


def _mean_and_scale(weighted: Sequence[tuple[float, float]], std_norm: bool) -> tuple[float, float]:
    """Mean of (weight, reward) pairs and what to divide by; scale 0 says that there is no spread."""
    rewards = [reward for _, reward in weighted]
    total = sum(weight for weight, _ in weighted)
    if not rewards or max(rewards) - min(rewards) <= SPREAD_FLOOR:
        return 0.0, 0.0
    if std_norm and total <= 1:
        return 0.0, 0.0  # one trajectory's outputs, which weigh 1 together: there is no deviation to divide by
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
    flat = sum(spread <= SPREAD_FLOOR for spread in spreads) + len(all_groups) - len(groups)
    return {
        "groups": float(len(all_groups)),
        "groups_without_spread": flat / max(len(all_groups), 1),
        "reward_spread": sum(spreads) / max(len(spreads), 1),
    }
