"""CM2 records: every rule of the format, in every spelling and file type."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from envace_jax.config import UserError
from envace_jax.datasets.cm2 import read_tasks, task_from_record, task_to_record

FIXTURE = Path(__file__).parent / "fixtures" / "library.json"
pytestmark = pytest.mark.quick


@pytest.fixture
def record() -> dict[str, Any]:
    return json.loads(FIXTURE.read_text(encoding="utf-8"))[0]


def for_verl(record: dict[str, Any]) -> dict[str, Any]:
    """The trainer's spelling of an annotated record."""
    return {
        "data_source": "nvidia_nemotron_checklist",
        "messages": record["messages"][:2],
        "extra_info": {
            "messages": record["messages"],
            "tools": json.dumps(record["tools"]),
            "interaction_kwargs": {"name": "checklist", "checklist_list": record["checklists"]},
            "need_tools_kwargs": False,
            "original_index": record["uuid"],
        },
    }


def nulled(value: Any) -> Any:
    """What parquet conversion does to empty objects."""
    if isinstance(value, dict):
        return {key: nulled(sub) for key, sub in value.items()} or None
    return [nulled(sub) for sub in value] if isinstance(value, list) else value


def test_reads_the_fixture():
    (task,), bad = read_tasks(FIXTURE)
    assert bad.count == 0
    assert task.uuid == "lookalike-0001" and task.source == "cm2"
    assert task.system == "You help readers of a town library."
    assert len(task.user_turns) == 3
    assert task.tool_names == ("find_book", "reserve_book", "card_fees", "loan_rules")
    first = task.messages[2]
    assert first.thinking == "I should look the title up in the catalogue." and first.content == ""
    items = task.checklists[0]
    assert [len(turn) for turn in items] == [3, 4, 3]
    assert items[0][2].dependence == ("C1",) and items[0][2].rule == {"kind": "reply", "contains": ["N4"]}
    assert items[2][2].focus_on == ("assistant.content.user_visible_reply", "assistant.content.thinking")


def test_calls_and_responses_pair_by_position():
    (task,), _ = read_tasks(FIXTURE)
    found = [(c.turn, c.step, c.index, c.name, json.loads(c.result)) for c in task.recorded_calls]
    assert found[0] == (0, 0, 0, "find_book", {"book": {"id": "B17", "shelf": "N4", "copies": 2, "loans": {}}})
    assert found[1][:4] == (1, 0, 0, "reserve_book") and found[1][4]["reservation"] == "R903"
    assert found[2][:4] == (1, 0, 1, "card_fees") and found[2][4][1]["reason"] == "café"
    assert found[3] == (2, 0, 0, "loan_rules", "21 days")
    assert task.recorded_calls[2].arguments == {"card": 5521, "options": {}}


def test_writing_inverts_reading(record):
    task = task_from_record(record, where="here")
    again = task_from_record(json.loads(json.dumps(task_to_record(task))), where="here")
    assert again == task


def test_for_verl_spelling_gives_the_same_task(record):
    annotated = task_from_record(record, where="here")
    verl = task_from_record(for_verl(record), where="here")
    assert verl.source == "nvidia_nemotron_checklist"
    assert (verl.messages, verl.tools, verl.checklists) == (annotated.messages, annotated.tools, annotated.checklists)


def test_parquet_gives_back_nulled_objects(record, tmp_path):
    import pyarrow
    import pyarrow.parquet

    expected = task_from_record(record, where="here")
    for item in (item for turn in record["checklists"][0] for item in turn):
        # What is of unlike shape from row to row goes in as JSON text, or always as a list.
        item["extra_info"] = json.dumps(item["extra_info"])
        item["focus_on"] = item["focus_on"] if isinstance(item["focus_on"], list) else [item["focus_on"]]
    other = copy.deepcopy(record) | {"uuid": "lookalike-0002"}
    for name, rows in {
        "annotated": [record, other],
        "verl": [for_verl(record), for_verl(other)],
    }.items():
        path = tmp_path / f"{name}.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([nulled(row) for row in rows]), path)
        tasks, _ = read_tasks(path)
        assert [t.uuid for t in tasks] == ["lookalike-0001", "lookalike-0002"]
        assert tasks[0].messages == expected.messages
        assert tasks[0].checklists == expected.checklists
        functions = {t["function"]["name"]: t["function"] for t in tasks[0].tools}
        assert functions["loan_rules"]["parameters"]["properties"] == {}
        assert set(functions["reserve_book"]["parameters"]["properties"]) == {"book_id", "card"}
        assert functions["card_fees"]["parameters"]["properties"]["options"] == {}


def test_nulled_schema_and_arguments_are_empty_objects(record):
    record["tools"][3]["function"]["parameters"]["properties"] = None
    record["tools"][2]["function"]["parameters"]["properties"]["options"] = None
    record["messages"][11]["tool_calls"][0]["function"]["arguments"] = None
    task = task_from_record(record, where="here")
    assert task.tools[3]["function"]["parameters"]["properties"] == {}
    assert task.tools[2]["function"]["parameters"]["properties"]["options"] == {}
    assert task.recorded_calls[3].arguments == {}


def edit(*path: Any, value: Any) -> Any:
    """An edit of a record: set what stands at ``path`` (or delete it, for the value ``...``)."""

    def apply(record: dict[str, Any]) -> None:
        for key in path[:-1]:
            record = record[key]
        if value is ...:
            del record[path[-1]]
        else:
            record[path[-1]] = value(record[path[-1]]) if callable(value) else value

    return apply


ITEM = ("checklists", 0, 0, 0)
BROKEN = [
    (edit("uuid", value=" "), "uuid", "is empty"),
    (edit("messages", value=[]), "messages", "is empty"),
    (edit("messages", 0, "role", value="narrator"), "messages[0].role", "system or user"),
    (edit("messages", value=lambda m: m[:1] + m), "messages[1].role", "expected user after system"),
    (edit("messages", value=lambda m: m[1:2] + m[1:]), "messages[1].role", "expected assistant after user"),
    (edit("messages", value=lambda m: m[:3] + m[4:]), "messages[3].role", "1 tool messages still due"),
    (edit("messages", value=lambda m: m[:4] + m[3:]), "messages[4].role", "expected assistant after tool"),
    (edit("messages", value=lambda m: m[:8] + m[9:]), "messages[8].role", "1 tool messages still due"),
    (edit("messages", value=lambda m: m[:-1]), "messages", "last message must be an assistant"),
    (edit("messages", value=lambda m: m[:-2]), "messages", "1 tool messages missing"),
    (edit("messages", 1, "content", value=" \n"), "messages[1].content", "is empty"),
    (edit("messages", 1, "content", value=None), "messages[1].content", "expected text, found null"),
    (edit("messages", 3, "content", value="{'a': 1}"), "messages[3].content", "is not JSON"),
    (edit("messages", 3, "content", value="NaN"), "messages[3].content", "is not JSON"),
    (edit("messages", 3, "content", value="[" * 200_000), "messages[3].content", "is not JSON"),
    (edit("messages", 4, "content", value="no thinking"), "messages[4].content", "exactly one <think>"),
    (edit("messages", 4, "content", value=lambda c: c + c), "messages[4].content", "exactly one <think>"),
    (edit("messages", 4, "content", value=lambda c: "Hm. " + c), "messages[4].content", "must come first"),
    (edit("messages", 1, "tool_calls", value=[{}]), "messages[1].tool_calls", "only assistant messages"),
    (edit("messages", 2, "tool_calls", 0, "type", value="code"), "messages[2].tool_calls[0].type", "'function'"),
    (
        edit("messages", 2, "tool_calls", 0, "function", "arguments", value={"title": "x"}),
        "messages[2].tool_calls[0].function.arguments",
        "expected text, found an object",
    ),
    (
        edit("messages", 2, "tool_calls", 0, "function", "arguments", value="[1]"),
        "messages[2].tool_calls[0].function.arguments",
        "the JSON text of an object",
    ),
    (
        edit("messages", 2, "tool_calls", 0, "function", "arguments", value='{"title": 3}'),
        "messages[2].tool_calls[0].function.arguments",
        "do not fit its schema",
    ),
    (
        edit("messages", 2, "tool_calls", 0, "function", "name", value="lend"),
        "messages[2].tool_calls[0].function.name",
        "no tool lend",
    ),
    (edit("tools", 0, "type", value="plugin"), "tools[0].type", "'function'"),
    (edit("tools", 1, "function", "name", value="find_book"), "tools[1].function.name", "used by two tools"),
    (
        edit("tools", 0, "function", "parameters", "properties", value=["title"]),
        "tools[0].function.parameters",
        "not a usable JSON schema",
    ),
    (edit("tools", value="[oops"), "tools", "is not JSON"),
    (edit("checklists", value=[]), "checklists", "at least one variant"),
    (edit("checklists", 0, value=lambda turns: turns[:2]), "checklists[0]", "2 turns, the dialogue has 3"),
    (edit("checklists", 0, 1, value=[]), "checklists[0][1]", "at least one item"),
    (edit(*ITEM, "id", value="C1"), "checklists[0][0][1].id", "used by two items"),
    (edit(*ITEM, "question", value=""), "checklists[0][0][0].question", "is empty"),
    (edit(*ITEM, "pass_condition", value=...), "checklists[0][0][0].pass_condition", "expected text"),
    (edit(*ITEM, "focus_on", value="user.content"), "checklists[0][0][0].focus_on", "expected one or more of"),
    (edit(*ITEM, "focus_on", value=[]), "checklists[0][0][0].focus_on", "expected one or more of"),
    (edit(*ITEM, "weight", value=0.4), "checklists[0][0]", "must sum to 1, found 0.9"),
    (edit(*ITEM, "weight", value=-0.5), "checklists[0][0][0].weight", "at least 0"),
    (edit(*ITEM, "weight", value=True), "checklists[0][0][0].weight", "expected a number"),
    (edit(*ITEM, "weight", value=float("nan")), "checklists[0][0][0].weight", "expected a number"),
    (edit(*ITEM, "required_for_next_turn", value="yes"), "checklists[0][0][0].required_for_next_turn", "true or"),
    (edit(*ITEM, "dependence", value=["C9"]), "checklists[0][0][0].dependence", "not another item"),
    (edit(*ITEM, "dependence", value=["C0"]), "checklists[0][0][0].dependence", "not another item"),
    (edit(*ITEM, "dependence", value=["C2"]), "checklists[0][0][0].dependence", "not an item on tool.content"),
    (edit(*ITEM, "evidence", 0, "step", value=-1), "checklists[0][0][0].evidence[0].step", "whole number"),
    (edit(*ITEM, "evidence", 0, "turn", value=9), "checklists[0][0][0].evidence[0].turn", "0 to 3"),
    (edit(*ITEM, "evidence", 0, "from", value="x"), "checklists[0][0][0].evidence[0].from", "expected one of"),
    (edit(*ITEM, "extra_info", "rule", value={"a": 1}), "checklists[0][0][0].extra_info.rule", "kind"),
    (edit(*ITEM, "extra_info", "rule", value={"kind": "x"}), "checklists[0][0][0].extra_info.rule", "kind"),
]


@pytest.mark.parametrize("change, field, message", BROKEN, ids=[f"{k}-{row[1]}" for k, row in enumerate(BROKEN)])
def test_a_broken_record_names_its_place(record, change, field, message):
    change(record)
    with pytest.raises(UserError) as caught:
        task_from_record(record, where="train.json: record 7")
    text = str(caught.value)
    assert text.startswith("train.json: record 7")
    assert f": {field}: " in text and message in text
    assert "\n" not in text


def test_errors_of_the_verl_spelling_name_its_fields(record):
    record["messages"][3]["content"] = "?"
    with pytest.raises(UserError, match=r"uuid lookalike-0001.*: extra_info\.messages\[3\]\.content: is not JSON"):
        task_from_record(for_verl(record), where="x")
    verl = for_verl(record)
    verl["extra_info"]["messages"][3]["content"] = "1"
    verl["extra_info"]["interaction_kwargs"] = None
    with pytest.raises(UserError, match=r"extra_info\.interaction_kwargs\.checklist_list: is empty"):
        task_from_record(verl, where="x")


def test_json_lines_stop_or_skip(record, tmp_path):
    path = tmp_path / "tasks.jsonl"
    bad = copy.deepcopy(record) | {"uuid": "b"}
    bad["messages"].pop()
    good = [record, record | {"uuid": "c"}]
    rows = [json.dumps(good[0]), "", "{cut", json.dumps(bad), json.dumps(good[1]), json.dumps(record), "[]"]
    path.write_text("\n".join(rows), encoding="utf-8")
    with pytest.raises(UserError, match=r"tasks\.jsonl: line 3: is not JSON"):
        read_tasks(path)
    tasks, left_out = read_tasks(path, on_bad="skip")
    assert [task.uuid for task in tasks] == ["lookalike-0001", "c"]
    assert left_out.count == 4
    assert "line 4 (uuid b)" in left_out.messages[1]
    assert "line 6 (uuid lookalike-0001): uuid: already used at" in left_out.messages[2]
    assert "line 7: expected an object, found a list" in left_out.messages[3]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("missing.json", None, "no such file"),
        ("tasks.txt", "[]", "expected a .json, .jsonl or .parquet file"),
        ("tasks.json", "{}", "expected a list of records, found an object"),
        ("tasks.json", "[1,", "is not JSON"),
        ("tasks.json", "[]", "no usable record"),
        ("tasks.jsonl", "\udce4", "no usable record"),
        ("tasks.parquet", "PAR?", "is not parquet"),
    ],
)
def test_unreadable_files(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=message):
        read_tasks(path, on_bad="skip")


def test_lone_surrogates_are_replaced(record):
    record["messages"][1]["content"] = "a \ud83d b \ud83d\ude00"
    task = task_from_record(record, where="here")
    assert task.user_turns[0] == "a \ufffd b \U0001f600"
    json.dumps(task_to_record(task), ensure_ascii=False).encode()


def test_late_tools(record):
    late = record["tools"].pop(3)
    with pytest.raises(UserError, match="no tool loan_rules"):
        task_from_record(record, where="here")
    record["meta"] = {"late_tools": {"2": [late]}}
    task = task_from_record(record, where="here")
    assert [len(task.tools_at(turn)) for turn in range(3)] == [3, 3, 4]
    assert "loan_rules" in task.tool_names
    record["meta"] = {"late_tools": {"3": [late]}}
    with pytest.raises(UserError, match=r"meta\.late_tools\.3: expected a turn from 0 to 2"):
        task_from_record(record, where="here")
    record["meta"] = {"late_tools": {"2": [late, record["tools"][0]]}}
    with pytest.raises(UserError, match="already on offer"):
        task_from_record(record, where="here")


def test_any_damage_is_a_user_error_or_a_task(record):
    rng = random.Random(0)
    junk = [None, True, -1, 1.5, "", "x", [], {}, [None], {"a": None}, "\ud800", [[]], "{}", "null"]
    for _ in range(600):
        damaged = copy.deepcopy(record)
        node: Any = damaged
        while True:
            key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
            child = node[key]
            if not isinstance(child, (dict, list)) or not child or rng.random() < 0.15:
                break
            node = child
        node[key] = rng.choice(junk)
        try:
            task = task_from_record(damaged, where="x")
        except UserError:
            continue
        assert task_from_record(task_to_record(task), where="x") == task
