"""The deterministic inducer: transition rules from traces, without a model.

Episodes that tell their initial state are replayed. Branches of an action are told apart by what the observation
looks like; each leaf of an observation is explained by terms; readings that disagree with the tracked state reveal
effects, which change the tracked state, and round it goes until nothing new is found. Then everything is fitted again,
strictly, and guards are learned. Nothing here knows any domain.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from envace_jax.datasets.traces import TraceEpisode
from envace_jax.worldbook.columns import (
    Column,
    Sample,
    Shape,
    build_columns,
    discover_shape,
    entity_terms,
    evaluate,
)
from envace_jax.worldbook.effects import (
    EffectFinder,
    EffectRunner,
    Reading,
    concrete,
    creation_candidates,
    dynamic_path,
)
from envace_jax.worldbook.explain import Explanation, explain
from envace_jax.worldbook.guards import Guard, action_novelty, learn_guards, novelty_conditions
from envace_jax.worldbook.ingest import Transition, align, usable_prefix
from envace_jax.worldbook.matching import implied
from envace_jax.worldbook.records import RecordError, StateMutation, TransitionRule, short_id
from envace_jax.worldbook.rulebook import check_rule
from envace_jax.worldbook.state import State, StateError, freeze, frozen_arguments, lookup, state_from_json
from envace_jax.worldbook.terms import Scope, compile_term

LONGEST = 8_000  # characters of an observation that rules may give
ROUNDS = 5
TOLERANCE = 0.3
MAX_BRANCHES = 24
GUARD_SAMPLES = 200
EXPLAIN_SAMPLES = 200
MIN_CLEAN = 6
CONTRADICTIONS = 0.05


@dataclass
class Branch:
    """One way in which an action answers."""

    index: int
    name: str
    samples: list[Sample] = field(default_factory=list)
    explanation: Explanation | None = None
    effects: list[StateMutation] = field(default_factory=list)


@dataclass
class Induction:
    """What the inducer found: rules with the transitions they were learned from, the state's shape, and the rest."""

    rules: list[TransitionRule]
    shape: Shape
    transitions: int
    episodes: int
    unexplained: dict[str, int] = field(default_factory=dict)
    held_out: dict[str, int] = field(default_factory=dict)


def is_failure(value: Any) -> bool:
    """Whether an observation reads as a refusal or an error."""
    if isinstance(value, dict):
        return any(k in value for k in ("error", "error_tool_call", "errors")) or value.get("success") is False
    return isinstance(value, str) and value.lower().startswith(("error", "exception", "traceback"))


def induce_rules(episodes: Sequence[TraceEpisode], max_samples: int = 20_000) -> Induction:
    """Rules from the episodes that carry an explicit initial state; other episodes teach nothing here."""
    states: list[State] = []
    by_episode: dict[int, list[Sample]] = {}
    steps: dict[str, Transition] = {}
    total = 0
    for episode in episodes:
        if episode.initial_state is None or total >= max_samples:
            continue
        try:
            state = state_from_json(episode.initial_state)
        except StateError:
            continue
        samples = []
        for at, t in enumerate(usable_prefix(align(episode)[0])):
            steps[t.id] = t
            args = frozen_arguments(t.arguments)
            samples.append(Sample(len(states), at, t.id, t.name, args, t.value, t.text, state.root))
        if samples:
            by_episode[len(states)] = samples
            states.append(state)
            total += len(samples)
    shape = discover_shape([s.root for s in states])
    work = _Induction(shape, states, by_episode, steps)
    work.find_effects()
    return work.finish()


class _Induction:
    def __init__(
        self,
        shape: Shape,
        states: list[State],
        by_episode: dict[int, list[Sample]],
        steps: dict[str, Transition],
    ):
        self.shape, self.states, self.by_episode, self.steps = shape, states, by_episode, steps
        self.by_action: dict[str, list[Sample]] = defaultdict(list)
        for samples in by_episode.values():
            for s in samples:
                self.by_action[s.name].append(s)
        self.branches: list[Branch] = []
        self.entities = {n: entity_terms(s[:400], shape) for n, s in self.by_action.items()}
        self.clean: set[int] = set()

    # --- branches

    def split(self, name: str, samples: list[Sample], tolerance: float) -> list[tuple[list[Sample], Explanation]]:
        """Groups of like observations with their explanations: by shape first, by text where terms do not reach."""
        out: list[tuple[list[Sample], Explanation]] = []
        for group in _grouped(samples, lambda s: (_long(s), signature(s.value))):
            out += [(group, Explanation(None))] if _long(group[0]) else self._split_group(group, tolerance)
        return out

    def _split_group(
        self, group: list[Sample], tolerance: float, depth: int = 0
    ) -> list[tuple[list[Sample], Explanation]]:
        columns, _ = build_columns(group, self.shape)
        found = explain(group, columns, self.shape, tolerance)
        if not found.complete:
            # A few contradictions make a rule tentative; they are no reason to cut its branch to pieces.
            loose = explain(group, columns, self.shape, CONTRADICTIONS) if not tolerance else None
            found = loose or self._explain_branch(Branch(-1, group[0].name, group))
        if found.complete or depth >= 3:
            return [(group, found)]
        for path in [leaf.path for leaf in found.leaves if not leaf.terms]:
            values = [_at(s.value, path) for s in group]
            if not all(isinstance(v, (str, bool)) or v is None for v in values):
                continue
            marks = [_mask(v) for v in values]
            kinds = Counter(marks)
            if 1 < len(kinds) <= max(2, min(MAX_BRANCHES, len(group) // 2)):
                parts = _grouped(list(zip(group, marks)), lambda x: x[1])
                out = []
                for part in self._merge([[s for s, _ in p] for p in parts], path, tolerance):
                    out += self._split_group(part, tolerance, depth + 1)
                return out
        return [(group, found)]

    def _merge(self, parts: list[list[Sample]], path: tuple[Any, ...], tolerance: float) -> list[list[Sample]]:
        """Put groups together whose texts differ in one word only, if that word is explained by a term."""
        words = {i: str(_at(p[0].value, path)).split() for i, p in enumerate(parts)}
        families: dict[Any, list[int]] = defaultdict(list)
        for i, w in words.items():
            if len(w) >= 2:
                for k in range(len(w)):
                    families[(len(w), k, *w[:k], "*", *w[k + 1 :])].append(i)
        done: set[int] = set()
        out = []
        for members in sorted(families.values(), key=len, reverse=True):
            members = [m for m in members if m not in done]
            if len(members) < 2:
                continue
            joined = [s for m in members for s in parts[m]]
            columns, _ = build_columns(joined, self.shape)
            if explain(joined, columns, self.shape, tolerance).complete:
                out.append(joined)
                done |= set(members)
        return out + [p for i, p in enumerate(parts) if i not in done]

    # --- state

    def track(self) -> None:
        """Replay every episode with the effects known so far; every sample gets the state before it."""
        runners = {b.index: EffectRunner(b.effects) for b in self.branches if b.effects}
        for number, samples in self.by_episode.items():
            state = self.states[number]
            for s in samples:
                state = state.advance()
                s.root = state.root
                runner = runners.get(s.branch)
                if runner is not None:
                    scope = Scope(s.root, s.args, freeze(s.value))
                    state = runner.run(state, scope, s.id) or runner.forget(state, scope, s.id)

    def readings(self) -> list[Reading]:
        """Every place of the state that an observation shows, by the terms that explain it."""
        out = []
        for branch in self.branches:
            if branch.explanation is None:
                continue
            for leaf in branch.explanation.leaves:
                paths = [p for p in map(dynamic_path, leaf.terms) if p is not None]
                for path in paths[:1]:
                    for s in branch.samples:
                        where = concrete(path, s.scope())
                        if where is not None:
                            seen = freeze(_at(s.value, leaf.path))
                            out.append(Reading(s, where, seen, lookup(s.root, where)))
        out.sort(key=lambda r: (r.sample.episode, r.sample.at))
        return out

    def _mark_clean(self) -> None:
        """Samples that nothing before them in their episode can have touched: no accepted call shares a value."""
        self.clean = set()
        for samples in self.by_episode.values():
            touched: set[Any] = set()
            for s in samples:
                values = {str(v) for _, v in s.args.items() if isinstance(v, (str, int)) and not isinstance(v, bool)}
                if not values & touched:
                    self.clean.add(id(s))
                if not is_failure(s.value):
                    touched |= values

    def _explain_branch(self, branch: Branch) -> Explanation:
        """Explain a branch from its untouched samples where there are enough, else from all of them, loosely."""
        if _long(branch.samples[0]):
            return Explanation(None)
        clean = [s for s in branch.samples if id(s) in self.clean][:EXPLAIN_SAMPLES]
        if len(clean) >= MIN_CLEAN:
            columns, _ = build_columns(clean, self.shape)
            found = explain(clean, columns, self.shape, TOLERANCE / 3)
            if found.complete:
                return found
        some = branch.samples[:: max(1, len(branch.samples) // EXPLAIN_SAMPLES)]
        columns, _ = build_columns(some, self.shape)
        return explain(some, columns, self.shape, TOLERANCE)

    def _refusals(self) -> list[Reading]:
        """What a surprising branch says of the state: its guard, learned where nothing had changed yet, must hold."""
        out: list[Reading] = []
        readers = {
            b.index
            for b in self.branches
            if b.explanation is not None
            and b.explanation.leaves
            and all(any(dynamic_path(t) for t in leaf.terms) for leaf in b.explanation.leaves)
        }
        failures = {b.index for b in self.branches if b.samples and is_failure(b.samples[0].value)}
        clean: dict[str, list[Sample]] = defaultdict(list)
        dirty: dict[str, list[Sample]] = defaultdict(list)
        for samples in self.by_episode.values():
            touched = False
            for s in samples:
                (dirty if touched else clean)[s.name].append(s)
                touched = touched or s.branch not in readers | failures
        for name, suspects in dirty.items():
            if not clean[name]:
                continue
            guards, _, _ = self._guards(clean[name])
            tests = {g.branch: g.condition for g in guards if g.condition is not None}
            wrong = {id(s) for s in _misled(guards, suspects)}
            for s in suspects:
                for path, seen in implied(tests.get(s.branch)) if id(s) in wrong else ():
                    where = concrete(path, s.scope())
                    if where is not None:
                        out.append(Reading(s, where, seen, lookup(s.root, where)))
        return out

    def find_effects(self) -> None:
        self._mark_clean()
        for name, samples in sorted(self.by_action.items()):
            for group, explanation in self.split(name, samples, TOLERANCE):
                branch = Branch(len(self.branches), name, group, explanation)
                for s in group:
                    s.branch = branch.index
                self.branches.append(branch)
        finder = EffectFinder(self.shape, self.by_episode, self.entities)
        for _ in range(ROUNDS):
            self.track()
            for branch in self.branches:
                branch.explanation = self._explain_branch(branch)
            existing = {b.index: b.effects for b in self.branches}
            readings = self.readings() + self._refusals()
            readings.sort(key=lambda r: (r.sample.episode, r.sample.at))
            writers = {b.index: b.samples for b in self.branches if b.samples and not is_failure(b.samples[0].value)}
            read = {
                b.index: {str(leaf.path[0]) for leaf in b.explanation.leaves if any(map(dynamic_path, leaf.terms))}
                for b in self.branches
                if b.explanation is not None and isinstance(b.samples[0].value, dict)
            }
            new = finder.echoes(writers, readings, existing, defaultdict(set, read)) or finder.find(readings, existing)
            if not new and not self._try_creations():
                break
            for index, effects in new.items():
                self.branches[index].effects += effects
        self.track()

    def _try_creations(self) -> bool:
        """Adopt a hypothesis that some answers name new entries, if it makes wrong answers right."""
        for branch in self.branches:
            if branch.effects or not branch.samples or is_failure(branch.samples[0].value):
                continue
            for collection in self.shape.collections:
                for effect in creation_candidates(branch.samples, collection):
                    before = self._misses()
                    branch.effects = [effect]
                    self.track()
                    if self._misses() < before:
                        return True
                    branch.effects = []
                    self.track()
        return False

    def _misses(self) -> int:
        """Observations that the present explanations do not give."""
        missed = 0
        for branch in self.branches:
            term = branch.explanation.term if branch.explanation else None
            if term is None:
                missed += len(branch.samples)
                continue
            run = compile_term(_single(term))
            for s in branch.samples:
                missed += run(s.scope()) != freeze(s.value)
        return missed

    # --- rules

    def finish(self) -> Induction:
        rules: list[TransitionRule] = []
        unexplained: dict[str, int] = {}
        for name, samples in sorted(self.by_action.items()):
            branches: list[Branch] = []
            for old in [b for b in self.branches if b.name == name]:
                for group, explanation in self.split(name, old.samples, 0.0):
                    branches.append(Branch(len(branches), name, group, explanation, old.effects))
            for b in branches:
                for s in b.samples:
                    s.branch = b.index
            guards, left, columns = self._guards(samples)
            made, missing = self._rules(name, samples, branches, guards, left, columns)
            rules += made
            if missing:
                unexplained[name] = missing
        total = sum(map(len, self.by_action.values()))
        return Induction(rules, self.shape, total, len(self.states), unexplained)

    def _guards(self, samples: list[Sample]) -> tuple[list[Guard], int, list[Column]]:
        """Guards from a part of the samples, grown by those they get wrong until they get all right."""
        step = max(1, len(samples) // GUARD_SAMPLES)
        chosen = {id(s): s for s in samples[::step]}
        for group in _grouped(samples, lambda s: s.branch):
            chosen.update({id(s): s for s in group[:: max(1, len(group) // 40)][:40]})
        columns, entities = build_columns(samples, self.shape)
        guards: list[Guard] = []
        left = 0
        for _ in range(6):
            part = list(chosen.values())
            inner = [evaluate(c.term, part, c.rank) for c in columns]
            things = [evaluate(c.term, part, c.rank) for c in entities]
            guards, left = learn_guards([s.branch for s in part], inner, things)
            wrong = [s for s in _misled(guards, samples) if id(s) not in chosen]
            if not wrong:
                break
            chosen.update({id(s): s for s in wrong[:60]})
        return guards, left, columns

    def _rules(
        self,
        name: str,
        samples: list[Sample],
        branches: list[Branch],
        guards: list[Guard],
        left: int,
        columns: list[Column],
    ) -> tuple[list[TransitionRule], int]:
        out: list[TransitionRule] = []
        known = action_novelty(columns)
        earlier: list[Any] = []
        missing = left
        position = {id(s): i for i, s in enumerate(samples)}
        for guard in guards:
            branch = branches[guard.branch]
            conditions = [*earlier]
            default: dict[str, Any] = {}
            if guard.condition is not None:
                conditions.append(guard.condition)
            else:
                members = [position[id(s)] for s in branch.samples]
                default = novelty_conditions(columns, members)
                conditions += default.values()
            conditions += [c for key, c in known.items() if key not in default]
            explanation = branch.explanation
            render = explanation.term if explanation is not None else None
            value = branch.samples[0].value
            sources = tuple(self.steps[s.id].source() for s in branch.samples[:8])
            body = {"a": name, "c": conditions, "r": render, "e": [[e.op, e.path, e.value] for e in branch.effects]}
            rule = TransitionRule(
                id=short_id("rule", body),
                action_type=name,
                description=f"{name}: branch of {guard.support} transitions",
                conditions=tuple(conditions),
                effects=tuple(branch.effects),
                outcome="failure" if is_failure(value) else "success",
                render=render,
                status="supported" if render is not None else "tentative",
                provenance=sources,
            )
            runs = _within_bounds(rule)
            if render is None or not runs:
                missing += guard.support
            if runs:
                out.append(rule)
            if guard.condition is not None:
                earlier.append({"not": guard.condition})
        return out, missing


def _within_bounds(rule: TransitionRule) -> bool:
    """Whether a rule can run: what traces of thousands of values give may be larger than a term can be."""
    try:
        check_rule(rule)
    except RecordError:
        return False
    return True


def _misled(guards: Sequence[Guard], samples: Sequence[Sample]) -> list[Sample]:
    from envace_jax.worldbook.conditions import compile_condition

    tests = [(g.branch, None if g.condition is None else compile_condition(g.condition)) for g in guards]
    out = []
    for s in samples:
        scope = s.scope()
        for branch, test in tests:
            answer = True if test is None else test(scope)
            if answer is False:
                continue
            if answer is True and branch != s.branch:
                out.append(s)
            break
    return out


def _single(term: Any) -> Any:
    """A term with each set of alternatives cut to its first."""
    if isinstance(term, dict):
        if "$agree" in term:
            return _single(term["$agree"][0])
        return {k: _single(v) for k, v in term.items()}
    return [_single(t) for t in term] if isinstance(term, list) else term


def _long(sample: Sample) -> bool:
    """Whether an observation is too long to be put together from terms: pages and files are the agent's to answer."""
    return len(sample.text) > LONGEST


def signature(value: Any) -> Any:
    """The shape of an observation: keys in order and kinds of values."""
    if isinstance(value, dict):
        return ("object", *((k, signature(v)) for k, v in value.items()))
    if isinstance(value, list):
        return "list"
    return (
        "null"
        if value is None
        else ("number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__)
    )


def _mask(value: Any) -> str:
    return re.sub(r"\d+", "9", value) if isinstance(value, str) else repr(value)


def _at(value: Any, path: Sequence[Any]) -> Any:
    for segment in path:
        value = value[segment]
    return value


def _grouped(items: Sequence[Any], key: Any) -> list[list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())
