"""Rehearsed against real success: a faithful world has no gap, a world that covers up for its actor has one."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from envace_jax.config import UserError, default_config
from envace_jax.datasets.quickstart.generator import accepted_write, generate_tasks
from envace_jax.datasets.quickstart.make_tokenizer import HOME
from envace_jax.environments import make_environment
from envace_jax.evaluation.collusion import both_worlds, succeeded
from envace_jax.learning.summary import evaluate_policy, fidelity_page, gap_plot
from envace_jax.rehearsal.scripted import ScriptedEngine
from envace_jax.rehearsal.settings import EpisodeConfig, RolloutConfig
from envace_jax.rewards.judge import RuleJudge
from envace_jax.text.chat import ChatFormat
from envace_jax.text.tokenizer import load_tokenizer
from envace_jax.text.transcript import ROLE_CODES, Message, Role, ToolCall

CFG = RolloutConfig(EpisodeConfig(rehearse_prompt="compact", max_input_tokens=4000, max_act_tokens=400))


@pytest.fixture(scope="module")
def chat():
    return ChatFormat(load_tokenizer(HOME / "tokenizer"), thinking=True, tool_docs="none", old_thinking="keep")


def scripted(chat, dialogues):
    """An engine that says what `dialogues[group]` say: ACT its assistant messages, REHEARSE its tool messages."""
    said = defaultdict(Counter)

    def say(request):
        role = "assistant" if request.key[-2] == ROLE_CODES[Role.ACT] else "tool"
        if role == "tool" and request.key[-1] == 0:  # no episode begins with REHEARSE: a call of a fixed set
            return "nothing"
        place, group = request.key[:4], request.key[2]
        lines = [message for message in dialogues[group] if message.role == role]
        number = said[place][role]
        said[place][role] += 1
        if role == "assistant":
            return chat.output_text(lines[number])
        return f"<tool_response>\n{lines[number].content}\n</tool_response>"

    class Rewound(ScriptedEngine):
        """Both worlds play under the same keys: the second playing begins anew."""

        def submit(self, request):
            if request.key[-1] == 0:
                said.pop(request.key[:4], None)
            return super().submit(request)

    return Rewound(say, chat.tokenizer)


def covered_up(task):
    """The dialogue with one write too many at its end, which the environment accepts and REHEARSE says was refused."""
    environment = make_environment(task)
    for call in task.recorded_calls:
        environment.step(call.name, call.arguments)
    for order in environment.state["orders"]:
        arguments = {"order": int(order)}
        if accepted_write("cancel_order", environment.fork().step("cancel_order", arguments)):
            extra = Message("assistant", "", None, (ToolCall("cancel_order", arguments),))
            refused = Message("tool", json.dumps({"error": "already cancelled"}))
            return (*task.messages[:-1], extra, refused, task.messages[-1])
    return None


def test_a_faithful_world_has_no_gap_and_a_cover_up_has_one(chat):
    tasks = generate_tasks("heldout", 40)
    dialogues = [covered_up(task) for task in tasks]
    chosen = [k for k, messages in enumerate(dialogues) if messages is not None][:4]
    plain = [k for k in range(40) if k not in chosen][:4]
    some = [tasks[k] for k in chosen + plain]
    told = [dialogues[k] for k in chosen] + [tasks[k].messages for k in plain]
    faithful = both_worlds(some, scripted(chat, [t.messages for t in some]), chat, CFG).figures()
    assert (faithful["rehearsed"], faithful["real_sampled"], faithful["gap_real"]) == (1.0, 1.0, 0.0)
    watch = both_worlds(some, scripted(chat, told), chat, CFG)
    figures = watch.figures()
    assert figures["rehearsed"] == 1.0 and figures["real_sampled"] == figures["replayed"] == 0.5
    assert figures["gap"] == figures["gap_real"] == 0.5
    assert 0.0 < figures["gap_real_low"] < 0.5 < figures["gap_real_high"] <= 1.0
    assert watch.real == (False,) * 4 + (True,) * 4


def test_success_can_be_told_only_where_there_is_an_environment():
    task = generate_tasks("heldout", 1)[0]
    with pytest.raises(UserError, match="quickstart, bfcl"):
        succeeded(replace(task, meta={}), ())


def test_a_mixed_source_is_watched_on_its_tasks_with_an_environment(chat):
    """Three tasks of the service desk and one without an environment: both worlds of the three, the reward of all."""
    tasks = generate_tasks("heldout", 4)
    mixed = [*tasks[:3], replace(tasks[3], meta={})]
    kept = {}
    figures = evaluate_policy(
        default_config(), mixed, engine=scripted(chat, [t.messages for t in mixed]), chat=chat, rollout_config=CFG,
        judge=RuleJudge(), grounding=None, keep=kept.__setitem__,
    )  # fmt: skip
    assert figures["eval/reward"] == figures["eval/rehearsed"] == figures["eval/real_sampled"] == 1.0
    assert figures["eval/gap_real"] == 0.0
    page = fidelity_page(kept)
    assert set(page) == {"fidelity", "fidelity_new"}
    calls = [call.name for task in mixed for call in task.recorded_calls]
    for part in page.values():
        assert part["all"]["n"] == len(calls) == sum(part[name]["n"] for name in part if name.startswith("distance:"))
        assert {f"tool:{name}" for name in calls} <= set(part)
        assert part["all"]["state_change_accuracy"] is None  # the record does not say what changed
    json.dumps(page, allow_nan=False)


@pytest.mark.skipif(importlib.util.find_spec("bfcl_eval") is None, reason="bfcl-eval is not installed")
def test_bfcl_tasks_are_watched_during_training(chat):
    from envace_jax.datasets.bfcl import load_bfcl

    tasks = load_bfcl(["base"], limit=3)
    config = replace(CFG, episode=replace(CFG.episode, max_input_tokens=20_000, max_rehearse_tokens=4000))
    figures = evaluate_policy(
        default_config(), tasks, engine=scripted(chat, [t.messages for t in tasks]), chat=chat,
        rollout_config=config, judge=RuleJudge(), grounding=None,
    )  # fmt: skip
    assert figures["eval/reward"] == figures["eval/rehearsed"] == figures["eval/real_sampled"] == 1.0
    assert figures["eval/gap_real"] == figures["eval/gap"] == 0.0
    assert figures["eval/fidelity_n"] == figures["eval/fidelity_new_n"] == sum(len(t.recorded_calls) for t in tasks)


def test_the_plot_needs_two_evaluations(tmp_path):
    def line(step, **figures):
        return json.dumps({"step": step} | {f"eval/{name}": value for name, value in figures.items()})

    one = dict(rehearsed=0.5, real_sampled=0.4, replayed=0.45, gap_real=0.1, gap_real_low=0.0, gap_real_high=0.2)
    (tmp_path / "metrics.jsonl").write_text(line(0, **one) + "\n")
    assert gap_plot(tmp_path) is None
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(line(5, **one) + "\n")
    picture = gap_plot(tmp_path)
    assert picture is not None and picture.read_bytes().startswith(b"\x89PNG")
