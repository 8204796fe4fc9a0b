"""Tasks made by hand, and a short way to play an episode."""

from __future__ import annotations

import json

from envace_jax.datasets.cm2 import ChecklistItem, Task
from envace_jax.rehearsal import episode
from envace_jax.rehearsal.episode import Need, NeedObservation, NeedVerdicts, Setting
from envace_jax.rehearsal.settings import EpisodeConfig
from envace_jax.rewards.judge import JudgeRequest, RuleJudge
from envace_jax.text.transcript import Message, Role, ToolCall

TEXTS = [
    '{"name": "get_order", "arguments": {"order_id": "A1"}}',
    '{"id": "A1", "status": "open", "total": 12.5}',
    '{"error_tool_call": {"code": "INVALID_PARAMETERS", "message": "no"}}',
    "rehearse\nuser: Please cancel order A1 and tell me when it is done.\nagent: It is done.\nresult of get_order:",
    "# Tools\n# Recorded calls and knowledge\n# Conversation so far\n# The agent's latest output\n# Call to answer",
]


def tool(name: str, **properties: str) -> dict:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
    }
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


TOOLS = (tool("get_order", order_id="string"), tool("cancel_order", order_id="string"))


def item(name: str, rule: dict | None, **fields) -> ChecklistItem:
    return ChecklistItem(name, "?", "!", ("assistant.tool_calls",), rule=rule, **fields)


def call_text(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answer(value, tag: str = "tool_response") -> str:
    return f"<{tag}>\n{json.dumps(value)}\n</{tag}>"


def make_task(**changes) -> Task:
    """Two turns: look at A1 and cancel it (two calls in one output); then look at A2."""
    messages = (
        Message("system", "You serve orders."),
        Message("user", "Cancel A1."),
        Message(
            "assistant",
            "",
            "Look first.",
            (ToolCall("get_order", {"order_id": "A1"}), ToolCall("cancel_order", {"order_id": "A1"})),
        ),
        Message("tool", '{"id": "A1", "status": "open"}'),
        Message("tool", '{"id": "A1", "status": "cancelled"}'),
        Message("assistant", "A1 is cancelled.", "Say so."),
        Message("user", "And A2?"),
        Message("assistant", "", None, (ToolCall("get_order", {"order_id": "A2"}),)),
        Message("tool", '{"id": "A2", "status": "sent"}'),
        Message("assistant", "A2 is sent.", None),
    )
    first = item(
        "C0", {"kind": "call", "name": "cancel_order", "accepted": True}, required_for_next_turn=True, weight=0.5
    )
    second = item("C1", {"kind": "reply", "contains": ["cancelled"]}, weight=0.5)
    third = item("C0", {"kind": "reply", "contains": ["sent"]})
    fields = {
        "uuid": "orders-1",
        "source": "test",
        "messages": messages,
        "tools": TOOLS,
        "checklists": (((first, second), (third,)),),
    }
    return Task(**(fields | changes))


ACT_SCRIPT = (
    call_text("get_order", order_id="A1") + "\n" + call_text("cancel_order", order_id="A1"),
    "A1 is cancelled.",
    call_text("get_order", order_id="A2"),
    "A2 is sent.",
)
REHEARSE_SCRIPT = (
    answer({"id": "A1", "status": "open"}),
    answer({"id": "A1", "status": "cancelled"}),
    answer({"id": "A2", "status": "sent"}),
)


def play(
    task,
    chat,
    act=ACT_SCRIPT,
    rehearse=REHEARSE_SCRIPT,
    *,
    judge=None,
    grounding=None,
    observe=None,
    watch=lambda state, need: None,
    **cfg,
):
    """The trajectory of an episode whose outputs are given: texts, or (text, finish), or (ids, finish).

    `watch(state, need)` sees every state that waits. An empty script ends the test with StopIteration.
    """
    setting = Setting.make(chat, EpisodeConfig(**cfg), grounding, outside=observe is not None)
    state = episode.start(setting, task)
    scripts = {Role.ACT: iter(act), Role.REHEARSE: iter(rehearse)}
    judge = judge or RuleJudge()
    while True:
        need = episode.next_request(state)
        watch(state, need)
        if isinstance(need, Need):
            said = next(scripts[need.role])
            text, finish = (said, "stop") if isinstance(said, str) else said
            ids = tuple(chat.tokenizer.encode(text)) if isinstance(text, str) else tuple(text)
            if finish == "stop" and isinstance(text, str):
                ids = (*ids, chat.tokenizer.eos_id)
            state = episode.receive(state, ids, [-0.5] * len(ids), finish)
        elif isinstance(need, NeedObservation):
            state = episode.receive_observation(state, observe(task, need.call, state))
        elif isinstance(need, NeedVerdicts):
            request = JudgeRequest("x", task.uuid, task.system, need.transcript, need.items)
            state = episode.receive_verdicts(state, judge.judge(request))
        else:
            return episode.trajectory(state)
