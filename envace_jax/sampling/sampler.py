"""From logits to one token a row: per-row temperature, truncation and keys; the log-probability stored with it."""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

BISECTIONS = 31
"""Enough to find a float32 threshold exactly: positive floats order like their 31 bits."""


def request_key(seed: int, key: Sequence[int]) -> np.ndarray:
    """Two uint32 words for one request: a digest of the run's seed and the request's own key.

    Every number of `key` counts (step, task, member, role, segment), and nothing else does: neither the order of
    admission nor the row.
    """
    data = struct.pack(f"<{len(key) + 1}q", seed, *key)
    return np.frombuffer(hashlib.blake2b(data, digest_size=8).digest(), np.uint32)


def position_uniforms(keys_Bx2: jax.Array, first_B: jax.Array, n: int) -> jax.Array:
    """Uniforms [B, n] in [0, 1) for positions `first_B .. first_B + n - 1` of every row.

    One Threefry call: a row's key words are the cipher's key, the position is what it encrypts.
    """
    positions_BxN = (first_B[:, None] + jnp.arange(n)[None]).astype(jnp.uint32)
    whole = functools.partial(jnp.broadcast_to, shape=positions_BxN.shape)
    bits_BxN, _ = threefry2x32_p.bind(
        whole(keys_Bx2[:, :1]), whole(keys_Bx2[:, 1:]), positions_BxN, jnp.zeros_like(positions_BxN)
    )
    # The 23 upper bits are the mantissa of a float in [1, 2).
    ones_BxN = (bits_BxN >> 9) | jnp.uint32(0x3F800000)
    return jax.lax.bitcast_convert_type(ones_BxN, jnp.float32) - 1.0


def _largest_threshold(weights_BxV: jax.Array, enough) -> jax.Array:
    """The largest float32 x [B] with `enough(weights >= x)`, by bisection on its bits (no sort, no gather)."""

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        keep = weights_BxV >= jax.lax.bitcast_convert_type(middle, jnp.float32)[:, None]
        ok = enough(keep)
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle)

    low = jnp.zeros(weights_BxV.shape[0], jnp.int32)
    high = jnp.full(weights_BxV.shape[0], 0x7F800000, jnp.int32)
    low, _ = jax.lax.fori_loop(0, BISECTIONS, halve, (low, high))
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def truncate(weights_BxV: jax.Array, top_p_B: jax.Array, top_k_B: jax.Array) -> jax.Array:
    """Zeroes what top-k, then top-p leave out of unnormalised probabilities.

    Top-k keeps the k largest (0 = all); top-p keeps the smallest set of the largest whose mass reaches p of what
    top-k left, and the largest value always. Values that tie with the last one kept are kept too.
    """
    count = jnp.where(top_k_B > 0, top_k_B, weights_BxV.shape[-1])
    bound = _largest_threshold(weights_BxV, lambda keep: keep.sum(-1) >= count)
    weights_BxV = jnp.where(weights_BxV >= bound[:, None], weights_BxV, 0.0)
    mass = jnp.where(top_p_B < 1.0, top_p_B, 0.0) * weights_BxV.sum(-1)
    bound = _largest_threshold(weights_BxV, lambda keep: jnp.where(keep, weights_BxV, 0.0).sum(-1) >= mass)
    bound = jnp.where(top_p_B < 1.0, jnp.minimum(bound, weights_BxV.max(-1)), 0.0)
    return jnp.where(weights_BxV >= bound[:, None], weights_BxV, 0.0)


def draw(weights_BxV: jax.Array, uniform_B: jax.Array) -> jax.Array:
    """Index drawn in proportion to the weights, by inverting the cumulative sum in two levels.

    One uniform a row instead of one a vocabulary entry, and no cumulative sum over the whole vocabulary: first
    the block that holds `u * total`, then the place in it. Weights of zero are never drawn.
    """
    b, v = weights_BxV.shape
    size = max(16, int(np.ceil(np.sqrt(v) / 16)) * 16)
    n = -(-v // size)
    blocks_BxNxS = jnp.pad(weights_BxV, ((0, 0), (0, n * size - v))).reshape(b, n, size)
    ends_BxN = jnp.cumsum(blocks_BxNxS.sum(-1), axis=-1)
    target_B = uniform_B * ends_BxN[:, -1]
    # The last block with any mass is the bound: rounding may put the target at or past the total.
    mass_before_BxN = jnp.concatenate([jnp.zeros((b, 1), ends_BxN.dtype), ends_BxN[:, :-1]], axis=1)
    last_B = jnp.max(jnp.where(ends_BxN > mass_before_BxN, jnp.arange(n), 0), axis=-1)
    block_B = jnp.minimum((ends_BxN <= target_B[:, None]).sum(-1), last_B)
    rest_B = target_B - jnp.take_along_axis(mass_before_BxN, block_B[:, None], axis=1)[:, 0]
    inside_BxS = jnp.take_along_axis(blocks_BxNxS, block_B[:, None, None], axis=1)[:, 0]
    last_B = jnp.max(jnp.where(inside_BxS > 0, jnp.arange(size), 0), axis=-1)
    place_B = jnp.minimum((jnp.cumsum(inside_BxS, axis=-1) <= rest_B[:, None]).sum(-1), last_B)
    # A place of zero weight can only be reached when the residual rounds below zero: take the next one up.
    index_S = jnp.arange(size)
    first_B = jnp.min(jnp.where((inside_BxS > 0) & (index_S >= place_B[:, None]), index_S, size - 1), axis=-1)
    return block_B * size + first_B


def sample(
    logits_BxV: jax.Array,
    uniform_B: jax.Array,
    temperature_B: jax.Array,
    top_p_B: jax.Array,
    top_k_B: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One token a row and its log-probability, from float32 logits.

    The log-probability is that of softmax(logits / temperature) before top-k and top-p: what the learner
    computes again. Temperature 0 takes the largest logit (the first one of equals) and stores its
    log-probability at temperature 1. A row whose logits are not finite gets a log-probability that is not.
    """
    greedy_B = temperature_B <= 0.0
    scaled_BxV = logits_BxV / jnp.where(greedy_B, 1.0, temperature_B)[:, None]
    top_B = scaled_BxV.max(-1)
    weights_BxV = jnp.exp(scaled_BxV - top_B[:, None])
    total_B = weights_BxV.sum(-1)
    kept_BxV = jax.lax.cond(
        jnp.any(~greedy_B & ((top_p_B < 1.0) | (top_k_B > 0))),
        lambda w: truncate(w, top_p_B, top_k_B),
        lambda w: w,
        weights_BxV,
    )
    best_B = jax.lax.cond(
        jnp.any(greedy_B),
        lambda s: jnp.min(jnp.where(s == top_B[:, None], jnp.arange(s.shape[-1]), s.shape[-1] - 1), axis=-1),
        lambda s: jnp.zeros(s.shape[0], jnp.int32),
        scaled_BxV,
    )
    token_B = jnp.where(greedy_B, best_B, draw(kept_BxV, uniform_B)).astype(jnp.int32)
    chosen_B = jnp.take_along_axis(scaled_BxV, token_B[:, None], axis=1)[:, 0]
    return token_B, chosen_B - top_B - jnp.log(total_B)
