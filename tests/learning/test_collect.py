"""Dynamic sampling: batches are drawn until enough groups have spread, and those are kept."""

from __future__ import annotations

import types

from learning_common import FakeTrajectory, tiny_config

from envace_jax.distributed import Processes
from envace_jax.learning import trainer
from envace_jax.learning.interrupts import Interrupts


def collected(monkeypatch, rewards: dict[int, tuple[float, float]], dynamic: bool):
    """The groups kept and the number of batches drawn, where each group's two rewards are given."""
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
        processes=Processes(),
        interrupts=Interrupts(),
    )
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
