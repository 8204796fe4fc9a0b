"""The loop over the real engine and a tiny random model: ledgers, keys and prefixes where ids are really sampled."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from envace_jax.model.qwen3 import init_params
from envace_jax.model.spec import PRESETS
from envace_jax.rehearsal.rollout import rollout
from envace_jax.rehearsal.settings import EpisodeConfig, RolloutConfig
from envace_jax.rewards.judge import RuleJudge
from envace_jax.sampling.engine import Engine, EngineConfig
from envace_jax.text.chat import ChatFormat
from envace_jax.text.transcript import Role
from tests.rehearsal.helpers import call_text, make_task


class Nudged:
    """The real engine, with every third ACT prompt's sampling replaced by a good call, so that REHEARSE is asked."""

    def __init__(self, engine, tokenizer):
        self.engine, self.config = engine, engine.config
        self.call = (*tokenizer.encode(call_text("get_order", order_id="A1")), tokenizer.eos_id)
        self.nudged: set[int] = set()
        self.prompts: dict[tuple, tuple[int, ...]] = {}

    def submit(self, request):
        self.prompts[request.key] = tuple(request.prompt_ids)
        number = self.engine.submit(request)
        if request.key[-2] == 0 and request.key[-1] % 3 == 0:
            self.nudged.add(number)
        return number

    def step(self):
        done = self.engine.step()
        zeros = (0.0,) * len(self.call)
        return [
            dataclasses.replace(c, ids=self.call, logprobs=zeros, finish="stop") if c.request_id in self.nudged else c
            for c in done
        ]

    def __getattr__(self, name):
        return getattr(self.engine, name)


@pytest.mark.long  # some 20 programs are compiled
def test_trajectories_do_not_depend_on_the_batch(tokenizer):
    chat = ChatFormat(tokenizer, thinking=False, tool_docs="none", old_thinking="keep")
    spec = dataclasses.replace(PRESETS["tiny"], d_model=16, d_ff=32, n_heads=2, n_kv_heads=1, head_dim=8)
    params = init_params(spec, jax.random.key(0))
    sizes = EngineConfig(slots=4, shelf=0, max_length=256, chunk=8, prefill_chunk=64)
    engine = Nudged(Engine(params, spec, sizes, seed=1), tokenizer)
    rules = EpisodeConfig(
        rehearse_prompt="compact", max_input_tokens=230, max_act_tokens=10, max_rehearse_tokens=10, max_acts=3
    )
    results = []
    for window in (64, 1):
        played = list(
            rollout(
                [make_task(uuid=str(k)) for k in range(3)],
                engine=engine,
                chat=chat,
                cfg=RolloutConfig(rules, live_episodes=window),
                judge=RuleJudge(),
                group_size=2,
            )
        )
        assert len(played) == 6
        for trajectory in played:
            assert {s.role for s in trajectory.segments} == {Role.ACT, Role.REHEARSE}
            for segment in trajectory.segments:
                key = (0, 0, trajectory.group, trajectory.member, int(segment.role is Role.REHEARSE), segment.index)
                assert trajectory.rows[segment.row].ids[: segment.start] == engine.prompts[key]
        results.append(sorted(played, key=lambda t: (t.group, t.member)))
    ids = [[segment.ids for t in result for segment in t.segments] for result in results]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) > 6  # the members of a group differ
