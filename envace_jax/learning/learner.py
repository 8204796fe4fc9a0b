"""One trained parameter set: its state, its reference, and what it does with a step's rows."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from envace_jax.build import longest_row, lora_scale, rules_for
from envace_jax.distributed import Processes
from envace_jax.learning.handover import HandOver, checksum, whole
from envace_jax.learning.loss import LossConfig
from envace_jax.learning.metrics import Metrics
from envace_jax.learning.packing import TrainRow, loss_denominator, microbatches, needs_gradient, pack_rows
from envace_jax.learning.step import Update, UpdateConfig, host_metrics
from envace_jax.model.qwen3 import Params
from envace_jax.model.sharding import Rules
from envace_jax.text.transcript import ROLE_CODES, Role


def data_shards(mesh: Mesh | None, rules: Rules = Rules()) -> int:
    """Over how many shards batch rows are spread."""
    if mesh is None:
        return 1
    axes = rules.batch if isinstance(rules.batch, tuple) else (rules.batch,)
    return int(np.prod([mesh.shape[axis] for axis in axes if axis is not None]))


def update_config(cfg: ConfigDict, mesh: Mesh | None = None) -> UpdateConfig:
    """The update of a configuration: `rows_per_microbatch` rows on each data shard, room for a full step."""
    c = cfg.learning
    rows = c.rows_per_microbatch * data_shards(mesh)
    # Room for every trajectory with two full ledgers; more doubles the room once, and is said.
    tokens = 2 * c.prompts_per_step * c.group_size * longest_row(cfg)
    return UpdateConfig(
        lr=c.lr,
        lr_schedule=c.schedule,
        lr_warmup_steps=c.warmup_steps,
        total_steps=c.steps * c.updates_per_batch * c.epochs,
        beta1=c.beta1,
        beta2=c.beta2,
        weight_decay=c.weight_decay,
        grad_clip=c.grad_clip,
        drift_limit=c.max_probability_error,
        spike_limit=c.spike_limit,
        compute_dtype=cfg.model.dtype,
        remat=cfg.model.remat,
        attention=cfg.model.attention,
        moe_exchange=cfg.model.moe_exchange,
        moe_chunk=cfg.model.moe_chunk,
        replay_routing=cfg.model.replay_routing,
        router_aux_coef=c.router_aux_coef,
        rules=rules_for(cfg),
        lora_scale=lora_scale(cfg),
        rows=rows,
        row_tokens=c.row_tokens,
        capacity=max(1, -(-tokens // (rows * c.row_tokens))),
        loss=LossConfig(
            temperature=cfg.rollout.temperature or 1.0,
            clip_low=c.clip_low,
            clip_high=c.clip_high,
            dual_clip=c.dual_clip,
            ratio=c.ratio,
            kl_coef=c.kl_coef,
            entropy_coef=c.entropy_coef,
            importance_cap=c.importance_cap,
            own_old=c.updates_per_batch * c.epochs == 1,
            chunk_tokens=c.logprob_chunk,
        ),
    )


class Learner:
    """State and reference of one parameter set."""

    def __init__(
        self,
        cfg: ConfigDict,
        update: Update,
        params: Params,
        name: str,
        folder: Path,
        processes: Processes | None = None,
        to_engine: HandOver | None = None,
    ):
        self.cfg, self.update, self.name, self.folder = cfg, update, name, folder
        self.processes, self.to_engine = processes or Processes(), to_engine
        self.state = update.init(params)
        self.reference: Params | None = None
        if cfg.learning.kl_coef > 0:
            self.reference = update.compute_copy(self.state["params"])

    def compile(self) -> None:
        """Compiles the programs of a step."""
        self.update.compile(self.state, self.reference)

    def hand_over(self, engine: Any, name: str) -> None:
        """Gives an engine the parameters: one copy in the compute dtype.

        The engine makes it when it has to convert; where it would take the arrays as they are it gets a copy, for
        the state is donated to the next update.
        """
        params = self.state["params"]
        if self.to_engine is not None:
            engine.set_params(self.to_engine(params), name)
            return
        dtype = self.update.options.dtype
        if all(x.dtype == dtype for x in jax.tree.leaves(params)):
            params = self.update.compute_copy(params)
        engine.set_params(params, name)

    def digest(self) -> str:
        """sha256 of the parameters; where they lie in several processes, of checksums of theirs, marked as such."""
        if not self.processes.alone:
            return f"parts:{checksum(self.state['params'])}"
        found = hashlib.sha256()
        for leaf in jax.tree.leaves(self.state["params"]):
            found.update(np.asarray(jax.device_get(leaf)).tobytes())
        return found.hexdigest()

    def learn(self, rows: Sequence[TrainRow], step: int, roles: Sequence[Role]) -> Metrics:
        """The updates of one step; returns figures averaged over them.

        rows: those of all trained roles; this set learns from those of `roles`. The loss is divided by what all of
        them count, so that two sets that share out the roles weigh each output as one set with both would.
        """
        c = self.cfg.learning
        compiled = len(self.update.compile_seconds)
        parts = [self._prepare(part, roles) for part in self._split(rows, step)]
        own_old = self.update.config.loss.own_old
        for batch, count, _, _ in parts:
            if self.reference is not None:
                batch["reference_logprobs"] = self.update.score(self.reference, batch, count)
            if not own_old:
                batch["old_logprobs"] = self.update.score(self.state["params"], batch, count)
        found = []
        for _ in range(c.epochs):
            for k, (batch, count, denominator, _) in enumerate(parts):
                self.state, metrics = self.update.update(self.state, batch, count, denominator)
                figures = host_metrics(metrics)
                if figures["skipped"]:
                    self._keep(batch, step, k)
                found.append(figures)
        out = {name: float(np.mean([f[name] for f in found])) for name in found[0]}
        out |= {name: max(f[name] for f in found) for name in found[0] if name.endswith("_max")}
        out["skipped"] = float(all(f["skipped"] for f in found))
        out["tokens_packed"] = float(sum(info["tokens_packed"] for *_, info in parts))
        out["packing/fill"] = float(np.mean([info["fill"] for *_, info in parts]))
        out["packing/rows"] = float(sum(info["rows"] for *_, info in parts))
        out["packing/rows_skipped"] = float(sum(info["skipped"] for *_, info in parts))
        out["packing/tokens_counted"] = float(sum(info["counted"] for *_, info in parts))
        out["compilations"] = float(len(self.update.compile_seconds) - compiled)
        out["lr"] = float(self.update.config.schedule()(step * len(found)))
        return out

    def _split(self, rows: Sequence[TrainRow], step: int) -> list[list[TrainRow]]:
        """The rows of each update, dealt at random when there are several."""
        n = self.cfg.learning.updates_per_batch
        if n == 1:
            return [list(rows)]
        order = list(range(len(rows)))
        random.Random(f"updates/{self.cfg.seed}/{step}").shuffle(order)
        return [[rows[i] for i in sorted(order[k::n])] for k in range(n)]

    def _prepare(
        self, rows: Sequence[TrainRow], roles: Sequence[Role]
    ) -> tuple[dict[str, jax.Array], int, float, dict[str, float]]:
        """Device batch of the rows of `roles`, number of microbatches, denominator of all rows, figures."""
        c, config = self.cfg.learning, self.update.config
        constant = float(self.cfg.rollout.max_act_tokens)
        denominator = loss_denominator(rows, c.loss_mean, constant)
        codes = {ROLE_CODES[role] for role in roles}
        rows = [row for row in rows if int(row.role[0]) in codes]
        exact = config.loss.kl_coef == 0 and config.loss.entropy_coef == 0
        kept = [r for r in rows if needs_gradient(r)] if c.skip_zero_advantage and exact else list(rows)
        batch = pack_rows(
            kept, config.row_tokens, config.rows, normaliser=c.loss_mean, routing=self.update.routing
        )
        arrays, count, self.update.capacity = microbatches(batch, config.rows, self.update.capacity)
        if not kept:
            count = 0
        info = {
            "fill": batch.fill,
            "rows": len(kept),
            "skipped": len(rows) - len(kept),
            "counted": float(sum(int(r.sampled.sum()) for r in rows)),
            "tokens_packed": float((batch.segment_ids > 0).sum()),
        }
        return self.update.put(arrays), count, denominator, info

    def _keep(self, batch: dict[str, jax.Array], step: int, k: int) -> None:
        """Writes a batch whose update was not taken where it can be looked at."""
        folder = self.folder / "bad_steps"
        folder.mkdir(parents=True, exist_ok=True)  # every process: gathering the batch needs all of them
        arrays: dict[str, Any] = {name: whole(x) for name, x in batch.items()}
        if self.processes.main:
            np.savez_compressed(folder / f"step_{step + 1:08d}_{self.name}_{k}.npz", **arrays)
