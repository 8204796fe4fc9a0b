"""Figures of a step, red flags, files that continue exactly, text fit for a terminal."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from learning_common import FakeRow, FakeSegment, FakeTrajectory

from envace_jax.config import UserError
from envace_jax.learning.metrics import (
    Display,
    JsonlFile,
    Sink,
    clean,
    read_metrics,
    red_flags,
    trajectory_metrics,
)
from envace_jax.text.transcript import AssistantOutput, Role, Step, Turn

pytestmark = pytest.mark.quick


@dataclasses.dataclass(frozen=True)
class Full(FakeTrajectory):
    transcript: tuple = ()
    masked_cause: str | None = None
    end_reason: str = "done"
    error_codes: tuple = ()
    counters: dict = dataclasses.field(default_factory=dict)


def trajectory(group, reward, acts, rehearsals, **more) -> Full:
    segments = tuple(
        FakeSegment(role, k, tuple(range(n)), finish="length" if n > 5 else "stop")
        for k, (role, n) in enumerate([(Role.ACT, n) for n in acts] + [(Role.REHEARSE, n) for n in rehearsals])
    )
    rows = (FakeRow(Role.ACT, tuple(range(10)), (False,) * 10, (0.0,) * 10),)
    return Full(group, reward, segments, rows, **more)


def test_step_figures():
    output = AssistantOutput(raw="x", thinking=None, reply="x", calls=())
    bad = dataclasses.replace(output, error_code="JSON")
    turn = Turn("hi", (Step(output, ()), Step(bad, ())))
    got = trajectory_metrics(
        [
            trajectory(0, 1.0, [2, 4], [3], transcript=(turn,), counters={"rehearsed": 2}),
            trajectory(0, 0.0, [6], [], error_codes=("act:JSON",), end_reason="cut"),
            trajectory(1, None, [1], [1], masked_cause="judge:timeout"),
            trajectory(1, 0.5, [1], [1]),
        ],
        [{Role.ACT: 0.5, Role.REHEARSE: 0.0}, {Role.ACT: -0.5}, {}, {}],
    )
    assert got["reward/mean"] == pytest.approx(0.5)
    assert got["reward/act"] == pytest.approx((1 + 1 + 0 + 0.5) / 4)
    assert got["reward/rehearse"] == pytest.approx((1 + 0.5) / 2)
    assert got["masked/share"] == 0.25 and got["masked/judge:timeout"] == 1
    assert got["groups/without_spread"] == 0.5
    assert got["length/act"] == pytest.approx(14 / 5) and got["length_max/act"] == 6
    assert got["finish/act/length"] == pytest.approx(0.2)
    assert got["end/cut"] == 0.25 and got["error/act:JSON"] == 1
    assert got["advantage_abs/act"] == 0.5
    assert got["act/parsed"] == 0.5
    assert got["count/rehearsed"] == 0.5


def test_red_flags_say_what_to_try():
    assert red_flags({"groups/without_spread": 0.2, "masked/share": 0.0}) == []
    bad = {
        "groups/without_spread": 0.9,
        "masked/share": 0.5,
        "finish/act/length": 0.4,
        "finish/rehearse/length": 0.4,
        "kl": 2.0,
        "exp_drift_max": 50.0,
        "entropy": 0.001,
        "length/act": 100.0,
        "length_first/act": 10.0,
        "grad_norm": 1e3,
        "clipped": 0.9,
        "nonfinite": 1.0,
    }
    lines = red_flags(bad)
    assert len(lines) == 11
    assert "90%" in lines[0] and "learning.group_size" in lines[0]


def test_clean_text():
    assert clean("a\x1b[2J\u202eb\ud800\u0007") == "a\ufffd[2J\ufffdb\ufffd\ufffd"
    assert clean("x" * 500).endswith("…") and len(clean("x" * 500)) == 201


def test_jsonl_is_cut_to_the_checkpoint(tmp_path):
    path = tmp_path / "m.jsonl"
    file = JsonlFile(path)
    file.write({"step": 1})
    length = file.sync()
    file.write({"step": 2})
    file.close()
    with path.open("a") as torn:
        torn.write('{"step": 3, "re')
    file = JsonlFile(path, length)
    file.write({"step": 2, "again": True})
    file.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1}, {"step": 2, "again": True}]
    with pytest.raises(UserError, match="have been lost.*--config.overwrite=true"):
        JsonlFile(path, 10_000)


def test_sink_writes_json_and_tensorboard(tmp_path):
    sink = Sink(tmp_path, tensorboard=True)
    sink.write(1, {"a": 1.0, "b": float("nan")})
    sink.text(1, "trajectory", "hello")
    sink.close()
    assert read_metrics(tmp_path) == [{"step": 1, "a": 1.0, "b": None}]
    assert any((tmp_path / "tensorboard").iterdir())


def test_display_prints_plain_lines_where_there_is_no_terminal():
    out = io.StringIO()
    display = Display(3, file=out)
    display.step(1, {"reward/mean": 0.5, "reward/act": 0.25})
    display.say("bad \x1b[31m text")
    display.close()
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("step 1/3 reward 0.500 (act 0.250")
    assert "\x1b" not in out.getvalue()


def test_display_shows_a_bar_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    display = Display(3, file=out)
    display.step(2, {"reward/mean": 0.75})
    display.phase("evaluating")
    display.say("a line")
    display.close()
    assert "a line" in out.getvalue()
