"""Puts a run together: data, model, programs, engine, files; and takes it up where a checkpoint left it."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from envace_jax.build import load_model, make_engine, make_judge, rules_for
from envace_jax.config import UserError
from envace_jax.datasets.pipeline import TaskIterator
from envace_jax.datasets.records import Task
from envace_jax.datasets.sources import source_counts
from envace_jax.distributed import Processes
from envace_jax.interrupts import Interrupts
from envace_jax.learning.arms import Arm, make_arm
from envace_jax.learning.bucket import checkpoint_place, push
from envace_jax.learning.checkpoint import Checkpoints
from envace_jax.learning.groups import connect
from envace_jax.learning.handover import HandOver, local_mesh
from envace_jax.learning.learner import Learner, update_config
from envace_jax.learning.looking import CompileLog
from envace_jax.learning.metrics import Display, Metrics, NoSink, Sink
from envace_jax.learning.overlap import Batch
from envace_jax.learning.preflight import preflight
from envace_jax.learning.run_dir import config_values, note_start, warm_here, write_json
from envace_jax.learning.step import make_update
from envace_jax.learning.trackers import Trackers
from envace_jax.rehearsal.grounding import Grounding
from envace_jax.rehearsal.rollout import warm_up_control
from envace_jax.rehearsal.settings import RolloutConfig
from envace_jax.rehearsal.trajectory import Trajectory, TrajectoryWriter
from envace_jax.rewards.judge import Judge
from envace_jax.worldbook.consistency import Consistency, ConsistencyWatch


@dataclasses.dataclass
class Run:
    """The parts of a run, and its position: `step` whole steps are done."""

    cfg: ConfigDict
    folder: Path
    arm: Arm
    chat: Any
    spec: Any
    rollout: RolloutConfig
    grounding: Grounding | None
    watch: ConsistencyWatch | None  # counts what contradicts the worldbook, where the run has one
    judge: Judge
    engine: Any
    learners: dict[str, Learner]
    data: TaskIterator
    held_out: list[Task]
    checkpoints: Checkpoints
    sink: Sink | NoSink
    trajectories: TrajectoryWriter | None
    display: Display
    initial: dict[str, Any]  # digest of the initial parameters, by set
    step: int = 0
    bad_steps: int = 0
    totals: dict[str, float] = dataclasses.field(default_factory=dict)
    position: dict[str, Any] = dataclasses.field(default_factory=dict)
    measured: bool = False  # the held-out figures before training are in the metrics
    saved: int = -1
    counted: dict[str, float] = dataclasses.field(default_factory=dict)  # the engine's counters a step ago
    pending: Metrics | None = None  # figures of a step that is done but for its evaluation
    ahead: Batch | None = None  # the next step's trajectories, where they were played during the last update
    score: float | None = None  # of the last whole step, by the metric that `checkpoint.best` names
    processes: Processes = dataclasses.field(default_factory=Processes)
    interrupts: Interrupts = dataclasses.field(default_factory=Interrupts)
    compile_log: CompileLog | None = None

    def mark(self) -> None:
        """Notes where everything stands after a whole step: what a checkpoint of this step holds."""
        # A file that this start does not write keeps the length it had.
        files = self.position.get("files", {}) | {"metrics": self.sink.sync()}
        if self.trajectories is not None:
            files["trajectories"] = self.trajectories.path.stat().st_size
        self.position = {
            "step": self.step,
            "seed": self.cfg.seed,
            "data": self.data.get_state(),
            "files": files,
            "totals": dict(self.totals),
            "bad_steps": self.bad_steps,
            "measured": self.measured,
            "pending": self.pending,
            "initial": self.initial,
            "model": self.spec.to_hf_config(),
        }

    def save(self) -> None:
        """Begins the checkpoint of the last whole step."""
        if self.saved == self.step:
            if self.score is not None:  # it was measured after it had been saved
                self.checkpoints.score(self.step, self.score)
            return
        with self.processes.waits("saving"):
            position = self.position | {"ahead": self.ahead and self.ahead.to_json()}
            self.checkpoints.save(self.step, {name: x.state for name, x in self.learners.items()}, position, self.score)
            if self.processes.main:
                push(self.cfg, self.folder)
        self.saved = self.step

    def note_compilations(self) -> None:
        """Writes down what has been compiled since the last call."""
        if self.compile_log is not None:
            learner = list(self.learners["policy"].update.compile_seconds.items())  # all learners share their programs
            self.compile_log.note(self.step, {"learner": learner, "engine": getattr(self.engine, "compiles", ())})

    def settle(self) -> None:
        """Waits until the checkpoint under way is whole."""
        with self.processes.waits("saving"):
            self.checkpoints.wait()

    def consistency(self, trajectories: Sequence[Trajectory]) -> list[Consistency]:
        """How each trajectory's answers stand to the worldbook; nothing without one."""
        if self.watch is None:
            return []
        return [Consistency(()) if t.task is None else self.watch.check(t.task, t.transcript) for t in trajectories]

    def hand_over(self) -> None:
        """Gives the engine the new parameters."""
        for name, learner in self.learners.items():
            learner.hand_over(self.engine, name)

    def received(self) -> Metrics:
        """Bytes that this process's devices got by the last hand-over from the others."""
        found = [x.to_engine.bytes for x in self.learners.values() if x.to_engine is not None]
        return {"handover/bytes": float(sum(found))} if found else {}


@contextlib.contextmanager
def prepare(cfg: ConfigDict, folder: Path, processes: Processes | None = None) -> Iterator[Run]:
    """Puts the parts of a run together, compiles, and restores the newest whole checkpoint if there is one.

    Of several processes each has its own engine, judge and share of the tasks; process 0 writes.
    """
    processes = processes or Processes()
    display = Display(cfg.learning.steps, enabled=cfg.metrics.progress and processes.main)
    loading, opened = contextlib.ExitStack(), contextlib.ExitStack()
    try:
        display.phase("loading")
        loading.enter_context(processes.waits("loading"))
        ground = preflight(cfg, processes, display.say)
        assert ground.data is not None
        train, held_out, chat, mesh, rules = ground.train, ground.held_out, ground.chat, ground.mesh, rules_for(cfg)
        connect(mesh, processes)
        judge = make_judge(cfg, mesh if mesh is None or processes.alone else local_mesh(mesh))
        spec, params = load_model(cfg, chat, mesh, rules)
        if cfg.warmstart.steps:
            from envace_jax.learning.warmstart import warm_started

            params = warm_started(cfg, folder, train, chat, spec, params, mesh, display, processes)
        arm = make_arm(cfg)
        update = make_update(spec, update_config(cfg, mesh), mesh)
        to_engine = None
        if not processes.alone:
            assert mesh is not None  # several processes have several devices
            to_engine = HandOver(mesh, rules, cfg.model.dtype)
        copy = to_engine or update.compute_copy
        learners = {name: Learner(cfg, update, params, name, folder, processes, to_engine) for name in arm.learners}
        checkpoints = Checkpoints(checkpoint_place(cfg, folder), cfg.checkpoint.keep, display.say)
        fresh = {name: x.digest() for name, x in learners.items() if x.reference is not None or arm.frozen}
        position = restore(checkpoints, learners, display, processes)
        same_base(fresh, position.get("initial", {}), cfg)
        if "data" in position:
            ground.data.set_state(position["data"])
        sink = metrics_sink(cfg, folder, position, display) if processes.main else NoSink()
        opened.callback(sink.close)
        display.phase("compiling")
        loading.enter_context(processes.waits("compiling"))
        for learner in learners.values():
            learner.compile()
        own_mesh = mesh if to_engine is None else to_engine.local
        sets = len(arm.learners) + len(arm.frozen)
        engine = make_engine(cfg, spec, copy(learners["policy"].state["params"]), rules, own_mesh, sets)
        for name in arm.frozen:
            engine.set_params(copy(update.place_params(params)), name)
        for name in set(learners) - {"policy"}:
            learners[name].hand_over(engine, name)
        del params
        rollout_config = RolloutConfig.from_config(
            cfg, act_params=arm.act_params, rehearse_params=arm.rehearse_params, observe_workers=arm.observe_workers
        )
        layout = "one device" if mesh is None else str(dict(mesh.shape))
        # A run that goes on where it was compiled need not trace a hundred programs before its next step.
        if not (position.get("step") and warm_here(folder, layout)):
            engine.warm_up(guided=cfg.rollout.constrain != "none")
            warm_up_control(engine, rollout_config)
        # Over all processes, of which another may still be compiling: a part of what each waits for.
        initial = position.get("initial") or {name: x.digest() for name, x in learners.items()}
        loading.close()
        run = Run(
            cfg=cfg,
            folder=folder,
            arm=arm,
            chat=chat,
            spec=spec,
            rollout=rollout_config,
            grounding=ground.grounding,
            watch=ground.watch,
            judge=judge,
            engine=engine,
            learners=learners,
            data=ground.data,
            held_out=held_out,
            checkpoints=checkpoints,
            sink=sink,
            trajectories=trajectory_file(cfg, folder, position) if processes.main else None,
            display=display,
            initial=initial,
            step=position.get("step", 0),
            measured=position.get("measured", False),
            bad_steps=position.get("bad_steps", 0),
            totals=dict(position.get("totals", {})),
            saved=position.get("step", -1),
            pending=position.get("pending"),
            position=position,
            ahead=Batch.from_json(position["ahead"]) if position.get("ahead") else None,
            processes=processes,
            compile_log=CompileLog(folder / "compile.jsonl") if processes.main else None,
        )
        fingerprint = run.data.get_state()["fingerprint"]
        sources = {"train": source_counts(train), "held_out": source_counts(held_out)}
        hosts = processes.gather(socket.gethostname(), "the start")
        if processes.main:
            write_json(folder / "data.json", {"fingerprint": fingerprint} | sources)
            note_start(cfg, folder, layout, hosts)
        run.note_compilations()
        run.mark()
        run.interrupts.told = processes.stopping
        try:
            yield run
        finally:
            if run.trajectories is not None:
                run.trajectories.close()
            checkpoints.close()
    finally:
        opened.close()
        loading.close()
        display.close()


def same_base(fresh: dict[str, str], initial: dict[str, str], cfg: ConfigDict) -> None:
    """Raises `UserError` where a run is taken up over other initial weights than it was begun with.

    The reference of the KL term and a frozen REHEARSE are made of them anew in every start.  Digests of one process
    and of several (`parts:`) cannot be compared.
    """
    for name, digest in fresh.items():
        before = initial.get(name, digest)
        if before != digest and before.startswith("parts:") == digest.startswith("parts:"):
            raise UserError(
                f"model.path={cfg.model.path!r}: the run was begun with other weights than lie there now, and its "
                "reference would be another one: give the old weights back, or start a new run_dir"
            )


def metrics_sink(cfg: ConfigDict, folder: Path, position: dict[str, Any], display: Display) -> Sink:
    """The run's metrics, cut to what the checkpoint knows of."""
    return Sink(
        folder,
        tensorboard=cfg.metrics.tensorboard,
        length=position.get("files", {}).get("metrics", 0),
        step=position.get("step", 0),
        trackers=Trackers(cfg.metrics.sinks, folder, config_values(cfg), display.say),
    )


def trajectory_file(cfg: ConfigDict, folder: Path, position: dict[str, Any]) -> TrajectoryWriter | None:
    """The run's trajectories, cut to what the checkpoint knows of."""
    if not cfg.metrics.trajectories:
        return None
    path = folder / "trajectories.jsonl"
    length = position.get("files", {}).get("trajectories", 0 if not position.get("step") else None)
    if length is not None and path.exists() and path.stat().st_size > length:
        with path.open("r+b") as file:
            file.truncate(length)
    return TrajectoryWriter(path)


def restore(
    checkpoints: Checkpoints, learners: dict[str, Learner], display: Display, processes: Processes | None = None
) -> dict[str, Any]:
    """Puts the newest whole checkpoint into the learners; returns its position, empty for a new run."""
    processes = processes or Processes()
    step = checkpoints.clean_up()
    processes.meet("restoring")  # process 0 has cleaned up
    if not processes.main:
        step = checkpoints.latest()
    if len(set(seen := processes.gather(step, "restoring"))) > 1:
        raise UserError(
            f"{checkpoints.folder}: the processes see different checkpoints (steps {seen}, by process); "
            "run_dir must be a folder that all of them share"
        )
    if step is None:
        return {}
    position = checkpoints.read_meta(step)
    states = checkpoints.restore(step, {name: x.state for name, x in learners.items()})
    for name, learner in learners.items():
        learner.state = states[name]
    display.say(f"going on from the checkpoint of step {step}")
    return position
