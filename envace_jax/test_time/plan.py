"""Names of test-time methods, as they stand on the command line and behind a served model's name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from envace_jax.config import UserError

REHEARSALS = ("parallel", "sequential", "stepwise")
CONTROLS = ("best", "vote", "trials", "think")
MAX_N = 16
NAMES = (
    "none, rehearse-parallel-N, rehearse-sequential-N, rehearse-stepwise-N, or a control at about equal tokens: "
    f"best-N, vote-N, trials-N, think-N (N from 1 to {MAX_N})"
)
_FORM = re.compile(r"(?:rehearse-(parallel|sequential|stepwise)|(best|vote|trials|think))-([0-9]{1,2})")


@dataclass(frozen=True)
class Plan:
    """One test-time method.

    Attributes:
        kind: `parallel`: N rehearsals from the same start; `sequential`: each sees those before it and what was made of
            them; `stepwise`: every output with calls is rehearsed before it is made, at most N candidates. Controls:
            `best`: of N candidates for each output the one evaluated best, nothing rehearsed; `vote`: of N candidates
            the most frequent action; `trials`: N trials of each turn in forks of the real environment, the one
            evaluated best is kept; `think`: one run with N + 1 times the output limit. `none`: one run.
        n: how many.
        memory_tokens: budget of the rehearsal memory (and of what a sequential rehearsal is told).
        evaluation_tokens: limit of a self-evaluation.
        user: `withheld`: a rehearsal ends with the assistant's reply; `rehearsed`: the rehearsing policy writes what
            the user says next, for at most `user_turns` messages more.
        rehearser: the engine's parameter set of everything that is private; the acting policy's is the voice's.
        every_turn: rehearse at every message of the user, or at the first one only.
        budget: tokens to spend in all, instead of what N says, and the ACT outputs over which to spread them: on
            candidates (`best`, `vote`), on trials (`trials`; at most MAX_N of either), or as room for one output
            (`think`; as far as a row holds). (0, 0): N decides.
    """

    kind: str = "none"
    n: int = 0
    memory_tokens: int = 512
    evaluation_tokens: int = 512
    user: str = "withheld"
    user_turns: int = 2
    rehearser: str = "policy"
    every_turn: bool = True
    budget: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        if self.kind not in ("none", *REHEARSALS, *CONTROLS):
            raise UserError(f"test-time method {self.kind!r}: expected {NAMES}")
        if self.user not in ("withheld", "rehearsed"):
            raise UserError(f"user turns {self.user!r}: expected withheld or rehearsed")
        if self.kind != "none" and not 1 <= self.n <= MAX_N:
            raise UserError(f"test-time method {self.kind!r} with N = {self.n}: expected 1 to {MAX_N}")

    @property
    def name(self) -> str:
        """As `read_plan` takes it."""
        if self.kind == "none":
            return "none"
        return f"rehearse-{self.kind}-{self.n}" if self.kind in REHEARSALS else f"{self.kind}-{self.n}"


def read_plan(name: str) -> Plan:
    """The plan of a name; raises `UserError` for any other."""
    if name in ("", "none"):
        return Plan()
    found = _FORM.fullmatch(name)
    if found is None:
        raise UserError(f"test-time method {name!r}: expected {NAMES}")
    return Plan(found[1] or found[2], int(found[3]))
