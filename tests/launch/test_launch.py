"""The launch scripts: dry runs print every command and start nothing, mistakes are one line, secrets stay hidden."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envace_jax.cli import load_config
from envace_jax.planning.chips import parse_slice

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
CLOUD = {"PROJECT": "p", "ZONE": "z", "TPU": "t", "TYPE": "v6e-32", "BUCKET": "gs://b", "CLUSTER": "c", "IMAGE": "i"}
TRAIN = ["--", "train", "--config", "configs/quickstart.py"]


def clean(env: dict[str, str] | None = None, path: str = "") -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "TMPDIR")}
    kept["PATH"] = path + kept["PATH"]
    return kept | (env or {})


def run(script: str, *args: str, env: dict[str, str] | None = None, path: str = "") -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(LAUNCH / script), *args], capture_output=True, text=True, env=clean(env, path), timeout=120
    )


def fake(folder: Path, name: str, *lines: str) -> Path:
    """A program of that name, for the front of PATH."""
    path = folder / name
    path.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def wait_for(path: Path, count: int, end: float = 30.0) -> None:
    """Until a file has so many lines."""
    end += time.monotonic()
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert time.monotonic() < end, path.read_text() if path.exists() else f"no {path}"
        time.sleep(0.05)


def test_local_prints_a_command_for_each_process() -> None:
    done = run("local.sh", "3", "--devices", "2", "--dry_run", *TRAIN)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all(f"ENVACE_PROCESS={i}" in lines[i] and "device_count=2" in lines[i] for i in range(3))


def test_local_hands_each_process_its_number_and_keeps_the_first_failure(tmp_path: Path) -> None:
    python = fake(
        tmp_path,
        "python",
        'echo "$ENVACE_PROCESS of $ENVACE_PROCESSES" >> "$OUT"',
        'if [ "$ENVACE_PROCESS" = 1 ]; then until grep -q "0 of" "$OUT"; do sleep 0.1; done; exit 7; fi',
        "exec sleep 30",
    )
    env = {"PYTHON": str(python), "OUT": str(tmp_path / "out"), "LOG_DIR": str(tmp_path / "logs")}
    done = run("local.sh", "2", "--devices", "0", *TRAIN, env=env)
    assert done.returncode == 7 and "status 7" in done.stderr  # and the other one did not sleep on
    assert sorted((tmp_path / "out").read_text().splitlines()) == ["0 of 2", "1 of 2"]


# Stands in for a training process: told to stop it saves for a while, one longer than the other, and ends with 75.
SAVES = (
    """trap 'sleep "0.$((ENVACE_PROCESS * 6 + 1))"; echo "saved $ENVACE_PROCESS" >> "$OUT"; exit 75' TERM""",
    'echo "up $ENVACE_PROCESS" >> "$OUT"',
    "while :; do sleep 0.05; done",
)


def test_local_waits_for_all_to_save_when_told_to_stop(tmp_path: Path) -> None:
    out = tmp_path / "out"
    env = {"PYTHON": str(fake(tmp_path, "python", *SAVES)), "OUT": str(out), "LOG_DIR": str(tmp_path / "logs")}
    command = ["bash", str(LAUNCH / "local.sh"), "2", "--devices", "0", *TRAIN]
    launched = subprocess.Popen(command, env=clean(env), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(out, 2)
    launched.send_signal(signal.SIGTERM)
    assert launched.wait(30) == 75
    assert sorted(out.read_text().splitlines()[2:]) == ["saved 0", "saved 1"]


@pytest.mark.parametrize(
    ("status", "restarts", "requeued"), [(75, 0, True), (76, 0, True), (76, 20, False), (1, 0, False), (0, 0, False)]
)
def test_slurm_saves_in_every_process_and_requeues(tmp_path: Path, status: int, restarts: int, requeued: bool) -> None:
    """The batch script is told to stop: the step's processes get the signal, srun is waited for, the job goes on later.

    srun and scancel are stand-ins: srun notes its process group's leader and runs the task, scancel signals the tasks.
    """
    out, calls = tmp_path / "out", tmp_path / "calls"
    fake(tmp_path, "srun", 'while [ "$1" != bash ]; do shift; done', "SLURM_PROCID=0 exec \"$@\"")
    fake(tmp_path, "scancel", 'echo "scancel $*" >> "$CALLS"', 'kill -TERM "$(head -n 1 "$OUT")"')
    fake(tmp_path, "scontrol", 'echo "scontrol $*" >> "$CALLS"')
    python = fake(
        tmp_path,
        "python",
        f"""trap 'sleep 0.3; echo "saved $ENVACE_PROCESS" >> "$OUT"; exit {status}' TERM""",
        'echo "$$" >> "$OUT"',
        "while :; do sleep 0.05; done",
    )
    names = {"PYTHON": python, "OUT": out, "CALLS": calls, "SLURM_SUBMIT_DIR": ROOT, "SLURM_RESTART_COUNT": restarts}
    env = {name: str(value) for name, value in names.items()} | {"SLURM_JOB_ID": "17"}
    command = ["bash", str(LAUNCH / "slurm_gpu.sbatch"), *TRAIN[1:]]
    job = subprocess.Popen(command, env=clean(env, f"{tmp_path}:"), stderr=subprocess.DEVNULL)
    wait_for(out, 1)
    job.send_signal(signal.SIGTERM)
    assert job.wait(30) == status
    assert out.read_text().splitlines()[1] == "saved 0"
    wanted = ["scancel --signal=TERM 17"] + ["scontrol requeue 17"] * requeued
    assert calls.read_text().splitlines() == wanted


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
    fake(tmp_path, "gcloud", 'echo "$@" >> "$CALLS"', 'case "$*" in *describe*) echo ACTIVE;; esac')
    calls = tmp_path / "calls"
    done = run("tpu_pod.sh", "up", env=CLOUD | {"CALLS": str(calls)}, path=f"{tmp_path}:")
    assert done.returncode == 0 and "there already" in done.stdout
    assert "create" not in calls.read_text()


@pytest.mark.parametrize("old", [True, False])
def test_pod_install_makes_an_environment_of_a_python_that_is_new_enough(tmp_path: Path, old: bool) -> None:
    """What the workers run, run here: the code is unpacked, uv brings Python where 3.11 is missing."""
    bins, worker = tmp_path / "bin", tmp_path / "worker"
    bins.mkdir(), worker.mkdir()
    for tool in ("bash", "basename", "chmod", "cp", "gzip", "mkdir", "mv", "rm", "tar"):
        (bins / tool).symlink_to(str(shutil.which(tool)))
    made = ["mkdir -p .venv/bin", f"for f in python pip; do cp {bins}/inside .venv/bin/$f; done"]
    fake(bins, "inside", 'echo "$(basename "$0") $*" >> "$CALLS"')
    new = fake(bins, "found-3.11" if old else "python3.11", 'echo "new $*" >> "$CALLS"', *made)
    fake(bins, "python3", 'echo "python3 $*" >> "$CALLS"', f'case "$*" in *find*) echo {new};; esac')
    fake(
        bins,
        "gcloud",
        'for a in "$@"; do',
        "  case $a in --command=*) command=${a#--command=};; *:*) to=${a#*:}; from=$last;; esac; last=$a",
        f'done; cd {worker}; [ -n "$command" ] || exec cp "$from" "$to"',
        f'PATH={bins} exec bash -c "$command"',
    )
    calls = tmp_path / "calls"
    env = CLOUD | {"CALLS": str(calls), "OPENAI_API_KEY": "canary-7733"}
    for _ in range(2):
        done = run("tpu_pod.sh", "install", env=env, path=f"{bins}:")
        assert done.returncode == 0, done.stderr
    said = calls.read_text().splitlines()
    assert sum(line.startswith("new -m venv") for line in said) == 1  # the second time it is there
    assert ("python3 -m uv python install -q 3.11" in said) == old
    assert sum(line.startswith("pip install -q -e .[tpu]") for line in said) == 2
    assert (worker / "envace/launch/tpu_pod.sh").exists() and not (worker / "envace/.git").exists()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert (worker / "envace/.commit").read_text().split()[:1] == head
    assert "canary-7733" in (worker / ".envace-secrets").read_text()
    assert stat.S_IMODE((worker / ".envace-secrets").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("kind", "runtime"),
    [("v5litepod-16", "v2-alpha-tpuv5-lite"), ("v5p-32", "v2-alpha-tpuv5"), ("v6e-32", "v2-alpha-tpuv6e")],
)
def test_runtime_follows_the_type(kind: str, runtime: str) -> None:
    done = run("tpu_pod.sh", "up", "--dry_run", env=CLOUD | {"TYPE": kind})
    assert done.stdout.split()[-1] == f"--runtime-version={runtime}"
    assert "--runtime-version=mine" in run("tpu_pod.sh", "up", "--dry_run", env=CLOUD | {"RUNTIME": "mine"}).stdout


def chips_of(kind: str) -> tuple[str, int]:
    name, _, count = kind.rpartition("-")
    return {"v5litepod": "v5e"}.get(name, name), int(count) // (2 if name == "v5p" else 1)


@pytest.mark.parametrize("page", ["docs/scaling.md", "launch/tpu_pod.sh", "launch/xpk.sh"])
def test_types_that_are_shown_hold_the_configuration_beside_them(page: str) -> None:
    shown = re.findall(r"TYPE=([\w-]+-\d+)\b.*?(configs/qwen3_\w+\.py)", (ROOT / page).read_text(), re.DOTALL)
    assert shown
    for kind, config in shown:
        topology = parse_slice(load_config(str(ROOT / config)).plan.topology)
        assert chips_of(kind) == (topology.chip.name, topology.size), (kind, config)


def test_xpk_hands_over_names_of_secrets_and_grace(tmp_path: Path) -> None:
    fake(
        tmp_path,
        "xpk",
        'echo "$*" >> "$CALLS"',
        'for a in "$@"; do case $a in --env-file=*) cat "${a#--env-file=}" >> "$CALLS";; esac; done',
    )
    calls = tmp_path / "calls"
    env = CLOUD | {"CALLS": str(calls), "HF_TOKEN": "canary-7734", "GRACE": "200"}
    assert run("xpk.sh", *TRAIN, env=env, path=f"{tmp_path}:").returncode == 0
    text = calls.read_text()
    assert "--termination-grace-period-seconds=200" in text and "--command=exec python -m envace_jax train" in text
    assert text.splitlines()[-2:] == ["ENVACE_DISTRIBUTED=auto", "HF_TOKEN"] and "canary" not in text


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
    assert "--num-slices=2" in done.stdout and "--tpu-type=v6e-32" in done.stdout
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
        ("tpu_pod.sh", ("up", "--dry_run"), CLOUD | {"TYPE": "v9-8"}, "TYPE=v9-8: expected v5litepod-N"),
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
