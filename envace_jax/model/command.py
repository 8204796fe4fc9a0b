"""The `import` and `export` commands."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from envace_jax.config import UserError
from envace_jax.model import hub
from envace_jax.model.hf_folder import Progress, verify_folder
from envace_jax.model.safetensors_io import DTYPES

DTYPE_OPTION = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
assert set(DTYPE_OPTION.values()) <= DTYPES.keys()


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress]:
    """A rich bar in bytes, one line for each of reading, writing and checking."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description:>12}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns) as bar:
        tasks: dict[str, int] = {}

        def show(done: int, total: int, what: str) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        yield show


def add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="Hugging Face folder, or owner/name on the hub")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--dtype", choices=sorted(DTYPE_OPTION), help="dtype of the weights (default: as they are)")
    _add_writing(parser)
    parser.add_argument("--revision", help="branch, tag or commit on the hub")


def _add_writing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shard_gb", type=float, default=5.0, help="size limit of one weight file (default 5)")
    parser.add_argument("--overwrite", action="store_true", help="replace the folder once the new one is whole")


def shard_bytes(args: argparse.Namespace) -> int:
    if not 0.001 <= args.shard_gb <= 1000:
        raise UserError(f"--shard_gb {args.shard_gb}: expected 0.001 to 1000")
    return int(args.shard_gb * 1e9)


def run_import(args: argparse.Namespace) -> None:
    """Copies a checkpoint into a checked folder that `model.path` can name: complete, in one dtype, checksummed."""
    from envace_jax.model.hf import import_folder

    limit = shard_bytes(args)
    source = hub.download(args.source, args.revision) if hub.is_repo_id(args.source) else Path(args.source)
    with progress_bar() as progress:
        folder = import_folder(
            source,
            args.out,
            dtype=DTYPE_OPTION[args.dtype] if args.dtype else None,
            shard_bytes=limit,
            overwrite=args.overwrite,
            progress=progress,
        )
    print(f"{folder}: {verify_folder(folder)} files, checked; train with --config.model.path={folder}")
