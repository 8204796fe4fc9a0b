"""The pure parts must not pull in the device."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.quick
def test_pure_modules_do_not_import_jax():
    names = (
        "prompts",
        "ledger",
        "episode",
        "grounding",
        "settings",
        "state",
        "record",
        "trajectory",
        "teacher",
        "observers",
    )
    lines = [f"import envace_jax.rehearsal.{name}" for name in names]
    code = "; ".join([*lines, "import sys; assert 'jax' not in sys.modules and 'flax' not in sys.modules"])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
