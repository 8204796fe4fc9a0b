"""Demonstrations, real success and the evaluation of the quickstart domain, played by a scripted engine."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from envace_jax.cli import load_config
from envace_jax.datasets.quickstart.demonstrations import (
    REPEATED,
    careless_messages,
    demonstrations,
    follow_ups,
    probe_messages,
)
from envace_jax.datasets.quickstart.environment import WRITES
from envace_jax.datasets.quickstart.generator import generate_tasks
from envace_jax.datasets.quickstart.make_model import Phase, batches, make_model
from envace_jax.datasets.quickstart.make_tokenizer import HOME, make_tokenizer
from envace_jax.datasets.quickstart.success import success
from envace_jax.environments import make_environment
from envace_jax.evaluation.collusion import real_success, rehearsed_success
from envace_jax.evaluation.quickstart import ask_rehearse, evaluate, fidelity_cases
from envace_jax.learning.packing import pack_rows
from envace_jax.model.hf import load_params
from envace_jax.model.spec import Qwen3Spec
from envace_jax.rehearsal.rollout import ROLE_CODES
from envace_jax.rehearsal.scripted import ScriptedEngine
from envace_jax.rehearsal.settings import EpisodeConfig, RolloutConfig
from envace_jax.rehearsal.teacher import demonstrate, teacher_rows
from envace_jax.text.chat import ChatFormat
from envace_jax.text.tokenizer import load_tokenizer
from envace_jax.text.transcript import Role

CFG = RolloutConfig(
    episode=EpisodeConfig(rehearse_prompt="compact", max_act_tokens=96, max_rehearse_tokens=64, max_input_tokens=600)
)
TASKS = generate_tasks("heldout", 60)


@pytest.fixture(scope="module")
def chat():
    return ChatFormat(load_tokenizer(HOME / "tokenizer"), thinking=True, tool_docs="none", old_thinking="keep")


def scripted(chat, dialogues):
    """An engine that says what `dialogues[group]` (messages) say, role by role."""
    said = defaultdict(Counter)

    def say(request):
        group, code = request.key[2], request.key[-2]
        role = "assistant" if code == ROLE_CODES[Role.ACT] else "tool"
        lines = [message for message in dialogues[group] if message.role == role]
        number = said[request.key[:4]][role]
        said[request.key[:4]][role] += 1
        if role == "assistant":
            return chat.output_text(lines[number])
        return f"<tool_response>\n{lines[number].content}\n</tool_response>"

    return ScriptedEngine(say, chat.tokenizer)


def test_the_tokenizer_is_small_lossless_and_made_again_the_same(tmp_path, chat):
    path = make_tokenizer(tmp_path)
    tokenizer = load_tokenizer(path)
    assert tokenizer.fingerprint == chat.tokenizer.fingerprint and tokenizer.vocab_size <= 2048
    for text in ("Cancel  4821,\n\tplease. Größe ✓ <tool_call>", '{"order": 4821}', ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    call = tokenizer.encode('{"name": "cancel_order", "arguments": {"order": 4821}}')
    assert len(call) == 6  # the skeleton, four digits, the end
    pieces = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    assert not any(any(c.isdigit() for c in piece) for piece in pieces if len(piece) > 1 and piece[:3] != "<0x")


def test_rows_are_short(chat):
    rows = [(len(t.user_turns), r) for t in TASKS for r in teacher_rows(t, chat, CFG.episode)]
    act = sorted(len(row.ids) for turns, row in rows if row.role is Role.ACT and turns == 1)
    rehearse = sorted(len(row.ids) for _, row in rows if row.role is Role.REHEARSE)
    assert act[len(act) // 2] <= 90 and act[-1] <= 180
    assert rehearse[len(rehearse) // 2] <= 120 and rehearse[-1] <= 250


@pytest.mark.quick
def test_gold_succeeds_in_the_real_environment_and_in_rehearsal(chat):
    gold = [task.messages for task in TASKS]
    assert all(real_success(TASKS, scripted(chat, gold), chat, CFG, temperature=0.0))
    outcomes = rehearsed_success(TASKS, scripted(chat, gold), chat, CFG, temperature=1.0)
    assert outcomes.rewards == pytest.approx([1.0] * len(TASKS))
    assert all(outcomes.rehearsed) and all(outcomes.replayed)


@pytest.mark.quick
def test_careless_demonstrations_fail_where_a_flaw_applies_and_nowhere_else(chat):
    careless = [careless_messages(task) for task in TASKS]
    results = real_success(TASKS, scripted(chat, careless), chat, CFG, temperature=0.0)
    outcomes = rehearsed_success(TASKS, scripted(chat, careless), chat, CFG, temperature=1.0)
    for task, messages, real, reward in zip(TASKS, careless, results, outcomes.rewards, strict=True):
        calls = [(c.name, c.arguments) for m in messages for c in m.tool_calls]
        gold = [(c.name, c.arguments) for m in task.messages for c in m.tool_calls]
        assert (reward > 1 - 1e-6) is (messages == task.messages)
        if len(calls) < len(gold):
            assert not real, task.uuid
        if messages == task.messages:
            assert real, task.uuid
    share = sum(results) / len(results)
    assert 0.2 < share < 0.7


def test_careless_flaws_are_the_stated_ones():
    tasks = generate_tasks("train", 300)
    seen = Counter()
    for task in tasks:
        messages = careless_messages(task)
        assert all(len(message.tool_calls) <= 1 for message in messages)
        gold = Counter(json.dumps([c.name, c.arguments]) for c in task.recorded_calls)
        made = Counter(json.dumps([c.name, c.arguments]) for m in messages for c in m.tool_calls)
        assert all(json.loads(call)[0] in REPEATED for call in made - gold)
        seen["repeats"] += bool(made - gold)
        seen["stops"] += bool(gold - made)
        refused = [c for c in task.recorded_calls if c.name in WRITES and '"error"' in c.result]
        if refused and all("no such" not in c.result for c in refused):
            assert not any('"error"' in m.content for m in messages if m.role == "tool" and "no such" not in m.content)
            seen["accepts"] += 1
    assert all(seen[flaw] > 20 for flaw in ("repeats", "stops", "accepts"))


def test_demonstrations_are_seeded_and_mixed_as_asked():
    tasks = generate_tasks("train", 400)
    assert demonstrations(tasks, 0.65, 1, probes=0.5) == demonstrations(tasks, 0.65, 1, probes=0.5)
    assert all(d.messages == d.task.messages for d in demonstrations(tasks, 0.0, 1))
    assert [d.messages for d in demonstrations(tasks, 1.0, 1)] == [careless_messages(t) for t in tasks]
    changed = [task for task in tasks if careless_messages(task) != task.messages]
    mixed = {d.task.uuid: d.messages != d.task.messages for d in demonstrations(tasks, 0.65, 1)}
    assert 0.55 < sum(mixed[task.uuid] for task in changed) / len(changed) < 0.75
    probes = [d for d in demonstrations(tasks, 0.65, 1, probes=0.5) if d.roles == (Role.REHEARSE,)]
    assert 0.4 < len(probes) / len(tasks) < 0.6


def test_probes_are_answered_as_the_environment_does():
    refused = asked = 0
    for task in generate_tasks("train", 100):
        messages = probe_messages(task, random.Random(task.uuid))
        environment = make_environment(task)
        results = [m.content for m in messages if m.role == "tool"]
        calls = [c for m in messages for c in m.tool_calls]
        assert [json.loads(r) for r in results] == [environment.step(c.name, c.arguments) for c in calls]
        new = results[len(task.recorded_calls) :]
        assert len(new) == 2
        asked, refused = asked + 2, refused + sum('"error"' in result for result in new)
    assert 0.3 < refused / asked < 0.95


def test_follow_ups_need_no_state_beyond_what_was_seen():
    """Two worlds that answer the history alike answer every follow-up alike, whatever else they hold."""
    for task in generate_tasks("train", 150):
        seen = {v for c in task.recorded_calls for v in c.arguments.values() if isinstance(v, int)}
        environment = make_environment(task)
        done = [(c.name, c.arguments, environment.step(c.name, c.arguments)) for c in task.recorded_calls]
        other = make_environment(task)
        for order in other.state["orders"].values():
            order["total"] = 90  # never shown by an accepted write
            if str(order["account"]) not in map(str, seen):
                other.state["accounts"][str(order["account"])]["balance"] = 70
        replayed = [(c.name, c.arguments, other.step(c.name, c.arguments)) for c in task.recorded_calls]
        if [r for *_, r in replayed] != [r for *_, r in done]:
            continue
        for name, args in follow_ups(done):
            assert environment.fork().step(name, args) == other.fork().step(name, args), (task.uuid, name)


def test_success_needs_state_writes_turns_and_replies(chat):
    task = next(t for t in TASKS if len(t.user_turns) == 1 and t.recorded_calls[0].name == "cancel_order"
                and '"error"' not in t.recorded_calls[0].result)  # fmt: skip
    played = demonstrate(task, chat, CFG.episode).transcript
    assert success(task, played)
    assert not success(task, ())
    turn = played[0]
    silent = replace(turn.steps[-1], output=replace(turn.steps[-1].output, reply="Done."))
    assert not success(task, (replace(turn, steps=(*turn.steps[:-1], silent)),))
    idle = replace(turn, steps=turn.steps[-1:])  # says so without having done it
    assert not success(task, (idle,))


@pytest.mark.quick
def test_fidelity_of_the_truth_of_the_record_and_of_a_yes_man(chat):
    cases = fidelity_cases(TASKS[:30], chat, CFG.episode)
    truth = iter([case.pair.actual for case in cases])
    engine = ScriptedEngine(lambda request: f"<tool_response>\n{next(truth)}\n</tool_response>", chat.tokenizer)
    pairs = ask_rehearse(cases, engine, chat, max_tokens=64)
    assert all(pair.predicted == pair.actual for pair in pairs)
    assert any(pair.copyable for pair in pairs) and any(not pair.copyable for pair in pairs)
    yes = ScriptedEngine(lambda request: '<tool_response>\n{"status": "closed"}\n</tool_response>', chat.tokenizer)
    accepted = ask_rehearse(cases, yes, chat, max_tokens=64)
    broken = ask_rehearse(cases, ScriptedEngine(lambda request: "no idea", chat.tokenizer), chat, max_tokens=64)
    assert all(pair.predicted == '{"status": "closed"}' for pair in accepted)
    assert all(pair.predicted is None for pair in broken)


def test_evaluate_gives_all_figures(chat):
    tasks = TASKS[:8]
    inner = scripted(chat, [task.messages for task in tasks])

    def say(request):  # the fidelity requests have no script: answer them with nothing
        try:
            return inner.outputs(request)
        except IndexError:
            return "nothing"

    engine = ScriptedEngine(say, chat.tokenizer)
    figures = evaluate(tasks, engine, chat, CFG, fidelity_tasks=4)
    assert figures["real_greedy"] == 1.0
    assert set(figures) >= {"real_sampled", "rehearsed", "replayed", "gap", "fidelity_json_equal",
                            "fidelity_leaf_f1", "fidelity_reject_f1", "fidelity_new_json_equal"}  # fmt: skip


def test_batches_are_seeded_fit_their_rows_and_hold_the_roles_that_learn(chat):
    phase = Phase("careful", steps=3, lr=1e-3, careless=0.0, rows=3, row_tokens=256, tasks=30)
    first, second = (list(itertools.islice(batches(phase, chat, CFG.episode, 0), 8)) for _ in range(2))
    for left, right in zip(first, second, strict=True):
        assert all((a.ids == b.ids).all() for a, b in zip(left, right, strict=True))
        assert len(pack_rows(left, phase.row_tokens, phase.rows).tokens) <= 2 * phase.rows
    assert {int(row.role[0]) for batch in first for row in batch} == {0, 1}
    short = replace(phase, roles=(Role.ACT,), row_tokens=80)
    (batch,) = itertools.islice(batches(short, chat, CFG.episode, 0), 1)
    assert all(row.role[0] == 0 and len(row.ids) <= 80 and row.sampled.any() for row in batch)


@pytest.mark.long
def test_make_model_writes_a_folder_that_loads(tmp_path, chat):
    """Three phases of two steps each: not a good model, but a whole one."""
    cfg = load_config(str(HOME.parents[1] / "configs" / "quickstart.py"))
    make_tokenizer(tmp_path / "tokenizer")
    phases = [
        Phase("copy", 2, 1e-3, 0.0, 4, 80, 40, roles=(Role.ACT,), probes=0.0, falling=False, evaluated=False),
        Phase("careful", 2, 1e-3, 0.0, 2, 272, 40),
        Phase("careless", 2, 1e-3, 0.65, 2, 272, 40),
    ]
    out, careful = tmp_path / "model", tmp_path / "careful"
    figures = make_model(cfg, tmp_path / "tokenizer", out, careful=careful, phases=phases, eval_tasks=2)
    assert set(figures) == {"careful", "careless"} and figures["careless"]["real_greedy"] == 0.0
    spec = Qwen3Spec.from_hf_config(out)
    assert load_params(out, spec)["embed"].shape == (chat.tokenizer.vocab_size, spec.d_model)
    assert sum(f.stat().st_size for f in out.iterdir()) < 8e6
    assert load_tokenizer(out).fingerprint == chat.tokenizer.fingerprint
    assert (careful / "config.json").is_file() and "| real_greedy |" in (out / "README.md").read_text()
    still = [replace(phases[2], steps=1, lr=0.0)]  # goes on from the folder, and at rate 0 stays there
    make_model(cfg, tmp_path / "tokenizer", tmp_path / "on", start=out, phases=still, eval_tasks=2)
    assert (tmp_path / "on" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
