"""What a program of whole episodes works on: static sizes, lanes, pieces that lie ready, and the rules of all lanes.

`automaton` has the program; here are its records and the empty ones that it is compiled with.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from envace_jax.sampling.engine import EngineConfig

ACT, REHEARSE = 0, 1
EMPTY, GOING, DONE, HANDED = range(4)
NOBODY = -1
FRAME = 64  # tokens of the longest piece of `Protocol.frame`
N_TAGS, N_STOPS = 32, 4
COUNTERS = ("iterations", "tokens_sampled", "tokens_prefilled", "tokens_prefill_padded")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of the programs.

    lanes: trajectories together. row: tokens of the longest ledger. output: tokens of the longest output. segments,
    turns, calls: most of a trajectory, of a task, of an output. chunk: tokens that a lane may gain before its stops are
    looked at. fill: (rows, tokens) of one prefill. piece: tokens of the longest piece that is appended at once.
    store: tokens of all pieces of a lane. lengths: of the cache rows, shortest first.
    """

    lanes: int
    row: int
    output: int
    segments: int
    turns: int
    calls: int
    chunk: int
    fill: tuple[int, int]
    piece: int
    store: int
    lengths: tuple[int, ...]

    @classmethod
    def plan(
        cls, *, lanes: int, row: int, prompt: int, output: int, segments: int, chunk: int, prefill_chunk: int
    ) -> Sizes:
        """Sizes for ledgers of at most `row` tokens whose prompts have at most `prompt`."""
        # What a lane gets to read between two outputs is short, and few lanes get it at a time.
        tokens = max(1, min(64, prefill_chunk // 4))
        rows = max(1, min(lanes, 2 * prefill_chunk // tokens))
        top = -(-(2 * row + max(tokens, chunk)) // 16) * 16
        lengths = tuple(sorted({-(-top // (16 * cut)) * 16 for cut in (4, 2, 1)}))
        piece = min(2048, prompt)
        return cls(lanes, row, output, segments, 16, 8, chunk, (rows, tokens), piece, 2 * piece + 512, lengths)

    @classmethod
    def of(cls, engine: EngineConfig, rules: Any) -> Sizes:
        """Sizes for an engine's configuration and the rules of an episode (`rehearsal.settings.EpisodeConfig`)."""
        return cls.plan(
            lanes=engine.slots,
            row=engine.max_length,
            prompt=rules.max_input_tokens,
            output=max(rules.max_act_tokens, rules.max_rehearse_tokens),
            segments=rules.max_segments,
            chunk=engine.chunk,
            prefill_chunk=engine.prefill_chunk,
        )

    @property
    def block(self) -> int:
        """Tokens of the longest block that is copied."""
        return min(2048, self.output)

    @property
    def ledger(self) -> int:
        """Places of a ledger on the device: whatever is written whole, garbage behind it included, stays inside."""
        return self.row + max(self.output, self.piece + self.block + self.chunk + 4 * FRAME)


class Lanes(NamedTuple):
    """Where every trajectory stands; all arrays begin with the lane.

    tokens, logps: the two ledgers, [lanes, ledger] each. known: their lengths. valid: how many have keys and values.
    owner: whose token lies at a position of the cache row. used: positions of the cache row in use.
    told: 0 before REHEARSE was asked, then one more than the turn in which it was asked last.
    start, limit: of the segment under way. blocks: where the calls of ACT's latest output lie, n_calls how many they
    are, call the one that is being answered. segments: role, start, length and finish of each.
    """

    tokens: tuple[Any, Any]
    logps: tuple[Any, Any]
    known: Any
    valid: Any
    owner: Any
    used: Any
    status: Any
    role: Any
    turn: Any
    n_turns: Any
    told: Any
    acts: Any
    n_segments: Any
    start: Any
    limit: Any
    call: Any
    n_calls: Any
    blocks: Any
    segments: Any


class Book(NamedTuple):
    """What lies ready for every lane: pieces as (offset, length) into `store`, and sampling keys.

    user [lanes, turns, 2]: what ACT's ledger gets when a turn begins. lead [lanes, turns + 1, turns, 2]: what comes
    before a call in REHEARSE's, by `told` and turn. keys [lanes, segments, 2 roles, 2 words].
    """

    store: Any
    user: Any
    lead: Any
    keys: Any


class Protocol(NamedTuple):
    """What is the same for all lanes.

    frame [4, F], frame_lengths: what comes before the first result, between two, after the last, and after a call.
    tags: call, end of call, response, end of response; think and end of thinking. all_tags, stops: ids, -1 unused.
    caps: tokens of an output of ACT, of REHEARSE, of a prompt, of a row; ACT outputs; segments. top_k, temperature,
    top_p: sampling.
    """

    frame: Any
    frame_lengths: Any
    tags: Any
    all_tags: Any
    stops: Any
    caps: Any
    top_k: Any
    temperature: Any
    top_p: Any


BEFORE, BETWEEN, BEHIND, AFTER_CALL = range(4)
MAX_ACT, MAX_REHEARSE, MAX_PROMPT, MAX_ROW, MAX_ACTS, MAX_SEGMENTS = range(6)


def empty_lanes(sizes: Sizes) -> Lanes:
    """Lanes without a trajectory, on the host."""
    b = sizes.lanes
    whole = lambda *shape: np.zeros((b, *shape), np.int32)  # noqa: E731
    floats = lambda: np.zeros((b, sizes.ledger), np.float32)  # noqa: E731
    return Lanes(
        tokens=(whole(sizes.ledger), whole(sizes.ledger)),
        logps=(floats(), floats()),
        known=whole(2),
        valid=whole(2),
        owner=np.full((b, sizes.lengths[-1]), NOBODY, np.int8),
        used=whole(),
        status=whole(),
        role=whole(),
        turn=whole(),
        n_turns=whole(),
        told=whole(),
        acts=whole(),
        n_segments=whole(),
        start=whole(),
        limit=whole(),
        call=whole(),
        n_calls=whole(),
        blocks=whole(sizes.calls, 2),
        segments=whole(sizes.segments, 4),
    )


def empty_book(sizes: Sizes) -> Book:
    """A book without pieces, on the host."""
    b, t = sizes.lanes, sizes.turns
    return Book(
        store=np.zeros((b, sizes.store + sizes.piece), np.int32),
        user=np.zeros((b, t, 2), np.int32),
        lead=np.zeros((b, t + 1, t, 2), np.int32),
        keys=np.zeros((b, sizes.segments, 2, 2), np.uint32),
    )


def empty_protocol() -> Protocol:
    """Of the right shapes, on the host."""
    return Protocol(
        frame=np.zeros((4, FRAME), np.int32),
        frame_lengths=np.zeros(4, np.int32),
        tags=np.full(6, -1, np.int32),
        all_tags=np.full(N_TAGS, -1, np.int32),
        stops=np.full(N_STOPS, -1, np.int32),
        caps=np.zeros(6, np.int32),
        top_k=np.int32(0),
        temperature=np.float32(1),
        top_p=np.float32(1),
    )
