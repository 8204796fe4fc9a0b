"""The programs that were compiled for docs/plan.md: what must hold of each, read from benchmarks/plan.json."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from envace_jax import cli
from envace_jax.planning.chips import parse_slice
from envace_jax.planning.command import assemble
from envace_jax.planning.formulas import kv_bytes
from envace_jax.planning.hlo import by_axis
from envace_jax.planning.report import gib, lines

ROOT = Path(__file__).parents[2]
KEPT = json.loads((ROOT / "benchmarks/plan.json").read_text())

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def table():
    spec = importlib.util.spec_from_file_location("plan_table", ROOT / "benchmarks/plan_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", sorted(KEPT))
def test_kept_programs(name, table):
    cfg = cli.load_config(str(ROOT / f"configs/{name}.py"))
    slice_ = parse_slice(cfg.plan.topology)
    programs = {n: table.program(p) for n, p in KEPT[name].items()}
    plan = assemble(cfg, slice_, name, list(programs.values()))
    # Measured when they were compiled, and kept: five minutes each, on a machine of two cores.
    assert all(p.fits and 0 < p.seconds <= 300 for p in programs.values())
    text = lines(plan)
    for n, p in programs.items():
        (line,) = (line for line in text if line.startswith(f"program {n}: compiled in {p.seconds:.0f} s"))
        assert f"arguments {gib(p.arguments)}, temporaries {gib(p.temporaries)}" in line
        at = text.index(line) + 1
        moved = [line for line in text[at : at + len(by_axis(p.collectives))] if "received a call" in line]
        assert len(moved) == len(by_axis(p.collectives))
    assert ("FROM FORMULAS" in "".join(text)) == (not programs) and text[-1] == "it fits"
    engine_rows = cfg.rollout.slots * (20_000 + cfg.rollout.chunk)
    cache = kv_bytes(plan.spec) * engine_rows / cfg.plan.rollout_tensor
    for n in programs.keys() & {"decode", "prefill"}:
        assert programs[n].aliased >= cache  # the donated cache is the returned one
    if "decode" in programs:
        assert programs["decode"].temporaries <= 0.02 * cache
        assert plan.spec.n_layers in programs["decode"].while_trips
    if "update" in programs:
        update = programs["update"]
        assert update.aliased >= 0.99 * (plan.resident.master + plan.resident.moments)  # updated in place
        assert update.while_trips.count(plan.spec.n_layers) >= 2  # layers are scanned, forward and backward
    if len(programs) == 3:
        estimate = assemble(cfg, slice_, name, [])
        for phase, size in plan.phases.items():  # what the formulas say where nothing can be compiled
            assert estimate.phases[phase] == pytest.approx(size, rel=0.1), phase
        moved = [p.seconds["train collectives"] for p in (estimate, plan)]
        assert moved[0] == pytest.approx(moved[1], rel=0.4)


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e"])
@pytest.mark.parametrize("size", ["1p7b", "8b", "30b_a3b"])
def test_every_size_was_compiled_for_every_chip_and_fits(size, chip, table):
    name = f"qwen3_{size}_{chip}"
    cfg = cli.load_config(str(ROOT / f"configs/{name}.py"))
    current = [table.program(p) for p in KEPT[name].values() if p["configuration"] == table.digest(cfg, p["name"])]
    assert len(current) == 3
    assert assemble(cfg, parse_slice(cfg.plan.topology), name, current).fits


def test_a_change_that_matters_makes_a_kept_program_stale(table):
    cfg = cli.load_config(str(ROOT / "configs/qwen3_8b_v5p.py"))
    before = {name: table.digest(cfg, name) for name in ("update", "decode")}
    cfg.rollout.slots += 1
    cfg.plan.chip_hour, cfg.data.path, cfg.rewards.judge, cfg.evaluation.every = 99.0, "elsewhere", "rules", 3
    assert table.digest(cfg, "update") == before["update"] and table.digest(cfg, "decode") != before["decode"]
    cfg.rollout.slots -= 1
    cfg.learning.rows_per_microbatch += 1
    assert table.digest(cfg, "update") != before["update"] and table.digest(cfg, "decode") == before["decode"]
    cfg.model.size = "1.7b"
    assert table.digest(cfg, "decode") != before["decode"]
