"""``python -m envace_jax worldbook build|show|diff|verify|patch|replay|compare|simulate``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from envace_jax.config import UserError
from envace_jax.datasets.traces import read_traces
from envace_jax.json_files import read_json, read_text
from envace_jax.options import number, whole
from envace_jax.text.transcript import canonical_json
from envace_jax.worldbook import compare
from envace_jax.worldbook.baselines import SYSTEMS, SystemConfig, make_system
from envace_jax.worldbook.build import (
    BuildConfig,
    BuildReport,
    build_worldbook,
    episode_digest,
    load_episodes,
    write_build,
)
from envace_jax.worldbook.compare import add_model, make_completer
from envace_jax.worldbook.compile import diff_worldbooks, replay_rules
from envace_jax.worldbook.harness import Harness
from envace_jax.worldbook.patch import apply_patch, read_patch
from envace_jax.worldbook.records import EXECUTABLE_CONFIDENCE, FAST_PATH_CONFIDENCE
from envace_jax.worldbook.service import WorldbookService, simulate
from envace_jax.worldbook.store import (
    load_worldbook,
    read_manifest,
    rule_text,
    save_worldbook,
    verify_folder,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sub-commands and their options."""
    commands = parser.add_subparsers(dest="worldbook_command", required=True, metavar="COMMAND")

    build = commands.add_parser("build", help="traces to a worldbook; a killed build goes on where it stopped")
    build.add_argument("--traces", nargs="+", required=True, help="files or folders: JSON, JSONL, text, parquet")
    build.add_argument("--out", required=True, help="a folder that does not exist yet")
    build.add_argument("--form", default=None, help="format of the traces, where it cannot be told from the records")
    build.add_argument("--on_bad", default="stop", choices=("stop", "skip"), help="a bad trace stops, or is skipped")
    build.add_argument("--domain", default="", help="file with a description of the environment")
    build.add_argument("--folds", type=whole(0), default=3, help="folds of the replay that confidence comes from")
    build.add_argument("--no_symbolic", action="store_true", help="without the deterministic rule inducer")
    build.add_argument("--max_calls", type=whole(0), default=100_000, help="model calls after which the build stops")
    build.add_argument("--max_cost", type=number(0), default=0.0, help="cost after which it stops (0: no limit)")
    build.add_argument("--parallel", type=whole(1), default=8, help="model calls at a time")
    build.add_argument("--price", type=number(0), nargs=2, default=(0.0, 0.0), metavar=("IN", "OUT"),
                       help="price of a million prompt and completion tokens")  # fmt: skip
    add_model(build)

    show = commands.add_parser("show", help="what is in a worldbook, or one action or item of it")
    show.add_argument("worldbook")
    show.add_argument("item", nargs="?", default="", help="an action, or the id of a rule, note or evidence item")

    diff = commands.add_parser("diff", help="what changed from one worldbook to another")
    diff.add_argument("old")
    diff.add_argument("new")

    verify = commands.add_parser("verify", help="check every file against the manifest")
    verify.add_argument("worldbook")

    patch = commands.add_parser("patch", help="apply typed edits, into a new folder")
    patch.add_argument("worldbook")
    patch.add_argument("patch", help='JSON: {"base": DIGEST, "edits": [...]}')
    patch.add_argument("--out", required=True)

    again = commands.add_parser("replay", help="try the rules on traces they were not made from; may promote")
    again.add_argument("worldbook")
    again.add_argument("--traces", nargs="+", required=True)
    again.add_argument("--form", default=None)
    again.add_argument("--floor", type=number(0, 1), default=FAST_PATH_CONFIDENCE, help="confidence of rules that act")
    again.add_argument("--no_state", action="store_true", help="without the explicit initial states")
    again.add_argument("--promote", default="", help="write a validated worldbook there if all cases pass")

    compare.add_arguments(commands)

    run = commands.add_parser("simulate", help="a session at the terminal, or an HTTP service")
    run.add_argument("worldbook")
    run.add_argument("--state", default="", help="JSON file with the initial state")
    run.add_argument("--system", default="full", choices=SYSTEMS)
    run.add_argument("--single_shot", action="store_true", help="one generation a call instead of the tool loop")
    run.add_argument("--port", type=whole(0, 65535), default=-1, help="serve HTTP there instead (0: any free port)")
    run.add_argument("--verbose", action="store_true", help="say where each answer comes from")
    add_model(run)


def run_worldbook(args: argparse.Namespace) -> int:
    """Run the sub-command; the exit status."""
    runners: dict[str, Callable[[argparse.Namespace], int]] = {
        "build": run_worldbook_build,
        "show": run_worldbook_show,
        "diff": run_worldbook_diff,
        "verify": run_worldbook_verify,
        "patch": run_worldbook_patch,
        "replay": run_worldbook_replay,
        "compare": compare.run_worldbook_compare,
        "simulate": run_worldbook_simulate,
    }
    return runners[args.worldbook_command](args)


def run_worldbook_build(args: argparse.Namespace) -> int:
    """Build a worldbook; stage outputs lie beside the destination until it is done."""
    out = Path(args.out)
    if out.exists():
        raise UserError(f"--out {out}: exists already: choose a new folder, a worldbook is never changed in place")
    domain = read_text(Path(args.domain)) if args.domain else ""
    config = BuildConfig(
        folds=args.folds,
        symbolic=not args.no_symbolic,
        domain=domain,
        max_calls=args.max_calls,
        max_cost=args.max_cost,
        parallel=args.parallel,
    )
    episodes, traces, sources = load_episodes(args.traces, on_bad=args.on_bad, form=args.form)
    for message in traces.bad:
        print(f"skipped: {message}")
    work = out.with_name(f".{out.name}.building")
    report = BuildReport()
    book = build_worldbook(
        episodes,
        config=config,
        completer=make_completer(args),
        work=work,
        sources=sources,
        log=lambda text: print(text, flush=True),
        report=report,
    )
    write_build(book, out, work)
    print(
        f"{report.traces} traces ({len(traces.bad)} skipped), {report.transitions} transitions, "
        f"{len(report.flags)} flags, {report.rules} executable rules, {report.candidates} candidates"
    )
    if report.model_calls:
        print(
            f"model: {report.model_calls} calls ({report.earlier_calls} in earlier starts), "
            f"{report.prompt_tokens} + {report.completion_tokens} tokens, "
            f"cost {report.cost:.4f}, {report.unknown_items} items unknown"
        )
    print(f"worldbook: {out}")
    return 0


def run_worldbook_show(args: argparse.Namespace) -> int:
    """Print an overview, an action with its rules, or one item."""
    book = load_worldbook(args.worldbook)
    if not args.item:
        print(f"digest {book.digest}\nstatus {book.status}" + (f"\nparent {book.parent}" if book.parent else ""))
        print(f"{len(book.episodes)} episodes, {len(book.evidence)} transitions")
        for action in book.actions:
            rules = [r for r in book.rules if r.action_type == action.name]
            left = [r for r in book.candidates if r.action_type == action.name]
            names = ", ".join(f"{n}: {a.type}" for n, a in action.arguments.items())
            print(f"  {action.name}({names}): {len(rules)} rules, {len(left)} candidates")
        held = book.replay.get("held_out") or {}
        if held:
            print(f"held-out replay: {canonical_json(held)}")
        for entry in book.unresolved[:20]:
            print(f"  unresolved {entry['kind']} {entry['id']}: {entry['reason']}")
        return 0
    name = book.canonical_names.get(args.item)
    if name is not None:
        for rule in (r for r in (*book.rules, *book.candidates) if r.action_type == name):
            mark = "" if rule in book.rules else " (candidate)"
            print(f"{rule.id}{mark} {rule.outcome} confidence {rule.confidence:.2f} {canonical_json(rule.replay)}")
            print(rule_text(rule))
        return 0
    for items in (book.rules, book.candidates, book.notes, book.evidence, book.demonstrations, book.contracts):
        for item in items:
            if item.id == args.item:
                from envace_jax.worldbook.records import to_json

                print(json.dumps(to_json(item), ensure_ascii=False, indent=1))
                return 0
    raise UserError(f"{args.worldbook}: no action or item {args.item!r}")


def run_worldbook_diff(args: argparse.Namespace) -> int:
    """Print the readable difference of two worldbooks."""
    print(diff_worldbooks(load_worldbook(args.old), load_worldbook(args.new)))
    return 0


def run_worldbook_verify(args: argparse.Namespace) -> int:
    """Check files and digest; status 1 where something is not as the manifest says."""
    path = Path(args.worldbook)
    problems = verify_folder(path)
    for problem in problems:
        print(problem)
    if problems:
        return 1
    book = load_worldbook(path)
    print(f"{path}: intact, {len(read_manifest(path)['files'])} files, digest {book.digest}")
    return 0


def run_worldbook_patch(args: argparse.Namespace) -> int:
    """Apply a patch to a worldbook, into a new folder."""
    book = load_worldbook(args.worldbook)
    new = apply_patch(book, read_patch(args.patch))
    save_worldbook(new, args.out)
    print(diff_worldbooks(book, new))
    print(f"worldbook: {args.out}")
    return 0


def run_worldbook_replay(args: argparse.Namespace) -> int:
    """Replay traces; status 1 where a rule answered wrongly. ``--promote`` is the replay gate: all cases pass, no trace
    of the build among them, every executable rule exercised."""
    book = load_worldbook(args.worldbook)
    episodes = [e for path in args.traces for e in read_traces(path, form=args.form)]
    built = {e["sha256"] for e in book.episodes} | {e["trajectory_group"] for e in book.episodes}
    overlap = [e.episode_id for e in episodes if e.group in built or episode_digest(e) in built]
    # The gate asks for every rule that may run, however sure it is.
    floor = min(args.floor, EXECUTABLE_CONFIDENCE) if args.promote else args.floor
    count = replay_rules(book, episodes, floor=floor, with_state=not args.no_state)
    figures = count.to_json()
    n = max(1, count.transitions)
    print(
        f"{count.transitions} transitions of {len(episodes)} traces: {figures['right']} answered by rules as recorded "
        f"({figures['right'] / n:.1%}), {figures['wrong']} wrongly, {count.handed_over} handed over"
    )
    for name, (right, wrong, handed) in sorted(figures["by_action"].items()):
        print(f"  {name}: {right} right, {wrong} wrong, {handed} handed over")
    for rule_id, ids in count.examples.items():
        print(f"  {rule_id} contradicted by {', '.join(ids[:4])}")
    if overlap:
        print(f"{len(overlap)} traces are of groups that the worldbook was built from, {overlap[0]} first")
    if args.promote:
        idle = [r.id for r in book.rules if not count.right[r.id]]
        reasons = [
            *(["no trace has a transition"] if not count.transitions else []),
            *(["a rule answered wrongly"] if figures["wrong"] else []),
            *(["traces of the build are among the cases"] if overlap else []),
            *([f"{len(idle)} rules were not exercised, {idle[0]} first"] if idle else []),
        ]
        if reasons:
            raise UserError("not promoted: " + "; ".join(reasons))
        validation = {**book.replay, "validation": figures, "base": book.digest}
        new = replace(book, status="validated", parent=book.digest, replay=validation)
        save_worldbook(new, args.promote)
        print(f"promoted: {args.promote}")
    return 1 if figures["wrong"] else 0


def run_worldbook_simulate(args: argparse.Namespace, lines: Iterable[str] | None = None) -> int:
    """A session at the terminal (actions from standard input), or the HTTP service."""
    book = load_worldbook(args.worldbook)
    config = SystemConfig(system=args.system, loop=not args.single_shot)
    harness: Harness = make_system(book, make_completer(args), config)
    if args.port >= 0:
        if args.state:
            raise UserError("--state: of a session at the terminal; a client of the service gives it to /reset")
        service = WorldbookService(harness, port=args.port)
        print(f"serving {service.address} (POST /reset, /step, /fork, /close)", flush=True)
        try:
            service.serve()
        except KeyboardInterrupt:
            service.stop()
        return 0
    state: Any = None
    if args.state:
        state = read_json(args.state)
    if lines is None and os.isatty(0):
        print("one action a line: name key=value, or JSON; :state :actions :memory :fork :back :quit")
    simulate(harness, sys.stdin if lines is None else lines, print, state, args.verbose)
    return 0
