"""The update: one jitted, donated program over microbatches, compiled before the run starts.

Master parameters and moments are float32.  The program makes one compute-dtype copy of the parameters, loops over
as many microbatches as there are (the loop bound is data, so the batch's size never causes a compilation), adds
their gradients in float32, divides once by the batch's denominator, clips, and lets AdamW take its step.  A
gradient that is not finite, or a sampler that disagrees with the learner, leaves the state as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from envace_jax.config import UserError
from envace_jax.learning.loss import (
    ROLES,
    LossConfig,
    gather_predictions,
    policy_loss,
    supervised_loss,
    token_logprobs,
)
from envace_jax.model.attention import choose
from envace_jax.model.moe import balance_loss, routed_differently
from envace_jax.model.qwen3 import ForwardOptions, Params, forward_with_routing, output_matrix
from envace_jax.model.sharding import Rules, axes_of, param_shardings
from envace_jax.model.spec import Qwen3Spec

State = dict[str, Any]
SCHEDULES = ("constant", "cosine")
UNROLL_LIMIT = 8


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """Optimizer, precision and batch shape.

    A microbatch is `rows` batch rows of `row_tokens` ids; `capacity` is the number of microbatches that the program
    has room for.  drift_limit: an update whose mean exp|learner - sampler| exceeds it is not taken (0: no limit).
    spike_limit: nor is one whose gradient norm exceeds it (0: no limit).
    router_aux_coef: weight of the load-balancing loss of a mixture of experts.  replay_routing: the batch says which
    experts to use (`packing.Batch.experts`), in the update and in scoring.
    attention: `auto` is settled for the devices of the mesh.  moe_exchange, moe_chunk, rules, lora_scale: see
    `model.qwen3.ForwardOptions`.
    """

    lr: float = 1e-6
    lr_schedule: str = "constant"
    lr_warmup_steps: int = 0
    total_steps: int = 0
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    drift_limit: float = 0.0
    spike_limit: float = 0.0
    compute_dtype: str = "float32"
    remat: str = "none"
    attention: str = "xla"
    moe_exchange: str = "gather"
    moe_chunk: int = 0
    rules: Rules = Rules()
    lora_scale: float = 1.0
    rows: int = 8
    row_tokens: int = 256
    capacity: int = 16
    router_aux_coef: float = 0.0
    replay_routing: bool = False
    loss: LossConfig = LossConfig()

    def __post_init__(self) -> None:
        if self.lr_schedule not in SCHEDULES:
            raise UserError(f"learning.lr_schedule='{self.lr_schedule}' is unknown; expected one of {SCHEDULES}")
        if self.lr_schedule == "cosine" and self.total_steps <= 0:
            raise UserError("learning.lr_schedule='cosine' needs the number of steps to be known")

    def schedule(self) -> optax.Schedule:
        """Learning rate by the number of steps taken."""

        def rate(count: Any) -> Any:
            value = jnp.float32(self.lr)
            if self.lr_schedule == "cosine":
                progress = jnp.clip(count / self.total_steps, 0.0, 1.0)
                value = value * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
            if self.lr_warmup_steps:
                value = value * jnp.minimum(1.0, (count + 1) / self.lr_warmup_steps)
            return value

        return rate

    def optimizer(self) -> optax.GradientTransformation:
        return optax.adamw(self.schedule(), b1=self.beta1, b2=self.beta2, eps=1e-8, weight_decay=self.weight_decay)


def cast(params: Params, dtype: Any) -> Params:
    """Every parameter in another dtype."""
    return jax.tree.map(lambda p: p.astype(dtype), params)


def unstack_layers(params: Params) -> Params:
    """The stacked layers as a tuple of layers: the decoder then runs them one by one instead of scanning."""
    n = jax.tree.leaves(params["layers"])[0].shape[0]
    return params | {"layers": tuple(jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(n))}


def stack_layers(params: Params) -> Params:
    """The inverse of `unstack_layers`."""
    return params | {"layers": jax.tree.map(lambda *layers: jnp.stack(layers), *params["layers"])}


def split_trained(params: Params) -> tuple[Params, Params]:
    """(what is trained, what stays): the adapters where there are some (`params["lora"]`), else everything."""
    if "lora" not in params:
        return params, {}
    return {"lora": params["lora"]}, {name: value for name, value in params.items() if name != "lora"}


def batch_logprobs(
    params: Params, spec: Qwen3Spec, batch: dict[str, jax.Array], options: ForwardOptions, loss: LossConfig
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Log-probabilities and entropies [B, S] of a microbatch's predictions, the routers' balance loss or 0, and, where
    experts are used again, how far the routers' own choices are from them (`moe.routed_differently`)."""
    replay_LxBxTxK = None
    if "experts" in batch:
        replay_LxBxTxK = jnp.moveaxis(batch["experts"].astype(jnp.int32), 2, 0)
    hidden_BxTxD, routing = forward_with_routing(
        params,
        spec,
        batch["tokens"],
        batch["positions"],
        batch["segment_ids"],
        options=options,
        replay_LxBxTxK=replay_LxBxTxK,
    )
    logprob, entropy = token_logprobs(
        gather_predictions(hidden_BxTxD, batch["target_index"]),
        batch["targets"],
        batch["mask"],
        output_matrix(params, options),
        temperature=loss.temperature,
        chunk_tokens=loss.chunk_tokens,
        entropy_gradient=loss.entropy_coef > 0,
    )
    if routing is None:
        return logprob, entropy, jnp.float32(0), None
    moved = None
    if replay_LxBxTxK is not None:
        moved = routed_differently(routing.own, replay_LxBxTxK, replay_LxBxTxK[0, :, :, 0] >= 0)
    return logprob, entropy, balance_loss(spec, routing), moved


def _pick(batch: dict[str, jax.Array], i: jax.Array) -> dict[str, jax.Array]:
    return {name: jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for name, x in batch.items()}


class Update:
    """The compiled programs of one learner: `init`, `update`, `score`, `compute_copy`.

    The state is a pytree {"params", "opt_state", "step"}; `update` takes it over (its buffers are donated).
    """

    def __init__(self, spec: Qwen3Spec, config: UpdateConfig, mesh: Mesh | None = None, rules: Rules | None = None):
        rules = config.rules if rules is None else rules
        self.spec, self.config, self.mesh, self.rules = spec, config, mesh, rules
        dtype = jnp.dtype(config.compute_dtype)
        # The mesh's devices, not this process's: they differ where a program is compiled ahead of time.
        platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
        self.options = ForwardOptions(
            dtype=dtype,
            remat=config.remat,
            rules=rules,
            attention=choose(config.attention, config.row_tokens, spec.head_dim, dtype, platform),
            moe_exchange=config.moe_exchange,
            moe_chunk=config.moe_chunk,
            lora_scale=config.lora_scale,
        )
        # On CPU a scan over few layers compiles longer and runs slower (about 15%) than the layers one by one.
        self.unrolled = mesh is None and jax.default_backend() == "cpu" and spec.n_layers <= UNROLL_LIMIT
        self.optimizer = config.optimizer()
        self.capacity = config.capacity
        self.compile_seconds: dict[str, float] = {}
        self._programs: dict[tuple[str, int, tuple[str, ...]], Any] = {}
        if config.replay_routing and not spec.is_moe:
            raise UserError("model.replay_routing=True: the model has no experts")
        if mesh is not None:
            shards = int(np.prod([mesh.shape[a] for a in axes_of(rules.batch)]))
            if config.rows % shards:
                raise UserError(
                    f"learning.rows_per_microbatch={config.rows} does not divide over the mesh's {shards} data shards; "
                    f"expected a multiple of {shards}"
                )

    # Placement

    def _context(self) -> Any:
        return jax.set_mesh(self.mesh) if self.mesh is not None else contextlib.nullcontext()

    def _batch_sharding(self) -> NamedSharding | None:
        if self.mesh is None:
            return None
        return NamedSharding(self.mesh, P(None, self.rules.batch))

    def _scalar_sharding(self) -> NamedSharding | None:
        return NamedSharding(self.mesh, P()) if self.mesh is not None else None

    def put(self, arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Host arrays [M, B, T] onto the devices, batch rows spread over the data axes."""
        sharding = self._batch_sharding()
        if sharding is None:
            return jax.device_put(arrays)
        return {name: spread(array, sharding) for name, array in arrays.items()}

    def place_params(self, params: Params) -> Params:
        """Parameters in the layout of the rules: what is trained in float32, what stays in the compute dtype."""
        trained, rest = split_trained(params)
        params = cast(rest, self.options.dtype) | cast(trained, jnp.float32)
        if self.mesh is None:
            return params
        return jax.device_put(params, param_shardings(params, self.mesh, self.rules))

    def init(self, params: Params) -> State:
        """A fresh state around these parameters (the caller's arrays stay valid)."""

        def fresh(params: Params) -> State:
            params = jax.tree.map(jnp.copy, params)
            trained, _ = split_trained(params)
            return {"params": params, "opt_state": self.optimizer.init(trained), "step": jnp.int32(0)}

        with self._context():
            return jax.jit(fresh)(self.place_params(params))

    # Programs

    def _update(
        self, state: State, batch: dict[str, jax.Array], count: jax.Array, denominator: jax.Array
    ) -> tuple[State, dict[str, Any]]:
        config = self.config
        params, rest = split_trained(state["params"])
        compute, frozen = cast(params, self.options.dtype), cast(rest, self.options.dtype)
        unrolled = self.unrolled and not frozen
        if unrolled:
            compute = unstack_layers(compute)

        def loss(params: Params, micro: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, Any]]:
            logprob, entropy, balance, moved = batch_logprobs(
                frozen | params, self.spec, micro, self.options, config.loss
            )
            if config.loss.supervised:
                value, figures = supervised_loss(logprob, entropy, micro)
            else:
                value, figures = policy_loss(logprob, entropy, micro, config.loss)
            if config.router_aux_coef > 0:
                # Weighted as the microbatch is in the loss, so that the sum over microbatches is their mean.
                value += config.router_aux_coef * balance * jnp.sum(micro["weights"])
            if moved is not None:
                figures["sums"]["rerouted"] = jax.lax.stop_gradient(moved)
            return value, figures

        gradient = jax.value_and_grad(loss, has_aux=True)
        figures = jax.eval_shape(gradient, compute, _pick(batch, jnp.int32(0)))[0][1]

        def body(i: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            total, grads, seen = carry
            (value, new), more = gradient(compute, _pick(batch, i))
            grads = jax.tree.map(lambda a, g: a + g.astype(jnp.float32), grads, more)
            seen = {
                "sums": jax.tree.map(jnp.add, seen["sums"], new["sums"]),
                "maxima": jax.tree.map(jnp.maximum, seen["maxima"], new["maxima"]),
            }
            return total + value, grads, seen

        none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), figures)
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), compute)
        total, grads, seen = jax.lax.fori_loop(0, count, body, (jnp.float32(0), zeros, none))
        if unrolled:
            grads = stack_layers(grads)
        scale = 1.0 / jnp.maximum(denominator, 1e-9)
        grads = jax.tree.map(lambda g: g * scale, grads)
        norm = optax.global_norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(total)
        sums = dict(seen["sums"])
        tokens = jnp.maximum(jnp.sum(sums["tokens"]), 1.0)
        accept = finite
        if config.drift_limit > 0 and not config.loss.supervised:
            accept &= jnp.sum(sums["exp_drift"]) / tokens <= config.drift_limit
        if config.spike_limit > 0:
            accept &= norm <= config.spike_limit
        if config.grad_clip > 0:
            clip = jnp.minimum(1.0, config.grad_clip / (norm + 1e-6))
            grads = jax.tree.map(lambda g: g * clip, grads)
        updates, opt_state = self.optimizer.update(grads, state["opt_state"], params)
        old = (params, state["opt_state"])
        new = (optax.apply_updates(params, updates), opt_state)
        params, opt_state = jax.tree.map(lambda a, b: jnp.where(accept, a, b), new, old)
        state = {"params": rest | params, "opt_state": opt_state, "step": state["step"] + 1}
        metrics = {
            "loss": total * scale,
            "grad_norm": norm,
            "finite": finite,
            "accepted": accept,
            "sums": sums,
            "maxima": seen["maxima"],
        }
        return state, metrics

    def _score(self, params: Params, batch: dict[str, jax.Array], count: jax.Array) -> jax.Array:
        compute = cast(params, self.options.dtype)
        if self.unrolled and "lora" not in params:
            compute = unstack_layers(compute)

        def body(i: jax.Array, out: jax.Array) -> jax.Array:
            logprob, *_ = batch_logprobs(compute, self.spec, _pick(batch, i), self.options, self.config.loss)
            return jax.lax.dynamic_update_index_in_dim(out, logprob, i, 0)

        return jax.lax.fori_loop(0, count, body, jnp.zeros_like(batch["weights"]))

    @property
    def routing(self) -> tuple[int, int] | None:
        """Layers and experts a token where batches say which experts to use, else None."""
        return (self.spec.n_layers, self.spec.n_experts_per_token) if self.config.replay_routing else None

    def batch_shapes(self, capacity: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the device batch, for compilation without data."""
        shape = (capacity, self.config.rows, self.config.row_tokens)
        dtypes: dict[str, Any] = dict.fromkeys(
            ("tokens", "positions", "segment_ids", "target_index", "targets", "output"), jnp.int32
        )
        dtypes |= dict.fromkeys(("weights", "advantages", "sampler_logprobs"), jnp.float32)
        dtypes |= {"mask": jnp.bool_, "role": jnp.int8}
        if not self.config.loss.supervised:
            if not self.config.loss.own_old:
                dtypes["old_logprobs"] = jnp.float32
            if self.config.loss.kl_coef > 0:
                dtypes["reference_logprobs"] = jnp.float32
        sharding = self._batch_sharding()
        shapes = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in dtypes.items()}
        if self.routing is not None:
            shapes["experts"] = jax.ShapeDtypeStruct((*shape, *self.routing), jnp.int16, sharding=sharding)
        return shapes

    def lower_update(self, state: State, capacity: int | None = None) -> Any:
        """The lowered update program for a state (arrays or shapes)."""
        scalar = self._scalar_sharding()
        with self._context():
            return jax.jit(self._update, donate_argnums=0).lower(
                state,
                self.batch_shapes(capacity or self.capacity),
                jax.ShapeDtypeStruct((), jnp.int32, sharding=scalar),
                jax.ShapeDtypeStruct((), jnp.float32, sharding=scalar),
            )

    def lower_score(self, params: Params, capacity: int | None = None) -> Any:
        """The lowered scoring program for parameters of any float dtype."""
        with self._context():
            shapes = self.batch_shapes(capacity or self.capacity)
            shapes = {k: v for k, v in shapes.items() if k not in ("old_logprobs", "reference_logprobs")}
            return jax.jit(self._score).lower(
                params, shapes, jax.ShapeDtypeStruct((), jnp.int32, sharding=self._scalar_sharding())
            )

    def _program(self, name: str, capacity: int, argument: Any) -> Any:
        # Of every leaf: with adapters a state and its reference begin with the same leaves and differ in the last ones.
        dtypes = tuple(str(x.dtype) for x in jax.tree.leaves(argument)) if name == "score" else ()
        key = (name, capacity, dtypes)
        if key not in self._programs:
            started = time.monotonic()
            lower = self.lower_update if name == "update" else self.lower_score
            self._programs[key] = lower(argument, capacity).compile()
            self.compile_seconds[f"{name}/{capacity}/{','.join(dtypes)}"] = time.monotonic() - started
        return self._programs[key]

    def compile(self, state: State, reference: Params | None = None) -> None:
        """Compiles what a run will call, before it starts."""
        self._program("update", self.capacity, state)
        if not self.config.loss.own_old:
            self._program("score", self.capacity, state["params"])
        if reference is not None:
            self._program("score", self.capacity, reference)

    # Calls

    def _scalar(self, value: float, dtype: Any) -> jax.Array:
        return spread(np.asarray(value, dtype), self._scalar_sharding())

    def update(
        self, state: State, batch: dict[str, jax.Array], count: int, denominator: float
    ) -> tuple[State, dict[str, Any]]:
        """One optimizer step on `count` microbatches; returns the new state and metrics still on the device."""
        program = self._program("update", batch["tokens"].shape[0], state)
        names = self.batch_shapes(1)
        with self._context():
            return program(
                state,
                {name: batch[name] for name in names},
                self._scalar(count, np.int32),
                self._scalar(denominator, np.float32),
            )

    def score(self, params: Params, batch: dict[str, jax.Array], count: int) -> jax.Array:
        """Log-probabilities [M, B, T] of the batch's predictions under these parameters."""
        program = self._program("score", batch["tokens"].shape[0], params)
        names = [n for n in self.batch_shapes(1) if n not in ("old_logprobs", "reference_logprobs")]
        with self._context():
            return program(params, {name: batch[name] for name in names}, self._scalar(count, np.int32))

    def compute_copy(self, params: Params, shardings: Any = None) -> Params:
        """A compute-dtype copy for the sampler, in its layout: independent of the donated state."""
        if not hasattr(self, "_copy"):
            dtype = self.options.dtype
            self._copy = jax.jit(
                lambda p: jax.tree.map(lambda x: jnp.copy(x.astype(dtype)), p), out_shardings=shardings
            )
        with self._context():
            return self._copy(params)


def spread(array: np.ndarray, sharding: NamedSharding | None) -> jax.Array:
    """A host array, the same in every process, laid out over the devices: each process places its own shards."""
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def make_update(spec: Qwen3Spec, config: UpdateConfig, mesh: Mesh | None = None, rules: Rules | None = None) -> Update:
    """The programs for one model and configuration; `Update.compile` compiles them."""
    return Update(spec, config, mesh, rules)


def host_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """Sums over microbatches turned into means by role and overall, as plain floats."""
    metrics = jax.device_get(metrics)
    sums = metrics["sums"]
    tokens = np.asarray(sums["tokens"], np.float64)
    out = {
        "loss": float(metrics["loss"]),
        "grad_norm": float(metrics["grad_norm"]),
        "skipped": float(not metrics["accepted"]),
        "nonfinite": float(not metrics["finite"]),
        "tokens_trained": float(tokens.sum()),
    }
    if "rerouted" in sums:
        some, mean, recorded = (float(n) for n in sums["rerouted"])
        out["routing/moved"] = some / max(recorded, 1.0)
        out["routing/moved_layers"] = mean / max(recorded, 1.0)
    for name, value in sums.items():
        if np.shape(value) == (ROLES,) and name != "tokens":
            out[name] = float(np.sum(value) / max(tokens.sum(), 1.0))
            for code, role in enumerate(("act", "rehearse")):
                out[f"{name}/{role}"] = float(value[code] / max(tokens[code], 1.0))
    for name, value in metrics["maxima"].items():
        out[f"{name}_max"] = float(value)
    return out
