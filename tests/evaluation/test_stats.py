"""Intervals and tests against scipy and against results worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from envace_jax.evaluation import stats

pytestmark = pytest.mark.quick


def test_mean_interval_agrees_with_scipy() -> None:
    x = np.random.default_rng(0).normal(2.0, 1.5, 80)
    ours = stats.bootstrap_mean(x)
    theirs = scipy.stats.bootstrap((x,), np.mean, method="percentile", n_resamples=10_000, random_state=1)
    assert ours.mean == pytest.approx(x.mean())
    assert ours.low == pytest.approx(theirs.confidence_interval.low, abs=0.02)
    assert ours.high == pytest.approx(theirs.confidence_interval.high, abs=0.02)


def test_missing_values_are_left_out() -> None:
    assert stats.bootstrap_mean([1.0, float("nan"), 3.0]).mean == 2.0
    with pytest.raises(ValueError, match="no values"):
        stats.bootstrap_mean([float("nan")])


def test_clusters_widen_the_interval_and_weigh_by_rows() -> None:
    rng = np.random.default_rng(1)
    effect = rng.normal(size=20)
    values = np.repeat(effect, 10)
    clustered = stats.cluster_bootstrap(values, np.repeat(np.arange(20), 10))
    independent = stats.bootstrap_mean(values)
    ratio = (clustered.high - clustered.low) / (independent.high - independent.low)
    assert ratio == pytest.approx(np.sqrt(10), rel=0.15)  # 20 values stand there, not 200
    # rows 1, 1, 1 in cluster a and 5 in b: mean 2; a resample of b alone gives 5, of a alone 1
    uneven = stats.cluster_bootstrap([1, 1, 1, 5], ["a", "a", "a", "b"])
    assert (uneven.mean, uneven.low, uneven.high) == (2.0, 1.0, 5.0)


def test_a_constant_paired_difference_has_no_width() -> None:
    b = np.random.default_rng(2).normal(size=30)
    got = stats.paired_cluster_bootstrap(b + 0.25, b, list(range(30)))
    assert (got.low, got.high) == (pytest.approx(0.25), pytest.approx(0.25))


def test_two_level_bootstrap_holds_both_variances() -> None:
    rng = np.random.default_rng(3)
    seeds, tasks = rng.normal(size=(8, 1)), rng.normal(size=(1, 200))
    got = stats.two_level_bootstrap(seeds + tasks)
    width = 2 * 1.96 * np.sqrt(seeds.var() / 8 + tasks.var() / 200)
    assert got.high - got.low == pytest.approx(width, rel=0.1)
    one = stats.two_level_bootstrap(tasks)
    alone = stats.bootstrap_mean(tasks[0])
    assert one.high - one.low == pytest.approx(alone.high - alone.low, rel=0.05)


def test_shared_tasks_cancel_in_a_difference() -> None:
    rng = np.random.default_rng(4)
    tasks = rng.normal(size=(1, 100))
    got = stats.two_level_difference(np.repeat(tasks, 3, 0) + 0.1, np.repeat(tasks, 5, 0))
    assert got.low == pytest.approx(0.1) and got.high == pytest.approx(0.1)


def test_sign_flip_by_hand_and_against_scipy() -> None:
    # |sum| of +-1 +-2 +-3: 6 4 2 0 0 2 4 6 -> only the two all-equal patterns reach 6: p = 2/8
    assert stats.sign_flip_test([1, 2, 3]) == pytest.approx(0.25)
    x = np.random.default_rng(5).normal(0.6, 1, 60)
    theirs = scipy.stats.permutation_test(
        (x,), np.mean, permutation_type="samples", n_resamples=20_000, random_state=0
    ).pvalue
    assert stats.sign_flip_test(x) == pytest.approx(theirs, abs=0.02)
    # two clusters only: whatever the rows, p cannot fall below 2/4
    assert stats.sign_flip_test([1, 1, 1, 2, 2], ["a", "a", "a", "b", "b"]) == 0.5


def test_detectable_difference_by_hand() -> None:
    # (1.960 + 0.842) * sqrt(0.25/100 + 0.25/100) = 2.802 * 0.0707 = 0.198
    assert stats.detectable_difference(0.5, 100, 0.5, 100) == pytest.approx(0.198, abs=1e-3)


def test_pass_hat_k_by_hand() -> None:
    # 4 trials, 4 and 2 successes: pass^1 = (1 + .5)/2, pass^2 = (1 + 1/6)/2
    assert stats.pass_hat_k([4, 2], 4, 1) == pytest.approx(0.75)
    assert stats.pass_hat_k([4, 2], 4, 2) == pytest.approx(7 / 12)
    with pytest.raises(ValueError, match="k=5"):
        stats.pass_hat_k([1], 4, 5)
