"""Weights from the training layout to every process's engine, in one program over all devices.

Training cuts parameters over the whole mesh.  An engine lives on the devices of one process: the program casts to
the compute dtype and gathers along the axis that fully-sharded training cuts, so that afterwards each process holds
whole weights (cut over `tensor` and `expert` alone) on its own devices, and hands those to its engine as local arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from envace_jax.config import UserError
from envace_jax.model.qwen3 import Params
from envace_jax.model.sharding import MESH_AXES, Rules, param_shardings


def local_mesh(mesh: Mesh) -> Mesh:
    """This process's block of the mesh, with the axes whole that an engine cuts weights over.

    Raises `UserError` where `tensor` and `expert` reach over processes: an engine's devices are one process's.
    """
    mine = own_rows(mesh.devices, jax.process_index())
    return Mesh(mine[None], MESH_AXES, axis_types=(AxisType.Explicit,) * 4)


def own_rows(grid: np.ndarray, process: int) -> np.ndarray:
    """A process's devices as [row, tensor, expert], of a grid [replica, fsdp, tensor, expert]; `UserError` as above."""
    tensor, expert = grid.shape[2:]
    own = sum(d.process_index == process for d in grid.flat)
    mine = [row for row in grid.reshape(-1, tensor, expert) if {d.process_index for d in row.flat} == {process}]
    if len(mine) * tensor * expert != own:
        raise UserError(
            f"mesh.tensor={tensor} and mesh.expert={expert} reach over processes of {own} devices: an engine "
            f"lies in one process, so their product must divide {own}"
        )
    return np.stack(mine)


class HandOver:
    """The program from parameters of `mesh` to arrays of this process; `bytes` counts what its devices received."""

    def __init__(self, mesh: Mesh, rules: Rules, dtype: Any):
        self.mesh, self.dtype = mesh, jnp.dtype(dtype)
        self.local = local_mesh(mesh)
        self.rules = dataclasses.replace(rules, batch=None, sequence=None, embed=None, logits=None)
        self.bytes = 0
        self._program: Any = None

    def __call__(self, params: Params) -> Params:
        if self._program is None:
            dtype, whole = self.dtype, param_shardings(params, self.mesh, self.rules)
            self._program = jax.jit(lambda p: jax.tree.map(lambda x: jnp.copy(x.astype(dtype)), p), out_shardings=whole)
            self.bytes = sum(
                _held(y, self.dtype) - _held(x, self.dtype)
                for x, y in zip(
                    jax.tree.leaves(params),
                    jax.tree.leaves(
                        jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, dtype, sharding=s), params, whole)
                    ),
                )
            )
        with jax.set_mesh(self.mesh) if self.mesh is not None else contextlib.nullcontext():
            gathered = self._program(params)
        return jax.tree.map(_own, gathered, param_shardings(params, self.local, self.rules))


def _held(x: Any, dtype: np.dtype) -> int:
    """Bytes of an array in this process's devices, in another dtype."""
    shard = x.sharding.shard_shape(x.shape)
    return int(np.prod(shard)) * dtype.itemsize * len(x.sharding.addressable_devices)


def _own(x: jax.Array, sharding: Any) -> jax.Array:
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    order = sharding.addressable_devices_indices_map(x.shape)
    return jax.make_array_from_single_device_arrays(x.shape, sharding, [shards[device] for device in order])


def whole(x: jax.Array) -> np.ndarray:
    """An array on the host, wherever it lies; where it lies in several processes all of them must call this."""
    if x.is_fully_addressable:
        return np.asarray(jax.device_get(x))
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def checksum(params: Params) -> str:
    """sha256 of a checksum of every array, computed where it lies: the same for every layout, other than one over
    the bytes themselves."""

    def one(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
        place = jnp.zeros(x.shape, jnp.uint32)
        for axis in range(x.ndim):
            place = place * jnp.uint32(x.shape[axis]) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        mixed = (bits ^ (place * jnp.uint32(2654435761))) * jnp.uint32(2246822519)
        return jnp.sum(mixed ^ (mixed >> 15), dtype=jnp.uint32)

    sharding = jax.tree.leaves(params)[0].sharding
    with jax.set_mesh(sharding.mesh):
        sums = jax.jit(lambda p: jax.tree.map(one, p))(params)
    return hashlib.sha256(b"".join(whole(x).tobytes() for x in jax.tree.leaves(sums))).hexdigest()
