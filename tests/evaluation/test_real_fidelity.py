"""The three protocols over scripted engines: a perfect one, a wrong one, one that flatters."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from envace_jax.datasets.bfcl import load_bfcl
from envace_jax.datasets.quickstart.generator import generate_tasks
from envace_jax.evaluation.benchmarks import BENCHMARKS
from envace_jax.evaluation.real_fidelity import (
    fidelity_report,
    free_running,
    lines,
    predictions,
    probes,
    sim_to_real,
)
from envace_jax.rehearsal.grounding import OracleGrounding
from envace_jax.rehearsal.scripted import ScriptedEngine
from envace_jax.rehearsal.settings import EpisodeConfig, RolloutConfig
from envace_jax.text.chat import ChatFormat
from envace_jax.text.tokenizer import load_tokenizer
from envace_jax.text.transcript import Role

pytestmark = pytest.mark.quick
TOKENIZER = Path(__file__).parents[2] / "data" / "quickstart" / "tokenizer"
CFG = EpisodeConfig(
    rehearse_prompt="compact", max_act_tokens=400, max_rehearse_tokens=400, max_input_tokens=4000, max_acts=20
)


@pytest.fixture(scope="module")
def chat():
    return ChatFormat(load_tokenizer(TOKENIZER), thinking=False, tool_docs="none")


def answer(text: str) -> str:
    return f"<tool_response>\n{text}\n</tool_response>"


def oracle(asked, chat):
    """An engine that knows the answer to every probe."""
    known = {probe.case.prompt_ids: probe.case.pair.actual for probe in asked}
    return ScriptedEngine(lambda request: answer(known[tuple(request.prompt_ids)]), chat.tokenizer)


def test_teacher_forced_on_quickstart(chat):
    tasks = generate_tasks("heldout", 12)
    asked = probes(tasks, chat, CFG)
    assert len(asked) == sum(len(t.recorded_calls) + (len(t.recorded_calls) > 1) for t in tasks)
    found = predictions(asked, oracle(asked, chat), chat, max_tokens=400)
    scores = fidelity_report(asked, found)
    assert scores["rehearse"]["all"]["json_equal"] == scores["rehearse"]["all"]["reject_mcc"] == 1.0
    assert scores["replay"]["all"]["exact"] == 1.0  # the environment asked again is its own ceiling
    assert scores["rehearse"]["all"]["state_change_accuracy"] == 1.0
    assert scores["accepts"]["all"]["json_equal"] == 0.0
    assert math.isnan(scores["accepts"]["all"]["reject_precision"]) and scores["accepts"]["all"]["reject_recall"] == 0
    assert 0 < scores["nearest"]["all"]["leaf_f1"] < 1
    # nothing stands in the prompts that could be copied, unless the grounding shows it
    assert not any(probe.case.pair.copyable for probe in asked)
    shown = probes(tasks, chat, CFG, grounding=OracleGrounding(), drops=False)
    assert all(probe.case.pair.copyable for probe in shown)
    assert len(shown[0].case.prompt_ids) > len(asked[0].case.prompt_ids)


def test_leaving_out_a_predecessor_makes_refusals_on_bfcl(chat):
    tasks = load_bfcl(("base",), limit=10)
    with_drops, without = (probes(tasks, chat, CFG, drops=drops) for drops in (True, False))
    found = predictions(with_drops, oracle(with_drops, chat), chat, max_tokens=400)

    def refused(asked):
        return sum("error" in json.loads(p.case.pair.actual) for p in asked if p.case.pair.actual.startswith("{"))

    assert refused(without) == 0 < refused(with_drops)
    scores = fidelity_report(with_drops, found)
    assert scores["replay"]["all"]["json_equal"] == 1.0
    assert "read_after_write" in scores["rehearse"] and scores["rehearse"]["writes"]["n"] > 0


def test_free_running_finds_the_first_wrong_step(chat):
    task = next(t for t in generate_tasks("heldout", 50) if len(t.recorded_calls) >= 3)
    right = [answer(record.result) for record in task.recorded_calls]
    engine = ScriptedEngine({Role.REHEARSE: right}, chat.tokenizer)
    out = free_running([task], engine, chat, CFG)
    assert out["equal"] == out["intact"] == 1.0 and out["first_divergence"] == {task.uuid: None}
    wrong = [right[0], answer('{"status": "imagined"}'), *right[2:]]
    engine = ScriptedEngine({Role.REHEARSE: wrong}, chat.tokenizer)
    out = free_running([task], engine, chat, CFG)
    n = len(right)
    assert out["equal"] == pytest.approx((n - 1) / n) and out["first_divergence"][task.uuid] == 1
    assert out["median_divergence"] == 1 and out["intact"] == 0.0
    # the wrong answer is part of what REHEARSE sees next
    assert "imagined" in chat.tokenizer.decode(engine.requests[2].prompt_ids)


def test_a_flattering_rehearsal_shows_in_the_gap(chat):
    """Cancelling must come before closing. A rehearsal that accepts the wrong order passes the checklist there."""
    task = next(
        t
        for t in generate_tasks("heldout", 400)
        if [c.name for c in t.recorded_calls] == ["cancel_order", "close_account"]
        and len(t.user_turns) == 1
        and "error" not in "".join(c.result for c in t.recorded_calls)
    )
    outputs = [chat.output_text(m) for m in task.messages if m.role == "assistant"]
    results = [answer(record.result) for record in task.recorded_calls]
    benchmark, cfg = BENCHMARKS["quickstart"], RolloutConfig(CFG)
    honest = ScriptedEngine({Role.ACT: outputs, Role.REHEARSE: results}, chat.tokenizer)
    out = sim_to_real(benchmark, [task], honest, chat, cfg)
    assert (out["Real"], out["WM"], out["W2R"], out["CR"], out["gap"]) == (1.0, 1.0, 1.0, 1.0, 0.0)
    swapped = [outputs[1], outputs[0], outputs[2]]
    flattering = ScriptedEngine({Role.ACT: swapped, Role.REHEARSE: results[::-1]}, chat.tokenizer)
    out = sim_to_real(benchmark, [task], flattering, chat, cfg)
    assert (out["Real"], out["WM"], out["W2R"], out["gap"]) == (0.0, 1.0, 0.0, 1.0)
    assert math.isnan(out["CR"])


def test_the_report_prints(chat):
    tasks = generate_tasks("heldout", 3)
    asked = probes(tasks, chat, CFG)
    forced = fidelity_report(asked, predictions(asked, oracle(asked, chat), chat, max_tokens=400))
    free = {"equal": 1.0, "intact": 1.0, "median_divergence": math.nan, "first_divergence": {}}
    sim = dict.fromkeys(("Real", "WM", "W2R", "CR", "gap", "gap_low", "gap_high"), 0.5) | {"n": 3}
    result = {"benchmark": "quickstart/heldout", "grounding": "none", "calls": len(asked), "teacher_forced": forced,
              "free_running": free, "sim_to_real": sim}  # fmt: skip
    text = "\n".join(lines(result))
    assert "rehearse, all" in text and "nearest, reads" in text and "rehearsed-real gap 0.500" in text
