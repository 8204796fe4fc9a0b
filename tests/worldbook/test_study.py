"""The study of the five systems in small form: one table, any endpoint, nothing computed twice."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from envace_jax.config import UserError
from envace_jax.datasets.records import Task
from envace_jax.datasets.traces import episode_from_task
from envace_jax.environments import make_environment
from envace_jax.evaluation.replay import ReadingAgent, ReferenceDomain, play, words
from envace_jax.evaluation.terminal_tasks import KINDS, WORDS, terminal_tasks
from envace_jax.text.transcript import Message, ToolCall, canonical_json
from envace_jax.worldbook.baselines import SystemConfig, make_system
from envace_jax.worldbook.ingest import align
from envace_jax.worldbook.store import Worldbook

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("worldbook_study", ROOT / "benchmarks" / "worldbook_study.py")
assert _spec is not None and _spec.loader is not None
study = importlib.util.module_from_spec(_spec)
sys.modules["worldbook_study"] = study
_spec.loader.exec_module(study)


class Chat(BaseHTTPRequestHandler):
    """An OpenAI-compatible endpoint that always says the same; it notes what it was asked."""

    asked: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        loop = "submit" in body["messages"][0]["content"]
        said = '{"submit": {"observation": "{\\"error\\": \\"not found\\"}"}}' if loop else '{"error": "not found"}'
        answer = {
            "id": "x", "object": "chat.completion", "created": 0, "model": body["model"],
            "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10},
        }  # fmt: skip
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    Chat.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Chat)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()


def arguments(folder: Path, *more: str) -> Any:
    small = ["--environments", "quickstart", "--rows", "8", "--heldout", "4", "--tasks", "2", "--resamples", "100"]
    return study.parse(["--out", str(folder), *small, *more])


def test_one_command_takes_any_endpoint_and_goes_on_where_it_was(
    tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(study.BUILD_TASKS, "quickstart", 60)
    args = arguments(tmp_path, "--copying", "--endpoint", endpoint, "--model", "loopback", "--ablations")
    text = study.run(args)
    assert text == (tmp_path / "table.md").read_text().rstrip("\n")
    # Rules alone, and for each of the two models five systems and five ablations; each line says whose answers it has.
    for heading in ("answer equal", "F1 of words", "W2R"):
        lines = [x for x in text.split("\n\n") if x.startswith(f"| {heading}")][0].splitlines()[2:]
        assert len(lines) == 1 + 2 * (5 + 5)
        assert sum("| copying stand-in |" in x for x in lines) == sum("| loopback |" in x for x in lines) == 10
    assert "harness_only | loopback" in text.split("full less")[1]
    asked = len(Chat.asked)
    assert asked and {body["model"] for body in Chat.asked} == {"loopback"}
    cells = {p: p.stat().st_mtime_ns for p in (tmp_path / "quickstart" / "cells").iterdir()}
    assert len(cells) == 21
    # A cell that a kill took is computed again, and the endpoint is not asked again for what it has answered.
    lost = next(p for p in cells if json.loads(p.read_text())["title"] == "direct" and "loopback" in p.read_text())
    before = lost.read_text()
    lost.unlink()
    assert study.run(args) == text and len(Chat.asked) == asked
    assert {k: v for k, v in json.loads(lost.read_text()).items() if k != "seconds"} == {
        k: v for k, v in json.loads(before).items() if k != "seconds"
    }
    assert all(p.stat().st_mtime_ns == t for p, t in cells.items() if p != lost)
    # Other questions are other cells.
    study.run(arguments(tmp_path, "--copying", "--rows", "5"))
    assert lost.read_text() != "" and json.loads(lost.read_text())["question"]


@pytest.mark.quick
def test_an_environment_that_cannot_run_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(study, "scienceworld_missing", lambda: "ScienceWorld: no Java found")
    args = study.parse(["--out", str(tmp_path), "--environments", "scienceworld"])
    with pytest.raises(UserError, match="no environment"):
        study.run(args)
    assert "left out: ScienceWorld: no Java found" in capsys.readouterr().out
    for bad in (["--rows", "0"], ["--environments", "moon"], ["--endpoint", "http://127.0.0.1:1/v1"]):
        with pytest.raises(SystemExit):
            study.parse(["--out", str(tmp_path), *bad])


@pytest.mark.quick
def test_the_content_tier_without_rules_answers_by_none(small_bank_book: Worldbook) -> None:
    for content in ("schema", "evidence"):
        harness = make_system(small_bank_book, None, SystemConfig(content=content))
        assert not harness.config.use_rules
    assert make_system(small_bank_book, None, SystemConfig(content="abstraction")).config.use_rules


# --- the errands of the terminal, and the agent that reads ---------------------------------------------------------


def test_terminal_errands_are_recorded_in_a_real_shell_and_repeat() -> None:
    tasks = terminal_tasks("heldout", len(KINDS))
    assert [t.messages for t in tasks] == [t.messages for t in terminal_tasks("heldout", len(KINDS))]
    assert not set(WORDS["train"]) & set(WORDS["heldout"])
    domain = ReferenceDomain("terminal")
    for task in tasks:
        environment = make_environment(task)
        history = play(ReadingAgent("terminal"), task, environment)
        assert len(history) == len(task.recorded_calls) and domain.solved(task, environment, history)
        assert domain.claimed(task, history)
        environment.close()  # type: ignore[attr-defined]
    # What the screen showed is text in a trace, not JSON in quotes.
    found, flags = align(episode_from_task(tasks[0]))
    assert found[0].text.startswith("ls\n") and not flags


def reading_task(*pairs: tuple[str, Any]) -> Task:
    messages = [Message("user", "Pay what is due to robin.")]
    for argument, result in pairs:
        messages.append(Message("assistant", "", None, (ToolCall("do", {"what": argument}),)))
        messages.append(Message("tool", canonical_json(result)))
    return Task("t", "terminal", tuple(messages), (), ())


@pytest.mark.quick
def test_the_reading_agent_knows_only_what_it_was_told() -> None:
    task = reading_task(("list robin", {"due": "bill7\nbill8"}), ("pay bill8", {"ok": True}), ("greet robin", "hello"))
    agent = ReadingAgent("terminal")

    def calls(*values: Any) -> int:
        history: list[Any] = []
        for value in values:
            call = agent.act(task, history)
            if call is None:
                break
            history.append((*call, value))
        return len(history)

    assert words({"a": "x1\nyy"}) == {"x1", "yy"}
    assert calls({"due": "bill8"}, {"ok": True}, "hello") == 3
    assert calls({"due": "bill9"}, {"ok": True}, "hello") == 1  # it never saw bill8
    assert calls({}, {"ok": True}) == 1  # an empty answer tells nothing
    assert calls({"error": "no", "x": "bill8"}, {"ok": True}) == 1  # a refusal that was not recorded
    assert calls({"due": "bill8"}, {"ok": False}, "hello") == 3


@pytest.mark.quick
def test_a_text_result_that_looks_like_json_stays_what_it_is() -> None:
    texts = {'"ls\\nsim$ "': "ls\nsim$ ", '"5"': '"5"', '"{}"': '"{}"', '{"a": 1}': '{"a": 1}', '"': '"'}
    for content, shown in texts.items():
        message = Message("assistant", "", None, (ToolCall("look", {}),))
        episode = episode_from_task(Task("t", "x", (Message("user", "go"), message, Message("tool", content)), (), ()))
        assert align(episode)[0][0].text == shown
