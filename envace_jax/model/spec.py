"""What a Qwen3 checkpoint's `config.json` says, as one frozen record, and the published sizes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envace_jax.config import UserError
from envace_jax.json_files import read_json


@dataclasses.dataclass(frozen=True)
class Qwen3Spec:
    """Shape and constants of one Qwen3 model (dense, or mixture of experts where `n_experts` > 0).

    `rope_theta` always comes from the configuration file: the 2507 models use 5e6 where the base models
    use 1e6, and nothing else in the file tells them apart.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float
    rms_eps: float = 1e-6
    tie_embeddings: bool = False
    max_positions: int = 40960
    n_experts: int = 0
    n_experts_per_token: int = 0
    d_ff_expert: int = 0
    norm_topk_prob: bool = True
    router_aux_coef: float = 0.0
    bos_token_id: int | None = 151643
    eos_token_id: int | None = 151645

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise UserError(f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}")
        if self.head_dim % 2:
            raise UserError(f"head_dim={self.head_dim} must be even for rotary positions")

    @property
    def is_moe(self) -> bool:
        return self.n_experts > 0

    def n_params(self) -> int:
        """Number of parameters, embedding counted once when it is tied."""
        attention = self.d_model * self.head_dim * (2 * self.n_heads + 2 * self.n_kv_heads)
        if self.is_moe:
            mlp = self.n_experts * 3 * self.d_model * self.d_ff_expert + self.d_model * self.n_experts
        else:
            mlp = 3 * self.d_model * self.d_ff
        norms = 2 * self.d_model + 2 * self.head_dim
        embeddings = self.vocab_size * self.d_model * (1 if self.tie_embeddings else 2)
        return self.n_layers * (attention + mlp + norms) + embeddings + self.d_model

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any] | str | Path) -> Qwen3Spec:
        """Reads a Hugging Face `config.json` (a mapping, the file, or its folder).

        Both spellings of the rotary base are read: `rope_theta` (transformers 4) and
        `rope_parameters.rope_theta` (transformers 5). Raises `UserError` naming the key that is missing
        or that asks for something Qwen3 here does not do.
        """
        where = "config.json"
        if not isinstance(config, Mapping):
            path = Path(config)
            path = path / "config.json" if path.is_dir() else path
            where = str(path)
            if not path.exists():
                raise UserError(f"{path}: no such file; expected a Hugging Face model folder")
            config = read_json(path)
        if not isinstance(config, Mapping):
            raise UserError(f"{where}: expected a JSON object")

        def need(key: str) -> Any:
            if config.get(key) is None:
                raise UserError(f"{where}: key '{key}' is missing")
            return config[key]

        def count(key: str, value: Any) -> int:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{where}: {key}={value!r}: expected a whole number above 0")
            return value

        def number(key: str, value: Any) -> float:
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
                raise UserError(f"{where}: {key}={value!r}: expected a number of at least 0")
            return float(value)

        def section(key: str) -> Mapping[str, Any]:
            if not isinstance(value := config.get(key) or {}, Mapping):
                raise UserError(f"{where}: {key}={value!r}: expected a JSON object")
            return value

        def token(key: str) -> int | None:
            value = config.get(key)
            first = next(iter(value), None) if isinstance(value, list) else value
            if first is not None and (not isinstance(first, int) or isinstance(first, bool) or first < 0):
                raise UserError(f"{where}: {key}={value!r}: expected a token id")
            return first

        model_type = config.get("model_type", "qwen3")
        if model_type not in ("qwen3", "qwen3_moe"):
            raise UserError(f"{where}: model_type '{model_type}' is not supported; expected qwen3 or qwen3_moe")
        rope = section("rope_parameters")
        theta = config.get("rope_theta", rope.get("rope_theta"))
        if theta is None:
            raise UserError(f"{where}: neither 'rope_theta' nor 'rope_parameters.rope_theta' is present")
        scaling = section("rope_scaling") or rope
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind != "default":
            raise UserError(f"{where}: rope type '{kind}' is not supported; expected 'default'")
        if config.get("attention_bias"):
            raise UserError(f"{where}: attention_bias=true is not supported for Qwen3")
        if config.get("use_sliding_window"):
            raise UserError(f"{where}: use_sliding_window=true is not supported for Qwen3")
        if config.get("hidden_act", "silu") != "silu":
            raise UserError(f"{where}: hidden_act '{config['hidden_act']}' is not supported; expected silu")
        moe: dict[str, Any] = {}
        if model_type == "qwen3_moe":
            if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
                raise UserError(f"{where}: mixed dense and expert layers are not supported")
            moe = dict(
                # transformers 5 writes num_local_experts, the published files say num_experts.
                n_experts=count("num_experts", config.get("num_local_experts") or need("num_experts")),
                n_experts_per_token=count("num_experts_per_tok", need("num_experts_per_tok")),
                d_ff_expert=count("moe_intermediate_size", need("moe_intermediate_size")),
                norm_topk_prob=bool(config.get("norm_topk_prob", True)),
                router_aux_coef=number("router_aux_loss_coef", config.get("router_aux_loss_coef", 0.0)),
            )
        d_model = count("hidden_size", need("hidden_size"))
        n_heads = count("num_attention_heads", need("num_attention_heads"))
        # A mixture's dense width is not used, and may be absent.
        wide = config.get("intermediate_size") or (0 if moe else need("intermediate_size"))
        return cls(
            vocab_size=count("vocab_size", need("vocab_size")),
            d_model=d_model,
            n_layers=count("num_hidden_layers", need("num_hidden_layers")),
            n_heads=n_heads,
            n_kv_heads=count("num_key_value_heads", config.get("num_key_value_heads") or n_heads),
            head_dim=count("head_dim", config.get("head_dim") or d_model // n_heads),
            d_ff=count("intermediate_size", wide) if wide else 0,
            rope_theta=number("rope_theta", theta),
            rms_eps=number("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            max_positions=count("max_position_embeddings", config.get("max_position_embeddings", 40960)),
            bos_token_id=token("bos_token_id"),
            eos_token_id=token("eos_token_id"),
            **moe,
        )

    def to_hf_config(self, dtype: str = "float32") -> dict[str, Any]:
        """The `config.json` that `transformers` reads back into the same model."""
        config: dict[str, Any] = {
            "architectures": ["Qwen3MoeForCausalLM" if self.is_moe else "Qwen3ForCausalLM"],
            "model_type": "qwen3_moe" if self.is_moe else "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.d_model,
            "initializer_range": 0.02,
            "intermediate_size": self.d_ff,
            "max_position_embeddings": self.max_positions,
            "num_attention_heads": self.n_heads,
            "num_hidden_layers": self.n_layers,
            "num_key_value_heads": self.n_kv_heads,
            "rms_norm_eps": self.rms_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rope_theta": self.rope_theta,
            "sliding_window": None,
            "tie_word_embeddings": self.tie_embeddings,
            "dtype": dtype,
            "torch_dtype": dtype,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
        }
        if self.is_moe:
            config |= {
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "moe_intermediate_size": self.d_ff_expert,
                "norm_topk_prob": self.norm_topk_prob,
                "num_experts": self.n_experts,
                "num_experts_per_tok": self.n_experts_per_token,
                "output_router_logits": False,
                "router_aux_loss_coef": self.router_aux_coef,
            }
        return config


def _dense(d_model: int, n_layers: int, n_heads: int, n_kv_heads: int, d_ff: int, tied: bool) -> Qwen3Spec:
    return Qwen3Spec(
        vocab_size=151936,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=128,
        d_ff=d_ff,
        rope_theta=1e6,
        tie_embeddings=tied,
    )


def _moe(d_model: int, n_layers: int, n_heads: int, d_ff: int, d_ff_expert: int) -> Qwen3Spec:
    return Qwen3Spec(
        vocab_size=151936,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=4,
        head_dim=128,
        d_ff=d_ff,
        rope_theta=1e6,
        n_experts=128,
        n_experts_per_token=8,
        d_ff_expert=d_ff_expert,
        router_aux_coef=1e-3,
    )


PRESETS: dict[str, Qwen3Spec] = {
    "tiny": Qwen3Spec(
        vocab_size=512,
        d_model=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=32,
        d_ff=128,
        rope_theta=1e4,
        tie_embeddings=True,
        max_positions=4096,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "0.6b": _dense(1024, 28, 16, 8, 3072, True),
    "1.7b": _dense(2048, 28, 16, 8, 6144, True),
    "4b": _dense(2560, 36, 32, 8, 9728, True),
    "8b": _dense(4096, 36, 32, 8, 12288, False),
    "14b": _dense(5120, 40, 40, 8, 17408, False),
    "32b": _dense(5120, 64, 64, 8, 25600, False),
    "30b-a3b": _moe(2048, 48, 32, 6144, 768),
    "235b-a22b": _moe(4096, 94, 64, 12288, 1536),
}
"""Published Qwen3 sizes and `tiny` (theirs come from the config files; the sizes serve planning)."""
