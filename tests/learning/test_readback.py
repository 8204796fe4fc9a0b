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
from learning_common import together

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
    (shard,) = readback.memory_sums({"x": x})
    assert int(shard.sum) == readback.file_sum(np.asarray(x))
    bits = np.array(x).view(np.uint8)
    at, bit = rng.integers(len(bits)), rng.integers(8)
    bits[at] ^= np.uint8(1 << bit)
    assert readback.file_sum(bits.view(np.asarray(x).dtype)) != int(shard.sum)


@pytest.mark.parametrize("part", [1, 1300, 2 << 30])
def test_what_was_written_is_compared_part_by_part(tmp_path, monkeypatch, part):
    monkeypatch.setattr(readback, "PART", part)
    state = tree()
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(1, state, {})
    checkpoints.close()
    assert checkpoints.latest() == 1
    folder, sums = tmp_path / "c" / "step_00000001", readback.memory_sums(state)
    assert readback.difference(folder, sums) is None
    other = state | {"b": state["b"] | {"step": jnp.int32(8)}}
    assert readback.difference(folder, readback.memory_sums(other)) == "b.step"


def test_sharded_arrays_are_summed_once(tmp_path):
    mesh = make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    x = jax.random.normal(jax.random.key(1), (8, 6))
    for spec in (P("fsdp", "tensor"), P(None, "tensor"), P()):
        placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        shards = readback.memory_sums({"x": placed})
        assert sum(int(s.sum) for s in shards) & 0xFFFFFFFF == readback.file_sum(np.asarray(x))
        assert sum(s.size for s in shards) == x.nbytes  # of copies one is summed
        checkpoints = Checkpoints(tmp_path / str(spec))
        checkpoints.save(1, {"x": placed}, {})
        checkpoints.close()
        folder = tmp_path / str(spec) / "step_00000001"
        assert readback.difference(folder, shards) is None
        # Two values that change places leave the sum of the whole as it was, and not the sums of their shards.
        swapped = jax.device_put(x.at[0, 0].set(x[7, 5]).at[7, 5].set(x[0, 0]), placed.sharding)
        found = readback.difference(folder, readback.memory_sums({"x": swapped}))
        assert found == ("x" if len(shards) > 1 else None)


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
    with pytest.raises(UserError, match=r"a\.0 is not on the disk as it was in memory.*the last .* step 1"):
        checkpoints.wait()
    assert Checkpoints(tmp_path / "c", say=lambda _: None).latest() == 1


def test_every_process_compares_what_it_holds(tmp_path):
    """Two processes, half an array each. A bit that flips in the second one's half is noticed there; the save counts in
    neither."""
    said = together("readback_child.py", tmp_path / "c")
    assert "step 1 is whole" in said[0] and "step 1 is whole" in said[1], said
    assert "x is not on the disk as it was in memory" in said[1], said
    assert "process 1: x is not on the disk as it was in memory" in said[0], said
    assert Checkpoints(tmp_path / "c", say=lambda _: None).latest() == 1
    assert (tmp_path / "c" / "step_00000002").is_dir() and not (tmp_path / "c" / "step_00000002.sha256").exists()
