"""The accelerator benchmark runs every case on a tiny model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "benchmarks/accelerator.py"


@pytest.mark.long
def test_every_case_runs_on_this_machine(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("accelerator", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    results = module.main(["--tiny", "--json", str(tmp_path / "out.json")])
    assert len(results) == 4 and not any("failed" in r for r in results), results
    assert all(r["tokens_per_s"] > 0 for r in results)
    assert "98 GB of state" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["results"] == results
