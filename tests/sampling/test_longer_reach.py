"""Guessing ahead and constrained requests: the same outputs sooner, and only what a guide allows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from conftest import SMALL
from plain import SPEC, plain_decode, row_logits

from envace_jax.config import UserError
from envace_jax.sampling.engine import Request, SamplingParams


def drain(engine):
    done = {}
    while not engine.idle:
        done |= {c.request_id: c for c in engine.step()}
    return done


def test_guessing_ahead_changes_no_output(make_engine, params):
    engine = make_engine(config=dataclasses.replace(SMALL, draft=4))
    rng = np.random.default_rng(0)
    requests = []
    for i in range(7):
        phrase = rng.integers(4, SPEC.vocab_size, 5).tolist()
        sampling = SamplingParams(
            temperature=[0.0, 0.4, 1.0][i % 3], max_tokens=12 + i, stop_ids=(1, 2), top_k=[0, 4][i % 2]
        )
        requests.append(Request(phrase * 4, sampling, (i,), affinity=i))
    ids = [engine.submit(r) for r in requests]
    done = drain(engine)
    for i, r in zip(ids, requests):
        want, logps, finish = plain_decode(params, r, 3, 56)
        assert (list(done[i].ids), done[i].finish) == (want, finish)
        np.testing.assert_allclose(done[i].logprobs, logps, atol=1e-4)
    stats = engine.stats()
    assert stats["tokens_drafted"] > 0
    # A greedy row repeats itself sooner or later, and then guesses come true.
    greedy = Request([9] * 6, SamplingParams(0.0, max_tokens=40), (9,))
    before = engine.stats()
    i = engine.submit(greedy)
    assert list(drain(engine)[i].ids) == plain_decode(params, greedy, 3, 56)[0]
    after = engine.stats()
    assert after["tokens_guessed_right"] > before["tokens_guessed_right"]
    assert after["chunks"] - before["chunks"] < 40


def test_guesses_are_fewer_than_a_chunk(make_engine):
    with pytest.raises(UserError, match="draft=8 must be smaller than chunk=8"):
        make_engine(config=dataclasses.replace(SMALL, draft=8))


class Alternating:
    """Even and odd ids take turns."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def allowed(self) -> np.ndarray:
        return np.arange(SPEC.vocab_size) % 2 == len(self.seen) % 2

    def accept(self, token: int) -> None:
        self.seen.append(token)


@pytest.mark.parametrize("draft", [0, 4])
def test_a_guide_masks_what_is_sampled_and_scored(make_engine, params, draft):
    engine = make_engine(config=dataclasses.replace(SMALL, draft=draft))
    guide = Alternating()
    guided = Request([5, 9, 11], SamplingParams(max_tokens=9), (0,), guide=guide)
    free = Request([5, 9, 11], SamplingParams(max_tokens=9), (1,))
    ids = [engine.submit(guided), engine.submit(free)]
    done = drain(engine)
    out = list(done[ids[0]].ids)
    assert [t % 2 for t in out] == [0, 1] * 4 + [0] and guide.seen == out
    row = np.zeros(128, np.int32)
    row[: 3 + len(out)] = [5, 9, 11, *out]
    logits = np.asarray(row_logits(params, row))
    for i, (token, logp) in enumerate(zip(out, done[ids[0]].logprobs)):
        kept = logits[2 + i][np.arange(SPEC.vocab_size) % 2 == i % 2].astype(np.float64)
        want = logits[2 + i][token] - np.log(np.exp(kept).sum())
        assert abs(want - logp) < 1e-4
    # A neighbour without a guide samples what it would have sampled alone.
    assert list(done[ids[1]].ids) == plain_decode(params, free, 3, 56)[0]
