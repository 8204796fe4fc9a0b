"""A run that trains adapters alone, as on one GPU, up to both folders that it is exported as."""

from __future__ import annotations

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from learning_common import tiny_config

from envace_jax import cli
from envace_jax.learning import trainer
from envace_jax.learning.metrics import read_metrics
from envace_jax.model.hf import save_params
from envace_jax.model.qwen3 import init_params
from envace_jax.model.spec import PRESETS

SPEC = dataclasses.replace(PRESETS["tiny"], vocab_size=768)  # the tokenizer's


@pytest.mark.long
def test_adapters_are_trained_merged_and_written_alone(tmp_path, toy_training):
    base = save_params(tmp_path / "base", init_params(SPEC, jax.random.key(0)), SPEC, dtype="F32")
    values = {
        "model.path": str(base),
        "model.dtype": "bfloat16",
        "model.lora.rank": 2,
        "model.lora.alpha": 6.0,
        "model.lora.targets": ("q", "o", "down"),
        "learning.lr": 0.02,
        "learning.steps": 2,
        "learning.kl_coef": 1e-3,
        "learning.updates_per_batch": 2,  # scores both the reference and the state
    }
    assert trainer.run_train(tiny_config(tmp_path / "run", **values)) == 0
    records = read_metrics(tmp_path / "run")
    assert any(r["grad_norm"] > 0 for r in records) and records[-1]["kl"] > 0

    merged, adapter = tmp_path / "merged", tmp_path / "adapter"
    assert cli.main(["export", str(tmp_path / "run"), str(merged), "--dtype", "float32"]) == 0
    assert cli.main(["export", str(tmp_path / "run"), str(adapter), "--adapter"]) == 0
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["base_model_name_or_path"]) == (2, 6.0, str(base))
    pairs = safetensors.numpy.load_file(adapter / "adapter_model.safetensors")
    before, after = (safetensors.numpy.load_file(folder / "model.safetensors") for folder in (base, merged))
    assert before.keys() == after.keys() and len(pairs) == 2 * 3 * SPEC.n_layers
    for name, weight in before.items():
        weight = weight.astype(ml_dtypes.bfloat16).astype(np.float32)
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" not in pairs:
            np.testing.assert_array_equal(after[name], weight, err_msg=name)
            continue
        term = 6.0 / 2 * pairs[f"{stem}.lora_B.weight"] @ pairs[f"{stem}.lora_A.weight"]  # as peft applies it
        assert np.abs(term).max() > 1e-3, name
        np.testing.assert_allclose(after[name], weight + term, rtol=2**-7, atol=1e-6, err_msg=name)
