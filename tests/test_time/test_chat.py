"""The conversation at the terminal, over an engine that is scripted."""

from __future__ import annotations

import pytest

from envace_jax import cli
from envace_jax.datasets.records import Task
from envace_jax.test_time import chat as command
from envace_jax.test_time.plan import Plan
from envace_jax.text.transcript import Message
from tests.test_time.conftest import CFG, TOOLS, Desk, Policy, answer, call

pytestmark = pytest.mark.quick


def act(text: str, key) -> str:
    turn = text.rsplit("<|im_start|>user\n", 1)[1]
    if "<tool_response>" in turn:
        return "Done."
    return "Hello." if turn.startswith("Hi") else call("cancel_order", order=11)


@pytest.mark.parametrize("real", [True, False])
def test_calls_are_shown_with_who_answered(chat, monkeypatch, real):
    monkeypatch.setattr(command, "make_environment", lambda task: Desk())
    task = Task("t", "desk", (Message("user", "Cancel 11."), Message("assistant", "")), TOOLS, ())
    policy = Policy(chat, act=act, rehearse=lambda text, key: answer({"status": "imagined"}))
    talk = command.Talk(task, policy.engine, chat, CFG, real=real)
    shown: list[str] = []
    said = iter(["Hi.", "", "", "/quit"])
    command.loop(talk, lambda prompt: next(said), shown.append)
    assert shown[0] == "assistant> Hello." and shown[1] == "you> Cancel 11."
    assert shown[2].startswith("  -> ") and '"order": 11' in shown[2]
    expected = '{"status": "cancelled", "seen": "for real"}  [real]' if real else '{"status": "imagined"}  [rehearsed]'
    assert shown[3] == f"  <- {expected}" and shown[4] == "assistant> Done."
    assert shown[5] == "(the task has no further message)"


def test_a_method_shows_what_is_remembered_and_the_end_is_said(chat, monkeypatch):
    monkeypatch.setattr(command, "make_environment", lambda task: Desk())
    task = Task("t", "desk", (Message("user", "Cancel 11."), Message("assistant", "")), TOOLS, ())
    policy = Policy(chat, act=act, remember=lambda text, key: "cancel 11")
    talk = command.Talk(task, policy.engine, chat, CFG, real=True, plan=Plan("parallel", 2))
    lines = talk.say("Cancel 11.")
    assert "rehearsed 2 times, self-evaluations [1.0, 1.0]" in lines[0] and lines[1] == "  (remembers) cancel 11"
    policy.says["act"] = lambda text, key: "long " * 200
    talk.plan = Plan()
    shown: list[str] = []
    command.loop(talk, lambda prompt: "More.", shown.append)
    assert shown[-1] == "(the conversation ended: truncated)"
    assert "OUTPUT_TRUNCATED" in "".join(shown)


def test_the_command_refuses_what_it_cannot_do(capsys):
    assert cli.main(["chat", "--config", "configs/quickstart.py", "--config.model.path=", "--test_time", "best-2"]) == 2
    assert "rehearse-parallel-N" in capsys.readouterr().err
