"""Rows of a parquet file of CM2 records, with what the file type does to nested data undone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envace_jax.config import UserError


def parquet_records(path: Path) -> Iterator[dict[str, Any]]:
    """The rows in order, a few at a time in memory.

    Raises:
        UserError: the file is not parquet.
    """
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: is not parquet ({str(error).splitlines()[0][:200]})") from None
    for batch in table.iter_batches(batch_size=64):
        for record in batch.to_pylist():
            yield _without_union(record)


def _without_union(record: dict[str, Any]) -> dict[str, Any]:
    """Parquet gives all structs of a column the union of their keys: take the null ones out of the tools."""
    if not isinstance(record.get("tools"), list):
        return record
    used: set[tuple[Any, str]] = set()  # names of tools and of arguments that the dialogue gives them
    for message in record.get("messages") or ():
        for call in (message or {}).get("tool_calls") or ():
            function = (call or {}).get("function") or {}
            try:
                used |= {(function.get("name"), key) for key in json.loads(function.get("arguments") or "{}")}
            except (TypeError, ValueError, RecursionError):
                continue  # the record's check will say what is wrong
    tools = []
    for tool in record["tools"]:
        tool = _prune(tool)
        parameters = (tool.get("function") or {}).get("parameters") if tool else None
        if isinstance(parameters, dict) and isinstance(parameters.get("properties"), dict):
            # A property with the schema {} is null like an absent one; that it is required or used tells.
            for key in [key for name, key in used if name == tool["function"].get("name")]:
                parameters["properties"].setdefault(key, {})
        tools.append(tool)
    return {**record, "tools": tools}


def _prune(value: Any) -> Any:
    if isinstance(value, list):
        return [_prune(v) for v in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, sub in value.items():
        if sub is not None:
            kept[key] = _prune(sub)
        elif key in ("parameters", "properties"):
            kept[key] = {}
    if isinstance(kept.get("properties"), dict):
        for name in kept.get("required") or ():
            kept["properties"].setdefault(name, {})
    return kept
