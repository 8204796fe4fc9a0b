"""Dynamic sampling: batches are drawn until enough groups have spread, and those are kept."""

from __future__ import annotations

import types

import pytest
from learning_common import FakeTrajectory, tiny_config

from envace_jax.distributed import Processes
from envace_jax.interrupts import Interrupts, Preempted
from envace_jax.learning import trainer
from envace_jax.learning.overlap import Batch
from envace_jax.learning.shared import Agreed


def prepared(monkeypatch, rewards: dict[int, tuple[float, float]], dynamic: bool, played=(), processes=None):
    """A run whose groups' two rewards are given, and its batches; `played`: groups that were played ahead."""
    batches = iter(range(100))

    def rollout(tasks, *, first_group, group_size, **_):
        for k, _task in enumerate(tasks):
            for member in range(group_size):
                yield FakeTrajectory(first_group + k, rewards[first_group + k][member], member=member)

    def draws():
        for _ in batches:
            yield ["task", "task"]

    monkeypatch.setattr(trainer, "rollout", rollout)
    cfg = tiny_config("x", **{"learning.dynamic_sampling": dynamic, "learning.group_size": 2})
    arm = types.SimpleNamespace(observe=None)
    run = types.SimpleNamespace(
        cfg=cfg,
        arm=arm,
        data=draws(),
        engine=None,
        chat=None,
        rollout=None,
        judge=None,
        step=0,
        grounding=None,
        processes=processes or Processes(),
        interrupts=Interrupts(),
        ahead=None,
    )
    if played:
        next(batches)
        ahead = [FakeTrajectory(g, rewards[g][member], member=member) for g in played for member in range(2)]
        run.ahead = Batch(ahead, 2.0, {"wall": 2.0})
    return run, batches


def collected(*args, **options):
    """The groups kept and the number of batches drawn."""
    run, batches = prepared(*args, **options)
    kept = trainer.collect(run, {})
    return sorted({t.group for t in kept}), len(kept), next(batches)


def test_groups_with_spread_are_kept(monkeypatch):
    rewards = {0: (1.0, 1.0), 1: (0.0, 1.0), 2: (0.5, 0.5), 3: (0.2, 0.4), 4: (0.0, 1.0), 5: (0.0, 1.0)}
    assert collected(monkeypatch, rewards, dynamic=True) == ([1, 3], 4, 2)
    assert collected(monkeypatch, rewards, dynamic=False) == ([0, 1], 4, 1)


def test_draws_end_when_no_group_has_spread(monkeypatch):
    rewards = dict.fromkeys(range(8), (1.0, 1.0)) | {5: (0.0, 1.0)}
    groups, n, drawn = collected(monkeypatch, rewards, dynamic=True)
    assert groups == [0, 5] and n == 4 and drawn == trainer.MAX_DRAWS


def test_what_was_played_ahead_is_the_first_draw(monkeypatch):
    """Its groups are kept; what they lack is drawn in the step."""
    rewards = {0: (1.0, 1.0), 1: (0.0, 1.0), 2: (0.5, 0.5), 3: (0.2, 0.4)}
    assert collected(monkeypatch, rewards, dynamic=True, played=(0, 1)) == ([1, 3], 4, 2)
    assert collected(monkeypatch, rewards, dynamic=False, played=(0, 1)) == ([0, 1], 4, 1)
    run, _ = prepared(monkeypatch, rewards, dynamic=False, played=(0, 1))
    batch, stale = trainer.next_batch(run)
    assert stale and batch.seconds >= 2.0 and batch.timings == {"wall": 2.0}


def test_an_interrupt_between_draws_still_finds_what_was_played_ahead(monkeypatch):
    rewards = {0: (1.0, 1.0), 1: (0.0, 1.0), 2: (0.5, 0.5), 3: (0.2, 0.4)}
    run, _ = prepared(monkeypatch, rewards, dynamic=True, played=(0, 1))
    run.interrupts.pending = Preempted
    with pytest.raises(Preempted):
        trainer.next_batch(run)
    assert [t.group for t in run.ahead.trajectories] == [0, 0, 1, 1]


def test_who_has_a_batch_hears_of_one_that_stops(monkeypatch):
    """Before the update, which is a program of all: a process that was told to stop is not in it."""

    class Two(Processes):
        alone = False

        def gather(self, value, name):
            assert value == {"trajectories": []}
            return [value, {"stop": True}]

    run, _ = prepared(monkeypatch, {0: (0.0, 1.0), 1: (0.0, 1.0)}, dynamic=False, played=(0, 1), processes=Two(0, 2))
    with pytest.raises(Agreed):
        trainer.next_batch(run)
    assert run.ahead is not None
