"""Rollouts that run while the update does: what is learned from, from whom, and that a killed run ends alike."""

from __future__ import annotations

import dataclasses
import json
import threading

import jax
import numpy as np
import pytest
from learning_common import counting_engine, rewarded, tiny_config, toy_engine
from test_trainer import ROOT, Killed, final_state, same_end

from envace_jax.config import UserError
from envace_jax.distributed import Processes
from envace_jax.learning import overlap, setup, trainer
from envace_jax.learning.checkpoint import Checkpoints
from envace_jax.learning.metrics import read_metrics
from envace_jax.rehearsal.trajectory import read_trajectories

pytestmark = pytest.mark.usefixtures("toy_training")
AHEAD = {"learning.max_staleness": 1, "learning.importance_cap": 2.0}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(trainer, "rollout", rewarded(trainer.rollout))
        patch.setattr(setup, "make_engine", toy_engine)
        folder = tmp_path_factory.mktemp("runs") / "unbroken"
        assert trainer.run_train(tiny_config(folder, **AHEAD)) == 0
    return folder


def words(folder, step):
    return [[s.ids for s in t.segments] for t in list(read_trajectories(folder / "trajectories.jsonl"))[4 * step :][:4]]


def test_every_batch_but_the_first_comes_from_the_parameters_before(unbroken, tmp_path):
    """The toy engine's words follow from the parameters: with those of step 0 kept, step 2 says what step 1's said.

    Steps count from 1.  In step with the update, batch 2 comes from the parameters after update 1; ahead of it, from
    the initial ones.  A learning rate of 0 makes both runs the same.
    """
    assert [r["staleness"] for r in read_metrics(unbroken)] == [0, 1, 1, 1]
    assert [t.member for t in read_trajectories(unbroken / "trajectories.jsonl")] == [0, 1, 0, 1] * 4
    in_step, still = tmp_path / "in_step", tmp_path / "still"
    assert trainer.run_train(tiny_config(in_step)) == 0
    assert trainer.run_train(tiny_config(still, **{"learning.lr": 0.0, "learning.steps": 2})) == 0
    assert words(unbroken, 0) == words(in_step, 0) == words(still, 0)
    assert words(unbroken, 1) == words(still, 1)
    assert words(in_step, 1) != words(still, 1)


def test_nothing_moves_when_nothing_is_learned(tmp_path):
    runs = tmp_path / "ahead", tmp_path / "in_step"
    for folder, options in zip(runs, (AHEAD, {})):
        assert trainer.run_train(tiny_config(folder, **{"learning.lr": 0.0}, **options)) == 0
    states = [final_state(folder)[2]["params"] for folder in runs]
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert (runs[0] / "trajectories.jsonl").read_bytes() == (runs[1] / "trajectories.jsonl").read_bytes()


@pytest.mark.parametrize("place", ["save", *(pytest.param(x, marks=pytest.mark.long) for x in ("next_batch", "mark"))])
def test_a_killed_run_learns_from_the_batch_that_was_played_ahead(unbroken, tmp_path, monkeypatch, place):
    folder, calls = tmp_path / "run", 0
    owner = trainer if place == "next_batch" else trainer.Run
    real = getattr(owner, place)

    def dies(*args):
        nonlocal calls
        calls += 1
        if calls == {"save": 2}.get(place, 4):
            raise Killed
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, place, dies)
        with pytest.raises(Killed):
            trainer.run_train(tiny_config(folder, **AHEAD))
    assert trainer.run_train(tiny_config(folder, **AHEAD)) == 0
    same_end(unbroken, folder)


def test_a_batch_without_verdicts_is_drawn_again(unbroken, tmp_path, monkeypatch):
    """Played ahead while the judge is away, it is dropped; its step asks again and finds the judge."""
    real, calls = trainer.played_draw, []

    def judge_away_once(run, step, *rest):
        calls.append(step > run.step)
        found = list(real(run, step, *rest))
        if len(calls) == 2:
            found = [dataclasses.replace(t, reward=None, masked_cause="outage") for t in found]
        return iter(found)

    monkeypatch.setattr(trainer, "played_draw", judge_away_once)
    folder = tmp_path / "run"
    assert trainer.run_train(tiny_config(folder, **AHEAD)) == 0
    assert calls == [False, True, False, True, True]
    assert [r["staleness"] for r in read_metrics(folder)] == [0, 0, 1, 1]
    tasks = [[t.task_id for t in read_trajectories(x / "trajectories.jsonl")] for x in (folder, unbroken)]
    assert tasks[0] == tasks[1]


class Half(Processes):
    """Process 0 of two that plays really; what the other one played is read from the run of one process."""

    def __init__(self, folder):
        super().__init__(0, 2)
        lines = map(json.loads, (folder / "trajectories.jsonl").read_text().splitlines())
        self.theirs = [t for t in lines if t["group"] == 1]
        self.heard = []

    def gather(self, value, name):
        if not (isinstance(value, dict) and "trajectories" in value):
            return [value, value]
        mine = value["trajectories"]
        assert all(t["group"] == 0 for t in mine)
        self.heard.append((name, len(mine)))
        return [value, {"trajectories": [t for t in self.theirs if mine and name == f"step {t['step'] + 1}"]}]


@pytest.mark.long
def test_what_each_played_ahead_is_gathered_after_the_update(tmp_path, monkeypatch):
    """Half a batch is played here: rows, losses and checkpoint are those of the whole one."""
    monkeypatch.setattr(setup, "make_engine", counting_engine)
    one, two = tmp_path / "one", tmp_path / "two"
    assert trainer.run_train(tiny_config(one, **AHEAD)) == 0
    half = Half(one)
    monkeypatch.setattr(trainer, "processes", lambda _: half)
    assert trainer.run_train(tiny_config(two, **AHEAD, **{"mesh.fsdp": 2})) == 0
    # A step that has its batch still asks, before its update, whether all go on.
    ahead = [(f"step {n}", k) for n in (2, 3, 4) for k in (2, 0)]
    assert half.heard == [("step 1", 2), *ahead]
    assert words(one, 0) + words(one, 3) == words(two, 0) + words(two, 3)
    records = read_metrics(one), read_metrics(two)
    assert [r["staleness"] for r in records[1]] == [0, 1, 1, 1]
    for a, b in zip(*records):
        assert abs(a["loss"] - b["loss"]) < 1e-5 and a["reward/mean"] == b["reward/mean"]
    saved = Checkpoints(two / "checkpoints").read_meta(2)["ahead"]["trajectories"]
    assert [(t["group"], t["member"]) for t in saved] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.quick
def test_an_update_that_fails_stops_the_players():
    stopped = threading.Event()

    def play(timings, stop):
        stop.wait(60)
        stopped.set()
        return []

    with pytest.raises(ZeroDivisionError), overlap.playing_ahead(play, keep=lambda _: pytest.fail("kept")):
        raise ZeroDivisionError
    assert stopped.is_set()


@pytest.mark.quick
def test_players_that_fail_are_heard():
    def play(timings, stop):
        raise UserError("no room")

    with pytest.raises(UserError, match="no room"), overlap.playing_ahead(play, keep=lambda _: pytest.fail("kept")):
        pass


@pytest.mark.quick
def test_what_cannot_run_ahead_is_refused(tmp_path):
    with pytest.raises(UserError, match="set learning.importance_cap"):
        overlap.check(tiny_config(tmp_path, **{"learning.max_staleness": 1}))
