"""The server under load: 64 streams for some minutes beside clients that vanish and bursts that do not fit.

    python benchmarks/server_targets.py --minutes 10 --out runs/server_targets.json

A `serve` process with the quickstart model and a key; clients in this one, over loopback. Measured: streams lost (no
end, or cut), streams mixed (other text than the same request got when it was alone), 99th percentile of `/health`,
chunks that the engine makes for a client that went away, answers of a burst larger than the queue, routes that
answer without a key, time from SIGTERM until the process has gone with its streams at their ends.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from envace_jax.datasets.quickstart.generator import generate_tasks

KEY = "server-targets"
HOST = "127.0.0.1"
LONG = {"temperature": 2.0, "max_tokens": 400}
"""Makes an answer that does not end soon: hot samples of the little model are noise."""
ROUTES = (
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/worlds"),
)


def head(method: str, path: str, body: bytes, key: str | None = KEY) -> bytes:
    """A request on a connection of its own."""
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}"]
    lines += [f"Authorization: Bearer {key}"] if key else []
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


class Client:
    """Asks one server; every request has a connection of its own."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def ask(self, method: str, path: str, body: Any = None, key: str | None = KEY) -> tuple[int, bytes, bytes]:
        """Status, head and body of an answer."""
        reader, writer = await asyncio.open_connection(HOST, self.port)
        try:
            writer.write(head(method, path, b"" if body is None else json.dumps(body).encode(), key))
            answer = await reader.read(-1)
        finally:
            writer.close()
        before, _, after = answer.partition(b"\r\n\r\n")
        return int(before.split(b" ", 2)[1]), before, after

    async def stream(self, body: Any) -> str | None:
        """What a chat stream said, None where it did not come to its end; a refused one asks again."""
        while True:
            status, _, data = await self.ask("POST", "/v1/chat/completions", {**body, "stream": True})
            if status != 429:
                break
            await asyncio.sleep(0.1)
        if status != 200 or b"data: [DONE]" not in data:
            return None
        said = []
        for line in data.replace(b"\r\n", b"\n").split(b"\n"):
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "choices" not in event:
                    return None
                said += [json.dumps(_without_ids(choice["delta"])) for choice in event["choices"]]
        return _joined(said)

    async def vanish(self, body: Any) -> None:
        """Reads the beginning of a stream and goes away; where the server is full (429) it was never there."""
        reader, writer = await asyncio.open_connection(HOST, self.port)
        writer.write(head("POST", "/v1/chat/completions", json.dumps({**body, "stream": True}).encode()))
        if b" 429 " not in await reader.readline():
            await reader.readuntil(b'"delta"')
        writer.transport.abort()

    async def counter(self, name: str) -> float:
        _, _, data = await self.ask("GET", "/metrics")
        return next(float(line.split()[1]) for line in data.decode().splitlines() if line.startswith(f"{name} "))


def _without_ids(delta: dict[str, Any]) -> dict[str, Any]:
    calls = [{k: v for k, v in call.items() if k != "id"} for call in delta.get("tool_calls", ())]
    return {**delta, **({"tool_calls": calls} if calls else {})}


def _joined(deltas: list[str]) -> str:
    """Deltas with neighbouring pieces of text put together: how an answer is cut is the server's business."""
    text, rest = {"content": "", "reasoning_content": ""}, []
    for delta in map(json.loads, deltas):
        for name in text:
            text[name] += delta.get(name) or ""
        rest += delta.get("tool_calls", ())
    return json.dumps([text, rest])


def bodies(count: int, tokens: int) -> list[dict[str, Any]]:
    """Chat requests of held-out tasks, each with a seed of its own."""
    return [
        {
            "model": "m",
            "messages": [{"role": "user", "content": task.user_turns[0]}],
            "tools": list(task.tools),
            "seed": k,
            "max_tokens": tokens,
        }
        for k, task in enumerate(generate_tasks("heldout", count))
    ]


async def load(client: Client, asked: list[dict[str, Any]], streams: int, seconds: float, burst: int) -> dict[str, Any]:
    """Everything at once, for `seconds`."""
    alone = [await client.stream(body) for body in asked]
    assert None not in alone, "a stream that was alone on the server did not come to its end"
    end = time.monotonic() + seconds
    lost = mixed = done = 0
    health: list[float] = []
    statuses: dict[str, int] = {}
    numbers = itertools.count()

    async def streamer() -> None:
        nonlocal lost, mixed, done
        while time.monotonic() < end:
            k = next(numbers) % len(asked)
            try:
                said = await client.stream(asked[k])
            except OSError:
                said = None
            done += 1
            lost += said is None
            mixed += said is not None and said != alone[k]

    async def watcher() -> None:
        while time.monotonic() < end:
            start = time.perf_counter()
            status, _, _ = await client.ask("GET", "/health", key=None)
            assert status == 200
            health.append(time.perf_counter() - start)
            await asyncio.sleep(0.1)

    async def vanisher() -> None:
        while time.monotonic() < end:
            await client.vanish(asked[0] | LONG)
            await asyncio.sleep(2)

    async def crowd() -> None:
        while time.monotonic() < end - 5:
            body = asked[0] | {"max_tokens": 4}
            answers = await asyncio.gather(*(client.ask("POST", "/v1/chat/completions", body) for _ in range(burst)))
            for status, before, _ in answers:
                name = str(status)
                if status == 429:
                    name += " with Retry-After" if b"retry-after:" in before.lower() else " without Retry-After"
                statuses[name] = statuses.get(name, 0) + 1
            await asyncio.sleep(20)

    await asyncio.gather(*(streamer() for _ in range(streams)), watcher(), vanisher(), crowd())
    health.sort()
    return {
        "streams_done": done,
        "streams_lost": lost,
        "streams_mixed": mixed,
        "health_ms_median": 1000 * statistics.median(health),
        "health_ms_p99": 1000 * health[min(len(health) - 1, int(0.99 * len(health)))],
        "burst": statuses,
        "rows_free_after_load": await freed(client),
    }


async def freed(client: Client) -> bool:
    """Whether nothing is open any more, some seconds after the last client left."""
    for _ in range(100):
        if await client.counter("envace_requests_open") == 0:
            return True
        await asyncio.sleep(0.1)
    return False


async def chunks_after_leaving(client: Client, body: dict[str, Any], times: int) -> list[int]:
    """Chunks that the engine made from just before a lone client left until it stood still."""
    out = []
    for k in range(times):
        reader, writer = await asyncio.open_connection(HOST, client.port)
        request = body | LONG | {"stream": True, "seed": k}
        writer.write(head("POST", "/v1/chat/completions", json.dumps(request).encode()))
        await reader.readuntil(b'"delta"')
        if await client.counter("envace_requests_open") == 0:
            continue  # it had ended by itself
        before = await client.counter("envace_engine_chunks")
        writer.transport.abort()
        assert await freed(client)
        out.append(int(await client.counter("envace_engine_chunks") - before))
    return out


async def open_routes(client: Client) -> list[str]:
    """Routes that answer anything but 401 without the key."""
    asked = [(f"{method} {path}", (await client.ask(method, path, {}, key=None))[0]) for method, path in ROUTES]
    return [name for name, status in asked if status != 401]


async def drain(client: Client, process: subprocess.Popen, asked: list[dict[str, Any]]) -> dict[str, Any]:
    """Terminates the server while it streams."""
    running = [asyncio.ensure_future(client.stream(body)) for body in asked[:8]]
    while await client.counter("envace_requests_open") < 4:
        await asyncio.sleep(0.001)
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    said = await asyncio.gather(*running, return_exceptions=True)
    status = await asyncio.to_thread(process.wait, 120)
    whole = sum(isinstance(text, str) for text in said)
    return {"drain_seconds": time.monotonic() - start, "drain_exit": status, "drained_whole": f"{whole} of {len(said)}"}


def start_server(args: argparse.Namespace, log: Path) -> tuple[subprocess.Popen, int]:
    """A `serve` process that answers, and its port."""
    with socket.socket() as s:
        s.bind((HOST, 0))
        port = s.getsockname()[1]
    command = [
        *(sys.executable, "-m", "envace_jax", "serve", "--config", args.config, "--model", args.model, "--name", "m"),
        *("--port", str(port), "--max_requests", str(args.streams + 32)),
        *("--config.rollout.max_input_tokens=512", "--config.learning.row_tokens=768"),
        *(f"--config.rollout.slots={args.slots}", f"--config.rollout.live_episodes={args.slots}", *args.override),
    ]
    environment = os.environ | {"ENVACE_API_KEY": KEY}
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    while True:
        if process.poll() is not None:
            raise SystemExit(f"the server did not start:\n{log.read_text()[-2000:]}")
        try:
            socket.create_connection((HOST, port), timeout=5).close()
            return process, port
        except OSError:
            time.sleep(0.5)


async def measure(args: argparse.Namespace, process: subprocess.Popen, port: int) -> dict[str, Any]:
    client, asked = Client(port), bodies(16, args.tokens)
    figures: dict[str, Any] = {"streams": args.streams, "slots": args.slots, "minutes": args.minutes}
    figures["open_without_key"] = await open_routes(client)
    figures |= await load(client, asked, args.streams, 60 * args.minutes, burst=args.streams + 64)
    figures["chunks_after_leaving"] = await chunks_after_leaving(client, asked[0], 10)
    return figures | await drain(client, process, [body | LONG for body in asked])


def main() -> None:
    parser = argparse.ArgumentParser(description="The server's targets under load.")
    parser.add_argument("--config", default="configs/quickstart.py")
    parser.add_argument("--model", default="data/quickstart/model")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args, args.override = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        process, port = start_server(args, Path(folder) / "log")
        try:
            figures = asyncio.run(measure(args, process, port))
        finally:
            process.kill()
            process.wait()
    print(json.dumps(figures, indent=1))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
