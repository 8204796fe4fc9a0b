"""Prefill over long rows in slices of queries."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.model import kv_cache
from envace_jax.model.spec import PRESETS

pytestmark = pytest.mark.quick


def test_slices_of_queries_change_nothing(monkeypatch):
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (2, 64, 4, 8))
    k, v = (jax.random.normal(key, (2, 2, 80, 8)) for key in keys[1:])
    positions = jnp.arange(64)[None] + jnp.array([[16], [3]])
    whole = jax.jit(kv_cache.prefill_attention)(q, k, v, positions)
    for name in ("SCORE_BYTES", "CPU_SCORE_BYTES"):
        monkeypatch.setattr(kv_cache, name, 4 * 2 * 4 * 16 * 80)
    text = str(jax.make_jaxpr(lambda *a: kv_cache.prefill_attention(*a))(q, k, v, positions))
    assert "scan" in text and "2,2,2,16,80" in text  # sixteen queries at a time
    sliced = jax.jit(lambda *a: kv_cache.prefill_attention(*a))(q, k, v, positions)
    np.testing.assert_allclose(sliced, whole, atol=1e-6)


def test_windows_of_a_stack_and_of_single_layers_are_equal():
    """Rows out of range write nothing, windows past the end are cut, and nothing else changes."""
    spec = dataclasses.replace(PRESETS["tiny"], n_layers=2)
    filled = lambda cache: jax.tree.map(lambda x: jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape), cache)  # noqa: E731
    flat = filled(kv_cache.empty_cache(spec, 4, 10, jnp.float32, stacked=False))
    stacked = kv_cache.KVCache(jnp.stack(flat.k), jnp.stack(flat.v))
    k, v = jax.random.normal(jax.random.key(0), (2, 4, spec.n_kv_heads, 3, spec.head_dim))
    rows, starts = jnp.array([2, 4, 0, 9]), jnp.array([1, 0, 8, 5])
    other = jax.jit(lambda c: kv_cache.write_windows(c, jnp.int32(1), k, v, rows, starts))(stacked)
    wanted = np.array(jnp.stack(flat.k))
    wanted[1, 2, :, 1:4] = k[0]
    wanted[1, 0, :, 8:10] = k[2][:, :2]
    np.testing.assert_array_equal(other.k, wanted)
    one = jax.jit(lambda c: kv_cache.write_windows(c, 1, k, v, rows, starts))(flat)
    np.testing.assert_array_equal(other.k, jnp.stack(one.k))
    np.testing.assert_array_equal(other.v, jnp.stack(one.v))
