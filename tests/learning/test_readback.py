"""A save whose files are not what was in memory is no checkpoint."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from envace_jax.config import UserError
from envace_jax.learning import readback
from envace_jax.learning.checkpoint import Checkpoints
from envace_jax.model.sharding import make_mesh


def tree():
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "a": (jax.random.normal(keys[0], (40, 8)), jax.random.normal(keys[1], (3, 5), jnp.bfloat16)),
        "b": {"step": jnp.int32(7), "flag": jnp.zeros((4,), jnp.int8)},
    }


@pytest.mark.quick
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(["float32", "bfloat16", "int32", "int8"]))
def test_every_flipped_bit_changes_the_sum(seed, dtype):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.integers(-100, 100, 33), dtype)
    (parts,) = readback.memory_sums(x)
    assert int(parts[0]) == readback.file_sum(np.asarray(x))
    bits = np.array(x).view(np.uint8)
    at, bit = rng.integers(len(bits)), rng.integers(8)
    bits[at] ^= np.uint8(1 << bit)
    assert readback.file_sum(bits.view(np.asarray(x).dtype)) != int(parts[0])


@pytest.mark.parametrize("part", [1, 1300, 2 << 30])
def test_what_was_written_is_compared_part_by_part(tmp_path, monkeypatch, part):
    monkeypatch.setattr(readback, "PART", part)
    state = tree()
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(1, state, {})
    checkpoints.close()
    assert checkpoints.latest() == 1
    folder, sums = tmp_path / "c" / "step_00000001", readback.memory_sums(state)
    assert readback.difference(folder, state, sums) is None
    other = state | {"b": state["b"] | {"step": jnp.int32(8)}}
    assert readback.difference(folder, state, readback.memory_sums(other)) == "['b']['step']"


def test_sharded_arrays_are_summed_once(tmp_path):
    mesh = make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    x = jax.random.normal(jax.random.key(1), (8, 6))
    for spec in (P("fsdp", "tensor"), P(None, "tensor"), P()):
        placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        (parts,) = readback.memory_sums(placed)
        assert sum(map(int, parts)) & 0xFFFFFFFF == readback.file_sum(np.asarray(x))


def test_a_bit_that_flips_on_its_way_to_the_disk_is_noticed(tmp_path, monkeypatch):
    """The arrays that reach the files differ from those in memory: no manifest, the step before stays."""
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(1, tree(), {})
    checkpoints.wait()
    real = checkpoints._checkpointer().save

    def damaged(path: Path, args):
        state = args["state"].item
        first, second = state["a"]
        args["state"].item["a"] = (first.at[3, 3].set(-first[3, 3]), second)
        return real(path, args=args)

    monkeypatch.setattr(checkpoints._checkpointer(), "save", damaged)
    checkpoints.save(2, tree(), {})
    with pytest.raises(UserError, match=r"\['a'\]\[0\] is not on the disk as it was in memory.*the last .* step 1"):
        checkpoints.wait()
    assert Checkpoints(tmp_path / "c", say=lambda _: None).latest() == 1
