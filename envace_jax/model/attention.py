"""Attention with one meaning: causal by position, blocked by segment, grouped heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp

NEGATIVE = -1e30


def attention_xla(
    q_BxTxHxDh: jax.Array,
    k_BxSxKxDh: jax.Array,
    v_BxSxKxDh: jax.Array,
    *,
    q_positions_BxT: jax.Array,
    kv_positions_BxS: jax.Array,
    q_segments_BxT: jax.Array,
    kv_segments_BxS: jax.Array,
) -> jax.Array:
    """Reference form: query t sees key s iff position_s <= position_t and both are of one segment.

    Scores and softmax are float32 whatever the inputs are. Head h reads key/value head h // (H / K). Returns
    [B, T, H, Dh] in the dtype of `v`. A query of segment 0 (padding) sees only padding; its output is not used.
    """
    b, t, h, d = q_BxTxHxDh.shape
    n_kv = k_BxSxKxDh.shape[2]
    q_BxTxKxGxDh = q_BxTxHxDh.reshape(b, t, n_kv, h // n_kv, d)
    scores_BxKxGxTxS = jnp.einsum(
        "btkgd,bskd->bkgts", q_BxTxKxGxDh, k_BxSxKxDh, preferred_element_type=jnp.float32
    )
    visible_BxTxS = (kv_positions_BxS[:, None, :] <= q_positions_BxT[:, :, None]) & (
        kv_segments_BxS[:, None, :] == q_segments_BxT[:, :, None]
    )
    scores_BxKxGxTxS = jnp.where(visible_BxTxS[:, None, None], scores_BxKxGxTxS * d**-0.5, NEGATIVE)
    weights_BxKxGxTxS = jax.nn.softmax(scores_BxKxGxTxS, axis=-1).astype(v_BxSxKxDh.dtype)
    out_BxTxKxGxDh = jnp.einsum("bkgts,bskd->btkgd", weights_BxKxGxTxS, v_BxSxKxDh)
    return out_BxTxKxGxDh.reshape(b, t, h, d)
