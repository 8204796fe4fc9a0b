"""Import and export of Hugging Face folders, with transformers as the oracle."""

from __future__ import annotations

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envace_jax.config import UserError
from envace_jax.model import hf
from envace_jax.model.hf import import_folder, load_params, save_params
from envace_jax.model.hf_folder import CHECKSUMS, verify_folder
from envace_jax.model.name_map import axis_sizes, entries, pieces
from envace_jax.model.qwen3 import ForwardOptions, forward, init_params, param_shapes, unembed
from envace_jax.model.sharding import Rules, make_mesh
from envace_jax.model.spec import PRESETS, Qwen3Spec

TOKENS = np.random.default_rng(0).integers(0, 96, (2, 17))


def our_logits(params, spec, tokens=TOKENS):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = forward(params, spec, jnp.asarray(tokens), positions, jnp.ones_like(positions))
    return np.asarray(unembed(params, hidden, ForwardOptions()))


def their_logits(model, tokens=TOKENS):
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


@pytest.mark.parametrize("name", ["tiny", "0.6b", "8b", "30b-a3b", "235b-a22b"])
@pytest.mark.quick
def test_map_covers_every_parameter_of_every_shape(name):
    spec = PRESETS[name]
    sizes = axis_sizes(spec)
    shapes = {entry.ours: entry.stack_shape(sizes) for entry in entries(spec)}
    names = [piece.name for piece in pieces(spec)]
    assert len(names) == len(set(names))
    total = sum(int(np.prod(piece.entry.their_shape(sizes))) for piece in pieces(spec))
    assert total == spec.n_params() == sum(int(np.prod(shape)) for shape in shapes.values())
    if not spec.is_moe:
        ours = jax.tree_util.tree_leaves_with_path(param_shapes(spec))
        assert shapes == {tuple(key.key for key in path): leaf.shape for path, leaf in ours}


@pytest.mark.quick
def test_every_entry_round_trips():
    sizes = {"V": 7, "D": 6, "L": 2, "H": 4, "K": 2, "h": 3, "F": 5, "E": 3}
    for entry in {*entries(PRESETS["8b"]), *entries(PRESETS["30b-a3b"])}:
        theirs = np.arange(np.prod(entry.their_shape(sizes))).reshape(entry.their_shape(sizes))
        ours = entry.to_ours(theirs, sizes)
        assert ours.shape == entry.our_shape(sizes)
        assert (entry.to_theirs(ours, sizes) == theirs).all()


@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_transformers(hf_folder, tied):
    model, folder = hf_folder(tied=tied)
    spec = Qwen3Spec.from_hf_config(folder)
    assert spec.rope_theta == 3.5e4 and spec.tie_embeddings == tied
    assert spec.head_dim != spec.d_model // spec.n_heads and spec.n_kv_heads < spec.n_heads
    params = load_params(folder, spec)
    np.testing.assert_allclose(our_logits(params, spec), their_logits(model), atol=1e-4, rtol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_export_loads_in_transformers(tied, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle")
    pytest.importorskip("torch", reason="torch is needed as the oracle")
    spec = Qwen3Spec(96, 32, 2, 4, 2, 16, 48, rope_theta=7e4, tie_embeddings=tied, eos_token_id=2, bos_token_id=None)
    params = init_params(spec, jax.random.key(1))
    folder = save_params(tmp_path / "out", params, spec, dtype="F32", shard_bytes=20_000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], (kind, info[kind])
    assert Qwen3Spec.from_hf_config(model.config.to_dict()) == spec
    np.testing.assert_allclose(our_logits(params, spec), their_logits(model), atol=1e-4, rtol=0)
    # ... and comes back as the same values.
    back = load_params(folder, spec)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), params, back))


@pytest.mark.quick
def test_round_trip_in_bfloat16_over_a_mesh(tmp_path):
    spec = PRESETS["tiny"]
    mesh = make_mesh(fsdp=4, tensor=2)
    params = init_params(spec, jax.random.key(1))
    first = save_params(tmp_path / "one", params, spec, dtype="BF16", shard_bytes=100_000)
    assert verify_folder(first) > 3
    sharded = load_params(first, spec, Rules(), mesh, jnp.bfloat16)
    assert sharded["layers"]["q"].sharding.spec == Rules().spec("layers", "embed", "heads", "head_dim")
    want = jax.tree.map(lambda x: np.asarray(x.astype(jnp.bfloat16)), params)
    assert jax.tree.all(jax.tree.map(lambda a, b: (np.asarray(a) == b).all(), sharded, want))
    second = save_params(tmp_path / "two", sharded, spec, dtype="BF16", shard_bytes=100_000)
    assert (first / CHECKSUMS).read_text() == (second / CHECKSUMS).read_text()


def test_moe_tensors_round_trip_over_a_mesh(hf_folder, tmp_path):
    import safetensors.numpy

    _, folder = hf_folder(moe=True)
    spec = Qwen3Spec.from_hf_config(folder)
    params = load_params(folder, spec, Rules(), make_mesh(expert=4, tensor=2))
    assert params["layers"]["experts_gate"].shape == (3, 8, 32, 24)
    out = save_params(tmp_path / "out", params, spec, dtype="F32")
    theirs, ours = (safetensors.numpy.load_file(f / "model.safetensors") for f in (folder, out))
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(value, ours[name], err_msg=name)


def test_import_goes_on_after_an_interruption(tmp_path):
    spec = PRESETS["tiny"]
    source = save_params(tmp_path / "source", init_params(spec, jax.random.key(2)), spec, dtype="F32")

    class Stop(Exception):
        pass

    def stop_late(done: int, total: int, what: str) -> None:
        if what == "writing" and done > 0.7 * total:
            raise Stop

    with pytest.raises(Stop):
        import_folder(source, tmp_path / "out", dtype="BF16", shard_bytes=60_000, progress=stop_late)
    staging = tmp_path / "out.partial"
    whole = sorted(staging.glob("*.safetensors"))
    assert not (tmp_path / "out").exists() and len(whole) >= 3
    with whole[0].open("r+b") as file:  # a file damaged meanwhile is written again
        file.seek(-1, 2)
        file.write(b"\x55")
    seen: list[str] = []
    import_folder(
        source, tmp_path / "out", dtype="BF16", shard_bytes=60_000, progress=lambda d, t, what: seen.append(what)
    )
    assert "found whole" in seen and "writing" in seen and not staging.exists()
    reference = import_folder(source, tmp_path / "reference", dtype="BF16", shard_bytes=60_000)
    assert (reference / CHECKSUMS).read_text() == (tmp_path / "out" / CHECKSUMS).read_text()


def test_export_goes_on_after_an_interruption_for_the_same_values_alone(tmp_path):
    spec = PRESETS["tiny"]
    params = init_params(spec, jax.random.key(2))

    class Stop(Exception):
        pass

    def stop_late(done: int, total: int, what: str) -> None:
        if what == "writing" and done > 0.7 * total:
            raise Stop

    def save(source_id, progress):
        return save_params(tmp_path / "out", params, spec, shard_bytes=60_000, source_id=source_id, progress=progress)

    def found_whole(source_id):
        with pytest.raises(Stop):
            save("step 1", stop_late)
        assert not (tmp_path / "out").exists()
        seen: list[str] = []
        folder = save(source_id, lambda done, total, what: seen.append(what))
        assert "writing" in seen and verify_folder(folder) > 3
        sums = (folder / CHECKSUMS).read_text()
        shutil.rmtree(folder)
        return seen.count("found whole"), sums

    (kept, sums), (other, others) = found_whole("step 1"), found_whole("step 2")
    assert kept >= 3 and other == 0 and sums == others


def test_a_mesh_reads_every_tensor_once(hf_folder, monkeypatch):
    _, folder = hf_folder(moe=True)
    names, read = [], hf.st.read_tensor

    def counted(path, info):
        names.append(info.name)
        return read(path, info)

    monkeypatch.setattr(hf.st, "read_tensor", counted)
    spec = Qwen3Spec.from_hf_config(folder)
    params = load_params(folder, spec, Rules(), make_mesh(fsdp=2, tensor=2, expert=2))
    assert sorted(names) == sorted(piece.name for piece in pieces(spec))
    want = load_params(folder, spec)
    assert jax.tree.all(jax.tree.map(lambda a, b: (np.asarray(a) == np.asarray(b)).all(), params, want))


@pytest.mark.quick
def test_devices_with_the_same_shard_share_one_host_copy():
    class Counted(np.ndarray):
        cuts = 0

        def __getitem__(self, index):
            Counted.cuts += 1
            return super().__getitem__(index)

    view = np.arange(32, dtype=np.float32).reshape(8, 4)
    mesh = make_mesh(fsdp=2, tensor=4)
    placed = hf._place(view.view(Counted), jax.sharding.NamedSharding(mesh, jax.P("fsdp", None)))
    np.testing.assert_array_equal(placed, view)
    assert Counted.cuts == 2  # eight devices, two different halves


def test_existing_folder_is_kept_or_replaced(tmp_path):
    spec = PRESETS["tiny"]
    params = init_params(spec, jax.random.key(0))
    save_params(tmp_path / "out", params, spec)
    with pytest.raises(UserError, match="exists already"):
        save_params(tmp_path / "out", params, spec)
    save_params(tmp_path / "out", params, spec, overwrite=True, texts={"README.md": "card"})
    assert (tmp_path / "out" / "README.md").read_text() == "card"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_damage_after_the_fact_is_noticed(tmp_path):
    spec = PRESETS["tiny"]
    folder = save_params(tmp_path / "out", init_params(spec, jax.random.key(0)), spec)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="differs from its checksum"):
        verify_folder(folder)


def test_save_refuses_a_tree_of_another_shape(tmp_path):
    spec = PRESETS["tiny"]
    params = init_params(spec, jax.random.key(0))
    with pytest.raises(UserError, match="'layers/q' is missing"):
        save_params(tmp_path / "a", {**params, "layers": {**params["layers"], "q": None}}, spec)
    with pytest.raises(UserError, match="'lm_head' has no name"):
        save_params(tmp_path / "a", {**params, "lm_head": jnp.zeros((2, 2))}, spec)
    assert not list(tmp_path.iterdir())
