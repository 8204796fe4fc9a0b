"""Traces as training data and a worldbook as grounding: one run of the committed quickstart model, end to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from envace_jax.config import set_key
from envace_jax.config_checks import validate
from envace_jax.config_file import read_config
from envace_jax.datasets.quickstart.generator import generate_tasks
from envace_jax.datasets.traces import episode_from_task, task_group, write_traces
from envace_jax.learning import trainer
from envace_jax.learning.metrics import read_metrics
from envace_jax.rehearsal.trajectory import read_trajectories
from envace_jax.text.tokenizer import load_tokenizer
from envace_jax.text.transcript import Role
from envace_jax.worldbook.build import BuildConfig, build_worldbook
from envace_jax.worldbook.store import save_worldbook

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_the_quickstart_model_learns_from_traces_grounded_in_their_worldbook(tmp_path, monkeypatch):
    """Both roles warm-started on traces, then two steps whose REHEARSE prompts hold the worldbook's brief."""
    monkeypatch.chdir(ROOT)
    episodes = [episode_from_task(task) for task in generate_tasks("train", 80)]
    write_traces(tmp_path / "traces.jsonl", episodes)
    save_worldbook(build_worldbook(episodes, config=BuildConfig(folds=2)), tmp_path / "wb")
    cfg = read_config("configs/quickstart.py")
    values = {
        "run_dir": str(tmp_path / "run"),
        "data.source": "traces",
        "data.path": str(tmp_path / "traces.jsonl"),
        "rollout.grounding": "worldbook",
        "rollout.worldbook": str(tmp_path / "wb"),
        "rollout.max_input_tokens": 900,  # the quickstart's own 272 leave a brief no room
        "rollout.live_episodes": 8,
        "rollout.slots": 8,
        "learning.row_tokens": 960,
        "learning.rows_per_microbatch": 2,
        "learning.steps": 2,
        "learning.prompts_per_step": 4,
        "learning.group_size": 2,
        "warmstart.steps": 1,
        "warmstart.batch_rows": 4,
        "rewards.contradiction_penalty": 0.1,
        "evaluation.at_start": False,
        "evaluation.at_end": False,
        "metrics.tensorboard": False,
        "metrics.progress": False,
    }
    with cfg.unlocked():
        for key, value in values.items():
            set_key(cfg, key, value)
    validate(cfg)
    assert trainer.run_train(cfg) == 0
    steps = [m for m in read_metrics(tmp_path / "run") if "worldbook/calls" in m]
    assert len(steps) == 2 and all(m["worldbook/calls"] > 0 for m in steps)
    sources = {e.episode_id: e.group for e in episodes}
    text = load_tokenizer("data/quickstart/model")
    asked = 0
    for trajectory in read_trajectories(tmp_path / "run" / "trajectories.jsonl"):
        # The task came from a trace, and is kept apart from its own group as the trace is.
        assert trajectory.task is not None and task_group(trajectory.task) == sources[trajectory.task_id]
        prompts = [text.decode(list(row.ids)) for row in trajectory.rows if row.role is Role.REHEARSE]
        asked += len(prompts)
        assert all("# The action" in p or "# Rules" in p or "# Answers of this action" in p for p in prompts)
    assert asked >= 8
