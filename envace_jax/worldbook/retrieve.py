"""Retrieval: deterministic BM25 over a worldbook, and the gate that says what a found item is good for.

Similar words do not make a recorded answer apply here. The gate asks whether the item speaks of the same specific
things (paths, files, ids) as the call and its history: *supporting* items are shown as they are, *uncertain* and
*format-only* ones with their specifics replaced by placeholders. Retrieval can leave a trajectory group out altogether.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from envace_jax.text.transcript import canonical_json
from envace_jax.worldbook.store import EvidenceItem, Worldbook, rule_text
from envace_jax.worldbook.workspace import Session

MAX_QUERY_TOKENS = 12
K1, B = 1.2, 0.75
SUPPORTING, UNCERTAIN, FORMAT_ONLY = "supporting", "uncertain", "format_only"

_WORD = re.compile(r"[A-Za-z0-9_]+")


def tokens(text: str) -> list[str]:
    """Lower-case words and numbers of a text."""
    return [t.lower() for t in _WORD.findall(text[:20_000])]


@dataclass(frozen=True)
class Document:
    """One searchable item: evidence, demonstration, rule, note or action."""

    id: str
    kind: str
    text: str
    groups: frozenset[str] = frozenset()
    action: str = ""


class Bm25:
    """Okapi BM25 with an inverted index; ties are broken by document order, so results never depend on timing."""

    def __init__(self, documents: Sequence[Document]):
        self.documents = list(documents)
        self._posting: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._length: list[int] = []
        for n, document in enumerate(self.documents):
            counts = Counter(tokens(document.text))
            self._length.append(sum(counts.values()))
            for token, tf in counts.items():
                self._posting[token].append((n, tf))
        self._mean = sum(self._length) / max(1, len(self._length))

    def search(
        self, query: Iterable[str], limit: int, allowed: Callable[[Document], bool] = lambda d: True
    ) -> list[tuple[Document, float]]:
        """The best documents for the query words (the first 12 distinct ones), with their scores."""
        scores: dict[int, float] = defaultdict(float)
        total = len(self.documents)
        for token in list(dict.fromkeys(t.lower() for t in query))[:MAX_QUERY_TOKENS]:
            posting = self._posting.get(token)
            if not posting:
                continue
            idf = math.log(1 + (total - len(posting) + 0.5) / (len(posting) + 0.5))
            for n, tf in posting:
                norm = K1 * (1 - B + B * self._length[n] / max(self._mean, 1e-9))
                scores[n] += idf * tf * (K1 + 1) / (tf + norm)
        out: list[tuple[Document, float]] = []
        for n in sorted(scores, key=lambda n: (-scores[n], n)):
            if allowed(self.documents[n]):
                out.append((self.documents[n], scores[n]))
                if len(out) >= limit:
                    break
        return out


def query_words(name: str, arguments: dict[str, Any]) -> list[str]:
    """The words that a call is searched by: its name and the words of its arguments, flags left out."""
    out = tokens(name.replace("_", " ")) + [name.lower()]
    for key, value in arguments.items():
        text = value if isinstance(value, str) else canonical_json(value)
        for word in text.split():
            if not word.startswith("-"):
                out += tokens(word)
        out.append(key.lower())
    return out


# --- specific names --------------------------------------------------------------------------------------------

_EXTENSIONS = (
    "py js ts jsx tsx c h cc cpp hpp rs go java rb sh md txt json jsonl yaml yml toml csv tsv html css xml sql db log "
    "cfg ini conf lock png jpg jpeg gif svg pdf zip tar gz xz parquet ipynb"
).split()
_NAME = re.compile(
    r"https?://[^\s\"'<>)\]]+"
    r"|(?:~|\.{1,2})?/[\w.\-+@]+(?:/[\w.\-+@]*)*"
    r"|[\w\-+@]+(?:/[\w.\-+@]+)+"
    r"|[\w\-]+(?:\.[\w\-]+)*\.(?:" + "|".join(_EXTENSIONS) + r")\b"
    r"|[\w.+\-]+@[\w\-]+\.[\w.]+"
    r"|\b[0-9a-f]{7,40}\b"
    r"|\b[A-Za-z_]+[-_#]?\d[\w\-]*\b"
    r"|\b\d{3,}\b"
)
GENERIC = frozenset(
    "/ . .. ~ /tmp /usr /bin /etc /home /root /dev/null /usr/bin /usr/local utf8 utf-8 sha256 md5".split()
)


def specific_names(text: str) -> frozenset[str]:
    """Paths, files with known extensions, addresses and ids that a text mentions; generic ones left out."""
    return frozenset(n for n in (m.group(0).rstrip(".,:;") for m in _NAME.finditer(text[:60_000])) if n not in GENERIC)


_URL = re.compile(r"(?:Page URL|url|URL|goto)\W{1,4}(https?://[^\s\"'<>)\]]+)")
_RESOURCE = re.compile(r"[\w.]+:id/[\w]+|\bstate[_ ]?id\W{1,3}[\w\-]+")


def page_names(text: str) -> frozenset[str]:
    """Identity of web pages: their addresses, and other specific names."""
    return frozenset(_URL.findall(text)) | specific_names(text)


def screen_names(text: str) -> frozenset[str]:
    """Identity of application screens: resource and state ids, and other specific names."""
    return frozenset(_RESOURCE.findall(text)) | specific_names(text)


IDENTITIES: dict[str, Callable[[str], frozenset[str]]] = {
    "names": specific_names,
    "pages": page_names,
    "screens": screen_names,
}
"""Extractors of what makes two situations the same, by kind of environment."""

_PROMPT = re.compile(r"[\w.\-]+@[\w.\-]+:([^\s#$]+)[#$]")


def working_folder(text: str) -> str | None:
    """The folder in the last shell prompt of a text, or None."""
    found = _PROMPT.findall(text)
    return found[-1] if found else None


def collapse(names: Iterable[str]) -> set[str]:
    """Names without those that are parts of another one."""
    ordered = sorted(set(names), key=lambda n: (-len(n), n))
    kept: list[str] = []
    for name in ordered:
        if not any(name in longer for longer in kept):
            kept.append(name)
    return set(kept)


_EXTENSION = r"[\w\-]+(?:\.[\w\-]+)*\.(?:" + "|".join(_EXTENSIONS) + r")\b"
_PLACES: tuple[tuple[str, str], ...] = (
    ("host", r"https?://[^\s\"'<>)\]]+|\b[\w.\-]+@[\w.\-]+(?=:)"),
    ("id", r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"),
    ("hash", r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,64}\b"),
    ("ip", r"\b\d{1,3}(?:\.\d{1,3}){3}\b"),
    ("date", r"\b\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2})?(?:\.\d+)?Z?)?"),
    ("version", r"\bv?\d+\.\d+\.\d+(?:[\-+.]\w+)*\b"),
    ("path", r"(?:~|\.{1,2})?/[\w.\-+@]+(?:/[\w.\-+@]*)+"),
    ("file", r"\b" + _EXTENSION),
    ("name", r"\b[A-Za-z]+[-_#]?\d[\w\-]*\b"),
    ("n", r"\b\d{3,}\b"),
)
_SPECIFIC = re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in _PLACES))


def sanitize(text: str, known: frozenset[str] = frozenset()) -> str:
    """A text with its specifics replaced by placeholders; names in ``known`` and generic ones survive."""

    def replace_one(match: re.Match[str]) -> str:
        found = match.group(0)
        if found in known or found in GENERIC:
            return found
        kind = match.lastgroup
        return f"<file.{found.rsplit('.', 1)[1]}>" if kind == "file" else f"<{kind}>"

    return _SPECIFIC.sub(replace_one, text)


# --- the gate --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gated:
    """A found item with what it is good for; the text is sanitised unless it supports."""

    item: EvidenceItem
    verdict: str
    score: int
    text: str


@dataclass(frozen=True)
class Retrieved:
    """What retrieval offers for one call. ``abstain``: nothing recorded supports an answer."""

    similar: tuple[Gated, ...] = ()
    rules: tuple[Any, ...] = ()
    notes: tuple[Any, ...] = ()
    demonstrations: tuple[tuple[Any, str], ...] = ()
    contracts: tuple[tuple[Any, tuple[str, ...]], ...] = ()
    action: Any = None
    invariants: tuple[Any, ...] = ()
    fields: tuple[Any, ...] = ()

    @property
    def abstain(self) -> bool:
        return not any(g.verdict == SUPPORTING for g in self.similar)


def rule_constants(rule: Any) -> set[str]:
    """The texts that a rule states (field names and the lists of values seen, which are never shown, left out)."""
    out: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, str):
            if len(value.strip()) > 2:
                out.add(value.strip())
        elif isinstance(value, dict):
            for key, item in value.items():
                if key not in ("$state", "$arg", "$entry", "$out", "op"):
                    walk(item)
                elif key == "$state":
                    walk([s for s in item if isinstance(s, dict)])
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item)

    walk([c for c in rule.conditions if not is_novelty(c)])
    walk(rule.render)
    walk([e.value for e in rule.effects])
    if rule.observation_template:
        out.add(rule.observation_template)
    return out


def shown_rule(rule: Any) -> str:
    """A rule as its readers see it: without the lists of values seen, and without whatever it was described by."""
    conditions = tuple(c for c in rule.conditions if not is_novelty(c))
    return rule_text(replace(rule, conditions=conditions, description=""))


def is_novelty(condition: Any) -> bool:
    """Whether a condition only keeps a rule to the values that the traces showed."""
    if not isinstance(condition, dict):
        return False
    if "any" in condition and len(condition["any"]) == 2:
        first, second = condition["any"]
        return isinstance(first, dict) and first.get("op") == "not_exists" and is_novelty(second)
    right = condition.get("right")
    listed = condition.get("op") == "in" and isinstance(right, dict) and "$const" in right
    return listed or (condition.get("op") in ("gt", "gte") and right == 0)


class Retriever:
    """Searches one worldbook. ``identity`` names the extractor that suits the environment; ``gate`` off shows all."""

    def __init__(self, book: Worldbook, identity: str = "names", gate: bool = True):
        self.book, self.gate = book, gate
        self.names_of = IDENTITIES[identity]
        self.group_of = {e["episode_id"]: str(e.get("trajectory_group", "")) for e in book.episodes}
        self._evidence = {e.id: e for e in book.evidence}
        documents = [
            Document(e.id, "evidence", f"{e.action} {canonical_json(e.arguments)} {e.observation[:2000]}",
                     frozenset([e.group]), e.action)
            for e in book.evidence
        ]  # fmt: skip
        self._index = Bm25(documents)
        self._notes = Bm25(
            [
                Document(n.id, "note", " ".join([*n.action_types, n.statement]), self.groups(n.provenance))
                for n in book.notes
                if n.status != "contradicted"
            ]
        )
        self._note_by_id = {n.id: n for n in book.notes}
        self._names: dict[str, frozenset[str]] = {}
        self._text_groups: dict[str, frozenset[str]] = {}
        self._rule_words: dict[str, frozenset[str]] = {}
        self._episode_names: dict[str, set[str]] = defaultdict(set)
        owners: dict[str, set[str]] = defaultdict(set)
        for e in book.evidence:
            names = self.item_names(e)
            self._episode_names[e.episode_id] |= names
            for name in names:
                owners[name].add(e.group)
        self._common = frozenset(n for n, groups in owners.items() if len(groups) > 1)

    def groups(self, sources: Iterable[Any]) -> frozenset[str]:
        """The trajectory groups that provenance points to."""
        return frozenset(self.group_of.get(s.episode_id, "") for s in sources)

    @cached_property
    def _sole_owners(self) -> dict[str, str]:
        """Words that recorded calls and answers of one group alone contain, each with that group."""
        out: dict[str, str] = {}
        for e in self.book.evidence:
            for word in set(_WORD.findall(f"{canonical_json(e.arguments)}\n{e.observation}".lower())):
                if out.setdefault(word, e.group) != e.group:
                    out[word] = ""
        return {word: group for word, group in out.items() if group}

    def told_elsewhere(self, text: str, exclude: str) -> bool:
        """Whether a text holds no word that the excluded group alone showed."""
        return not exclude or all(self._sole_owners.get(w) != exclude for w in _WORD.findall(text.lower()))

    def item_visible(self, item: Any, text: str, exclude: str) -> bool:
        """Whether a note, an invariant or the like may be shown to the excluded group: it does not rest on that group
        alone, nor does it say what that group alone showed."""
        if not exclude:
            return True
        return not self.groups(item.provenance) <= frozenset([exclude]) and self.told_elsewhere(text, exclude)

    def visible_fields(self, exclude: str) -> tuple[Any, ...]:
        """Declared places of the state whose names the excluded group does not alone know."""
        return tuple(f for f in self.book.state_fields if self.told_elsewhere(f.path, exclude))

    def visible_action(self, name: str, exclude: str) -> Any:
        """An action's schema, its description left out where it says what the excluded group alone showed; or None."""
        action = next((a for a in self.book.actions if a.name == name), None)
        if action is None or self.told_elsewhere(action.description, exclude):
            return action
        return replace(action, description="")

    def rule_visible(self, rule: Any, exclude: str) -> bool:
        """Whether a rule may be shown to the excluded group: it does not rest on that group alone, every text that it
        contains was also observed in another group, and it names nothing that only that group showed."""
        if not exclude:
            return True
        if self.groups(rule.provenance) <= frozenset([exclude]):
            return False
        if rule.id not in self._rule_words:
            self._rule_words[rule.id] = frozenset(_WORD.findall(shown_rule(rule).lower()))
        if any(self._sole_owners.get(w) == exclude for w in self._rule_words[rule.id]):
            return False
        for text in rule_constants(rule):
            if text not in self._text_groups:
                self._text_groups[text] = frozenset(
                    e.group for e in self.book.evidence if text in e.observation or text in canonical_json(e.arguments)
                )
            if not self._text_groups[text] - {exclude}:
                return False
        return True

    def item_names(self, item: EvidenceItem) -> frozenset[str]:
        if item.id not in self._names:
            self._names[item.id] = self.names_of(f"{canonical_json(item.arguments)}\n{item.observation[:20_000]}")
        return self._names[item.id]

    def retrieve(
        self,
        session: Session,
        name: str,
        arguments: dict[str, Any],
        *,
        exclude: str = "",
        similar: int = 5,
        rules: int = 12,
        notes: int = 6,
        demonstrations: int = 2,
        documented: bool = False,
    ) -> Retrieved:
        """What the worldbook offers for a call.

        Args:
            exclude: a trajectory group nothing of which may be seen: its evidence, examples and demonstrations, and
                rules and notes that rest on it alone.
            documented: the caller's prompt shows what this action's answers look like: format examples are withheld.
        """
        book = self.book
        name = book.canonical_names.get(name, name)
        words = query_words(name, arguments)

        def allowed(document: Document) -> bool:
            return not exclude or exclude not in document.groups

        hits = self._index.search(words, 4 * similar, lambda d: allowed(d) and d.action == name)
        if len(hits) < similar:
            seen = {d.id for d, _ in hits}
            hits += [h for h in self._index.search(words, 2 * similar, allowed) if h[0].id not in seen]
        shown = self._shown(session)
        gated = [self.judge(self._evidence[d.id], arguments, shown, session) for d, _ in hits]
        # Among equals, the order of relevance stays; what supports goes first.
        gated.sort(key=lambda g: -{SUPPORTING: 2, UNCERTAIN: 1, FORMAT_ONLY: 0}[g.verdict])
        if documented and self.gate:
            gated = [g for g in gated if g.verdict != FORMAT_ONLY]
        chosen_rules = [r for r in book.rules if r.action_type == name and self.rule_visible(r, exclude)]
        chosen_rules.sort(key=lambda r: (-r.priority, -r.confidence, r.id))
        found_notes = [
            self._note_by_id[d.id]
            for d, _ in self._notes.search(words, 4 * notes)
            if self.item_visible(self._note_by_id[d.id], self._note_by_id[d.id].statement, exclude)
        ]
        known = shown | self.names_of(canonical_json(arguments))
        demos = [
            (d, d.observation if not self.gate else sanitize(d.observation, known))
            for d in book.demonstrations
            if d.action.get("type") == name and (not exclude or d.group != exclude)
        ][:demonstrations]
        contracts = [
            (self._contract(c, exclude), self._examples(c, exclude, known, documented))
            for c in book.contracts
            if name in c.action_types and not (exclude and self.groups(c.provenance) <= frozenset([exclude]))
        ]
        return Retrieved(
            tuple(gated[:similar]),
            tuple(chosen_rules[:rules]),
            tuple(found_notes[:notes]),
            tuple(demos),
            tuple(contracts),
            self.visible_action(name, exclude),
            tuple(i for i in book.invariants if self.item_visible(i, i.description, exclude)),
            self.visible_fields(exclude),
        )

    def _contract(self, contract: Any, exclude: str) -> Any:
        """A contract without the words of the excluded group alone."""
        return replace(
            contract,
            required_fields=tuple(f for f in contract.required_fields if self.told_elsewhere(f, exclude)),
            instructions=contract.instructions if self.told_elsewhere(contract.instructions, exclude) else "",
        )

    def _examples(self, contract: Any, exclude: str, known: frozenset[str], documented: bool) -> tuple[str, ...]:
        """A contract's examples, without those that the excluded group gave or that cannot be told from them."""
        if documented:
            return ()
        out = []
        for example in contract.examples:
            if exclude and any(e.group == exclude and e.observation[:400] == example[:400] for e in self.book.evidence):
                continue
            if not self.told_elsewhere(example, exclude):
                continue
            out.append(sanitize(example, known) if self.gate else example)
        return tuple(out[:3])

    def judge(self, item: EvidenceItem, arguments: dict[str, Any], shown: frozenset[str], session: Session) -> Gated:
        """Whether a recorded transition supports an answer to this call, may, or only shows the format."""
        if not self.gate:
            return Gated(item, SUPPORTING, 0, item.observation)
        operands = self.names_of(canonical_json(arguments)) - self._common
        theirs = self.names_of(canonical_json(item.arguments)) - self._common
        shared = collapse(operands & theirs)
        places = collapse((self._episode_names[item.episode_id] - self._common) & shown)
        score = len(shared) + min(len(places), 3)
        here, there = self._folder(session), working_folder(item.observation)
        conflict = here is not None and there is not None and here != there
        if score >= 2 and (len(shared) >= 1 or len(places) >= 2) and not conflict:
            return Gated(item, SUPPORTING, score, item.observation)
        known = shown | self.names_of(canonical_json(arguments))
        verdict = UNCERTAIN if score >= 1 else FORMAT_ONLY
        return Gated(item, verdict, score, sanitize(item.observation, known))

    def _shown(self, session: Session) -> frozenset[str]:
        names: frozenset[str] = self.names_of(session.instruction)
        for item in session.memory.recent(20):
            names |= self.names_of(f"{canonical_json(item.arguments)}\n{item.observation[:6000]}")
        return names

    def _folder(self, session: Session) -> str | None:
        for item in session.memory:
            folder = working_folder(item.observation)
            if folder is not None:
                return folder
        return None

    def search_knowledge(
        self, query: str, kinds: Sequence[str] = (), limit: int = 8, exclude: str = ""
    ) -> list[dict[str, str]]:
        """Free search over evidence, rules and notes for the agent's tool."""
        words = tokens(query)
        out: list[dict[str, str]] = []
        if not kinds or "evidence" in kinds:
            for d, _ in self._index.search(words, limit, lambda d: not exclude or exclude not in d.groups):
                out.append({"id": d.id, "kind": "evidence", "text": d.text[:400]})
        if not kinds or "rule" in kinds:
            for r in self.book.rules:
                text = shown_rule(r)
                if self.told_elsewhere(r.description, exclude):
                    text = f"{r.description}\n{text}".strip()
                if self.rule_visible(r, exclude) and set(tokens(text + " " + r.action_type)) & set(words):
                    out.append({"id": r.id, "kind": "rule", "text": text[:400]})
        if not kinds or "note" in kinds:
            for d, _ in self._notes.search(words, limit):
                note = self._note_by_id[d.id]
                if self.item_visible(note, note.statement, exclude):
                    out.append({"id": d.id, "kind": "note", "text": d.text[:400]})
        return out[: max(1, min(limit, 25))]


@dataclass
class RetrievalCache:
    """Briefs by worldbook and query, at most so many."""

    size: int = 10_000
    hits: int = 0
    misses: int = 0
    _entries: dict[Any, Any] = field(default_factory=dict)

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        """The entry, made if it is not there."""
        if key in self._entries:
            self.hits += 1
            return self._entries[key]
        self.misses += 1
        return self.put(key, make())

    def put(self, key: Any, value: Any) -> Any:
        """Keep an entry, the oldest ones making room."""
        while len(self._entries) >= self.size:
            self._entries.pop(next(iter(self._entries)), None)  # another thread may have been faster
        self._entries[key] = value
        return value

    def peek(self, key: Any) -> Any:
        """An entry that is there."""
        return self._entries[key]

    def __contains__(self, key: Any) -> bool:
        return key in self._entries
