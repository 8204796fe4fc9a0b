"""Runs whose checkpoints lie in a bucket: `checkpoint.folder=gs://…` beside a local `run_dir`.

Metrics are appended to, which a bucket cannot do, so a run's own files stay local; the small ones are copied beside the
checkpoints whenever one is begun, and fetched when the run is taken up on a machine that does not have them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from envace_jax.config import UserError

COPIED = ("config.json", "start.json", "starts.json", "REPRODUCE.md", "data.json", "metrics.jsonl", "trackers.json")


def place(folder: str | Path) -> Any:
    """A local path, or one in a bucket with the same methods."""
    if "://" not in str(folder):
        return Path(folder).absolute()
    if str(folder).startswith("gs://") and not _has_gcsfs():
        raise UserError(f"'{folder}': Google's buckets need gcsfs: pip install gcsfs")
    from etils import epath

    return epath.Path(str(folder))


def _has_gcsfs() -> bool:
    return importlib.util.find_spec("gcsfs") is not None


def checkpoint_place(cfg: ConfigDict, run_dir: Path, name: str = "checkpoints") -> Any:
    """Where a run keeps its checkpoints: in its folder, or where `checkpoint.folder` says."""
    return place(cfg.checkpoint.folder) / name if cfg.checkpoint.folder else run_dir / name


def anew(cfg: ConfigDict) -> bool:
    """Whether a run begins from nothing, whatever lies in its place."""
    return bool(cfg.overwrite or not cfg.checkpoint.resume)


def clear_place(cfg: ConfigDict) -> None:
    """Removes what a run keeps in `checkpoint.folder`, where it has one, and nothing else that may lie there."""
    if not cfg.checkpoint.folder:
        return
    from etils import epath

    for name in ("checkpoints", "warmstart", "run"):
        path = epath.Path(str(place(cfg.checkpoint.folder) / name))
        if path.exists():
            path.rmtree()


def push(cfg: ConfigDict, run_dir: Path) -> None:
    """Copies the run's small files beside its checkpoints."""
    if not cfg.checkpoint.folder:
        return
    target = place(cfg.checkpoint.folder) / "run"
    target.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        if (run_dir / name).exists():
            (target / name).write_bytes((run_dir / name).read_bytes())


def pull(cfg: ConfigDict, run_dir: Path) -> list[str]:
    """Fetches what is not here, before a run is taken up; returns the names."""
    if not cfg.checkpoint.folder or anew(cfg) or (run_dir / "config.json").exists():
        return []
    source = place(cfg.checkpoint.folder) / "run"
    names = [name for name in COPIED if (source / name).exists()]
    for name in names:
        (run_dir / name).write_bytes((source / name).read_bytes())
    return names
