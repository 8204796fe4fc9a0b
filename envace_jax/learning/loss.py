"""Log-probabilities over a large vocabulary in chunks, and the policy loss on them.

The loss of one prediction is -min(r A, clip(r, 1 - low, 1 + high) A) * c + beta * k3 - eta * entropy, with
r = exp(log pi - log old), c = min(exp(old - sampler), cap) the optional correction for what the sampler computed
otherwise, and k3 the low-variance estimate of the KL divergence to a reference.  Sums over predictions are
returned, never means: the caller divides once, by a denominator that covers the whole batch.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from envace_jax.config import UserError
from envace_jax.model.sharding import axes_of, mesh_active

RATIOS = ("token", "sequence")
KL_EXPONENT_LIMIT = 20.0
KL_LIMIT = 10.0
ROLES = 2
Figures = dict[str, dict[str, jax.Array]]
"""{"sums": ..., "maxima": ...}: what is added up, and what the largest is taken of, over microbatches."""


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """What the update minimises.

    temperature: the sampler's, applied to the logits before the softmax as the sampler does.  clip_low, clip_high:
    the ratio's allowed distance below and above 1.  ratio: `token`, or `sequence` for the geometric mean over an
    output.  kl_coef: weight of the KL to the reference (0: none is computed).  importance_cap: cap of the token
    correction from sampler to learner (0: off).  own_old: old log-probabilities are this pass's own, gradient
    stopped (a batch gets one update); else they come with the batch.  dual_clip: for negative advantages the term
    is at most dual_clip * |A| (0: off).  entropy_coef: weight of an entropy bonus.  chunk_tokens: predictions whose
    logits exist at one time, on all devices together.  supervised: cross-entropy on the targets instead of the
    policy loss.
    """

    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    ratio: str = "token"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    importance_cap: float = 0.0
    own_old: bool = True
    chunk_tokens: int = 1024
    supervised: bool = False

    def __post_init__(self) -> None:
        if self.ratio not in RATIOS:
            raise UserError(f"learning.ratio='{self.ratio}' is unknown; expected one of {RATIOS}")
        if self.temperature <= 0:
            raise UserError(f"learning temperature is {self.temperature}; expected a number above 0")


def gather_predictions(hidden_BxTxD: jax.Array, index_BxS: jax.Array) -> jax.Array:
    """hidden[b, index[b, s]]: the hidden states that predict something, [B, S, D]."""
    return jax.vmap(lambda hidden_TxD, index_S: hidden_TxD[index_S])(hidden_BxTxD, index_BxS)


def token_logprobs(
    hidden_BxSxD: jax.Array,
    targets_BxS: jax.Array,
    mask_BxS: jax.Array,
    head_DxV: jax.Array,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    entropy_gradient: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target under softmax(logits / temperature), and the entropy: float32 [B, S], 0 off mask.

    Runs over chunks of columns; the logits of a chunk are dropped and recomputed in the backward pass, so no more
    than `chunk_tokens` rows of them exist.  Chunks without predictions are skipped while running (predictions lie
    at the front of each row).  The vocabulary axis may be sharded: the target's logit is a masked sum, no gather.
    The entropy carries a gradient only where asked for.
    """
    columns = max(1, min(hidden_BxSxD.shape[1], chunk_tokens // max(hidden_BxSxD.shape[0], 1)))
    form = functools.partial(
        _shard_logprobs, temperature=temperature, columns=columns, entropy_gradient=entropy_gradient
    )
    arrays = (hidden_BxSxD, targets_BxS, mask_BxS, head_DxV.astype(jnp.float32))
    if not mesh_active():
        return form(*arrays, batch=(), vocab=())
    batch, vocab = jax.typeof(hidden_BxSxD).sharding.spec[0], jax.typeof(head_DxV).sharding.spec[1]
    rows = P(batch, None)
    return jax.shard_map(
        functools.partial(form, batch=axes_of(batch), vocab=axes_of(vocab)),
        in_specs=(P(batch, None, None), rows, rows, P(None, vocab)),
        out_specs=(rows, rows),
    )(hidden_BxSxD, jax.reshard(targets_BxS, rows), jax.reshard(mask_BxS, rows), arrays[3])


def _shard_logprobs(
    hidden_BxSxD: jax.Array,
    targets_BxS: jax.Array,
    mask_BxS: jax.Array,
    head_DxV: jax.Array,
    *,
    temperature: float,
    columns: int,
    entropy_gradient: bool,
    batch: tuple[str, ...],
    vocab: tuple[str, ...],
) -> tuple[jax.Array, jax.Array]:
    """`token_logprobs` of one shard of rows (cut over `batch`) and of the vocabulary (cut over `vocab`)."""
    b, s, d = hidden_BxSxD.shape
    n = -(-s // columns)
    pad = n * columns - s
    dtype = hidden_BxSxD.dtype
    # Each shard of rows adds up its own gradient of the matrix, in float32, and they are summed once, after the loop:
    # left to the compiler, the sum over shards would be taken for every chunk.
    head_DxV = jax.lax.pcast(head_DxV, batch, to="varying") if batch else head_DxV
    first = jax.lax.axis_index(vocab) * head_DxV.shape[1] if vocab else 0

    def over_vocab(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, vocab) if vocab else x

    def chunked(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(b, n, columns, *x.shape[2:]), 1, 0)

    def compute(x_BxCxD: jax.Array, targets_BxC: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = jnp.einsum("bcd,dv->bcv", x_BxCxD, head.astype(dtype), preferred_element_type=jnp.float32)
        logits = logits / temperature
        top = jnp.max(jax.lax.stop_gradient(logits), axis=-1, keepdims=True)
        top = jax.lax.pmax(top, vocab) if vocab else top
        exp = jnp.exp(logits - top)
        total = over_vocab(jnp.sum(exp, axis=-1))
        log_total = jnp.log(total) + top[..., 0]
        hit = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) + first == targets_BxC[..., None]
        logprob = over_vocab(jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)) - log_total
        entropy = log_total - over_vocab(jnp.sum(exp * logits, axis=-1)) / total
        return logprob, entropy if entropy_gradient else jax.lax.stop_gradient(entropy)

    @jax.checkpoint
    def chunk(head: jax.Array, x_BxCxD: jax.Array, targets_BxC: jax.Array, mask_BxC: jax.Array) -> Any:
        def nothing(x: jax.Array, targets: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
            zero = jnp.zeros_like(mask_BxC, jnp.float32)
            return zero, zero

        some = jnp.any(mask_BxC).astype(jnp.int32)
        # All shards take the same branch: they meet in it.
        some = jax.lax.pmax(some, batch) if batch else some
        logprob, entropy = jax.lax.cond(some > 0, compute, nothing, x_BxCxD, targets_BxC, head)
        return jnp.where(mask_BxC, logprob, 0.0), jnp.where(mask_BxC, entropy, 0.0)

    def body(_: None, xs: tuple[jax.Array, ...]) -> tuple[None, Any]:
        return None, chunk(head_DxV, *xs)

    _, chunks = jax.lax.scan(body, None, (chunked(hidden_BxSxD), chunked(targets_BxS), chunked(mask_BxS)))

    def whole(x_NxBxC: jax.Array) -> jax.Array:
        return jnp.moveaxis(x_NxBxC, 0, 1).reshape(b, n * columns)[:, :s]

    return whole(chunks[0]), whole(chunks[1])


def low_variance_kl(logprob: jax.Array, reference: jax.Array) -> jax.Array:
    """k3 estimate of KL(pi || reference) per token: exp(d) - d - 1 with d = reference - logprob, clamped."""
    d = jnp.clip(reference - logprob, -KL_EXPONENT_LIMIT, KL_EXPONENT_LIMIT)
    return jnp.clip(jnp.exp(d) - d - 1.0, -KL_LIMIT, KL_LIMIT)


def output_mean(values_BxS: jax.Array, output_BxS: jax.Array) -> jax.Array:
    """Each prediction's value replaced by the mean over its output (0 where output is 0)."""

    def row(values_S: jax.Array, output_S: jax.Array) -> jax.Array:
        n = output_S.shape[0] + 1
        total = jax.ops.segment_sum(values_S, output_S, n)
        count = jax.ops.segment_sum(jnp.ones_like(values_S), output_S, n)
        return jnp.where(output_S > 0, (total / jnp.maximum(count, 1.0))[output_S], 0.0)

    return jax.vmap(row)(values_BxS, output_BxS)


def policy_loss(
    logprob_BxS: jax.Array, entropy_BxS: jax.Array, batch: dict[str, jax.Array], config: LossConfig
) -> tuple[jax.Array, Figures]:
    """Summed weighted loss of a microbatch, and sums and maxima for the metrics.

    `batch` holds [B, S] arrays: mask, weights, advantages, sampler_logprobs, role, output, with `old_logprobs`
    where not `own_old` and `reference_logprobs` where `kl_coef` is above 0.
    """
    mask, weights = batch["mask"], batch["weights"]
    old = jax.lax.stop_gradient(logprob_BxS) if config.own_old else batch["old_logprobs"]
    log_ratio = jnp.where(mask, logprob_BxS - old, 0.0)
    if config.ratio == "sequence":
        log_ratio = output_mean(log_ratio, batch["output"])
    ratio = jnp.exp(log_ratio)
    advantages = batch["advantages"]
    clipped = jnp.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    per_token = -jnp.minimum(ratio * advantages, clipped * advantages)
    binds = clipped * advantages < ratio * advantages
    if config.dual_clip > 0:
        per_token = jnp.where(advantages < 0, jnp.minimum(per_token, -config.dual_clip * advantages), per_token)
    drift = jnp.where(mask, jax.lax.stop_gradient(old) - batch["sampler_logprobs"], 0.0)
    if config.importance_cap > 0:
        per_token *= jnp.minimum(jnp.exp(drift), config.importance_cap)
    by_role = jax.nn.one_hot(batch["role"], ROLES, dtype=jnp.float32) * mask[..., None]

    def role_sum(values_BxS: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.stop_gradient(values_BxS)[..., None] * by_role, axis=(0, 1))

    exp_drift = jnp.exp(jnp.abs(drift))
    sums = {
        "tokens": role_sum(jnp.ones_like(weights)),
        "entropy": role_sum(entropy_BxS),
        "logprob": role_sum(logprob_BxS),
        "ratio": role_sum(ratio),
        "clipped": role_sum(binds.astype(jnp.float32)),
        "exp_drift": role_sum(exp_drift),
        "policy_loss": jnp.sum(jax.lax.stop_gradient(per_token) * weights),
    }
    maxima = {"ratio": jnp.max(ratio), "exp_drift": jnp.max(exp_drift)}
    if config.kl_coef > 0:
        kl = jnp.where(mask, low_variance_kl(logprob_BxS, batch["reference_logprobs"]), 0.0)
        per_token += config.kl_coef * kl
        sums["kl"] = role_sum(kl)
    if config.entropy_coef > 0:
        per_token -= config.entropy_coef * entropy_BxS
    return jnp.sum(per_token * weights), {"sums": sums, "maxima": jax.lax.stop_gradient(maxima)}


def supervised_loss(
    logprob_BxS: jax.Array, entropy_BxS: jax.Array, batch: dict[str, jax.Array]
) -> tuple[jax.Array, Figures]:
    """Summed weighted cross-entropy of the targets, with the same figures for the metrics."""
    by_role = jax.nn.one_hot(batch["role"], ROLES, dtype=jnp.float32) * batch["mask"][..., None]
    sums = {
        "tokens": jnp.sum(by_role, axis=(0, 1)),
        "entropy": jnp.sum(entropy_BxS[..., None] * by_role, axis=(0, 1)),
        "logprob": jnp.sum(jax.lax.stop_gradient(logprob_BxS)[..., None] * by_role, axis=(0, 1)),
    }
    return -jnp.sum(logprob_BxS * batch["weights"]), {"sums": sums, "maxima": {}}
