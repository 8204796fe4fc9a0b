"""Options of the command line: numbers within bounds (types for `argparse`), and files that are yet to be written."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from envace_jax.config import UserError


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """Reads a whole number of at least `low` (and at most `high`)."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"expected a whole number {_bounds(low, high)}, not '{text}'")
        return value

    return read


def number(low: float, high: float | None = None) -> Callable[[str], float]:
    """Reads a finite number of at least `low` (and at most `high`)."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"expected a number {_bounds(low, high)}, not '{text}'")
        return value

    return read


def _bounds(low: float, high: float | None) -> str:
    return f"of at least {low}" if high is None else f"from {low} to {high}"


def new_file(option: str, path: Path) -> None:
    """Raises `UserError` where a file is there already or cannot be made; leaves nothing behind but its folder."""
    if path.exists():
        raise UserError(f"{option} {path}: is there already; name a new file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("x").close()
        path.unlink()
    except OSError as error:
        raise UserError(f"{option} {path}: cannot be written ({error.strerror})") from None
