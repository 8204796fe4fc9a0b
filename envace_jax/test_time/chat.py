"""`chat`: talk to the policy at the terminal, in a rehearsed world or in the real environment of a task.

Every call is shown with the answer it got and who gave it. With a test-time method the policy rehearses each message
first, and what it remembers is shown before it acts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ml_collections import ConfigDict

from envace_jax.config import UserError
from envace_jax.datasets.records import Task
from envace_jax.environments import Environment, make_environment
from envace_jax.options import whole
from envace_jax.rehearsal.episode import EpisodeState, Setting
from envace_jax.rehearsal.flow import Voice, real_run, rehearsal, run_flows
from envace_jax.rehearsal.grounding import Grounding, NoGrounding, make_grounding
from envace_jax.rehearsal.prompts import call_text
from envace_jax.rehearsal.settings import EpisodeConfig
from envace_jax.test_time.plan import NAMES, Plan, read_plan
from envace_jax.test_time.rehearse import Rehearser, Spent, start_of
from envace_jax.text.transcript import Message, Turn

HELP = "your message, or /quit; an empty line takes the task's own next message"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", type=whole(0), default=0, help="number of the held-out task whose world it is")
    parser.add_argument("--real", action="store_true", help="the task's real environment answers, not the policy")
    parser.add_argument(
        "--mcp",
        metavar="SERVER",
        help="an MCP server is the real environment: a command in quotes, or an http(s) address",
    )
    parser.add_argument("--test_time", default="none", metavar="METHOD", help=NAMES)


def run_chat(cfg: ConfigDict, args: argparse.Namespace) -> None:
    from envace_jax.build import chat_format, load_model, make_engine, mesh_for
    from envace_jax.datasets.sources import load_tasks

    plan = read_plan(args.test_time)
    if plan.kind not in ("none", "parallel", "sequential"):
        raise UserError(f"--test_time {args.test_time}: chat takes rehearse-parallel-N or rehearse-sequential-N")
    environment = None
    if args.mcp:
        from envace_jax.mcp_environment import McpEnvironment, McpServer

        environment = McpEnvironment(McpServer.read(args.mcp))
        environment.reset()
        task = Task("mcp", "mcp", (Message("user", ""),), environment.tools, ())
    else:
        _, tasks = load_tasks(cfg.data)
        if not 0 <= args.task < len(tasks):
            raise UserError(f"--task {args.task}: there are {len(tasks)} held-out tasks, counted from 0")
        task = tasks[args.task]
    chat = chat_format(cfg)
    spec, params = load_model(cfg, chat, mesh_for(cfg))
    talk = Talk(
        task,
        make_engine(cfg, spec, params),
        chat,
        EpisodeConfig.from_config(cfg, judged=False),
        real=args.real,
        environment=environment,
        plan=plan,
        grounding=make_grounding(cfg.rollout.grounding, cfg.rollout.worldbook),
        voice=Voice((cfg.seed,), cfg.evaluation.temperature, cfg.evaluation.top_p),
    )
    world = "real environment" if talk.environment is not None else "rehearsed world"
    print(f"task {talk.task.uuid}, {world}, tools: {', '.join(talk.task.tool_names)}\n{HELP}")
    loop(talk, input, print)


def loop(talk: Talk, read: Callable[[str], str], show: Callable[[str], Any]) -> None:
    """Reads messages until /quit, the end of input, or an episode that cannot go on."""
    users = iter(talk.task.user_turns)
    while True:
        try:
            text = read("you> ").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if text == "/quit":
            return
        if not text:
            text = next(users, "")
            if not text:
                show("(the task has no further message)")
                continue
            show(f"you> {text}")
        for line in talk.say(text):
            show(line)
        if talk.over:
            show(f"(the conversation ended: {talk.over})")
            return


class Talk:
    """One conversation. `say` plays a turn and gives what to show; `over` says why it cannot go on, once it cannot."""

    def __init__(
        self,
        task: Task,
        engine: Any,
        chat: Any,
        cfg: EpisodeConfig,
        *,
        real: bool = False,
        environment: Environment | None = None,
        plan: Plan = Plan(),
        grounding: Grounding = NoGrounding(),
        voice: Voice = Voice(),
    ) -> None:
        self.task, self.engine, self.chat, self.voice, self.over = task, engine, chat, voice, ""
        self.environment = make_environment(task) if real and environment is None else environment
        real = self.environment is not None
        rules = replace(cfg, parser="lenient", checks=("format",)) if real else replace(cfg, parser="lenient")
        self.setting = Setting.make(chat, rules, NoGrounding() if real else grounding, outside=real)
        self.plan = plan
        self.rehearser = Rehearser(chat, cfg, plan, grounding)
        self.state: EpisodeState | None = None

    def say(self, text: str) -> list[str]:
        """The turn of one user message, as lines."""
        turn = 0 if self.state is None else len(self.state.transcript)
        shown: list[str] = []
        start, told = start_of(self.task, self.state), text
        if self.plan.kind != "none":
            spent = Spent()
            memory = self._run(self.rehearser.memory(start, text, self.voice.at(turn, 1), spent))
            told = self.rehearser.reviewer.attach(text, memory.text)
            scores = [r.evaluation.score if r.evaluation else None for r in memory.rehearsed]
            shown.append(f"  (rehearsed {len(scores)} times, self-evaluations {scores}, {spent.total} tokens)")
            shown += [f"  (remembers) {line}" for line in memory.text.splitlines() or ["nothing"]]
        begun = start(self.setting, told)
        here = self.voice.at(turn, 0)
        flow = rehearsal(begun, here) if self.environment is None else real_run(begun, here, self.environment)
        self.state = self._run(flow)
        if self.state.end_reason != "completed":
            cut = self.state.end_reason == "masked"
            self.over = str(self.state.masked_cause) if cut else self.state.end_reason
        return shown + turn_lines(self.state.transcript[-1])

    def _run(self, flow: Any) -> Any:
        return next(run_flows([(None, flow)], self.engine))[1]


def turn_lines(turn: Turn) -> list[str]:
    """Calls, their answers and the reply of a turn, as lines."""
    out = []
    for step in turn.steps:
        if step.output.thinking and step.output.thinking.strip():
            out.append(f"  (thinks) {step.output.thinking.strip()}")
        for k, call in enumerate(step.output.calls):
            out.append(f"  -> {call_text(call)}")
            if k < len(step.observations):
                out.append(f"  <- {step.observations[k].text}  [{step.observations[k].source}]")
        if step.output.error_code:
            out.append(f"  !! {step.output.error_code}: {step.output.error_message}")
        if step.output.reply:
            out.append(f"assistant> {step.output.reply}")
    return out
