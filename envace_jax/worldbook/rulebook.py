"""Rules made runnable: choosing the rule for a call, its observation and its effects.

All conditions of an action's rules are compiled once and tested at most once a step, however many rules share them.
A rule fires only when every condition is known to hold; where a rule that could outrank or contradict it is not known
to be out, nothing fires and the call goes to the agent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from envace_jax.text.transcript import result_text
from envace_jax.worldbook.conditions import Test, compile_condition
from envace_jax.worldbook.effects import EffectRunner
from envace_jax.worldbook.notation import operand, parse_path, template_term
from envace_jax.worldbook.records import Invariant, RecordError, StateField, StateMutation, TransitionRule, digest
from envace_jax.worldbook.state import ABSENT, NAMESPACES, UNKNOWN, StateError, is_whole, thaw
from envace_jax.worldbook.terms import Scope, TermError, compile_term

_UNSET = object()


class Choice(NamedTuple):
    """What the rules say of a call: the rule that fires, or why none does
    (``no_rule``, ``unknown``, ``conflict``, ``unresolved``)."""

    rule: CompiledRule | None
    cause: str = ""
    value: Any = None
    text: str = ""
    plan: Any = ()


class CompiledRule:
    """One rule with its closures."""

    __slots__ = ("conditions", "effects", "plan_key", "priority", "render", "rule")

    def __init__(self, rule: TransitionRule, conditions: list[tuple[int, bool]]):
        self.rule = rule
        self.conditions = conditions
        self.priority = rule.priority
        term = rule.render
        if term is None and rule.observation_template:
            term = template_term(rule.observation_template)
        self.render = None if term is None else compile_term(term)
        self.effects = EffectRunner([normal_effect(e) for e in rule.effects])
        self.plan_key = digest([rule.render, rule.observation_template, rule.effects])

    def prepare(self, scope: Scope) -> Choice:
        """The observation and the planned effects, or the reason why an argument does not resolve."""
        value = UNKNOWN if self.render is None else self.render(scope)
        # An entry of which a part was never observed is no answer: what is missing there is unknown, not absent.
        if value is ABSENT or not is_whole(value):
            return Choice(None, "unresolved")
        scope.out = value
        plan = self.effects.plan(scope)
        if plan is None:
            return Choice(None, "unresolved")
        plain = value if value.__class__ is str else thaw(value)
        return Choice(self, "", plain, result_text(plain), plan)


def normal_effect(effect: StateMutation) -> StateMutation:
    """An effect with its path as segments; a path text is parsed, ``{action.arguments.x}`` tokens become terms."""
    path, value = effect.path, effect.value
    if isinstance(path, str):
        path = _path_with_tokens(path)
    if not isinstance(path, (list, tuple)) or not path:
        raise RecordError(f"effect path {str(effect.path)[:80]!r}: expected a path")
    if isinstance(value, str) and "{action.arguments." in value:
        value = template_term(value)
    op, delay = effect.op, effect.delay_steps
    if op == "schedule":  # setting something later
        op, delay = "set", max(1, delay)
    return StateMutation(op, [_segment(s) for s in path], value, delay)


def _path_with_tokens(text: str) -> list[Any]:
    marker = "\x00"
    tokens: list[str] = []
    out, i = "", 0
    while True:
        at = text.find("{action.arguments.", i)
        if at < 0:
            break
        end = text.index("}", at) if "}" in text[at:] else len(text)
        out += text[i:at] + f"{marker}{len(tokens)}{marker}"
        tokens.append(text[at : end + 1])
        i = end + 1
    segments: list[Any] = []
    for segment in parse_path(out + text[i:]):
        if isinstance(segment, str) and marker in segment:
            for n, token in enumerate(tokens):
                segment = segment.replace(f"{marker}{n}{marker}", token)
            segments.append(template_term(segment))
        else:
            segments.append(segment)
    return segments


def _segment(value: Any) -> Any:
    if isinstance(value, str) and "{action.arguments." in value:
        return template_term(value)
    if isinstance(value, bool) or not isinstance(value, (str, int, dict)):
        raise RecordError(f"effect path segment {value!r}: expected text, a number or a term")
    return value


class ActionRules:
    """The rules of one action, highest priority first, over one table of conditions."""

    def __init__(self, rules: Iterable[TransitionRule]):
        self.tests: list[Any] = []
        index: dict[str, int] = {}
        self.rules: list[CompiledRule] = []
        for rule in sorted(rules, key=lambda r: (-r.priority, r.id)):
            conditions = []
            for condition in rule.conditions:
                wanted = True
                while isinstance(condition, dict) and set(condition) == {"not"}:
                    condition, wanted = condition["not"], not wanted
                key = digest(condition)
                if key not in index:
                    index[key] = len(self.tests)
                    self.tests.append(compile_condition(condition))
                conditions.append((index[key], wanted))
            self.rules.append(CompiledRule(rule, conditions))
        self._ask_cheap_first()

    def _ask_cheap_first(self) -> None:
        """Rules that share a prefix of conditions are decided fastest when the shared ones are asked in order."""
        for rule in self.rules:
            rule.conditions = list(dict.fromkeys(rule.conditions))

    def choose(self, scope: Scope) -> Choice:
        """The rule that fires in this scope, with its observation and effects, or the cause why none does."""
        answers: list[Any] = [_UNSET] * len(self.tests)
        tests = self.tests
        found: CompiledRule | None = None
        open_rules: list[CompiledRule] = []
        for rule in self.rules:
            if found is not None and rule.priority < found.priority:
                break
            verdict: bool | None = True
            for index, wanted in rule.conditions:
                answer = answers[index]
                if answer is _UNSET:
                    answer = answers[index] = tests[index](scope)
                if answer is None:
                    verdict = None
                elif answer is not wanted:
                    verdict = False
                    break
            if verdict is True:
                if found is not None and found.plan_key != rule.plan_key:
                    return Choice(None, "conflict")
                found = rule
            elif verdict is None:
                open_rules.append(rule)
        if found is None:
            return Choice(None, "unknown" if open_rules else "no_rule")
        if any(r.plan_key != found.plan_key for r in open_rules):
            return Choice(None, "unknown")
        return found.prepare(scope)

    def applicable(self, rule_id: str, scope: Scope) -> bool | None:
        """Whether the conditions of one rule hold: True, False, or None when that is not known."""
        for rule in self.rules:
            if rule.rule.id == rule_id:
                verdict: bool | None = True
                for index, wanted in rule.conditions:
                    answer = self.tests[index](scope)
                    if answer is None:
                        verdict = None
                    elif answer is not wanted:
                        return False
                return verdict
        return False

    def __getitem__(self, rule_id: str) -> CompiledRule:
        return next(r for r in self.rules if r.rule.id == rule_id)


def compile_rules(rules: Iterable[TransitionRule]) -> dict[str, ActionRules]:
    """Rules by action.

    Raises:
        RecordError: a rule with a condition, term or path that is not well formed; the message names the rule.
    """
    grouped: dict[str, list[TransitionRule]] = {}
    for rule in rules:
        check_rule(rule)
        grouped.setdefault(rule.action_type, []).append(rule)
    return {name: ActionRules(members) for name, members in grouped.items()}


def compile_invariant(invariant: Invariant) -> Test:
    """The condition of an invariant, made runnable; `RecordError` names one that is not well formed."""
    try:
        return compile_condition(invariant.condition)
    except (TermError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecordError(f"invariant {invariant.id}: {error}") from None


def check_field(field: StateField) -> None:
    """Raise `RecordError` naming the field unless its path is one of a state."""
    try:
        parse_path(field.path)
    except (TermError, StateError, ValueError) as error:
        raise RecordError(f"field {field.path[:80]!r}: {error}") from None
    if field.visibility not in NAMESPACES:
        raise RecordError(f"field {field.path[:80]!r}: expected a path that begins with one of {', '.join(NAMESPACES)}")


def check_rule(rule: TransitionRule) -> None:
    """Raise `RecordError` naming the rule unless its terms, conditions and effects are well formed."""
    try:
        CompiledRule(rule, [])
        for condition in rule.conditions:
            compile_condition(condition)
            if isinstance(condition, dict) and "left" in condition:
                operand(condition["left"])
    except (TermError, StateError, RecordError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecordError(f"rule {rule.id} ({rule.action_type}): {error}") from None
