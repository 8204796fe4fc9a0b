"""One engine over several devices gives what one device gives."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from conftest import SMALL
from plain import SPEC

from envace_jax.model.sharding import Rules, make_mesh, param_shardings
from envace_jax.sampling.engine import Engine, Request, SamplingParams


def play(engine):
    ledgers = {a: [5 + a, 6, 7, 8, 9, 10, 11] for a in range(6)}
    for turn in range(2):
        asked = {
            engine.submit(Request(ids, SamplingParams(max_tokens=8), (turn, a), affinity=a)): a
            for a, ids in ledgers.items()
        }
        while not engine.idle:
            for c in engine.step():
                ledgers[asked[c.request_id]] += [*c.ids, 5]
    return ledgers


@pytest.mark.parametrize("unroll", [True, False])
def test_a_mesh_changes_nothing(make_engine, params, unroll):
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices (XLA_FLAGS=--xla_force_host_platform_device_count=8)")
    want = play(make_engine())
    mesh = make_mesh(fsdp=2, tensor=2)
    config = dataclasses.replace(SMALL, unroll_layers=unroll)
    # As a learner would hold them: cut over fsdp and tensor.
    cut = jax.device_put(params, param_shardings(params, mesh, Rules()))
    engine = Engine(cut, SPEC, config, seed=3, mesh=mesh)
    assert play(engine) == want
    cache = engine._pools["policy"].lanes
    assert "tensor" in (cache.k[0] if unroll else cache.k).sharding.spec
