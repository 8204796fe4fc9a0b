"""Warm start: supervised training of both roles on recorded conversations, through the chat, packing and update of
the main job.

ACT learns the assistant messages, REHEARSE the recorded results under the prompt that a rollout would write: in the
configured context and grounding half of the time, in the other ones the rest.  In some demonstrations a call is first
made wrongly, so that the error observation and the recovery from it are seen; the wrong call itself is not learnt.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from envace_jax.config import UserError
from envace_jax.datasets.records import Task
from envace_jax.distributed import Processes
from envace_jax.learning.bucket import checkpoint_place
from envace_jax.learning.checkpoint import Checkpoints
from envace_jax.learning.learner import update_config
from envace_jax.learning.loss import LossConfig
from envace_jax.learning.metrics import Display, Sink
from envace_jax.learning.packing import TrainRow, loss_denominator, microbatches, pack_rows, train_rows
from envace_jax.learning.step import UpdateConfig, host_metrics, make_update
from envace_jax.model.qwen3 import Params
from envace_jax.model.spec import Qwen3Spec
from envace_jax.rehearsal.grounding import make_grounding
from envace_jax.rehearsal.settings import EpisodeConfig
from envace_jax.rehearsal.teacher import demonstrate
from envace_jax.test_time.targets import flawed_messages, review_rows
from envace_jax.text.chat import ChatFormat
from envace_jax.text.transcript import ROLE_CODES, Message, Role, ToolCall

WRONG_SHARE = 0.15  # of demonstrations, where a host check can tell the wrong call
GROUNDINGS = ("none", "past", "oracle")
CONTEXTS = ("stateless", "stream")
SETTLED_BY_HOST = {"whitelist", "schema"}
REPORT_EVERY = 20


def variants(cfg: ConfigDict) -> list[tuple[str, str]]:
    """(context, grounding) pairs to learn under, the configured one first."""
    own = (cfg.rollout.context, cfg.rollout.grounding)
    return [own, *(pair for pair in itertools.product(CONTEXTS, GROUNDINGS) if pair != own)]


def with_wrong_call(task: Task, rng: random.Random) -> tuple[tuple[Message, ...], int | None]:
    """The task's dialogue with one call made wrongly before it is made rightly, and which assistant message is wrong.

    Wrong is a required argument left out where the tool has one, or a tool that is not there.  The tool message that
    follows stands for the host's error.  Without a call there is nothing to change.
    """
    messages = task.messages
    places = [i for i, m in enumerate(messages) if m.role == "assistant" and m.tool_calls]
    if not places:
        return messages, None
    at = rng.choice(places)
    call = messages[at].tool_calls[0]
    required = _required(task, call.name)
    given = [name for name in required if name in call.arguments]
    if given and rng.random() < 0.5:
        left_out = rng.choice(given)
        wrong = ToolCall(call.name, {k: v for k, v in call.arguments.items() if k != left_out})
    else:
        wrong = ToolCall(f"{call.name}_v2", call.arguments)
    mistake = (dataclasses.replace(messages[at], tool_calls=(wrong,)), Message("tool", "{}"))
    number = sum(m.role == "assistant" for m in messages[:at])
    return (*messages[:at], *mistake, *messages[at:]), number


def _required(task: Task, name: str) -> Sequence[str]:
    for tool in task.tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            return list(function.get("parameters", {}).get("required", ()))
    return []


def demonstration_rows(
    task: Task, chat: ChatFormat, episode: EpisodeConfig, grounding: str, rng: random.Random, worldbook: str = ""
) -> list[TrainRow]:
    """Training rows of one demonstration of a task. `worldbook`: the folder for `grounding="worldbook"`."""
    messages, wrong = task.messages, None
    if SETTLED_BY_HOST <= set(episode.checks) and rng.random() < WRONG_SHARE:
        messages, wrong = with_wrong_call(task, rng)
    played = demonstrate(task, chat, episode, messages, grounding=make_grounding(grounding, worldbook))
    rows = train_rows(dataclasses.replace(played, reward=0.0, masked_cause=None), {})
    if wrong is None:
        return rows
    acts = [s for s in played.segments if s.role is Role.ACT]
    if wrong >= len(acts):
        return rows
    # The rows that hold something sampled, in order: as `train_rows` gives them.
    sources = [k for k, row in enumerate(played.rows) if any(row.sampled)]
    segment = acts[wrong]
    row = rows[sources.index(segment.row)]
    sampled = row.sampled.copy()
    sampled[segment.start : segment.start + len(segment.ids)] = False
    kept = TrainRow(row.ids, sampled, row.sampler_logprobs, row.advantages, row.role)
    rows[sources.index(segment.row)] = kept
    return [r for r in rows if r.sampled.any()]


def reviews(task: Task, chat: ChatFormat, episode: EpisodeConfig, rng: random.Random) -> list[TrainRow]:
    """Rows that teach a task's self-evaluations and memories, for rehearsal at test time."""
    rows = review_rows(task, chat, episode, rng, flawed=flawed_messages(task, rng))
    zeros = [np.zeros(len(row), np.float32) for row in rows]
    return [
        TrainRow(
            ids=np.asarray(row.ids, np.int32),
            sampled=np.asarray(row.sampled, bool),
            sampler_logprobs=zero,
            advantages=zero,
            role=np.full(len(row), ROLE_CODES[row.role], np.int8),
        )
        for row, zero in zip(rows, zeros)
    ]


def row_stream(cfg: ConfigDict, tasks: Sequence[Task], chat: ChatFormat, longest: int, seed: int) -> Iterator[TrainRow]:
    """Endless rows: pass after pass over the tasks in a new order, each in its turn's context and grounding."""
    base = EpisodeConfig.from_config(cfg)
    own, *others = variants(cfg)
    for number in itertools.count():
        rng = random.Random(f"warmstart/{seed}/{number}")
        order = list(range(len(tasks)))
        rng.shuffle(order)
        rows: list[TrainRow] = []
        for k, i in enumerate(order):
            context, grounding = own if (k + number) % 2 == 0 else rng.choice(others)
            episode = dataclasses.replace(base, context=context)
            rows += demonstration_rows(tasks[i], chat, episode, grounding, rng, cfg.rollout.worldbook)
            if rng.random() < cfg.warmstart.reviews:
                rows += reviews(tasks[i], chat, episode, rng)
        fitting = [row for row in rows if len(row.ids) <= longest]
        if not fitting:
            raise UserError(
                f"warmstart: no demonstration fits learning.row_tokens={longest} tokens "
                f"(the shortest row has {min((len(r.ids) for r in rows), default=0)}); raise it"
            )
        rng.shuffle(fitting)
        yield from fitting


def warmstart_update(cfg: ConfigDict, mesh: Mesh | None) -> UpdateConfig:
    """The main job's update with cross-entropy and the warm start's learning rate, falling to zero."""
    steps = cfg.warmstart.steps
    config = update_config(cfg, mesh)
    tokens = cfg.warmstart.batch_rows * config.row_tokens
    return dataclasses.replace(
        config,
        lr=cfg.warmstart.lr,
        lr_schedule="cosine",
        lr_warmup_steps=max(1, steps // 20),
        total_steps=steps,
        drift_limit=0.0,
        replay_routing=False,  # nothing was sampled
        capacity=max(1, -(-tokens // (config.rows * config.row_tokens))),
        loss=LossConfig(supervised=True, chunk_tokens=cfg.learning.logprob_chunk),
    )


def warm_start(
    cfg: ConfigDict,
    tasks: Sequence[Task],
    chat: ChatFormat,
    spec: Qwen3Spec,
    params: Params,
    mesh: Mesh | None,
    display: Display,
    sink: Sink | None = None,
) -> Params:
    """Trains for `warmstart.steps` steps of `warmstart.batch_rows` rows; returns the parameters."""
    chosen = list(tasks[: cfg.warmstart.tasks]) if cfg.warmstart.tasks else list(tasks)
    update = make_update(spec, warmstart_update(cfg, mesh), mesh)
    config = update.config
    state = update.init(params)
    rows = row_stream(cfg, chosen, chat, config.row_tokens, cfg.seed)
    for step in range(1, cfg.warmstart.steps + 1):
        batch = list(itertools.islice(rows, cfg.warmstart.batch_rows))
        packed = pack_rows(batch, config.row_tokens, config.rows)
        arrays, count, update.capacity = microbatches(packed, config.rows, update.capacity)
        state, metrics = update.update(state, update.put(arrays), count, loss_denominator(batch, "token"))
        if step % REPORT_EVERY == 0 or step in (1, cfg.warmstart.steps):
            figures = host_metrics(metrics)
            losses = {role: -figures[f"logprob/{role}"] for role in Role}
            display.phase(
                f"warm start {step}/{cfg.warmstart.steps}: loss act {losses[Role.ACT]:.3f}, "
                f"rehearse {losses[Role.REHEARSE]:.3f}"
            )
            if sink is not None:
                sink.write(step, {f"loss/{role}": value for role, value in losses.items()} | figures)
    return state["params"]


def warm_started(
    cfg: ConfigDict,
    folder: Path,
    tasks: Sequence[Task],
    chat: ChatFormat,
    spec: Qwen3Spec,
    params: Params,
    mesh: Mesh | None,
    display: Display,
    processes: Processes | None = None,
) -> Params:
    """The warm-started parameters of a run: made once, kept in its folder, read back when the run is taken up again."""
    checkpoints = Checkpoints(checkpoint_place(cfg, folder, "warmstart"), keep=1, say=display.say)
    checkpoints.clean_up()
    (processes or Processes()).meet("the warm start")  # process 0 has cleaned up
    if checkpoints.latest() == cfg.warmstart.steps:
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32, sharding=x.sharding), params)
        return checkpoints.restore(cfg.warmstart.steps, {"params": like})["params"]
    params = warm_start(cfg, tasks, chat, spec, params, mesh, display)
    checkpoints.save(
        cfg.warmstart.steps, {"params": params}, {"steps": cfg.warmstart.steps, "model": spec.to_hf_config()}
    )
    checkpoints.close()
    return params


def run_warmstart(cfg: ConfigDict, args: argparse.Namespace | None = None) -> int:
    """Warm-starts the configured model and writes it as a Hugging Face folder, `run_dir/model`."""
    from envace_jax.build import chat_format, load_model, mesh_for
    from envace_jax.datasets.sources import load_tasks
    from envace_jax.learning.run_dir import open_run_dir
    from envace_jax.model.hf import save_params
    from envace_jax.text.build import tokenizer_folder

    if cfg.warmstart.steps < 1:
        raise UserError("warmstart.steps=0: expected the number of steps to train, --config.warmstart.steps=200 say")
    if cfg.dry_run:
        from envace_jax.report.dry_run import run_dry

        return run_dry(cfg, rollouts=False)
    out = Path(cfg.run_dir) / "model"
    if out.exists() and not cfg.overwrite:
        raise UserError(f"{out}: is there already; give another run_dir, or --config.overwrite=true")
    with open_run_dir(cfg) as folder:
        display = Display(cfg.warmstart.steps, enabled=False)
        train, _ = load_tasks(cfg.data)
        chat, mesh = chat_format(cfg), mesh_for(cfg)
        spec, params = load_model(cfg, chat, mesh)
        sink = Sink(folder, tensorboard=cfg.metrics.tensorboard)
        params = warm_start(cfg, train, chat, spec, params, mesh, display, sink)
        sink.close()
        save_params(
            out,
            params,
            spec,
            dtype="F32" if cfg.model.dtype == "float32" else "BF16",
            tokenizer_dir=tokenizer_folder(cfg),
            texts={"chat_template.jinja": chat.template()},
            overwrite=True,
        )
        print(f"{out}: warm-started model; train with --config.model.path={out}")
    return 0
