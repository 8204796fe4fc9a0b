"""The test-time study in small form: its cells, its table and plot, and (long) a real run of a few tasks."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from envace_jax import cli
from envace_jax.evaluation.results import Header, Result, ResultFile, read_results

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("test_time_study", ROOT / "benchmarks" / "test_time_study.py")
assert _spec is not None and _spec.loader is not None
study = importlib.util.module_from_spec(_spec)
import sys  # noqa: E402

sys.modules["test_time_study"] = study
_spec.loader.exec_module(study)

MODEL = str(ROOT / "data" / "quickstart" / "model")


def arguments(folder: Path, *more: str):
    return study.parse(["--trained", MODEL, "--warm", MODEL, "--out", str(folder), *more])


def test_cells_commands_table_and_plot(tmp_path):
    args = arguments(tmp_path, "--n", "1", "2", "--seeds", "0", "1", "--config.rollout.slots=8")
    assert args.override == ["--config.rollout.slots=8"]
    every = list(study.cells(args.n, args.seeds))
    assert len(every) == 2 * (1 + 2 * (4 + 4)) == len({cell.name for cell in every})
    order = [cell.name for cell in every]
    for cell in every:
        command = study.arguments(cell, args)
        if "--match" in command:
            matched = Path(command[command.index("--match") + 1]).stem
            assert order.index(matched) < order.index(cell.name) and f"seed{cell.seed}" in matched
        assert ("--match" in command) == (cell.method in ("best", "vote", "trials"))
    asked = []
    study.run(args, lambda command: asked.append(command) or 0)
    assert len(asked) == len(every) and all(command[-1] == args.override[0] for command in asked)
    with pytest.raises(SystemExit):
        study.run(args, lambda command: 2)
    for cell in every:
        if cell.name == "think-2-trained-seed1":
            continue  # not played yet: its row is left out
        with ResultFile(study.result_path(tmp_path, cell), Header("q", {}, "h", "t", {}, tasks=4)) as file:
            for task in range(4):
                if (cell.name, task) == ("trials-1-trained-seed0", 3):
                    continue  # stopped before its end: its row is left out as well
                score = float(task < 2 + cell.n - (cell.rehearser == "warm"))
                said = [1.0, None] if task else [1.0, 1.0]
                parts = {"evaluations": said} if cell.method == "rehearse-parallel" else {}
                more = dict(tokens=100 * (cell.n + 1), parts=parts, transcript=[{}] * (1 + (task == 3)))
                file.write(Result(f"t{task}", 0, "quickstart", score, **more))
    lines = study.summary(tmp_path, args.n, args.seeds)
    assert len(lines) == 15
    by_name = {(x.method, x.n, x.rehearser): x for x in lines}
    assert by_name["none", 0, "trained"].success.mean == 0.5 and by_name["none", 0, "trained"].gain is None
    assert by_name["rehearse-parallel", 1, "warm"].by_seed == (0.5, 0.5)
    assert by_name["rehearse-sequential", 2, "trained"].success.mean == 1.0
    assert by_name["rehearse-parallel", 1, "trained"].gain.mean == 0.25  # one task of four, in both seeds
    assert by_name["rehearse-parallel", 1, "trained"].evaluations == (10, 0, 6)
    # Four tasks in two seeds: task 0, right either way; 1 to 3, of which 2 is gained; all but 3; task 3.
    where = by_name["rehearse-parallel", 1, "trained"].where
    assert [(n, round(gain.mean, 3)) for n, gain in where] == [(2, 0.0), (6, 0.333), (6, 0.333), (2, 0.0)]
    text = study.table(lines)
    assert "| vote | 2 | trained | 1.000 [1.000, 1.000] | +0.500 [+0.000, +1.000] | 1.000, 1.000 | 300 |  |" in text
    assert "4 tasks, 2 seeds; a true gain over N = 0 found with 80% power" in text
    assert "| rehearse-parallel | 1 | trained | +0.000 [+0.000, +0.000] (2) | +0.333 [" in text
    study.plot(lines, tmp_path / "p.svg")
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")


@pytest.mark.long
def test_a_small_study_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    args = arguments(tmp_path, "--tasks", "2", "--n", "1", "--seeds", "0", "--controls", "best", "trials", "think")
    args.override = ["--config.rollout.slots=4", "--config.rollout.live_episodes=4"]
    study.run(args, cli.main)
    lines = study.summary(tmp_path, args.n, args.seeds, args.controls)
    assert {(x.method, x.rehearser) for x in lines} == {
        ("none", "trained"),
        ("rehearse-parallel", "trained"),
        ("rehearse-parallel", "warm"),
        ("rehearse-sequential", "trained"),
        ("rehearse-sequential", "warm"),
        ("best", "trained"),
        ("trials", "trained"),
        ("think", "trained"),
    }
    sampling = [read_results(path)[0].sampling for path in tmp_path.glob("*.jsonl")]
    assert {(s["temperature"], s["top_p"]) for s in sampling} == {(1.0, 1.0)}
    plain = next(x for x in lines if x.n == 0)
    assert all(x.tokens > plain.tokens for x in lines if x.method.startswith("rehearse"))
    header, _ = read_results(tmp_path / "rehearse-parallel-1-warm-seed0.jsonl")
    assert header.model["rehearser"] == MODEL
    before = {path: path.read_text() for path in tmp_path.glob("*.jsonl")}
    study.run(args, cli.main)  # taken up again: nothing is played twice
    assert all(path.read_text() == text for path, text in before.items())
    # With one engine for cells in a row every cell says what it said with one of its own.
    args.out = tmp_path / "shared"
    study.run(args, study.evaluator())
    for path in before:
        one, other = (
            [dataclasses.replace(r, seconds=0.0) for r in read_results(p)[1]] for p in (path, args.out / path.name)
        )
        assert sorted(one, key=lambda r: r.task) == sorted(other, key=lambda r: r.task)
