"""Tiny random checkpoints made by transformers, the oracle of the parity tests, and the folder of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

TOKENIZER = "data/quickstart/tokenizer"


def hf_model(moe: bool = False, tied: bool = False, seed: int = 0, **changes):
    """A random float32 Qwen3 (MoE) with a rotary base and a head size that no default has."""
    torch = pytest.importorskip("torch", reason="torch is needed as the oracle")
    import transformers

    torch.manual_seed(seed)
    sizes = dict(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 3.5e4},
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=2,
    )
    if moe:
        sizes |= dict(moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True)
    config_class = transformers.Qwen3MoeConfig if moe else transformers.Qwen3Config
    model_class = transformers.Qwen3MoeForCausalLM if moe else transformers.Qwen3ForCausalLM
    model = model_class(config_class(**(sizes | changes))).eval()
    with torch.no_grad():  # norms away from one, or a wrong norm would go unseen
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory):
    """hf_folder(moe=..., tied=...) -> (transformers model, its folder); made once a session."""
    made: dict[tuple, tuple] = {}

    def make(**options) -> tuple[object, Path]:
        key = tuple(sorted(options.items()))
        if key not in made:
            model = hf_model(**options)
            folder = tmp_path_factory.mktemp("hf")
            model.save_pretrained(folder)
            made[key] = (model, folder)
        return made[key]

    return make


@pytest.fixture
def run_dir(tmp_path):
    """The folder of a run that stopped after step 3, and its parameters."""
    import jax

    from envace_jax.config import default_config, flat
    from envace_jax.learning.checkpoint import Checkpoints
    from envace_jax.model.qwen3 import init_params
    from envace_jax.model.spec import PRESETS

    spec = PRESETS["tiny"]
    folder = tmp_path / "run"
    folder.mkdir()
    cfg = default_config()
    cfg.model.tokenizer = TOKENIZER
    cfg.data.source = "bfcl+quickstart"
    (folder / "config.json").write_text(json.dumps(dict(flat(cfg)), default=list))
    (folder / "data.json").write_text(json.dumps({"fingerprint": "feedbeef"}))
    (folder / "metrics.jsonl").write_text('{"step": 0, "eval/success": 0.5}\n{"step": 3, "eval/success": 0.75}\n')
    checkpoints = Checkpoints(folder / "checkpoints")
    params = init_params(spec, jax.random.key(0))
    state = {"policy": {"params": params, "step": jax.numpy.int32(3)}}
    checkpoints.save(3, state, {"step": 3, "model": spec.to_hf_config()})
    checkpoints.close()
    return folder, params
