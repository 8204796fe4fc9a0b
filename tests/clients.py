"""Where the official clients of the long tests are: virtual environments of their own, made by launch/clients.sh."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HOME = Path(os.environ.get("ENVACE_CLIENTS", Path(__file__).parents[1] / ".clients"))


def client_python(name: str) -> str:
    """The Python of a client's environment; skips the test, and says what is missing, where there is none."""
    python = HOME / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {name} client at {python}: launch/clients.sh {name} makes it")
    return str(python)
