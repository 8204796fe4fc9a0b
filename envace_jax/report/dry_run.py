"""`train --dry_run`: everything that can be checked before the first long minute, and what the run will take.

The configuration has been validated when this runs. It takes the very steps that a run takes before it compiles
(`learning.preflight`), looks at the run's folder, measures prompts against their limits, plays one scripted episode
through the code that rollouts use, asks the endpoints for a word, and estimates memory, disk and time from sizes alone.
Problems are collected and printed together.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict
from rich.console import Console

from envace_jax.build import cache_bytes, judge_config, longest_row, model_spec
from envace_jax.config import UserError
from envace_jax.datasets.records import Task
from envace_jax.distributed import Processes
from envace_jax.learning.bucket import anew, place
from envace_jax.learning.preflight import preflight
from envace_jax.learning.run_dir import same_run
from envace_jax.model.spec import Qwen3Spec
from envace_jax.rehearsal.grounding import Grounding
from envace_jax.rehearsal.settings import EpisodeConfig
from envace_jax.rehearsal.teacher import demonstrate
from envace_jax.report.doctor import JUDGE, SIMULATOR, Finding, disk, endpoint
from envace_jax.rewards.judge import JudgeRequest, RuleJudge
from envace_jax.text.chat import ChatFormat
from envace_jax.text.check import template_findings
from envace_jax.text.tokenizer import load_tokenizer

SAMPLE = 64
GIB = 2**30


@dataclass(frozen=True)
class Lengths:
    """Ledger lengths of demonstrations, in tokens: rows per trajectory, mean and longest row, sampled tokens, and the
    share of trajectories with a row that the configuration's rows cannot hold."""

    rows: float
    mean_row: float
    longest: int
    sampled: float
    too_long: float


def ledger_lengths(tasks: Sequence[Task], chat: ChatFormat, cfg: ConfigDict, grounding: Grounding) -> Lengths:
    """Measured on an even sample of the tasks' own dialogues."""
    chosen = [tasks[i] for i in np.linspace(0, len(tasks) - 1, min(SAMPLE, len(tasks))).astype(int)]
    episode_config = EpisodeConfig.from_config(cfg)
    played = [demonstrate(t, chat, episode_config, grounding=grounding).rows for t in chosen]
    rows = [row for ledgers in played for row in ledgers]
    limit = longest_row(cfg)
    too_long = sum(any(len(row.ids) > limit for row in ledgers) for ledgers in played) / len(chosen)
    lengths = [len(r.ids) for r in rows]
    sampled = sum(sum(r.sampled) for r in rows)
    per_task = 1 / len(chosen)
    return Lengths(len(rows) * per_task, float(np.mean(lengths)), max(lengths), sampled * per_task, too_long)


def memory_estimate(spec: Qwen3Spec, cfg: ConfigDict) -> dict[str, float]:
    """Bytes over all devices, by what they hold.

    Master weights, two moments and gradients are float32 (16 bytes a parameter), the sampler's copy, the reference and
    the weights and cache of a policy that judges are in the compute dtype.
    """
    n, size = spec.n_params(), np.dtype(np.float32).itemsize if cfg.model.dtype == "float32" else 2
    return {
        "weights, moments, gradients": 16.0 * n,
        "compute copy": float(size * n),
        "reference": float(size * n) if cfg.learning.kl_coef else 0.0,
        "KV cache": cache_bytes(cfg, spec),
        "log-probability chunk": 3.0 * 4 * cfg.learning.logprob_chunk * spec.vocab_size,
        "policy that judges": judge_bytes(cfg, size) if cfg.rewards.judge == "policy" else 0.0,
    }


def judge_bytes(cfg: ConfigDict, size: int) -> float:
    """Weights, `size` bytes each, and cache of a policy that judges."""
    own = judge_config(cfg)
    spec = model_spec(own)
    return size * spec.n_params() + cache_bytes(own, spec)


def export_problems(chat: ChatFormat, spec: Qwen3Spec) -> Iterator[str]:
    """What would make an exported folder another model than the trained one: its shape, tokenizer or template."""
    try:
        if Qwen3Spec.from_hf_config(spec.to_hf_config()) != spec:
            yield "export: the model's shape does not come back from the config.json that would be written"
        with tempfile.TemporaryDirectory() as folder:
            chat.tokenizer.save(folder, chat.template())
            written = replace(chat, tokenizer=load_tokenizer(folder))
            if written.tokenizer.fingerprint != chat.tokenizer.fingerprint:
                yield "export: the tokenizer does not come back from the files that would be written"
            for name, text, ok in template_findings(written, Path(folder)):
                if ok is False:
                    yield f"export: {name}: {text}"
    except UserError as error:
        yield f"export: {error}"


def matmul_rate() -> float:
    """Float operations a second of a plain matrix product on the first device, measured now."""
    import jax
    import jax.numpy as jnp

    n = 1024
    x = jnp.ones((n, n), jnp.float32)
    product = jax.jit(lambda a: a @ a)
    product(x).block_until_ready()
    start, times = time.perf_counter(), 0
    while time.perf_counter() - start < 0.3:
        product(x).block_until_ready()
        times += 1
    return 2.0 * n**3 * times / (time.perf_counter() - start)


def scripted_episode(task: Task, chat: ChatFormat, cfg: ConfigDict, grounding: Grounding) -> str:
    """Plays the task's own dialogue and, where its items have rules, judges it by them."""
    played = demonstrate(task, chat, EpisodeConfig.from_config(cfg), grounding=grounding)
    passed = judged = 0
    if cfg.rewards.judge == "rules":
        for turn in range(len(played.transcript)):
            items = tuple(variant[turn] for variant in task.checklists)
            request = JudgeRequest("dry", task.uuid, task.system, played.transcript[: turn + 1], items)
            for table in RuleJudge().judge(request).verdicts:
                judged += len(table)
                passed += sum(any(row) for row in table)
    verdicts = f", {passed} of {judged} checklist items pass" if judged else ""
    return f"{len(played.segments)} outputs in {len(played.rows)} ledgers, {len(played.transcript)} turns{verdicts}"


def place_problems(cfg: ConfigDict) -> Iterator[str]:
    """What speaks against beginning, or going on, in the run's folder."""
    if not anew(cfg):
        folder = Path(cfg.run_dir)
        here = folder / "config.json"
        if not here.exists() and cfg.checkpoint.folder:
            here = place(cfg.checkpoint.folder) / "run" / "config.json"
        try:
            same_run(cfg, here)
        except UserError as error:
            yield str(error)


def run_dry(cfg: ConfigDict, *, rollouts: bool = True) -> int:
    """Prints the report; exit status 1 when something is to be mended.

    rollouts: whether the run plays tasks (`train`), or only learns from them (`warmstart`).
    """
    console = Console(markup=False, highlight=False, soft_wrap=True)
    wrong: list[str] = []

    def say(name: str, text: str) -> None:
        console.print(f"{name:<16} {text}")

    say("config", "holds")
    ground = preflight(cfg, Processes(), lambda text: say("note", text), wrong, rollouts=rollouts)
    train, held_out, chat, spec = ground.train, ground.held_out, ground.chat, ground.spec
    say("data", f"{len(train)} training tasks, {len(held_out)} held out ({cfg.data.source})")
    wrong += place_problems(cfg)
    if cfg.rewards.judge == "rules":
        bare = [t.uuid for t in train if any(i.rule is None for v in t.checklists for turn in v for i in turn)]
        if bare:
            wrong.append(
                f"rewards.judge=rules: {len(bare)} tasks have items without a rule (first: {bare[0]}); "
                "their trajectories would all be masked"
            )
    if spec is not None:
        unfit = list(export_problems(chat, spec))
        wrong += unfit
        if not unfit:
            say("export", "shape, tokenizer and template come back from what would be written")
    found = disk(cfg.run_dir)
    if spec is not None and ground.grounding is not None:
        found = estimates(cfg, train, chat, spec, ground.grounding, say)
    if found.ok is False:
        wrong.append(found.text)
    for used, (key, name) in (
        (cfg.rewards.judge == "endpoint", JUDGE),
        (cfg.learning.arm == "act_only_endpoint", SIMULATOR),
    ):
        for answer in endpoint(cfg, key, name) if used and rollouts else ():
            say(answer.name, answer.text)
            if answer.ok is False:
                wrong.append(f"{key}: {answer.text}")
    for line in wrong:
        console.print(f"MEND  {line}")
    console.print("dry run: nothing was started" + (f"; {len(wrong)} to mend" if wrong else ", all is well"))
    return 1 if wrong else 0


def estimates(
    cfg: ConfigDict,
    tasks: Sequence[Task],
    chat: ChatFormat,
    spec: Qwen3Spec,
    grounding: Grounding,
    say: Callable[[str, str], None],
) -> Finding:
    """Says how long ledgers are and what memory, disk and time the run takes; returns what was found of the disk."""
    lengths = ledger_lengths(tasks, chat, cfg, grounding)
    say(
        "lengths",
        f"{lengths.rows:.1f} ledgers a trajectory, mean {lengths.mean_row:.0f} and longest {lengths.longest} tokens, "
        f"{lengths.sampled:.0f} sampled (demonstrations)",
    )
    if lengths.too_long:
        text = f"{lengths.too_long:.0%} of the dialogues outgrow rows of {longest_row(cfg)} tokens and end early"
        say("note", f"{text} (rollout.max_input_tokens)")
    say("episode", scripted_episode(tasks[0], chat, cfg, grounding))

    parts = memory_estimate(spec, cfg)
    detail = ", ".join(f"{name} {v / GIB:.2f}" for name, v in parts.items() if v)
    say("memory", f"{sum(parts.values()) / GIB:.2f} GiB over all devices ({detail})")
    checkpoint = 12.0 * spec.n_params()
    trajectories = cfg.learning.steps * cfg.learning.prompts_per_step * cfg.learning.group_size
    lines = trajectories * lengths.rows * lengths.mean_row * 24.0
    total = checkpoint * (cfg.checkpoint.keep + 1) + lines * bool(cfg.metrics.trajectories)
    found = disk(cfg.run_dir, total)
    say("disk", f"{total / GIB:.2f} GiB ({checkpoint / GIB:.2f} a checkpoint); {found.text}")
    tokens = cfg.learning.prompts_per_step * cfg.learning.group_size * lengths.rows * lengths.mean_row
    flops = (6 + 2 + 2) * spec.n_params() * tokens
    rate = matmul_rate()
    hours = cfg.learning.steps * flops / rate / 3600
    say(
        "time",
        f"at least {hours:.2f} h for {cfg.learning.steps} steps on one device like this one "
        f"({tokens:.0f} tokens a step, 10 FLOPs a parameter and token, {rate / 1e9:.0f} GFLOP/s measured)",
    )
    return found
