"""Constrained rollouts over an engine that draws whatever its guides allow: calls and results keep their shape."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from envace_jax.config import UserError, default_config
from envace_jax.config_checks import problems
from envace_jax.datasets.quickstart.generator import generate_tasks
from envace_jax.rehearsal.rollout import rollout
from envace_jax.rehearsal.scripted import ScriptedEngine
from envace_jax.rehearsal.settings import EpisodeConfig, RolloutConfig
from envace_jax.sampling.engine import Completion
from envace_jax.text.chat import ChatFormat
from envace_jax.text.tokenizer import load_tokenizer
from envace_jax.text.tool_calls import parse_execution_result
from envace_jax.text.tool_schema import check_call
from envace_jax.text.transcript import Role

pytestmark = pytest.mark.quick
TOKENIZER = load_tokenizer(Path(__file__).parents[2] / "data" / "quickstart" / "tokenizer")


class Drawing(ScriptedEngine):
    """Draws among the allowed ids, tags and turn ends more often than others."""

    def __init__(self) -> None:
        super().__init__(lambda request: "", TOKENIZER)
        self.weights = np.ones(TOKENIZER.vocab_size)
        self.weights[[*TOKENIZER.tags.values(), TOKENIZER.eos_id]] = 60.0
        self.guided: list[bool] = []

    def _complete(self, number: int, request) -> Completion:
        self.guided.append(request.guide is not None)
        if request.guide is None:
            return Completion(number, (TOKENIZER.eos_id,), (0.0,), "stop")
        rng = np.random.default_rng(abs(hash(request.key)) % 2**32)
        ids: list[int] = []
        while len(ids) < request.params.max_tokens:
            weights = self.weights * request.guide.allowed()
            ids.append(int(rng.choice(len(weights), p=weights / weights.sum())))
            request.guide.accept(ids[-1])
            if ids[-1] == TOKENIZER.eos_id:
                return Completion(number, tuple(ids), (0.0,) * len(ids), "stop")
        return Completion(number, tuple(ids), (0.0,) * len(ids), "length")


@pytest.mark.parametrize("constrain", ["none", "act", "rehearse", "both"])
def test_outputs_keep_their_shape(constrain):
    tasks = generate_tasks("heldout", 6)
    rules = EpisodeConfig(
        rehearse_prompt="compact",
        constrain=constrain,
        judged=False,
        max_act_tokens=200,
        max_rehearse_tokens=120,
        max_input_tokens=4000,
        max_acts=3,
    )
    chat = ChatFormat(TOKENIZER, thinking=False, tool_docs="none")
    engine = Drawing()
    calls = results = 0
    for trajectory in rollout(tasks, engine=engine, chat=chat, cfg=RolloutConfig(rules), judge=None, seed=3):
        for segment in trajectory.segments:
            if segment.role is Role.REHEARSE and segment.finish == "stop" and constrain in ("rehearse", "both"):
                # what no float can hold is JSON all the same
                sound = parse_execution_result(segment.text).error_code is None
                assert sound or re.search(r"[eE][+]?\d{3}", segment.text), segment.text
                results += 1
        for step in (step for turn in trajectory.transcript for step in turn.steps):
            for call in step.output.calls:
                assert check_call(call, tasks[trajectory.group].tools) is None, call
                calls += 1
    assert any(engine.guided) == (constrain in ("act", "both"))
    assert (calls > 0) == (constrain in ("act", "both"))
    assert (results > 0) == (constrain == "both")  # without calls there is nothing to rehearse


def test_the_configuration_says_what_does_not_go_together():
    cfg = default_config()
    cfg.rollout.constrain = "maybe"
    assert any(line.startswith("rollout.constrain='maybe'") for line in problems(cfg))
    cfg.rollout.constrain, cfg.rollout.control, cfg.rollout.context = "both", "device", "stream"
    assert any("rollout.control=device needs 'none'" in line for line in problems(cfg))


def test_training_on_masked_samples_needs_their_correction(tmp_path):
    from envace_jax.learning.setup import prepare

    cfg = default_config()
    cfg.rollout.constrain = "act"
    with pytest.raises(UserError, match="learning.importance_cap"), prepare(cfg, tmp_path):
        pass
