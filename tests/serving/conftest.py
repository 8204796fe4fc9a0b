"""A server on loopback over a scripted or a tiny real engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from envace_jax.rehearsal.scripted import ScriptedEngine
from envace_jax.rehearsal.settings import EpisodeConfig
from envace_jax.serving.app import Server, ServerSettings
from envace_jax.serving.generate import Generator
from envace_jax.serving.loop import EngineLoop
from envace_jax.serving.worlds import Worlds
from envace_jax.text.chat import ChatFormat
from envace_jax.text.tokenizer import load_tokenizer

TOKENIZER = Path(__file__).parents[2] / "data" / "quickstart" / "tokenizer"


@pytest.fixture(scope="session")
def chat() -> ChatFormat:
    return ChatFormat(load_tokenizer(TOKENIZER), thinking=False)


class Running:
    """A server under test: its address, its loop, and a way to stop it."""

    def __init__(self, engine: Any, chat: ChatFormat, max_requests: int = 128, max_length: int = 4096, **settings: Any):
        self.loop = EngineLoop(engine, max_requests=max_requests, time_limit=settings.pop("time_limit", 60.0))
        generator = Generator(self.loop, chat.tokenizer, chat.stop_ids, max_length, 64)
        episode = EpisodeConfig(rehearse_prompt="compact", max_input_tokens=2000, max_rehearse_tokens=64)
        self.server = Server(
            generator, chat, ServerSettings("tiny", **settings), Worlds(generator, chat, episode, limit=8)
        )
        config = uvicorn.Config(self.server.app, host="127.0.0.1", port=0, log_level="error")
        self.uvicorn = uvicorn.Server(config)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.uvicorn.serve()), daemon=True)
        self.thread.start()
        while not self.uvicorn.started:
            time.sleep(0.01)
        self.port = self.uvicorn.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def close(self) -> None:
        self.uvicorn.should_exit = True
        self.thread.join(timeout=10)
        self.loop.drain(1.0)


@pytest.fixture
def serve(chat: ChatFormat) -> Iterator[Callable[..., Running]]:
    """serve(script or engine, **settings) starts a server; all are stopped at the end."""
    running: list[Running] = []

    def start(script: Any, **settings: Any) -> Running:
        engine = script if hasattr(script, "submit") else ScriptedEngine(script, chat.tokenizer)
        running.append(Running(engine, chat, **settings))
        return running[-1]

    yield start
    for r in running:
        r.close()
