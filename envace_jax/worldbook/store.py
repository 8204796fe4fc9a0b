"""A worldbook as a value and as a folder: written once, hashed file by file, verified on load, never changed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from envace_jax.config import UserError
from envace_jax.faults import point, write_whole
from envace_jax.json_files import parse, read_json
from envace_jax.text.transcript import canonical_json
from envace_jax.worldbook import records as R
from envace_jax.worldbook.notation import TermError, describe, describe_condition, format_path, parse_path
from envace_jax.worldbook.rulebook import ActionRules, compile_rules
from envace_jax.worldbook.state import PMap

T = TypeVar("T")


@dataclass(frozen=True)
class EvidenceItem:
    """A recorded transition as retrieval sees it."""

    id: str
    episode_id: str
    group: str
    index: int
    action: str
    arguments: dict[str, Any]
    observation: str
    outcome: R.Outcome = "unknown"


@dataclass(frozen=True)
class Worldbook:
    """Everything learned from a set of traces. Equal content has an equal `digest`."""

    actions: tuple[R.ActionSpec, ...] = ()
    state_fields: tuple[R.StateField, ...] = ()
    invariants: tuple[R.Invariant, ...] = ()
    rules: tuple[R.TransitionRule, ...] = ()
    candidates: tuple[R.TransitionRule, ...] = ()
    contracts: tuple[R.RenderContract, ...] = ()
    demonstrations: tuple[R.Demonstration, ...] = ()
    notes: tuple[R.Note, ...] = ()
    evidence: tuple[EvidenceItem, ...] = ()
    local: tuple[R.TransitionEvidence, ...] = ()
    slices: tuple[R.TransitionSlice, ...] = ()
    episodes: tuple[dict[str, Any], ...] = ()
    sources: tuple[dict[str, Any], ...] = ()
    unresolved: tuple[dict[str, Any], ...] = ()
    rejected: tuple[dict[str, Any], ...] = ()
    replay: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, Any] = field(default_factory=dict)
    overview: str = ""
    status: str = "candidate"
    parent: str = ""

    @cached_property
    def digest(self) -> str:
        """SHA-256 over all artifacts (not over where or when they were written)."""
        return R.digest({f.name: getattr(self, f.name) for f in fields(self)})

    @cached_property
    def canonical_names(self) -> dict[str, str]:
        """Aliases and names, each to the canonical action name."""
        out = {a.name: a.name for a in self.actions}
        for action in self.actions:
            for alias in action.aliases:
                out.setdefault(alias, action.name)
        return out

    def compiled(self, floor: float) -> dict[str, ActionRules]:
        """The executable rules of at least this confidence, compiled, by action (cached)."""
        cache = self.__dict__.setdefault("_compiled", {})
        if floor not in cache:
            cache[floor] = compile_rules(r for r in self.rules if r.confidence >= floor and r.templated)
        return cache[floor]

    @cached_property
    def _effective(self) -> frozenset[str]:
        return frozenset(r.action_type for r in (*self.rules, *self.candidates) if r.effects)

    @cached_property
    def _explained(self) -> frozenset[str]:
        return frozenset(r.action_type for r in self.rules)

    def is_read_only(self, name: str) -> bool:
        """Whether the action has rules, they explain all that was recorded of it, and none changes anything."""
        return name in self._explained and name not in self._effective and not self.has_unexplained(name)

    def has_unexplained(self, name: str) -> bool:
        """Whether some recorded transitions of the action are explained by no executable rule."""
        return int(self.artifacts.get("unexplained", {}).get(name, 0)) > 0

    @cached_property
    def field_table(self) -> dict[tuple[Any, ...], R.StateField]:
        return {parse_path(f.path): f for f in self.state_fields}

    def field_at(self, path: Sequence[Any]) -> R.StateField | None:
        """The declaration that covers a path (``*`` matches any key)."""
        table = self.field_table
        exact = table.get(tuple(path))
        if exact is not None:
            return exact
        for declared, f in table.items():
            if len(declared) == len(path) and all(d == "*" or d == p for d, p in zip(declared, path)):
                return f
        return None

    def check_effect(self, op: str, path: Sequence[Any], value: Any) -> str:
        """Why an effect is not allowed, or an empty text: the path is declared, mutable, the value of its type."""
        place = format_path(path)
        found = self.field_at(path)
        if found is None:
            # Writing an object below which fields are declared is allowed where its fields are.
            if isinstance(value, PMap) and op in ("set", "create", "merge"):
                problems = (self.check_effect("set", [*path, k], v) for k, v in value.items())
                return next((p for p in problems if p), "")
            below = any(
                len(d) > len(path) and all(a == "*" or a == b for a, b in zip(d, path)) for d in self.field_table
            )
            return "" if below and op in ("delete", "forget") else f"path {place} is not declared"
        if not found.mutable and op != "forget":
            return f"path {place} is not mutable"
        if op in ("set", "create") and not fits_type(value, found.type):
            return f"path {place}: {type(value).__name__} does not fit {found.type}"
        if op in ("increment", "decrement") and found.type not in ("integer", "number", "any"):
            return f"path {place}: {op} on {found.type}"
        if op == "append" and found.type not in ("array", "any"):
            return f"path {place}: append on {found.type}"
        return ""


def fits_type(value: Any, kind: str) -> bool:
    """Whether a state value is of a declared type; null fits any."""
    if kind == "any" or value is None:
        return True
    kinds: dict[str, Any] = {
        "string": str, "integer": int, "number": (int, float), "boolean": bool,
        "object": (PMap, dict), "array": (tuple, list),
    }  # fmt: skip
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, kinds[kind])


# --- folder ----------------------------------------------------------------------------------------------------

_JSONL: dict[str, tuple[str, Any]] = {
    "rules/index.jsonl": ("rules", R.TransitionRule),
    "candidates/rules.jsonl": ("candidates", R.TransitionRule),
    "demonstrations/transitions.jsonl": ("demonstrations", R.Demonstration),
    "knowledge/notes.jsonl": ("notes", R.Note),
    "evidence/transitions.jsonl": ("evidence", EvidenceItem),
    "evidence/local_transitions.jsonl": ("local", R.TransitionEvidence),
    "evidence/slices.jsonl": ("slices", R.TransitionSlice),
}
_JSON: dict[str, tuple[str, Any]] = {
    "action_schema.json": ("actions", R.ActionSpec),
    "state_schema.json": ("state_fields", R.StateField),
    "invariants.json": ("invariants", R.Invariant),
    "renderer/contracts.json": ("contracts", R.RenderContract),
}
_PLAIN = {
    "evidence/sources.json": "sources",
    "exceptions/unresolved.json": "unresolved",
    "exceptions/rejected.json": "rejected",
    "construction/config.json": "config",
    "construction/artifacts.json": "artifacts",
    "validation/replay.json": "replay",
}


def save_worldbook(book: Worldbook, path: str | Path) -> Path:
    """Write a worldbook into a fresh folder: a staging folder first, then one rename.

    Raises:
        UserError: the destination exists already.
    """
    path = Path(path)
    if path.exists():
        raise UserError(f"{path}: exists already: a worldbook is never changed in place, choose a new folder")
    staging = path.with_name(f".{path.name}.writing")
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    files: dict[str, str] = {}

    def put(name: str, chunks: Iterable[str]) -> None:
        target = staging / name
        target.parent.mkdir(parents=True, exist_ok=True)
        sha = hashlib.sha256()
        point("open")
        with target.open("wb") as file:
            for chunk in chunks:
                data = chunk.encode("utf-8")
                sha.update(data)
                point("write")
                file.write(data)
            file.flush()
            point("fsync")
            os.fsync(file.fileno())
        files[name] = sha.hexdigest()

    for name, (attribute, _) in _JSONL.items():
        put(name, (canonical_json(R.to_json(item)) + "\n" for item in getattr(book, attribute)))
    put("evidence/episodes.jsonl", (canonical_json(e) + "\n" for e in book.episodes))
    for name, (attribute, _) in _JSON.items():
        put(name, [_pretty(R.to_json(getattr(book, attribute)))])
    for name, attribute in _PLAIN.items():
        put(name, [_pretty(R.to_json(getattr(book, attribute)))])
    for action in sorted({r.action_type for r in book.rules}):
        safe = "".join(c if c.isalnum() or c in "-_" else "_" for c in action)[:60]
        name = f"rules/by_action/{safe}-{R.digest(action)[:6]}.md"
        put(name, [rules_page(action, [r for r in book.rules if r.action_type == action])])
    put("overview.md", [book.overview or default_overview(book)])
    manifest = {
        "schema_version": R.SCHEMA_VERSION,
        "digest": book.digest,
        "status": book.status,
        "parent": book.parent,
        "config_digest": R.digest(book.config),
        "counts": {f.name: len(getattr(book, f.name)) for f in fields(book) if f.name not in _TEXT_FIELDS},
        "files": dict(sorted(files.items())),
    }
    write_whole(staging / "manifest.json", _pretty(manifest))
    point("rename")
    os.replace(staging, path)
    return path


_TEXT_FIELDS = ("overview", "status", "parent", "replay", "config", "artifacts")


def load_worldbook(path: str | Path) -> Worldbook:
    """Read a worldbook, verifying every file against the manifest.

    Raises:
        UserError: no worldbook there, another schema version, a file missing, added or changed, or a malformed record.
    """
    path = Path(path)
    manifest = read_manifest(path)
    problems = verify_folder(path)
    if problems:
        raise UserError(f"{path}: not intact: " + "; ".join(problems[:5]))
    values: dict[str, Any] = {}
    for name, (attribute, kind) in _JSONL.items():
        values[attribute] = tuple(_read_lines(path / name, kind))
    values["episodes"] = tuple(_read_lines(path / "evidence/episodes.jsonl", None))
    for name, (attribute, kind) in _JSON.items():
        data = read_json(path / name)
        values[attribute] = tuple(R.from_json(kind, d, f"{path / name}[{i}]") for i, d in enumerate(data))
    for name, attribute in _PLAIN.items():
        data = read_json(path / name)
        values[attribute] = tuple(data) if isinstance(data, list) else data
    overview = (path / "overview.md").read_text(encoding="utf-8")
    book = Worldbook(**values, overview="", status=manifest["status"], parent=manifest["parent"])
    if book.digest != manifest["digest"]:
        book = Worldbook(**values, overview=overview, status=manifest["status"], parent=manifest["parent"])
    if book.digest != manifest["digest"]:
        raise UserError(f"{path}: content does not have the digest that the manifest states")
    return book


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a worldbook folder."""
    file = path / "manifest.json"
    if not file.is_file():
        raise UserError(f"{path}: no worldbook there (no manifest.json)")
    manifest = read_json(file)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise UserError(f"{file}: not a worldbook manifest")
    if manifest.get("schema_version") != R.SCHEMA_VERSION:
        raise UserError(
            f"{file}: schema version {manifest.get('schema_version')!r}, this program reads {R.SCHEMA_VERSION!r}: "
            "build the worldbook again"
        )
    return manifest


def verify_folder(path: Path) -> list[str]:
    """What is not as the manifest says: files missing, changed or added."""
    manifest = read_manifest(path)
    problems = []
    for name, expected in manifest["files"].items():
        file = path / name
        if ".." in Path(name).parts or not file.is_file():
            problems.append(f"{name} is missing")
            continue
        sha = hashlib.sha256()
        with file.open("rb") as handle:
            while chunk := handle.read(1 << 20):
                sha.update(chunk)
        if sha.hexdigest() != expected:
            problems.append(f"{name} was changed")
    present = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()} - {"manifest.json"}
    problems += [f"{name} is not in the manifest" for name in sorted(present - set(manifest["files"]))]
    return problems


def _read_lines(path: Path, kind: type[T] | None) -> Iterable[T]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}: line {number}"
            data = parse(line, where)
            yield data if kind is None else R.from_json(kind, data, where)


def _pretty(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


# --- pages -----------------------------------------------------------------------------------------------------


def rules_page(action: str, rules: Sequence[R.TransitionRule]) -> str:
    """The rules of one action as readable text."""
    out = [f"# {action}\n"]
    for rule in rules:
        out.append(f"## {rule.id} ({rule.outcome}, {rule.status}, confidence {rule.confidence:.2f})\n")
        out.append(rule_text(rule) + "\n")
    return "\n".join(out)


def rule_text(rule: R.TransitionRule) -> str:
    """One rule as a few lines: if, then, answers."""
    lines = [rule.description] if rule.description else []
    for condition in rule.conditions:
        try:
            lines.append(f"  if {describe_condition(condition)}")
        except (TermError, KeyError, TypeError, AttributeError, IndexError):
            lines.append(f"  if {canonical_json(condition)}")
    for e in rule.effects:
        place = e.path if isinstance(e.path, str) else describe({"$state": list(e.path)})
        value = "" if e.op in ("delete", "forget") else f" {describe(e.value)}"
        lines.append(f"  {e.op} {place}{value}" + (f" after {e.delay_steps} steps" if e.delay_steps else ""))
    answer = describe(rule.render) if rule.render is not None else rule.observation_template
    lines.append(f"  answers {answer}" if answer else "  answers freely")
    return "\n".join(lines)


def default_overview(book: Worldbook) -> str:
    """A page that says what is in the worldbook."""
    out = ["# Worldbook\n", f"digest {book.digest[:16]}, status {book.status}\n"]
    out.append(f"{len(book.episodes)} episodes, {len(book.evidence)} transitions, {len(book.actions)} actions, ")
    out.append(f"{len(book.rules)} executable rules, {len(book.candidates)} candidates, {len(book.notes)} notes.\n")
    for action in book.actions:
        rules = [r for r in book.rules if r.action_type == action.name]
        args = ", ".join(f"{n}: {a.type}" for n, a in action.arguments.items())
        out.append(f"- {action.name}({args}): {len(rules)} rules. {action.description}")
    return "\n".join(out) + "\n"
