"""Reading `config.json`: a value that is no shape is refused by its key."""

from __future__ import annotations

from typing import Any

import pytest

from envace_jax.config import UserError
from envace_jax.model.spec import PRESETS, Qwen3Spec

pytestmark = pytest.mark.quick
GOOD = PRESETS["0.6b"].to_hf_config()
SHAPES = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size "
    "max_position_embeddings"
).split()


@pytest.mark.parametrize("key", SHAPES)
@pytest.mark.parametrize("value", ["x", -4, 1.5, True, [1], {"a": 1}])
def test_a_shape_is_a_whole_number(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"config.json: {key}="):
        Qwen3Spec.from_hf_config(GOOD | {key: value})


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "vocab_size"])
def test_a_shape_is_there(key: str) -> None:
    with pytest.raises(UserError, match=f"key '{key}' is missing"):
        Qwen3Spec.from_hf_config({k: v for k, v in GOOD.items() if k != key})


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rope_theta": "fast"}, "rope_theta"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"eos_token_id": "end"}, "eos_token_id"),
        ({"eos_token_id": ["end"]}, "eos_token_id"),
        ({"bos_token_id": -1}, "bos_token_id"),
    ],
)
def test_other_values_are_what_they_are_for(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=f"config.json: {key}="):
        Qwen3Spec.from_hf_config(GOOD | changes)


@pytest.mark.parametrize("size", PRESETS)
def test_what_is_written_is_read_back(size: str) -> None:
    assert Qwen3Spec.from_hf_config(PRESETS[size].to_hf_config()) == PRESETS[size]


def test_several_ends_are_read_by_their_first() -> None:
    assert Qwen3Spec.from_hf_config(GOOD | {"eos_token_id": [7, 8]}).eos_token_id == 7
    assert Qwen3Spec.from_hf_config(GOOD | {"eos_token_id": []}).eos_token_id is None
