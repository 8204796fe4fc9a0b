"""Result files: taken up again, refused when they hold something else, and what is printed of them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from envace_jax.evaluation.published import PUBLISHED, compare, measured
from envace_jax.evaluation.results import Header, Result, ResultFile, figures, read_results, table

pytestmark = pytest.mark.quick
HEADER = Header(
    "tau2/all", {"name": "m"}, "in process", "0" * 64, {"temperature": 0.6}, full={"airline": 2, "retail": 1}
)


def result(task: str, trial: int = 0, category: str = "airline", score: float = 1.0, **fields) -> Result:
    return Result(task, trial, category, score, **fields)


def test_a_file_is_taken_up_again(tmp_path):
    path = tmp_path / "deep" / "r.jsonl"
    with ResultFile(path, HEADER) as file:
        file.write(result("a", errors=("act:X",), parts={"database": 1.0}))
    # a killed run leaves half a line
    path.write_bytes(path.read_bytes() + b'{"kind": "result", "task": "b"')
    with ResultFile(path, replace(HEADER, trials=3, tasks=9)) as file:
        assert file.done == {("a", 0)}
        file.write(result("b"))
    header, results = read_results(path)
    assert header == HEADER and [r.task for r in results] == ["a", "b"]
    assert results[0] == result("a", errors=("act:X",), parts={"database": 1.0})
    # a last line that is whole but for its newline is kept
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    with ResultFile(path, HEADER) as file:
        assert len(file.done) == 2
        file.write(result("c"))
    assert len(read_results(path)[1]) == 3


@pytest.mark.parametrize(
    "field", ["benchmark", "model", "handler", "template", "sampling", "versions", "seen", "notes"]
)
def test_another_evaluation_is_refused(tmp_path, field):
    path = tmp_path / "r.jsonl"
    ResultFile(path, HEADER).close()
    changed = {"model": {"name": "n"}, "sampling": {"temperature": 1.0}, "versions": {"jax": "0"}}.get(field, ("x",))
    if field in ("benchmark", "handler", "template"):
        changed = "other"
    with pytest.raises(ValueError, match=f"{field}: .* there, .* here.*name another --out"):
        ResultFile(path, replace(HEADER, **{field: changed}))


def test_what_is_no_result_file_is_named(tmp_path):
    path = tmp_path / "x"
    with pytest.raises(ValueError, match="no such file"):
        read_results(path)
    for text, message in (("[]\n", "no header"), ("\n", "line 1|no header"), ("no\n{}\n", "line 1: is not JSON")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_results(path)
    path.write_text(json.dumps({"kind": "header", "colour": 1}) + "\n")
    with pytest.raises(ValueError, match="of this version"):
        read_results(path)


def test_figures_worked_by_hand():
    # two tasks, two trials: a wins both, b one. Avg@2 = 3/4; run means 1 and 1/2, spread sqrt(1/8); pass^1 = 3/4,
    # pass^2 = (1 + 0) / 2
    results = [result("a", 0), result("a", 1), result("b", 0), result("b", 1, score=0.0)]
    f = figures("airline", results, 2)
    assert f.interval.mean == 0.75 and f.tasks == 2 and f.trials == 2 and f.complete
    assert f.spread == pytest.approx(np.sqrt(1 / 8))
    assert f.passed == (0.75, 0.5)
    # a task with a trial missing counts in the mean, not in pass^k, and makes the category partial
    f = figures("airline", results[:3], 2)
    assert f.interval.mean == 1.0 and f.passed == (1.0, 1.0) and not f.complete
    assert figures("airline", results[:1], 2).spread is None


def test_floors_stand_beside_scores_and_averages_only_where_all_is_there():
    airline = [result("a", floor=1.0), result("b", score=0.0, floor=0.0)]
    text = "\n".join(table(HEADER, airline))
    assert "airline: Avg@1 0.500" in text and "floor (only ends politely) 0.500" in text
    assert "no average over categories" in text and "mean of categories" not in text
    whole = [*airline, result("c", category="retail")]
    text = "\n".join(table(HEADER, whole))
    # categories 1/2 and 1: mean .75; pooled 2/3
    assert "mean of categories 0.750, pooled over tasks 0.667" in text and "partial" not in text
    text = "\n".join(table(HEADER, [airline[0], result("c", category="retail")]))
    assert "partial: 1 of 2 tasks" in text and "no average" in text


def test_published_numbers_hold_together():
    assert len({(p.source, p.place, p.model, p.benchmark, p.metric) for p in PUBLISHED}) == len(PUBLISHED)
    values = {(p.place, p.model, p.benchmark): p.value for p in PUBLISHED}
    judged = [p for p in PUBLISHED if p.benchmark == "agentworldbench" and p.place == "Table 1"]
    assert len(judged) == 2 * 5 * 8
    for k in range(0, len(judged), 8):  # seven environments and their mean
        *each, average = judged[k : k + 8]
        assert average.model.endswith(", average")
        assert sum(p.value for p in each) / 7 == pytest.approx(average.value, abs=0.011)
    replayed = {(p.model, p.metric): p.value for p in measured("sim_to_real")}
    for model in {model for model, _ in replayed}:
        ratio = 100 * replayed[model, "W2R"] / replayed[model, "Real"]
        assert ratio == pytest.approx(replayed[model, "CR"], abs=0.06)
    for model in ("Qwen3-8B", "AWM-14B", "EnvScaler-8B", "EnvACE-1.7B", "EnvACE-8B"):
        mean = np.mean([values["Table 1", model, b] for b in ("bfcl_v4", "tau2", "vita")])
        assert values["Table 1", model, "overall"] == pytest.approx(mean, abs=0.011)
    for p in PUBLISHED:
        if p.place == "Table 3" and p.benchmark == "overall":
            pair = [values["Table 3", p.model, b] for b in ("tau2", "bfcl_multi_turn")]
            assert p.value == pytest.approx(np.mean(pair), abs=0.051)
    tr, tp, tf1 = (p.value for p in measured("finmcp")[:3])
    assert tf1 == pytest.approx(2 * tr * tp / (tr + tp), abs=0.011)


def test_compare_says_what_stands_against_it():
    whole = [result("a"), result("b", score=0.0), result("c", category="retail")]
    lines = "\n".join(compare(HEADER, whole))
    assert " 75.00" in lines and "mean of categories" in lines and " 66.67" in lines
    assert "36.70" in lines and "user model, release" in lines and "PARTIAL" not in lines
    lines = "\n".join(compare(HEADER, whole[:1]))
    assert "THIS RESULT IS PARTIAL (airline, retail)" in lines and "mean of categories" not in lines
    bfcl = replace(HEADER, benchmark="bfcl/all", full={"multi_turn_base": 1})
    lines = "\n".join(compare(bfcl, [result("a", category="multi_turn_base")]))
    assert "41.90" in lines and "46.04" not in lines  # never against an average of other categories
    assert "nothing is published" in compare(replace(HEADER, benchmark="quickstart/heldout"), whole)[0]
