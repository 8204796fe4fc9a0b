"""τ²-bench's natural-language assertions, judged by a model, apart from the score.

Release 1.0.1 puts them into the reward of most retail tasks, 0.2.0 into none; the score here is judge-free. This reads
a finished result file and asks a judge for each assertion of its tasks whether the conversation met it. The outcome is
printed under its own name with the judge's, never mixed into the score; what the judge did not answer is no verdict.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from envace_jax.config import UserError
from envace_jax.datasets.records import Task
from envace_jax.evaluation.results import Header, Result, digest, versions
from envace_jax.text.transcript import canonical_json

RULES = """\
You check a customer-service conversation. Below are the conversation (what the customer and the agent said, the \
agent's tool calls and what they returned) and a numbered list of statements about what the agent should have done. \
For each statement decide from the conversation alone whether it holds.
Answer with JSON only: {"verdicts": [true or false for each statement, in order]}"""


@dataclass(frozen=True)
class Assessed:
    """The verdicts on one played task, one an assertion; None where the judge gave none, with the cause."""

    task: str
    trial: int
    score: float
    verdicts: tuple[bool, ...] | None
    cause: str = ""


def schema(n: int) -> dict[str, Any]:
    """The shape of a judge's answer on `n` assertions."""
    verdicts = {"type": "array", "items": {"type": "boolean"}, "minItems": n, "maxItems": n}
    return {
        "type": "object",
        "properties": {"verdicts": verdicts},
        "required": ["verdicts"],
        "additionalProperties": False,
    }


def messages(assertions: Sequence[str], transcript: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The judge's prompt for one conversation, as a result file holds it."""
    lines = []
    for turn in transcript:
        lines.append(f"Customer: {turn['user']}")
        for step in turn["steps"]:
            output = step["output"]
            if output.get("reply"):
                lines.append(f"Agent: {output['reply']}")
            for call, observation in zip(output.get("calls", ()), step.get("observations", ())):
                lines.append(f"Agent calls {call['name']} with {canonical_json(call['arguments'])}")
                lines.append(f"It returns: {observation['text'][:2000]}")
    numbered = "\n".join(f"{k}. {text}" for k, text in enumerate(assertions, 1))
    told = "\n".join(lines) or "(nothing was said)"
    return [
        {"role": "system", "content": RULES},
        {"role": "user", "content": f"# Conversation\n{told}\n\n# Statements\n{numbered}"},
    ]


def assess(results: Sequence[Result], tasks: Mapping[str, Task], endpoint: Any) -> list[Assessed]:
    """Asks the judge about every result whose task has assertions.

    Raises:
        UserError: a result is of no known task, or was written without its conversation.
    """
    asked = []
    for result in results:
        if result.task not in tasks:
            raise UserError(f"{result.task}: not a tau2 task, so there is nothing to assert")
        assertions = tasks[result.task].meta["nl_assertions"]
        if not assertions:
            continue
        if result.transcript is None:
            raise UserError(f"{result.task}: the result file holds no conversation")
        n = len(assertions)
        future = endpoint.submit(
            messages(assertions, result.transcript), schema=schema(n), check=lambda text, n=n: _problem(text, n)
        )
        asked.append((result, future))
    out = []
    for result, future in asked:
        done = future.result()
        verdicts = None if done.text is None else tuple(json.loads(done.text)["verdicts"])
        cause = "" if verdicts is not None else str(done.cause)
        out.append(Assessed(result.task, result.trial, result.score, verdicts, cause))
    return out


def _problem(text: str, n: int) -> str | None:
    try:
        verdicts = json.loads(text)["verdicts"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "no object with verdicts"
    if not isinstance(verdicts, list) or len(verdicts) != n or not all(isinstance(v, bool) for v in verdicts):
        return f"verdicts: expected {n} booleans"
    return None


def write(path: Path, header: Header, assessed: Sequence[Assessed], judge: str) -> Path:
    """The verdicts as JSON beside the result file that they are about, with what they depend on; its path."""
    out = path.with_name(f"{path.name}.nl_assertions.json")
    record = {
        "result": path.name,
        "benchmark": header.benchmark,
        "model": header.model,
        "judge": judge,
        "judge_temperature": 0.0,
        "judge_prompt": digest(RULES),
        "versions": versions(),
        "verdicts": [asdict(one) for one in assessed],
    }
    out.write_text(json.dumps(record, indent=1) + "\n")
    return out


def report(header: Header, assessed: Sequence[Assessed], judge: str) -> list[str]:
    """The outcome as lines, labelled as what it is."""
    lines = [f"NL_ASSERTION of {header.benchmark}, judged by {judge} (not part of any score above):"]
    judged = [one for one in assessed if one.verdicts is not None]
    if not assessed:
        return [*lines, "  none of these tasks has assertions"]
    if judged:
        verdicts = [v for one in judged for v in one.verdicts or ()]
        both = sum(one.score * all(one.verdicts or ()) for one in judged) / len(judged)
        lines.append(
            f"  {sum(verdicts)} of {len(verdicts)} assertions met; all of a conversation's in "
            f"{sum(all(one.verdicts or ()) for one in judged)} of {len(judged)} conversations that have some"
        )
        lines.append(f"  score x assertions on those conversations: {both:.3f} (another number than the score)")
    if missing := len(assessed) - len(judged):
        causes = sorted({one.cause for one in assessed if one.verdicts is None})
        lines.append(f"  {missing} conversations without a verdict ({', '.join(causes)}): counted nowhere")
    return lines
