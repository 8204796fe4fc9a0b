"""What people say at the desk, in few words: requests, answers, and what an answer must state."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

REQUESTS: dict[str, tuple[str, ...]] = {
    "cancel": (
        "Cancel {ids}.",
        "Please cancel {ids}.",
        "I no longer want {ids}.",
        "Stop {ids}, please.",
        "Drop {ids}.",
    ),
    "refund": (
        "Refund {amount} on {ids}.",
        "I want {amount} back for {ids}.",
        "Give me {amount} back on {ids}.",
        "{amount} refund for {ids}, please.",
    ),
    "refund_all": ("Refund {ids}.", "Full refund for {ids}.", "All my money back for {ids}."),
    "city": (
        "Send {ids} to {city}.",
        "Ship {ids} to {city}.",
        "{ids} must go to {city}.",
        "New city for {ids}: {city}.",
    ),
    "pay": ("Pay {amount} on {ids}.", "Put {amount} towards {ids}.", "I pay {amount} on {ids}."),
    "settle": ("Settle {ids}.", "Pay all I owe on {ids}.", "Clear the balance of {ids}."),
    "close": ("Close {ids}.", "Please close {ids}.", "Shut account {ids}.", "I am leaving, close {ids}."),
    "status": ("Status of {ids}?", "How far is {ids}?", "What about {ids}?", "Any news on {ids}?"),
    "total": ("Total of {ids}?", "How much was {ids}?", "What did {ids} cost?"),
    "where": ("Where does {ids} go?", "City of {ids}?", "Where to is {ids}?"),
    "balance": ("What does {ids} owe?", "Balance of {ids}?", "How much is due on {ids}?"),
    "orders": ("Orders of {ids}?", "Which orders has {ids}?", "List the orders of {ids}."),
    "cancel_and_close": ("Cancel {ids} and close {account}.", "Drop {ids}, then close {account}."),
    "settle_and_close": ("Settle {account} and close it.", "Pay all on {account}, then close it."),
    "cancel_listed": ("Cancel all orders of {account}.", "Drop every order of {account}."),
    "status_listed": ("Status of all orders of {account}?", "How far are the orders of {account}?"),
}
"""What the user says for each kind of request; `{ids}` is one or more numbers or, later in a talk, "it"."""

JOIN = {2: ("{} and {}", "{}, {}", "{} and also {}"), 3: ("{}, {} and {}", "{}, {}, {}")}
SYSTEM = "Service desk."


def request_text(rng: random.Random, kind: str, ids: Sequence[int | str] = (), **fields: Any) -> str:
    """A user sentence of the given kind."""
    names = [str(name) for name in ids]
    joined = names[0] if len(names) == 1 else rng.choice(JOIN[len(names)]).format(*names) if names else ""
    text = rng.choice(REQUESTS[kind]).format(ids=joined, **fields)
    return text[0].upper() + text[1:]


def answer(name: str, arguments: dict[str, Any], result: Any, ask: str | None) -> str:
    """What the desk says about one call and its result; `ask` is what a look-up was made for."""
    subject = arguments.get("order", arguments.get("account"))
    if isinstance(result, dict) and "error" in result:
        verb = {
            "cancel_order": "cancel", "refund_order": "refund", "set_city": "move", "pay_balance": "pay",
            "close_account": "close",
        }.get(name, "find")  # fmt: skip
        return f"Cannot {verb} {subject}: {result['error']}."
    if name == "cancel_order":
        return f"{subject} is cancelled."
    if name == "refund_order":
        return f"{result['amount']} refunded on {subject}."
    if name == "set_city":
        return f"{subject} goes to {result['city']}."
    if name == "pay_balance":
        return f"{subject} owes {result['balance']}."
    if name == "close_account":
        return f"{subject} is closed."
    if name == "list_orders":
        return f"{subject} has {', '.join(map(str, result)) or 'none'}."
    if name == "get_account":
        return f"{subject} owes {result['balance']}."
    if ask == "total":
        return f"{subject} costs {result['total']}."
    if ask == "where":
        return f"{subject} goes to {result['city']}."
    return f"{subject} is {result['status']}."


def required_texts(name: str, arguments: dict[str, Any], result: Any, ask: str | None) -> list[Any]:
    """What a reply must state about one call: entries of a `reply` rule's `contains`."""
    subject = str(arguments.get("order", arguments.get("account")))
    if isinstance(result, dict) and "error" in result:
        return [subject, ["cannot", "can't", "could not"], result["error"]]
    if name == "cancel_order":
        return [subject, ["cancelled", "canceled"]]
    if name == "refund_order":
        return [subject, str(result["amount"]), "refunded"]
    if name == "set_city":
        return [subject, result["city"]]
    if name in ("pay_balance", "get_account"):
        return [subject, str(result["balance"])]
    if name == "close_account":
        return [subject, "closed"]
    if name == "list_orders":
        return [str(order) for order in result]
    return [subject, {"total": str(result["total"]), "where": result["city"]}.get(ask or "", result["status"])]


def speaking_calls(calls: Sequence[tuple[str, dict[str, Any], Any]], writes: Sequence[str], ask: str | None):
    """Which calls of a turn its reply speaks about: the writes if there are any, else the look-ups asked
    for."""
    made = [call for call in calls if call[0] in writes]
    if made:
        return made
    if ask != "orders":
        found = [call for call in calls if call[0] != "list_orders"]
        return found or list(calls)
    return list(calls)
