"""Small trajectories and rows that the learning tests share."""

from __future__ import annotations

import dataclasses

import numpy as np

from envace_jax.learning.packing import ROLE_CODES, TrainRow
from envace_jax.model.spec import PRESETS
from envace_jax.text.transcript import Role

SPEC = dataclasses.replace(
    PRESETS["tiny"], vocab_size=96, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=64
)


@dataclasses.dataclass(frozen=True)
class FakeSegment:
    role: Role
    index: int = 0
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    row: int = 0
    start: int = 0
    finish: str = "stop"
    text: str = ""


@dataclasses.dataclass(frozen=True)
class FakeRow:
    role: Role
    ids: tuple[int, ...]
    sampled: tuple[bool, ...]
    logprobs: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class FakeTrajectory:
    group: int
    reward: float | None
    segments: tuple[FakeSegment, ...] = ()
    rows: tuple[FakeRow, ...] = ()
    task_id: str = "t"
    member: int = 0


def random_row(
    rng: np.random.Generator,
    length: int,
    vocab: int = 96,
    role: Role = Role.ACT,
    advantage: float | None = None,
) -> TrainRow:
    """A row with one to three outputs at random places."""
    sampled = np.zeros(length, bool)
    at = 1 + int(rng.integers(0, max(length // 4, 1)))
    for _ in range(int(rng.integers(1, 4))):
        end = min(length, at + int(rng.integers(1, max(length // 3, 2))))
        sampled[at:end] = True
        at = end + 1 + int(rng.integers(0, 3))
        if at >= length:
            break
    value = float(rng.normal()) if advantage is None else advantage
    return TrainRow(
        ids=rng.integers(0, vocab, length).astype(np.int32),
        sampled=sampled,
        sampler_logprobs=np.where(sampled, -np.log(vocab) + 0.01 * rng.normal(size=length), 0).astype(np.float32),
        advantages=np.where(sampled, value, 0).astype(np.float32),
        role=np.full(length, ROLE_CODES[role], np.int8),
    )


def random_rows(seed: int, n: int, low: int = 8, high: int = 40, vocab: int = 96) -> list[TrainRow]:
    rng = np.random.default_rng(seed)
    roles = list(Role)
    return [random_row(rng, int(rng.integers(low, high)), vocab, roles[i % 2]) for i in range(n)]
