"""Plans every configuration of record and writes the table of docs/plan.md.

    python benchmarks/plan_table.py [--formulas] [configs/qwen3_8b_v5p.py ...]

Each plan runs in a process of its own (libtpu from the `tpu` extra). Results are kept in benchmarks/plan.json by name,
so that single configurations can be done again. `--formulas` compiles nothing and fills in what was never compiled; the
table says of those rows that the compiler was not run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA, PAGE = ROOT / "benchmarks/plan.json", ROOT / "docs/plan.md"
BEGIN, END = "<!-- table: made by benchmarks/plan_table.py -->", "<!-- end of table -->"
GIB = 1 << 30


def estimate(file: Path) -> dict:
    """The figures of one configuration from formulas, in this process."""
    from envace_jax.cli import load_config
    from envace_jax.planning.chips import parse_slice
    from envace_jax.planning.command import plan_for
    from envace_jax.planning.programs import prepare_environment
    from envace_jax.planning.report import record

    prepare_environment()
    cfg = load_config(str(file))
    return record(plan_for(cfg, parse_slice(cfg.plan.topology), file.stem, compiling=False))


def plan(file: Path) -> dict:
    """The figures of one configuration, its programs compiled."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "envace_jax", "plan", "--config", str(file), "--json", str(out)]
        started = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode not in (0, 1) or not out.exists():
            raise SystemExit(f"{file}: {done.stderr[-2000:]}")
        return json.loads(out.read_text()) | {"plan_seconds": time.monotonic() - started}


def mesh(sizes: dict[str, int]) -> str:
    return " × ".join(f"{axis} {n}" for axis, n in sizes.items() if n > 1) or "one chip"


def row(figures: dict) -> str:
    """One line of the table."""
    peak = {phase: size / GIB for phase, size in figures["phases"].items()}
    programs = {p["name"]: p for p in figures["programs"]}

    def compiled(name: str) -> str:
        p = programs.get(name)
        if p is None:
            return "not run"
        if p["needed"]:
            return "refused"
        return f"{p['seconds']:.0f} s ({p['cpu_seconds']:.0f} of CPU), {p['code'] / 2**20:.0f} MiB"

    cells = (
        figures["name"].removeprefix("qwen3_"),
        f"{figures['topology']} ({figures['chips']})",
        mesh(figures["mesh"]),
        mesh(figures["rollout_mesh"]),
        " / ".join(f"{peak[phase]:.1f}" for phase in ("rollout", "update", "hand-over")),
        f"{figures['hbm'] / GIB:.1f}",
        ("yes" if figures["fits"] else "**no**") + ("" if figures["compiled"] else ", by formula"),
        compiled("update"),
        compiled("decode"),
        f"{figures['train_flops']:.2e}",
        f"{figures['seconds']['train']:.0f} + {figures['seconds']['rollout']:.0f}",
        f"{figures['likely_seconds']:.0f}",
        f"{470 * figures['likely_seconds'] * figures['chips'] / 3600:,.0f}",
    )
    return "| " + " | ".join(cells) + " |"


HEAD = (
    "configuration",
    "slice (chips)",
    "learner mesh",
    "one sampler",
    "peak GiB: rollout / update / hand-over",
    "HBM GiB",
    "fits",
    "update compiled, program",
    "decode compiled, program",
    "model FLOPs a step",
    "roofline s: train + rollout",
    "likely s a step",
    "chip-hours for 470 steps",
)


def main() -> None:
    options = {a for a in sys.argv[1:] if a.startswith("--")}
    if options - {"--formulas"}:
        raise SystemExit(__doc__)
    named = [Path(a) for a in sys.argv[1:] if not a.startswith("--")]
    results = json.loads(DATA.read_text()) if DATA.exists() else {}
    for file in named or sorted((ROOT / "configs").glob("qwen3_*.py")):
        if not options:
            results[file.stem] = plan(file)
        elif not results.get(file.stem, {}).get("compiled"):
            results[file.stem] = estimate(file)
        DATA.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        print(row(results[file.stem]), flush=True)
    order = sorted(results.values(), key=lambda f: (f["parameters"], f["topology"]))
    table = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD), *map(row, order)]
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text("\n".join([before + BEGIN, *table, END]) + rest.partition(END)[2])


if __name__ == "__main__":
    main()
