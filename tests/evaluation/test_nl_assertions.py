"""Natural-language assertions: what the judge is asked, what counts, what is never mixed into the score."""

from __future__ import annotations

import json
from concurrent.futures import Future

import pytest

from envace_jax.config import UserError
from envace_jax.datasets.tau2 import load_tau2
from envace_jax.endpoint import Completion
from envace_jax.evaluation import nl_assertions
from envace_jax.evaluation.results import Header, Result
from envace_jax.rehearsal.trajectory import _turn_json
from tests.datasets.transcripts import reference_transcript

pytestmark = pytest.mark.quick


class Judge:
    """Answers in order; None is an outage."""

    def __init__(self, *answers) -> None:
        self.answers, self.asked = list(answers), []

    def submit(self, messages, **more) -> Future:
        self.asked.append(messages)
        answer = self.answers.pop(0)
        future: Future = Future()
        if answer is None:
            future.set_result(Completion(None, cause="timeout", detail=""))
        else:
            text = json.dumps({"verdicts": answer})
            assert more["check"](text) is None and more["check"]('{"verdicts": [1]}') is not None
            future.set_result(Completion(text))
        return future


def test_assertions_are_judged_apart(tmp_path):
    tasks = {task.uuid: task for task in load_tau2(("retail",))}
    with_some = [task for task in tasks.values() if task.meta["nl_assertions"]][:3]
    without = next(task for task in tasks.values() if not task.meta["nl_assertions"])
    results = [
        Result(task.uuid, 0, "retail", 1.0, transcript=[_turn_json(turn) for turn in reference_transcript(task)])
        for task in (*with_some, without)
    ]
    ns = [len(task.meta["nl_assertions"]) for task in with_some]
    judge = Judge([True] * ns[0], [False] * ns[1], None)
    assessed = nl_assertions.assess(results, tasks, judge)
    assert [one.verdicts for one in assessed] == [(True,) * ns[0], (False,) * ns[1], None]
    prompt = judge.asked[0][1]["content"]
    assert with_some[0].meta["nl_assertions"][0] in prompt and "Agent calls" in prompt and "It returns" in prompt
    text = "\n".join(nl_assertions.report(Header("tau2/all", {}, "h", "t", {}), assessed, "judge-1"))
    assert "judged by judge-1 (not part of any score above)" in text
    assert f"{ns[0]} of {ns[0] + ns[1]} assertions met" in text and "1 of 2 conversations" in text
    assert "score x assertions on those conversations: 0.500" in text and "1 conversations without a verdict" in text
    header = Header("tau2/all", {"name": "m"}, "h", "t", {})
    path = nl_assertions.write(tmp_path / "r.jsonl", header, assessed, "judge-1")
    written = json.loads(path.read_text())
    assert path.name == "r.jsonl.nl_assertions.json" and written["judge"] == "judge-1" and written["judge_prompt"]
    assert [one["verdicts"] for one in written["verdicts"]] == [[True] * ns[0], [False] * ns[1], None]
    assert written["verdicts"][2]["cause"] == "timeout" and written["model"] == {"name": "m"}
    with pytest.raises(UserError, match="not a tau2 task"):
        nl_assertions.assess([Result("quickstart-1", 0, "q", 1.0)], tasks, judge)
