"""Which TPU chip takes which place of a mesh: slices follow each other along `replica`, hosts lie in blocks.

Between slices there is a data-centre network, so only `replica` reaches over them.  Within a slice jax lays logical
axes along the torus without a look at hosts: on 4 x 4 chips it would lay `tensor` of 4 over two hosts of 2 x 2.  An
engine lives on the chips of one process, so wherever `tensor` x `expert` divides a host's chips each host holds whole
blocks of them, and the hosts among themselves are laid along the torus.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils

from envace_jax.config import UserError

Shape = tuple[int, int, int, int]


def device_grid(shape: Shape, devices: Sequence[Any], *, whole: bool = True) -> np.ndarray:
    """TPU chips as an array [replica, fsdp, tensor, expert].

    whole: whether these are all chips of their hosts; where some are set apart the rest are no torus, and are laid in
    the order given.
    Raises `UserError` where there are several slices and `replica` is no multiple of their number.
    """
    slices = _groups(devices, lambda d: getattr(d, "slice_index", None) or 0)
    replica, *rest = shape
    if replica % len(slices):
        raise UserError(
            f"mesh.replica={replica}: there are {len(slices)} slices, and only replicas may lie in different ones; "
            f"give a multiple of {len(slices)}"
        )
    inner: Shape = (replica // len(slices), *rest)  # type: ignore[assignment]
    if len({len(chips) for chips in slices}) > 1 or len(slices[0]) != math.prod(inner):
        raise UserError(f"{len(slices)} slices of {', '.join(str(len(chips)) for chips in slices)} chips are not alike")
    if not whole:
        return np.concatenate([np.array(chips, object).reshape(inner) for chips in slices])
    return np.concatenate([_slice_grid(inner, chips) for chips in slices])


def _groups(devices: Iterable[Any], key: Callable[[Any], int]) -> list[list[Any]]:
    found = defaultdict(list)
    for device in devices:
        found[key(device)].append(device)
    return [found[k] for k in sorted(found)]


@dataclasses.dataclass(frozen=True)
class _Host:
    """A host as jax's mesh functions see a chip: a place in the torus of hosts."""

    coords: tuple[int, ...]
    number: int
    core_on_chip: int = 0
    platform: str = "tpu"
    device_kind: str = "host"


def _slice_grid(shape: Shape, devices: Sequence[Any]) -> np.ndarray:
    """One slice's chips, [replica, fsdp, tensor, expert]."""
    hosts = _groups(devices, lambda d: d.process_index)
    chips = len(hosts[0])
    if len(hosts) == 1 or {len(h) for h in hosts} != {chips} or chips % (shape[2] * shape[3]):
        # A logical axis may take a part of a physical one: 32 x 4 on a torus of 8 x 16.
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    blocks = chips // (shape[2] * shape[3])  # of one host, along fsdp as far as that goes
    along_fsdp = math.gcd(blocks, shape[1])
    block: Shape = (blocks // along_fsdp, along_fsdp, shape[2], shape[3])

    corners = [np.min([d.coords for d in host], axis=0) for host in hosts]
    size = np.max([d.coords for d in hosts[0]], axis=0) - corners[0] + 1
    standing = [_Host(tuple(int(x) for x in corner // size), n) for n, corner in enumerate(corners)]
    torus = (shape[0] // block[0], shape[1] // block[1], 1, 1)
    order = mesh_utils.create_device_mesh(torus, standing, allow_split_physical_axes=True)

    # Every host's chips stand as those of the first in the torus, at which jax knows the rings of a small block.
    first = min(range(len(hosts)), key=lambda n: standing[n].coords)
    pattern = mesh_utils.create_device_mesh(block, hosts[first], allow_split_physical_axes=True)
    grid = np.empty(shape, object)
    for i, j in np.ndindex(torus[:2]):
        n = order[i, j, 0, 0].number
        at = {tuple(np.subtract(d.coords, corners[n])): d for d in hosts[n]}
        for (r, f, t, e), like in np.ndenumerate(pattern):
            chip = at[tuple(np.subtract(like.coords, corners[first]))]  # type: ignore[attr-defined]
            grid[i * block[0] + r, j * block[1] + f, t, e] = chip
    return grid
