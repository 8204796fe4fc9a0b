"""`show --trajectories`: the advantages are those that the trainer dealt."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from envace_jax.config import UserError, default_config
from envace_jax.rehearsal.trajectory import TrajectoryWriter
from envace_jax.report.show import dealt, recorded
from envace_jax.text.chat import ChatFormat
from envace_jax.text.tokenizer import load_tokenizer
from tests.rehearsal.helpers import REHEARSE_SCRIPT, call_text, make_task, play

ACTS = (call_text("get_order", order_id="A1"), call_text("cancel_order", order_id="A1"), "bye", "bye")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Two steps of one task's group of two: rewards 1 and 0 with 3 and 2 ACT outputs, then 1 and 1."""
    chat = ChatFormat(load_tokenizer("data/quickstart/tokenizer"), thinking=False, tool_docs="none")
    long = play(make_task(), chat, ACTS, REHEARSE_SCRIPT)
    short = play(make_task(), chat, ACTS[1:], REHEARSE_SCRIPT)
    path = tmp_path_factory.mktemp("show") / "trajectories.jsonl"
    with TrajectoryWriter(path) as writer:
        for step, rewards in enumerate(((1.0, 0.0), (1.0, 1.0))):
            for member, (trajectory, reward) in enumerate(zip((long, short), rewards)):
                played = dataclasses.replace(trajectory, member=member, reward=reward, masked_cause=None)
                writer.write(played, step=step)
    outputs = [[sum(s.role.value == role for s in t.segments) for role in ("act", "rehearse")] for t in (long, short)]
    return path, make_task().uuid, outputs


def asked(file, step=None, member=0, **changes):
    path, task, _ = file
    cfg = default_config()
    with cfg.unlocked():
        cfg.learning.update(changes)
    return recorded(cfg, argparse.Namespace(trajectories=path, task=task, member=member, step=step, held_out=False))


def test_each_step_is_a_group_of_its_own(file):
    _, _, ((acts, rehearsals), (other_acts, other_rehearsals)) = file
    shown, rows = asked(file, step=0)
    act = 1 - acts / (acts + other_acts)  # A = R - mean over the outputs of the role
    rehearse = 1 - rehearsals / (rehearsals + other_rehearsals)
    assert dealt(shown, rows) == f"act {act:+.3f}; rehearse {rehearse:+.3f}"
    for row, paid in zip(shown.rows, rows):
        assert [bool(x) for x in paid[: len(row.ids)]] == list(row.sampled)
    shown, rows = asked(file)  # the last step: both got 1
    assert dealt(shown, rows) == "act +0.000; rehearse +0.000"


def test_the_arm_and_the_shaping_are_the_run_s(file):
    _, _, (one, two) = file
    shown, rows = asked(file, step=0, arm="single_baseline")
    both = 1 - sum(one) / (sum(one) + sum(two))
    assert dealt(shown, rows) == f"act {both:+.3f}; rehearse {both:+.3f}"


def test_a_folder_and_what_is_in_it(file):
    path, task, _ = file
    shown, _ = asked((path.parent, task, None), step=0)
    assert shown.task_id == task
    with pytest.raises(UserError, match=f"there are 1 tasks \\({task}"):
        asked((path.parent, "another", None))
    with pytest.raises(UserError, match="no trajectory of task 'quickstart-train"):  # a number is that of the split
        asked((path, "0", None))


def test_what_is_not_there_is_said(file):
    for step, member in ((5, 0), (0, 7)):
        with pytest.raises(UserError, match="no trajectory of task"):
            asked(file, step=step, member=member)
