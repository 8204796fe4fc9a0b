"""Rehearsal against real environments: teacher-forced, free-running, and sim-to-real replay.

*Teacher-forced*: after a true history REHEARSE answers one call; its answer is set beside the environment's own. The
calls are the tasks' reference calls, and one call a task whose predecessor was left out, which often makes it one
that must be refused. *Free-running*: the reference calls again, each answered after REHEARSE's own earlier answers; the
first step at which they part is kept. *Sim-to-real*: the policy acts in its rehearsal, and its calls are replayed for
real: Real (success in the environment), WM (the checklist passed in rehearsal), W2R (the rehearsed calls, replayed),
CR = W2R / Real, and the gap WM - W2R: how far rehearsals flatter. It is watched because a policy that writes its own
world could learn to pass there alone. Where a rehearsal has no verdict (ScienceWorld's tasks have no checklist) WM and
the gap leave it out.

Beside REHEARSE stand two predictors that know nothing, `accepts` (an empty object for everything) and `nearest` (a
schema check, then the closest record of the same tool in other tasks), and the ceiling `replay`, the environment
itself, asked again.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from envace_jax.config import UserError
from envace_jax.datasets.records import RecordedCall, Task
from envace_jax.environments import is_rejection, make_environment, may_write
from envace_jax.evaluation.benchmarks import BENCHMARKS, Benchmark
from envace_jax.evaluation.fidelity import Pair, compare, parse, rejection_intervals, report
from envace_jax.evaluation.next_observation import Answer, Results, Row, judge_rows
from envace_jax.evaluation.quickstart import FidelityCase, ask_rehearse
from envace_jax.evaluation.results import digest, versions
from envace_jax.evaluation.shown import Watched
from envace_jax.evaluation.stats import cluster_bootstrap
from envace_jax.rehearsal import episode
from envace_jax.rehearsal.episode import Need, Setting
from envace_jax.rehearsal.flow import Flow, Voice, run_flows, sample
from envace_jax.rehearsal.grounding import Grounding, NoGrounding, closest
from envace_jax.rehearsal.prompts import PromptWriter
from envace_jax.rehearsal.rollout import rollout
from envace_jax.rehearsal.settings import EpisodeConfig, RolloutConfig
from envace_jax.rehearsal.teacher import demonstrate
from envace_jax.rewards.judge import RuleJudge
from envace_jax.rewards.verifiers import json_equal, turn_calls
from envace_jax.text.tool_schema import check_call
from envace_jax.text.transcript import Message, Role, ToolCall, canonical_json
from envace_jax.worldbook.completer import Completer

SEED = 0
"""Decides which call of a task loses its predecessor."""


@dataclass(frozen=True)
class Probe:
    """One call after a true history: REHEARSE's prompt with what is known of the answer, and for the predictors that
    stand beside it the task, the call, and the calls before it.

    `after_write`: a read after the state was changed in this episode.
    """

    case: FidelityCase
    task: Task
    call: ToolCall
    before: tuple[ToolCall, ...]
    after_write: bool = False


def probes(
    tasks: Sequence[Task], chat: Any, cfg: EpisodeConfig, *, grounding: Grounding | None = None, drops: bool = True
) -> list[Probe]:
    """The teacher-forced set: every reference call, and with `drops` one a task whose predecessor is left out.

    `grounding` is what REHEARSE may look at; nothing unless given.
    """
    grounding = grounding or NoGrounding()
    out: list[Probe] = []
    for task in tasks:
        calls = [ToolCall(c.name, c.arguments) for c in task.recorded_calls]
        out += _probes(task, calls, task.messages, chat, cfg, grounding)
        if drops and len(calls) > 1:
            k = random.Random(f"drop/{SEED}/{task.uuid}").randrange(1, len(calls))
            made = [*calls[: k - 1], calls[k]]
            shown = _dialogue(task, made)
            out += _probes(replace_messages(task, shown), made, shown, chat, cfg, grounding, task)[-1:]
    return out


def replace_messages(task: Task, messages: Sequence[Message]) -> Task:
    """The task with another dialogue of one turn (its checklists, which belong to the old one, are dropped)."""
    return replace(task, messages=tuple(messages), checklists=())


def _dialogue(task: Task, calls: Sequence[ToolCall]) -> list[Message]:
    """One turn in which some calls are made and really answered."""
    environment = make_environment(task)
    head = [message for message in task.messages[:1] if message.role == "system"]
    out = [*head, Message("user", "\n\n".join(task.user_turns))]
    for call in calls:
        out.append(Message("assistant", "", None, (call,)))
        out.append(Message("tool", canonical_json(environment.step(call.name, call.arguments))))
    return [*out, Message("assistant", "Done.")]


def _probes(
    task: Task,
    calls: Sequence[ToolCall],
    messages: Sequence[Message],
    chat: Any,
    cfg: EpisodeConfig,
    grounding: Grounding,
    original: Task | None = None,
) -> list[Probe]:
    # The host answers nothing, and no prompt is trimmed: whoever asks leaves out what is too long.
    everything = replace(cfg, checks=(), max_input_tokens=1 << 30, max_acts=1 << 20, max_segments=1 << 20)
    watched, writer = Watched(grounding), PromptWriter(chat, everything)
    played = demonstrate(task, chat, everything, messages, grounding=_Fixed(watched, original or task))
    answered = [pair for turn in played.transcript for pair in turn_calls(turn)]
    asked = [segment for segment in played.segments if segment.role is Role.REHEARSE]
    environment = make_environment(original or task)
    out = []
    state, written = environment.state_hash(), False
    name = (original or task).meta["environment"]
    for k, ((call, observation), segment) in enumerate(zip(answered, asked)):
        assert observation is not None
        actual = environment.step(call.name, call.arguments)
        now = environment.state_hash()
        changed, state = now != state, now
        writes = may_write(name, call.name, call.arguments)
        prompt = played.rows[segment.row].ids[: segment.start]
        pair = Pair(
            tool=call.name,
            predicted=None,
            actual=canonical_json(actual),
            writes=writes,
            copyable=watched.shows(prompt, call, canonical_json(actual), writer),
            distance=k,
            group=(original or task).uuid,
            changed=changed,
        )
        case = FidelityCase(prompt, pair)
        out.append(Probe(case, original or task, call, tuple(calls[:k]), written and not writes))
        written |= changed
    return out


class _Fixed:
    """A grounding that looks at the original task, whatever dialogue is shown."""

    def __init__(self, inner: Grounding, task: Task) -> None:
        self.inner, self.task = inner, task

    def brief(self, task: Task, state: Any, call: ToolCall) -> Any:
        return self.inner.brief(self.task, state, call)


# --- predictors -------------------------------------------------------------------------------------------------------


def predictions(
    asked: Sequence[Probe], engine: Any, chat: Any, *, max_tokens: int, param_set: str = "policy"
) -> dict[str, list[Pair]]:
    """What each predictor answers to the probes: `rehearse`, `accepts`, `nearest`, `replay`."""
    pools: dict[str, dict[str, list[RecordedCall]]] = {}
    for task in {probe.task.uuid: probe.task for probe in asked}.values():
        for record in task.recorded_calls:
            pools.setdefault(record.name, {}).setdefault(task.uuid, []).append(record)
    return {
        "rehearse": ask_rehearse([p.case for p in asked], engine, chat, max_tokens=max_tokens, param_set=param_set),
        "accepts": [replace(p.case.pair, predicted="{}") for p in asked],
        "nearest": [replace(p.case.pair, predicted=_nearest(p, pools)) for p in asked],
        "replay": [replace(p.case.pair, predicted=_replayed(p)) for p in asked],
    }


def _nearest(probe: Probe, pools: dict[str, dict[str, list[RecordedCall]]]) -> str:
    error = check_call(probe.call, probe.task.tools)
    if error is not None:
        return canonical_json({"error_tool_call": {"code": error.code, "message": error.message}})
    others = pools.get(probe.call.name, {})
    pool = tuple(r for uuid, part in others.items() if uuid != probe.task.uuid for r in part)
    found = closest(pool, probe.call, 1)
    return found[-1].result if found else "{}"


def _replayed(probe: Probe) -> str:
    environment = make_environment(probe.task)
    for call in probe.before:
        environment.step(call.name, call.arguments)
    return canonical_json(environment.step(probe.call.name, probe.call.arguments))


def fidelity_report(asked: Sequence[Probe], predicted: dict[str, list[Pair]]) -> dict[str, dict[str, dict[str, float]]]:
    """`fidelity.report` of every predictor, with reads after a write, and intervals of the means by trajectory."""
    out: dict[str, dict[str, dict[str, float]]] = {}
    for name, pairs in predicted.items():

        def rejects(value: Any) -> bool:
            kinds = {probe.task.meta["environment"] for probe in asked}
            return any(is_rejection(kind, value) for kind in kinds)

        out[name] = report(pairs, rejects)
        later = [pair for pair, probe in zip(pairs, asked) if probe.after_write]
        if later:
            out[name] |= {"read_after_write": report(later, rejects)["all"]}
        for metric in ("json_equal", "leaf_f1"):
            values = [float(getattr(compare(pair, rejects), metric)) for pair in pairs]
            interval = cluster_bootstrap(values, [pair.group for pair in pairs])
            out[name]["all"] |= {f"{metric}_low": interval.low, f"{metric}_high": interval.high}
        decided = [compare(pair, rejects) for pair in pairs]
        out[name]["all"] |= rejection_intervals(
            [(one.rejects, one.rejected) for one in decided], [pair.group for pair in pairs]
        )
    return out


def judged(asked: Sequence[Probe], answers: Sequence[Pair], judge: Completer, benchmark: Benchmark) -> dict[str, Any]:
    """The five-dimension grade (0..100) of the answers: `domain_mean`, the mean of the benchmark's categories, each in
    `domains`; how many were graded (`n`) and how many the judge failed on (`excluded`)."""
    rows = []
    for k, probe in enumerate(asked):
        environment = make_environment(probe.task)
        history = tuple(
            (call.name, call.arguments, canonical_json(environment.step(call.name, call.arguments)))
            for call in probe.before
        )
        domain, pair = benchmark.category(probe.task), probe.case.pair
        rows.append(Row(str(k), domain, pair.group, pair.tool, probe.call.arguments, pair.actual, history))
    given = [Answer(row.id, pair.predicted, "rehearse") for row, pair in zip(rows, answers)]
    grades = judge_rows(judge, rows, given)
    table = Results("rehearse", rows, {"judge": grades}).table(1_000)["judge"]
    table = table or {"domain_mean": math.nan, "domains": {}}
    n = sum(not math.isnan(grade) for grade in grades)
    return {"n": n, "excluded": len(grades) - n, "domain_mean": table["domain_mean"], "domains": table["domains"]}


# --- free running -----------------------------------------------------------------------------------------------------


def free_running(
    tasks: Sequence[Task], engine: Any, chat: Any, cfg: EpisodeConfig, *, grounding: Grounding | None = None
) -> dict[str, Any]:
    """The reference calls answered after REHEARSE's own earlier answers, greedily.

    Gives `equal` (share of steps JSON-equal to the real answer), `intact` (share of tasks without a wrong step),
    `first_divergence` (task -> step from 0, or None) and `median_divergence` over the tasks that part.
    """
    setting = Setting.make(chat, replace(cfg, checks=(), judged=False), grounding or NoGrounding())
    voice = Voice((SEED,), temperature=0.0)
    flows = ((task.uuid, _free(task, setting, voice.at(k))) for k, task in enumerate(tasks))
    first: dict[str, int | None] = {}
    equal = steps = 0
    for uuid, outcomes in run_flows(flows, engine):
        first[uuid] = next((k for k, same in enumerate(outcomes) if not same), None)
        equal, steps = equal + sum(outcomes), steps + len(outcomes)
    parted = sorted(step for step in first.values() if step is not None)
    return {
        "equal": equal / steps if steps else math.nan,
        "intact": sum(step is None for step in first.values()) / len(first) if first else math.nan,
        "median_divergence": parted[len(parted) // 2] if parted else math.nan,
        "first_divergence": first,
    }


def _free(task: Task, setting: Setting, voice: Voice) -> Flow[list[bool]]:
    chat = setting.chat
    outputs = [message for message in task.messages if message.role == "assistant"]
    limits = replace(setting.cfg, max_act_tokens=1 << 30, max_acts=1 << 20, max_segments=1 << 20)
    state = episode.start(replace(setting, cfg=limits), task)  # the prompts' own limit stays the writer's
    said = 0
    while isinstance(need := episode.next_request(state), Need):
        if need.role is Role.ACT:
            ids = tuple(chat.output_ids(outputs[said]))
            state, said = episode.receive(state, ids, (0.0,) * len(ids), "stop"), said + 1
        else:
            done = yield from sample(state, need, voice)
            state = episode.receive(state, done.ids, done.logprobs, done.finish)
    answered = [observation for turn in state.transcript for _, observation in turn_calls(turn)]
    return [
        observation is not None and json_equal(parse(observation.text)[1], parse(record.result)[1])
        for observation, record in zip(answered, task.recorded_calls)
    ]


# --- sim to real ------------------------------------------------------------------------------------------------------


def sim_to_real(
    benchmark: Benchmark,
    tasks: Sequence[Task],
    engine: Any,
    chat: Any,
    cfg: RolloutConfig,
    *,
    seed: int = 0,
    grounding: Grounding | None = None,
) -> dict[str, Any]:
    """Real, WM, W2R, CR and the gap WM - W2R with its interval; one episode a task in each world, sampled alike."""
    from envace_jax.evaluation.play import play, real_config
    from envace_jax.test_time.commit import Committed

    wm: dict[str, float] = {}
    w2r: dict[str, float] = {}
    for judged in (True, False):
        part = [t for t in tasks if judged == any(items for turns in t.checklists for items in turns)]
        rules = replace(cfg, episode=replace(cfg.episode, judged=judged))
        source = grounding or NoGrounding()
        for trajectory in rollout(
            part, engine=engine, chat=chat, cfg=rules, judge=RuleJudge(), seed=seed, grounding=source
        ):
            task = part[trajectory.group]
            if judged and trajectory.reward is not None:  # without a verdict it neither passed nor failed
                wm[task.uuid] = float(trajectory.reward > 1 - 1e-6)
            w2r[task.uuid] = benchmark.score(task, trajectory.transcript)["score"]
    method = Committed(chat, real_config(cfg.episode, benchmark), turn_steps=benchmark.turn_steps)
    voice = Voice((seed, 1), cfg.temperature, cfg.top_p, cfg.top_k)
    real = {r.task: r.score for r in play(benchmark, tasks, method, engine, voice)}
    means = {key: sum(part[u] for u in real) / len(real) for key, part in (("Real", real), ("W2R", w2r))}
    out = means | {
        "n": len(real),
        "n_judged": len(wm),
        "CR": means["W2R"] / means["Real"] if means["Real"] else math.nan,
    }
    if not wm:
        return out | dict.fromkeys(("WM", "gap", "gap_low", "gap_high"), math.nan)
    gap = cluster_bootstrap([wm[u] - w2r[u] for u in wm], list(wm))
    return out | {
        "WM": sum(wm.values()) / len(wm),
        "gap": gap.mean,
        "gap_low": gap.low,
        "gap_high": gap.high,
    }


# --- the command ------------------------------------------------------------------------------------------------------


def run_fidelity(cfg: ConfigDict, args: argparse.Namespace) -> None:
    """`evaluate fidelity --on BENCHMARK`: the three protocols, printed and written as JSON; with a judge its grades."""
    from envace_jax.build import chat_format, load_model, make_engine, mesh_for
    from envace_jax.endpoint import Endpoint, EndpointSettings
    from envace_jax.evaluation.command import folder_digest
    from envace_jax.rehearsal.grounding import make_grounding
    from envace_jax.worldbook.completer import EndpointCompleter

    if bool(args.judge_url) != bool(args.judge_model):
        raise UserError("evaluate fidelity: --judge_url and --judge_model name the judge together")
    benchmark = BENCHMARKS[args.on]
    tasks = [benchmark.reference(task) for task in benchmark.load(args.split, args.tasks, args.category)]
    chat = chat_format(cfg)
    spec, params = load_model(cfg, chat, mesh_for(cfg))
    engine = make_engine(cfg, spec, params)
    rules = RolloutConfig.from_config(cfg, temperature=cfg.evaluation.temperature, top_p=cfg.evaluation.top_p)
    grounding = make_grounding(cfg.rollout.grounding, cfg.rollout.worldbook)
    asked = probes(tasks, chat, rules.episode, grounding=grounding)
    fits = [p for p in asked if len(p.case.prompt_ids) <= rules.episode.max_input_tokens]
    found = predictions(fits, engine, chat, max_tokens=rules.episode.max_rehearse_tokens)
    result = {
        "benchmark": f"{benchmark.name}/{args.split}",
        "model": {"name": cfg.model.path or f"random {cfg.model.size}", "digest": folder_digest(cfg.model.path)},
        "template": digest(chat.template()),
        "sampling": {
            "teacher_forced": "greedy",
            "free_running": "greedy",
            "temperature": rules.temperature,
            "top_p": rules.top_p,
            "top_k": rules.top_k,
            "max_act_tokens": rules.episode.max_act_tokens,
            "max_rehearse_tokens": rules.episode.max_rehearse_tokens,
            "max_input_tokens": rules.episode.max_input_tokens,
            "thinking": chat.thinking,
            "rehearse_prompt": rules.episode.rehearse_prompt,
            "seed": cfg.seed,
        },
        "versions": versions("scienceworld"),
        "grounding": cfg.rollout.grounding,
        "tasks": len(tasks),
        "calls": len(fits),
        "calls_too_long": len(asked) - len(fits),
        "teacher_forced": fidelity_report(fits, found),
        "free_running": free_running(tasks, engine, chat, rules.episode, grounding=grounding),
        "sim_to_real": sim_to_real(benchmark, tasks, engine, chat, rules, seed=cfg.seed, grounding=grounding),
    }
    if args.judge_url:
        settings = EndpointSettings(args.judge_url, args.judge_model, temperature=0.6, top_p=1.0, max_tokens=32_768)
        with Endpoint(settings) as judge:
            result["judged"] = judged(fits, found["rehearse"], EndpointCompleter(judge), benchmark)
        result["judged"]["judge"] = args.judge_model
    out = args.out or Path(cfg.run_dir) / "evaluation" / f"fidelity_{benchmark.name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(_plain(result), indent=1) + "\n")
    print("\n".join([*lines(result), f"results: {out}"]))


SHOWN = {
    "json_equal": "json equal",
    "leaf_f1": "leaf F1",
    "reject_precision": "reject P",
    "reject_recall": "reject R",
    "reject_f1": "reject F1",
    "reject_mcc": "reject MCC",
    "error_class_accuracy": "error class",
    "state_change_precision": "change P",
    "state_change_recall": "change R",
}


def lines(result: dict[str, Any]) -> list[str]:
    """The report of `run_fidelity`, as lines."""
    out = [f"fidelity on {result['benchmark']}, grounding {result['grounding']}: {result['calls']} calls"]
    out.append("  " + "predictor".ljust(24) + " ".join(label.rjust(12) for label in SHOWN.values()))
    for name, parts in result["teacher_forced"].items():
        for part in ("all", "not_copyable", "reads", "writes", "read_after_write"):
            if part in parts:
                values = " ".join(f"{parts[part][metric]:12.3f}" for metric in SHOWN)
                out.append(f"  {f'{name}, {part}'.ljust(24)}{values}  n={parts[part]['n']:.0f}")
    free = result["free_running"]
    out.append(
        f"  free-running: {free['equal']:.3f} of steps equal, {free['intact']:.3f} of tasks without a wrong step, "
        f"median first divergence {free['median_divergence']}"
    )
    sim = result["sim_to_real"]
    if judged := result.get("judged"):
        domains = ", ".join(f"{name} {value:.1f}" for name, value in judged["domains"].items())
        out.append(
            f"  five dimensions, judged by {judged['judge']}: {judged['domain_mean']:.1f} of 100 ({domains}); "
            f"{judged['n']} calls judged, {judged['excluded']} not"
        )
    out.append(
        f"  sim to real (n={sim['n']}, {sim['n_judged']} rehearsals with a verdict): "
        f"Real {sim['Real']:.3f}, WM {sim['WM']:.3f}, W2R {sim['W2R']:.3f}, "
        f"CR {sim['CR']:.3f}, rehearsed-real gap {sim['gap']:.3f} [{sim['gap_low']:.3f}, {sim['gap_high']:.3f}]"
    )
    return out


def _plain(value: Any) -> Any:
    """JSON has no NaN: what nothing decides is null."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
