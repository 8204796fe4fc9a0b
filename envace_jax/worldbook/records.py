"""The artifacts of a worldbook: frozen records with provenance, one JSON codec, content hashes."""

from __future__ import annotations

import hashlib
import json
import types
import typing
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar

from envace_jax.config import UserError

SCHEMA_VERSION = "1"
EXECUTABLE_CONFIDENCE = 0.55
FAST_PATH_CONFIDENCE = 0.9

Outcome = Literal["success", "failure", "partial", "unknown"]
FactStatus = Literal["observed", "inferred", "hypothesized", "conflicted"]
RuleStatus = Literal["supported", "tentative", "conflicted", "deprecated"]
EFFECT_OPS = (
    "set", "create", "delete", "increment", "decrement", "append", "merge", "remove", "forget", "schedule",
)  # fmt: skip


class RecordError(UserError):
    """A record that does not have the stated shape; the message names the place."""


@dataclass(frozen=True)
class SourceRef:
    """Where a claim comes from: a source file or built-in, an episode, events of it, a short verbatim excerpt."""

    source_id: str
    episode_id: str = ""
    event_ids: tuple[str, ...] = ()
    locator: str = ""
    excerpt: str = ""


@dataclass(frozen=True)
class ArgumentSpec:
    type: str = "any"
    required: bool = False
    description: str = ""
    enum: tuple[Any, ...] = ()


@dataclass(frozen=True)
class ActionSpec:
    """One action of the environment: its arguments and other names it goes by."""

    name: str
    description: str = ""
    arguments: dict[str, ArgumentSpec] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    provenance: tuple[SourceRef, ...] = ()


@dataclass(frozen=True)
class StateField:
    """A declared place of the state; ``*`` in the path stands for any key. Its first segment is its visibility."""

    path: str
    type: Literal["string", "integer", "number", "boolean", "object", "array", "any"] = "any"
    description: str = ""
    default: Any = None
    mutable: bool = True
    aliases: tuple[str, ...] = ()
    provenance: tuple[SourceRef, ...] = ()

    @property
    def visibility(self) -> str:
        return self.path.split(".", 1)[0].split("[", 1)[0]


@dataclass(frozen=True)
class TransitionSlice:
    """One aligned action with its observation, and what stood before it (ids only: texts stay in the episode)."""

    id: str
    episode_id: str
    group: str
    index: int
    action_event_ids: tuple[str, ...]
    observation_event_ids: tuple[str, ...]
    history_event_ids: tuple[str, ...] = ()
    concurrent_event_ids: tuple[str, ...] = ()
    alignment: Literal["correlated", "sequential", "ambiguous"] = "sequential"
    ambiguities: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether rules may rest on it."""
        return self.alignment != "ambiguous" and not self.ambiguities and not self.concurrent_event_ids


@dataclass(frozen=True)
class Confidence:
    value: float = 0.0
    rationale: str = ""


@dataclass(frozen=True)
class Fact:
    subject: str
    predicate: Literal["equals", "contains", "not_contains", "exists", "not_exists"] = "equals"
    value: Any = None
    status: FactStatus = "observed"
    confidence: float = 1.0
    provenance: tuple[SourceRef, ...] = ()


@dataclass(frozen=True)
class StateMutation:
    """A change of state: operation, path (a path text, or a list of segments and terms), value term, delay."""

    op: str
    path: Any
    value: Any = None
    delay_steps: int = 0

    def __post_init__(self) -> None:
        if self.op not in EFFECT_OPS:
            raise RecordError(f"effect operation {self.op!r}: expected one of {', '.join(EFFECT_OPS)}")
        if not isinstance(self.delay_steps, int) or not 0 <= self.delay_steps <= 10_000:
            raise RecordError("effect delay_steps: expected 0 to 10,000")


@dataclass(frozen=True)
class TransitionEvidence:
    """What one slice shows. The observation text is filled in by code and never rewritten."""

    id: str
    slice_id: str
    action: dict[str, Any]
    outcome: Outcome
    observation_text: str
    preconditions: tuple[Fact, ...] = ()
    mutations: tuple[StateMutation, ...] = ()
    observation_facts: tuple[Fact, ...] = ()
    latent_variables: tuple[str, ...] = ()
    ambiguities: tuple[str, ...] = ()
    confidence: Confidence = Confidence()
    provenance: tuple[SourceRef, ...] = ()


@dataclass(frozen=True)
class TransitionRule:
    """What an action does when all conditions hold: effects, and the observation as a term (``render``).

    ``observation_template`` is the text form with ``{action.arguments.x}`` tokens; ``render`` wins where both are.
    """

    id: str
    action_type: str
    description: str = ""
    priority: int = 0
    conditions: tuple[dict[str, Any], ...] = ()
    effects: tuple[StateMutation, ...] = ()
    outcome: Outcome = "success"
    renderer: str = ""
    render: Any = None
    observation_template: str = ""
    confidence: float = 0.0
    status: RuleStatus = "tentative"
    provenance: tuple[SourceRef, ...] = ()
    counterexamples: tuple[str, ...] = ()
    scope: dict[str, Any] = field(default_factory=dict)
    replay: dict[str, int] = field(default_factory=dict)

    @property
    def templated(self) -> bool:
        return self.render is not None or bool(self.observation_template)


@dataclass(frozen=True)
class Invariant:
    """A condition that every state satisfies; ``error`` ones reject a step that newly breaks them."""

    id: str
    description: str
    condition: dict[str, Any]
    severity: Literal["error", "warning"] = "warning"
    provenance: tuple[SourceRef, ...] = ()


@dataclass(frozen=True)
class RenderContract:
    """What the observations of some actions look like."""

    id: str
    action_types: tuple[str, ...]
    content_type: Literal["json", "text"] = "text"
    template: str = ""
    required_fields: tuple[str, ...] = ()
    instructions: str = ""
    examples: tuple[str, ...] = ()
    provenance: tuple[SourceRef, ...] = ()


@dataclass(frozen=True)
class Demonstration:
    """A transition kept whole as an example; the states are observed projections."""

    id: str
    action: dict[str, Any]
    observation: str
    outcome: Outcome
    state_before: dict[str, Any] = field(default_factory=dict)
    state_after: dict[str, Any] = field(default_factory=dict)
    rule_ids: tuple[str, ...] = ()
    group: str = ""
    provenance: tuple[SourceRef, ...] = ()


@dataclass(frozen=True)
class Note:
    id: str
    kind: Literal["convention", "format", "constraint", "fact", "concept"]
    statement: str
    action_types: tuple[str, ...] = ()
    confidence: float = 0.5
    status: Literal["supported", "untested", "contradicted"] = "untested"
    provenance: tuple[SourceRef, ...] = ()


# --- codec -----------------------------------------------------------------------------------------------------

R = TypeVar("R")


def to_json(value: Any) -> Any:
    """The JSON value of a record; empty optional fields are left out."""
    if is_dataclass(value) and not isinstance(value, type):
        out = {}
        for f in fields(value):
            item = getattr(value, f.name)
            if f.default is not MISSING and item == f.default and type(item) is type(f.default):
                continue
            if f.default_factory is not MISSING and not item:
                continue
            out[f.name] = to_json(item)
        return out
    if isinstance(value, dict):
        return {k: to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    return value


def from_json(cls: type[R], data: Any, where: str) -> R:
    """A record from its JSON value; every field is checked against its declared type.

    Raises:
        RecordError: not an object, an unknown or missing field, or a value of another type; names the place.
    """
    return typing.cast(R, _decode(cls, data, where))


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _decode(kind: Any, data: Any, where: str) -> Any:
    if kind is Any:
        return data
    origin = typing.get_origin(kind)
    if is_dataclass(kind):
        if not isinstance(data, dict):
            raise RecordError(f"{where}: expected an object, found {type(data).__name__}")
        hints = _hints(kind)  # type: ignore[arg-type]
        known = {f.name: f for f in fields(kind)}
        for name in data:
            if name not in known:
                raise RecordError(f"{where}: unknown field {str(name)[:60]!r}")
        values = {}
        for name, f in known.items():
            if name in data:
                values[name] = _decode(hints[name], data[name], f"{where}.{name}")
            elif f.default is MISSING and f.default_factory is MISSING:
                raise RecordError(f"{where}: missing field {name!r}")
        return kind(**values)  # type: ignore[operator]
    if origin is Literal:
        if data not in typing.get_args(kind):
            raise RecordError(f"{where}: expected one of {typing.get_args(kind)}, found {str(data)[:60]!r}")
        return data
    if origin is tuple:
        if not isinstance(data, (list, tuple)):
            raise RecordError(f"{where}: expected a list, found {type(data).__name__}")
        return tuple(_decode(typing.get_args(kind)[0], v, f"{where}[{i}]") for i, v in enumerate(data))
    if origin is dict:
        if not isinstance(data, dict):
            raise RecordError(f"{where}: expected an object, found {type(data).__name__}")
        inner = typing.get_args(kind)[1]
        return {str(k): _decode(inner, v, f"{where}.{k}") for k, v in data.items()}
    if origin in (typing.Union, types.UnionType):
        return data
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not isinstance(data, kind) or (kind in (int, float) and isinstance(data, bool)):
        raise RecordError(f"{where}: expected {kind.__name__}, found {type(data).__name__}")
    return data


def digest(value: Any) -> str:
    """SHA-256 of a record's or JSON value's canonical text."""
    text = json.dumps(to_json(value), ensure_ascii=True, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def short_id(prefix: str, value: Any) -> str:
    """A content id such as ``rule-3f2a…`` (12 hex digits)."""
    return f"{prefix}-{digest(value)[:12]}"
