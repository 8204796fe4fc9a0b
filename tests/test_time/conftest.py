"""The quickstart's chat format, and an engine that answers by what a prompt is about."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from envace_jax.rehearsal.scripted import Scripted, ScriptedEngine
from envace_jax.rehearsal.settings import EpisodeConfig
from envace_jax.text.chat import ChatFormat
from envace_jax.text.tokenizer import load_tokenizer

ORDERS = {"11": "paid", "12": "shipped"}
TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {"type": "object", "properties": {"order": {"type": "integer"}}, "required": ["order"]},
        },
    }
    for name in ("get_order", "cancel_order")
)
TOKENIZER = Path(__file__).parents[2] / "data" / "quickstart" / "tokenizer"
CFG = EpisodeConfig(
    rehearse_prompt="compact", max_act_tokens=64, max_rehearse_tokens=64, max_input_tokens=2000, max_acts=12
)


class Desk:
    """Two orders; one that is paid can be cancelled."""

    def __init__(self, orders: dict[str, str] | None = None) -> None:
        self.orders = dict(ORDERS if orders is None else orders)

    def reset(self, task) -> None:
        self.orders = dict(ORDERS)

    def step(self, name: str, arguments: dict):
        order = str(arguments.get("order"))
        if order not in self.orders:
            return {"error": "no such order"}
        if name == "cancel_order":
            if self.orders[order] != "paid":
                return {"error": f"already {self.orders[order]}"}
            self.orders[order] = "cancelled"
        return {"status": self.orders[order], "seen": "for real"}

    def fork(self) -> Desk:
        return Desk(self.orders)

    def state_hash(self) -> str:
        return json.dumps(self.orders, sort_keys=True)


@pytest.fixture(scope="session")
def chat() -> ChatFormat:
    return ChatFormat(load_tokenizer(TOKENIZER), thinking=False, tool_docs="none")


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answer(value) -> str:
    return f"<tool_response>\n{json.dumps(value)}\n</tool_response>"


class Policy:
    """Says what four functions of a prompt's text say, and keeps all prompts by kind."""

    def __init__(
        self,
        chat: ChatFormat,
        *,
        act: Callable[..., str | Scripted],
        rehearse: Callable[..., str] = lambda text, key: answer({"status": "cancelled"}),
        evaluate: Callable[..., str] = lambda text, key: "good",
        remember: Callable[..., str] = lambda text, key: "do it once",
    ):
        self.chat, self.prompts = chat, []
        self.says = {"act": act, "rehearse": rehearse, "evaluate": evaluate, "remember": remember}
        self.engine = ScriptedEngine(self._answer, chat.tokenizer)

    def _answer(self, request) -> str | Scripted:
        text = self.chat.tokenizer.decode(request.prompt_ids)
        kind = "act"
        for name in ("rehearse", "evaluate", "remember"):
            if f"user\n{name}\n" in text and text.count("<|im_start|>user") == 1:
                kind = name
        self.prompts.append((kind, text, request))
        return self.says[kind](text, request.key)

    def texts(self, kind: str) -> list[str]:
        return [text for k, text, _ in self.prompts if k == kind]
