"""The engine against a plain decoder: same ids, same log-probabilities, whatever shares the batch."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from conftest import LONG, SMALL
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import SPEC, make_params, plain_decode, row_logprobs

from envace_jax.config import UserError
from envace_jax.model import qwen3
from envace_jax.model.lora import TARGETS, LoraConfig, init_lora, merge
from envace_jax.model.qwen3 import ForwardOptions
from envace_jax.sampling.engine import Engine, Request, SamplingParams

TOLERANCE = 1e-4


def drain(engine):
    done = {}
    while not engine.idle:
        for c in engine.step():
            assert c.request_id not in done
            done[c.request_id] = c
    return done


def check(completion, request, params, seed, max_length):
    ids, logps, finish = plain_decode(params, request, seed, max_length)
    assert list(completion.ids) == ids
    assert completion.finish == finish
    np.testing.assert_allclose(completion.logprobs, logps, atol=TOLERANCE)


def ids_of(rng, n):
    return rng.integers(4, SPEC.vocab_size, n).tolist()


@pytest.mark.quick
def test_group_prompts_are_prefilled_once_and_sampled_apart(make_engine, params):
    engine = make_engine()
    prompt = ids_of(np.random.default_rng(0), 30)
    requests = [Request(prompt, SamplingParams(max_tokens=9), (0, m)) for m in range(4)]
    ids = [engine.submit(r) for r in requests]
    done = drain(engine)
    for i, r in zip(ids, requests):
        check(done[i], r, params, 3, engine.config.max_length)
    assert len({done[i].ids for i in ids}) == 4
    stats = engine.stats()
    assert stats["tokens_prefilled"] == 29
    assert stats["tokens_prompt"] == 4 * 29 and stats["tokens_reused"] == 3 * 29


@pytest.mark.long
def test_adapters_sample_as_the_merged_model(params):
    config = LoraConfig(rank=2, alpha=4.0, targets=TARGETS)
    shapes = init_lora(SPEC, config, jax.random.key(1))
    lora = jax.tree.map(lambda x: 0.2 * jax.random.normal(jax.random.key(x.size), x.shape), shapes)
    tuned = {**params, "lora": lora}
    engine = Engine(tuned, SPEC, SMALL, seed=3, options=ForwardOptions(lora_scale=2.0))
    request = Request(ids_of(np.random.default_rng(9), 12), SamplingParams(max_tokens=9), (9, 0))
    engine.submit(request)
    (said,) = drain(engine).values()
    check(said, request, merge(tuned, 2.0), 3, SMALL.max_length)
    assert list(said.ids) != plain_decode(params, request, 3, SMALL.max_length)[0]


@pytest.mark.quick
def test_news_piece_by_piece_is_the_completion(make_engine):
    engine = make_engine()
    rng = np.random.default_rng(8)
    requests = [Request(ids_of(rng, 6), SamplingParams(max_tokens=20 + k), (8, k)) for k in range(3)]
    pieces: dict[int, list] = {engine.submit(r): [] for r in requests}
    done = {}
    while not engine.idle:
        done |= {c.request_id: c for c in engine.step()}
        for number, (ids, logps) in engine.news({i: len(pieces[i]) for i in pieces}).items():
            assert ids and number not in done
            pieces[number] += zip(ids, logps, strict=True)
        assert not engine.news({i: len(known) for i, known in pieces.items()} | {10**6: 0})
    for number, known in pieces.items():
        whole = list(zip(done[number].ids, done[number].logprobs))
        assert 0 < len(known) < len(whole) and known == whole[: len(known)]


@pytest.mark.quick
def test_ledgers_go_on_in_their_rows_and_logprobs_equal_a_full_forward(make_engine, params):
    engine = make_engine()
    rng = np.random.default_rng(1)
    ledgers = {a: ids_of(rng, 5) for a in range(3)}
    prefilled = 0
    for turn in range(4):
        asked = {}
        for a, ids in ledgers.items():
            ids += ids_of(rng, 3 if turn else 0)
            request = Request(tuple(ids), SamplingParams(0.8, max_tokens=7, stop_ids=(2, 3)), (turn, a), affinity=a)
            asked[engine.submit(request)] = (a, request)
        prefilled += sum(4 if turn else 0 for _ in ledgers) if turn else 3 * 4
        for i, c in drain(engine).items():
            a, request = asked[i]
            check(c, request, params, 3, engine.config.max_length)
            start = len(ledgers[a])
            ledgers[a] += c.ids
            np.testing.assert_allclose(c.logprobs, row_logprobs(params, ledgers[a], start, 0.8), atol=TOLERANCE)
    assert engine.stats()["tokens_prefilled"] <= prefilled  # three new tokens and the last sampled one, never more


@pytest.mark.quick
def test_order_of_admission_and_neighbours_change_nothing(make_engine):
    rng = np.random.default_rng(2)
    requests = [
        Request(ids_of(rng, int(rng.integers(1, 40))), SamplingParams(max_tokens=12, stop_ids=(1,)), (i,))
        for i in range(9)
    ]
    seen = []
    for order in (range(9), reversed(range(9)), [4, 0, 8, 2, 6, 1, 3, 5, 7]):
        engine = make_engine()
        by_id = {engine.submit(requests[i]): i for i in order}
        seen.append({by_id[k]: (c.ids, c.finish) for k, c in drain(engine).items()})
    alone = make_engine()
    one = alone.submit(requests[5])
    assert seen[0] == seen[1] == seen[2]
    c = drain(alone)[one]
    assert seen[0][5] == (c.ids, c.finish)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["new", "continue", "continue", "twin", "cancel", "release", "step", "step"]),
        st.integers(0, 10**6),
    ),
    min_size=4,
    max_size=24,
)


@settings(max_examples=12, deadline=None)
@given(OPERATIONS, st.sampled_from([0, 4]))
def test_any_history_of_requests_equals_the_plain_decoder(make_engine, params, operations, draft):
    engine = make_engine(config=dataclasses.replace(SMALL, draft=draft))
    ledgers: dict[int, list[int]] = {}
    busy: dict[int, tuple[int | None, Request]] = {}
    cancelled, checked, prompts = set(), 0, [[5, 6, 7]]

    def take(completions):
        nonlocal checked
        for c in completions:
            ledger, request = busy.pop(c.request_id)
            if c.request_id in cancelled:
                assert c.finish == "cancelled"  # with the beginning of what it would have been
                assert list(c.ids) == plain_decode(params, request, 3, engine.config.max_length)[0][: len(c.ids)]
            else:
                check(c, request, params, 3, engine.config.max_length)
                checked += 1
            if ledger is not None:
                ledgers[ledger] = list(request.prompt_ids) + list(c.ids)

    def submit(ledger, prompt, n, rng):
        sampling = SamplingParams(
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_p=float(rng.choice([0.6, 1.0])),
            top_k=int(rng.choice([0, 5])),
            max_tokens=1 + n % 19,
            stop_ids=(1, 2)[: n % 3],
        )
        request = Request(prompt, sampling, (n,), affinity=ledger)
        prompts.append(prompt)
        busy[engine.submit(request)] = (ledger, request)

    for i, (operation, n) in enumerate(operations):
        rng = np.random.default_rng(n)
        free = [a for a in ledgers if a not in {b for b, _ in busy.values()}]
        if operation == "new":
            submit(i, ids_of(rng, 1 + n % 40), n, rng)
        elif operation == "twin":
            base = prompts[n % len(prompts)]
            submit(None if n % 2 else i, base[: min(50, 1 + n % len(base))] + ids_of(rng, n % 4), n, rng)
        elif operation == "continue" and free:
            a = free[n % len(free)]
            prompt = ledgers[a] + ids_of(rng, n % 9)
            if len(prompt) < engine.config.max_length:
                submit(a, prompt, n, rng)
        elif operation == "cancel" and busy:
            request_id = sorted(busy)[n % len(busy)]
            cancelled.add(request_id)
            engine.cancel(request_id)
        elif operation == "release" and free:
            engine.release(free[n % len(free)])
        elif operation == "step":
            take(engine.step())
    while not engine.idle:
        take(engine.step())
    assert not busy


def test_a_broken_row_is_reported_and_others_are_not_touched(make_engine, params):
    poison = 60
    weights = params | {"embed": params["embed"].at[poison].set(jax.numpy.nan)}
    engine = make_engine(weights=weights)
    rng = np.random.default_rng(3)
    prompts = [[t % 60 for t in ids_of(rng, 9)] for _ in range(3)]
    good = [Request(p, SamplingParams(max_tokens=6, top_k=3), (i,)) for i, p in enumerate(prompts)]
    bad = Request([7, poison, 9], SamplingParams(max_tokens=6), (9,), affinity="bad")
    ids = [engine.submit(r) for r in (good[0], bad, good[1], good[2])]
    done = drain(engine)
    assert (done[ids[1]].finish, done[ids[1]].ids) == ("nan", ())
    for i, r in zip((ids[0], ids[2], ids[3]), good):
        if poison not in done[i].ids:
            check(done[i], r, params, 3, 56)
    assert engine.stats()["rows_nan"] >= 1
    again = engine.submit(good[0])  # the broken row's lane serves again
    assert drain(engine)[again].ids == done[ids[0]].ids


def test_parameter_sets_have_their_own_rows(make_engine, params):
    engine = make_engine()
    other = make_params(7)
    engine.set_params(other, "second")
    prompt = ids_of(np.random.default_rng(4), 12)
    sampling = SamplingParams(max_tokens=8)
    requests = [Request(prompt, sampling, (i,), param_set=n) for i, n in enumerate(["policy", "second"] * 3)]
    ids = [engine.submit(r) for r in requests]
    done = drain(engine)
    for i, r in zip(ids, requests):
        check(done[i], r, params if r.param_set == "policy" else other, 3, engine.config.max_length)


def test_new_weights_forget_old_keys_and_values(make_engine, params):
    engine = make_engine()
    request = Request(ids_of(np.random.default_rng(5), 20), SamplingParams(max_tokens=6), (0,), affinity="a")
    engine.submit(request)
    with pytest.raises(RuntimeError, match="in flight"):
        engine.set_params(params)
    drain(engine)
    other = make_params(8)
    engine.set_params(other)
    i = engine.submit(request)
    check(drain(engine)[i], request, other, 3, engine.config.max_length)


@pytest.mark.quick
def test_refusals_name_size_and_limit(make_engine):
    engine = make_engine()
    with pytest.raises(UserError, match=r"prompt of 56 tokens does not fit: a row holds 56"):
        engine.submit(Request([5] * 56, SamplingParams(), (0,)))
    with pytest.raises(UserError, match="no parameter set 'judge'"):
        engine.submit(Request([5], SamplingParams(), (0,), param_set="judge"))
    with pytest.raises(UserError, match="stop ids"):
        engine.submit(Request([5], SamplingParams(stop_ids=tuple(range(9))), (0,)))
    with pytest.raises(UserError, match="prompt of 0 tokens"):
        engine.submit(Request([], SamplingParams(), (0,)))
    assert engine.idle
    i = engine.submit(Request([5] * 55, SamplingParams(max_tokens=50), (0,)))
    assert len(drain(engine)[i].ids) == 1  # the row is full: one more token and no further


def test_cancelling_frees_the_lane_and_returns_what_was_there(make_engine, params):
    engine = make_engine()
    prompt = [9, 8, 7]
    requests = [Request(prompt, SamplingParams(max_tokens=40), (i,)) for i in range(6)]
    ids = [engine.submit(r) for r in requests]
    first = engine.step()
    assert not first
    engine.cancel(ids[1])
    engine.cancel(ids[5])  # still waits for a lane
    engine.cancel(ids[1])
    engine.cancel(12345)
    done = drain(engine)
    assert [done[i].finish for i in ids] == ["length", "cancelled", "length", "length", "length", "cancelled"]
    assert done[ids[5]].ids == ()
    n = len(done[ids[1]].ids)
    assert 0 < n < 40
    assert list(done[ids[1]].ids) == plain_decode(params, requests[1], 3, 56)[0][:n]


def test_lanes_grow_and_nothing_compiles_after_warm_up(params):
    engine = Engine(params, SPEC, LONG)
    engine.warm_up()
    rng = np.random.default_rng(6)
    ledgers = {a: ids_of(rng, 1 + 5 * a) for a in range(6)}
    lengths = set()
    for turn in range(3):
        asked = {}
        for a, ids in ledgers.items():
            request = Request(tuple(ids), SamplingParams(max_tokens=10 + turn), (turn, a), affinity=a)
            asked[engine.submit(request)] = a
        while not engine.idle:
            done = engine.step()
            lengths.add(engine._pools["policy"].lanes.length)
            for c in done:
                a = asked[c.request_id]
                ids = [*ledgers[a], *c.ids]
                np.testing.assert_allclose(c.logprobs, row_logprobs(params, ids, len(ledgers[a])), atol=TOLERANCE)
                ledgers[a] = [*ids, *ids_of(rng, 2)]
    assert len(lengths) > 1, "the lanes never grew"
    for _ in range(12):  # and shrink again when long rows are gone
        engine.forget()
        engine.submit(Request([5], SamplingParams(max_tokens=9), (0,)))
        drain(engine)
    assert engine._pools["policy"].lanes.length == min(lengths)
    assert engine.stats()["programs_compiled_after_warm_up"] == 0


def test_scanned_layers_give_the_same(make_engine, params):
    engine = make_engine(config=dataclasses.replace(SMALL, unroll_layers=False))
    rng = np.random.default_rng(7)
    requests = [Request(ids_of(rng, 20 + i), SamplingParams(max_tokens=9), (i,)) for i in range(5)]
    ids = [engine.submit(r) for r in requests]
    done = drain(engine)
    for i, r in zip(ids, requests):
        check(done[i], r, params, 3, 56)


def test_the_sampler_computes_in_the_learners_dtype(params):
    options = ForwardOptions(dtype=jax.numpy.bfloat16)
    engine = Engine(params, SPEC, dataclasses.replace(SMALL, slots=2, shelf=0), options=options)
    request = Request([5, 9, 12], SamplingParams(max_tokens=12), (0,))
    engine.submit(request)
    (c,) = drain(engine).values()
    ids = jax.numpy.asarray([*request.prompt_ids, *c.ids])
    n = len(ids)
    hidden = qwen3.forward(
        params, SPEC, ids[None], jax.numpy.arange(n)[None], jax.numpy.ones((1, n), int), options=options
    )
    logp = jax.nn.log_softmax(qwen3.unembed(params, hidden[0], options), -1)
    want = np.asarray(logp)[np.arange(2, n - 1), np.asarray(ids)[3:]]
    assert np.abs(np.exp(np.abs(want - np.asarray(c.logprobs))) - 1).mean() < 0.05
