"""From claims to a worldbook: reconcile, test by replay, keep what may run, put the rest where it can be read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from envace_jax.datasets.traces import TraceEpisode
from envace_jax.worldbook import records as R
from envace_jax.worldbook.columns import Shape
from envace_jax.worldbook.criteria import executable
from envace_jax.worldbook.harness import Harness, HarnessConfig
from envace_jax.worldbook.ingest import Transition, align, usable_prefix
from envace_jax.worldbook.notation import describe, format_path
from envace_jax.worldbook.rulebook import check_rule, normal_effect
from envace_jax.worldbook.state import frozen_arguments
from envace_jax.worldbook.store import EvidenceItem, Worldbook
from envace_jax.worldbook.symbolic import is_failure
from envace_jax.worldbook.terms import Scope
from envace_jax.worldbook.workspace import open_session

MAX_DEMONSTRATIONS = 3
SCOPE_KEYS = ("environment",)


# --- schemas from what was observed ----------------------------------------------------------------------------


def observed_actions(
    transitions: Iterable[Transition], tools: Sequence[dict[str, Any]] = ()
) -> tuple[R.ActionSpec, ...]:
    """An action schema of everything that was called; tool documents, where given, add texts and types."""
    uses: dict[str, int] = Counter()
    arguments: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for t in transitions:
        uses[t.name] += 1
        for key, value in t.arguments.items():
            arguments[t.name][key][json_kind(value)] += 1
    docs = {f["name"]: f for tool in tools if isinstance(f := tool.get("function", tool), dict) and "name" in f}
    out = []
    for name in sorted(set(uses) | set(docs)):
        # Documents are a trace's words: what is not of the form says nothing.
        parameters = _of(dict, docs.get(name, {}).get("parameters"))
        properties = _of(dict, parameters.get("properties"))
        required = {r for r in _of(list, parameters.get("required")) if isinstance(r, str)}
        specs = {}
        for key in dict.fromkeys([*properties, *arguments[name]]):
            kinds = arguments[name][key]
            seen = kinds.most_common(1)[0][0] if len(kinds) == 1 else "any"
            doc = properties.get(key)
            doc = doc if isinstance(doc, dict) else {}
            specs[key] = R.ArgumentSpec(
                str(doc.get("type") or seen) if not isinstance(doc.get("type"), list) else "any",
                key in required or (not parameters and sum(kinds.values()) == uses[name]),
                str(doc.get("description") or ""),
                tuple(_of(list, doc.get("enum"))),
            )
        out.append(R.ActionSpec(name, str(docs.get(name, {}).get("description") or ""), specs))
    return tuple(out)


def _of(kind: type, value: Any) -> Any:
    return value if isinstance(value, kind) else kind()


def json_kind(value: Any) -> str:
    """The JSON type name of a value."""
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "any")


def observed_fields(shape: Shape, rules: Sequence[R.TransitionRule]) -> tuple[R.StateField, ...]:
    """A state schema of every place that was seen or that a rule writes."""
    written = set()
    for rule in rules:
        for effect in rule.effects:
            path = tuple("*" if isinstance(s, dict) else s for s in normal_effect(effect).path)
            written.add(path)
            if isinstance(effect.value, dict) and not any(k.startswith("$") for k in effect.value):
                written |= {(*path, k) for k in effect.value}
    out = []
    for path in dict.fromkeys([*shape.types, *sorted(written, key=str)]):
        if path and path[0] in ("world", "session", "surface", "epistemic"):
            kind: Any = shape.types.get(path, "any")
            out.append(R.StateField(format_path(path), kind))
    return tuple(out)


# --- contrasts, demonstrations, contracts ----------------------------------------------------------------------


def contrasts(transitions: Sequence[Transition], per_action: int = 32) -> list[dict[str, Any]]:
    """Pairs of equal calls with unequal outcomes from different groups: what must have differed is the state."""
    by_call: dict[str, list[Transition]] = defaultdict(list)
    for t in transitions:
        if t.slice.usable:
            by_call[R.digest([t.name, t.arguments])].append(t)
    counts: Counter[str] = Counter()
    out = []
    for calls in by_call.values():
        good = [t for t in calls if not is_failure(t.value)]
        bad = [t for t in calls if is_failure(t.value)]
        for a in good[:2]:
            for b in bad[:2]:
                if a.slice.group != b.slice.group and counts[a.name] < per_action:
                    counts[a.name] += 1
                    out.append({"action": a.name, "arguments": a.arguments, "success": a.id, "failure": b.id})
    return out


def choose_demonstrations(
    transitions: Sequence[Transition], rules: Sequence[R.TransitionRule], limit: int = MAX_DEMONSTRATIONS
) -> tuple[R.Demonstration, ...]:
    """At most three examples an action: new outcomes first, then new episodes, shorter ones first among equals."""
    by_action: dict[str, list[Transition]] = defaultdict(list)
    for t in transitions:
        if t.slice.usable and t.text and len(t.text) <= 4000:
            by_action[t.name].append(t)
    by_event = {e: r.id for r in rules for p in r.provenance for e in p.event_ids[:1]}
    out = []
    for name in sorted(by_action):
        pool = by_action[name][:2000]
        shapes: Counter[Any] = Counter()
        episodes: set[str] = set()
        for _ in range(min(limit, len(pool))):
            best = min(
                pool,
                key=lambda t: (shapes[_shape(t)], t.episode_id in episodes, len(t.text), t.id),
            )
            pool.remove(best)
            shapes[_shape(best)] += 1
            episodes.add(best.episode_id)
            rule = by_event.get(best.slice.action_event_ids[0])
            out.append(
                R.Demonstration(
                    f"demo-{best.id}",
                    {"type": name, "arguments": best.arguments},
                    best.text,
                    "failure" if is_failure(best.value) else "success",
                    rule_ids=(rule,) if rule else (),
                    group=best.slice.group,
                    provenance=(best.source(),),
                )
            )
    return tuple(out)


def _shape(t: Transition) -> str:
    value = t.value
    head = str(value.get("error"))[:40] if isinstance(value, dict) and is_failure(value) else ""
    return f"{is_failure(value)}|{sorted(value) if isinstance(value, dict) else type(value).__name__}|{head}"


def observed_contracts(transitions: Sequence[Transition]) -> tuple[R.RenderContract, ...]:
    """What the answers of each action look like, read off the traces."""
    by_action: dict[str, list[Transition]] = defaultdict(list)
    for t in transitions:
        if t.slice.usable:
            by_action[t.name].append(t)
    out = []
    for name, items in sorted(by_action.items()):
        good = [t for t in items if not is_failure(t.value)] or items
        as_json = all(not isinstance(t.value, str) for t in items)
        objects = [t.value for t in good if isinstance(t.value, dict)]
        fields = sorted(set.intersection(*[set(o) for o in objects])) if len(objects) == len(good) else []
        examples = tuple(dict.fromkeys(t.text[:400] for t in items[:50]))[:3]
        # Only what several groups showed is said in general words: one trajectory's text stays its own.
        said: dict[str, set[str]] = defaultdict(set)
        for t in items:
            if isinstance(t.value, dict) and is_failure(t.value):
                said[str(t.value.get("error"))[:80]].add(t.slice.group)
        failures = sorted(text for text, groups in said.items() if len(groups) > 1)
        text = f"Failures read: {'; '.join(failures[:8])}." if failures else ""
        witnesses = {t.slice.group: t for t in items[:200]}
        out.append(
            R.RenderContract(
                R.short_id("contract", [name, fields, examples]),
                (name,),
                "json" if as_json else "text",
                required_fields=tuple(fields),
                instructions=text,
                examples=examples,
                provenance=tuple(t.source() for t in list(witnesses.values())[:4]),
            )
        )
    return tuple(out)


# --- replay ----------------------------------------------------------------------------------------------------


@dataclass
class ReplayCount:
    """How a set of rules did on recorded episodes."""

    right: Counter[str]
    wrong: Counter[str]
    examples: dict[str, list[str]]
    results: dict[str, tuple[str, bool]]  # transition id -> (rule id, right), where a rule answered
    transitions: int = 0
    handed_over: int = 0
    by_action: dict[str, list[int]] | None = None

    @property
    def answered(self) -> int:
        return self.transitions - self.handed_over

    def to_json(self) -> dict[str, Any]:
        """Totals and, by action, [right, wrong, handed over]."""
        return {
            "transitions": self.transitions,
            "right": sum(self.right.values()),
            "wrong": sum(self.wrong.values()),
            "handed_over": self.handed_over,
            "by_action": self.by_action or {},
        }


def replay_rules(
    book: Worldbook, episodes: Iterable[TraceEpisode], *, floor: float = 0.0, with_state: bool = True
) -> ReplayCount:
    """Replay episodes teacher-forced: at each recorded transition ask the rules, compare, then observe the truth.

    Args:
        floor: the confidence from which rules answer.
        with_state: start from the episode's explicit initial state where it has one, else from nothing.
    """
    harness = Harness(book, None, HarnessConfig(fast_path=floor))
    count = ReplayCount(Counter(), Counter(), defaultdict(list), {}, by_action={})
    for episode in episodes:
        session = open_session(episode.initial_state if with_state else None, group=episode.group)
        for t in usable_prefix(align(episode)[0]):
            _, result = harness.step(session, t.name, t.arguments)
            count.transitions += 1
            table = count.by_action.setdefault(t.name, [0, 0, 0])  # type: ignore[union-attr]
            if result.source != "rule":
                count.handed_over += 1
                table[2] += 1
            elif result.text == t.text or (result.value == t.value and not isinstance(t.value, str)):
                count.right[result.rule_id] += 1
                count.results[t.id] = (result.rule_id, True)
                table[0] += 1
            else:
                count.wrong[result.rule_id] += 1
                count.results[t.id] = (result.rule_id, False)
                table[1] += 1
                count.examples[result.rule_id].append(t.id)
            session = harness.observe(session, t.name, t.arguments, t.text)
    return count


def try_each_rule(book: Worldbook, episodes: Iterable[TraceEpisode]) -> ReplayCount:
    """Try every rule on its own at every recorded transition where its conditions hold: a wrong rule beside it neither
    hides nor spoils it. The state follows the recorded observations."""
    harness = Harness(book, None, HarnessConfig(fast_path=0.0))
    table = book.compiled(0.0)
    count = ReplayCount(Counter(), Counter(), defaultdict(list), {}, by_action={})
    for episode in episodes:
        session = open_session(episode.initial_state, group=episode.group)
        for t in usable_prefix(align(episode)[0]):
            count.transitions += 1
            rules = table.get(t.name)
            root = session.state.advance().root
            for rule in rules.rules if rules is not None else ():
                scope = Scope(root, frozen_arguments(t.arguments))
                assert rules is not None
                if rules.applicable(rule.rule.id, scope) is not True:
                    continue
                choice = rule.prepare(scope)
                if choice.rule is None:
                    continue
                if choice.text == t.text or (choice.value == t.value and not isinstance(t.value, str)):
                    count.right[rule.rule.id] += 1
                else:
                    count.wrong[rule.rule.id] += 1
                    count.examples[rule.rule.id].append(t.id)
            session = harness.observe(session, t.name, t.arguments, t.text)
    return count


def with_confidence(
    rules: Sequence[R.TransitionRule], right: Counter[str], wrong: Counter[str]
) -> tuple[R.TransitionRule, ...]:
    """Rules with the confidence that held-out replay gives them: (right + 1) / (right + wrong + 2)."""
    out = []
    for rule in rules:
        r, w = right[rule.id], wrong[rule.id]
        out.append(replace(rule, confidence=(r + 1) / (r + w + 2), replay={"right": r, "wrong": w}))
    return tuple(out)


# --- reconcile and compile -------------------------------------------------------------------------------------


@dataclass
class Claims:
    """All that was proposed, before it is checked."""

    actions: tuple[R.ActionSpec, ...]
    state_fields: tuple[R.StateField, ...]
    rules: tuple[R.TransitionRule, ...]
    invariants: tuple[R.Invariant, ...] = ()
    contracts: tuple[R.RenderContract, ...] = ()
    notes: tuple[R.Note, ...] = ()
    demonstrations: tuple[R.Demonstration, ...] = ()


def reconcile(claims: Claims, transitions: Sequence[Transition]) -> tuple[Claims, list[dict[str, Any]]]:
    """Claims made consistent, and what was rejected on the way, each with the reason.

    Malformed rules and rules of unknown actions are rejected; unknown scope keys go; citations that point nowhere go;
    invariants without an anchored citation go; claims without support are downgraded; colliding aliases go.
    """
    rejected: list[dict[str, Any]] = []
    known = {t.slice.action_event_ids[0]: t for t in transitions}
    events = {e for t in transitions for e in (*t.slice.action_event_ids, *t.slice.observation_event_ids)}
    names = {a.name for a in claims.actions}
    taken = set(names)
    actions = []
    for action in claims.actions:
        aliases = tuple(a for a in dict.fromkeys(action.aliases) if a not in taken)
        taken |= set(aliases)
        actions.append(replace(action, aliases=aliases))
    alias_of = {alias: a.name for a in actions for alias in a.aliases}
    rules: dict[str, R.TransitionRule] = {}
    for rule in claims.rules:
        rule = replace(rule, action_type=alias_of.get(rule.action_type, rule.action_type))
        try:
            if rule.action_type not in names:
                raise R.RecordError(f"rule {rule.id}: no action {rule.action_type!r} was ever observed")
            check_rule(rule)
        except R.RecordError as error:
            rejected.append({"kind": "rule", "id": rule.id, "reason": str(error)})
            continue
        sources = tuple(p for p in (_anchored(p, events) for p in rule.provenance) if p is not None)
        scope = {k: v for k, v in rule.scope.items() if k in SCOPE_KEYS}
        template = "" if _placeholder(rule.observation_template) else rule.observation_template
        status = rule.status
        supported = any(
            known[e].slice.usable and known[e].name == rule.action_type
            for p in sources
            for e in p.event_ids
            if e in known
        )
        if status == "supported" and not supported:
            status = "tentative"
        rule = replace(rule, provenance=sources, scope=scope, observation_template=template, status=status)
        if rule.id in rules:
            rejected.append({"kind": "rule", "id": rule.id, "reason": "two rules of one id"})
            continue
        rules[rule.id] = rule
    invariants = []
    for invariant in claims.invariants:
        sources = tuple(p for p in (_anchored(p, events) for p in invariant.provenance) if p is not None)
        if not sources:
            rejected.append({"kind": "invariant", "id": invariant.id, "reason": "no citation of an observed event"})
        else:
            invariants.append(replace(invariant, provenance=sources))
    notes = []
    for note in claims.notes:
        sources = tuple(p for p in (_anchored(p, events) for p in note.provenance) if p is not None)
        notes.append(replace(note, provenance=sources, status=note.status if sources else "untested"))
    have = {a for c in claims.contracts for a in c.action_types}
    contracts = (*claims.contracts, *[c for c in observed_contracts(transitions) if c.action_types[0] not in have])
    return (
        Claims(
            tuple(actions),
            claims.state_fields,
            tuple(rules.values()),
            tuple(invariants),
            contracts,
            tuple(notes),
            claims.demonstrations,
        ),
        rejected,
    )


def _anchored(source: R.SourceRef, events: set[str]) -> R.SourceRef | None:
    kept = tuple(e for e in source.event_ids if e in events)
    return replace(source, event_ids=kept) if kept else None


def _placeholder(template: str) -> bool:
    """Whether a template is prose about an answer instead of an answer."""
    low = template.strip().lower()
    return low.startswith(("<", "[")) and low.endswith((">", "]")) and " " in low and "{" not in low


def compile_worldbook(
    claims: Claims,
    transitions: Sequence[Transition],
    **fields: Any,
) -> Worldbook:
    """A worldbook: rules that meet every criterion run, the others are kept as candidates with the reason."""
    evidence = tuple(evidence_item(t) for t in transitions)
    draft = Worldbook(state_fields=claims.state_fields, actions=claims.actions)
    rules, candidates, unresolved = [], [], []
    environments = frozenset(str(e.get("environment", "")) for e in fields.get("episodes", ()))
    for rule in claims.rules:
        reason = executable(rule, draft, environments)
        if reason:
            candidates.append(rule)
            unresolved.append({"kind": "rule", "id": rule.id, "action": rule.action_type, "reason": reason})
        else:
            rules.append(rule)
    return Worldbook(
        actions=claims.actions,
        state_fields=claims.state_fields,
        invariants=claims.invariants,
        rules=tuple(rules),
        candidates=tuple(candidates),
        contracts=claims.contracts,
        demonstrations=claims.demonstrations,
        notes=claims.notes,
        evidence=evidence,
        slices=tuple(t.slice for t in transitions),
        unresolved=(*fields.pop("unresolved", ()), *unresolved),
        **fields,
    )


def evidence_item(t: Transition, limit: int = 40_000) -> EvidenceItem:
    """A transition for retrieval; long observations keep their head and tail."""
    text = t.text if len(t.text) <= limit else t.text[: limit * 3 // 4] + "\n…\n" + t.text[-limit // 4 :]
    outcome: R.Outcome = "failure" if is_failure(t.value) else "success"
    if not t.slice.usable:
        outcome = "unknown"
    return EvidenceItem(t.id, t.episode_id, t.slice.group, t.slice.index, t.name, t.arguments, text, outcome)


def diff_worldbooks(old: Worldbook, new: Worldbook) -> str:
    """A readable difference of two worldbooks: by kind, added (+), removed (-) and changed (~) with the fields."""
    out: list[str] = []
    kinds: list[tuple[str, Any]] = [
        ("actions", lambda a: a.name),
        ("state_fields", lambda f: f.path),
        ("rules", lambda r: r.id),
        ("candidates", lambda r: r.id),
        ("invariants", lambda i: i.id),
        ("contracts", lambda c: c.id),
        ("notes", lambda n: n.id),
        ("demonstrations", lambda d: d.id),
        ("evidence", lambda e: e.id),
    ]
    for name, key in kinds:
        a = {key(x): x for x in getattr(old, name)}
        b = {key(x): x for x in getattr(new, name)}
        lines = [f"  - {k}{_hint(a[k])}" for k in a if k not in b] + [f"  + {k}{_hint(b[k])}" for k in b if k not in a]
        for k in a:
            if k in b and a[k] != b[k]:
                left, right = R.to_json(a[k]), R.to_json(b[k])
                changed = [f for f in dict.fromkeys([*left, *right]) if left.get(f) != right.get(f)]
                detail = "; ".join(f"{f}: {_brief(left.get(f))} → {_brief(right.get(f))}" for f in changed)
                lines.append(f"  ~ {k} {detail}")
        if lines:
            out.append(f"{name} ({len(a)} → {len(b)})")
            shown = lines if name != "evidence" else lines[:10]
            out += shown + ([f"  … {len(lines) - len(shown)} more"] if len(lines) > len(shown) else [])
    if old.status != new.status:
        out.append(f"status {old.status} → {new.status}")
    return "\n".join(out) if out else "no difference"


def _hint(item: Any) -> str:
    if isinstance(item, R.TransitionRule):
        answer = describe(item.render) if item.render is not None else item.observation_template
        return f" {item.action_type} → {answer[:80]} (confidence {item.confidence:.2f})"
    return f" {item.statement[:80]}" if isinstance(item, R.Note) else ""


def _brief(value: Any) -> str:
    return repr(value)[:60]
