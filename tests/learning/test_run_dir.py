"""The folder of a run: who may go on there, and what starting anew removes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from learning_common import tiny_config

from envace_jax.config import UserError
from envace_jax.learning.run_dir import changed_keys, config_values, note_start, open_run_dir

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
    assert changed_keys(before, now) == ([] if free else ["learning.steps: 4 there, 8 here"])


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
        note_start(tiny_config(tmp_path), tmp_path, "one device")
