"""One training step on CM2-shaped records with three user turns, under each of the three judges in turn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from learning_common import IDLE, Actors, tiny_config
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

from envace_jax import build
from envace_jax.datasets.cm2 import task_to_record
from envace_jax.datasets.quickstart.generator import generate_tasks
from envace_jax.learning import setup
from envace_jax.learning.run_dir import open_run_dir
from envace_jax.learning.trainer import train_step
from envace_jax.rehearsal.scripted import ScriptedEngine
from envace_jax.rehearsal.trajectory import read_trajectories
from envace_jax.rewards.judge_prompts import ANALYSES
from envace_jax.text.transcript import Role

ROOT = Path(__file__).resolve().parents[2]


def verdict(user: str) -> str:
    """A judge's answer to its prompt: what was left undone fails, all else passes."""
    data = json.loads(user.split("BEGIN DATA\n")[1].split("\nEND DATA")[0])  # the system text names both lines
    idle = data["current_turn"]["steps"][-1]["assistant.content.user_visible_reply"] == IDLE
    return json.dumps({**dict.fromkeys(ANALYSES, "."), "answer": not idle})


def served(req: Request) -> Response:
    message = {"role": "assistant", "content": verdict(json.loads(req.data)["messages"][1]["content"])}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    return Response(json.dumps(body), content_type="application/json")


def judging_engine(cfg, spec, params, *_, **__):
    """Stands in for the engine of the policy that judges: what it reads is its own chat format's prompt."""
    chat = build.chat_format(cfg)

    def say(request):
        prompt = chat.tokenizer.decode(request.prompt_ids)
        return "<think>\nhm\n</think>\n\n" + verdict(prompt)

    return ScriptedEngine(say, chat.tokenizer)


def test_three_judges_in_turn(tmp_path, monkeypatch, httpserver: HTTPServer):
    monkeypatch.chdir(ROOT)
    tasks = [t for t in generate_tasks("train", 400) if len(t.user_turns) == 3][:2]
    (tmp_path / "cm2.json").write_text(json.dumps([task_to_record(t) for t in tasks]))
    httpserver.expect_request("/v1/chat/completions").respond_with_handler(served)
    actors = lambda cfg, spec, *_: Actors(build.chat_format(cfg), tasks, spec.vocab_size)  # noqa: E731
    monkeypatch.setattr(setup, "make_engine", actors)
    monkeypatch.setattr(build, "make_engine", judging_engine)
    values = {
        "data.source": "cm2",
        "data.path": str(tmp_path / "cm2.json"),
        "rollout.max_acts": 20,
        "rollout.max_segments": 40,
        "rewards.endpoint.base_url": httpserver.url_for("/v1"),
        "rewards.endpoint.model": "m",
        "rewards.policy.path": "data/quickstart/model",
    }
    cfg = tiny_config(tmp_path / "run", **values)
    with open_run_dir(cfg) as folder, setup.prepare(cfg, folder) as run:
        digests = [run.learners["policy"].digest()]
        for number, kind in enumerate(("rules", "endpoint", "policy")):
            run.step, cfg.rewards.judge = number, kind
            run.judge = build.make_judge(cfg)
            metrics = train_step(run)
            assert metrics["grad_norm"] > 0 and metrics["masked/share"] == 0 and metrics["groups/without_spread"] == 0
            if kind != "rules":
                assert metrics["count/judge_requests"] > 0
            digests.append(run.learners["policy"].digest())
    assert len(set(digests)) == 4  # every step changed the parameters
    played = list(read_trajectories(tmp_path / "run" / "trajectories.jsonl"))
    assert len(played) == 3 * 2 * 2
    for t in played:
        if t.member == 0:
            assert len(t.transcript) == 3 and t.reward == pytest.approx(1.0) and t.end_reason == "completed"
            assert any(s.role is Role.REHEARSE for s in t.segments)
        else:
            assert t.reward < 1.0
