"""The served quickstart model, asked by the programs that people use: openai, litellm, bfcl, tau2.

Long: a server process with a real engine, and clients in environments of their own (launch/clients.sh). A client that
is not there is skipped, and the report says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import openai
import pytest

from envace_jax.datasets.bfcl_single import check_single, load_bfcl_single
from envace_jax.datasets.quickstart.generator import generate_tasks
from envace_jax.text.transcript import ToolCall
from tests.clients import client_python

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
ALIAS = "openbmb/MiniCPM-SALA-FC"  # a name that bfcl knows, of a handler that speaks plain chat completions


@contextlib.contextmanager
def serving(folder: Path, positions: int):
    """(port, model folder) of a server with the committed model and room for `positions` tokens a row.

    That is also what keeps these tests short: asked for another domain's tools the little model says noise, and a
    harness lets it say as much as fits.
    """
    shutil.copytree(ROOT / "data" / "quickstart" / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": positions}))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [
        *(sys.executable, "-m", "envace_jax", "serve", "--config", "configs/quickstart.py", "--model", str(folder)),
        *("--name", str(folder), "--alias", "quickstart", "--alias", ALIAS, "--port", str(port)),
        *("--max_new_tokens", "48", "--config.chat.tool_docs=full", "--config.rollout.slots=8"),
        *("--config.rollout.live_episodes=8", f"--config.rollout.max_input_tokens={positions - 64}"),
        f"--config.learning.row_tokens={positions}",
    ]
    environment = {k: v for k, v in os.environ.items() if k != "ENVACE_API_KEY"} | {"JAX_PLATFORMS": "cpu"}
    log = folder.parent / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
    end = time.monotonic() + 1200
    try:
        while True:
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-2000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
                break
            except OSError:
                time.sleep(1)
        yield port, folder
    finally:
        process.terminate()
        assert process.wait(timeout=120) == 0 and "drained" in log.read_text(), log.read_text()[-2000:]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("served") / "model", 1536) as running:
        yield running


def tools_and_request():
    task = generate_tasks("heldout", 1)[0]
    return list(task.tools), [{"role": "user", "content": task.user_turns[0]}]


def test_the_official_openai_client(served):
    port, _ = served
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=300)
    tools, messages = tools_and_request()
    whole = client.chat.completions.create(
        model="quickstart", messages=messages, tools=tools, temperature=0, seed=1, logprobs=True
    )
    message = whole.choices[0].message
    assert message.content or message.tool_calls
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens > 0
    content, calls = "", []
    for chunk in client.chat.completions.create(
        model="quickstart", messages=messages, tools=tools, temperature=0, seed=1, stream=True
    ):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            calls += [(t.function.name, t.function.arguments) for t in choice.delta.tool_calls or []]
    assert content == (message.content or "")
    assert calls == [(t.function.name, t.function.arguments) for t in message.tool_calls or []]
    required = client.chat.completions.create(
        model="quickstart", messages=messages, tools=tools, tool_choice="required", max_tokens=48
    )
    assert required.choices[0].finish_reason in ("tool_calls", "length", "stop")
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}}}
    plain = {"chat_template_kwargs": {"enable_thinking": False}}  # a thought may take all the tokens there are
    told = client.chat.completions.create(model="quickstart", messages=messages, response_format=form, extra_body=plain)
    assert set(json.loads(told.choices[0].message.content)) == {"ok"}


def test_clients_that_misbehave(served):
    """A reader that dawdles, bodies that are no JSON, too many tools, a body without end: others are answered."""
    port, _ = served
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=300)
    _, messages = tools_and_request()

    def post(body: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        data = response.read()
        connection.close()
        return response.status, data

    asked = {"model": "quickstart", "messages": messages, "max_tokens": 48, "seed": 3}
    body = json.dumps(asked | {"stream": True, "logprobs": True, "n": 8}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(300)
        slow.connect(("127.0.0.1", port))
        slow.sendall(head.encode() + body)
        for wrong in (b"{", b"\xff\xfe", b"[" * 100_000, b'{"model": NaN}', b""):
            assert post(wrong)[0] == 400, wrong[:20]
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
        many = [{**tool, "function": {**tool["function"], "name": f"f{k}"}} for k in range(10_000)]
        status, answer = post(json.dumps(asked | {"tools": many}).encode())
        assert status == 400 and b"at most 512" in answer
        assert post_without_end(port, 100 << 20).startswith(b"HTTP/1.1 413")
        assert client.chat.completions.create(model="quickstart", messages=messages, max_tokens=4).choices
        data = b""
        while chunk := slow.recv(256):
            data += chunk
    assert data.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in data
    for k in range(8):  # each choice has its end
        assert f'"index": {k}, "delta": {{}}, "finish_reason": "'.encode() in data


def post_without_end(port: int, size: int) -> bytes:
    """What the server says to a chunked body of `size` bytes, which is sent until it has said something."""
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=300) as s:
        s.sendall(head)
        sent = 0
        while sent < size and not select.select([s], [], [], 0)[0]:
            try:
                s.sendall(chunk)
            except (BrokenPipeError, ConnectionResetError):
                break
            sent += 0x10000
        assert sent < size  # it was not read to its end
        return s.recv(65536)


def test_a_model_that_rehearses(served):
    """`NAME+rehearse-parallel-1` through the official client: what was private is told and counted."""
    port, _ = served
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=600)
    tools, messages = tools_and_request()
    asked = {"model": "quickstart+rehearse-parallel-1", "messages": messages, "tools": tools, "seed": 1}
    whole = client.chat.completions.create(**asked)
    private = whole.rehearsal["tokens"]
    assert whole.choices[0].message.content or whole.choices[0].message.tool_calls
    assert 0 < private < whole.usage.completion_tokens
    assert whole.usage.completion_tokens_details.reasoning_tokens == private
    first, *rest = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert first.rehearsal == {"memory": whole.rehearsal["memory"], "tokens": 0}  # kept from before
    assert rest[-1].usage.completion_tokens == whole.usage.completion_tokens - private
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.completions.create(model="quickstart+rehearse-parallel-1", prompt="a")


def test_64_concurrent_streams_and_none_is_lost(served):
    """Eight rows for 64 clients at once: each stream comes to its end, and equal seeds say equal things."""
    port, _ = served
    _, messages = tools_and_request()

    async def one(client: openai.AsyncOpenAI, seed: int) -> tuple[str, str | None]:
        text, finish = "", None
        stream = await client.chat.completions.create(
            model="quickstart", messages=messages, stream=True, seed=seed, max_tokens=24
        )
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
        return text, finish

    async def all_of_them():
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=900
        ) as client:
            return await asyncio.gather(*(one(client, k % 8) for k in range(64)))

    got = asyncio.run(all_of_them())
    assert len(got) == 64 and all(finish in ("stop", "length") for _, finish in got)
    for k in range(8):
        assert len(set(got[k::8])) == 1


LITELLM = """
import json, sys
import litellm
base, tools, messages = json.load(sys.stdin)
common = dict(model="openai/quickstart", api_base=base, api_key="none", messages=messages, temperature=0, timeout=300)
whole = litellm.completion(tools=tools, **common)
stream = litellm.completion(tools=tools, stream=True, **common)
text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
message = whole.choices[0].message
calls = [[t.function.name, t.function.arguments] for t in message.tool_calls or []]
n = whole.usage.completion_tokens
print(json.dumps({"content": message.content or "", "calls": calls, "streamed": text, "n": n}))
"""


def test_litellm(served):
    python = client_python("litellm")
    port, _ = served
    done = subprocess.run(
        [python, "-c", LITELLM],
        input=json.dumps([f"http://127.0.0.1:{port}/v1", *tools_and_request()]),
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["n"] > 0 and (got["content"] or got["calls"]) and got["streamed"] == got["content"]


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B-FC", ALIAS])
def test_bfcl_generates_and_evaluates_on_both_routes(served, tmp_path, model):
    """Raw completions with the Qwen handler's own prompt, and chat completions; scores are then those we give."""
    bfcl = Path(client_python("bfcl")).with_name("bfcl")
    port, folder = served
    wanted = {
        "simple_python": [f"simple_python_{i}" for i in range(3)],
        "irrelevance": [f"irrelevance_{i}" for i in range(2)],
    }
    (tmp_path / "test_case_ids_to_generate.json").write_text(json.dumps(wanted))
    url = f"http://127.0.0.1:{port}/v1"
    environment = os.environ | {
        "BFCL_PROJECT_ROOT": str(tmp_path),
        "REMOTE_OPENAI_BASE_URL": url,
        "REMOTE_OPENAI_API_KEY": "EMPTY",
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": "EMPTY",
        "HF_HUB_OFFLINE": "1",
    }
    generate = [
        *(str(bfcl), "generate", "--model", model, "--run-ids", "--num-threads", "2", "-o"),
        *("--result-dir", str(tmp_path / "result")),
    ]
    if model != ALIAS:
        generate += ["--skip-server-setup", "--local-model-path", str(folder)]
    for command in (
        generate,
        [
            *(str(bfcl), "evaluate", "--model", model, "--test-category", "simple_python,irrelevance"),
            *("--partial-eval", "--result-dir", str(tmp_path / "result"), "--score-dir", str(tmp_path / "score")),
        ],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    for category, ids in wanted.items():
        (results,) = (tmp_path / "result").rglob(f"*_{category}_result.json")
        (scores,) = (tmp_path / "score").rglob(f"*_{category}_score.json")
        rows = {row["id"]: row["result"] for row in map(json.loads, results.read_text().splitlines())}
        assert sorted(rows) == ids
        assert not any("Error during inference" in str(result) for result in rows.values()), rows
        tasks = {task.uuid.removeprefix("bfcl-"): task for task in load_bfcl_single((category,))}
        ours = sum(check_single(tasks[uuid], read_calls(rows[uuid]))[0] for uuid in ids)
        assert json.loads(scores.read_text().splitlines()[0])["correct_count"] == ours


def read_calls(result) -> list[ToolCall]:
    """The calls of a result row: a list of {name: JSON arguments} (chat route), or the output's text."""
    if isinstance(result, str):
        from envace_jax.text.tool_calls import parse_assistant

        return list(parse_assistant(result, mode="lenient").calls)
    return [ToolCall(name, json.loads(text)) for call in result for name, text in call.items()]


def test_tau2_run(tmp_path):
    """The official harness, where somebody has put it: it is on no package index."""
    tau2 = shutil.which("tau2")
    if tau2 is None:
        pytest.skip("no tau2 program on PATH (pip install -e a checkout of tau2-bench), so its run was not tried")
    with serving(tmp_path / "model", 16384) as (port, _):  # its policies are long
        model = json.dumps({"api_base": f"http://127.0.0.1:{port}/v1", "api_key": "EMPTY", "temperature": 0.6})
        command = [
            *(tau2, "run", "--domain", "airline", "--num-tasks", "1", "--num-trials", "1", "--max-steps", "4"),
            *("--agent-llm", "openai/quickstart", "--agent-llm-args", model),
            *("--user-llm", "openai/quickstart", "--user-llm-args", model, "--save-to", str(tmp_path / "out")),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-2000:]
