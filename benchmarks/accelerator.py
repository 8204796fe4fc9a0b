"""What one accelerator reaches: the 1.7B train step whole, 8B with adapters, decoding; in under eight minutes.

    python benchmarks/accelerator.py [--tiny] [--json FILE]

Prints model FLOP utilisation, memory and tokens per second for each case, against the chip's published peaks. 8B with
float32 master weights and moments has 98 GB of state and, with gradients and the compute copy, more than one device of
140 GB holds: there adapters are trained, forward and backward through the whole model. `--tiny` runs every case on a
tiny model, on any device. After LIMIT seconds it stops with what is done, exit status 1; what was not run is said, in
the JSON file too.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

import jax
import jax.numpy as jnp
import numpy as np

from envace_jax.learning.loss import LossConfig
from envace_jax.learning.step import Update, UpdateConfig
from envace_jax.model.lora import LoraConfig, init_lora
from envace_jax.model.qwen3 import ForwardOptions, init_params
from envace_jax.model.spec import PRESETS, Qwen3Spec
from envace_jax.planning import formulas
from envace_jax.planning.chips import CHIPS, Chip
from envace_jax.sampling import programs

KINDS = {"H200": "h200", "H100": "h100", "A100": "a100", "v5 lite": "v5e", "v6 lite": "v6e", "TPU v5": "v5p"}

LIMIT = 450.0
"""Seconds until it stops: with the start of Python and jax, eight minutes."""
NOT_RUN = {
    "8B update, all parameters": "float32 masters and moments are 98 GB, more than one device with gradients"
}


def chip() -> Chip | None:
    """The published figures of the device here, None where it is not a known accelerator."""
    kind = jax.devices()[0].device_kind
    return next((CHIPS[name] for word, name in KINDS.items() if word.lower() in kind.lower()), None)


def peak_bytes() -> int | None:
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def batch(config: UpdateConfig, vocabulary: int) -> dict[str, Any]:
    """Full rows of one segment, every token predicted."""
    shape = (1, config.rows, config.row_tokens)
    rng = np.random.default_rng(0)
    places = np.broadcast_to(np.arange(config.row_tokens, dtype=np.int32), shape)
    ones = np.ones(shape, np.float32)
    return {
        "tokens": rng.integers(0, vocabulary, shape).astype(np.int32),
        "targets": rng.integers(0, vocabulary, shape).astype(np.int32),
        "positions": places,
        "target_index": places,
        "segment_ids": np.ones(shape, np.int32),
        "output": np.ones(shape, np.int32),
        "mask": np.ones(shape, bool),
        "role": np.zeros(shape, np.int8),
        "weights": ones,
        "advantages": rng.standard_normal(shape).astype(np.float32),
        "sampler_logprobs": -ones,
    }


def timed(run: Any, repeats: int) -> float:
    """Seconds a call, after one that is not counted."""
    jax.block_until_ready(run())
    started = time.perf_counter()
    for _ in range(repeats):
        out = run()
    jax.block_until_ready(out)
    return (time.perf_counter() - started) / repeats


def train(name: str, spec: Qwen3Spec, config: UpdateConfig, repeats: int, lora: LoraConfig | None = None) -> dict:
    """The learner's update on one microbatch of full rows."""
    config = dataclasses.replace(config, lora_scale=lora.alpha / lora.rank if lora else 1.0)
    update = Update(spec, config)
    dtype = jnp.bfloat16 if lora else jnp.float32
    params = jax.jit(functools.partial(init_params, spec, dtype=dtype))(jax.random.key(0))
    if lora:
        params["lora"] = init_lora(spec, lora, jax.random.key(1))
    trained, rest = ({"lora": params["lora"]}, params) if lora else (params, params)
    # Without `Update.init`, which copies: there is no room for the weights twice.
    state = {"params": rest, "opt_state": update.optimizer.init(trained), "step": jnp.int32(0)}
    del params, trained, rest
    arrays = update.put(batch(config, spec.vocab_size))
    started = time.perf_counter()
    update.compile(state)
    compiled = time.perf_counter() - started
    holder = [state]
    del state

    def run() -> Any:
        holder[0], metrics = update.update(holder[0], arrays, 1, float(config.rows * config.row_tokens))
        return metrics["loss"]

    seconds = timed(run, repeats)
    tokens = config.rows * config.row_tokens
    pairs = config.rows * formulas.causal_pairs(config.row_tokens)
    forward = formulas.forward_flops(spec, tokens, pairs, tokens)
    # With adapters the gradients of the weights themselves are not computed: two thirds of the products.
    flops = forward * (2 if lora else 3)
    return figures(name, seconds, compiled, flops, tokens)


def decode(name: str, spec: Qwen3Spec, slots: int, length: int, chunk: int, repeats: int) -> dict:
    """The engine's decode program on half-full rows."""
    options = ForwardOptions(dtype=jnp.bfloat16)
    shapes = programs.Shapes.plan(slots=slots, shelf=0, max_length=length - chunk, chunk=chunk, prefill_chunk=64)
    run_ = programs.Programs(spec, options, shapes, stacked=True)
    params = jax.jit(functools.partial(init_params, spec, dtype=jnp.bfloat16))(jax.random.key(0))
    main = run_.cache(slots, shapes.lengths[-1])
    ints = np.full((slots, programs.STOPS + shapes.stop_ids), -1, np.int32)
    ints[:, programs.LENGTH_COLUMN] = length // 2
    ints[:, programs.PENDING] = 1
    ints[:, programs.REMAINING] = 1 << 20
    ints[:, programs.KEY : programs.KEY + 2] = np.arange(2 * slots).reshape(slots, 2)
    ints[:, programs.TOP_K] = 0
    floats = np.ones((slots, 2), np.float32)
    holder = [main]
    del main

    def run() -> Any:
        holder[0], tokens, *_ = run_.decode(params, holder[0], ints, floats, 1 << 20)
        return tokens

    started = time.perf_counter()
    jax.block_until_ready(run())
    compiled = time.perf_counter() - started
    seconds = timed(run, repeats) / chunk
    known = chip()
    read = 2 * spec.n_params() * formulas.read_weights(spec, slots)
    best = formulas.decode_seconds(read, slots * length / 2 * formulas.kv_bytes(spec), known.bandwidth) if known else 0
    out = {"name": name, "compile_s": round(compiled, 1), "tokens_per_s": round(slots / seconds)}
    return out | {"ms_a_token": round(1e3 * seconds, 3), "of_ceiling": round(best / seconds, 3) if known else None}


def figures(name: str, seconds: float, compiled: float, flops: float, tokens: int) -> dict:
    known, peak = chip(), peak_bytes()
    return {
        "name": name,
        "compile_s": round(compiled, 1),
        "step_s": round(seconds, 4),
        "tokens_per_s": round(tokens / seconds),
        "tflops": round(flops / seconds / 1e12, 2),
        "mfu": round(flops / seconds / known.flops, 4) if known else None,
        "peak_gib": round(peak / 2**30, 2) if peak else None,
    }


def cases(tiny: bool) -> list[tuple[str, Any]]:
    """What is measured, by name: smallest memory first (the peak that a device reports never falls)."""
    gpu = jax.default_backend() == "gpu"
    attention = "cudnn" if gpu else "splash" if jax.default_backend() == "tpu" else "chunked"
    base = UpdateConfig(
        compute_dtype="bfloat16",
        remat="full",
        attention=attention,
        rows=1 if tiny else 2,
        row_tokens=256 if tiny else 8192,
        capacity=1,
        loss=LossConfig(chunk_tokens=128 if tiny else 2048),
    )
    small, large = (PRESETS["tiny"],) * 2 if tiny else (PRESETS["1.7b"], PRESETS["8b"])
    slots, length = (4, 256) if tiny else (64, 4096)
    repeats = 1 if tiny else 4
    return [
        ("1.7B decode", lambda name: decode(name, small, slots, length, 16, repeats)),
        ("1.7B update, all parameters", lambda name: train(name, small, base, repeats)),
        ("8B decode", lambda name: decode(name, large, slots // 2, length, 16, repeats)),
        ("8B update, adapters of rank 16", lambda name: train(name, large, base, repeats, LoraConfig())),
    ]


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    device = jax.devices()[0]
    print(f"jax {jax.__version__} on {device.device_kind} ({device.platform})")
    results: list[dict] = []
    not_run = dict(NOT_RUN)
    planned = cases(args.tiny)

    def write() -> None:
        for name, why in not_run.items():
            print(f"not run: {name}: {why}", flush=True)
        if args.json:
            record = {"device": device.device_kind, "results": results, "not_run": not_run}
            args.json.write_text(json.dumps(record, indent=1))

    def stop() -> None:  # from a thread of its own: a compilation hears no signal
        not_run.update((name, f"stopped after {LIMIT:g} s") for name, _ in planned[len(results) :])
        write()
        os._exit(1)

    guard = threading.Timer(LIMIT, stop)
    guard.daemon = True
    guard.start()
    for name, case in planned:
        try:
            results.append(case(name))
        except jax.errors.JaxRuntimeError as error:  # one case that does not fit must not hide the others
            results.append({"name": name, "failed": str(error).splitlines()[0][:200]})
        print(json.dumps(results[-1]), flush=True)
    guard.cancel()
    write()
    return results


if __name__ == "__main__":
    main()
