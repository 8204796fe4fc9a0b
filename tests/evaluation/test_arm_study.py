"""The study of the arms: what it runs, its table against figures by hand, and a small one end to end."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import pytest

from envace_jax import cli
from envace_jax.config import UserError, flat
from envace_jax.config_checks import ARMS
from envace_jax.config_file import load_module
from envace_jax.evaluation import arm_study
from envace_jax.evaluation.arm_study import (
    analyse,
    arm_config,
    by_task,
    difference_table,
    table,
    together,
    write_page,
)
from envace_jax.evaluation.stats import Interval, detectable, detectable_difference
from envace_jax.learning.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
STUDY = "configs/studies/arms_quickstart.py"


@pytest.fixture
def study(monkeypatch):
    monkeypatch.chdir(ROOT)
    return load_module(STUDY, "get_study").get_study()


def options(**values):
    defaults = dict(study=STUDY, out=None, page=None, arms="", seeds=0, tasks=0, steps=0, report=False)
    return argparse.Namespace(**(defaults | values))


def result(arm: str, seed: int, right: int, fidelity: int = 2, gap: int = 0) -> dict:
    """A run with `right` of 10 tasks done in reality, `gap` more in rehearsal, `fidelity` of 4 calls right."""
    return {
        "arm": arm, "seed": seed, "tasks": 10, "overrides": {}, "steps": 3, "date": "2000-01-01", "machine": "2 x m",
        "seconds": {"training": 1.0, "all": 3600.0},
        "real_greedy": [1] * right + [0] * (10 - right), "real_sampled": [1] * right + [0] * (10 - right),
        "rehearsed": [1] * (right + gap) + [0] * (10 - right - gap), "replayed": [0] * 10,
        "fidelity": [1] * fidelity + [0] * (4 - fidelity), "fidelity_task": ["a", "a", "a", "b"], "copyable": [0] * 4,
    }  # fmt: skip


@pytest.mark.quick
def test_the_study_is_what_was_asked_for(study):
    assert set(study.arms) == set(ARMS) and study.tasks >= 1000
    assert {arm: n for arm, n in study.arms.items() if n != 3} == {"envace": 8, "single_baseline": 8}
    assert len(study.runs) == 31 and study.runs[:7] == [(arm, 0) for arm in study.arms]
    small = arm_study._narrowed(study, options(arms="envace,real_env", seeds=2, tasks=8, steps=1))
    assert small.runs == [("envace", 0), ("real_env", 0), ("envace", 1), ("real_env", 1)]
    assert (small.tasks, small.fidelity_tasks, small.overrides) == (8, 8, {"learning.steps": 1})
    with pytest.raises(UserError, match="no_arm"):
        arm_study._narrowed(study, options(arms="no_arm"))


@pytest.mark.quick
def test_arms_differ_in_nothing_but_the_arm(study, tmp_path):
    """The seven configurations as they are run: the same but for the arm (and where its simulator is)."""
    trees = {
        arm: dict(flat(arm_config(study, arm, 5, tmp_path, "http://127.0.0.1:1/v1"))) for arm in study.arms
    }
    for arm, tree in trees.items():
        different = {k for k, v in tree.items() if v != trees["envace"][k]}
        allowed = {"learning.arm"} if arm != "envace" else set()
        if arm == "act_only_endpoint":
            allowed |= {f"rollout.simulator.{k}" for k in ("base_url", "model", "temperature", "top_p", "max_tokens")}
        assert different == allowed, arm
        assert tree["seed"] == 5


@pytest.mark.quick
def test_table_by_hand(study, tmp_path):
    """envace: 8 and 6 of 10 in two seeds, mean .7; real_env: .5 twice; fidelity of one run: tasks a 2/3, b 0."""
    results = [result("envace", 0, 8), result("envace", 1, 6, 3, 2), result("real_env", 0, 5), result("real_env", 1, 5)]
    assert by_task(results[0], "fidelity").tolist() == pytest.approx([2 / 3, 0.0])
    assert by_task(results[1], "gap").sum() == 2
    envace, real = analyse(results)
    assert (envace.arm, envace.seeds, envace.differences) == ("envace", 2, {})
    assert envace.figures["real_greedy"].mean == pytest.approx(0.7)
    assert envace.figures["gap"].mean == pytest.approx(0.1)
    assert envace.figures["fidelity"].mean == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert real.differences["real_greedy"].mean == pytest.approx(-0.2)
    assert real.differences["real_greedy"].low < -0.2 < real.differences["real_greedy"].high
    assert real.differences["fidelity"].mean == pytest.approx(1 / 3 - 5 / 12)
    assert real.differences["gap"].mean == pytest.approx(-0.1)
    lines, apart = table([envace, real]), difference_table([envace, real])
    assert (len(lines), len(apart), difference_table([envace])) == (4, 3, [])
    for made in (lines, apart):
        assert all(line.count("|") == made[0].count("|") for line in made)
    assert lines[2].startswith("| `envace` | 2 | 0.700 [")
    cells = [cell.strip() for cell in apart[2].strip("|").split("|")]
    for name, cell in zip(("real_greedy", "real_sampled", "fidelity", "gap"), cells[1:], strict=True):
        difference = real.differences[name]
        assert cell == f"{difference}; {detectable(difference):.3f}" and detectable(difference) > 0
    assert cells[0] == "`real_env`" and cells[1].startswith("-0.200 [") and cells[3].startswith("-0.083 [")
    # a page whose surroundings are kept
    page = tmp_path / "arms.md"
    page.write_text(f"# Title\n\n{arm_study.BEGIN}\nold\n{arm_study.END}\nafter\n")
    write_page(study, results, page, STUDY)
    text = page.read_text()
    assert text.startswith("# Title") and text.endswith("after\n") and "old" not in text
    assert apart[2] in text.splitlines()
    assert "27 runs of the study are missing" in text and "`envace` 0 of 2, `real_env` 0 of 2" in text
    assert {p.name for p in tmp_path.iterdir()} == {"arms.md", "arms_success.png", "arms_fidelity.png"}
    page.write_text("no marks")
    with pytest.raises(UserError, match="no lines"):
        write_page(study, results, page, STUDY)


@pytest.mark.quick
def test_whether_fidelity_and_success_move_together():
    # fidelity by task: 1 of 4 calls: (1/3 + 0) / 2, 2: 1/3, 3: 1/2; success 2, 4, 6 of 10: on one line
    line = [result("envace", k, 2 * k, k) for k in (1, 2, 3)]
    overall, within, n = together(line)
    assert (overall, within, n) == (pytest.approx(1.0), pytest.approx(1.0), 3)
    assert all(math.isnan(x) for x in together([result("envace", k, 5) for k in range(3)])[:2])
    # two arms that differ, alike within: only the overall correlation is there
    arms = [result("envace", 0, 8, 3), result("envace", 1, 8, 3), result("real_env", 0, 2, 1)]
    overall, within, _ = together(arms)
    assert overall == pytest.approx(1.0) and math.isnan(within)


@pytest.mark.quick
def test_detectable_difference_from_an_interval():
    """Half width 1.96 standard errors, 2.80 of them detectable: as from the standard errors themselves."""
    error = math.hypot(0.1 / math.sqrt(8), 0.2 / math.sqrt(3))
    interval = Interval(0.0, -1.959964 * error, 1.959964 * error, 11)
    assert detectable(interval) == pytest.approx(detectable_difference(0.1, 8, 0.2, 3), rel=1e-5)


@pytest.mark.quick
def test_what_is_there_is_not_made_again(study, tmp_path, monkeypatch):
    made = []

    def one_run(study, arm, seed, tasks, folder):
        made.append((arm, seed, len(tasks)))
        return result(arm, seed, 5) | {"tasks": len(tasks), "overrides": dict(study.overrides)}

    monkeypatch.setattr(arm_study, "one_run", one_run)
    small = dict(out=tmp_path / "runs", page=tmp_path / "arms.md", arms="envace,recorded", tasks=10)
    assert arm_study.run_study(options(seeds=1, **small)) == 0
    assert made == [("envace", 0, 10), ("recorded", 0, 10)]
    assert arm_study.run_study(options(seeds=2, **small)) == 0
    assert made[2:] == [("envace", 1, 10), ("recorded", 1, 10)]
    assert arm_study.run_study(options(seeds=2, report=True, **small)) == 0 and len(made) == 4
    with pytest.raises(UserError, match="was measured on 10 tasks"):
        arm_study.run_study(options(seeds=1, **(small | {"tasks": 11})))
    with pytest.raises(UserError, match="holds no result"):
        arm_study.run_study(options(report=True, **(small | {"out": tmp_path / "none"})))


SMALL = """
from dataclasses import replace

from envace_jax.config_file import load_module


def get_study():
    study = load_module("configs/studies/arms_quickstart.py", "get_study").get_study()
    small = {"learning.steps": 1, "learning.prompts_per_step": 2, "learning.group_size": 2, "rollout.live_episodes": 4}
    small |= {"rollout.slots": 4, "learning.rows_per_microbatch": 2, "learning.max_probability_error": 1.5}
    return replace(study, overrides=small)
"""


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_small_study_end_to_end(study, tmp_path):
    """All seven arms, one seed, one step, four tasks: trained, measured, told on a page; again, and nothing runs."""
    (tmp_path / "small.py").write_text(SMALL)
    options = ["--out", str(tmp_path / "runs"), "--page", str(tmp_path / "arms.md"), "--seeds", "1", "--tasks", "4"]
    command = ["study", str(tmp_path / "small.py"), *options]
    assert cli.main(command) == 0
    files = sorted((tmp_path / "runs").glob("*.json"))
    assert [f.stem for f in files] == sorted(f"{arm}-0" for arm in ARMS)
    for file in files:
        found = json.loads(file.read_text())
        assert len(found["real_greedy"]) == len(found["rehearsed"]) == 4 and found["steps"] == 1
        assert len(found["fidelity"]) == len(found["fidelity_task"]) > 4
        assert np.isfinite(by_task(found, "fidelity")).all()
    metrics = {arm: read_metrics(tmp_path / "runs" / "runs" / f"{arm}-0")[0] for arm in ARMS}
    assert metrics["act_only_endpoint"]["count/observations_endpoint"] > 0
    assert metrics["real_env"]["count/observations_real"] > 0
    assert metrics["envace"]["count/observations_rehearsed"] > 0
    text = (tmp_path / "arms.md").read_text()
    assert all(f"| `{arm}` | 1 |" in text for arm in ARMS) and "missing" not in text
    before = {f: f.stat().st_mtime_ns for f in files}
    assert cli.main(command) == 0
    assert before == {f: f.stat().st_mtime_ns for f in files}
