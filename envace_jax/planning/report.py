"""Whether a run fits a slice, what it computes and moves, how long it takes at best, and what that costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from envace_jax.model.sharding import MESH_AXES, PARAM_AXES, SAMPLER, Rules, axes_of
from envace_jax.model.spec import Qwen3Spec
from envace_jax.planning import formulas
from envace_jax.planning.chips import GIB, Slice
from envace_jax.planning.hlo import by_axis
from envace_jax.planning.programs import Program

STEPS = 470
"""Updates of the published run."""
REACHED = {"train": 0.40, "decode": 0.50}
"""Share of the roofline that good implementations reach (dense training, decoding)."""


def adapters_per_chip(spec: Qwen3Spec, cfg: ConfigDict, rules: Rules, mesh: Mapping[str, int]) -> int:
    """Adapter parameters that one chip holds (0 where every parameter is trained)."""
    import jax

    from envace_jax.build import lora_config
    from envace_jax.model.lora import init_lora

    config, total = lora_config(cfg), 0
    if config is None:
        return 0
    shapes = jax.eval_shape(lambda: init_lora(spec, config, jax.random.key(0)))
    for name, pair in shapes.items():
        for half, leaf in pair.items():
            total += _cut(leaf.shape, PARAM_AXES[f"lora/{name}/{half}"], rules, mesh)
    return total


def _cut(shape: Sequence[int], logical: Sequence[str | None], rules: Rules, mesh: Mapping[str, int]) -> int:
    axes = [axes_of(getattr(rules, name)) if name else () for name in logical]
    return math.prod(-(-n // math.prod(mesh[a] for a in cut)) for n, cut in zip(shape, axes))


def weights_per_chip(spec: Qwen3Spec, rules: Rules, mesh: Mapping[str, int]) -> int:
    """Parameters that one chip holds, by the rules."""
    from envace_jax.model.name_map import axis_sizes, entries

    sizes = axis_sizes(spec)
    return sum(_cut(e.stack_shape(sizes), PARAM_AXES["/".join(e.ours)], rules, mesh) for e in entries(spec))


def rows_bytes(cfg: ConfigDict, spec: Qwen3Spec, mesh: Mapping[str, int]) -> tuple[float, float]:
    """Keys and values of an engine's lanes and of its shelf on one chip."""
    from envace_jax.build import engine_config

    engine = engine_config(cfg)
    row = (engine.max_length + engine.chunk) * formulas.kv_bytes(spec) / mesh["tensor"]
    return engine.slots * row, engine.shelf * row


def judge_bytes(cfg: ConfigDict, mesh: Mapping[str, int]) -> float:
    """What a policy that judges holds on one chip of these axes: its own weights, keys and values."""
    from envace_jax.build import judge_config, model_spec

    own = judge_config(cfg)
    spec = model_spec(own)
    return 2 * weights_per_chip(spec, SAMPLER, mesh) + sum(rows_bytes(own, spec, mesh))


@dataclasses.dataclass(frozen=True)
class Work:
    """One step of the published batch: tokens through the learner, pairs attended, tokens sampled and prompted."""

    rows: int
    row: int
    sampled: float
    fill: float

    @property
    def tokens(self) -> float:
        return self.fill * self.rows * self.row

    @property
    def pairs(self) -> float:
        return self.fill * self.rows * formulas.causal_pairs(self.row)

    @property
    def predictions(self) -> float:
        return self.fill * self.rows * self.sampled


def work_of(cfg: ConfigDict) -> Work:
    """Every trajectory with one full ACT and one full REHEARSE ledger, times `plan.fill`."""
    r, trajectories = cfg.rollout, cfg.learning.prompts_per_step * cfg.learning.group_size
    longest = max(r.max_act_tokens, r.max_rehearse_tokens)
    return Work(2 * trajectories, r.max_input_tokens + longest, longest, cfg.plan.fill)


def scorings_of(cfg: ConfigDict) -> int:
    """Forward passes over a step's rows before its updates: under the reference, and under the parameters themselves
    where a batch gets several updates (old log-probabilities)."""
    c = cfg.learning
    return int(c.kl_coef > 0) + int(c.updates_per_batch * c.epochs > 1)


def microbatches_of(cfg: ConfigDict) -> int:
    """Microbatches of that work, each full."""
    from envace_jax.build import rules_for

    work, shards = work_of(cfg), math.prod(int(cfg.mesh[a]) for a in axes_of(rules_for(cfg).batch))
    return max(1, math.ceil(work.tokens / (cfg.learning.rows_per_microbatch * shards * cfg.learning.row_tokens)))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything the report shows. Bytes are those of one chip."""

    name: str
    slice: Slice
    spec: Qwen3Spec
    mesh: dict[str, int]
    rollout_mesh: dict[str, int]
    rules: Rules
    work: Work
    microbatches: int
    rows_per_microbatch: int
    resident: formulas.Resident
    shelf: float
    judge_chips: int
    phases: dict[str, float]
    programs: tuple[Program, ...]
    train_flops: float
    score_flops: float
    recompute_flops: float
    scorings: int
    seconds: dict[str, float]
    tokens_per_second: float
    free_tokens: int
    compiled: bool
    chip_hour: float

    @property
    def hbm(self) -> int:
        return self.slice.chip.hbm

    @property
    def fits(self) -> bool:
        return all(p.fits for p in self.programs) and max(self.phases.values()) <= self.hbm

    @property
    def caution(self) -> str:
        """Why `train` would not make its samplers as they are planned here; empty where it would."""
        planned = {axis: self.rollout_mesh[axis] for axis in ("tensor", "expert")}
        trained = {axis: self.mesh[axis] for axis in planned}
        if planned != trained:
            return (
                f"an engine cuts weights over mesh.tensor={trained['tensor']} and mesh.expert={trained['expert']}, not "
                f"over plan.rollout_tensor={planned['tensor']} and plan.rollout_expert={planned['expert']}"
            )
        chips, own = math.prod(planned.values()), self.slice.host - self.judge_chips
        if own % chips:
            return f"a sampler of {chips} chips: an engine lies in one process, which has {own} here"
        return ""

    @property
    def model_flops(self) -> float:
        """Of a step's training: updates and scoring, nothing that is computed again."""
        return self.train_flops + self.score_flops

    @property
    def step_seconds(self) -> float:
        """A step at the roofline."""
        return self.seconds["train"] + self.seconds["rollout"]

    @property
    def likely_seconds(self) -> float:
        """A step at the shares of the roofline that are usually reached."""
        return self.seconds["train"] / REACHED["train"] + self.seconds["rollout"] / REACHED["decode"]

    def price(self, seconds: float) -> float:
        return STEPS * seconds * self.slice.size * self.chip_hour / 3600


def _program(programs: Sequence[Program], name: str) -> Program | None:
    return next((p for p in programs if p.name == name), None)


def make_plan(
    cfg: ConfigDict, spec: Qwen3Spec, slice_: Slice, programs: Sequence[Program], *, name: str, learners: int, sets: int
) -> Plan:
    """Puts compiled programs and formulas together.

    programs: `update`, `decode`, `prefill` where they could be compiled; what is missing comes from formulas.
    learners: trained parameter sets. sets: parameter sets that the sampler holds.
    """
    from envace_jax.build import engine_config, judge_devices, rules_for

    chip, rules = slice_.chip, rules_for(cfg)
    mesh = {axis: int(cfg.mesh[axis]) for axis in MESH_AXES}
    rollout_mesh = {"replica": 1, "fsdp": 1, "tensor": cfg.plan.rollout_tensor, "expert": cfg.plan.rollout_expert}
    share, copy_share = weights_per_chip(spec, rules, mesh), weights_per_chip(spec, SAMPLER, rollout_mesh)
    engine, work = engine_config(cfg), work_of(cfg)
    length = engine.max_length + engine.chunk
    kv_token = formulas.kv_bytes(spec) / rollout_mesh["tensor"]
    lanes, shelf = (sets * n for n in rows_bytes(cfg, spec, rollout_mesh))
    adapters = adapters_per_chip(spec, cfg, rules, mesh)
    trained, apart = adapters or share, judge_devices(cfg)
    resident = formulas.Resident(
        # With adapters the weights themselves stay, in the compute dtype.
        master=(4 * trained + (2 * share if adapters else 0)) * learners,
        moments=8 * trained * learners,
        reference=2 * share * learners if cfg.learning.kl_coef > 0 else 0,
        compute_copy=2 * copy_share * sets,
        kv=lanes + shelf,
        judge=judge_bytes(cfg, rollout_mesh) if cfg.rewards.judge == "policy" and not apart else 0,
    )
    shards = math.prod(mesh[a] for a in axes_of(rules.batch))
    rows = cfg.learning.rows_per_microbatch * shards
    microbatches = microbatches_of(cfg)
    update, decode, prefill = (_program(programs, n) for n in ("update", "decode", "prefill"))
    state = resident.master + resident.moments
    others = resident.total - state
    if update is None:
        own = formulas.update_bytes(trained) + formulas.activation_bytes(
            spec,
            cfg.learning.rows_per_microbatch * cfg.learning.row_tokens,
            max(1, cfg.learning.logprob_chunk // shards) * cfg.learning.rows_per_microbatch,
            cfg.model.remat,
            mesh["tensor"],
            math.prod(mesh[a] for a in axes_of(rules.sequence)),
            mesh["expert"],
            cfg.model.moe_chunk,
        )
        in_update = state + own
    else:
        in_update = update.needed or update.arguments + update.own + state * (1 - 1 / learners)
    sampling = max(
        decode.own if decode else 0.02 * lanes,
        prefill.own if prefill else _prefill_bytes(engine, spec, rollout_mesh),
    )
    refused = max([p.needed for p in (decode, prefill) if p is not None], default=0)
    phases = {
        "rollout": resident.total + sampling if not refused else refused + state + resident.reference + shelf,
        "update": others + in_update,
        "hand-over": resident.total + 2 * copy_share,
    }
    if apart:
        phases["judge"] = _judge_alone(cfg, apart)
    flops, again, scoring, seconds = _training(cfg, spec, slice_, rules, mesh, update, bool(adapters))
    # A process has one engine, which repeats the same work on chips that its axes leave over.
    samplers = slice_.size / max(slice_.host, rollout_mesh["tensor"] * rollout_mesh["expert"])
    trajectories = cfg.learning.prompts_per_step * cfg.learning.group_size
    together = min(engine.slots, math.ceil(trajectories / samplers))
    read = 2 * copy_share * formulas.read_weights(spec, together)
    iteration = formulas.decode_seconds(read, together * 0.5 * length * kv_token, chip.bandwidth)
    if decode:
        iteration += sum(c.total for c in decode.collectives) / engine.chunk / chip.links
    rate = samplers * together / iteration
    seconds["decode"] = work.predictions / rate
    prompts = work.tokens - work.predictions
    seconds["prefill"] = 2 * formulas.active_weights(spec) * prompts / (math.prod(mesh.values()) * chip.flops)
    seconds["rollout"] = seconds["decode"] + seconds["prefill"]
    free = max(0.0, chip.hbm - max(v for name, v in phases.items() if name != "judge"))
    return Plan(
        name=name,
        slice=slice_,
        spec=spec,
        mesh=mesh,
        rollout_mesh=rollout_mesh,
        rules=rules,
        work=work,
        microbatches=microbatches,
        rows_per_microbatch=rows,
        resident=resident,
        shelf=shelf,
        judge_chips=apart,
        phases=phases,
        programs=tuple(programs),
        train_flops=flops,
        score_flops=scoring,
        recompute_flops=again,
        scorings=scorings_of(cfg),
        seconds=seconds,
        tokens_per_second=rate,
        free_tokens=int(free / kv_token * samplers),
        compiled=bool(programs),
        chip_hour=cfg.plan.chip_hour,
    )


def _judge_alone(cfg: ConfigDict, chips: int) -> float:
    """What one of a judge's own chips holds at its fullest, by formula."""
    from envace_jax.build import engine_config, judge_config, model_spec

    own, mesh = judge_config(cfg), {"replica": 1, "fsdp": 1, "tensor": chips, "expert": 1}
    spec = model_spec(own)
    lanes, _ = rows_bytes(own, spec, mesh)
    return judge_bytes(cfg, mesh) + max(0.02 * lanes, _prefill_bytes(engine_config(own), spec, mesh))


def _prefill_bytes(engine: Any, spec: Qwen3Spec, mesh: Mapping[str, int]) -> float:
    """Temporaries of the engine's largest prefill call, by formula."""
    from envace_jax.model.kv_cache import SCORE_BYTES

    shapes = engine.shapes()
    rows, piece = shapes.prefill[-1]
    return formulas.prefill_bytes(spec, rows, piece, shapes.lengths[-1], SCORE_BYTES, mesh["tensor"])


def _training(
    cfg: ConfigDict,
    spec: Qwen3Spec,
    slice_: Slice,
    rules: Rules,
    mesh: Mapping[str, int],
    update: Program | None,
    adapters: bool,
) -> tuple[float, float, float, dict[str, float]]:
    """FLOPs of a step's updates, of their recomputation and of scoring, and seconds at the roofline."""
    work, epochs = work_of(cfg), cfg.learning.epochs
    flops = epochs * formulas.train_flops(spec, work.tokens, work.pairs, work.predictions)
    if adapters:
        flops *= 2 / 3  # no gradients of the weights themselves
    again = epochs * formulas.recompute_flops(spec, work.tokens, work.pairs, work.predictions, cfg.model.remat)
    scoring = scorings_of(cfg) * formulas.forward_flops(spec, work.tokens, work.pairs, work.predictions)
    inside = mesh["tensor"] * mesh["expert"] <= slice_.host

    def moving(backward: bool) -> float:
        weights, hidden = _moved(cfg, spec, rules, mesh, microbatches_of(cfg), backward)
        return weights / slice_.links + hidden / (slice_.chip.links if inside else slice_.links)

    peak = math.prod(mesh.values()) * slice_.chip.flops
    once = sum(c.total for c in update.collectives) / slice_.links if update else moving(backward=True)
    seconds = {
        "train compute": (flops + again) / peak,
        "train collectives": epochs * once,
        "scoring": max(scoring / peak, scorings_of(cfg) * moving(backward=False)),
    }
    seconds["train"] = max(seconds["train compute"], seconds["train collectives"]) + seconds["scoring"]
    return flops, again, scoring, seconds


def _moved(
    cfg: ConfigDict, spec: Qwen3Spec, rules: Rules, mesh: Mapping[str, int], microbatches: int, backward: bool
) -> tuple[float, float]:
    """Bytes a chip receives in one pass over a step's rows, by formula: weights (gathered once a microbatch; with a
    backward pass once more, and gradients scattered), and hidden states over the tensor and expert axes."""
    n = math.prod(mesh[a] for a in axes_of(rules.embed))
    whole = weights_per_chip(spec, dataclasses.replace(rules, embed=None), mesh)
    tokens = cfg.learning.rows_per_microbatch * cfg.learning.row_tokens
    with_tensor = rules.sequence is not None and rules.sequence == rules.heads
    exchanged = formulas.exchanged_bytes(spec, tokens, mesh["tensor"], with_tensor, mesh["expert"], backward)
    return microbatches * (3 if backward else 1) * 2 * whole * (n - 1) / n, microbatches * exchanged


def gib(n: float) -> str:
    return f"{n / GIB:.2f} GiB"


def _rules_table(plan: Plan) -> list[str]:
    lines = ["sharding rules (logical axis -> mesh axes)"]
    for field in dataclasses.fields(plan.rules):
        pair = [getattr(rules, field.name) for rules in (plan.rules, SAMPLER)]
        learner, sampler = ("+".join(axes_of(axis)) or "-" for axis in pair)
        lines.append(f"  {field.name:<10} learner {learner:<22} sampler {sampler}")
    return lines


def lines(plan: Plan) -> list[str]:
    """The report as text."""
    chip, work, spec = plan.slice.chip, plan.work, plan.spec
    mesh = " x ".join(f"{axis} {n}" for axis, n in plan.mesh.items() if n > 1) or "one chip"
    sampler = " x ".join(f"{axis} {n}" for axis, n in plan.rollout_mesh.items() if n > 1) or "one chip"
    out = [
        f"plan {plan.name}: {spec.n_params() / 1e9:.2f}B parameters on {plan.slice.name} ({plan.slice.size} chips of "
        f"{gib(chip.hbm)}), learner {mesh}, each sampler {sampler}",
    ]
    if plan.caution:
        out.append(f"CAUTION: {plan.caution}")
    if not plan.compiled:
        why = "" if chip.kind == "tpu" else "; ahead-of-time compilation exists for TPU only"
        out.append(f"FROM FORMULAS: no program was compiled{why}")
    out += [
        f"step: {work.rows} ledgers of {work.row} tokens ({work.sampled:.0f} sampled), fill {work.fill:g}: "
        f"{work.tokens / 1e6:.2f}M tokens, {plan.microbatches} microbatches of {plan.rows_per_microbatch} rows",
        "",
        *_rules_table(plan),
        "",
        "resident on one chip",
    ]
    for field in dataclasses.fields(plan.resident):
        out.append(f"  {field.name.replace('_', ' '):<14}{gib(getattr(plan.resident, field.name)):>12}")
    out += ["", "peak by phase (everything resident included)"]
    for phase, size in plan.phases.items():
        verdict = "fits" if size <= plan.hbm else "DOES NOT FIT"
        out.append(f"  {phase:<14}{gib(size):>12}  {100 * size / plan.hbm:5.1f}%  {verdict}")
    for p in plan.programs:
        out.append("")
        if not p.fits:
            out.append(f"program {p.name}: refused after {p.seconds:.0f} s: {p.message}")
            continue
        out.append(
            f"program {p.name}: compiled in {p.seconds:.0f} s ({p.cpu_seconds:.0f} of CPU); arguments "
            f"{gib(p.arguments)}, temporaries {gib(p.temporaries)}, output {gib(p.output)} ({gib(p.aliased)} aliased), "
            f"program {p.code / 2**20:.1f} MiB, loops {sorted(set(p.while_trips), reverse=True)[:4]}"
        )
        for axes, size in sorted(by_axis(p.collectives).items()):
            out.append(f"  collectives over {axes:<16}{gib(size):>12} received a call")
    total = plan.train_flops + plan.recompute_flops
    passes = plan.train_flops / formulas.forward_flops(spec, work.tokens, work.pairs, work.predictions)
    out += [
        "",
        f"model FLOPs a step: {passes:g} (2 W t + 4 L H Dh p + 2 D V s) = {plan.train_flops:.3e}, recomputed "
        f"{plan.recompute_flops:.3e} (W {formulas.active_weights(spec):,}, t {work.tokens:.3e}, p {work.pairs:.3e}, "
        f"s {work.predictions:.3e})",
        f"train: max(compute {plan.seconds['train compute']:.1f} s = {total:.3e} / ({math.prod(plan.mesh.values())} x "
        f"{chip.flops:.3g}), collectives {plan.seconds['train collectives']:.1f} s at "
        f"{plan.slice.links / 1e9:.0f} GB/s), and {plan.seconds['scoring']:.1f} s of scoring: {plan.scorings} forward "
        f"pass(es) of 2 W t + 4 L H Dh p + 2 D V s, {plan.score_flops:.3e} FLOPs (reference, old log-probabilities)",
        f"decode: weights + half-full rows, read at {chip.bandwidth / 1e9:.0f} GB/s: {plan.tokens_per_second:,.0f} "
        f"tokens/s over all samplers, {plan.seconds['decode']:.1f} s; prefill {plan.seconds['prefill']:.1f} s",
        f"a step at the roofline {plan.step_seconds:.0f} s; at {REACHED['train']:.0%} and {REACHED['decode']:.0%} of "
        f"it {plan.likely_seconds:.0f} s",
        f"free: room for {plan.free_tokens:,} more tokens of keys and values over the slice",
    ]
    if plan.chip_hour:
        out.append(
            f"{STEPS} steps at {plan.chip_hour:g} a chip-hour: {plan.price(plan.step_seconds):,.0f} at the roofline, "
            f"{plan.price(plan.likely_seconds):,.0f} as above"
        )
    out.append("it fits" if plan.fits else "it does NOT fit")
    return out


def record(plan: Plan) -> dict[str, Any]:
    """The figures as JSON data."""
    return {
        "name": plan.name,
        "topology": plan.slice.name,
        "chips": plan.slice.size,
        "parameters": plan.spec.n_params(),
        "mesh": plan.mesh,
        "rollout_mesh": plan.rollout_mesh,
        "hbm": plan.hbm,
        "resident": dataclasses.asdict(plan.resident),
        "phases": plan.phases,
        "programs": [
            {k: v for k, v in dataclasses.asdict(p).items() if k != "collectives"}
            | {"collectives": by_axis(p.collectives)}
            for p in plan.programs
        ],
        "train_flops": plan.train_flops,
        "score_flops": plan.score_flops,
        "recompute_flops": plan.recompute_flops,
        "seconds": plan.seconds,
        "step_seconds": plan.step_seconds,
        "likely_seconds": plan.likely_seconds,
        "tokens_per_second": plan.tokens_per_second,
        "free_tokens": plan.free_tokens,
        "compiled": plan.compiled,
        "caution": plan.caution,
        "fits": plan.fits,
    }
