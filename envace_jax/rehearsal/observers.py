"""Where observations come from in the arms that do not rehearse: records, a real environment, an outside simulator.

An observer is called as `observe(task, call, state)` and returns an `Observation`. It may keep something for an
episode; `forget(state)`, where it has one, is called when the episode is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from envace_jax.datasets.cm2 import Task
from envace_jax.environments import Environment, make_environment
from envace_jax.rehearsal.episode import EpisodeState, error_observation, scene, times_called
from envace_jax.rehearsal.grounding import exact_record
from envace_jax.rehearsal.state import REHEARSE_PROMPT_TOO_LONG, TOO_LONG
from envace_jax.text.tool_calls import parse_execution_result
from envace_jax.text.transcript import Observation, ToolCall, canonical_json

NO_RECORDED_RESPONSE = "NO_RECORDED_RESPONSE"


class Observer(Protocol):
    """A source of observations."""

    def __call__(self, task: Task, call: ToolCall, state: EpisodeState) -> Observation: ...


def observe_recorded(task: Task, call: ToolCall, state: EpisodeState) -> Observation:
    """The recorded result of exactly this call, else the error `NO_RECORDED_RESPONSE`."""
    record = exact_record(task, call, seen=times_called(state, call))
    if record is None:
        return error_observation(NO_RECORDED_RESPONSE, f"no response is recorded for this call of {call.name}")
    return Observation(record.result, "recorded")


class RealObserver:
    """A real environment for every episode, made when it is first asked."""

    def __init__(self, make: Callable[[Task], Environment] = make_environment) -> None:
        self._make = make
        self._live: dict[tuple[int, int], Environment] = {}

    def __call__(self, task: Task, call: ToolCall, state: EpisodeState) -> Observation:
        key = (state.group, state.member)
        if key not in self._live:
            self._live[key] = self._make(task)
        return Observation(canonical_json(self._live[key].step(call.name, call.arguments)), "real")

    def environment(self, state: EpisodeState) -> Environment | None:
        """The episode's environment, if it has been asked anything."""
        return self._live.get((state.group, state.member))

    def forget(self, state: EpisodeState) -> None:
        self._live.pop((state.group, state.member), None)


class EndpointObserver:
    """A simulator outside the engine: `ask(system, user)` gets what REHEARSE would get and returns its text."""

    def __init__(self, ask: Callable[[str, str], str]) -> None:
        self._ask = ask

    def __call__(self, task: Task, call: ToolCall, state: EpisodeState) -> Observation:
        asked = state.setting.writer.messages(scene(state))
        if asked is None:
            return error_observation(REHEARSE_PROMPT_TOO_LONG, TOO_LONG)
        parsed = parse_execution_result(self._ask(*asked))
        if parsed.error_code is not None:
            return error_observation(parsed.error_code, parsed.message or "")
        return Observation(parsed.value_text, "endpoint")
