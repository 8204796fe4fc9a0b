"""The OpenAI wire format: requests read and checked, answers and stream events written. Pure.

A request is checked whole before anything is queued; what does not hold raises `BadRequest` with the field's name,
which the server turns into a 400 with an OpenAI error body.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from envace_jax.text.transcript import Message, ToolCall, canonical_json, clean_text

MAX_MESSAGES = 4096
MAX_TOOLS = 512
MAX_N = 32
MAX_STOP = 8
MAX_STOP_LENGTH = 256
MAX_DEPTH = 64
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


class BadRequest(ValueError):
    """The client's mistake: message, the field it is about, and the HTTP status."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.param, self.status, self.code = param, status, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclasses.dataclass(frozen=True)
class Sampling:
    """What every generation route takes."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    stream_usage: bool = False


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """A checked `/v1/chat/completions` body. `tool_choice` is none, auto, required or a tool's name.

    `schema` is the JSON schema the reply must meet, None for free text; `strict` says that a tool asks for arguments
    that meet its schema by construction.
    """

    model: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    tool_choice: str
    named_tool: str | None
    parallel: bool
    thinking: bool | None
    schema: Mapping[str, Any] | None
    sampling: Sampling
    strict: bool = False


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """A checked `/v1/completions` body; each prompt is text or token ids."""

    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool
    sampling: Sampling


def read_json(text: str) -> Any:
    """The value of a client's JSON text: numbers are finite, text is what UTF-8 can hold, nesting is bounded.

    Raises:
        ValueError: it is not such JSON.
    """
    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from None
    if _depth(value) > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    return _cleaned(value) if _SURROGATE_ESCAPE.search(text) else value


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {clean_text(key): _cleaned(inner) for key, inner in value.items()}
    return [_cleaned(inner) for inner in value] if isinstance(value, list) else value


def _depth(value: Any) -> int:
    deepest, level = 0, [value]
    while level and deepest <= MAX_DEPTH:
        deepest += 1
        inner: list[Any] = []
        for v in level:
            if isinstance(v, dict):
                inner.extend(v.values())
            elif isinstance(v, list):
                inner.extend(v)
        level = inner
    return deepest


def _typed(body: Mapping[str, Any], name: str, kinds: tuple[type, ...], default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(k.__name__ for k in kinds)
        raise BadRequest(f"'{name}' must be {wanted}", name)
    return value


def _between(body: Mapping[str, Any], name: str, low: float, high: float, default: Any, kinds: tuple[type, ...]) -> Any:
    value = _typed(body, name, kinds, default)
    if value is not None and not low <= value <= high:
        raise BadRequest(f"'{name}' must lie between {low:g} and {high:g}", name)
    return value


def _top_p(body: Mapping[str, Any], default: float) -> float:
    value = _between(body, "top_p", 0, 1, default, (int, float))
    if value == 0:
        raise BadRequest("'top_p' must lie above 0, up to 1 (for the likeliest token always: temperature 0)", "top_p")
    return value


def read_sampling(body: Mapping[str, Any], defaults: Sampling = Sampling()) -> Sampling:
    """The sampling fields of a body; NaN, wrong types and values out of range raise `BadRequest`."""
    stop = body.get("stop")
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else ()
    if stop is not None and not isinstance(stop, str | list):
        raise BadRequest("'stop' must be a string or a list of strings", "stop")
    if len(stops) > MAX_STOP or any(not isinstance(s, str) or not 0 < len(s) <= MAX_STOP_LENGTH for s in stops):
        raise BadRequest(f"'stop' takes at most {MAX_STOP} strings of 1 to {MAX_STOP_LENGTH} characters", "stop")
    limit = _between(body, "max_completion_tokens", 1, 1 << 24, None, (int,))
    limit = limit or _between(body, "max_tokens", 1, 1 << 24, None, (int,))
    options = _typed(body, "stream_options", (dict,), {})
    for name in ("logit_bias", "presence_penalty", "frequency_penalty"):
        if body.get(name):
            raise BadRequest(f"'{name}' is not supported", name)
    if _typed(body, "top_logprobs", (int,), 0) > 0:
        raise BadRequest("'top_logprobs' above 0 is not supported: only the sampled token's is known", "top_logprobs")
    seed = _typed(body, "seed", (int,), None)
    return Sampling(
        temperature=_between(body, "temperature", 0, 5, defaults.temperature, (int, float)),
        top_p=_top_p(body, defaults.top_p),
        top_k=max(0, _between(body, "top_k", -1, 1 << 20, defaults.top_k, (int,))),
        max_tokens=limit,
        seed=None if seed is None else seed & 0xFFFFFFFF,
        n=_between(body, "n", 1, MAX_N, 1, (int,)),
        stop=stops,
        logprobs=bool(body.get("logprobs")),
        stream=_typed(body, "stream", (bool,), False),
        stream_usage=bool(options.get("include_usage")),
    )


def _content(value: Any, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in value):
        return clean_text("".join(p["text"] for p in value))
    raise BadRequest(f"{where}.content must be text (or a list of text parts)", f"{where}.content")


def _call(value: Any, where: str) -> ToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where} must hold a function with a name", where)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments or "{}")
        except ValueError as error:
            raise BadRequest(f"{where}.function.arguments is not JSON: {str(error)[:200]}", where) from None
    if not isinstance(arguments, dict):
        raise BadRequest(f"{where}.function.arguments must be a JSON object", where)
    return ToolCall(function["name"], arguments, value.get("id"))


def read_message(value: Any, where: str) -> Message:
    """One message of a body; `developer` is `system`, reasoning comes as `reasoning_content`."""
    if not isinstance(value, dict):
        raise BadRequest(f"{where} must be an object", where)
    role = {"developer": "system", "function": "tool"}.get(str(value.get("role")), value.get("role"))
    if role not in ("system", "user", "assistant", "tool"):
        raise BadRequest(f"{where}.role must be system, user, assistant or tool", f"{where}.role")
    calls = value.get("tool_calls") or []
    if not isinstance(calls, list) or (calls and role != "assistant"):
        raise BadRequest(f"{where}.tool_calls must be a list and stands in assistant messages only", where)
    thinking = value.get("reasoning_content")
    return Message(
        role,
        _content(value.get("content"), where),
        thinking if isinstance(thinking, str) and thinking else None,
        tuple(_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)),
    )


def read_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """The tools of a body, each `{type: function, function: {name, …}}`."""
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise BadRequest(f"'tools' must be a list of at most {MAX_TOOLS}", "tools")
    seen: set[str] = set()
    for i, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise BadRequest(f"tools[{i}] must be {{type: function, function: {{name: …}}}}", f"tools[{i}]")
        if name in seen:
            raise BadRequest(f"tools[{i}]: the name '{name}' stands twice", f"tools[{i}]")
        seen.add(name)
    return tuple(value)


def read_chat(body: Any, defaults: Sampling = Sampling()) -> ChatRequest:
    """A whole chat body; raises `BadRequest` naming the field."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise BadRequest(f"'messages' must be a list of 1 to {MAX_MESSAGES} messages", "messages")
    tools = read_tools(body.get("tools"))
    names = {t["function"]["name"] for t in tools}
    choice, named = body.get("tool_choice"), None
    if isinstance(choice, dict):
        function = choice.get("function")
        named = function.get("name") if isinstance(function, dict) else None
        if not isinstance(named, str) or named not in names:
            raise BadRequest(f"tool_choice names '{named}', which is not among the tools", "tool_choice")
        choice = "named"
    elif choice is None:
        choice = "auto" if tools else "none"
    elif choice not in ("none", "auto", "required"):
        raise BadRequest("'tool_choice' must be none, auto, required or a named function", "tool_choice")
    if choice == "required" and not tools:
        raise BadRequest("tool_choice 'required' needs tools", "tool_choice")
    extra = _typed(body, "chat_template_kwargs", (dict,), {})
    thinking = extra.get("enable_thinking", body.get("enable_thinking"))
    return ChatRequest(
        model=str(body.get("model") or ""),
        messages=tuple(read_message(m, f"messages[{i}]") for i, m in enumerate(messages)),
        tools=tools if choice != "none" else (),
        tool_choice=choice,
        named_tool=named,
        parallel=_typed(body, "parallel_tool_calls", (bool,), True),
        thinking=None if thinking is None else bool(thinking),
        schema=_schema(body.get("response_format")),
        sampling=read_sampling(body, defaults),
        strict=choice != "none" and any(tool["function"].get("strict") is True for tool in tools),
    )


def _schema(value: Any) -> Mapping[str, Any] | None:
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        schema = value.get("json_schema")
        schema = schema.get("schema") if isinstance(schema, dict) else None
        if isinstance(schema, dict):
            return schema
    raise BadRequest("'response_format' must be text, json_object or json_schema with a schema", "response_format")


def read_completion(body: Any, vocab_size: int, defaults: Sampling = Sampling()) -> CompletionRequest:
    """A raw completion body: a prompt, or a list of prompts, as text or ids."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    prompt = body.get("prompt")
    ids = isinstance(prompt, list) and bool(prompt) and all(isinstance(p, int) for p in prompt)
    prompts = [prompt] if isinstance(prompt, str) or ids else prompt
    if not isinstance(prompts, list) or not 0 < len(prompts) <= MAX_N:
        raise BadRequest(f"'prompt' must be text, token ids, or a list of at most {MAX_N} of them", "prompt")
    read: list[str | tuple[int, ...]] = []
    for p in prompts:
        if isinstance(p, str):
            read.append(p)
        elif isinstance(p, list) and p and all(isinstance(t, int) and 0 <= t < vocab_size for t in p):
            read.append(tuple(p))
        else:
            raise BadRequest(f"'prompt' holds something that is neither text nor ids below {vocab_size}", "prompt")
    return CompletionRequest(
        str(body.get("model") or ""), tuple(read), _typed(body, "echo", (bool,), False), read_sampling(body, defaults)
    )


# --- answers ----------------------------------------------------------------------------------------------------------


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex[:24]}"


def tool_call_body(call: ToolCall, index: int | None = None) -> dict[str, Any]:
    """A call on the wire; `index` is there in stream deltas."""
    body: dict[str, Any] = {} if index is None else {"index": index}
    body |= {
        "id": call.id or new_id("call"),
        "type": "function",
        "function": {"name": call.name, "arguments": canonical_json(call.arguments)},
    }
    return body


def finish_reason(finish: str, calls: bool) -> str:
    """`length` where the limit cut it, `tool_calls` where calls were made, else `stop`."""
    if finish == "length":
        return "length"
    return "tool_calls" if calls else "stop"


def message_body(content: str, reasoning: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """The assistant message; its content is null only where calls stand in its place."""
    body: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning:
        body["reasoning_content"] = reasoning
    if calls:
        body["tool_calls"] = [tool_call_body(c) for c in calls]
    return body


def usage(prompt: int, completion: int, private: int = 0) -> dict[str, Any]:
    """Tokens used; what was generated in private counts, and is told apart as reasoning is."""
    total = completion + private
    counted: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": total,
        "total_tokens": prompt + total,
    }
    if private:
        counted["completion_tokens_details"] = {"reasoning_tokens": private}
    return counted


def envelope(
    kind: str, identity: str, model: str, choices: Sequence[Mapping[str, Any]], **extra: Any
) -> dict[str, Any]:
    """The outer object of an answer or of a stream chunk."""
    return {
        "id": identity,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": list(choices),
        **extra,
    }


def chat_logprobs(tokens: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
    """The `logprobs` object of a chat choice: the sampled tokens only."""
    return {
        "content": [
            {"token": t, "logprob": lp, "bytes": list(t.encode("utf-8", "replace")), "top_logprobs": []}
            for t, lp in zip(tokens, logprobs)
        ]
    }


def event(data: Any) -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"data: {text}\n\n".encode("utf-8", "replace")
