"""Tool metrics by hand, and records that are not in the format."""

from __future__ import annotations

import json

import pytest

from envace_jax.evaluation.finmcp import called, count, evaluate, metrics, report, write

pytestmark = pytest.mark.quick


def said(*groups: list[str]) -> list[dict]:
    out: list[dict] = [{"role": "user", "content": "?"}]
    for group in groups:
        calls = [{"id": "1", "type": "function", "function": {"name": n, "arguments": "{}"}} for n in group]
        out += [{"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "x"}]
    return [*out, {"role": "assistant", "content": "Done.", "tool_calls": None}]


def record(gold, predicted, **fields):
    return {"scenery": "Market-Macro", "diff_level": {"level": "easy"}, "messages": said(*gold),
            "messages_pred": said(*predicted)} | fields  # fmt: skip


def test_multisets_and_micro_sums_by_hand():
    # gold A B B, predicted B A C: common A, B = 2; gold D, predicted nothing
    counts = [count(record([["A", "B"], ["B"]], [["B", "A"], ["C"]])), count(record([["D"]], []))]
    assert (counts[0].common, counts[0].predicted, counts[0].gold) == (2, 3, 3)
    m = metrics(counts)
    assert m["TP"] == pytest.approx(2 / 3) and m["TR"] == pytest.approx(2 / 4)
    assert m["TF1"] == pytest.approx(2 * 2 / (3 + 4))  # harmonic mean of 2/3 and 2/4
    assert m["TR_macro"] == pytest.approx((2 / 3 + 0) / 2)


@pytest.mark.parametrize(
    ("predicted", "ordered", "grouped"),
    [
        ([["A", "B"], ["C"]], True, True),
        ([["B", "A"], ["C"]], False, True),  # within a message order is free in the text, not in the code
        ([["A"], ["B"], ["C"]], True, False),  # the code does not see messages
        ([["A", "B"], ["C"], ["C"]], False, False),
        ([], False, False),
    ],
)
def test_exact_match_both_ways(predicted, ordered, grouped):
    c = count(record([["A", "B"], ["C"]], predicted))
    assert (c.ordered, c.grouped) == (ordered, grouped)


def test_files_and_what_is_left_out(tmp_path):
    records = [
        record([["A"]], [["A"]], id=1, task="multi turn"),
        record([["A"]], [["B"]], id=2) | {"error": True},
        {"id": 3, "messages": []},
        {"id": 4, "messages": "no", "messages_pred": []},
        record([["A"]], [["A"]], id=5) | {"messages_pred": [{"tool_calls": [{"name": "A"}]}]},
        7,
    ]
    path = tmp_path / "p.json"
    path.write_text(json.dumps(records))
    scores, left_out = evaluate(path)
    assert scores["all"]["n"] == 1 and scores["all"]["TF1"] == 1.0
    assert set(scores) == {"all", "field:Market", "level:easy", "task:multi_turn"}
    assert len(left_out) == 5 and left_out[0] == "record 2: marked as error" and "messages_pred" in left_out[1]
    lines = tmp_path / "p.jsonl"
    lines.write_text("\n".join(json.dumps(r) for r in records))
    assert evaluate(lines) == (scores, left_out)
    written = json.loads(write(path).read_text())
    assert written["scores"]["all"]["n"] == evaluate(path)[0]["all"]["n"] and written["left_out"] == evaluate(path)[1]
    assert written["digest"] and written["versions"]["envace_jax"] and written["full"] == 613
    text = "\n".join(report(path))
    assert "partial: the benchmark has 613 records" in text and "54.04" in text


def test_nothing_usable_is_an_error(tmp_path):
    path = tmp_path / "p.json"
    for text, message in (("[]", "empty"), ("[1]", "no usable record"), ("{", "line 1: is not JSON")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            evaluate(path)
    with pytest.raises(ValueError, match="no such file"):
        evaluate(tmp_path / "absent")
    assert called([]) == []
