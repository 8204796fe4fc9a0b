"""Adapters: they start as nothing, merge into the same function, and load in peft."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.config import UserError
from envace_jax.model.hf import load_params
from envace_jax.model.lora import TARGETS, LoraConfig, init_lora, merge, save_adapter
from envace_jax.model.qwen3 import ForwardOptions, forward, init_params, unembed
from envace_jax.model.sharding import Rules, make_mesh, param_shardings
from envace_jax.model.spec import PRESETS, Qwen3Spec

SPEC = PRESETS["tiny"]
CONFIG = LoraConfig(rank=4, alpha=12.0, targets=TARGETS)
OPTIONS = ForwardOptions(lora_scale=CONFIG.alpha / CONFIG.rank)
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 11))
POSITIONS = jnp.broadcast_to(jnp.arange(11), (2, 11))


def logits(params, spec=SPEC, options=OPTIONS):
    run = jax.jit(
        lambda p: unembed(p, forward(p, spec, TOKENS, POSITIONS, jnp.ones_like(POSITIONS), options=options), options)
    )
    return run(params)


def trained(lora, seed: int = 3):
    """Adapters whose B is no longer zero."""
    leaves, tree = jax.tree.flatten(lora)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return tree.unflatten([x + 0.1 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves)])


@pytest.mark.quick
def test_fresh_adapters_change_nothing_and_merge_equals_applying():
    params = init_params(SPEC, jax.random.key(0))
    lora = init_lora(SPEC, CONFIG, jax.random.key(1))
    plain = logits(params)
    np.testing.assert_array_equal(logits({**params, "lora": lora}), plain)
    tuned = {**params, "lora": trained(lora)}
    merged = merge(tuned, OPTIONS.lora_scale)
    assert "lora" not in merged
    assert float(jnp.abs(logits(tuned) - plain).max()) > 0.1
    np.testing.assert_allclose(logits(merged), logits(tuned), atol=1e-4)


def test_gradients_reach_adapters_alone_and_keep_their_layout():
    params = init_params(SPEC, jax.random.key(0))
    lora = trained(init_lora(SPEC, CONFIG, jax.random.key(1)))
    mesh = make_mesh(fsdp=4, tensor=2)
    with jax.set_mesh(mesh):
        placed = jax.device_put({**params, "lora": lora}, param_shardings({**params, "lora": lora}, mesh, Rules()))
        tokens = jax.device_put(np.tile(TOKENS[:1], (4, 1)), Rules().spec("batch", "sequence"))
        rows = jax.device_put(np.tile(POSITIONS[:1], (4, 1)), Rules().spec("batch", "sequence"))

        def loss(lora, frozen):
            hidden = forward({**frozen, "lora": lora}, SPEC, tokens, rows, jnp.ones_like(rows), options=OPTIONS)
            return jnp.sum(jnp.sin(hidden)) / 4

        frozen = {k: v for k, v in placed.items() if k != "lora"}
        grads = jax.jit(jax.grad(loss))(placed["lora"], frozen)
    assert jax.tree.all(jax.tree.map(lambda g, p: g.sharding == p.sharding, grads, placed["lora"]))

    def single(lora):
        one = jnp.ones((1, 11), jnp.int32)
        both = {**params, "lora": lora}
        return jnp.sum(jnp.sin(forward(both, SPEC, TOKENS[:1], POSITIONS[:1], one, options=OPTIONS)))

    want = jax.jit(jax.grad(single))(lora)
    for got, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(want)):
        np.testing.assert_allclose(got, expected, atol=1e-4 * (1 + float(jnp.abs(expected).max())))


def test_adapter_folder_loads_in_peft_with_equal_logits(hf_folder, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is the oracle")
    import torch

    model, folder = hf_folder(tied=False)
    spec = Qwen3Spec.from_hf_config(folder)
    params = load_params(folder, spec)
    lora = trained(init_lora(spec, CONFIG, jax.random.key(2)))
    out = save_adapter(tmp_path / "adapter", lora, spec, CONFIG, base_model=str(folder))
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 4
    base = type(model).from_pretrained(folder)
    tuned = peft.PeftModel.from_pretrained(base, str(out))
    with torch.no_grad():
        want = tuned(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(logits({**params, "lora": lora}, spec), want, atol=2e-4)


@pytest.mark.quick
def test_impossible_settings_are_refused():
    with pytest.raises(UserError, match="rank=0"):
        LoraConfig(rank=0)
    with pytest.raises(UserError, match="expected some of q"):
        LoraConfig(targets=("q", "embed"))
    moe = dataclasses.replace(SPEC, n_experts=4, n_experts_per_token=2, d_ff_expert=8)
    with pytest.raises(UserError, match="take no adapters"):
        init_lora(moe, LoraConfig(targets=("gate",)), jax.random.key(0))
