"""Causality proved by gradient: what a position depends on, and that packed rows do not see each other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.model.attention import attention_xla
from envace_jax.model.qwen3 import ForwardOptions, decoder, embed, forward, init_params
from envace_jax.model.spec import PRESETS

SPEC = PRESETS["tiny"]


@pytest.mark.quick
def test_gradient_reaches_the_own_past_and_nothing_else():
    params = init_params(SPEC, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (1, 12), 0, SPEC.vocab_size)
    segments = jnp.array([[1] * 5 + [2] * 5 + [0] * 2])
    positions = jnp.array([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]])

    def out(x_BxTxD):
        def attend(carry, _, q, k, v):
            places = dict(q_positions_BxT=positions, kv_positions_BxS=positions)
            return carry, attention_xla(q, k, v, **places, q_segments_BxT=segments, kv_segments_BxS=segments)

        hidden, _ = decoder(params, SPEC, x_BxTxD, positions, attend, options=ForwardOptions())
        return hidden[0].sum(-1)

    reach = np.asarray(jnp.abs(jax.jacobian(out)(embed(params, tokens, ForwardOptions()))).sum((1, 3)))
    same = np.asarray(segments)[0][:, None] == np.asarray(segments)[0][None]
    earlier = np.tril(np.ones((12, 12), bool))
    assert ((reach > 0) == (same & earlier)).all()


def test_forward_takes_no_part_in_padding():
    params = init_params(SPEC, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (1, 8), 0, SPEC.vocab_size)
    segments = jnp.array([[1, 1, 1, 1, 1, 0, 0, 0]])
    positions = jnp.arange(8)[None] * (segments > 0)
    first = forward(params, SPEC, tokens, positions, segments)[:, :5]
    second = forward(params, SPEC, tokens.at[:, 5:].set(0), positions, segments)[:, :5]
    np.testing.assert_array_equal(first, second)
