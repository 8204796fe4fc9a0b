"""The scaling study of record: its commands hold, its published numbers are those of the tables, nothing is claimed."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

import pytest

from envace_jax.cli import load_config
from envace_jax.config_checks import problems
from envace_jax.config_file import load_module

pytestmark = pytest.mark.quick
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def study():
    return load_module(str(ROOT / "configs/studies/scaling.py"), "page")


def test_every_command_is_a_configuration_that_holds(study, tmp_path, monkeypatch):
    """With files and addresses in the variables' places, for the pod slice and for the GPUs."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for size in study.SIZES:
        (tmp_path / size.model).mkdir(parents=True)
    (tmp_path / "cm2.json").write_text("[]")
    monkeypatch.chdir(tmp_path)
    values = {"$CM2": "cm2.json", "$JUDGE_URL": "http://h/v1", "$SIMULATOR_URL": "http://h/v1", "$SIMULATOR": "m"}
    seen = set()
    for size in study.SIZES:
        for arm in study.ARMS:
            for command in study.commands(size, arm):
                assert (ROOT / re.search(r"launch/\w+\.\w+", command)[0]).exists()
                words = shlex.split(command[command.index("train ") :])
                filled = [re.sub(r"\$\w+", lambda m: values[m[0]], word) for word in words]
                cfg = load_config(filled[2], filled[3:])
                assert problems(cfg) == []
                assert (cfg.learning.arm, cfg.preset, cfg.rewards.dependence) == (arm.name, "paper", False)
                assert (cfg.learning.prompts_per_step, cfg.learning.group_size) == (16, 4)
                chips = math.prod(int(n) for n in cfg.plan.topology.partition(":")[2].split("x"))
                assert chips == math.prod(cfg.mesh[axis] for axis in ("replica", "fsdp", "tensor", "expert"))
                seen.add((cfg.model.path, cfg.learning.arm, cfg.plan.topology.partition(":")[0], cfg.run_dir))
    assert len(seen) == 12 and len({run for *_, run in seen}) == 6


def test_published_numbers_stand_beside_empty_cells(study):
    eight, small = study.SIZES[1], study.SIZES[0]
    envace, *standard = study.ARMS
    assert study.published("tau2", eight, envace) == "36.7 (Table 1)"
    assert study.published("bfcl_v4", small, envace) == "31.81 (Table 1)"
    assert all(study.published("tau2", eight, arm) == "31.2 (section 5.3)" for arm in standard)
    assert all(study.published("vita", eight, arm) == study.published("tau2", small, arm) == "–" for arm in standard)
    text = (ROOT / "docs/studies/scaling.md").read_text()
    results = text.partition("## Results")[2].partition("Empty cells")[0].strip().splitlines()
    assert len(results) == 2 + 6
    for row in results[2:]:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[4::2] == ["", "", ""], row  # ours
    assert "Nothing on this page has been run" in text


def test_plans_of_both_kinds(study):
    size, arm = study.SIZES[1], study.ARMS[0]
    pod, gpu = study.planned(size, arm, False), study.planned(size, arm, True)
    assert (pod.slice.size, gpu.slice.size, gpu.slice.chip.kind) == (16, 16, "gpu")
    assert pod.train_flops == gpu.train_flops > 0
    half = study.planned(size, study.ARMS[1], False)
    assert half.train_flops == pytest.approx(pod.train_flops / 2)
