"""The folder of a run: who may go on there, and what starting anew removes."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from learning_common import tiny_config

from envace_jax.config import UserError, default_config
from envace_jax.learning import run_dir
from envace_jax.learning.run_dir import (
    changed_keys,
    config_values,
    default_values,
    facts,
    git_state,
    note_start,
    open_run_dir,
    warm_here,
)

pytestmark = pytest.mark.quick


def lay(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


def here(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def opened(cfg) -> None:
    with open_run_dir(cfg):
        pass


@pytest.mark.parametrize("changes", [{"overwrite": True}, {"checkpoint.resume": False}])
@pytest.mark.parametrize("local", [True, False])
def test_anew_is_anew_in_the_folder_of_the_checkpoints_too(tmp_path: Path, changes: dict, local: bool) -> None:
    run, place = tmp_path / "run", tmp_path / "place"
    if local:
        lay(run, "config.json", "metrics.jsonl", "checkpoints/step_00000001/d", "mine.txt")
    lay(place, "checkpoints/step_00000001/d", "checkpoints/step_00000001.sha256", "warmstart/step_00000001/d")
    lay(place, "run/config.json", "run/metrics.jsonl", "another/checkpoints/a", "notes.txt")
    opened(tiny_config(run, **{"checkpoint.folder": str(place), **changes}))
    assert here(place) == {"another/checkpoints/a", "notes.txt"}
    assert here(run) == {"config.json", "start.json", "lock"} | ({"mine.txt"} if local else set())


def test_a_run_that_goes_on_keeps_its_checkpoints(tmp_path: Path) -> None:
    run, place = tmp_path / "run", tmp_path / "place"
    lay(place, "checkpoints/step_00000001/d")
    cfg = tiny_config(run, **{"checkpoint.folder": str(place)})
    opened(cfg)
    opened(cfg)
    assert here(place) == {"checkpoints/step_00000001/d"}


@pytest.mark.parametrize(("schedule", "free"), [("constant", True), ("cosine", False)])
def test_the_number_of_steps_is_free_where_nothing_depends_on_it(tmp_path: Path, schedule: str, free: bool) -> None:
    before, now = (
        config_values(tiny_config(tmp_path, **{"learning.steps": steps, "learning.schedule": schedule}))
        for steps in (4, 8)
    )
    assert changed_keys(before, now, before) == ([] if free else ["learning.steps: 4 there, 8 here"])


@pytest.mark.parametrize("text", ["", '{"seed":', "[1]", "\xff\xfe", "[" * 100_000])
def test_a_damaged_configuration_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match="config.json: .*it is damaged"):
        opened(tiny_config(tmp_path))
    opened(tiny_config(tmp_path, overwrite=True))
    assert json.loads((tmp_path / "config.json").read_text())["run_dir"] == str(tmp_path)


def test_damaged_starts_are_named(tmp_path: Path) -> None:
    (tmp_path / "starts.json").write_text("[{")
    with pytest.raises(UserError, match="starts.json: .*it is damaged"):
        note_start(tiny_config(tmp_path), tmp_path, "one device", ["here"])


def begun(folder: Path, *, without: str = "", **more) -> None:
    """A run's folder as another version of the keys would have left it."""
    opened(tiny_config(folder))
    values = json.loads((folder / "config.json").read_text()) | more
    values.pop(without, None)
    (folder / "config.json").write_text(json.dumps(values))


def test_a_key_that_is_younger_than_the_run_takes_its_default_and_is_said_once(tmp_path: Path, capsys) -> None:
    begun(tmp_path, without="learning.dual_clip")
    opened(tiny_config(tmp_path))
    assert "begun before there were learning.dual_clip: it goes on with their defaults" in capsys.readouterr().err
    opened(tiny_config(tmp_path))
    assert not capsys.readouterr().err
    begun(tmp_path, without="learning.dual_clip")
    with pytest.raises(UserError, match=r"learning.dual_clip: 0\.0 there, 2\.0 here"):
        opened(tiny_config(tmp_path, **{"learning.dual_clip": 2.0}))


def test_a_key_that_only_the_run_s_version_had_is_named_with_the_remedies(tmp_path: Path) -> None:
    begun(tmp_path, **{"learning.old_trick": 3, "metrics.old_sink": True})
    start = json.loads((tmp_path / "start.json").read_text())
    (tmp_path / "start.json").write_text(json.dumps(start | {"git": {"commit": "0123456789abcdef"}}))
    said = r"another version of envace_jax: its learning.old_trick are unknown here.*commit 0123456789ab\)"
    with pytest.raises(UserError, match=said + ".*another run_dir.*overwrite=true"):
        opened(tiny_config(tmp_path))
    begun(tmp_path / "free", **{"metrics.old_sink": True})  # it changed no result
    opened(tiny_config(tmp_path / "free"))


def test_defaults_are_those_of_the_preset(tmp_path: Path) -> None:
    assert default_values(tiny_config(tmp_path, preset="reference_code"))["learning.dual_clip"] == 3.0
    assert default_values(tiny_config(tmp_path))["learning.dual_clip"] == 0.0


def test_facts_of_a_start(tmp_path: Path) -> None:
    note_start(tiny_config(tmp_path), tmp_path, "fsdp=8", ["tpu-0", "tpu-1"])
    [start] = json.loads((tmp_path / "starts.json").read_text())
    assert start["mesh"] == "fsdp=8" and start["hosts"] == ["tpu-0", "tpu-1"] and start["host"] == facts()["host"] != ""
    assert "tpu-0, tpu-1" in (tmp_path / "REPRODUCE.md").read_text()


def test_a_copy_without_git_knows_its_commit(tmp_path: Path) -> None:
    assert git_state(tmp_path) == {"commit": "", "changed_files": 0}
    (tmp_path / ".commit").write_text("0123456789abcdef\n3\n")
    assert git_state(tmp_path) == {"commit": "0123456789abcdef", "changed_files": 3}
    (tmp_path / ".commit").write_text("")  # the launcher's own copy had none
    assert git_state(tmp_path) == {"commit": "", "changed_files": 0}


def test_programs_are_taken_as_compiled_only_where_an_earlier_start_had_them(tmp_path, monkeypatch):
    layout = "one device"
    assert not warm_here(tmp_path, layout)  # a first start
    note_start(default_config(), tmp_path, layout, [socket.gethostname()])
    assert warm_here(tmp_path, layout)
    assert not warm_here(tmp_path, "{'fsdp': 2}")
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert not warm_here(tmp_path, layout)  # its compilation cache may be empty
    monkeypatch.undo()
    monkeypatch.setattr(run_dir, "PACKAGES", ("numpy",))
    assert not warm_here(tmp_path, layout)  # other versions than those that compiled
