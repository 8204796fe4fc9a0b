"""Checkpoints: exact, verified, with a fall-back that says so."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.config import UserError
from envace_jax.learning.checkpoint import Checkpoints, manifest_problem, write_manifest
from envace_jax.model.sharding import make_mesh


def state(seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "params": {"a": jax.random.normal(keys[0], (40, 8)), "b": jax.random.normal(keys[1], (16,), jnp.bfloat16)},
        "step": jnp.int32(seed),
    }


def equal(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    checkpoints = Checkpoints(folder, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, state(step), {"step": step, "data": {"epoch": 1}})
    checkpoints.close()
    return folder


def copy(saved: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(saved, tmp_path / "c"))


@pytest.mark.quick
def test_saved_is_restored_and_old_steps_go(saved):
    checkpoints = Checkpoints(saved)
    assert checkpoints.latest() == 3
    equal(checkpoints.restore(3, state(0)), state(3))
    equal(checkpoints.restore(2, state(0)), state(2))
    assert checkpoints.read_meta(3) == {"step": 3, "data": {"epoch": 1}}
    assert checkpoints.problem(1) == "there is no such step"
    part = checkpoints.restore(3, {"params": state(0)["params"]}, partial=True)
    equal(part, {"params": state(3)["params"]})


def test_donated_buffers_are_saved_as_they_were(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    s = jax.tree.map(jnp.copy, state(5))
    checkpoints.save(1, s, {})
    for _ in range(20):
        s = step(s)
    checkpoints.close()
    equal(Checkpoints(tmp_path).restore(1, state(0)), state(5))


def test_restores_onto_another_mesh(saved):
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = make_mesh(fsdp=4, tensor=2)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P())), state(0))
    like["params"]["a"] = jax.ShapeDtypeStruct((40, 8), jnp.float32, sharding=NamedSharding(mesh, P("fsdp", "tensor")))
    got = Checkpoints(saved).restore(3, like)
    assert got["params"]["a"].sharding.spec == P("fsdp", "tensor")
    equal(jax.device_get(got), state(3))


def test_every_flipped_bit_cut_and_deletion_is_noticed(saved, tmp_path):
    folder = copy(saved, tmp_path)
    rng = random.Random(0)
    checkpoints = Checkpoints(folder)
    files = [p for p in sorted((folder / "step_00000003").rglob("*")) if p.is_file() and p.stat().st_size]
    files.append(folder / "step_00000003.sha256")
    places = [(p, rng.randrange(p.stat().st_size * 8)) for p in files for _ in range(4)]
    while len(places) < 120:
        p = rng.choice(files)
        places.append((p, rng.randrange(p.stat().st_size * 8)))
    for path, bit in places:
        data = path.read_bytes()
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert checkpoints.problem(3) is not None, (path, bit)
        path.write_bytes(data)
    for path in files:
        data = path.read_bytes()
        path.write_bytes(data[:-1])
        assert checkpoints.problem(3) is not None
        path.unlink()
        assert checkpoints.problem(3) is not None
        path.write_bytes(data)
    extra = folder / "step_00000003" / "extra"
    extra.write_text("x")
    assert "does not belong" in str(checkpoints.problem(3))
    extra.unlink()
    assert checkpoints.problem(3) is None


@pytest.mark.quick
def test_falls_back_to_the_last_whole_step_and_says_so(saved, tmp_path):
    folder = copy(saved, tmp_path)
    victim = next(p for p in (folder / "step_00000003").rglob("d/*") if p.is_file())
    victim.write_bytes(victim.read_bytes()[:-2])
    said: list[str] = []
    checkpoints = Checkpoints(folder, keep=1, say=said.append)
    assert checkpoints.latest() == 2
    assert len(said) == 1 and "step_00000003" in said[0] and "damaged" in said[0]
    with pytest.raises(UserError, match="damaged"):
        checkpoints.restore(3, state(0))
    (folder / "step_00000002.sha256").unlink()
    said.clear()
    assert checkpoints.latest() is None and "manifest is missing" in said[-1]


def test_a_restart_hashes_a_checkpoint_once(saved, monkeypatch):
    import envace_jax.learning.checkpoint as module

    real, hashed = module.sha256_file, []
    monkeypatch.setattr(module, "sha256_file", lambda path: hashed.append(path) or real(path))
    checkpoints = Checkpoints(saved)
    step = checkpoints.clean_up()
    assert checkpoints.read_meta(step)["step"] == step == 3
    equal(checkpoints.restore(step, state(0)), state(3))
    assert len(hashed) == len(set(hashed)) > 5
    checkpoints.restore(2, state(0))  # another one is looked at before it is read
    assert len(hashed) == len(set(hashed)) and any("step_00000002" in str(path) for path in hashed)


def test_clean_up_sets_damaged_steps_aside(saved, tmp_path):
    folder = copy(saved, tmp_path)
    (folder / "step_00000003" / "commit_success.txt").write_text("?")
    (folder / "step_00000009.orbax-checkpoint-tmp").mkdir()
    (folder / "step_00000008").mkdir()
    checkpoints = Checkpoints(folder, keep=1, say=lambda _: None)
    checkpoints.clean_up()
    names = sorted(p.name for p in folder.iterdir())
    assert names == ["damaged_step_00000003", "damaged_step_00000003.sha256", "step_00000002", "step_00000002.sha256"]
    checkpoints.save(3, state(7), {})
    checkpoints.close()
    assert checkpoints.latest() == 3
    equal(checkpoints.restore(3, state(0)), state(7))


def test_best_step_is_kept_beside_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    with pytest.raises(UserError, match="no step there was scored"):
        checkpoints.best()
    for step, score in ((1, 0.2), (2, 0.7), (3, None), (4, 0.7), (5, 0.1)):  # a tie does not move it
        checkpoints.save(step, state(step), {}, score)
    checkpoints.close()
    assert checkpoints.best() == 2 and checkpoints.latest() == 5
    assert sorted(p.name for p in (tmp_path / "c").glob("*.sha256")) == [f"step_{k:08d}.sha256" for k in (2, 4, 5)]
    equal(Checkpoints(tmp_path / "c").restore(2, state(0)), state(2))
    Checkpoints(tmp_path / "c").clean_up()
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    checkpoints.save(6, state(6), {}, 0.9)
    checkpoints.close()
    assert checkpoints.best() == 6 and checkpoints.problem(2) == "there is no such step"
    checkpoints.save(7, state(7), {})
    checkpoints.score(7, 0.95)  # measured after the save
    assert checkpoints.best() == 7
    checkpoints.score(8, 2.0)  # no such step
    assert checkpoints.best() == 7
    for text in ("{", "[]", '{"step": "x", "score": 1}', '{"step": 6}'):
        (tmp_path / "c" / "best.json").write_text(text)
        with pytest.raises(UserError, match="no step there was scored"):
            checkpoints.best()


def test_manifest_of_a_folder(tmp_path):
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "a").write_text("a")
    assert "missing" in str(manifest_problem(tmp_path / "f", tmp_path / "m"))
    write_manifest(tmp_path / "f", tmp_path / "m")
    assert manifest_problem(tmp_path / "f", tmp_path / "m") is None
    text = (tmp_path / "m").read_text()
    (tmp_path / "m").write_text(text + "\n")
    assert "damaged" in str(manifest_problem(tmp_path / "f", tmp_path / "m"))
    (tmp_path / "m").write_text("")
    assert "damaged" in str(manifest_problem(tmp_path / "f", tmp_path / "m"))


def test_another_shape_is_refused(saved):
    other = {"params": {"a": jnp.zeros((40, 9)), "b": jnp.zeros((16,), jnp.bfloat16)}, "step": jnp.int32(0)}
    with pytest.raises(UserError, match="step_00000003"):
        Checkpoints(saved).restore(3, other)
    with pytest.raises(UserError, match="another shape"):
        Checkpoints(saved).restore(3, {"params": {"c": jnp.zeros(3)}})


def test_save_that_fails_is_raised_by_the_next_call(tmp_path, monkeypatch):
    import envace_jax.learning.checkpoint as module

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(1), {})
    checkpoints.wait()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_manifest", full)
    checkpoints.save(2, state(2), {})
    with pytest.raises(UserError, match="No space left.*last whole checkpoint is step 1"):
        checkpoints.wait()
    monkeypatch.undo()
    checkpoints.save(2, state(2), {})
    checkpoints.close()
    assert checkpoints.latest() == 2


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.15])
def test_killed_in_a_save_keeps_the_step_before(tmp_path, delay):
    root = Path(__file__).resolve().parents[2]
    script = f"""
        import sys, os, threading, time, signal
        sys.path[:0] = [{str(root)!r}, {str(Path(__file__).parent)!r}]
        from test_checkpoint import Checkpoints, state
        import jax, jax.numpy as jnp
        c = Checkpoints({str(tmp_path)!r})
        c.save(1, state(1), {{"step": 1}}); c.wait()
        threading.Timer({delay}, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        c.save(2, dict(state(2), big=jnp.ones((400, 4000))), {{"step": 2}}); c.wait()
        time.sleep(5)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, timeout=120)
    assert done.returncode == -9, done.stderr.decode()[-500:]
    checkpoints = Checkpoints(tmp_path, say=lambda _: None)
    step = checkpoints.latest()
    assert step in (1, 2)
    checkpoints.clean_up()
    if step == 1:
        equal(checkpoints.restore(1, state(0)), state(1))
        assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000001", "step_00000001.sha256"]
