"""Whole episodes on the device: the trajectories of host control, whatever the outputs are."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from envace_jax.config import UserError
from envace_jax.rehearsal.episode import Setting
from envace_jax.rehearsal.grounding import NoGrounding
from envace_jax.rehearsal.rollout import rollout
from envace_jax.rehearsal.settings import EpisodeConfig, RolloutConfig
from envace_jax.rewards.judge import RuleJudge
from envace_jax.sampling.engine import Engine, EngineConfig
from envace_jax.text.chat import ChatFormat
from envace_jax.text.transcript import Role
from tests.rehearsal.toy import PIECES, ToyTokenizer, toy_model, toy_task

RULES = EpisodeConfig(
    context="stream",
    rehearse_prompt="compact",
    max_act_tokens=12,
    max_rehearse_tokens=6,
    max_input_tokens=300,
    max_acts=6,
    max_segments=9,
)
SIZES = EngineConfig(slots=4, shelf=4, max_length=312, chunk=4, prefill_chunk=16)
CONFIG = RolloutConfig(RULES, live_episodes=16, device_steps=9)


@pytest.fixture(scope="module")
def toy():
    spec, params = toy_model()
    chat = ChatFormat(ToyTokenizer(), thinking=True, tool_docs="none", old_thinking="keep")
    return Engine(params, spec, SIZES, seed=5), chat


def played(toy, control, n=5, **changes):
    """Trajectories by group and member, and what the engine counted meanwhile."""
    engine, chat = toy
    config = dataclasses.replace(CONFIG, control=control, **changes)
    before = engine.stats()
    tasks = [toy_task(chr(97 + k), turns=1 + k % 3) for k in range(n)]
    out = rollout(tasks, engine=engine, chat=chat, cfg=config, judge=RuleJudge(), group_size=3, grounding=NoGrounding())
    out = sorted(out, key=lambda t: (t.group, t.member))
    assert [(t.group, t.member) for t in out] == [(g, m) for g in range(n) for m in range(3)]
    return out, {name: value - before[name] for name, value in engine.stats().items()}


def same(a, b):
    for x, y in zip(a, b, strict=True):
        assert [(s.role, s.ids, s.finish) for s in x.segments] == [(s.role, s.ids, s.finish) for s in y.segments]
        assert [(r.role, r.ids, r.sampled) for r in x.rows] == [(r.role, r.ids, r.sampled) for r in y.rows]
        for s, t in zip(x.segments, y.segments):
            np.testing.assert_allclose(s.logprobs, t.logprobs, atol=1e-4)
        assert (x.transcript, x.reward, x.end_reason, x.error_codes) == (
            y.transcript,
            y.reward,
            y.end_reason,
            y.error_codes,
        )


def test_trajectories_are_those_of_host_control(toy):
    host, _ = played(toy, "host", 10)
    device, counted = played(toy, "device", 10)
    same(host, device)
    segments = [s for t in host for s in t.segments]
    assert {s.role for s in segments} == {Role.ACT, Role.REHEARSE}
    codes = {code for t in host for code in t.error_codes}
    assert {"act:JSON_DECODE_ERROR", "act:TOOL_NOT_AVAILABLE", "act:FABRICATED_RESPONSE"} <= codes
    assert {"rehearse:SIMULATOR_JSON_DECODE_ERROR", "rehearse:NO_EXECUTION_RESULT_TAG_FOUND"} <= codes
    assert any(len(step.output.calls) > 1 for t in host for turn in t.transcript for step in turn.steps)
    assert any(len(t.transcript) > 2 for t in host)
    assert {"completed", "max_segments", "truncated"} <= {t.end_reason for t in host}
    # Every episode began on the device, and every kind of end was seen.
    assert counted["device_episodes"] == len(host)
    assert counted["device_handed_over"] and counted["device_diverged"] and counted["device_tokens_dropped"]
    assert counted["device_tokens_told"] + counted["device_tokens_dropped"] <= counted["tokens_sampled"]
    told = counted["device_tokens_told"]
    assert 0 < told < sum(len(s.ids) for s in segments)


def test_greedy_outputs_and_caps(toy):
    tight = dataclasses.replace(RULES, max_acts=2, checks=())
    for changes in ({"temperature": 0.0}, {"top_k": 3, "episode": tight}):
        host, _ = played(toy, "host", 3, **changes)
        device, counted = played(toy, "device", 3, **changes)
        same(host, device)
        assert counted["device_tokens_told"] > 0
    assert "max_acts" in {t.end_reason for t in host}


def test_a_task_too_large_for_a_lane_is_the_hosts(toy):
    engine, chat = toy
    config = dataclasses.replace(CONFIG, control="device")
    task = toy_task("a", turns=17)
    before = engine.stats()
    (trajectory,) = rollout([task], engine=engine, chat=chat, cfg=config, judge=None, grounding=NoGrounding())
    assert trajectory.segments
    after = engine.stats()
    assert after["device_refused"] - before["device_refused"] == 1
    assert after["device_episodes"] == before["device_episodes"]


def test_a_lane_whose_numbers_break_serves_again(toy):
    """A second user message breaks its reader: those episodes are masked, all others are those of host control."""
    engine, chat = toy
    _, params = toy_model()
    embed = params["embed"].copy()
    embed[PIECES.index("1")] = np.nan
    engine.set_params(params | {"embed": embed})
    try:
        host, counted = played(toy, "host", 8)
        device, on_device = played(toy, "device", 8)
    finally:
        engine.set_params(params)
    same(host, device)
    causes = [t.masked_cause for t in host]
    assert causes == [t.masked_cause for t in device]
    assert 2 < causes.count("nan") < len(causes) - 8, causes
    assert counted["rows_nan"] == causes.count("nan")
    assert on_device["rows_nan"] >= 2 and on_device["device_tokens_told"] > 0


@pytest.mark.quick
def test_what_the_device_cannot_do_is_refused():
    from envace_jax.rehearsal.device_control import check

    chat = ChatFormat(ToyTokenizer(), thinking=True, tool_docs="none", old_thinking="keep")
    check(Setting.make(chat, RULES), CONFIG)
    for rules, chat_changes, changes, message in (
        ({"context": "stateless"}, {}, {}, "rollout.context='stateless'"),
        ({"rehearse_tag": "execution_result"}, {}, {}, "rollout.rehearse_tag="),
        ({}, {"old_thinking": "strip"}, {}, "chat.old_thinking='strip'"),
        ({}, {}, {"rehearse_params": "frozen"}, "learning.arm"),
    ):
        episode = dataclasses.replace(RULES, **rules)
        setting = Setting.make(dataclasses.replace(chat, **chat_changes), episode)
        with pytest.raises(UserError, match=message):
            check(setting, dataclasses.replace(CONFIG, episode=episode, **changes))


@pytest.mark.long
def test_quickstart_episodes_are_those_of_host_control():
    """The embedded model, whose calls are mostly sound: most of what it says comes from the device."""
    from envace_jax.build import chat_format, load_model, make_engine
    from envace_jax.config_file import read_config
    from envace_jax.datasets.sources import load_tasks

    cfg = read_config("configs/quickstart.py")
    cfg.rollout.context, cfg.rollout.slots = "stream", 8
    tasks, _ = load_tasks(cfg.data)
    chat = chat_format(cfg)
    spec, params = load_model(cfg, chat, None)
    engine = make_engine(cfg, spec, params)
    base = RolloutConfig.from_config(cfg)
    for temperature in (1.0, 0.0):
        results = []
        for control in ("host", "device"):
            config = dataclasses.replace(base, control=control, temperature=temperature)
            before = engine.stats()
            out = rollout(tasks[:5], engine=engine, chat=chat, cfg=config, judge=RuleJudge(), group_size=2)
            results.append(sorted(out, key=lambda t: (t.group, t.member)))
            counted = {name: value - before[name] for name, value in engine.stats().items()}
        same(*results)
        sampled = sum(len(s.ids) for t in results[0] for s in t.segments)
        assert counted["device_tokens_told"] > 0.7 * sampled
