"""Damaged and hostile checkpoint files: one clear error, before data is touched."""

from __future__ import annotations

import json
import struct

import jax
import ml_dtypes
import numpy as np
import pytest

from envace_jax.config import UserError
from envace_jax.model import safetensors_io as st
from envace_jax.model.hf import INDEX, load_params, save_params
from envace_jax.model.qwen3 import init_params
from envace_jax.model.spec import PRESETS

pytestmark = pytest.mark.quick


def write(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin, end, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        ({}, b"", 1 << 62, "above the limit"),
        ({}, b"", 4000, "cut off"),
        (b"{", b"", None, "not JSON"),
        (b"[" * 100_000, b"", None, "not JSON"),
        (b"[]", b"", None, "expected an object"),
        (b'{"a": {}, "a": {}}', b"", None, "appears twice"),
        ({"a": 3}, b"", None, "no dtype"),
        ({"a": entry(0, 8)}, b"1234", None, "cut off"),
        ({"a": entry(0, 4)}, b"1234", None, "needs 8 bytes"),
        ({"a": entry(-8, 0)}, b"", None, "impossible data_offsets"),
        ({"a": entry(0, 8, shape=(-2,))}, b"12345678", None, "impossible shape"),
        ({"a": entry(0, 8, shape=(1 << 40, 1 << 40))}, b"12345678", None, "needs"),
        ({"a": entry(0, 8, shape=(True,))}, b"12345678", None, "impossible shape"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, b"123456781234", None, "overlaps"),
        ({"a": entry(4, 12)}, b"123456781234", None, "leaves a gap"),
        ({"a": entry(0, 8)}, b"1234567812", None, "belong to none"),
        ({"a": entry(0, 2, dtype="F8_E4M3")}, b"12", None, "quantised"),
        ({"a": entry(0, 2, dtype="F99")}, b"12", None, "unknown dtype"),
    ],
)
def test_bad_header(tmp_path, header, data, length, message):
    with pytest.raises(UserError, match=message):
        st.read_header(write(tmp_path / "x.safetensors", header, data, length))


def test_empty_file(tmp_path):
    (tmp_path / "x").write_bytes(b"")
    with pytest.raises(UserError, match="cut off"):
        st.read_header(tmp_path / "x")


def test_written_file_reads_back_and_in_the_safetensors_package(tmp_path):
    safe_open = pytest.importorskip("safetensors").safe_open
    values = {"a": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3), "b": np.float32(2.5).reshape(())}
    specs = [st.TensorSpec("a", "BF16", (2, 3)), st.TensorSpec("b", "F32", ())]
    digest = st.write_file(tmp_path / "x", specs, lambda spec: values[spec.name])
    assert digest == st.sha256_file(tmp_path / "x")
    header = st.read_header(tmp_path / "x")
    for name, value in values.items():
        got = st.read_tensor(tmp_path / "x", header[name])
        assert got.dtype == value.dtype and (got == value).all()
    with safe_open(tmp_path / "x", framework="numpy") as file:
        assert set(file.keys()) == {"a", "b"} and file.get_tensor("b") == 2.5


@pytest.fixture
def folder(tmp_path):
    spec = PRESETS["tiny"]
    return save_params(tmp_path / "m", init_params(spec, jax.random.key(0)), spec, shard_bytes=150_000)


def edit(path, change):
    """Rewrites one file with its tensors changed by `change(dict)`."""
    header = st.read_header(path)
    tensors = {name: st.read_tensor(path, info) for name, info in header.items()}
    change(tensors)
    specs = [st.TensorSpec(name, st.DTYPE_NAMES[value.dtype], value.shape) for name, value in tensors.items()]
    st.write_file(path, specs, lambda spec: tensors[spec.name])


def test_folder_errors_name_the_tensor(folder):
    spec = PRESETS["tiny"]
    files = sorted(folder.glob("*.safetensors"))
    index = json.loads((folder / INDEX).read_text())
    name = next(name for name, file in index["weight_map"].items() if "q_proj" in name and file == files[1].name)

    def expect(message):
        with pytest.raises(UserError, match=message):
            load_params(folder, spec)

    whole = {path: path.read_bytes() for path in folder.iterdir()}

    def restore():
        for path, data in whole.items():
            path.write_bytes(data)

    files[1].write_bytes(whole[files[1]][:-10])
    expect("cut off")
    restore()
    files[1].unlink()
    expect("not there")
    restore()
    edit(files[1], lambda tensors: tensors.pop(name))
    expect(f"'{name}' is in none of the files")
    (folder / INDEX).unlink()
    expect(f"'{name}' is missing")
    restore()
    edit(files[1], lambda tensors: tensors.update({name: tensors[name].T.copy()}))
    expect(f"'{name}' has shape")
    restore()
    edit(files[0], lambda tensors: tensors.update({name: np.zeros(3, np.float32)}))
    expect("says 'model-00002")
    (folder / INDEX).unlink()
    expect("is also in")
    restore()
    (folder / INDEX).unlink()
    edit(files[0], lambda tensors: tensors.update({"model.rotary.inv_freq": np.zeros(3, np.float32)}))
    expect("'model.rotary.inv_freq' belongs to no parameter")
    restore()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "../../secret.safetensors"}}))
    expect("not the name of a file in this folder")
    restore()
    load_params(folder, spec)


def test_tied_copy_must_equal_the_embedding(tmp_path):
    spec = PRESETS["tiny"]
    folder = save_params(tmp_path / "m", init_params(spec, jax.random.key(0)), spec)
    path = folder / "model.safetensors"
    edit(path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}))
    load_params(folder, spec)
    edit(path, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"] + 1}))
    with pytest.raises(UserError, match="differs from 'model.embed_tokens.weight'"):
        load_params(folder, spec)


def test_pickles_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match="pickles"):
        load_params(tmp_path, PRESETS["tiny"])
