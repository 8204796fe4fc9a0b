"""The `plan` command: does this run fit that slice, and what will it cost."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from envace_jax.config import UserError
from envace_jax.planning.chips import Slice, parse_slice
from envace_jax.planning.programs import prepare_environment

PROGRAMS = ("decode", "prefill", "update")
"""What a plan compiles, the quickest first."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--search", action="store_true", help="also find the largest microbatch that fits (compiles)")
    parser.add_argument("--formulas", action="store_true", help="compile nothing: estimate from formulas alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")


def run_plan(cfg: ConfigDict, args: argparse.Namespace) -> int:
    """Prints the report; exit status 1 when the run does not fit."""
    prepare_environment()  # before anything imports jax
    from envace_jax.planning.report import lines, record

    slice_ = parse_slice(cfg.plan.topology)
    name = Path(args.config).stem if args.config else cfg.model.size
    compiling = slice_.chip.kind == "tpu" and not args.formulas
    plan = plan_for(cfg, slice_, name, compiling)
    print("\n".join(lines(plan)))
    figures: dict[str, Any] = record(plan)
    if args.search:
        largest = search(cfg, slice_, name, plan.programs)
        figures["largest_rows_per_microbatch"] = largest
        print(f"largest learning.rows_per_microbatch that fits: {largest or 'none'}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    return 0 if plan.fits else 1


def plan_for(cfg: ConfigDict, slice_: Slice, name: str, compiling: bool) -> Any:
    """Compiles what the platform allows and puts the plan together."""
    check_layout(cfg, slice_)
    return assemble(cfg, slice_, name, [compile_one(cfg, slice_, p) for p in PROGRAMS] if compiling else [])


def compile_one(cfg: ConfigDict, slice_: Slice, program: str) -> Any:
    """One of PROGRAMS, compiled for the slice (`programs.Program`)."""
    from envace_jax.build import model_spec
    from envace_jax.planning import programs as compile_
    from envace_jax.planning.report import microbatches_of

    spec = model_spec(cfg)
    if program == "update":
        mesh = compile_.learner_mesh(cfg, compile_.tpu_devices(slice_))
        return compile_.update_program(cfg, spec, mesh, microbatches_of(cfg))
    sampler = compile_.sampler_mesh(cfg, slice_)
    return {"decode": compile_.decode_program, "prefill": compile_.prefill_program}[program](cfg, spec, sampler)


def assemble(cfg: ConfigDict, slice_: Slice, name: str, programs: Sequence[Any]) -> Any:
    """The plan (`report.Plan`) from compiled programs; what is missing comes from formulas."""
    from envace_jax.build import model_spec
    from envace_jax.learning.arms import make_arm
    from envace_jax.planning.report import make_plan

    arm = make_arm(cfg)
    learners = len(arm.learners)
    sets = learners + len(arm.frozen)
    return make_plan(cfg, model_spec(cfg), slice_, programs, name=name, learners=learners, sets=sets)


def check_layout(cfg: ConfigDict, slice_: Slice) -> None:
    """That the mesh, with what is set apart for a judge, has the slice's size, and that both models are cut evenly."""
    from envace_jax.build import check_judge_cut, judge_config, judge_devices, model_spec
    from envace_jax.model.sharding import MESH_AXES

    check_heads(cfg, model_spec(cfg))
    sizes = {axis: int(cfg.mesh[axis]) for axis in MESH_AXES}
    count = judge_devices(cfg)
    apart = slice_.apart(count)
    if math.prod(sizes.values()) != slice_.size - apart:
        beside = f", {apart} of them for the judge (rewards.policy.devices={count} a process)" if apart else ""
        raise UserError(
            f"mesh {sizes}: {math.prod(sizes.values())} places, plan.topology has {slice_.size} chips{beside}"
        )
    if count:
        check_judge_cut(cfg, model_spec(judge_config(cfg)))


def check_heads(cfg: ConfigDict, spec: Any) -> None:
    """That the meshes cut heads, experts and vocabulary evenly; `UserError` names the key."""
    for prefix, section, name in (("mesh.", cfg.mesh, ""), ("plan.rollout_", cfg.plan, "rollout_")):
        tensor, expert = section[f"{name}tensor"], section[f"{name}expert"]
        for what, n in (("key/value heads", spec.n_kv_heads), ("vocabulary", spec.vocab_size)):
            if n % tensor:
                raise UserError(f"{prefix}tensor={tensor}: does not divide the model's {n} {what}")
        if spec.is_moe and spec.n_experts % (tensor * expert):  # a sampler cuts experts over both
            raise UserError(
                f"{prefix}tensor={tensor} times {prefix}expert={expert}: does not divide the model's {spec.n_experts} "
                "experts, of which a sampler gives each chip whole ones"
            )


def search(cfg: ConfigDict, slice_: Slice, name: str, programs: Sequence[Any]) -> int:
    """The largest power of two for `learning.rows_per_microbatch` with which every phase fits (0: none).

    programs: those of the plan, of which the update is compiled anew for each size; none: formulas alone.
    """
    others = [p for p in programs if p.name != "update"]
    best, rows = 0, 1
    while True:
        trial = cfg.copy_and_resolve_references()
        trial.learning.rows_per_microbatch = rows
        plan = assemble(trial, slice_, name, [*others, compile_one(trial, slice_, "update")] if programs else [])
        if not plan.fits:
            return best
        best = rows
        if plan.microbatches == 1:  # the whole step in one: more rows would be empty
            return best
        rows *= 2
