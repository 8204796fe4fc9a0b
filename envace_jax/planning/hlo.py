"""Collectives of a compiled program: which mesh axes they run over, and the bytes that a chip receives.

Reads the text of an optimised HLO module. Computations are followed from the entry; what a `while` body does counts
as often as the loop runs (its known trip count, or the caller's word where the count is data).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

ITEMSIZE = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
ITEMSIZE |= {"s64": 8, "u64": 8, "f64": 8, "f8e4m3fn": 1, "f8e5m2": 1, "c64": 8}
_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_CONSTANT = re.compile(r"s32\[\]\S* constant\((\d+)\)")
_OPERATION = re.compile(r"(?<=[\s)}\]])([a-z][\w\-]*)\(")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:to_apply|calls|body|condition|branch_computations|called_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'"?known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)"?')
_GROUPS = re.compile(r"replica_groups=\{(\{[\d,{} ]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{([^}]*)\}")
_MESH_AXIS = re.compile(r"'([^']+)'(?:=(\d+)|:\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{} ]*\})\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction: kind, mesh axes, bytes that a chip receives a time, and how often it runs."""

    kind: str
    axes: tuple[str, ...]
    received: float
    times: int

    @property
    def total(self) -> float:
        return self.received * self.times


def _bytes(text: str) -> list[int]:
    return [
        ITEMSIZE[dtype] * math.prod(int(n) for n in dims.split(",") if n)
        for dtype, dims in _SHAPE.findall(text)
        if dtype in ITEMSIZE
    ]


def _group(line: str) -> list[int] | None:
    if found := _GROUPS.search(line) or _PAIRS.search(line):
        first = found.group(1).split("}")[0].strip("{ ")
        return [int(n) for n in first.split(",")] if first else None
    if found := _IOTA.search(line):
        shape = [int(n) for n in found.group(1).split(",")]
        dims = [int(n) for n in found.group(2).split(",")]
        ids = np.arange(math.prod(dims)).reshape(dims)
        if found.group(3):
            ids = ids.transpose([int(n) for n in found.group(3).split(",")])
        return ids.reshape(shape)[0].tolist()
    if found := _MESH.search(line):
        return _mesh_group(*found.groups())
    return None


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _mesh_group(sizes: str, order: str | None, permutation: str | None, members: str) -> list[int]:
    """First group of `mesh['a'=4,'b'=2], device_ids=([4,2]T(1,0)) {'a'}`.

    The order of devices is that of the mesh where none is given. A member may be a part of an axis: `'a':(before)size`.
    """
    shape = {name: int(size) for name, size, _, _ in _MESH_AXIS.findall(sizes)}
    devices = np.arange(math.prod(shape.values()))
    if order:
        devices = devices.reshape(_numbers(order))
        devices = devices.transpose(_numbers(permutation)) if permutation else devices
    strides = dict(zip(shape, np.cumprod([1, *list(shape.values())[:0:-1]])[::-1].tolist()))
    places = np.zeros(1, int)
    for name, _, before, size in _MESH_AXIS.findall(members):
        n = int(size) if size else shape[name]
        step = strides[name] * shape[name] // (int(before or 1) * n)
        places = (places[:, None] + np.arange(n) * step).reshape(-1)
    return devices.reshape(-1)[places].tolist()


def _received(op: str, shapes: list[int], n: int) -> float:
    """Bytes that one of n chips receives in a ring, from the shapes on the left of the instruction.

    The left side of a `-start` holds operands and results (and, for permutes, two flags); of several arrays that were
    combined into one collective, all count.
    """
    kind = op.removesuffix("-start")
    if op.endswith("-start") and kind != "all-reduce":
        # Operands and results lie side by side: the larger half is what a gather makes and a scatter starts from.
        size = max(sum(shapes[: len(shapes) // 2]), sum(shapes[len(shapes) // 2 :])) if len(shapes) > 1 else sum(shapes)
        if kind == "collective-permute":
            return max(shapes, default=0)
        return size * (n - 1) / n
    size = sum(shapes)
    if kind == "all-reduce":
        return 2 * size * (n - 1) / n
    if kind == "reduce-scatter":  # the result is one part of n
        return size * (n - 1)
    return size if kind == "collective-permute" else size * (n - 1) / n


def _axes(group: Sequence[int], mesh_shape: Sequence[int], names: Sequence[str]) -> tuple[str, ...]:
    coordinates = np.array(np.unravel_index(np.asarray(group), tuple(mesh_shape)))
    return tuple(name for name, row in zip(names, coordinates) if len(set(row.tolist())) > 1)


def computations(text: str) -> tuple[dict[str, list[tuple[str, str]]], str]:
    """(name, right side) of the instructions by computation, the root last; and the name of the entry."""
    found: dict[str, list[tuple[str, str]]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            current = match.group(2)
            found[current] = []
            entry = current if match.group(1) else entry
        elif line.rstrip() == "}":  # a kernel's own text may begin a line with more of them
            current = None
        elif current is not None and (match := _INSTRUCTION.match(line)):
            found[current].append((match.group(2), match.group(3)))
    return found, entry


def trips(line: str, bodies: dict[str, list[tuple[str, str]]]) -> int | None:
    """How often a `while` runs: by its annotation, else by a condition that compares a counter with a constant."""
    if known := _TRIPS.search(line):
        return int(known.group(1))
    condition = _CONDITION.search(line)
    body = bodies.get(condition.group(1)) if condition else None
    if not body or operation(body[-1][1]) not in ("compare", "fusion"):
        return None
    root = body[-1][1]
    operands = re.findall(r"%([\w.\-]+)", root.partition(f"{operation(root)}(")[2].partition(")")[0])
    limits = [match.group(1) for name, right in body if name in operands and (match := _CONSTANT.match(right))]
    return int(limits[0]) if len(limits) == 1 else None


def operation(line: str) -> str:
    """The opcode of an instruction's right side."""
    match = _OPERATION.search(" " + line)
    return match.group(1) if match else ""


def collectives(text: str, mesh_shape: Sequence[int], names: Sequence[str], unknown_trips: int = 1) -> list[Collective]:
    """Every collective that the program runs; loops whose count is data run `unknown_trips` times."""
    bodies, entry = computations(text)
    times: Counter[str] = Counter()

    def visit(name: str, n: int) -> None:
        times[name] += n
        for _, line in bodies.get(name, ()):
            called = [c.strip("%{} ") for found in _CALLED.findall(line) for c in found.split(",")]
            if not called:
                continue
            loop = n
            if operation(line) == "while":
                loop = n * (trips(line, bodies) or unknown_trips)
            for other in called:
                if other in bodies:
                    visit(other, loop)

    visit(entry, 1)
    out = []
    for name, lines in bodies.items():
        for _, line in lines if times[name] else ():
            op = operation(line)
            kind = op.removesuffix("-start")
            if kind not in _KINDS:
                continue
            group = _group(line)
            if group is None or len(group) < 2:
                continue
            received = _received(op, _bytes(line[: line.index(f"{op}(")]), len(group))
            if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
                kind, received = "reduce-scatter", received / 2  # fused with the slice that follows: half the bytes
            out.append(Collective(kind, _axes(group, mesh_shape, names), received, times[name]))
    return out


def by_axis(found: Sequence[Collective]) -> dict[str, float]:
    """Total bytes received by one chip, by mesh axes (`fsdp`, `fsdp+tensor`, ...)."""
    totals: dict[str, float] = {}
    for c in found:
        key = "+".join(c.axes) or "none"
        totals[key] = totals.get(key, 0.0) + c.total
    return totals


def loops(text: str) -> list[int]:
    """Known trip counts of the program's loops."""
    bodies, _ = computations(text)
    whiles = [right for lines in bodies.values() for _, right in lines if operation(right) == "while"]
    return [n for n in (trips(right, bodies) for right in whiles) if n is not None]
