"""Attention with one meaning: causal by position, blocked by segment, grouped heads; several ways to compute it.

`xla` is the reference and the sampler's form. `chunked` is the same arithmetic over slices of queries, for rows whose
scores do not fit. `splash` is the Pallas kernel for TPU, `cudnn` NVIDIA's kernel. The kernels read causality off the
order of a row, so they serve packed rows: segments lie one after the other, positions rise inside each.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envace_jax.config import UserError
from envace_jax.model.sharding import Rules, inner_sequence, mesh_active

NEGATIVE = -1e30
BACKENDS = ("xla", "chunked", "splash", "cudnn")
CHUNK = 1024
"""Queries whose scores exist at one time in the `chunked` and `cudnn` forms."""


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
    # The queries of all heads that share keys are one matrix, [B, K, G * T, Dh]: XLA on CPU is slow with one more axis.
    q = jnp.transpose(q_BxTxHxDh.reshape(b, t, n_kv, -1, d), (0, 2, 3, 1, 4)).reshape(b, n_kv, -1, d)
    scores = jnp.einsum("bkmd,bskd->bkms", q, k_BxSxKxDh, preferred_element_type=jnp.float32)
    visible_BxTxS = _visible(q_positions_BxT, kv_positions_BxS, q_segments_BxT, kv_segments_BxS)
    scores_BxKxGxTxS = scores.reshape(b, n_kv, h // n_kv, t, -1) * d**-0.5
    scores_BxKxGxTxS = jnp.where(visible_BxTxS[:, None, None], scores_BxKxGxTxS, NEGATIVE)
    weights = jax.nn.softmax(scores_BxKxGxTxS, axis=-1).astype(v_BxSxKxDh.dtype)
    out = jnp.einsum("bkms,bskd->bkmd", weights.reshape(b, n_kv, -1, weights.shape[-1]), v_BxSxKxDh)
    return jnp.transpose(out.reshape(b, n_kv, -1, t, d), (0, 3, 1, 2, 4)).reshape(b, t, h, d)


def _visible(
    q_positions_BxT: jax.Array, kv_positions_BxS: jax.Array, q_segments_BxT: jax.Array, kv_segments_BxS: jax.Array
) -> jax.Array:
    return (kv_positions_BxS[:, None, :] <= q_positions_BxT[:, :, None]) & (
        kv_segments_BxS[:, None, :] == q_segments_BxT[:, :, None]
    )


def _over_queries(form: Any, q: jax.Array, q_positions_BxT: jax.Array, q_segments_BxT: jax.Array) -> jax.Array:
    """`form(q, positions, segments)` over slices of CHUNK queries, each recomputed in the backward pass."""
    b, t, h, d = q.shape
    n = -(-t // CHUNK)
    pad = n * CHUNK - t

    def cut(x: jax.Array) -> jax.Array:
        # Padding repeats the last query, which sees something: no row of scores is empty.
        x = jnp.concatenate([x, jnp.repeat(x[:, -1:], pad, axis=1)], axis=1) if pad else x
        return jnp.moveaxis(x.reshape(b, n, CHUNK, *x.shape[2:]), 1, 0)

    slices = (cut(q), cut(q_positions_BxT), cut(q_segments_BxT))
    out_NxBxCxHxDh = jax.lax.map(lambda s: jax.checkpoint(form)(*s), slices)
    return jnp.moveaxis(out_NxBxCxHxDh, 0, 1).reshape(b, n * CHUNK, h, d)[:, :t]


def _local(
    q_BxTxHxDh: jax.Array,
    k_BxSxKxDh: jax.Array,
    v_BxSxKxDh: jax.Array,
    q_positions_BxT: jax.Array,
    q_segments_BxT: jax.Array,
    kv_positions_BxS: jax.Array,
    kv_segments_BxS: jax.Array,
    *,
    backend: str,
    interpret: bool,
) -> jax.Array:
    """One shard's attention (S = T unless the sequence is cut)."""
    if backend == "splash":
        return _splash(q_BxTxHxDh, k_BxSxKxDh, v_BxSxKxDh, q_segments_BxT, interpret)

    def xla(q: jax.Array, positions_BxC: jax.Array, segments_BxC: jax.Array) -> jax.Array:
        return attention_xla(
            q,
            k_BxSxKxDh,
            v_BxSxKxDh,
            q_positions_BxT=positions_BxC,
            kv_positions_BxS=kv_positions_BxS,
            q_segments_BxT=segments_BxC,
            kv_segments_BxS=kv_segments_BxS,
        )

    def cudnn(q: jax.Array, positions_BxC: jax.Array, segments_BxC: jax.Array) -> jax.Array:
        # The kernel's own causal flag knows nothing of segments: the mask says all, for CHUNK queries at a time.
        mask_BxCxS = _visible(positions_BxC, kv_positions_BxS, segments_BxC, kv_segments_BxS)
        return jax.nn.dot_product_attention(
            q, k_BxSxKxDh, v_BxSxKxDh, mask=mask_BxCxS[:, None], implementation="cudnn"
        )

    form = cudnn if backend == "cudnn" else xla
    if backend == "xla" or q_BxTxHxDh.shape[1] <= CHUNK:
        return form(q_BxTxHxDh, q_positions_BxT, q_segments_BxT)
    return _over_queries(form, q_BxTxHxDh, q_positions_BxT, q_segments_BxT)


def _splash_blocks(t: int, kernel: Any) -> Any:
    # Blocks divide the row; 512 x 1024 for 128-wide heads stays inside VMEM on v5e, v5p and v6e.
    kv = next(n for n in (1024, 512, 256, 128) if t % n == 0)
    half = min(512, kv)
    return kernel.BlockSizes(
        block_q=half,
        block_kv=kv,
        block_kv_compute=half,
        block_q_dkv=half,
        block_kv_dkv=kv,
        block_kv_dkv_compute=half,
        block_q_dq=half,
        block_kv_dq=half,
    )


def _splash(
    q_BxTxHxDh: jax.Array, k_BxTxKxDh: jax.Array, v_BxTxKxDh: jax.Array, segments_BxT: jax.Array, interpret: bool
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    b, t, h, d = q_BxTxHxDh.shape
    if t % 128:
        raise UserError(f"model.attention=splash: rows of {t} tokens; expected a multiple of 128")
    mask = masks.MultiHeadMask([masks.CausalMask((t, t))] * h)
    splash = kernel.make_splash_mha(
        mask, block_sizes=_splash_blocks(t, kernel), head_shards=1, q_seq_shards=1, interpret=interpret
    )
    heads_first = functools.partial(jnp.swapaxes, axis1=1, axis2=2)
    scale = np.float32(d**-0.5).astype(q_BxTxHxDh.dtype)  # the kernel does not scale

    def row(q: jax.Array, k: jax.Array, v: jax.Array, segments_T: jax.Array) -> jax.Array:
        return splash(q, k, v, kernel.SegmentIds(segments_T, segments_T))

    out = jax.vmap(row)(
        heads_first(q_BxTxHxDh * scale), heads_first(k_BxTxKxDh), heads_first(v_BxTxKxDh), segments_BxT
    )
    return heads_first(out).astype(v_BxTxKxDh.dtype)


def choose(backend: str, length: int, head_dim: int, dtype: Any, platform: str) -> str:
    """The form for devices of this platform where `auto` is asked for: a kernel where it takes these shapes."""
    if backend != "auto":
        return backend
    if platform == "tpu" and length % 128 == 0 and head_dim % 128 == 0:
        return "splash"
    if platform == "gpu" and dtype in (jnp.bfloat16, jnp.float16) and head_dim <= 128:
        return "cudnn"
    return "xla" if length <= 2 * CHUNK else "chunked"


def attention(
    q_BxTxHxDh: jax.Array,
    k_BxTxKxDh: jax.Array,
    v_BxTxKxDh: jax.Array,
    *,
    positions_BxT: jax.Array,
    segments_BxT: jax.Array,
    rules: Rules = Rules(),
    backend: str = "xla",
    interpret: bool = False,
) -> jax.Array:
    """Self-attention of packed rows by the named backend; the meaning is that of `attention_xla`.

    Every shard of batch and heads computes for itself (`shard_map` where a mesh is set); where the rules cut the
    sequence, keys and values are gathered along it and queries stay cut.

    Args:
        backend: one of BACKENDS (`choose` turns `auto` into one). `splash` and `cudnn` need rows laid out as packing
            does (see above); `splash` needs lengths that are multiples of 128 and a sequence that is not cut.
        interpret: run Pallas kernels in the interpreter (tests without a TPU).
    """
    if backend not in BACKENDS:
        raise UserError(f"model.attention='{backend}' is unknown; expected auto or one of {', '.join(BACKENDS)}")
    local = functools.partial(_local, backend=backend, interpret=interpret)
    own = (positions_BxT, segments_BxT)
    if not mesh_active():
        return local(q_BxTxHxDh, k_BxTxKxDh, v_BxTxKxDh, *own, *own)
    cut = inner_sequence(rules)
    if cut and backend == "splash":
        raise UserError("model.attention=splash does not take rows cut along the sequence; use chunked")
    q_spec, kv_spec = rules.spec("batch", cut, "heads", None), rules.spec("batch", None, "kv_heads", None)
    cut_spec, whole_spec = rules.spec("batch", cut), rules.spec("batch", None)
    # The kernel's outputs carry no varying axes, so they cannot be checked.
    shard = jax.shard_map(
        local,
        in_specs=(q_spec, kv_spec, kv_spec, cut_spec, cut_spec, whole_spec, whole_spec),
        out_specs=q_spec,
        check_vma=backend != "splash",
    )
    k_BxTxKxDh, v_BxTxKxDh = jax.reshard(k_BxTxKxDh, kv_spec), jax.reshard(v_BxTxKxDh, kv_spec)
    cut_rows = [jax.reshard(x, cut_spec) for x in own]
    whole_rows = [jax.reshard(x, whole_spec) for x in own]
    return shard(q_BxTxHxDh, k_BxTxKxDh, v_BxTxKxDh, *cut_rows, *whole_rows)
