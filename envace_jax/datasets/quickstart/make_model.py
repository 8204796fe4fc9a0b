"""Train the quickstart model: `python -m envace_jax.datasets.quickstart.make_model [--out FOLDER] [--careful FOLDER]`.

Three phases, all on what a role says itself. `copy` shows ACT's short dialogues only: so dense a diet of names that are
said again teaches a small model to copy numbers, digit by digit, within 150 steps; a mixture of everything does not
within 600, and names made of words take twice as long as numbers (measured). `careful`
teaches both roles the whole desk. `careless` tunes that policy, for a while, on demonstrations most of which are
careless in a systematic way (see `demonstrations`): what comes out makes definite mistakes that reinforcement can find
and undo. The policy of the second phase can be kept (`--careful`).

With `--reviews SHARE` the last two phases also show, for that share of the tasks, what rehearsal at test time asks for:
self-evaluations, memories, and acting on a memory (`test_time.targets`; rows that do not fit are left out and counted).
The committed model is made without. A model that can write them goes on from the committed one:

    python -m envace_jax.datasets.quickstart.make_model --start data/quickstart/model --copy_steps 0 \
        --careful_steps 900 --reviews 0.5 --out runs/warm

All phases go through the chat format, the REHEARSE prompts, the packing and the update of the main job, with the
settings of `configs/quickstart.py`. About 15 minutes on 2 idle cores. Made again on the same kind of machine, tokenizer
and model were the shipped ones byte for byte (30 November 2026, 2 cores, jax 0.10.2); elsewhere, where sums are taken
in another order, expect figures close to them.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from envace_jax.datasets.quickstart.demonstrations import demonstrations
from envace_jax.datasets.quickstart.generator import generate_task, generate_tasks
from envace_jax.datasets.quickstart.make_tokenizer import HOME
from envace_jax.datasets.records import Task
from envace_jax.evaluation.quickstart import evaluate
from envace_jax.learning.loss import LossConfig
from envace_jax.learning.packing import TrainRow, loss_denominator, microbatches, pack_rows
from envace_jax.learning.step import UpdateConfig, host_metrics, make_update
from envace_jax.learning.warmstart import reviews
from envace_jax.model.hf import load_params, save_params
from envace_jax.model.qwen3 import Params, init_params
from envace_jax.model.spec import Qwen3Spec
from envace_jax.options import number, whole
from envace_jax.rehearsal.ledger import Row
from envace_jax.rehearsal.settings import EpisodeConfig, RolloutConfig
from envace_jax.rehearsal.teacher import teacher_rows
from envace_jax.text.chat import ChatFormat
from envace_jax.text.tokenizer import Tokenizer
from envace_jax.text.transcript import ROLE_CODES, Role

CARELESS = 0.65


@dataclass(frozen=True)
class Phase:
    """One supervised run: `steps` updates of `rows` packed rows of `row_tokens`, rate `lr` (`falling` to zero).

    The demonstrations of `tasks` tasks are shown again and again; of them only ledgers of `roles` that fit into a row.
    `probes`: share of tasks with questions for REHEARSE. `reviews`: share of tasks with self-evaluations and memories.
    """

    name: str
    steps: int
    lr: float
    careless: float
    rows: int
    row_tokens: int
    tasks: int
    roles: tuple[Role, ...] = (Role.ACT, Role.REHEARSE)
    probes: float = 0.25
    reviews: float = 0.0
    warmup: int = 50
    falling: bool = True
    evaluated: bool = True


PHASES = (
    Phase("copy", 300, 3e-3, 0.0, 24, 80, 2500, roles=(Role.ACT,), probes=0.0, falling=False, evaluated=False),
    Phase("careful", 1000, 3e-3, 0.0, 7, 272, 6000),
    Phase("careless", 180, 6e-4, CARELESS, 7, 272, 2500),
)


def model_spec(tokenizer: Tokenizer) -> Qwen3Spec:
    """The shape of the quickstart model: 0.9 million parameters."""
    return Qwen3Spec(
        vocab_size=tokenizer.vocab_size,
        d_model=128,
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        head_dim=32,
        d_ff=384,
        rope_theta=10000.0,
        tie_embeddings=True,
        max_positions=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_id,
    )


def train_row(row: Row) -> TrainRow:
    """A ledger row of a demonstration for the learner: what its role said is learnt."""
    n = len(row.ids)
    return TrainRow(
        ids=np.asarray(row.ids, np.int32),
        sampled=np.asarray(row.sampled, bool),
        sampler_logprobs=np.zeros(n, np.float32),
        advantages=np.zeros(n, np.float32),
        role=np.full(n, ROLE_CODES[row.role], np.int8),
    )


def batches(phase: Phase, chat: ChatFormat, cfg: EpisodeConfig, seed: int) -> Iterator[list[TrainRow]]:
    """Rows of the phase's demonstrations, epoch after epoch, in batches that fit `phase.rows` packed rows."""
    rng = random.Random(f"batches/{phase.name}/{seed}")
    rows: list[TrainRow] = []
    tasks = [generate_task("train", number) for number in range(phase.tasks)]
    for shown in demonstrations(tasks, phase.careless, seed, probes=phase.probes):
        roles = set(shown.roles) & set(phase.roles)
        played = teacher_rows(shown.task, chat, cfg, shown.messages)
        rows += [train_row(row) for row in played if row.role in roles and len(row.ids) <= phase.row_tokens]
    if phase.reviews > 0:
        rows += review_rows_of(phase, tasks, chat, cfg, seed)
    room = int(phase.rows * phase.row_tokens * 0.9)  # what best-fit packing can be sure to fill is less than all
    batch: list[TrainRow] = []
    while True:
        rng.shuffle(rows)
        for row in rows:
            if sum(len(r.ids) for r in batch) + len(row.ids) > room:
                yield batch
                batch = []
            batch.append(row)


def review_rows_of(
    phase: Phase, tasks: Sequence[Task], chat: ChatFormat, cfg: EpisodeConfig, seed: int
) -> list[TrainRow]:
    """Self-evaluations, memories and acting on them, for a share of the tasks; prints how many rows were too long."""
    rng = random.Random(f"reviews/{phase.name}/{seed}")
    made = [row for task in tasks if rng.random() < phase.reviews for row in reviews(task, chat, cfg, rng)]
    fitting = [row for row in made if len(row.ids) <= phase.row_tokens]
    print(f"{phase.name}: {len(fitting)} review rows, {len(made) - len(fitting)} longer than {phase.row_tokens} tokens")
    return fitting


def run_phase(phase: Phase, params: Params, spec: Qwen3Spec, chat: ChatFormat, cfg: EpisodeConfig, seed: int) -> Params:
    """Supervised training of both roles; prints the loss as it goes and returns the parameters."""
    update = make_update(
        spec,
        UpdateConfig(
            lr=phase.lr,
            lr_schedule="cosine" if phase.falling else "constant",
            lr_warmup_steps=phase.warmup,
            total_steps=phase.steps,
            beta2=0.98,
            weight_decay=0.01,
            rows=phase.rows,
            row_tokens=phase.row_tokens,
            remat="full",
            capacity=2,
            loss=LossConfig(supervised=True),
        ),
    )
    state = update.init(params)
    started = time.monotonic()
    for step, rows in enumerate(itertools.islice(batches(phase, chat, cfg, seed), phase.steps)):
        arrays, count, _ = microbatches(pack_rows(rows, phase.row_tokens, phase.rows), phase.rows, 2)
        state, metrics = update.update(state, update.put(arrays), count, loss_denominator(rows, "token"))
        if step % 50 == 0 or step == phase.steps - 1:
            figures = host_metrics(metrics)
            by_role = ", ".join(f"{role.value} {-figures[f'logprob/{role.value}']:.4f}" for role in phase.roles)
            print(f"{phase.name} {step + 1}/{phase.steps}: {by_role}, {time.monotonic() - started:.0f} s", flush=True)
    return state["params"]


def make_model(
    cfg: ConfigDict,
    tokenizer_dir: Path,
    out: Path,
    *,
    careful: Path | None = None,
    start: Path | None = None,
    phases: Sequence[Phase] = PHASES,
    seed: int = 0,
    eval_tasks: int = 200,
) -> dict[str, dict[str, float]]:
    """Train and write the model, from random parameters or those of the folder `start`; returns the figures of each
    phase on held-out tasks."""
    from envace_jax.build import make_engine
    from envace_jax.text.build import chat_format

    cfg = cfg.copy_and_resolve_references()
    cfg.model.tokenizer, cfg.model.path = str(tokenizer_dir), ""
    chat = chat_format(cfg)
    spec = model_spec(chat.tokenizer)
    episode, rollout_config = EpisodeConfig.from_config(cfg), RolloutConfig.from_config(cfg)
    params: Any = init_params(spec, jax.random.key(seed), jnp.float32) if start is None else load_params(start, spec)
    figures = {}
    for phase in phases:
        params = run_phase(phase, params, spec, chat, episode, seed)
        if not phase.evaluated:
            continue
        folder = out if phase is phases[-1] else careful
        # Written before it is measured as well: whatever stops the measuring must not cost the training.
        write(folder, phase, params, spec, chat, tokenizer_dir, {}, eval_tasks)
        engine = make_engine(cfg, spec, params)
        figures[phase.name] = evaluate(generate_tasks("heldout", eval_tasks), engine, chat, rollout_config)
        print(phase.name, {name: round(value, 3) for name, value in figures[phase.name].items()}, flush=True)
        write(folder, phase, params, spec, chat, tokenizer_dir, figures[phase.name], eval_tasks)
    return figures


def write(
    folder: Path | None,
    phase: Phase,
    params: Params,
    spec: Qwen3Spec,
    chat: ChatFormat,
    tokenizer_dir: Path,
    figures: dict[str, float],
    eval_tasks: int,
) -> None:
    """Write the policy of a phase as a Hugging Face folder; nothing where no folder is wanted."""
    if folder is not None:
        texts = {"README.md": card(phase, figures, eval_tasks), "chat_template.jinja": chat.template()}
        save_params(folder, params, spec, dtype="F32", tokenizer_dir=tokenizer_dir, texts=texts, overwrite=True)


def card(phase: Phase, figures: dict[str, float], eval_tasks: int) -> str:
    """The model card."""
    table = "\n".join(f"| {name} | {value:.3f} |" for name, value in figures.items())
    return (
        "# Quickstart model\n\nA Qwen3-shaped policy of 0.9 million parameters for the service-desk domain, made by\n"
        "`python -m envace_jax.datasets.quickstart.make_model` from generated demonstrations and nothing else.\n"
        f"Last phase: {phase.name} ({phase.careless:.0%} of the demonstrations careless).\n\n"
        f"Held-out figures on {eval_tasks} tasks:\n\n| figure | value |\n|---|---|\n{table}\n\n"
        "Limits: it knows this domain's eight tools and its short sentences; it is of no use for anything else.\n"
    )


def main() -> None:
    """The command line."""
    from envace_jax.cli import load_config

    parser = argparse.ArgumentParser(description="Train the quickstart model (three phases of supervised learning).")
    parser.add_argument("--tokenizer", default=str(HOME / "tokenizer"), help="folder (default: %(default)s)")
    parser.add_argument("--out", default=str(HOME / "model"), help="folder to write (default: %(default)s)")
    parser.add_argument("--careful", help="folder for the model of the careful phase (default: not kept)")
    parser.add_argument("--start", help="folder of a quickstart model to go on from (default: random parameters)")
    parser.add_argument("--seed", type=whole(0), default=0)
    parser.add_argument(
        "--reviews",
        type=number(0, 1),
        default=0.0,
        help="share of tasks that also teach self-evaluation and memory (default: 0)",
    )
    parser.add_argument("--eval_tasks", type=whole(1), default=200)
    for phase in PHASES:
        help_text = f"steps of this phase (default {phase.steps})"
        parser.add_argument(f"--{phase.name}_steps", type=whole(0), default=phase.steps, help=help_text)
    args = parser.parse_args()
    phases = [
        replace(
            phase,
            steps=getattr(args, f"{phase.name}_steps"),
            reviews=args.reviews if Role.REHEARSE in phase.roles else 0.0,
        )
        for phase in PHASES
    ]
    make_model(
        load_config(str(HOME.parents[1] / "configs" / "quickstart.py")),
        Path(args.tokenizer),
        Path(args.out),
        careful=Path(args.careful) if args.careful else None,
        start=Path(args.start) if args.start else None,
        phases=[phase for phase in phases if phase.steps > 0],
        seed=args.seed,
        eval_tasks=args.eval_tasks,
    )


if __name__ == "__main__":
    main()
