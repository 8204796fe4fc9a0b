"""Hugging Face checkpoint folders: import straight into shards, export as a stream, both at any size.

Import holds one tensor on the host at a time (for a mixture of experts, one layer's experts of one kind) and
writes it into a preallocated, sharded, donated stack. Export writes tensor by tensor into one file at a time in a
staging folder beside the target, reads every file back, and renames the folder as the last act: a target folder is
whole or absent.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from envace_jax.config import UserError
from envace_jax.json_files import read_json
from envace_jax.model import safetensors_io as st
from envace_jax.model.hf_folder import INDEX, Progress, silent, write_folder
from envace_jax.model.name_map import EMBED, LM_HEAD, Entry, Piece, axis_sizes, entries, pieces
from envace_jax.model.sharding import PARAM_AXES, Rules, mesh_active
from envace_jax.model.spec import Qwen3Spec

Located = dict[str, tuple[Path, st.TensorInfo]]


# ---------------------------------------------------------------------------------------------- finding tensors


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    index = folder / INDEX
    if index.exists():
        try:
            weight_map = read_json(index)["weight_map"]
            names = sorted(set(weight_map.values()))
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index}: no usable weight_map ({error!r})") from None
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise UserError(f"{index}: {name!r} is not the name of a file in this folder")
        return [folder / name for name in names], weight_map
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        other = " (*.bin and *.pt files hold pickles and are not read)" if any(folder.glob("*.bin")) else ""
        raise UserError(f"{folder}: no *.safetensors file there{other}")
    return files, None


def locate_tensors(folder: Path) -> Located:
    """Every tensor of a checkpoint folder with its file and place, all headers checked, no data read.

    Raises:
        UserError: a file is missing, damaged or in another format, a tensor lies in two files, or the index and
            the files disagree.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; expected one with config.json and *.safetensors")
    files, weight_map = _weight_files(folder)
    located: Located = {}
    for path in files:
        if not path.exists():
            raise UserError(f"{path}: named in {INDEX} and not there; download it again")
        for name, info in st.read_header(path).items():
            if name in located:
                raise UserError(f"{path}: tensor {name!r} is also in {located[name][0].name}")
            if weight_map is not None and weight_map.get(name) != path.name:
                raise UserError(f"{path}: tensor {name!r} is here, {INDEX} says {weight_map.get(name)!r}")
            located[name] = (path, info)
    if weight_map is not None and (absent := sorted(weight_map.keys() - located.keys())):
        raise UserError(f"{folder / INDEX}: tensor {absent[0]!r} is in none of the files{_more(absent)}")
    return located


def _more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def check_tensors(located: Located, spec: Qwen3Spec, where: str) -> list[Piece]:
    """That the folder holds this model, every tensor exactly once and in its shape; returns the pieces in order.

    A tied checkpoint may carry a copy of the embedding as `lm_head.weight`; `load_params` compares the two.
    """
    sizes = axis_sizes(spec)
    wanted = list(pieces(spec))
    rest = set(located)
    missing = [piece.name for piece in wanted if piece.name not in located]
    if missing:
        raise UserError(f"{where}: tensor {missing[0]!r} is missing{_more(missing)}")
    for piece in wanted:
        rest.discard(piece.name)
        want, got = piece.entry.their_shape(sizes), located[piece.name][1].shape
        if want != got:
            raise UserError(f"{where}: tensor {piece.name!r} has shape {got}, config.json makes it {want}")
    if spec.tie_embeddings:
        rest.discard(LM_HEAD.theirs)
    if rest:
        extra = sorted(rest)
        raise UserError(f"{where}: tensor {extra[0]!r} belongs to no parameter of this model{_more(extra)}")
    return wanted


# ------------------------------------------------------------------------------------------------------ loading


@functools.partial(jax.jit, donate_argnums=0)
def _put_layer(stack: jax.Array, part: jax.Array, layer: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(stack, part[None].astype(stack.dtype), (layer, *[0] * part.ndim))


def _sharding(entry: Entry, rules: Rules, mesh: Mesh | None, *, layer: bool) -> jax.sharding.Sharding:
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    axes = PARAM_AXES["/".join(entry.ours)]
    return NamedSharding(mesh, rules.spec(*(axes[1:] if layer else axes)))


def _mesh_context(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def _key(index: Sequence[slice] | None, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(part.indices(n) for part, n in zip(index or (), shape))  # slices are no keys before Python 3.12


@functools.partial(jax.jit, static_argnums=1)
def _cast(array: jax.Array, dtype: Any) -> jax.Array:
    return array.astype(dtype)


def _place(view: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    # Each shard is cut out of the host view and transposed on its own, once for all devices that hold a copy.
    cut: dict[Any, np.ndarray] = {}

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        key = _key(index, view.shape)
        if key not in cut:
            cut[key] = np.ascontiguousarray(view[index])
        return cut[key]

    return jax.make_array_from_callback(view.shape, sharding, shard)


def _place_experts(
    read: Callable[[str], np.ndarray], entry: Entry, spec: Qwen3Spec, layer: int, sharding: jax.sharding.Sharding
) -> jax.Array:
    """One layer's experts of one kind: a process reads each expert that its devices hold once, and no others."""
    sizes = axis_sizes(spec)
    shape = (spec.n_experts, *entry.our_shape(sizes))
    found = sharding.addressable_devices_indices_map(shape).values()
    indices = {_key(index, shape): index for index in found if index is not None}
    held = {key: range(spec.n_experts)[index[0]] for key, index in indices.items()}
    shards: dict[Any, np.ndarray] = {}
    for expert in sorted(set().union(*held.values())):
        tensor = entry.to_ours(read(entry.theirs.format(layer=layer, expert=expert)), sizes)
        for key, experts in held.items():
            if expert in experts:
                part = tensor[indices[key][1:]]
                if key not in shards:
                    shards[key] = np.empty((len(experts), *part.shape), part.dtype)
                shards[key][experts.index(expert)] = part
    return jax.make_array_from_callback(shape, sharding, lambda index: shards[_key(index, shape)])


def load_params(
    folder: str | Path,
    spec: Qwen3Spec,
    rules: Rules = Rules(),
    mesh: Mesh | None = None,
    dtype: Any = jnp.float32,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Reads a Hugging Face folder into the parameter tree, sharded by `rules` over `mesh` (None: one device).

    On the host one tensor is held at a time beside the arrays themselves, in the dtype of the file.

    Raises:
        UserError: the folder is damaged or holds another model; every message names the tensor.
    """
    folder = Path(folder)
    located = locate_tensors(folder)
    check_tensors(located, spec, str(folder))
    sizes = axis_sizes(spec)
    total = sum(info.size for _, info in located.values())
    done = 0

    def read(name: str) -> np.ndarray:
        nonlocal done
        tensor = st.read_tensor(*located[name])
        done += tensor.nbytes
        progress(min(done, total), total, "reading")
        return tensor

    params: dict[str, Any] = {}
    for entry in entries(spec):
        whole = _sharding(entry, rules, mesh, layer=False)
        if not entry.stacked:
            placed = _place(entry.to_ours(read(entry.theirs), sizes), whole)
            with _mesh_context(mesh):
                value = _cast(placed, dtype)
        else:
            part_sharding = _sharding(entry, rules, mesh, layer=True)
            make = jax.jit(lambda shape=entry.stack_shape(sizes): jnp.zeros(shape, dtype), out_shardings=whole)
            value = make()
            for layer in range(spec.n_layers):
                if entry.per_expert:
                    part = _place_experts(read, entry, spec, layer, part_sharding)
                else:
                    part = _place(entry.to_ours(read(entry.theirs.format(layer=layer)), sizes), part_sharding)
                with _mesh_context(mesh):
                    value = _put_layer(value, part, jnp.int32(layer))
                value.block_until_ready()  # or the host runs ahead with a queue of tensors
        _insert(params, entry.ours, value)
    if spec.tie_embeddings and LM_HEAD.theirs in located:
        _check_tied_copy(located, folder)
    return params


def _check_tied_copy(located: Located, folder: Path) -> None:
    (head_path, head), (embed_path, embedding) = located[LM_HEAD.theirs], located[EMBED.theirs]
    same = (head.shape, head.dtype) == (embedding.shape, embedding.dtype)
    if not same or st.read_tensor(head_path, head).tobytes() != st.read_tensor(embed_path, embedding).tobytes():
        raise UserError(
            f"{folder}: tie_word_embeddings is true and {LM_HEAD.theirs!r} differs from {EMBED.theirs!r}; "
            "set it to false in config.json if the output matrix is its own"
        )


def _insert(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


# ------------------------------------------------------------------------------------------------------- saving


def _fetch(params: Mapping[str, Any], spec: Qwen3Spec, dtype: np.dtype) -> Callable[[Piece], np.ndarray]:
    """A function that brings one tensor to the host, in their axes and the output dtype."""
    sizes = axis_sizes(spec)

    @functools.partial(jax.jit, static_argnums=1)
    def whole(array: jax.Array, stacked: bool, layer: jax.Array) -> jax.Array:
        if stacked:
            array = jax.lax.dynamic_index_in_dim(array, layer, 0, keepdims=False)
        array = array.astype(dtype)
        return jax.reshard(array, P()) if mesh_active() else array

    @functools.lru_cache(maxsize=1)
    def layer_part(path: tuple[str, ...], stacked: bool, layer: int) -> np.ndarray:
        # The experts of one kind and layer come together: they are sharded among themselves.
        array: Any = functools.reduce(lambda tree, key: tree[key], path, params)
        with _mesh_context(getattr(array.sharding, "mesh", None)):
            return np.asarray(whole(array, stacked, jnp.int32(layer)).addressable_data(0))

    def fetch(piece: Piece) -> np.ndarray:
        layer = piece.index[0] if piece.index else 0
        part = layer_part(piece.entry.ours, piece.entry.stacked, layer)
        return piece.entry.to_theirs(part[piece.index[1]] if piece.entry.per_expert else part, sizes)

    return fetch


def _plan_files(spec: Qwen3Spec, dtype: str, shard_bytes: int) -> list[list[tuple[st.TensorSpec, Piece]]]:
    sizes = axis_sizes(spec)
    files: list[list[tuple[st.TensorSpec, Piece]]] = [[]]
    room = shard_bytes
    for piece in pieces(spec):
        tensor = st.TensorSpec(piece.name, dtype, piece.entry.their_shape(sizes))
        if files[-1] and tensor.size > room:
            files.append([])
            room = shard_bytes
        files[-1].append((tensor, piece))
        room -= tensor.size
    return files


def check_params(params: Mapping[str, Any], spec: Qwen3Spec) -> None:
    """That the tree holds every parameter of `spec` in its shape and nothing else (`UserError` names the first)."""
    sizes = axis_sizes(spec)
    flat = {
        tuple(str(key.key) for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(dict(params))
    }
    for entry in entries(spec):
        name, leaf = "/".join(entry.ours), flat.pop(entry.ours, None)
        if leaf is None:
            raise UserError(f"parameter {name!r} is missing; nothing was written")
        if leaf.shape != entry.stack_shape(sizes):
            raise UserError(f"parameter {name!r} has shape {leaf.shape}, expected {entry.stack_shape(sizes)}")
    if flat:
        raise UserError(f"parameter {'/'.join(min(flat))!r} has no name in a Hugging Face checkpoint")


def save_params(
    folder: str | Path,
    params: Mapping[str, Any],
    spec: Qwen3Spec,
    *,
    dtype: str = "BF16",
    shard_bytes: int = 5_000_000_000,
    tokenizer_dir: str | Path | None = None,
    texts: Mapping[str, str] | None = None,
    source_id: str | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Path:
    """Writes a Hugging Face folder: weight files, index, config, generation config, tokenizer files, checksums.

    Args:
        params: the parameter tree (sharded or not; every process of a multi-process run must call).
        dtype: a key of `safetensors_io.DTYPES`.
        shard_bytes: size limit of one weight file (a larger tensor gets a file of its own).
        tokenizer_dir: where `TOKENIZER_FILES` and `generation_config.json` are copied from.
        texts: further small files by name, written as given (model card, chat template); they win over copies.
        source_id: what identifies the values (a checkpoint's digest). With it an interrupted export goes on with
            the weight files whose digest proves whole; without it an interrupted one is thrown away.
        overwrite: replace an existing folder; the old one goes once the new one is whole.

    Raises:
        UserError: the folder exists, the tree does not fit the spec, or a file read back differs from what was
            written.
    """
    folder = Path(folder)
    if dtype not in st.DTYPES:
        raise UserError(f"export dtype {dtype!r} is unknown; expected one of {sorted(st.DTYPES)}")
    check_params(params, spec)
    fetch = _fetch(params, spec, st.DTYPES[dtype])
    files = _plan_files(spec, dtype, shard_bytes)
    if jax.process_index() != 0:
        for _, piece in (item for file in files for item in file):
            fetch(piece)
        return folder
    source_id = source_id if jax.process_count() == 1 else None
    by_name = {piece.name: piece for file in files for _, piece in file}
    return write_folder(
        folder,
        [[tensor for tensor, _ in file] for file in files],
        lambda tensor: fetch(by_name[tensor.name]),
        config=spec.to_hf_config(_torch_name(dtype)),
        tokenizer_dir=Path(tokenizer_dir) if tokenizer_dir else None,
        texts=texts or {},
        source_id=source_id,
        overwrite=overwrite,
        progress=progress,
    )


def _torch_name(dtype: str) -> str:
    return {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dtype]


def import_folder(
    source: str | Path,
    folder: str | Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Path:
    """Copies a foreign checkpoint into a checked folder of ours: complete, in one dtype, with checksums.

    Streams one tensor at a time and needs no accelerator. A run that was interrupted goes on where it stopped.

    Args:
        dtype: output dtype (a key of `safetensors_io.DTYPES`), None keeps the dtype of the embedding.
    """
    source, folder = Path(source), Path(folder)
    spec = Qwen3Spec.from_hf_config(source)
    located = locate_tensors(source)
    check_tensors(located, spec, str(source))
    if spec.tie_embeddings and LM_HEAD.theirs in located:
        _check_tied_copy(located, source)
    dtype = dtype or located[EMBED.theirs][1].dtype
    if dtype not in st.DTYPES:
        raise UserError(f"import dtype {dtype!r} is unknown; expected one of {sorted(st.DTYPES)}")
    files = [[tensor for tensor, _ in file] for file in _plan_files(spec, dtype, shard_bytes)]

    def produce(tensor: st.TensorSpec) -> np.ndarray:
        value = st.read_tensor(*located[tensor.name])
        if not np.isfinite(value).all():
            raise UserError(f"{located[tensor.name][0]}: tensor {tensor.name!r} holds NaN or infinite values")
        return value.astype(st.DTYPES[dtype], copy=False)

    state = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(source.iterdir())]
    return write_folder(
        folder,
        files,
        produce,
        config=spec.to_hf_config(_torch_name(dtype)),
        tokenizer_dir=source,
        texts={},
        source_id=f"{state}",
        overwrite=overwrite,
        progress=progress,
    )
