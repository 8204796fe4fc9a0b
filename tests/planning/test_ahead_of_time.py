"""Real programs compiled for TPU slices that are not here (libtpu from the `tpu` extra)."""

from __future__ import annotations

import dataclasses

import pytest

from envace_jax.config import UserError, default_config
from envace_jax.model.spec import PRESETS
from envace_jax.planning import programs
from envace_jax.planning.chips import parse_slice
from envace_jax.planning.formulas import kv_bytes
from envace_jax.planning.hlo import by_axis

pytest.importorskip("libtpu", reason="libtpu (the `tpu` extra) compiles for TPU")

DENSE = dataclasses.replace(PRESETS["0.6b"], n_layers=3, vocab_size=4096)
MOE = dataclasses.replace(PRESETS["30b-a3b"], n_layers=2, n_experts=16, vocab_size=4096)


@pytest.fixture(autouse=True)
def environment():
    programs.prepare_environment()


def small():
    cfg = default_config()
    cfg.model.dtype = "bfloat16"
    cfg.model.remat = "full"
    cfg.model.attention = "splash"
    cfg.rollout.max_input_tokens = 1024
    cfg.rollout.max_act_tokens = cfg.rollout.max_rehearse_tokens = 1000
    cfg.rollout.slots = cfg.rollout.live_episodes = 16
    cfg.learning.row_tokens = 2048
    cfg.learning.logprob_chunk = 1024
    return cfg


@pytest.mark.parametrize("topology", ["v6e:1x1", pytest.param("v5e:1x1", marks=pytest.mark.long)])
def test_decode_reads_its_cache_in_place(topology):
    cfg = small()
    cfg.rollout.max_input_tokens = cfg.rollout.max_act_tokens = cfg.rollout.max_rehearse_tokens = 4000
    decode = programs.decode_program(cfg, DENSE, programs.sampler_mesh(cfg, parse_slice(topology)))
    cache = kv_bytes(DENSE) * 16 * (8000 + cfg.rollout.chunk)
    assert decode.fits
    assert decode.aliased >= cache  # the donated cache is the returned one, and nothing as large is made beside it:
    assert decode.temporaries <= 0.02 * cache, (decode.temporaries, cache)
    assert DENSE.n_layers in decode.while_trips  # layers are scanned


@pytest.mark.long
def test_prefill_writes_its_cache_in_place():
    cfg = small()
    prefill = programs.prefill_program(cfg, DENSE, programs.sampler_mesh(cfg, parse_slice("v6e:1x1")))
    cache = kv_bytes(DENSE) * 16 * (2024 + cfg.rollout.chunk)
    assert prefill.fits and prefill.aliased >= cache and prefill.temporaries < cache


@pytest.mark.long
def test_whole_episodes_compile_and_keep_their_cache_in_place():
    cfg = small()
    cfg.rollout.control, cfg.rollout.context = "device", "stream"
    cfg.rollout.max_act_tokens = cfg.rollout.max_rehearse_tokens = 512
    cfg.rollout.max_segments = 40
    program = programs.episodes_program(cfg, DENSE, programs.sampler_mesh(cfg, parse_slice("v6e:1x1")))
    cache = kv_bytes(DENSE) * 16 * 2 * (1024 + 512)  # both ledgers of a lane
    assert program.fits and program.aliased >= cache
    # What is read of one or two layers at a time, never a second cache; and layers are scanned.
    assert program.temporaries <= 2.5 * cache / DENSE.n_layers, (program.temporaries, cache)
    assert DENSE.n_layers in program.while_trips


@pytest.mark.long
def test_update_on_a_mesh_gathers_layers_one_at_a_time():
    cfg = small()
    cfg.mesh.fsdp, cfg.mesh.tensor, cfg.mesh.sequence = 2, 2, "tensor"
    slice_ = parse_slice("v5e:2x2")
    mesh = programs.learner_mesh(cfg, programs.tpu_devices(slice_))
    update = programs.update_program(cfg, DENSE, mesh, microbatches=4)
    assert update.fits and DENSE.n_layers in update.while_trips
    assert update.aliased >= 12 * DENSE.n_params() / 4  # master and moments are updated in place
    assert {"fsdp", "tensor"} <= by_axis(update.collectives).keys()
    deeper = programs.update_program(cfg, dataclasses.replace(DENSE, n_layers=6), mesh, microbatches=4)
    assert deeper.code < 1.2 * update.code  # no layer unrolled


@pytest.mark.long
@pytest.mark.parametrize("exchange", ["gather", "ragged"])
def test_expert_layer_compiles_with_both_exchanges(exchange):
    import functools

    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from envace_jax.model.moe import moe_mlp
    from envace_jax.model.sharding import Rules, make_mesh

    mesh, rules = make_mesh(expert=4, devices=programs.tpu_devices(parse_slice("v5e:2x2"))), Rules()

    def shape(dims, *axes):
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, rules.gathered(*axes)))

    d, e, f = MOE.d_model, MOE.n_experts, MOE.d_ff_expert
    wide, narrow = ("experts", "embed", "expert_ffn"), ("experts", "expert_ffn", "embed")
    experts = (shape((e, d, f), *wide), shape((e, d, f), *wide), shape((e, f, d), *narrow))
    layer = functools.partial(moe_mlp, MOE, rules=rules, exchange=exchange)

    def loss(x, router, experts):
        return jnp.sum(layer(x, router, experts)[0].astype(jnp.float32))

    program = programs.compile_program(
        "experts",
        lambda: jax.jit(jax.grad(loss, (0, 1, 2))).lower(
            shape((4, 256, d), "batch", None, None), shape((d, e), None, None), experts
        ),
        mesh,
    )
    kinds = {c.kind for c in program.collectives}
    assert program.fits and ("ragged-all-to-all" in kinds) == (exchange == "ragged"), kinds


@pytest.mark.quick
def test_attention_is_chosen_for_the_chips_that_are_compiled_for():
    from envace_jax.learning.step import Update, UpdateConfig

    config = UpdateConfig(attention="auto", compute_dtype="bfloat16", row_tokens=20_480, rows=4)
    mesh = programs.learner_mesh(default_config(), programs.tpu_devices(parse_slice("v5e:1x1")))
    assert Update(DENSE, config, mesh).options.attention == "splash"
    assert Update(DENSE, config).options.attention == "chunked"  # this machine's own


def test_a_program_too_large_is_a_result():
    cfg = small()
    cfg.rollout.max_input_tokens = 120_000
    decode = programs.decode_program(cfg, DENSE, programs.sampler_mesh(cfg, parse_slice("v5e:1x1")))
    assert not decode.fits and decode.needed > parse_slice("v5e:1x1").chip.hbm


@pytest.mark.quick
def test_an_unknown_slice_is_said():
    with pytest.raises(UserError, match=r"plan.topology='v5e:3x7': not described"):
        programs.tpu_devices(parse_slice("v5e:3x7"))
