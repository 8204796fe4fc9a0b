"""Faults of the disk: whatever operation fails, the old state or the new one is there, and one line says so."""

from __future__ import annotations

import errno
import itertools
import json
import os
import resource
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learning_common import rewarded, tiny_config, toy_engine

from envace_jax.config import UserError
from envace_jax.distributed import Processes
from envace_jax.faults import failing
from envace_jax.learning import setup, trainer
from envace_jax.learning.checkpoint import Checkpoints
from envace_jax.learning.metrics import JsonlFile, read_metrics
from envace_jax.learning.run_dir import shared_run_dir, write_json
from envace_jax.model.hf_folder import verify_folder, write_folder
from envace_jax.model.safetensors_io import TensorSpec, read_header, read_tensor
from envace_jax.worldbook.build import Stages
from envace_jax.worldbook.records import ActionSpec
from envace_jax.worldbook.store import Worldbook, load_worldbook, save_worldbook

ROOT = Path(__file__).resolve().parents[2]


def state(value: float, size: int = 10):
    return {"x": jnp.full((size,), value), "step": jnp.int32(value)}


CODES = (errno.ENOSPC, errno.EIO, errno.EROFS)


@pytest.mark.parametrize("code", CODES)
def test_every_operation_of_a_save_may_fail(tmp_path, code):
    """After a fault at any place the last whole step is the old or the new one, bit for bit, and a retry works."""
    for n in itertools.count(1):
        folder = tmp_path / str(n)
        checkpoints = Checkpoints(folder, say=lambda _: None)
        checkpoints.save(1, state(1), {"step": 1})
        checkpoints.wait()
        with failing(n, code) as fault:
            checkpoints.save(2, state(2), {"step": 2})
            try:
                checkpoints.wait()
            except UserError as error:
                assert len(str(error).splitlines()) == 1 and os.strerror(code) in str(error)
        whole = checkpoints.latest()
        assert whole in (1, 2)
        got = checkpoints.restore(whole, state(0))
        jax.tree.map(np.testing.assert_array_equal, got, state(whole))
        checkpoints.clean_up()
        checkpoints.save(2, state(2), {"step": 2})
        checkpoints.close()
        assert checkpoints.latest() == 2
        if fault.seen < n:
            break
    assert n - 1 == 5  # the manifest: open, write, fsync, rename, fsync of the folder


def test_every_operation_of_a_json_file_may_fail(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    for n in itertools.count(1):
        with failing(n) as fault:
            try:
                write_json(path, {"new": 1})
            except OSError:
                assert json.loads(path.read_text()) == {"old": 1}
        if fault.seen < n:
            break
    assert json.loads(path.read_text()) == {"new": 1} and n == 5


def test_every_operation_of_an_export_may_fail(tmp_path):
    """A folder that is to be replaced stays as it was or is the new one, whole; the same call then ends the work."""
    specs = [[TensorSpec("a", "F32", (2, 3))], [TensorSpec("b", "F32", (4,)), TensorSpec("c", "F32", (1,))]]

    def export(folder: Path, value: float) -> Path:
        return write_folder(
            folder,
            specs,
            lambda spec: np.full(spec.shape, value, np.float32),
            config={"eos_token_id": 1},
            tokenizer_dir=None,
            texts={"README.md": f"{value}"},
            source_id=f"{value}",
            overwrite=True,
        )

    for n, code in enumerate(itertools.cycle(CODES), 1):
        folder = export(tmp_path / str(n), 1.0)
        with failing(n, code) as fault:
            try:
                export(folder, 2.0)
            except OSError as error:
                assert error.errno == code
        verify_folder(folder)
        assert (folder / "README.md").read_text() == ("1.0" if fault.seen >= n else "2.0")
        export(folder, 2.0)
        assert {p.name for p in tmp_path.iterdir()} == {str(k) for k in range(1, n + 1)}  # nothing is left beside it
        header = read_header(folder / "model-00002-of-00002.safetensors")
        np.testing.assert_array_equal(read_tensor(folder / "model-00002-of-00002.safetensors", header["b"]), 2.0)
        if fault.seen < n:
            break
    assert n - 1 == 41  # of two weight files, their journals, five small files, two renames


def test_every_operation_of_a_worldbook_may_fail(tmp_path):
    """There is a whole worldbook or none, and the same call then writes it."""
    book = Worldbook(actions=(ActionSpec("get_order"),))
    for n, code in enumerate(itertools.cycle(CODES), 1):
        path = tmp_path / str(n)
        with failing(n, code) as fault:
            try:
                save_worldbook(book, path)
            except OSError as error:
                assert error.errno == code and not path.exists()
        if not path.exists():
            save_worldbook(book, path)
        assert load_worldbook(path) == book
        if fault.seen < n:
            break
    assert n > 40


def test_every_operation_of_a_build_may_fail(tmp_path):
    """A stage is done or it is not: the same build goes on, and computes again only what was not written."""

    def built(folder: Path) -> list[str]:
        ran: list[str] = []
        stages = Stages(folder, "settings", lambda _: None)
        assert stages.run("first", [1], lambda: ran.append("first") or {"x": 1}) == {"x": 1}
        assert stages.run("second", [2], lambda: ran.append("second") or {"y": 2}) == {"y": 2}
        return ran

    for n, code in enumerate(itertools.cycle(CODES), 1):
        with failing(n, code) as fault:
            try:
                built(tmp_path / str(n))
            except OSError as error:
                assert error.errno == code
        again = built(tmp_path / str(n))
        assert again == ([] if fault.seen < n else ["second"] if n > 8 else ["first", "second"])
        if fault.seen < n:
            break
    assert n - 1 == 12  # the mark of the settings and two stages: open, write, fsync, rename of each


def test_metrics_after_a_fault_are_those_of_the_checkpoint(tmp_path):
    file = JsonlFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1})
    length = file.sync()
    file.write({"step": 2})
    with failing(1), pytest.raises(OSError, match="No space"):
        file.write({"step": 3})
    file.close()
    again = JsonlFile(tmp_path / "metrics.jsonl", length)
    again.write({"step": 2})
    again.close()
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]


def test_full_disk_while_arrays_are_written(tmp_path):
    """The arrays themselves are not written by us: here the system refuses (a limit on file sizes)."""
    checkpoints = Checkpoints(tmp_path / "c", say=lambda _: None)
    checkpoints.save(1, state(1), {"step": 1})
    checkpoints.wait()
    noise = jax.random.normal(jax.random.key(0), (1 << 20,))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, hard))
    try:
        with pytest.raises(UserError, match="could not be written.*the last whole checkpoint is step 1"):
            checkpoints.save(2, {"x": noise, "step": jnp.int32(2)}, {"step": 2})
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoints.latest() == 1
    checkpoints.clean_up()
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["step_00000001", "step_00000001.sha256"]


def test_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    cfg = tiny_config(tmp_path / "file" / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"), shared_run_dir(cfg, Processes()):
        pass
    read_only = OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path / "run" / "x"))
    message = "cannot be written any more .Read-only file system"
    with pytest.raises(UserError, match=message), shared_run_dir(tiny_config(tmp_path / "run"), Processes()):
        raise read_only
    with pytest.raises(FileNotFoundError), shared_run_dir(tiny_config(tmp_path / "run"), Processes()):
        (tmp_path / "nothing").read_text()  # not the disk's fault: not called one


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_sweep_over_a_whole_run(tmp_path, monkeypatch):
    """Every operation of a run fails once; the same command then ends as the unbroken run did."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(trainer, "rollout", rewarded(trainer.rollout))
    monkeypatch.setattr(setup, "make_engine", toy_engine)

    def config(name):
        return tiny_config(tmp_path / name, **{"learning.steps": 3, "checkpoint.every": 1})

    assert trainer.run_train(config("whole")) == 0
    want = (tmp_path / "whole" / "trajectories.jsonl").read_bytes()
    for n in itertools.count(1, 3):
        name, code = f"fault{n}", CODES[n // 3 % 3]
        with failing(n, code) as fault:
            try:
                trainer.run_train(config(name))
            except UserError as error:
                assert len(str(error).splitlines()) == 1 and os.strerror(code) in str(error)
        assert trainer.run_train(config(name)) == 0
        assert (tmp_path / name / "trajectories.jsonl").read_bytes() == want
        assert [r["step"] for r in read_metrics(tmp_path / name)] == [1, 2, 3]
        if fault.seen < n:
            break
    assert n > 20
