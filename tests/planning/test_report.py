"""The report of a run that no chip here could make: from formulas, and from real compilation where libtpu is."""

from __future__ import annotations

import dataclasses
import json

import pytest

from envace_jax import cli
from envace_jax.config import UserError, default_config
from envace_jax.model.qwen3 import param_shapes
from envace_jax.model.sharding import SAMPLER, Rules, make_mesh, param_shardings
from envace_jax.model.spec import PRESETS
from envace_jax.planning import report
from envace_jax.planning.chips import parse_slice
from envace_jax.planning.command import plan_for, search


def small(topology: str = "h100:8"):
    """0.6B on eight GPUs, short rows."""
    cfg = default_config()
    cfg.model.size = "0.6b"
    cfg.model.dtype = "bfloat16"
    cfg.model.remat = "full"
    cfg.rollout.max_input_tokens = 1024
    cfg.rollout.max_act_tokens = cfg.rollout.max_rehearse_tokens = 1000
    cfg.rollout.slots = cfg.rollout.live_episodes = 8
    cfg.learning.row_tokens = 2048
    cfg.mesh.fsdp = 8
    cfg.plan.topology = topology
    cfg.plan.chip_hour = 2.0
    return cfg


@pytest.mark.quick
def test_shares_of_a_chip_are_those_of_the_shardings():
    mesh = make_mesh(fsdp=2, tensor=2, expert=2)
    sizes = dict(mesh.shape)
    for name in ("tiny", "8b", "30b-a3b"):
        spec, total = PRESETS[name], 0
        shapes = param_shapes(spec)
        for rules in (Rules(), SAMPLER):
            shardings = param_shardings(shapes, mesh, rules)
            total = sum(
                _size(sharding.shard_shape(leaf.shape)) for leaf, sharding in zip(_leaves(shapes), _leaves(shardings))
            )
            assert report.weights_per_chip(spec, rules, sizes) == total


def _leaves(tree):
    import jax

    return jax.tree.leaves(tree)


def _size(shape):
    n = 1
    for k in shape:
        n *= k
    return n


@pytest.mark.quick
def test_memory_by_hand():
    cfg = small()
    plan = plan_for(cfg, parse_slice("h100:8"), "x", compiling=False)
    spec = PRESETS["0.6b"]
    per_chip = plan.resident.master / 4
    # Norms are whole on every chip, everything else is cut in eight.
    norms = spec.n_layers * (2 * spec.d_model + 2 * spec.head_dim) + spec.d_model
    assert per_chip == (spec.n_params() - norms) / 8 + norms
    assert plan.resident.moments == 2 * plan.resident.master
    assert plan.resident.compute_copy == 2 * spec.n_params()  # one sampler a chip
    length = 1024 + 1000 + cfg.rollout.chunk
    assert plan.resident.kv == (8 + 8) * length * 2 * 28 * 8 * 128 * 2
    assert plan.caution == "" and plan.slice.host == 8
    assert plan.phases["hand-over"] == pytest.approx(plan.resident.total + plan.resident.compute_copy)
    # 64 trajectories, an ACT and a REHEARSE ledger each.
    assert plan.work.rows == 128 and plan.work.predictions == 128_000
    assert plan.microbatches == 16  # 128 x 2024 tokens in microbatches of 8 x 2048


@pytest.mark.quick
def test_gpu_report_is_marked_and_priced(tmp_path, capsys):
    out = tmp_path / "plan.json"
    arguments = [f"--config.{k}={v}" for k, v in _flat_changes(small())]
    assert cli.main(["plan", "--json", str(out), *arguments]) == 0
    text = capsys.readouterr().out
    for words in ("FROM FORMULAS", "it fits", "470 steps at 2", "collectives", "sharding rules", "room for"):
        assert words in text, words
    figures = json.loads(out.read_text())
    assert figures["fits"] and not figures["compiled"] and figures["chips"] == 8
    assert figures["step_seconds"] < figures["likely_seconds"]
    assert cli.main(["plan", *arguments, "--config.rollout.slots=4096"]) == 1
    assert "it does NOT fit" in capsys.readouterr().out


def _flat_changes(cfg):
    from envace_jax.config import flat

    base = dict(flat(default_config()))
    return [(key, value) for key, value in flat(cfg) if base[key] != value]


@pytest.mark.quick
def test_scoring_is_part_of_a_step_s_work_time_and_price():
    cfg, slice_ = small(), parse_slice("h100:8")
    assert cfg.learning.kl_coef > 0
    plan = plan_for(cfg, slice_, "x", compiling=False)  # one forward pass under the reference
    assert plan.score_flops == pytest.approx(plan.train_flops / 3)
    assert plan.model_flops == pytest.approx(plan.train_flops * 4 / 3)
    cfg.learning.kl_coef = 0.0
    without = plan_for(cfg, slice_, "x", compiling=False)
    assert without.score_flops == without.seconds["scoring"] == 0 and without.train_flops == plan.train_flops
    assert plan.seconds["scoring"] >= plan.score_flops / (8 * slice_.chip.flops)
    assert plan.step_seconds - without.step_seconds == pytest.approx(plan.seconds["scoring"])
    assert plan.price(plan.step_seconds) > without.price(without.step_seconds)
    cfg.learning.kl_coef, cfg.learning.updates_per_batch, cfg.learning.epochs = 1e-4, 2, 3
    several = plan_for(cfg, slice_, "x", compiling=False)  # old log-probabilities too; each row is trained three times
    assert several.score_flops == pytest.approx(2 * plan.score_flops)
    assert several.train_flops == pytest.approx(3 * plan.train_flops)
    assert several.seconds["train collectives"] == pytest.approx(3 * plan.seconds["train collectives"])
    assert "2 forward pass(es)" in "\n".join(report.lines(several))


@pytest.mark.quick
def test_adapters_are_planned_by_what_is_trained():
    cfg, spec = small(), PRESETS["0.6b"]
    cfg.mesh.fsdp, cfg.plan.topology, slice_ = 1, "h100:1", parse_slice("h100:1")
    whole = plan_for(cfg, slice_, "x", compiling=False)
    cfg.model.lora.rank = 8
    plan = plan_for(cfg, slice_, "x", compiling=False)
    # q: 1024 to 16 heads of 128; k, v: to 8 heads; o: 16 heads of 128 to 1024. Rank 8, 28 layers.
    adapters = 28 * 8 * ((1024 + 2048) + 2 * (1024 + 1024) + (2048 + 1024))
    assert plan.resident.moments == 8 * adapters
    assert plan.resident.master == 4 * adapters + 2 * spec.n_params()  # the weights in bfloat16, no master copy
    assert plan.train_flops == pytest.approx(whole.train_flops * 2 / 3) and plan.score_flops == whole.score_flops
    assert plan.phases["update"] < whole.phases["update"]
    for p, line in ((whole, "step: 3 (2 W t"), (plan, "step: 2 (2 W t")):
        assert line in "\n".join(report.lines(p))


@pytest.mark.quick
def test_gpus_of_several_nodes_talk_over_the_network():
    chip = parse_slice("h100:8").chip
    assert parse_slice("h100:8").links == chip.links and parse_slice("h100:16").links == chip.network < chip.links
    assert parse_slice("v5e:4x8").links == parse_slice("v5e:4x8").chip.links


@pytest.mark.quick
def test_search_finds_the_largest_microbatch():
    cfg = small()
    cfg.learning.prompts_per_step = 512  # 8,192 ledgers: more than one microbatch holds
    best = search(cfg, parse_slice("h100:8"), "x", programs=())
    assert best >= 1 and best & (best - 1) == 0
    for rows, fits in ((best, True), (2 * best, False)):
        cfg.learning.rows_per_microbatch = rows
        plan = plan_for(cfg, parse_slice("h100:8"), "x", compiling=False)
        assert plan.fits == fits and plan.microbatches > 1
    cfg.rollout.slots = 4096
    assert search(cfg, parse_slice("h100:8"), "x", programs=()) == 0


@pytest.mark.quick
def test_what_cannot_be_laid_out_is_refused():
    cfg = small()
    with pytest.raises(UserError, match="8 places, plan.topology has 4 chips"):
        plan_for(cfg, parse_slice("h100:4"), "x", compiling=False)
    cfg.plan.rollout_tensor = 16
    with pytest.raises(UserError, match="plan.rollout_tensor=16: does not divide"):
        plan_for(cfg, parse_slice("h100:8"), "x", compiling=False)
    cfg = small()
    cfg.model.size, cfg.plan.rollout_tensor, cfg.plan.rollout_expert = "30b-a3b", 4, 64
    with pytest.raises(UserError, match="plan.rollout_tensor=4 times plan.rollout_expert=64: does not divide"):
        plan_for(cfg, parse_slice("h100:8"), "x", compiling=False)


def test_every_configuration_of_record_can_be_planned():
    """Formulas alone: layouts divide, microbatches come out whole."""
    from pathlib import Path

    from envace_jax.config_checks import validate

    files = sorted(Path(__file__).parents[2].glob("configs/qwen3_*.py"))
    assert len(files) == 13
    for file in files:
        cfg = cli.load_config(str(file))
        validate(cfg, cli.COMMANDS["plan"].unread)
        plan = plan_for(cfg, parse_slice(cfg.plan.topology), file.stem, compiling=False)
        assert plan.work.rows == 128 and plan.work.row == 20_000
        assert plan.fits and report.lines(plan)


@pytest.mark.quick
def test_a_policy_that_judges_is_sized_by_its_own_configuration(tmp_path):
    cfg = small()
    alone = plan_for(cfg, parse_slice("h100:8"), "x", compiling=False)
    judge = PRESETS["1.7b"]
    (tmp_path / "config.json").write_text(json.dumps(judge.to_hf_config()))
    cfg.rewards.judge, cfg.rewards.policy.path, cfg.rewards.policy.max_tokens = "policy", str(tmp_path), 500
    plan = plan_for(cfg, parse_slice("h100:8"), "x", compiling=False)
    rows = (8 + 8) * (1024 + 500 + cfg.rollout.chunk) * 2 * 28 * 8 * 128 * 2
    assert plan.resident.judge == 2 * judge.n_params() + rows and alone.resident.judge == 0
    for phase in ("rollout", "update", "hand-over"):
        assert plan.phases[phase] - alone.phases[phase] == pytest.approx(plan.resident.judge)


@pytest.mark.quick
def test_a_judge_on_chips_of_its_own_is_sized_alone(tmp_path):
    """Two of eight: the mesh has six places, and what the judge holds is on its own chips only."""
    cfg = small()
    cfg.mesh.fsdp, cfg.mesh.replica, cfg.mesh.tensor = 6, 1, 1
    judge = PRESETS["1.7b"]
    (tmp_path / "config.json").write_text(json.dumps(judge.to_hf_config()))
    cfg.rewards.judge, cfg.rewards.policy.path, cfg.rewards.policy.max_tokens = "policy", str(tmp_path), 500
    with pytest.raises(UserError, match="6 places, plan.topology has 8 chips"):
        plan_for(cfg, parse_slice("h100:8"), "x", compiling=False)
    cfg.rewards.policy.devices = 2
    plan = plan_for(cfg, parse_slice("h100:8"), "x", compiling=False)
    assert plan.resident.judge == 0
    rows = (8 + 8) * (1024 + 500 + cfg.rollout.chunk) * 2 * 28 * 8 * 128 * 2
    norms = 28 * (2 * 2048 + 2 * 128) + 2048  # whole on both chips
    assert plan.phases["judge"] > (2 * (judge.n_params() + norms) + rows) / 2
    assert any("judge" in line and "fits" in line for line in report.lines(plan))
    six = dataclasses.replace(plan.slice, shape=(6,))
    cfg.rewards.judge, cfg.rewards.policy.devices = "rules", 0
    alone = plan_for(cfg, six, "x", compiling=False)
    assert alone.seconds["train compute"] == plan.seconds["train compute"]
    cfg.rewards.judge, cfg.rewards.policy.devices = "policy", 3
    cfg.mesh.fsdp = 5
    with pytest.raises(UserError, match="8 key/value heads cannot be cut over them"):
        plan_for(cfg, parse_slice("h100:8"), "x", compiling=False)


@pytest.mark.quick
def test_samplers_that_a_run_would_not_make_are_said():
    cfg = small("v5e:2x4")
    assert plan_for(cfg, parse_slice("v5e:2x4"), "x", compiling=False).caution == ""
    rate = plan_for(cfg, parse_slice("v5e:2x4"), "x", compiling=False).tokens_per_second
    cfg.plan.rollout_tensor = 4
    plan = plan_for(cfg, parse_slice("v5e:2x4"), "x", compiling=False)
    assert "not over plan.rollout_tensor=4" in plan.caution
    assert "CAUTION: an engine cuts" in "\n".join(report.lines(plan))
    cfg.mesh.tensor, cfg.mesh.fsdp = 4, 2
    fitting = plan_for(cfg, parse_slice("v5e:2x4"), "x", compiling=False)
    assert fitting.caution == "" and fitting.tokens_per_second > rate  # four chips no longer do the same work
    cfg.mesh.tensor, cfg.mesh.fsdp, cfg.plan.rollout_tensor = 8, 1, 8
    assert "a sampler of 8 chips" in plan_for(cfg, parse_slice("v5e:2x4"), "x", compiling=False).caution
