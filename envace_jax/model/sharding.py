"""One table from logical to mesh axes, the mesh itself, and the few operations that use both.

Every array of the project is laid out by `Rules`: layers never name a mesh axis. Axis types are explicit, so
that an array's layout is part of its type and gradients keep the layout of their weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from envace_jax.config import UserError
from envace_jax.model.device_grid import device_grid

MESH_AXES = ("replica", "fsdp", "tensor", "expert")
Axis = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Rules:
    """Logical axis -> mesh axis (or axes, or none).

    `embed` is the axis of weights that fully-sharded data parallelism cuts; `gather` undoes it for one layer
    at a time, inside the scan, so that only one layer's whole weights exist at once. `expert_ffn` is the hidden axis of
    an expert, `ffn` that of a dense layer. `logits` is the vocabulary of computed logits (`vocab` is that of the
    weights): None for a sampler, which sorts and draws over all of it.
    """

    batch: Axis = ("replica", "fsdp", "expert")
    sequence: Axis = None
    embed: Axis = "fsdp"
    heads: Axis = "tensor"
    kv_heads: Axis = "tensor"
    head_dim: Axis = None
    ffn: Axis = "tensor"
    vocab: Axis = "tensor"
    logits: Axis = "tensor"
    experts: Axis = "expert"
    expert_ffn: Axis = "tensor"
    layers: Axis = None

    def spec(self, *logical: str | None) -> P:
        """PartitionSpec for an array whose axes carry these logical names (None = not sharded)."""
        return P(*(getattr(self, name) if name else None for name in logical))

    def gathered(self, *logical: str | None) -> P:
        """The same with the `embed` axis whole: the layout in which a weight is used."""
        return P(*(getattr(self, name) if name and name != "embed" else None for name in logical))


SAMPLER = Rules(batch=None, embed=None, logits=None, experts=("expert", "tensor"), expert_ffn=None)
"""One sampler's devices: rows whole, heads and vocabulary cut over `tensor`, experts over `expert` and `tensor`.

Every shard sees all rows, so experts stay whole: cut in four, the 768 columns of 30B-A3B are no longer tiles of 128 and
XLA for TPU copies the weights at every step."""


def mesh_active() -> bool:
    """Whether a mesh has been set (`jax.set_mesh`); without one nothing is annotated."""
    return not jax.sharding.get_abstract_mesh().empty


def layout(rules: Rules, *logical: str | None) -> P | None:
    """`out_sharding` for an operation under the current mesh, None where no mesh is set."""
    return rules.spec(*logical) if mesh_active() else None


def axes_of(axis: Axis) -> tuple[str, ...]:
    """A rule's mesh axes as a tuple."""
    return () if axis is None else (axis,) if isinstance(axis, str) else axis


def inner_sequence(rules: Rules) -> str | None:
    """How the sequence is cut inside a block: not at all where the rules cut it over the axis of the heads.

    Then only the residual stream is cut: a block's first product reads whole rows, its last one cuts them again.
    A sequence that has an axis of its own stays cut, and attention gathers keys and values along it.
    """
    return None if rules.sequence is None or rules.sequence == rules.heads else "sequence"


def enter(rules: Rules, x: jax.Array) -> jax.Array:
    """[B, T, ...] from the residual stream's layout into the one inside a block (`inner_sequence`)."""
    if not mesh_active() or rules.sequence is None or rules.sequence != rules.heads:
        return x
    return jax.reshard(x, rules.spec("batch", *(None,) * (x.ndim - 1)))


def gather(rules: Rules, x: jax.Array, *logical: str | None) -> jax.Array:
    """Brings a weight into the layout in which it is used (whole along `embed`)."""
    return jax.reshard(x, rules.gathered(*logical)) if mesh_active() else x


def set_apart(devices: Sequence[Any], count: int) -> tuple[list[Any], list[Any]]:
    """All devices but the last `count` of every process, and those; process by process.

    Raises `UserError` where a process would keep none.
    """
    own: dict[int, list[Any]] = {}
    for device in sorted(devices, key=lambda d: (d.process_index, d.id)):
        own.setdefault(device.process_index, []).append(device)
    if count >= (least := min(map(len, own.values()))):
        raise UserError(f"rewards.policy.devices={count}: a process has {least} devices, of which training needs some")
    parts = [(x[: len(x) - count], x[len(x) - count :]) for x in own.values()]
    return [d for rest, _ in parts for d in rest], [d for _, apart in parts for d in apart]


def make_mesh(
    replica: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    expert: int = 1,
    devices: Sequence[Any] | None = None,
    *,
    whole: bool = True,
) -> Mesh:
    """A named mesh with explicit axes; raises `UserError` when the sizes do not fit the devices.

    whole: see `device_grid`.
    """
    shape = (replica, fsdp, tensor, expert)
    devices = list(devices if devices is not None else jax.devices())
    want = math.prod(shape)
    if min(shape) < 1 or want > len(devices):
        sizes = ", ".join(f"mesh.{a}={n}" for a, n in zip(MESH_AXES, shape))
        raise UserError(f"{sizes} asks for {want} devices, {len(devices)} are there")
    devices, types = devices[:want], (AxisType.Explicit,) * 4
    if devices[0].platform != "tpu":
        return jax.make_mesh(shape, MESH_AXES, axis_types=types, devices=devices)
    return Mesh(device_grid(shape, devices, whole=whole), MESH_AXES, axis_types=types)


PARAM_AXES: dict[str, tuple[str | None, ...]] = {
    "embed": ("vocab", "embed"),
    "lm_head": ("embed", "vocab"),
    "final_norm": (None,),
    "layers/attn_norm": ("layers", None),
    "layers/mlp_norm": ("layers", None),
    "layers/q": ("layers", "embed", "heads", "head_dim"),
    "layers/k": ("layers", "embed", "kv_heads", "head_dim"),
    "layers/v": ("layers", "embed", "kv_heads", "head_dim"),
    "layers/o": ("layers", "heads", "head_dim", "embed"),
    "layers/q_norm": ("layers", None),
    "layers/k_norm": ("layers", None),
    "layers/gate": ("layers", "embed", "ffn"),
    "layers/up": ("layers", "embed", "ffn"),
    "layers/down": ("layers", "ffn", "embed"),
    "layers/router": ("layers", None, None),
    "layers/experts_gate": ("layers", "experts", "embed", "expert_ffn"),
    "layers/experts_up": ("layers", "experts", "embed", "expert_ffn"),
    "layers/experts_down": ("layers", "experts", "expert_ffn", "embed"),
}
"""Logical axes of every parameter, by its path in the tree."""

for _name in ("q", "k", "v", "o", "gate", "up", "down"):
    _, *_axes = PARAM_AXES[f"layers/{_name}"]
    _inner = 2 if _name == "o" else 1  # how many of a weight's axes the input is contracted with
    PARAM_AXES[f"lora/{_name}/a"] = ("layers", *_axes[:_inner], None)
    PARAM_AXES[f"lora/{_name}/b"] = ("layers", None, *_axes[_inner:])


def param_path(path: Sequence[Any]) -> str:
    """`layers/q` for a key path of `jax.tree_util`."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", k))) for k in path)


def param_shardings(params: Any, mesh: Mesh, rules: Rules) -> Any:
    """NamedShardings for a parameter tree (arrays or shapes)."""

    def one(path: Sequence[Any], leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, rules.spec(*PARAM_AXES[param_path(path)][: leaf.ndim]))

    return jax.tree_util.tree_map_with_path(one, params)
