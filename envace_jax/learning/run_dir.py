"""The folder of one run: its configuration, the facts of its start, and the guard against two runs in one place."""

from __future__ import annotations

import errno
import fcntl
import json
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from ml_collections import ConfigDict

from envace_jax import json_files
from envace_jax.config import UserError, apply_preset, default_config, flat
from envace_jax.distributed import Processes
from envace_jax.faults import write_whole
from envace_jax.learning.bucket import anew, clear_place, pull

T = TypeVar("T", dict[str, Any], list[Any])

# What may differ when a run is taken up again: it changes how long and how closely watched a run is, not its results.
FREE = ("run_dir", "overwrite", "dry_run", "checkpoint.", "metrics.", "evaluation.", "mesh.") + (
    "profile_steps",
    "learning.require_checks",
    "learning.max_bad_steps",
    "rewards.max_no_verdict_share",
    *(  # how a judge or simulator is reached, not what is asked of it
        f"{section}.{name}"
        for section in ("rewards.endpoint", "rollout.simulator")
        for name in (
            "base_url api_key_env concurrency requests_per_minute tokens_per_minute attempts timeout deadline cache_dir"
        ).split()
    ),
)
STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG, errno.ESTALE)  # the disk, not us
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
OURS = (
    *("config.json", "start.json", "starts.json", "data.json", "REPRODUCE.md"),
    *("metrics.jsonl", "metrics.prom", "trackers.json", "compile.jsonl"),
    *("trajectories.jsonl", "summary.json", "reward.png", "gap.png"),
)
OUR_FOLDERS = ("checkpoints", "tensorboard", "warmstart", "bad_steps", "profile", "no_verdict")


def config_values(cfg: ConfigDict) -> dict[str, Any]:
    """The configuration as JSON data, by full key names."""
    return json.loads(json.dumps(dict(flat(cfg)), default=list))


def default_values(cfg: ConfigDict) -> dict[str, Any]:
    """What the configuration's keys are by default, under its preset."""
    usual = default_config()
    with usual.unlocked():
        usual.preset = cfg.preset
    return config_values(apply_preset(usual))


def changed_keys(before: dict[str, Any], now: dict[str, Any], usual: dict[str, Any]) -> list[str]:
    """Keys that make it another run, with both values.

    How many steps there are is free under a constant learning rate only: any other schedule falls by the steps' number.
    A key that is younger than the run had what is now its default (`usual`).
    """
    constant = before.get("learning.schedule") == now.get("learning.schedule") == "constant"
    free = (*FREE, "learning.steps") if constant else FREE
    then = usual | before
    return [
        f"{name}: {then[name]!r} there, {now[name]!r} here"
        for name in sorted(now)
        if not name.startswith(free) and then[name] != now[name]
    ]


def younger_keys(before: dict[str, Any], now: dict[str, Any], folder: Path) -> list[str]:
    """Keys that this version has and the run's did not; raises `UserError` for keys that only the run's version had.

    What a key of the past did to the run cannot be done any more, unless it changed nothing of its results.
    """
    if gone := [name for name in sorted(before.keys() - now.keys()) if not name.startswith(FREE)]:
        commit = read_json(folder / "start.json", {}).get("git", {}).get("commit", "")[:12]
        raise UserError(
            f"run_dir='{folder}' holds a run of another version of envace_jax: its {', '.join(gone)} are unknown here: "
            f"go on with that version{f' (commit {commit})' if commit else ''}, name another run_dir (model.path "
            "takes an export of its checkpoint), or start anew with --config.overwrite=true"
        )
    return sorted(now.keys() - before.keys())


def read_json(path: Path, absent: T) -> T:
    """What a small JSON file of a run holds; `absent` where there is none. Raises `UserError` where it is damaged."""
    if not path.exists():
        return absent
    try:
        value = json_files.read_json(path)
        if not isinstance(value, type(absent)):
            raise UserError(f"{path}: expected a JSON {type(absent).__name__}, found a {type(value).__name__}")
    except UserError as error:
        raise UserError(f"{error}; it is damaged: give it back, or start anew with --config.overwrite=true") from None
    return value


def same_run(cfg: ConfigDict, path: Path) -> None:
    """Raises `UserError` where a run with another configuration lies there (`path`: its config.json).

    Keys that are younger than the run take their defaults; that is said, once: the file is written anew afterwards.
    """
    if not (before := read_json(path, {})):
        return
    now = config_values(cfg)
    younger = younger_keys(before, now, path.parent)
    if changed := changed_keys(before, now, default_values(cfg)):
        more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
        raise UserError(
            f"run_dir='{path.parent}' holds a run with another configuration: {'; '.join(changed[:3])}{more}; "
            "name another run_dir, or start anew with --config.overwrite=true"
        )
    if younger:
        print(
            f"run_dir='{path.parent}': the run was begun before there were {', '.join(younger)}: it goes on with their "
            "defaults",
            file=sys.stderr,
        )


@contextmanager
def shared_run_dir(cfg: ConfigDict, processes: Processes) -> Iterator[Path]:
    """`open_run_dir` for several processes: process 0 makes or takes it up, the others see the same folder."""
    with ExitStack() as stack:
        try:
            processes.first(lambda: str(stack.enter_context(open_run_dir(cfg))), "opening the run")
            folder = Path(cfg.run_dir)
            seen = processes.gather((folder / "config.json").exists(), "opening the run")
            if not all(seen) and not cfg.checkpoint.folder:
                raise UserError(
                    f"run_dir='{folder}': process {seen.index(False)} does not see what process 0 wrote there; give a "
                    "folder that all processes share, or a checkpoint.folder that they do"
                )
            yield folder
        except OSError as error:
            if error.errno not in STORAGE:
                raise
            raise UserError(
                f"run_dir='{cfg.run_dir}': cannot be written any more ({error.strerror}"
                f"{f': {error.filename}' if error.filename else ''}); metrics and checkpoints up to the last whole "
                "checkpoint stay. Make room, or mend the disk; the same command goes on from there"
            ) from error


@contextmanager
def open_run_dir(cfg: ConfigDict) -> Iterator[Path]:
    """Makes or takes up the run's folder and holds its lock.

    Raises `UserError` when another process trains there, or when it holds a run with another configuration and
    `overwrite` is off.
    """
    folder = Path(cfg.run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a")
    except OSError as error:
        raise UserError(f"run_dir='{folder}': cannot be written ({error.strerror})") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"run_dir='{folder}': another process is training there") from None
        pull(cfg, folder)
        path = folder / "config.json"
        if anew(cfg):
            if path.exists():
                clear(folder)
            clear_place(cfg)
        same_run(cfg, path)
        write_json(path, config_values(cfg))
        if not (folder / "start.json").exists():
            write_json(folder / "start.json", facts())
        yield folder


def clear(folder: Path) -> None:
    """Removes what a run writes, and nothing else that may lie in the folder."""
    for name in OURS:
        (folder / name).unlink(missing_ok=True)
    for name in OUR_FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)


def git_state(root: Path = Path(__file__).parents[2]) -> dict[str, Any]:
    """Commit and number of changed files; in a copy without .git, what its launcher noted in `.commit`."""

    def git(*words: str) -> str:
        try:
            done = subprocess.run(("git", *words), capture_output=True, text=True, timeout=10, cwd=root)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip()

    noted = root / ".commit"
    if not (root / ".git").exists() and noted.exists():
        commit, changed, *_ = [*noted.read_text().split(), "", "0"]
        return {"commit": commit, "changed_files": int(changed or 0)}
    return {"commit": git("rev-parse", "HEAD"), "changed_files": len(git("status", "--porcelain").splitlines())}


def facts() -> dict[str, Any]:
    """Versions, host, devices and git state at the start of a run."""
    import jax

    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "processes": jax.process_count(),
        "devices": sorted({d.device_kind for d in jax.devices()}),
        "device_count": jax.device_count(),
        "git": git_state(),
    }


def note_start(cfg: ConfigDict, folder: Path, mesh: str, hosts: Sequence[str]) -> None:
    """Adds this start to `starts.json` and writes `REPRODUCE.md`. `hosts`: of the processes, in their order."""
    from envace_jax.learning.looking import reproduce_page

    path = folder / "starts.json"
    starts = [*read_json(path, []), facts() | {"mesh": mesh, "hosts": list(hosts)}]
    write_json(path, starts)
    (folder / "REPRODUCE.md").write_text(reproduce_page(config_values(cfg), starts))


def warm_here(folder: Path, mesh: str) -> bool:
    """Whether an earlier start of the run had all its programs on this host, with these versions, devices and mesh.

    They then lie in the compilation cache, and a program costs its tracing alone when it is first asked for.
    """
    now = facts()
    same = ("python", "packages", "devices", "device_count", "processes")
    return any(
        start.get("mesh") == mesh
        and now["host"] in start.get("hosts", ())
        and all(start.get(name) == now[name] for name in same)
        for start in read_json(folder / "starts.json", [])
    )


def write_json(path: Path, value: Any) -> None:
    """Writes a small JSON file atomically."""
    write_whole(path, json.dumps(value, indent=1, sort_keys=True))
