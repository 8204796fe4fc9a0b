"""Batches of tasks: one order for any number of processes, exact resumption, refusal of other data."""

from __future__ import annotations

import json
import sys

import pytest

from data.__main__ import main as prepare_command
from data.quickstart.quickstart_dataset_builder import Builder as Quickstart
from envace_jax.config import UserError
from envace_jax.datasets.cm2 import task_to_record
from envace_jax.datasets.pipeline import fingerprint, task_iterator
from envace_jax.datasets.prepared import PreparedTasks, prepare, splits_of
from envace_jax.datasets.quickstart.generator import generate_tasks

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def tasks():
    return generate_tasks("train", 22)


def names(batch):
    return [task.uuid for task in batch]


def take(iterator, count):
    return [names(next(iterator)) for _ in range(count)]


def test_an_epoch_has_distinct_tasks_in_an_order_of_its_own(tasks):
    batches = take(task_iterator(tasks, seed=3, batch_size=4), 10)
    epochs = [sum(batches[:5], []), sum(batches[5:], [])]
    for epoch in epochs:
        assert len(set(epoch)) == 20  # the last two of 22 make no batch
    assert epochs[0] != epochs[1]
    assert take(task_iterator(tasks, seed=3, batch_size=4), 10) == batches
    assert take(task_iterator(tasks, seed=4, batch_size=4), 10) != batches


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_the_same_global_batches(tasks, processes):
    whole = take(task_iterator(tasks, seed=3, batch_size=4), 7)
    shares = [
        take(task_iterator(tasks, seed=3, batch_size=4, process_index=k, process_count=processes), 7)
        for k in range(processes)
    ]
    assert [sum(parts, []) for parts in zip(*shares)] == whole


def test_resumes_exactly_under_another_number_of_processes(tasks):
    whole = take(task_iterator(tasks, seed=3, batch_size=4), 12)
    for taken in range(11):
        first = task_iterator(tasks, seed=3, batch_size=4, process_index=1, process_count=2)
        take(first, taken)
        state = json.loads(json.dumps(first.get_state()))
        assert state["epoch"] == max(taken - 1, 0) // 5
        rest = [
            task_iterator(tasks, seed=3, batch_size=4, process_index=k, process_count=4, state=state) for k in range(4)
        ]
        assert sum((names(next(it)) for it in rest), []) == whole[taken]
        assert sum((names(next(it)) for it in rest), []) == whole[taken + 1]


def test_refuses_a_state_of_other_data_or_another_seed(tasks):
    state = task_iterator(tasks, seed=3, batch_size=4).get_state()
    with pytest.raises(UserError, match="another data set"):
        task_iterator(tasks[::-1], seed=3, batch_size=4, state=state)
    with pytest.raises(UserError, match="under seed 3, this run has 5"):
        task_iterator(tasks, seed=5, batch_size=4, state=state)


def test_impossible_batches(tasks):
    with pytest.raises(UserError, match="cannot be shared by 3"):
        task_iterator(tasks, seed=0, batch_size=4, process_count=3)
    with pytest.raises(UserError, match="the data set has 22"):
        task_iterator(tasks, seed=0, batch_size=24)
    with pytest.raises(UserError, match="no such process"):
        task_iterator(tasks, seed=0, batch_size=4, process_index=2, process_count=2)


def test_a_prepared_data_set_equals_the_list(tasks, tmp_path, monkeypatch):
    counts = {"train": 22, "heldout": 3}
    monkeypatch.setattr(
        "data.quickstart.quickstart_dataset_builder.generate_tasks", lambda split: generate_tasks(split, counts[split])
    )
    folder = prepare(Quickstart(data_dir=str(tmp_path)))
    assert "tensorflow" not in sys.modules
    assert list(folder.glob("*.array_record*"))
    assert splits_of(folder) == {"train": 22, "heldout": 3}
    prepared = PreparedTasks(folder, "train")
    assert list(prepared) == tasks
    assert fingerprint(prepared) == fingerprint(tasks)
    state = task_iterator(tasks, seed=1, batch_size=4).get_state()
    from_disk = task_iterator(prepared, seed=1, batch_size=4, process_index=1, process_count=2, state=state)
    in_memory = task_iterator(tasks, seed=1, batch_size=4, process_index=1, process_count=2)
    assert take(from_disk, 8) == take(in_memory, 8)
    with pytest.raises(UserError, match="has no split 'test', only"):
        PreparedTasks(folder, "test")
    with pytest.raises(UserError, match="not a prepared data set"):
        PreparedTasks(tmp_path / "nothing", "train")


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_shard_is_named_with_the_remedy(tasks, tmp_path, damage):
    """No record of it comes out changed: every chunk has a digest, and what is read is checked against it."""
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(task_to_record(task)) + "\n" for task in tasks))
    from data.cm2.cm2_dataset_builder import Builder, Cm2Config

    folder = prepare(Builder(config=Cm2Config(path=str(file)), data_dir=str(tmp_path / "prepared")))
    (shard,) = [path for path in folder.iterdir() if "train" in path.name and "array_record" in path.name]
    whole = shard.read_bytes()
    middle = (64 + len(whole.rstrip(b"\0"))) // 2  # padding lies behind what was written
    damaged = {"flip": whole[:middle] + bytes([whole[middle] ^ 4]) + whole[middle + 1 :], "cut": whole[:middle]}
    shard.write_bytes(damaged.get(damage, b""))
    with pytest.raises(UserError, match="a shard is damaged .*python -m data"):
        list(PreparedTasks(folder, "train"))


def test_the_command_prepares_cm2_files(tasks, tmp_path, capsys):
    path = tmp_path / "some.jsonl"
    records = [task_to_record(task) for task in tasks]
    for record in records:
        del record["meta"]
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + "{}\n", encoding="utf-8")
    arguments = ["cm2", "--path", str(path), "--out", str(tmp_path / "out")]
    assert prepare_command(arguments) == 2
    assert "some.jsonl: line 23: uuid: expected text, found null" in capsys.readouterr().err
    assert prepare_command([*arguments, "--on_bad_record", "skip"]) == 0
    assert "{'train': 20, 'heldout': 2}, 1 broken records left out" in capsys.readouterr().out
    path.write_text(json.dumps(records[0]) + "\n", encoding="utf-8")
    assert prepare_command(arguments) == 0  # another content is another build
    assert "{'train': 1}, 0 broken records" in capsys.readouterr().out


def test_the_command_prepares_traces(tmp_path, capsys):
    episode = {
        "episode_id": "e1",
        "events": [
            {"actor": "user", "kind": "message", "content": "Open the door."},
            {"actor": "agent", "kind": "action", "content": {"type": "open", "arguments": {"what": "door"}}},
            {"actor": "environment", "kind": "observation", "content": "It is open."},
        ],
    }
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps(episode) + "\n", encoding="utf-8")
    assert prepare_command(["traces", "--path", str(path), "--out", str(tmp_path / "out")]) == 0
    assert "{'train': 1}, 0 broken records" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_one_line(capsys):
    for out in ("/proc/x", "/etc/hostname/y"):
        assert prepare_command(["quickstart", "--out", out]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: --out {out}: No")
