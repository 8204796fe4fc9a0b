"""The update program: meshes, skipping, microbatches, refusal of bad steps, donation, no compilation."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learning_common import SPEC, FakeRow, FakeSegment, FakeTrajectory, random_rows

from envace_jax.config import UserError
from envace_jax.learning.advantage import role_advantages
from envace_jax.learning.loss import LossConfig
from envace_jax.learning.packing import loss_denominator, microbatches, needs_gradient, pack_rows, train_rows
from envace_jax.learning.step import Update, UpdateConfig, host_metrics, make_update
from envace_jax.model.lora import LoraConfig, init_lora
from envace_jax.model.qwen3 import init_params
from envace_jax.model.sharding import make_mesh
from envace_jax.text.transcript import Role

CONFIG = UpdateConfig(lr=1e-2, rows=4, row_tokens=64, capacity=4, loss=LossConfig(chunk_tokens=64))


def params():
    return init_params(SPEC, jax.random.key(0))


def pack(rows, config, normaliser="token"):
    batch = pack_rows(rows, config.row_tokens, config.rows, normaliser=normaliser)
    arrays, count, _ = microbatches(batch, config.rows, config.capacity)
    return arrays, count


def run(update: Update, rows, steps=1, denominator=None):
    state = update.init(params())
    arrays, count = pack(rows, update.config)
    batch = update.put(arrays)
    if denominator is None:
        denominator = loss_denominator(rows, "token")
    if update.config.loss.kl_coef > 0:
        batch["reference_logprobs"] = update.score(state["params"], batch, count)
    for _ in range(steps):
        state, metrics = update.update(state, batch, count, denominator)
    return state, metrics


def close(a, b, atol):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=atol), a, b)


def moment(state):
    """AdamW's first moment: the clipped gradient times 1 - beta1 after one step, without Adam's sign-like scaling."""
    return state["opt_state"][0].mu


@pytest.fixture(scope="module")
def single():
    return make_update(SPEC, CONFIG)


@pytest.mark.parametrize("shape", [dict(fsdp=4, tensor=2), dict(replica=2, fsdp=2, tensor=2)])
def test_mesh_equals_single_device(single, shape):
    rows = random_rows(0, 30)
    want, m0 = run(single, rows)
    mesh = make_mesh(**shape)
    update = make_update(SPEC, CONFIG, mesh)
    got, m1 = run(update, rows)
    a, b = host_metrics(m0), host_metrics(m1)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), name
    close(moment(want), moment(got), 1e-6)
    # Gradients (through the moments) and new parameters keep the layout of the weights.
    start = update.place_params(params())
    for tree in (got["params"], moment(got)):
        jax.tree.map(
            lambda x, y: None if x.sharding.is_equivalent_to(y.sharding, x.ndim) else pytest.fail("layout"),
            tree,
            start,
        )


@pytest.mark.quick
def test_skipping_zero_advantage_rows_is_exact(single):
    rows = random_rows(1, 30)
    for i in range(0, 30, 3):
        rows[i] = dataclasses.replace(rows[i], advantages=np.zeros_like(rows[i].advantages))
    kept = [r for r in rows if needs_gradient(r)]
    assert len(kept) == 20
    on, m_on = run(single, kept, denominator=loss_denominator(rows, "token"))
    off, m_off = run(single, rows)
    close(moment(on), moment(off), 1e-7)
    assert float(m_on["loss"]) == pytest.approx(float(m_off["loss"]), abs=1e-6)


def test_all_rows_skipped_equals_zero_gradient(single):
    rows = [dataclasses.replace(r, advantages=np.zeros_like(r.advantages)) for r in random_rows(2, 6)]
    on, _ = run(single, [], denominator=loss_denominator(rows, "token"))
    off, m = run(single, rows)
    close(on["params"], off["params"], 0)
    assert float(m["grad_norm"]) == 0


def group_rows(trajectories):
    advantages = role_advantages(trajectories)
    return [row for t, a in zip(trajectories, advantages) for row in train_rows(t, a)]


def random_trajectory(rng, group, reward):
    """An ACT row with two outputs and a REHEARSE row with one."""
    ids = tuple(int(i) for i in rng.integers(1, 90, 16))
    sampled = (False, True, True, True, False, False, True, True)
    act = FakeRow(Role.ACT, ids, (*sampled, *(False,) * 8), (-1.0,) * 16)
    rehearse = FakeRow(Role.REHEARSE, ids[::-1], (False,) * 10 + (True,) * 6, (-1.0,) * 16)
    segments = (
        FakeSegment(Role.ACT, 0, act.ids[1:4], row=0, start=1),
        FakeSegment(Role.REHEARSE, 1, rehearse.ids[10:], row=1, start=10),
        FakeSegment(Role.ACT, 2, act.ids[6:8], row=0, start=6),
    )
    return FakeTrajectory(group, reward, segments, (act, rehearse))


def test_a_masked_trajectory_changes_nothing(single):
    """Its content changes no bit of the gradients, its removal at most 1e-6; with a reward it does change them."""
    rng = np.random.default_rng(5)
    seen = [random_trajectory(rng, k // 3, r) for k, r in enumerate((1.0, 0.0, 0.5, 0.0, 1.0, 1.0))]
    masked = [random_trajectory(rng, 0, None) for _ in range(2)]
    with_one, with_other = ([*seen[:2], m, *seen[2:]] for m in masked)
    states = [moment(run(single, group_rows(batch))[0]) for batch in (with_one, with_other, seen)]
    assert float(jnp.max(jnp.abs(states[0]["embed"]))) > 0
    close(states[0], states[1], 0)
    close(states[0], states[2], 1e-6)
    scored = [*seen[:2], dataclasses.replace(masked[0], reward=0.0), *seen[2:]]
    other = moment(run(single, group_rows(scored))[0])
    assert not np.array_equal(np.asarray(other["embed"]), np.asarray(states[0]["embed"]))


def test_packing_and_microbatches_do_not_matter(single):
    rows = random_rows(3, 12, high=30)
    want, _ = run(single, rows)
    one_each = dataclasses.replace(CONFIG, rows=1, row_tokens=30, capacity=16)
    got, _ = run(make_update(SPEC, one_each), rows)
    close(moment(want), moment(got), 1e-6)


def test_padding_garbage_does_not_matter(single):
    rows = random_rows(4, 10)
    arrays, count = pack(rows, CONFIG)
    noisy = dict(arrays)
    padding = arrays["segment_ids"] == 0
    noisy["tokens"] = np.where(padding, 7, arrays["tokens"])
    noisy["targets"] = np.where(arrays["mask"], arrays["targets"], 5)
    states = []
    for a in (arrays, noisy):
        state, _ = single.update(single.init(params()), single.put(a), count, 100.0)
        states.append(moment(state))
    close(*states, 0)


@pytest.mark.quick
def test_nonfinite_gradient_leaves_the_state(single):
    rows = random_rows(5, 6)
    rows[0] = dataclasses.replace(rows[0], advantages=np.full_like(rows[0].advantages, np.nan))
    before = jax.device_get(single.init(params()))
    after, metrics = run(single, rows)
    assert host_metrics(metrics)["nonfinite"] == 1.0 and host_metrics(metrics)["skipped"] == 1.0
    close(before["params"], after["params"], 0)
    close(before["opt_state"], after["opt_state"], 0)
    assert int(after["step"]) == 1


def test_drift_above_the_limit_is_not_taken():
    update = make_update(SPEC, dataclasses.replace(CONFIG, drift_limit=1.05))
    rows = random_rows(6, 6)
    far = [dataclasses.replace(r, sampler_logprobs=r.sampler_logprobs - 3 * r.sampled) for r in rows]
    before = jax.device_get(update.init(params()))
    after, metrics = run(update, far)
    figures = host_metrics(metrics)
    assert figures["skipped"] == 1.0 and figures["nonfinite"] == 0.0 and figures["exp_drift"] > 1.05
    close(before["params"], after["params"], 0)


def test_no_compilation_after_the_first_call(single):
    state = single.init(params())
    single.compile(state)
    programs = dict(single._programs)
    for seed, n in ((7, 3), (8, 20), (9, 29)):
        rows = random_rows(seed, n)
        arrays, count = pack(rows, CONFIG)
        state, _ = single.update(state, single.put(arrays), count, loss_denominator(rows, "token"))
    assert single._programs == programs


def test_state_is_donated(single):
    state = single.init(params())
    arrays, count = pack(random_rows(10, 3), CONFIG)
    copy = single.compute_copy(state["params"])
    single.update(state, single.put(arrays), count, 10.0)
    assert all(x.is_deleted() for x in jax.tree.leaves(state["params"]))
    assert not any(x.is_deleted() for x in jax.tree.leaves(copy))


def test_several_updates_use_old_logprobs():
    config = dataclasses.replace(CONFIG, loss=dataclasses.replace(CONFIG.loss, own_old=False))
    update = make_update(SPEC, config)
    rows = random_rows(11, 12)
    state = update.init(params())
    arrays, count = pack(rows, config)
    batch = update.put(arrays)
    batch["old_logprobs"] = update.score(state["params"], batch, count)
    state, first = update.update(state, batch, count, 100.0)
    state, second = update.update(state, batch, count, 100.0)
    first, second = host_metrics(first), host_metrics(second)
    assert first["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert second["ratio_max"] > 1.001


def test_adapters_in_bfloat16_are_scored_beside_their_reference():
    """A state has float32 adapters, its reference is bfloat16 throughout: two programs, equal figures at the start."""
    loss = dataclasses.replace(CONFIG.loss, own_old=False, kl_coef=0.1)
    update = make_update(SPEC, dataclasses.replace(CONFIG, compute_dtype="bfloat16", loss=loss))
    state = update.init({**params(), "lora": init_lora(SPEC, LoraConfig(rank=2), jax.random.key(1))})
    arrays, count = pack(random_rows(14, 8), update.config)
    batch = update.put(arrays)
    scores = [update.score(p, batch, count) for p in (update.compute_copy(state["params"]), state["params"])]
    np.testing.assert_array_equal(*scores)
    assert len(update.compile_seconds) == 2 and float(jnp.abs(scores[0]).max()) > 1


def test_bfloat16_compute_keeps_float32_masters_and_the_loss(single):
    update = make_update(SPEC, dataclasses.replace(CONFIG, compute_dtype="bfloat16", remat="full"))
    rows = random_rows(12, 12)
    state, metrics = run(update, rows)
    assert {x.dtype for x in jax.tree.leaves(state["params"])} == {jnp.dtype("float32")}
    assert {x.dtype for x in jax.tree.leaves(update.compute_copy(state["params"]))} == {jnp.dtype("bfloat16")}
    got, want = host_metrics(metrics), host_metrics(run(single, rows)[1])
    # A rounding to bfloat16 is off by 2^-9 at most; advantages and entropies are of the order of one.
    assert got["loss"] == pytest.approx(want["loss"], abs=0.01)
    for name, most in (("entropy", 0.01), ("exp_drift", 0.01), ("grad_norm", 0.05)):
        assert got[name] == pytest.approx(want[name], rel=most), name


def test_supervised_loss_falls():
    config = dataclasses.replace(CONFIG, loss=LossConfig(supervised=True), lr=1e-2)
    update = make_update(SPEC, config)
    rows = random_rows(13, 6)
    _, first = run(update, rows)
    _, last = run(update, rows, steps=30)
    assert host_metrics(last)["loss"] < 0.6 * host_metrics(first)["loss"]


def test_schedule_and_errors():
    rate = UpdateConfig(lr=1.0, lr_schedule="cosine", lr_warmup_steps=2, total_steps=10).schedule()
    assert float(rate(0)) == pytest.approx(0.5) and float(rate(10)) == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(UserError, match="lr_schedule"):
        UpdateConfig(lr_schedule="linear")
    with pytest.raises(UserError, match="rows_per_microbatch=3"):
        make_update(SPEC, dataclasses.replace(CONFIG, rows=3), make_mesh(fsdp=4))
