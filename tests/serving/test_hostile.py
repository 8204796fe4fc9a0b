"""Requests that are wrong in every way that a seed finds: each is answered, none with the server's own error."""

from __future__ import annotations

import copy
import http.client
import json
import random
from typing import Any

import pytest

from tests.serving.test_app import TOOLS, USER, post

CALLS = [{"id": "c1", "type": "function", "function": {"name": "get_order", "arguments": '{"order": 1}'}}]
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Be kind."},
        *USER,
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": CALLS},
        {"role": "tool", "content": "{}", "tool_call_id": "c1"},
        {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
    ],
    "tools": TOOLS,
    "tool_choice": {"type": "function", "function": {"name": "get_order"}},
    "parallel_tool_calls": True,
    "chat_template_kwargs": {"enable_thinking": False},
    "temperature": 0.5, "top_p": 0.9, "top_k": 5, "max_tokens": 4, "n": 2, "seed": 3, "stop": ["x", "y"],
    "logprobs": True, "stream": False, "stream_options": {"include_usage": True},
}  # fmt: skip
ROLE = {"model": "tiny", "tools": TOOLS, "messages": [*USER, {"role": "assistant", "tool_calls": CALLS}]}
RAW = {"model": "tiny", "prompt": ["a", "b"], "echo": True, "max_tokens": 3, "logprobs": 1, "stop": "z"}
WORLD = {
    "tools": TOOLS,
    "system": "A shop.",
    "user": "Hi.",
    "recorded": [{"name": "get_order", "arguments": {"order": 9}, "result": {"status": ["new"]}}],
}
STEP = {"name": "get_order", "arguments": {"order": 9}}
WRONG: list[Any] = [
    None, True, -1, 0, 10**30, 10**4000, 0.5, float("nan"), float("inf"), "", "x", "\ud800", "\udc00\ud800", "\x00",
    "<|im_end|>", "NaN", '{"order": NaN}', '{"a": "\\ud800"}', "[" * 500, [], {}, [[]], [{}], {"": ""}, [None],
    {"$ref": []}, {"type": []}, {"name": []}, {"type": "string", "pattern": "(?=a)b"}, {"properties": []},
    {"required": 5}, {"\ud800": 1}, ["a"] * 600,
]  # fmt: skip


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Where something stands in a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, v in inner for place in places(v, (*path, key)))]


def spoilt(rng: random.Random, body: Any) -> Any:
    """The body with one or two things in it put wrong, or left out."""
    body = copy.deepcopy(body)
    for _ in range(rng.randint(1, 2)):
        path = rng.choice(places(body))
        if not path:
            return copy.deepcopy(rng.choice(WRONG))
        holder = body
        for key in path[:-1]:
            holder = holder[key]
        if rng.random() < 0.15:
            del holder[path[-1]]
        else:
            holder[path[-1]] = copy.deepcopy(rng.choice(WRONG))
    return body


def test_no_request_is_answered_by_the_servers_own_error(serve) -> None:
    server = serve(lambda request: '<tool_response>\n{"a": 1}\n</tool_response>')
    _, _, world = post(server.port, "/v1/worlds", json.dumps(WORLD))
    chat, step = "/v1/chat/completions", f"/v1/worlds/{world['id']}/step"
    routes: list[tuple[str, dict, Any]] = [
        (chat, {}, CHAT), (chat, {}, {**CHAT, "model": "tiny+rehearse-parallel-1", "stream": True}), (step, {}, STEP),
        (chat, {"X-Role": "rehearse"}, ROLE), ("/v1/completions", {}, RAW), ("/v1/worlds", {}, WORLD),
    ]  # fmt: skip
    for path, headers, body in routes:  # as they stand they are sound
        assert post(server.port, path, json.dumps({**body, "stream": False}), headers)[0] in (200, 201), path
    rng = random.Random(0)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    statuses: dict[int, int] = {}
    for _ in range(600):
        path, headers, body = rng.choice(routes)
        text = json.dumps(spoilt(rng, body))
        connection.request("POST", path, text, {"content-type": "application/json", **headers})
        response = connection.getresponse()
        response.read()
        assert response.status < 500, (path, headers, text[:2000])
        statuses[response.status] = statuses.get(response.status, 0) + 1
        if path == "/v1/worlds" and response.status == 201:  # the session that is stepped must stay
            post(server.port, step, json.dumps(STEP))
    connection.close()
    assert statuses[400] > 200 and server.loop.alive


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": []},
        {"anyOf": [{"$ref": {}}]},
        {"type": "object", "properties": {"$ref": {"$ref": 5}}},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": []},
        {"properties": []},
        {"minimum": 10**400},
    ],
)
def test_a_schema_that_cannot_be_followed_is_the_clients_mistake(serve, schema) -> None:
    server = serve(lambda request: "x")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"model": "tiny", "messages": USER, "response_format": form}
    status, _, answer = post(server.port, "/v1/chat/completions", json.dumps(body))
    assert status == 400 and "schema" in answer["error"]["message"]


def test_a_property_may_be_called_ref(serve) -> None:
    server = serve(lambda request: "x")
    schema = {"type": "object", "properties": {"$ref": {"type": "string"}}, "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"model": "tiny", "messages": USER, "response_format": form}
    assert post(server.port, "/v1/chat/completions", json.dumps(body))[0] == 200


@pytest.mark.parametrize("pattern", ["(?=a)b", "("])
def test_a_tool_that_cannot_be_checked_is_the_clients_mistake(serve, pattern) -> None:
    server = serve(lambda request: "x")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"pattern": pattern}}}}}
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
    body = {"model": "tiny", "tools": [tool], "messages": [*USER, {"role": "assistant", "tool_calls": [call]}]}
    status, _, answer = post(server.port, "/v1/chat/completions", json.dumps(body), {"X-Role": "rehearse"})
    assert status == 400 and "tool f" in answer["error"]["message"]
    _, _, world = post(server.port, "/v1/worlds", json.dumps({"tools": [tool]}))
    status, _, answer = post(server.port, f"/v1/worlds/{world['id']}/step", '{"name": "f", "arguments": {"a": "b"}}')
    assert status == 400 and "tool f" in answer["error"]["message"]
