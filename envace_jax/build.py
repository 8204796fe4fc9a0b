"""From a configuration to the parts of a run: tokenizer, chat format, mesh, model, engine, judge.

Every command puts its parts together here, so that training, evaluation and serving cannot drift apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from envace_jax.config import UserError
from envace_jax.model import qwen3
from envace_jax.model.hf import check_tensors, load_params, locate_tensors
from envace_jax.model.hf_folder import silent
from envace_jax.model.lora import LoraConfig, init_lora
from envace_jax.model.progress import progress_bar
from envace_jax.model.sharding import Rules, make_mesh, param_shardings, set_apart
from envace_jax.model.spec import PRESETS, Qwen3Spec
from envace_jax.rewards.judge import Judge, RuleJudge
from envace_jax.sampling.engine import Engine, EngineConfig
from envace_jax.text.build import chat_format, tokenizer_folder
from envace_jax.text.chat import ChatFormat

__all__ = [
    "chat_format",
    "cache_bytes",
    "check_cache",
    "check_judge_cut",
    "checked_spec",
    "engine_config",
    "forward_options",
    "judge_config",
    "judge_devices",
    "load_model",
    "lora_config",
    "make_engine",
    "make_judge",
    "mesh_for",
    "model_spec",
    "rules_for",
    "tokenizer_folder",
]

CPU_COPIES = 1.7  # XLA on CPU holds most of a loop's cache twice: measured, 20.9 GB for a cache of 12.2 GiB


def mesh_for(cfg: ConfigDict) -> jax.sharding.Mesh | None:
    """The mesh of the configuration; None on one device, where nothing needs annotating."""
    sizes = {axis: cfg.mesh[axis] for axis in ("replica", "fsdp", "tensor", "expert")}
    total, apart = math.prod(sizes.values()), judge_devices(cfg)
    devices = set_apart(jax.devices(), apart)[0] if apart else jax.devices()
    if jax.process_count() > 1 and total != len(devices):
        beside = f" beside the {apart} that each sets apart for the judge" if apart else ""
        raise UserError(
            f"{', '.join(f'mesh.{axis}={n}' for axis, n in sizes.items())} is {total} devices: {jax.process_count()} "
            f"processes have {len(devices)}{beside}, and a run of several uses all of them "
            f"(for example --config.mesh.fsdp={len(devices)})"
        )
    if total == 1:
        return None
    return make_mesh(**sizes, devices=devices, whole=not apart)


def rules_for(cfg: ConfigDict) -> Rules:
    """The layout rules of the learner: the defaults, and the sequence cut where `mesh.sequence` says so."""
    return Rules(sequence=cfg.mesh.sequence or None)


def model_spec(cfg: ConfigDict, chat: ChatFormat | None = None) -> Qwen3Spec:
    """The model's shape: from its folder, else the named preset with the tokenizer's vocabulary where smaller."""
    if cfg.model.path:
        return Qwen3Spec.from_hf_config(cfg.model.path)
    if cfg.model.size not in PRESETS:
        raise UserError(f"model.size='{cfg.model.size}': expected one of {', '.join(PRESETS)}")
    spec = PRESETS[cfg.model.size]
    if chat is not None and chat.tokenizer.vocab_size > spec.vocab_size:
        spec = dataclasses.replace(spec, vocab_size=chat.tokenizer.vocab_size)
    return spec


def checked_spec(cfg: ConfigDict, chat: ChatFormat) -> Qwen3Spec:
    """The model's shape, after a look at its tokenizer and the headers of its files: no weight is read.

    Raises `UserError` where a tensor is missing, cut off or of another shape, or the tokenizer has pieces without an
    embedding, or the configuration asks for what the model has not.
    """
    spec = model_spec(cfg, chat)
    if chat.tokenizer.vocab_size > spec.vocab_size:
        raise UserError(
            f"the tokenizer has {chat.tokenizer.vocab_size} pieces, the model {spec.vocab_size} embeddings: "
            "model.tokenizer does not belong to model.path"
        )
    if cfg.model.replay_routing and not spec.is_moe:
        raise UserError("model.replay_routing=True: the model has no experts")
    if cfg.model.moe_exchange == "ragged" and jax.default_backend() == "cpu":
        raise UserError("model.moe_exchange=ragged: XLA has no ragged all-to-all for CPU; expected gather")
    if cfg.model.path:
        folder = Path(cfg.model.path)
        check_tensors(locate_tensors(folder), spec, str(folder))
    return spec


def load_model(
    cfg: ConfigDict,
    chat: ChatFormat,
    mesh: jax.sharding.Mesh | None,
    rules: Rules = Rules(),
    *,
    frozen: bool = False,
) -> tuple[Qwen3Spec, qwen3.Params]:
    """Spec and float32 master parameters, laid out on the mesh; random ones where no folder is named.

    `frozen` weights are in the compute dtype from the start. So are those under `model.lora`, and fresh adapters lie
    beside them, under `lora`.
    """
    spec = checked_spec(cfg, chat)
    lora = lora_config(cfg)
    dtype = jnp.dtype(cfg.model.dtype) if lora or frozen else jnp.float32  # weights that stay need no master copy
    if cfg.model.path:
        shown = cfg.metrics.progress and jax.process_index() == 0
        with progress_bar() if shown else contextlib.nullcontext(silent) as progress:
            params = load_params(Path(cfg.model.path), spec, rules, mesh, dtype, progress)
    else:
        shardings = None if mesh is None else param_shardings(qwen3.param_shapes(spec), mesh, rules)
        init = jax.jit(lambda key: qwen3.init_params(spec, key, dtype), out_shardings=shardings)
        params = init(jax.random.key(cfg.seed))
    if lora is not None:
        params = params | {"lora": init_lora(spec, lora, jax.random.key(cfg.seed))}
    return spec, params


def lora_config(cfg: ConfigDict) -> LoraConfig | None:
    """The adapters that are trained; None where every parameter is."""
    c = cfg.model.lora
    return LoraConfig(c.rank, c.alpha, tuple(c.targets)) if c.rank else None


def lora_scale(cfg: ConfigDict) -> float:
    """What the adapters' term is multiplied with."""
    return cfg.model.lora.alpha / cfg.model.lora.rank if cfg.model.lora.rank else 1.0


def forward_options(cfg: ConfigDict, rules: Rules = Rules()) -> qwen3.ForwardOptions:
    """Compute dtype, recomputation and layout of the forward pass, the same for sampler and learner."""
    return qwen3.ForwardOptions(
        dtype=jnp.dtype(cfg.model.dtype), remat=cfg.model.remat, rules=rules, lora_scale=lora_scale(cfg)
    )


def longest_row(cfg: ConfigDict) -> int:
    """Tokens of the longest ledger that the configuration allows."""
    r = cfg.rollout
    return r.max_input_tokens + max(r.max_act_tokens, r.max_rehearse_tokens)


def cache_bytes(cfg: ConfigDict, spec: Qwen3Spec, sets: int = 1) -> float:
    """Bytes of keys and values of every lane and shelf row: 2 * layers * rows * tokens * KV heads * head size.

    Each of several parameter `sets` has rows of its own. Control on the device has lanes besides, of two ledgers each.
    """
    rows = sets * (cfg.rollout.slots + max(cfg.rollout.slots, cfg.rollout.live_episodes))
    rows += 2 * cfg.rollout.slots * (cfg.rollout.control == "device")
    size = jnp.dtype(cfg.model.dtype).itemsize
    return 2.0 * spec.n_layers * rows * longest_row(cfg) * spec.n_kv_heads * spec.head_dim * size


def free_bytes(devices: Sequence[jax.Device]) -> float | None:
    """Free memory of the fullest of these devices, of the host where they are its own; None where nobody tells."""
    if devices[0].platform != "cpu":
        stats = [d.memory_stats() or {} for d in devices]
        free = [s["bytes_limit"] - s.get("bytes_in_use", 0) for s in stats if "bytes_limit" in s]
        return float(min(free)) if free else None
    try:
        line = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    return float(line.split()[1]) * 1024 / len(devices)


def check_cache(cfg: ConfigDict, spec: Qwen3Spec, mesh: jax.sharding.Mesh | None, sets: int = 1) -> None:
    """Raises `UserError` where an engine's cache would be larger than the memory that is free: a host would kill the
    process without a word."""
    devices = list(mesh.local_devices) if mesh is not None else jax.local_devices()[:1]
    need = cache_bytes(cfg, spec, sets) / (mesh.shape["tensor"] if mesh is not None else 1)
    if devices[0].platform == "cpu":
        need *= CPU_COPIES
    free = free_bytes(devices)
    if free is not None and need > free:
        raise UserError(
            f"rollout.slots={cfg.rollout.slots}: keys and values of rows of {longest_row(cfg)} tokens take about "
            f"{need / 2**30:.1f} GiB a device, {free / 2**30:.1f} GiB are free: lower rollout.max_input_tokens (with "
            "max_act_tokens and max_rehearse_tokens), rollout.slots or rollout.live_episodes"
        )


def engine_config(cfg: ConfigDict) -> EngineConfig:
    """Sizes of the rollout engine."""
    r = cfg.rollout
    return EngineConfig(
        slots=r.slots,
        shelf=max(r.slots, r.live_episodes),
        max_length=longest_row(cfg),
        chunk=r.chunk,
        prefill_chunk=r.prefill_chunk,
        draft=r.draft,
        record_routing=cfg.model.replay_routing,
    )


def make_engine(
    cfg: ConfigDict,
    spec: Qwen3Spec,
    params: qwen3.Params,
    rules: Rules = Rules(),
    mesh: jax.sharding.Mesh | None = None,
    sets: int = 1,
    config: EngineConfig | None = None,
) -> Engine:
    """A rollout engine over `params`, seeded by the run, for as many parameter `sets` as it will get.

    config: sizes, where they are not those of the configuration. Raises `UserError` where its cache has no room.
    """
    check_cache(cfg, spec, mesh, sets)
    config = config or engine_config(cfg)
    return Engine(params, spec, config, seed=cfg.seed, options=forward_options(cfg, rules), mesh=mesh)


def make_judge(cfg: ConfigDict, mesh: jax.sharding.Mesh | None = None) -> Judge:
    """The judge of the configuration: rules, an endpoint, or a policy in this process, on the engine's `mesh` or on
    devices of its own."""
    rewards = cfg.rewards
    if rewards.judge == "rules":
        return RuleJudge()
    if rewards.judge == "endpoint":
        from envace_jax.endpoint import Endpoint, EndpointSettings
        from envace_jax.rewards.model_judge import ModelJudge

        return ModelJudge(Endpoint(EndpointSettings.from_config(rewards.endpoint)), batch_items=rewards.batch_items)
    return _policy_judge(cfg, mesh)


def judge_config(cfg: ConfigDict) -> ConfigDict:
    """The configuration of the policy that judges: the run's, with its own folder, tokenizer and limits."""
    section = cfg.rewards.policy
    own = cfg.copy_and_resolve_references()
    with own.unlocked():
        own.model.path, own.model.tokenizer = section.path, ""
        own.chat.thinking, own.chat.tool_docs = True, "full"
        own.model.replay_routing, own.model.lora.rank = False, 0
        own.rollout.control = "host"  # it plays no episodes
        own.rollout.max_act_tokens = own.rollout.max_rehearse_tokens = section.max_tokens
    return own


def judge_devices(cfg: ConfigDict) -> int:
    """How many devices of each process are the judge's alone; 0 where it shares the engine's, or is no policy."""
    return int(cfg.rewards.policy.devices) if cfg.rewards.judge == "policy" else 0


def check_judge_cut(cfg: ConfigDict, spec: Qwen3Spec) -> None:
    """Raises `UserError` where a judge of this shape cannot be cut over its own devices."""
    count = judge_devices(cfg)
    for what, n in (("key/value heads", spec.n_kv_heads), ("pieces", spec.vocab_size)):
        if count and n % count:
            raise UserError(
                f"rewards.policy.devices={count}: the judge's {n} {what} cannot be cut over them; give a number that "
                "divides it"
            )


def _policy_judge(cfg: ConfigDict, mesh: jax.sharding.Mesh | None) -> Judge:
    """A frozen policy as the judge, with an engine of its own, on the mesh or on `rewards.policy.devices` of its own.

    The rollouts' engine cannot serve it: an engine's programs are compiled for one shape of model and rows of one
    length, and a judge is usually a larger model that reads more. So it has keys and values of its own
    (`rollout.slots` lanes), and its decode iterations are put between those of the rollouts, by `pump`. On its own
    devices an iteration runs beside the rollouts' next one: `pump` waits for the one begun before and begins another,
    so that verdicts do not depend on which is faster.
    """
    from envace_jax.rewards.model_judge import ModelJudge
    from envace_jax.rewards.policy_judge import PolicyBackend

    section, own = cfg.rewards.policy, judge_config(cfg)
    chat = chat_format(own)
    config = engine_config(own)
    if count := judge_devices(cfg):
        check_judge_cut(cfg, checked_spec(own, chat))
        mesh = make_mesh(tensor=count, devices=set_apart(jax.local_devices(), count)[1], whole=False)
        config = dataclasses.replace(config, spare=1.0)
    spec, params = load_model(own, chat, mesh, frozen=True)
    backend = PolicyBackend(
        make_engine(own, spec, params, rules_for(own), mesh, config=config),
        chat,
        temperature=section.temperature,
        top_p=section.top_p,
        max_tokens=section.max_tokens,
    )
    return ModelJudge(backend, batch_items=cfg.rewards.batch_items, pump=backend.pump)
