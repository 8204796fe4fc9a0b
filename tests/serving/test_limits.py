"""What a server bounds: memory of its worlds, schemas that wait, and work on the event loop."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time

import pytest

from envace_jax import cli
from envace_jax.rehearsal.scripted import ScriptedEngine
from envace_jax.serving import protocol, structured, worlds
from envace_jax.serving.loop import Overloaded
from tests.serving.conftest import Running
from tests.serving.test_app import TOOLS, USER, client, post

CHAT = "/v1/chat/completions"


def test_worlds_hold_so_much_and_no_more(serve, monkeypatch) -> None:
    server = serve(lambda request: '<tool_response>\n{"a": 1}\n</tool_response>')
    body = json.dumps({"tools": TOOLS, "system": "x" * 5_000})
    monkeypatch.setattr(worlds, "MAX_HELD", 3 * len(body))
    made = [post(server.port, "/v1/worlds", body)[2]["id"] for _ in range(3)]
    step = json.dumps({"name": "get_order", "arguments": {"order": 1}})
    assert post(server.port, f"/v1/worlds/{made[0]}/step", step)[0] == 200  # too much in all: the oldest unused goes
    assert [post(server.port, f"/v1/worlds/{w}/fork", "")[0] for w in (made[1], made[2])] == [404, 201]
    monkeypatch.setattr(worlds, "MAX_WORLD", len(body) + len(step))
    assert post(server.port, f"/v1/worlds/{made[0]}/step", step)[0] in (404, 413)
    big = json.dumps({"tools": TOOLS, "system": "x" * 6_000})
    status, _, answer = post(server.port, "/v1/worlds", big)
    assert status == 413 and "holds at most" in answer["error"]["message"]


def test_schemas_wait_in_a_bounded_line_for_a_bounded_time(serve, chat, monkeypatch) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    body = {"model": "tiny", "messages": USER, "response_format": form}
    late = structured.Structure(chat, seconds=0.0)
    with pytest.raises(Overloaded, match="in time"):
        asyncio.run(late.guides(protocol.read_chat(body), ""))
    server = serve(lambda request: "x")
    monkeypatch.setattr(structured, "MAX_OPEN", 0)
    status, headers, _ = post(server.port, CHAT, json.dumps(body))
    assert status == 429 and int(headers["retry-after"]) > 0
    assert post(server.port, CHAT, json.dumps({"model": "tiny", "messages": USER}))[0] == 200
    monkeypatch.undo()
    assert post(server.port, CHAT, json.dumps(body))[0] == 200


def test_an_open_bind_needs_a_key(monkeypatch, capsys) -> None:
    monkeypatch.delenv("ENVACE_API_KEY", raising=False)
    assert cli.main(["serve", "--host", "0.0.0.0", "--model", "data/quickstart/model"]) == 2
    assert "set ENVACE_API_KEY to a key first" in capsys.readouterr().err


def test_a_body_that_does_not_come_is_not_waited_for(serve) -> None:
    server = serve(lambda request: "x", body_seconds=0.2)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as s:
        s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        answer = b""
        while b"did not arrive in time" not in answer:
            chunk = s.recv(65536)
            assert chunk, answer
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 408")
    assert post(server.port, CHAT, json.dumps({"model": "tiny", "messages": USER}))[0] == 200


def test_a_drain_lets_open_streams_end_and_takes_nothing_new(serve, chat) -> None:
    engine = ScriptedEngine(lambda request: "all of it", chat.tokenizer, delay=lambda request: 100)
    step = engine.step
    engine.step = lambda: (time.sleep(0.005), step())[1]  # type: ignore[method-assign]
    server = serve(engine)
    ask = client(server.url).chat.completions.create
    said: list[str] = []

    def listen() -> None:
        stream = ask(model="tiny", messages=USER, stream=True)
        said.append("".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices))

    streams = [threading.Thread(target=listen) for _ in range(3)]
    for thread in streams:
        thread.start()
    while server.loop.open_requests < 3:
        time.sleep(0.01)
    whole: list[bool] = []
    draining = threading.Thread(target=lambda: whole.append(server.loop.drain(60.0)))
    draining.start()
    while not server.loop._draining:
        time.sleep(0.001)
    for path, body in ((CHAT, {"model": "tiny", "messages": USER}), ("/v1/completions", {"prompt": "a"})):
        status, headers, answer = post(server.port, path, json.dumps({**body, "stream": True}))
        assert status == 429 and "shutting down" in answer["error"]["message"] and headers["retry-after"] == "30"
    for thread in (*streams, draining):
        thread.join(timeout=60)
    assert said == ["all of it"] * 3 and whole == [True]


class Watched:
    """A tokenizer that notes which thread encodes how much."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer, self.noted = tokenizer, []

    def __getattr__(self, name: str):
        return getattr(self.tokenizer, name)

    def encode(self, text: str) -> list[int]:
        self.noted.append((len(text), threading.current_thread()))
        return self.tokenizer.encode(text)

    def encode_data(self, text: str) -> list[int]:
        self.noted.append((len(text), threading.current_thread()))
        return self.tokenizer.encode_data(text)


def test_long_texts_are_not_encoded_on_the_event_loop(chat) -> None:
    import dataclasses

    watched = Watched(chat.tokenizer)
    engine = ScriptedEngine(lambda request: '<tool_response>\n{"a": 1}\n</tool_response>', chat.tokenizer)
    server = Running(engine, dataclasses.replace(chat, tokenizer=watched))
    try:
        watched.noted.clear()
        long = "the order " * 3_000
        said = [{"role": "user", "content": long}]
        call = {"type": "function", "function": {"name": "get_order", "arguments": '{"order": 1}'}}
        post(server.port, CHAT, json.dumps({"model": "tiny", "messages": said}))
        post(server.port, "/v1/completions", json.dumps({"model": "tiny", "prompt": long}))
        role = {"model": "tiny", "tools": TOOLS, "messages": [*said, {"role": "assistant", "tool_calls": [call]}]}
        post(server.port, CHAT, json.dumps(role), {"X-Role": "rehearse"})
        _, _, world = post(server.port, "/v1/worlds", json.dumps({"tools": TOOLS, "system": long}))
        post(server.port, f"/v1/worlds/{world['id']}/step", '{"name": "get_order", "arguments": {"order": 1}}')
        assert sum(size >= len(long) for size, _ in watched.noted) >= 2
        assert all(thread is not server.thread for size, thread in watched.noted if size > worlds.SHORT)
        assert post(server.port, CHAT, json.dumps({"model": "tiny", "messages": USER}))[0] == 200
        assert watched.noted[-1][1] is server.thread  # a short one is encoded where it is
        # what no tokens are long enough for is not encoded at all
        watched.noted.clear()
        endless = "x" * (1 << 20)
        for path, body in ((CHAT, {"messages": [{"role": "user", "content": endless}]}),
                           (CHAT, {"model": "tiny+rehearse-parallel-1", "tools": TOOLS,
                                   "messages": [{"role": "user", "content": endless}]}),
                           ("/v1/completions", {"prompt": endless})):  # fmt: skip
            status, _, answer = post(server.port, path, json.dumps(body))
            assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
        assert not watched.noted
    finally:
        server.close()
