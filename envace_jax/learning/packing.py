"""From trajectories to arrays: training rows, best-fit packing, microbatches.

A ledger row of L ids gives L-1 predictions.  Packing lays several rows side by side in one batch row of fixed
length T, told apart by segment ids; the predictions that count (those of sampled ids) are compacted to the front
of the batch row, so that the vocabulary is computed for them alone.  Everything here is numpy; masks come from the
ledger, never from token values.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envace_jax.text.transcript import ROLE_CODES, Role

NORMALISERS = ("token", "sequence", "constant")


@dataclasses.dataclass(frozen=True)
class TrainRow:
    """One ledger row for the learner; all arrays have its length.

    ids int32; sampled bool; sampler_logprobs float32 (0 where not sampled); advantages float32; role int8 (0 ACT,
    1 REHEARSE); output int32: which sampled output of the row an id belongs to (0, 1, ...; -1 where not sampled);
    copies int32: how often the loss counts the id (1 but for the reference's duplicated rows); experts int16
    [length, layers, k]: the experts of the position that each id was sampled from, -1 where none are known.
    """

    ids: np.ndarray
    sampled: np.ndarray
    sampler_logprobs: np.ndarray
    advantages: np.ndarray
    role: np.ndarray
    output: np.ndarray = None  # type: ignore[assignment]  # left out: filled in below
    copies: np.ndarray = None  # type: ignore[assignment]
    experts: np.ndarray | None = None

    def __post_init__(self) -> None:
        if len(self.ids) < 2 or self.sampled[0]:
            raise ValueError("a training row needs at least two ids and starts with context, not with a sampled id")
        if self.output is None:
            # Without the ledger's word, a run of sampled ids is one output.
            starts = self.sampled & ~np.concatenate([[False], self.sampled[:-1]])
            object.__setattr__(self, "output", np.where(self.sampled, np.cumsum(starts) - 1, -1).astype(np.int32))
        if self.copies is None:
            object.__setattr__(self, "copies", np.ones(len(self.ids), np.int32))


def train_rows(
    trajectory: Any,
    advantages: Mapping[Role, float] | Sequence[float],
    extra_copies: Sequence[int] | None = None,
    routing: tuple[int, int] | None = None,
) -> list[TrainRow]:
    """Training rows of one trajectory: those of its ledger rows that hold sampled ids, up to the last of them.

    advantages: one a role, or one an output in the order of the trajectory's segments. routing: layers and experts a
    token, where the rows are to carry what the segments recorded.

    A trajectory with reward None gives none: no verdict, no gradient.  Raises ValueError when a segment's ids are
    not the ids of its row (the prefix that the sampler saw must be the row that the learner trains on).
    """
    if trajectory.reward is None:
        return []
    outputs = [np.full(len(row.ids), -1, np.int32) for row in trajectory.rows]
    copies = [np.ones(len(row.ids), np.int32) for row in trajectory.rows]
    experts: list[np.ndarray | None] = [None] * len(outputs)
    for k, segment in enumerate(trajectory.segments):
        span = slice(segment.start, segment.start + len(segment.ids))
        row = trajectory.rows[segment.row]
        if tuple(row.ids[span]) != tuple(segment.ids) or not all(row.sampled[span]):
            raise ValueError(f"task {trajectory.task_id}: output {segment.index} is not what row {segment.row} holds")
        outputs[segment.row][span] = k
        if extra_copies is not None:
            copies[segment.row][span] += extra_copies[k]
        if routing is not None:
            experts[segment.row] = _with_experts(experts[segment.row], len(row.ids), span, segment.experts, routing)
    result = []
    for row, output, copy, chosen in zip(trajectory.rows, outputs, copies, experts):
        sampled = np.asarray(row.sampled, bool)
        if not sampled.any():
            continue
        if (output[sampled] < 0).any():
            raise ValueError(f"task {trajectory.task_id}: a sampled id belongs to no output")
        # What came after the last output is seen by nothing that is trained.
        end = int(np.flatnonzero(sampled)[-1]) + 1
        sampled, output = sampled[:end], output[:end]
        if isinstance(advantages, Mapping):
            advantage = np.full(end, advantages.get(row.role, 0.0), np.float32)
        else:
            advantage = np.asarray(advantages, np.float32)[output]  # -1, where nothing was sampled, is masked below
        result.append(
            TrainRow(
                ids=np.asarray(row.ids[:end], np.int32),
                sampled=sampled,
                sampler_logprobs=np.asarray(row.logprobs[:end], np.float32),
                advantages=np.where(sampled, advantage, np.float32(0)).astype(np.float32),
                role=np.full(end, ROLE_CODES[row.role], np.int8),
                output=np.where(sampled, output - output[sampled].min(), -1).astype(np.int32),
                copies=copy[:end],
                experts=None if chosen is None else chosen[:end],
            )
        )
    return result


def _with_experts(
    known: np.ndarray | None, length: int, span: slice, recorded: bytes, shape: tuple[int, int]
) -> np.ndarray:
    """A row's experts [length, layers, k] with those that one segment recorded."""
    if known is None:
        known = np.full((length, *shape), -1, np.int16)
    if recorded:
        known[span] = np.frombuffer(recorded, np.int16).reshape(-1, *shape)
    return known


def token_weights(row: TrainRow, normaliser: str) -> np.ndarray:
    """Weight of each id in the loss, float32 of the row's length.

    `token`: 1 for every sampled id (global token mean).  `sequence`: 1 / length of its output, so that the loss is
    the mean over outputs of their token means.  `constant`: as `token`; it is divided by a number that does not
    depend on lengths (see `loss_denominator`).
    """
    weights = np.where(row.sampled, row.copies, 0).astype(np.float32)
    if normaliser == "sequence":
        lengths = np.bincount(row.output[row.sampled])
        weights[row.sampled] /= lengths[row.output[row.sampled]]
    elif normaliser not in NORMALISERS:
        raise ValueError(f"unknown normaliser {normaliser!r} (one of {NORMALISERS})")
    return weights


def loss_denominator(rows: Sequence[TrainRow], normaliser: str, constant: float = 0.0) -> float:
    """What the summed loss of these rows is divided by: all their sampled ids, zero-advantage ones included.

    `constant` gives outputs x constant, free of the lengths that were sampled.
    """
    if normaliser == "constant":
        if constant <= 0:
            raise ValueError("normaliser 'constant' needs a constant above 0 (such as the output limit in tokens)")
        outputs = sum(
            int(row.copies[row.output == k].max())
            for row in rows
            for k in np.unique(row.output[row.sampled])
        )
        return outputs * constant
    return float(sum(token_weights(row, normaliser).sum(dtype=np.float64) for row in rows))


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of row indices, each at most `capacity` long: longest first, each into the fullest bin that holds it.

    Deterministic: equal lengths keep their order.  Raises ValueError for a row longer than a bin.
    """
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, bin), sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > capacity:
            raise ValueError(
                f"a row of {length} tokens does not fit learning.row_tokens={capacity}: raise it, or lower the limits "
                "on prompt and output"
            )
        at = bisect.bisect_left(free, (length, -1))
        room, chosen = free.pop(at) if at < len(free) else (capacity, len(bins))
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(index)
        bisect.insort(free, (room - length, chosen))
    return bins


@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed rows [N, T], numpy.  The first three lie by position; the others are compacted predictions.

    tokens int32, positions int32 (from 0 in each packed row), segment_ids int32 (1, 2, ...; 0 is padding);
    target_index int32: the position whose hidden state predicts; targets int32: the id it predicts; mask bool;
    output int32: outputs of a batch row numbered from 1, 0 where not mask; role int8; weights, advantages,
    sampler_logprobs float32.  experts int16 [N, T, layers, k], by position: experts to use again, -1 for the router's
    own choice; None where nothing is replayed.  `packed` names the source rows of each batch row, `fill` the share
    that is not padding.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
    target_index: np.ndarray
    targets: np.ndarray
    mask: np.ndarray
    output: np.ndarray
    role: np.ndarray
    weights: np.ndarray
    advantages: np.ndarray
    sampler_logprobs: np.ndarray
    experts: np.ndarray | None = None
    packed: list[list[int]] = dataclasses.field(default_factory=list)

    @property
    def fill(self) -> float:
        used = sum(bool(members) for members in self.packed)
        return float((self.segment_ids > 0).sum() / max(used * self.tokens.shape[1], 1))

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that go to the device, by name."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "packed"}
        return {name: array for name, array in named.items() if array is not None}


def pack_rows(
    rows: Sequence[TrainRow],
    row_tokens: int,
    n_rows_multiple: int = 1,
    *,
    normaliser: str = "token",
    routing: tuple[int, int] | None = None,
) -> Batch:
    """Packs rows into [N, row_tokens] with N a multiple of `n_rows_multiple` (at least one multiple).

    A row of L ids takes L-1 positions: its last id is only ever predicted. routing: layers and experts a token, where
    the batch is to carry experts to use again.
    """
    bins = best_fit([len(row.ids) - 1 for row in rows], row_tokens)
    n = max(-(-len(bins) // n_rows_multiple), 1) * n_rows_multiple
    bins += [[] for _ in range(n - len(bins))]
    ints = {
        name: np.zeros((n, row_tokens), np.int32)
        for name in ("tokens", "positions", "segment_ids", "target_index", "targets", "output")
    }
    floats = {name: np.zeros((n, row_tokens), np.float32) for name in ("weights", "advantages", "sampler_logprobs")}
    mask = np.zeros((n, row_tokens), bool)
    role = np.zeros((n, row_tokens), np.int8)
    experts = None if routing is None else np.full((n, row_tokens, *routing), -1, np.int16)
    for b, members in enumerate(bins):
        start = filled = outputs = 0
        for segment, index in enumerate(members, 1):
            row = rows[index]
            length = len(row.ids) - 1
            span = slice(start, start + length)
            ints["tokens"][b, span] = row.ids[:-1]
            ints["positions"][b, span] = np.arange(length)
            ints["segment_ids"][b, span] = segment
            where = np.flatnonzero(row.sampled[1:])
            front = slice(filled, filled + len(where))
            ints["target_index"][b, front] = start + where
            ints["targets"][b, front] = row.ids[where + 1]
            ints["output"][b, front] = row.output[where + 1] + outputs + 1  # type: ignore[index]
            floats["weights"][b, front] = token_weights(row, normaliser)[where + 1]
            floats["advantages"][b, front] = row.advantages[where + 1]
            floats["sampler_logprobs"][b, front] = row.sampler_logprobs[where + 1]
            mask[b, front] = True
            role[b, front] = row.role[where + 1]
            if experts is not None and row.experts is not None:
                experts[b, span] = row.experts[1:]  # by the position that predicts
            start += length
            filled += len(where)
            outputs += int(row.output.max(initial=-1)) + 1  # type: ignore[union-attr]
    return Batch(**ints, **floats, mask=mask, role=role, experts=experts, packed=bins)


def needs_gradient(row: TrainRow) -> bool:
    """Whether a row's policy-gradient term can be other than zero."""
    return bool((row.advantages[row.sampled] != 0).any())


def microbatches(batch: Batch, rows_per_microbatch: int, capacity: int) -> tuple[dict[str, np.ndarray], int, int]:
    """Batch rows as [capacity, rows_per_microbatch, T] arrays, how many microbatches are real, and the capacity.

    The device program loops over the real ones, so the capacity fixes its shape without costing work; when the
    rows need more, the capacity doubles until they fit (a new shape, and so a compilation: counted by the caller).
    """
    real = -(-len(batch.tokens) // rows_per_microbatch)
    while capacity < real:
        capacity *= 2
    shaped = {}
    for name, array in batch.arrays().items():
        full = np.zeros((capacity * rows_per_microbatch, *array.shape[1:]), array.dtype)
        full[: len(array)] = array
        shaped[name] = full.reshape(capacity, rows_per_microbatch, *array.shape[1:])
    return shaped, real, capacity
