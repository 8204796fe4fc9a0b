"""The three protocols over scripted engines: a perfect one, a wrong one, one that flatters."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from envace_jax.datasets.bfcl import load_bfcl
from envace_jax.datasets.quickstart.generator import generate_tasks
from envace_jax.environments import may_write
from envace_jax.evaluation.benchmarks import BENCHMARKS
from envace_jax.evaluation.real_fidelity import (
    fidelity_report,
    free_running,
    judged,
    lines,
    predictions,
    probes,
    sim_to_real,
)
from envace_jax.evaluation.text_worlds import scienceworld_missing
from envace_jax.rehearsal.grounding import OracleGrounding
from envace_jax.rehearsal.scripted import ScriptedEngine
from envace_jax.rehearsal.settings import EpisodeConfig, RolloutConfig
from envace_jax.text.chat import ChatFormat
from envace_jax.text.tokenizer import load_tokenizer
from envace_jax.text.transcript import Role
from envace_jax.worldbook.completer import ScriptedCompleter

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


def played(chat, name: str, task, **limits):
    """Probes of a task, and `sim_to_real` of an engine that says the reference and rehearses the real answers."""
    benchmark = BENCHMARKS[name]
    outputs = [chat.output_text(m) for m in task.messages if m.role == "assistant"]
    results = [answer(record.result) for record in task.recorded_calls]
    engine = ScriptedEngine({Role.ACT: outputs, Role.REHEARSE: results}, chat.tokenizer)
    episode = EpisodeConfig(
        rehearse_prompt="compact", max_act_tokens=4000, max_rehearse_tokens=1 << 15, max_input_tokens=1 << 20, **limits
    )
    asked = probes([task], chat, episode, drops=False)
    return asked, sim_to_real(benchmark, [task], engine, chat, RolloutConfig(episode))


def test_all_of_it_on_tau2(chat):
    benchmark = BENCHMARKS["tau2"]
    task = next(
        t
        for t in map(benchmark.reference, benchmark.load("all", 0, ("retail",)))
        if 3 <= len(t.recorded_calls) <= 6 and any(c.name.startswith("cancel") for c in t.recorded_calls)
    )
    asked, sim = played(chat, "tau2", task)
    scores = fidelity_report(asked, predictions(asked, oracle(asked, chat), chat, max_tokens=1 << 15))["rehearse"]
    assert scores["all"]["json_equal"] == 1.0 and scores["writes"]["n"] >= 1
    assert scores["all"]["state_change_precision"] == scores["all"]["state_change_recall"] == 1.0
    assert sim["Real"] == sim["W2R"] == sim["CR"] == 1.0


@pytest.mark.long
@pytest.mark.skipif(bool(scienceworld_missing()), reason=scienceworld_missing() or "it is there")
def test_all_of_it_on_scienceworld_which_has_no_verdicts(chat):
    benchmark = BENCHMARKS["scienceworld"]
    (task,) = map(benchmark.reference, benchmark.load("heldout", 1, ("find-living-thing",)))
    asked, sim = played(chat, "scienceworld", task, max_acts=100)
    assert [probe.case.pair.actual for probe in asked] == [record.result for record in task.recorded_calls]
    writes = [probe.case.pair for probe in asked if probe.case.pair.writes]
    assert 0 < sum(bool(pair.changed) for pair in writes) and len(writes) <= len(asked)
    assert (sim["Real"], sim["W2R"], sim["CR"], sim["n"], sim["n_judged"]) == (1.0, 1.0, 1.0, 1, 0)
    assert all(math.isnan(sim[name]) for name in ("WM", "gap", "gap_low", "gap_high"))


def test_a_change_is_predicted_by_what_is_known_before(chat):
    """What came of a call tells nothing about its kind: the same call is a write when it is refused or in vain."""
    assert may_write("quickstart", "cancel_order", {}) and not may_write("quickstart", "get_order", {})
    assert may_write("bfcl", "mkdir", {}) and not may_write("bfcl", "ls", {})
    assert may_write("tau2_airline", "cancel_reservation", {}) and not may_write("tau2_airline", "calculate", {})
    assert may_write("scienceworld", "do", {"action": "open door"})
    assert not any(may_write("scienceworld", "do", {"action": text}) for text in ("look around", "Inventory", ""))
    asked = probes(generate_tasks("heldout", 40), chat, CFG)
    found = predictions(asked, oracle(asked, chat), chat, max_tokens=400)
    kinds = {(probe.call.name, probe.case.pair.writes) for probe in asked}
    assert len(kinds) == len({name for name, _ in kinds})  # one answer a tool
    accepting = fidelity_report(asked, found)["accepts"]["all"]
    changes = [p.case.pair.changed for p in asked if p.case.pair.writes]
    assert accepting["state_change_precision"] == pytest.approx(sum(changes) / len(changes))
    assert accepting["state_change_recall"] == 1.0 > accepting["state_change_precision"]


def test_a_judge_grades_by_domain(chat):
    tasks = load_bfcl(("base", "miss_func"), limit=4)
    asked = probes(tasks, chat, CFG, drops=False)[:6]
    names = ("format", "factuality", "consistency", "realism", "quality")

    def grade(n: int) -> str:
        final = {"strengths": "", "weaknesses": "", "scores": dict.fromkeys(names, n)}
        return f"Reasons.\n<final_evaluation>{json.dumps(final)}</final_evaluation>"

    judge = ScriptedCompleter(script={"answers": [], "default": grade(3)})
    answers = [replace(probe.case.pair, predicted=probe.case.pair.actual) for probe in asked]
    answers[0] = replace(answers[0], predicted=None)  # no answer: no grade
    out = judged(asked, answers, judge, BENCHMARKS["bfcl"])
    assert (out["n"], out["excluded"], out["domain_mean"]) == (5, 1, 50.0)
    assert set(out["domains"]) <= {"multi_turn_base", "multi_turn_miss_func"}
    assert any(asked[1].before[0].name in text for text in judge.asked)  # the true history is shown
    none = judged(asked[:1], answers[:1], judge, BENCHMARKS["bfcl"])
    assert none["n"] == 0 and math.isnan(none["domain_mean"])


def test_tasks_without_a_checklist_are_rehearsed_without_a_verdict(chat):
    judged_one, plain = generate_tasks("heldout", 2)
    tasks = [replace(plain, checklists=(((),) * len(plain.user_turns),)), judged_one]
    said = {t.uuid: [chat.output_text(m) for m in t.messages if m.role == "assistant"] for t in tasks}
    told = {t.uuid: [answer(record.result) for record in t.recorded_calls] for t in tasks}

    for chosen, counted in ((tasks[:1], 0), (tasks[1:], 1)):
        uuid = chosen[0].uuid
        engine = ScriptedEngine({Role.ACT: said[uuid], Role.REHEARSE: told[uuid]}, chat.tokenizer)
        out = sim_to_real(BENCHMARKS["quickstart"], chosen, engine, chat, RolloutConfig(CFG))
        assert (out["Real"], out["W2R"], out["CR"], out["n"], out["n_judged"]) == (1.0, 1.0, 1.0, 1, counted)
        assert math.isnan(out["WM"]) == (not counted) == math.isnan(out["gap"])


def test_the_report_prints(chat):
    tasks = generate_tasks("heldout", 3)
    asked = probes(tasks, chat, CFG)
    forced = fidelity_report(asked, predictions(asked, oracle(asked, chat), chat, max_tokens=400))
    free = {"equal": 1.0, "intact": 1.0, "median_divergence": math.nan, "first_divergence": {}}
    sim = dict.fromkeys(("Real", "WM", "W2R", "CR", "gap", "gap_low", "gap_high"), 0.5) | {"n": 3, "n_judged": 2}
    told = {"judge": "j-1", "n": 3, "excluded": 0, "domain_mean": 62.5, "domains": {"quickstart": 62.5}}
    result = {"benchmark": "quickstart/heldout", "grounding": "none", "calls": len(asked), "teacher_forced": forced,
              "free_running": free, "sim_to_real": sim, "judged": told}  # fmt: skip
    text = "\n".join(lines(result))
    assert "judged by j-1: 62.5 of 100 (quickstart 62.5)" in text and "change P" in text and "2 rehearsals with" in text
    assert "rehearse, all" in text and "nearest, reads" in text and "rehearsed-real gap 0.500" in text
