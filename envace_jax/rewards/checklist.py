"""Checklist scoring: from verdicts to turn scores, a trajectory reward and the vote to stop.

Formulas (EnvACE and CM2 reference scoring):

    S_t = (1 / V) * sum_v sum_k w_vtk * [item k of variant v passes at some step of turn t]
    R   = sum over reached t of S_t / T

with V checklist variants and T the number of user turns of the task: a turn that was not reached scores 0
and stays in the denominator. A turn that ended before it could be judged has empty verdict rows and scores
0 too; whoever judges partial turns simply fills the rows in.

Verdicts are three-valued. `None` (no verdict) is never a fail: where it could change the outcome of an item
that has weight, the reward is `None` and the trajectory is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from envace_jax.config import UserError
from envace_jax.datasets.cm2 import ChecklistItem

Verdict = bool | None
"""Pass, fail, or no verdict."""

ItemVerdicts = Sequence[Verdict]
"""One verdict a step of the turn."""


@dataclass(frozen=True)
class Score:
    """The scored checklist of one trajectory.

    Attributes:
        turn_scores: S_t of each of the task's turns, mean over the variants; `None` where a missing verdict
            leaves it open, 0.0 for a turn that was not reached.
        reward: R in [0, 1], or `None` where any turn score is open (the trajectory is masked).
        unreached: how many turns of the task were not reached.
        missing: how many items (over all variants and reached turns) were left without an outcome.
    """

    turn_scores: tuple[float | None, ...]
    reward: float | None
    unreached: int
    missing: int


def any_of(verdicts: Sequence[Verdict]) -> Verdict:
    """Three-valued "or": a pass decides, else a missing verdict leaves it open, else it is a fail."""
    if any(verdict is True for verdict in verdicts):
        return True
    return None if any(verdict is None for verdict in verdicts) else False


def all_of(verdicts: Sequence[Verdict]) -> Verdict:
    """Three-valued "and": a fail decides, else a missing verdict leaves it open, else it is a pass."""
    if any(verdict is False for verdict in verdicts):
        return False
    return None if any(verdict is None for verdict in verdicts) else True


def item_outcomes(
    items: Sequence[ChecklistItem], verdicts: Sequence[ItemVerdicts], *, honour_dependence: bool = True
) -> tuple[Verdict, ...]:
    """The outcome of every item of one turn of one variant.

    An item passes when it passes at some step. With `honour_dependence` it must also have every item that it
    depends on pass, their own dependences included. Which came first is the judge's matter: it sees the turn
    step by step.

    Args:
        items: the turn's items.
        verdicts: `verdicts[item][step]`; an empty row means that the item was not judged and counts as a
            fail.
        honour_dependence: False ignores `dependence`, as the EnvACE reference does.

    Raises:
        UserError: when the verdicts do not fit the items, or a dependence is unknown or circular.
    """
    if len(verdicts) != len(items):
        raise UserError(f"checklist turn has {len(items)} items but {len(verdicts)} rows of verdicts")
    if not honour_dependence:
        return tuple(any_of(row) for row in verdicts)
    position = {item.id: k for k, item in enumerate(items)}
    outcomes: dict[int, Verdict] = {}

    def resolve(k: int, above: tuple[int, ...]) -> Verdict:
        if k in above:
            raise UserError(f"checklist item {items[k].id!r} depends on itself: mend its 'dependence'")
        if k not in outcomes:
            unknown = [name for name in items[k].dependence if name not in position]
            if unknown:
                raise UserError(f"checklist item {items[k].id!r} depends on {unknown}, not an item of its turn")
            needed = [resolve(position[name], (*above, k)) for name in items[k].dependence]
            outcomes[k] = all_of([any_of(verdicts[k]), *needed])
        return outcomes[k]

    return tuple(resolve(k, ()) for k in range(len(items)))


def turn_score(items: Sequence[ChecklistItem], outcomes: Sequence[Verdict]) -> float | None:
    """Weighted share of the passed items of one turn of one variant; `None` where a weighted outcome is
    open."""
    if any(outcome is None and item.weight != 0 for item, outcome in zip(items, outcomes, strict=True)):
        return None
    return float(sum(item.weight for item, outcome in zip(items, outcomes, strict=True) if outcome))


def score_checklist(
    checklists: Sequence[Sequence[Sequence[ChecklistItem]]],
    verdicts: Sequence[Sequence[Sequence[ItemVerdicts]]],
    n_turns: int,
    *,
    honour_dependence: bool = True,
) -> Score:
    """Score one trajectory.

    Args:
        checklists: `checklists[variant][turn][item]`, every turn of the task.
        verdicts: `verdicts[variant][turn][item][step]` for the reached turns. All variants reach the same
            turns. A turn that was reached but not judged has one empty row an item.
        n_turns: T, the number of user turns of the task.
        honour_dependence: see `item_outcomes`.

    Raises:
        UserError: when the tables do not fit each other.
    """
    if not checklists:
        raise UserError("a task without a checklist cannot be scored: give it at least one variant")
    if any(len(turns) != n_turns for turns in checklists):
        raise UserError(f"every checklist variant must have {n_turns} turns, one a user message")
    if len(verdicts) != len(checklists):
        raise UserError(f"{len(checklists)} checklist variants but {len(verdicts)} tables of verdicts")
    reached = len(verdicts[0])
    if any(len(table) != reached for table in verdicts) or reached > n_turns:
        raise UserError(f"verdicts must cover the same turns in every variant, at most {n_turns}")
    turn_scores: list[float | None] = []
    missing = 0
    for turn in range(reached):
        by_variant = []
        for items_by_turn, table in zip(checklists, verdicts, strict=True):
            outcomes = item_outcomes(items_by_turn[turn], table[turn], honour_dependence=honour_dependence)
            missing += sum(outcome is None for outcome in outcomes)
            by_variant.append(turn_score(items_by_turn[turn], outcomes))
        known = [score for score in by_variant if score is not None]
        turn_scores.append(sum(known) / len(checklists) if len(known) == len(by_variant) else None)
    turn_scores.extend([0.0] * (n_turns - reached))
    values = [score for score in turn_scores if score is not None]
    reward = sum(values) / n_turns if len(values) == n_turns and n_turns else None
    return Score(tuple(turn_scores), reward, n_turns - reached, missing)


def votes_to_stop(
    items_by_variant: Sequence[Sequence[ChecklistItem]],
    verdicts: Sequence[Sequence[ItemVerdicts]],
    *,
    honour_dependence: bool = True,
) -> bool:
    """Whether the checklists stop the episode after this turn, by strict majority of the variants.

    A variant votes to stop when an item that is `required_for_next_turn` failed. A missing verdict is not a
    fail and does not vote. The last turn ends the episode by itself; it needs no vote.

    Args:
        items_by_variant: `items_by_variant[variant][item]` of the turn.
        verdicts: `verdicts[variant][item][step]` of the turn.
        honour_dependence: see `item_outcomes`.
    """
    votes = 0
    for items, table in zip(items_by_variant, verdicts, strict=True):
        outcomes = item_outcomes(items, table, honour_dependence=honour_dependence)
        failed = [item for item, outcome in zip(items, outcomes, strict=True) if outcome is False]
        votes += any(item.required_for_next_turn for item in failed)
    return 2 * votes > len(items_by_variant)
