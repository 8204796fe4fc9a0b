"""Tokens the learner computes, and how full its batches are: ledger rows against one row per output.

    python benchmarks/packing.py              # prints the table of docs/scaling.md; --out FILE writes JSON too

Output lengths come from `lengths.json`.  A trajectory has prompts, turns and calls drawn as the training data has
them (`Workload`).  The reference trains one row per output, each with all that its prompt held; a ledger row holds a
conversation of one role once.  Counted are positions: a row of L ids costs L - 1.  Packing is the trainer's own
(`envace_jax.learning.packing.best_fit`) into rows of four mean ledgers.

`shared` is a formula, not a layout that the trainer has: positions per trajectory if what the members of a group begin
with alike (ACT's first prompt, the head of every REHEARSE prompt) stood once for the group.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np

from envace_jax.learning.packing import best_fit

HERE = Path(__file__).parent
GROUP = 4


@dataclasses.dataclass(frozen=True)
class Workload:
    """Sizes in tokens of what stands around the outputs, each drawn evenly from its range.

    The first prompt is cut at 3,500 tokens by the published loader; a REHEARSE prompt is rules, tool schema and
    examples (`rehearse_head`), then the history so far, at most `input_limit` in all.
    """

    prompt: tuple[int, int] = (500, 3500)
    user: tuple[int, int] = (20, 120)
    user_turns: tuple[int, int] = (1, 4)
    calls_per_turn: tuple[int, int] = (1, 4)
    rehearse_head: tuple[int, int] = (600, 1500)
    call_frame: int = 40  # what REHEARSE is told of one call beside the history
    input_limit: int = 12000


@dataclasses.dataclass(frozen=True)
class Rows:
    """Row lengths in ids: one row per output, and the ledgers of both contexts."""

    per_output: list[int]
    stateless: list[int]
    stream: list[int]
    prompt: int  # what ACT's ledger begins with
    head: int  # what every row of REHEARSE begins with

    def shared(self, context: str, group: int) -> float:
        """Positions of this trajectory's share of a group whose common beginnings stand once."""
        lengths = getattr(self, context)
        alone = sum(x - 1 for x in lengths)
        return alone - self.prompt * (1 - 1 / group) - self.head * (len(lengths) - 1 - 1 / group)


def trajectory(rng: np.random.Generator, lengths: dict[str, list[int]], w: Workload) -> Rows:
    def draw(bounds: tuple[int, int]) -> int:
        return int(rng.integers(*bounds, endpoint=True))

    ledger = prompt_tokens = draw(w.prompt)
    head = draw(w.rehearse_head)
    history = 0
    stream = head
    per_output: list[int] = []
    rehearse_rows: list[int] = []
    for turn in range(draw(w.user_turns)):
        new = draw(w.user) if turn else 0
        ledger += new
        history += new
        stream += new
        for call in range(draw(w.calls_per_turn) + 1):  # the last output of a turn is the reply
            act = int(rng.choice(lengths["act"]))
            ledger += act
            per_output.append(ledger)
            history += act
            stream += act
            if call == 0 and turn == 0:
                history += new
            answer = int(rng.choice(lengths["rehearse"]))
            prompt = min(w.input_limit, head + history + w.call_frame)
            rehearse_rows.append(prompt + answer)
            per_output.append(prompt + answer)
            stream += w.call_frame + answer
            ledger += answer
            history += answer
        # The reply has no answer: take the last call's back.
        ledger -= answer
        history -= answer
        stream -= w.call_frame + answer
        per_output.pop()
        rehearse_rows.pop()
    return Rows(per_output, [ledger, *rehearse_rows], [ledger, stream], prompt_tokens, head)


def measure(n: int = 2000, seed: int = 0, workload: Workload = Workload()) -> dict[str, float]:
    """Means over `n` trajectories."""
    lengths = json.loads((HERE / "lengths.json").read_text())
    rng = np.random.default_rng(seed)
    played = [trajectory(rng, lengths, workload) for _ in range(n)]
    base = sum(x - 1 for rows in played for x in rows.per_output)
    out = {
        "outputs_per_trajectory": float(np.mean([len(rows.per_output) for rows in played])),
        "tokens_per_trajectory/one_row_per_output": base / n,
    }
    for context in ("stateless", "stream"):
        rows = [x - 1 for trajectory in played for x in getattr(trajectory, context)]
        capacity = max(max(rows), int(4 * np.mean(rows)))
        # A step's batch: 16 prompts of 4.
        fills = []
        at = 0
        for first in range(0, n - 63, 64):
            batch = [x - 1 for t in played[first : first + 64] for x in getattr(t, context)]
            bins = best_fit(batch, capacity)
            fills.append(sum(batch) / (len(bins) * capacity))
            at += len(batch)
        out[f"tokens_per_trajectory/{context}"] = sum(rows) / n
        out[f"ratio/{context}"] = sum(rows) / base
        shared = sum(trajectory.shared(context, GROUP) for trajectory in played)
        out[f"shared/{context}"] = shared / n
        out[f"shared_ratio/{context}"] = shared / base
        out[f"row_tokens/{context}"] = capacity
        out[f"fill/{context}"] = float(np.mean(fills))
    return out


def length_table_fill(seed: int = 0) -> dict[str, float]:
    """Fill of rows of four mean ledgers where a ledger is one output of the length table, or a pair of them."""
    lengths = json.loads((HERE / "lengths.json").read_text())
    rng = np.random.default_rng(seed)
    out = {}
    for name, pool in (("act", lengths["act"]), ("rehearse", lengths["rehearse"]), ("both", sum(lengths.values(), []))):
        batch = rng.choice(pool, 1024).tolist()
        capacity = max(max(batch), int(4 * np.mean(batch)))
        out[f"fill_table/{name}"] = sum(batch) / (len(best_fit(batch, capacity)) * capacity)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    figures = measure() | length_table_fill()
    for name, value in figures.items():
        print(f"{name:45} {value:10.3f}")
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
