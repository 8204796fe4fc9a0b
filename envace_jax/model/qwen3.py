"""Qwen3: thin Flax NNX modules for the definition, plain pytrees for the hot path.

`Qwen3` holds one stacked `Block` for all layers. `init_params` builds it once and splits it into the nested
dictionary that everything else carries; `decoder` scans over the stacked layers and merges one `Block` at a
time while tracing. What attention reads and writes (nothing, or a KV cache) is the caller's `attend`.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from envace_jax.config import UserError
from envace_jax.model.attention import attention_xla
from envace_jax.model.sharding import PARAM_AXES, Rules, gather, layout, mesh_active
from envace_jax.model.spec import Qwen3Spec

Params = dict[str, Any]
Attend = Callable[[Any, jax.Array, jax.Array, jax.Array, jax.Array], tuple[Any, jax.Array]]
"""attend(carry, layer, q_BxTxHxDh, k_BxTxKxDh, v_BxTxKxDh) -> (carry, out_BxTxHxDh)."""

REMAT_POLICIES: dict[str, Any] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""What a layer keeps for its backward pass: everything, nothing, or the weight products."""


@dataclasses.dataclass(frozen=True)
class ForwardOptions:
    """How the forward pass is run: compute dtype, what is recomputed, and the layout rules."""

    dtype: Any = jnp.float32
    remat: str = "none"
    rules: Rules = Rules()

    def __post_init__(self) -> None:
        if self.remat not in REMAT_POLICIES:
            raise UserError(f"model.remat='{self.remat}' is unknown; expected one of {sorted(REMAT_POLICIES)}")


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the last axis, in float32, returned in x's dtype."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale.astype(jnp.float32)).astype(x.dtype)


def rope(x_BxTxNxDh: jax.Array, positions_BxT: jax.Array, theta: float) -> jax.Array:
    """Rotary positions in the half-split form (pairs i and i + Dh/2), computed in float32."""
    half = x_BxTxNxDh.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_BxTx1xF = positions_BxT[:, :, None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle_BxTx1xF), jnp.sin(angle_BxTx1xF)
    a, b = jnp.split(x_BxTxNxDh.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BxTxNxDh.dtype)


def _normal(rngs: nnx.Rngs, name: str, shape: tuple[int, ...], std: float, dtype: Any) -> nnx.Param:
    # The key is folded from the name: a parameter added later leaves the others' values alone.
    key = jax.random.fold_in(rngs.params(), zlib.crc32(name.encode()) & 0x7FFFFFFF)
    return nnx.Param((jax.random.normal(key, shape, jnp.float32) * std).astype(dtype))


class Block(nnx.Module):
    """One decoder layer: attention with per-head query and key norms, then a gated MLP."""

    def __init__(self, spec: Qwen3Spec, dtype: Any, rngs: nnx.Rngs):
        d, h, k, dh, f = spec.d_model, spec.n_heads, spec.n_kv_heads, spec.head_dim, spec.d_ff
        out_std = 0.02 / (2 * spec.n_layers) ** 0.5
        self.attn_norm = nnx.Param(jnp.ones((d,), dtype))
        self.q = _normal(rngs, "q", (d, h, dh), 0.02, dtype)
        self.k = _normal(rngs, "k", (d, k, dh), 0.02, dtype)
        self.v = _normal(rngs, "v", (d, k, dh), 0.02, dtype)
        self.o = _normal(rngs, "o", (h, dh, d), out_std, dtype)
        self.q_norm = nnx.Param(jnp.ones((dh,), dtype))
        self.k_norm = nnx.Param(jnp.ones((dh,), dtype))
        self.mlp_norm = nnx.Param(jnp.ones((d,), dtype))
        self.gate = _normal(rngs, "gate", (d, f), 0.02, dtype)
        self.up = _normal(rngs, "up", (d, f), 0.02, dtype)
        self.down = _normal(rngs, "down", (f, d), out_std, dtype)

    def weight(self, name: str, dtype: Any, rules: Rules) -> jax.Array:
        """A weight in the compute dtype, whole along the axis that data parallelism cuts."""
        w = getattr(self, name)[...].astype(dtype)
        return gather(rules, w, *PARAM_AXES[f"layers/{name}"][1:])

    def __call__(
        self,
        spec: Qwen3Spec,
        x_BxTxD: jax.Array,
        positions_BxT: jax.Array,
        attend: Callable[..., tuple[Any, jax.Array]],
        options: ForwardOptions,
    ) -> tuple[jax.Array, Any]:
        rules = options.rules
        w = functools.partial(self.weight, dtype=options.dtype, rules=rules)
        residual = layout(rules, "batch", "sequence", None)
        with jax.named_scope("attention"):
            y_BxTxD = rms_norm(x_BxTxD, self.attn_norm[...], spec.rms_eps)
            q_BxTxHxDh = jnp.einsum("btd,dhk->bthk", y_BxTxD, w("q"))
            k_BxTxKxDh = jnp.einsum("btd,dhk->bthk", y_BxTxD, w("k"))
            v_BxTxKxDh = jnp.einsum("btd,dhk->bthk", y_BxTxD, w("v"))
            q_BxTxHxDh = rms_norm(q_BxTxHxDh, self.q_norm[...], spec.rms_eps)
            k_BxTxKxDh = rms_norm(k_BxTxKxDh, self.k_norm[...], spec.rms_eps)
            q_BxTxHxDh = rope(q_BxTxHxDh, positions_BxT, spec.rope_theta)
            k_BxTxKxDh = rope(k_BxTxKxDh, positions_BxT, spec.rope_theta)
            carry, out_BxTxHxDh = attend(q_BxTxHxDh, k_BxTxKxDh, v_BxTxKxDh)
            x_BxTxD += jnp.einsum("bthk,hkd->btd", out_BxTxHxDh, w("o"), out_sharding=residual)
        with jax.named_scope("mlp"):
            y_BxTxD = rms_norm(x_BxTxD, self.mlp_norm[...], spec.rms_eps)
            gate_BxTxF = jnp.einsum("btd,df->btf", y_BxTxD, w("gate"))
            up_BxTxF = jnp.einsum("btd,df->btf", y_BxTxD, w("up"))
            x_BxTxD += jnp.einsum(
                "btf,fd->btd", jax.nn.silu(gate_BxTxF) * up_BxTxF, w("down"), out_sharding=residual
            )
        return x_BxTxD, carry


class Qwen3(nnx.Module):
    """Embedding, `n_layers` stacked blocks, final norm and (where untied) the output matrix."""

    def __init__(self, spec: Qwen3Spec, dtype: Any, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=spec.n_layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> Block:
            return Block(spec, dtype, rngs)

        self.embed = _normal(rngs, "embed", (spec.vocab_size, spec.d_model), 0.02, dtype)
        self.layers = stack(rngs)
        self.final_norm = nnx.Param(jnp.ones((spec.d_model,), dtype))
        if not spec.tie_embeddings:
            self.lm_head = _normal(rngs, "lm_head", (spec.d_model, spec.vocab_size), 0.02, dtype)


def init_params(spec: Qwen3Spec, key: jax.Array, dtype: Any = jnp.float32) -> Params:
    """Random parameters as a nested dictionary of arrays, layers stacked on axis 0."""
    model = Qwen3(spec, dtype, nnx.Rngs(params=key))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def param_shapes(spec: Qwen3Spec, dtype: Any = jnp.float32) -> Params:
    """The same tree as `jax.ShapeDtypeStruct`s: nothing is allocated."""
    return jax.eval_shape(lambda: init_params(spec, jax.random.key(0), dtype))


@functools.cache
def _block_graph(spec: Qwen3Spec, dtype: Any) -> Any:
    return nnx.split(nnx.eval_shape(lambda: Block(spec, dtype, nnx.Rngs(params=jax.random.key(0)))))[0]


def embed(params: Params, tokens_BxT: jax.Array, options: ForwardOptions) -> jax.Array:
    """Token embeddings [B, T, D] in the compute dtype."""
    table_VxD = params["embed"].astype(options.dtype)
    if not mesh_active():
        return table_VxD[tokens_BxT]
    return table_VxD.at[tokens_BxT].get(out_sharding=options.rules.spec("batch", "sequence", None))


def decoder(
    params: Params,
    spec: Qwen3Spec,
    x_BxTxD: jax.Array,
    positions_BxT: jax.Array,
    attend: Attend,
    carry: Any = None,
    *,
    options: ForwardOptions,
) -> tuple[jax.Array, Any]:
    """All layers and the final norm.

    `attend` is called once a layer with the scanned `carry` (a KV cache, or None) and the layer's index; what
    it returns is the next carry. Returns the normed hidden states [B, T, D] and the last carry.
    Where `params["layers"]` is a tuple of per-layer trees instead of one stacked tree, layers are unrolled and
    the index is a Python int: XLA on CPU copies what a scan slices out of a stack, decoding pays for it.
    """
    graph = _block_graph(spec, jnp.float32)

    def layer(state: tuple[jax.Array, Any], scanned: tuple[Params, jax.Array]) -> tuple[Any, None]:
        x, carry = state
        weights, index = scanned
        block = nnx.merge(graph, weights)
        x, carry = block(spec, x, positions_BxT, functools.partial(attend, carry, index), options)
        return (x, carry), None

    if options.remat != "none":
        layer = jax.checkpoint(layer, policy=REMAT_POLICIES[options.remat], prevent_cse=False)
    if isinstance(params["layers"], tuple):
        for index, weights in enumerate(params["layers"]):
            (x_BxTxD, carry), _ = layer((x_BxTxD, carry), (weights, index))
    else:
        (x_BxTxD, carry), _ = jax.lax.scan(
            layer, (x_BxTxD, carry), (params["layers"], jnp.arange(spec.n_layers))
        )
    return rms_norm(x_BxTxD, params["final_norm"], spec.rms_eps), carry


def output_matrix(params: Params, options: ForwardOptions) -> jax.Array:
    """[D, V] in the compute dtype: the transposed embedding where tied."""
    if "lm_head" in params:
        return gather(options.rules, params["lm_head"].astype(options.dtype), "embed", "vocab")
    return gather(options.rules, params["embed"].astype(options.dtype), "vocab", "embed").T


def unembed(params: Params, x_xD: jax.Array, options: ForwardOptions) -> jax.Array:
    """Float32 logits over the vocabulary for hidden states with any leading axes."""
    return jnp.einsum("...d,dv->...v", x_xD, output_matrix(params, options), preferred_element_type=jnp.float32)


def forward(
    params: Params,
    spec: Qwen3Spec,
    tokens_BxT: jax.Array,
    positions_BxT: jax.Array,
    segment_ids_BxT: jax.Array,
    *,
    options: ForwardOptions = ForwardOptions(),
) -> jax.Array:
    """Hidden states [B, T, D] of packed rows: a token sees earlier tokens of its own segment only."""

    def attend(carry: None, _: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[None, jax.Array]:
        out = attention_xla(
            q,
            k,
            v,
            q_positions_BxT=positions_BxT,
            kv_positions_BxS=positions_BxT,
            q_segments_BxT=segment_ids_BxT,
            kv_segments_BxS=segment_ids_BxT,
        )
        return carry, out

    x_BxTxD = embed(params, tokens_BxT, options)
    return decoder(params, spec, x_BxTxD, positions_BxT, attend, options=options)[0]
