"""Rollouts that run while the update does, in real processes: the same trajectories for every number of them, and a
run that is killed ends as the unbroken one."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from learning_common import counting_engine, rewarded, tiny_config
from test_team import ROOT, finish, output, parameters, same_training, start, trajectories
from test_trainer import MEASURED

from envace_jax.learning import setup, trainer
from envace_jax.learning.checkpoint import Checkpoints
from envace_jax.learning.metrics import read_metrics

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
AHEAD = ("learning.max_staleness=1", "learning.importance_cap=2.0")
TEAM = ("mesh.fsdp=4", "mesh.hang_timeout=20", *AHEAD)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two processes, four steps, that nothing disturbed."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert finish(start(folder, *TEAM)) == [0, 0], output(folder)
    return folder


def timeless(folder):
    return [{k: v for k, v in r.items() if not k.startswith(MEASURED)} for r in read_metrics(folder)]


def test_two_processes_play_ahead_as_one_does(tmp_path, monkeypatch):
    """With words that follow from how many updates there were: all trajectories are equal, and so are the losses."""
    one, two = tmp_path / "one", tmp_path / "two"
    with monkeypatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(trainer, "rollout", rewarded(trainer.rollout))
        patch.setattr(setup, "make_engine", counting_engine)
        changes = {"learning.max_staleness": 1, "learning.importance_cap": 2.0}
        assert trainer.run_train(tiny_config(one, **changes)) == 0
    assert finish(start(two, *TEAM, "engine=counting")) == [0, 0], output(two)
    same_training(one, two)
    assert [r["staleness"] for r in read_metrics(two)] == [0, 1, 1, 1]
    words = [[(t["step"], t["group"], t["member"], t["rows"]) for t in trajectories(x)] for x in (one, two)]
    assert words[0] == words[1]


@pytest.mark.parametrize(
    ("victim", "place", "number", "sign"),
    [(1, "update", 3, "SIGKILL"), (0, "save", 1, "SIGKILL"), (1, "update", 2, "SIGTERM"), (0, "judge", 3, "SIGTERM")],
)
def test_one_of_two_dies_and_the_end_is_the_same(whole, tmp_path, victim, place, number, sign):
    folder = tmp_path / "run"
    status = finish(start(folder, *TEAM, f"die{victim}={place}:{number}:{sign}"))
    if sign == "SIGKILL":
        assert status[victim] == -9 and status[1 - victim] != 0, output(folder)
    else:
        assert status == [trainer.PREEMPTED] * 2, output(folder)
    assert finish(start(folder, *TEAM)) == [0, 0], output(folder)
    step, state = parameters(folder)
    want_step, want = parameters(whole)
    assert step == want_step
    jax.tree.map(np.testing.assert_array_equal, state, want)
    assert (folder / "trajectories.jsonl").read_bytes() == (whole / "trajectories.jsonl").read_bytes()
    assert timeless(folder) == timeless(whole)


def test_what_two_played_ahead_one_learns_from(whole, tmp_path):
    """The checkpoint holds what both played: taken up by one process, its next step is that of the two."""
    folder = tmp_path / "run"
    assert finish(start(folder, *TEAM, "die0=update:2:SIGTERM")) == [trainer.PREEMPTED] * 2, output(folder)
    position = Checkpoints(folder / "checkpoints").read_meta(2)
    assert [(t["group"], t["member"]) for t in position["ahead"]["trajectories"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert finish(start(folder, *AHEAD, processes=1, devices=1)) == [0], output(folder)
    lines = [[json.dumps(t) for t in trajectories(x) if t["step"] < 3] for x in (folder, whole)]
    assert lines[0] == lines[1]
    third = [read_metrics(x)[2] for x in (folder, whole)]
    assert third[0]["staleness"] == third[1]["staleness"] == 1
    assert abs(third[0]["loss"] - third[1]["loss"]) < 1e-5 and third[0]["reward/mean"] == third[1]["reward/mean"]


def test_a_model_that_samples_plays_beside_the_update(tmp_path):
    """A real engine over two devices of each process, cut over both, while the update runs over all four."""
    folder = tmp_path / "run"
    changes = ("mesh.fsdp=2", "mesh.tensor=2", "engine=real", "learning.steps=3", *AHEAD)
    assert finish(start(folder, *changes)) == [0, 0], output(folder)
    assert [r["staleness"] for r in read_metrics(folder)] == [0, 1, 1]
