"""Traces: canonical episodes of what an agent did and what its environment answered, and readers for their formats.

An episode is a list of events: instructions and replies (``message``), calls (``action``) and answers
(``observation``). Readers keep every word as data: nothing is evaluated, sizes are limited, and what cannot be paired
is left unpaired for `envace_jax.worldbook.ingest` to flag. Ids are hashes of the content.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from envace_jax.config import UserError
from envace_jax.datasets.action_text import BadTrace, parse_call_text, short_error, text_action
from envace_jax.datasets.records import Task
from envace_jax.text.transcript import canonical_json, clean_text, result_text

ACTORS = ("system", "user", "agent", "environment")
KINDS = ("message", "action", "observation")
FORMATS = ("canonical", "messages", "tasks", "tau2", "bfcl", "text")
MAX_OBSERVATION_BYTES = 1 << 20
MAX_EVENTS = 5_000
MAX_NESTING = 48
MAX_RECORD_BYTES = 64 << 20


@dataclass(frozen=True)
class TraceEvent:
    """One event. ``content`` is text for messages and observations, ``{"type", "arguments", "raw"}`` for actions;
    ``metadata`` may carry ``call_id``, ``error`` and ``batch`` (actions of one message share it)."""

    actor: str
    kind: str
    content: Any
    metadata: dict[str, Any] = field(default_factory=dict)
    id: str = ""


@dataclass(frozen=True)
class TraceEpisode:
    """A recorded episode. ``group`` names trajectories of one task (it never crosses a split or a fold);
    ``initial_state`` is the environment's whole state at the start where the source tells it, else None."""

    episode_id: str
    events: tuple[TraceEvent, ...]
    split: str = "train"
    group: str = ""
    environment: str = ""
    initial_state: dict[str, Any] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The canonical record (inverse of `episode_from_record`)."""
        return {
            "episode_id": self.episode_id,
            "split": self.split,
            "trajectory_group": self.group,
            "environment": self.environment,
            "initial_state": self.initial_state,
            "metadata": self.metadata,
            "events": [
                {"actor": e.actor, "kind": e.kind, "content": e.content, "metadata": e.metadata} for e in self.events
            ],
        }


@dataclass
class TraceReport:
    """What reading left out: one message for each bad trace."""

    read: int = 0
    bad: list[str] = field(default_factory=list)


def content_id(value: Any, prefix: str) -> str:
    """An id that is a hash of the content."""
    text = json.dumps(value, ensure_ascii=True, sort_keys=True, allow_nan=False)
    return f"{prefix}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def make_episode(
    events: Iterable[TraceEvent],
    *,
    where: str,
    episode_id: str | None = None,
    split: str = "train",
    group: str | None = None,
    environment: str = "",
    initial_state: dict[str, Any] | None = None,
    metadata: dict[str, Any] | None = None,
) -> TraceEpisode:
    """A checked episode with ids; every complaint names the trace.

    Raises:
        BadTrace: an event of unknown kind, an observation above 1 MiB, more than 5,000 events, content that is not
            JSON (cycles and NaN included) or nested beyond 48 levels, or no action at all.
    """
    name = f"{where} (trace {str(episode_id)[:80]})" if episode_id else where
    checked: list[TraceEvent] = []
    try:
        for event in events:
            checked.append(_checked(event, f"{name}: event {len(checked)}"))
            if len(checked) > MAX_EVENTS:
                raise BadTrace(f"{name}: more than {MAX_EVENTS} events")
        if not any(e.kind == "action" for e in checked):
            raise BadTrace(f"{name}: has no action")
        body = [[e.actor, e.kind, e.content, e.metadata] for e in checked]
        digest = content_id([body, initial_state, environment], "e")
        if initial_state is not None and not isinstance(initial_state, dict):
            raise BadTrace(f"{name}: initial_state: expected an object")
        if not isinstance(metadata or {}, dict):
            raise BadTrace(f"{name}: metadata: expected an object")
        meta = json.loads(canonical_json(metadata or {}))
        initial = None if initial_state is None else json.loads(canonical_json(initial_state))
        if too_deep(initial) or too_deep(meta):
            raise BadTrace(f"{name}: initial_state or metadata nested deeper than {MAX_NESTING} levels")
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, BadTrace):
            raise
        raise BadTrace(f"{name}: not JSON content ({short_error(error)})") from None
    eid = clean_text(str(episode_id)) if episode_id else digest
    numbered = tuple(replace(e, id=f"{digest}.{i}") for i, e in enumerate(checked))
    return TraceEpisode(eid, numbered, split, group or eid, environment, initial, meta)


def _checked(event: TraceEvent, where: str) -> TraceEvent:
    if event.actor not in ACTORS or event.kind not in KINDS:
        raise BadTrace(f"{where}: unknown actor or kind {event.actor!r}/{event.kind!r}")
    metadata = json.loads(canonical_json(event.metadata or {}))
    call_id = metadata.get("call_id")
    if isinstance(call_id, (dict, list, bool)):
        raise BadTrace(f"{where}: call_id: expected a text")
    if call_id is not None:
        metadata["call_id"] = str(call_id)
    if event.kind == "action":
        content = event.content
        if not isinstance(content, dict) or not isinstance(content.get("type"), str) or not content["type"].strip():
            raise BadTrace(f"{where}: an action needs a type")
        arguments = content.get("arguments", {})
        if not isinstance(arguments, dict):
            raise BadTrace(f"{where}: arguments: expected an object")
        if too_deep(arguments):
            raise BadTrace(f"{where}: arguments nested deeper than {MAX_NESTING} levels")
        raw = content.get("raw", "")
        clean = {
            "type": clean_text(content["type"]),
            "arguments": json.loads(canonical_json(arguments)),
            "raw": "",
        }
        clean["raw"] = _bounded(raw if isinstance(raw, str) else canonical_json(raw), where)
        return TraceEvent(event.actor, event.kind, clean, metadata)
    text = event.content if isinstance(event.content, str) else result_text(event.content)
    return TraceEvent(event.actor, event.kind, _bounded(clean_text(text).replace("\x00", "\ufffd"), where), metadata)


def too_deep(value: Any) -> bool:
    """Whether a JSON value is nested deeper than 48 levels (which state and terms could not hold)."""
    level = [value]
    for _ in range(MAX_NESTING):
        level = [
            inner
            for item in level
            for inner in (item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def _bounded(text: str, where: str) -> str:
    if len(text) > MAX_OBSERVATION_BYTES or len(text.encode("utf-8", "replace")) > MAX_OBSERVATION_BYTES:
        raise BadTrace(f"{where}: text of {len(text):,} characters is above the limit of {MAX_OBSERVATION_BYTES:,}")
    return text


# --- formats ---------------------------------------------------------------------------------------------------


def episode_from_record(record: Any, where: str) -> TraceEpisode:
    """An episode from the canonical record ``{episode_id, split?, trajectory_group?, events: [...]}``."""
    if not isinstance(record, dict) or not isinstance(record.get("events"), list):
        raise BadTrace(f"{where}: expected an object with a list of events")
    events = []
    for i, e in enumerate(record["events"]):
        if not isinstance(e, dict) or "kind" not in e:
            raise BadTrace(f"{where}: event {i}: expected actor, kind, content")
        kind = {"instruction": "message"}.get(e["kind"], e["kind"])
        metadata = e.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise BadTrace(f"{where}: event {i}: metadata: expected an object")
        events.append(TraceEvent(str(e.get("actor", "")), str(kind), e.get("content", ""), metadata))
    return make_episode(
        events,
        where=where,
        episode_id=record.get("episode_id") or record.get("trajectory_id"),
        split=str(record.get("split") or "train"),
        group=str(record.get("trajectory_group") or "") or None,
        environment=str(record.get("environment") or ""),
        initial_state=record.get("initial_state"),
        metadata=record.get("metadata") or {},
    )


def episode_from_messages(record: Any, where: str) -> TraceEpisode:
    """An episode from an OpenAI-style log ``{"messages": [...]}`` (or the bare list).

    Results keep their ``tool_call_id``; where a message made several calls and results carry none, nothing is guessed.
    """
    if isinstance(record, list):
        record = {"messages": record}
    messages = record.get("messages", record.get("traj")) if isinstance(record, dict) else None
    if not isinstance(messages, list):
        raise BadTrace(f"{where}: expected a list of messages")
    return make_episode(
        _message_events(messages, where),
        where=where,
        episode_id=record.get("episode_id") or record.get("id") or record.get("trajectory_id"),
        split=str(record.get("split") or "train"),
        group=str(record.get("trajectory_group", record.get("task_id")) or "") or None,
        environment=str(record.get("environment") or ""),
        initial_state=record.get("initial_state"),
        metadata={k: record[k] for k in ("reward", "task_id", "tools") if k in record},
    )


def _message_events(messages: list[Any], where: str) -> Iterator[TraceEvent]:
    actors = {"system": "system", "developer": "system", "user": "user", "assistant": "agent"}
    for i, message in enumerate(messages):
        at = f"{where}: message {i}"
        if not isinstance(message, dict):
            raise BadTrace(f"{at}: expected an object")
        role, content = message.get("role"), message.get("content")
        if role in ("tool", "function"):
            meta: dict[str, Any] = {}
            call_id = message.get("tool_call_id") or (message.get("id") if "requestor" in message else None)
            if call_id:
                meta["call_id"] = str(call_id)
            if message.get("error"):
                meta["error"] = True
            yield TraceEvent("environment", "observation", _plain(content), meta)
            continue
        if role not in actors:
            raise BadTrace(f"{at}: unknown role {role!r}")
        if content:
            yield TraceEvent(actors[role], "message", _plain(content))
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise BadTrace(f"{at}: tool_calls: expected a list")
        for call in calls:
            function = call.get("function", call) if isinstance(call, dict) else None
            if not isinstance(function, dict):
                raise BadTrace(f"{at}: tool_calls: expected objects")
            arguments = function.get("arguments", function.get("parameters")) or {}
            raw = arguments if isinstance(arguments, str) else canonical_json(arguments)
            if isinstance(arguments, str):
                try:
                    arguments = json.loads(arguments)
                except (ValueError, RecursionError):
                    raise BadTrace(f"{at}: arguments of {function.get('name')!r} are not JSON") from None
            meta = {"batch": f"m{i}"} if len(calls) > 1 else {}
            if call.get("id"):
                meta["call_id"] = str(call["id"])
            # A user may have tools of his own (τ²-bench, telecom): what he does with them is not the agent's doing.
            yield TraceEvent(
                actors[role], "action", {"type": function.get("name"), "arguments": arguments, "raw": raw}, meta
            )


def _plain(content: Any) -> Any:
    """The text of a message content, given as a string or as a list of parts."""
    if isinstance(content, list) and content and all(isinstance(p, dict) and "text" in p for p in content):
        return "".join(str(p["text"]) for p in content)
    return "" if content is None else content


def task_group(task: Task) -> str:
    """The trajectory group of a task: its source and scenario, so that variants of one scenario stay together.

    A task that was made from a trace keeps the trace's group (``meta["trajectory_group"]``).
    """
    group = task.meta.get("trajectory_group")
    if isinstance(group, str) and group:
        return group
    scenario = task.meta.get("scenario")
    return task.uuid if scenario in (None, "") else f"{task.source}-{scenario}"


def episode_from_task(task: Task) -> TraceEpisode:
    """An episode from a CM2 task's reference dialogue; results answer calls in order, as the format defines."""
    events: list[TraceEvent] = []
    waiting: list[str] = []
    for i, message in enumerate(task.messages):
        if message.role == "tool":
            text = _screen_text(message.content)
            events.append(TraceEvent("environment", "observation", text, {"call_id": waiting.pop(0)}))
            continue
        actor = {"assistant": "agent"}.get(message.role, message.role)
        if message.content:
            events.append(TraceEvent(actor, "message", message.content))
        for k, call in enumerate(message.tool_calls):
            waiting.append(f"{i}.{k}")
            content = {"type": call.name, "arguments": call.arguments, "raw": canonical_json(call.arguments)}
            events.append(TraceEvent("agent", "action", content, {"call_id": waiting[-1], "ordered": True}))
    meta = task.meta
    return make_episode(
        events,
        where=f"task {task.uuid}",
        episode_id=task.uuid,
        split=str(meta.get("split") or "train"),
        group=task_group(task),
        environment=str(meta.get("environment") or task.source),
        initial_state=meta.get("initial_state"),
        metadata={"source": task.source},
    )


def _screen_text(content: str) -> str:
    """A result that is one JSON string as the text that it holds: what a terminal or a text world showed.

    A string that would read as another JSON value stays as it is.
    """
    try:
        value = json.loads(content) if content[:1] == '"' else None
    except ValueError:
        return content
    return value if isinstance(value, str) and value.strip()[:1] not in '{["-0123456789tfn' else content


def episode_from_bfcl(record: Any, where: str) -> TraceEpisode:
    """An episode from one line of a BFCL result file with its ``inference_log``; call texts are parsed, never run."""
    log = record.get("inference_log") if isinstance(record, dict) else None
    if not isinstance(log, list):
        raise BadTrace(f"{where}: a BFCL run needs its inference_log (generate it with --include-input-log)")
    events: list[TraceEvent] = []
    for t, turn in enumerate(log):
        if not isinstance(turn, dict):
            continue
        for message in turn.get("begin_of_turn_query") or []:
            if isinstance(message, dict) and message.get("role") == "user":
                events.append(TraceEvent("user", "message", _plain(message.get("content"))))
        for name, entries in turn.items():
            if not name.startswith("step_") or not isinstance(entries, list):
                continue
            waiting: list[str] = []
            for entry in entries:
                if not isinstance(entry, dict):
                    raise BadTrace(f"{where}: turn {t}: {name}: expected objects")
                for k, text in enumerate(entry.get("model_response_decoded") or []):
                    call_name, arguments = parse_call_text(str(text), f"{where}: turn {t}: {name}")
                    waiting.append(f"{t}.{name}.{k}")
                    content = {"type": call_name, "arguments": arguments, "raw": text}
                    events.append(TraceEvent("agent", "action", content, {"call_id": waiting[-1], "ordered": True}))
                if entry.get("role") == "tool":
                    meta = {"call_id": waiting.pop(0)} if waiting else {}
                    events.append(TraceEvent("environment", "observation", _plain(entry.get("content")), meta))
    scenario = re.sub(r"\D", "", str(record.get("id", "")).split("_")[-1])
    return make_episode(
        events,
        where=where,
        episode_id=record.get("id"),
        group=f"bfcl-{scenario}" if scenario else None,
        environment="bfcl",
        initial_state=record.get("initial_config"),
    )


_PREFIX = re.compile(r"^(SYSTEM|USER|ASSISTANT|AGENT|ACTION|OBSERVATION|ENVIRONMENT|TOOL)\s*:[ \t]?", re.M)


def episode_from_text(text: str, where: str) -> TraceEpisode:
    """An episode from role-prefixed text (``USER:``, ``ACTION:``, ``OBSERVATION:`` at line starts).

    An action is a JSON object ``{"name"|"type", "arguments"}`` or a line such as ``withdraw amount=25`` whose first
    word is the type; the text itself is kept.
    """
    marks = list(_PREFIX.finditer(text))
    if not marks:
        raise BadTrace(f"{where}: no role prefix (USER:, ACTION:, OBSERVATION:) at a line start")
    events = []
    for mark, following in zip(marks, [*marks[1:], None]):
        body = text[mark.end() : following.start() if following else len(text)].strip("\n")
        name = mark.group(1)
        if name == "ACTION":
            events.append(TraceEvent("agent", "action", text_action(body)))
        elif name in ("OBSERVATION", "ENVIRONMENT", "TOOL"):
            events.append(TraceEvent("environment", "observation", body))
        else:
            actor = {"ASSISTANT": "agent"}.get(name, name.lower())
            events.append(TraceEvent(actor, "message", body))
    return make_episode(events, where=where)


# --- files -----------------------------------------------------------------------------------------------------


def read_traces(
    path: str | Path,
    *,
    form: str | None = None,
    on_bad: str = "stop",
    report: TraceReport | None = None,
    seen: dict[str, str] | None = None,
) -> Iterator[TraceEpisode]:
    """Episodes of a file or of every file of a folder, one at a time.

    Args:
        path: .jsonl, .json, .txt or .parquet (CM2 tasks) file, or a folder of them.
        form: one of `FORMATS`; None decides by the record.
        on_bad: ``"stop"`` raises at the first bad trace, ``"skip"`` leaves it out and names it in ``report``.
        seen: ids and digests of traces read before, with their places; the same one again is a bad trace.

    Raises:
        UserError: the path does not exist, or (``"stop"``) a bad trace.
    """
    path = Path(path)
    if form is not None and form not in FORMATS:
        raise UserError(f"traces format {form!r}: expected one of {', '.join(FORMATS)}")
    if on_bad not in ("stop", "skip"):
        raise UserError(f"on_bad={on_bad!r}: expected stop or skip")
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    report = report if report is not None else TraceReport()
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    seen = {} if seen is None else seen
    for file in files:
        for where, make in _records(file, form):
            try:
                for episode in make():
                    digest = content_id([[e.actor, e.kind, e.content] for e in episode.events], "t")
                    if digest in seen:
                        raise BadTrace(f"{where}: the same trace as {seen[digest]}")
                    if episode.episode_id in seen:
                        raise BadTrace(f"{where}: id {episode.episode_id[:80]!r} is used by {seen[episode.episode_id]}")
                    seen[digest] = seen[episode.episode_id] = where
                    report.read += 1
                    yield episode
            except UserError as error:
                if on_bad == "stop":
                    raise
                report.bad.append(str(error))


def _records(file: Path, form: str | None) -> Iterator[tuple[str, Any]]:
    if file.suffix == ".txt":
        yield (
            str(file),
            lambda: [episode_from_text(file.read_text(encoding="utf-8", errors="replace"), str(file))],
        )
    elif file.suffix == ".jsonl":
        yield from _lines(file, form)
    elif file.suffix == ".parquet":
        from envace_jax.datasets.cm2 import read_tasks

        yield str(file), lambda: (episode_from_task(t) for t in read_tasks(file)[0])
    elif file.suffix == ".json":
        yield str(file), lambda: _from_json_file(file, form)


def _lines(file: Path, form: str | None) -> Iterator[tuple[str, Any]]:
    grouped: dict[str, list[dict[str, Any]]] = {}
    with file.open(encoding="utf-8", errors="replace") as handle:
        for number, line in enumerate(handle, 1):
            if not line.strip():
                continue
            where = f"{file}: line {number}"
            try:
                if len(line) > MAX_RECORD_BYTES:
                    raise ValueError(f"line of {len(line):,} characters")
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield where, _raiser(f"{where}: is not JSON ({short_error(error)})")
                continue
            # One event a line: gathered by episode, in file order.
            if isinstance(record, dict) and "kind" in record and "events" not in record:
                key = str(record.get("episode_id", record.get("trajectory_id", "")))
                grouped.setdefault(key, []).append(record)
                continue
            yield where, lambda record=record, where=where: _by_form(record, where, form)
    for key, events in grouped.items():
        where = f"{file}: episode {key}"
        whole: dict[str, Any] = {"episode_id": key, "events": events}
        for name in ("split", "trajectory_group", "environment", "initial_state"):
            given = [e[name] for e in events if e.get(name) is not None]
            if any(value != given[0] for value in given):
                yield where, _raiser(f"{where}: its events disagree about {name}")
                break
            whole[name] = given[0] if given else None
        else:
            yield where, lambda record=whole, where=where: _by_form(record, where, "canonical")


def _from_json_file(file: Path, form: str | None) -> Iterator[TraceEpisode]:
    if file.stat().st_size > 8 * MAX_RECORD_BYTES:
        raise BadTrace(f"{file}: above {8 * MAX_RECORD_BYTES:,} bytes: write one record a line (.jsonl)")
    try:
        value = json.loads(file.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError) as error:
        raise BadTrace(f"{file}: is not JSON ({short_error(error)})") from None
    if isinstance(value, dict) and isinstance(value.get("simulations"), list):
        value, form = _tau2_records(value), form or "tau2"
    if isinstance(value, list) and not (value and isinstance(value[0], dict) and "role" in value[0]):
        for i, record in enumerate(value):
            yield from _by_form(record, f"{file}: record {i}", form)
    else:
        yield from _by_form(value, str(file), form)


def _tau2_records(results: dict[str, Any]) -> list[Any]:
    """The simulations of a τ²-bench results file, each in the group that tasks of its domain have (`task_group`)."""
    info = results.get("info")
    domain = info.get("environment_info") if isinstance(info, dict) else None
    name = domain.get("domain_name") if isinstance(domain, dict) else None
    if not isinstance(name, str):
        return list(results["simulations"])
    return [
        {"trajectory_group": f"tau2_{name}-{r.get('task_id')}", "environment": f"tau2_{name}", **r}
        if isinstance(r, dict)
        else r
        for r in results["simulations"]
    ]


def _by_form(record: Any, where: str, form: str | None) -> Iterator[TraceEpisode]:
    keys = set(record) if isinstance(record, dict) else set()
    if {"current_prompt", "system_str"} <= keys:
        raise BadTrace(f"{where}: AgentWorldBench rows are for evaluation, never for building or training")
    if form is None:
        if "events" in keys:
            form = "canonical"
        elif "inference_log" in keys:
            form = "bfcl"
        elif "checklists" in keys or "extra_info" in keys:
            form = "tasks"
        else:
            form = "messages"
    if form == "tasks":
        from envace_jax.datasets.cm2 import task_from_record

        yield episode_from_task(task_from_record(record, where=where))
    elif form == "text":
        yield episode_from_text(str(record), where)
    else:
        readers = {
            "canonical": episode_from_record,
            "bfcl": episode_from_bfcl,
            "messages": episode_from_messages,
            "tau2": episode_from_messages,
        }
        yield readers[form](record, where)


def write_traces(path: str | Path, episodes: Iterable[TraceEpisode]) -> int:
    """Write canonical records, one a line; returns how many."""
    count = 0
    with Path(path).open("w", encoding="utf-8") as file:
        for episode in episodes:
            file.write(canonical_json(episode.to_json()) + "\n")
            count += 1
    return count


def _raiser(message: str) -> Any:
    def fail() -> list[TraceEpisode]:
        raise BadTrace(message)

    return fail
