"""The bar that shows how far reading, writing and checking of a checkpoint are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from envace_jax.model.hf_folder import Progress


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress]:
    """A rich bar in bytes on standard error, one line for each of reading, writing and checking."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description:>12}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, TaskID] = {}

        def show(done: int, total: int, what: str) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        yield show
