"""Scores of the official programs, in the form that they write them, become result files that `compare` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from envace_jax import cli
from envace_jax.config import UserError
from envace_jax.datasets.bfcl_single import CATEGORIES
from envace_jax.evaluation.bfcl_average import GROUPS, report
from envace_jax.evaluation.official import BFCL_FULL, official
from envace_jax.evaluation.published import compare
from envace_jax.evaluation.results import read_results

pytestmark = pytest.mark.quick


def bfcl_file(folder: Path, where: str, category: str, correct: int, failed: list[str]) -> None:
    total = correct + len(failed)
    head = {"accuracy": correct / total, "correct_count": correct, "total_count": total}
    path = folder / "Qwen_Qwen3-8B-FC" / where / f"BFCL_v4_{category}_score.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [head, *({"id": name, "valid": False, "error": {"error_type": "x"}} for name in failed)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def evaluate(tmp_path: Path, *words: str) -> int:
    return cli.main(["evaluate", *words, f"--config.run_dir={tmp_path / 'run'}"])


def test_a_bfcl_score_folder(tmp_path, capsys):
    scores = tmp_path / "S"
    bfcl_file(scores, "multi_turn", "multi_turn_base", 150, [f"multi_turn_base_{k}" for k in range(50)])
    bfcl_file(scores, "non_live", "simple_java", 3, ["simple_java_7"])
    bfcl_file(scores, "agentic/memory/kv", "memory_kv", 31, [f"memory_{k}" for k in range(124)])
    bfcl_file(scores, "non_live", "format_sensitivity", 1, [])
    assert evaluate(tmp_path, "import", str(scores)) == 0
    assert "multi_turn_base: Avg@1 0.750" in capsys.readouterr().out
    files = sorted((tmp_path / "run" / "evaluation").iterdir())
    assert [path.name for path in files] == [
        "official_bfcl-agentic_Qwen_Qwen3-8B-FC.jsonl",
        "official_bfcl-single_Qwen_Qwen3-8B-FC.jsonl",
        "official_bfcl_Qwen_Qwen3-8B-FC.jsonl",
    ]
    header, results = read_results(files[2])
    assert len(results) == 200 and sum(r.score for r in results) == 150
    text = "\n".join(compare(header, results))
    assert "75.00" in text and "ours, multi_turn_base" in text and "EnvACE-8B, no rehearsal" in text
    assert "THIS RESULT IS PARTIAL (multi_turn_miss_func" in text and "name neither sampling" in text
    averages = "\n".join(report(files))
    assert "multi_turn_base: 0.7500" in averages and "memory_kv: 0.2000" in averages
    assert "simple_java:" not in averages and "no overall" in averages  # 4 of 100 are no category
    assert evaluate(tmp_path, "import", str(scores)) == 0  # taken in twice it is the same
    assert read_results(files[2])[1] == results


def test_the_sizes_of_the_categories():
    assert set(BFCL_FULL) == set(CATEGORIES) | {name for names in GROUPS.values() for name in names}
    assert sum(BFCL_FULL.values()) == 5106  # scored entries of version 4


@pytest.mark.parametrize("wrong", ["counts", "empty", "two", "place"])
def test_folders_that_are_not_whole(tmp_path, wrong):
    if wrong == "counts":
        bfcl_file(tmp_path, "live", "live_simple", 2, ["a"])
        path = next(tmp_path.rglob("*.json"))
        path.write_text(path.read_text().splitlines()[0] + "\n")
    elif wrong == "two":
        bfcl_file(tmp_path / "A", "live", "live_simple", 2, ["a"])
        bfcl_file(tmp_path / "B", "live", "live_simple", 2, ["a"])
    elif wrong == "place":
        bfcl_file(tmp_path, "elsewhere", "live_simple", 2, ["a"])
    with pytest.raises(UserError, match="disagree|scores of one model |expected below"):
        official(tmp_path)


def simulation(task: str, trial: int, reward: float | None) -> dict[str, Any]:
    call = {"id": "c", "name": "get_user", "arguments": {}, "requestor": "assistant"}
    return {
        "id": f"{task}/{trial}", "task_id": task, "trial": trial, "duration": 3.5, "termination_reason": "user_stop",
        "reward_info": None if reward is None else {"reward": reward, "reward_breakdown": {"DB": reward}},
        "messages": [
            {"role": "user", "content": "Hi."},
            {"role": "assistant", "tool_calls": [call], "usage": {"prompt_tokens": 9, "completion_tokens": 5}},
            {"role": "tool", "content": "{}"},
            {"role": "assistant", "content": "Done.", "usage": {"prompt_tokens": 9, "completion_tokens": 2}},
        ],
    }  # fmt: skip


def test_a_tau2_results_file(tmp_path, capsys):
    arguments = {"api_base": "http://x", "api_key": "s3cret", "temperature": 0.6, "max_tokens": 9}
    runs = [simulation(str(task), trial, float(task == 0)) for task in range(2) for trial in range(2)]
    record = {
        "timestamp": "t",
        "info": {
            "git_commit": "abc", "num_trials": 2, "max_steps": 200, "max_errors": 10, "seed": 300,
            "agent_info": {"implementation": "llm_agent", "llm": "openai/NAME", "llm_args": arguments},
            "user_info": {"implementation": "user_simulator", "llm": "u-1", "llm_args": {}},
            "environment_info": {"domain_name": "telecom", "policy": "…"},
        },
        "tasks": [],
        "simulations": [*runs, simulation("2", 0, None)],
    }  # fmt: skip
    path = tmp_path / "out.json"
    path.write_text(json.dumps(record))
    assert evaluate(tmp_path, "import", str(path)) == 0
    out = tmp_path / "run" / "evaluation" / "official_tau2_openai_NAME.jsonl"
    assert "s3cret" not in out.read_text()
    header, results = read_results(out)
    assert header.sampling["agent"] == {"api_base": "http://x", "temperature": 0.6, "max_tokens": 9}
    assert header.full == {"telecom": 114} and header.trials == 2 and "abc" in header.handler
    first = results[0]
    assert (first.task, first.score, first.tokens, first.acts, first.calls) == ("telecom-0", 1.0, 7, 2, 1)
    assert len(results) == 4 and any("1 simulations have no reward" in note for note in header.notes)
    text = "\n".join(compare(header, results))
    assert "50.00" in text and "ours, telecom" in text and "THIS RESULT IS PARTIAL" in text
    for broken in ({}, {"info": {}, "simulations": []}, {"info": 1, "simulations": 2}):
        path.write_text(json.dumps(broken))
        with pytest.raises(UserError, match="tau2"):
            official(path)
