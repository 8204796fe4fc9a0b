"""The loop: what a run writes, and that a killed run ends as an unbroken one."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from learning_common import SPEC, rewarded, tiny_config, toy_engine

from envace_jax.config import UserError
from envace_jax.distributed import Processes
from envace_jax.learning import setup, trainer
from envace_jax.learning.advantage import output_advantages, role_advantages
from envace_jax.learning.checkpoint import Checkpoints
from envace_jax.learning.metrics import read_metrics
from envace_jax.learning.shaping import Shaping, additions
from envace_jax.rehearsal.trajectory import read_trajectories
from envace_jax.text.transcript import Role
from envace_jax.worldbook.records import ActionSpec, TransitionRule
from envace_jax.worldbook.store import Worldbook, save_worldbook

pytestmark = pytest.mark.usefixtures("toy_training")
ROOT = Path(__file__).resolve().parents[2]
MEASURED = ("time/", "tokens_per_s", "engine/", "memory/", "mfu/", "host_share")  # of the machine, not of the run
CHILD = Path(__file__).with_name("trainer_child.py")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The folder of a run of four steps that nothing disturbed."""
    before = os.getcwd()
    os.chdir(ROOT)
    patch = pytest.MonkeyPatch()
    patch.setattr(trainer, "rollout", rewarded(trainer.rollout))
    patch.setattr(setup, "make_engine", toy_engine)
    folder = tmp_path_factory.mktemp("runs") / "unbroken"
    assert trainer.run_train(tiny_config(folder)) == 0
    patch.undo()
    os.chdir(before)
    return folder


def final_state(folder: Path):
    checkpoints = Checkpoints(folder / "checkpoints")
    step = checkpoints.latest()
    position = checkpoints.read_meta(step)
    from envace_jax.learning.step import UpdateConfig, make_update
    from envace_jax.model.qwen3 import init_params
    from envace_jax.model.spec import Qwen3Spec

    spec = Qwen3Spec.from_hf_config(position["model"])
    like = make_update(spec, UpdateConfig()).init(init_params(spec, jax.random.key(0)))
    return step, position, checkpoints.restore(step, {"policy": like})["policy"]


def same_end(a: Path, b: Path) -> None:
    step_a, position_a, state_a = final_state(a)
    step_b, position_b, state_b = final_state(b)
    assert step_a == step_b
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), state_a, state_b)
    for name in ("data", "totals", "bad_steps", "seed", "step"):
        assert position_a[name] == position_b[name], name
    assert (a / "trajectories.jsonl").read_bytes() == (b / "trajectories.jsonl").read_bytes()
    timeless = [[{k: v for k, v in r.items() if not k.startswith(MEASURED)} for r in read_metrics(x)] for x in (a, b)]
    assert timeless[0] == timeless[1]


def test_what_a_run_writes(unbroken):
    records = read_metrics(unbroken)
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    last = records[-1]
    for name in (
        "reward/mean reward/act groups/reward_spread groups/without_spread masked/share length/act finish/act/stop "
        "outputs/rehearse ratio exp_drift exp_drift_max entropy grad_norm tokens_per_s/sampled time/rollout "
        "time/learn time/handover time/step packing/fill lr total/trajectories act/parsed"
    ).split():
        assert name in last, name
    assert any(r["grad_norm"] > 0 for r in records)
    lines = [json.loads(line) for line in (unbroken / "trajectories.jsonl").read_text().splitlines()]
    assert [(t["step"], t["group"], t["member"]) for t in lines] == [
        (s, g, m) for s in range(4) for g in range(2) for m in range(2)
    ]
    assert {"config.json", "start.json", "data.json", "summary.json", "reward.png"} <= {
        p.name for p in unbroken.iterdir()
    }
    summary = json.loads((unbroken / "summary.json").read_text())["lines"]
    assert any("parameters changed" in line and "ok" in line for line in summary)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """The records of a run whose model really samples."""
    before = os.getcwd()
    os.chdir(ROOT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "rollout", rewarded(trainer.rollout))
        folder = tmp_path_factory.mktemp("runs") / "sampled"
        small = {"rollout.max_act_tokens": 8, "rollout.max_input_tokens": 150, "learning.row_tokens": 176}
        cfg = tiny_config(folder, **small, **{"learning.max_probability_error": 1.05, "checkpoint.every": 100})
        assert trainer.run_train(cfg) == 0
    os.chdir(before)
    return read_metrics(folder)


def test_sampler_and_learner_agree(sampled):
    """The parameters that sampled are those that the update starts from: float32 log-probabilities within 1e-4."""
    for record in sampled:
        assert record["exp_drift_max"] < 1 + 1e-4
        assert record["ratio"] == 1.0 or not record["tokens_trained"]  # nothing trained: no group had spread
    assert any(r["grad_norm"] > 0 for r in sampled)


def test_nothing_compiles_after_the_second_step(sampled):
    assert all(r["compilations"] == 0 for r in sampled)
    assert sampled[-1]["engine/programs_compiled"] == sampled[1]["engine/programs_compiled"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("place", ["collect", "learn", "mark", "save"])
def test_a_run_that_dies_goes_on_and_ends_alike(unbroken, tmp_path, monkeypatch, place):
    folder = tmp_path / "run"
    calls = 0

    def dies(real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == {"save": 2, "mark": 4}.get(place, 4):
                raise Killed
            return real(*args, **kwargs)

        return call

    owner, name = {
        "collect": (trainer, "collect"),
        "learn": (setup.Learner, "learn"),
        "mark": (trainer.Run, "mark"),
        "save": (trainer.Run, "save"),
    }[place]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dies(getattr(owner, name)))
        with pytest.raises(Killed):
            trainer.run_train(tiny_config(folder))
    assert trainer.run_train(tiny_config(folder)) == 0
    same_end(unbroken, folder)


def test_a_clock_that_jumps_loses_nothing(unbroken, tmp_path, monkeypatch):
    """Ours are monotonic clocks.  Orbax counts by the wall clock: a jump of hours in the middle of a save ends the
    save, and the run, in one message; the same command goes on from what was whole."""
    folder, real, jumps = tmp_path / "run", time.time, itertools.cycle((0, 86_400, -86_400, 3.0))
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + next(jumps))
        with contextlib.suppress(UserError):
            trainer.run_train(tiny_config(folder))
    assert trainer.run_train(tiny_config(folder)) == 0
    same_end(unbroken, folder)
    assert all(r["time/step"] >= 0 for r in read_metrics(folder))


def test_finished_run_again_changes_nothing(unbroken, capsys):
    before = {p: p.read_bytes() for p in unbroken.glob("*.jsonl")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "prepare", lambda *_: pytest.fail("loaded"))
        assert trainer.run_train(tiny_config(unbroken)) == 0
        told = capsys.readouterr().out
        assert trainer.run_train(tiny_config(unbroken, **{"learning.require_checks": True})) == 1
    assert before == {p: p.read_bytes() for p in unbroken.glob("*.jsonl")}
    assert f"run: {unbroken}" in told and "learning.steps=4 are done" in told
    assert "check FAILED REHEARSE was called" in told  # by the scripted model of these tests


def test_the_step_that_was_measured_best_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "evaluate", lambda run, when: {"eval/x": {1: 0.1, 2: 0.9}.get(run.step, 0.3)})
    options = {"checkpoint.every": 1, "checkpoint.keep": 1, "checkpoint.best": "eval/x", "evaluation.every": 1}
    assert trainer.run_train(tiny_config(tmp_path / "run", **options)) == 0
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    assert (checkpoints.best(), checkpoints.latest()) == (2, 4)
    assert checkpoints.problem(3) == "there is no such step"


def test_evaluating_touches_no_parameter(unbroken, tmp_path):
    """Measured before, on the way and at the end, a run ends with the parameters and moments of one that never was."""
    often = {"evaluation.at_start": True, "evaluation.every": 2, "evaluation.at_end": True}
    assert trainer.run_train(tiny_config(tmp_path / "run", **often)) == 0
    assert sum("time/eval" in r for r in read_metrics(tmp_path / "run")) == 3
    states = [final_state(folder)[2] for folder in (unbroken, tmp_path / "run")]
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), *states)


def test_an_evaluation_leaves_its_whole_fidelity_report(tmp_path):
    """By tool and by distance, of the same calls with and without their records: what the metrics are a part of."""
    room = {"rollout.max_input_tokens": 500, "learning.row_tokens": 540}
    options = {"learning.steps": 1, "evaluation.at_end": True} | room
    assert trainer.run_train(tiny_config(tmp_path / "run", **options)) == 0
    record = read_metrics(tmp_path / "run")[-1]
    (file,) = (tmp_path / "run" / "fidelity").iterdir()
    page = json.loads(file.read_text())
    assert file.name == "step_00000001.json" and set(page) == {"fidelity", "fidelity_new"}
    for name, parts in page.items():
        assert parts["all"]["n"] == record[f"eval/{name}_n"] > 0
        assert parts["all"]["json_equal"] == record[f"eval/{name}_json_equal"]
        assert any(part.startswith("tool:") for part in parts) and "distance:0" in parts
    assert page["fidelity"]["all"]["n"] == page["fidelity_new"]["all"]["n"]
    assert "copyable" in page["fidelity"] and "copyable" not in page["fidelity_new"]


@pytest.mark.parametrize("required", [True, False])
def test_a_check_that_fails_is_the_exit_status_where_checks_are_required(tmp_path, capsys, required):
    """The scripted model of these tests ends without a call that reaches REHEARSE."""
    options = {"learning.steps": 1, "learning.require_checks": required}
    assert trainer.run_train(tiny_config(tmp_path / "run", **options)) == int(required)
    told = capsys.readouterr()
    assert "check FAILED REHEARSE was called (0.0 times" in told.out
    assert ("1 of the run's checks failed (above): REHEARSE was called" in told.err) == required


def test_lost_metrics_are_found_before_anything_compiles(unbroken, tmp_path, monkeypatch):
    def compiling(self):
        raise AssertionError("programs were compiled")

    folder = tmp_path / "run"
    shutil.copytree(unbroken, folder)
    (folder / "metrics.jsonl").write_text("")
    monkeypatch.setattr(setup.Learner, "compile", compiling)
    values = {"run_dir": str(folder), "learning.steps": 5}
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | values))
    with pytest.raises(UserError, match="metrics.jsonl has 0 bytes.*lines have been lost"):
        trainer.run_train(tiny_config(folder, **{"learning.steps": 5}))


def test_another_configuration_is_refused_in_the_same_folder(unbroken):
    with pytest.raises(UserError, match="learning.lr: 0.001 there, 0.5 here"):
        trainer.run_train(tiny_config(unbroken, **{"learning.lr": 0.5}))


def test_other_initial_weights_are_refused_where_a_reference_is_made_of_them(tmp_path, monkeypatch):
    options = {"learning.steps": 1, "learning.kl_coef": 0.01}
    assert trainer.run_train(tiny_config(tmp_path / "run", **options)) == 0
    real = setup.load_model

    def scaled(*args):
        spec, params = real(*args)
        return spec, jax.tree.map(lambda x: x * 1.05, params)

    monkeypatch.setattr(setup, "load_model", scaled)
    with pytest.raises(UserError, match="begun with other weights"):
        trainer.run_train(tiny_config(tmp_path / "run", **options | {"learning.steps": 2}))
    setup.same_base({"policy": "a"}, {"policy": "parts:b"}, tiny_config(tmp_path))


def test_trajectories_written_at_times_are_never_lost(unbroken, tmp_path):
    """On, off, on: what was written stays, and only what a kill left behind the checkpoint is cut."""
    folder = tmp_path / "run"
    for steps, on in ((1, True), (2, False), (3, True)):
        options = {"learning.steps": steps, "metrics.trajectories": on, "checkpoint.every": 1}
        assert trainer.run_train(tiny_config(folder, **options)) == 0
    steps = [json.loads(line)["step"] for line in (folder / "trajectories.jsonl").read_text().splitlines()]
    assert steps == [0] * 4 + [2] * 4
    begun = {"files": {"metrics": 10}, "step": 5}
    setup.trajectory_file(tiny_config(folder), folder, begun).close()
    assert len((folder / "trajectories.jsonl").read_text().splitlines()) == 8


def test_sampler_that_disagrees_stops_the_run(tmp_path, monkeypatch):
    real = trainer.rows_of

    def shifted(*args):
        return [dataclasses.replace(r, sampler_logprobs=r.sampler_logprobs - 0.2 * r.sampled) for r in real(*args)]

    monkeypatch.setattr(trainer, "rows_of", shifted)
    with pytest.raises(UserError, match="sampler and learner disagree"):
        trainer.run_train(tiny_config(tmp_path / "run", **{"learning.max_probability_error": 1.1}))
    assert Checkpoints(tmp_path / "run" / "checkpoints").latest() is None


def test_spikes_are_not_taken_their_batches_kept_and_the_run_stops(tmp_path):
    """Every gradient is above the limit: after three steps the run stops, with the parameters that it began with."""
    folder = tmp_path / "run"
    options = {"learning.spike_limit": 1e-9, "learning.max_bad_steps": 3}
    options |= {"learning.prompts_per_step": 4, "checkpoint.every": 1, "learning.steps": 5}
    said = r"step {}: {} steps in a row .* learning.spike_limit=1e-09 \(learning.max_bad_steps\); .*bad_steps"
    with pytest.raises(UserError, match=said.format(3, 3)):
        trainer.run_train(tiny_config(folder, **options))
    records = read_metrics(folder)
    assert [(r["step"], r["skipped"], r["nonfinite"]) for r in records] == [(1, 1.0, 0.0), (2, 1.0, 0.0)]
    assert all(r["grad_norm"] > 1e-9 for r in records)
    step, position, state = final_state(folder)
    held = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state["params"]))
    assert (step, position["bad_steps"], position["initial"]["policy"]) == (2, 2, hashlib.sha256(held).hexdigest())
    kept = sorted((folder / "bad_steps").iterdir())
    assert [p.name for p in kept] == [f"step_{k:08d}_policy_0.npz" for k in (1, 2, 3)]
    batch = np.load(kept[0])
    assert batch["tokens"].shape == batch["advantages"].shape and np.abs(batch["advantages"]).max() > 0
    # How many are borne may change when the run is taken up; the count goes on where it stood.
    with pytest.raises(UserError, match=said.format(4, 4)):
        trainer.run_train(tiny_config(folder, **options | {"learning.max_bad_steps": 4}))


def test_a_run_can_be_looked_into(tmp_path):
    """A profile of the step that was asked for, trajectories as text in TensorBoard, what was compiled."""
    folder = tmp_path / "run"
    options = {"profile_steps": "2", "metrics.tensorboard": True, "learning.steps": 2}
    assert trainer.run_train(tiny_config(folder, **options)) == 0
    assert [p.name for p in (folder / "profile").iterdir()] == ["step_00000002"]
    assert list((folder / "profile").rglob("*.xplane.pb"))
    board = b"".join(p.read_bytes() for p in (folder / "tensorboard").iterdir())
    played = list(read_trajectories(folder / "trajectories.jsonl"))
    assert b"trajectory/" in board and b"    [user]" in board
    assert any(f"task {t.task_id}, member {t.member}".encode() in board for t in played)
    compiled = [json.loads(line) for line in (folder / "compile.jsonl").read_text().splitlines()]
    assert {(x["step"], x["owner"], x["program"].split("/")[0]) for x in compiled} == {(0, "learner", "update")}
    assert all(x["seconds"] > 0 for x in compiled)


def test_the_host_s_share_is_what_the_rollout_did_not_wait_for():
    """Of 10 s the engine waited 4 for its device, of which 1 before this step."""
    run = types.SimpleNamespace(
        counted={"seconds_waiting": 1.0, "tokens_prefilled": 10.0},
        processes=Processes(),
        spec=SPEC,
        learners={"policy": types.SimpleNamespace(update=types.SimpleNamespace(mesh=None))},
    )
    seconds = {"time/learn": 1.0, "time/rollout": 10.0}
    assert trainer._busy(run, [], {"seconds_waiting": 4.0}, 0, seconds)["host_share"] == pytest.approx(0.7)
    assert trainer._busy(run, [], {"seconds_waiting": 24.0}, 0, seconds)["host_share"] == 0.0
    assert "host_share" not in trainer._busy(run, [], {}, 0, seconds)  # an engine that does not count


def test_a_batch_without_verdicts_stops_the_run_and_is_kept(unbroken, tmp_path, monkeypatch):
    """Two of four trajectories of step 3 get no verdict: nothing is learned, step 2 is saved, the batch lies in a file.

    With a judge that answers, the same command ends as the run that nothing disturbed.
    """
    folder, steps = tmp_path / "run", {"checkpoint.every": 100}
    real = trainer.rollout

    def silent(*args, **kwargs):
        for t in real(*args, **kwargs):
            masked = kwargs["step"] == 2 and t.member == 1
            yield dataclasses.replace(t, reward=None, masked_cause="judge:outage") if masked else t

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "rollout", silent)
        said = r"step 3: 2 of 4 trajectories have no verdict \(judge:outage 2\)"
        with pytest.raises(UserError, match=said) as stopped:
            trainer.run_train(tiny_config(folder, **steps))
    kept = folder / "no_verdict" / "step_00000003.jsonl"
    assert str(kept) in str(stopped.value) and "rewards.max_no_verdict_share=0.25" in str(stopped.value)
    found = list(read_trajectories(kept))
    assert [t.masked_cause for t in found].count("judge:outage") == 2 and len(found) == 4
    assert all(t.task is not None and t.segments for t in found)
    assert Checkpoints(folder / "checkpoints").latest() == 2
    assert [r["step"] for r in read_metrics(folder)] == [1, 2]
    # the judge is mended: its address is not part of what the run is
    mended = {"rewards.endpoint.base_url": "http://127.0.0.1:1/v1", "rewards.endpoint.timeout": 9.0}
    assert trainer.run_train(tiny_config(folder, **mended)) == 0
    same_end(unbroken, folder)


def test_a_share_below_the_limit_goes_on(tmp_path, monkeypatch):
    real = trainer.rollout

    def silent(*args, **kwargs):
        for t in real(*args, **kwargs):
            masked = (t.group, t.member) == (0, 0)
            yield dataclasses.replace(t, reward=None, masked_cause="judge:timeout") if masked else t

    monkeypatch.setattr(trainer, "rollout", silent)
    folder = tmp_path / "run"
    assert trainer.run_train(tiny_config(folder, **{"learning.steps": 1})) == 0
    assert read_metrics(folder)[0]["masked/share"] == 0.25 and not (folder / "no_verdict").exists()


def test_shaped_rewards_reach_the_update(tmp_path):
    """What the step learned from are the advantages of rewards less the length penalty, not those of the rewards."""
    cfg = tiny_config(
        tmp_path / "run", **{"learning.steps": 1, "rollout.max_act_tokens": 14, "rewards.length_penalty": 0.5}
    )
    assert trainer.run_train(cfg) == 0
    record = read_metrics(tmp_path / "run")[0]
    played = list(read_trajectories(tmp_path / "run" / "trajectories.jsonl"))
    added, figures = additions(played, Shaping.from_config(cfg))
    values = [abs(a) for row in output_advantages(played, added) for a in row]
    assert record["shaping/added/act"] == figures["shaping/added/act"] < 0
    assert record["advantage_abs/act"] == pytest.approx(sum(values) / len(values))
    unshaped = [abs(a) for by_role in role_advantages(played) for a in by_role.values()]
    assert abs(record["advantage_abs/act"] - sum(unshaped) / len(unshaped)) > 1e-6 and record["grad_norm"] > 0


def test_a_run_counts_and_charges_what_contradicts_its_worldbook(tmp_path):
    """Under a rule that says that every order is paid, each other answer of `get_order` is a contradiction."""
    rule = TransitionRule("paid", "get_order", render={"status": "paid"}, confidence=1.0, status="supported")
    save_worldbook(Worldbook(actions=(ActionSpec("get_order"),), rules=(rule,)), tmp_path / "wb")
    grounded = {"rollout.grounding": "worldbook", "rollout.worldbook": str(tmp_path / "wb")}
    paid = {"rewards.contradiction_penalty": 0.5, "rollout.checks": ("format",)}
    cfg = tiny_config(tmp_path / "run", **grounded, **paid, **{"learning.steps": 1, "learning.prompts_per_step": 4})
    assert trainer.run_train(cfg) == 0
    record = read_metrics(tmp_path / "run")[0]
    played = list(read_trajectories(tmp_path / "run" / "trajectories.jsonl"))
    pairs = [p for t in played for turn in t.transcript for step in turn.steps
             for p in zip(step.output.calls, step.observations)]  # fmt: skip
    looks = [observation for call, observation in pairs if call.name == "get_order" and observation.source != "error"]
    against = sum(json.loads(observation.text) != {"status": "paid"} for observation in looks)
    assert 0 < against < len(looks) < len(pairs)
    assert record["worldbook/judged"] == len(looks) / len(pairs)
    assert record["worldbook/contradictions"] == against / len(played)
    assert record["worldbook/contradiction_share"] == against / len(looks)
    outputs = sum(s.role is Role.REHEARSE for t in played for s in t.segments)
    assert record["shaping/added/rehearse"] == pytest.approx(-0.5 * against / outputs)


def child(folder: Path, *changes: str) -> subprocess.Popen:
    environment = os.environ | {"XLA_FLAGS": ""}
    return subprocess.Popen(
        [sys.executable, str(CHILD), str(folder), *changes],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def wait_for(folder: Path, lines: int, process: subprocess.Popen, limit: float = 240) -> None:
    end = time.monotonic() + limit
    path = folder / "metrics.jsonl"
    while time.monotonic() < end and process.poll() is None:
        if path.exists() and len(path.read_text().splitlines()) >= lines:
            return
        time.sleep(0.01)


def test_killed_process_goes_on_by_the_same_command(tmp_path):
    """SIGKILL and SIGTERM against real processes; the end equals that of a run nobody disturbed."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert child(whole).wait(300) == 0
    first = child(broken)
    wait_for(broken, 3, first)
    first.send_signal(signal.SIGKILL)
    assert first.wait() == -9
    second = child(broken)
    wait_for(broken, 3, second)
    second.send_signal(signal.SIGTERM)
    # before the handler stands (imports), SIGTERM simply ends the process: nothing has been done yet
    assert second.wait(120) in (trainer.PREEMPTED, 0, -signal.SIGTERM)
    assert child(broken).wait(300) == 0
    same_end(whole, broken)


@pytest.mark.long
def test_random_kills(tmp_path):
    """Many seeded kills over one run of 40 steps."""
    # The toy engine's log-probabilities are those of no model, and the model moves away from them.
    changes = "learning.steps=40", "learning.max_probability_error=1000.0"
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert child(whole, *changes).wait(600) == 0
    rng = random.Random(0)
    for _ in range(12):
        process = child(broken, *changes)
        done = len(read_metrics(broken)) if (broken / "metrics.jsonl").exists() else 0
        wait_for(broken, done + rng.randint(1, 5), process)
        time.sleep(rng.random())
        process.send_signal(rng.choice((signal.SIGKILL, signal.SIGTERM)))
        process.wait(120)
    assert child(broken, *changes).wait(600) == 0
    same_end(whole, broken)
