"""Collectives read from compiled programs: axes, bytes, and how often loops run them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from envace_jax.model.sharding import MESH_AXES, make_mesh
from envace_jax.planning.hlo import _group, by_axis, collectives, computations, loops, operation

pytestmark = pytest.mark.quick
SHAPE = (1, 4, 2, 1)


def compiled_text(function, *args):
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        return jax.jit(function).lower(*args).compile().as_text()


def laid_out(shape, *axes):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(make_mesh(fsdp=4, tensor=2), P(*axes)))


def test_gather_and_sum_by_axis():
    def run(x, y):
        whole = jax.reshard(x, P(None, "tensor"))  # gathers 16 x 4 floats over fsdp
        return jnp.sin(whole), jnp.einsum("ab,bc->ac", y, y.T, out_sharding=P(None, None))  # sums 8 x 8 over tensor

    text = compiled_text(run, laid_out((16, 8), "fsdp", "tensor"), laid_out((8, 16), None, "tensor"))
    found = by_axis(collectives(text, SHAPE, MESH_AXES))
    assert found["fsdp"] == 16 * 4 * 4 * 3 / 4
    assert found["tensor"] == 2 * 8 * 8 * 4 / 2


def test_loops_multiply():
    def run(x, n):
        def body(_, carry):
            return jax.reshard(jnp.sin(jax.reshard(carry, P())), P("fsdp"))

        scanned = jax.lax.fori_loop(0, 5, body, x)
        return jax.lax.fori_loop(0, n, body, scanned)

    scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(make_mesh(fsdp=4, tensor=2), P()))
    text = compiled_text(run, laid_out((16,), "fsdp"), scalar)
    assert loops(text) == [5]
    once = 16 * 4 * 3 / 4
    assert by_axis(collectives(text, SHAPE, MESH_AXES))["fsdp"] == pytest.approx(6 * once)
    assert by_axis(collectives(text, SHAPE, MESH_AXES, unknown_trips=7))["fsdp"] == pytest.approx(12 * once)


HLO = """HloModule m

%body (p: (s32[], bf16[4])) -> (s32[], bf16[4]) {
  %ag = (bf16[8,128]{1,0}, bf16[64,128]{1,0}) all-gather-start(%x), replica_groups=[1,8]<=[8], dimensions={0}
  %kernel = f32[4]{0} custom-call(%x), backend_config={"text": "{
}}, more
"}
  %ar = f32[16]{0:T(256)} all-reduce(%y), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  ROOT %t = (s32[], bf16[4]) tuple(%a, %b)
}

%cond (p: (s32[], bf16[4])) -> pred[] {
  ROOT %lt = pred[]{:T(512)} compare(%a, %b), direction=LT
}

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}

%all-reduce-scatter.2 (a: f32[8,16]) -> f32[2,16] {
  %both = (f32[8,16]{1,0}, f32[8,2]{1,0}) all-reduce(%a, %b), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
  ROOT %ds = f32[2,16]{1,0} dynamic-slice(%both, %i), dynamic_slice_sizes={2,16}
}

ENTRY %main (x: bf16[4]) -> bf16[4] {
  %w = (s32[], bf16[4]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"36"}}
  %fused = f32[2,16]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.2
  %rs = f32[2,8]{1,0} reduce-scatter(%z), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, to_apply=%add
  %cp = bf16[10]{0} collective-permute(%q), source_target_pairs={{0,2},{2,4},{4,6},{6,0}}
  ROOT %r = bf16[4] get-tuple-element(%w), index=1
}
"""


@pytest.mark.parametrize(
    ("groups", "want"),
    [
        ("{{0,1},{2,3}}", [0, 1]),
        ("[4,2]<=[8]", [0, 1]),
        ("[2,4]<=[4,2]T(1,0)", [0, 2, 4, 6]),
        ("mesh['a'=4,'b'=2] {'a'}", [0, 2, 4, 6]),
        ("mesh['a'=4,'b'=2] {'b'}", [0, 1]),
        ("mesh['a'=4,'b'=2] {'a':(1)2}", [0, 4]),
        ("mesh['a'=4,'b'=2] {'a':(2)2,'b'}", [0, 1, 2, 3]),
        ("mesh['a'=8] {'a'}", list(range(8))),
        ("mesh['a'=1,'b'=2,'c'=4], device_ids=([4,2]T(1,0)) {'b'}", [0, 1]),
    ],
)
def test_every_way_to_write_groups(groups, want):
    assert _group(f"f32[4] all-reduce(%x), channel_id=1, replica_groups={groups}, to_apply=%add") == want


def test_text_of_a_tpu_program():
    bodies, entry = computations(HLO)
    assert entry == "main" and set(bodies) == {"body", "cond", "add", "main", "all-reduce-scatter.2"}
    assert operation(bodies["main"][0][1]) == "while"
    assert loops(HLO) == [36]
    bare = HLO.replace(', backend_config={"known_trip_count":{"n":"36"}}', "")
    assert loops(bare) == []  # the bound is data
    counted = bare.replace("  ROOT %lt", "  %b = s32[]{:T(128)} constant(28)\n  ROOT %lt")
    assert loops(counted) == [28]
    every = collectives(HLO, SHAPE, MESH_AXES)
    found = {c.kind: c for c in every}
    fused = next(c for c in every if c.kind == "reduce-scatter" and c.received != 64 * 3)
    assert fused.axes == ("fsdp",) and fused.received == (8 * 16 + 8 * 2) * 4 * 3 / 4
    assert found["all-gather"].axes == ("fsdp", "tensor") and found["all-gather"].times == 36
    assert found["all-gather"].received == 64 * 128 * 2 * 7 / 8
    assert found["all-reduce"].axes == ("tensor",) and found["all-reduce"].received == 2 * 64 / 2
    assert found["reduce-scatter"].axes == ("fsdp",) and found["reduce-scatter"].received == 64 * 3
    assert found["collective-permute"].axes == ("fsdp",) and found["collective-permute"].received == 20
