"""google-tunix's own sampler on the conversations of `rollout.py`, turn by turn; run by it with tunix's Python.

PYTHON benchmarks/rollout_tunix.py MODEL_FOLDER CONVERSATIONS

Every batch has another shape, for which the sampler compiles anew; those seconds are reported beside the others.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import jax
import numpy as np
from conversations import LONGEST_SIDE, in_order, limits, load
from jax.sharding import Mesh
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen3.model import ModelConfig
from tunix.models.qwen3.params import create_model_from_safe_tensors

BATCH = 16
"""Prompts at a time: its prefill of 64 of 2,048 tokens wants 45 GB with this model, 16 of them a quarter."""
PAD, OTHER = 0, 1
"""The sampler hides every token equal to its padding, sampled ones too: those go on as another token."""


class Numbers:
    """A tokenizer whose texts are ids written out. Nothing ends an output: lengths are forced."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> None:
        return None  # nothing is put before a prompt

    def eos_id(self) -> int:
        return -1

    def pad_id(self) -> int:
        return PAD


class Compiling:
    """Seconds that jax has compiled so far."""

    def __init__(self) -> None:
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, seconds: float, **_: object) -> None:
        if event.endswith(("jaxpr_to_mlir_module_duration", "backend_compile_duration")):
            self.seconds += seconds


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
    prompt, output = limits(load(Path(path)))
    rows = 1 << (prompt - 1).bit_length()  # prompts are padded to a power of two
    cache = CacheConfig(
        cache_size=rows + output,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    sampler = Sampler(model, Numbers(), cache)
    ends = [config.vocab_size]  # an id that is never sampled

    def generate(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        texts = [" ".join(map(str, prompt)) for prompt in prompts]
        out = sampler(texts, max(lengths), eos_tokens=ends, temperature=1.0, top_p=1.0, seed=0)
        return [[OTHER if token == PAD else token for token in row.tolist()] for row in out.tokens]

    compiling = Compiling()
    began = time.perf_counter()
    useful = in_order(played, generate, BATCH, enough=lambda: time.perf_counter() - began > LONGEST_SIDE)
    seconds = time.perf_counter() - began - compiling.seconds
    print(json.dumps({"seconds": seconds, "useful_tokens": useful, "compile_seconds": compiling.seconds}))


if __name__ == "__main__":
    main()
