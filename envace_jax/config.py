"""One configuration tree (ml_collections).

`default_config` is the tree with our defaults; `apply_preset` turns it into the published behaviour, each
difference one named option. `config_checks` says which values hold, `config_file` reads a tree from a file.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator
from contextvars import ContextVar
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


_base: ContextVar[str] = ContextVar("_base", default="default")


@contextlib.contextmanager
def based_on(preset: str) -> Iterator[None]:
    """While the block runs, `default_config` has the values of a preset: what is set on top of them stands."""
    token = _base.set(preset)
    try:
        yield
    finally:
        _base.reset(token)


def default_config() -> ConfigDict:
    """The whole tree. Sizes are in tokens, times in seconds, shares in 0..1."""
    c = ConfigDict(
        {
            "preset": _base.get(),  # default | paper | reference_code
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
                "moe_exchange": "gather",  # between expert shards: gather | ragged (TPU and GPU only, never run)
                "moe_chunk": 0,  # tokens of a shard that go through the experts at a time; 0: all
                "replay_routing": False,  # the learner sends tokens to the experts that the sampler sent them to
            },
            "chat": {
                "thinking": False,
                "tool_docs": "full",  # full | none (the policy knows its tools: quickstart)
                "old_thinking": "strip",  # across turns: strip | keep
            },
            "data": {
                "source": "quickstart",  # quickstart | cm2 | bfcl | tau2 | traces | a "+"-joined mix
                "path": "",  # CM2 file, traces, or TFDS folder for source=cm2 or traces
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
                "cap_acts": "always",  # always | between_turns: calls within one turn do not meet max_acts
                "max_segments": 200,
                "deadline": 0.0,  # 0: none
                "live_episodes": 256,
                "slots": 64,
                "chunk": 16,
                "prefill_chunk": 256,
                "draft": 0,  # tokens that prompt look-up guesses ahead of every row; 0: off. Outputs stay the same
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
                "contradiction_penalty": 0.0,  # for a rehearsed answer that a rule of rollout.worldbook contradicts
                "endpoint": _endpoint(),
                "policy": {"path": "", "temperature": 0.6, "top_p": 0.8, "max_tokens": 6000, "devices": 0},
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
                "router_aux_coef": 0.0,  # weight of the load-balancing loss of a mixture of experts; 0: off
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
                "max_probability_error": 1.05,  # mean exp|dlogp| sampler to learner, trained rows: above it a run ends
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
    return apply_preset(c.lock())


PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {
        "rollout.checks": ("format",),
        "rollout.rehearse_tag": "execution_result",
        "chat.thinking": True,
        "rewards.dependence": False,
        "rewards.judge": "endpoint",
        "rewards.endpoint.model": "Qwen/Qwen3-30B-A3B",
        "evaluation.samples": 4,
    },
    "reference_code": {
        "rollout.checks": ("format",),
        "rollout.rehearse_tag": "execution_result",
        "rollout.on_invalid_call": "terminate",
        "rollout.on_invalid_rehearsal": "terminate",
        "rollout.show_thinking": True,
        "rollout.objects_only": True,
        "rollout.cap_acts": "between_turns",
        "chat.thinking": True,
        "chat.old_thinking": "keep",
        "rewards.dependence": False,
        "rewards.judge": "endpoint",
        "rewards.endpoint.model": "Qwen/Qwen3-30B-A3B",
        "rewards.empty_penalty": 0.1,
        "evaluation.every": 10,
        "evaluation.samples": 4,
        "learning.kl_coef": 0.0,
        "learning.population": "rows",
        "learning.loss_mean": "sequence",
        "learning.dual_clip": 3.0,
    },
}
"""What each preset sets, by full key name."""


def apply_preset(cfg: ConfigDict) -> ConfigDict:
    """Sets the options of `cfg.preset` on a copy; what is set later stands above them.

    `paper` follows the publication, `reference_code` the published code (where the two differ, or where the
    code does what the text does not say), `default` changes nothing.
    """
    if cfg.preset not in PRESETS:
        raise UserError(f"preset='{cfg.preset}' is unknown; expected one of {', '.join(PRESETS)}")
    out = cfg.copy_and_resolve_references()
    for key, value in PRESETS[cfg.preset].items():
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
    hint = f"; did you mean '{near[0]}'?" if near else "; `envace_jax config` lists the keys"
    return UserError(f"config key '{key}' is unknown{hint}")
