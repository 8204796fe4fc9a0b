"""Reading and writing safetensors files one tensor at a time.

The `safetensors` package maps whole files and its NumPy loader lacks bfloat16; a 61 GB checkpoint has to pass
through a host with less memory than that. Here a header is parsed under limits before any data is touched, one
tensor is read at a time, and a file is written as a stream while its SHA-256 is taken.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length, JSON header, data).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from envace_jax.config import UserError
from envace_jax.faults import point

# The limit of the reference implementation; a real header of 235B parameters is about 4 MB.
MAX_HEADER_BYTES = 100_000_000
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Every dtype name the format knows, so that a quantised file is told apart from a damaged one.
_OTHER_DTYPES = frozenset("BOOL U8 I8 U16 I16 U32 I32 U64 I64 C64 F4 F6_E2M3 F6_E3M2 F8_E5M2 F8_E4M3 F8_E8M0".split())


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `start` counts from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def _no_duplicates(where: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise UserError(f"{where}: {key!r} appears twice in the header")
            found[key] = value
        return found

    return build


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tensor_info(where: str, name: str, entry: Any, data_start: int, data_size: int) -> TensorInfo:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise UserError(f"{where}: tensor {name!r} has no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPES:
        kind = "is stored quantised or as integers" if dtype in _OTHER_DTYPES else "has an unknown dtype"
        raise UserError(f"{where}: tensor {name!r} {kind} ({dtype!r}); use a checkpoint in {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(_is_count(n) for n in shape):
        raise UserError(f"{where}: tensor {name!r} has the impossible shape {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(n) for n in offsets):
        raise UserError(f"{where}: tensor {name!r} has the impossible data_offsets {offsets!r}")
    begin, end = offsets
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if end < begin or end - begin != size:
        raise UserError(
            f"{where}: tensor {name!r} of shape {tuple(shape)} and dtype {dtype} needs {size} bytes, "
            f"its data_offsets span {end - begin}"
        )
    if end > data_size:
        raise UserError(
            f"{where}: the file is cut off: tensor {name!r} ends at byte {data_start + end}, "
            f"the file has {data_start + data_size}; download it again"
        )
    return TensorInfo(name, dtype, tuple(shape), data_start + begin, size)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a file by name, in the order of their data. Checks the header whole; reads no data.

    Raises:
        UserError: the file is truncated, its header is too long, malformed, has duplicate names, overlapping or
            missing data, or dtypes that are not plain floats.
    """
    where = str(path)
    total = path.stat().st_size
    if total < 8:
        raise UserError(f"{where}: the file is cut off: {total} bytes, a safetensors file has at least 8")
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > MAX_HEADER_BYTES:
            raise UserError(f"{where}: header length {length} is above the limit of {MAX_HEADER_BYTES} bytes")
        if 8 + length > total:
            raise UserError(f"{where}: the file is cut off: the header says {length} bytes, {total - 8} are there")
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_no_duplicates(where))
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: the header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise UserError(f"{where}: the header is a {type(header).__name__}, expected an object")
    header.pop("__metadata__", None)
    start = 8 + length
    infos = [_tensor_info(where, name, entry, start, total - start) for name, entry in header.items()]
    infos.sort(key=lambda info: (info.start, info.size))
    position = start
    for info in infos:
        if info.start != position:
            what = "overlaps the one before it" if info.start < position else "leaves a gap before it"
            raise UserError(f"{where}: the data of tensor {info.name!r} {what}")
        position = info.start + info.size
    if position != total:
        raise UserError(f"{where}: {total - position} bytes after the last tensor belong to none")
    return {info.name: info for info in infos}


def read_tensor(path: Path, info: TensorInfo) -> np.ndarray:
    """One tensor as a fresh array in its stored dtype; nothing else of the file is held."""
    data = np.empty(info.shape, DTYPES[info.dtype])
    view = data.reshape(-1).view(np.uint8).data
    with path.open("rb", buffering=0) as file:
        file.seek(info.start)
        done = 0
        while done < info.size:
            got = file.readinto(view[done:])
            if not got:
                raise UserError(f"{path}: the file is cut off inside tensor {info.name!r}")
            done += got
    return data


@dataclass(frozen=True)
class TensorSpec:
    """A tensor about to be written: `dtype` is a key of `DTYPES`."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def write_file(
    path: Path,
    specs: Iterable[TensorSpec],
    produce: Callable[[TensorSpec], np.ndarray],
    on_tensor: Callable[[TensorSpec], None] | None = None,
) -> str:
    """Writes one file as a stream, calling `produce` for one tensor after the other; returns its SHA-256.

    The data reaches the disk (fsync) before the function returns, so a digest stands for a whole file.
    """
    specs = list(specs)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [position, position + spec.size],
        }
        position += spec.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data is aligned to 8 bytes, as the format asks
    digest = hashlib.sha256()
    point("open")
    with path.open("wb") as file:
        for piece in (struct.pack("<Q", len(text)), text):
            point("write")
            file.write(piece)
            digest.update(piece)
        for spec in specs:
            value = np.asarray(produce(spec), DTYPES[spec.dtype], order="C")
            if value.shape != spec.shape:
                raise ValueError(f"{spec.name}: produced shape {value.shape}, announced {spec.shape}")
            view = value.reshape(-1).view(np.uint8).data
            point("write")
            file.write(view)
            digest.update(view)
            if on_tensor is not None:
                on_tensor(spec)
        file.flush()
        point("fsync")
        os.fsync(file.fileno())
    return digest.hexdigest()


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file, read in pieces of 4 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()
