"""Whether a checkpoint on disk holds what was in memory: sums of bits, taken when a save begins and after it.

A digest of files made after they were written would make a bit that flipped on the way the truth.  So every array is
summed where it lies before it is written, and again from the files before their digests are: a part at a time, at
most `PART` bytes on the host.  Of several processes each compares the shards that it holds, by their places in the
whole array; together they are the checkpoint.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

PART = 2 << 30  # bytes read back at a time; a larger shard is read on its own


@jax.jit
def _bit_sum(x: jax.Array) -> jax.Array:
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return jnp.sum(jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32), dtype=jnp.uint32)


@dataclasses.dataclass(frozen=True)
class ShardSum:
    """One shard of an array: the array's name, the shard's place in it, its bytes, and the sum of its bits."""

    name: str
    index: tuple[slice, ...]
    size: int
    sum: jax.Array


def memory_sums(state: Any) -> list[ShardSum]:
    """Sum modulo 2^32 of the bit patterns of each shard that this process answers for (of copies one process does);
    computed on the devices, without waiting.

    A single flipped bit always changes it.
    """
    return [
        ShardSum(name, shard.index, shard.data.nbytes, _bit_sum(shard.data))
        for name, x in ocp.tree.to_flat_dict(state, sep=".").items()
        for shard in x.addressable_shards
        if shard.replica_id == 0
    ]


def file_sum(array: np.ndarray) -> int:
    """The same sum of an array that was read from a file."""
    bits = np.ascontiguousarray(array).reshape(-1).view(f"uint{8 * array.dtype.itemsize}")
    return int(np.sum(bits, dtype=np.uint64)) & 0xFFFFFFFF


def difference(folder: Any, sums: list[ShardSum]) -> str | None:
    """The first array of the checkpoint in `folder` of which a shard is not what was in memory; None when all are.

    Reads this process's shards and waits for nobody.
    """
    for part in _parts([x.size for x in sums]):
        arrays = {sums[i].name: _open(folder, sums[i].name) for i in part}
        reads = [arrays[sums[i].name].result()[sums[i].index].read() for i in part]
        for i, read in zip(part, reads):
            if file_sum(np.asarray(read.result())) != int(sums[i].sum):
                return sums[i].name
    return None


def _open(folder: Any, name: str) -> Any:
    """An array of a checkpoint in the form that Orbax writes: zarr in one key-value store."""
    place = os.fspath(folder / "state")
    base: Any = place if "://" in place else {"driver": "file", "path": f"{place}/"}
    return ts.open(
        {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}, open=True, read=True
    )


def _parts(sizes: list[int]) -> Iterator[range]:
    """Runs of places whose bytes together stay within `PART`, or that hold one shard."""
    start, total = 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > PART:
            yield range(start, i)
            start, total = i, 0
        total += size
    if start < len(sizes):
        yield range(start, len(sizes))
