"""Recorded trajectories judged again: the same judge gives the same rewards, another one changes them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from envace_jax import cli
from envace_jax.datasets.cm2 import task_to_record
from envace_jax.datasets.quickstart.generator import generate_tasks
from envace_jax.rehearsal.rollout import rollout
from envace_jax.rehearsal.scripted import ScriptedEngine
from envace_jax.rehearsal.settings import EpisodeConfig, RolloutConfig
from envace_jax.rehearsal.trajectory import TrajectoryWriter
from envace_jax.rewards.judge import RuleJudge
from envace_jax.text.chat import ChatFormat
from envace_jax.text.tokenizer import load_tokenizer

TOKENIZER = Path(__file__).parents[2] / "data" / "quickstart" / "tokenizer"


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    chat = ChatFormat(load_tokenizer(TOKENIZER), thinking=True, tool_docs="none", old_thinking="keep")
    engine = ScriptedEngine(lambda request: "Done.", chat.tokenizer)
    cfg = RolloutConfig(EpisodeConfig(rehearse_prompt="compact", max_input_tokens=500, max_act_tokens=50))
    with TrajectoryWriter(tmp_path / "trajectories.jsonl") as writer:
        tasks = generate_tasks("train", 6)
        for t in rollout(tasks, engine=engine, chat=chat, cfg=cfg, judge=RuleJudge(), group_size=2):
            writer.write(t)
        writer.write(replace(t, reward=None, masked_cause="deadline"))
    return tmp_path


def test_the_same_judge_gives_the_same_rewards(recorded: Path, capsys: pytest.CaptureFixture) -> None:
    out = recorded / "scores.jsonl"
    assert cli.main(["rescore", str(recorded), "--out", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 13
    assert all(line["reward"] == pytest.approx(line["recorded_reward"]) for line in lines[:12])
    assert lines[12]["reward"] is None and lines[12]["missing_verdicts"] == {"deadline": 1}
    assert "0 changed" in capsys.readouterr().out
    assert cli.main(["rescore", str(recorded), "--out", str(out)]) == 2  # nothing is overwritten


def test_another_checklist_changes_them(recorded: Path) -> None:
    tasks = []
    for task in generate_tasks("train", 6):
        rule = {"kind": "reply", "contains": ["Done."]}
        lists = tuple(
            tuple((replace(turn[0], weight=1.0, dependence=(), rule=rule),) for turn in variant)
            for variant in task.checklists
        )
        tasks.append(replace(task, checklists=lists))
    file = recorded / "lists.jsonl"
    file.write_text("\n".join(json.dumps(task_to_record(t)) for t in tasks))
    out = recorded / "scores.jsonl"
    assert cli.main(["rescore", str(recorded), "--out", str(out), "--checklists", str(file)]) == 0
    rewards = [json.loads(line)["reward"] for line in out.read_text().splitlines()][:12]
    assert all(r is not None and r > 0 for r in rewards)
