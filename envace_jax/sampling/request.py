"""What goes into the engine and what comes out: small frozen records."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np


class Guide(Protocol):
    """What a constrained request may say next."""

    def allowed(self) -> np.ndarray:
        """Which ids may come next, bool [n]; ids from n on may not. Must leave at least one."""

    def accept(self, token: int) -> None:
        """A token was sampled."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. Temperature 0 is greedy; top_k 0 and top_p 1 leave the distribution whole."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Request:
    """One segment to sample.

    `key` is folded with the run's seed into the sampling key: equal keys give equal samples whatever else is in
    the batch. A request whose prompt extends the finished row of the same `affinity` goes on in that row; until
    `Engine.release(affinity)` the row is kept in preference to others. With a `guide` only the tokens that it allows
    are sampled, one device call a token, and the stored log-probabilities are those of the masked distribution.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    key: tuple[int, ...]
    affinity: Hashable = None
    param_set: str = "policy"
    guide: Guide | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """What a request got: sampled ids (the stop id included), their log-probabilities, and why it ended.

    `finish` is stop, length, cancelled (with what was sampled so far) or nan (with what was sampled before).
    `experts`: see `rehearsal.ledger.Segment`; empty unless the engine records routing.
    """

    request_id: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str
    experts: bytes = b""


@dataclasses.dataclass
class Live:
    """A request on its way, from `submit` to its completion.

    shares: some of its prompt was copied from another row. alone: it takes nothing from others any more.
    """

    id: int
    request: Request
    prompt: np.ndarray
    limit: int
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    experts: bytearray = dataclasses.field(default_factory=bytearray)
    shares: bool = False
    alone: bool = False
