"""Building a worldbook from traces: stages with hashed outputs, resumable, with a budget where a model is asked."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from envace_jax.config import UserError
from envace_jax.datasets.traces import TraceEpisode, TraceReport, read_traces
from envace_jax.faults import write_whole
from envace_jax.text.transcript import canonical_json
from envace_jax.worldbook import records as R
from envace_jax.worldbook.brief import clip
from envace_jax.worldbook.columns import Shape, discover_shape
from envace_jax.worldbook.compile import (
    Claims,
    choose_demonstrations,
    compile_worldbook,
    contrasts,
    observed_actions,
    observed_fields,
    reconcile,
    replay_rules,
    try_each_rule,
    with_confidence,
)
from envace_jax.worldbook.completer import CallLog, Completer
from envace_jax.worldbook.criteria import tried_invariants
from envace_jax.worldbook.ingest import Flag, Transition, align
from envace_jax.worldbook.state import state_from_json
from envace_jax.worldbook.store import Worldbook, save_worldbook
from envace_jax.worldbook.symbolic import LONGEST, Induction, induce_rules

WHOLE_CHARS = 64 << 20  # characters of observations that a build holds whole
CLIPPED = LONGEST + 1_000  # what is kept of a long one beyond that: still longer than rules may give

Log = Callable[[str], None]


@dataclass(frozen=True)
class BuildConfig:
    """What a build depends on besides the traces.

    ``folds`` cross-fits the replay that confidence comes from; ``symbolic`` turns the deterministic inducer on;
    ``domain`` is a description of the environment for the language stages.
    """

    folds: int = 3
    symbolic: bool = True
    max_transitions: int = 20_000
    domain: str = ""
    max_calls: int = 100_000
    max_cost: float = 0.0  # 0: no limit
    parallel: int = 8
    seed: int = 0

    def settings(self) -> dict[str, Any]:
        """What the outcome depends on. Limits on calls are left out: a build that met one goes on under another."""
        return {k: v for k, v in asdict(self).items() if k not in ("max_calls", "max_cost", "parallel")}


@dataclass
class BuildReport:
    """What a build did, for the terminal."""

    traces: int = 0
    bad_traces: list[str] = field(default_factory=list)
    transitions: int = 0
    flags: list[Flag] = field(default_factory=list)
    rules: int = 0
    candidates: int = 0
    model_calls: int = 0
    earlier_calls: int = 0  # of starts that were stopped, whose answers were used again
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    unknown_items: int = 0


class Stages:
    """Stage outputs in a working folder: a stage whose inputs have not changed is read back instead of run again."""

    def __init__(self, folder: Path, config_digest: str, log: Log):
        self.folder = folder
        self.log = log
        marker = folder / "config.digest"
        if folder.exists() and (not marker.is_file() or marker.read_text() != config_digest):
            log(f"{folder}: left by a build with other settings: starting anew, answers to equal questions are kept")
            for file in folder.glob("*.json"):
                file.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(marker, config_digest)

    def run(self, name: str, inputs: Any, compute: Callable[[], Any]) -> Any:
        """The JSON output of a stage, from its file if that is whole and of the same inputs."""
        file = self.folder / f"{name}.json"
        digest = R.digest(inputs)
        if file.is_file():
            try:
                data = json.loads(file.read_text(encoding="utf-8"))
                if data["inputs"] == digest and data["sha256"] == _sha(data["output"]):
                    self.log(f"{name}: done before")
                    return data["output"]
            except (ValueError, RecursionError, KeyError, TypeError):
                self.log(f"{name}: earlier output is not whole: running again")
        output = compute()
        body = {"inputs": digest, "sha256": _sha(output), "output": output}
        write_whole(file, canonical_json(body))
        return output


def _sha(value: Any) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def load_episodes(
    paths: Sequence[str | Path], *, on_bad: str = "stop", form: str | None = None
) -> tuple[list[TraceEpisode], TraceReport, list[dict[str, Any]]]:
    """Episodes of several files or folders with the report of bad ones and the hashed list of sources.

    Memory is bounded: when 64 Mi characters of observations are held, long ones are kept in part.

    Raises:
        UserError: a missing path, a bad trace under ``on_bad="stop"``, an episode outside the train split, or
            nothing usable.
    """
    report = TraceReport()
    episodes: list[TraceEpisode] = []
    sources = []
    seen: dict[str, str] = {}
    held = 0
    for path in map(Path, paths):
        for episode in read_traces(path, form=form, on_bad=on_bad, report=report, seen=seen):
            if episode.split != "train":
                message = f"{path}: trace {episode.episode_id[:80]} is of split {episode.split!r}, not train"
                if on_bad == "stop":
                    raise UserError(message + ": a worldbook is built from training traces only")
                report.bad.append(message)
                continue
            if held > WHOLE_CHARS:
                episode = clipped(episode)
            held += sum(len(e.content) for e in episode.events if e.kind == "observation")
            episodes.append(episode)
        for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
            with file.open("rb") as handle:
                sha = hashlib.file_digest(handle, "sha256").hexdigest()
            sources.append({"name": file.name, "sha256": sha, "bytes": file.stat().st_size})
    if not episodes:
        raise UserError(f"no usable trace in {', '.join(map(str, paths))} ({len(report.bad)} bad)")
    return episodes, report, sources


def clipped(episode: TraceEpisode) -> TraceEpisode:
    """The episode with the middle of its long observations left out; its ids stay those of the whole one."""
    events = [
        replace(e, content=clip(e.content, CLIPPED), metadata={**e.metadata, "clipped_from": len(e.content)})
        if e.kind == "observation" and len(e.content) > CLIPPED
        else e
        for e in episode.events
    ]
    return replace(episode, events=tuple(events))


def build_worldbook(
    episodes: Sequence[TraceEpisode],
    *,
    config: BuildConfig | None = None,
    completer: Completer | None = None,
    work: Path | None = None,
    sources: Sequence[dict[str, Any]] = (),
    log: Log = lambda text: None,
    report: BuildReport | None = None,
) -> Worldbook:
    """A worldbook from episodes.

    Args:
        completer: a language model for the language stages; None runs the deterministic stages alone.
        work: a folder for stage outputs and model answers, so that a killed build goes on where it stopped.
        report: filled in with counts and costs.

    Raises:
        BudgetExceeded: the model budget was used up; what was answered so far lies in ``work``.
    """
    config = config or BuildConfig()
    report = report if report is not None else BuildReport()
    report.traces = len(episodes)
    stages = Stages(work, R.digest(config.settings()), log) if work is not None else None
    transitions, kept = _align_all(episodes, report)
    log(f"aligned {len(transitions)} transitions of {len(kept)} traces, {len(report.flags)} flags")
    tools = _tools(episodes)
    inputs = [e.to_json() for e in episodes[:50]] + [t.id for t in transitions]

    def symbolic() -> Any:
        return _induction_json(_cross_fitted(kept, transitions, config, log))

    induced: dict[str, Any] = {"rules": [], "types": [], "unexplained": {}}
    if config.symbolic:
        induced = stages.run("induce", inputs, symbolic) if stages else symbolic()
    rules = tuple(R.from_json(R.TransitionRule, d, "induce.rules") for d in induced["rules"])
    shape = Shape(types={tuple(path): kind for path, kind in induced["types"]}) if config.symbolic else _shape(kept)
    pairs = contrasts(transitions)
    log(f"{len(rules)} rules from the deterministic inducer, {len(pairs)} contrasts")
    claims = Claims(
        observed_actions(transitions, tools),
        observed_fields(shape, rules),
        rules,
        demonstrations=choose_demonstrations(transitions, rules),
    )
    local: tuple[R.TransitionEvidence, ...] = ()
    unresolved: list[dict[str, Any]] = []
    if completer is not None:
        from envace_jax.worldbook.induce import language_stages

        calls = CallLog(completer, work / "calls.jsonl" if work else None, config.max_calls, config.max_cost, log)
        # One fold is kept from the model: what it says is measured where it could not look.
        held = [e for e in kept if config.folds > 1 and fold_of(e.group, config.folds, config.seed) == 0]
        hidden = {e.group for e in held}
        visible = [t for t in transitions if t.slice.group not in hidden]
        seen = [e for e in kept if e.group not in hidden]

        def refuted(proposed: Sequence[R.TransitionRule]) -> dict[str, list[str]]:
            trial = replace(_trial(proposed, shape, transitions, {}), state_fields=claims.state_fields)
            return dict(try_each_rule(trial, seen).examples)

        try:
            claims, local, unresolved = language_stages(
                claims, seen, visible, pairs, calls, config.domain, config.parallel, log, refuted
            )
        finally:
            calls.close()
            report.model_calls, report.earlier_calls = calls.calls, calls.before
            report.cost = calls.cost + calls.before_cost
            report.prompt_tokens, report.completion_tokens = calls.prompt_tokens, calls.completion_tokens
            report.unknown_items = len(unresolved)
        claims = replace(claims, rules=_confirmed(claims, kept, held, transitions))
    claims, rejected = reconcile(claims, transitions)
    kept_invariants, refuted_invariants = tried_invariants(
        claims.invariants, replace(_trial(claims.rules, shape, transitions, {}), state_fields=claims.state_fields), kept
    )
    claims = replace(claims, invariants=kept_invariants)
    rejected += refuted_invariants
    book = compile_worldbook(
        claims,
        transitions,
        local=local,
        episodes=tuple(_episode_line(e) for e in kept),
        sources=tuple(sources),
        unresolved=(
            *({"kind": "trace", "id": f.event_id, "episode": f.episode_id, "reason": f.problem} for f in report.flags),
            *unresolved,
        ),
        rejected=tuple(rejected),
        config=config.settings(),
        artifacts={
            "stages": ["align", "extract", "schema", "contrast", "induce", "falsify", "contracts", "notes",
                       "demonstrations", "reconcile", "compile"],
            "language_model": completer is not None,
            "contrasts": len(pairs),
            "unexplained": induced["unexplained"],
        },
    )  # fmt: skip
    count = replay_rules(book, kept, floor=R.EXECUTABLE_CONFIDENCE)
    book = replace(book, replay={"construction": count.to_json(), "held_out": induced.get("held_out", {})})
    report.rules, report.candidates = len(book.rules), len(book.candidates)
    log(f"{len(book.rules)} executable rules, {len(book.candidates)} candidates, digest {book.digest[:16]}")
    return book


def write_build(book: Worldbook, out: str | Path, work: Path | None = None) -> Path:
    """Save a built worldbook and remove the working folder."""
    path = save_worldbook(book, out)
    if work is not None and work.exists():
        shutil.rmtree(work)
    return path


def _align_all(episodes: Iterable[TraceEpisode], report: BuildReport) -> tuple[list[Transition], list[TraceEpisode]]:
    transitions: list[Transition] = []
    kept = []
    for episode in episodes:
        found, flags = align(episode)
        report.flags += flags
        kept.append(episode)
        transitions += found
    report.transitions = len(transitions)
    return transitions, kept


def _shape(episodes: Sequence[TraceEpisode]) -> Shape:
    """The shape of the explicit initial states."""
    return discover_shape([state_from_json(e.initial_state).root for e in episodes if e.initial_state is not None])


def _tools(episodes: Sequence[TraceEpisode]) -> list[dict[str, Any]]:
    """Tool documents that the traces carry, first ones first, one for each name."""
    found: dict[str, dict[str, Any]] = {}
    for episode in episodes:
        tools = episode.metadata.get("tools")
        for tool in tools if isinstance(tools, list) else ():
            if isinstance(tool, dict):
                function = tool.get("function", tool)
                if isinstance(function, dict) and isinstance(function.get("name"), str):
                    found.setdefault(function["name"], tool)
    return list(found.values())


def fold_of(group: str, folds: int, seed: int = 0) -> int:
    """The fold of a trajectory group: a hash, so that groups never cross and order plays no part."""
    return int(hashlib.sha256(f"{seed}/{group}".encode()).hexdigest(), 16) % max(1, folds)


def _cross_fitted(
    episodes: Sequence[TraceEpisode], transitions: Sequence[Transition], config: BuildConfig, log: Log
) -> Induction:
    """Rules from all episodes. The confidence of a rule is how often, on the transitions that it answers, the rules
    induced without that transition's group were right."""
    whole = induce_rules(episodes, config.max_transitions)
    held_out: dict[str, bool] = {}
    handed_over = 0
    for fold in range(config.folds if config.folds > 1 else 0):
        inside = [e for e in episodes if fold_of(e.group, config.folds, config.seed) != fold]
        outside = [e for e in episodes if fold_of(e.group, config.folds, config.seed) == fold]
        if not inside or not outside:
            continue
        part = induce_rules(inside, config.max_transitions)
        count = replay_rules(_trial(part.rules, part.shape, transitions, part.unexplained), outside)
        held_out.update({t: right for t, (_, right) in count.results.items()})
        handed_over += count.handed_over
        log(
            f"fold {fold}: {sum(count.right.values())} right, {sum(count.wrong.values())} wrong, "
            f"{count.handed_over} handed over"
        )
    # The final rules must also bear out everything that they were made from.
    check = replay_rules(_trial(whole.rules, whole.shape, transitions, whole.unexplained), episodes)
    right: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    for t, (rule_id, _) in check.results.items():
        if t in held_out:
            (right if held_out[t] else wrong)[rule_id] += 1
    whole.rules = [
        replace(r, status="tentative", counterexamples=tuple(check.examples[r.id][:8])) if check.wrong[r.id] else r
        for r in with_confidence(whole.rules, right, wrong)
    ]
    whole.held_out = {
        "right": sum(held_out.values()),
        "wrong": sum(not v for v in held_out.values()),
        "handed_over": handed_over,
    }
    return whole


def _trial(
    rules: Iterable[R.TransitionRule], shape: Shape, transitions: Sequence[Transition], unexplained: dict[str, int]
) -> Worldbook:
    """A worldbook that lets all templated rules run, for measuring them."""
    kept = tuple(replace(r, confidence=1.0) for r in rules if r.templated)
    return Worldbook(
        actions=observed_actions(transitions),
        state_fields=observed_fields(shape, kept),
        rules=kept,
        artifacts={"unexplained": unexplained},
    )


def _confirmed(
    claims: Claims,
    episodes: Sequence[TraceEpisode],
    held: Sequence[TraceEpisode],
    transitions: Sequence[Transition],
) -> tuple[R.TransitionRule, ...]:
    """Rules that a model proposed, with the confidence that replay of traces it did not see gives them (of all traces
    where none were kept from it); one contradiction anywhere makes a rule tentative. Its own word counts nothing."""
    proposed = tuple(r for r in claims.rules if not r.replay)
    if not proposed:
        return claims.rules
    checked, _ = reconcile(replace(claims, rules=proposed), transitions)
    book = replace(_trial(checked.rules, Shape(), transitions, {}), state_fields=claims.state_fields)
    everything = try_each_rule(book, episodes)
    count = try_each_rule(book, held) if held else everything
    confirmed = {r.id: r for r in with_confidence(checked.rules, count.right, count.wrong)}
    out = []
    for rule in claims.rules:
        new = confirmed.get(rule.id)
        if rule.replay or new is None:
            out.append(rule)
            continue
        borne_out = everything.right[rule.id] and not everything.wrong[rule.id]
        status: Any = "supported" if borne_out else "tentative"
        out.append(replace(new, status=status, counterexamples=tuple(everything.examples[rule.id][:8])))
    return tuple(out)


def _induction_json(found: Induction) -> dict[str, Any]:
    return {
        "rules": [R.to_json(r) for r in found.rules],
        "types": [[list(path), kind] for path, kind in found.shape.types.items()],
        "unexplained": found.unexplained,
        "held_out": found.held_out,
    }


def _episode_line(e: TraceEpisode) -> dict[str, Any]:
    return {
        "episode_id": e.episode_id,
        "trajectory_group": e.group,
        "environment": e.environment,
        "events": len(e.events),
        "explicit_state": e.initial_state is not None,
        "sha256": episode_digest(e),
    }


def episode_digest(episode: TraceEpisode) -> str:
    """What was said and done in an episode as a digest, whatever its name and group."""
    return R.digest([[v.actor, v.kind, v.content] for v in episode.events])
