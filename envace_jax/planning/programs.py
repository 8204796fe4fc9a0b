"""The run's real programs, compiled ahead of time for a TPU slice that is not here.

`libtpu` compiles for a topology description without a chip. A program that does not fit makes the compiler fail; what
it says it needed is kept, so that a report can be made of that as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ml_collections import ConfigDict

from envace_jax.config import UserError
from envace_jax.planning.chips import GIB, Slice, rollout_slice
from envace_jax.planning.hlo import Collective, collectives, loops


def prepare_environment() -> None:
    """Settings that libtpu reads when it is loaded: no chip is looked for. To be called before jax is imported."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")


@dataclasses.dataclass(frozen=True)
class Program:
    """What compiling one program told. Bytes are those of one chip.

    seconds, cpu_seconds: by the clock, and of all threads together (free of what else the machine does). needed: HBM
    that the compiler asked for where it refused (0: it fits). while_trips: known trip counts of its loops.
    """

    name: str
    seconds: float
    cpu_seconds: float
    arguments: int = 0
    aliased: int = 0
    output: int = 0
    temporaries: int = 0
    code: int = 0
    needed: int = 0
    collectives: tuple[Collective, ...] = ()
    while_trips: tuple[int, ...] = ()
    message: str = ""

    @property
    def fits(self) -> bool:
        return not self.needed

    @property
    def own(self) -> int:
        """What the program adds to its arguments while it runs."""
        return self.temporaries + self.code + max(0, self.output - self.aliased)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops what libtpu writes to file descriptor 2 while it looks for chips that are not there."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def tpu_devices(slice_: Slice) -> Sequence[Any]:
    """Device descriptions of a TPU slice; raises `UserError` where libtpu is missing or knows no such slice.

    libtpu takes a host to hold 2 x 2 chips; a smaller slice is a host of its own.
    """
    from jax.experimental import topologies

    small = {} if slice_.size >= 4 else {"chips_per_host_bounds": (*slice_.shape, 1, 1)[:3]}
    try:
        with _quiet():
            return topologies.get_topology_desc(platform="tpu", topology_name=slice_.name, **small).devices
    except Exception as error:
        what = str(error).splitlines()[0][:200]
        raise UserError(
            f"plan.topology='{slice_.name}': not described ({what}); it takes libtpu: pip install 'envace_jax[tpu]'"
        ) from None


_NUMBER = r"([\d.]+)([KMG]?)"
_USED = re.compile(rf"Used {_NUMBER} of |required for HLO temporaries \({_NUMBER}\)")


def _size(number: str, unit: str) -> int:
    return int(float(number) * {"": 1, "K": 1 << 10, "M": 1 << 20, "G": GIB}[unit])


def compile_program(name: str, lower: Callable[[], Any], mesh: Any, unknown_trips: int = 1) -> Program:
    """Lowers and compiles; a program too large for the chip is a result, any other failure is raised."""
    import jax

    started, cpu_started = time.monotonic(), time.process_time()
    try:
        with jax.set_mesh(mesh):
            compiled = lower().compile()
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "RESOURCE_EXHAUSTED" not in text and "Ran out of memory" not in text:
            raise
        used = _USED.search(text)
        return Program(
            name,
            time.monotonic() - started,
            time.process_time() - cpu_started,
            needed=_size(*(g for g in used.groups() if g is not None)) if used else 1,
            message=text.splitlines()[0][:300],
        )
    seconds, cpu_seconds = time.monotonic() - started, time.process_time() - cpu_started
    memory, text = compiled.memory_analysis(), compiled.as_text()
    found = collectives(text, list(mesh.shape.values()), list(mesh.axis_names), unknown_trips)
    return Program(
        name,
        seconds,
        cpu_seconds,
        arguments=memory.argument_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        output=memory.output_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        collectives=tuple(found),
        while_trips=tuple(loops(text)),
    )


def learner_mesh(cfg: ConfigDict, devices: Sequence[Any]) -> Any:
    """The configuration's mesh over a slice; every chip that is not the judge's alone must have a place in it."""
    from envace_jax.build import judge_devices
    from envace_jax.model.sharding import MESH_AXES, make_mesh, set_apart

    apart = judge_devices(cfg)
    if apart:
        devices, _ = set_apart(devices, apart)
    sizes = {axis: cfg.mesh[axis] for axis in MESH_AXES}
    product = 1
    for n in sizes.values():
        product *= n
    if product != len(devices):
        asked = " x ".join(f"{axis} {n}" for axis, n in sizes.items())
        raise UserError(f"mesh ({asked}) has {product} places, plan.topology has {len(devices)} chips")
    return make_mesh(**sizes, devices=devices, whole=not apart)


def sampler_mesh(cfg: ConfigDict, slice_: Slice) -> Any:
    """The mesh of one sampler over the smallest slice that holds it."""
    from envace_jax.model.sharding import make_mesh

    tensor, expert = cfg.plan.rollout_tensor, cfg.plan.rollout_expert
    devices = tpu_devices(rollout_slice(slice_.chip, tensor * expert))
    return make_mesh(tensor=tensor, expert=expert, devices=devices)


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Shapes that carry where they lie."""
    import jax

    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def like_params(opt_state: Any, params: Any, mesh: Any) -> Any:
    """Optimizer shapes that lie as their parameters do (moments carry their parameter's path); counters are whole."""
    import jax
    from jax.sharding import NamedSharding
    from jax.tree_util import DictKey

    def key(path: Sequence[Any]) -> tuple[str, ...]:
        return tuple(k.key for k in path if isinstance(k, DictKey))

    places = {key(path): leaf.sharding for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    whole = NamedSharding(mesh, jax.P())

    def one(path: Sequence[Any], x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places.get(key(path), whole))

    return jax.tree_util.tree_map_with_path(one, opt_state)


def update_program(cfg: ConfigDict, spec: Any, mesh: Any, microbatches: int) -> Program:
    """The learner's update, with the batch of the configuration."""
    import jax
    import jax.numpy as jnp

    from envace_jax.build import lora_config
    from envace_jax.learning.learner import update_config
    from envace_jax.learning.step import Update, split_trained
    from envace_jax.model.lora import init_lora
    from envace_jax.model.qwen3 import param_shapes
    from envace_jax.model.sharding import param_shardings

    update = Update(spec, update_config(cfg, mesh), mesh)
    lora = lora_config(cfg)
    shapes = param_shapes(spec, update.options.dtype if lora else jnp.float32)
    if lora is not None:
        shapes["lora"] = jax.eval_shape(lambda: init_lora(spec, lora, jax.random.key(0)))
    params = with_shardings(shapes, param_shardings(shapes, mesh, update.rules))
    trained, _ = split_trained(params)
    opt_state = like_params(jax.eval_shape(update.optimizer.init, trained), params, mesh)
    state = {"params": params, "opt_state": opt_state, "step": jax.ShapeDtypeStruct((), jnp.int32)}
    return compile_program("update", lambda: update.lower_update(state), mesh, microbatches)


@dataclasses.dataclass(frozen=True)
class SamplerShapes:
    """What one sampler's programs are compiled for: abstract weights and cache, and the engine's ladder."""

    shapes: Any
    options: Any
    params: Any
    cache: Any
    slots: int

    @property
    def length(self) -> int:
        return self.shapes.lengths[-1]


def sampler_shapes(cfg: ConfigDict, spec: Any, mesh: Any) -> SamplerShapes:
    """The configuration's engine at its longest lanes, over one sampler's devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from envace_jax.build import engine_config
    from envace_jax.model.kv_cache import KVCache, cache_spec
    from envace_jax.model.qwen3 import ForwardOptions, flatten_heads, param_shapes
    from envace_jax.model.sharding import SAMPLER, param_shardings

    config = engine_config(cfg)
    shapes = config.shapes()
    weights = jax.eval_shape(flatten_heads, param_shapes(spec, jnp.bfloat16))
    one = jax.ShapeDtypeStruct(
        (spec.n_layers, config.slots, spec.n_kv_heads, shapes.lengths[-1], spec.head_dim),
        jnp.bfloat16,
        sharding=NamedSharding(mesh, cache_spec(SAMPLER, stacked=True)),
    )
    return SamplerShapes(
        shapes,
        ForwardOptions(dtype=jnp.bfloat16, rules=SAMPLER),
        with_shardings(weights, param_shardings(weights, mesh, SAMPLER)),
        KVCache(one, one),
        config.slots,
    )


def _whole(mesh: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Shape of a small array that every chip holds whole."""
    import jax
    from jax.sharding import NamedSharding

    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, jax.P(*(None,) * len(shape))))


def decode_program(cfg: ConfigDict, spec: Any, mesh: Any) -> Program:
    """The engine's decode program over its longest lanes."""
    import jax
    import jax.numpy as jnp

    from envace_jax.sampling import programs

    given = sampler_shapes(cfg, spec, mesh)
    chunk = given.shapes.chunk
    decode = functools.partial(programs.decode, spec=spec, options=given.options, chunk=chunk)
    state = (
        _whole(mesh, (given.slots, programs.STOPS + given.shapes.stop_ids), jnp.int32),
        _whole(mesh, (given.slots, 2), jnp.float32),
        _whole(mesh, (), jnp.int32),
    )
    lower = functools.partial(jax.jit(decode, donate_argnums=1).lower, given.params, given.cache, *state)
    return compile_program("decode", lower, mesh, chunk)


def prefill_program(cfg: ConfigDict, spec: Any, mesh: Any) -> Program:
    """The engine's largest prefill program."""
    import jax
    import jax.numpy as jnp

    from envace_jax.sampling import programs

    given = sampler_shapes(cfg, spec, mesh)
    prefill = functools.partial(programs.prefill, spec=spec, options=given.options, context=given.length)
    rows, piece = given.shapes.prefill[-1]
    work = (_whole(mesh, (rows, piece), jnp.int32), _whole(mesh, (rows, 2), jnp.int32))
    lower = functools.partial(jax.jit(prefill, donate_argnums=1).lower, given.params, given.cache, *work)
    return compile_program("prefill", lower, mesh)


def episodes_program(cfg: ConfigDict, spec: Any, mesh: Any) -> Program:
    """The program of `rollout.control=device`: whole episodes, over cache rows of their full length."""
    import jax
    import jax.numpy as jnp

    from envace_jax.build import engine_config
    from envace_jax.rehearsal.settings import EpisodeConfig
    from envace_jax.sampling import automaton, lanes

    config = engine_config(cfg)
    sizes = lanes.Sizes.of(config, EpisodeConfig.from_config(cfg))
    given = sampler_shapes(cfg, spec, mesh)
    shape = list(given.cache.k.shape)
    shape[-2] = sizes.lengths[-1]
    cache = jax.tree.map(lambda x: jax.ShapeDtypeStruct(tuple(shape), x.dtype, sharding=x.sharding), given.cache)
    small = (lanes.empty_lanes(sizes), lanes.empty_book(sizes), lanes.empty_protocol())
    state = jax.tree.map(lambda x: _whole(mesh, x.shape, x.dtype), small)
    fixed = dict(spec=spec, options=given.options, sizes=sizes, patience=config.patience)
    play = jax.jit(functools.partial(automaton.play, **fixed), donate_argnums=1)
    number = _whole(mesh, (), jnp.int32)
    lower = functools.partial(play.lower, given.params, cache, *state, number, number)
    return compile_program("episodes", lower, mesh, config.chunk)
