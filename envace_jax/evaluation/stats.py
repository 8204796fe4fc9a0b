"""Intervals and tests for results that come in clusters: seeds over tasks, trajectories over rows.

All resampling is seeded and vectorised; a percentile interval at level 1 - alpha is the alpha/2 and 1 - alpha/2
quantile of the resampled statistic. Missing values are NaN and are left out of means, never counted as zero.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from statistics import NormalDist

import numpy as np

RESAMPLES = 10_000
BATCH = 500  # resamples held in memory at once


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean with its percentile interval and how many values stand behind it."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def _interval(mean: float, samples: np.ndarray, n: int, alpha: float) -> Interval:
    low, high = np.nanquantile(samples, [alpha / 2, 1 - alpha / 2])
    return Interval(float(mean), float(low), float(high), n)


def bootstrap_mean(
    values: Sequence[float], *, alpha: float = 0.05, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Percentile bootstrap of a mean over independent values."""
    x = _present(values)
    return cluster_bootstrap(x, range(len(x)), alpha=alpha, resamples=resamples, seed=seed)


def cluster_bootstrap(
    values: Sequence[float] | np.ndarray,
    clusters: Sequence[Hashable],
    *,
    alpha: float = 0.05,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Bootstrap of the row mean, resampling whole clusters (trajectories) with replacement.

    A resample's statistic is sum of rows / number of rows over the drawn clusters, so that long trajectories
    weigh by their rows, as in the row mean itself. Raises `ValueError` when nothing is left to average.
    """
    x = np.asarray(values, float)
    keep = ~np.isnan(x)
    ids = _numbered(clusters)
    if len(ids) != len(x):
        raise ValueError(f"{len(x)} values but {len(ids)} clusters")
    x, ids = x[keep], ids[keep]
    if not len(x):
        raise ValueError("no values to average")
    ids = np.unique(ids, return_inverse=True)[1]
    total, count = np.bincount(ids, x), np.bincount(ids).astype(float)
    rng = np.random.default_rng(seed)
    samples = []
    for start in range(0, resamples, BATCH):
        drawn = rng.integers(len(total), size=(min(BATCH, resamples - start), len(total)))
        samples.append(total[drawn].sum(1) / count[drawn].sum(1))
    return _interval(x.mean(), np.concatenate(samples), len(x), alpha)


def paired_cluster_bootstrap(
    a: Sequence[float],
    b: Sequence[float],
    clusters: Sequence[Hashable],
    *,
    alpha: float = 0.05,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Interval of mean(a - b) over rows valid in both, resampling clusters."""
    difference = np.asarray(a, float) - np.asarray(b, float)
    return cluster_bootstrap(difference, clusters, alpha=alpha, resamples=resamples, seed=seed)


def two_level_bootstrap(
    values_SxT: np.ndarray, *, alpha: float = 0.05, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Bootstrap over seeds and, independently, over tasks (columns shared by all seeds).

    `values_SxT[s, t]` is the result of training seed s on task t. Each resample draws seeds with replacement
    and tasks with replacement and averages the cross product, so that both the luck of the run and the choice
    of tasks are in the interval. With one seed it is the task bootstrap.
    """
    x = np.asarray(values_SxT, float)
    if x.ndim != 2 or not x.size:
        raise ValueError(f"expected an array [seeds, tasks], got shape {x.shape}")
    n_seeds, n_tasks = x.shape
    rng = np.random.default_rng(seed)
    samples = np.empty(resamples)
    known, filled = ~np.isnan(x), np.nan_to_num(x)
    for start in range(0, resamples, BATCH):
        n = min(BATCH, resamples - start)
        w_seed = rng.multinomial(n_seeds, np.full(n_seeds, 1 / n_seeds), size=n).astype(float)
        w_task = rng.multinomial(n_tasks, np.full(n_tasks, 1 / n_tasks), size=n).astype(float)
        total = np.einsum("rs,st,rt->r", w_seed, filled, w_task, optimize=True)
        weight = np.einsum("rs,st,rt->r", w_seed, known.astype(float), w_task, optimize=True)
        samples[start : start + n] = total / np.where(weight > 0, weight, np.nan)
    return _interval(float(np.nanmean(x)), samples, int(known.sum()), alpha)


def two_level_difference(
    a_SxT: np.ndarray, b_SxT: np.ndarray, *, alpha: float = 0.05, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Interval of mean(a) - mean(b), tasks shared and resampled together, seeds of each arm on their own."""
    a, b = np.asarray(a_SxT, float), np.asarray(b_SxT, float)
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"the arms have {a.shape[1]} and {b.shape[1]} tasks")
    rng = np.random.default_rng(seed)
    n_tasks = a.shape[1]
    samples = np.empty(resamples)
    for start in range(0, resamples, BATCH):
        n = min(BATCH, resamples - start)
        w_task = rng.multinomial(n_tasks, np.full(n_tasks, 1 / n_tasks), size=n) / n_tasks
        parts = []
        for x in (a, b):
            w_seed = rng.multinomial(len(x), np.full(len(x), 1 / len(x)), size=n) / len(x)
            parts.append(np.einsum("rs,st,rt->r", w_seed, x, w_task, optimize=True))
        samples[start : start + n] = parts[0] - parts[1]
    return _interval(float(a.mean() - b.mean()), samples, a.size + b.size, alpha)


def sign_flip_test(
    differences: Sequence[float], clusters: Sequence[Hashable] | None = None, *, flips: int = 20_000, seed: int = 0
) -> float:
    """Two-sided p-value of mean difference zero: the signs of whole clusters are exchangeable under it.

    Exact over all 2^n sign patterns where there are at most `flips` of them, else Monte Carlo with the observed
    pattern counted ((1 + hits) / (1 + flips)).
    """
    x = np.asarray(differences, float)
    keep = ~np.isnan(x)
    ids = np.arange(len(x)) if clusters is None else _numbered(clusters)
    sums = np.bincount(ids[keep], x[keep]) if keep.any() else np.zeros(0)
    if not len(sums):
        raise ValueError("no differences to test")
    observed = abs(sums.sum())
    tolerance = 1e-12 * max(1.0, np.abs(sums).sum())
    if 2 ** min(len(sums), 60) <= flips:
        patterns = (np.arange(2 ** len(sums))[:, None] >> np.arange(len(sums))) & 1
        return float(np.mean(np.abs((1 - 2 * patterns) @ sums) >= observed - tolerance))
    rng = np.random.default_rng(seed)
    hits = 0
    for start in range(0, flips, BATCH):
        signs = rng.integers(0, 2, size=(min(BATCH, flips - start), len(sums))) * 2 - 1
        hits += int(np.sum(np.abs(signs @ sums) >= observed - tolerance))
    return (1 + hits) / (1 + flips)


def detectable_difference(
    sd_a: float, n_a: int, sd_b: float, n_b: int, *, alpha: float = 0.05, power: float = 0.8
) -> float:
    """Smallest true difference of two independent means found with `power` at two-sided level `alpha`.

    (z_{1-alpha/2} + z_power) * sqrt(sd_a^2 / n_a + sd_b^2 / n_b), the normal approximation.
    """
    z = NormalDist().inv_cdf(1 - alpha / 2) + NormalDist().inv_cdf(power)
    return z * math.sqrt(sd_a**2 / n_a + sd_b**2 / n_b)


def detectable(difference: Interval, *, alpha: float = 0.05, power: float = 0.8) -> float:
    """Smallest true difference found with `power`, from the interval (at level `alpha`) of a measured difference.

    The interval's half width is z_{1-alpha/2} standard errors; (z_{1-alpha/2} + z_power) of them are needed.
    """
    z, more = NormalDist().inv_cdf(1 - alpha / 2), NormalDist().inv_cdf(power)
    return (difference.high - difference.low) / (2 * z) * (z + more)


def pass_hat_k(successes: Sequence[int], trials: int, k: int) -> float:
    """Mean over tasks of C(c, k) / C(n, k): the chance that k trials drawn without replacement all succeed."""
    if not 1 <= k <= trials:
        raise ValueError(f"k={k} does not lie between 1 and {trials} trials")
    return float(np.mean([math.comb(c, k) / math.comb(trials, k) for c in successes]))


def _numbered(clusters: Sequence[Hashable]) -> np.ndarray:
    # in order of appearance: hashes differ from process to process, and the resampling must not
    number: dict[Hashable, int] = {}
    return np.asarray([number.setdefault(c, len(number)) for c in clusters], int)


def _present(values: Sequence[float] | np.ndarray) -> np.ndarray:
    x = np.asarray(values, float)
    return x[~np.isnan(x)]
