"""Checkpoints in a bucket: a file system in memory stands in for it (arrays themselves are Orbax's to write there)."""

from __future__ import annotations

import sys

import pytest
from learning_common import tiny_config

import envace_jax.learning.bucket as bucket_module
from envace_jax.config import UserError
from envace_jax.config_checks import problems
from envace_jax.learning.bucket import checkpoint_place, place, pull, push
from envace_jax.learning.checkpoint import Checkpoints, write_manifest


@pytest.fixture
def bucket(monkeypatch):
    """`gs://` kept in memory."""
    from etils.epath import backend
    from fsspec.implementations.memory import MemoryFileSystem

    class Bucket(MemoryFileSystem):
        protocol = ("gs",)
        store: dict = {}
        pseudo_dirs = [""]

        @classmethod
        def _strip_protocol(cls, path):
            return super()._strip_protocol(str(path).removeprefix("gs://").removeprefix("gcs://"))

    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "gcs", Bucket)
    monkeypatch.setattr(bucket_module, "_has_gcsfs", lambda: True)
    backend.fsspec_backend._get_filesystem.cache_clear()
    yield place("gs://bucket/run")
    backend.fsspec_backend._get_filesystem.cache_clear()


def step(folder, number: int, text: bytes) -> None:
    (folder / f"step_{number:08d}" / "d").mkdir(parents=True, exist_ok=True)
    (folder / f"step_{number:08d}" / "d" / "a").write_bytes(text)


def test_what_buckets_need_is_named(monkeypatch):
    monkeypatch.setattr(bucket_module, "_has_gcsfs", lambda: False)
    with pytest.raises(UserError, match="pip install gcsfs"):
        place("gs://bucket/run")


def test_manifests_in_a_bucket(bucket):
    said: list[str] = []
    checkpoints = Checkpoints(bucket / "checkpoints", say=said.append)
    for number in (1, 2):
        step(bucket / "checkpoints", number, b"x" * number)
        write_manifest(checkpoints._path(number), checkpoints._manifest(number))
    assert checkpoints.latest() == 2
    step(bucket / "checkpoints", 2, b"xy")
    step(bucket / "checkpoints", 3, b"unfinished")
    assert checkpoints.latest() == 1
    assert any("step_00000002 is not used" in line and "damaged" in line for line in said)
    checkpoints.clean_up()
    assert not checkpoints._path(3).exists() and checkpoints.latest() == 1


def test_small_files_go_there_and_come_back(bucket, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    cfg = tiny_config(one, **{"checkpoint.folder": "gs://bucket/other"})
    (one / "config.json").write_text("{}")
    (one / "metrics.jsonl").write_text('{"step": 1}\n')
    push(cfg, one)
    assert pull(cfg, one) == []  # it has its own
    assert set(pull(cfg, two)) == {"config.json", "metrics.jsonl"}
    assert (two / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert str(checkpoint_place(cfg, one)) == "gs://bucket/other/checkpoints"
    assert checkpoint_place(tiny_config(one), one) == one / "checkpoints"


def test_run_dir_is_local():
    assert any("checkpoint.folder=gs://" in line for line in problems(tiny_config("gs://bucket/run")))
