"""ScienceWorld in its own simulator (a Java program): tasks, gold path, score, forks."""

from __future__ import annotations

import pytest

from envace_jax.config import UserError
from envace_jax.environments import is_rejection, make_environment
from envace_jax.evaluation import scienceworld
from envace_jax.evaluation.benchmarks import BENCHMARKS
from envace_jax.evaluation.text_worlds import scienceworld_missing
from envace_jax.text.transcript import AssistantOutput, Step, Turn

MISSING = scienceworld_missing()


@pytest.mark.skipif(bool(MISSING), reason=MISSING or "it is there")
@pytest.mark.long
def test_the_gold_path_scores_full_and_forks_agree():
    benchmark = BENCHMARKS["scienceworld"]
    (task,) = benchmark.load("heldout", 1, ("find-living-thing",))
    assert task.user_turns[0] and benchmark.category(task) == "find-living-thing"
    assert benchmark.floor(task) == 0.0
    gold = benchmark.reference(task)
    calls = [message.tool_calls[0] for message in gold.messages if message.tool_calls]
    steps = tuple(Step(AssistantOutput("", None, "", (call,)), ()) for call in calls)
    assert benchmark.score(task, (Turn("?", steps),)) == {"score": 1.0, "solved": 1.0}
    assert benchmark.score(task, (Turn("?", steps[:-1]),))["score"] < 1.0
    environment = make_environment(task)
    try:
        for record in gold.recorded_calls[:3]:
            environment.step(record.name, record.arguments)
        fork = environment.fork()
        try:
            assert fork.state_hash() == environment.state_hash()
        finally:
            fork.close()
        refused = environment.step("do", {"action": "juggle the moon"})
        assert is_rejection("scienceworld", refused), refused
    finally:
        environment.close()
    with pytest.raises(UserError, match="expected one of"):
        benchmark.load("heldout", 1, ("no-such-task",))


@pytest.mark.quick
def test_without_the_simulator_the_reason_is_said(monkeypatch):
    scienceworld._world.cache_clear()
    monkeypatch.setattr(scienceworld, "scienceworld_missing", lambda: "ScienceWorld: no Java found")
    with pytest.raises(UserError, match="no Java found"):
        BENCHMARKS["scienceworld"].load("heldout", 1, ())
