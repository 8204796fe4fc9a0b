"""The `import` and `export` commands."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from envace_jax.config import UserError, default_config, set_key
from envace_jax.json_files import read_json
from envace_jax.model import hub
from envace_jax.model.card import CardFacts
from envace_jax.model.hf_folder import GENERATION_CONFIG, verify_folder
from envace_jax.model.progress import progress_bar
from envace_jax.model.safetensors_io import DTYPES, sha256_file
from envace_jax.options import number, whole

DTYPE_OPTION = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
BENCHMARKS = {"bfcl": "BFCL multi-turn", "tau2": "tau2-bench airline and retail"}
"""Data sources that are benchmarks."""
assert set(DTYPE_OPTION.values()) <= DTYPES.keys()


def add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="Hugging Face folder, or owner/name on the hub")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--dtype", choices=sorted(DTYPE_OPTION), help="dtype of the weights (default: as they are)")
    _add_writing(parser)
    parser.add_argument("--revision", help="branch, tag or commit on the hub")


def _add_writing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shard_gb", type=number(0.001, 1000), default=5.0, help="limit of a weight file (default 5)")
    parser.add_argument("--overwrite", action="store_true", help="replace the folder once the new one is whole")


def run_import(args: argparse.Namespace) -> None:
    """Copies a checkpoint into a checked folder that `model.path` can name: complete, in one dtype, checksummed."""
    from envace_jax.model.hf import import_folder

    limit = int(args.shard_gb * 1e9)
    source = hub.download(args.source, args.revision) if hub.is_repo_id(args.source) else Path(args.source)
    with progress_bar() as progress:
        folder = import_folder(
            source,
            args.out,
            dtype=DTYPE_OPTION[args.dtype] if args.dtype else None,
            shard_bytes=limit,
            overwrite=args.overwrite,
            progress=progress,
        )
    print(f"{folder}: {verify_folder(folder)} files, checked; train with --config.model.path={folder}")


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="folder of a run")
    parser.add_argument("out", type=Path, help="folder to write")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=whole(0), help="checkpoint to export (default: the newest whole one)")
    which.add_argument("--best", action="store_true", help="export the step that checkpoint.best kept")
    parser.add_argument("--set", default="policy", dest="name", help="parameter set of an arm with several")
    parser.add_argument("--dtype", choices=sorted(DTYPE_OPTION), default="bfloat16", help="dtype of the weights")
    _add_writing(parser)
    parser.add_argument("--adapter", action="store_true", help="write the adapters alone, as peft loads them")
    parser.add_argument("--push_to", metavar="OWNER/NAME", help="upload the folder to this hub repository")


def _read_json(path: Path) -> dict[str, Any]:
    """What a run wrote there; empty where it did not. Raises `UserError` where it is damaged."""
    value = read_json(path) if path.exists() else {}
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object")
    return value


def _config_of(values: dict[str, Any], path: Path) -> ConfigDict:
    cfg = default_config()
    for key, value in values.items():
        try:
            set_key(cfg, key, tuple(value) if isinstance(value, list) else value)
        except TypeError:
            raise UserError(f"{path}: {key}={value!r} is not of the key's type") from None
    return cfg


def run_export(args: argparse.Namespace) -> None:
    """Writes a run's policy as a Hugging Face folder with tokenizer, template, model card and checksums."""
    import jax
    import jax.numpy as jnp

    from envace_jax.build import lora_config
    from envace_jax.learning.arms import learners_of
    from envace_jax.learning.bucket import checkpoint_place
    from envace_jax.learning.checkpoint import Checkpoints
    from envace_jax.model.card import model_card
    from envace_jax.model.hf import save_params
    from envace_jax.model.lora import init_lora, merge, save_adapter
    from envace_jax.model.qwen3 import param_shapes
    from envace_jax.model.sharding import Rules, make_mesh, param_shardings
    from envace_jax.model.spec import Qwen3Spec
    from envace_jax.text.build import chat_format

    limit = int(args.shard_gb * 1e9)
    values = _read_json(args.run_dir / "config.json")
    if not values:
        raise UserError(f"{args.run_dir}: no config.json there; expected the folder of a run")
    cfg = _config_of(values, args.run_dir / "config.json")
    sets = learners_of(cfg.learning.arm)
    if args.name not in sets:
        raise UserError(f"--set {args.name}: learning.arm={cfg.learning.arm} trains {', '.join(sets)}")
    checkpoints = Checkpoints(checkpoint_place(cfg, args.run_dir), say=print)
    step = checkpoints.best() if args.best else checkpoints.latest() if args.step is None else args.step
    if step is None:
        raise UserError(f"{checkpoints.folder}: no whole checkpoint there")
    meta = checkpoints.read_meta(step)
    spec = Qwen3Spec.from_hf_config(meta["model"])
    lora = lora_config(cfg)
    if args.adapter and lora is None:
        raise UserError("--adapter: this run trained every parameter (model.lora.rank=0)")
    shapes = param_shapes(spec, jnp.dtype(cfg.model.dtype) if lora else jnp.float32)
    if lora is not None:
        shapes["lora"] = jax.eval_shape(lambda: init_lora(spec, lora, jax.random.key(0)))
    # Over as many of the devices here as divide the model's width: float32 weights need not fit one of them.
    devices = jax.local_devices()
    cut = max(n for n in range(1, len(devices) + 1) if spec.d_model % n == 0)
    mesh = make_mesh(fsdp=cut, devices=devices)
    shapes = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        param_shardings(shapes, mesh, Rules()),
    )
    params = checkpoints.restore(step, {args.name: {"params": shapes}}, partial=True)[args.name]["params"]
    manifest = checkpoints.folder / f"step_{step:08d}.sha256"
    texts = {"README.md": model_card(args.out.name, spec, run_facts(args.run_dir, values, step))}
    if args.adapter and lora is not None:
        folder = save_adapter(
            args.out,
            params["lora"],
            spec,
            lora,
            base_model=cfg.model.path,
            texts=texts,
            overwrite=args.overwrite,
        )
        print(f"{folder}: adapters of step {step}, {verify_folder(folder)} files written and read back")
        return _push(args, folder)
    if lora is not None:
        with jax.set_mesh(mesh):
            params = merge(params, lora.alpha / lora.rank)
    chat = chat_format(cfg)
    with tempfile.TemporaryDirectory() as tokenizer_dir, progress_bar() as progress:
        chat.tokenizer.save(tokenizer_dir, chat.template())
        sampling = Path(cfg.model.path) / GENERATION_CONFIG
        if cfg.model.path and sampling.is_file():  # the base model's sampling values and ends of text
            shutil.copyfile(sampling, Path(tokenizer_dir) / GENERATION_CONFIG)
        folder = save_params(
            args.out,
            params,
            spec,
            dtype=DTYPE_OPTION[args.dtype],
            shard_bytes=limit,
            tokenizer_dir=tokenizer_dir,
            texts=texts,
            source_id=f"{sha256_file(manifest)} {args.name} {args.dtype}",
            overwrite=args.overwrite,
            progress=progress,
        )
    print(f"{folder}: step {step}, {verify_folder(folder)} files written and read back")
    _push(args, folder)


def _push(args: argparse.Namespace, folder: Path) -> None:
    if args.push_to:
        print(f"pushed: {hub.push(folder, args.push_to)}")


def run_facts(run_dir: Path, values: dict[str, Any], step: int) -> CardFacts:
    """What a run's folder says about it, for its model card."""
    data = _read_json(run_dir / "data.json")
    start = _read_json(run_dir / "start.json")
    evaluation = []
    if (run_dir / "metrics.jsonl").exists():
        from envace_jax.learning.metrics import read_metrics
        from envace_jax.learning.summary import before_and_after

        before, after = before_and_after(read_metrics(run_dir))
        evaluation = [
            {"name": name, "value": value, "before training": before.get(name, "")} for name, value in after.items()
        ]
    sources = set(str(values.get("data.source", "")).split("+"))
    seen = [title for source, title in BENCHMARKS.items() if source in sources]
    return CardFacts(
        config=values,
        data={"data.source": values.get("data.source", "unknown")} | data,
        evaluation=evaluation,
        benchmarks_seen=seen,
        step=step,
        base_model=str(values.get("model.path", "")),
        versions=start.get("packages", {}),
    )
