"""Brings the processes of a run on CPU together before a program needs them.

Where collectives run over gloo, each group of devices is connected by the first collective that it takes part in.  The
last process must come to it within 30 seconds of the first (XLA has no setting for that; afterwards a collective may
wait half an hour), and on a loaded machine one process compiles longer than that beside another.  So all groups of a
mesh are connected by one program that is run at the start, when all processes have compiled it.
"""

from __future__ import annotations

import itertools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from envace_jax.distributed import Processes


def connect(mesh: Mesh | None, processes: Processes) -> None:
    """Runs one collective over every group of devices that the mesh's axes, alone and together, name."""
    if mesh is None or processes.alone or mesh.devices.flat[0].platform != "cpu":
        return
    shape = mesh.devices.shape
    axes = [axis for axis, n in mesh.shape.items() if n > 1]
    groups = [some for n in range(1, len(axes) + 1) for some in itertools.combinations(axes, n)]
    place = NamedSharding(mesh, P(*mesh.axis_names))
    ones = jax.make_array_from_callback(shape, place, lambda index: np.ones(shape, np.float32)[index])

    def sums(x: jax.Array) -> list[jax.Array]:
        return [jax.lax.psum(x, group) for group in groups]

    rest = [P(*(None if axis in group else axis for axis in mesh.axis_names)) for group in groups]
    program = jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=place.spec, out_specs=rest)).lower(ones).compile()
    processes.meet("the first collectives")
    jax.block_until_ready(program(ones))
