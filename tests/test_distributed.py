"""Several processes without several processes: the environment, the watch, interrupts, the hand-over's layout."""

from __future__ import annotations

import dataclasses
import json
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.config import UserError
from envace_jax.distributed import GRACE, Processes, Watch, initialize
from envace_jax.interrupts import Interrupts, Preempted
from envace_jax.learning.handover import HandOver, checksum, local_mesh
from envace_jax.learning.shared import exchange, share
from envace_jax.model.qwen3 import init_params
from envace_jax.model.sharding import Rules, make_mesh, param_shardings
from envace_jax.model.spec import PRESETS
from envace_jax.rehearsal.trajectory import Trajectory

SPEC = dataclasses.replace(
    PRESETS["tiny"], vocab_size=96, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=64
)
WHOLE = {"ENVACE_COORDINATOR": "127.0.0.1:1", "ENVACE_PROCESSES": "2", "ENVACE_PROCESS": "0"}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ENVACE_PROCESS": "1"}, "ENVACE_PROCESS set without ENVACE_COORDINATOR, ENVACE_PROCESSES"),
        (WHOLE | {"ENVACE_PROCESS": "2"}, "expected a number from 0 to 1"),
        (WHOLE | {"ENVACE_PROCESSES": "two"}, "expected numbers"),
        ({"ENVACE_DISTRIBUTED": "yes"}, "expected 'auto'"),
    ],
)
def test_contradictions_are_named(environment, message):
    with pytest.raises(UserError, match=message):
        initialize(environment)


def test_without_a_word_there_is_one_process():
    assert initialize({}) is False
    assert initialize(WHOLE | {"ENVACE_PROCESSES": "1"}) is False


class FakeStore(dict):
    """The key-value store of a coordinator, in memory."""

    def key_value_set(self, key, value, allow_overwrite=False):
        self[key] = value

    def key_value_dir_get(self, key):
        return [(k, v) for k, v in self.items() if k.startswith(key)]


def pair(timeout=100.0):
    store, lost, stopped = FakeStore(), [], []
    watches = [
        Watch(store, i, 2, timeout, lost=lambda line, i=i: lost.append((i, line)), stop=lambda i=i: stopped.append(i))
        for i in range(2)
    ]
    for watch in watches:
        watch._looked = 0.0
    return *watches, lost, stopped


@pytest.mark.quick
def test_process_whose_beats_stop_is_named():
    a, b, lost, _ = pair()
    b.move("the rollout of step 7")
    b.look(0.0)
    with a.wait("step 7"):
        for now in (0.0, 30.0, 60.0, 99.0):
            a.look(now)
        assert not lost
        a.look(101.0)
    assert lost[0][0] == 0 and "process 1" in lost[0][1]
    assert "is gone or stopped: last seen 101 s ago in the rollout of step 7" in lost[0][1]


def test_slow_process_is_not_lost_and_a_hung_one_is():
    a, b, lost, _ = pair()
    with a.wait("step 1"):
        for now in range(0, 1000, 50):  # the other one works on
            b.move()
            b.look(float(now))
            a.look(float(now))
        assert not lost
        for now in range(1000, 1160, 20):  # it lives, but its main thread does nothing
            b.look(float(now))
            a.look(float(now))
    assert "process 1" in lost[0][1] and "hangs" in lost[0][1]


def test_progress_counts_as_a_move_and_who_waits_is_not_blamed():
    a, b, lost, _ = pair()
    tokens = iter(range(10**6))
    b.progress = lambda: next(tokens)
    with a.wait("step 1"):
        for now in range(0, 1000, 50):
            b.look(float(now))
            a.look(float(now))
        with b.wait("step 1"):
            b.progress = lambda: None
            for now in range(1000, 2000, 50):
                b.look(float(now))
                a.look(float(now))
    assert not lost


def test_who_compiles_may_be_silent_and_still_meets_the_others():
    """A barrier inside a long wait ends the barrier, not the wait; a process that dies in there is still named."""
    a, b, lost, _ = pair()
    with a.wait("step 1"), b.wait("loading"):
        for now in range(0, 500, 50):
            b.look(float(now))
            a.look(float(now))
        with b.wait("restoring"):
            b.look(500.0)
        for now in range(500, 1000, 50):
            b.look(float(now))
            a.look(float(now))
        assert not lost and b.waiting_since is not None
        for now in range(1000, 1160, 50):
            a.look(float(now))
    assert b.waiting_since is None and "process 1" in lost[0][1] and "is gone or stopped" in lost[0][1]


def test_process_that_never_came_is_named():
    a, _, lost, _ = pair()
    with a.wait("start"):
        a.waiting_since = 0.0
        for now in (0.0, 40.0, 80.0, 101.0):
            a.look(now)
    assert "process 1 has never been heard of" in lost[0][1]


def test_stop_reaches_the_others_and_shortens_the_wait():
    a, b, lost, stopped = pair(timeout=1000.0)
    b.look(0.0)
    a.look(0.0)
    b.stopping = True
    b.look(1.0)
    a.look(1.0)
    a.look(2.0)
    assert stopped == [0]
    with a.wait("stopping"):
        a.look(3.0)
        assert not lost
        a.look(3.0 + GRACE)
    assert lost


def test_one_process_exchanges_with_itself():
    alone = Processes()
    assert alone.main and alone.alone
    assert alone.gather({"a": 1}, "x") == [{"a": 1}]
    assert alone.first(lambda: 3, "x") == 3
    with pytest.raises(UserError, match="no"), alone.waits("x"):
        alone.first(lambda: (_ for _ in ()).throw(UserError("no")), "x")


@pytest.mark.quick
def test_who_comes_to_stop_meets_who_comes_with_trajectories():
    """Whatever each calls the place: barriers go by number, or two processes would wait for each other for ever."""
    ids = [[], []]

    class Store(FakeStore):
        def wait_at_barrier(self, barrier_id, timeout_in_ms):
            ids[self["index"]].append(barrier_id)

    for index, names in enumerate((("opening", "step 4"), ("opening", "stopping"))):
        watch = Watch(Store(index=index), index, 2, 100.0, lost=lambda _: None)
        process = Processes(index, 2, watch)
        for name in names:
            process.meet(name)
    assert ids[0] == ids[1] and len(set(ids[0])) == 2


class TwoProcesses(Processes):
    """Process 0 of two; the other one says what it is told to say."""

    def __init__(self, other):
        super().__init__(0, 2)
        self.other = other

    def gather(self, value, name):
        return [json.loads(json.dumps(value)), self.other]


def trajectory(group, member=0):
    return Trajectory(task_id="t", group=group, member=member, rows=(), segments=(), reward=0.1 + 0.2)


def test_trajectories_of_all_processes_in_order():
    theirs = {"trajectories": [trajectory(3).to_json(), trajectory(2).to_json()]}
    interrupts = Interrupts()
    got = share(TwoProcesses(theirs), interrupts, None, [trajectory(1), trajectory(0, 1), trajectory(0)], {}, "step 1")
    assert [(t.group, t.member) for t in got] == [(0, 0), (0, 1), (1, 0), (2, 0), (3, 0)]
    assert got[0] == trajectory(0)
    with pytest.raises(Preempted):
        exchange(TwoProcesses({"stop": True}), [trajectory(0)], "step 1")


@pytest.mark.quick
def test_interrupts_wait_while_they_are_held():
    with Interrupts() as interrupts:
        with pytest.raises(Preempted):
            signal.raise_signal(signal.SIGTERM)
        interrupts.pending = None
        interrupts.hold()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Preempted):
            interrupts.let()
        interrupts.pending = None
        told = []
        interrupts.told = lambda: told.append(1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        interrupts.done()
        signal.raise_signal(signal.SIGTERM)  # the run is saving already
        assert told == [1, 1]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_weights_of_the_training_layout_reach_the_engine():
    mesh = make_mesh(fsdp=4, tensor=2)
    params = init_params(SPEC, jax.random.key(0), jnp.float32)
    laid = jax.device_put(params, param_shardings(params, mesh, Rules()))
    hand_over = HandOver(mesh, Rules(), "bfloat16")
    got = hand_over(laid)
    assert got["embed"].sharding.mesh.shape == {"replica": 1, "fsdp": 4, "tensor": 2, "expert": 1}
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(np.asarray(x.astype(jnp.bfloat16)), np.asarray(y)), params, got
    )
    # Every matrix lies in quarters before and in halves of `tensor` after: each device receives three quarters of its
    # share; norms and other small arrays are everywhere already.
    matrices = [x for x in jax.tree.leaves(params) if x.size > 1000]
    assert hand_over.bytes == sum(8 * (x.size // 2) * 3 // 4 * 2 for x in matrices)
    assert checksum(laid) == checksum(jax.device_put(laid, param_shardings(params, make_mesh(fsdp=8), Rules())))
    assert checksum(laid) != checksum(jax.tree.map(lambda x: x + 1e-6, laid))
    assert local_mesh(mesh).devices.tolist() == mesh.devices.tolist()
