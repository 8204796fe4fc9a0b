"""What the documents name exists: tests, files, commands, configuration keys."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from envace_jax.cli import COMMANDS
from envace_jax.config import default_config, flat

pytestmark = pytest.mark.quick
ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "data" / "README.md", *(ROOT / "docs").rglob("*.md")])
TESTS = "\n".join(p.read_text() for p in (ROOT / "tests").rglob("test_*.py"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_named_things_exist(document: Path) -> None:
    text = document.read_text()
    for name in set(re.findall(r"`(test_\w+)`", text)):
        assert f"def {name}(" in TESTS, name
    for path in set(re.findall(r"`((?:tests|docs|configs|launch|benchmarks|envace_jax)/[\w./-]+\.\w+)`", text)):
        assert (ROOT / path).exists(), path
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (document.parent / target).exists(), target
    for command in re.findall(r"python -m envace_jax ([a-z]\w*)", text):
        assert command in COMMANDS, command
    keys = {name for name, _ in flat(default_config())}
    for key in re.findall(r"--config\.([\w.]+?)(?==)", text):
        assert key in keys, key
    assert not re.search(r"@[A-Z]+@", text), "a gap that was to be filled"


def test_every_defect_has_its_row_and_a_test() -> None:
    """The 24 numbered defects of the published code: what stands here, and an existing test."""
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", (ROOT / "docs" / "reference-defects.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 25))
    for number, row in rows:
        published, ours, _, shown = (cell.strip() for cell in row.split(" | "))
        assert published and ours, number
        names = re.findall(r"`([^`]+)`", shown)
        assert names, number
        for name in names:
            assert f"def {name}(" in TESTS, (number, name)


def test_no_document_names_a_machine_or_a_registry() -> None:
    here = (str(ROOT), str(Path.home()) + "/", tempfile.gettempdir() + "/")
    for document in DOCUMENTS:
        text = document.read_text()
        assert not any(place in text for place in here), document
