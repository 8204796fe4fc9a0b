"""Versions, extras and what happens to libtpu on a machine without a TPU."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import jax
import pytest

from envace_jax import compat

pytestmark = pytest.mark.quick
ROOT = Path(__file__).parents[1]


def test_a_tpu_is_found_by_its_device(tmp_path: Path) -> None:
    assert not compat.has_tpu(tmp_path)
    device = tmp_path / "sys/bus/pci/devices/0000:00:04.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    assert not compat.has_tpu(tmp_path)
    (device / "vendor").write_text("0x1ae0\n")
    assert compat.has_tpu(tmp_path)
    driver = tmp_path / "other/dev"
    driver.mkdir(parents=True)
    (driver / "accel0").touch()
    assert compat.has_tpu(tmp_path / "other")


@pytest.mark.parametrize(
    "tpu, libtpu, plugins, chosen, want",
    [
        (False, True, False, "", "cpu"),  # libtpu for `plan` alone: it is not loaded to look for chips
        (True, True, False, "", None),
        (False, False, False, "", None),
        (False, True, True, "", None),  # CUDA may be there: jax decides
        (False, True, False, "tpu", None),  # the user's word stands, and its error is seen
    ],
)
def test_libtpu_is_left_alone_where_it_has_nothing_to_do(monkeypatch, tpu, libtpu, plugins, chosen, want) -> None:
    found = {"libtpu": libtpu, "jax_plugins": plugins}
    monkeypatch.setattr(compat, "has_tpu", lambda: tpu)
    monkeypatch.setattr(compat.importlib.util, "find_spec", lambda name: True if found[name] else None)
    monkeypatch.setattr(compat.importlib.metadata, "entry_points", lambda group: [])
    monkeypatch.setenv("JAX_PLATFORMS", chosen)
    monkeypatch.delenv("JAX_FORCE_TPU_INIT", raising=False)
    before = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", None)
        compat.skip_tpu_search()
        assert jax.config.jax_platforms == want
    finally:
        jax.config.update("jax_platforms", before)


def extras() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    files = project["tool"]["setuptools"]["dynamic"]["optional-dependencies"]
    read = lambda name: [  # noqa: E731
        line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")
    ]
    return {name: [line for file in entry["file"] for line in read(file)] for name, entry in files.items()}


def test_named_extras_exist() -> None:
    """What documents, scripts and messages tell people to install."""
    named = set()
    for suffix in ("md", "py", "sh", "sbatch"):
        for file in ROOT.rglob(f"*.{suffix}"):
            if not {".git", ".venv", ".venv312", ".cache"} & set(file.relative_to(ROOT).parts):
                named |= set(re.findall(r"(?:envace_jax|['\"]\.)\[(\w+)\]", file.read_text()))
    assert {"tpu", "cuda"} <= named <= set(extras())


def test_accelerator_extras_go_with_the_tested_versions() -> None:
    pins = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("jax==")]
    assert len(pins) == 2
    for name, extra in (("tpu", "tpu"), ("cuda", "cuda12")):
        jax_lines = [line for line in extras()[name] if line.startswith("jax")]
        assert [line.replace(f"[{extra}]", "") for line in jax_lines] == pins
