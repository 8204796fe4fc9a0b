"""Experts recorded in sampling and used again in learning, on a tiny mixture: engine, segment, row, batch, update."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learning_common import SPEC as DENSE
from learning_common import random_rows, rewarded, tiny_config

from envace_jax.build import chat_format, checked_spec
from envace_jax.config import UserError
from envace_jax.learning import trainer
from envace_jax.learning.metrics import read_metrics
from envace_jax.learning.packing import microbatches, pack_rows, train_rows
from envace_jax.learning.step import Update, UpdateConfig, host_metrics
from envace_jax.model.qwen3 import forward_with_routing, init_params
from envace_jax.model.sharding import make_mesh
from envace_jax.model.spec import PRESETS
from envace_jax.rehearsal.ledger import Row, Segment
from envace_jax.rehearsal.trajectory import Trajectory, read_trajectories
from envace_jax.sampling.engine import Engine, EngineConfig, Request, SamplingParams
from envace_jax.text.transcript import Role

SPEC = dataclasses.replace(DENSE, n_experts=8, n_experts_per_token=2, d_ff_expert=16)
TOKENIZER = Path(__file__).parents[2] / "data/quickstart/tokenizer"
SHAPE = (SPEC.n_layers, SPEC.n_experts_per_token)
CONFIG = UpdateConfig(rows=2, row_tokens=64, capacity=2, replay_routing=True)


@pytest.fixture(scope="module")
def params():
    return init_params(SPEC, jax.random.key(0))


def noisy(params, size=0.3):
    return jax.tree.map(lambda w: w + size * jnp.std(w) * jax.random.normal(jax.random.key(1), w.shape), params)


def sampled_trajectory(params, draft=0) -> Trajectory:
    """Two segments in one row, the second after an observation; the engine goes on in the same row."""
    config = EngineConfig(
        slots=2, shelf=2, max_length=56, chunk=8, prefill_chunk=16, min_share=4, record_routing=True, draft=draft
    )
    engine = Engine(params, SPEC, config, seed=3)
    row, segments = Row(Role.ACT).context(range(1, 8)), ()
    for index in range(2):
        engine.submit(Request(row.ids, SamplingParams(max_tokens=11), key=(index,), affinity="row"))
        done = []
        while not done:
            done = engine.step()
        (said,) = done
        segments += (
            Segment(Role.ACT, index, said.ids, said.logprobs, said.finish, "", 0, len(row), said.experts),
        )
        row = row.sample(said.ids, said.logprobs).context((5, 6, 7) if index == 0 else ())
    return Trajectory("t", 0, 0, (row,), segments, reward=1.0)


def own_routing(params, ids) -> np.ndarray:
    """[T, layers, k]: what a forward pass over the whole row routes by itself."""
    tokens = jnp.asarray(ids)[None]
    positions = jnp.arange(len(ids))[None]
    _, routing = forward_with_routing(params, SPEC, tokens, positions, jnp.ones_like(tokens))
    return np.moveaxis(np.asarray(routing.ids)[:, 0], 0, 1)


@pytest.mark.parametrize("draft", [0, 2])
def test_what_is_recorded_is_the_routing_of_the_predicting_positions(params, draft):
    played = sampled_trajectory(params, draft)
    routed = own_routing(params, played.rows[0].ids)
    for segment in played.segments:
        assert len(segment.ids) == 11
        recorded = np.frombuffer(segment.experts, np.int16).reshape(-1, *SHAPE)
        np.testing.assert_array_equal(recorded, routed[segment.start - 1 : segment.start - 1 + len(segment.ids)])
    assert Trajectory.from_json(played.to_json()) == played


@pytest.mark.quick
def test_rows_and_batches_carry_experts_to_the_position_that_predicts():
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, 8, (3, *SHAPE)).astype(np.int16)
    row = Row(Role.ACT).context((1, 2)).sample((3, 4, 5), (-1.0,) * 3).context((6, 7))
    segments = (Segment(Role.ACT, 0, (3, 4, 5), (-1.0,) * 3, "stop", "", 0, 2, chosen.tobytes()),)
    played = Trajectory("t", 0, 0, (row,), segments, reward=1.0)
    (train,) = train_rows(played, {Role.ACT: 1.0}, routing=SHAPE)
    np.testing.assert_array_equal(train.experts[2:], chosen)
    assert (train.experts[:2] == -1).all()
    other = random_rows(0, 1)[0]  # a row that recorded nothing
    batch = pack_rows([train, other], 64, routing=SHAPE)
    start = 0 if batch.packed[0][0] == 0 else len(other.ids) - 1
    np.testing.assert_array_equal(batch.experts[0, start + 1 : start + 4], chosen)
    assert (batch.experts >= 0).sum() == chosen.size
    predicting = batch.target_index[0][batch.mask[0]]
    assert {start + 1, start + 2, start + 3} <= set(predicting.tolist())
    arrays, _, _ = microbatches(batch, 1, 2)
    assert arrays["experts"].shape == (2, 1, 64, *SHAPE)
    assert pack_rows([train], 64).experts is None and "experts" not in pack_rows([train], 64).arrays()


def learn(update, params, rows, steps=1):
    batch = pack_rows(rows, CONFIG.row_tokens, CONFIG.rows, routing=update.routing)
    arrays, count, _ = microbatches(batch, CONFIG.rows, CONFIG.capacity)
    state, placed = update.init(params), update.put(arrays)
    scores = update.score(state["params"], placed, count)
    state, metrics = update.update(state, placed, count, 10.0)
    return host_metrics(metrics), np.asarray(scores), state


def test_the_update_uses_what_was_recorded(params):
    rows = train_rows(sampled_trajectory(params), {Role.ACT: 1.0}, routing=SHAPE)
    same, agreeing, _ = learn(Update(SPEC, CONFIG), params, rows)
    assert same["routing/moved"] == same["routing/moved_layers"] == 0
    other = noisy(params)
    moved, replayed, state = learn(Update(SPEC, CONFIG), other, rows)
    assert 0 < moved["routing/moved_layers"] < moved["routing/moved"] <= 1
    free, routed, free_state = learn(Update(SPEC, dataclasses.replace(CONFIG, replay_routing=False)), other, rows)
    assert "routing/moved" not in free
    # Against an oracle that is told the experts of every recorded position.
    (row,) = rows
    ids = row.ids[:-1]
    tokens = jnp.asarray(ids)[None]
    experts = np.moveaxis(row.experts[1:], 1, 0)[:, None].astype(np.int32)
    hidden, _ = forward_with_routing(
        other, SPEC, tokens, jnp.arange(len(ids))[None], jnp.ones_like(tokens), replay_LxBxTxK=experts
    )
    logits = hidden[0] @ other["embed"].T if "lm_head" not in other else hidden[0] @ other["lm_head"]
    want = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(ids)), row.ids[1:]][row.sampled[1:]]
    n = int(row.sampled.sum())
    np.testing.assert_allclose(replayed[0, 0, :n], want, atol=1e-5)
    assert np.abs(routed[0, 0, :n] - want).max() > 1e-3
    assert np.abs(agreeing[0, 0, :n] - row.sampler_logprobs[row.sampled]).max() < 1e-4
    gap = [float(jnp.abs(a - b).max()) for a, b in zip(*(jax.tree.leaves(s["params"]) for s in (state, free_state)))]
    assert max(gap) > 0


@pytest.mark.parametrize("shape", [{"fsdp": 2, "expert": 2, "tensor": 2}, {"expert": 4, "fsdp": 2}])
def test_replay_on_a_mesh_equals_one_device(params, shape):
    rows = train_rows(sampled_trajectory(params), {Role.ACT: 1.0}, routing=SHAPE)
    config = dataclasses.replace(CONFIG, rows=8)
    alone, scores, _ = learn(Update(SPEC, CONFIG), noisy(params), rows)
    update = Update(SPEC, config, make_mesh(**shape))
    batch = pack_rows(rows, config.row_tokens, config.rows, routing=update.routing)
    arrays, count, _ = microbatches(batch, config.rows, 1)
    state, placed = update.init(noisy(params)), update.put(arrays)
    np.testing.assert_allclose(np.asarray(update.score(state["params"], placed, count))[0, 0], scores[0, 0], atol=1e-4)
    _, metrics = update.update(state, placed, count, 10.0)
    found = host_metrics(metrics)
    for name in ("routing/moved", "routing/moved_layers", "loss", "logprob"):
        assert found[name] == pytest.approx(alone[name], abs=1e-4), name


@pytest.mark.long
def test_a_training_run_replays_and_says_how_much_was_routed_differently(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    monkeypatch.setattr(trainer, "rollout", rewarded(trainer.rollout))
    mixture = dataclasses.replace(PRESETS["tiny"], n_experts=8, n_experts_per_token=2, d_ff_expert=32)
    monkeypatch.setitem(PRESETS, "tiny_mixture", mixture)
    options = {
        "model.size": "tiny_mixture",
        "model.replay_routing": True,
        "learning.router_aux_coef": 0.01,
        "learning.steps": 2,
        "learning.kl_coef": 1e-3,
        "rollout.max_act_tokens": 12,
        "rollout.max_rehearse_tokens": 8,
    }
    assert trainer.run_train(tiny_config(tmp_path / "run", **options)) == 0
    lines = read_metrics(tmp_path / "run")
    moved = [line["routing/moved"] for line in lines if "routing/moved" in line]
    assert len(moved) == 2 and all(0 <= share < 0.05 for share in moved)  # float32, equal weights
    written = [s for t in read_trajectories(tmp_path / "run" / "trajectories.jsonl") for s in t.segments]
    assert written and all(len(s.experts) == 2 * len(s.ids) * 2 * 2 for s in written)


@pytest.mark.quick
def test_a_model_without_experts_is_refused(tmp_path):
    with pytest.raises(UserError, match="no experts"):
        Update(DENSE, CONFIG)
    cfg = tiny_config(tmp_path, **{"model.replay_routing": True, "model.tokenizer": str(TOKENIZER)})
    with pytest.raises(UserError, match="model.replay_routing=True: the model has no experts"):
        checked_spec(cfg, chat_format(cfg))
    with pytest.raises(UserError, match="no experts"):
        Engine(init_params(DENSE, jax.random.key(0)), DENSE, EngineConfig(slots=2, record_routing=True))
