"""Compiles the programs of every configuration of record and writes the table of docs/plan.md.

    python benchmarks/plan_table.py [--missing] [--table] [configs/qwen3_8b_v5p.py ...]

Each program is compiled in a process of its own (libtpu from the `tpu` extra) and kept in benchmarks/plan.json as soon
as it is done, with a digest of the configuration: `--missing` goes on where an earlier call ended and compiles what the
file lacks or what was compiled for other settings. `--table` compiles nothing. The figures of the table are computed
anew from the kept programs; a row without some of them says that it is from formulas.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA, PAGE = ROOT / "benchmarks/plan.json", ROOT / "docs/plan.md"
BEGIN, END = "<!-- table: made by benchmarks/plan_table.py -->", "<!-- end of table -->"
GIB = 1 << 30


ROLLOUT = ("rollout.slots", "rollout.live_episodes", "rollout.chunk", "rollout.prefill_chunk", "plan.rollout")
TASKS = ("data.", "rewards.", "evaluation.")  # what is played and how it is paid: no program's business
TRAINING = ("learning.", "mesh.", "model.remat", "model.attention", "model.moe_exchange", "model.moe_chunk")


def digest(cfg: Any, name: str) -> str:
    """Of what a configuration changes of the defaults, as far as the program can depend on it."""
    from envace_jax.config import default_config, flat

    usual = dict(flat(default_config()))
    without = ("plan.chip_hour", *TASKS, *(ROLLOUT if name == "update" else TRAINING))
    text = json.dumps([(k, str(v)) for k, v in sorted(flat(cfg)) if usual.get(k) != v and not k.startswith(without)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compile_here(file: Path, name: str) -> dict[str, Any]:
    """One program's figures as JSON data; collectives are added up by kind and axes."""
    from envace_jax.planning.programs import prepare_environment

    prepare_environment()
    from envace_jax.cli import load_config
    from envace_jax.planning.chips import parse_slice
    from envace_jax.planning.command import check_layout, compile_one

    cfg = load_config(str(file))
    slice_ = parse_slice(cfg.plan.topology)
    check_layout(cfg, slice_)
    program = compile_one(cfg, slice_, name)
    totals: dict[tuple[str, tuple[str, ...]], float] = {}
    for c in program.collectives:
        totals[c.kind, c.axes] = totals.get((c.kind, c.axes), 0.0) + c.total
    added = [{"kind": kind, "axes": axes, "received": n, "times": 1} for (kind, axes), n in sorted(totals.items())]
    return asdict(program) | {"collectives": added, "configuration": digest(cfg, name)}


def compile_apart(file: Path, name: str) -> dict[str, Any]:
    """`compile_here` in a process that ends afterwards, and with it what the compiler holds."""
    done = subprocess.run(
        [sys.executable, __file__, "--compile", str(file), name], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{file}, {name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def program(figures: dict[str, Any]) -> Any:
    """The kept program as `planning.programs.Program`."""
    from envace_jax.planning.hlo import Collective
    from envace_jax.planning.programs import Program

    own = {key: value for key, value in figures.items() if key != "configuration"}
    found = tuple(Collective(c["kind"], tuple(c["axes"]), c["received"], c["times"]) for c in own["collectives"])
    return Program(**own | {"collectives": found, "while_trips": tuple(own["while_trips"])})


def mesh(sizes: dict[str, int]) -> str:
    return " × ".join(f"{axis} {n}" for axis, n in sizes.items() if n > 1) or "one chip"


def compiled(found: Any) -> str:
    if found is None:
        return "not run"
    if not found.fits:
        return "refused"
    return f"{found.seconds:.0f} ({found.cpu_seconds:.0f}), {found.temporaries / GIB:.2f}, {found.code / 2**20:.0f}"


def row(plan: Any, kept: int) -> str:
    """One line of the table."""
    from envace_jax.planning.hlo import by_axis

    programs = {p.name: p for p in plan.programs}
    update = programs.get("update")
    moved = {} if update is None else {axis: n for axis, n in by_axis(update.collectives).items() if n > GIB}
    cells = (
        plan.name.removeprefix("qwen3_"),
        f"{plan.slice.name} ({plan.slice.size})",
        mesh(plan.mesh),
        mesh(plan.rollout_mesh) + (" †" if plan.caution else ""),
        " / ".join(f"{plan.phases[phase] / GIB:.1f}" for phase in ("rollout", "update", "hand-over")),
        f"{plan.hbm / GIB:.1f}",
        ("yes" if plan.fits else "**no**") + ("" if kept == 3 else ", by formula"),
        *(compiled(programs.get(name)) for name in ("update", "prefill", "decode")),
        f"{plan.model_flops:.2e}",
        ", ".join(f"{axis} {n / GIB:,.0f}" for axis, n in moved.items()) or "–",
        f"{plan.seconds['train']:.0f} + {plan.seconds['rollout']:.0f}",
        f"{plan.likely_seconds:.0f}",
        f"{470 * plan.likely_seconds * plan.slice.size / 3600:,.0f}",
        f"{plan.price(plan.likely_seconds):,.0f}" if plan.chip_hour else "–",
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
    "update",
    "prefill",
    "decode",
    "model FLOPs a step",
    "GiB a chip receives in an update",
    "roofline s: train + rollout",
    "likely s a step",
    "chip-hours for 470 steps",
    "dollars for 470 steps",
)


def write_table(results: dict[str, Any], files: list[Path]) -> None:
    """The table of docs/plan.md from the kept programs that were compiled for the configurations as they are."""
    from envace_jax.cli import load_config
    from envace_jax.planning.chips import parse_slice
    from envace_jax.planning.command import assemble, check_layout

    rows = []
    for file in files:
        cfg = load_config(str(file))
        slice_ = parse_slice(cfg.plan.topology)
        check_layout(cfg, slice_)
        kept = [p for p in results.get(file.stem, {}).values() if p["configuration"] == digest(cfg, p["name"])]
        plan = assemble(cfg, slice_, file.stem, [program(p) for p in kept])
        rows.append((plan.spec.n_params(), plan.slice.name, row(plan, len(kept))))
    table = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD), *(line for *_, line in sorted(rows))]
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text("\n".join([before + BEGIN, *table, END]) + rest.partition(END)[2])
    print("\n".join(table))


def main() -> None:
    if sys.argv[1:2] == ["--compile"]:
        print(json.dumps(compile_here(Path(sys.argv[2]), sys.argv[3])))
        return
    from envace_jax.cli import load_config
    from envace_jax.planning.chips import parse_slice
    from envace_jax.planning.command import PROGRAMS

    options = {a for a in sys.argv[1:] if a.startswith("--")}
    if options - {"--missing", "--table"}:
        raise SystemExit(__doc__)
    every = sorted((ROOT / "configs").glob("qwen3_*.py"))
    results = json.loads(DATA.read_text()) if DATA.exists() else {}
    for file in [] if "--table" in options else [Path(a) for a in sys.argv[1:] if not a.startswith("--")] or every:
        cfg = load_config(str(file))
        if parse_slice(cfg.plan.topology).chip.kind != "tpu":
            continue
        for name in PROGRAMS:
            old = results.get(file.stem, {}).get(name)
            if "--missing" in options and old and old["configuration"] == digest(cfg, name):
                continue
            found = compile_apart(file, name)
            results.setdefault(file.stem, {})[name] = found
            DATA.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
            print(f"{file.stem} {name}: {compiled(program(found))} {found['message']}", flush=True)
    write_table(results, every)


if __name__ == "__main__":
    main()
