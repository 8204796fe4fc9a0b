"""Demonstrations for the warm start: careful ones, careless ones, and questions that only REHEARSE learns
from.

A careful demonstration is the task's own dialogue. A careless one has flaws that are *systematic*, so that a
policy tuned on them has something definite to unlearn: of several calls in one message only the first is
made; a lone accepted refund or payment is made a second time; and REHEARSE accepts what must be refused. A
probe goes on after the dialogue with calls that are not recorded but whose answer follows from what has been
seen (a repeated cancellation, a refund after it); it teaches REHEARSE, not ACT, to keep the world consistent.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from envace_jax.datasets.quickstart.environment import CITIES, WRITES, QuickstartEnvironment
from envace_jax.datasets.quickstart.generator import accepted_write, turn_reply
from envace_jax.datasets.records import Task
from envace_jax.text.transcript import Message, Role, ToolCall, canonical_json

REPEATED = ("refund_order", "pay_balance")
"""The writes that a careless desk makes twice."""

Result = Any
_Step = list[tuple[str, dict[str, Any], Result]]


@dataclass(frozen=True)
class Demonstration:
    """One dialogue to learn from.

    Attributes:
        task: the task it belongs to: its prompt, its recorded calls for grounding.
        messages: user, assistant and tool messages as they are to be learnt.
        roles: whose outputs are targets.
    """

    task: Task
    messages: tuple[Message, ...]
    roles: tuple[Role, ...] = (Role.ACT, Role.REHEARSE)


def demonstrations(tasks: Sequence[Task], careless: float, seed: int, *, probes: float = 0.0) -> list[Demonstration]:
    """One demonstration a task, careless with probability `careless`, and for a share `probes` of the tasks
    a probe.

    Args:
        tasks: quickstart tasks.
        careless: in [0, 1].
        seed: with the task's uuid it decides which demonstrations are careless and what the probes ask.
        probes: in [0, 1].
    """
    out = []
    for task in tasks:
        rng = random.Random(f"demonstration/{seed}/{task.uuid}")
        messages = careless_messages(task) if rng.random() < careless else task.messages
        out.append(Demonstration(task, messages))
        if rng.random() < probes:
            out.append(Demonstration(task, probe_messages(task, rng), (Role.REHEARSE,)))
    return out


def careless_messages(task: Task) -> tuple[Message, ...]:
    """The dialogue of a task with every flaw that applies to it."""
    environment = QuickstartEnvironment(task.meta["initial_state"])
    head = [m for m in task.messages if m.role == "system"]
    out = [*head]
    for turn, (user, steps) in enumerate(_turns(task)):
        flawed = [step[:1] for step in steps]
        if len(steps) == 1 and len(steps[0]) == 1 and steps[0][0][0] in REPEATED and _accepted(steps[0][0]):
            flawed.append(steps[0])
        out.append(Message("user", user))
        done: _Step = []
        for step in flawed:
            out.append(Message("assistant", "", None, tuple(ToolCall(name, args) for name, args, _ in step)))
            for name, args, _ in step:
                result = _accepting(environment, name, args)
                out.append(Message("tool", canonical_json(result)))
                done.append((name, args, result))
        out.append(Message("assistant", turn_reply(done, task.meta["asks"][turn])))
    return tuple(out)


def probe_messages(task: Task, rng: random.Random, count: int = 2) -> tuple[Message, ...]:
    """The dialogue of a task whose last turn goes on with calls that need no record: see `follow_ups`."""
    environment = QuickstartEnvironment(task.meta["initial_state"])
    done = [(c.name, c.arguments, environment.step(c.name, c.arguments)) for c in task.recorded_calls]
    out = [*task.messages[:-1]]
    for _ in range(count):
        options = list(follow_ups(done))
        name, args = rng.choice(options)
        result = environment.step(name, args)
        done.append((name, args, result))
        out += [Message("assistant", "", None, (ToolCall(name, args),)), Message("tool", canonical_json(result))]
    return (*out, task.messages[-1])


def follow_ups(done: Sequence[tuple[str, dict[str, Any], Result]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Calls whose result follows from the calls and results so far, without further knowledge of the
    state."""
    last_write = max((k for k, (name, _, result) in enumerate(done) if accepted_write(name, result)), default=-1)
    ended: dict[int, str] = {}  # order -> a status that refuses cancellations and new cities for good
    for k, (name, args, result) in enumerate(done):
        order: Any = args.get("order")
        if accepted_write(name, result):
            if name in ("cancel_order", "refund_order"):
                ended[order] = result["status"]
            if name == "close_account":
                yield "pay_balance", {"account": args["account"], "amount": 10}
            yield name, args
        elif k > last_write:  # whatever was refused or looked up after the last change stays as it is
            yield name, args
        if _is_error(result) and result["error"].startswith("already ") and order is not None:
            ended[order] = result["error"].removeprefix("already ")
        if name == "get_order" and not _is_error(result) and result["status"] != "paid":
            ended[order] = result["status"]
    for k, (order, status) in enumerate(ended.items()):
        yield "cancel_order", {"order": order}
        yield "set_city", {"order": order, "city": CITIES[(order + k) % len(CITIES)]}
        if status != "delivered":
            yield "refund_order", {"order": order, "amount": 10}


def _accepting(environment: QuickstartEnvironment, name: str, args: dict[str, Any]) -> Result:
    """The result of a call by a desk that never refuses a write on something that exists; the state follows
    it."""
    result = environment.step(name, args)
    if name not in WRITES or not _is_error(result):
        return result
    state = environment.state
    if name in ("pay_balance", "close_account"):
        account = state["accounts"].get(str(args["account"]))
        if account is None:
            return result
        if name == "close_account":
            account["status"] = "closed"
            return {"status": "closed"}
        account["balance"] = max(0, account["balance"] - args["amount"])
        return {"balance": account["balance"]}
    order = state["orders"].get(str(args["order"]))
    if order is None:
        return result
    if name == "set_city":
        order["city"] = args["city"]
        return {"city": args["city"]}
    if name == "refund_order":
        order["status"] = "refunded"
        return {"status": "refunded", "amount": args["amount"]}
    account = state["accounts"][str(order["account"])]
    if order["status"] == "shipped":
        account["open_orders"] -= 1
    order["status"] = "cancelled"
    return {"status": "cancelled", "account": order["account"], "open_orders": account["open_orders"]}


def _turns(task: Task) -> list[tuple[str, list[_Step]]]:
    """For each turn its user text and its steps with calls, each call with its recorded result."""
    turns: list[tuple[str, list[_Step]]] = [(user, []) for user in task.user_turns]
    for record in task.recorded_calls:
        steps = turns[record.turn][1]
        if record.index == 0:
            steps.append([])
        steps[-1].append((record.name, record.arguments, json.loads(record.result)))
    return turns


def _accepted(call: tuple[str, dict[str, Any], Result]) -> bool:
    return not _is_error(call[2])


def _is_error(result: Result) -> bool:
    return isinstance(result, dict) and "error" in result
