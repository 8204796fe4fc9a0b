"""Key/value rows on the device: head-major arrays, and the few operations that read or move them.

A cache holds `rows` rows of up to `length` positions, `[rows, K, length, Dh]` a layer. Which positions of a row
are valid is the engine's knowledge (a length per row); what lies beyond is garbage, which has weight zero in attention.
That hides finite values alone, so whoever writes sees to it that garbage is finite. Decoding reads this *main* cache
without writing it: the new positions of one chunk go to a small buffer with one cursor for all rows, and `merge` moves
them to each row's end when the chunk is over.

Layers are separate arrays (`stacked=False`) or one array with a leading layer axis (`stacked=True`). Stacked is
what a scan over layers needs, and what TPU compiles well; XLA on CPU copies whatever a program slices out of a
stack, so there separate arrays are read in place.

On a mesh heads are cut over the rules' `kv_heads` axis and rows are whole: every operation here is local to a shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from envace_jax.model.attention import NEGATIVE
from envace_jax.model.sharding import Rules, mesh_active
from envace_jax.model.spec import Qwen3Spec

SCORE_BYTES = 1 << 29
"""Float32 attention scores that a prefill holds at one time."""
CPU_SCORE_BYTES = 1 << 24
"""The same where XLA compiles for CPU: what stays in its caches, and in memory that is not mapped anew every time."""


class KVCache(NamedTuple):
    """Keys and values: a tuple of `[rows, K, length, Dh]`, one a layer, or one `[L, rows, K, length, Dh]` each."""

    k: Any
    v: Any

    @property
    def stacked(self) -> bool:
        return not isinstance(self.k, tuple)

    @property
    def rows(self) -> int:
        return (self.k if self.stacked else self.k[0]).shape[-4]

    @property
    def length(self) -> int:
        return (self.k if self.stacked else self.k[0]).shape[-2]

    def layer(self, index: Any) -> tuple[jax.Array, jax.Array]:
        """Keys and values of one layer, `[rows, K, length, Dh]` each."""
        if self.stacked:
            pick = lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)  # noqa: E731
            return pick(self.k), pick(self.v)
        return self.k[index], self.v[index]


def cache_spec(rules: Rules, *, stacked: bool) -> jax.sharding.PartitionSpec:
    """The layout of every array of a cache."""
    return rules.spec(*(["layers"] if stacked else []), None, "kv_heads", None, None)


def empty_cache(spec: Qwen3Spec, rows: int, length: int, dtype: Any, *, stacked: bool, sharding: Any = None) -> KVCache:
    """A cache of zeros."""
    layer = (rows, spec.n_kv_heads, length, spec.head_dim)
    shape = (spec.n_layers, *layer) if stacked else layer
    zeros = functools.partial(jnp.zeros, shape, dtype, device=sharding)
    if stacked:
        return KVCache(zeros(), zeros())
    return KVCache(*(tuple(zeros() for _ in range(spec.n_layers)) for _ in range(2)))


def empty_buffer(main: KVCache, chunk: int) -> KVCache:
    """A cache of `chunk` positions of zeros, laid out as `main` is."""
    return jax.tree.map(lambda x: jnp.zeros_like(x[..., :chunk, :]), main)


def local(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`function` run by every shard on its own heads; itself where no mesh is set."""
    if not mesh_active():
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs)


def put(cache: KVCache, layer: Any, k_RxKxPxDh: jax.Array, v_RxKxPxDh: jax.Array, starts: Any) -> KVCache:
    """Writes one layer's window; `starts` is the (row, head, position, channel) of its corner."""

    def one(whole: Any, part: jax.Array) -> Any:
        if isinstance(whole, tuple):
            new = jax.lax.dynamic_update_slice(whole[layer], part, starts)
            return whole[:layer] + (new,) + whole[layer + 1 :]
        return jax.lax.dynamic_update_slice(whole, part[None], (layer, *starts))

    return KVCache(one(cache.k, k_RxKxPxDh), one(cache.v, v_RxKxPxDh))


def take_rows(cache: KVCache, rows_B: jax.Array) -> KVCache:
    """A cache of these rows alone."""
    return jax.tree.map(lambda whole: jnp.take(whole, rows_B, axis=whole.ndim - 4, mode="clip"), cache)


def merge(
    main: KVCache, buffer: KVCache, starts_B: jax.Array, count_B: jax.Array, rows_B: jax.Array | None = None
) -> KVCache:
    """Appends a chunk's buffer `[B, K, C, Dh]` to rows `rows_B` (distinct; all of them, in order), each at its length.

    Only the first `count_B` positions count; zeros are written for the others, which may hold anything.
    """
    kept_Bx1xCx1 = (jnp.arange(buffer.length)[None] < count_B[:, None])[:, None, :, None]
    buffer = jax.tree.map(lambda part: jnp.where(kept_Bx1xCx1, part, 0), buffer)

    def rows(whole: jax.Array, part: jax.Array) -> jax.Array:
        if rows_B is None:
            update = lambda w, p, s: jax.lax.dynamic_update_slice(w, p, (0, s, 0))  # noqa: E731
            return jax.vmap(update)(whole, part, starts_B)
        return _scatter_in(whole, part, rows_B, starts_B)

    def stacked(whole: jax.Array, part: jax.Array) -> jax.Array:
        # Unrolled on purpose: as a loop it crashes libtpu, and a scatter is slow there.
        for r in range(part.shape[1]):
            row = r if rows_B is None else rows_B[r]
            whole = jax.lax.dynamic_update_slice(whole, part[:, r : r + 1], (0, row, 0, starts_B[r], 0))
        return whole

    return jax.tree.map(stacked if main.stacked else rows, main, buffer)


def _scatter_in(
    whole_BxKxTxDh: jax.Array, part_RxKxPxDh: jax.Array, rows_R: jax.Array, starts_R: jax.Array
) -> jax.Array:
    """Writes a window into each of R rows of one layer; what lies out of range is not written."""
    positions_RxP = starts_R[:, None] + jnp.arange(part_RxKxPxDh.shape[2])[None]
    moved = jnp.swapaxes(part_RxKxPxDh, 1, 2)  # [R, P, K, Dh], as advanced indexing lays it out
    return whole_BxKxTxDh.at[rows_R[:, None], :, positions_RxP].set(moved, mode="drop")


def _slide_in(
    whole_LxBxKxTxDh: jax.Array, layer: Any, part_RxKxPxDh: jax.Array, rows_R: jax.Array, starts_R: jax.Array
) -> jax.Array:
    """`write_windows` of a stack, row by row: on TPU a scatter would copy the whole cache, slices are set in place."""
    whole = whole_LxBxKxTxDh
    n_rows, length = whole.shape[1], whole.shape[3]
    n, _, p, _ = part_RxKxPxDh.shape
    for r in range(n):
        start = jnp.clip(starts_R[r], 0, length - p)
        # A window that reaches past the end is read from further back, and what lies before its start is kept.
        shift = starts_R[r] - start
        corner = (layer, jnp.clip(rows_R[r], 0, n_rows - 1), 0, start, 0)
        old = jax.lax.dynamic_slice(whole, corner, (1, 1, *part_RxKxPxDh.shape[1:]))
        new = jnp.roll(part_RxKxPxDh[r], shift, axis=1)[None, None].astype(whole.dtype)
        written = (jnp.arange(p) >= shift)[:, None] & (rows_R[r] >= 0) & (rows_R[r] < n_rows)
        whole = jax.lax.dynamic_update_slice(whole, jnp.where(written, new, old), corner)
    return whole


def write_windows(
    cache: KVCache,
    layer: Any,
    k_RxKxPxDh: jax.Array,
    v_RxKxPxDh: jax.Array,
    rows_R: jax.Array,
    starts_R: jax.Array,
) -> KVCache:
    """Writes one layer's window of P positions into R rows; a row index out of range writes nothing."""

    def one(whole: Any, part: jax.Array) -> Any:
        if not isinstance(whole, tuple):
            return _slide_in(whole, layer, part, rows_R, starts_R)
        return whole[:layer] + (_scatter_in(whole[layer], part, rows_R, starts_R),) + whole[layer + 1 :]

    return KVCache(one(cache.k, k_RxKxPxDh), one(cache.v, v_RxKxPxDh))


def copy_rows(target: KVCache, source: KVCache, to_R: jax.Array, from_R: jax.Array, length: int) -> KVCache:
    """The first `length` positions of rows `from_R` of `source` into rows `to_R` of `target`.

    All rows are read before any is written, so source and target may be one cache. A target index out of
    range writes nothing.
    """

    def one(whole: jax.Array, other: jax.Array) -> jax.Array:
        every = (slice(None),) * (whole.ndim - 4)
        part = other.at[(*every, from_R, slice(None), slice(length))].get(mode="clip")
        return whole.at[(*every, to_R, slice(None), slice(length))].set(part, mode="drop")

    return jax.tree.map(one, target, source)


def wipe_rows(cache: KVCache, rows_R: jax.Array) -> KVCache:
    """Zeroes whole rows that may hold what is not finite; an index out of range is left out."""

    def one(whole: jax.Array) -> jax.Array:
        every = (slice(None),) * (whole.ndim - 4)
        return whole.at[(*every, rows_R)].set(0, mode="drop")

    return jax.tree.map(one, cache)


def decode_attention(
    q_BxHxDh: jax.Array,
    main: tuple[jax.Array, jax.Array],
    buffer: tuple[jax.Array, jax.Array],
    lengths_B: jax.Array,
    cursor: jax.Array,
    hidden_BxT: jax.Array | None = None,
) -> jax.Array:
    """One query a row over its main positions (`< lengths_B`) and the buffer's (`<= cursor`).

    Main positions that `hidden_BxT` marks are not seen. Scores and softmax are float32, as in `attention_xla`.
    Returns [B, H, Dh] in the dtype of the values.
    """
    return _by_platform(_decode_attention, q_BxHxDh, main, buffer, lengths_B, cursor, hidden_BxT)


def _by_platform(function: Callable[..., Any], *arrays: Any) -> Any:
    """`function(*arrays, cpu=...)` as the platform wants it that the program is compiled for."""
    whole = functools.partial(function, cpu=False)
    return jax.lax.platform_dependent(*arrays, cpu=functools.partial(function, cpu=True), default=whole)


def _decode_attention(
    q_BxHxDh: jax.Array,
    main: tuple[jax.Array, jax.Array],
    buffer: tuple[jax.Array, jax.Array],
    lengths_B: jax.Array,
    cursor: jax.Array,
    hidden_BxT: jax.Array | None,
    cpu: bool,
) -> jax.Array:
    b, h, d = q_BxHxDh.shape
    (k_BxKxTxDh, v_BxKxTxDh), (bk_BxKxCxDh, bv_BxKxCxDh) = main, buffer
    n_kv, t, c = k_BxKxTxDh.shape[1], k_BxKxTxDh.shape[2], bk_BxKxCxDh.shape[2]
    q_BxKxGxDh = q_BxHxDh.reshape(b, n_kv, h // n_kv, d)

    def score(k_BxKxTxDh: jax.Array) -> jax.Array:
        s = jnp.einsum("bktd,bkgd->bktg", k_BxKxTxDh, q_BxKxGxDh, preferred_element_type=jnp.float32)
        # Left to itself XLA makes the transpose part of the product, which on CPU transposes all keys first.
        s = jax.lax.optimization_barrier(s) if cpu else s
        return jnp.swapaxes(s, 2, 3)

    seen_BxT = jnp.arange(t)[None] < lengths_B[:, None]
    if hidden_BxT is not None:
        seen_BxT &= ~hidden_BxT
    seen_C = jnp.arange(c) <= cursor
    s_main = jnp.where(seen_BxT[:, None, None], score(k_BxKxTxDh) * d**-0.5, NEGATIVE)
    s_buffer = jnp.where(seen_C, score(bk_BxKxCxDh) * d**-0.5, NEGATIVE)
    top = jnp.maximum(s_main.max(-1, keepdims=True), s_buffer.max(-1, keepdims=True))
    e_main, e_buffer = jnp.exp(s_main - top), jnp.exp(s_buffer - top)
    total = e_main.sum(-1, keepdims=True) + e_buffer.sum(-1, keepdims=True)
    dtype = v_BxKxTxDh.dtype
    out = jnp.einsum("bkgt,bktd->bkgd", (e_main / total).astype(dtype), v_BxKxTxDh)
    out += jnp.einsum("bkgt,bktd->bkgd", (e_buffer / total).astype(dtype), bv_BxKxCxDh)
    return out.reshape(b, h, d)


def prefill_attention(
    q_RxPxHxDh: jax.Array,
    k_RxKxTxDh: jax.Array,
    v_RxKxTxDh: jax.Array,
    positions_RxP: jax.Array,
    hidden_RxT: jax.Array | None = None,
) -> jax.Array:
    """P queries a row over the row's positions up to each query's own, less those that `hidden_RxT` marks.

    Returns [R, P, H, Dh].

    Over long rows it runs over slices of the queries, so that no more than `SCORE_BYTES` of scores exist.
    """
    return _by_platform(_prefill_attention, q_RxPxHxDh, k_RxKxTxDh, v_RxKxTxDh, positions_RxP, hidden_RxT)


def _prefill_attention(
    q_RxPxHxDh: jax.Array,
    k_RxKxTxDh: jax.Array,
    v_RxKxTxDh: jax.Array,
    positions_RxP: jax.Array,
    hidden_RxT: jax.Array | None,
    cpu: bool,
) -> jax.Array:
    r, p, h, d = q_RxPxHxDh.shape
    n_kv, t = k_RxKxTxDh.shape[1], k_RxKxTxDh.shape[2]
    limit = CPU_SCORE_BYTES if cpu else SCORE_BYTES
    slices = 1
    while 4 * r * h * (p // slices) * t > limit and p % (2 * slices) == 0 and p // slices > 16:
        slices *= 2

    def some(q_RxCxHxDh: jax.Array, positions_RxC: jax.Array) -> jax.Array:
        # The queries of all heads that share keys are one matrix: [R, K, G * C, Dh].
        c = q_RxCxHxDh.shape[1]
        q = jnp.moveaxis(q_RxCxHxDh.reshape(r, c, n_kv, -1, d), 1, 3).reshape(r, n_kv, -1, d)
        scores = jnp.einsum("rkmd,rktd->rkmt", q, k_RxKxTxDh, preferred_element_type=jnp.float32)
        seen_RxCxT = jnp.arange(t)[None, None] <= positions_RxC[:, :, None]
        if hidden_RxT is not None:
            seen_RxCxT &= ~hidden_RxT[:, None]
        scores_RxKxGxCxT = scores.reshape(r, n_kv, -1, c, t) * d**-0.5
        scores_RxKxGxCxT = jnp.where(seen_RxCxT[:, None, None], scores_RxKxGxCxT, NEGATIVE)
        weights = jax.nn.softmax(scores_RxKxGxCxT, axis=-1).astype(v_RxKxTxDh.dtype)
        out = jnp.einsum("rkmt,rktd->rkmd", weights.reshape(r, n_kv, -1, t), v_RxKxTxDh)
        return jnp.moveaxis(out.reshape(r, n_kv, -1, c, d), 3, 1).reshape(r, c, h, d)

    if slices == 1:
        return some(q_RxPxHxDh, positions_RxP)
    cut = lambda x: jnp.moveaxis(x.reshape(r, slices, -1, *x.shape[2:]), 1, 0)  # noqa: E731
    out_SxRxCxHxDh = jax.lax.map(lambda pair: some(*pair), (cut(q_RxPxHxDh), cut(positions_RxP)))
    return jnp.moveaxis(out_SxRxCxHxDh, 0, 1).reshape(r, p, h, d)
