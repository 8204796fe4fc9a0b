"""Which TPU chip takes which place: hosts in blocks, slices along `replica`, for every configuration of record."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from envace_jax import cli
from envace_jax.config import UserError
from envace_jax.learning.handover import own_rows
from envace_jax.model.device_grid import device_grid
from envace_jax.model.sharding import MESH_AXES, set_apart
from envace_jax.planning.chips import parse_slice

pytestmark = pytest.mark.quick

CONFIGS = Path(__file__).parents[2] / "configs"
KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5p", "v6e": "TPU v6 lite"}
TPU = [
    (path.stem, cfg)
    for path in sorted(CONFIGS.glob("qwen3_*.py"))
    if parse_slice((cfg := cli.load_config(str(path))).plan.topology).chip.kind == "tpu"
]


@dataclasses.dataclass(frozen=True)
class Chip:
    """What jax's mesh functions read of a TPU device."""

    id: int
    process_index: int
    coords: tuple[int, int, int]
    device_kind: str
    slice_index: int = 0
    core_on_chip: int = 0
    platform: str = "tpu"


def chips(topology: str, slices: int = 1) -> list[Chip]:
    """Fake chips of slices whose hosts hold 2 x 2 of them."""
    asked = parse_slice(topology)
    x, y, z = (*asked.shape, 1)[:3]
    hosts = (x // 2) * (y // 2) * z
    found = []
    for s, (k, j, i) in itertools.product(range(slices), itertools.product(range(z), range(y), range(x))):
        host = s * hosts + k * (x // 2) * (y // 2) + (j // 2) * (x // 2) + i // 2
        found.append(Chip(len(found), host, (i, j, k), KINDS[asked.chip.name], s))
    return found


@pytest.mark.parametrize(("name", "cfg"), TPU, ids=[name for name, _ in TPU])
def test_an_engine_of_record_lies_in_one_process(name, cfg):
    devices = chips(cfg.plan.topology)
    shape = tuple(cfg.mesh[axis] for axis in MESH_AXES)
    grid = device_grid(shape, devices)
    assert grid.shape == shape and set(grid.flat) == set(devices)
    hosts = {d.process_index for d in devices}
    if shape[2] * shape[3] > 4:  # larger than a host: docs/plan.md marks these, and they are refused by name
        assert name in ("qwen3_30b_a3b_v5e", "qwen3_30b_a3b_v6e")
        with pytest.raises(UserError, match="their product must divide 4"):
            own_rows(grid, 0)
        return
    for host in hosts:
        rows = own_rows(grid, host)
        assert {d.process_index for d in rows.flat} == {host} and rows.size == 4
        places = [(d.coords[0] % 2, d.coords[1] % 2) for d in rows.flat]
        assert places == [(d.coords[0] % 2, d.coords[1] % 2) for d in own_rows(grid, 0).flat]  # all hosts alike


def test_a_ring_of_four_on_a_host():
    """`tensor` of a 2 x 2 host goes round it, every two neighbours joined by a link."""
    rows = own_rows(device_grid((1, 4, 4, 1), chips("v5e:4x4")), 3).reshape(4)
    for a, b in zip(rows, np.roll(rows, 1)):
        assert sum(abs(p - q) for p, q in zip(a.coords, b.coords)) == 1


@pytest.mark.parametrize(("shape", "blocks"), [((1, 8, 2, 1), (1, 2)), ((8, 1, 2, 1), (2, 1)), ((2, 4, 1, 2), (1, 2))])
def test_several_engines_on_a_host(shape, blocks):
    """Where two blocks of `tensor` x `expert` fit a host they follow each other along fsdp, else along replica."""
    grid = device_grid(shape, chips("v5e:4x4"))
    assert len(set(grid.flat)) == 16
    for i, j in itertools.product(range(shape[0] // blocks[0]), range(shape[1] // blocks[1])):
        part = grid[i * blocks[0] : (i + 1) * blocks[0], j * blocks[1] : (j + 1) * blocks[1]]
        assert len({d.process_index for d in part.flat}) == 1


@pytest.mark.parametrize("replica", [2, 4])
def test_only_replicas_reach_over_slices(replica):
    grid = device_grid((replica, 16 // replica, 4, 1), chips("v5p:2x2x8", slices=2))
    assert grid.shape == (replica, 16 // replica, 4, 1) and len(set(grid.flat)) == 64
    for i in range(replica):
        assert {d.slice_index for d in grid[i].flat} == {i * 2 // replica}
    for host in range(16):
        assert own_rows(grid, host).shape == (1, 4, 1)


def test_slices_that_no_replica_axis_joins_are_refused():
    with pytest.raises(UserError, match="mesh.replica=1: there are 2 slices.*give a multiple of 2"):
        device_grid((1, 8, 4, 1), chips("v5p:2x2x4", slices=2))
    with pytest.raises(UserError, match="2 slices of 16, 8 chips are not alike"):
        device_grid((2, 3, 4, 1), chips("v5p:2x2x4", slices=2)[:24])


def test_chips_set_apart_are_the_last_of_every_host():
    """Two of four a host: the others are laid host by host, an engine's block still in one process."""
    devices = chips("v5e:4x4")
    rest, apart = set_apart(devices[::-1], 2)
    assert [d.process_index for d in rest] == [d.process_index for d in apart] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {d.id for d in apart} == {4, 5, 6, 7, 12, 13, 14, 15}  # each host's second row of its 2 x 2
    grid = device_grid((2, 2, 2, 1), rest, whole=False)
    for process in range(4):
        assert {d.process_index for d in own_rows(grid, process).flat} == {process}
    assert set_apart(devices, 0) == (sorted(devices, key=lambda d: (d.process_index, d.id)), [])
    with pytest.raises(UserError, match="rewards.policy.devices=4: a process has 4 devices"):
        set_apart(devices, 4)


def test_chips_set_apart_in_several_slices():
    rest, _ = set_apart(chips("v5p:2x2x2", slices=2), 2)
    grid = device_grid((2, 2, 2, 1), rest, whole=False)
    assert [{d.slice_index for d in part.flat} for part in grid] == [{0}, {1}]
    with pytest.raises(UserError, match="give a multiple of 2"):
        device_grid((1, 4, 2, 1), rest, whole=False)
