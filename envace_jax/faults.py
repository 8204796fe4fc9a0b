"""Files that are whole or not there, and one seam for faults of the disk: a test makes the n-th operation fail.

Whatever writes something that has to be whole says before each operation what it is about to do; outside `failing`
that is one comparison.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

OPERATIONS = ("open", "write", "fsync", "rename")
_armed: list[Fault] = []


class Fault:
    """Raises an `OSError` at the n-th operation (from 1); `seen` counts them all."""

    def __init__(self, n: int, code: int = errno.ENOSPC):
        self.n, self.code, self.seen = n, code, 0

    def step(self, operation: str) -> None:
        self.seen += 1
        if self.seen == self.n:
            raise OSError(self.code, os.strerror(self.code), operation)


def point(operation: str) -> None:
    """Says that `operation` comes next."""
    if _armed:
        _armed[-1].step(operation)


def write_whole(path: Path, text: str) -> None:
    """Writes a small file through a second name: a reader finds what stood there before, or all of `text`."""
    part = path.with_name(path.name + ".tmp")
    point("open")
    with part.open("wb") as file:
        point("write")
        file.write(text.encode())
        file.flush()
        point("fsync")
        os.fsync(file.fileno())
    point("rename")
    os.replace(part, path)


@contextlib.contextmanager
def failing(n: int, code: int = errno.ENOSPC) -> Iterator[Fault]:
    """Inside, the n-th operation fails once."""
    _armed.append(Fault(n, code))
    try:
        yield _armed[-1]
    finally:
        _armed.pop()
