"""Drawing, truncation and keys against numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envace_jax.sampling.sampler import draw, position_uniforms, request_key, sample, truncate

pytestmark = pytest.mark.quick


def reference_truncate(w: np.ndarray, top_p: float, top_k: int) -> np.ndarray:
    order = np.sort(w)[::-1]
    if top_k:
        w = np.where(w >= order[min(top_k, len(w)) - 1], w, 0)
        order = np.sort(w)[::-1]
    if top_p < 1:
        n = int(np.searchsorted(np.cumsum(order.astype(np.float64)), top_p * order.sum(dtype=np.float64))) + 1
        w = np.where(w >= order[min(n, len(w)) - 1], w, 0)
    return w


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31 - 1),
    st.sampled_from([0.05, 0.3, 0.7, 0.95, 1.0]),
    st.sampled_from([0, 1, 3, 40, 100]),
)
def test_truncation_keeps_what_a_sort_keeps(seed, top_p, top_k):
    w = np.exp(np.random.default_rng(seed).normal(size=40) * 3).astype(np.float32)
    got = np.asarray(jax.jit(truncate)(jnp.asarray(w)[None], jnp.float32([top_p]), jnp.int32([top_k])))[0]
    want = reference_truncate(w, top_p, top_k)
    # Where the mass meets p exactly, rounding may move the edge by one value.
    assert (got > 0).sum() - (want > 0).sum() in (-1, 0, 1)
    if top_p in (0.3, 0.7):
        np.testing.assert_array_equal(got, want)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31 - 1), st.sampled_from([1, 7, 40, 300]), st.floats(0, 1, exclude_max=True, width=32))
def test_draw_inverts_the_cumulative_sum_and_never_draws_zero(seed, size, u):
    rng = np.random.default_rng(seed)
    w = np.where(rng.random(size) < 0.4, 0, rng.random(size)).astype(np.float32)
    w[rng.integers(size)] = 1.0
    got = int(draw(jnp.asarray(w)[None], jnp.float32([u]))[0])
    assert w[got] > 0
    cumulative = np.cumsum(w.astype(np.float64))
    target = u * cumulative[-1]
    assert cumulative[got] - w[got] - 1e-5 <= target <= cumulative[got] + 1e-5


def test_draws_follow_the_distribution():
    n, v = 20000, 37
    logits = np.random.default_rng(0).normal(size=v).astype(np.float32) * 2
    keys = jnp.asarray(np.stack([request_key(0, (i,)) for i in range(n)]))
    u = position_uniforms(keys, jnp.zeros(n, jnp.int32), 1)[:, 0]
    ones = jnp.ones(n, jnp.float32)
    token, logp = jax.jit(sample)(jnp.tile(logits, (n, 1)), u, 0.7 * ones, ones, jnp.zeros(n, jnp.int32))
    p = np.exp(logits / 0.7 - (logits / 0.7).max())
    p /= p.sum()
    counts = np.bincount(np.asarray(token), minlength=v)
    expected = np.maximum(p * n, 1e-9)
    chi2 = ((counts - expected) ** 2 / expected)[expected > 5].sum()
    assert chi2 < 80, chi2  # 37 degrees of freedom: 1 in 10^4
    np.testing.assert_allclose(np.asarray(logp), np.log(p)[np.asarray(token)], atol=2e-5)


def test_greedy_takes_the_first_largest_at_temperature_one():
    logits = jnp.float32([[0.0, 2.0, 2.0, 1.0], [5.0, 0.0, 0.0, 0.0]])
    one = jnp.ones(2)
    token, logp = sample(logits, 0.99 * one, 0 * one, one, jnp.zeros(2, jnp.int32))
    assert token.tolist() == [1, 0]
    np.testing.assert_allclose(logp, jax.nn.log_softmax(logits, -1)[jnp.arange(2), token], rtol=1e-6)


def test_logprob_is_before_truncation():
    logits = jnp.float32([[1.0, 0.5, -1.0, -3.0]])
    one = jnp.ones(1)
    for u in (0.0, 0.5, 0.999):
        token, logp = sample(logits, jnp.float32([u]), one, one, jnp.int32([2]))
        assert int(token[0]) in (0, 1)
        np.testing.assert_allclose(logp[0], jax.nn.log_softmax(logits[0])[token[0]], rtol=1e-6)


def test_not_finite_logits_show_in_the_logprob():
    logits = jnp.float32([[1.0, jnp.nan], [0.0, jnp.inf], [-jnp.inf, -jnp.inf], [0.0, 0.0]])
    one = jnp.ones(4)
    _, logp = sample(logits, 0.3 * one, one, one, jnp.zeros(4, jnp.int32))
    assert np.isfinite(np.asarray(logp)).tolist() == [False, False, False, True]


def test_keys_depend_on_every_number_and_on_their_place():
    keys = {request_key(0, k).tobytes() for k in [(1, 2), (2, 1), (1, 2, 0), (0, 1, 2), (), (1,)]}
    keys.add(request_key(1, (2,)).tobytes())
    assert len(keys) == 7
    assert request_key(5, (1, -3)).tolist() == request_key(5, (1, -3)).tolist()


@pytest.mark.parametrize("top_p", [0.0, 1e-30, -1.0])
def test_the_largest_is_always_kept(top_p):
    weights = jnp.asarray([[0.2, 1.0, 0.5], [1.0, 1e-30, 0.0]])
    kept = truncate(weights, jnp.full(2, top_p), jnp.zeros(2, jnp.int32))
    np.testing.assert_array_equal(kept, [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
