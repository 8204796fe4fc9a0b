"""BFCL multi-turn as a source of tasks and as a real environment.

The tasks, tool documents, reference calls and environment classes are those of the installed ``bfcl-eval`` package
(nothing of it is copied); this module turns them into CM2 tasks with rule checklists and drives the classes. Calls
reach them as JSON arguments to white-listed bound methods of instances of one's own: no text is ever evaluated.
The package's own executor evaluates call strings and is not used; its state and response comparisons are.
"""

from __future__ import annotations

import ast
import copy
import decimal
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envace_jax.config import UserError
from envace_jax.datasets.records import ChecklistItem, Task, spread
from envace_jax.text.tool_schema import check_call
from envace_jax.text.transcript import Message, ToolCall, canonical_json

SOURCE = "bfcl_multi_turn"
VARIANTS = ("base", "miss_func", "miss_param", "long_context")
# Scenario numbers are shared by the four variants, and a split takes all four of a number or none. Every fourth
# number is held out: the numbers run through the domains, so each domain is held out in the same proportion.
HELD_OUT_EVERY = 4
STATELESS = "MathAPI"
# Integers beyond this in an exponent, precision or number of places would let one call run for hours.
MATH_LIMIT = 1000
# Functions that change the public state, which is what BFCL compares (a change of folder is not part of it).
WRITES = frozenset(
    (
        "activateParkingBrake add_contact add_to_watchlist authenticate_travel authenticate_twitter "
        "book_flight cancel_booking cancel_order close_ticket comment cp create_ticket delete_message echo "
        "edit_ticket fillFuelTank fund_account follow_user lockDoors logout mention message_login mkdir mv "
        "place_order post_tweet pressBrakePedal purchase_insurance register_credit_card releaseBrakePedal "
        "remove_stock_from_watchlist resolve_ticket retweet rm rmdir send_message setCruiseControl "
        "setHeadlights set_budget_limit set_navigation startEngine ticket_login touch trading_login "
        "trading_logout unfollow_user withdraw_funds"
    ).split()
)
_MATH_LIMITED = ("exponent", "precision", "decimal_places")
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}


def load_bfcl(variants: Sequence[str] = VARIANTS, split: str | None = None, limit: int = 0) -> list[Task]:
    """Tasks of the named variants, in order of variant and scenario number.

    Args:
        variants: any of `VARIANTS`.
        split: ``"train"``, ``"heldout"``, or None for both.
        limit: at most so many, evenly over all of them; 0: all.

    Raises:
        UserError: the package is missing, or a variant is unknown.
    """
    chosen = []
    for variant in variants:
        if variant not in VARIANTS:
            raise UserError(f"BFCL variant {variant!r}: expected one of {', '.join(VARIANTS)}")
        answers = _rows(f"possible_answer/BFCL_v4_multi_turn_{variant}.json")
        gold = {row["id"]: row["ground_truth"] for row in answers}
        entries = _rows(f"BFCL_v4_multi_turn_{variant}.json")
        chosen += [(e, gold[e["id"]], variant) for e in entries if split in (None, split_of(e["id"]))]
    return [task_from_entry(*item) for item in spread(chosen, limit)]


def split_of(entry_id: str) -> str:
    """``"train"`` or ``"heldout"``, by the scenario number alone."""
    return "heldout" if int(entry_id.rsplit("_", 1)[1]) % HELD_OUT_EVERY == 0 else "train"


def task_from_entry(entry: dict[str, Any], gold: list[list[str]], variant: str) -> Task:
    """The CM2 task of one BFCL entry: its dialogue is the execution of the recorded calls, one call a step.

    A function that the entry withholds is not among ``tools``; it stands in ``meta["late_tools"]`` under the turn
    that offers it, and in that turn's user message.
    """
    docs = {doc["name"]: doc for name in entry["involved_classes"] for doc in _docs(name)}
    late = {int(turn): names for turn, names in entry.get("missed_function", {}).items()}
    calls_by_turn = [[parse_call(text, docs) for text in turn] for turn in gold]
    for turn in late:
        # One entry's reference calls a function before the turn that offers it: it is offered from the start.
        early = {call.name for calls in calls_by_turn[:turn] for call in calls}
        late[turn] = [name for name in late[turn] if name not in early]
    withheld = {name for names in late.values() for name in names}
    docs = {name: _fitting(doc, calls_by_turn) for name, doc in docs.items()}
    meta = {
        "environment": "bfcl",
        "split": split_of(entry["id"]),
        "variant": variant,
        "scenario": int(entry["id"].rsplit("_", 1)[1]),
        "classes": list(entry["involved_classes"]),
        "initial_state": entry["initial_config"],
        "long_context": variant == "long_context",
        "gold": [[{"name": c.name, "arguments": c.arguments} for c in turn] for turn in calls_by_turn],
        "late_tools": {str(turn): [docs[name]["tool"] for name in names] for turn, names in late.items()},
    }
    tools = tuple(doc["tool"] for name, doc in docs.items() if name not in withheld)
    environment = BfclEnvironment()
    environment.load(meta, tuple(docs))
    messages: list[Message] = []
    turns = []
    effects: list[dict[str, Any]] = []
    for number, calls in enumerate(calls_by_turn):
        offered = [docs[name]["tool"] for name in late.get(number, ())]
        said = "\n\n".join(message["content"] for message in entry["question"][number])
        if offered:
            said = "\n\n".join(filter(None, [canonical_json(offered), _offer(), said]))
        messages.append(Message("user", said))
        accepted = []
        for k, call in enumerate(calls):
            value = environment.step(call.name, call.arguments)
            messages.append(Message("assistant", "", None, (ToolCall(call.name, call.arguments, f"call_{k}"),)))
            messages.append(Message("tool", canonical_json(value)))
            if not (isinstance(value, dict) and "error" in value):
                accepted.append(call)
        effects += [{"name": c.name, "arguments": c.arguments} for c in accepted if c.name in WRITES]
        messages.append(Message("assistant", _closing(calls, number, entry, late)))
        turns.append(_items(calls, accepted, list(effects), sorted(WRITES & set(docs)), list(docs)))
    return Task(f"bfcl-{entry['id']}", SOURCE, tuple(messages), tools, (tuple(turns),), meta)


def parse_call(text: str, docs: dict[str, Any]) -> ToolCall:
    """A recorded call string, e.g. ``mv(source='a', destination='b')``, read without evaluating it.

    Raises:
        UserError: it is anything but a call of a documented function with literal arguments.
    """
    try:
        node = ast.parse(text, mode="eval").body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise ValueError("not a plain call")
        names = list(_parameters(docs[node.func.id]["class"], node.func.id))
        arguments = {name: ast.literal_eval(value) for name, value in zip(names, node.args)}
        arguments |= {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    except (SyntaxError, ValueError, KeyError) as error:
        raise UserError(f"BFCL reference call {text!r}: {error}") from None
    return ToolCall(node.func.id, json.loads(canonical_json(arguments)))


class BfclEnvironment:
    """The BFCL classes of one task, as instances of its own."""

    def __init__(self) -> None:
        self._instances: dict[str, Any] = {}
        self._owner: dict[str, str] = {}

    def reset(self, task: Task) -> None:
        self.load(task.meta, task.tool_names)

    def load(self, meta: dict[str, Any], names: Sequence[str]) -> None:
        """Build the instances of ``meta["classes"]`` in their initial state; only ``names`` may be called."""
        self._instances = {}
        self._owner = {}
        for class_name in meta["classes"]:
            instance = _class(class_name)()
            if class_name != STATELESS:
                # The classes keep and change what they are given.
                scenario = copy.deepcopy(meta["initial_state"].get(class_name, {}))
                instance._load_scenario(scenario, long_context=meta["long_context"])
            self._instances[class_name] = instance
            self._owner |= {doc["name"]: class_name for doc in _docs(class_name) if doc["name"] in names}

    def step(self, name: str, arguments: dict[str, Any]) -> Any:
        value, _ = self.run(name, arguments)
        return value

    def run(self, name: str, arguments: dict[str, Any]) -> tuple[Any, str]:
        """The JSON value of a call, and the text that BFCL would compare it by."""
        owner = self._owner.get(name)
        if owner is None:
            return _failure(f"Function {name} is not available.")
        if owner == STATELESS:
            problem = _math_problem(arguments)
            if problem:
                return _failure(problem)
        try:
            with decimal.localcontext():  # square_root changes the precision of the whole process
                result = getattr(self._instances[owner], name)(**copy.deepcopy(arguments))
            text = _bfcl_text(result)
        except Exception as error:  # the classes raise whatever bad arguments lead to
            return _failure(str(error))
        try:
            return json.loads(canonical_json(result)), text
        except (TypeError, ValueError):
            return text, text

    def fork(self) -> BfclEnvironment:
        other = BfclEnvironment()
        other._instances = copy.deepcopy(self._instances)
        other._owner = dict(self._owner)
        return other

    def state_hash(self) -> str:
        """Digest of what BFCL compares: the public attributes of every instance."""
        state = {name: _plain(instance) for name, instance in self._instances.items()}
        return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()

    @property
    def instances(self) -> dict[str, Any]:
        """Instances by class name, for BFCL's own comparison."""
        return self._instances


def bfcl_check(task: Task, calls_by_turn: Sequence[Sequence[ToolCall]]) -> tuple[bool, str]:
    """Whether the calls solve the task by BFCL's multi-turn check, and why not.

    After every turn whose reference has calls, the public state must equal the reference's and the results of the
    turn's reference calls must be among all results so far, in any order. A turn without the calls it needs, or an
    episode with too few turns, fails.
    """
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import response_checker, state_checker

    gold = [[ToolCall(c["name"], c["arguments"]) for c in turn] for turn in task.meta["gold"]]
    if len(calls_by_turn) != len(gold):
        return False, f"{len(calls_by_turn)} turns of {len(gold)}"
    names = task.tool_names
    ours, reference = BfclEnvironment(), BfclEnvironment()
    ours.load(task.meta, names)
    reference.load(task.meta, names)
    seen: list[str] = []
    for turn, (calls, wanted) in enumerate(zip(calls_by_turn, gold)):
        seen += [ours.run(call.name, call.arguments)[1] for call in calls]
        expected = [reference.run(call.name, call.arguments)[1] for call in wanted]
        if not wanted:
            continue
        if not calls:
            return False, f"turn {turn}: no call"
        if not state_checker(ours.instances, reference.instances)["valid"]:
            return False, f"turn {turn}: another state than the reference's"
        if not response_checker(seen, expected, turn)["valid"]:
            return False, f"turn {turn}: results of the reference are missing"
    return True, ""


def bfcl_success(task: Task, calls_by_turn: Sequence[Sequence[ToolCall]]) -> bool:
    """`bfcl_check` without the reason."""
    return bfcl_check(task, calls_by_turn)[0]


# --- reading the package ---


NEEDS = "BFCL needs two packages: pip install mpmath==1.3.0 && pip install --no-deps bfcl-eval==2026.3.23"


def _data_dir() -> Path:
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(NEEDS)
    return Path(spec.submodule_search_locations[0]) / "data"


def _rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (_data_dir() / name).read_text(encoding="utf-8").splitlines() if line]


def _offer() -> str:
    """What BFCL's user says when a function that was withheld becomes available."""
    from bfcl_eval.constants.default_prompts import DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC

    return DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC


@functools.cache
def _docs(class_name: str) -> tuple[dict[str, Any], ...]:
    from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING

    file = MULTI_TURN_FUNC_DOC_FILE_MAPPING[class_name]
    rows = _rows(f"multi_turn_func_doc/{file}")
    return tuple({**doc, "class": class_name, "tool": _tool(doc)} for doc in rows)


@functools.cache
def _class(class_name: str) -> Any:
    from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING

    try:
        module = importlib.import_module(CLASS_FILE_PATH_MAPPING[class_name])
    except ModuleNotFoundError as error:
        raise UserError(f"{NEEDS} ({error})") from None
    return getattr(module, class_name)


@functools.cache
def _parameters(class_name: str, method: str) -> tuple[str, ...]:
    return tuple(inspect.signature(getattr(_class(class_name), method)).parameters)[1:]


def _tool(doc: dict[str, Any]) -> dict[str, Any]:
    returns = {name: sub.get("type") for name, sub in doc.get("response", {}).get("properties", {}).items()}
    description = doc["description"] + (f" Returns {canonical_json(returns)}." if returns else "")
    function = {"name": doc["name"], "description": description, "parameters": json_schema(doc["parameters"])}
    return {"type": "function", "function": function}


def _fitting(doc: dict[str, Any], calls_by_turn: list[list[ToolCall]]) -> dict[str, Any]:
    """The document of a function, less the type of a parameter that a reference call contradicts (one does)."""
    for call in (call for calls in calls_by_turn for call in calls if call.name == doc["name"]):
        error = check_call(call, [doc["tool"]])
        if error is not None:
            doc = copy.deepcopy(doc)
            doc["parameters"]["properties"][error.path.removeprefix("/")].pop("type", None)
            doc["tool"] = _tool(doc)
    return doc


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """JSON schema of a BFCL parameter description, whose type names are Python's."""
    out = dict(schema)
    kind = out.get("type")
    if kind in _TYPES:
        out["type"] = _TYPES[kind]
        if out["type"] is None:
            del out["type"]
    if "properties" in out:
        out["properties"] = {name: json_schema(sub) for name, sub in out["properties"].items()}
    if isinstance(out.get("items"), dict):
        out["items"] = json_schema(out["items"])
    return out


# --- results and states ---


def _bfcl_text(result: Any) -> str:
    if isinstance(result, str):
        return result
    if isinstance(result, dict):
        try:
            return json.dumps(result)
        except (TypeError, ValueError):
            return str(result)
    return str(result)


def _failure(message: str) -> tuple[dict[str, str], str]:
    text = f"Error during execution: {message}"
    return {"error": text}, text


def _math_problem(arguments: dict[str, Any]) -> str | None:
    """Why a calculation is refused beforehand: Python's integers have no bounds, a power of them no end."""
    for name, value in arguments.items():
        limit = MATH_LIMIT if name in _MATH_LIMITED else sys.float_info.max
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, (int, float)) and not abs(number) <= limit:
                return f"{name} must lie between -{limit:g} and {limit:g}"
    return None


def _plain(value: Any) -> Any:
    """JSON form of an attribute, equal where BFCL's comparison finds the values equal."""
    if isinstance(value, dict):
        return {str(key): _plain(sub) for key, sub in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(sub) for sub in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(sub) for sub in value), key=repr)
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if hasattr(value, "__dict__"):
        # A directory's parent points back at it, and is not compared.
        return {key: _plain(sub) for key, sub in vars(value).items() if not key.startswith("_") and key != "parent"}
    return repr(value)


# --- checklists ---


def _closing(calls: list[ToolCall], turn: int, entry: dict[str, Any], late: dict[int, list[str]]) -> str:
    if calls:
        return f"Done. I called {', '.join(dict.fromkeys(call.name for call in calls))}; the results are above."
    if any(offer > turn for offer in late):
        return "I cannot do this with the functions I have: none of them fits the request."
    return "I need more information before I can do this. Could you tell me what is missing?"


def _items(
    calls: list[ToolCall],
    accepted: list[ToolCall],
    effects: list[dict[str, Any]],
    writes: list[str],
    names: list[str],
) -> tuple[ChecklistItem, ...]:
    """The checklist of a turn: one item on the state reached, one for each read that the reference makes."""
    if not calls:
        return (
            ChecklistItem(
                "C0",
                "Did the assistant refrain from calling functions while it could not fulfil the request?",
                "No function is called in this turn.",
                ("assistant.tool_calls",),
                rule={"kind": "no_call", "names": names},
            ),
        )
    reads = [call for call in _distinct(accepted) if call.name not in writes]
    weight = 1.0 / (1 + len(reads))
    items = [
        ChecklistItem(
            "C0",
            "Is the state that the request asks for reached, and nothing else changed?",
            f"The accepted state-changing calls so far are exactly: {canonical_json(effects)}",
            ("assistant.tool_calls", "tool.content"),
            required_for_next_turn=True,
            weight=weight,
            rule={"kind": "state", "writes": writes, "effects": effects},
        )
    ]
    for k, call in enumerate(reads, 1):
        items.append(
            ChecklistItem(
                f"C{k}",
                f"Did the assistant call {call.name} as the request needs?",
                f"An accepted call of {call.name} with {canonical_json(call.arguments)}",
                ("assistant.tool_calls",),
                weight=weight,
                rule={"kind": "call", "name": call.name, "arguments": call.arguments, "accepted": True},
            )
        )
    return tuple(items)


def _distinct(calls: list[ToolCall]) -> list[ToolCall]:
    return list({(call.name, canonical_json(call.arguments)): call for call in calls}.values())
