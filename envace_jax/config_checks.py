"""Which configurations hold: one check for every key that can be wrong, and the keys that need each other.

`validate` lists every error at once, by the key's full name, before anything is compiled. Nothing here imports jax.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from envace_jax.config import PRESETS, UserError, flat
from envace_jax.learning.looking import profiled
from envace_jax.model.spec import PRESETS as SIZES
from envace_jax.planning.chips import parse_slice


@dataclasses.dataclass(frozen=True)
class Check:
    """One rule on one key: what is expected, and whether a value meets it."""

    expected: str
    holds: Callable[[Any], bool]


def one_of(*values: str) -> Check:
    return Check(f"one of {', '.join(values)}", lambda v: v in values)


def at_least(low: float) -> Check:
    return Check(f"a number of at least {low}", lambda v: _number(v) and v >= low)


def above(low: float) -> Check:
    return Check(f"a number above {low}", lambda v: _number(v) and v > low)


def between(low: float, high: float) -> Check:
    return Check(f"a number from {low} to {high}", lambda v: _number(v) and low <= v <= high)


def subset_of(*values: str) -> Check:
    return Check(f"a tuple of {', '.join(values)}", lambda v: set(v) <= set(values))


def read_by(read: Callable[[str], Any], expected: str) -> Check:
    """Empty, or what `read` takes without a `UserError`."""

    def holds(value: Any) -> bool:
        try:
            return isinstance(value, str) and (not value or read(value) is not None)
        except UserError:
            return False

    return Check(expected, holds)


def _number(v: Any) -> bool:
    return isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)


ARMS = (
    "envace",
    "single_baseline",
    "per_role",
    "frozen_rehearse",
    "recorded",
    "real_env",
    "act_only_endpoint",
)
SOURCES = ("quickstart", "cm2", "bfcl", "tau2", "traces")
ENDPOINTS = ("rewards.endpoint", "rollout.simulator")
DECAY = Check("a number from 0 to below 1", lambda v: _number(v) and 0 <= v < 1)
NUCLEUS = Check("a number above 0, up to 1", lambda v: _number(v) and 0 < v <= 1)


def _sources(value: Any) -> bool:
    names = value.split("+") if isinstance(value, str) else [None]
    return set(names) <= set(SOURCES) and len(set(names)) == len(names)


CHECKS: dict[str, Check] = {
    "preset": one_of(*PRESETS),
    "profile_steps": read_by(profiled, "a step or a range such as 3 or 3-5"),
    "model.size": one_of(*SIZES),
    "seed": at_least(0),
    "model.dtype": one_of("float32", "bfloat16"),
    "model.remat": one_of("none", "full", "attention", "dots", "offload"),
    "model.moe_exchange": one_of("gather", "ragged"),
    "model.moe_chunk": at_least(0),
    "model.lora.rank": at_least(0),
    "model.lora.alpha": above(0),
    "model.lora.targets": subset_of("q", "k", "v", "o", "gate", "up", "down"),
    "model.attention": one_of("xla", "auto", "splash", "cudnn", "chunked"),
    "chat.tool_docs": one_of("full", "none"),
    "chat.old_thinking": one_of("strip", "keep"),
    "data.source": Check(f"one of {', '.join(SOURCES)}, or several, each once, joined by '+'", _sources),
    "data.on_bad_record": one_of("stop", "skip"),
    "data.train_limit": at_least(0),
    "data.eval_limit": at_least(0),
    "data.max_head_tokens": at_least(1),
    "rollout.control": one_of("host", "device"),
    "rollout.device_steps": at_least(1),
    "rollout.context": one_of("stateless", "stream"),
    "rollout.grounding": one_of("none", "past", "oracle", "worldbook"),
    "rollout.rehearse_prompt": one_of("full", "compact"),
    "rollout.rehearse_tag": one_of("tool_response", "execution_result"),
    "rollout.max_examples": at_least(-1),
    "rollout.checks": subset_of("format", "whitelist", "schema", "exact"),
    "rollout.on_invalid_call": one_of("observe", "terminate"),
    "rollout.on_invalid_rehearsal": one_of("observe", "terminate"),
    "rollout.parser": one_of("strict", "lenient"),
    "rollout.constrain": one_of("none", "act", "rehearse", "both"),
    "rollout.temperature": at_least(0),
    "rollout.top_p": NUCLEUS,
    "rollout.top_k": at_least(0),
    "rollout.max_act_tokens": at_least(1),
    "rollout.max_rehearse_tokens": at_least(1),
    "rollout.max_input_tokens": at_least(1),
    "rollout.max_acts": at_least(1),
    "rollout.cap_acts": one_of("always", "between_turns"),
    "rollout.max_segments": at_least(1),
    "rollout.deadline": at_least(0),
    "rollout.live_episodes": at_least(1),
    "rollout.slots": at_least(1),
    "rollout.chunk": at_least(1),
    "rollout.prefill_chunk": at_least(1),
    "rollout.draft": at_least(0),
    "rewards.judge": one_of("rules", "endpoint", "policy"),
    "rewards.max_checklists": at_least(1),
    "rewards.fidelity_weight": at_least(0),
    "rewards.act_format_penalty": at_least(0),
    "rewards.rehearse_format_penalty": at_least(0),
    "rewards.length_penalty": at_least(0),
    "rewards.empty_penalty": at_least(0),
    "rewards.contradiction_penalty": at_least(0),
    "rewards.max_no_verdict_share": between(0, 1),
    "rewards.policy.temperature": at_least(0),
    "rewards.policy.top_p": NUCLEUS,
    "rewards.policy.max_tokens": at_least(1),
    "rewards.policy.devices": at_least(0),
    "learning.arm": one_of(*ARMS),
    "learning.steps": at_least(0),
    "learning.prompts_per_step": at_least(1),
    "learning.group_size": at_least(1),
    "learning.lr": at_least(0),
    "learning.schedule": one_of("constant", "cosine"),
    "learning.warmup_steps": at_least(0),
    "learning.weight_decay": at_least(0),
    "learning.beta1": DECAY,
    "learning.beta2": DECAY,
    "learning.grad_clip": above(0),
    "learning.clip_low": between(0, 1),
    "learning.clip_high": above(0),
    "learning.kl_coef": at_least(0),
    "learning.entropy_coef": at_least(0),
    "learning.router_aux_coef": at_least(0),
    "learning.baseline": one_of("role", "single"),
    "learning.population": one_of("outputs", "rows", "trajectories"),
    "learning.loss_mean": one_of("token", "sequence", "constant"),
    "learning.ratio": one_of("token", "sequence"),
    "learning.dual_clip": at_least(0),
    "learning.importance_cap": at_least(0),
    "learning.updates_per_batch": at_least(1),
    "learning.epochs": at_least(1),
    "learning.row_tokens": at_least(8),
    "learning.rows_per_microbatch": at_least(1),
    "learning.logprob_chunk": at_least(1),
    "learning.max_probability_error": above(1),
    "learning.spike_limit": at_least(0),
    "learning.max_bad_steps": at_least(1),
    "learning.max_staleness": Check("0 or 1", lambda v: v in (0, 1)),
    "warmstart.steps": at_least(0),
    "warmstart.lr": at_least(0),
    "warmstart.tasks": at_least(0),
    "warmstart.batch_rows": at_least(1),
    "warmstart.reviews": between(0, 1),
    "metrics.sinks": subset_of("wandb", "trackio", "mlflow", "prometheus"),
    "mesh.replica": at_least(1),
    "mesh.fsdp": at_least(1),
    "mesh.tensor": at_least(1),
    "mesh.expert": at_least(1),
    "mesh.hang_timeout": above(0),
    "mesh.sequence": one_of("", "tensor"),
    "plan.topology": read_by(parse_slice, "CHIP:SIZES such as v5p:2x2x4, v5e:4x8 or h100:8"),
    "plan.rollout_tensor": at_least(1),
    "plan.rollout_expert": at_least(1),
    "plan.chip_hour": at_least(0),
    "plan.fill": between(0, 1),
    "checkpoint.every": at_least(1),
    "checkpoint.keep": at_least(1),
    "evaluation.every": at_least(0),
    "evaluation.tasks": at_least(0),
    "evaluation.temperature": at_least(0),
    "evaluation.top_p": NUCLEUS,
    "evaluation.samples": at_least(1),
}

for _section in ENDPOINTS:
    CHECKS |= {
        f"{_section}.base_url": Check(
            "empty, or an http:// or https:// address",
            lambda v: v == "" or bool(re.match(r"https?://[^/]", v)),
        ),
        f"{_section}.api_key_env": Check(
            "the name of an environment variable", lambda v: bool(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", v))
        ),
        f"{_section}.temperature": at_least(0),
        f"{_section}.top_p": NUCLEUS,
        f"{_section}.max_tokens": at_least(1),
        f"{_section}.concurrency": at_least(1),
        f"{_section}.requests_per_minute": at_least(0),
        f"{_section}.tokens_per_minute": at_least(0),
        f"{_section}.attempts": at_least(1),
        f"{_section}.timeout": above(0),
        f"{_section}.deadline": above(0),
    }

PATHS = ("model.path", "model.tokenizer", "data.path", "data.eval_path", "rollout.worldbook", "rewards.policy.path")
"""Files and folders that must be there, where they are named."""
UNCHECKED = (
    *PATHS,
    *("run_dir", "checkpoint.folder"),  # made where they are not there
    "checkpoint.best",  # the metrics' names are known once there are figures
    *(f"{section}.{name}" for section in ENDPOINTS for name in ("model", "cache_dir")),
)
"""The keys that are not switches and of which any text may be right."""

DEVICE_CONTROL = {
    "rollout.context": ("stream",),
    "rollout.rehearse_tag": ("tool_response",),
    "rollout.grounding": ("none", "past", "oracle"),
    "chat.old_thinking": ("keep",),
    "learning.arm": ("envace", "single_baseline"),
    "rollout.constrain": ("none",),
    "rollout.draft": (0,),
    "rollout.cap_acts": ("always",),
    "model.replay_routing": (False,),
}
"""What whole episodes on the device ask of a configuration: pieces that lie ready, one row a ledger, one set of
parameters, and REHEARSE alone to answer."""


def problems(cfg: ConfigDict) -> list[str]:
    """Every error of a tree, one line each: the key's full name, its value, what was expected."""
    found = {}
    values = dict(flat(cfg))
    for key, check in CHECKS.items():
        try:
            ok = key in values and check.holds(values[key])
        except (TypeError, AttributeError):
            ok = False
        if not ok:
            found[key] = f"{key}={values.get(key)!r}: expected {check.expected}"
    for key in UNCHECKED:
        if not isinstance(values.get(key), str):
            found[key] = f"{key}={values.get(key)!r}: expected a text"
    # What does not hold by itself cannot be held against another key.
    sound = {key: value for key, value in values.items() if key not in found}
    together = [line for keys, rule in RELATIONS if sound.keys() >= set(keys) for line in rule(sound)]
    return [*found.values(), *_missing_files(sound), *together]


def _missing_files(values: Mapping[str, Any]) -> Iterator[str]:
    for key in PATHS:
        path = values.get(key)
        if path and (key, path) != ("model.tokenizer", "qwen3") and not Path(path).exists():
            yield f"{key}='{path}': no such file or folder"


def _run_dir(v: Mapping[str, Any]) -> Iterator[str]:
    if "://" in v["run_dir"]:
        yield (
            f"run_dir='{v['run_dir']}': expected a local folder; checkpoints may go to a bucket "
            "(--config.checkpoint.folder=gs://...)"
        )


READ_FROM_FILES = {
    "cm2": "the CM2 file (JSON, JSONL or parquet)",
    "traces": "a file or folder of traces, or a folder prepared by `python -m data traces`",
}


def _data_files(v: Mapping[str, Any]) -> Iterator[str]:
    reading = [name for name in READ_FROM_FILES if name in v["data.source"].split("+")]
    for name in reading[:1] if not v["data.path"] else ():
        yield f"data.path='': data.source={name} needs {READ_FROM_FILES[name]}"
    if len(reading) > 1:
        yield f"data.source={v['data.source']}: {' and '.join(reading)} would both read data.path, take one of them"
    for key in ("data.path", "data.eval_path"):
        if v[key] and not reading:
            yield f"{key}='{v[key]}': data.source={v['data.source']} does not read it (cm2 and traces do)"


def _worldbook(v: Mapping[str, Any]) -> Iterator[str]:
    if v["rollout.grounding"] == "worldbook" and not v["rollout.worldbook"]:
        yield "rollout.worldbook='': rollout.grounding=worldbook needs a worldbook folder"


def _contradictions(v: Mapping[str, Any]) -> Iterator[str]:
    if v["rewards.contradiction_penalty"] and not v["rollout.worldbook"]:
        yield f"rewards.contradiction_penalty={v['rewards.contradiction_penalty']}: needs a folder in rollout.worldbook"


def _draft(v: Mapping[str, Any]) -> Iterator[str]:
    if v["rollout.draft"] >= v["rollout.chunk"]:
        yield f"rollout.draft={v['rollout.draft']}: expected less than rollout.chunk={v['rollout.chunk']}"


def _device_control(v: Mapping[str, Any]) -> Iterator[str]:
    if v["rollout.control"] == "device":
        for key, wanted in DEVICE_CONTROL.items():
            if v[key] not in wanted:
                yield f"{key}={v[key]!r}: rollout.control=device needs {' or '.join(map(repr, wanted))}"


def _endpoint(section: str, key: str, value: str, who: str) -> Callable[[Mapping[str, Any]], Iterator[str]]:
    """Address and model of an endpoint, where `key` has the value that makes use of it."""

    def rule(v: Mapping[str, Any]) -> Iterator[str]:
        if v[key] == value:
            if not v[f"{section}.base_url"]:
                yield f"{section}.base_url='': {key}={value} needs the {who}'s address"
            if not v[f"{section}.model"]:
                yield f"{section}.model='': {key}={value} needs the name of a model that the endpoint serves"

    return rule


def _policy_judge(v: Mapping[str, Any]) -> Iterator[str]:
    if v["rewards.judge"] == "policy" and not v["rewards.policy.path"]:
        yield "rewards.policy.path='': rewards.judge=policy needs a model folder"
    if v["rewards.policy.devices"] and v["rewards.judge"] != "policy":
        yield f"rewards.policy.devices={v['rewards.policy.devices']}: only rewards.judge=policy has devices of its own"


def _best(v: Mapping[str, Any]) -> Iterator[str]:
    if v["checkpoint.best"] and not (v["evaluation.every"] or v["evaluation.at_end"]):
        yield f"checkpoint.best={v['checkpoint.best']!r}: needs evaluation.every or evaluation.at_end"


def _fidelity(v: Mapping[str, Any]) -> Iterator[str]:
    if v["rewards.fidelity_weight"] and "exact" in v["rollout.checks"]:
        yield "rewards.fidelity_weight: recorded calls never reach REHEARSE with 'exact' in rollout.checks"


def _row_tokens(v: Mapping[str, Any]) -> Iterator[str]:
    longest = v["rollout.max_input_tokens"] + max(v["rollout.max_act_tokens"], v["rollout.max_rehearse_tokens"])
    if v["learning.row_tokens"] < longest:
        yield (
            f"learning.row_tokens={v['learning.row_tokens']}: expected at least {longest}, the longest ledger "
            "(rollout.max_input_tokens + the larger of max_act_tokens and max_rehearse_tokens)"
        )


LIMITS = ("rollout.max_input_tokens", "rollout.max_act_tokens", "rollout.max_rehearse_tokens")
RELATIONS: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, Any]], Iterator[str]]], ...] = (
    (("run_dir",), _run_dir),
    (("data.source", "data.path", "data.eval_path"), _data_files),
    (("rollout.grounding", "rollout.worldbook"), _worldbook),
    (("rewards.contradiction_penalty", "rollout.worldbook"), _contradictions),
    (("rollout.draft", "rollout.chunk"), _draft),
    (("rollout.control", *DEVICE_CONTROL), _device_control),
    (
        ("rewards.judge", "rewards.endpoint.base_url", "rewards.endpoint.model"),
        _endpoint("rewards.endpoint", "rewards.judge", "endpoint", "judge"),
    ),
    (
        ("learning.arm", "rollout.simulator.base_url", "rollout.simulator.model"),
        _endpoint("rollout.simulator", "learning.arm", "act_only_endpoint", "simulator"),
    ),
    (("rewards.judge", "rewards.policy.path", "rewards.policy.devices"), _policy_judge),
    (("checkpoint.best", "evaluation.every", "evaluation.at_end"), _best),
    (("rewards.fidelity_weight", "rollout.checks"), _fidelity),
    (("learning.row_tokens", *LIMITS), _row_tokens),
)
"""Keys that need each other: which they are, and the rule, which is asked once each of them holds by itself."""


def validate(cfg: ConfigDict, unread: Sequence[str] = ()) -> None:
    """Raises one `UserError` that lists all problems but those of the sections `unread`."""
    if found := [line for line in problems(cfg) if line.partition(".")[0] not in unread]:
        raise UserError("the configuration does not hold:\n  " + "\n  ".join(found))
