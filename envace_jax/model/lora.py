"""Low-rank adapters (Hu et al. 2021): W + (alpha / r) A B, trained while W stays.

Adapters live in the parameter tree beside the layers, `params["lora"][name] = {"a": [L, in, r], "b": [L, r, out]}`.
The forward pass adds (x A) B to a projection's output, so that no gradient of a whole weight exists; `merge` folds
them into the weights for export. The scale alpha / r is an option of the forward pass, not a parameter.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envace_jax.config import UserError
from envace_jax.model import safetensors_io as st
from envace_jax.model.hf_folder import write_folder
from envace_jax.model.sharding import PARAM_AXES, gather, inner_sequence, layout
from envace_jax.model.spec import Qwen3Spec

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
"""Weights that can carry an adapter; the experts of a mixture cannot."""
_MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """rank r, alpha (the update is scaled by alpha / r), and the weights that get adapters."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("q", "k", "v", "o")

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError(f"model.lora.rank={self.rank}: expected at least 1")
        if not self.targets or not set(self.targets) <= set(TARGETS):
            raise UserError(f"model.lora.targets={self.targets}: expected some of {', '.join(TARGETS)}")


def _shapes(spec: Qwen3Spec, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    d, h, k, dh, f = spec.d_model, spec.n_heads, spec.n_kv_heads, spec.head_dim, spec.d_ff
    return {
        "q": ((d,), (h, dh)),
        "k": ((d,), (k, dh)),
        "v": ((d,), (k, dh)),
        "o": ((h, dh), (d,)),
        "gate": ((d,), (f,)),
        "up": ((d,), (f,)),
        "down": ((f,), (d,)),
    }[name]


def _weight_axes(equation: str) -> tuple[str, str]:
    """Input axes and output axes of the weight in a product such as `btd,dhk->bthk`."""
    weight, out = equation.split(",")[1].split("->")
    return "".join(c for c in weight if c not in out), "".join(c for c in weight if c in out)


def init_lora(spec: Qwen3Spec, config: LoraConfig, key: jax.Array, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Adapters that change nothing yet (A random, B zero), for `params["lora"]`."""
    if spec.is_moe and set(config.targets) & {"gate", "up", "down"}:
        raise UserError("model.lora.targets: the experts of a mixture take no adapters; expected some of q, k, v, o")
    out: dict[str, Any] = {}
    for name in config.targets:
        inner, outer = _shapes(spec, name)
        name_key = jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)
        a = jax.random.normal(name_key, (spec.n_layers, *inner, config.rank), jnp.float32)
        out[name] = {
            "a": (a / math.sqrt(math.prod(inner))).astype(dtype),
            "b": jnp.zeros((spec.n_layers, config.rank, *outer), dtype),
        }
    return out


def adapter_term(
    equation: str, y: jax.Array, name: str, pair: Mapping[str, jax.Array], options: Any, out_sharding: Any
) -> jax.Array:
    """scale * (y A) B for one layer: what an adapter adds to `einsum(equation, y, W)`."""
    rules = options.rules
    a = gather(rules, pair["a"].astype(options.dtype), *PARAM_AXES[f"lora/{name}/a"][1:])
    b = gather(rules, pair["b"].astype(options.dtype), *PARAM_AXES[f"lora/{name}/b"][1:])
    inner, outer = _weight_axes(equation)
    mid_sharding = layout(rules, "batch", inner_sequence(rules), None)
    y_in, out = equation.split(",")[0], equation.split("->")[1]
    mid_BxTxR = jnp.einsum(f"{y_in},{inner}r->btr", y, a, out_sharding=mid_sharding)
    return options.lora_scale * jnp.einsum(f"btr,r{outer}->{out}", mid_BxTxR, b, out_sharding=out_sharding)


def merge(params: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """The same model without adapters: W + scale A B in float32, in the dtype of W."""
    layers = dict(params["layers"])
    for name, pair in params["lora"].items():
        layers[name] = _merge_one(layers[name], pair["a"], pair["b"], scale)
    return {key: value for key, value in params.items() if key != "lora"} | {"layers": layers}


@jax.jit
def _merge_one(w: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    def layer(_: None, pair: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
        w, a, b = pair
        product = jnp.tensordot(a.astype(jnp.float32), b.astype(jnp.float32), axes=1)
        return None, (w.astype(jnp.float32) + scale * product).astype(w.dtype)

    return jax.lax.scan(layer, None, (w, a, b))[1]


def save_adapter(
    folder: str | Path,
    lora: Mapping[str, Any],
    spec: Qwen3Spec,
    config: LoraConfig,
    *,
    base_model: str = "",
    texts: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> Path:
    """A folder that `peft.PeftModel.from_pretrained` loads: `adapter_config.json`, `adapter_model.safetensors`."""
    values: dict[str, np.ndarray] = {}
    for name, pair in lora.items():
        a_LxIxR = np.asarray(pair["a"], np.float32).reshape(spec.n_layers, -1, config.rank)
        b_LxRxO = np.asarray(pair["b"], np.float32).reshape(spec.n_layers, config.rank, -1)
        for layer in range(spec.n_layers):
            stem = f"base_model.model.model.layers.{layer}.{_MODULES[name]}"
            values[f"{stem}.lora_A.weight"] = a_LxIxR[layer].T
            values[f"{stem}.lora_B.weight"] = b_LxRxO[layer].T
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted(_MODULES[name].rpartition(".")[2] for name in lora),
        "inference_mode": True,
    }
    return write_folder(
        Path(folder),
        [[st.TensorSpec(name, "F32", value.shape) for name, value in values.items()]],
        lambda tensor: values[tensor.name],
        config=None,
        tokenizer_dir=None,
        texts={"adapter_config.json": json.dumps(adapter, indent=2) + "\n", **(texts or {})},
        source_id=None,
        overwrite=overwrite,
        stem="adapter_model",
    )
