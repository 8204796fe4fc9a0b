"""Readers, alignment, and traces that mean harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from envace_jax.config import UserError
from envace_jax.datasets.action_text import BadTrace, parse_call_text, text_action
from envace_jax.datasets.quickstart.generator import generate_tasks
from envace_jax.datasets.records import Task
from envace_jax.datasets.traces import (
    TraceEpisode,
    TraceEvent,
    TraceReport,
    episode_from_bfcl,
    episode_from_messages,
    episode_from_record,
    episode_from_task,
    episode_from_text,
    make_episode,
    read_traces,
    task_group,
    write_traces,
)
from envace_jax.worldbook.build import BuildConfig, build_worldbook, load_episodes
from envace_jax.worldbook.compile import replay_rules
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
    # Which of the two acted first is not recorded: neither says anything of the state before it.
    assert [f.problem for f in flags] == ["answered while another call was open"] * 2
    assert not any(t.slice.usable for t in found) and found[0].slice.concurrent_event_ids == (episode.events[2].id,)


def test_calls_that_are_answered_in_their_order_are_a_sequence_and_a_late_answer_is_an_overlap() -> None:
    batch = log(
        {"role": "assistant", "tool_calls": [call("a", "1"), call("b", "2")]},
        {"role": "tool", "tool_call_id": "1", "content": "first"},
        {"role": "tool", "tool_call_id": "2", "content": "second"},
    )
    found, flags = align(batch)
    assert not flags and all(t.slice.usable for t in found)
    late = log(
        {"role": "assistant", "tool_calls": [call("slow", "1")]},
        {"role": "assistant", "tool_calls": [call("b", "2")]},
        {"role": "tool", "tool_call_id": "2", "content": "second"},
        {"role": "tool", "tool_call_id": "1", "content": "first"},
        {"role": "assistant", "tool_calls": [call("c", "3")]},
        {"role": "tool", "tool_call_id": "3", "content": "third"},
    )
    assert [(t.text, t.slice.usable) for t in align(late)[0]] == [("first", False), ("second", False), ("third", True)]


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
    for depth, kind in ((40, list), (60, str)):
        assert type(observation_value("[" * depth + "1" + "]" * depth)) is kind
    deep = json.loads('{"a": ' * 60 + "1" + "}" * 60)
    for field in ("metadata", "initial_state"):
        with pytest.raises(BadTrace, match="evil-7.*deeper"):
            episode_from_record(hostile("x") | {field: deep}, "f")
    with pytest.raises(BadTrace, match="evil-7.*deeper"):
        episode_from_record(hostile("x", a=deep), "f")
    # What is not too deep goes through the whole build, and what is does as a text.
    episodes = [
        episode_from_record(hostile("[" * depth + f"{i}" + "]" * depth, k=i) | {"initial_state": {"n": i},
                                                                               "episode_id": f"{i}-{depth}"}, "f")
        for i in range(4) for depth in (30, 47, 200)
    ]  # fmt: skip
    assert len(build_worldbook(episodes, config=BuildConfig(folds=2)).evidence) == 12
    assert observation_value('{"a": NaN}') == '{"a": NaN}'


def test_what_a_trace_says_of_itself_is_checked_too(tmp_path: Path) -> None:
    """Ids, metadata and tool documents of any shape: refused with the trace named, or without effect."""
    for field, value in (("metadata", [1]), ("initial_state", [1])):
        with pytest.raises(BadTrace, match="evil-7"):
            episode_from_record(hostile("x") | {field: value}, "f")
    record = hostile("x")
    record["events"][0]["metadata"] = {"call_id": [1]}
    with pytest.raises(BadTrace, match="evil-7.*call_id"):
        episode_from_record(record, "f")
    record["events"][0]["metadata"] = record["events"][1]["metadata"] = {"call_id": 7}
    assert align(episode_from_record(record, "f"))[0][0].slice.alignment == "correlated"
    documents: list[Any] = [
        5,
        "abc",
        [{"function": {"name": "look", "parameters": [1]}}],
        [{"function": {"name": "look", "parameters": {"properties": [1]}}}],
        [{"function": {"name": "look", "description": 5,
                       "parameters": {"properties": {"q": {"enum": 5, "type": ["a"]}}, "required": 5}}}],
    ]  # fmt: skip
    for tools in documents:
        episode = episode_from_record(hostile("x") | {"metadata": {"tools": tools}}, "f")
        assert build_worldbook([episode], config=BuildConfig(folds=0)).actions[0].name == "look"


@pytest.mark.parametrize("key", ["$arg", "$state", "$const", "$nope", "a.b", "*", "", "[0]", "__class__", "world"])
def test_keys_that_mean_something_elsewhere_are_keys(key: str) -> None:
    """State, arguments and answers full of them: the build and a replay go through, and no rule answers wrongly."""
    episodes = []
    for i in range(12):
        events = [
            ("get", {"order": "o1", key: i}, {key: 1, "s": "p"}),
            ("add", {key: i}, {"id": f"o{i + 5}", key: i}),
            ("get", {"order": f"o{i + 5}", key: i}, {key: i, "s": "p"}),
        ]
        record = {"episode_id": f"e{i}", "initial_state": {"orders": {f"o{j}": {key: j, "s": "p"} for j in range(3)}}}
        record["events"] = [
            event
            for name, arguments, answer in events
            for event in (
                {"actor": "agent", "kind": "action", "content": {"type": name, "arguments": arguments}},
                {"actor": "environment", "kind": "observation", "content": answer},
            )
        ]
        episodes.append(episode_from_record(record, "f"))
    book = build_worldbook(episodes[:10], config=BuildConfig(folds=2))
    assert not sum(replay_rules(book, episodes[10:], floor=0.0).wrong.values())


def test_event_lines_keep_their_split_and_the_same_trace_twice_is_said(tmp_path: Path) -> None:
    lines = [
        {"episode_id": "z", "split": "test", "actor": "agent", "kind": "action", "content": {"type": "a"}},
        {"episode_id": "z", "actor": "environment", "kind": "observation", "content": "y"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert [e.split for e in read_traces(tmp_path / "a.jsonl")] == ["test"]
    lines[1]["split"] = "train"
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(BadTrace, match="episode z.*disagree about split"):
        list(read_traces(tmp_path / "b.jsonl"))
    good = [episode_from_task(t) for t in generate_tasks("train", 2)]
    for name in ("c.jsonl", "d.jsonl"):
        write_traces(tmp_path / name, good)
    with pytest.raises(UserError, match="the same trace as .*c.jsonl"):
        load_episodes([tmp_path / "c.jsonl", tmp_path / "d.jsonl"])
    assert len(load_episodes([tmp_path / "c.jsonl", tmp_path / "d.jsonl"], on_bad="skip")[0]) == 2


def test_tau2_results_get_the_groups_of_their_tasks_and_a_users_calls_are_his_own(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "help", "tool_calls": [{"id": "1", "name": "reboot", "arguments": {}}]},
        {"role": "tool", "id": "1", "requestor": "user", "content": "done"},
        {"role": "assistant", "tool_calls": [{"id": "2", "name": "check", "arguments": {"n": 1}}]},
        {"role": "tool", "id": "2", "requestor": "assistant", "content": "{}", "error": True},
    ]
    results = {
        "info": {"environment_info": {"domain_name": "airline"}},
        "simulations": [{"id": "s", "task_id": "12", "messages": messages}],
    }
    (tmp_path / "r.json").write_text(json.dumps(results))
    (episode,) = read_traces(tmp_path / "r.json")
    assert episode.group == task_group(Task("tau2-airline-12", "tau2_airline", (), (), (), {"scenario": "12"}))
    assert [e.actor for e in episode.events if e.kind == "action"] == ["user", "agent"]
    assert [(t.name, t.text) for t in align(episode)[0]] == [("reboot", "done"), ("check", "{}")]


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ('[{"keystrokes": "ls -la\\n", "duration": 0.1}]', "ls", {"keystrokes": "ls -la\n", "duration": 0.1}),
        ('[{"keystrokes": "/usr/bin/python3 a.py\\n"}]', "python3", None),
        ('[{"keystrokes": "a | b\\n", "duration": 1}]', "shell", None),
        ('{"commands": [{"keystrokes": "cd x\\n", "duration": 1}, {"keystrokes": "ls\\n", "duration": 2}]}', "shell",
         {"keystrokes": "cd x\nls\n", "duration": 3}),
        ('[{"keystrokes": "", "duration": 5}]', "wait", {"keystrokes": "", "duration": 5}),
        ('[{"keystrokes": "\\u0003"}]', "keys", None),
        ('[{"keystrokes": "y"}]', "keys", None),
        ("click(id=3, text='a')", "click", {"id": 3, "text": "a"}),
        ("f(x=__import__('os'))", "f(x=__import__('os'))", {"text": "f(x=__import__('os'))"}),
        ("go to cabinet 1", "go", {"text": "go to cabinet 1"}),
        ("[1, 2]", "[1,", {"text": "[1, 2]"}),
    ],
)  # fmt: skip
def test_actions_written_as_text(text: str, name: str, arguments: Any) -> None:
    action = text_action(text)
    assert action["type"] == name and action["raw"] == text
    assert arguments is None or action["arguments"] == arguments
