"""The folder of one run: its configuration, the facts of its start, and the guard against two runs in one place."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from ml_collections import ConfigDict

from envace_jax import json_files
from envace_jax.config import UserError, flat
from envace_jax.distributed import Processes
from envace_jax.faults import point
from envace_jax.learning.bucket import anew, clear_place, pull

T = TypeVar("T", dict[str, Any], list[Any])

# What may differ when a run is taken up again: it changes how long and how closely watched a run is, not its results.
FREE = ("run_dir", "overwrite", "dry_run", "checkpoint.", "metrics.", "evaluation.", "mesh.") + (
    "profile_steps",
    "learning.require_checks",
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
    *("metrics.jsonl", "metrics.prom", "trackers.json"),
    *("trajectories.jsonl", "summary.json", "reward.png", "gap.png"),
)
OUR_FOLDERS = ("checkpoints", "tensorboard", "warmstart", "bad_steps", "profile", "no_verdict")


def config_values(cfg: ConfigDict) -> dict[str, Any]:
    """The configuration as JSON data, by full key names."""
    return json.loads(json.dumps(dict(flat(cfg)), default=list))


def changed_keys(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Keys that make it another run, with both values.

    How many steps there are is free under a constant learning rate only: any other schedule falls by the steps' number.
    """
    constant = before.get("learning.schedule") == now.get("learning.schedule") == "constant"
    free = (*FREE, "learning.steps") if constant else FREE
    return [
        f"{name}: {before[name]!r} there, {now[name]!r} here"
        for name in sorted(before.keys() & now.keys())
        if not name.startswith(free) and before[name] != now[name]
    ]


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
    """Raises `UserError` where a run with another configuration lies there (`path`: its config.json)."""
    if changed := changed_keys(read_json(path, {}), config_values(cfg)):
        more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
        raise UserError(
            f"run_dir='{path.parent}' holds a run with another configuration: {'; '.join(changed[:3])}{more}; "
            "name another run_dir, or start anew with --config.overwrite=true"
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


def facts() -> dict[str, Any]:
    """Versions, host, devices and git state at the start of a run."""
    import jax

    def git(*words: str) -> str:
        try:
            done = subprocess.run(
                ("git", *words), capture_output=True, text=True, timeout=10, cwd=Path(__file__).parent
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip()

    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "processes": jax.process_count(),
        "devices": sorted({d.device_kind for d in jax.devices()}),
        "device_count": jax.device_count(),
        "git": {"commit": git("rev-parse", "HEAD"), "changed_files": len(git("status", "--porcelain").splitlines())},
    }


def note_start(cfg: ConfigDict, folder: Path, mesh: str) -> None:
    """Adds this start to `starts.json` and writes `REPRODUCE.md`."""
    from envace_jax.learning.looking import reproduce_page

    path = folder / "starts.json"
    starts = [*read_json(path, []), facts()]
    write_json(path, starts)
    (folder / "REPRODUCE.md").write_text(reproduce_page(config_values(cfg), starts, mesh))


def write_json(path: Path, value: Any) -> None:
    """Writes a small JSON file atomically."""
    temporary = path.with_name(path.name + ".tmp")
    point("open")
    with temporary.open("w") as file:
        point("write")
        json.dump(value, file, indent=1, sort_keys=True)
        file.flush()
        point("fsync")
        os.fsync(file.fileno())
    point("rename")
    os.replace(temporary, path)
