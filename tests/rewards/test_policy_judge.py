"""A policy in this process as the judge: the same verdicts, retries and causes as an endpoint's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envace_jax.datasets.cm2 import ChecklistItem
from envace_jax.rehearsal.scripted import Scripted, ScriptedEngine
from envace_jax.rewards.judge import JudgeRequest
from envace_jax.rewards.judge_prompts import ANALYSES
from envace_jax.rewards.model_judge import ModelJudge
from envace_jax.rewards.policy_judge import PolicyBackend
from envace_jax.text.chat import ChatFormat
from envace_jax.text.tokenizer import load_tokenizer
from envace_jax.text.transcript import AssistantOutput, Step, Turn

pytestmark = pytest.mark.quick
TOKENIZER = Path(__file__).parents[2] / "data" / "quickstart" / "tokenizer"
REQUEST = JudgeRequest(
    "r",
    "t",
    None,
    (Turn("do it", (Step(AssistantOutput("done", None, "done", ()), ()),)),),
    ((ChecklistItem("C0", "q", "p", ("tool.content",)),),),
)


def answer(value: object) -> str:
    return "<think>\nhm\n</think>\n\n" + json.dumps({**dict.fromkeys(ANALYSES, "."), "answer": value})


def judge(*said: str | Scripted) -> tuple[ModelJudge, ScriptedEngine]:
    chat = ChatFormat(load_tokenizer(TOKENIZER), thinking=True)
    left = list(said)
    engine = ScriptedEngine(lambda request: left.pop(0), chat.tokenizer)
    backend = PolicyBackend(engine, chat, attempts=2)
    return ModelJudge(backend, pump=backend.pump), engine


def test_a_verdict_after_a_malformed_one() -> None:
    judging, engine = judge("I think so", answer(True))
    result = judging.judge(REQUEST)
    assert result.verdicts == (((True,),),) and result.usage["requests"] == 2
    assert len({r.key for r in engine.requests}) == 2  # asked again under another key


@pytest.mark.parametrize("bad", ["nonsense", answer("yes"), Scripted(answer(True)[:40], finish="length")])
def test_what_never_holds_is_no_verdict(bad: str | Scripted) -> None:
    judging, _ = judge(bad, bad)
    result = judging.judge(REQUEST)
    assert result.verdicts == (((None,),),) and result.causes == {(0, 0, 0): "malformed"}


def test_polling_advances_its_engine() -> None:
    judging, _ = judge(answer(False))
    judging.submit(REQUEST)
    results = []
    for _ in range(5):
        results += judging.poll()
    assert results[0].verdicts == (((False,),),)


def test_a_judge_made_from_a_configuration_runs_on_the_mesh_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from envace_jax.build import make_judge, mesh_for
    from envace_jax.config import default_config

    monkeypatch.chdir(TOKENIZER.parents[2])
    cfg = default_config()
    cfg.rewards.judge, cfg.rewards.policy.path, cfg.rewards.policy.max_tokens = "policy", "data/quickstart/model", 8
    cfg.rollout.max_input_tokens, cfg.rollout.slots, cfg.rollout.live_episodes = 2000, 2, 2
    cfg.mesh.fsdp, cfg.mesh.tensor = 2, 2
    judging = make_judge(cfg, mesh_for(cfg))
    result = judging.judge(REQUEST)
    assert result.verdicts == (((None,),),) and result.usage["requests"] > 0  # cut off after eight tokens
