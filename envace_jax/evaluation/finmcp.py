"""FinMCP-Bench on its record format: which tools were called, against which the gold dialogue calls.

A record has `messages` (the gold dialogue) and `messages_pred` (the model's, where every user turn was answered from
the gold history), both in OpenAI's form. Names are compared as multisets, arguments are not. TP is the share of
predicted calls that are gold, TR the share of gold calls that were predicted, TF1 their harmonic mean, all from sums
over the records (micro). Exact match is given both ways: `emr_ordered` wants the same names in the same order (the
published code), `emr_groups` lets the calls of one message stand in any order (the published text).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envace_jax.config import UserError
from envace_jax.evaluation.results import versions
from envace_jax.json_files import parse, read_bytes

RECORDS = 613
"""Of the whole benchmark."""


@dataclass(frozen=True)
class Counts:
    """One record: how many calls were predicted, are gold, and agree; exact match both ways; its groups."""

    predicted: int
    gold: int
    common: int
    ordered: bool
    grouped: bool
    parts: tuple[str, ...] = ()


def called(messages: Any) -> list[list[str]]:
    """Names of the tools called, by message; a message without calls is left out.

    Raises:
        ValueError: messages that are no list of objects, or a call without a name.
    """
    groups = []
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError("messages must be a list of objects")
    for message in messages:
        calls = message.get("tool_calls") or []
        try:
            names = [str(call["function"]["name"]) for call in calls]
        except (KeyError, TypeError):
            raise ValueError("a call without function.name") from None
        if names:
            groups.append(names)
    return groups


def count(record: Mapping[str, Any]) -> Counts:
    """The counts of one record; raises `ValueError` for one that is not in the format."""
    for name in ("messages", "messages_pred"):
        if name not in record:
            raise ValueError(f"no '{name}'")
    gold, predicted = called(record["messages"]), called(record["messages_pred"])
    flat_gold, flat = sum(gold, []), sum(predicted, [])
    level = record.get("diff_level")
    parts = [f"field:{str(record.get('scenery', '')).partition('-')[0].strip() or 'none'}"]
    parts.append(f"level:{level.get('level', 'none') if isinstance(level, Mapping) else 'none'}")
    if "task" in record:
        parts.append(f"task:{str(record['task']).replace(' ', '_')}")
    return Counts(
        predicted=len(flat),
        gold=len(flat_gold),
        common=(Counter(flat) & Counter(flat_gold)).total(),
        ordered=flat == flat_gold,
        grouped=[sorted(group) for group in predicted] == [sorted(group) for group in gold],
        parts=tuple(parts),
    )


def metrics(counts: Sequence[Counts]) -> dict[str, float]:
    """TP, TR, TF1 (micro and macro) and exact match over some records; 0 where a denominator is 0, as published."""
    common, predicted, gold = (sum(getattr(c, name) for c in counts) for name in ("common", "predicted", "gold"))
    n = max(1, len(counts))
    each = [_prf(c.common, c.predicted, c.gold) for c in counts]
    precision, recall, f1 = _prf(common, predicted, gold)
    return {
        "n": len(counts),
        "TP": precision,
        "TR": recall,
        "TF1": f1,
        "TP_macro": sum(p for p, _, _ in each) / n,
        "TR_macro": sum(r for _, r, _ in each) / n,
        "TF1_macro": sum(f for _, _, f in each) / n,
        "emr_ordered": sum(c.ordered for c in counts) / n,
        "emr_groups": sum(c.grouped for c in counts) / n,
    }


def _prf(common: int, predicted: int, gold: int) -> tuple[float, float, float]:
    precision, recall = common / predicted if predicted else 0.0, common / gold if gold else 0.0
    return precision, recall, 2 * precision * recall / (precision + recall) if common else 0.0


def evaluate(path: str | Path) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Metrics of a prediction file (a JSON list, or JSON lines), all and by part, and what was left out and why.

    Records marked `error` and records that are not in the format are left out and named: they are not zeros, and they
    are not silent.

    Raises:
        UserError: the file cannot be read or holds no usable record.
    """
    data = read_bytes(Path(path))
    if data.lstrip().startswith(b"["):
        records = parse(data, str(path))
    else:
        records = [parse(line, f"{path}: line {n}") for n, line in enumerate(data.splitlines(), 1) if line.strip()]
    counts: list[Counts] = []
    left_out: list[str] = []
    for number, record in enumerate(records):
        where = f"record {record.get('id', number) if isinstance(record, Mapping) else number}"
        if isinstance(record, Mapping) and record.get("error"):
            left_out.append(f"{where}: marked as error")
            continue
        try:
            counts.append(count(record))
        except (ValueError, TypeError, AttributeError) as error:
            left_out.append(f"{where}: {error}")
    if not counts:
        raise UserError(f"{path}: no usable record ({left_out[0] if left_out else 'it is empty'})")
    names = sorted({part for c in counts for part in c.parts})
    parts = {name: metrics([c for c in counts if name in c.parts]) for name in names}
    return {"all": metrics(counts)} | parts, left_out


def write(path: str | Path) -> Path:
    """The metrics as JSON beside the predictions, with their digest; its path."""
    out = Path(path).with_name(f"{Path(path).name}.finmcp.json")
    scores, left_out = evaluate(path)
    record = {
        "predictions": Path(path).name,
        "digest": hashlib.sha256(read_bytes(Path(path))).hexdigest(),
        "versions": versions(),
        "scores": scores,
        "left_out": left_out,
        "full": RECORDS,
    }
    out.write_text(json.dumps(record, indent=1) + "\n")
    return out


def report(path: str | Path) -> list[str]:
    """`evaluate` as lines, beside the published numbers."""
    from envace_jax.evaluation.published import measured

    scores, left_out = evaluate(path)
    lines = [f"finmcp: {path}"]
    for name, m in scores.items():
        lines.append(
            f"  {name} (n={m['n']}): TR {100 * m['TR']:.2f}, TP {100 * m['TP']:.2f}, TF1 {100 * m['TF1']:.2f} (micro), "
            f"exact match {100 * m['emr_ordered']:.2f} in order, {100 * m['emr_groups']:.2f} by message"
        )
    lines.append(f"  left out: {len(left_out)}" + "".join(f"\n    {text}" for text in left_out[:5]))
    lines += [f"  published: {p.model} {p.metric} {p.value:.2f} ({p.source}, {p.place})" for p in measured("finmcp")]
    if scores["all"]["n"] < RECORDS:
        lines.append(f"  partial: the benchmark has {RECORDS} records")
    return lines
