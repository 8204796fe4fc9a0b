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


def prefill_bytes(spec: Qwen3Spec, rows: int, piece: int, context: int, score_limit: int, tensor: int = 1) -> float:
    """Temporaries of a prefill call on one chip, bfloat16: `piece` tokens of each of `rows` rows, read up to `context`.

    Float32 scores of as many queries as keep them under `score_limit`, one layer's keys and values of the rows, and the
    tokens' hidden states, three wide and the feed-forward's.
    """
    scores = 4.0 * rows * spec.n_heads / tensor * piece * context
    while scores > score_limit:
        scores /= 2
    layer = rows * context * kv_bytes(spec) / spec.n_layers / tensor
    hidden = spec.n_experts_per_token * spec.d_ff_expert if spec.is_moe else spec.d_ff
    return scores + layer + 2 * rows * piece * (3 * spec.d_model + 2 * hidden / tensor)


def exchanged_bytes(
    spec: Qwen3Spec, tokens: float, tensor: int, sequence: bool, expert: int, backward: bool = True
) -> float:
    """Bytes that one chip receives in a microbatch for `tokens` tokens of its own over the tensor and expert axes.

    A layer's hidden states, bfloat16, are summed over `tensor` after both halves of the layer, once more in
    recomputation and twice in the backward pass (an all-reduce receives twice (n - 1) / n of them); where the
    sequence is cut over the same axis each half also gathers them three times. Experts gather four times and scatter
    three times, each (n - 1) times the chip's own tokens. A forward pass alone (`backward=False`) sums after both
    halves, gathers once in each, and has experts gather once and scatter once.
    """
    hidden = 2 * tokens * spec.d_model
    sums, gathers, meetings = (5, 6, 7) if backward else (2, 2, 2)
    layer = hidden * (tensor - 1) / tensor * (2 * sums + (gathers if sequence else 0))
    if spec.is_moe:
        layer += hidden * (expert - 1) * meetings
    return spec.n_layers * layer


def update_bytes(trained: float) -> float:
    """What an update holds beside state and activations, from one chip's trained parameters: 14 bytes each.

    The sum of gradients in float32 and its next value, one microbatch's gradients, those of the scan under way, and the
    compute copy, in bfloat16 (fits what the TPU compiler allots; see docs/plan.md).
    """
    return 14 * trained


def activation_bytes(
    spec: Qwen3Spec,
    tokens: int,
    chunk: int,
    remat: str,
    tensor: int = 1,
    sequence: int = 1,
    expert: int = 1,
    moe_chunk: int = 0,
) -> float:
    """Rough peak of a training row's activations on one chip, bfloat16 (used where no compiler can be asked).

    The inputs of all layers (cut `sequence` ways), one layer's intermediates recomputed, their gradients, its gathered
    weights and their gradients, the output matrix (bfloat16, float32 and its float32 gradient), one chunk's logits. Of
    a mixture also what the tokens of `moe_chunk` (0: all) from all expert shards become, a state for each of their
    experts: sorted (bfloat16), multiplied, and both their gradients (float32).
    """
    width = 4 * spec.d_model + 2 * (spec.n_heads + 2 * spec.n_kv_heads) * spec.head_dim / tensor
    hidden = spec.n_experts_per_token * spec.d_ff_expert if spec.is_moe else spec.d_ff
    layer = tokens * (width + 4 * hidden / tensor) * 2
    kept: float = spec.n_layers * tokens * spec.d_model * 2 / sequence
    if remat == "none":
        kept += spec.n_layers * layer
    elif remat == "dots":
        kept += spec.n_layers * tokens * (width + 2 * hidden / tensor)
    elif remat == "attention":
        kept += spec.n_layers * tokens * spec.n_heads * spec.head_dim * 2 / tensor
    weights = spec.n_params() - spec.d_model * spec.vocab_size * (1 if spec.tie_embeddings else 2)
    gathered = 2 * 2 * weights / spec.n_layers / tensor / expert
    head = (2 + 4 + 4) * spec.d_model * spec.vocab_size / tensor
    together = expert * min(moe_chunk or tokens, tokens) if spec.is_moe else 0
    assigned = together * spec.n_experts_per_token * spec.d_model * (2 + 3 * 4)
    return kept + 2 * layer + assigned + gathered + head + 3 * chunk * spec.vocab_size * 4 / tensor
