"""One committed run in the real environment, by any test-time method: after private rehearsals, or as a control.

Whatever is private happens in a `Rehearser`, which holds no environment; the environment is stepped by the committed
run alone (and, in the control `trials`, by trials in forks of it). All tokens are counted, by what they were for.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from envace_jax.datasets.records import Task
from envace_jax.environments import Environment, make_environment
from envace_jax.rehearsal import episode
from envace_jax.rehearsal.episode import EpisodeState, Need, Setting
from envace_jax.rehearsal.flow import (
    Flow,
    Together,
    User,
    Voice,
    begin,
    real_run,
    rehearsal,
    sample,
    say,
    scripted_user,
)
from envace_jax.rehearsal.grounding import Grounding, NoGrounding
from envace_jax.rehearsal.settings import EpisodeConfig
from envace_jax.rehearsal.trajectory import Trajectory
from envace_jax.sampling.engine import Completion
from envace_jax.test_time.plan import MAX_N, Plan
from envace_jax.test_time.rehearse import Memory, Rehearser, Spent, private, start_of
from envace_jax.text.tool_calls import parse_assistant
from envace_jax.text.transcript import AssistantOutput, Step, Transcript, Turn, canonical_json

Counted = dict[str, Any]
Simulator = Callable[[Task], Callable[[EpisodeState | None], "Flow[str | None]"]]
"""A user for a task: asked with None it opens the conversation."""

_Tried = tuple[EpisodeState, Environment, float]
"""A trial of a turn: how it ended, its fork, and the policy's own score of it."""

GOOD_ENOUGH = 0.5
"""A step-wise rehearsal evaluated at least so is committed."""


@dataclass(frozen=True)
class Committed:
    """Plays a task: `(task, voice)` -> its trajectory in the real environment and what it took.

    Attributes:
        chat: the chat format.
        cfg: rules of the committed run.
        private_cfg: rules of rehearsals.
        plan: the test-time method; none is one plain run.
        grounding: what REHEARSE may look at in private; nothing unless given.
        turn_steps: ACT outputs that a turn may take, 0: no limit.
        budgets: `Plan.budget` by task, for controls that are to cost about what another method cost.
        simulator: who the user is; the task's own messages unless given.
        make: makes a fresh environment.
    """

    chat: Any
    cfg: EpisodeConfig
    private_cfg: EpisodeConfig | None = None
    plan: Plan = Plan()
    grounding: Grounding = NoGrounding()
    turn_steps: int = 0
    budgets: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    simulator: Simulator | None = None
    make: Callable[[Task], Environment] = make_environment

    @functools.cached_property
    def setting(self) -> Setting:
        """Of the committed run; shared by all episodes, so that heads are encoded once."""
        chat, cfg = self.chat, replace(self.cfg, judged=False)
        if self.plan.kind == "think":
            chat = replace(chat, thinking=True)
            cfg = replace(cfg, max_act_tokens=cfg.max_act_tokens * (self.plan.n + 1))
        return Setting.make(chat, cfg, NoGrounding(), outside=True)

    @functools.cached_property
    def rehearser(self) -> Rehearser:
        """All that is private."""
        return Rehearser(self.chat, self.private_cfg or self.cfg, self.plan, self.grounding)

    def __call__(self, task: Task, voice: Voice) -> Flow[tuple[Trajectory, Counted]]:
        spent, memories = Spent(), list[Memory]()
        text, user = yield from self._opening(task)
        said = [text]

        def prepared(before: EpisodeState | None, text: str) -> Flow[str]:
            turn = 0 if before is None else len(before.transcript)
            if self.plan.kind not in ("parallel", "sequential") or (turn and not self.plan.every_turn):
                return text
            here = voice.at(1, turn)
            memory = yield from self.rehearser.memory(start_of(task, before), text, here, spent)
            memories.append(memory)
            return self.rehearser.reviewer.attach(text, memory.text)

        def speaks(state: EpisodeState) -> Flow[str | None]:
            # The user never sees a memory: it stands in the policy's copy of the message alone.
            heard = state.but(transcript=_as_said(state.transcript, said))
            text = yield from user(heard)
            if text is not None:
                said.append(text)
            return text

        def prepared_user(state: EpisodeState) -> Flow[str | None]:
            text = yield from speaks(state)
            return None if text is None else (yield from prepared(state, text))

        environment = self.make(task)
        if self.plan.kind == "trials":
            state = yield from self._trials(task, voice, environment, text, speaks, spent)
        else:
            state = begin(self.setting, task, (yield from prepared(None, text)))
            state = yield from real_run(
                state,
                voice.at(0),
                environment,
                user=prepared_user,
                turn_steps=self.turn_steps,
                act=self._act(spent),
            )
        trajectory = episode.trajectory(state)
        trajectory = replace(trajectory, transcript=_as_said(trajectory.transcript, said), task=task)
        return trajectory, self._counted(trajectory, spent, memories)

    def _opening(self, task: Task) -> Flow[tuple[str, User]]:
        """The user's first message, and who speaks after it."""
        if self.simulator is None:
            return task.user_turns[0], scripted_user(task)
        user = self.simulator(task)
        first = yield from user(None)
        return first or "", user

    def _counted(self, trajectory: Trajectory, spent: Spent, memories: Sequence[Memory]) -> Counted:
        committed = sum(len(segment.ids) for segment in trajectory.segments)
        counted: Counted = {"tokens": committed + spent.total}
        if self.plan.kind != "none":
            counted |= {"method": self.plan.name, "tokens_committed": committed, "tokens_private": dict(spent.by)}
        if memories:
            evaluations = [r.evaluation for memory in memories for r in memory.rehearsed]
            counted |= {
                "memories": [memory.text for memory in memories],
                "evaluations_unread": sum(e is None or e.score is None for e in evaluations),
                "evaluations": [None if e is None else e.score for e in evaluations],
            }
        return counted

    # --- ACT outputs that are more than one sample ----------------------------------------------------------------

    def _act(self, spent: Spent) -> Callable[[EpisodeState, Need, Voice], Flow[Completion]] | None:
        choosers = {"stepwise": self._stepwise, "best": self._best, "vote": self._vote}
        if self.budgets or self.plan.budget[0]:
            choosers["think"] = self._think
        chooser = choosers.get(self.plan.kind)
        return None if chooser is None else functools.partial(chooser, spent)

    def _budget(self, task: Task) -> tuple[int, int]:
        return self.budgets.get(task.uuid, self.plan.budget)

    def _think(self, spent: Spent, state: EpisodeState, need: Need, voice: Voice) -> Flow[Completion]:
        """One output that may be as long as what is left of the budget, and never less than without a method."""
        tokens, _ = self._budget(state.task)
        if tokens:
            need = replace(need, max_tokens=max(self.cfg.max_act_tokens, tokens - _used(spent, state)))
        return (yield from sample(state, need, voice))

    def _candidates(self, spent: Spent, state: EpisodeState, need: Need, voice: Voice) -> Flow[list[Completion]]:
        """N samples of one output, or as many as the budget's share for it allows (at least one)."""
        tokens, acts = self._budget(state.task)
        if not tokens:
            flows = [sample(state, need, voice.at(need.segment, k)) for k in range(self.plan.n)]
            return (yield Together(flows))
        allowed = tokens * min(1.0, (state.acts + 1) / max(1, acts))
        so_far = _used(spent, state)
        done: list[Completion] = []
        while not done or (so_far + sum(len(c.ids) for c in done) < allowed and len(done) < MAX_N):
            done.append((yield from sample(state, need, voice.at(need.segment, len(done)))))
        return done

    def _best(self, spent: Spent, state: EpisodeState, need: Need, voice: Voice) -> Flow[Completion]:
        """The candidate that the policy evaluates best; its calls have no results yet."""
        done = yield from self._candidates(spent, state, need, voice)
        evaluations = [
            self._evaluate(spent, self._with(state, c), voice.at(need.segment, k, 1)) for k, c in enumerate(done)
        ]
        scores = yield Together(evaluations)
        best = max(range(len(done)), key=lambda k: (scores[k], -k))
        return self._keep(spent, done, best)

    def _vote(self, spent: Spent, state: EpisodeState, need: Need, voice: Voice) -> Flow[Completion]:
        """The first candidate with the most frequent action: the same calls, or a reply of any words."""
        done = yield from self._candidates(spent, state, need, voice)
        actions = [_action(self._parsed(c)) for c in done]
        counts = Counter(actions)
        return self._keep(spent, done, max(range(len(done)), key=lambda k: (counts[actions[k]], -k)))

    def _stepwise(self, spent: Spent, state: EpisodeState, need: Need, voice: Voice) -> Flow[Completion]:
        """Rehearses an output's calls before they are made: the first candidate that is good enough, else the best."""
        done: list[Completion] = []
        scores: list[float] = []
        for k in range(self.plan.n):
            completion = yield from sample(state, need, voice.at(need.segment, k))
            done.append(completion)
            imagined = episode.receive(
                private(state, self.rehearser.setting), completion.ids, completion.logprobs, completion.finish
            )
            if imagined.phase is not episode.Phase.REHEARSE:  # a reply, or an output without a call to imagine
                return self._keep(spent, done, k)
            here = voice.at(need.segment, k, 1)
            here = replace(here, act_params=self.plan.rehearser, rehearse_params=self.plan.rehearser)
            before = len(imagined.segments)
            imagined = yield from rehearsal(imagined, here, until=lambda _: True)
            spent.add("rehearsals", sum(len(segment.ids) for segment in imagined.segments[before:]))
            turn = imagined.history[-1] if imagined.phase is not episode.Phase.DONE else imagined.transcript[-1]
            scores.append((yield from self._evaluate(spent, turn, here.at(1))))
            if scores[-1] >= GOOD_ENOUGH:
                return self._keep(spent, done, k)
        return self._keep(spent, done, max(range(len(done)), key=lambda k: (scores[k], -k)))

    def _keep(self, spent: Spent, done: Sequence[Completion], chosen: int) -> Completion:
        spent.add("candidates", sum(len(c.ids) for k, c in enumerate(done) if k != chosen))
        return done[chosen]

    def _evaluate(self, spent: Spent, turn: Turn, voice: Voice) -> Flow[float]:
        """The policy's own score of a turn; -1 where it cannot be read, which loses against any score."""
        reviewer = self.rehearser.reviewer
        text, done = yield from say(voice, self.chat, reviewer.evaluation_prompt([turn]), self.plan.evaluation_tokens)
        spent.add("evaluations", len(done.ids))
        score = reviewer.read_evaluation(text).score
        return -1.0 if score is None else score

    def _parsed(self, completion: Completion) -> AssistantOutput:
        stopped = completion.finish == "stop" and completion.ids[-1:] == tuple(self.chat.stop_ids)[:1]
        text = self.chat.tokenizer.decode(completion.ids[:-1] if stopped else completion.ids)
        return parse_assistant(text, mode=self.cfg.parser, truncated=completion.finish == "length")

    def _with(self, state: EpisodeState, completion: Completion) -> Turn:
        """The current turn as it would stand with an output, its calls unanswered."""
        turn = state.history[-1]
        return replace(turn, steps=(*turn.steps, Step(self._parsed(completion), ())))

    # --- trials in forks of the environment -----------------------------------------------------------------------

    def _trials(
        self, task: Task, voice: Voice, environment: Environment, text: str, user: User, spent: Spent
    ) -> Flow[EpisodeState]:
        state: EpisodeState | None = None
        turn = 0
        while True:
            start = start_of(task, state)
            past = 0 if state is None else len(state.segments)
            flows = (
                self._trial(start(self.setting, text), environment.fork(), voice.at(0, turn, k), spent)
                for k in range(MAX_N)
            )
            if self._budget(task)[0]:
                ran = yield from self._until_spent(task, spent, past, flows)
            else:
                ran = yield Together(list(itertools.islice(flows, self.plan.n)))
            best = max(range(len(ran)), key=lambda k: (ran[k][2], -k))
            for k, (tried, _, _) in enumerate(ran):
                if k != best:
                    spent.add("trials", sum(len(segment.ids) for segment in tried.segments[past:]))
            state, environment, _ = ran[best]
            said = None
            if state.end_reason == "completed":
                said = yield from user(state)
            if said is None:
                return state
            text, turn = said, turn + 1

    def _until_spent(self, task: Task, spent: Spent, past: int, flows: Iterable[Flow[_Tried]]) -> Flow[list[_Tried]]:
        """Trials of one turn, one after the other, until the budget's share for the outputs so far is spent.

        The last turn of a scripted user gets all that is left.
        """
        tokens, acts = self._budget(task)
        ran: list[_Tried] = []
        for flow in flows:
            ran.append((yield from flow))
            state = ran[-1][0]
            last = self.simulator is None and len(state.transcript) >= len(task.user_turns)
            allowed = tokens if last else tokens * min(1.0, max(one.acts for one, _, _ in ran) / max(1, acts))
            before = sum(len(segment.ids) for segment in state.segments[:past])
            if spent.total + before + sum(len(s.ids) for one, _, _ in ran for s in one.segments[past:]) >= allowed:
                break
        return ran

    def _trial(
        self, state: EpisodeState, environment: Environment, voice: Voice, spent: Spent
    ) -> Flow[_Tried]:
        """One turn in a fork of its own, and how the policy evaluates it."""
        state = yield from real_run(state, voice.at(0), environment, turn_steps=self.turn_steps)
        score = yield from self._evaluate(spent, state.transcript[-1], voice.at(1))
        return state, environment, score


def _used(spent: Spent, state: EpisodeState) -> int:
    """All tokens so far, those of the episode as it stands included."""
    return spent.total + sum(len(segment.ids) for segment in state.segments)


def _action(output: AssistantOutput) -> str:
    if output.error_code is not None:
        return "error"
    calls = [[call.name, dict(sorted(call.arguments.items()))] for call in output.calls]
    return canonical_json(calls) if calls else "reply"


def _as_said(transcript: Transcript, said: Sequence[str]) -> Transcript:
    """The transcript with the user's own words, without the memories under them."""
    return tuple(replace(turn, user=text) for turn, text in zip(transcript, said))
