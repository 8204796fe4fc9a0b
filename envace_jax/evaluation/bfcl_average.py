"""BFCL's averages over result files: group means where a group is whole, the overall only where everything is there.

The official program counts a category that was not run as 0 in its overall; here it is missing, and is named.
Formula (v4): overall = .10 non-live + .10 live + .10 irrelevance + .30 multi-turn + .40 agentic; non-live is the mean
of simple (the mean of its three languages), multiple, parallel, parallel_multiple; live is weighted by counts;
irrelevance is the mean of two, multi-turn of four, agentic of web search and memory, each the mean of its categories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from envace_jax.config import UserError
from envace_jax.evaluation.results import by_category, read_results

SIMPLE = ("simple_python", "simple_java", "simple_javascript")
WEIGHTS = {"non_live": 0.10, "live": 0.10, "irrelevance": 0.10, "multi_turn": 0.30, "agentic": 0.40}
LIVE_COUNTS = {"live_simple": 258, "live_multiple": 1053, "live_parallel": 16, "live_parallel_multiple": 24}
GROUPS: dict[str, tuple[str, ...]] = {
    "simple": SIMPLE,
    "non_live": (*SIMPLE, "multiple", "parallel", "parallel_multiple"),
    "live": tuple(LIVE_COUNTS),
    "irrelevance": ("irrelevance", "live_irrelevance"),
    "multi_turn": tuple(f"multi_turn_{name}" for name in ("base", "miss_func", "miss_param", "long_context")),
    "web_search": ("web_search_base", "web_search_no_snippet"),
    "memory": ("memory_kv", "memory_vector", "memory_rec_sum"),
}
GROUPS["agentic"] = (*GROUPS["web_search"], *GROUPS["memory"])


def averages(means: Mapping[str, float]) -> dict[str, float]:
    """Every group mean that the whole categories in `means` allow, and `overall` where all are there."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    whole = {group for group, names in GROUPS.items() if all(name in means for name in names)}
    out = {group: mean([means[name] for name in GROUPS[group]]) for group in whole - {"non_live", "live", "agentic"}}
    if "non_live" in whole:
        out["non_live"] = mean([out["simple"], *(means[name] for name in GROUPS["non_live"][3:])])
    if "live" in whole:
        out["live"] = sum(means[name] * n for name, n in LIVE_COUNTS.items()) / sum(LIVE_COUNTS.values())
    if "agentic" in whole:
        out["agentic"] = mean([out["web_search"], out["memory"]])
    if all(group in out for group in WEIGHTS):
        out["overall"] = sum(weight * out[group] for group, weight in WEIGHTS.items())
    return out


def report(paths: Sequence[Path]) -> list[str]:
    """The averages of some result files of one model, as lines.

    Raises:
        UserError: the files are of different models or templates, or two of them hold the same category.
    """
    means: dict[str, float] = {}
    partial: list[str] = []
    first = None
    for path in paths:
        header, results = read_results(path)
        same = (header.model, header.template)
        if first is not None and same != first:
            raise UserError(f"{path}: of another model or chat template than {paths[0]}")
        first = same
        for figures in by_category(header, results):
            if figures.name in means or figures.name in partial:
                raise UserError(f"{path}: category {figures.name} stands in another file as well")
            if figures.complete:
                means[figures.name] = figures.interval.mean
            else:
                partial.append(figures.name)
    found = averages(means)
    lines = [f"  {name}: {value:.4f}" for name, value in means.items()]
    lines += [f"  {name}: {found[name]:.4f} (mean)" for name in (*GROUPS, "overall") if name in found]
    if "overall" not in found:
        needed = [name for group in WEIGHTS for name in GROUPS[group] if name not in means]
        lines.append(f"  no overall: {len(needed)} categories are missing or partial ({', '.join(needed)})")
    return lines
