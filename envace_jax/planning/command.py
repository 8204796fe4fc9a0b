"""The `plan` command: does this run fit that slice, and what will it cost."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from envace_jax.config import UserError
from envace_jax.planning.chips import Slice, parse_slice
from envace_jax.planning.programs import prepare_environment


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
        largest = search(cfg, slice_, name, compiling)
        figures["largest_rows_per_microbatch"] = largest
        print(f"largest learning.rows_per_microbatch that fits: {largest or 'none'}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    return 0 if plan.fits else 1


def plan_for(cfg: ConfigDict, slice_: Slice, name: str, compiling: bool) -> Any:
    """Compiles what the platform allows and puts the plan together."""
    import math

    from envace_jax.build import model_spec, rules_for
    from envace_jax.learning.arms import make_arm
    from envace_jax.model.sharding import MESH_AXES, axes_of
    from envace_jax.planning import programs as compile_
    from envace_jax.planning.report import make_plan, work_of

    spec = model_spec(cfg)
    check_heads(cfg, spec)
    sizes = {axis: int(cfg.mesh[axis]) for axis in MESH_AXES}
    if math.prod(sizes.values()) != slice_.size:
        raise UserError(f"mesh {sizes}: {math.prod(sizes.values())} places, plan.topology has {slice_.size} chips")
    arm, found = make_arm(cfg), []
    if compiling:
        rows = cfg.learning.rows_per_microbatch * math.prod(sizes[a] for a in axes_of(rules_for(cfg).batch))
        work = work_of(cfg)
        microbatches = math.ceil(work.tokens / (rows * cfg.learning.row_tokens))
        mesh = compile_.learner_mesh(cfg, compile_.tpu_devices(slice_))
        sampler = compile_.sampler_mesh(cfg, slice_)
        found = [
            compile_.update_program(cfg, spec, mesh, microbatches),
            compile_.decode_program(cfg, spec, sampler),
            compile_.prefill_program(cfg, spec, sampler),
        ]
    learners = len(arm.learners)
    return make_plan(cfg, spec, slice_, found, name=name, learners=learners, sets=learners + len(arm.frozen))


def check_heads(cfg: ConfigDict, spec: Any) -> None:
    """That the meshes cut heads, experts and vocabulary evenly; `UserError` names the key."""
    for key, tensor in (("mesh.tensor", cfg.mesh.tensor), ("plan.rollout_tensor", cfg.plan.rollout_tensor)):
        for what, n in (("key/value heads", spec.n_kv_heads), ("vocabulary", spec.vocab_size)):
            if n % tensor:
                raise UserError(f"{key}={tensor}: does not divide the model's {n} {what}")
    for key, expert in (("mesh.expert", cfg.mesh.expert), ("plan.rollout_expert", cfg.plan.rollout_expert)):
        if expert > 1 and spec.n_experts % expert:
            raise UserError(f"{key}={expert}: does not divide the model's {spec.n_experts} experts")


def search(cfg: ConfigDict, slice_: Slice, name: str, compiling: bool) -> int:
    """The largest power of two for `learning.rows_per_microbatch` with which every phase fits (0: none)."""
    best, rows = 0, 1
    while True:
        trial = cfg.copy_and_resolve_references()
        trial.learning.rows_per_microbatch = rows
        plan = plan_for(trial, slice_, name, compiling)
        if not plan.fits:
            return best
        best = rows
        if plan.microbatches == 1:  # the whole step in one: more rows would be empty
            return best
        rows *= 2
