"""The environment over HTTP: sessions, forks, misuse, and clients side by side."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from test_runtime import BOOK, STATE

from envace_jax.worldbook import service as service_module
from envace_jax.worldbook.harness import Harness, Prediction
from envace_jax.worldbook.service import WorldbookService

pytestmark = pytest.mark.quick


def post(address: str, path: str, body: Any) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_the_service_resets_steps_and_forks() -> None:
    service = WorldbookService(Harness(BOOK))
    service.start()
    try:
        _, opened = post(service.address, "/reset", {"initial_state": STATE})
        _, fork = post(service.address, "/fork", {"session": opened["session"]})
        _, done = post(
            service.address, "/step", {"session": opened["session"], "name": "cancel", "arguments": {"order": "1"}}
        )
        assert done["observation"] == '{"ok": true}' and done["source"] == "rule"
        look = {"name": "look", "arguments": {"order": "1"}}
        assert (
            post(service.address, "/step", {"session": opened["session"], **look})[1]["observation"]
            == '{"status": "gone"}'
        )
        assert (
            post(service.address, "/step", {"session": fork["session"], **look})[1]["observation"]
            == '{"status": "paid"}'
        )
        assert post(service.address, "/step", {"session": "s99", **look})[0] == 404
        assert post(service.address, "/step", b"[1")[0] == 400
        assert post(service.address, "/reset", {"initial_state": [1]})[0] == 400
    finally:
        service.stop()


LOOK = {"name": "look", "arguments": {"order": "1"}}


class Waiting:
    """An agent that answers when it is told to, or fails."""

    def __init__(self) -> None:
        self.asked, self.go = threading.Event(), threading.Event()

    def predict(self, requests: Any) -> list[Prediction]:
        if requests[0].name == "fail":
            raise OSError("no disk")
        self.asked.set()
        assert self.go.wait(20)
        return [Prediction("late", "unknown") for _ in requests]


@pytest.fixture
def slow() -> Iterator[tuple[WorldbookService, Waiting]]:
    agent = Waiting()
    service = WorldbookService(Harness(BOOK, agent))
    service.start()
    yield service, agent
    agent.go.set()
    service.stop()


def test_a_session_that_waits_for_its_model_holds_up_no_other(slow: tuple[WorldbookService, Waiting]) -> None:
    service, agent = slow
    first, second = (post(service.address, "/reset", {"initial_state": STATE})[1]["session"] for _ in range(2))
    answers: list[Any] = []
    ask = {"session": first, "name": "shout", "arguments": {}}
    asking = threading.Thread(target=lambda: answers.append(post(service.address, "/step", ask)))
    asking.start()
    assert agent.asked.wait(20)
    assert post(service.address, "/step", {"session": second, **LOOK})[1]["observation"] == '{"status": "paid"}'
    assert post(service.address, "/fork", {"session": first})[0] == 200
    assert not answers
    agent.go.set()
    asking.join(20)
    assert answers[0][1]["observation"] == "late"


def test_steps_of_one_session_sent_at_once_are_all_taken_one_after_the_other() -> None:
    service = WorldbookService(Harness(BOOK))
    service.start()
    try:
        session = post(service.address, "/reset", {"initial_state": STATE})[1]["session"]
        turns: list[int] = []
        step = {"session": session, **LOOK}
        threads = [threading.Thread(target=lambda: turns.append(post(service.address, "/step", step)[1]["turn"]))
                   for _ in range(12)]  # fmt: skip
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert sorted(turns) == list(range(1, 13))
    finally:
        service.stop()


def test_misuse_gets_one_answer_and_the_service_goes_on(
    slow: tuple[WorldbookService, Waiting], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, _ = slow
    session = post(service.address, "/reset", {"initial_state": STATE})[1]["session"]
    bad = [
        ("/step", {"session": session, "name": 5}, 400),
        ("/step", {"session": session, "name": "look", "arguments": []}, 400),
        ("/step", {"session": session, "name": "fail", "arguments": {}}, 500),
        ("/step", {}, 404),
        ("/nowhere", {}, 404),
        ("/reset", {"initial_state": {"a": json.loads("[" * 80 + "]" * 80)}}, 400),
        ("/step", b"\xff", 400),
    ]
    for path, body, status in bad:
        answer = post(service.address, path, body)
        assert answer[0] == status and answer[1]["error"], (path, body)
    host, port = service.server.server_address[:2]
    with socket.create_connection((str(host), int(port)), timeout=20) as raw:
        raw.sendall(b"POST /reset HTTP/1.0\r\nContent-Length: -5\r\n\r\n")
        assert b" 400 " in raw.recv(200)
    assert post(service.address, "/close", {"session": session})[1] == {"closed": session}
    assert post(service.address, "/step", {"session": session, **LOOK})[0] == 404
    monkeypatch.setattr(service_module, "MAX_SESSIONS", 2)
    kept = [post(service.address, "/reset", {"initial_state": STATE})[1]["session"] for _ in range(2)]
    post(service.address, "/step", {"session": kept[0], **LOOK})
    post(service.address, "/reset", {})
    assert post(service.address, "/step", {"session": kept[0], **LOOK})[0] == 200
    assert post(service.address, "/step", {"session": kept[1], **LOOK})[0] == 404  # idle for longest
