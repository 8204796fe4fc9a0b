"""The compare command: one table a metric with paired differences, from a worldbook or in folds."""

from __future__ import annotations

import json
from pathlib import Path

import ledger
import pytest

from envace_jax import cli
from envace_jax.datasets.traces import write_traces
from envace_jax.evaluation.next_observation import Results, Row, differences_table, joined, judge_system, results_table

pytestmark = pytest.mark.quick


def test_every_trace_is_answered_from_a_worldbook_that_saw_nothing_of_its_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    episodes = ledger.episodes(12, 5)
    write_traces(tmp_path / "t.jsonl", episodes)
    out = tmp_path / "rows.jsonl"
    options = ["--traces", str(tmp_path / "t.jsonl"), "--copying", "--single_shot", "--resamples", "200"]
    asked = ["--systems", "direct", "full", "--metric", "json_equal", "--out", str(out)]
    assert cli.main(["worldbook", "compare", "--cross_fit", "3", *options, *asked]) == 0
    text = capsys.readouterr().out
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    total = sum(e.kind == "action" for episode in episodes for e in episode.events)
    assert f"3 folds, 12 traces, {total} rows" in text and len(lines) == 2 * total
    assert {line["trajectory"] for line in lines} == {e.episode_id for e in episodes}
    assert "(group) first" not in text  # no fold knows a group that it is asked about
    assert "full (copying stand-in) less" in text and "mean of domains" in text


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--traces", "T"], "give a worldbook, or --cross_fit"),
        (["WB", "--cross_fit", "3", "--traces", "T"], "give a worldbook, or --cross_fit"),
        (["--cross_fit", "1", "--traces", "T"], "2 or more folds"),
        (["--cross_fit", "3", "--rows", "R"], "2 or more folds"),
    ],
)
def test_what_cannot_be_compared_is_refused(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["worldbook", "compare", *argv]) == 2
    assert says in capsys.readouterr().err


def test_tables_by_hand() -> None:
    """Domains a (0.5) and b (1): their mean 0.75, the row mean 2/3; NaN rows are excluded and counted."""
    nan = float("nan")
    rows = [Row(str(k), d, t, "x", {}, "") for k, (d, t) in enumerate([("a", "1"), ("a", "1"), ("b", "2"), ("b", "3")])]
    one = Results("one", rows, {"m": [1.0, 0.0, 1.0, nan]}, ["agent"] * 4, 1)
    two = Results("two", rows, {"m": [1.0, 1.0, nan, 0.5]}, ["agent"] * 4, 1)
    line = results_table([one], "m", 200).splitlines()[-1]
    assert line.startswith("| one | 0.500 | 1.000 | 0.750 | 0.667 (") and line.endswith("| 1 |")
    # Valid in both are the first two rows: (1 - 1 + 1 - 0) / 2.
    assert "| one | +0.500 (0.500 to 0.500) | 2 |" in differences_table([one, two], "m", 200)
    nothing = Results("none", rows, {"m": [nan] * 4}, ["none"] * 4, 4)
    assert "| none | – | 0 |" in differences_table([nothing, two], "m", 200)
    both = joined([one, two])
    assert len(both.rows) == 8 and both.scores["m"][:2] == [1.0, 0.0] and both.failed == 2 and both.system == "one"


def test_the_judge_is_told_what_a_domain_determines() -> None:
    assert "10 to 20 percent" in judge_system("MCP") and "process ids" in judge_system("terminal/bash")
    assert judge_system("quickstart") in judge_system("web")
