"""doctor, show and the dry run, on the quickstart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envace_jax import cli
from envace_jax.datasets.cm2 import task_to_record
from envace_jax.datasets.quickstart.generator import generate_tasks
from envace_jax.report.show import visible

QUICKSTART = ["--config", "configs/quickstart.py"]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])


def test_doctor_finds_nothing_to_mend(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["doctor", *QUICKSTART]) == 0
    out = capsys.readouterr().out
    assert "ids agree" in " ".join(out.split()) and "cpu" in out and "MEND" not in out


def test_doctor_says_what_to_mend(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = Path("data/quickstart/tokenizer")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert cli.main(["doctor", *QUICKSTART, f"--config.model.tokenizer={tmp_path}"]) == 1
    assert "MEND" in capsys.readouterr().out


def test_show_prints_prompts_and_the_token_table(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["show", "0", *QUICKSTART]) == 0
    text = capsys.readouterr().out
    task = generate_tasks("train", 1)[0]
    assert task.uuid in text and task.user_turns[0] in text and "rehearse" in text
    assert cli.main(["show", task.uuid, "--tokens", *QUICKSTART]) == 0
    table = capsys.readouterr().out
    assert "advantage" in table and "yes" in table and "<|im_end|>" in table
    assert cli.main(["show", "no such task", *QUICKSTART]) == 2
    assert "neither a uuid nor a number" in capsys.readouterr().err


def test_what_is_shown_cannot_speak_to_the_terminal() -> None:
    assert visible("a\x1b[2Jb\r\n\u202e") == "a\\x1b[2Jb\\r\\n\\u202e"


def test_a_dry_run_checks_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    argv = ["train", *QUICKSTART, "--dry_run", f"--config.run_dir={tmp_path / 'run'}", "--config.data.train_limit=80"]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    for words in ("80 training tasks", "ledgers a trajectory", "GiB over all devices", "at least"):
        assert words in out
    assert "all is well" in out and not (tmp_path / "run").exists()


def test_a_dry_run_collects_what_is_to_mend(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    records = []
    for task in generate_tasks("train", 12):
        record = task_to_record(task)
        for turn in record["checklists"][0]:
            turn[0]["extra_info"] = {}
        records.append(record)
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    argv = ["train", *QUICKSTART, "--dry_run", "--config.data.source=cm2", f"--config.data.path={file}"]
    assert cli.main(argv) == 1
    out = capsys.readouterr().out
    assert "items without a rule" in out and "to mend" in out
