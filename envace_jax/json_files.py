"""JSON that somebody else wrote: whatever is wrong with a file is one `UserError` that names it.

`json.loads` has more ways to fail than `ValueError`: nesting may be deeper than Python recurses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envace_jax.config import UserError


def parse(data: bytes | str, where: str) -> Any:
    """The value of a JSON text, as UTF-8 where it is bytes."""
    try:
        return json.loads(data.decode() if isinstance(data, bytes) else data)
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: is not UTF-8 text ({error.reason} at byte {error.start})") from None
    except ValueError as error:
        raise UserError(f"{where}: is not JSON ({error})") from None
    except RecursionError:
        raise UserError(f"{where}: is nested too deeply") from None


def read_bytes(path: Path) -> bytes:
    """A file's content; raises `UserError` when it is not there or cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def read_text(path: Path) -> str:
    """The text of a UTF-8 file."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from None


def read_json(path: str | Path) -> Any:
    """The value in a JSON file."""
    return parse(read_bytes(Path(path)), str(path))


def read_lines(path: str | Path) -> Iterator[tuple[str, Any]]:
    """(where, value) of every line of a JSON lines file, one at a time; empty lines are passed over.

    A last line that cannot be read was cut off by a killed writer and is left out; anywhere else it is an error.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    broken: UserError | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if broken is not None:
                raise broken
            if not line.strip():
                continue
            where = f"{path}: line {number}"
            try:
                value = parse(line, where)
            except UserError as error:
                broken = error
                continue
            yield where, value
