"""doctor, show and the dry run, on the quickstart."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

from envace_jax import cli
from envace_jax.build import chat_format
from envace_jax.datasets.cm2 import task_to_record
from envace_jax.datasets.quickstart.generator import generate_tasks
from envace_jax.learning.run_dir import config_values
from envace_jax.model.spec import Qwen3Spec
from envace_jax.report.dry_run import export_problems, memory_estimate
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
    assert cli.main(["show", "\u00b2", *QUICKSTART]) == 2
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


def damaged_model(folder: Path) -> Path:
    """The quickstart model, its weights cut off."""
    shutil.copytree("data/quickstart/model", folder)
    weights = folder / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size - 4)
    return folder


def test_doctor_goes_on_after_what_it_finds(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = damaged_model(tmp_path / "model")
    options = (
        "rewards.endpoint.base_url=http://127.0.0.1:9",  # and no model named
        "rollout.simulator.base_url=http://127.0.0.1:9",
        "rollout.simulator.model=m",
        "rollout.worldbook=/nowhere",
        f"model.path={model}",
    )
    assert cli.main(["doctor", *QUICKSTART, *(f"--config.{option}" for option in options)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    for words in ("cut off", "endpoint model=''", "127.0.0.1:9: outage", "rollout.worldbook='/nowhere'", "ids agree"):
        assert words in out, words


def test_a_dry_run_is_not_well_where_a_run_would_not_be(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    options = (
        "run_dir=/proc/x",
        "mesh.fsdp=16",
        "learning.prompts_per_step=5000",
        "rollout.constrain=act",
        f"model.path={damaged_model(tmp_path / 'model')}",
        "data.train_limit=80",
    )
    assert cli.main(["train", *QUICKSTART, "--dry_run", *(f"--config.{option}" for option in options)]) == 1
    out = capsys.readouterr().out
    mend = [line for line in out.splitlines() if line.startswith("MEND")]
    for words in ("run_dir='/proc/x'", "asks for 16 devices", "takes 5000 tasks", "importance_cap", "cut off"):
        assert sum(words in line for line in mend) == 1, (words, mend)
    assert "all is well" not in out
    assert cli.main(["train", *QUICKSTART, "--dry_run", "--config.profile_steps=abc"]) == 2


def test_a_dry_run_looks_at_the_run_that_lies_there(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    argv = ["train", *QUICKSTART, "--dry_run", f"--config.run_dir={tmp_path}", "--config.data.train_limit=80"]
    values = config_values(cli.load_config("configs/quickstart.py")) | {"data.train_limit": 80}
    (tmp_path / "config.json").write_text(json.dumps(values | {"seed": 7}))
    assert cli.main(argv) == 1
    assert "holds a run with another configuration: seed: 7 there, 0 here" in capsys.readouterr().out
    (tmp_path / "config.json").write_text('{"seed":')
    assert cli.main(argv) == 1
    assert "config.json: is not JSON" in capsys.readouterr().out
    assert cli.main([*argv, "--config.overwrite=true"]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


DRY = ["train", *QUICKSTART, "--dry_run", "--config.data.train_limit=20"]


def mend(options: list[str], capsys: pytest.CaptureFixture) -> tuple[str, list[str]]:
    """What a dry run with these options says, and its lines about what is to mend."""
    assert cli.main([*DRY, *(f"--config.{option}" for option in options)]) in (0, 1)
    out = capsys.readouterr().out
    return out, [line for line in out.splitlines() if line.startswith("MEND")]


def completion(text: str) -> Response:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    return Response(json.dumps(body), content_type="application/json")


@pytest.mark.parametrize("kind", ["good", "refuses schemas", "ignores schemas"])
def test_a_dry_run_asks_the_judge_for_a_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture, httpserver: HTTPServer, kind: str
) -> None:
    """All three answer a plain question; only the one that gives a verdict by the schema could judge a run."""

    def handler(request: Request) -> Response:
        schema = "response_format" in json.loads(request.data)
        if schema and kind == "refuses schemas":
            return Response('{"error": {"message": "response_format: unknown"}}', 400, content_type="application/json")
        return completion('{"answer": true}' if schema and kind == "good" else "ready")

    httpserver.expect_request("/v1/chat/completions").respond_with_handler(handler)
    judge = ["rewards.judge=endpoint", f"rewards.endpoint.base_url={httpserver.url_for('/v1')}"]
    out, lines = mend([f"run_dir={tmp_path / 'x'}", *judge, "rewards.endpoint.model=m"], capsys)
    if kind == "good":
        assert not lines and "judges in" in out
    else:
        assert len(lines) == 1 and lines[0].startswith("MEND  rewards.endpoint: ")
        assert ("unknown" if kind == "refuses schemas" else "not JSON") in lines[0]


def test_a_dry_run_finds_tasks_without_an_environment(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "tasks.jsonl"
    tasks = [replace(task, meta={}) for task in generate_tasks("train", 20)]
    file.write_text("\n".join(json.dumps(task_to_record(task)) for task in tasks))
    options = [f"run_dir={tmp_path / 'x'}", "learning.arm=real_env"]
    assert mend(options, capsys)[1] == []
    lines = mend([*options, "data.source=cm2", f"data.path={file}"], capsys)[1]
    assert len(lines) == 1 and "learning.arm=real_env: task" in lines[0] and "meta.environment is None" in lines[0]


def test_memory_counts_a_policy_that_judges() -> None:
    """Weights of 4 bytes, and keys and values: 2 x layers x (lanes + shelf) x tokens x KV heads x head size x 4."""
    cfg = cli.load_config("configs/quickstart.py")
    spec = Qwen3Spec.from_hf_config("data/quickstart/model")
    assert memory_estimate(spec, cfg)["policy that judges"] == 0
    cfg.rewards.judge, cfg.rewards.policy.path, cfg.rewards.policy.max_tokens = "policy", "data/quickstart/model", 100
    rows, tokens = 64 + 64, 272 + 100
    cache = 2 * spec.n_layers * rows * tokens * spec.n_kv_heads * spec.head_dim * 4
    assert memory_estimate(spec, cfg)["policy that judges"] == 4 * spec.n_params() + cache


def test_what_could_not_be_exported_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = cli.load_config("configs/quickstart.py")
    spec, chat = Qwen3Spec.from_hf_config("data/quickstart/model"), chat_format(cfg)
    assert list(export_problems(chat, spec)) == []
    monkeypatch.setattr(type(chat), "template", lambda self: "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert any("differs from id" in line for line in export_problems(chat, spec))
    shape = spec.to_hf_config() | {"num_hidden_layers": 1}
    monkeypatch.setattr(type(spec), "to_hf_config", lambda self: shape)
    assert any("shape does not come back" in line for line in export_problems(chat, spec))


def test_a_warm_start_is_not_held_to_the_batches_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    options = (f"run_dir={tmp_path / 'x'}", "learning.prompts_per_step=5000", "warmstart.steps=2", "data.train_limit=9")
    assert cli.main(["warmstart", *QUICKSTART, "--dry_run", *(f"--config.{option}" for option in options)]) == 0
    assert "all is well" in capsys.readouterr().out


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
