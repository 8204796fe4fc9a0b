"""Scores of the official programs as result files, so that `compare` and `bfcl-average` read them.

`bfcl evaluate` leaves a folder with one file a category: its counts, then the entries that failed (the others are not
named there). `tau2 run` saves one JSON file with every simulation and its reward. Both are taken as they are: what the
programs do not record (BFCL: sampling, template, version) is said in the notes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from envace_jax.config import UserError
from envace_jax.evaluation.bfcl_average import LIVE_COUNTS
from envace_jax.evaluation.results import Header, Result
from envace_jax.json_files import parse, read_bytes, read_json

BFCL_FULL = {
    "simple_python": 400,
    "simple_java": 100,
    "simple_javascript": 50,
    "multiple": 200,
    "parallel": 200,
    "parallel_multiple": 200,
    "irrelevance": 240,
    **LIVE_COUNTS,
    "live_irrelevance": 884,
    "live_relevance": 16,
    **{f"multi_turn_{name}": 200 for name in ("base", "miss_func", "miss_param", "long_context")},
    **{f"memory_{name}": 155 for name in ("kv", "vector", "rec_sum")},
    **{f"web_search_{name}": 100 for name in ("base", "no_snippet")},
}
"""Entries of every scored category of BFCL v4."""
TAU2_FULL = {"airline": 50, "retail": 114, "telecom": 114}
_SECRET = ("key", "token", "secret", "password", "auth", "header")


def official(path: Path) -> list[tuple[Header, list[Result]]]:
    """Headers and results of a BFCL score folder (multi-turn, single-turn and agentic apart) or a tau2 results file.

    Raises:
        UserError: neither of the two, or one that is not whole.
    """
    if path.is_dir():
        return _bfcl(path)
    record = read_json(path)
    if not isinstance(record, dict) or not {"info", "simulations"} <= record.keys():
        raise UserError(f"{path}: expected a folder of `bfcl evaluate`, or a file that `tau2 run` saved")
    try:
        return [_tau2(record)]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{path}: not the form of a tau2 results file ({type(error).__name__}: {error})") from None


def _bfcl(folder: Path) -> list[tuple[Header, list[Result]]]:
    files = sorted(folder.rglob("BFCL_v4_*_score.json"))
    models = {_model_folder(path) for path in files}
    if len(models) != 1:
        raise UserError(f"{folder}: expected scores of one model (BFCL_v4_*_score.json), found {len(models)} models")
    groups: dict[str, dict[str, list[Result]]] = {}
    for path in files:
        category = path.name.removeprefix("BFCL_v4_").removesuffix("_score.json")
        if category in BFCL_FULL:  # format_sensitivity is not scored
            found = groups.setdefault(_group(category), {})
            found[category] = _bfcl_category(path, category)
    out = []
    for group, parts in groups.items():
        header = Header(
            benchmark=f"{group}/official",
            model={"name": models.copy().pop().name},
            handler="official program (bfcl-eval, v4), its score files",
            template="",
            sampling={},
            tasks=sum(map(len, parts.values())),
            full={name: n for name, n in BFCL_FULL.items() if _group(name) == group},
            notes=("BFCL's score files name neither sampling, template nor version: state them beside these numbers",),
        )
        out.append((header, [result for part in parts.values() for result in part]))
    return out


def _model_folder(path: Path) -> Path:
    """The model's folder: above the group (`non_live`, `live`, `multi_turn`, `agentic/…`)."""
    groups = [k for k, name in enumerate(path.parts) if name in ("non_live", "live", "multi_turn", "agentic")]
    if not groups:
        raise UserError(f"{path}: expected below a folder non_live, live, multi_turn or agentic")
    return Path(*path.parts[: groups[-1]])


def _group(category: str) -> str:
    """The benchmark here that a category belongs to; agentic ones have none."""
    if category.startswith("multi_turn"):
        return "bfcl"
    return "bfcl-agentic" if category.startswith(("memory", "web_search")) else "bfcl-single"


def _bfcl_category(path: Path, category: str) -> list[Result]:
    texts = read_bytes(path).splitlines()
    lines = [parse(line, f"{path}: line {n}") for n, line in enumerate(texts, 1) if line.strip()]
    head = lines[0] if lines and isinstance(lines[0], dict) else {}
    total, correct = head.get("total_count"), head.get("correct_count")
    failed = [line.get("id") for line in lines[1:] if isinstance(line, dict)]
    if not isinstance(total, int) or not isinstance(correct, int) or total - correct != len(failed):
        raise UserError(f"{path}: {correct} of {total} correct and {len(failed)} failed entries disagree")
    wrong = [Result(str(name), 0, category, 0.0) for name in failed]
    return [Result(f"{category}, correct {k}", 0, category, 1.0) for k in range(correct)] + wrong


def _tau2(record: Mapping[str, Any]) -> tuple[Header, list[Result]]:
    info = record["info"]
    agent, user = info["agent_info"], info["user_info"]
    domain = info["environment_info"]["domain_name"]
    simulations = record["simulations"]
    scored = [one for one in simulations if one.get("reward_info")]
    notes = ["the reward is what the harness's release counts: 0.2.0 and 1.0.1 differ, state which"]
    if left := len(simulations) - len(scored):
        notes.append(f"{left} simulations have no reward and are counted nowhere")
    commit = info.get("git_commit", "unknown")
    header = Header(
        benchmark="tau2/official",
        model={"name": str(agent["llm"])},
        handler=f"official tau2-bench harness (commit {commit}), agent {agent['implementation']}",
        template="",
        sampling={
            "agent": _open(agent.get("llm_args")),
            "user": f"{user['implementation']} {user.get('llm')}",
            "user_args": _open(user.get("llm_args")),
            "max_steps": info.get("max_steps"),
            "max_errors": info.get("max_errors"),
            "seed": info.get("seed"),
        },
        tasks=len({one["task_id"] for one in simulations}),
        trials=int(info["num_trials"]),
        full={domain: TAU2_FULL[domain]} if domain in TAU2_FULL else {},
        notes=tuple(notes),
    )
    return header, [_simulation(one, domain) for one in scored]


def _simulation(one: Mapping[str, Any], domain: str) -> Result:
    said = [message for message in one["messages"] if message.get("role") == "assistant"]
    return Result(
        task=f"{domain}-{one['task_id']}",
        trial=int(one.get("trial") or 0),
        category=domain,
        score=float(one["reward_info"]["reward"]),
        end=str(one.get("termination_reason", "")),
        tokens=sum(int((message.get("usage") or {}).get("completion_tokens", 0)) for message in said),
        acts=len(said),
        calls=sum(len(message.get("tool_calls") or ()) for message in said),
        seconds=float(one.get("duration") or 0.0),
        parts={"reward": one["reward_info"].get("reward_breakdown")},
    )


def _open(arguments: Any) -> dict[str, Any]:
    """A model's arguments less what may be secret."""
    given: Iterable[tuple[str, Any]] = (arguments or {}).items()
    return {name: value for name, value in given if not any(word in name.lower() for word in _SECRET) or "max_" in name}
