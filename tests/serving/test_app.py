"""The routes, asked by the official client and by clients that misbehave."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from typing import Any

import openai
import pytest

from envace_jax.rehearsal.scripted import Scripted

CALL = '<tool_call>\n{"name": "get_order", "arguments": {"order": 4821}}\n</tool_call>'
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"order": {"type": "integer"}}, "required": ["order"]},
        },
    }
    for name in ("get_order", "cancel_order")
]
USER: Any = [{"role": "user", "content": "Where is 4821?"}]


def client(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=20)


def post(port: int, path: str, body: bytes | str, headers: dict | None = None) -> tuple[int, dict, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", path, body, {"content-type": "application/json", **(headers or {})})
    response = connection.getresponse()
    data = response.read()
    connection.close()
    return response.status, dict(response.headers), json.loads(data) if data else None


def test_chat_whole_and_streamed_give_the_same(serve) -> None:
    said = f"<think>\nlook first\n</think>\n\nOn it.\n{CALL}\n{CALL.replace('get', 'cancel')}"
    server = serve(lambda request: said)
    c = client(server.url)
    whole = c.chat.completions.create(model="tiny", messages=USER, tools=TOOLS, logprobs=True)
    message = whole.choices[0].message
    assert message.content == "On it." and message.reasoning_content == "look first"
    assert [t.function.name for t in message.tool_calls] == ["get_order", "cancel_order"]
    assert json.loads(message.tool_calls[0].function.arguments) == {"order": 4821}
    assert whole.choices[0].finish_reason == "tool_calls"
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    content, reasoning, calls, finish, used = "", "", {}, None, None
    stream = c.chat.completions.create(
        model="tiny", messages=USER, tools=TOOLS, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        used = chunk.usage or used
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for t in choice.delta.tool_calls or []:
                calls[t.index] = (t.function.name, t.function.arguments)
            finish = choice.finish_reason or finish
    assert (content, reasoning, finish) == ("On it.", "look first", "tool_calls")
    assert calls == {i: (t.function.name, t.function.arguments) for i, t in enumerate(message.tool_calls)}
    assert used == whole.usage


def test_tool_choice_and_parallel_calls(serve) -> None:
    prompts: list[str] = []

    def script(request):
        prompts.append(server.server.chat.tokenizer.decode(request.prompt_ids))
        return '{"order": 7}}\n</tool_call>' if prompts[-1].endswith('"arguments": ') else f"{CALL}\n{CALL}"

    server = serve(script)
    c = client(server.url)
    named = c.chat.completions.create(
        model="tiny", messages=USER, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "cancel_order"}}
    )
    call = named.choices[0].message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("cancel_order", {"order": 7})
    single = c.chat.completions.create(model="tiny", messages=USER, tools=TOOLS, parallel_tool_calls=False)
    assert len(single.choices[0].message.tool_calls) == 1
    c.chat.completions.create(model="tiny", messages=USER, tools=TOOLS, tool_choice="none")
    assert "# Tools" not in prompts[-1]


def test_without_tools_a_tag_is_text_and_nothing_is_lost(serve) -> None:
    server = serve(lambda request: CALL)
    got = client(server.url).chat.completions.create(model="tiny", messages=USER)
    assert got.choices[0].message.content == CALL and not got.choices[0].message.tool_calls
    broken = serve(lambda request: "<tool_call>\n{oops\n</tool_call>")
    got = client(broken.url).chat.completions.create(model="tiny", messages=USER, tools=TOOLS)
    assert "{oops" in got.choices[0].message.content and got.choices[0].finish_reason == "stop"


def test_stop_strings_n_and_length(serve) -> None:
    server = serve(lambda request: "one two STOP three")
    c = client(server.url)
    got = c.chat.completions.create(model="tiny", messages=USER, stop=["STOP"], n=3)
    assert [x.message.content for x in got.choices] == ["one two "] * 3
    assert [x.finish_reason for x in got.choices] == ["stop"] * 3
    got = c.chat.completions.create(model="tiny", messages=USER, max_tokens=2)
    assert got.choices[0].finish_reason == "length" and got.usage.completion_tokens == 2


def test_raw_completions(serve) -> None:
    seen: list[tuple[int, ...]] = []
    server = serve(lambda request: (seen.append(tuple(request.prompt_ids)), "world")[1])
    c = client(server.url)
    got = c.completions.create(model="tiny", prompt="hello ", echo=True, logprobs=1)
    assert got.choices[0].text == "hello world"
    assert len(got.choices[0].logprobs.token_logprobs) == got.usage.completion_tokens
    c.completions.create(model="tiny", prompt=list(seen[0]))
    assert seen[1] == seen[0]
    text = "".join(x.choices[0].text for x in c.completions.create(model="tiny", prompt="a", stream=True))
    assert text == "world"


def test_a_seed_repeats_an_answer(serve) -> None:
    keys: list[tuple[int, ...]] = []
    server = serve(lambda request: (keys.append(request.key), "x")[1])
    c = client(server.url)
    for seed in (5, 5, None, None):
        c.chat.completions.create(model="tiny", messages=USER, seed=seed)
    assert keys[0] == keys[1] and len(set(keys)) == 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "oracle", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": USER, "temperature": -1}, "temperature"),
        ({"messages": USER, "temperature": True}, "temperature"),
        ({"messages": USER, "n": 1000}, "n"),
        ({"messages": USER, "max_tokens": 0}, "max_tokens"),
        ({"messages": USER, "stop": ["a"] * 99}, "stop"),
        ({"messages": USER, "tools": [{}]}, "tools[0]"),
        ({"messages": USER, "tools": TOOLS * 5000}, "tools"),
        ({"messages": USER, "tools": TOOLS + TOOLS}, "tools[2]"),
        ({"messages": USER, "tool_choice": "required"}, "tool_choice"),
        ({"messages": USER, "tools": TOOLS, "tool_choice": {"function": {"name": "zap"}}}, "tool_choice"),
        ({"messages": USER, "top_logprobs": 5}, "top_logprobs"),
        ({"messages": USER, "logit_bias": {"1": 5}}, "logit_bias"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "messages"),
    ],
)
def test_bad_fields_are_named(serve, body: dict, param: str) -> None:
    server = serve(lambda request: "x")
    status, _, answer = post(server.port, "/v1/chat/completions", json.dumps({"model": "tiny", **body}))
    assert status == 400 and answer["error"]["param"] == param and answer["error"]["message"]


def test_bodies_that_are_no_bodies(serve) -> None:
    server = serve(lambda request: "x", max_body=1 << 20)
    path = "/v1/chat/completions"
    assert post(server.port, path, "{")[0] == 400
    assert post(server.port, path, "[" * 100_000)[0] == 400
    assert post(server.port, path, '{"a": ' * 200 + "1" + "}" * 200)[0] == 400
    assert post(server.port, path, b"\xff\xfe")[0] == 400
    for number in ("NaN", "-Infinity", "1e999", "9" * 5000):
        body = json.dumps({"model": "tiny", "messages": USER})[:-1] + f', "temperature": {number}}}'
        status, _, answer = post(server.port, path, body)
        assert status == 400 and "is not JSON" in answer["error"]["message"]
    status, _, answer = post(server.port, path, '{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}')
    assert status == 404 and answer["error"]["message"].startswith("model '\ufffd'")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.putrequest("POST", path)
    connection.putheader("content-length", str(100 << 20))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()
    assert post(server.port, path, json.dumps({"model": "other", "messages": USER}))[0] == 404
    assert client(server.url).models.list().data[0].id == "tiny"


def test_a_key_stands_on_every_route_but_health(serve) -> None:
    server = serve(lambda request: "x", api_key="secret-1")
    for route in server.server.app.routes:
        for method in sorted((route.methods or {"GET"}) - {"HEAD"}):
            path = route.path.replace("{world}", "w").replace("{name:path}", "m")
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
            connection.request(method, path, "{}", {"authorization": "Bearer wrong"})
            status = connection.getresponse().status
            connection.close()
            assert status == (200 if path == "/health" else 401), path
    with pytest.raises(openai.AuthenticationError):
        client(server.url, "secret-2").models.list()
    assert client(server.url, "secret-1").models.list().data


def test_a_full_queue_answers_429_with_retry_after(serve) -> None:
    server = serve(lambda request: "x", max_requests=0)
    body = json.dumps({"model": "tiny", "messages": USER})
    status, headers, answer = post(server.port, "/v1/chat/completions", body)
    assert status == 429 and int(headers["retry-after"]) > 0 and answer["error"]["code"] == "rate_limit_exceeded"
    status, _, _ = post(server.port, "/v1/chat/completions", json.dumps({"stream": True, **json.loads(body)}))
    assert status == 429
    for stream in (False, True):
        body = json.dumps({"model": "tiny", "prompt": "a", "stream": stream})
        status, headers, _ = post(server.port, "/v1/completions", body)
        assert status == 429 and int(headers["retry-after"]) > 0


def test_a_client_that_goes_away_frees_its_row(serve, chat) -> None:
    from envace_jax.rehearsal.scripted import ScriptedEngine

    engine = ScriptedEngine(lambda r: Scripted("x"), chat.tokenizer, delay=lambda r: 10**9)
    step = engine.step
    engine.step = lambda: (time.sleep(0.005), step())[1]  # type: ignore[method-assign]
    server = serve(engine)
    _, _, world = post(server.port, "/v1/worlds", json.dumps({"tools": TOOLS}))
    arguments = {"order": 1}
    calls = [{"type": "function", "function": {"name": "get_order", "arguments": json.dumps(arguments)}}]
    asked = {"model": "tiny", "tools": TOOLS, "messages": [*USER, {"role": "assistant", "tool_calls": calls}]}
    for path, extra, wanted in (
        ("chat/completions", "", {"model": "tiny", "messages": USER, "stream": False}),
        ("chat/completions", "", {"model": "tiny", "messages": USER, "stream": True}),
        ("completions", "", {"model": "tiny", "prompt": "a", "stream": True}),
        ("chat/completions", "X-Role: rehearse\r\n", asked),
        (f"worlds/{world['id']}/step", "", {"name": "get_order", "arguments": arguments}),
    ):
        body = json.dumps(wanted).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as s:
            head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\n{extra}Content-Length: {len(body)}\r\n\r\n"
            s.sendall(head.encode() + body)
            while server.loop.open_requests == 0:
                time.sleep(0.01)
        end = time.monotonic() + 10
        while server.loop.open_requests and time.monotonic() < end:
            time.sleep(0.02)
        while not engine.idle and time.monotonic() < end:
            time.sleep(0.02)
        assert server.loop.open_requests == 0 and engine.idle


def test_a_request_has_its_time_and_is_counted_once(serve, chat) -> None:
    from envace_jax.rehearsal.scripted import ScriptedEngine

    engine = ScriptedEngine(lambda r: Scripted("x"), chat.tokenizer, delay=lambda r: 10**9)
    step = engine.step
    engine.step = lambda: (time.sleep(0.005), step())[1]  # type: ignore[method-assign]
    server = serve(engine, time_limit=0.2)
    c = client(server.url)
    for _ in range(2):
        assert c.chat.completions.create(model="tiny", messages=USER).choices[0].finish_reason == "length"
    while not engine.idle:
        time.sleep(0.01)
    assert server.loop.open_requests == 0
    assert server.loop.counts["timed_out"] == 2 == server.loop.counts["finished"]


def test_a_slow_reader_holds_nobody_up_and_loses_nothing(serve, chat) -> None:
    """A client that reads nothing for a while: others are answered meanwhile, and its own answer comes whole."""
    said = "word " * 12_000  # more than the sockets' buffers hold
    server = serve(lambda request: said if "long" in chat.tokenizer.decode(request.prompt_ids) else "quick")
    server.server.generator.max_length = 10**6
    body = json.dumps(
        {"model": "tiny", "messages": [{"role": "user", "content": "long"}], "stream": True, "max_tokens": 10**5}
    ).encode()
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.settimeout(60)
        s.connect(("127.0.0.1", server.port))
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        s.sendall(head.encode() + body)
        got = client(server.url).chat.completions.create(model="tiny", messages=USER)
        assert got.choices[0].message.content == "quick"
        data = b""
        while chunk := s.recv(65536):
            data += chunk
    assert b"[DONE]" in data
    events = re.findall(rb"data: (\{.*?\})\n\n", data.replace(b"\r\n", b"\n"))
    text = "".join(json.loads(e)["choices"][0]["delta"].get("content") or "" for e in events if b"delta" in e)
    assert text.split() == said.split()


def test_many_clients_none_lost_none_mixed(serve, chat) -> None:
    server = serve(lambda request: chat.tokenizer.decode(request.prompt_ids).split("#")[1], max_requests=256)
    answers: dict[int, str] = {}

    def ask(i: int) -> None:
        stream = client(server.url).chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": f"say #{i * 7919}# please"}], stream=True
        )
        answers[i] = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(64)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert answers == {i: str(i * 7919) for i in range(64)}


def test_an_engine_that_breaks_fails_the_health_check_and_tells_everyone(serve, chat) -> None:
    def script(request):
        raise RuntimeError("device lost")

    server = serve(script)
    body = json.dumps({"model": "tiny", "messages": USER})
    status, _, answer = post(server.port, "/v1/chat/completions", body)
    assert status == 503 and "device lost" in answer["error"]["message"]
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 503


def test_the_rehearsing_role_and_its_worlds(serve, chat) -> None:
    prompts: list[str] = []

    def script(request):
        prompts.append(chat.tokenizer.decode(request.prompt_ids))
        return '<tool_response>\n{"status": "shipped"}\n</tool_response>'

    server = serve(script)
    call = {"type": "function", "function": {"name": "get_order", "arguments": '{"order": 1}'}}
    body = {"model": "tiny", "tools": TOOLS, "messages": [*USER, {"role": "assistant", "tool_calls": [call]}]}
    status, _, answer = post(server.port, "/v1/chat/completions", json.dumps(body), {"X-Role": "rehearse"})
    assert status == 200 and answer["choices"][0]["message"] == {"role": "tool", "content": '{"status": "shipped"}'}
    assert answer["choices"][0]["source"] == "rehearsed"
    two = [{**call, "id": "a"}, {"id": "b", "function": {"name": "cancel_order", "arguments": '{"order": "x"}'}}]
    several = {**body, "messages": [*USER, {"role": "assistant", "tool_calls": [*two, {**call, "id": "c"}]}]}
    status, _, answer = post(server.port, "/v1/chat/completions", json.dumps(several), {"X-Role": "rehearse"})
    got = [choice["message"].get("tool_call_id") for choice in answer["choices"]]
    assert status == 200 and got == ["a", "b", "c"]
    assert [choice["source"] for choice in answer["choices"]] == ["rehearsed", "error", "rehearsed"]
    assert "shipped" not in prompts[-2] and "shipped" in prompts[-1]  # a later call knows what the earlier ones got
    for wrong in ({"stream": True}, {"n": 2}):
        got = post(server.port, "/v1/chat/completions", json.dumps({**body, **wrong}), {"X-Role": "rehearse"})
        assert got[0] == 400 and "'stream' nor 'n'" in got[2]["error"]["message"]
    recorded = [{"name": "get_order", "arguments": {"order": 9}, "result": {"status": "new"}}]
    status, _, world = post(server.port, "/v1/worlds", json.dumps({"tools": TOOLS, "recorded": recorded}))
    assert status == 201
    path = f"/v1/worlds/{world['id']}"
    status, _, fork = post(server.port, f"{path}/fork", "")
    step = {"name": "cancel_order", "arguments": {"order": 1}}
    status, _, answer = post(server.port, f"{path}/step", json.dumps(step))
    assert status == 200
    assert answer == {"observation": '{"status": "shipped"}', "source": "rehearsed", "error_code": None}
    assert '"status": "new"' in prompts[-1] and "shipped" not in prompts[-1]
    post(server.port, f"{path}/step", json.dumps(step))
    assert "shipped" in prompts[-1]  # the world remembers
    post(server.port, f"/v1/worlds/{fork['id']}/step", json.dumps(step))
    assert "shipped" not in prompts[-1]  # its fork went another way
    _, _, refused = post(server.port, f"{path}/step", json.dumps({"name": "get_order", "arguments": {"order": "x"}}))
    assert refused["source"] == "error" and refused["error_code"]
    assert post(server.port, "/v1/worlds/none/step", json.dumps(step))[0] == 404
