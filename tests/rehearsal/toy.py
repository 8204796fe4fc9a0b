"""A vocabulary of whole calls and results, and a model that mostly knows which of them may follow what.

Its outputs are of every kind: calls and answers that are sound, two calls at once, calls that are no JSON or that no
tool fits, answers in the wrong role, replies. Attention is random, so log-probabilities depend on everything seen.
"""

from __future__ import annotations

import string

import jax
import numpy as np

from envace_jax.datasets.cm2 import Task
from envace_jax.model.qwen3 import init_params
from envace_jax.model.spec import Qwen3Spec
from envace_jax.text.transcript import Message
from tests.rehearsal.helpers import TOOLS, item

TAGS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
CALLS = tuple(f'\n{{"name": "get_order", "arguments": {{"order_id": "A{i}"}}}}\n' for i in range(3))
ODD_CALLS = ('\n{"name": "get_order"\n', '\n{"name": "no_such_tool", "arguments": {}}\n')
ANSWERS = tuple(f'\n{{"id": "A{i}", "status": "open"}}\n' for i in range(3))
ODD_ANSWERS = ("\nno JSON\n",)
REPLY = "It is done."
ERRORS = (
    '{"error_tool_call": {"code": "',
    '", "message": "',
    "FABRICATED_RESPONSE",
    "TOOL_NOT_AVAILABLE",
    "SIMULATOR_JSON_DECODE_ERROR",
    "NO_EXECUTION_RESULT_TAG_FOUND",
    "An output must not contain ",
    ": only the environment answers. End the turn after the calls.",
    " is not JSON: ",
    "The output has no ",
    "The text ",
    " outside its thinking.",
    "tool_call",
    "tool_response",
)
OTHER = ("user\n", "assistant\n", "rehearse\n", "\n\n", "\n", REPLY)
PIECES = (*TAGS, *CALLS, *ODD_CALLS, *ANSWERS, *ODD_ANSWERS, *ERRORS, *OTHER, *sorted(set(string.printable) - {"\n"}))


class ToyTokenizer:
    """Longest piece first."""

    vocab_size = -(-len(PIECES) // 16) * 16
    eos_id, pad_id = PIECES.index("<|im_end|>"), 0
    fingerprint = "toy"
    tags = {tag: i for i, tag in enumerate(TAGS)}

    def encode_data(self, text: str) -> list[int]:
        return self._encode(text, range(len(TAGS), len(PIECES)))

    def encode(self, text: str) -> list[int]:
        return self._encode(text, range(len(PIECES)))

    def _encode(self, text: str, allowed: range) -> list[int]:
        ids = []
        while text:
            best = max((i for i in allowed if text.startswith(PIECES[i])), key=lambda i: len(PIECES[i]))
            ids.append(best)
            text = text[len(PIECES[best]) :]
        return ids

    def decode(self, ids) -> str:
        return "".join(PIECES[i] if i < len(PIECES) else "" for i in ids)

    def token_id(self, piece: str) -> int | None:
        return PIECES.index(piece) if piece in PIECES else None

    def save(self, folder) -> None:
        raise NotImplementedError


def toy_model(seed: int = 0):
    """(spec, parameters)."""
    v = ToyTokenizer.vocab_size
    spec = Qwen3Spec(
        vocab_size=v,
        d_model=v,
        n_layers=1,
        n_heads=2,
        n_kv_heads=1,
        head_dim=8,
        d_ff=16,
        rope_theta=1e4,
        tie_embeddings=False,
    )
    follows = {
        "assistant\n": {"<tool_call>": 5, "<tool_response>": 5, REPLY: 2},
        "<tool_call>": dict.fromkeys(CALLS, 6) | dict.fromkeys(ODD_CALLS, 1),
        "<tool_response>": dict.fromkeys(ANSWERS, 6) | dict.fromkeys(ODD_ANSWERS, 8),
        "</tool_call>": {"<|im_end|>": 3, "<tool_call>": 2},
        "</tool_response>": {"<|im_end|>": 1},
        REPLY: {"<|im_end|>": 8, REPLY: 1},
    }
    follows |= {piece: {"</tool_call>": 1} for piece in (*CALLS, *ODD_CALLS)}
    follows |= {piece: {"</tool_response>": 1} for piece in (*ANSWERS, *ODD_ANSWERS)}
    logits = np.full((v, v), -8.0, np.float32)
    for piece, next_pieces in follows.items():
        for other, weight in next_pieces.items():
            logits[PIECES.index(piece), PIECES.index(other)] = np.log(weight) + 3
    params = init_params(spec, jax.random.key(seed))
    layers = params["layers"] | {"o": params["layers"]["o"] * 4, "v": params["layers"]["v"] * 4}
    embed = np.eye(v, dtype=np.float32)
    return spec, params | {"layers": layers, "embed": embed, "lm_head": logits / np.sqrt(v)}


def toy_task(uuid: str, turns: int = 2) -> Task:
    messages = []
    for turn in range(turns):
        messages += [Message("user", f"{uuid}{turn}"), Message("assistant", REPLY)]
    checklist = tuple((item("C0", {"kind": "reply", "contains": ["done"]}),) for _ in range(turns))
    return Task(uuid, "test", tuple(messages), TOOLS, (checklist,))
