"""The model card written at export: what was trained, on what, how it did, and what it must not be used to claim."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from envace_jax.model.hub import is_repo_id
from envace_jax.model.spec import Qwen3Spec

LIMITS = (
    "Observations in training were written by the model itself (or by the source named below): what it learned "
    "about its tools is no better than those observations.",
    "Tool calls and rehearsed tool responses are model output. Treat both as untrusted text: validate arguments "
    "before acting on them.",
)


@dataclasses.dataclass(frozen=True)
class CardFacts:
    """What a run knows about itself; anything empty is said to be unknown, never left out.

    config: flat configuration, full key names. data: fingerprint, sources, counts. evaluation: one mapping a
    measurement with `name`, `value` and whatever else is known (interval, tasks, seeds). benchmarks_seen: names of
    benchmarks whose tasks (or the scenarios they share) were trained on.
    """

    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    evaluation: Sequence[Mapping[str, Any]] = ()
    benchmarks_seen: Sequence[str] = ()
    limits: Sequence[str] = ()
    step: int | None = None
    base_model: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _plain(text: Any) -> str:
    """One table cell: no line breaks, no pipes, no markup that a viewer would run."""
    value = text if isinstance(text, str) else json.dumps(text, default=str, ensure_ascii=False)
    for character, safe in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;"), ("`", "&#96;")):
        value = value.replace(character, safe)
    return " ".join(value.split())


def _table(head: tuple[str, str], rows: Mapping[str, Any]) -> list[str]:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    return lines + [f"| {_plain(key)} | {_plain(value)} |" for key, value in rows.items()]


def model_card(name: str, spec: Qwen3Spec, facts: CardFacts) -> str:
    """Markdown with the metadata block that Hugging Face reads (`README.md` of the exported folder)."""
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation", "tags: [agent, tool-use, grpo]"]
    hub_knows_it = is_repo_id(facts.base_model)  # the hub refuses a value that is no repository's name
    if hub_knows_it:
        lines.append(f"base_model: {json.dumps(facts.base_model)}")
    lines += ["---", f"# {_plain(name)}", ""]
    kind = "mixture of experts" if spec.is_moe else "dense"
    lines += [
        f"A Qwen3 {kind} model ({spec.n_params():,} parameters) trained with envace_jax"
        + (f", {facts.step} updates." if facts.step is not None else "."),
        *([] if hub_knows_it or not facts.base_model else [f"Training began from `{_plain(facts.base_model)}`."]),
        "One policy plays two roles: ACT writes tool calls and replies, REHEARSE writes what the tools would return.",
        "",
        "## Evaluation",
        "",
    ]
    if facts.benchmarks_seen:
        seen = ", ".join(_plain(benchmark) for benchmark in facts.benchmarks_seen)
        lines += [
            f"**Benchmarks seen in training: {seen}.** Results on them do not measure generalisation.",
            "",
        ]
    else:
        lines += ["No benchmark's tasks are recorded as training data.", ""]
    if facts.evaluation:
        keys = ["name", "value", *sorted({k for row in facts.evaluation for k in row} - {"name", "value"})]
        lines += ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
        lines += ["| " + " | ".join(_plain(row.get(key, "")) for key in keys) + " |" for row in facts.evaluation]
    else:
        lines.append("None recorded with this run.")
    lines += ["", "## Training data", ""]
    lines += _table(("what", "value"), facts.data) if facts.data else ["Not recorded."]
    lines += ["", "## Limits", "", *(f"- {_plain(limit)}" for limit in (*LIMITS, *facts.limits))]
    shape = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    lines += ["", "## Architecture", "", *_table(("key", "value"), shape)]
    if facts.config:
        lines += ["", "## Configuration", "", *_table(("key", "value"), facts.config)]
    if facts.versions:
        lines += ["", "## Versions", "", *_table(("package", "version"), facts.versions)]
    return "\n".join(lines) + "\n"
