"""Rehearsals, memory, the committed run and its controls, over an engine that is scripted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from envace_jax.datasets.records import Task
from envace_jax.rehearsal.episode import Setting
from envace_jax.rehearsal.flow import Voice, begin, real_run, rehearsal, run_flows
from envace_jax.test_time.commit import Committed
from envace_jax.test_time.memory import Reviewer
from envace_jax.test_time.plan import Plan, read_plan
from envace_jax.text.transcript import Message
from tests.test_time.conftest import CFG, TOOLS, Desk, Policy, answer, call

pytestmark = pytest.mark.quick


def task(*users: str) -> Task:
    messages = tuple(Message("user", text) for text in users or ("Cancel 11.",))
    return Task("t", "desk", messages, TOOLS, ())


class Counting:
    """An environment that counts its own steps and those of its forks."""

    def __init__(self, log: list[str], inner: Desk | None = None, name: str = "real"):
        self.log, self.inner, self.name, self.forks = log, inner or Desk(), name, 0

    def reset(self, task):
        self.inner.reset(task)

    def step(self, name, arguments):
        self.log.append(f"{self.name}:{name}")
        return self.inner.step(name, arguments)

    def fork(self):
        self.forks += 1
        return Counting(self.log, self.inner.fork(), f"{self.name}/{self.forks - 1}")

    def state_hash(self):
        return self.inner.state_hash()


def cancel_once(text: str, key) -> str:
    """Cancels 11 in the first output of a turn, then says what came out."""
    return "11 is cancelled." if text.rstrip().count("<tool_response>") else call("cancel_order", order=11)


def commit(policy: Policy, plan: str | Plan, *, what: Task | None = None, cfg=CFG, **more):
    log: list[str] = []
    plan = read_plan(plan) if isinstance(plan, str) else plan
    method = Committed(policy.chat, replace(cfg, checks=("format",)), cfg, plan, make=lambda t: Counting(log), **more)
    ((_, (trajectory, counted)),) = run_flows([("only", method(what or task(), Voice((0,))))], policy.engine)
    return trajectory, counted, log


def test_names_are_read_and_written():
    for name in ("none", "rehearse-parallel-2", "rehearse-sequential-3", "rehearse-stepwise-1", "best-4", "think-1"):
        assert read_plan(name).name == name
    for name in ("rehearse", "rehearse-parallel-0", "rehearse-parallel-17", "best-x", "parallel-2", "best-2 "):
        with pytest.raises(ValueError, match="rehearse-parallel-N|expected 1 to 16"):
            read_plan(name)


def test_without_a_method_it_is_one_run(chat):
    policy = Policy(chat, act=cancel_once)
    trajectory, counted, log = commit(policy, "none")
    assert log == ["real:cancel_order"]
    assert [kind for kind, _, _ in policy.prompts] == ["act", "act"]
    assert counted["tokens"] == sum(len(segment.ids) for segment in trajectory.segments)
    assert trajectory.transcript[0].steps[0].observations[0].source == "real"


@pytest.mark.parametrize("n", [1, 2, 3])
def test_parallel_rehearsals_never_reach_the_environment(chat, n):
    policy = Policy(chat, act=cancel_once, remember=lambda text, key: "cancel 11 once")
    trajectory, counted, log = commit(policy, f"rehearse-parallel-{n}")
    assert log == ["real:cancel_order"]  # the committed run's one call
    assert policy.texts("rehearse") and len(policy.texts("evaluate")) == n and len(policy.texts("remember")) == 1
    # the memory stands in the committed run's prompt and in no rehearsal's
    with_memory = [text for text in policy.texts("act") if "memory\ncancel 11 once" in text]
    assert len(with_memory) == 2 and len(policy.texts("act")) == 2 * n + 2
    assert counted["memories"] == ["cancel 11 once"]
    assert counted["evaluations"] == [1.0] * n
    # every token is counted once: what the engine sampled is what is said to have been spent
    sampled = sum(
        len(chat.tokenizer.encode(policy.says[kind](text, request.key))) + 1 for kind, text, request in policy.prompts
    )
    assert counted["tokens"] == sampled
    assert trajectory.transcript[0].user == "Cancel 11."


def test_rehearsals_side_by_side_sample_with_keys_of_their_own(chat):
    policy = Policy(chat, act=cancel_once)
    commit(policy, "rehearse-parallel-3")
    keys = [request.key for _, _, request in policy.prompts]
    assert len(set(keys)) == len(keys)


def test_sequential_rehearsals_see_the_earlier_ones(chat):
    policy = Policy(chat, act=cancel_once, evaluate=lambda text, key: "bad\nlook first")
    _, counted, log = commit(policy, "rehearse-sequential-2")
    assert log == ["real:cancel_order"]
    first, second = policy.texts("act")[0], policy.texts("act")[2]
    assert "memory" not in first
    assert "memory\nCancel 11." in second and "bad\nlook first" in second
    # what is remembered is told without the notes that a rehearsal was given
    assert policy.texts("remember")[0].count("bad\nlook first") == 2
    assert "memory" not in policy.texts("evaluate")[1]
    assert counted["evaluations"] == [0.0, 0.0]


def test_every_user_turn_is_rehearsed_from_the_real_history(chat):
    def act(text, key):
        turn = text.rsplit("<|im_start|>user\n", 1)[1]
        if "tool_response" in turn:
            return "Done."
        return call("cancel_order", order=11) if turn.startswith("Cancel") else call("get_order", order=11)

    policy = Policy(chat, act=act, rehearse=lambda text, key: answer({"status": "imagined"}))
    trajectory, counted, log = commit(policy, "rehearse-parallel-2", what=task("Cancel 11.", "Status of 11?"))
    assert log == ["real:cancel_order", "real:get_order"]
    assert len(counted["memories"]) == 2 and len(policy.texts("evaluate")) == 4
    late = policy.texts("rehearse")[-1]
    assert '"seen": "for real"' in late  # the real answer of the first turn is part of what the second rehearsal knows
    assert [turn.user for turn in trajectory.transcript] == ["Cancel 11.", "Status of 11?"]
    once, counted_once, _ = commit(policy, Plan("parallel", 2, every_turn=False), what=task("Cancel 11.", "Status?"))
    assert len(counted_once["memories"]) == 1


def test_an_unread_evaluation_is_neither_good_nor_bad(chat):
    policy = Policy(chat, act=cancel_once, evaluate=lambda text, key: "hm", remember=lambda text, key: "")
    _, counted, _ = commit(policy, "rehearse-parallel-2")
    assert counted["evaluations"] == [None, None] and counted["evaluations_unread"] == 2
    assert not any("memory" in text for text in policy.texts("act"))  # nothing remembered, nothing attached


def test_a_thought_that_never_ends_is_no_memory_and_no_evaluation(chat):
    thinking = replace(chat, thinking=True)
    thought = "<think>\nThe user wants 11 cancelled, so first"
    policy = Policy(thinking, act=cancel_once, evaluate=lambda *_: "<think>\ngood", remember=lambda *_: thought)
    _, counted, log = commit(policy, "rehearse-parallel-2")
    assert counted["memories"] == [""] and counted["evaluations_unread"] == 2
    assert log == ["real:cancel_order"] and not any("memory\n" in text for text in policy.texts("act"))
    ended = Policy(
        thinking,
        act=cancel_once,
        evaluate=lambda *_: "<think>\nbad at first\n</think>\n\ngood",
        remember=lambda *_: f"{thought}\n</think>\n\ncancel 11",
    )
    _, counted, _ = commit(ended, "rehearse-sequential-2")
    assert counted["memories"] == ["cancel 11"] and counted["evaluations"] == [1.0, 1.0]
    told = Reviewer(thinking, compact=False, max_input_tokens=2000)
    assert told.read_evaluation('<think>\nsay {"score": 1}').score is None
    assert told.read_evaluation('<think>\n{"score": 1}\n</think>\n{"score": 0}').score == 0.0


def test_the_memory_keeps_its_budget(chat):
    policy = Policy(chat, act=cancel_once, remember=lambda text, key: "cancel it " * 50)
    _, counted, _ = commit(policy, Plan("parallel", 1, memory_tokens=10))
    assert len(chat.tokenizer.encode_data(counted["memories"][0])) <= 10
    assert counted["tokens_private"]["memory"] == 10


def test_rehearsing_and_acting_policies_may_differ(chat):
    policy = Policy(chat, act=cancel_once)
    commit(policy, Plan("parallel", 2, rehearser="other"))
    used = {(request.param_set, request.key[1]) for _, _, request in policy.prompts}
    assert used == {("other", 1), ("policy", 0)}  # private flows lie under 1, the committed run under 0


def test_the_user_may_be_rehearsed(chat):
    said = iter(["And 12?", "DONE"])

    def act(text, key):
        if "You play the user" in text:
            return next(said)
        return cancel_once(text, key)

    policy = Policy(chat, act=act)
    _, counted, log = commit(policy, Plan("parallel", 1, user="rehearsed"))
    assert "And 12?" in policy.texts("evaluate")[0]
    assert counted["tokens_private"]["imagined user"] > 0
    assert log == ["real:cancel_order"]


def test_stepwise_rehearses_each_call_before_it_is_made(chat):
    def act(text, key):
        if "<tool_response>" in text:
            return "Done."
        return call("cancel_order", order=12 if key[-3] == 0 else 11)  # the first candidate is the wrong one

    policy = Policy(
        chat,
        act=act,
        rehearse=lambda text, key: answer({"error": "already shipped"} if '"order": 12' in text else {"status": "ok"}),
        evaluate=lambda text, key: "bad" if "already shipped" in text else "good",
    )
    trajectory, counted, log = commit(policy, "rehearse-stepwise-3")
    assert log == ["real:cancel_order"]
    assert trajectory.transcript[0].steps[0].output.calls[0].arguments == {"order": 11}
    assert counted["tokens_private"]["candidates"] > 0 and len(policy.texts("evaluate")) == 2


def test_best_of_n_keeps_the_candidate_evaluated_best(chat):
    def act(text, key):
        if "<tool_response>" in text:
            return "Done."
        return call("cancel_order", order=(12, 12, 11)[key[-3]])

    policy = Policy(chat, act=act, evaluate=lambda text, key: "good" if '"order": 11' in text else "bad")
    trajectory, _, log = commit(policy, "best-3")
    assert log == ["real:cancel_order"] and not policy.texts("rehearse")
    assert trajectory.transcript[0].steps[0].output.calls[0].arguments == {"order": 11}


def test_the_vote_keeps_the_most_frequent_action(chat):
    def act(text, key):
        if "<tool_response>" in text:
            return ("Done.", "It is done.", call("get_order", order=11))[key[-3]]
        return call("cancel_order", order=(12, 11, 11)[key[-3]])

    policy = Policy(chat, act=act)
    trajectory, counted, log = commit(policy, "vote-3")
    assert log == ["real:cancel_order"] and {kind for kind, _, _ in policy.prompts} == {"act"}
    assert trajectory.transcript[0].steps[0].output.calls[0].arguments == {"order": 11}
    assert trajectory.transcript[0].steps[1].output.reply == "Done."
    assert counted["tokens_private"].keys() == {"candidates"}


def test_a_budget_decides_how_many_candidates(chat):
    policy = Policy(chat, act=cancel_once)
    _, plain, _ = commit(policy, "none")
    tokens = plain["tokens"]
    for factor in (1, 3, 6):
        _, counted, _ = commit(policy, Plan("vote", 2, budget=(factor * tokens, 2)))
        assert factor * tokens <= counted["tokens"] < (factor + 1.5) * tokens


def test_trials_run_in_forks_and_the_best_is_kept(chat):
    def act(text, key):
        if "<tool_response>" in text.rsplit("<|im_start|>user", 1)[1]:
            return "Done."
        return call("cancel_order", order=(12, 11)[key[3]])

    policy = Policy(chat, act=act, evaluate=lambda text, key: "bad" if "already shipped" in text else "good")
    trajectory, counted, log = commit(policy, "trials-2", what=task("Cancel 11.", "Again."))
    assert log == ["real/0:cancel_order", "real/1:cancel_order", "real/1/0:cancel_order", "real/1/1:cancel_order"]
    assert trajectory.transcript[0].steps[0].output.calls[0].arguments == {"order": 11}
    # in the second turn both trials are refused: 11 is cancelled already, and 12 shipped
    assert "error" in json.loads(trajectory.transcript[1].steps[0].observations[0].text)
    assert counted["tokens_private"]["trials"] > 0


def test_a_budget_decides_how_many_trials(chat):
    policy = Policy(chat, act=lambda text, key: cancel_once(text.rsplit("<|im_start|>user", 1)[1], key))
    what = task("Cancel 11.", "Again.")
    _, one, log = commit(policy, "trials-1", what=what)
    assert len(log) == 2
    for factor in (1, 3, 6):
        _, counted, log = commit(policy, Plan("trials", 2, budget=(factor * one["tokens"], 4)), what=what)
        assert factor * one["tokens"] <= counted["tokens"] < (factor + 1) * one["tokens"]
        assert sum(step.startswith("real/") and step.count("/") == 1 for step in log) == factor  # half of it a turn
    # acts of the budget that never come: the last turn gets all that is left
    _, counted, _ = commit(policy, Plan("trials", 2, budget=(4 * one["tokens"], 400)), what=what)
    assert 4 * one["tokens"] <= counted["tokens"] < 5 * one["tokens"]
    # nothing but the bound on their number ends trials that cost nothing to speak of
    _, _, log = commit(policy, Plan("trials", 2, budget=(10**6, 1)))
    assert len(log) == 16


def test_thinking_gets_what_is_left_of_a_budget(chat):
    policy = Policy(chat, act=cancel_once)
    _, counted, _ = commit(policy, Plan("think", 1, budget=(1000, 3)))
    first, second = (request.params.max_tokens for _, _, request in policy.prompts)
    assert first == 1000 and second == 1000 - len(chat.tokenizer.encode(cancel_once("", None))) - 1
    policy.prompts.clear()
    commit(policy, Plan("think", 1), budgets={"t": (10, 3)})
    assert {request.params.max_tokens for _, _, request in policy.prompts} == {CFG.max_act_tokens}


def test_thinking_gets_a_longer_limit_and_an_open_block(chat):
    policy = Policy(chat, act=cancel_once)
    commit(policy, "think-2")
    requests = [request for _, _, request in policy.prompts]
    assert {request.params.max_tokens for request in requests} == {3 * CFG.max_act_tokens}
    assert not policy.texts("act")[0].endswith("</think>\n\n")


def test_flows_hold_to_their_setting(chat):
    inside, outside = Setting.make(chat, CFG), Setting.make(chat, CFG, outside=True)
    with pytest.raises(ValueError, match="no rehearsal"):
        next(rehearsal(begin(outside, task(), "Hi."), Voice()))
    with pytest.raises(ValueError, match="outside observations"):
        next(real_run(begin(inside, task(), "Hi."), Voice(), Counting([])))
