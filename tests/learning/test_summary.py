"""What a run says at its end."""

from __future__ import annotations

import json

import pytest

from envace_jax.learning.summary import before_and_after, summary_lines

pytestmark = pytest.mark.quick

STEP = {"reward/mean": 0.5, "grad_norm": 1.0}


def written(folder, *records):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return summary_lines(folder, changed=True)[0]


def test_before_is_said_only_of_what_was_measured_before(tmp_path):
    start, end = {"step": 0, "eval/real_greedy": 0.25}, {"step": 2, "eval/real_greedy": 0.75}
    steps = [{"step": 1, **STEP}, {"step": 2, **STEP}]
    title = "held-out success in the real environment, greedy: "
    assert f"{title}0.250 before, 0.750 after" in written(tmp_path, start, *steps, end)
    assert f"{title}0.750 after" in written(tmp_path, *steps, end)
    assert not any(" before," in line for line in written(tmp_path, *steps, end))
    assert not any("held-out" in line for line in written(tmp_path, *steps))
    assert before_and_after([start]) == ({"real_greedy": 0.25}, {"real_greedy": 0.25})
    assert before_and_after([]) == ({}, {})
