"""Packing: nothing lost, nothing padded into a statistic, weights as the normaliser says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learning_common import FakeRow, FakeSegment, FakeTrajectory, random_rows

from envace_jax.learning.packing import (
    TrainRow,
    best_fit,
    loss_denominator,
    microbatches,
    pack_rows,
    token_weights,
    train_rows,
)
from envace_jax.text.transcript import Role

pytestmark = pytest.mark.quick
ROOT = Path(__file__).parents[2]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 130))
def test_best_fit_places_every_row_once(lengths, capacity):
    bins = best_fit(lengths, capacity)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= capacity for b in bins)
    # No two bins could be one: a property of best fit that bounds the waste.
    loads = sorted(sum(lengths[i] for i in b) for b in bins)
    assert len(loads) < 2 or loads[0] + loads[1] > capacity


def test_row_longer_than_a_bin_is_named():
    with pytest.raises(ValueError, match="learning.row_tokens=50"):
        best_fit([3, 51], 50)


@pytest.mark.parametrize("seed", range(5))
def test_packed_predictions_are_the_rows(seed):
    rows = random_rows(seed, 23)
    batch = pack_rows(rows, 64, 4)
    assert len(batch.tokens) % 4 == 0
    seen = 0
    for b, members in enumerate(batch.packed):
        offset, front, outputs = 0, 0, 0
        for segment, i in enumerate(members, 1):
            row, n = rows[i], len(rows[i].ids) - 1
            assert (batch.tokens[b, offset : offset + n] == row.ids[:-1]).all()
            assert (batch.positions[b, offset : offset + n] == np.arange(n)).all()
            assert (batch.segment_ids[b, offset : offset + n] == segment).all()
            for t in range(1, len(row.ids)):
                if not row.sampled[t]:
                    continue
                assert batch.mask[b, front]
                assert batch.target_index[b, front] == offset + t - 1
                assert batch.targets[b, front] == row.ids[t]
                assert batch.advantages[b, front] == row.advantages[t]
                assert batch.sampler_logprobs[b, front] == row.sampler_logprobs[t]
                assert batch.role[b, front] == row.role[t]
                assert batch.output[b, front] == row.output[t] + outputs + 1
                front += 1
            outputs += row.output.max() + 1
            offset += n
        assert not batch.mask[b, front:].any() and not batch.weights[b, front:].any()
        assert not batch.segment_ids[b, offset:].any()
        seen += front
    assert seen == sum(int(r.sampled.sum()) for r in rows) == batch.mask.sum()


def test_ids_decide_nothing():
    """Pad id, turn end and any other id may be equal: the arrays but tokens and targets do not change."""
    rows = random_rows(3, 9)
    zeros = [
        TrainRow(np.zeros_like(r.ids), r.sampled, r.sampler_logprobs, r.advantages, r.role, r.output, r.copies)
        for r in rows
    ]
    a, b = pack_rows(rows, 64).arrays(), pack_rows(zeros, 64).arrays()
    for name in a:
        if name not in ("tokens", "targets"):
            assert (a[name] == b[name]).all(), name


def test_normalisers():
    rows = random_rows(4, 7)
    outputs = sum(len(np.unique(r.output[r.sampled])) for r in rows)
    assert loss_denominator(rows, "token") == sum(r.sampled.sum() for r in rows)
    assert loss_denominator(rows, "sequence") == pytest.approx(outputs, rel=1e-6)
    assert loss_denominator(rows, "constant", 100.0) == outputs * 100
    for row in rows:
        weights = token_weights(row, "sequence")
        for k in np.unique(row.output[row.sampled]):
            assert weights[row.output == k].sum() == pytest.approx(1.0)
    with pytest.raises(ValueError, match="unknown normaliser"):
        token_weights(rows[0], "words")
    with pytest.raises(ValueError, match="above 0"):
        loss_denominator(rows, "constant")


def test_microbatch_capacity_doubles():
    batch = pack_rows(random_rows(5, 40), 64, 2)
    arrays, real, capacity = microbatches(batch, 2, 2)
    assert real * 2 == len(batch.tokens) and capacity in (2, 4, 8, 16, 32) and capacity >= real
    assert arrays["tokens"].shape == (capacity, 2, 64)
    assert (arrays["tokens"].reshape(-1, 64)[: len(batch.tokens)] == batch.tokens).all()
    assert not arrays["mask"][real:].any()


def example(reward: float | None = 1.0) -> FakeTrajectory:
    row = FakeRow(
        Role.ACT,
        (1, 2, 3, 4, 5, 6, 7),
        (False, True, True, False, False, True, True),
        (0, -1, -2, 0, 0, -3, -4),
    )
    return FakeTrajectory(
        0,
        reward,
        (FakeSegment(Role.ACT, 0, (2, 3), row=0, start=1), FakeSegment(Role.ACT, 1, (6, 7), row=0, start=5)),
        (row, FakeRow(Role.ACT, (1, 2), (False, False), (0, 0))),
    )


def test_train_rows_from_a_trajectory():
    (row,) = train_rows(example(), {Role.ACT: 0.5}, extra_copies=[0, 2])
    assert row.output.tolist() == [-1, 0, 0, -1, -1, 1, 1]
    assert row.advantages.tolist() == [0, 0.5, 0.5, 0, 0, 0.5, 0.5]
    assert token_weights(row, "token").tolist() == [0, 1, 1, 0, 0, 3, 3]
    assert train_rows(example(None), {}) == []


def test_segment_that_is_not_its_row_is_an_error():
    bad = example()
    segment = FakeSegment(Role.ACT, 1, (6, 8), row=0, start=5)
    with pytest.raises(ValueError, match="output 1 is not what row 0 holds"):
        train_rows(FakeTrajectory(0, 1.0, (bad.segments[0], segment), bad.rows), {})
    with pytest.raises(ValueError, match="belongs to no output"):
        train_rows(FakeTrajectory(0, 1.0, bad.segments[:1], bad.rows), {})


def test_row_must_begin_with_context():
    ones = np.ones(3, bool)
    with pytest.raises(ValueError, match="starts with context"):
        TrainRow(np.arange(3), ones, np.zeros(3), np.zeros(3), np.zeros(3))


@pytest.fixture(scope="module")
def benchmark():
    """`benchmarks/packing.py`, whose table docs/scaling.md shows."""
    spec = importlib.util.spec_from_file_location("packing_benchmark", ROOT / "benchmarks/packing.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its records look their module up
    spec.loader.exec_module(module)
    return module


def test_ledger_rows_need_the_share_of_tokens_that_was_aimed_at(benchmark):
    """On the published settings: at most 0.70 and 0.40 of one row per output, rows of four mean ledgers 95% full."""
    figures = benchmark.measure(n=640)
    assert figures["ratio/stateless"] <= 0.70 and figures["ratio/stream"] <= 0.40
    assert figures["fill/stateless"] >= 0.95 and figures["fill/stream"] >= 0.95
    assert all(fill >= 0.95 for fill in benchmark.length_table_fill().values())
    for context in ("stateless", "stream"):
        assert 0 < figures[f"shared_ratio/{context}"] < figures[f"ratio/{context}"]


def test_shared_beginnings_by_hand(benchmark):
    """Four members: ACT's prompt of 10 of 30 tokens and REHEARSE's head of 5 stand once, a quarter of it each."""
    rows = benchmark.Rows([], stateless=[30, 12, 14], stream=[30, 21], prompt=10, head=5)
    assert rows.shared("stateless", 4) == (30 + 12 + 14 - 3) - 10 - 2 * 5 + 10 / 4 + 5 / 4
    assert rows.shared("stream", 4) == (30 + 21 - 2) - 10 - 5 + 10 / 4 + 5 / 4
    assert rows.shared("stream", 1) == 30 + 21 - 2
