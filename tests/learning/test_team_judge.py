"""A judge with devices of its own beside a training run, in one process and in two."""

from __future__ import annotations

import pytest
from test_team import finish, output, start

from envace_jax.learning.metrics import read_metrics

JUDGE = (
    "rewards.judge=policy",
    "rewards.policy.path=data/quickstart/model",
    "rewards.policy.max_tokens=8",
    "learning.steps=2",
)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("processes", "devices", "changes"),
    [
        (1, 8, ("mesh.replica=3", "mesh.fsdp=2", "rewards.policy.devices=2")),
        (2, 3, ("mesh.fsdp=4", "rewards.policy.devices=1")),
    ],
)
def test_a_run_whose_judge_has_devices_of_its_own(tmp_path, processes, devices, changes):
    """Every process asks its own; the mesh is laid over the devices that are left."""
    folder = tmp_path / "run"
    started = start(folder, *JUDGE, *changes, processes=processes, devices=devices)
    assert finish(started) == [0] * processes, output(folder)
    records = read_metrics(folder)
    assert [r["step"] for r in records] == [1, 2]
    assert all(r["count/judge_requests"] > 0 for r in records)
