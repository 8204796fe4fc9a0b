"""google-tunix's own sampler on the conversations of `rollout.py`, turn by turn; run by it with tunix's Python.

PYTHON benchmarks/rollout_tunix.py MODEL_FOLDER CONVERSATIONS
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import jax
import numpy as np
from conversations import in_order, load
from jax.sharding import Mesh
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen3.model import ModelConfig
from tunix.models.qwen3.params import create_model_from_safe_tensors


class Numbers:
    """A tokenizer whose texts are ids written out. Nothing ends an output: lengths are forced."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return -1

    def pad_id(self) -> int:
        return 0


def main() -> None:
    folder, path = sys.argv[1:]
    facts = json.loads((Path(folder) / "config.json").read_text())
    rope = facts.get("rope_parameters") or facts
    config = ModelConfig(
        num_layers=facts["num_hidden_layers"],
        vocab_size=facts["vocab_size"],
        embed_dim=facts["hidden_size"],
        hidden_dim=facts["intermediate_size"],
        num_heads=facts["num_attention_heads"],
        head_dim=facts["head_dim"],
        num_kv_heads=facts["num_key_value_heads"],
        rope_theta=int(rope["rope_theta"]),
        norm_eps=facts["rms_norm_eps"],
        use_tied_embedding=facts["tie_word_embeddings"],
    )
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    with mesh:
        model = create_model_from_safe_tensors(folder, config, mesh)
    played = load(Path(path))
    longest = 4096
    cache = CacheConfig(
        cache_size=longest, num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim
    )
    sampler = Sampler(model, Numbers(), cache)
    ends = [config.vocab_size]  # an id that is never sampled

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        # The sampler puts its own first token before a prompt, so the prompt's first one is left to it.
        texts = [" ".join(map(str, prompt[1:])) for prompt in prompts]
        out = sampler(texts, max(lengths), eos_tokens=ends, temperature=1.0, top_p=1.0, seed=0)
        return [np.asarray(row).tolist() for row in out.tokens]

    began = time.perf_counter()
    useful = in_order(played, generate)
    print(json.dumps({"seconds": time.perf_counter() - began, "useful_tokens": useful}))


if __name__ == "__main__":
    main()
