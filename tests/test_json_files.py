"""Whatever is wrong with a JSON file is one error that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from envace_jax.config import UserError
from envace_jax.evaluation.finmcp import evaluate
from envace_jax.evaluation.next_observation import read_rows
from envace_jax.evaluation.results import read_results
from envace_jax.json_files import read_json, read_lines
from envace_jax.learning.metrics import read_metrics
from envace_jax.model.hf import locate_tensors
from envace_jax.model.hf_folder import INDEX
from envace_jax.model.spec import Qwen3Spec
from envace_jax.worldbook.completer import ScriptedCompleter
from envace_jax.worldbook.patch import read_patch

pytestmark = pytest.mark.quick
READERS = (read_json, read_rows, evaluate, read_results, Qwen3Spec.from_hf_config, read_patch, ScriptedCompleter)
BAD = {"text": b'{"a": ', "binary": b"\xff\xfe\x00\n", "deep": b"[" * 100_000}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("read", READERS)
def test_every_reader_names_the_file(read, bad: bytes, tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_bytes(bad + b"\n{}\n")
    with pytest.raises(UserError, match=r"f\.json"):
        read(path)
    with pytest.raises(UserError, match="none.json.*no such file"):
        read(tmp_path / "none.json")


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_last_line_that_was_cut_off_is_left_out(bad: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\n{"step": 2}\n' + bad)
    assert [value for _, value in read_lines(path)] == [{"step": 1}, {"step": 2}]
    assert [r["step"] for r in read_metrics(tmp_path)] == [1]  # what follows an empty line is not a run's
    path.write_bytes(b'{"step": 1}\n' + bad.replace(b"\n", b"") + b'\n{"step": 2}\n')
    with pytest.raises(UserError, match="metrics.jsonl: line 2: is n"):
        list(read_lines(path))


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_an_index_of_weights_is_named(bad: bytes, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(bad)
    with pytest.raises(UserError, match=INDEX):
        locate_tensors(tmp_path)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_json(tmp_path)
