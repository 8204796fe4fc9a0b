"""The accelerator benchmark runs every case on a tiny model, and stops in time with what is done."""

from __future__ import annotations

import importlib.util
import json
import threading
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "benchmarks/accelerator.py"
WHOLE = "8B update, all parameters"


@pytest.fixture
def module():
    spec = importlib.util.spec_from_file_location("accelerator", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_every_case_runs_on_this_machine(module, tmp_path, capsys):
    results = module.main(["--tiny", "--json", str(tmp_path / "out.json")])
    assert len(results) == 4 and not any("failed" in r for r in results), results
    assert all(r["tokens_per_s"] > 0 for r in results)
    assert f"not run: {WHOLE}: float32 masters and moments are 98 GB" in capsys.readouterr().out
    kept = json.loads((tmp_path / "out.json").read_text())
    assert kept["results"] == results and kept["not_run"].keys() == {WHOLE}


@pytest.mark.quick
def test_it_stops_in_time_with_what_is_done(module, tmp_path, monkeypatch):
    out, stopped, seen = tmp_path / "out.json", threading.Event(), []

    def leave(status):
        seen.append((status, json.loads(out.read_text())))
        stopped.set()

    monkeypatch.setattr(module.os, "_exit", leave)
    monkeypatch.setattr(module, "LIMIT", 0.2)
    endless = lambda name: {"name": name, "in time": not stopped.wait(60)}  # noqa: E731
    monkeypatch.setattr(module, "cases", lambda tiny: [("a", lambda name: {"name": name}), ("b", endless)])
    module.main(["--json", str(out)])
    ((status, kept),) = seen
    assert status == 1 and kept["results"] == [{"name": "a"}]
    assert kept["not_run"].keys() == {WHOLE, "b"} and "stopped after 0.2 s" in kept["not_run"]["b"]
