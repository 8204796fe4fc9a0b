"""A small stateful domain for these tests: a bank that mostly answers without saying what it changed."""

from __future__ import annotations

import copy
import random
from typing import Any

from envace_jax.datasets.traces import TraceEpisode, TraceEvent, make_episode
from envace_jax.text.transcript import canonical_json

TOOLS = ("balance", "deposit", "withdraw", "transfer", "freeze", "open_account", "accounts_of")


class Ledger:
    """``names`` renames the tools; ``limit`` is the largest withdrawal, ``minimum`` the smallest deposit."""

    def __init__(self, state: dict[str, Any], names: dict[str, str] | None = None, limit: int = 500, minimum: int = 5):
        self.state = copy.deepcopy(state)
        self.tools = {(names or {}).get(t, t): t for t in TOOLS}
        self.limit, self.minimum = limit, minimum

    def fork(self) -> Ledger:
        other = copy.copy(self)
        other.state = copy.deepcopy(self.state)
        return other

    def state_hash(self) -> str:
        return canonical_json({k: self.state[k] for k in sorted(self.state)})

    def step(self, name: str, arguments: dict[str, Any]) -> Any:
        return getattr(self, "_" + self.tools[name])(**arguments)

    def _account(self, account: str) -> dict[str, Any] | None:
        return self.state["accounts"].get(account)

    def _balance(self, account: str) -> Any:
        found = self._account(account)
        if found is None:
            return {"error": f"account {account} not found"}
        return {"account": account, "owner": found["owner"], "balance": found["balance"]}

    def _deposit(self, account: str, amount: int) -> Any:
        found = self._account(account)
        if found is None:
            return {"error": f"account {account} not found"}
        if amount < self.minimum:
            return {"error": "amount too small"}
        found["balance"] += amount
        return {"ok": True}

    def _withdraw(self, account: str, amount: int) -> Any:
        found = self._account(account)
        if found is None:
            return {"error": f"account {account} not found"}
        if found["frozen"]:
            return {"error": f"account {account} is frozen"}
        if amount > self.limit:
            return {"error": "limit exceeded"}
        if amount > found["balance"]:
            return {"error": f"only {found['balance']} available"}
        found["balance"] -= amount
        return {"ok": True}

    def _transfer(self, source: str, target: str, amount: int) -> Any:
        a, b = self._account(source), self._account(target)
        if a is None or b is None:
            return {"error": "account not found"}
        if amount > a["balance"]:
            return {"error": "insufficient funds"}
        a["balance"] -= amount
        b["balance"] += amount
        return {"ok": True}

    def _freeze(self, account: str) -> Any:
        found = self._account(account)
        if found is None:
            return {"error": f"account {account} not found"}
        if found["frozen"]:
            return {"error": "already frozen"}
        found["frozen"] = True
        return {"done": "frozen"}

    def _open_account(self, owner: str) -> Any:
        key = f"A{len(self.state['accounts']) + 1:03d}"
        self.state["accounts"][key] = {"owner": owner, "balance": 0, "frozen": False}
        return {"account": key, "owner": owner, "balance": 0, "frozen": False}

    def _accounts_of(self, owner: str) -> Any:
        return [k for k, v in self.state["accounts"].items() if v["owner"] == owner]


OWNERS = ("ann", "bob", "cid", "dora")


def random_state(rng: random.Random) -> dict[str, Any]:
    accounts = {
        f"A{i + 1:03d}": {
            "owner": rng.choice(OWNERS),
            "balance": rng.choice([0, rng.randrange(1, 900)]),
            "frozen": rng.random() < 0.25,
        }
        for i in range(rng.randrange(3, 9))
    }
    return {"accounts": accounts}


def random_call(rng: random.Random, state: dict[str, Any], limit: int, minimum: int) -> tuple[str, dict[str, Any]]:
    keys = list(state["accounts"])
    account = rng.choice([*keys[:3], *keys[:3], "A099"])
    amount = rng.choice([rng.randrange(1, 40), rng.randrange(1, 900), limit, limit + 1, minimum, minimum - 1])
    tool = rng.choice([*TOOLS, "balance", "balance", "withdraw"])
    if tool in ("balance", "freeze"):
        return tool, {"account": account}
    if tool in ("deposit", "withdraw"):
        return tool, {"account": account, "amount": amount}
    if tool == "transfer":
        return tool, {"source": account, "target": rng.choice(keys[:3]), "amount": amount}
    return tool, {"owner": rng.choice(OWNERS)}


def episodes(
    n: int,
    seed: int,
    names: dict[str, str] | None = None,
    limit: int = 500,
    minimum: int = 5,
    length: int = 8,
    explicit: bool = True,
) -> list[TraceEpisode]:
    """Random episodes executed in the domain."""
    out = []
    for i in range(n):
        rng = random.Random(f"{seed}/{i}")
        state = random_state(rng)
        bank = Ledger(state, names, limit, minimum)
        events = [TraceEvent("user", "message", "Please see to my accounts.")]
        for k in range(length):
            tool, arguments = random_call(rng, bank.state, limit, minimum)
            if arguments.get("source") is not None and arguments["source"] == arguments.get("target"):
                continue
            name = (names or {}).get(tool, tool)
            value = bank.step(name, arguments)
            content = {"type": name, "arguments": arguments, "raw": canonical_json(arguments)}
            events.append(TraceEvent("agent", "action", content, {"call_id": f"c{k}"}))
            events.append(TraceEvent("environment", "observation", canonical_json(value), {"call_id": f"c{k}"}))
        out.append(
            make_episode(
                events,
                where=f"ledger {seed}/{i}",
                episode_id=f"ledger-{seed}-{i}",
                environment="ledger",
                initial_state=state if explicit else None,
            )
        )
    return out
