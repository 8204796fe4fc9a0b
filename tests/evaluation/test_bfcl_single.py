"""BFCL single-turn: its own checker in process, gold answers, wrong answers, and the averages."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from envace_jax.config import UserError
from envace_jax.datasets.bfcl_single import CATEGORIES, RELEVANCE, check_single, load_bfcl_single
from envace_jax.evaluation.benchmarks import BENCHMARKS
from envace_jax.evaluation.bfcl_average import GROUPS, averages, report
from envace_jax.evaluation.results import Header, Result, ResultFile
from envace_jax.text.tool_schema import check_tools
from envace_jax.text.transcript import AssistantOutput, Step, ToolCall, Turn
from tests.clients import client_python


def answer_calls(task) -> list[ToolCall]:
    """A right output: the first possible value of every argument that must be there."""
    spelled = task.meta["category"] in ("simple_java", "simple_javascript")

    def needed(options: Any) -> bool:
        return not (isinstance(options, list) and options and options[0] == "")

    def pick(options: Any) -> Any:
        value = next((v for v in options if v != ""), "") if isinstance(options, list) else options
        if isinstance(value, dict):
            return {k: pick(v) for k, v in value.items() if needed(v)}
        if isinstance(value, list):
            return [{k: pick(v) for k, v in x.items() if needed(v)} if isinstance(x, dict) else x for x in value]
        return value

    def spell(value: Any) -> Any:
        return value if isinstance(value, str) else json.dumps(value)

    if task.meta["category"] in RELEVANCE:
        return [ToolCall("f", {})] if task.meta["category"] == "live_relevance" else []
    made = []
    for function in task.meta["answer"]:
        ((name, arguments),) = function.items()
        chosen = {k: pick(v) for k, v in arguments.items() if needed(v)}
        made.append(ToolCall(name, {k: spell(v) for k, v in chosen.items()} if spelled else chosen))
    return made


def wrong(calls: list[ToolCall], kind: int) -> list[ToolCall]:
    """One change of an output."""
    if not calls:
        return [ToolCall("f", {"x": 1})] if kind % 2 else []
    first, *rest = calls
    if kind == 0:
        return rest
    if kind == 1:
        return [*calls, first]
    if kind == 2:
        return [ToolCall(first.name + "x", first.arguments), *rest]
    if kind == 3 and first.arguments:
        return [ToolCall(first.name, dict(list(first.arguments.items())[1:])), *rest]
    if kind == 4 and first.arguments:
        name, value = next(iter(first.arguments.items()))
        changed = value + 7 if isinstance(value, int) and not isinstance(value, bool) else f"{value} and more"
        return [ToolCall(first.name, first.arguments | {name: changed}), *rest]
    if kind == 5:
        return [ToolCall(first.name, first.arguments | {"no_such_parameter": 1}), *rest]
    return calls[::-1]


def test_gold_outputs_pass_and_changed_ones_do_not():
    benchmark = BENCHMARKS["bfcl-single"]
    tasks = benchmark.load("heldout", 40, ("simple_python", "parallel", "irrelevance", "live_relevance"))
    for task in tasks:
        check_tools(task.tools)
        assert len(task.user_turns) == 1
        right = answer_calls(task)
        assert check_single(task, right) == (True, ""), task.uuid
        output = AssistantOutput("", None, "", tuple(right))
        assert benchmark.score(task, (Turn("?", (Step(output, ()),)),)) == {"score": 1.0}
        assert benchmark.floor(task) == float(task.meta["category"] == "irrelevance")
        if right and task.meta["category"] != "live_relevance":
            for kind in (0, 1, 2, 5):
                assert not check_single(task, wrong(right, kind))[0], (task.uuid, kind)
    with pytest.raises(UserError, match="expected one of"):
        load_bfcl_single(("simple",))
    with pytest.raises(UserError, match="train"):
        benchmark.load("train", 0, ())


@pytest.mark.long
def test_gold_outputs_of_all_categories_pass():
    """All but the few whose possible answers leave an optional value open, and Java values that JSON does not spell."""
    failed: dict[str, int] = {}
    counts: dict[str, int] = {}
    for task in load_bfcl_single():
        category = task.meta["category"]
        counts[category] = counts.get(category, 0) + 1
        failed[category] = failed.get(category, 0) + (not check_single(task, answer_calls(task))[0])
    assert sum(counts.values()) == 3641 and set(counts) == set(CATEGORIES)
    for category, n in failed.items():
        assert n <= (0.3 if category == "simple_java" else 0.005) * counts[category] + 1, failed


OFFICIAL = """
import json, sys
from bfcl_eval.constants.enums import Language
from bfcl_eval.constants.model_config import MODEL_CONFIG_MAPPING
from bfcl_eval.eval_checker.eval_runner import _evaluate_single_ast_entry, _evaluate_single_relevance_entry, get_handler
from bfcl_eval.constants.enums import ReturnFormat
from bfcl_eval.utils import load_dataset_entry, load_ground_truth_entry
name = "Qwen/Qwen3-8B-FC"
handler = get_handler(name)
verdicts = []
for category, cases in json.load(sys.stdin).items():
    entries = {e["id"]: (i, e) for i, e in enumerate(load_dataset_entry(category, False, False))}
    truth = [] if "relevance" in category else load_ground_truth_entry(category)
    language, form = {
        "simple_java": (Language.JAVA, ReturnFormat.JAVA),
        "simple_javascript": (Language.JAVASCRIPT, ReturnFormat.JAVASCRIPT),
    }.get(category, (Language.PYTHON, ReturnFormat.PYTHON))
    for uuid, text in cases:
        i, entry = entries[uuid]
        if "relevance" in category:
            out = _evaluate_single_relevance_entry(handler, uuid, text, entry, name, category)
        else:
            out = _evaluate_single_ast_entry(
                handler, uuid, text, truth[i]["ground_truth"], entry, name, category, language, form
            )
        verdicts.append(bool(out["valid"]))
json.dump(verdicts, sys.stdout)
"""


@pytest.mark.long
def test_outputs_score_as_the_official_runner_says():
    """The official runner with its Qwen handler, in an environment of its own, over gold and changed outputs."""
    python = client_python("bfcl")
    asked: dict[str, list[tuple[str, str]]] = {}
    ours = []
    for category in CATEGORIES:
        for number, task in enumerate(load_bfcl_single((category,), 40)):
            calls = answer_calls(task)
            calls = calls if number % 2 else wrong(calls, number // 2 % 7)
            text = "\n".join(
                f"<tool_call>\n{json.dumps({'name': c.name, 'arguments': c.arguments})}\n</tool_call>" for c in calls
            )
            asked.setdefault(category, []).append((task.uuid.removeprefix("bfcl-"), text or "I cannot."))
            ours.append(check_single(task, calls)[0])
    environment = os.environ | {"OPENAI_API_KEY": "none"}
    done = subprocess.run(
        [python, "-c", OFFICIAL], input=json.dumps(asked), capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert len(ours) > 400 and ours == theirs
    assert 0.2 < sum(ours) / len(ours) < 0.9


@pytest.mark.quick
def test_averages_by_hand():
    means = dict.fromkeys([name for group in GROUPS.values() for name in group], 0.5)
    assert averages(means)["overall"] == pytest.approx(0.5)
    means |= {"simple_python": 1.0, "simple_java": 0.0, "simple_javascript": 0.2, "live_multiple": 1.0}
    found = averages(means)
    assert found["simple"] == pytest.approx(0.4) and found["non_live"] == pytest.approx((0.4 + 1.5) / 4)
    assert found["live"] == pytest.approx((0.5 * 298 + 1053) / 1351)
    only_multi = averages(dict.fromkeys(GROUPS["multi_turn"], 1.0))
    assert only_multi == {"multi_turn": 1.0}


@pytest.mark.quick
def test_a_partial_overall_is_never_printed(tmp_path):
    header = Header("bfcl/all", {"name": "m"}, "h", "t", {}, full={"multi_turn_base": 1, "multi_turn_miss_func": 2})
    with ResultFile(tmp_path / "a.jsonl", header) as file:
        file.write(Result("a", 0, "multi_turn_base", 1.0))
        file.write(Result("b", 0, "multi_turn_miss_func", 1.0))
    text = "\n".join(report([tmp_path / "a.jsonl"]))
    assert "multi_turn_base: 1.0000" in text and "no overall" in text and "multi_turn_miss_func: 1" not in text
    with pytest.raises(UserError, match="as well"):
        report([tmp_path / "a.jsonl", tmp_path / "a.jsonl"])
