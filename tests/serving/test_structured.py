"""Structured output over a real engine with random weights: whatever it would say, it can only say what fits."""

from __future__ import annotations

import json
import time

import jax
import jax.numpy as jnp
import openai
import pytest

from envace_jax.model.qwen3 import init_params
from envace_jax.model.spec import Qwen3Spec
from envace_jax.sampling.engine import Engine, EngineConfig

SCHEMA = {
    "type": "object",
    "properties": {"verdict": {"enum": ["pass", "fail"]}, "sure": {"type": "boolean"}},
    "required": ["verdict", "sure"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "track",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"carrier": {"enum": ["north", "south"]}, "insured": {"type": "boolean"}},
                "required": ["carrier", "insured"],
                "additionalProperties": False,
            },
        },
    }
]
USER = [{"role": "user", "content": "Where is it?"}]


@pytest.fixture(scope="module")
def make_engine(chat):
    spec = Qwen3Spec(
        vocab_size=chat.tokenizer.vocab_size,
        d_model=16,
        n_layers=1,
        n_heads=2,
        n_kv_heads=1,
        head_dim=8,
        d_ff=32,
        rope_theta=1e4,
    )
    params = init_params(spec, jax.random.key(0), jnp.float32)
    config = EngineConfig(slots=4, shelf=4, max_length=700, chunk=4, prefill_chunk=32)
    return lambda: Engine(params, spec, config, seed=1)


def test_replies_and_calls_meet_their_schemas(serve, make_engine):
    server = serve(make_engine(), max_length=700, time_limit=600.0)
    ask = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=600).chat.completions.create
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": SCHEMA}}
    got = ask(model="tiny", messages=USER, response_format=form, n=2, logprobs=True, temperature=1.5)
    for choice in got.choices:
        assert set(json.loads(choice.message.content)) == {"verdict", "sure"} and choice.finish_reason == "stop"
        assert len(choice.logprobs.content) > 0
    stream = ask(model="tiny", messages=USER, response_format=form, stream=True)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert set(json.loads(said)) == {"verdict", "sure"}
    named = {"type": "function", "function": {"name": "track"}}
    for choice_of_tool in ("required", named):
        got = ask(
            model="tiny",
            messages=USER,
            tools=TOOLS,
            tool_choice=choice_of_tool,
            max_tokens=300,
            parallel_tool_calls=False,
        )
        call, *_ = got.choices[0].message.tool_calls
        assert set(json.loads(call.function.arguments)) == {"carrier", "insured"}
    got = ask(model="tiny", messages=USER, response_format={"type": "json_object"}, max_tokens=200, seed=4)
    if got.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(got.choices[0].message.content), dict)
    # what cannot be followed is refused, and the server goes on
    for schema in ({"$ref": "#"}, {"type": "string", "pattern": "("}, {"enum": []}):
        began = time.monotonic()
        with pytest.raises(openai.BadRequestError, match="schema"):
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            ask(model="tiny", messages=USER, response_format=form)
        assert time.monotonic() - began < 300
    assert ask(model="tiny", messages=USER, max_tokens=4).usage.completion_tokens > 0
