"""Trackers behind one sink (with stand-ins for their packages), the Prometheus file, profiles, REPRODUCE.md."""

from __future__ import annotations

import json
import types

import pytest
from learning_common import SPEC

from envace_jax.config import UserError
from envace_jax.learning.looking import (
    CompileLog,
    memory,
    peak_flops,
    profiled,
    reproduce_page,
    telling,
    trajectory_text,
    utilisation,
)
from envace_jax.learning.trackers import Trackers
from envace_jax.planning.formulas import causal_pairs, train_flops
from envace_jax.text.transcript import AssistantOutput, Observation, Step, Turn


class Recorder:
    """Writes down every call, whatever the name."""

    def __init__(self):
        self.calls = []
        self.util = types.SimpleNamespace(generate_id=lambda: "abc")

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return types.SimpleNamespace(
                log=lambda *a, **k: self.calls.append(("log", a, k)),
                finish=lambda: self.calls.append(("finish", (), {})),
                info=types.SimpleNamespace(run_id="r1"),
            )

        return call


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "opens", "logs", "closes"),
    [
        ("wandb", "init", "log", "finish"),
        ("trackio", "init", "log", "finish"),
        ("mlflow", "start_run", "log_metrics", "end_run"),
    ],
)
def test_each_tracker_gets_every_step_in_one_run(tmp_path, name, opens, logs, closes):
    calls = []
    for step in (1, 2):  # the run is taken up again
        package = Recorder()
        trackers = Trackers((name,), tmp_path, {"seed": 0}, print, module=lambda _, package=package: package)
        trackers.log(step, {"reward/mean": 0.5, "kl": float("nan")})
        trackers.close()
        calls.append(package.calls)
    for step, made in zip((1, 2), calls):
        log = next(c for c in made if c[0] == logs)
        assert log[1][0] == {"reward/mean": 0.5} and log[2]["step"] == step
        assert made[-1][0] == closes
    first, second = ([c for c in made if c[0] == opens][0][2] for made in calls)
    if name == "mlflow":
        assert "run_id" not in first and second["run_id"] == "r1"
    else:
        key = "id" if name == "wandb" else "name"
        assert first[key] == second[key] and second["resume"] == "allow"


def test_tracker_that_fails_is_said_once(tmp_path):
    said = []

    class Away(Recorder):
        def init(self, **_):
            def away(*_, **__):
                raise ConnectionError("no route")

            return types.SimpleNamespace(log=away, finish=away)

    trackers = Trackers(("wandb",), tmp_path, {}, said.append, module=lambda _: Away())
    for step in range(3):
        trackers.log(step, {"loss": 1.0})
    trackers.close()
    assert len(said) == 1 and "no route" in said[0]


def test_tracker_that_is_not_installed_is_named(tmp_path):
    def missing(name):
        raise ImportError(name)

    with pytest.raises(UserError, match=r"pip install -e '\.\[wandb\]'"):
        Trackers(("wandb",), tmp_path, {}, print, module=missing)


def test_prometheus_file_is_the_last_step(tmp_path):
    from prometheus_client.parser import text_string_to_metric_families

    trackers = Trackers(("prometheus",), tmp_path / 'a"b', {}, print)
    (tmp_path / 'a"b').mkdir()
    trackers.log(1, {"reward/mean": 0.5})
    trackers.log(2, {"reward/mean": 0.75, "finish/act/stop": 1.0})
    families = {f.name: f.samples for f in text_string_to_metric_families((tmp_path / 'a"b/metrics.prom').read_text())}
    assert families["envace_reward_mean"][0].value == 0.75
    assert families["envace_step"][0].value == 2.0
    assert families["envace_finish_act_stop"][0].labels == {"run": 'a"b'}


def test_profiled_steps():
    assert list(profiled("")) == [] and list(profiled("3")) == [3] and list(profiled("3-5")) == [3, 4, 5]
    for text in ("0", "5-3", "a", "1-", "1,2"):
        with pytest.raises(UserError, match="profile_steps"):
            profiled(text)


def test_utilisation_is_the_formulas():
    rows = [(100, 40), (50, 10)]
    got = utilisation(SPEC, rows, (300.0, 50.0), {"learn": 2.0, "rollout": 1.0}, 4, 1e12)
    want = train_flops(SPEC, 150, causal_pairs(100) + causal_pairs(50), 50)
    assert got["model_tflops/learn"] == pytest.approx(want / 1e12)
    assert got["mfu/learn"] == pytest.approx(want / 2.0 / 4e12)
    assert "mfu/learn" not in utilisation(SPEC, rows, (1.0, 1.0), {"learn": 1.0, "rollout": 1.0}, 1, None)
    assert peak_flops("TPU v5 lite") == 197e12 and peak_flops("TPU v5p") == 459e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12 and peak_flops("cpu") is None
    assert memory()["memory/host_gib"] > 0


def test_every_program_is_logged_once(tmp_path):
    log = CompileLog(tmp_path / "compile.jsonl")
    log.note(0, {"learner": [("update/8/", 1.23456)], "engine": [("decode/4/64", 2.0)]})
    log.note(1, {"learner": [("update/8/", 1.23456)], "engine": [("decode/4/64", 2.0), ("decode/4/64", 3.0)]})
    log.note(2, {"engine": [("decode/4/64", 2.0), ("decode/4/64", 3.0)]})
    lines = [json.loads(line) for line in (tmp_path / "compile.jsonl").read_text().splitlines()]
    assert [(x["step"], x["owner"], x["program"], x["seconds"]) for x in lines] == [
        (0, "learner", "update/8/", 1.235),
        (0, "engine", "decode/4/64", 2.0),
        (1, "engine", "decode/4/64", 3.0),
    ]


def played(group, reward, **more):
    said = AssistantOutput(raw="<b>a</b>\n# b\x1b[2J", thinking=None, reply="", calls=())
    step = Step(said, (Observation('{"x": 1}', "rehearsed"), Observation("no", "error", "UNKNOWN_TOOL")))
    fields = dict(task_id="t", member=3, end_reason="done", transcript=(Turn("hello", (step,)),))
    return types.SimpleNamespace(group=group, reward=reward, **(fields | more))


def test_telling_trajectories():
    batch = [played(0, 1.0), played(0, 1.0), played(1, None), played(1, 0.25), played(1, 0.75), played(1, 0.5)]
    assert telling(batch) == {"best": batch[4], "worst": batch[3]}
    assert telling(batch[:3]) == {"first": batch[0]} and telling([]) == {}


def test_a_trajectory_as_text_is_a_block():
    """Four spaces before every line: Markdown shows it as it is, whatever a model wrote."""
    text = trajectory_text(played(0, 0.25))
    want = ["task t, member 3: reward 0.250, end done", "[user]", "hello", "[act]", "<b>a</b>", "# b\ufffd[2J"]
    want += ["[rehearsed]", '{"x": 1}', "[UNKNOWN_TOOL]", "no"]
    assert text.split("\n") == [f"    {line}" for line in want]
    long = trajectory_text(played(0, None), limit=50)
    assert "reward none" in long and long.endswith("\n    …") and len(long) < 80


def test_the_page_that_repeats_a_run():
    start = {
        "time": "2026-01-01",
        "command": ["__main__.py", "train", "--config", "configs/quickstart.py", "--config.run_dir=a b"],
        "python": "3.11",
        "packages": {"jax": "0.10.2"},
        "platform": "Linux",
        "processes": 2,
        "devices": ["cpu"],
        "device_count": 8,
        "git": {"commit": "0123456789abcdef", "changed_files": 2},
    }
    later = start | {"hosts": ["tpu-0", "tpu-1"], "mesh": "fsdp=8"}
    page = reproduce_page({"seed": 3, "run_dir": "runs/x", "odd": "a|b"}, [start, later])
    assert "| 2026-01-01 | tpu-0, tpu-1 | 2 | 8 | fsdp=8 | 0123456789ab |" in page
    assert "python -m envace_jax train --config configs/quickstart.py '--config.run_dir=a b'" in page
    assert "git checkout 0123456789abcdef" in page and "2 files differed" in page
    assert "| `odd` | `a\\|b` |" in page and page.count("| 2026-01-01 |") == 2 and "fsdp=8" in page
