"""The runtime: validate a step, commit or reject it, render it, remember it.

Rules answer first, for all episodes of a batch, on the host; what they do not settle goes to the agent in one batch of
generations. A step never changes a session in place. `observe` is the teacher-forced half: a real observation is
matched with the rules, what it reveals of the state is written down, and what it contradicts is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from envace_jax.worldbook.completer import in_parallel
from envace_jax.worldbook.effects import EffectRunner, carry_out
from envace_jax.worldbook.ingest import observation_value
from envace_jax.worldbook.matching import implied_facts, match
from envace_jax.worldbook.notation import TermError, template_term
from envace_jax.worldbook.records import FAST_PATH_CONFIDENCE, StateMutation
from envace_jax.worldbook.rulebook import ActionRules, Choice, CompiledRule, compile_invariant, normal_effect
from envace_jax.worldbook.state import ABSENT, UNKNOWN, PMap, State, StateError, freeze, frozen_arguments, json_equal
from envace_jax.worldbook.store import Worldbook
from envace_jax.worldbook.terms import Scope, compile_term
from envace_jax.worldbook.workspace import MemoryItem, Session


class StepResult(NamedTuple):
    """What a step answered: the observation text and where it came from (``rule``, ``agent``, ``none``).

    ``cause`` says why the rules did not answer; ``rejected`` why the agent's effects were not committed.
    """

    text: str
    source: str
    outcome: str = "unknown"
    rule_id: str = ""
    cause: str = ""
    rejected: str = ""
    warnings: tuple[str, ...] = ()
    citations: tuple[str, ...] = ()
    calls: int = 0

    @property
    def value(self) -> Any:
        return observation_value(self.text)


@dataclass(frozen=True)
class Prediction:
    """What an agent submits for a call: effects, outcome, observation, the rules and items it rests on."""

    observation: str = ""
    outcome: str = "unknown"
    effects: tuple[StateMutation, ...] = ()
    rule_ids: tuple[str, ...] = ()
    citations: tuple[str, ...] = ()
    uncertainty: tuple[str, ...] = ()
    rationale: str = ""
    failed: str = ""
    calls: int = 0


class Agent(Protocol):
    """Answers what rules do not settle."""

    def predict(self, requests: Sequence[AgentRequest]) -> list[Prediction]: ...


@dataclass(frozen=True)
class AgentRequest:
    """A call to be answered in a session; ``cause`` says why no rule did, ``official`` is a caller's own prompt."""

    session: Session
    name: str
    arguments: dict[str, Any]
    cause: str = ""
    official: str = ""


@dataclass(frozen=True)
class HarnessConfig:
    """Trust ``rules_only`` refuses effects that no cited rule covers, ``schema_checked`` takes them if they are well
    typed; ``on_reject`` is ``fail`` (the step has no answer) or ``keep_observation`` (the text stays, effects go)."""

    trust: str = "schema_checked"
    on_reject: str = "keep_observation"
    fast_path: float = FAST_PATH_CONFIDENCE
    use_rules: bool = True
    track_state: bool = True


@dataclass
class HarnessStats:
    steps: int = 0
    by_rule: int = 0
    by_agent: int = 0
    unanswered: int = 0
    rejected: int = 0
    contradictions: int = 0
    causes: dict[str, int] = field(default_factory=dict)


class Tracker(Protocol):
    """Accounts for observed turns that no rule explained (`envace_jax.worldbook.tracker.StateTracker`)."""

    def catch_up(self, session: Session) -> Session: ...


class Harness:
    """Runs episodes in a worldbook. Without an agent, what rules do not settle stays unanswered (``source="none"``).

    With a `tracker`, observed turns that no rule explained are read before a call that rules do not settle goes on to
    the agent; where that makes a rule certain, the rule answers.
    """

    def __init__(self, worldbook: Worldbook, agent: Agent | None = None, config: HarnessConfig | None = None):
        self.worldbook = worldbook
        self.agent = agent
        self.tracker: Tracker | None = None
        self.config = config or HarnessConfig()
        self.stats = HarnessStats()
        floor = self.config.fast_path
        self._fast = worldbook.compiled(floor) if self.config.use_rules else {}
        self._all: dict[str, ActionRules] = worldbook.compiled(0.0) if self.config.use_rules else {}
        self._invariants = [(i, compile_invariant(i)) for i in worldbook.invariants]
        self._names = worldbook.canonical_names
        self._contracts = {name: c for c in reversed(worldbook.contracts) for name in c.action_types}

    # --- one step, many sessions

    def step(
        self, session: Session, name: str, arguments: Mapping[str, Any], official: str = ""
    ) -> tuple[Session, StepResult]:
        """The session after the call, and the answer."""
        return self.step_batch([(session, name, arguments)], [official])[0]

    def step_batch(
        self, calls: Sequence[tuple[Session, str, Mapping[str, Any]]], official: Sequence[str] | None = None
    ) -> list[tuple[Session, StepResult]]:
        """One step in each of several sessions: rules first, then one batch for the agent. Order is kept."""
        out: list[tuple[Session, StepResult] | None] = []
        asked: list[tuple[int, AgentRequest, State]] = []
        for session, name, arguments in calls:
            name = self._names.get(name, name)
            arguments = dict(arguments)  # what the caller does with his own later changes no memory
            state = session.state.advance()
            done, cause = self._by_rule(session, state, name, arguments)
            if done is None:
                request = AgentRequest(session, name, arguments, cause, official[len(out)] if official else "")
                asked.append((len(out), request, state))
            out.append(done)
        self.stats.steps += len(out)
        if asked and self.tracker is not None:
            asked = self._caught_up(self.tracker, asked, out)
        self.stats.by_rule += len(out) - len(asked)
        if asked:
            self._ask(asked, out)
        return [o for o in out if o is not None]

    def _by_rule(
        self, session: Session, state: State, name: str, arguments: dict[str, Any]
    ) -> tuple[tuple[Session, StepResult] | None, str]:
        """The step by rules, or None and why they do not settle it."""
        rules = self._fast.get(name)
        if rules is None:
            return None, _NO_RULES.cause
        choice = rules.choose(Scope(state.root, frozen_arguments(arguments)))
        if choice.rule is None:
            return None, choice.cause
        done = self._commit_rule(session, state, name, arguments, choice)
        return done, "" if done is not None else "refused"

    def _caught_up(
        self,
        tracker: Tracker,
        asked: list[tuple[int, AgentRequest, State]],
        out: list[tuple[Session, StepResult] | None],
    ) -> list[tuple[int, AgentRequest, State]]:
        """What is still to be asked once the tracker has read the turns that no rule explained."""
        late = [k for k, (_, request, _) in enumerate(asked) if request.session.unexplained]
        read = in_parallel(tracker.catch_up, [asked[k][1].session for k in late], TRACKED_AT_A_TIME)
        sessions = dict(zip(late, read))
        left = []
        for k, (index, request, state) in enumerate(asked):
            if k in sessions:
                state = sessions[k].state.advance()
                out[index], cause = self._by_rule(sessions[k], state, request.name, request.arguments)
                request = replace(request, session=sessions[k], cause=cause)
            if out[index] is None:
                left.append((index, request, state))
        return left

    def _commit_rule(
        self, session: Session, state: State, name: str, arguments: dict[str, Any], choice: Choice
    ) -> tuple[Session, StepResult] | None:
        rule = choice.rule
        assert rule is not None
        after = carry_out(state, choice.plan, rule.rule.id) if choice.plan else state
        if after is None or (choice.plan and self._broken(state, after)):
            return None
        item = MemoryItem(
            session.memory.length,
            "predicted",
            name,
            arguments,
            choice.text,
            "rule",
            rule.rule.outcome,
            choice.plan,
            (rule.rule.id,),
        )
        result = StepResult(choice.text, "rule", rule.rule.outcome, rule.rule.id)
        return session.remember(item, after), result

    def _ask(self, asked: list[tuple[int, AgentRequest, State]], out: list[tuple[Session, StepResult] | None]) -> None:
        for _, request, _ in asked:
            self.stats.causes[request.cause] = self.stats.causes.get(request.cause, 0) + 1
        if self.agent is None:
            answers = [Prediction(failed="no agent")] * len(asked)
        else:
            answers = self.agent.predict([r for _, r, _ in asked])
        for (index, request, state), prediction in zip(asked, answers):
            out[index] = self._commit_prediction(request, state, prediction)

    def _commit_prediction(
        self, request: AgentRequest, state: State, prediction: Prediction
    ) -> tuple[Session, StepResult]:
        session, name, arguments = request.session, request.name, request.arguments
        if prediction.failed:
            self.stats.unanswered += 1
            after = self._forget(state, name, arguments) if self.config.track_state else state
            item = MemoryItem(session.turn, "predicted", name, arguments, "", "none")
            result = StepResult("", "none", cause=request.cause, rejected=prediction.failed, calls=prediction.calls)
            return session.remember(item, after), result
        self.stats.by_agent += 1
        reason, plan, warnings = self.validate(state, name, arguments, prediction)
        after = state
        if reason:
            self.stats.rejected += 1
            if self.config.on_reject == "fail":
                item = MemoryItem(session.turn, "predicted", name, arguments, "", "none", warnings=(reason,))
                result = StepResult("", "none", cause=request.cause, rejected=reason, calls=prediction.calls)
                return session.remember(item, state), result
            warnings = (*warnings, f"effects dropped: {reason}")
        elif self.config.track_state:
            after = carry_out(state, plan, "agent") or state
        text = prediction.observation if reason else self._rendered(request, state, after, prediction)
        item = MemoryItem(
            session.turn,
            "predicted",
            name,
            arguments,
            text,
            "agent",
            prediction.outcome,
            () if reason else tuple(plan),
            prediction.citations,
            tuple(warnings),
        )
        session = session.remember(item, after)
        if self.config.track_state and not reason and not prediction.effects:
            session = self._absorb(session, state, name, arguments, text)
        result = StepResult(
            text,
            "agent",
            prediction.outcome,
            cause=request.cause,
            rejected=reason,
            warnings=tuple(warnings),
            citations=prediction.citations,
            calls=prediction.calls,
        )
        return session, result

    # --- validation

    def validate(
        self, state: State, name: str, arguments: Mapping[str, Any], prediction: Prediction
    ) -> tuple[str, list[Any], tuple[str, ...]]:
        """(reason for rejection or "", planned effects, warnings) of a prediction in a state."""
        warnings: list[str] = []
        scope = Scope(state.root, frozen_arguments(arguments), _frozen_text(prediction.observation))
        rules = self._all.get(name)
        covered: list[Any] = []
        for rule_id in prediction.rule_ids:
            known = rules is not None and any(r.rule.id == rule_id for r in rules.rules)
            if not known:
                return f"cites rule {rule_id!r}, which is not an executable rule of {name}", [], ()
            assert rules is not None
            if rules.applicable(rule_id, scope) is not True:
                return f"cites rule {rule_id!r}, whose conditions are not known to hold", [], ()
            rule = rules[rule_id]
            if rule.rule.outcome != prediction.outcome:
                return f"outcome {prediction.outcome!r} differs from rule {rule_id!r}", [], ()
            planned = rule.effects.plan(scope)
            if planned is None:
                return f"cites rule {rule_id!r}, whose effects cannot be worked out", [], ()
            covered += planned
        try:
            effects = [normal_effect(e) for e in prediction.effects]
            plan = EffectRunner(effects).plan(scope)
        except (ValueError, TermError, RecursionError) as error:
            return f"effects not well formed: {error}", [], ()
        if plan is None:
            return "an effect refers to something that is not known", [], ()
        for op, path, value, _ in plan:
            problem = self.worldbook.check_effect(op, path, value)
            if problem:
                return problem, [], ()
        if not _in_order([c[:3] for c in covered], [p[:3] for p in plan]):
            return "effects differ from those of the cited rules, or their order does", [], ()
        if self.config.trust == "rules_only" and [p[:3] for p in plan] != [c[:3] for c in covered]:
            return "effects that no cited rule covers", [], ()
        if prediction.effects and not prediction.rule_ids:
            warnings.append("effects without a cited rule")
        after = carry_out(state, plan, "agent")
        if after is None:
            return "the state does not allow the effects", [], ()
        broken = self._broken(state, after)
        if broken:
            return f"breaks invariant {broken}", [], ()
        contract = self._contracts.get(name)
        if contract is not None and contract.content_type == "json" and prediction.outcome == "success":
            value = observation_value(prediction.observation)
            lacking = [f for f in contract.required_fields if not isinstance(value, dict) or f not in value]
            if lacking and not self._render_of(name, prediction, scope):
                return f"the answer lacks {', '.join(lacking[:5])}, which every answer of {name} has", [], ()
        return "", plan, tuple(warnings)

    def _render_of(self, name: str, prediction: Prediction, scope: Scope) -> str:
        """The observation of the only rule that the prediction cites, or an empty text."""
        rules = self._all.get(name)
        if rules is None or len(prediction.rule_ids) != 1:
            return ""
        choice = rules[prediction.rule_ids[0]].prepare(Scope(scope.root, scope.args))
        return choice.text if choice.rule is not None else ""

    def _rendered(self, request: AgentRequest, before: State, after: State, prediction: Prediction) -> str:
        """The text of an accepted prediction: the template of its only rule, else its action's, else the agent's words.

        Where the caller's own prompt speaks of the action, that decides the form, and the agent's words stand.
        """
        if request.name in request.official:
            return prediction.observation
        args = frozen_arguments(request.arguments)
        text = self._render_of(request.name, prediction, Scope(before.root, args))
        contract = self._contracts.get(request.name)
        if not text and contract is not None and contract.template and prediction.outcome == "success":
            value = compile_term(template_term(contract.template))(Scope(after.root, args))
            text = value if isinstance(value, str) else ""
        return text or prediction.observation

    def _broken(self, before: State, after: State) -> str:
        """The first error invariant that holds (or is not known) before and is false after."""
        for invariant, test in self._invariants:
            if invariant.severity != "error":
                continue
            empty = PMap(closed=True)
            if test(Scope(after.root, empty)) is False and test(Scope(before.root, empty)) is not False:
                return invariant.id
        return ""

    # --- real observations

    def observe(self, session: Session, name: str, arguments: Mapping[str, Any], text: str) -> Session:
        """The session after a real observation: effects of the rule that it bears out, what it reveals, what it
        contradicts. Where no rule explains it, everything the action might touch becomes unknown."""
        name = self._names.get(name, name)
        state = session.state.advance()
        item = MemoryItem(session.turn, "observed", name, dict(arguments), text, "observation")
        session = session.remember(item, state)
        return self._absorb(session, state, name, arguments, text) if self.config.track_state else session

    def _absorb(self, session: Session, state: State, name: str, arguments: Mapping[str, Any], text: str) -> Session:
        rules = self._all.get(name)
        value = observation_value(text)
        args = frozen_arguments(arguments)
        try:
            out = freeze(value)
        except StateError:
            return session.with_state(state.apply("forget", ("world",), None, "unreadable observation"))
        scope = Scope(state.root, args)
        choice = _NO_RULES if rules is None else rules.choose(scope)
        if choice.rule is not None and (_same_text(choice.text, text) or json_equal(choice.value, value)):
            after = carry_out(state, choice.plan, choice.rule.rule.id)
            if after is not None:
                return session.with_state(after)
        if choice.rule is not None:
            session = session.contradicted()
            self.stats.contradictions += 1
        scope = Scope(state.root, args, out)
        fits: list[tuple[CompiledRule, list[Any]]] = []
        for override in (False, True):
            for rule in rules.rules if rules is not None else ():
                if rule.rule.render is None or (not override and self._ruled_out(rule, rules, scope)):
                    continue
                reveals = match(rule.rule.render, value, scope, override)
                if reveals is not None:
                    fits.append((rule, reveals))
            if fits:
                break
        if not fits:
            session = replace(session, unexplained=(*session.unexplained, session.turn - 1))
        return session.with_state(self._absorbed(state, name, arguments, scope, fits))

    def _absorbed(
        self,
        state: State,
        name: str,
        arguments: Mapping[str, Any],
        scope: Scope,
        fits: list[tuple[CompiledRule, list[Any]]],
    ) -> State:
        plans = {rule.plan_key if rule.rule.effects else "": rule for rule, _ in fits}
        if not fits or len(plans) > 1:
            return self._forget(state, name, arguments)
        shared = [r for r in fits[0][1] if all(r in other for _, other in fits[1:])]
        if len(fits) == 1:
            shared += [f for f in implied_facts(fits[0][0].rule.conditions, scope) if f not in shared]
        for path, seen in shared:
            try:
                op = "delete" if seen is ABSENT else "set"
                state = state.apply(op, path, None if seen is ABSENT else seen, "observed")
            except StateError:
                state = state.apply("forget", path[:1], None, "observed")
        rule = next(iter(plans.values()))
        if rule.rule.effects:
            inner = Scope(state.root, scope.args, scope.out)
            plan = rule.effects.plan(inner)
            after = None if plan is None else carry_out(state, plan, rule.rule.id)
            state = after if after is not None else rule.effects.forget(state, inner, rule.rule.id)
        return state

    def _ruled_out(self, rule: CompiledRule, rules: ActionRules | None, scope: Scope) -> bool:
        assert rules is not None
        return any(
            (answer := rules.tests[index](scope)) is not None and answer is not wanted
            for index, wanted in rule.conditions
        )

    def _forget(self, state: State, name: str, arguments: Mapping[str, Any]) -> State:
        """The state with everything that the action might have changed marked unknown."""
        if self.worldbook.is_read_only(name):
            return state
        rules = self._all.get(name)
        if rules is None or not rules.rules or self.worldbook.has_unexplained(name):
            return state.apply("forget", ("world",), None, f"{name}: unexplained")
        scope = Scope(state.root, frozen_arguments(arguments), UNKNOWN)
        for rule in rules.rules:
            if rule.rule.effects:
                state = rule.effects.forget(state, scope, f"{name}: unexplained")
        return state


_NO_RULES = Choice(None, "no_rule")
TRACKED_AT_A_TIME = 8


def _in_order(wanted: Sequence[Any], found: Sequence[Any]) -> bool:
    """Whether all that is wanted stands in what was found, in this order."""
    rest = iter(found)
    return all(any(item == other for other in rest) for item in wanted)


def _same_text(a: str, b: str) -> bool:
    return a == b or "".join(a.split()) == "".join(b.split())


def _frozen_text(text: str) -> Any:
    try:
        return freeze(observation_value(text))
    except StateError:
        return UNKNOWN
