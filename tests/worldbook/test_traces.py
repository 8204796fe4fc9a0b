"""Readers, alignment, and traces that mean harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from envace_jax.config import UserError
from envace_jax.datasets.quickstart.generator import generate_tasks
from envace_jax.datasets.traces import (
    BadTrace,
    TraceEpisode,
    TraceEvent,
    TraceReport,
    episode_from_bfcl,
    episode_from_messages,
    episode_from_record,
    episode_from_task,
    episode_from_text,
    make_episode,
    parse_call_text,
    read_traces,
    write_traces,
)
from envace_jax.worldbook.ingest import align, observation_value, usable_prefix

pytestmark = pytest.mark.quick


def call(name: str, call_id: str | None = None, **arguments: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {"function": {"name": name, "arguments": json.dumps(arguments)}}
    return {**entry, "id": call_id} if call_id else entry


def log(*messages: dict[str, Any]) -> TraceEpisode:
    return episode_from_messages({"messages": list(messages)}, "log")


def test_results_answer_calls_by_id_whatever_their_order() -> None:
    episode = log(
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [call("a", "1", x=1), call("b", "2", x=2)]},
        {"role": "tool", "tool_call_id": "2", "content": "second"},
        {"role": "tool", "tool_call_id": "1", "content": "first"},
    )
    found, flags = align(episode)
    assert [(t.name, t.text, t.slice.alignment) for t in found] == [
        ("a", "first", "correlated"),
        ("b", "second", "correlated"),
    ]
    assert not flags


def test_results_without_ids_answer_a_single_call_and_nothing_is_guessed_for_several() -> None:
    single = log(
        {"role": "assistant", "tool_calls": [call("a")]},
        {"role": "tool", "content": "one"},
        {"role": "assistant", "tool_calls": [call("a"), call("b")]},
        {"role": "tool", "content": "two"},
        {"role": "tool", "content": "three"},
        {"role": "tool", "content": "stray"},
    )
    found, flags = align(single)
    assert [t.slice.usable for t in found] == [True, False, False]
    assert {f.problem for f in flags} >= {"uncorrelated results of several calls", "result without a call"}
    assert [t.text for t in usable_prefix(found)] == ["one"]


def test_duplicates_and_unanswered_calls_are_withheld() -> None:
    episode = log(
        {"role": "assistant", "tool_calls": [call("a", "1")]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
        {"role": "tool", "tool_call_id": "1", "content": "y"},
        {"role": "assistant", "tool_calls": [call("b", "2")]},
        {"role": "assistant", "content": "never mind"},
        {"role": "tool", "tool_call_id": "9", "content": "?"},
    )
    found, flags = align(episode)
    assert not any(t.slice.usable for t in found)
    problems = {f.problem for f in flags}
    assert {"two results for one call", "no result before the agent went on", "result without its call"} <= problems


def test_a_cm2_task_gives_its_calls_in_order_with_the_initial_state_and_its_group() -> None:
    task = generate_tasks("train", 3)[2]
    episode = episode_from_task(task)
    found, flags = align(episode)
    assert [(t.name, t.arguments, t.text) for t in found] == [
        (c.name, c.arguments, c.result) for c in task.recorded_calls
    ]
    assert not flags and all(t.slice.usable for t in found)
    assert episode.initial_state == task.meta["initial_state"] and episode.episode_id == task.uuid


def test_role_prefixed_text_is_split_and_its_words_are_kept() -> None:
    text = 'USER: hello\nACTION: {"name": "pay", "arguments": {"n": 2}}\nOBSERVATION: {"ok": true}\n'
    text += "ACTION: look at=desk\nOBSERVATION: a desk"
    found, _ = align(episode_from_text(text, "t"))
    assert [(t.name, t.arguments, t.value) for t in found] == [
        ("pay", {"n": 2}, {"ok": True}),
        ("look", {"at": "desk"}, "a desk"),
    ]


def test_bfcl_runs_are_parsed_not_run() -> None:
    record = {
        "id": "multi_turn_base_7",
        "inference_log": [
            {
                "begin_of_turn_query": [{"role": "user", "content": "list"}],
                "step_0": [
                    {"role": "assistant", "content": "x"},
                    {"role": "handler_log", "model_response_decoded": ["cd(folder='a')", "ls(a=True)"]},
                    {"role": "tool", "content": "{}"},
                    {"role": "tool", "content": '{"files": []}'},
                ],
            }
        ],
    }
    episode = episode_from_bfcl(record, "r")
    assert [(t.name, t.arguments) for t in align(episode)[0]] == [("cd", {"folder": "a"}), ("ls", {"a": True})]
    assert episode.group == "bfcl-7"
    for bad in ("__import__('os').system('x')", "f(x=open('y'))", "a.b(c=1)", "f(1)", "1+1"):
        with pytest.raises(BadTrace):
            parse_call_text(bad, "w")


def test_files_round_trip_and_event_lines_are_gathered(tmp_path: Path) -> None:
    episodes = [episode_from_task(t) for t in generate_tasks("train", 5)]
    write_traces(tmp_path / "a.jsonl", episodes)
    assert list(read_traces(tmp_path / "a.jsonl")) == episodes
    lines = [{"episode_id": "z", "actor": e.actor, "kind": e.kind, "content": e.content, "metadata": e.metadata}
             for e in episodes[0].events]  # fmt: skip
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (gathered,) = read_traces(tmp_path / "b.jsonl")
    assert [e.content for e in gathered.events] == [e.content for e in episodes[0].events]


def test_evaluation_rows_never_become_traces(tmp_path: Path) -> None:
    row = {"task": "terminal", "id": "1", "prompt": ["x"], "response": ["y"], "current_prompt": "x", "system_str": "",
           "turn_idx": 0, "total_turns": 1}  # fmt: skip
    (tmp_path / "r.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match="never for building"):
        list(read_traces(tmp_path / "r.jsonl"))


def hostile(content: Any, **arguments: Any) -> dict[str, Any]:
    return {
        "episode_id": "evil-7",
        "events": [
            {"actor": "agent", "kind": "action", "content": {"type": "look", "arguments": arguments}},
            {"actor": "environment", "kind": "observation", "content": content},
        ],
    }


def test_a_five_megabyte_observation_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="evil-7"):
        episode_from_record(hostile("x" * 5_000_000), "f")
    good = episode_from_task(generate_tasks("train", 1)[0]).to_json()
    (tmp_path / "t.jsonl").write_text(
        "\n".join(json.dumps(r) for r in (hostile("x" * 5_000_000), good)) + "\n{not json"
    )
    report = TraceReport()
    assert len(list(read_traces(tmp_path / "t.jsonl", on_bad="skip", report=report))) == 1
    assert len(report.bad) == 2 and "evil-7" in report.bad[0]


def test_cycles_nan_and_foreign_kinds_are_refused_by_name() -> None:
    loop: dict[str, Any] = {}
    loop["self"] = loop
    for record in (hostile("x", a=loop), hostile("x", a=float("nan")), hostile(object())):
        with pytest.raises(BadTrace, match="evil-7"):
            episode_from_record(record, "f")
    with pytest.raises(BadTrace, match="unknown actor or kind"):
        make_episode([TraceEvent("root", "shell", "x")], where="w")
    with pytest.raises(BadTrace, match="no action"):
        make_episode([TraceEvent("user", "message", "x")], where="w")


def test_control_characters_surrogates_and_odd_keys_are_neutral() -> None:
    episode = episode_from_record(hostile("a\x00b\ud800c\x1b[31m<script>alert(1)</script>", **{"a.b": 1, "": 2}), "f")
    (t,), _ = align(episode)
    t.text.encode("utf-8")
    assert "\x00" not in t.text and t.arguments == {"a.b": 1, "": 2}


def test_deep_json_is_text_not_a_crash() -> None:
    assert observation_value("[" * 100_000) == "[" * 100_000
    assert observation_value('{"a": NaN}') == '{"a": NaN}'
