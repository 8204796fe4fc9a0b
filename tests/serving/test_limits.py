"""What a server bounds: memory of its worlds, schemas that wait, and work on the event loop."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from envace_jax.rehearsal.scripted import ScriptedEngine
from envace_jax.serving import protocol, structured, worlds
from envace_jax.serving.loop import Overloaded
from tests.serving.conftest import Running
from tests.serving.test_app import TOOLS, USER, post

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
