"""The arms: that two parameter sets weigh outputs as one does, and which sets a step trains."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from learning_common import SPEC, Actors, random_rows, tiny_config

from envace_jax import build
from envace_jax.config import UserError
from envace_jax.datasets.sources import load_tasks
from envace_jax.learning import setup, trainer
from envace_jax.learning.arms import learners_of
from envace_jax.learning.learner import Learner
from envace_jax.learning.loss import LossConfig
from envace_jax.learning.metrics import read_metrics
from envace_jax.learning.packing import NORMALISERS
from envace_jax.learning.step import UpdateConfig, make_update
from envace_jax.model.qwen3 import init_params
from envace_jax.rehearsal.trajectory import read_trajectories

# At lr 0 every update of a batch starts from the same parameters, and AdamW's first moment is linear in the gradients.
STILL = UpdateConfig(lr=0.0, grad_clip=0.0, rows=4, row_tokens=64, capacity=4, loss=LossConfig(chunk_tokens=64))


@pytest.fixture(scope="module")
def updates():
    """The update of one and of several updates a batch."""
    several = dataclasses.replace(STILL, loss=dataclasses.replace(STILL.loss, own_old=False))
    return {1: make_update(SPEC, STILL), 2: make_update(SPEC, several)}


@pytest.mark.parametrize(
    ("loss_mean", "parts"),
    [
        *(pytest.param(mean, 1, marks=() if mean == "token" else pytest.mark.long) for mean in NORMALISERS),
        pytest.param("token", 2, marks=pytest.mark.long),
    ],
)
def test_gradients_of_two_sets_add_up_to_those_of_the_shared_set(updates, tmp_path, loss_mean, parts):
    """Same rows, same parameters: what `per_role` learns from ACT and from REHEARSE is what `envace` learns."""
    cfg = tiny_config(tmp_path, **{"learning.loss_mean": loss_mean, "learning.updates_per_batch": parts})
    rows, params = random_rows(3, 21), init_params(SPEC, jax.random.key(0))
    moments = {}
    for arm in ("envace", "per_role"):
        for name, roles in learners_of(arm).items():
            learner = Learner(cfg, updates[parts], params, name, tmp_path)
            figures = learner.learn(rows, 0, roles)
            assert 0 < figures["packing/rows"] < len(rows) or arm == "envace"
            moments[arm, name] = learner.state["opt_state"][0].mu
    both = jax.tree.map(np.add, moments["per_role", "policy"], moments["per_role", "rehearse"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), both, moments["envace", "policy"])
    assert max(float(np.abs(x).max()) for x in jax.tree.leaves(both)) > 1e-4


@pytest.mark.usefixtures("toy_training")
@pytest.mark.parametrize("arm", ["per_role", "frozen_rehearse"])
def test_a_step_trains_the_sets_of_its_arm(tmp_path, monkeypatch, arm):
    """`per_role` moves both sets, apart; `frozen_rehearse` moves ACT's and goes on to ask the initial one."""
    given: dict[str, list[np.ndarray]] = {}
    real = setup.make_engine

    def watched(*args):
        engine = real(*args)
        keep = engine.set_params

        def set_params(params, name="policy"):
            given.setdefault(name, []).append(np.asarray(params["embed"]))
            keep(params, name)

        engine.set_params = set_params
        given["policy"] = [np.asarray(args[2]["embed"])]
        return engine

    monkeypatch.setattr(setup, "make_engine", watched)
    options = {"learning.arm": arm, "learning.steps": 3, "learning.prompts_per_step": 4, "rollout.checks": ("format",)}
    folder = tmp_path / "run"
    assert trainer.run_train(tiny_config(folder, **options)) == 0
    # Whether a role's few outputs of one step differ in reward depends on jax's version: some step of three has spread.
    moved = lambda name: max(record[name] for record in read_metrics(folder))  # noqa: E731
    lines = (folder / "trajectories.jsonl").read_text().splitlines()
    roles = [s["role"] for line in lines for s in json.loads(line)["segments"]]
    assert roles.count("rehearse") > 0
    initial = given["policy"][0]
    assert len(given["policy"]) == 4  # the initial parameters, and one hand-over an update
    assert moved("grad_norm") > 0 and not np.array_equal(given["policy"][-1], initial)
    if arm == "per_role":
        assert set(given) == {"policy", "rehearse"} and moved("rehearse/grad_norm") > 0
        np.testing.assert_array_equal(given["rehearse"][0], initial)
        assert not np.array_equal(given["rehearse"][-1], initial)
        assert not np.array_equal(given["rehearse"][-1], given["policy"][-1])
    else:
        assert set(given) == {"policy", "frozen"} and len(given["frozen"]) == 1
        np.testing.assert_array_equal(given["frozen"][0], initial)
        assert not any(name.startswith("rehearse/grad") for record in read_metrics(folder) for name in record)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("bfcl_eval") is None, reason="bfcl-eval is not installed")
@pytest.mark.parametrize(("arm", "source"), [("recorded", "recorded"), ("real_env", "real")])
def test_arms_without_rehearsal_train_on_bfcl(tmp_path, monkeypatch, arm, source):
    """One step on a task of BFCL: who does what the reference does is paid, who idles is not, nobody rehearses."""
    monkeypatch.chdir(Path(__file__).parents[2])
    values = {
        "data.source": "bfcl", "data.train_limit": 1, "data.eval_limit": 1, "data.max_head_tokens": 6000,
        "learning.prompts_per_step": 1, "rollout.max_input_tokens": 6000, "rollout.max_act_tokens": 800,
        "rollout.max_acts": 60, "rollout.max_segments": 200, "learning.row_tokens": 6800, "learning.steps": 1,
        "learning.arm": arm,
    }  # fmt: skip
    cfg = tiny_config(tmp_path / "run", **values)
    tasks = load_tasks(cfg.data)[0]
    actors = lambda cfg, spec, *_: Actors(build.chat_format(cfg), tasks, spec.vocab_size)  # noqa: E731
    monkeypatch.setattr(setup, "make_engine", actors)
    assert trainer.run_train(cfg) == 0
    record = read_metrics(tmp_path / "run")[0]
    assert record["grad_norm"] > 0 and record[f"count/observations_{source}"] > 0 and record["masked/share"] == 0
    assert record.get("outputs/rehearse", 0) == 0
    played = list(read_trajectories(tmp_path / "run" / "trajectories.jsonl"))
    assert {t.reward for t in played if t.member == 0} == {1.0}
    assert all(t.reward < 1.0 for t in played if t.member == 1)


@pytest.mark.quick
def test_a_bad_step_of_any_set_counts(tmp_path):
    run = SimpleNamespace(
        cfg=tiny_config(tmp_path, **{"learning.max_bad_steps": 2}), folder=tmp_path, step=4, bad_steps=0,
        learners=dict.fromkeys(learners_of("per_role")),
    )  # fmt: skip
    trainer.guard(run, {"skipped": 0.0, "rehearse/skipped": 1.0})
    assert run.bad_steps == 1
    trainer.guard(run, {"skipped": 0.0, "rehearse/skipped": 0.0})
    assert run.bad_steps == 0
    trainer.guard(run, {"skipped": 1.0, "rehearse/skipped": 0.0})
    with pytest.raises(UserError, match="2 steps in a row"):
        trainer.guard(run, {"skipped": 0.0, "rehearse/skipped": 1.0})
