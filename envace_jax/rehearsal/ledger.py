"""The token ledger: append-only rows of ids, what of them was sampled, and with which log-probability.

A sampled id stays that id for ever: rows only grow, by ids that are given, never by text. The prompt that a sampler saw
is therefore the beginning of the row that the learner trains on. Where old thinking is dropped the row is closed and
`fork` begins another with the ids that stay; those count as context there, so every sampled id is trained exactly once,
in the row that it was sampled in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from envace_jax.text.transcript import Role

FINISHES = ("stop", "length", "cancelled", "nan")
"""How a segment can end: by a stop id, at its token limit, cancelled, or dropped for NaN logits."""


@dataclass(frozen=True)
class Segment:
    """One sampled output of one role.

    Attributes:
        role: who wrote it.
        index: its place among the trajectory's segments, over both roles.
        ids: the sampled ids, the stop id included.
        logprobs: natural log-probability of each id under the sampler.
        finish: one of `FINISHES`.
        text: the decoded ids without the stop id.
        row: index of the row that holds it.
        start: position of its first id in that row.
        experts: int16 [len(ids), layers, k], row by row, in the machine's byte order: which experts of a mixture the
            position went through that each id was sampled from. Empty where the sampler did not record them.
    """

    role: Role
    index: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str
    text: str
    row: int
    start: int
    experts: bytes = b""


@dataclass(frozen=True)
class Row:
    """One conversation of one role as ids; all three tuples have the same length.

    Attributes:
        role: whose conversation it is.
        ids: token ids.
        sampled: True where the id was sampled in this row.
        logprobs: the sampler's log-probability, 0.0 where not sampled.
    """

    role: Role
    ids: tuple[int, ...] = ()
    sampled: tuple[bool, ...] = ()
    logprobs: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def context(self, ids: Iterable[int]) -> Row:
        """The row with ids that nobody sampled appended."""
        ids = tuple(ids)
        return Row(self.role, self.ids + ids, self.sampled + (False,) * len(ids), self.logprobs + (0.0,) * len(ids))

    def sample(self, ids: Sequence[int], logprobs: Sequence[float]) -> Row:
        """The row with a sampled segment appended.

        Raises:
            ValueError: when ids and log-probabilities differ in number, or the row has no context yet.
        """
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} sampled ids came with {len(logprobs)} log-probabilities")
        if not self.ids:
            raise ValueError("a row must begin with context: nothing can be sampled from an empty prompt")
        return Row(self.role, self.ids + tuple(ids), self.sampled + (True,) * len(ids), self.logprobs + tuple(logprobs))

    def fork(self, keep: Sequence[tuple[int, int]]) -> Row:
        """A new row with the ids of the spans `[start, end)` of this one, in order, all of them context.

        Raises:
            ValueError: when the spans overlap, are out of order or leave the row.
        """
        at = 0
        ids: list[int] = []
        for start, end in keep:
            if not at <= start <= end <= len(self.ids):
                raise ValueError(f"spans to keep must be ordered and within 0..{len(self.ids)}, got {list(keep)}")
            ids.extend(self.ids[start:end])
            at = end
        return Row(self.role).context(ids)


def sampled_spans(segments: Iterable[Segment], row: int) -> list[tuple[int, int]]:
    """Where the segments of one row lie in it: `[start, end)` spans in order."""
    return [(s.start, s.start + len(s.ids)) for s in segments if s.row == row]


def between(ids: Sequence[int], open_id: int | None, close_id: int | None) -> list[tuple[int, ...]]:
    """What stands between each opening tag and the next closing one, tags excluded; an unclosed tag gives nothing."""
    found: list[tuple[int, ...]] = []
    start: int | None = None
    if open_id is None or close_id is None:
        return found
    for at, token in enumerate(ids):
        if token == open_id and start is None:
            start = at + 1
        elif token == close_id and start is not None:
            found.append(tuple(ids[start:at]))
            start = None
    return found
