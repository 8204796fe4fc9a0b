"""`serve`: an OpenAI-compatible server over one model folder."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
from pathlib import Path

from ml_collections import ConfigDict

from envace_jax.build import chat_format, checked_spec, load_model, longest_row, make_engine, mesh_for
from envace_jax.config import UserError
from envace_jax.options import number, whole
from envace_jax.rehearsal.settings import EpisodeConfig
from envace_jax.serving.app import Server, ServerSettings
from envace_jax.serving.generate import Generator
from envace_jax.serving.loop import EngineLoop
from envace_jax.serving.protocol import Sampling
from envace_jax.serving.remember import RememberingTokenizer
from envace_jax.serving.worlds import Worlds

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", help="Hugging Face folder (stands above config.model.path)")
    parser.add_argument("--name", help="the model's name on the wire (default: the folder's)")
    parser.add_argument("--alias", action="append", default=[], help="a further name for it (repeatable)")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind; anything but loopback needs a key")
    parser.add_argument("--port", type=whole(0, 65535), default=8000)
    parser.add_argument("--api_key_env", default="ENVACE_API_KEY", help="environment variable that holds the key")
    parser.add_argument("--max_requests", type=whole(1), default=256, help="open requests before 429")
    parser.add_argument("--max_new_tokens", type=whole(1), default=1024, help="where a request names no limit")
    parser.add_argument("--time_limit", type=number(0.001), default=600.0, help="seconds one request may take")
    parser.add_argument("--max_body_mb", type=number(0.001), default=8.0)
    parser.add_argument("--drain", type=number(0), default=25.0, help="seconds that open requests get at shutdown")


def build_server(cfg: ConfigDict, args: argparse.Namespace) -> tuple[Server, EngineLoop]:
    """Everything but the socket; raises `UserError` for an open bind without a key."""
    key = os.environ.get(args.api_key_env) or None
    if args.host not in LOOPBACK and key is None:
        raise UserError(f"--host {args.host} is open to others: set {args.api_key_env} to a key first")
    if args.model:
        if not Path(args.model).is_dir():
            raise UserError(f"--model {args.model}: no such folder")
        cfg.model.path = args.model
    if not cfg.model.path:
        raise UserError("--model: expected a Hugging Face folder (or config.model.path)")
    chat = chat_format(cfg)
    within_positions(cfg, checked_spec(cfg, chat).max_positions)
    chat = dataclasses.replace(chat, tokenizer=RememberingTokenizer(chat.tokenizer))
    spec, params = load_model(cfg, chat, mesh_for(cfg))
    engine = make_engine(cfg, spec, params)
    engine.warm_up(guided=True)
    loop = EngineLoop(engine, max_requests=args.max_requests, time_limit=args.time_limit)
    generator = Generator(loop, chat.tokenizer, chat.stop_ids, longest_row(cfg), args.max_new_tokens)
    settings = ServerSettings(
        model=args.name or Path(cfg.model.path).resolve().name,
        aliases=tuple(args.alias),
        api_key=key,
        max_body=int(args.max_body_mb * 2**20),
        defaults=Sampling(temperature=cfg.rollout.temperature, top_p=cfg.rollout.top_p, top_k=cfg.rollout.top_k),
    )
    return Server(generator, chat, settings, Worlds(generator, chat, EpisodeConfig.from_config(cfg))), loop


def within_positions(cfg: ConfigDict, positions: int) -> None:
    """Shortens rows to what the model was made for; outputs get a quarter of its positions at most."""
    r = cfg.rollout
    if longest_row(cfg) > positions:
        output = min(max(r.max_act_tokens, r.max_rehearse_tokens), max(1, positions // 4))
        r.max_act_tokens = r.max_rehearse_tokens = output
        r.max_input_tokens = min(r.max_input_tokens, positions - output)
        print(f"rows of {longest_row(cfg)} tokens: the model was made for {positions} positions", flush=True)


def run_serve(cfg: ConfigDict, args: argparse.Namespace) -> None:
    import uvicorn

    print("loading and compiling", flush=True)
    server, loop = build_server(cfg, args)
    print(f"serving '{server.settings.model}' at http://{args.host}:{args.port}/v1", flush=True)
    config = uvicorn.Config(
        server.app,
        host=args.host,
        port=args.port,
        log_level="warning",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(args.drain),
        h11_max_incomplete_event_size=64 << 10,
    )
    # uvicorn stops at these signals and then raises them once more, for whoever started it. That is us, and there are
    # requests to drain and an exit status to give.
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, lambda *_: None)
    try:
        uvicorn.Server(config).run()
    finally:
        whole = loop.drain(args.drain)
        print("drained" if whole else "stopped with open requests", flush=True)
