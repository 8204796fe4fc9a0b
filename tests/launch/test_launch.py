"""The launch scripts: dry runs print every command and start nothing, mistakes are one line, secrets stay hidden."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
CLOUD = {"PROJECT": "p", "ZONE": "z", "TPU": "t", "TYPE": "v6e-64", "BUCKET": "gs://b", "CLUSTER": "c", "IMAGE": "i"}
TRAIN = ["--", "train", "--config", "configs/quickstart.py"]


def run(script: str, *args: str, env: dict[str, str] | None = None, path: str = "") -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "TMPDIR")}
    clean["PATH"] = path + clean["PATH"]
    return subprocess.run(
        ["bash", str(LAUNCH / script), *args], capture_output=True, text=True, env=clean | (env or {}), timeout=60
    )


def test_local_prints_a_command_for_each_process() -> None:
    done = run("local.sh", "3", "--devices", "2", "--dry_run", *TRAIN)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all(f"ENVACE_PROCESS={i}" in lines[i] and "device_count=2" in lines[i] for i in range(3))


def test_local_hands_each_process_its_number_and_keeps_the_first_failure(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    script = [
        '#!/bin/sh',
        'echo "$ENVACE_PROCESS of $ENVACE_PROCESSES" >> "$OUT"',
        'if [ "$ENVACE_PROCESS" = 1 ]; then until grep -q "0 of" "$OUT"; do sleep 0.1; done; exit 7; fi',
        'exec sleep 30',
    ]
    fake.write_text('\n'.join(script))
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    env = {"PYTHON": str(fake), "OUT": str(tmp_path / "out"), "LOG_DIR": str(tmp_path / "logs")}
    done = run("local.sh", "2", "--devices", "0", *TRAIN, env=env)
    assert done.returncode == 7 and "status 7" in done.stderr  # and the other one did not sleep on
    assert sorted((tmp_path / "out").read_text().splitlines()) == ["0 of 2", "1 of 2"]


def test_pod_walks_through_all_steps() -> None:
    done = run("tpu_pod.sh", "all", "--dry_run", *TRAIN, env=CLOUD)
    assert done.returncode == 0
    order = ["queued-resources create", "scp", "pip install", "tmux new-session", "tail"]
    places = [done.stdout.index(word) for word in order]
    assert places == sorted(places)
    assert "--config.checkpoint.folder=gs://b/envace" in done.stdout and "ENVACE_DISTRIBUTED=auto" in done.stdout
    for action in ("up", "install", "start", "follow", "collect", "down"):
        assert run("tpu_pod.sh", action, "--dry_run", *TRAIN, env=CLOUD).returncode == 0


def test_pod_reuses_what_is_there(tmp_path: Path) -> None:
    fake = tmp_path / "gcloud"
    fake.write_text('#!/bin/sh\necho "$@" >> "$CALLS"\ncase "$*" in *describe*) echo ACTIVE;; esac\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    calls = tmp_path / "calls"
    done = run("tpu_pod.sh", "up", env=CLOUD | {"CALLS": str(calls)}, path=f"{tmp_path}:")
    assert done.returncode == 0 and "there already" in done.stdout
    assert "create" not in calls.read_text()


def test_secrets_are_never_on_a_command_line() -> None:
    env = CLOUD | {"OPENAI_API_KEY": "canary-7733", "HF_TOKEN": "canary-7734"}
    for script, args in (
        ("tpu_pod.sh", ("all", "--dry_run", *TRAIN)),
        ("xpk.sh", ("--dry_run", *TRAIN)),
        ("slurm_gpu.sbatch", ("--dry_run", *TRAIN[1:])),
        ("local.sh", ("2", "--dry_run", *TRAIN)),
    ):
        done = run(script, *args, env=env)
        assert done.returncode == 0, done.stderr
        assert "canary" not in done.stdout + done.stderr


def test_xpk_and_slurm_print_their_commands() -> None:
    done = run("xpk.sh", "--dry_run", *TRAIN, env=CLOUD | {"SLICES": "2"})
    assert "--num-slices=2" in done.stdout and "--tpu-type=v6e-64" in done.stdout
    done = run("slurm_gpu.sbatch", "--dry_run", "train", env={"SLURM_JOB_NUM_NODES": "4"})
    assert "srun --nodes=4 --ntasks=4" in done.stdout


@pytest.mark.parametrize(
    ("script", "args", "env", "message"),
    [
        ("local.sh", (), {}, "usage"),
        ("local.sh", ("x",), {}, "expected a number of processes"),
        ("local.sh", ("2", "--nonsense"), {}, "unknown option"),
        ("local.sh", ("2",), {}, "no command after --"),
        ("tpu_pod.sh", ("up",), {}, "PROJECT is not set"),
        ("tpu_pod.sh", ("fly",), CLOUD, "unknown action"),
        ("tpu_pod.sh", ("start", "--dry_run"), CLOUD, "needs a command"),
        ("xpk.sh", TRAIN, {}, "PROJECT is not set"),
        ("slurm_gpu.sbatch", (), {}, "no command"),
    ],
)
def test_mistakes_are_one_line(script: str, args: tuple, env: dict, message: str) -> None:
    done = run(script, *args, env=env)
    assert done.returncode == 1 and message in done.stderr and len(done.stderr.splitlines()) == 1


SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")
def test_shellcheck_is_clean() -> None:
    scripts = [*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch"), ROOT / ".ci" / "run"]
    done = subprocess.run([str(SHELLCHECK), "-x", *map(str, scripts)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout
