"""CM2 records: dialogues with tools and checklists, read, validated and written.

A record carries a reference dialogue (``messages``), the functions on offer (``tools``) and, for every variant
and user turn, a checklist. Two spellings are read: the annotated one and the one prepared for a trainer (fields
under ``extra_info``, tools as JSON text). Every rule of the format is checked here, once, so that nothing further
down meets a half-formed task. This module is pure: no device, no network, nothing evaluated.

Two fields are ours: ``source`` (where the record comes from) and ``meta`` (free; ``meta.late_tools`` holds tools
that only a later turn offers, ``{"3": [tool, …]}``). A machine-readable rule of an item stands in
``extra_info.rule``. Where parquet would merge the keys of unlike objects, JSON text is read in place of ``tools``,
``messages``, ``checklists``, ``meta``, ``extra_info`` and ``rule``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envace_jax.config import UserError
from envace_jax.datasets.parquet import parquet_records
from envace_jax.datasets.records import ChecklistItem, RecordedCall, Task
from envace_jax.rewards.verifiers import check_rule
from envace_jax.text.tool_calls import no_constant
from envace_jax.text.tool_schema import TOOL_NOT_AVAILABLE, check_call, check_tools
from envace_jax.text.transcript import Message, ToolCall, canonical_json, clean_text

__all__ = [
    "BadRecords",
    "ChecklistItem",
    "RecordedCall",
    "Task",
    "iter_records",
    "read_tasks",
    "task_from_record",
    "task_to_record",
]

FOCUS = (
    "assistant.tool_calls",
    "assistant.content.thinking",
    "assistant.content.user_visible_reply",
    "tool.content",
)
EVIDENCE_FROM = (*FOCUS, "user.content")
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
DEFAULT_SOURCE = "cm2"
WEIGHT_TOLERANCE = 1e-6


@dataclass
class BadRecords:
    """Records that were skipped: how many, and what was wrong with each."""

    count: int = 0
    messages: list[str] = field(default_factory=list)

    def add(self, message: str) -> None:
        self.count += 1
        self.messages.append(message)


class _Record:
    """A record under inspection; it knows where it stands, so every complaint names file, record and field."""

    def __init__(self, where: str):
        self.where = where

    def fail(self, path: str, message: str) -> UserError:
        return UserError(f"{self.where}: {path}: {message}" if path else f"{self.where}: {message}")

    def obj(self, value: Any, path: str) -> dict[str, Any]:
        # Parquet conversion turns every {} into null.
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.fail(path, f"expected an object, found {_kind(value)}")
        return value

    def list(self, value: Any, path: str) -> list[Any]:
        if value is None:
            return []
        if not isinstance(value, (list, tuple)):
            raise self.fail(path, f"expected a list, found {_kind(value)}")
        return list(value)

    def text(self, value: Any, path: str, *, empty: bool = False) -> str:
        if not isinstance(value, str):
            raise self.fail(path, f"expected text, found {_kind(value)}")
        if not empty and not value.strip():
            raise self.fail(path, "is empty")
        return clean_text(value)

    def json(self, value: Any, path: str) -> Any:
        text = self.text(value, path)
        try:
            return json.loads(text, parse_constant=no_constant)
        except (ValueError, RecursionError) as error:
            raise self.fail(path, f"is not JSON ({_short(error)})") from None


def task_from_record(record: Any, *, where: str) -> Task:
    """A validated `Task` from one CM2 record in either spelling.

    Args:
        record: the decoded record.
        where: how errors name it, e.g. ``"train.json: record 3"``.

    Raises:
        UserError: the first rule that the record breaks, with its place.
    """
    r = _Record(where)
    if not isinstance(record, dict):
        raise r.fail("", f"expected an object, found {_kind(record)}")
    uuid_hint = _get(record, "uuid") or _get(record, "extra_info", "original_index")
    if isinstance(uuid_hint, str) and uuid_hint:
        r.where = f"{where} (uuid {uuid_hint})"
    verl = isinstance(_get(record, "extra_info"), dict) and "uuid" not in record
    prefix = "extra_info." if verl else ""
    body = record["extra_info"] if verl else record
    uuid_path = prefix + ("original_index" if verl else "uuid")
    uuid = r.text(body.get("original_index" if verl else "uuid"), uuid_path)
    source = r.text(record.get("data_source" if verl else "source", DEFAULT_SOURCE) or DEFAULT_SOURCE, "source")
    tools = _tools(r, body.get("tools"), f"{prefix}tools")
    messages = _messages(r, body.get("messages"), f"{prefix}messages")
    n_turns = sum(m.role == "user" for m in messages)
    lists_path, raw_lists = "checklists", body.get("checklists")
    if verl:
        lists_path = "extra_info.interaction_kwargs.checklist_list"
        settings = r.obj(body.get("interaction_kwargs"), "extra_info.interaction_kwargs")
        raw_lists = settings.get("checklist_list")
    checklists = _checklists(r, raw_lists, lists_path, n_turns)
    meta = _meta(r, record.get("meta"), n_turns)
    task = Task(uuid, source, messages, tools, checklists, meta)
    _check_calls(r, task, f"{prefix}messages")
    return task


def task_to_record(task: Task) -> dict[str, Any]:
    """The annotated CM2 record of a task: the inverse of `task_from_record`."""
    return {
        "uuid": task.uuid,
        "source": task.source,
        "messages": [_message_record(m) for m in task.messages],
        "tools": list(task.tools),
        "checklists": [[[_item_record(i) for i in turn] for turn in variant] for variant in task.checklists],
        "meta": task.meta,
    }


def iter_records(path: str | Path) -> Iterator[tuple[str, Any]]:
    """Yield ``(where, record)`` for every record of a .json (list), .jsonl or .parquet file.

    A JSONL line stays text, decoded later, so that one broken line does not hide the others.

    Raises:
        UserError: the file is missing, of another type, or not readable as a whole.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8", errors="surrogateescape") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}: line {number}", line
    elif path.suffix == ".json":
        try:
            records = json.loads(path.read_text(encoding="utf-8"), parse_constant=no_constant)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: is not JSON ({_short(error)})") from None
        if not isinstance(records, list):
            raise UserError(f"{path}: expected a list of records, found {_kind(records)}")
        for number, record in enumerate(records):
            yield f"{path}: record {number}", record
    elif path.suffix == ".parquet":
        for number, record in enumerate(parquet_records(path)):
            yield f"{path}: record {number}", record
    else:
        raise UserError(f"{path}: expected a .json, .jsonl or .parquet file")


def read_tasks(path: str | Path, on_bad: str = "stop") -> tuple[list[Task], BadRecords]:
    """All tasks of a file.

    Args:
        path: a .json, .jsonl or .parquet file.
        on_bad: ``"stop"`` raises at the first broken record; ``"skip"`` leaves them out and counts them.

    Raises:
        UserError: a broken record under ``"stop"``, an unreadable file, or no usable record at all.
    """
    if on_bad not in ("stop", "skip"):
        raise UserError(f"on_bad: expected 'stop' or 'skip', found {on_bad!r}")
    tasks: list[Task] = []
    bad = BadRecords()
    seen: dict[str, str] = {}
    for where, raw in iter_records(path):
        try:
            task = _decode(raw, where)
            # Recorded responses are looked up by uuid: two dialogues under one would answer for each other.
            if task.uuid in seen:
                raise UserError(f"{where} (uuid {task.uuid}): uuid: already used at {seen[task.uuid]}")
        except UserError as error:
            if on_bad == "stop":
                raise
            bad.add(str(error))
            continue
        seen[task.uuid] = where
        tasks.append(task)
    if not tasks:
        raise UserError(f"{path}: no usable record ({bad.count} broken)")
    return tasks, bad


# --- parts of a record ---


def _decode(raw: Any, where: str) -> Task:
    if isinstance(raw, str):
        raw = _Record(where).json(raw, "")
    return task_from_record(raw, where=where)


def _tools(r: _Record, value: Any, path: str) -> tuple[dict[str, Any], ...]:
    tools = []
    names: set[str] = set()
    for i, tool in enumerate(r.list(r.json(value, path) if isinstance(value, str) else value, path)):
        at = f"{path}[{i}]"
        if not isinstance(tool, dict):
            raise r.fail(at, f"expected an object, found {_kind(tool)}")
        if tool.get("type") != "function":
            raise r.fail(f"{at}.type", f"expected 'function', found {tool.get('type')!r}")
        function = r.obj(tool.get("function"), f"{at}.function")
        name = r.text(function.get("name"), f"{at}.function.name")
        if name in names:
            raise r.fail(f"{at}.function.name", f"{name!r} is used by two tools")
        names.add(name)
        clean = dict(function)
        clean["description"] = r.text(function.get("description") or "", f"{at}.function.description", empty=True)
        clean["parameters"] = restore_schema(r.obj(function.get("parameters"), f"{at}.function.parameters"))
        if clean.get("strict", False) is None:
            del clean["strict"]
        tools.append({**tool, "function": clean})
        try:
            check_tools(tools[-1:])
        except UserError as error:
            raise r.fail(f"{at}.function.parameters", str(error)) from None
    return tuple(tools)


# Schema keywords whose value is a schema, and those whose value maps names to schemas.
_SCHEMA_KEYS = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")


def restore_schema(schema: Any) -> Any:
    """A JSON schema with the ``{}`` that a parquet conversion made null put back."""
    if schema is None:
        return {}
    if not isinstance(schema, dict):
        return schema
    out = dict(schema)
    for key in _SCHEMA_KEYS:
        if key in out and not isinstance(out[key], list):
            out[key] = restore_schema(out[key])
    for key in _SCHEMA_MAPS:
        if key in out and (out[key] is None or isinstance(out[key], dict)):
            out[key] = {name: restore_schema(sub) for name, sub in (out[key] or {}).items()}
    for key in _SCHEMA_LISTS:
        if isinstance(out.get(key), list):
            out[key] = [restore_schema(sub) for sub in out[key]]
    return out


def _messages(r: _Record, value: Any, path: str) -> tuple[Message, ...]:
    raw = r.list(r.json(value, path) if isinstance(value, str) else value, path)
    messages: list[Message] = []
    owed = 0  # tool messages that must still follow the last assistant message
    previous = "start"
    for i, entry in enumerate(raw):
        at = f"{path}[{i}]"
        entry = r.obj(entry, at)
        role = entry.get("role")
        allowed = _successors(previous, owed)
        if role not in allowed:
            expected = " or ".join(allowed) + (f" ({owed} tool messages still due)" if owed else "")
            raise r.fail(f"{at}.role", f"expected {expected} after {previous}, found {role!r}")
        content = r.text(entry.get("content"), f"{at}.content")
        calls = r.list(entry.get("tool_calls"), f"{at}.tool_calls")
        if role != "assistant" and calls:
            raise r.fail(f"{at}.tool_calls", f"only assistant messages call tools, found {len(calls)} in {role}")
        if role == "assistant":
            thinking, reply = _split_thinking(r, content, f"{at}.content")
            tool_calls = tuple(_call(r, c, f"{at}.tool_calls[{k}]") for k, c in enumerate(calls))
            messages.append(Message("assistant", reply, thinking, tool_calls))
            owed = len(calls)
        elif role == "tool":
            messages.append(Message("tool", canonical_json(r.json(content, f"{at}.content"))))
            owed -= 1
        else:
            messages.append(Message(role, content))
        previous = role if role != "assistant" or not owed else "an assistant message with calls"
    if not messages:
        raise r.fail(path, "is empty")
    if messages[-1].role != "assistant" or owed:
        last = previous if not owed else f"{previous} ({owed} tool messages missing)"
        raise r.fail(path, f"the last message must be an assistant message without calls, found {last}")
    return tuple(messages)


def _successors(previous: str, owed: int) -> tuple[str, ...]:
    if owed:
        return ("tool",)
    return {
        "start": ("system", "user"),
        "system": ("user",),
        "user": ("assistant",),
        "tool": ("assistant",),
    }.get(previous, ("user",))


def _split_thinking(r: _Record, content: str, path: str) -> tuple[str | None, str]:
    opened, closed = content.count(THINK_OPEN), content.count(THINK_CLOSE)
    if opened != 1 or closed != 1 or content.index(THINK_OPEN) > content.index(THINK_CLOSE):
        raise r.fail(
            path,
            f"expected exactly one {THINK_OPEN}…{THINK_CLOSE} block (empty when there is no thinking), "
            f"found {opened} opening and {closed} closing tags",
        )
    before, rest = content.split(THINK_OPEN)
    if before.strip():
        raise r.fail(path, f"the {THINK_OPEN} block must come first")
    thinking, reply = rest.split(THINK_CLOSE)
    return thinking.strip("\n") or None, reply.lstrip("\n")


def _call(r: _Record, value: Any, path: str) -> ToolCall:
    value = r.obj(value, path)
    if value.get("type", "function") != "function":
        raise r.fail(f"{path}.type", f"expected 'function', found {value.get('type')!r}")
    function = r.obj(value.get("function"), f"{path}.function")
    name = r.text(function.get("name"), f"{path}.function.name")
    raw = function.get("arguments")
    at = f"{path}.function.arguments"
    arguments = {} if raw is None else r.json(raw, at)
    if not isinstance(arguments, dict):
        raise r.fail(at, f"expected the JSON text of an object, found that of {_kind(arguments)}")
    call_id = value.get("id")
    return ToolCall(name, arguments, call_id if isinstance(call_id, str) else None)


def _meta(r: _Record, value: Any, n_turns: int) -> dict[str, Any]:
    meta = dict(r.obj(r.json(value, "meta") if isinstance(value, str) else value, "meta"))
    if "late_tools" in meta:
        late = {}
        for turn, tools in r.obj(meta["late_tools"], "meta.late_tools").items():
            at = f"meta.late_tools.{turn}"
            if not (isinstance(turn, str) and turn.isdecimal() and int(turn) < n_turns):
                raise r.fail(at, f"expected a turn from 0 to {n_turns - 1}")
            late[turn] = list(_tools(r, tools, at))
        meta["late_tools"] = late
    return meta


def _check_calls(r: _Record, task: Task, path: str) -> None:
    if len(set(task.tool_names)) < len(task.tool_names):
        raise r.fail("meta.late_tools", "offers a tool that is already on offer")
    turn = -1
    for i, message in enumerate(task.messages):
        if message.role == "user":
            turn += 1
        for k, call in enumerate(message.tool_calls):
            error = check_call(call, task.tools_at(turn))
            if error is not None:
                field = "name" if error.code == TOOL_NOT_AVAILABLE else "arguments"
                raise r.fail(f"{path}[{i}].tool_calls[{k}].function.{field}", error.message)


def _checklists(r: _Record, value: Any, path: str, n_turns: int):
    variants = r.list(r.json(value, path) if isinstance(value, str) else value, path)
    if not variants:
        raise r.fail(path, "is empty: at least one variant is needed")
    out = []
    for v, variant in enumerate(variants):
        turns = r.list(variant, f"{path}[{v}]")
        if len(turns) != n_turns:
            raise r.fail(f"{path}[{v}]", f"has {len(turns)} turns, the dialogue has {n_turns} user messages")
        out.append(tuple(_turn_items(r, turn, f"{path}[{v}][{t}]", n_turns) for t, turn in enumerate(turns)))
    return tuple(out)


def _turn_items(r: _Record, value: Any, path: str, n_turns: int) -> tuple[ChecklistItem, ...]:
    items = tuple(_item(r, raw, f"{path}[{k}]", n_turns) for k, raw in enumerate(r.list(value, path)))
    if not items:
        raise r.fail(path, "is empty: every user turn needs at least one item")
    by_id: dict[str, ChecklistItem] = {}
    for k, item in enumerate(items):
        if item.id in by_id:
            raise r.fail(f"{path}[{k}].id", f"{item.id!r} is used by two items of the turn")
        by_id[item.id] = item
    for k, item in enumerate(items):
        for name in item.dependence:
            if name not in by_id or name == item.id:
                raise r.fail(f"{path}[{k}].dependence", f"{name!r} is not another item of the turn")
            if "tool.content" not in by_id[name].focus_on:
                raise r.fail(f"{path}[{k}].dependence", f"{name!r} is not an item on tool.content")
    total = math.fsum(item.weight for item in items)
    if abs(total - 1.0) > WEIGHT_TOLERANCE:
        raise r.fail(path, f"the weights of a turn must sum to 1, found {total:.8g}")
    return items


def _item(r: _Record, value: Any, path: str, n_turns: int) -> ChecklistItem:
    value = r.obj(value, path)
    focus = value.get("focus_on")
    focus = [focus] if isinstance(focus, str) else r.list(focus, f"{path}.focus_on")
    if not focus or any(f not in FOCUS for f in focus):
        raise r.fail(f"{path}.focus_on", f"expected one or more of {', '.join(FOCUS)}, found {focus!r}")
    weight = value.get("weight")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight) or weight < 0:
        raise r.fail(f"{path}.weight", f"expected a number of at least 0, found {weight!r}")
    required = value.get("required_for_next_turn")
    if not isinstance(required, bool):
        raise r.fail(f"{path}.required_for_next_turn", f"expected true or false, found {required!r}")
    examples = r.list(value.get("failure_examples"), f"{path}.failure_examples")
    depends = r.list(value.get("dependence"), f"{path}.dependence")
    evidence = r.list(value.get("evidence"), f"{path}.evidence")
    extra = value.get("extra_info")
    extra = r.obj(r.json(extra, f"{path}.extra_info") if isinstance(extra, str) else extra, f"{path}.extra_info")
    rule = extra.get("rule")
    rule = r.json(rule, f"{path}.extra_info.rule") if isinstance(rule, str) else rule
    if rule:
        try:
            check_rule(r.obj(rule, f"{path}.extra_info.rule"), where="")
        except UserError as error:
            raise r.fail(f"{path}.extra_info.rule", str(error).removeprefix(": ")) from None
    return ChecklistItem(
        id=r.text(value.get("id"), f"{path}.id"),
        question=r.text(value.get("question"), f"{path}.question"),
        pass_condition=r.text(value.get("pass_condition"), f"{path}.pass_condition"),
        focus_on=tuple(focus),
        evidence=tuple(_evidence(r, e, f"{path}.evidence[{k}]", n_turns) for k, e in enumerate(evidence)),
        failure_examples=tuple(e if isinstance(e, str) else canonical_json(e) for e in examples),
        required_for_next_turn=required,
        dependence=tuple(r.text(d, f"{path}.dependence[{k}]") for k, d in enumerate(depends)),
        weight=float(weight),
        rule=rule or None,
    )


def _evidence(r: _Record, value: Any, path: str, n_turns: int) -> dict[str, Any]:
    value = r.obj(value, path)
    for key, limit in (("turn", n_turns), ("step", None)):
        number = value.get(key)
        if isinstance(number, bool) or not isinstance(number, int) or number < 0 or (limit and number > limit):
            raise r.fail(
                f"{path}.{key}",
                f"expected a whole number from 0{f' to {limit}' if limit else ''}, found {number!r}",
            )
    if value.get("from") not in EVIDENCE_FROM:
        raise r.fail(f"{path}.from", f"expected one of {', '.join(EVIDENCE_FROM)}, found {value.get('from')!r}")
    r.text(value.get("snippet"), f"{path}.snippet", empty=True)
    return {key: value[key] for key in ("turn", "step", "from", "snippet")}


def _message_record(message: Message) -> dict[str, Any]:
    content = message.content
    if message.role == "assistant":
        content = f"{THINK_OPEN}\n{message.thinking or ''}\n{THINK_CLOSE}\n\n{content}"
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": canonical_json(call.arguments)},
        }
        for call in message.tool_calls
    ]
    return {"role": message.role, "content": content, "tool_calls": calls}


def _item_record(item: ChecklistItem) -> dict[str, Any]:
    return {
        "id": item.id,
        "evidence": list(item.evidence),
        "focus_on": item.focus_on[0] if len(item.focus_on) == 1 else list(item.focus_on),
        "question": item.question,
        "pass_condition": item.pass_condition,
        "failure_examples": list(item.failure_examples),
        "required_for_next_turn": item.required_for_next_turn,
        "dependence": list(item.dependence),
        "weight": item.weight,
        "extra_info": {"rule": item.rule} if item.rule is not None else {},
    }


def _get(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


def _short(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
