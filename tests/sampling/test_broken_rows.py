"""Rows whose numbers are not finite: reported and dropped, and nobody else's numbers change."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from conftest import SMALL
from plain import SPEC, plain_decode

from envace_jax.sampling.engine import Request, SamplingParams

POISON = 60
"""A token whose embedding is NaN; what it is fed to is broken from there on."""


@pytest.fixture
def weights(params):
    # Nothing samples it by itself: only prompts and guides bring it.
    head = params["lm_head"].at[:, POISON].set(0)
    return params | {"embed": params["embed"].at[POISON].set(np.nan), "lm_head": head}


def drain(engine):
    done = {}
    while not engine.idle:
        done |= {c.request_id: c for c in engine.step()}
    return done


def tokens(rng, n):
    return rng.integers(4, POISON, n).tolist()


def ask(prompt, number, **sampling):
    return Request(prompt, SamplingParams(**{"temperature": 0.0, "max_tokens": 7} | sampling), (number,))


def sound(done, asked, weights):
    for number, request in asked.items():
        ids, logps, finish = plain_decode(weights, request, 3, SMALL.max_length)
        assert POISON not in ids, "the comparison is about rows that are sound"
        assert (list(done[number].ids), done[number].finish) == (ids, finish)
        np.testing.assert_allclose(done[number].logprobs, logps, atol=1e-4)


def every_lane_serves(engine, weights, rng):
    """As many requests as there are lanes, none of which shares anything with what was there before."""
    asked = {}
    for k in range(SMALL.slots):
        request = ask(tokens(rng, 3 + k), 100 + k)
        asked[engine.submit(request)] = request
    sound(drain(engine), asked, weights)


@pytest.mark.parametrize("first", ["broken", "sound"])
def test_a_prefix_shared_with_a_broken_row(make_engine, weights, first):
    engine, rng = make_engine(weights=weights), np.random.default_rng(3)
    prefix = tokens(rng, 20)
    broken, good = ask([*prefix, POISON, *tokens(rng, 15)], 1), ask([*prefix, *tokens(rng, 3)], 2)
    asked = {engine.submit(request): request for request in ((broken, good) if first == "broken" else (good, broken))}
    done = drain(engine)
    (number,) = (number for number, request in asked.items() if request is broken)
    assert (done[number].finish, done[number].ids) == ("nan", ())
    sound(done, {n: request for n, request in asked.items() if request is good}, weights)
    assert engine.stats()["rows_nan"] == 1
    every_lane_serves(engine, weights, rng)


@pytest.mark.parametrize("launched", [False, True])
def test_a_broken_row_that_is_cancelled_before_anybody_saw_it(make_engine, weights, launched):
    engine, rng = make_engine(weights=weights), np.random.default_rng(4)
    for k in range(SMALL.slots):
        engine.submit(ask(tokens(rng, 3), k, max_tokens=1))
    broken = engine.submit(ask([*tokens(rng, 5), POISON, *tokens(rng, 30)], 9))
    others = [ask(tokens(rng, 4), 20 + k) for k in range(SMALL.slots - 1 if launched else 0)]
    asked = {engine.submit(request): request for request in others}
    assert len(engine.step()) == SMALL.slots  # the lanes went to those that waited
    pool = engine._pools["policy"]
    assert (pool.flying is not None) == launched and len(pool.live) == 1 + len(others)
    engine.cancel(broken)
    done = drain(engine)
    assert done[broken].finish == "cancelled"
    sound(done, asked, weights)
    every_lane_serves(engine, weights, rng)


class Only:
    """Allows one token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def allowed(self) -> np.ndarray:
        return np.arange(SPEC.vocab_size) == self.token

    def accept(self, token: int) -> None:
        assert token == self.token


def test_a_token_that_would_break_the_row_and_is_never_fed(make_engine, weights):
    """It ends its row; the idle lane keeps it while others decode, and nothing of it may stay behind."""
    engine, rng = make_engine(weights=weights), np.random.default_rng(5)
    request = dataclasses.replace(ask(tokens(rng, 5), 0, max_tokens=1), guide=Only(POISON))
    last = engine.submit(request)
    asked = {engine.submit(r): r for r in (ask(tokens(rng, 5), 1, max_tokens=30),)}
    done = drain(engine)
    assert (done[last].ids, done[last].finish) == ((POISON,), "length")
    sound(done, asked, weights)
    every_lane_serves(engine, weights, rng)


@pytest.mark.parametrize("draft", [0, 4])
def test_what_fills_a_program_up_is_of_the_row_itself(make_engine, params, draft):
    """The token 0, which no row here holds, is the broken one."""
    whole = params | {"lm_head": params["lm_head"].at[:, 0].set(0)}  # for the plain decoder
    weights = whole | {"embed": params["embed"].at[0].set(np.nan)}
    engine = make_engine(weights=weights, config=dataclasses.replace(SMALL, draft=draft))
    rng = np.random.default_rng(6)
    asked = {engine.submit(r): r for r in (ask(tokens(rng, 6 + 3 * k), k, temperature=1.0, top_k=3) for k in range(6))}
    done = drain(engine)
    for number, request in asked.items():
        assert done[number].finish == "length" and 0 not in done[number].ids
        assert list(done[number].ids) == plain_decode(whole, request, 3, SMALL.max_length)[0]
    assert engine.stats()["rows_nan"] == 0


def test_a_guide_that_allows_nothing_breaks_its_own_row_alone(make_engine, params):
    engine = make_engine()
    stuck = engine.submit(dataclasses.replace(ask([5, 6, 7], 0), guide=Only(SPEC.vocab_size)))
    free = engine.submit(ask([5, 6, 7], 1))
    done = drain(engine)
    assert (done[stuck].finish, done[stuck].ids) == ("nan", ())
    assert list(done[free].ids) == plain_decode(params, ask([5, 6, 7], 1), 3, SMALL.max_length)[0]
