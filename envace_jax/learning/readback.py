"""Whether a checkpoint on disk holds what was in memory: sums of bits, taken when a save begins and after it.

A digest of files made after they were written would make a bit that flipped on the way the truth.  So every array is
summed where it lies before it is written, and again from the files before their digests are: a part at a time, at
most `PART` bytes on the host.  One process alone does it; of several each holds a share of the arrays only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

PART = 2 << 30  # bytes read back at a time; a larger array is read on its own


@jax.jit
def _bit_sum(x: jax.Array) -> jax.Array:
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return jnp.sum(jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32), dtype=jnp.uint32)


def memory_sums(state: Any) -> list[list[jax.Array]]:
    """Sum modulo 2^32 of the bit patterns of each array, by shard; computed on the devices, without waiting.

    A single flipped bit always changes it.
    """
    return [[_bit_sum(s.data) for s in x.addressable_shards if s.replica_id == 0] for x in jax.tree.leaves(state)]


def file_sum(array: np.ndarray) -> int:
    """The same sum of an array that was read from a file."""
    bits = np.ascontiguousarray(array).reshape(-1).view(f"uint{8 * array.dtype.itemsize}")
    return int(np.sum(bits, dtype=np.uint64)) & 0xFFFFFFFF


def difference(folder: Path, like: Any, sums: list[list[jax.Array]]) -> str | None:
    """The first array of the checkpoint in `folder` that is not what was in memory, by its place in the tree; None when
    all are.  `like` holds shapes and dtypes."""
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    for part in _parts([x.size * x.dtype.itemsize for _, x in paths]):
        wanted = [x if i in part else ocp.PLACEHOLDER for i, (_, x) in enumerate(paths)]
        item = jax.tree.unflatten(structure, wanted)
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler("state")) as reader:
            read = reader.restore(
                folder, args=ocp.args.Composite(state=ocp.args.PyTreeRestore(item=item, restore_args=arguments))
            )["state"]
        found = jax.tree.leaves(read, is_leaf=lambda x: x is ocp.PLACEHOLDER)
        for i in part:
            if file_sum(np.asarray(found[i])) != sum(int(x) for x in sums[i]) & 0xFFFFFFFF:
                return jax.tree_util.keystr(paths[i][0])
    return None


def _parts(sizes: list[int]) -> Iterator[range]:
    """Runs of places whose bytes together stay within `PART`, or that hold one array."""
    start, total = 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > PART:
            yield range(start, i)
            start, total = i, 0
        total += size
    if start < len(sizes):
        yield range(start, len(sizes))
