"""``worldbook compare``: systems on the same questions, with intervals and paired differences; in folds on request."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from envace_jax.config import UserError
from envace_jax.datasets.traces import TraceEpisode, read_traces
from envace_jax.options import whole
from envace_jax.text.transcript import canonical_json
from envace_jax.worldbook.baselines import CONTENT, SYSTEMS, CopyingCompleter, SystemConfig, make_system
from envace_jax.worldbook.build import BuildConfig, build_worldbook
from envace_jax.worldbook.completer import Completer, EndpointCompleter, ScriptedCompleter
from envace_jax.worldbook.harness import Harness
from envace_jax.worldbook.store import Worldbook, load_worldbook


def add_arguments(commands: Any) -> None:
    """The sub-command and its options."""
    versus = commands.add_parser("compare", help="next-observation scores of several systems, in one table")
    versus.add_argument("worldbook", nargs="?", default="", help="a worldbook; none with --cross_fit")
    versus.add_argument("--traces", nargs="+", default=[], help="held-out traces")
    versus.add_argument("--rows", default="", help="or rows in the AgentWorldBench format")
    versus.add_argument("--cross_fit", type=whole(0), default=0, metavar="K", help="build from the traces in K folds: "
                        "each trace is answered from a worldbook that saw nothing of its group")  # fmt: skip
    versus.add_argument("--form", default=None)
    versus.add_argument(
        "--systems",
        nargs="+",
        default=["rules", *SYSTEMS],
        choices=["rules", *SYSTEMS],
        help="rules alone, or systems with a model",
    )
    versus.add_argument(
        "--metric",
        nargs="+",
        default=["json_equal", "outcome"],
        choices=("answered", "exact", "normalised", "json_equal", "leaf_f1", "word_f1", "outcome"),
        help="scores to show",
    )
    versus.add_argument("--judge", default="", metavar="URL", help="endpoint of a judge that grades answers")
    versus.add_argument("--judge_model", default="", help="its model")
    versus.add_argument("--limit", type=whole(0), default=0, help="at most so many rows, spread over all (0: all)")
    versus.add_argument("--content", default="full", choices=sorted(CONTENT), help="ablation: tier of the worldbook")
    versus.add_argument("--single_shot", action="store_true", help="ablation: no tool loop")
    versus.add_argument("--no_state", action="store_true", help="ablation: no tracked state and no rules")
    versus.add_argument("--copying", action="store_true", help="a deterministic stand-in for the model that copies")
    versus.add_argument(
        "--rehearse",
        default="",
        metavar="CONFIG",
        help="a configuration whose policy's REHEARSE answers in place of a chat model",
    )
    versus.add_argument("--resamples", type=whole(1), default=10_000)
    versus.add_argument("--out", default="", help="write every row's scores there as JSON lines")
    add_model(versus)


def add_model(parser: argparse.ArgumentParser) -> None:
    """The options that say which language model answers."""
    parser.add_argument("--endpoint", default="", help="address of an OpenAI-compatible endpoint")
    parser.add_argument("--model", default="", help="its model")
    parser.add_argument("--api_key_env", default="OPENAI_API_KEY", help="environment variable that holds its key")
    parser.add_argument("--script", default="", help="JSON file of scripted answers in place of an endpoint")


def make_completer(args: argparse.Namespace) -> Completer | None:
    """The model that the options name: an endpoint, a script, or none."""
    if args.script:
        return ScriptedCompleter(args.script)
    if bool(args.endpoint) != bool(args.model):
        raise UserError("--endpoint and --model go together")
    if not args.endpoint:
        return None
    from envace_jax.endpoint import Endpoint, EndpointSettings

    settings = EndpointSettings(args.endpoint, args.model, args.api_key_env)
    price = getattr(args, "price", (0.0, 0.0))
    return EndpointCompleter(Endpoint(settings), price_in=price[0], price_out=price[1])


def run_worldbook_compare(args: argparse.Namespace) -> int:
    """Score systems on the same rows; each line is labelled with the system and with what stood in for its model."""
    from envace_jax.evaluation import next_observation as evaluation

    if bool(args.worldbook) == bool(args.cross_fit):
        raise UserError("compare: give a worldbook, or --cross_fit K and --traces to build from in folds")
    if args.cross_fit and (args.rows or args.cross_fit < 2):
        raise UserError("--cross_fit: expected 2 or more folds of --traces; --rows are never built from")
    parts = []  # (worldbook, rows that it did not see)
    for book, rows in _cross_fitted(args) if args.cross_fit else [_given(args)]:
        leaks = evaluation.leakage_audit(book, rows)
        if leaks:
            first = f"{leaks[0]['row']} ({leaks[0]['kind']}) first"
            print(f"{len(leaks)} of {len(rows)} rows are known to the worldbook, {first}")
        parts.append((book, rows))
    model = _compared_model(args)
    judge = None
    if bool(args.judge) != bool(args.judge_model):
        raise UserError("--judge and --judge_model go together")
    if args.judge:
        from envace_jax.endpoint import Endpoint, EndpointSettings

        judge = EndpointCompleter(Endpoint(EndpointSettings(args.judge, args.judge_model, args.api_key_env)))
    results = []
    for title, make in _systems(args, model):
        each = [evaluation.evaluate_system(title, make(book), rows, judge) for book, rows in parts]
        results.append(evaluation.joined(each))
        asked = len(results[-1].rows)
        print(f"{title}: {asked - results[-1].failed} of {asked} rows answered", flush=True)
    for metric in [*args.metric, *(["judge"] if judge is not None else [])]:
        print("\n" + evaluation.results_table(results, metric, args.resamples))
        if len(results) > 1:
            print("\n" + evaluation.differences_table(results, metric, args.resamples))
    if args.out:
        _write(args.out, results)
    return 0


def _given(args: argparse.Namespace) -> tuple[Worldbook, list[Any]]:
    """The worldbook that was named, and the rows."""
    from envace_jax.evaluation import next_observation as evaluation

    book = load_worldbook(args.worldbook)
    rows = evaluation.read_rows(args.rows) if args.rows else []
    for path in args.traces:
        rows += evaluation.rows_from_episodes(read_traces(path, form=args.form))
    if not rows:
        raise UserError("nothing to score: give --traces or --rows")
    if args.limit and len(rows) > args.limit:
        rows = rows[:: -(-len(rows) // args.limit)]
    return book, rows


def _cross_fitted(args: argparse.Namespace) -> list[tuple[Worldbook, list[Any]]]:
    """For each fold, a worldbook of the other folds' traces (deterministic stages), and the rows of its own."""
    from envace_jax.evaluation import next_observation as evaluation

    seen: dict[str, str] = {}
    episodes: list[TraceEpisode] = []
    for path in args.traces:
        episodes += (replace(e, split="train") for e in read_traces(path, form=args.form, seen=seen))
    fits = evaluation.cross_fit(episodes, lambda part: build_worldbook(part, config=BuildConfig()), k=args.cross_fit)
    if not fits:
        raise UserError("--cross_fit: expected traces of two groups or more in --traces")
    parts = [(book, evaluation.rows_from_episodes(outside)) for book, outside in fits]
    total = sum(len(rows) for _, rows in parts)
    print(f"{len(parts)} folds, {len(episodes)} traces, {total} rows", flush=True)
    step = -(-total // args.limit) if args.limit else 1
    return [(book, rows[::step]) for book, rows in parts]


def _systems(args: argparse.Namespace, model: Any) -> list[tuple[str, Callable[[Worldbook], Harness]]]:
    """Title and maker of every system asked for."""
    label = getattr(model, "name", "") or args.model or ("script" if args.script else "no model")
    out: list[tuple[str, Callable[[Worldbook], Harness]]] = []
    for name in args.systems:
        if name == "rules":
            out.append(("rules alone (no model)", lambda book: make_system(book, None, SystemConfig())))
            continue
        if model is None:
            raise UserError(f"--systems {name}: needs a model: --endpoint, --script, --rehearse or --copying")
        config = SystemConfig(name, args.content, not args.single_shot, not args.no_state)

        def make(book: Worldbook, config: SystemConfig = config) -> Harness:
            return make_system(book, model, config) if hasattr(model, "complete") else model.system(book, config)

        out.append((f"{name} ({label})", make))
    return out


def _write(path: str, results: Sequence[Any]) -> None:
    with Path(path).open("w", encoding="utf-8") as file:
        for result in results:
            for i, row in enumerate(result.rows):
                scores = {m: None if math.isnan(v[i]) else v[i] for m, v in result.scores.items()}
                line = {"system": result.system, "row": row.id, "trajectory": row.trajectory}
                file.write(canonical_json({**line, "source": result.sources[i], **scores}) + "\n")


def _compared_model(args: argparse.Namespace) -> Any:
    """What answers in the compared systems: a completer, or a policy's REHEARSE; None for rules alone."""
    if args.rehearse:
        from envace_jax.evaluation.rehearse_agent import RehearseModel

        return RehearseModel(args.rehearse)
    return CopyingCompleter() if args.copying else make_completer(args)
