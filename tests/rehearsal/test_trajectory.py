"""The JSON line: everything comes back, broken files say where."""

from __future__ import annotations

import json
import math

import pytest

from envace_jax.config import UserError
from envace_jax.learning.packing import train_rows
from envace_jax.rehearsal.trajectory import Trajectory, TrajectoryWriter, read_trajectories
from envace_jax.text.transcript import Role
from tests.rehearsal.helpers import ACT_SCRIPT, call_text, make_task, play

pytestmark = pytest.mark.quick


def test_a_line_carries_everything(chat, tmp_path):
    act = (call_text("fly"), *ACT_SCRIPT)
    played = play(make_task(), chat, act)
    path = tmp_path / "t.jsonl"
    with TrajectoryWriter(path) as writer:
        writer.write(played, step=3)
        writer.write(played, step=4)
    assert list(read_trajectories(path)) == [played, played]
    line = json.loads(path.read_text().splitlines()[0])
    assert line["step"] == 3
    for name in ("task", "segments", "transcript", "verdicts", "reward", "end_reason", "error_codes", "rows"):
        assert name in line
    assert set(line["segments"][0]) >= {"role", "text", "ids", "logprobs", "finish"}
    observations = [o for turn in line["transcript"] for step in turn["steps"] for o in step["observations"]]
    assert [o["source"] for o in observations] == ["error", "rehearsed", "rehearsed", "rehearsed"]
    assert line["task"]["uuid"] == "orders-1"


def test_nan_and_surrogates_are_written_as_json(chat, tmp_path):
    spoken = 'caf\u00e9 \u2028 <tool_call>\n{"name": "get_order", "arguments": {"order_id": "\\ud800"}}\n</tool_call>'
    played = play(make_task(), chat, (spoken, "bye"), ("<tool_response>{}</tool_response>",))
    segment = played.segments[0]
    broken = Trajectory(
        **{
            **vars(played),
            "segments": (type(segment)(**{**vars(segment), "logprobs": (math.nan,) * len(segment.ids)}),),
        }
    )
    with TrajectoryWriter(tmp_path / "t.jsonl") as writer:
        writer.write(played)
        writer.write(broken)
    whole, nan = read_trajectories(tmp_path / "t.jsonl")
    assert whole == played
    assert all(math.isnan(value) for value in nan.segments[0].logprobs)


def test_a_killed_run_loses_its_last_line_only(chat, tmp_path):
    path = tmp_path / "t.jsonl"
    with TrajectoryWriter(path) as writer:
        writer.write(play(make_task(), chat))
    whole = path.read_text()
    path.write_text(whole + whole[:200])
    assert len(list(read_trajectories(path))) == 1
    path.write_text(whole[:200] + "\n" + whole)
    with pytest.raises(UserError, match="line 1: is not JSON"):
        list(read_trajectories(path))
    path.write_text("{}\n" + whole)
    with pytest.raises(UserError, match="line 1: not a trajectory"):
        list(read_trajectories(path))
    with pytest.raises(UserError, match="no such file"):
        list(read_trajectories(tmp_path / "none.jsonl"))


def test_what_is_no_trajectory_is_named(chat, tmp_path):
    path = tmp_path / "t.jsonl"
    whole = json.dumps(play(make_task(), chat).to_json())
    nested = whole.replace('"verdicts": ', f'"verdicts": {"[" * 990 + "]" * 990}, "before": ')
    role = json.loads(whole)
    role["segments"][0]["role"] = "oracle"
    number = json.loads(whole) | {"group": "x"}
    for line, words in (
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"[" * 100_000, "is nested too deeply"),
        (nested.encode(), "not a trajectory record|is nested too deeply"),
        (json.dumps(role).encode(), "not a trajectory record.*'oracle'"),
        (json.dumps(number).encode(), "not a trajectory record"),
        (b"[1]", "not a trajectory record"),
    ):
        path.write_bytes(line + b"\n" + whole.encode() + b"\n")
        with pytest.raises(UserError, match=f"line 1: ({words})"):
            list(read_trajectories(path))


def test_the_learner_takes_it(chat):
    """Its rows give training rows: every sampled id once, with the advantage of its role."""
    played = play(make_task(), chat)
    rows = train_rows(played, {Role.ACT: 0.5, Role.REHEARSE: -0.5})
    assert sum(int(row.sampled.sum()) for row in rows) == sum(len(s.ids) for s in played.segments)
    assert [float(row.advantages[row.sampled][0]) for row in rows] == [0.5, -0.5, -0.5, -0.5]
