"""Mixture of experts: routing, grouped matrix products, and the exchange between expert shards. Dropless.

Each token goes to its k most probable experts. Assignments are sorted by expert, so that one grouped product
(`jax.lax.ragged_dot`) serves all experts of a shard whatever their loads are.

Exchange. With the experts cut over an axis that also cuts the batch, tokens and experts must meet. `gather`
brings every token to every expert shard of its group and sums what comes back: 2 (n - 1) D numbers a token over n
shards. `ragged` sends each assignment to its expert's shard and back: 2 k (n - 1) / n D. For n <= k gathering is
the cheaper one, and it exists on every platform; `ragged` needs `jax.lax.ragged_all_to_all`, which XLA has for TPU
and GPU only.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from envace_jax.config import UserError
from envace_jax.model.sharding import Rules, axes_of, enter, inner_sequence, mesh_active
from envace_jax.model.spec import Qwen3Spec

GPU_KERNELS = ("mosaic", "triton")
"""tokamax's grouped kernels in the order in which they are tried; its own default ends in the dense product."""


class Routing(NamedTuple):
    """What the routers did. Per layer, or stacked over layers on axis 0 as `forward_with_routing` returns it.

    ids: int32 [B, T, k], the experts that were used, most probable first where nothing was replayed. own: the same,
    the experts that the router would have used. counts: float32 [E], assignments of valid tokens. mass: float32 [E],
    summed probability. tokens: float32 scalar, valid tokens.
    """

    ids: jax.Array
    own: jax.Array
    counts: jax.Array
    mass: jax.Array
    tokens: jax.Array


def route(
    spec: Qwen3Spec, logits_NxE: jax.Array, replay_NxK: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Expert ids [N, k], their weights [N, k], all probabilities [N, E] (float32), and the router's own choice [N, k].

    With `replay_NxK` the experts are the given ones, where they are not negative, and only their weights are computed
    anew.
    """
    probs_NxE = jax.nn.softmax(logits_NxE.astype(jnp.float32), axis=-1)
    weights_NxK, own_NxK = jax.lax.top_k(probs_NxE, spec.n_experts_per_token)
    ids_NxK = own_NxK
    if replay_NxK is not None:
        ids_NxK = jnp.where(replay_NxK >= 0, replay_NxK, own_NxK)
        weights_NxK = jnp.take_along_axis(probs_NxE, ids_NxK, axis=-1)
    if spec.norm_topk_prob:
        weights_NxK = weights_NxK / jnp.sum(weights_NxK, axis=-1, keepdims=True)
    return ids_NxK, weights_NxK, probs_NxE, own_NxK


def grouped_matmul(x_MxD: jax.Array, w_ExDxF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Row m times the matrix of its group; groups lie one after the other. Rows past the last group are undefined.

    On NVIDIA `ragged_dot` multiplies every row with every expert (measured elsewhere: 22 TFLOP/s where 1,500 were
    to be had), so there one of tokamax's kernels does it, and nothing dense in its place. That has not been run here.
    """
    if jax.default_backend() == "gpu":
        try:
            import tokamax
        except ImportError:
            raise UserError(
                "a mixture of experts on GPU needs the grouped kernels of tokamax: pip install 'envace_jax[cuda]'"
            ) from None
        return tokamax.ragged_dot(x_MxD, w_ExDxF, group_sizes=sizes_E, implementation=GPU_KERNELS)
    return jax.lax.ragged_dot(x_MxD, w_ExDxF, sizes_E)


def _feed_forward(
    x_NxD: jax.Array, expert_M: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    """Row m, which is token m // (M / N), through expert m; zeros where that is not one of these (E or more)."""
    k = expert_M.shape[0] // x_NxD.shape[0]
    n = gate.shape[0]
    order_M = jnp.argsort(expert_M, stable=True)
    sizes_E = jnp.bincount(expert_M, length=n + 1)[:n].astype(jnp.int32)
    sorted_MxD = x_NxD[order_M // k]
    hidden_MxF = jax.nn.silu(grouped_matmul(sorted_MxD, gate, sizes_E)) * grouped_matmul(sorted_MxD, up, sizes_E)
    out_MxD = grouped_matmul(hidden_MxF, down, sizes_E)
    mine_M = jnp.arange(len(order_M)) < jnp.sum(sizes_E)
    out_MxD = jnp.where(mine_M[:, None], out_MxD, 0)
    return out_MxD[jnp.argsort(order_M)]


def _combine(out_MxD: jax.Array, weights_NxK: jax.Array) -> jax.Array:
    n, k = weights_NxK.shape
    return jnp.einsum("nkd,nk->nd", out_MxD.reshape(n, k, -1).astype(jnp.float32), weights_NxK)


def _experts_here(
    x_NxD: jax.Array, ids_NxK: jax.Array, weights_NxK: jax.Array, weights: tuple[jax.Array, ...], first: jax.Array | int
) -> jax.Array:
    """Float32 [N, D]: what experts `first` and following add for each token."""
    local_M = (ids_NxK - first).reshape(-1)
    n = weights[0].shape[0]
    local_M = jnp.where((local_M >= 0) & (local_M < n), local_M, n)
    return _combine(_feed_forward(x_NxD, local_M, *weights), weights_NxK)


def _ragged_exchange(
    x_NxD: jax.Array, ids_NxK: jax.Array, weights_NxK: jax.Array, weights: tuple[jax.Array, ...], axis: str
) -> jax.Array:
    """Sends each assignment to the shard of its expert and back. Not run by the tests: XLA:CPU has no such op."""
    n, d = x_NxD.shape
    k, experts = ids_NxK.shape[1], weights[0].shape[0]
    shards, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    flat_M = ids_NxK.reshape(-1)
    order_M = jnp.argsort(flat_M, stable=True)
    rows_MxD = x_NxD[order_M // k]
    counts_SxE = jnp.bincount(flat_M, length=shards * experts).astype(jnp.int32).reshape(shards, experts)
    all_SxSxE = jax.lax.all_gather(counts_SxE, axis)  # [from, to, expert of `to`]
    sizes_SxS = all_SxSxE.sum(-1)
    before = lambda x, axis: jnp.cumsum(x, axis) - x  # noqa: E731
    sent_at_SxS, landed_at_SxS = before(sizes_SxS, 1), before(sizes_SxS, 0)
    room = n * shards * min(k, experts)  # every token of the group may choose every expert here
    received_RxD = jax.lax.ragged_all_to_all(
        rows_MxD,
        jnp.zeros((room, d), x_NxD.dtype),
        sent_at_SxS[me],
        sizes_SxS[me],
        landed_at_SxS[me],
        sizes_SxS[:, me],
        axis_name=axis,
    )
    # Rows arrive by sender and, inside one sender's, by expert.
    ends_X = jnp.cumsum(all_SxSxE[:, me].reshape(-1))
    run_R = jnp.searchsorted(ends_X, jnp.arange(room), side="right")
    expert_R = jnp.where(run_R < shards * experts, run_R % experts, experts)
    out_RxD = _feed_forward(received_RxD, expert_R, *weights)
    back_MxD = jax.lax.ragged_all_to_all(
        out_RxD.astype(x_NxD.dtype),
        jnp.zeros((n * k, d), x_NxD.dtype),
        landed_at_SxS[:, me],
        sizes_SxS[:, me],
        sent_at_SxS[:, me],
        sizes_SxS[me],
        axis_name=axis,
    )
    return _combine(back_MxD[jnp.argsort(order_M)], weights_NxK)


def moe_mlp(
    spec: Qwen3Spec,
    x_BxTxD: jax.Array,
    router_DxE: jax.Array,
    experts: tuple[jax.Array, jax.Array, jax.Array],
    *,
    valid_BxT: jax.Array | None = None,
    replay_BxTxK: jax.Array | None = None,
    rules: Rules = Rules(),
    exchange: str = "gather",
    chunk: int = 0,
) -> tuple[jax.Array, Routing]:
    """The expert layer: [B, T, D] in the dtype of `x`, and what the router did.

    Args:
        experts: gate and up [E, D, F], down [E, F, D], whole along D, cut along E and F as the rules say.
        valid_BxT: tokens that count in the routing figures (None: all). Padding is computed all the same.
        replay_BxTxK: expert ids to use instead of the router's choice; negative: its choice stands.
        exchange: `gather` or `ragged` (see above), where experts are cut over an axis of the batch.
        chunk: tokens of one shard that go through the experts at a time, recomputed in the backward pass (0: all).
    """
    b, t, d = x_BxTxD.shape
    valid_BxT = jnp.ones((b, t), jnp.bool_) if valid_BxT is None else valid_BxT
    cut, batch = axes_of(rules.experts), axes_of(rules.batch)
    active, sequence = mesh_active(), inner_sequence(rules)
    meet = active and bool(set(cut) & set(batch))
    hidden_axes = axes_of(rules.expert_ffn) if active else ()
    token_axes = (*batch, *(axes_of(rules.sequence) if sequence else ()))
    shared = tuple(a for a in (*hidden_axes, *cut) if active and a not in token_axes)

    def shard(x: jax.Array, router: jax.Array, weights: tuple, valid: jax.Array, replay: jax.Array | None):
        x_NxD = x.reshape(-1, d)
        ids_NxK, weights_NxK, probs_NxE, own_NxK = route(
            spec,
            jnp.einsum("nd,de->ne", x_NxD, router, preferred_element_type=jnp.float32),
            None if replay is None else replay.reshape(-1, spec.n_experts_per_token),
        )
        n = weights[0].shape[0]
        first = jax.lax.axis_index(cut) * n if active and cut else 0
        # Said here, the gradients of the shards are summed by token. Left to the first product with the cut weights,
        # they are summed after the exchange and for every assignment: k (n + 1) times the bytes.
        entered_NxD = jax.lax.pcast(x_NxD, shared, to="varying") if shared else x_NxD
        weights_NxK = jax.lax.pcast(weights_NxK, shared, to="varying") if shared else weights_NxK

        def some(x_NxD: jax.Array, ids_NxK: jax.Array, weights_NxK: jax.Array) -> jax.Array:
            if meet and exchange == "ragged":
                out = _ragged_exchange(x_NxD, ids_NxK, weights_NxK, weights, cut[0])
                return jax.lax.psum(out, hidden_axes) if hidden_axes else out
            if meet:
                gather = functools.partial(jax.lax.all_gather, axis_name=cut, tiled=True)
                x_NxD, ids_NxK, weights_NxK = gather(x_NxD), gather(ids_NxK), gather(weights_NxK)
            out = _experts_here(x_NxD, ids_NxK, weights_NxK, weights, first)
            if meet:
                out = jax.lax.psum_scatter(out, cut, scatter_dimension=0, tiled=True)
            axes = hidden_axes if meet or not active else (*hidden_axes, *cut)
            return jax.lax.psum(out, axes) if axes else out

        tokens = x_NxD.shape[0]
        if chunk and chunk < tokens:
            if tokens % chunk:
                raise ValueError(f"{tokens} tokens of a shard are not a multiple of the expert chunk {chunk}")
            split = lambda a: a.reshape(-1, chunk, a.shape[-1])  # noqa: E731
            out_NxD = jax.lax.map(
                lambda s: jax.checkpoint(some)(*s), (split(entered_NxD), split(ids_NxK), split(weights_NxK))
            ).reshape(-1, d)
        else:
            out_NxD = some(entered_NxD, ids_NxK, weights_NxK)
        seen_N = valid.reshape(-1).astype(jnp.float32)
        chosen_NxE = jax.nn.one_hot(ids_NxK, spec.n_experts, dtype=jnp.float32).sum(1)
        figures = (seen_N @ chosen_NxE, seen_N @ probs_NxE, seen_N.sum())
        if active:
            figures = jax.lax.psum(figures, token_axes)
        ids, own = (i.reshape(*x.shape[:2], -1) for i in (ids_NxK, own_NxK))
        return out_NxD.reshape(x.shape).astype(x.dtype), ids, own, figures

    if not active:
        out, ids, own, figures = shard(x_BxTxD, router_DxE, experts, valid_BxT, replay_BxTxK)
        return out, Routing(ids, own, *figures)
    token_spec, row_spec = rules.spec("batch", sequence, None), rules.spec("batch", sequence)
    wide, narrow = (rules.gathered("experts", *axes) for axes in (("embed", "expert_ffn"), ("expert_ffn", "embed")))
    whole = rules.spec(None)
    out, ids, own, figures = jax.shard_map(
        shard,
        in_specs=(token_spec, rules.spec(None, None), (wide, wide, narrow), row_spec, token_spec),
        out_specs=(token_spec, token_spec, token_spec, (whole, whole, rules.spec())),
    )(enter(rules, x_BxTxD), router_DxE, experts, jax.reshard(valid_BxT, row_spec), replay_BxTxK)
    return jax.reshard(out, rules.spec("batch", "sequence", None)), Routing(ids, own, *figures)


def balance_loss(spec: Qwen3Spec, routing: Routing) -> jax.Array:
    """Load-balancing loss over all layers: E * sum_e f_e p_e, 1 where both are uniform and k = 1.

    f_e is the share of tokens that chose expert e, p_e its mean probability, both over tokens of all layers (Fedus
    et al. 2021, equations 4 to 6, as Qwen3-MoE applies it). No coefficient. Its gradient goes through p alone.
    """
    tokens = jnp.sum(routing.tokens)
    counts_E = routing.counts.reshape(-1, spec.n_experts).sum(0) / tokens
    mass_E = routing.mass.reshape(-1, spec.n_experts).sum(0) / tokens
    return spec.n_experts * jnp.sum(jax.lax.stop_gradient(counts_E) * mass_E)


def routed_differently(ids_LxBxTxK: jax.Array, other_LxBxTxK: jax.Array, mask_BxT: jax.Array) -> jax.Array:
    """Float32 [3]: tokens under the mask whose sets of experts differ in some layer, the mean of that number over
    single layers, and tokens under the mask."""
    differ = jnp.any(jnp.sort(ids_LxBxTxK, -1) != jnp.sort(other_LxBxTxK, -1), axis=-1) & mask_BxT[None]
    counts = (jnp.any(differ, axis=0), jnp.mean(differ.astype(jnp.float32), axis=0), mask_BxT)
    return jnp.stack([jnp.sum(n, dtype=jnp.float32) for n in counts])
