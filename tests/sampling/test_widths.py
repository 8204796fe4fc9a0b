"""Decode calls over some of the lanes: what rows say does not depend on how many lanes a call took."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from plain import SPEC, plain_decode

from envace_jax.model import kv_cache
from envace_jax.sampling.engine import Engine, EngineConfig, Request, SamplingParams

WIDE = EngineConfig(slots=32, shelf=4, max_length=56, chunk=4, prefill_chunk=16, min_share=4)


def play(engine, requests, together):
    """Completions in the order of the requests, which are asked all at once or one by one."""
    said = {}
    for part in [requests] if together else [[r] for r in requests]:
        asked = {engine.submit(r): r for r in part}
        while not engine.idle:
            said |= {asked[c.request_id].key: c for c in engine.step()}
    return [said[r.key] for r in requests]


def test_all_widths_say_the_same(params):
    rng = np.random.default_rng(0)
    prompt = lambda: rng.integers(4, SPEC.vocab_size, rng.integers(2, 14)).tolist()  # noqa: E731
    first = [Request(prompt(), SamplingParams(max_tokens=1 + k), (0, k), affinity=k) for k in range(30)]
    engine, alone = (Engine(params, SPEC, WIDE, seed=5) for _ in range(2))
    engine.warm_up()
    widths = {width for name, width, *_ in engine.run.compiled if name == "decode"}
    assert widths == {8, 16, 32}
    taken = set()
    decode = engine.run.decode

    def note(params, main, ints, *rest):
        taken.add(len(ints))
        return decode(params, main, ints, *rest)

    engine.run.decode = note
    ours, theirs = play(engine, first, True), play(alone, first, False)
    assert taken == widths
    # A second turn of every ledger: what narrow calls wrote is what is read now.
    second = [
        Request([*a.prompt_ids, *c.ids, 5], SamplingParams(max_tokens=30 - k), (1, k), affinity=k)
        for k, (a, c) in enumerate(zip(first, ours))
    ]
    second = [r for r in second if len(r.prompt_ids) < WIDE.max_length]
    before = engine.stats()["tokens_prefilled"]
    ours += play(engine, second, True)
    theirs += play(alone, second, False)
    assert [c.ids for c in ours] == [c.ids for c in theirs]
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    for request, completion in list(zip([*first, *second], ours))[::20]:
        assert list(completion.ids) == plain_decode(params, request, 5, WIDE.max_length)[0]
    stats = engine.stats()
    assert stats["tokens_prefilled"] - before == len(second), "kept rows are read, one new token each is not in them"
    assert stats["programs_compiled_after_warm_up"] == 0
    assert stats["tokens_sampled"] <= stats["slot_iterations"] < stats["tokens_sampled"] * 4


@pytest.mark.quick
@pytest.mark.parametrize("stacked", [False, True])
def test_merge_into_some_rows(stacked):
    """Against numpy: the named rows get what counts at their ends and zeros behind it, the others nothing."""
    rng = np.random.default_rng(1)
    main = kv_cache.empty_cache(SPEC, 5, 12, np.float32, stacked=stacked)
    draw = lambda x: np.asarray(rng.normal(size=x.shape), np.float32)  # noqa: E731
    main = jax.tree.map(draw, main)
    buffer = jax.tree.map(draw, kv_cache.empty_buffer(kv_cache.take_rows(main, np.arange(3)), 4))
    rows, starts, count = np.array([4, 0, 2]), np.array([8, 3, 0]), np.array([4, 2, 0])

    def expected(whole, part):
        whole = whole.copy()
        for at, (row, start, n) in enumerate(zip(rows, starts, count)):
            whole[..., row, :, start : start + 4, :] = 0
            whole[..., row, :, start : start + n, :] = part[..., at, :, :n, :]
        return whole

    merged = jax.jit(kv_cache.merge)(main, buffer, starts, count, rows)
    jax.tree.map(np.testing.assert_array_equal, merged, jax.tree.map(expected, main, buffer))
    taken = kv_cache.take_rows(main, rows)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[..., rows, :, :, :]), taken, main)
