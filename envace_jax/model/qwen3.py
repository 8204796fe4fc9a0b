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
from jax.ad_checkpoint import checkpoint_name

from envace_jax.config import UserError
from envace_jax.model.attention import attention
from envace_jax.model.lora import adapter_term
from envace_jax.model.moe import Routing, moe_mlp
from envace_jax.model.sharding import PARAM_AXES, Rules, axes_of, enter, gather, inner_sequence, layout, mesh_active
from envace_jax.model.spec import Qwen3Spec

Params = dict[str, Any]
Attend = Callable[[Any, jax.Array, jax.Array, jax.Array, jax.Array], tuple[Any, jax.Array]]
"""attend(carry, layer, q_BxTxHxDh, k_BxTxKxDh, v_BxTxKxDh) -> (carry, out_BxTxHxDh)."""

REMAT_POLICIES: dict[str, Any] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names("attention"),
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["attention"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
"""What a layer keeps for its backward pass: everything, nothing, attention's output, the weight products, or
attention's output in host memory. The layer's input is always kept."""


@dataclasses.dataclass(frozen=True)
class ForwardOptions:
    """How the forward pass is run.

    dtype: compute dtype. remat: a key of REMAT_POLICIES. rules: the layout. attention: one of
    `attention.BACKENDS`, for packed rows (the sampler brings its own). moe_exchange, moe_chunk: see `moe.moe_mlp`.
    lora_scale: alpha / rank of the adapters in `params["lora"]`.
    """

    dtype: Any = jnp.float32
    remat: str = "none"
    rules: Rules = Rules()
    attention: str = "xla"
    moe_exchange: str = "gather"
    moe_chunk: int = 0
    lora_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.remat not in REMAT_POLICIES:
            raise UserError(f"model.remat='{self.remat}' is unknown; expected one of {sorted(REMAT_POLICIES)}")


@dataclasses.dataclass(frozen=True)
class BlockCall:
    """What one layer is called with beside its weights and input.

    adapters: this layer's low-rank pairs by weight name (`lora.py`), None without. valid_BxT and replay_BxTxK: which
    tokens count in routing figures, and experts to use again (mixture of experts only).
    """

    positions_BxT: jax.Array
    attend: Callable[..., tuple[Any, jax.Array]]
    options: ForwardOptions
    adapters: Params | None = None
    valid_BxT: jax.Array | None = None
    replay_BxTxK: jax.Array | None = None


HEADS = ("q", "k", "v")
"""Weights whose output axes are heads and head size."""


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
    """One decoder layer: attention with per-head query and key norms, then a gated MLP or a choice of experts."""

    def __init__(self, spec: Qwen3Spec, dtype: Any, rngs: nnx.Rngs):
        d, h, k, dh = spec.d_model, spec.n_heads, spec.n_kv_heads, spec.head_dim
        out_std = 0.02 / (2 * spec.n_layers) ** 0.5
        self.attn_norm = nnx.Param(jnp.ones((d,), dtype))
        self.q = _normal(rngs, "q", (d, h, dh), 0.02, dtype)
        self.k = _normal(rngs, "k", (d, k, dh), 0.02, dtype)
        self.v = _normal(rngs, "v", (d, k, dh), 0.02, dtype)
        self.o = _normal(rngs, "o", (h, dh, d), out_std, dtype)
        self.q_norm = nnx.Param(jnp.ones((dh,), dtype))
        self.k_norm = nnx.Param(jnp.ones((dh,), dtype))
        self.mlp_norm = nnx.Param(jnp.ones((d,), dtype))
        if spec.is_moe:
            e, f = spec.n_experts, spec.d_ff_expert
            self.router = _normal(rngs, "router", (d, e), 0.02, dtype)
            self.experts_gate = _normal(rngs, "experts_gate", (e, d, f), 0.02, dtype)
            self.experts_up = _normal(rngs, "experts_up", (e, d, f), 0.02, dtype)
            self.experts_down = _normal(rngs, "experts_down", (e, f, d), out_std, dtype)
        else:
            f = spec.d_ff
            self.gate = _normal(rngs, "gate", (d, f), 0.02, dtype)
            self.up = _normal(rngs, "up", (d, f), 0.02, dtype)
            self.down = _normal(rngs, "down", (f, d), out_std, dtype)

    def __call__(self, spec: Qwen3Spec, x_BxTxD: jax.Array, call: BlockCall) -> tuple[jax.Array, Any, Routing | None]:
        options, rules = call.options, call.options.rules
        residual = layout(rules, "batch", "sequence", None)

        def w(name: str) -> jax.Array:
            # In the compute dtype, whole along the axis that data parallelism cuts.
            value = getattr(self, name)[...].astype(options.dtype)
            return gather(rules, value, *PARAM_AXES[f"layers/{name}"][1 : 1 + value.ndim])

        def dot(equation: str, y: jax.Array, name: str, out_sharding: Any = None) -> jax.Array:
            weight = w(name)
            if name in HEADS and weight.ndim == 2:  # `flatten_heads`
                out = jnp.einsum("btd,df->btf", y, weight).reshape(*y.shape[:2], -1, spec.head_dim)
            else:
                out = jnp.einsum(equation, y, weight, out_sharding=out_sharding)
            if call.adapters is not None and name in call.adapters:
                out += adapter_term(equation, y, name, call.adapters[name], options, out_sharding)
            return out

        with jax.named_scope("attention"):
            y_BxTxD = enter(rules, rms_norm(x_BxTxD, self.attn_norm[...], spec.rms_eps))
            q_BxTxHxDh = rms_norm(dot("btd,dhk->bthk", y_BxTxD, "q"), self.q_norm[...], spec.rms_eps)
            k_BxTxKxDh = rms_norm(dot("btd,dhk->bthk", y_BxTxD, "k"), self.k_norm[...], spec.rms_eps)
            v_BxTxKxDh = dot("btd,dhk->bthk", y_BxTxD, "v")
            q_BxTxHxDh = rope(q_BxTxHxDh, call.positions_BxT, spec.rope_theta)
            k_BxTxKxDh = rope(k_BxTxKxDh, call.positions_BxT, spec.rope_theta)
            carry, out_BxTxHxDh = call.attend(q_BxTxHxDh, k_BxTxKxDh, v_BxTxKxDh)
            out_BxTxHxDh = checkpoint_name(out_BxTxHxDh, "attention")
            x_BxTxD += dot("bthk,hkd->btd", out_BxTxHxDh, "o", residual)
        y_BxTxD = rms_norm(x_BxTxD, self.mlp_norm[...], spec.rms_eps)
        if spec.is_moe:
            with jax.named_scope("experts"):
                out_BxTxD, routing = moe_mlp(
                    spec,
                    y_BxTxD,
                    w("router"),
                    (w("experts_gate"), w("experts_up"), w("experts_down")),
                    valid_BxT=call.valid_BxT,
                    replay_BxTxK=call.replay_BxTxK,
                    rules=rules,
                    exchange=options.moe_exchange,
                    chunk=options.moe_chunk,
                )
            return x_BxTxD + out_BxTxD, carry, routing
        with jax.named_scope("mlp"):
            y_BxTxD = enter(rules, y_BxTxD)
            gate_BxTxF = dot("btd,df->btf", y_BxTxD, "gate")
            up_BxTxF = dot("btd,df->btf", y_BxTxD, "up")
            x_BxTxD += dot("btf,fd->btd", jax.nn.silu(gate_BxTxF) * up_BxTxF, "down", residual)
        return x_BxTxD, carry, None


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


def flatten_heads(params: Params) -> Params:
    """Stacked q, k and v with heads and head size as one axis, [L, D, H Dh]: how a sampler holds them.

    A TPU tiles the last two axes of an array. A product over D cannot read [D, H, Dh] in its tiles, so every program
    would first copy these weights (1.7 GiB for 8B). Parameters that are flat already are returned as they are.
    """
    layers = params["layers"]
    return {**params, "layers": layers | {name: _flat(layers[name]) for name in HEADS}}


@jax.jit
def _flatten(w_LxDxHxDh: jax.Array) -> jax.Array:
    return w_LxDxHxDh.reshape(*w_LxDxHxDh.shape[:2], -1)


def _flat(w: jax.Array) -> jax.Array:
    return w if w.ndim == 3 else _flatten(w)


@functools.cache
def _block_graph(spec: Qwen3Spec, dtype: Any) -> Any:
    return nnx.split(nnx.eval_shape(lambda: Block(spec, dtype, nnx.Rngs(params=jax.random.key(0)))))[0]


def embed(params: Params, tokens_BxT: jax.Array, options: ForwardOptions) -> jax.Array:
    """Token embeddings [B, T, D] in the compute dtype.

    On a mesh the table stays where it is: a shard looks up its vocabulary and columns for the tokens of all shards
    that hold other columns, and the columns change places. Neither the table nor its gradient is ever gathered.
    """
    table_VxD = params["embed"].astype(options.dtype)
    if not mesh_active():
        return table_VxD[tokens_BxT]
    rules = options.rules
    columns, vocab = axes_of(rules.embed), axes_of(rules.vocab)
    sequence = inner_sequence(rules)
    meet = None  # the axis of tokens that is cut over the same devices as the table's columns
    if columns and set(columns) <= set(axes_of(rules.batch)):
        meet = 0
    elif columns and sequence and columns == axes_of(rules.sequence):
        meet = 1

    def shard(table: jax.Array, tokens: jax.Array) -> jax.Array:
        if meet is not None:
            tokens = jax.lax.all_gather(tokens, columns, axis=meet, tiled=True)
        local = tokens - (jax.lax.axis_index(vocab) * table.shape[0] if vocab else 0)
        here = (local >= 0) & (local < table.shape[0])
        x = jnp.where(here[..., None], table[jnp.where(here, local, 0)], 0)
        x = jax.lax.psum(x, vocab) if vocab else x
        if meet is not None:
            return jax.lax.all_to_all(x, columns, split_axis=meet, concat_axis=2, tiled=True)
        return x

    token_spec = rules.spec("batch", sequence)
    x_BxTxD = jax.shard_map(
        shard,
        in_specs=(rules.spec("vocab", "embed"), token_spec),
        out_specs=rules.spec("batch", sequence, "embed" if meet is None else None),
    )(table_VxD, jax.reshard(tokens_BxT, token_spec))
    return jax.reshard(x_BxTxD, rules.spec("batch", "sequence", None))


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
    """All layers and the final norm: the hidden states [B, T, D] and the last carry. See `decoder_with_routing`."""
    return decoder_with_routing(params, spec, x_BxTxD, positions_BxT, attend, carry, options=options)[:2]


def decoder_with_routing(
    params: Params,
    spec: Qwen3Spec,
    x_BxTxD: jax.Array,
    positions_BxT: jax.Array,
    attend: Attend,
    carry: Any = None,
    *,
    options: ForwardOptions,
    valid_BxT: jax.Array | None = None,
    replay_LxBxTxK: jax.Array | None = None,
) -> tuple[jax.Array, Any, Routing | None]:
    """All layers and the final norm.

    `attend` is called once a layer with the scanned `carry` (a KV cache, or None) and the layer's index; what
    it returns is the next carry. Returns the normed hidden states [B, T, D], the last carry, and the routers'
    choices stacked over layers (None for a dense model). `params["lora"]`, where present, is applied unmerged.
    Where `params["layers"]` is a tuple of per-layer trees instead of one stacked tree, layers are unrolled and
    the index is a Python int: XLA on CPU copies what a scan slices out of a stack, decoding pays for it.
    """
    graph = _block_graph(spec, jnp.float32)
    if mesh_active():
        positions_BxT = jax.reshard(positions_BxT, options.rules.spec("batch", inner_sequence(options.rules)))
    adapters = params.get("lora")

    def layer(state: tuple[jax.Array, Any], scanned: tuple[Any, ...]) -> tuple[Any, Routing | None]:
        x, carry = state
        weights, index, adapters, replay = scanned
        call = BlockCall(
            positions_BxT, functools.partial(attend, carry, index), options, adapters, valid_BxT, replay
        )
        x, carry, routing = nnx.merge(graph, weights)(spec, x, call)
        return (x, carry), routing

    if options.remat != "none":
        layer = jax.checkpoint(layer, policy=REMAT_POLICIES[options.remat], prevent_cse=False)
    if isinstance(params["layers"], tuple):
        routings = []
        for index, weights in enumerate(params["layers"]):
            of_layer = lambda tree: jax.tree.map(lambda a: a[index], tree)  # noqa: B023, E731
            (x_BxTxD, carry), routing = layer(
                (x_BxTxD, carry), (weights, index, of_layer(adapters), of_layer(replay_LxBxTxK))
            )
            routings.append(routing)
        routing = jax.tree.map(lambda *r: jnp.stack(r), *routings)
    else:
        scanned = (params["layers"], jnp.arange(spec.n_layers), adapters, replay_LxBxTxK)
        (x_BxTxD, carry), routing = jax.lax.scan(layer, (x_BxTxD, carry), scanned)
    return rms_norm(x_BxTxD, params["final_norm"], spec.rms_eps), carry, routing


def output_matrix(params: Params, options: ForwardOptions) -> jax.Array:
    """[D, V] in the compute dtype: the transposed embedding where tied."""
    if "lm_head" in params:
        return gather(options.rules, params["lm_head"].astype(options.dtype), "embed", "vocab")
    return gather(options.rules, params["embed"].astype(options.dtype), "vocab", "embed").T


def unembed(params: Params, x_xD: jax.Array, options: ForwardOptions) -> jax.Array:
    """Float32 logits over the vocabulary for hidden states with any leading axes."""
    logits = jnp.einsum("...d,dv->...v", x_xD, output_matrix(params, options), preferred_element_type=jnp.float32)
    if mesh_active() and options.rules.logits is None:
        leading = jax.typeof(logits).sharding.spec[:-1]
        logits = jax.reshard(logits, jax.P(*leading, None))
    return logits


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
    return forward_with_routing(params, spec, tokens_BxT, positions_BxT, segment_ids_BxT, options=options)[0]


def forward_with_routing(
    params: Params,
    spec: Qwen3Spec,
    tokens_BxT: jax.Array,
    positions_BxT: jax.Array,
    segment_ids_BxT: jax.Array,
    *,
    options: ForwardOptions = ForwardOptions(),
    replay_LxBxTxK: jax.Array | None = None,
) -> tuple[jax.Array, Routing | None]:
    """`forward`, and the routers' choices [L, ...] (None for a dense model); `replay_LxBxTxK` fixes the choices."""
    rules = options.rules

    def attend(carry: None, _: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[None, jax.Array]:
        out_BxTxHxDh = attention(
            q,
            k,
            v,
            positions_BxT=positions_BxT,
            segments_BxT=segment_ids_BxT,
            rules=rules,
            backend=options.attention,
        )
        return carry, out_BxTxHxDh

    x_BxTxD = embed(params, tokens_BxT, options)
    x_BxTxD, _, routing = decoder_with_routing(
        params,
        spec,
        x_BxTxD,
        positions_BxT,
        attend,
        options=options,
        valid_BxT=segment_ids_BxT > 0,
        replay_LxBxTxK=replay_LxBxTxK,
    )
    if mesh_active() and rules.sequence is not None:
        x_BxTxD = jax.reshard(x_BxTxD, rules.spec("batch", None, None))
    return x_BxTxD, routing
