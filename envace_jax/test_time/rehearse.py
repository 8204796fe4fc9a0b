"""Private rehearsals of a user's message, and the memory that they leave.

A `Rehearser` holds the chat format, the rules of an episode and a reviewer, and nothing else: no environment can be
reached from here. It is given a way to begin an episode for a text (`Start`), which makes rehearsing settings only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from envace_jax.rehearsal import episode
from envace_jax.rehearsal.episode import EpisodeState, Setting
from envace_jax.rehearsal.flow import Flow, Together, Voice, begin, rehearsal, say, user_says
from envace_jax.rehearsal.grounding import Grounding, NoGrounding
from envace_jax.rehearsal.settings import EpisodeConfig
from envace_jax.test_time.memory import Rehearsed, Reviewer
from envace_jax.test_time.plan import Plan
from envace_jax.text.tool_calls import after_thinking
from envace_jax.text.transcript import Message

Start = Callable[[Setting, str], EpisodeState]
"""Begins, under a setting, the episode in which the user has just said a text."""

PLAY_USER = """\
You play the user of an assistant. Below is the conversation so far. Write the user's next message: what this user \
would say, with nothing made up that the user was not shown to know. If everything that the user asked for is settled, \
write DONE and nothing else."""
DONE = "DONE"


@dataclass
class Spent:
    """Tokens generated, by what they were for."""

    by: dict[str, int] = field(default_factory=dict)

    def add(self, what: str, tokens: int) -> None:
        self.by[what] = self.by.get(what, 0) + tokens

    @property
    def total(self) -> int:
        return sum(self.by.values())


@dataclass(frozen=True)
class Memory:
    """What the rehearsals of one user message left: the text, and the rehearsals that it came from."""

    text: str = ""
    rehearsed: tuple[Rehearsed, ...] = ()


@dataclass(frozen=True)
class Rehearser:
    """Rehearses one user message by a plan (`parallel` or `sequential`)."""

    chat: Any
    cfg: EpisodeConfig
    plan: Plan
    grounding: Grounding = NoGrounding()

    @functools.cached_property
    def setting(self) -> Setting:
        """Calls are answered by REHEARSE; nothing is judged."""
        return Setting.make(self.chat, replace(self.cfg, judged=False), self.grounding)

    @functools.cached_property
    def reviewer(self) -> Reviewer:
        compact = self.cfg.rehearse_prompt == "compact"
        return Reviewer(self.chat, compact=compact, max_input_tokens=self.cfg.max_input_tokens)

    def memory(self, start: Start, text: str, voice: Voice, spent: Spent) -> Flow[Memory]:
        """N rehearsals, a self-evaluation after each, and one memory condensed from all of them."""
        plan = self.plan
        voice = replace(voice, act_params=plan.rehearser, rehearse_params=plan.rehearser)
        rehearsed: list[Rehearsed] = []
        if plan.kind == "parallel":
            flows = [self.one(start, text, voice.at(k), spent) for k in range(plan.n)]
            rehearsed = yield Together(flows)
        else:
            for k in range(plan.n):
                told = "\n\n".join(self.reviewer.tellings(rehearsed))
                noted = self.reviewer.attach(text, self.reviewer.within(told, plan.memory_tokens))
                rehearsed.append((yield from self.one(start, noted, voice.at(k), spent, text)))
        prompt = self.reviewer.memory_prompt(rehearsed, plan.memory_tokens)
        written, done = yield from say(voice.at(plan.n), self.chat, prompt, plan.memory_tokens)
        spent.add("memory", len(done.ids))
        memory = after_thinking(written).strip()
        return Memory(memory, tuple(rehearsed))

    def one(self, start: Start, text: str, voice: Voice, spent: Spent, original: str | None = None) -> Flow[Rehearsed]:
        """One rehearsal of a user message with its self-evaluation; `original` is the message without notes."""
        state = start(self.setting, text)
        before, past = len(state.segments), len(state.transcript)
        user = None if self.plan.user == "withheld" else functools.partial(self._user, voice, spent, past)
        state = yield from rehearsal(state, voice.at(0), user=user)
        spent.add("rehearsals", sum(len(segment.ids) for segment in state.segments[before:]))
        turns = state.transcript[past:]
        if original is not None and turns:
            turns = (replace(turns[0], user=original), *turns[1:])
        judged, done = yield from say(
            voice.at(1), self.chat, self.reviewer.evaluation_prompt(turns), self.plan.evaluation_tokens
        )
        spent.add("evaluations", len(done.ids))
        return Rehearsed(tuple(turns), self.reviewer.read_evaluation(judged))

    def _user(self, voice: Voice, spent: Spent, past: int, state: EpisodeState) -> Flow[str | None]:
        """The user's next message as the rehearsing policy imagines it."""
        imagined = len(state.transcript) - past
        if imagined > self.plan.user_turns:
            return None
        told = self.reviewer.story(state.transcript)
        prompt = self.chat.head_ids([Message("system", PLAY_USER), Message("user", told)], ())
        if len(prompt) >= self.cfg.max_input_tokens:
            return None
        text, done = yield from say(voice.at(2, imagined), self.chat, prompt, self.cfg.max_rehearse_tokens)
        spent.add("imagined user", len(done.ids))
        text = after_thinking(text).strip()
        return None if not text or text == DONE or done.finish != "stop" else text


def start_of(task: Any, before: EpisodeState | None) -> Start:
    """How episodes of a task begin, or go on after `before`, whose last turn is over. The past is shared."""

    def start(setting: Setting, text: str) -> EpisodeState:
        if before is None:
            return begin(setting, task, text)
        unjudged = replace(setting, cfg=replace(setting.cfg, judged=False))
        return user_says(before.but(setting=unjudged, rehearse_row=None, told=frozenset()), text)

    return start


def private(state: EpisodeState, setting: Setting) -> EpisodeState:
    """The same episode under a rehearsing setting: whatever happens to it, the real one stays as it is."""
    assert not setting.outside and state.phase is episode.Phase.ACT
    return state.but(setting=setting, rehearse_row=None, told=frozenset())
