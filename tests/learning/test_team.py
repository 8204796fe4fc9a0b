"""Real processes: two train as one, checkpoints fit other meshes, and what dies or hangs costs no whole step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from learning_common import counting_engine, free_port, rewarded, tiny_config

from envace_jax.distributed import LOST
from envace_jax.learning import setup, trainer
from envace_jax.learning.checkpoint import Checkpoints
from envace_jax.learning.metrics import read_metrics
from envace_jax.learning.step import UpdateConfig, make_update
from envace_jax.model.qwen3 import init_params
from envace_jax.model.sharding import make_mesh
from envace_jax.model.spec import Qwen3Spec

ROOT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("team_child.py")
QUICK_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def start(folder: Path, *changes: str, processes: int = 2, devices: int = 2) -> list[subprocess.Popen]:
    """The processes of a run; their output goes beside its folder."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {QUICK_COMPILE}",
        "ENVACE_COORDINATOR": f"127.0.0.1:{free_port()}",
        "ENVACE_PROCESSES": str(processes),
    }
    if processes == 1:
        del environment["ENVACE_COORDINATOR"], environment["ENVACE_PROCESSES"]
    started = []
    for index in range(processes):
        with (folder.parent / f"{folder.name}-{index}.log").open("ab") as log:
            started.append(
                subprocess.Popen(
                    [sys.executable, str(CHILD), str(folder), *changes],
                    cwd=ROOT,
                    env=environment | ({"ENVACE_PROCESS": str(index)} if processes > 1 else {}),
                    stdout=log,
                    stderr=log,
                )
            )
    return started


def finish(started: list[subprocess.Popen], limit: float = 800) -> list[int]:
    """Exit statuses by process; nothing is left running."""
    end = time.monotonic() + limit
    try:
        return [process.wait(max(1.0, end - time.monotonic())) for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()


def output(folder: Path) -> str:
    return "".join(path.read_text(errors="replace")[-3000:] for path in folder.parent.glob(f"{folder.name}-*.log"))


def trajectories(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "trajectories.jsonl").read_text().splitlines()]


def like_on(mesh, folder: Path):
    """What a run over this mesh would restore into."""
    step = Checkpoints(folder / "checkpoints").latest()
    spec = Qwen3Spec.from_hf_config(Checkpoints(folder / "checkpoints").read_meta(step)["model"])
    update = make_update(spec, UpdateConfig(), mesh)
    return step, update.init(init_params(spec, jax.random.key(0)))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of a run of one process on one device: five steps."""
    before = os.getcwd()
    os.chdir(ROOT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "rollout", rewarded(trainer.rollout))
        patch.setattr(setup, "make_engine", counting_engine)
        folder = tmp_path_factory.mktemp("runs") / "alone"
        assert trainer.run_train(tiny_config(folder, **{"learning.steps": 5})) == 0
    os.chdir(before)
    return folder


def same_training(one: Path, two: Path) -> None:
    """Step 1 was played alike, and all losses agree."""
    records = read_metrics(one), read_metrics(two)
    assert [r["step"] for r in records[0]] == [r["step"] for r in records[1]]
    for a, b in zip(*records):
        assert abs(a["loss"] - b["loss"]) < 1e-5, (a["step"], a["loss"], b["loss"])
        assert a["reward/mean"] == b["reward/mean"]
        assert abs(a["grad_norm"] - b["grad_norm"]) < 1e-4 * max(1.0, a["grad_norm"])
    first = [[t for t in trajectories(x) if t["step"] == 0] for x in (one, two)]
    assert [t["rows"] for t in first[0]] == [t["rows"] for t in first[1]]
    assert [(t["group"], t["member"], t["reward"]) for t in first[0]] == [
        (t["group"], t["member"], t["reward"]) for t in first[1]
    ]


def restores_everywhere(folder: Path) -> None:
    states = []
    for mesh in (None, make_mesh(fsdp=8)):
        step, like = like_on(mesh, folder)
        assert step == 5
        states.append(jax.device_get(Checkpoints(folder / "checkpoints").restore(step, {"policy": like})))
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_processes_train_as_one(alone, tmp_path):
    """Their own first step has the same ids; on the same trajectories losses agree; checkpoints fit other meshes."""
    folder = tmp_path / "two"
    changes = ("learning.steps=5", "mesh.replica=2", "mesh.fsdp=2", "engine=counting", f"replay={alone}")
    assert finish(start(folder, *changes)) == [0, 0], output(folder)
    same_training(alone, folder)
    restores_everywhere(folder)
    record = read_metrics(folder)[-1]
    assert record["handover/bytes"] > 0 and record["time/handover"] > 0
    assert not (folder / "metrics.tmp").exists() and "2 devices" not in (folder / "REPRODUCE.md").read_text()
    assert json.loads((folder / "start.json").read_text())["processes"] == 2


@pytest.mark.long
def test_two_by_four_with_the_real_engine(tmp_path):
    """2 processes of 4 devices and 1 of 1, both sampling with the model: ids of step 1, losses on the same batches."""
    one, two = tmp_path / "one", tmp_path / "two"
    assert finish(start(one, "learning.steps=5", "engine=real", processes=1, devices=1)) == [0], output(one)
    changes = ("learning.steps=5", "mesh.fsdp=8", "engine=real", f"replay={one}")
    assert finish(start(two, *changes, devices=4)) == [0, 0], output(two)
    same_training(one, two)
    restores_everywhere(two)


@pytest.mark.long
def test_two_processes_go_on_as_one_and_back(tmp_path):
    """The same command on another number of processes takes the run up where it stood."""
    folder = tmp_path / "run"
    assert finish(start(folder, "learning.steps=2", "mesh.fsdp=4")) == [0, 0], output(folder)
    assert finish(start(folder, "learning.steps=4", processes=1, devices=1)) == [0], output(folder)
    assert finish(start(folder, "learning.steps=6", "mesh.fsdp=4")) == [0, 0], output(folder)
    assert [r["step"] for r in read_metrics(folder)] == [1, 2, 3, 4, 5, 6]


PLACES = [("rollout", 3), ("judge", 9), ("update", 3), ("save", 1)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of one process that nothing disturbed, compiled as the killed ones are."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert finish(start(folder, processes=1, devices=1)) == [0], output(folder)
    return folder


def parameters(folder: Path):
    step, like = like_on(None, folder)
    return step, jax.device_get(Checkpoints(folder / "checkpoints").restore(step, {"policy": like}))


@pytest.mark.long
@pytest.mark.parametrize("sign", ["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize(("place", "number"), PLACES)
def test_kill_matrix(whole, tmp_path, place, number, sign):
    """Wherever one process dies, the same command ends with the parameters of the unbroken run."""
    folder = tmp_path / "run"
    status = finish(start(folder, f"die={place}:{number}:{sign}", processes=1, devices=1))
    if sign == "SIGKILL":
        assert status == [-9]
    else:  # in a save the steps go on until the signal is seen; the last one may be the run's end
        assert status[0] in (trainer.PREEMPTED, 0), output(folder)
    Checkpoints(folder / "checkpoints", say=lambda _: None).clean_up()
    assert finish(start(folder, processes=1, devices=1)) == [0], output(folder)
    step, state = parameters(folder)
    want_step, want = parameters(whole)
    assert step == want_step
    jax.tree.map(np.testing.assert_array_equal, state, want)
    assert (folder / "trajectories.jsonl").read_bytes() == (whole / "trajectories.jsonl").read_bytes()
    assert [r["step"] for r in read_metrics(folder)] == [1, 2, 3, 4]


@pytest.mark.long
@pytest.mark.parametrize("sign", ["SIGKILL", "SIGTERM"])
def test_one_of_two_dies(tmp_path, sign):
    """The other one ends too: after SIGTERM with a checkpoint of the same step, after SIGKILL by naming the dead."""
    folder = tmp_path / "run"
    changes = ("mesh.fsdp=4", "mesh.hang_timeout=20", "learning.steps=6")
    status = finish(start(folder, *changes, f"die1=rollout:4:{sign}"))
    if sign == "SIGKILL":
        assert status[1] == -9 and status[0] not in (0, None)
        text = (tmp_path / "run-0.log").read_text(errors="replace")
        assert "process 1" in text or "another process" in text or "task 1" in text.lower(), text[-2000:]
    else:
        assert status == [trainer.PREEMPTED] * 2, output(folder)
        assert Checkpoints(folder / "checkpoints").latest() == 3
    assert finish(start(folder, *changes)) == [0, 0], output(folder)
    assert [r["step"] for r in read_metrics(folder)] == [1, 2, 3, 4, 5, 6]


@pytest.fixture(scope="module")
def whole_team(tmp_path_factory):
    """A run of two processes that nothing disturbed."""
    folder = tmp_path_factory.mktemp("runs") / "team"
    assert finish(start(folder, "mesh.fsdp=4")) == [0, 0], output(folder)
    return folder


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("victim", "place", "number"), [(1, "judge", 5), (1, "update", 3), (0, "save", 1)])
def test_one_of_two_dies_and_the_end_is_the_same(whole_team, tmp_path, victim, place, number):
    """Wherever one of two is killed (process 0 writes the manifests), the other ends too; the same command then ends
    with the parameters of the unbroken run, bit for bit."""
    folder = tmp_path / "run"
    changes = ("mesh.fsdp=4", "mesh.hang_timeout=20")
    status = finish(start(folder, *changes, f"die{victim}={place}:{number}:SIGKILL"))
    assert status[victim] == -9 and status[1 - victim] != 0, output(folder)
    assert finish(start(folder, *changes)) == [0, 0], output(folder)
    step, state = parameters(folder)
    want_step, want = parameters(whole_team)
    assert step == want_step
    jax.tree.map(np.testing.assert_array_equal, state, want)
    assert (folder / "trajectories.jsonl").read_bytes() == (whole_team / "trajectories.jsonl").read_bytes()
    assert [r["step"] for r in read_metrics(folder)] == [1, 2, 3, 4]


@pytest.mark.long
def test_hung_process_is_named(tmp_path):
    """One of two is stopped (it neither dies nor answers): the other names it and ends."""
    folder = tmp_path / "run"
    started = start(folder, "mesh.fsdp=4", "mesh.hang_timeout=10", "learning.steps=500", "die1=rollout:3:SIGSTOP")
    try:
        assert started[0].wait(800) == LOST, output(folder)
        text = (tmp_path / "run-0.log").read_text(errors="replace")
        # Where it was is what its last beat said, which may have been before the rollout.
        assert "process 1 on" in text and "is gone or stopped" in text and "process 0 waits in step 3" in text, text
    finally:
        for process in started:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
