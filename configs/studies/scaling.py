"""The scaling study of record: three arms at two sizes, as the publication trained them. Nothing in it has been run.

    python configs/studies/scaling.py            (writes docs/studies/scaling.md; seconds, nothing is compiled)

The arms are `envace` and both readings of the publication's "standard GRPO", which does not say where its observations
came from: `act_only_endpoint` (an outside simulator, the form of the published launcher) and `real_env` (a real
environment; CM2 has none, so this arm trains on BFCL's multi-turn tasks). The page holds the published numbers beside
empty cells, what each cell would take on a TPU pod and on GPUs by `plan`'s formulas, its cost, and its commands.

Hardware: 4 v5p chips or 8 H100 for 1.7B, 16 v5p chips or 16 H100 for 8B.
Expect: docs/studies/scaling.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

PAGE = ROOT / "docs/studies/scaling.md"
BEGIN, END = "<!-- made by configs/studies/scaling.py -->", "<!-- end -->"
GIB = 1 << 30
GPU = "h100"


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and where it is trained. `tpu` is the accelerator type of the slice that the configuration plans; `gpu`
    is the configuration for GPUs, with what it changes."""

    name: str
    published: str
    config: str
    tpu: str
    gpus: int
    gpu: tuple[str, ...]
    model: str


@dataclasses.dataclass(frozen=True)
class Arm:
    """An arm of the study and what it is set against. `ledgers`: roles whose outputs it trains, of two."""

    name: str
    against: str
    options: tuple[str, ...]
    ledgers: int = 2


SIZES = (
    Size(
        "1.7B",
        "EnvACE-1.7B",
        "configs/qwen3_1p7b_v5p.py",
        "v5p-8",
        8,
        ("configs/qwen3_1p7b_v5p.py", f"plan.topology={GPU}:8", "mesh.fsdp=2", "model.attention=cudnn"),
        "models/qwen3-1.7b",
    ),
    Size(
        "8B",
        "EnvACE-8B",
        "configs/qwen3_8b_v5p.py",
        "v5p-32",
        16,
        ("configs/qwen3_8b_gpu16.py",),
        "models/qwen3-8b",
    ),
)
JUDGE = (
    "rewards.judge=endpoint",
    "rewards.endpoint.base_url=$JUDGE_URL",
    "rewards.endpoint.model=Qwen/Qwen3-30B-A3B",
)
ARMS = (
    Arm("envace", "EnvACE", ("data.source=cm2", "data.path=$CM2", *JUDGE)),
    Arm(
        "act_only_endpoint",
        "standard GRPO",
        (
            "data.source=cm2",
            "data.path=$CM2",
            *JUDGE,
            "rollout.simulator.base_url=$SIMULATOR_URL",
            "rollout.simulator.model=$SIMULATOR",
        ),
        1,
    ),
    Arm("real_env", "standard GRPO", ("data.source=bfcl", "rewards.judge=rules"), 1),
)
BENCHMARKS = (("tau2", "τ²-Bench avg."), ("bfcl_v4", "BFCL V4 avg."), ("vita", "VitaBench avg."))


def options(size: Size, arm: Arm) -> list[str]:
    """The configuration values of one cell, as `key=value`."""
    run = f"runs/scaling-{size.name.lower()}-{arm.name}"
    return [
        "preset=paper",
        f"learning.arm={arm.name}",
        f"model.path={size.model}",
        f"run_dir={run}",
        f"plan.fill={arm.ledgers / 2}",
        *arm.options,
    ]


def commands(size: Size, arm: Arm) -> list[str]:
    """How the cell is trained on a TPU pod slice, and on GPUs."""
    config, *changed = size.gpu
    pod, gpus = (
        f"train --config {file} " + " ".join(f"--config.{option}" for option in values)
        for file, values in ((size.config, options(size, arm)), (config, [*options(size, arm), *changed]))
    )
    return [
        f"TPU=envace TYPE={size.tpu} RUNTIME=v2-alpha-tpuv5 launch/tpu_pod.sh all -- {pod}",
        f"sbatch --nodes={size.gpus // 8} --gpus-per-node=8 launch/slurm_gpu.sbatch {gpus}",
    ]


def published(benchmark: str, size: Size, arm: Arm) -> str:
    """The number that stands beside a cell, or a dash where none was published."""
    from envace_jax.evaluation.published import measured

    name = size.published if arm.against == "EnvACE" else f"{arm.against} ({size.name})"
    found = [p for p in measured(benchmark) if p.model == name]
    return f"{found[0].value:g} ({found[0].place})" if found else "–"


def planned(size: Size, arm: Arm, gpu: bool):
    """The plan of one cell from formulas."""
    from envace_jax.build import model_spec
    from envace_jax.cli import load_config
    from envace_jax.planning.chips import parse_slice
    from envace_jax.planning.report import make_plan

    # What a plan does not depend on (files, addresses) is left out: it need not be there.
    skip = ("data.path", "rewards.", "rollout.simulator", "model.path")
    config, *changed = size.gpu if gpu else (size.config,)
    values = [o for o in options(size, arm) if not o.startswith(skip)] + changed
    cfg = load_config(str(ROOT / config), [f"--config.{value}" for value in values])
    slice_ = parse_slice(cfg.plan.topology)
    return make_plan(cfg, model_spec(cfg), slice_, [], name=arm.name, learners=1, sets=1)


def page(prices: dict[str, float]) -> list[str]:
    """The lines between the marks."""
    lines = ["## Results", ""]
    head = ["size", "arm", "set against"]
    for _, title in BENCHMARKS:
        head += [f"{title}, published", "ours"]
    lines += _table(
        head,
        [
            [size.name, f"`{arm.name}`", arm.against]
            + [cell for name, _ in BENCHMARKS for cell in (published(name, size, arm), "")]
            for size in SIZES
            for arm in ARMS
        ],
    )
    lines += ["", "Empty cells: not run.", "", "## What a cell would take", ""]
    rows = []
    for size in SIZES:
        for arm in ARMS:
            for gpu in (False, True):
                plan = planned(size, arm, gpu)
                hours = 470 * plan.likely_seconds * plan.slice.size / 3600
                chip = plan.slice.chip.name
                rows.append(
                    [
                        size.name,
                        f"`{arm.name}`",
                        plan.slice.name,
                        f"{max(plan.phases.values()) / GIB:.1f} of {plan.hbm / GIB:.1f}",
                        "yes" if plan.fits else "**no**",
                        f"{plan.train_flops:.2e}",
                        f"{plan.likely_seconds:.0f}",
                        f"{hours:,.0f}",
                        f"{hours * prices[chip]:,.0f}",
                    ]
                )
    head = ["size", "arm", "slice", "peak GiB a chip", "fits", "model FLOPs a step", "likely s a step"]
    lines += _table([*head, "chip-hours, 470 steps", "cost, $"], rows)
    said = ", ".join(f"{chip} {price:g}" for chip, price in prices.items())
    lines += [
        "",
        f"By formulas, every trajectory at its limits (docs/plan.md says how); prices assumed, $ a chip-hour: {said}. "
        "An arm without REHEARSE has half the ledgers. The judge, the outside simulator and the evaluation are not in "
        "these figures.",
        "",
        "## Commands",
        "",
    ]
    for size in SIZES:
        for arm in ARMS:
            lines += [f"{size.name}, `{arm.name}`: on a TPU pod slice, or on GPUs", "", "```"]
            lines += [*commands(size, arm), "```", ""]
    return lines


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tpu_price", type=float, default=4.2, help="assumed price of one v5p chip for an hour")
    parser.add_argument("--gpu_price", type=float, default=3.0, help=f"the same of one {GPU}")
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    text = args.page.read_text()
    before, _, rest = text.partition(BEGIN)
    lines = page({"v5p": args.tpu_price, GPU: args.gpu_price})
    args.page.write_text("\n".join([before + BEGIN, *lines, END]) + rest.partition(END)[2])


if __name__ == "__main__":
    main()
