"""Where an episode stands, what it can wait for, and how it can end."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from envace_jax.datasets.cm2 import ChecklistItem, Task
from envace_jax.rehearsal.grounding import Grounding, OracleGrounding
from envace_jax.rehearsal.ledger import Row, Segment
from envace_jax.rehearsal.prompts import PromptWriter
from envace_jax.rehearsal.settings import EpisodeConfig
from envace_jax.rehearsal.trajectory import Verdicts
from envace_jax.text.transcript import AssistantOutput, Observation, Role, Step, ToolCall, Transcript, Turn

if TYPE_CHECKING:
    from envace_jax.text.chat import ChatFormat
    from envace_jax.text.constrain import Constrainer

LENGTH_EXCEEDED = "LENGTH_EXCEEDED"
REHEARSAL_TRUNCATED = "REHEARSAL_TRUNCATED"
REHEARSE_PROMPT_TOO_LONG = "REHEARSE_PROMPT_TOO_LONG"
TOO_LONG = "the tool could not be asked: the request does not fit its input limit"  # the message of that error
REHEARSED_ERROR = "REHEARSED_ERROR"
"""REHEARSE answered with an error whose code is none of the known ones."""
KNOWN_REHEARSED = ("INVALID_TOOL_CALL_FORMAT", "TOOL_NOT_AVAILABLE", "INVALID_PARAMETERS", "SCHEMA_VALIDATION_FAILED")

END_REASONS = (
    "completed",  # the last user turn was judged
    "vote",  # the checklists voted to stop
    "invalid_call",  # on_invalid_call=terminate
    "invalid_rehearsal",  # on_invalid_rehearsal=terminate
    "truncated",  # an ACT output hit its token limit
    "length",  # the context limit: LENGTH_EXCEEDED
    "max_acts",
    "max_segments",
    "empty_checklist",  # nothing to score: masked
    "judge",  # no verdict: masked
    "masked",  # cut from outside: deadline, cancelled, nan, observation outage
)


class Phase(enum.StrEnum):
    """What a state waits for."""

    ACT = "act"
    REHEARSE = "rehearse"
    OBSERVE = "observe"
    VERDICTS = "verdicts"
    DONE = "done"


@dataclass(frozen=True)
class Need:
    """A segment is needed: sample `max_tokens` at most from `prompt_ids`, which are row `row` as it stands.

    `continues` says that the row goes on after this segment (its keys and values are worth keeping).
    """

    role: Role
    prompt_ids: tuple[int, ...]
    max_tokens: int
    segment: int
    row: int
    continues: bool


@dataclass(frozen=True)
class NeedObservation:
    """An outside source must answer `call`."""

    call: ToolCall


@dataclass(frozen=True)
class NeedVerdicts:
    """The last turn of `transcript` must be judged on `items[variant][item]`."""

    transcript: Transcript
    items: tuple[tuple[ChecklistItem, ...], ...]


@dataclass(frozen=True)
class Done:
    """The episode is over; `trajectory(state)` is its record."""


@dataclass(frozen=True)
class Setting:
    """What stays the same over an episode, and mostly over a rollout.

    `outside` sends calls to an observation source instead of REHEARSE (the arms without rehearsal). `constrainer`
    compiles the shapes of outputs where `cfg.constrain` asks for it.
    """

    chat: ChatFormat
    cfg: EpisodeConfig
    writer: PromptWriter
    grounding: Grounding
    outside: bool = False
    constrainer: Constrainer | None = None

    @staticmethod
    def make(
        chat: ChatFormat, cfg: EpisodeConfig, grounding: Grounding | None = None, outside: bool = False
    ) -> Setting:
        constrainer = None
        if cfg.constrain != "none":
            from envace_jax.text.constrain import Constrainer

            constrainer = Constrainer(chat.tokenizer, chat.stop_ids, thinking=chat.thinking)
        return Setting(chat, cfg, PromptWriter(chat, cfg), grounding or OracleGrounding(), outside, constrainer)


@dataclass(frozen=True)
class EpisodeState:
    """Where an episode stands. `turn` counts from 0; `transcript` has the turns that are over.

    `output` is ACT's latest output while its calls are being answered, `observations` the answers so far, and `pieces`
    the same as they go into ACT's row: text, or ids as REHEARSE sampled them.
    """

    setting: Setting
    task: Task
    group: int = 0
    member: int = 0
    phase: Phase = Phase.ACT
    turn: int = 0
    transcript: Transcript = ()
    steps: tuple[Step, ...] = ()
    output: AssistantOutput | None = None
    observations: tuple[Observation, ...] = ()
    pieces: tuple[str | tuple[int, ...], ...] = ()
    rows: tuple[Row, ...] = ()
    segments: tuple[Segment, ...] = ()
    act_row: int = 0
    rehearse_row: int | None = None
    news: tuple[str, ...] = ()  # entries that the stream ledger has not been told
    told: frozenset[str] = frozenset()  # grounding that it has been told
    verdicts: Verdicts = ()
    judged: Mapping[str, float] = field(default_factory=dict)  # what judging cost, and missing verdicts by cause
    error_codes: tuple[str, ...] = ()
    ending: str | None = None  # why the episode ends once the verdicts of its last turn are in
    end_reason: str = ""
    masked_cause: str | None = None

    def but(self, **changes: Any) -> EpisodeState:
        """The state with some fields changed: `dataclasses.replace` without its checks, which dominated host time."""
        new = object.__new__(EpisodeState)
        new.__dict__.update(self.__dict__, **changes)
        return new

    @property
    def acts(self) -> int:
        """How many ACT outputs there have been."""
        return sum(segment.role is Role.ACT for segment in self.segments)

    @property
    def checklists(self) -> tuple[tuple[tuple[ChecklistItem, ...], ...], ...]:
        """The checklist variants that count."""
        return self.task.checklists[: self.setting.cfg.max_checklists]

    @property
    def history(self) -> Transcript:
        """The turns so far, the current one included as far as its steps are complete."""
        return (*self.transcript, Turn(self.task.user_turns[self.turn], self.steps))

    @property
    def call(self) -> ToolCall | None:
        """The call that is to be answered next; a malformed output that REHEARSE must answer has none."""
        if self.output is None or not self.output.calls:
            return None
        return self.output.calls[len(self.observations)]
