"""What the automaton finds in an output."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envace_jax.rehearsal.ledger import between
from envace_jax.sampling.automaton import blocks
from envace_jax.sampling.lanes import Sizes

OPEN, CLOSE, WIDTH = 1, 2, 12


@pytest.mark.quick
@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=WIDTH), min_size=3, max_size=3))
def test_blocks_are_those_of_the_ledger(rows):
    ids = np.full((3, WIDTH), OPEN, np.int32)  # what lies behind a row's end must not matter
    for b, row in enumerate(rows):
        ids[b, : len(row)] = row
    length, tag = jnp.array([len(row) for row in rows]), jnp.full(3, OPEN)
    spans, n, unclosed, edges, inside = map(np.asarray, blocks(ids, length, tag, tag + 1, 3))
    for b, row in enumerate(rows):
        want = between(row, OPEN, CLOSE)
        assert n[b] == len(want)
        assert [tuple(row[i:j]) for i, j in spans[b, : len(want)]] == want[:3]
        last_close = max((i for i, t in enumerate(row) if t == CLOSE), default=-1)
        assert unclosed[b] == (OPEN in row[last_close + 1 :])
        for i, j in spans[b, : min(3, len(want))]:
            assert inside[b, i:j].all() and not inside[b, i - 1] and edges[b, i - 1] and edges[b, j]
        assert not edges[b, len(row) :].any()


@pytest.mark.quick
def test_sizes_hold_the_longest_ledgers():
    sizes = Sizes.plan(lanes=64, row=20000, prompt=12000, output=8000, segments=200, chunk=16, prefill_chunk=256)
    rows, tokens = sizes.fill
    assert sizes.lengths[-1] >= 2 * 20000 + max(tokens, 16) and rows * tokens <= 4 * 256
    assert sizes.lengths == tuple(sorted(sizes.lengths)) and sizes.ledger >= 20000 + 8000
    small = Sizes.plan(lanes=1, row=64, prompt=40, output=24, segments=9, chunk=8, prefill_chunk=16)
    assert small.fill[0] == 1 and small.lengths[-1] >= 128 + 16
