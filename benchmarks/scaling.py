"""Communication of the train step by number of devices, from the compiled program, and what it predicts for slices.

    python benchmarks/scaling.py --config configs/qwen3_1p7b_v5e.py      # tables of docs/scaling.md

The run's own update is compiled for 1, 2, 4 and 8 virtual CPU devices (`mesh.fsdp`; nothing is executed) and the bytes
that a device receives are summed over its collectives, loops counted as often as they run.  Everything is compiled in
float32, the one type whose collectives CPU leaves alone; in bfloat16 the gathers of weights are half as large.  Strong
scaling keeps the rows of a step, weak scaling the rows of a device.

The prediction takes the formulas that the table confirms: each microbatch gathers the compute-dtype weights twice
(forward, and again in the recomputed backward pass) and reduces float32 gradients once, over the whole mesh.
Compute is `planning.formulas` at 40% of the chip's peak.  Efficiency is compute time over step time, with
communication hidden behind compute as far as it goes (best) or not at all (worst).  With the rows of a step fixed
(strong scaling, `--rows_fixed`) chips that have no row left in the last round do nothing meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        # The machine code is not run: what is wanted is the partitioned program.
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    ]
)

from envace_jax.cli import load_config
from envace_jax.planning.chips import CHIPS, Chip
from envace_jax.planning.formulas import causal_pairs, recompute_flops, train_flops

DEVICES = (1, 2, 4, 8)
CHIPS_PREDICTED = (16, 64, 256)
REACHED = 0.40


def volumes(config: str, rows: int) -> list[dict]:
    """One record for each number of devices and kind of scaling."""
    import jax

    from envace_jax.build import model_spec
    from envace_jax.model.sharding import make_mesh
    from envace_jax.planning.hlo import by_axis
    from envace_jax.planning.programs import update_program

    out = []
    for n in DEVICES:
        cfg = load_config(config)
        with cfg.unlocked():
            cfg.model.path = ""
            cfg.model.dtype = "float32"
            cfg.model.attention = "xla"
            cfg.mesh.replica = cfg.mesh.tensor = cfg.mesh.expert = 1
            cfg.mesh.fsdp, cfg.mesh.sequence = n, ""
            cfg.learning.rows_per_microbatch = 1
            cfg.learning.row_tokens = 2048
        spec = model_spec(cfg)
        mesh = make_mesh(fsdp=n, devices=jax.devices()[:n])
        program = update_program(cfg, spec, mesh, microbatches=1)
        kinds: dict[str, float] = {}
        for c in program.collectives:
            kinds[c.kind] = kinds.get(c.kind, 0.0) + c.total
        out.append(
            {
                "devices": n,
                "params": spec.n_params(),
                "received_per_microbatch": sum(by_axis(program.collectives).values()),
                "by_kind": kinds,
                "strong_microbatches": rows // n,
                "weak_microbatches": rows // max(DEVICES),
                "compile_seconds": program.seconds,
            }
        )
        print(json.dumps(out[-1]), flush=True)
    return out


def predict(spec: object, chip: Chip, chips: int, microbatches: int, tokens: int) -> dict[str, float]:
    """Seconds of compute and communication of one update, and efficiency, for `microbatches` rows a chip."""
    pairs, predictions = causal_pairs(tokens), tokens // 4
    flops = train_flops(spec, tokens, pairs, predictions) + recompute_flops(spec, tokens, pairs, predictions, "full")
    compute = microbatches * flops / (REACHED * chip.flops)
    share = (chips - 1) / chips
    received = microbatches * spec.n_params() * share * (2 * 2 + 4)  # two gathers in bfloat16, one reduction in float32
    communication = received / chip.links
    return {
        "compute": compute,
        "communication": communication,
        "best": compute / max(compute, communication),
        "worst": compute / (compute + communication),
    }


def at_work(chips: int, rows: int) -> float:
    """The share of chips that have a row while a step of `rows` rows is learned: all but in the last round."""
    return rows / (chips * -(-rows // chips))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/qwen3_1p7b_v5e.py")
    parser.add_argument("--rows", type=int, default=64, help="rows of 2,048 tokens in a step")
    parser.add_argument("--rows_fixed", type=int, default=64, help="rows of a step that is scaled strongly")
    parser.add_argument("--predict_only", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = [] if args.predict_only else volumes(args.config, args.rows)
    if found:
        n_params = found[0]["params"]
        print("\n| devices | received per microbatch | of the formula | strong: per step | weak: per step |")
        print("|---|---|---|---|---|")
        for r in found:
            n, got = r["devices"], r["received_per_microbatch"]
            formula = 12 * n_params * (n - 1) / n
            ratio = f"{got / formula:.2f}" if n > 1 else "–"
            print(
                f"| {n} | {got / 1e9:.2f} GB | {ratio} | {got * r['strong_microbatches'] / 1e9:.1f} GB "
                f"| {got * r['weak_microbatches'] / 1e9:.1f} GB |"
            )
    from envace_jax.build import model_spec

    print("\n| model | chip | tokens a row | chips | compute | communication | weak: worst to best | strong |")
    print("|---|---|---|---|---|---|---|---|")
    predictions = []
    for name in ("qwen3_1p7b", "qwen3_8b"):
        for chip in ("v5e", "v5p", "v6e"):
            cfg = load_config(f"configs/{name}_{chip}.py")
            with cfg.unlocked():
                cfg.model.path = ""
            spec = model_spec(cfg)
            for tokens in (4096, 20480):
                for chips in CHIPS_PREDICTED:
                    p = predict(spec, CHIPS[chip], chips, 1, tokens)
                    share = at_work(chips, args.rows_fixed)
                    place = {"model": name, "chip": chip, "tokens": tokens, "chips": chips, "strong_share": share}
                    predictions.append(place | p)
                    print(
                        f"| {name} | {chip} | {tokens:,} | {chips} | {p['compute']:.2f} s | {p['communication']:.2f} s "
                        f"| {p['worst']:.0%} to {p['best']:.0%} "
                        f"| {share * p['worst']:.0%} to {share * p['best']:.0%} |"
                    )
    if args.out:
        args.out.write_text(json.dumps({"volumes": found, "predictions": predictions}, indent=1) + "\n")


if __name__ == "__main__":
    main()
