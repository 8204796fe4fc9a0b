"""The service desk itself: accounts and orders, eight tools, refusals that depend on the state.

The whole state is JSON, keyed by id as text:

    {"orders":   {"4821": {"status": "paid", "total": 40, "city": "Oslo", "account": 173}},
     "accounts": {"173":  {"status": "active", "balance": 20, "open_orders": 1}}}

An order is paid, shipped, delivered, cancelled or refunded; it is open while paid or shipped. An account is
active or closed; `balance` is what it owes, `open_orders` counts its open orders. Every write answers with
the values it set, so the effects can be read off a trace. A refused call changes nothing and answers
`{"error": reason}`.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

from envace_jax.datasets.records import Task
from envace_jax.text.transcript import canonical_json

CITIES = ("Oslo", "Rome", "Lima", "Cairo", "Quito", "Paris", "Delhi", "Milan")
WRITES = ("cancel_order", "refund_order", "set_city", "pay_balance", "close_account")
"""The tools that change the state when they are accepted."""

_ARGUMENTS: dict[str, tuple[str, dict[str, str]]] = {  # tool -> (description, argument -> JSON type)
    "get_order": ("Look up an order: status, total, city, account.", {"order": "integer"}),
    "get_account": ("Look up an account: status, balance due, open orders.", {"account": "integer"}),
    "list_orders": ("List the order numbers of an account.", {"account": "integer"}),
    "cancel_order": ("Cancel an order that is paid and not shipped.", {"order": "integer"}),
    "refund_order": (
        "Refund a delivered order once, up to its total.",
        {"order": "integer", "amount": "integer"},
    ),
    "set_city": ("Send an order that is not shipped to another city.", {"order": "integer", "city": "string"}),
    "pay_balance": ("Pay off part or all of an account's balance.", {"account": "integer", "amount": "integer"}),
    "close_account": ("Close an account without open orders or balance.", {"account": "integer"}),
}

TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": kind} for argument, kind in arguments.items()},
                "required": list(arguments),
                "additionalProperties": False,
            },
        },
    }
    for name, (description, arguments) in _ARGUMENTS.items()
)
"""The eight tools in the form records carry them."""


class QuickstartEnvironment:
    """The desk of one episode (see the module's text for state and refusals)."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        self.state: dict[str, Any] = copy.deepcopy(state) if state else {"orders": {}, "accounts": {}}

    def reset(self, task: Task) -> None:
        """Set the state to `task.meta["initial_state"]`."""
        self.state = copy.deepcopy(task.meta["initial_state"])

    def fork(self) -> QuickstartEnvironment:
        """An independent copy."""
        return QuickstartEnvironment(self.state)

    def state_hash(self) -> str:
        """SHA-256 of the state with sorted keys."""
        ordered = {kind: dict(sorted(entries.items())) for kind, entries in sorted(self.state.items())}
        return hashlib.sha256(canonical_json(ordered).encode()).hexdigest()

    def step(self, name: str, arguments: dict[str, Any]) -> Any:
        """Answer one call with a JSON value; never raises on what a model wrote."""
        if name not in _ARGUMENTS:
            return _refused("no such tool")
        wanted = _ARGUMENTS[name][1]
        if not isinstance(arguments, dict) or set(arguments) != set(wanted):
            return _refused("bad arguments")
        for key, kind in wanted.items():
            value = arguments[key]
            if kind == "integer" and (isinstance(value, bool) or not isinstance(value, int)):
                return _refused("bad arguments")
            if kind == "string" and not isinstance(value, str):
                return _refused("bad arguments")
        tool: Callable[..., Any] = getattr(self, f"_{name}")  # one of the eight names above, never the model's
        return tool(**arguments)

    def _order(self, order: int) -> dict[str, Any] | None:
        return self.state["orders"].get(str(order))

    def _account(self, account: int) -> dict[str, Any] | None:
        return self.state["accounts"].get(str(account))

    def _get_order(self, order: int) -> Any:
        found = self._order(order)
        return dict(found) if found else _refused("no such order")

    def _get_account(self, account: int) -> Any:
        found = self._account(account)
        return dict(found) if found else _refused("no such account")

    def _list_orders(self, account: int) -> Any:
        if self._account(account) is None:
            return _refused("no such account")
        return [int(order) for order, entry in self.state["orders"].items() if entry["account"] == account]

    def _cancel_order(self, order: int) -> Any:
        found = self._order(order)
        if found is None:
            return _refused("no such order")
        if found["status"] != "paid":
            return _refused(f"already {found['status']}")
        found["status"] = "cancelled"
        account = self.state["accounts"][str(found["account"])]
        account["open_orders"] -= 1
        return {"status": "cancelled", "account": found["account"], "open_orders": account["open_orders"]}

    def _refund_order(self, order: int, amount: int) -> Any:
        found = self._order(order)
        if found is None:
            return _refused("no such order")
        if found["status"] == "refunded":
            return _refused("already refunded")
        if found["status"] != "delivered":
            return _refused("not delivered")
        if amount > found["total"]:
            return _refused("above total")
        if amount <= 0:
            return _refused("bad arguments")
        found["status"] = "refunded"
        return {"status": "refunded", "amount": amount}

    def _set_city(self, order: int, city: str) -> Any:
        found = self._order(order)
        if found is None:
            return _refused("no such order")
        if found["status"] != "paid":
            return _refused(f"already {found['status']}")
        found["city"] = city
        return {"city": city}

    def _pay_balance(self, account: int, amount: int) -> Any:
        found = self._account(account)
        if found is None:
            return _refused("no such account")
        if found["status"] == "closed":
            return _refused("account closed")
        if amount > found["balance"]:
            return _refused("above balance")
        if amount <= 0:
            return _refused("bad arguments")
        found["balance"] -= amount
        return {"balance": found["balance"]}

    def _close_account(self, account: int) -> Any:
        found = self._account(account)
        if found is None:
            return _refused("no such account")
        if found["status"] == "closed":
            return _refused("account closed")
        if found["open_orders"]:
            return _refused("open orders")
        if found["balance"]:
            return _refused("balance due")
        found["status"] = "closed"
        return {"status": "closed"}


def _refused(reason: str) -> dict[str, str]:
    return {"error": reason}
