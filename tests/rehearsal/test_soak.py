"""Ten thousand episodes over one engine: every one accounted for, no row lost, memory flat."""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path

import pytest

from envace_jax.rehearsal.grounding import NoGrounding
from envace_jax.rehearsal.rollout import rollout
from envace_jax.rehearsal.settings import EpisodeConfig, RolloutConfig
from envace_jax.rewards.judge import RuleJudge
from envace_jax.sampling.engine import Engine, EngineConfig
from envace_jax.text.chat import ChatFormat
from tests.rehearsal.toy import ToyTokenizer, toy_model, toy_task

EPISODES, GROUP, EVERY = 10_000, 4, 250


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("control", ["host", "device"])
def test_ten_thousand_episodes(control):
    spec, params = toy_model()
    chat = ChatFormat(ToyTokenizer(), thinking=True, tool_docs="none", old_thinking="keep")
    sizes = EngineConfig(slots=32, shelf=64, max_length=192, chunk=8, prefill_chunk=64)
    engine = Engine(params, spec, sizes, seed=1)
    engine.warm_up()  # what the last few rows of a run ask for is else compiled when memory has been looked at
    rules = EpisodeConfig(
        context="stream",
        rehearse_prompt="compact",
        max_act_tokens=12,
        max_rehearse_tokens=8,
        max_input_tokens=180,
        max_acts=8,
        max_segments=16,
    )
    cfg = RolloutConfig(rules, live_episodes=96, control=control)
    tasks = (toy_task(f"{k % 7}{k}", turns=1 + k % 3) for k in range(EPISODES // GROUP))
    seen, ends, tokens, memory = set(), Counter(), 0, []
    for trajectory in rollout(
        tasks, engine=engine, chat=chat, cfg=cfg, judge=RuleJudge(), group_size=GROUP, grounding=NoGrounding()
    ):
        seen.add((trajectory.group, trajectory.member))
        ends[trajectory.end_reason] += 1
        tokens += sum(len(segment.ids) for segment in trajectory.segments)
        assert trajectory.masked_cause is None
        if len(seen) % EVERY == 0:
            memory.append(resident())
    assert len(seen) == sum(ends.values()) == EPISODES
    stats, pool = engine.stats(), engine._pools["policy"]
    sampled = stats["tokens_sampled"] - stats["device_tokens_dropped"]
    assert sampled >= tokens if control == "device" else sampled == tokens
    assert engine.idle and not pool.live and not pool.busy.any() and not pool.home and not pool.owned.any()
    quarter = len(memory) // 4
    early, late = max(memory[quarter : 2 * quarter]), max(memory[-quarter:])
    print(f"\n{control}: {tokens} tokens, ends {dict(ends)}, {early >> 20} MiB early, {late >> 20} MiB late")
    assert late <= 1.02 * early, [m >> 20 for m in memory]
