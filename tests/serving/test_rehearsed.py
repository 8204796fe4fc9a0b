"""A served model that rehearses before it answers: the official client, kept memories, what is refused."""

from __future__ import annotations

import json

import openai
import pytest

from tests.test_time.conftest import TOOLS, Policy, answer, call

pytestmark = pytest.mark.quick
USER = {"role": "user", "content": "Cancel 11."}


def ask(url: str, messages, model: str = "tiny+rehearse-parallel-2", **more):
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    return client.chat.completions.create(model=model, messages=messages, tools=list(TOOLS), **more)


def act(text: str, key) -> str:
    return "11 is cancelled." if "<tool_response>" in text else call("cancel_order", order=11)


def test_it_rehearses_once_for_each_message_of_the_user(chat, serve):
    policy = Policy(chat, act=act, rehearse=lambda text, key: answer({"status": "imagined"}))
    policy.says["remember"] = lambda text, key: "cancel 11"
    server = serve(policy.engine)
    got = ask(server.url, [USER])
    assert got.choices[0].message.tool_calls[0].function.name == "cancel_order"
    assert got.model == "tiny+rehearse-parallel-2"
    assert got.rehearsal["memory"] == "cancel 11" and got.rehearsal["tokens"] > 0
    said = len(chat.tokenizer.encode(act("", None)))
    assert got.usage.completion_tokens == said + got.rehearsal["tokens"]
    assert got.usage.completion_tokens_details.reasoning_tokens == got.rehearsal["tokens"]
    assert len(policy.texts("evaluate")) == 2 and len(policy.texts("remember")) == 1
    assert policy.texts("act")[-1].count("memory\ncancel 11") == 1
    # the tool's real answer comes: the same memory, no further rehearsal
    made = got.choices[0].message.model_dump(exclude_none=True)
    result = {
        "role": "tool",
        "tool_call_id": made["tool_calls"][0]["id"],
        "content": json.dumps({"status": "cancelled"}),
    }
    again = ask(server.url, [USER, made, result])
    assert again.choices[0].message.content == "11 is cancelled." and again.rehearsal["tokens"] == 0
    assert len(policy.texts("evaluate")) == 2
    assert policy.texts("act")[-1].count("memory\ncancel 11") == 1
    # a new message of the user is rehearsed from the real history
    later = [
        USER,
        made,
        result,
        {"role": "assistant", "content": "11 is cancelled."},
        {"role": "user", "content": "12?"},
    ]
    policy.says["act"] = lambda text, key: "I cannot say."
    assert ask(server.url, later).choices[0].message.content == "I cannot say."
    assert len(policy.texts("evaluate")) == 4
    stream = ask(server.url, later, stream=True)
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "I cannot say."
    assert [c.rehearsal for c in chunks if hasattr(c, "rehearsal")] == [{"memory": "cancel 11", "tokens": 0}]
    assert len(policy.texts("evaluate")) == 4


@pytest.mark.parametrize(
    ("model", "messages", "status", "message"),
    [
        ("tiny+rehearse-parallel-0", [USER], 404, "expected 1 to 16"),
        ("tiny+magic", [USER], 404, "rehearse-parallel-N"),
        ("other+rehearse-parallel-2", [USER], 404, "not served here"),
        ("tiny+best-2", [USER], 400, "is not served"),
        ("tiny+rehearse-parallel-2", [{"role": "system", "content": "x"}], 400, "message of the user"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(chat, serve, model, messages, status, message):
    server = serve(Policy(chat, act=act).engine)
    with pytest.raises(openai.APIStatusError, match=message) as error:
        ask(server.url, messages, model)
    assert error.value.status_code == status


def test_equal_conversations_give_equal_keys(chat, serve):
    keys = []
    for _ in range(2):
        policy = Policy(chat, act=act)
        ask(serve(policy.engine).url, [USER])
        keys.append(sorted(request.key for _, _, request in policy.prompts if request.key[0] == 2))
    assert keys[0] == keys[1] and len(set(keys[0])) == len(keys[0])
