"""What an episode and a rollout are told: small frozen records, read from the configuration tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

CHECKS = ("format", "whitelist", "schema", "exact")
"""What the host may settle before REHEARSE is asked: malformed output, unknown tool, arguments against the schema, and
a call that is recorded exactly as it stands."""


@dataclass(frozen=True)
class EpisodeConfig:
    """The rules of an episode; names and defaults are those of the configuration's `rollout` and `rewards` sections.

    Attributes:
        context: `stateless` opens a ledger for every REHEARSE call, `stream` keeps one for the trajectory.
        rehearse_prompt: `full`, or `compact` for tiny models.
        rehearse_tag: the tag around REHEARSE's answer, `tool_response` or `execution_result`.
        objects_only: whether an answer must be a non-empty object or a list, as the reference wants it.
        show_thinking: whether REHEARSE reads ACT's thinking, as the reference lets it.
        checks: a subset of `CHECKS`.
        on_invalid_call, on_invalid_rehearsal: `observe` puts the error into the history, `terminate` ends the episode.
        parser: `strict` or `lenient`, see `text.tool_calls`.
        constrain: whose outputs are kept to their shape by token masks: `none`, `act`, `rehearse`, `both`.
        max_act_tokens, max_rehearse_tokens: limit of one output.
        max_input_tokens: limit of a prompt of either role.
        max_examples: at most so many recorded calls in a `stateless` REHEARSE prompt, the closest ones; 0 is no limit,
            -1 is no limit for the full form and 2 for the compact one.
        max_acts, max_segments: caps of an episode.
        cap_acts: `always`, or `between_turns`: `max_acts` is looked at when a turn begins alone, as in the reference.
        judged: False runs all turns without asking a judge; the trajectory then has no reward.
        dependence: whether `dependence` between checklist items counts.
        judge_partial_turns: whether a turn that was cut off is judged all the same.
        max_checklists: only the first so many checklist variants count.
    """

    context: str = "stateless"
    rehearse_prompt: str = "full"
    rehearse_tag: str = "tool_response"
    objects_only: bool = False
    show_thinking: bool = False
    checks: tuple[str, ...] = ("format", "whitelist", "schema")
    on_invalid_call: str = "observe"
    on_invalid_rehearsal: str = "observe"
    parser: str = "strict"
    constrain: str = "none"
    max_act_tokens: int = 8000
    max_rehearse_tokens: int = 8000
    max_input_tokens: int = 12000
    max_examples: int = -1
    max_acts: int = 30
    cap_acts: str = "always"
    max_segments: int = 200
    judged: bool = True
    dependence: bool = True
    judge_partial_turns: bool = False
    max_checklists: int = 1

    @staticmethod
    def from_config(cfg: Any, **changes: Any) -> EpisodeConfig:
        """From the whole configuration tree; `changes` stand above it."""
        shared = {
            name: cfg.rollout[name]
            for name in EpisodeConfig.__dataclass_fields__
            if name in cfg.rollout and name not in changes
        }
        shared["checks"] = tuple(cfg.rollout.checks)
        for name in ("dependence", "judge_partial_turns", "max_checklists"):
            shared[name] = cfg.rewards[name]
        return EpisodeConfig(**(shared | changes))


@dataclass(frozen=True)
class RolloutConfig:
    """How episodes are played over one engine.

    Attributes:
        episode: the rules of each episode.
        temperature, top_p, top_k: sampling of both roles.
        live_episodes: how many episodes are under way at once, which bounds memory.
        control: `host`, or `device`: whole episodes in one program, see `rehearsal.device_control`.
        device_steps: decode iterations after which such a program lets the host look.
        deadline: seconds an episode may take before it is cut and masked; 0 is none.
        observe_workers: threads for an observation source that waits (an endpoint); 0 calls it in line.
        act_params, rehearse_params: the engine's parameter set of each role; one and the same but in the arms with two.
    """

    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    live_episodes: int = 256
    control: str = "host"
    device_steps: int = 32
    deadline: float = 0.0
    observe_workers: int = 0
    act_params: str = "policy"
    rehearse_params: str = "policy"

    @staticmethod
    def from_config(cfg: Any, **changes: Any) -> RolloutConfig:
        """From the whole configuration tree; `changes` stand above it."""
        names = ("temperature", "top_p", "top_k", "live_episodes", "control", "device_steps", "deadline")
        shared = {name: cfg.rollout[name] for name in names}
        shared["episode"] = EpisodeConfig.from_config(cfg)
        return RolloutConfig(**(shared | changes))
