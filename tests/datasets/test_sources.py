"""Which tasks a run gets, and that none stands on both sides."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from envace_jax.config import UserError, default_config
from envace_jax.datasets.cm2 import task_to_record
from envace_jax.datasets.prepared import prepare
from envace_jax.datasets.quickstart.generator import generate_tasks
from envace_jax.datasets.sources import load_tasks, source_counts
from envace_jax.datasets.traces import TraceEvent, episode_from_task, make_episode, task_group, write_traces

FIXTURE = Path(__file__).parent / "fixtures" / "library.json"


def section(**values):
    data = default_config().data
    data.update(values)
    return data


@pytest.fixture
def cm2_file(tmp_path):
    record = json.loads(FIXTURE.read_text(encoding="utf-8"))[0]

    def write(name, uuids, **fields):
        path = tmp_path / name
        path.write_text(json.dumps([record | {"uuid": uuid} | fields for uuid in uuids]), encoding="utf-8")
        return str(path)

    return write


@pytest.mark.quick
def test_cm2_file_holds_out_its_first_tenth(cm2_file):
    path = cm2_file("a.json", [f"r{k}" for k in range(20)])
    train, heldout = load_tasks(section(source="cm2", path=path))
    assert [t.uuid for t in heldout] == ["r0", "r1"] and len(train) == 18
    assert {t.meta["split"] for t in train} == {"train"} and {t.meta["split"] for t in heldout} == {"heldout"}
    train, heldout = load_tasks(section(source="cm2", path=path, train_limit=3, eval_limit=1))
    assert [t.uuid for t in train] == ["r2", "r8", "r14"] and len(heldout) == 1


@pytest.mark.quick
def test_cm2_files_with_splits_of_their_own(cm2_file):
    path = cm2_file("a.json", ["r0", "r1"])
    other = cm2_file("b.json", ["s0"])
    train, heldout = load_tasks(section(source="cm2", path=path, eval_path=other))
    assert [t.uuid for t in train] == ["r0", "r1"] and [t.uuid for t in heldout] == ["s0"]
    with pytest.raises(UserError, match=r"1 held-out tasks are also in the training data \(first: r1\)"):
        load_tasks(section(source="cm2", path=path, eval_path=cm2_file("c.json", ["r1"])))
    held = cm2_file("d.json", ["t0", "t1"], meta={"split": "heldout"})
    with pytest.raises(UserError, match="no training task"):
        load_tasks(section(source="cm2", path=held))


@pytest.mark.quick
def test_broken_records_are_counted_aloud(tmp_path, caplog):
    tasks = [task_to_record(task) for task in generate_tasks("train", 3)]
    tasks[1]["tools"] = []
    path = tmp_path / "a.json"
    path.write_text(json.dumps(tasks), encoding="utf-8")
    with pytest.raises(UserError, match="record 1 "):
        load_tasks(section(source="cm2", path=str(path)))
    train, _ = load_tasks(section(source="cm2", path=str(path), on_bad_record="skip"))
    assert len(train) == 2
    assert "1 broken records left out" in caplog.text


def test_prepared_folder(cm2_file, tmp_path):
    from data.cm2.cm2_dataset_builder import Builder, Cm2Config

    path = cm2_file("a.json", [f"r{k}" for k in range(12)])
    folder = prepare(Builder(data_dir=str(tmp_path / "out"), config=Cm2Config(path=path)))
    assert load_tasks(section(source="cm2", path=str(folder))) == load_tasks(section(source="cm2", path=path))


@pytest.mark.quick
def test_quickstart_makes_as_many_as_asked_for():
    train, heldout = load_tasks(section(train_limit=5, eval_limit=203))
    assert (len(train), len(heldout)) == (5, 203)
    assert source_counts(train) == {"quickstart": 5}


def test_mix_parts_its_limit():
    train, heldout = load_tasks(section(source="bfcl+tau2+quickstart", train_limit=10, eval_limit=6))
    counts = source_counts(train)
    assert counts["bfcl_multi_turn"] == 4 and counts["quickstart"] == 3
    assert counts["tau2_airline"] + counts["tau2_retail"] == 3
    assert len(heldout) == 6


@pytest.mark.quick
def test_unknown_source():
    with pytest.raises(UserError, match="expected quickstart, cm2, bfcl, tau2 or traces, found 'web'"):
        load_tasks(section(source="web"))
    with pytest.raises(UserError, match=r"data\.path: source=cm2 needs"):
        load_tasks(section(source="cm2"))


def traces(folder, name, count=40, split=None):
    episodes = [episode_from_task(task) for task in generate_tasks("train", count)]
    if split is not None:
        episodes = [dataclasses.replace(e, split=split if k % 4 == 0 else "train") for k, e in enumerate(episodes)]
    write_traces(folder / name, episodes)
    return str(folder / name), episodes


@pytest.mark.quick
def test_traces_are_tasks_and_keep_their_groups_apart(tmp_path):
    path, episodes = traces(tmp_path, "t.jsonl")
    train, heldout = load_tasks(section(source="traces", path=path))
    assert len(train) + len(heldout) == 40 and 0 < len(heldout) < 12
    groups = {e.episode_id: e.group for e in episodes}
    assert all(task_group(t) == groups[t.uuid] for t in train + heldout)  # what a worldbook leaves out for them
    assert not {task_group(t) for t in train} & {task_group(t) for t in heldout}
    by_id = {t.uuid: t for t in generate_tasks("train", 40)}
    for task in train:
        calls = [(c.name, c.arguments, c.result) for c in by_id[task.uuid].recorded_calls]
        assert [(c.name, c.arguments, c.result) for c in task.recorded_calls] == calls
        assert task.meta["initial_state"] == by_id[task.uuid].meta["initial_state"]
    path, _ = traces(tmp_path, "own.jsonl", split="test")
    train, heldout = load_tasks(section(source="traces", path=path))
    assert len(heldout) == 10 and {t.meta["split"] for t in heldout} == {"heldout"}
    other = [episode_from_task(task) for task in generate_tasks("heldout", 3)]
    write_traces(tmp_path / "e.jsonl", other)
    train, heldout = load_tasks(section(source="traces", path=path, eval_path=str(tmp_path / "e.jsonl"), train_limit=5))
    assert len(train) == 5 and [t.uuid for t in heldout] == [e.episode_id for e in other]
    # A trace without an answered call teaches nothing: refused by name, or left out.
    silent = make_episode([TraceEvent("agent", "action", {"type": "a", "arguments": {}})], where="t", episode_id="mute")
    write_traces(tmp_path / "m.jsonl", [*episodes[:3], silent])
    with pytest.raises(UserError, match="mute: no usable transition"):
        load_tasks(section(source="traces", path=str(tmp_path / "m.jsonl")))
    assert len(sum(load_tasks(section(source="traces", path=str(tmp_path / "m.jsonl"), on_bad_record="skip")), [])) == 3
    with pytest.raises(UserError, match="data.path"):
        load_tasks(section(source="traces"))


@pytest.mark.quick
def test_prepared_traces_give_the_tasks_of_their_files(tmp_path):
    from data.traces.traces_dataset_builder import Builder, TracesConfig

    path, _ = traces(tmp_path, "t.jsonl", 12, split="heldout")
    folder = prepare(Builder(data_dir=tmp_path / "tfds", config=TracesConfig(name="c", path=path)))
    prepared = load_tasks(section(source="traces", path=str(folder)))
    read = load_tasks(section(source="traces", path=path))
    assert [[t.uuid for t in part] for part in prepared] == [[t.uuid for t in part] for part in read]
    assert prepared[0] == read[0] and len(prepared[1]) == 3
