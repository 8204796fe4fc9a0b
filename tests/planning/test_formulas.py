"""FLOPs and bytes against counts made by hand, and against what XLA counts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.config import UserError
from envace_jax.model.qwen3 import ForwardOptions, forward, param_shapes, unembed
from envace_jax.model.spec import PRESETS, Qwen3Spec
from envace_jax.planning import formulas
from envace_jax.planning.chips import parse_slice, rollout_slice

pytestmark = pytest.mark.quick

SPEC = Qwen3Spec(10, 4, 2, 2, 1, 2, 6, rope_theta=1e4)
MOE = dataclasses.replace(SPEC, n_experts=4, n_experts_per_token=2, d_ff_expert=3)


def test_flops_of_a_tiny_model_by_hand():
    # One layer, one token: q 4x4, k 4x2, v 4x2, o 4x4 = 48 weights; gate, up, down 3 x 4x6 = 72. Two layers: 240.
    assert formulas.active_weights(SPEC) == 240
    # A row of 3 tokens: 6 pairs; scores and mixing: 2 FLOPs x 2 heads x 2 wide x 2 products x 6 pairs x 2 layers = 192.
    assert formulas.causal_pairs(3) == 6
    # Logits for 1 token: 2 x 4 x 10 = 80.
    assert formulas.forward_flops(SPEC, tokens=3, pairs=6, predictions=1) == 2 * 240 * 3 + 192 + 80
    assert formulas.train_flops(SPEC, 3, 6, 1) == 3 * (1440 + 192 + 80)
    assert formulas.recompute_flops(SPEC, 3, 6, 1, "full") == 1440 + 192 + 80
    assert formulas.recompute_flops(SPEC, 3, 6, 1, "none") == 80


def test_a_mixture_counts_the_experts_that_a_token_meets():
    # Attention 48, router 4x4 = 16, two experts of three 4x3 matrices = 72; two layers.
    assert formulas.active_weights(MOE) == 2 * (48 + 16 + 72)
    assert formulas.read_weights(SPEC, 8) == 1.0
    one = formulas.read_weights(MOE, 1)
    experts = 2 * 4 * 3 * 4 * 3
    assert one == pytest.approx(1 - experts * 0.5 / MOE.n_params())
    assert formulas.read_weights(MOE, 1000) == pytest.approx(1.0)


def test_published_sizes():
    assert PRESETS["8b"].n_params() == 8_190_735_360
    assert PRESETS["30b-a3b"].n_params() == 30_532_122_624
    # Active parameters of 30B-A3B with both embeddings: the published 3.3B.
    spec = PRESETS["30b-a3b"]
    assert formulas.active_weights(spec) + 2 * spec.vocab_size * spec.d_model == pytest.approx(3.35e9, rel=0.01)
    # 8B: 36 layers x 2 x 8 heads x 128 x 2 bytes.
    assert formulas.kv_bytes(PRESETS["8b"]) == 147_456


def test_the_compiler_counts_the_same_products():
    spec = dataclasses.replace(PRESETS["tiny"], n_layers=1)
    tokens = jnp.zeros((1, 64), jnp.int32)

    def run(params):
        hidden = forward(params, spec, tokens, tokens, tokens + 1)
        return unembed(params, hidden, ForwardOptions())

    counted = jax.jit(run).lower(param_shapes(spec)).compile().cost_analysis()["flops"]
    # The reference form computes masked pairs as well: 64 x 64. Norms and softmax add a little.
    expected = formulas.forward_flops(spec, 64, 64 * 64, 64)
    np.testing.assert_allclose(counted, expected, rtol=0.06)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v9:2x2", "chip 'v9' is unknown"),
        ("v5p", "expected CHIP:SIZES"),
        ("v5p:2x2", "3 dimension"),
        ("v5e:2xx2", "expected CHIP:SIZES"),
        ("v5e:0x4", "expected CHIP:SIZES"),
        ("", "is unknown"),
    ],
)
def test_a_slice_that_cannot_be_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_slice(text)


def test_slices():
    slice_ = parse_slice("v5p:2x2x4")
    assert slice_.size == 16 and slice_.name == "v5p:2x2x4"
    assert rollout_slice(slice_.chip, 4).name == "v5p:2x2x1"
    assert parse_slice("h100:8").size == 8
    with pytest.raises(UserError, match="at most 16"):
        rollout_slice(slice_.chip, 32)


def test_temporaries_of_a_prefill_by_hand():
    # Two rows of 8 tokens over 16 positions: scores 4 bytes x 2 rows x 2 heads x 8 x 16 = 2,048, halved to under 600.
    # One layer's keys and values: 2 rows x 16 x (2 x 1 head x 2 wide x 2 bytes) = 256. Hidden states: 16 tokens x
    # (3 x 4 + 2 x 6) x 2 bytes = 768.
    assert formulas.prefill_bytes(SPEC, 2, 8, 16, score_limit=600) == 512 + 256 + 768
    assert formulas.prefill_bytes(SPEC, 2, 8, 16, score_limit=5000) == 2048 + 256 + 768
    # Cut over two chips: half the heads, keys and values, half the feed-forward.
    assert formulas.prefill_bytes(SPEC, 2, 8, 16, 5000, tensor=2) == 1024 + 128 + 2 * 16 * (12 + 6)


def test_activations_by_hand():
    # Width 4 x 4 + 2 x (2 + 2) x 2 = 32, feed-forward 4 x 6 = 24: a layer of 10 tokens is 10 x 56 x 2 bytes = 1,120.
    # Inputs of two layers 2 x 10 x 4 x 2 = 160; the output matrix 10 bytes x 4 x 10 = 400; logits of a chunk of 5
    # 3 x 5 x 10 x 4 = 600; weights and gradients of a layer 4 bytes x its share of the parameters.
    weights = 4 * (SPEC.n_params() - 4 * 10 * (1 if SPEC.tie_embeddings else 2)) / 2
    whole = formulas.activation_bytes(SPEC, 10, 5, "full")
    assert whole == 160 + 2 * 1120 + 400 + 600 + weights
    assert formulas.activation_bytes(SPEC, 10, 5, "full", sequence=2) == whole - 80
    assert formulas.activation_bytes(SPEC, 10, 5, "none") == whole + 2 * 1120
    # Experts: 4 tokens of each of two shards, k states of 4 numbers for each of them, 14 bytes a number.
    chunks = [formulas.activation_bytes(MOE, 10, 5, "full", expert=2, moe_chunk=n) for n in (4, 8, 0, 10)]
    assert chunks[1] - chunks[0] == 2 * 4 * MOE.n_experts_per_token * 4 * 14 and chunks[2] == chunks[3]


def test_exchanged_bytes_by_hand():
    # Ten tokens of 4 numbers, two bytes each: 80. Over two chips half of it, five all-reduces of twice that: 400.
    assert formulas.exchanged_bytes(SPEC, 10, 1, True, 1) == 0
    assert formulas.exchanged_bytes(SPEC, 10, 2, False, 1) == 2 * 400
    assert formulas.exchanged_bytes(SPEC, 10, 2, True, 1) == 2 * (400 + 6 * 40)
    assert formulas.exchanged_bytes(MOE, 10, 1, False, 4) == 2 * 7 * 3 * 80
    assert formulas.exchanged_bytes(SPEC, 10, 1, False, 4) == 0
    # A forward pass: two all-reduces, a gather in each half, an exchange there and back.
    assert formulas.exchanged_bytes(SPEC, 10, 2, True, 1, backward=False) == 2 * (2 * 80 + 2 * 40)
    assert formulas.exchanged_bytes(MOE, 10, 1, False, 4, backward=False) == 2 * 2 * 3 * 80
