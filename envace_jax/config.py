"""One configuration tree (ml_collections), checked whole before anything is compiled.

`default_config` is the tree with our defaults; `apply_preset` turns it into the published behaviour, each
difference one named option; `validate` lists every error at once, by the key's full name.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict


class UserError(ValueError):
    """A mistake the user can mend: printed as one message without a traceback, exit status 2."""


def _endpoint() -> dict[str, Any]:
    """A section for one OpenAI-compatible endpoint (see `endpoint.EndpointSettings`)."""
    return {
        "base_url": "",
        "model": "",
        "api_key_env": "OPENAI_API_KEY",
        "temperature": 0.6,
        "top_p": 0.8,
        "max_tokens": 6000,
        "concurrency": 32,
        "requests_per_minute": 0,
        "tokens_per_minute": 0,
        "attempts": 5,
        "timeout": 120.0,
        "deadline": 600.0,
        "cache_dir": "",
    }


def default_config() -> ConfigDict:
    """The whole tree. Sizes are in tokens, times in seconds, shares in 0..1."""
    c = ConfigDict(
        {
            "preset": "default",  # default | paper | reference_code
            "seed": 0,
            "run_dir": "",  # where the run lies; empty: runs/<config name>
            "overwrite": False,  # start anew in a run_dir that holds another run
            "dry_run": False,
            "profile_steps": "",  # steps whose profile is kept, 3 or 3-5 (run_dir/profile)
            "model": {
                "path": "",  # Hugging Face folder; empty: random weights of `size`
                "size": "tiny",  # a key of model.spec.PRESETS, used where path is empty
                "tokenizer": "",  # folder or file; empty: model.path; "qwen3": the published one
                "dtype": "float32",  # compute dtype; master weights are float32
                "remat": "none",
                "attention": "xla",
                "lora": {  # low-rank adapters: they alone are trained
                    "rank": 0,  # 0: none, every parameter is trained
                    "alpha": 32.0,  # the adapters' term is scaled by alpha / rank
                    "targets": ("q", "k", "v", "o"),  # also gate, up, down (not with experts)
                },
                "moe_chunk": 0,  # tokens of a shard that go through the experts at a time; 0: all
            },
            "chat": {
                "thinking": False,
                "tool_docs": "full",  # full | none (the policy knows its tools: quickstart)
                "old_thinking": "strip",  # across turns: strip | keep
            },
            "data": {
                "source": "quickstart",  # quickstart | cm2 | bfcl | tau2 | a "+"-joined mix
                "path": "",  # CM2 file or TFDS folder for source=cm2
                "eval_path": "",
                "on_bad_record": "stop",  # stop | skip
                "train_limit": 0,  # 0: all
                "eval_limit": 0,
                "max_head_tokens": 3500,  # tasks whose first prompt is longer are dropped and counted
            },
            "rollout": {
                "control": "host",  # host | device (whole episodes in one program)
                "device_steps": 32,  # control=device: decode iterations until the host looks
                "context": "stateless",  # stateless | stream
                "grounding": "oracle",  # none | past | oracle | worldbook
                "worldbook": "",
                "rehearse_prompt": "full",  # full | compact
                "rehearse_tag": "tool_response",  # tool_response | execution_result
                "max_examples": -1,  # recorded calls shown to REHEARSE, the closest; 0: all; -1: all, compact form 2
                "show_thinking": False,  # whether REHEARSE reads ACT's thinking
                "objects_only": False,  # a rehearsed answer must be an object or a list
                "checks": ("format", "whitelist", "schema"),  # settled by the host before REHEARSE; also: exact
                "on_invalid_call": "observe",  # observe | terminate
                "on_invalid_rehearsal": "observe",
                "parser": "strict",  # strict | lenient
                "constrain": "none",  # none | act | rehearse | both: token masks keep calls and results to their shape
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": 0,
                "max_act_tokens": 8000,
                "max_rehearse_tokens": 8000,
                "max_input_tokens": 12000,
                "max_acts": 30,
                "max_segments": 200,
                "deadline": 0.0,  # 0: none
                "live_episodes": 256,
                "slots": 64,
                "chunk": 16,
                "prefill_chunk": 256,
                "simulator": _endpoint(),  # who answers calls in the arm act_only_endpoint
            },
            "rewards": {
                "judge": "rules",  # rules | endpoint | policy
                "dependence": True,  # an item passes only if those it depends on pass (EnvACE and CM2: False)
                "judge_partial_turns": False,  # a turn that was cut off is judged too (EnvACE: False, CM2: True)
                "max_checklists": 1,  # variants that count: the mean of their scores, their majority's vote to stop
                "max_no_verdict_share": 0.25,  # a batch with more trajectories without a verdict stops the run
                "batch_items": False,  # all open items of a step in one request to the judge
                # Beyond the checklist, by output (learning/shaping.py); 0: off
                "fidelity_weight": 0.0,  # times leaf F1 of a rehearsed answer against the record of its call
                "act_format_penalty": 0.0,  # for an output that cannot be read
                "rehearse_format_penalty": 0.0,
                "length_penalty": 0.0,  # reached over the last fifth of an output's token limit
                "empty_penalty": 0.0,  # for an output that says nothing
                "endpoint": _endpoint(),
                "policy": {"path": "", "temperature": 0.6, "top_p": 0.8, "max_tokens": 6000},
            },
            "learning": {
                "arm": "envace",
                "steps": 470,
                "prompts_per_step": 16,
                "group_size": 4,
                "lr": 1e-6,
                "schedule": "constant",  # constant | cosine
                "warmup_steps": 0,
                "weight_decay": 0.01,
                "beta1": 0.9,
                "beta2": 0.999,
                "grad_clip": 1.0,
                "clip_low": 0.2,
                "clip_high": 0.2,
                "kl_coef": 1e-4,
                "entropy_coef": 0.0,
                "baseline": "role",  # role | single
                "population": "outputs",  # outputs | rows | trajectories
                "std_norm": False,
                "loss_mean": "token",  # token | sequence | constant
                "ratio": "token",  # token | sequence
                "dual_clip": 0.0,  # 0: off
                "importance_cap": 0.0,  # 0: no sampler correction
                "updates_per_batch": 1,
                "epochs": 1,
                "skip_zero_advantage": True,
                "dynamic_sampling": False,
                "shuffle_advantages": False,  # the control: credit dealt at random within the batch
                "row_tokens": 20480,
                "rows_per_microbatch": 1,
                "logprob_chunk": 1024,
                "max_probability_error": 1.05,  # mean exp|dlogp| sampler to learner above this stops the run
                "spike_limit": 0.0,  # an update whose gradient norm is above it is not taken; 0: no limit
                "max_staleness": 0,  # 1: the next step's rollouts run while this step's update does
                "max_bad_steps": 5,
                "require_checks": False,  # a check of the summary that fails makes the exit status 1
            },
            "warmstart": {
                "steps": 0,
                "lr": 1e-3,
                "tasks": 0,
                "batch_rows": 64,
                "reviews": 0.0,  # share of demonstrations that also teach self-evaluation and memory
            },
            "mesh": {
                "replica": 1,
                "fsdp": 1,
                "tensor": 1,
                "expert": 1,
                "hang_timeout": 300.0,  # of several processes: seconds after which one that does not move is named
                "sequence": "",  # "tensor": cut the residual stream of training rows over the tensor axis too
            },
            "plan": {
                "topology": "",  # what `plan` compiles for: v5p:2x2x4, v5e:4x8, h100:8
                "rollout_tensor": 1,  # chips that share one sampler (they cut its heads)
                "rollout_expert": 1,  # times as many, over which a mixture's experts are cut
                "chip_hour": 0.0,  # price of one chip for one hour
                "fill": 1.0,  # tokens of a usual step, as a share of every trajectory at its limits
            },
            "checkpoint": {
                "every": 50,
                "keep": 3,
                "best": "",  # a metric of evaluations, eval/real_greedy say: the step with the highest is kept as well
                "resume": True,
                "folder": "",  # empty: run_dir; a folder or bucket (gs://...) that all processes see
            },
            "evaluation": {
                "every": 0,
                "tasks": 200,
                "at_start": False,
                "at_end": False,
                "temperature": 0.6,
                "top_p": 0.95,
                "samples": 1,
            },
            "metrics": {"tensorboard": True, "progress": True, "trajectories": True, "sinks": ()},
        }
    )
    return c.lock()


def apply_preset(cfg: ConfigDict) -> ConfigDict:
    """Sets the options of `cfg.preset` on a copy; later command-line values stand above them.

    `paper` follows the publication, `reference_code` the published code (where the two differ, or where the
    code does what the text does not say), `default` changes nothing.
    """
    presets: dict[str, dict[str, Any]] = {
        "default": {},
        "paper": {
            "rollout.checks": ("format",),
            "rollout.rehearse_tag": "execution_result",
            "chat.thinking": True,
            "rewards.dependence": False,
        },
        "reference_code": {
            "rollout.checks": ("format",),
            "rollout.rehearse_tag": "execution_result",
            "rollout.on_invalid_call": "terminate",
            "rollout.on_invalid_rehearsal": "terminate",
            "rollout.show_thinking": True,
            "rollout.objects_only": True,
            "chat.thinking": True,
            "chat.old_thinking": "keep",
            "rewards.dependence": False,
            "rewards.empty_penalty": 0.1,
            "learning.kl_coef": 0.0,
            "learning.population": "rows",
            "learning.loss_mean": "sequence",
            "learning.dual_clip": 3.0,
        },
    }
    if cfg.preset not in presets:
        raise UserError(f"preset='{cfg.preset}' is unknown; expected one of {', '.join(presets)}")
    out = cfg.copy_and_resolve_references()
    with out.unlocked():
        for key, value in presets[cfg.preset].items():
            set_key(out, key, value)
    return out


def set_key(cfg: ConfigDict, key: str, value: Any) -> None:
    """Sets `a.b.c`; raises `UserError` with the nearest known key when there is none of that name."""
    *parents, last = key.split(".")
    node = cfg
    for parent in parents:
        if not isinstance(node, ConfigDict) or parent not in node:
            raise unknown_key(cfg, key)
        node = node[parent]
    if not isinstance(node, ConfigDict) or last not in node:
        raise unknown_key(cfg, key)
    node[last] = value


def flat(cfg: ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf as (full name, value)."""
    for key in cfg:
        name = f"{prefix}{key}"
        if isinstance(cfg[key], ConfigDict):
            yield from flat(cfg[key], f"{name}.")
        else:
            yield name, cfg[key]


def unknown_key(cfg: ConfigDict, key: str) -> UserError:
    names = [name for name, _ in flat(cfg)]
    near = difflib.get_close_matches(key, names, 1, 0.5)
    hint = f"; did you mean '{near[0]}'?" if near else "; `--help` lists the keys"
    return UserError(f"config key '{key}' is unknown{hint}")


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


def _number(v: Any) -> bool:
    return isinstance(v, int | float) and not isinstance(v, bool) and v == v


ARMS = (
    "envace",
    "single_baseline",
    "per_role",
    "frozen_rehearse",
    "recorded",
    "real_env",
    "act_only_endpoint",
)
SOURCES = ("quickstart", "cm2", "bfcl", "tau2")

CHECKS: dict[str, Check] = {
    "seed": at_least(0),
    "model.dtype": one_of("float32", "bfloat16"),
    "model.remat": one_of("none", "full", "attention", "dots", "offload"),
    "model.moe_chunk": at_least(0),
    "model.lora.rank": at_least(0),
    "model.lora.alpha": above(0),
    "model.lora.targets": subset_of("q", "k", "v", "o", "gate", "up", "down"),
    "model.attention": one_of("xla", "auto", "splash", "cudnn", "chunked"),
    "chat.tool_docs": one_of("full", "none"),
    "chat.old_thinking": one_of("strip", "keep"),
    "data.source": Check(
        f"one of {', '.join(SOURCES)}, or several joined by '+'", lambda v: set(v.split("+")) <= set(SOURCES)
    ),
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
    "rollout.top_p": between(0.0, 1.0),
    "rollout.top_k": at_least(0),
    "rollout.max_act_tokens": at_least(1),
    "rollout.max_rehearse_tokens": at_least(1),
    "rollout.max_input_tokens": at_least(1),
    "rollout.max_acts": at_least(1),
    "rollout.max_segments": at_least(1),
    "rollout.deadline": at_least(0),
    "rollout.live_episodes": at_least(1),
    "rollout.slots": at_least(1),
    "rollout.chunk": at_least(1),
    "rollout.prefill_chunk": at_least(1),
    "rewards.judge": one_of("rules", "endpoint", "policy"),
    "rewards.max_checklists": at_least(1),
    "rewards.fidelity_weight": at_least(0),
    "rewards.act_format_penalty": at_least(0),
    "rewards.rehearse_format_penalty": at_least(0),
    "rewards.length_penalty": at_least(0),
    "rewards.empty_penalty": at_least(0),
    "rewards.max_no_verdict_share": between(0, 1),
    "learning.arm": one_of(*ARMS),
    "learning.steps": at_least(0),
    "learning.prompts_per_step": at_least(1),
    "learning.group_size": at_least(1),
    "learning.lr": at_least(0),
    "learning.schedule": one_of("constant", "cosine"),
    "learning.warmup_steps": at_least(0),
    "learning.weight_decay": at_least(0),
    "learning.grad_clip": above(0),
    "learning.clip_low": between(0, 1),
    "learning.clip_high": above(0),
    "learning.kl_coef": at_least(0),
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
    "warmstart.reviews": between(0, 1),
    "metrics.sinks": subset_of("wandb", "trackio", "mlflow", "prometheus"),
    "mesh.replica": at_least(1),
    "mesh.fsdp": at_least(1),
    "mesh.tensor": at_least(1),
    "mesh.expert": at_least(1),
    "mesh.hang_timeout": above(0),
    "mesh.sequence": one_of("", "tensor"),
    "plan.rollout_tensor": at_least(1),
    "plan.rollout_expert": at_least(1),
    "plan.chip_hour": at_least(0),
    "plan.fill": between(0, 1),
    "checkpoint.every": at_least(1),
    "checkpoint.keep": at_least(1),
    "evaluation.every": at_least(0),
    "evaluation.tasks": at_least(0),
    "evaluation.temperature": at_least(0),
    "evaluation.top_p": between(0, 1),
}

for _section in ("rewards.endpoint", "rollout.simulator"):
    CHECKS |= {
        f"{_section}.attempts": at_least(1),
        f"{_section}.concurrency": at_least(1),
        f"{_section}.timeout": above(0),
        f"{_section}.deadline": above(0),
        f"{_section}.max_tokens": at_least(1),
    }


DEVICE_CONTROL = {
    "rollout.context": ("stream",),
    "rollout.rehearse_tag": ("tool_response",),
    "rollout.grounding": ("none", "past", "oracle"),
    "chat.old_thinking": ("keep",),
    "learning.arm": ("envace", "single_baseline"),
    "rollout.constrain": ("none",),
}
"""What whole episodes on the device ask of a configuration: pieces that lie ready, one row a ledger, one set of
parameters, and REHEARSE alone to answer."""


def problems(cfg: ConfigDict) -> list[str]:
    """Every error of a tree, one line each: the key's full name, its value, what was expected."""
    found = []
    values = dict(flat(cfg))
    for key, check in CHECKS.items():
        try:
            ok = key in values and check.holds(values[key])
        except TypeError:
            ok = False
        if not ok:
            found.append(f"{key}={values.get(key)!r}: expected {check.expected}")
    if found:
        return found
    for key in ("model.path", "data.path", "data.eval_path", "rollout.worldbook", "rewards.policy.path"):
        if values[key] and not Path(values[key]).exists():
            found.append(f"{key}='{values[key]}': no such file or folder")
    if values["model.tokenizer"] not in ("", "qwen3") and not Path(values["model.tokenizer"]).exists():
        found.append(f"model.tokenizer='{values['model.tokenizer']}': no such file or folder")
    if "://" in values["run_dir"]:
        found.append(
            f"run_dir='{values['run_dir']}': expected a local folder; checkpoints may go to a bucket "
            "(--config.checkpoint.folder=gs://...)"
        )
    if "cm2" in values["data.source"].split("+") and not values["data.path"]:
        found.append("data.path='': data.source=cm2 needs the CM2 file (JSON, JSONL or parquet)")
    if values["rollout.grounding"] == "worldbook" and not values["rollout.worldbook"]:
        found.append("rollout.worldbook='': rollout.grounding=worldbook needs a worldbook folder")
    if values["rollout.control"] == "device":
        for key, wanted in DEVICE_CONTROL.items():
            if values[key] not in wanted:
                expected = " or ".join(map(repr, wanted))
                found.append(f"{key}={values[key]!r}: rollout.control=device needs {expected}")
    if values["rewards.judge"] == "endpoint" and not values["rewards.endpoint.base_url"]:
        found.append("rewards.endpoint.base_url='': rewards.judge=endpoint needs the judge's address")
    if values["learning.arm"] == "act_only_endpoint" and not values["rollout.simulator.base_url"]:
        found.append("rollout.simulator.base_url='': learning.arm=act_only_endpoint needs the simulator's address")
    if values["rewards.judge"] == "policy" and not values["rewards.policy.path"]:
        found.append("rewards.policy.path='': rewards.judge=policy needs a model folder")
    if values["checkpoint.best"] and not (values["evaluation.every"] or values["evaluation.at_end"]):
        found.append(f"checkpoint.best={values['checkpoint.best']!r}: needs evaluation.every or evaluation.at_end")
    if values["rewards.fidelity_weight"] and "exact" in values["rollout.checks"]:
        found.append("rewards.fidelity_weight: recorded calls never reach REHEARSE with 'exact' in rollout.checks")
    longest = values["rollout.max_input_tokens"] + max(
        values["rollout.max_act_tokens"], values["rollout.max_rehearse_tokens"]
    )
    if values["learning.row_tokens"] < longest:
        found.append(
            f"learning.row_tokens={values['learning.row_tokens']}: expected at least {longest}, the longest ledger "
            "(rollout.max_input_tokens + the larger of max_act_tokens and max_rehearse_tokens)"
        )
    return found


def validate(cfg: ConfigDict) -> None:
    """Raises one `UserError` that lists all problems."""
    if found := problems(cfg):
        raise UserError("the configuration does not hold:\n  " + "\n  ".join(found))
