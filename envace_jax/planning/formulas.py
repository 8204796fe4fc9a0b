"""FLOPs and bytes from a model's shape: the formulas that the report shows, tested against counts by hand.

A product of [n, a] with [a, b] is 2 n a b FLOPs. Norms, rotary positions, softmax and the optimizer are left out (below
one percent). Model FLOPs are what the mathematics needs; recomputation is counted apart.
"""

from __future__ import annotations

import dataclasses

from envace_jax.model.spec import Qwen3Spec


def active_weights(spec: Qwen3Spec) -> int:
    """Matrix weights of all layers that one token meets (a mixture: its k experts and the router), no embedding."""
    attention = spec.d_model * spec.head_dim * (2 * spec.n_heads + 2 * spec.n_kv_heads)
    if spec.is_moe:
        mlp = spec.n_experts_per_token * 3 * spec.d_model * spec.d_ff_expert + spec.d_model * spec.n_experts
    else:
        mlp = 3 * spec.d_model * spec.d_ff
    return spec.n_layers * (attention + mlp)


def causal_pairs(length: int) -> int:
    """(query, key) pairs of one causal row."""
    return length * (length + 1) // 2


def forward_flops(spec: Qwen3Spec, tokens: float, pairs: float, predictions: float) -> float:
    """2 W tokens + 4 L H Dh pairs (scores and mixing) + 2 D V predictions (logits)."""
    attention = 4 * spec.n_layers * spec.n_heads * spec.head_dim * pairs
    return 2 * active_weights(spec) * tokens + attention + 2 * spec.d_model * spec.vocab_size * predictions


def train_flops(spec: Qwen3Spec, tokens: float, pairs: float, predictions: float) -> float:
    """Model FLOPs of forward and backward: three forwards."""
    return 3 * forward_flops(spec, tokens, pairs, predictions)


def recompute_flops(spec: Qwen3Spec, tokens: float, pairs: float, predictions: float, remat: str) -> float:
    """FLOPs of what the backward pass computes again: a whole forward (`none`: the chunked logits alone)."""
    logits = 2 * spec.d_model * spec.vocab_size * predictions
    layers = forward_flops(spec, tokens, pairs, 0)
    return logits + (0 if remat == "none" else layers)


def kv_bytes(spec: Qwen3Spec, itemsize: int = 2) -> int:
    """Keys and values of one token over all layers."""
    return 2 * spec.n_layers * spec.n_kv_heads * spec.head_dim * itemsize


@dataclasses.dataclass(frozen=True)
class Resident:
    """Bytes on one chip that live through a phase, by what they are."""

    master: float
    moments: float
    reference: float
    compute_copy: float
    kv: float
    judge: float

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))


def decode_seconds(weights: float, kv: float, bandwidth: float) -> float:
    """One decode iteration at best: every weight and every valid key and value of a chip is read once."""
    return (weights + kv) / bandwidth


def read_weights(spec: Qwen3Spec, rows: int) -> float:
    """Share of a model's weights that one decode iteration of `rows` rows reads (experts nobody chose are not read).

    With routing at random an expert is missed by all rows with probability (1 - k / E)^rows.
    """
    if not spec.is_moe:
        return 1.0
    experts = spec.n_layers * spec.n_experts * 3 * spec.d_model * spec.d_ff_expert
    hit = 1 - (1 - spec.n_experts_per_token / spec.n_experts) ** rows
    return 1 - experts * (1 - hit) / spec.n_params()


def activation_bytes(spec: Qwen3Spec, tokens: int, chunk: int, remat: str, tensor: int = 1) -> float:
    """Rough peak of a training row's activations on one chip, bfloat16 (used where no compiler can be asked).

    The inputs of all layers, one layer's intermediates recomputed, their gradients, and one chunk's logits.
    """
    width = 4 * spec.d_model + 2 * (spec.n_heads + 2 * spec.n_kv_heads) * spec.head_dim / tensor
    hidden = spec.n_experts_per_token * spec.d_ff_expert if spec.is_moe else spec.d_ff
    layer = tokens * (width + 4 * hidden / tensor) * 2
    kept: float = spec.n_layers * tokens * spec.d_model * 2
    if remat == "none":
        kept += spec.n_layers * layer
    elif remat == "dots":
        kept += spec.n_layers * tokens * (width + 2 * hidden / tensor)
    elif remat == "attention":
        kept += spec.n_layers * tokens * spec.n_heads * spec.head_dim * 2 / tensor
    return kept + 2 * layer + 3 * chunk * spec.vocab_size * 4 / tensor
