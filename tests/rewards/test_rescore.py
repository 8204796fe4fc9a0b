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
from envace_jax.rehearsal.trajectory import Trajectory, TrajectoryWriter
from envace_jax.rewards.judge import JudgeRequest, JudgeResult, RuleJudge
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


class Silent(RuleJudge):
    """Gives no verdict on turn `turn` of a task's turns."""

    def __init__(self, turn: int) -> None:
        super().__init__()
        self.silent = turn

    def judge(self, request: JudgeRequest) -> JudgeResult:
        result = super().judge(request)
        if request.turn != self.silent:
            return result
        none = tuple(tuple((None,) * len(row) for row in table) for table in result.verdicts)
        where = [(v, k, s) for v, t in enumerate(none) for k, row in enumerate(t) for s in range(len(row))]
        return replace(result, verdicts=none, causes=dict.fromkeys(where, "outage"))


def test_another_judge_over_an_outage(tmp_path: Path) -> None:
    """What an outage left without a verdict is scored as an undisturbed judge would have; what it cut short is not."""
    chat = ChatFormat(load_tokenizer(TOKENIZER), thinking=True, tool_docs="none", old_thinking="keep")
    cfg = RolloutConfig(EpisodeConfig(rehearse_prompt="compact", max_input_tokens=500, max_act_tokens=50))
    # Items that pass, so that the episodes go on, and weigh 1.
    tasks = []
    for task in [t for t in generate_tasks("train", 60) if len(t.user_turns) < 4]:
        rule = {"kind": "reply", "contains": ["Done."]}
        turns = tuple((replace(t[0], weight=1.0, dependence=(), rule=rule),) for t in task.checklists[0])
        tasks.append(replace(task, checklists=(turns,)))
    tasks = [next(t for t in tasks if len(t.user_turns) == n) for n in (1, 2, 3)]

    def played(judge: RuleJudge, cfg: RolloutConfig = cfg) -> list[Trajectory]:
        engine = ScriptedEngine(lambda request: "Done.", chat.tokenizer)
        found = rollout(tasks, engine=engine, chat=chat, cfg=cfg, judge=judge, group_size=1)
        return sorted(found, key=lambda t: t.group)

    unjudged = replace(cfg, episode=replace(cfg.episode, judged=False))
    lost = [*played(Silent(0)), *played(Silent(1)), *played(RuleJudge(), unjudged)]
    assert [t.masked_cause for t in lost[:6]] == ["judge:outage"] * 3 + [None] + ["judge:outage"] * 2
    assert all(t.masked_cause == "not_judged" and t.reward is None for t in lost[6:])
    cut = replace(lost[8], end_reason="truncated")  # three turns, the last one cut off
    with TrajectoryWriter(tmp_path / "trajectories.jsonl") as writer:
        for t in [*lost, cut]:
            writer.write(t)
    out = tmp_path / "scores.jsonl"
    assert cli.main(["rescore", str(tmp_path), "--out", str(out)]) == 0
    lines = sorted((json.loads(line) for line in out.read_text().splitlines()), key=lambda line: line["group"])
    rewards = {n: sorted(str(x["reward"]) for x in lines if x["group"] == n) for n in range(3)}
    # One turn: all scored. Two: not the one that turn 0 ended. Three: nor the one that turn 1 ended; 2 of 3 turns.
    assert rewards[0] == ["1.0"] * 3 and rewards[1] == ["1.0"] * 2 + ["None"]
    assert rewards[2] == [str(2 / 3), "1.0", "None", "None"]
    assert [x["missing_verdicts"] for x in lines if x["reward"] is None] == [{"judge:outage": 1}] * 3


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
