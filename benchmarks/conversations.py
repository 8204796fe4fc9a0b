"""The conversations that every side of `rollout.py` plays; imports nothing of the package, so that others' environments
can read them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

ACT, REHEARSE = 0, 1


@dataclasses.dataclass(frozen=True)
class Turn:
    """One request of the workload: what stands before it is known, what it samples has a forced length."""

    role: int
    new_ids: tuple[int, ...]  # ACT: appended to its ledger; REHEARSE: after the static head and the ledger's end
    length: int


@dataclasses.dataclass
class Conversation:
    """One member of a group: its turns in order, ACT and REHEARSE alternating."""

    task: int
    member: int
    turns: list[Turn]
    ledger: list[int] = dataclasses.field(default_factory=list)
    at: int = 0

    def prompt(self, head: tuple[int, ...]) -> list[int]:
        turn = self.turns[self.at]
        if turn.role == ACT:
            return self.ledger + list(turn.new_ids)
        return [*head, *turn.new_ids, *self.ledger[-400:]]

    def receive(self, prompt: list[int], ids: list[int]) -> None:
        turn = self.turns[self.at]
        self.ledger = [*prompt, *ids] if turn.role == ACT else [*self.ledger, *ids]
        self.at += 1

    @property
    def done(self) -> bool:
        return self.at == len(self.turns)


Played = tuple[tuple[int, ...], list[Conversation]]
"""The static head of REHEARSE prompts, and the conversations."""


def save(path: Path, head: Sequence[int], conversations: Sequence[Conversation]) -> None:
    """Writes what has not begun yet as JSON."""
    facts = {"head": list(head), "conversations": [dataclasses.asdict(c) for c in conversations]}
    path.write_text(json.dumps(facts))


def load(path: Path) -> Played:
    """What `save` wrote."""
    facts = json.loads(path.read_text())
    conversations = [
        Conversation(c["task"], c["member"], [Turn(t["role"], tuple(t["new_ids"]), t["length"]) for t in c["turns"]])
        for c in facts["conversations"]
    ]
    return tuple(facts["head"]), conversations


def limits(played: Played) -> tuple[int, int]:
    """Tokens of the longest prompt and of the longest output; the conversations are played by it."""
    prompt = output = 0

    def note(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        nonlocal prompt, output
        prompt, output = max(prompt, *map(len, prompts)), max(output, *lengths)
        return [[8] * n for n in lengths]

    in_order(played, note)
    return prompt, output


Generate = Callable[[list[list[int]], list[int]], list[list[int]]]
"""Prompts and forced lengths to outputs."""


LONGEST_SIDE = 600.0
"""Seconds after which an outside side begins no further batch; its rate is that of what it did until then."""


def in_order(
    played: Played, generate: Generate, batch_size: int = 64, enough: Callable[[], bool] = lambda: False
) -> int:
    """All ACT prompts, then all REHEARSE prompts, in batches, whole prompts each time; how many tokens were useful.

    `enough` ends it before the next batch.
    """
    head, conversations = played
    useful = 0
    while any(not c.done for c in conversations):
        for role in (ACT, REHEARSE):
            batch = [c for c in conversations if not c.done and c.turns[c.at].role == role]
            for part in (batch[i : i + batch_size] for i in range(0, len(batch), batch_size)):
                if enough():
                    return useful
                prompts = [c.prompt(head) for c in part]
                lengths = [c.turns[c.at].length for c in part]
                for c, prompt, ids, n in zip(part, prompts, generate(prompts, lengths), lengths, strict=True):
                    assert len(ids) >= n, "an output was cut"
                    c.receive(prompt, ids[:n])
                    useful += n
    return useful
