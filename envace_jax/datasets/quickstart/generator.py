"""Seeded quickstart tasks: dialogues executed in the real environment, each with a rule checklist.

Task i of a split depends on nothing but (split, seed, i), so a longer list begins with the shorter one.
Entities of the two splits are disjoint: an order or account number whose digits add up to a multiple of four
is held out, which leaves every digit in every place to both splits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from envace_jax.config import UserError
from envace_jax.datasets.quickstart.environment import CITIES, TOOLS, WRITES, QuickstartEnvironment
from envace_jax.datasets.quickstart.phrases import SYSTEM, answer, request_text, required_texts, speaking_calls
from envace_jax.datasets.records import ChecklistItem, Task
from envace_jax.text.transcript import Message, ToolCall, canonical_json

SPLITS = ("train", "heldout")
COUNTS = {"train": 2000, "heldout": 200}
SOURCE = "quickstart"

Call = tuple[str, dict[str, Any]]
Done = tuple[str, dict[str, Any], Any]  # a call and its result

_OTHER_WEIGHTS = (0.3, 0.3)  # of the state item and the reply item; the calls share the rest


def is_held_out(number: int) -> bool:
    """Whether an order or account number belongs to the held-out split."""
    return sum(map(int, str(number))) % 4 == 0


def generate_tasks(split: str, count: int | None = None, seed: int = 0) -> list[Task]:
    """The first `count` tasks of a split (2,000 of `train`, 200 of `heldout` when not said otherwise).

    Raises:
        UserError: when the split does not exist.
    """
    if split not in SPLITS:
        raise UserError(f"split: expected one of {', '.join(SPLITS)}, found {split!r}")
    return [generate_task(split, index, seed) for index in range(COUNTS[split] if count is None else count)]


def generate_task(split: str, index: int, seed: int = 0) -> Task:
    """One task: dialogue, tools, checklist, and what the real environment starts from."""
    rng = random.Random(f"quickstart/{split}/{seed}/{index}")
    for _ in range(100):
        talk = _Talk(rng, split == "heldout")
        for _ in range(rng.choices((1, 2, 3), (74, 19, 7))[0]):
            kind = rng.choices(list(_TURNS), [weight for weight, _ in _TURNS.values()])[0]
            _TURNS[kind][1](talk)
        if talk.valid():
            return talk.task(f"quickstart-{split}-{seed}-{index}", split)
    raise AssertionError("no valid talk in 100 tries")  # pragma: no cover - about 1 try in 20 fails


class _Talk:
    """A dialogue in the making. Entities are made up as they are needed: a new one could always have been
    there."""

    def __init__(self, rng: random.Random, held_out: bool) -> None:
        self.rng, self.held_out = rng, held_out
        self.initial: dict[str, Any] = {"orders": {}, "accounts": {}}
        self.environment = QuickstartEnvironment(self.initial)
        self.messages: list[Message] = [Message("system", SYSTEM)]
        self.turns: list[dict[str, Any]] = []  # {"ask": ..., "done": [Done]}

    # --- the world ------------------------------------------------------------------------------------------------

    def number(self, digits: int, taken: dict[str, Any]) -> int:
        """A number of the split that no entity has yet."""
        while True:
            number = self.rng.randrange(10 ** (digits - 1), 10**digits)
            if is_held_out(number) == self.held_out and str(number) not in taken:
                return number

    def account(self, *, orders: Sequence[str] = (), balance: int | None = None, status: str = "active") -> int:
        """A new account with one order for each given order status."""
        account = self.number(3, self.initial["accounts"])
        owed = self.rng.choice((0, 0, *range(10, 100, 10))) if balance is None else balance
        entry = {"status": status, "balance": owed, "open_orders": 0}
        self._put("accounts", account, entry)
        for order_status in orders:
            self.order(order_status, account)
        return account

    def order(self, status: str, account: int | None = None) -> int:
        """A new order; its account is new too when none is given."""
        account = self.account() if account is None else account
        order = self.number(4, self.initial["orders"])
        total, city = self.rng.randrange(10, 100, 10), self.rng.choice(CITIES)
        self._put("orders", order, {"status": status, "total": total, "city": city, "account": account})
        if status in ("paid", "shipped"):
            for state in (self.initial, self.environment.state):
                state["accounts"][str(account)]["open_orders"] += 1
        return order

    def _put(self, kind: str, number: int, entry: dict[str, Any]) -> None:
        for state in (self.initial, self.environment.state):
            state[kind][str(number)] = dict(entry)

    def order_for(self, wanted: str) -> int:
        """A new order on which a request mostly succeeds: `wanted` in 7 of 10 cases, rarely one that is
        unknown."""
        draw = self.rng.random()
        if draw < 0.02:
            return self.number(4, self.initial["orders"])
        others = [s for s in ("paid", "shipped", "delivered", "cancelled", "refunded") if s != wanted]
        return self.order(wanted if draw < 0.72 else self.rng.choice(others))

    def any_order(self) -> int:
        return self.order(self.rng.choice(("paid", "shipped", "delivered", "cancelled", "refunded")))

    def known(self, argument: str) -> list[int]:
        """Numbers the last turn was about, if it was about one entity of that kind."""
        if not self.turns:
            return []
        found = {args[argument] for name, args, _ in self.turns[-1]["done"] if argument in args}
        return [found.pop()] if len(found) == 1 else []

    # --- the dialogue ---------------------------------------------------------------------------------------------

    def user(self, text: str, ask: str | None = None) -> None:
        self.messages.append(Message("user", text))
        self.turns.append({"ask": ask, "done": []})

    def call(self, *calls: Call) -> list[Any]:
        """One assistant message with these calls, executed in order."""
        self.messages.append(Message("assistant", "", None, tuple(ToolCall(name, args) for name, args in calls)))
        results = []
        for name, args in calls:
            results.append(self.environment.step(name, args))
            self.messages.append(Message("tool", canonical_json(results[-1])))
            self.turns[-1]["done"].append((name, args, results[-1]))
        return results

    def reply(self) -> None:
        """The closing assistant message of the turn, stating what came out."""
        self.messages.append(Message("assistant", turn_reply(self.turns[-1]["done"], self.turns[-1]["ask"])))

    def valid(self) -> bool:
        """Whether every turn has one to three calls and no accepted write occurs twice."""
        writes = [canonical_json([n, a]) for t in self.turns for n, a, r in t["done"] if n in WRITES and not _error(r)]
        return len(set(writes)) == len(writes) and all(1 <= len(turn["done"]) <= 3 for turn in self.turns)

    def task(self, uuid: str, split: str) -> Task:
        meta = {
            "environment": SOURCE,
            "initial_state": self.initial,
            "split": split,
            "asks": [turn["ask"] for turn in self.turns],
        }
        return Task(uuid, SOURCE, tuple(self.messages), TOOLS, (checklist(self.turns),), meta)


def turn_reply(done: Sequence[Done], ask: str | None) -> str:
    """What the desk answers at the end of a turn with these calls and results."""
    return " ".join(answer(name, args, result, ask) for name, args, result in speaking_calls(done, WRITES, ask))


# --- turns ----------------------------------------------------------------------------------------------------------


def _write_on_order(talk: _Talk, kind: str, order: int, name: int | str) -> tuple[str, Call]:
    """Request text and call for a one-call write on an order."""
    if kind == "cancel":
        return request_text(talk.rng, kind, [name]), ("cancel_order", {"order": order})
    if kind == "refund":
        total = talk.initial["orders"].get(str(order), {}).get("total", 50)
        fits = [amount for amount in range(10, 100, 10) if amount <= total]
        above = [amount for amount in range(10, 100, 10) if amount > total]
        amount = talk.rng.choice(above if above and talk.rng.random() < 0.12 else fits)
        return request_text(talk.rng, kind, [name], amount=amount), (
            "refund_order",
            {"order": order, "amount": amount},
        )
    city = talk.rng.choice(CITIES)
    return request_text(talk.rng, kind, [name], city=city), ("set_city", {"order": order, "city": city})


_WANTED = {"cancel": "paid", "refund": "delivered", "city": "paid"}


def _single_write(talk: _Talk) -> None:
    kind = talk.rng.choice(("cancel", "cancel", "refund", "refund", "city", "pay", "close"))
    known = talk.known("account" if kind in ("pay", "close") else "order")
    it = bool(known) and talk.rng.random() < 0.6
    if kind == "pay":
        account = known[0] if it else talk.account(balance=talk.rng.randrange(20, 100, 10))
        balance = max(10, talk.environment.state["accounts"].get(str(account), {"balance": 50})["balance"])
        low = [amount for amount in range(10, 100, 10) if amount <= balance]
        high = [amount for amount in range(10, 100, 10) if amount > balance]
        amount = talk.rng.choice(high if high and talk.rng.random() < 0.25 else low)
        talk.user(request_text(talk.rng, "pay", ["it" if it else account], amount=amount))
        talk.call(("pay_balance", {"account": account, "amount": amount}))
    elif kind == "close":
        account = known[0] if it else _account_to_close(talk)
        talk.user(request_text(talk.rng, "close", ["it" if it else account]))
        talk.call(("close_account", {"account": account}))
    else:
        order = known[0] if it else talk.order_for(_WANTED[kind])
        text, call = _write_on_order(talk, kind, order, "it" if it else order)
        talk.user(text)
        talk.call(call)
    talk.reply()


def _account_to_close(talk: _Talk) -> int:
    draw = talk.rng.random()
    if draw < 0.6:
        return talk.account(balance=0, orders=talk.rng.choice(((), ("delivered",), ("cancelled",))))
    if draw < 0.75:
        return talk.account(balance=0, orders=(talk.rng.choice(("paid", "shipped")),))
    if draw < 0.9:
        return talk.account(balance=talk.rng.randrange(10, 100, 10))
    return talk.account(balance=0, status="closed")


def _single_read(talk: _Talk) -> None:
    kind = talk.rng.choice(("status", "status", "total", "where", "balance", "orders"))
    argument = "account" if kind in ("balance", "orders") else "order"
    known = talk.known(argument)
    it = bool(known) and talk.rng.random() < 0.4
    if kind in ("balance", "orders"):
        count = talk.rng.choice((1, 2)) if kind == "orders" else 0
        orders = [talk.rng.choice(("paid", "shipped", "delivered")) for _ in range(count)]
        number = known[0] if it else talk.account(orders=orders)
        tool = "get_account" if kind == "balance" else "list_orders"
    else:
        number, tool = known[0] if it else talk.any_order(), "get_order"
    talk.user(request_text(talk.rng, kind, ["it" if it else number]), ask=kind)
    talk.call((tool, {argument: number}))
    talk.reply()


def _same_pair(talk: _Talk) -> None:
    """Two or three of one kind in one message."""
    kind = talk.rng.choice(("cancel", "cancel", "city", "status", "total"))
    count = 3 if talk.rng.random() < 0.15 else 2
    if kind == "cancel":
        orders = [talk.order_for("paid") for _ in range(count)]
        talk.user(request_text(talk.rng, kind, orders))
        talk.call(*(("cancel_order", {"order": order}) for order in orders))
    elif kind == "city":
        orders, city = [talk.order_for("paid") for _ in range(count)], talk.rng.choice(CITIES)
        talk.user(request_text(talk.rng, kind, orders, city=city))
        talk.call(*(("set_city", {"order": order, "city": city}) for order in orders))
    else:
        orders = [talk.any_order() for _ in range(count)]
        talk.user(request_text(talk.rng, kind, orders), ask=kind)
        talk.call(*(("get_order", {"order": order}) for order in orders))
    talk.reply()


def _mixed_pair(talk: _Talk) -> None:
    """Two different writes on two orders in one message."""
    kinds = talk.rng.sample(("cancel", "refund", "city"), 2)
    texts, calls = [], []
    for kind in kinds:
        order = talk.order_for(_WANTED[kind])
        text, call = _write_on_order(talk, kind, order, order)
        texts.append(text)
        calls.append(call)
    talk.user(" ".join(texts))
    talk.call(*calls)
    talk.reply()


def _refund_all(talk: _Talk) -> None:
    """Look the total up, then refund it; an order that is not delivered is tried all the same and refused."""
    known = talk.known("order")
    it = bool(known) and talk.rng.random() < 0.5
    order = known[0] if it else talk.order_for("delivered")
    talk.user(request_text(talk.rng, "refund_all", ["it" if it else order]))
    found = talk.call(("get_order", {"order": order}))[0]
    if not _error(found):
        talk.call(("refund_order", {"order": order, "amount": found["total"]}))
    talk.reply()


def _settle(talk: _Talk) -> None:
    account = talk.account(balance=talk.rng.randrange(10, 100, 10))
    talk.user(request_text(talk.rng, "settle", [account]))
    found = talk.call(("get_account", {"account": account}))[0]
    talk.call(("pay_balance", {"account": account, "amount": found["balance"]}))
    talk.reply()


def _chain(talk: _Talk) -> None:
    """Calls that build on each other, one message each."""
    if talk.rng.random() < 0.5:
        account = talk.account(balance=0)
        order = talk.order("paid" if talk.rng.random() < 0.8 else "shipped", account)
        talk.user(request_text(talk.rng, "cancel_and_close", [order], account=account))
        talk.call(("cancel_order", {"order": order}))
    else:
        account = talk.account(balance=talk.rng.randrange(10, 100, 10))
        if talk.rng.random() < 0.2:
            talk.order("shipped", account)
        talk.user(request_text(talk.rng, "settle_and_close", account=account))
        found = talk.call(("get_account", {"account": account}))[0]
        talk.call(("pay_balance", {"account": account, "amount": found["balance"]}))
    talk.call(("close_account", {"account": account}))
    talk.reply()


def _listed(talk: _Talk) -> None:
    """List an account's orders, then the same call for each, in one message."""
    write = talk.rng.random() < 0.5
    choices = ("paid", "paid", "paid", "shipped") if write else ("paid", "shipped", "delivered", "cancelled")
    account = talk.account(orders=[talk.rng.choice(choices) for _ in range(talk.rng.choice((1, 2)))])
    kind = "cancel_listed" if write else "status_listed"
    talk.user(request_text(talk.rng, kind, account=account), ask=None if write else "status")
    orders = talk.call(("list_orders", {"account": account}))[0]
    talk.call(*(("cancel_order" if write else "get_order", {"order": order}) for order in orders))
    talk.reply()


_TURNS: dict[str, tuple[int, Callable[[_Talk], None]]] = {
    "single_write": (40, _single_write),
    "single_read": (18, _single_read),
    "same_pair": (17, _same_pair),
    "mixed_pair": (12, _mixed_pair),
    "refund_all": (7, _refund_all),
    "settle": (3, _settle),
    "chain": (5, _chain),
    "listed": (3, _listed),
}


# --- the checklist --------------------------------------------------------------------------------------------------


def checklist(turns: Sequence[dict[str, Any]]) -> tuple[tuple[ChecklistItem, ...], ...]:
    """The rule checklist of a dialogue: a turn's writes (or the look-ups it was about), the state, the
    reply."""
    effects: list[dict[str, Any]] = []
    out = []
    for turn in turns:
        rules: list[tuple[str, str, dict[str, Any]]] = []  # focus, question, rule
        spoken = speaking_calls(turn["done"], WRITES, turn["ask"])
        for name, args, result in spoken:
            call = {"name": name, "arguments": args}
            if _error(result) and name in WRITES:
                rule = {"kind": "refusal", "call": call, "contains": [result["error"]]}
                rules.append((_CALLS, f"Was {_text(call)} tried and its refusal respected?", rule))
            else:
                accepted = not _error(result)
                rule = {"kind": "call", **call, "accepted": accepted} | ({"max": 1} if name in WRITES else {})
                rules.append((_CALLS, f"Was {_text(call)} made{' once' if name in WRITES else ''}?", rule))
            if accepted_write(name, result):
                effects.append(call)
        contains = [text for name, args, result in spoken for text in required_texts(name, args, result, turn["ask"])]
        reply: dict[str, Any] = {"kind": "reply", "contains": contains}
        if not any(_error(result) for _, _, result in spoken):
            reply["excludes"] = ["cannot"]
        state = {"kind": "state", "writes": list(WRITES), "effects": list(effects)}
        state_weight, reply_weight = _OTHER_WEIGHTS
        share = (1.0 - state_weight - reply_weight) / len(rules)
        items = [
            _item(
                0, _RESULTS, "Do the accepted writes so far give the wanted state?", state, state_weight, required=True
            ),
            _item(1, _REPLY, "Does the reply state what came out?", reply, reply_weight, dependence=("C0",)),
        ]
        items += [_item(2 + k, focus, text, rule, share) for k, (focus, text, rule) in enumerate(rules)]
        out.append(tuple(items))
    return tuple(out)


_CALLS, _REPLY, _RESULTS = "assistant.tool_calls", "assistant.content.user_visible_reply", "tool.content"


def _item(
    number: int,
    focus: str,
    question: str,
    rule: dict[str, Any],
    weight: float,
    *,
    required: bool = False,
    dependence: tuple[str, ...] = (),
) -> ChecklistItem:
    return ChecklistItem(
        id=f"C{number}",
        question=question,
        pass_condition=f"The rule holds at the end of the turn: {_text(rule)}",
        focus_on=(focus,),
        required_for_next_turn=required,
        dependence=dependence,
        weight=weight,
        rule=rule,
    )


def accepted_write(name: str, result: Any) -> bool:
    """Whether a call changed the state."""
    return name in WRITES and not _error(result)


def _error(result: Any) -> bool:
    return isinstance(result, dict) and "error" in result


def _text(value: Any) -> str:
    return canonical_json(value)
