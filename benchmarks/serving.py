"""Served throughput against the engine's own: the same requests through HTTP streams and straight to the engine.

    python benchmarks/serving.py --model data/quickstart/model --config configs/quickstart.py --streams 32

Each stream asks `--requests` times, one after the other, as clients do that stay. What one request samples is between
half and one and a half times `--tokens` (nothing stops it), the same numbers on both sides, so that both do equal work
and streams do not end together. Sides take turns, `--repeats` times, on one engine in one process, each first in every
other round. The served side is asked by asyncio clients in a process of their own, over loopback, on the same cores.
Printed: tokens/s of both (median and range), the ratio (median of the rounds' own ratios, and their quartiles), time to
the first token. Goal: 0.95 or more. The ratio of the process's own CPU time (clients left out) says what serving costs
where other programs share the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

CLIENT = """
import asyncio, json, sys, time
host, port, body, lengths = "127.0.0.1", int(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])

async def stream(wanted):
    return [await one(json.dumps({**body, "max_tokens": n}).encode()) for n in wanted]

async def one(body):
    reader, writer = await asyncio.open_connection(host, port)
    head = "POST /v1/completions HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n"
    head += f"Content-Length: {len(body)}\\r\\n\\r\\n"
    start = time.perf_counter()
    writer.write(head.encode() + body)
    first, data = None, b""
    while chunk := await reader.read(65536):
        data += chunk
        if first is None and b"data: " in data:
            first = time.perf_counter() - start
    writer.close()
    assert b"[DONE]" in data, data[-300:]
    return first

async def main():
    return sum(await asyncio.gather(*map(stream, lengths)), [])

for line in sys.stdin:  # one line from the parent starts one round
    start = time.perf_counter()
    firsts = asyncio.run(main())
    print(json.dumps([time.perf_counter() - start, sorted(firsts)]), flush=True)
"""


def direct(loop: Any, generator: Any, prompt: list[int], sampling: Any, lengths: list[list[int]]) -> float:
    """Seconds for all requests straight on the engine's own loop (no HTTP, no streaming)."""
    done = threading.Event()
    left = [len(lengths)]

    def ask(stream: int, number: int) -> None:
        def report(progress: Any) -> None:
            assert progress.error is None, progress.error
            if progress.finish is None:
                return
            if number + 1 < len(lengths[stream]):
                ask(stream, number + 1)
                return
            left[0] -= 1
            if left[0] == 0:
                done.set()

        own = dataclasses.replace(sampling, max_tokens=lengths[stream][number])
        loop.submit(generator.request(prompt, own, stream), report)

    start = time.perf_counter()
    for k in range(len(lengths)):
        ask(k, 0)
    assert done.wait(600)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="Served tokens/s against the engine's own.")
    parser.add_argument("--config", default="configs/quickstart.py")
    parser.add_argument("--model", default="data/quickstart/model")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt_tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=4, help="of one stream in a round, one after the other")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args, overrides = parser.parse_known_args()

    import uvicorn

    from envace_jax.cli import load_config
    from envace_jax.compat import set_up_jax
    from envace_jax.serving.command import build_server
    from envace_jax.serving.protocol import Sampling

    set_up_jax()
    rng = random.Random(0)
    most = args.tokens + args.tokens // 2
    lengths = [[rng.randint(args.tokens // 2, most) for _ in range(args.requests)] for _ in range(args.streams)]
    room = args.prompt_tokens + most
    sizes = [f"--config.rollout.max_input_tokens={room}", f"--config.rollout.slots={args.streams}"]
    cfg = load_config(args.config, [*sizes, f"--config.learning.row_tokens={2 * room + 128}", *overrides])
    command = argparse.Namespace(
        model=args.model, name="m", alias=[], host="127.0.0.1", api_key_env="NO_KEY_HERE",
        max_requests=4 * args.streams, max_new_tokens=most, time_limit=600.0, max_body_mb=8.0,
    )  # fmt: skip
    server, loop = build_server(cfg, command)
    generator = server.generator
    generator.stop_ids = ()  # every request runs to its limit
    app = uvicorn.Server(uvicorn.Config(server.app, host="127.0.0.1", port=0, log_level="error"))
    threading.Thread(target=lambda: asyncio.run(app.serve()), daemon=True).start()
    while not app.started:
        time.sleep(0.05)
    port = app.servers[0].sockets[0].getsockname()[1]
    prompt = [5 + k % 200 for k in range(args.prompt_tokens)]
    body = json.dumps({"model": "m", "prompt": prompt, "stream": True, "temperature": 1.0})
    clients = subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(port), body, json.dumps(lengths)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert clients.stdin is not None and clients.stdout is not None
    sampling = Sampling(max_tokens=most)
    tokens = sum(map(sum, lengths))
    served: list[float] = []
    own: list[float] = []
    firsts: list[float] = []
    served_cpu: list[float] = []
    own_cpu: list[float] = []

    def ask_clients() -> None:
        assert clients.stdin is not None and clients.stdout is not None
        start = time.process_time()
        clients.stdin.write("go\n")
        clients.stdin.flush()
        wall, first = json.loads(clients.stdout.readline())
        served.append(tokens / wall)
        served_cpu.append(time.process_time() - start)
        firsts.extend(first)

    def ask_engine() -> None:
        start = time.process_time()
        own.append(tokens / direct(loop, generator, prompt, sampling, lengths))
        own_cpu.append(time.process_time() - start)

    for k in range(args.repeats + 1):
        for side in (ask_clients, ask_engine) if k % 2 else (ask_engine, ask_clients):
            side()
    # The first round warms both sides up.
    served, own, firsts = served[1:], own[1:], firsts[args.streams * args.requests :]
    ratios = [a / b for a, b in zip(served, own)]
    clients.stdin.close()
    clients.wait(timeout=30)
    app.should_exit = True
    loop.drain(5)
    figures = {
        "streams": args.streams,
        "requests_a_stream": args.requests,
        "tokens_a_request": args.tokens,
        "prompt_tokens": args.prompt_tokens,
        "engine_tokens_per_second": statistics.median(own),
        "engine_range": [min(own), max(own)],
        "served_tokens_per_second": statistics.median(served),
        "served_range": [min(served), max(served)],
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
        "cpu_seconds_engine": statistics.median(own_cpu[1:]),
        "cpu_seconds_served": statistics.median(served_cpu[1:]),
        "cpu_ratio": statistics.median(own_cpu[1:]) / statistics.median(served_cpu[1:]),
        "first_token_seconds_median": statistics.median(firsts),
    }
    print(json.dumps(figures, indent=1))
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
