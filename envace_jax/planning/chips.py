"""What the makers say of their chips: the numbers that rooflines are drawn with."""

from __future__ import annotations

import dataclasses
import math

from envace_jax.config import UserError

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator. Peaks, not what is reached.

    hbm: bytes that a program can use (TPU: what the compiler grants, below the published size). flops: dense bfloat16
    per second. bandwidth: HBM bytes per second. links: bytes per second over all links to other chips together.
    node: chips that those links join (0: all of a slice). network: bytes per second and chip between nodes.
    """

    name: str
    kind: str
    hbm: int
    flops: float
    bandwidth: float
    links: float
    node: int = 0
    network: float = 0.0


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("v5e", "tpu", int(15.75 * GIB), 197e12, 819e9, 200e9),
        Chip("v5p", "tpu", int(95.74 * GIB), 459e12, 2765e9, 600e9),
        Chip("v6e", "tpu", int(31.25 * GIB), 918e12, 1640e9, 448e9),
        Chip("a100", "gpu", 80 * 10**9, 312e12, 2039e9, 600e9, 8, 25e9),
        Chip("h100", "gpu", 80 * 10**9, 989e12, 3350e9, 900e9, 8, 50e9),
        Chip("h200", "gpu", int(139.8 * GIB), 989e12, 4800e9, 900e9, 8, 50e9),
    )
}
"""Published figures (cloud.google.com/tpu/docs, nvidia.com data sheets; between nodes a 200 or 400 Gb/s port a GPU)."""


@dataclasses.dataclass(frozen=True)
class Slice:
    """A chip and how many: `v5p:2x2x4` (a TPU topology) or `h100:8`."""

    chip: Chip
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def host(self) -> int:
        """Chips of one process (a TPU slice of several hosts has four in each)."""
        return min(self.size, self.chip.node or 4)

    def apart(self, count: int) -> int:
        """Chips of the slice when every process sets `count` apart."""
        return count * self.size // self.host

    @property
    def links(self) -> float:
        """Bytes per second and chip that a collective over the whole slice moves at best."""
        return self.chip.network if self.chip.node and self.size > self.chip.node else self.chip.links

    @property
    def name(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"


def parse_slice(text: str) -> Slice:
    """Reads `v5p:2x2x4`; raises `UserError` saying what was expected."""
    name, _, shape = text.partition(":")
    if name not in CHIPS:
        raise UserError(
            f"plan.topology='{text}': chip '{name}' is unknown; expected a slice (v5p:2x2x1, h100:8) of one of "
            f"{', '.join(CHIPS)}"
        )
    sizes = tuple(int(n) for n in shape.split("x") if n.isdigit())
    if not sizes or min(sizes) < 1 or "x".join(map(str, sizes)) != shape:
        raise UserError(f"plan.topology='{text}': expected CHIP:SIZES such as v5p:2x2x4, v5e:4x8 or h100:8")
    dimensions = {"v5p": 3, "v5e": 2, "v6e": 2}.get(name, 1)
    if len(sizes) != dimensions:
        raise UserError(f"plan.topology='{text}': {name} has {dimensions} dimension(s)")
    return Slice(CHIPS[name], sizes)


def rollout_slice(chip: Chip, size: int) -> Slice:
    """A small topology of `size` chips for programs that one sampler runs."""
    known: dict[str, dict[int, tuple[int, ...]]] = {
        "v5e": {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4)},
        "v6e": {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4)},
        "v5p": {1: (2, 2, 1), 2: (2, 2, 1), 4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4)},
    }
    shapes = known[chip.name]
    fitting = [n for n in sorted(shapes) if n >= size]
    if not fitting:
        raise UserError(f"one sampler over {size} {chip.name} chips: expected at most {max(shapes)}")
    return Slice(chip, shapes[fitting[0]])
