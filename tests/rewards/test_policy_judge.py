"""A policy in this process as the judge: the same verdicts, retries and causes as an endpoint's."""

from __future__ import annotations

import dataclasses
import itertools
import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.build import judge_config, load_model, make_engine, make_judge, mesh_for
from envace_jax.config import default_config
from envace_jax.datasets.cm2 import ChecklistItem
from envace_jax.model.hf import save_params
from envace_jax.model.qwen3 import init_params
from envace_jax.model.spec import PRESETS
from envace_jax.rehearsal.scripted import Scripted, ScriptedEngine
from envace_jax.rewards.judge import JudgeRequest
from envace_jax.rewards.judge_prompts import ANALYSES
from envace_jax.rewards.model_judge import ModelJudge
from envace_jax.rewards.policy_judge import PolicyBackend
from envace_jax.text.chat import ChatFormat
from envace_jax.text.tokenizer import load_tokenizer
from envace_jax.text.transcript import AssistantOutput, Message, Step, Turn

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


def reciting(folder: Path, chat: ChatFormat, text: str, **shape: int) -> None:
    """A model folder whose random layers are drowned out: after the last token of a prompt it says `text`, and stops.

    Each token's embedding is a direction of its own, which the output matrix turns into the token that follows.
    """
    said = chat.tokenizer.encode(text)
    start = chat.encode_prompt([Message("user", "?")])[-1]
    chain = [start, *said, chat.tokenizer.eos_id]
    assert len(set(chain)) == len(chain) <= 64  # each token has one successor
    spec = dataclasses.replace(
        PRESETS["tiny"], vocab_size=chat.tokenizer.vocab_size, n_layers=1, tie_embeddings=False, **shape
    )
    params = init_params(spec, jax.random.key(0))
    embed, head = (np.asarray(params[name]).copy() for name in ("embed", "lm_head"))
    for k, (token, after) in enumerate(itertools.pairwise(chain)):
        embed[token] = 1000.0 * np.eye(spec.d_model)[k]
        head[:, after] = 0.0
        head[k, after] = 10.0  # times the square root of 64: a logit of 80
    params |= {"embed": jnp.asarray(embed), "lm_head": jnp.asarray(head)}
    with tempfile.TemporaryDirectory() as tokenizer:
        chat.tokenizer.save(tokenizer, chat.template())
        save_params(folder, params, spec, dtype="F32", tokenizer_dir=tokenizer)


MIXTURE = {"n_experts": 4, "n_experts_per_token": 2, "d_ff_expert": 16}


@pytest.mark.parametrize("experts", [{}, pytest.param(MIXTURE, marks=pytest.mark.long)])
def test_verdicts_of_a_model_in_this_process(tmp_path: Path, experts: dict[str, int]) -> None:
    """A dense model and a mixture, read from a folder into a real engine: true, false, and what is no verdict."""
    cfg = default_config()
    cfg.model.dtype = "bfloat16"
    cfg.rewards.judge, cfg.rewards.policy.max_tokens = "policy", 24
    cfg.rollout.max_input_tokens, cfg.rollout.slots, cfg.rollout.live_episodes = 2000, 2, 2
    cfg.rollout.prefill_chunk = 512
    chat = ChatFormat(load_tokenizer(TOKENIZER), thinking=True)
    engine = None
    for text, verdict in (('{"answer": true}', True), ('{"answer": false}', False), ("yes", None)):
        cfg.rewards.policy.path = str(tmp_path / str(verdict))
        reciting(tmp_path / str(verdict), chat, text, **experts)
        own = judge_config(cfg)
        spec, params = load_model(own, chat, None, frozen=True)
        assert spec.is_moe == bool(experts)
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}  # no float32 copy on the way
        engine = engine or make_engine(own, spec, params)
        engine.set_params(params)
        backend = PolicyBackend(engine, chat, max_tokens=24)
        result = ModelJudge(backend, pump=backend.pump).judge(REQUEST)
        assert result.verdicts == (((verdict,),),), text
        assert dict(result.causes) == ({} if verdict is not None else {(0, 0, 0): "malformed"})
        assert result.usage["requests"] == (1 if verdict is not None else 3)


@pytest.mark.long
def test_a_judge_made_from_a_configuration_runs_on_the_mesh_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TOKENIZER.parents[2])
    cfg = default_config()
    cfg.rewards.judge, cfg.rewards.policy.path, cfg.rewards.policy.max_tokens = "policy", "data/quickstart/model", 8
    cfg.rollout.max_input_tokens, cfg.rollout.slots, cfg.rollout.live_episodes = 2000, 2, 2
    cfg.mesh.fsdp, cfg.mesh.tensor = 2, 2
    judging = make_judge(cfg, mesh_for(cfg))
    result = judging.judge(REQUEST)
    assert result.verdicts == (((None,),),) and result.usage["requests"] > 0  # cut off after eight tokens


def recited(tmp_path: Path, devices: int, **mesh: int) -> tuple[ModelJudge, object]:
    """A judge that says that an item holds, of a configuration whose mesh it leaves alone."""
    cfg = default_config()
    chat = ChatFormat(load_tokenizer(TOKENIZER), thinking=True)
    reciting(tmp_path / "judge", chat, '{"answer": true}', n_kv_heads=max(2, devices))
    cfg.rewards.judge, cfg.rewards.policy.path, cfg.rewards.policy.max_tokens = "policy", str(tmp_path / "judge"), 24
    cfg.rewards.policy.devices = devices
    cfg.rollout.max_input_tokens, cfg.rollout.slots, cfg.rollout.live_episodes = 2000, 2, 2
    cfg.rollout.prefill_chunk, cfg.rollout.chunk = 512, 2
    cfg.mesh.update(mesh)
    laid = mesh_for(cfg)
    return make_judge(cfg, laid), laid


@pytest.mark.long
@pytest.mark.parametrize(("devices", "mesh"), [(2, {"replica": 3, "fsdp": 2}), (4, {"fsdp": 4}), (1, {})])
def test_a_judge_on_devices_of_its_own(tmp_path: Path, devices: int, mesh: dict[str, int]) -> None:
    """The last ones of eight: none of the mesh's, and its verdicts are those of a judge on the mesh."""
    judging, laid = recited(tmp_path, devices, **mesh)
    engine = judging._backend.engine
    used = {d for x in jax.tree.leaves(engine.params()) for d in x.devices()}
    assert used == set(jax.devices()[-devices:])
    assert not used & set(jax.devices()[:1] if laid is None else laid.devices.flat)
    judging.submit(REQUEST)
    flying = []
    while not (results := judging.poll()):
        flying.append(engine._pools["policy"].flying is not None)
    assert [r.verdicts for r in results] == [(((True,),),)]
    # The first poll asks; what each later one waits for was under way while the caller played, though a lane was free.
    assert len(flying) > 2 and all(flying[1:])
