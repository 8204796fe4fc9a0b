"""Token masks from JSON schemas: what an output may say next, so that it cannot come out malformed.

A `Constrainer` compiles the shape of an output (an assistant's calls, a rehearsed result, a reply that meets a schema)
for one tokenizer, by `llguidance`; its `TokenGuide` is what the engine asks before every token. Objects are written as
`canonical_json` writes them, their properties in the order of the schema. A guide changes the distribution that is
sampled from: log-probabilities stored with a guided output are those of the masked distribution.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envace_jax.config import UserError
from envace_jax.text.tokenizer import Tokenizer
from envace_jax.text.tool_schema import arguments_schema, tool_function
from envace_jax.text.transcript import canonical_json

STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ANY_OBJECT = {"type": "object"}
OBJECT_OR_LIST = {"anyOf": [{"type": "object"}, {"type": "array"}]}
MAX_GRAMMAR_CHARS = 400_000
MAX_NODES, MAX_PROPERTIES, MAX_STRING = 20_000, 500, 2_000
"""Of a schema. The texts of `description` and `title` constrain nothing and are left out before."""
KEPT = 256
CHILD_SECONDS, CHILD_BYTES = 2, 2 << 30
_CHILD = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({CHILD_SECONDS}, {CHILD_SECONDS}))
resource.setrlimit(resource.RLIMIT_AS, ({CHILD_BYTES}, {CHILD_BYTES}))
from llguidance import LLMatcher, LLTokenizer
matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(sys.stdin.read()), log_level=0)
matcher.compute_bitmask()
print(matcher.get_error() or ("nothing meets it" if matcher.is_stopped() else ""), flush=True)
"""
"""Run with a grammar on its standard input: says what is wrong with it, or dies of its limits."""


class TokenGuide:
    """One output on its way. `failure` says why nothing more could be allowed but the end of the turn."""

    def __init__(self, matcher: Any, size: int, stop_ids: Sequence[int]):
        self._matcher, self._stops = matcher, list(stop_ids)
        self._words = np.zeros((1, (size + 31) // 32), np.int32)
        self._size = size
        self.failure: str | None = None

    def allowed(self) -> np.ndarray:
        """Which ids may come next, bool [tokenizer's vocabulary]."""
        from llguidance.numpy import fill_next_token_bitmask

        if self.failure is None:
            fill_next_token_bitmask(self._matcher, self._words)
            if self._matcher.is_error():
                self.failure = str(self._matcher.get_error()).partition("\n")[0] or "the grammar failed"
        if self.failure is None:
            allowed = np.unpackbits(self._words.view(np.uint8), bitorder="little")[: self._size].astype(bool)
            if allowed.any():
                return allowed
            self.failure = "nothing is allowed next"
        allowed = np.zeros(self._size, bool)
        allowed[self._stops] = True
        return allowed

    def accept(self, token: int) -> None:
        """A token was sampled."""
        if self.failure is None and token not in self._stops and not self._matcher.consume_token(token):
            self.failure = str(self._matcher.get_error()).partition("\n")[0] or f"token {token} was not allowed"


class Constrainer:
    """Compiles shapes for one tokenizer; the latest ones are kept. Safe to use from several threads.

    `thinking` lets an output begin with a thinking block.

    `guarded` compiles a new grammar in a child process with limits of its own first: a schema from a client can make
    the compiler run for ever (`{"$ref": "#"}` does).

    Raises (all methods that return a guide):
        UserError: a schema that cannot be compiled within the limits; a tokenizer whose call tags are not one id each.
    """

    def __init__(self, tokenizer: Tokenizer, stop_ids: Sequence[int], *, thinking: bool = True, guarded: bool = False):
        from llguidance import LLParserLimits, LLTokenizer

        self.tokenizer, self.stop_ids, self.guarded = tokenizer, tuple(stop_ids), guarded
        self.thinking = thinking
        self._tokenizer = LLTokenizer(tokenizer.definition(), eos_token=list(stop_ids))
        # Steps of at most some tens of milliseconds: a schema comes from a client, and all requests share the thread.
        self._limits = LLParserLimits(
            initial_lexer_fuel=1_000_000,
            step_lexer_fuel=200_000,
            step_max_items=10_000 if guarded else 50_000,
            max_grammar_size=100_000,
            max_lexer_states=50_000,
        )
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def calls(
        self,
        tools: Sequence[dict[str, Any]],
        *,
        required: bool = False,
        name: str | None = None,
        parallel: bool = True,
        schema: Mapping[str, Any] | None = None,
        after: str = "",
        lenient: bool = False,
    ) -> TokenGuide:
        """An assistant's output: thinking if any, then a reply, then calls of the tools with arguments that fit.

        Args:
            tools: with the schema of their parameters.
            required: at least one call, and no reply.
            name: only this tool (with `required`).
            parallel: whether several calls may be made.
            schema: what the reply must be, where no call is made; else any text.
            after: text that stands in the prompt already and is part of the output.
            lenient: a tool whose schema cannot be followed takes any object.
        """
        functions = [f for f in map(tool_function, tools) if name in (None, f["name"])]
        if not functions:
            raise UserError("an output with calls needs tools")
        forms = [self._call_form(f, lenient) for f in functions]
        call = f'{self._tag("<tool_call>")} "\\n" body "\\n" {self._tag("</tool_call>")}'
        several = 'call ("\\n" call)*' if parallel else "call"
        rules = [f"call: {call}", f"body: {_json({'anyOf': forms})}", "TEXT: /(.|\\n)*/", "SPACE: /\\n*/"]
        if required:
            start = f"thinking {several}"
        elif schema is None:
            start = f"thinking TEXT ({several})?"
        else:
            start = f"thinking (value | {several})"
            rules.append(f"value: {_json(schema)}")
        return self._guide(start, rules, after)

    def reply(self, schema: Mapping[str, Any]) -> TokenGuide:
        """An output whose reply, after thinking if any, is JSON that meets a schema; no calls."""
        return self._guide("thinking value", [f"value: {_json(schema)}", "TEXT: /(.|\\n)*/", "SPACE: /\\n*/"])

    def result(self, tag: str = "tool_response", *, objects_only: bool = False) -> TokenGuide:
        """A rehearsed result between its tags: any JSON value, or an object or a list.

        JSON knows numbers that no float can hold; parsing refuses those.
        """
        value: Mapping[str, Any] = OBJECT_OR_LIST if objects_only else {}
        start = f'thinking {self._tag(f"<{tag}>")} "\\n" value "\\n" {self._tag(f"</{tag}>")}'
        return self._guide(start, [f"value: {_json(value)}", "TEXT: /(.|\\n)*/", "SPACE: /\\n*/"])

    def _call_form(self, function: Mapping[str, Any], lenient: bool) -> dict[str, Any]:
        name = function["name"]
        try:
            arguments = arguments_schema(function)
            if "$ref" in canonical_json(arguments):
                raise UserError(f"tool '{name}': constrained calls do not follow references ($ref) in its schema")
            if lenient:
                self._matcher(f"start: {_json(arguments)}")
        except UserError:
            if not lenient:
                raise
            arguments = ANY_OBJECT
        return {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": arguments},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }

    def _tag(self, tag: str) -> str:
        index = self.tokenizer.tags.get(tag)
        if index is not None:
            return f"<[{index}]>"
        if tag in ("<tool_call>", "</tool_call>"):
            raise UserError(f"constrained calls need a tokenizer in which {tag} is one id")
        return json.dumps(tag)

    def _guide(self, start: str, rules: Sequence[str], after: str = "") -> TokenGuide:
        think = '""'
        if self.thinking and {"<think>", "</think>"} <= set(self.tokenizer.tags):
            think = f"({self._tag('<think>')} TEXT {self._tag('</think>')} SPACE)?"
        grammar = "\n".join([f"start: {start}", f"thinking: {think}", *rules])
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise UserError(f"the schemas of this request take {len(grammar)} characters; {MAX_GRAMMAR_CHARS} are read")
        matcher = self._matcher(grammar).deep_copy()
        if after and not matcher.consume_tokens(self.tokenizer.encode(after)):
            raise UserError(f"the output cannot begin with {after!r}")
        return TokenGuide(matcher, self.tokenizer.vocab_size, self.stop_ids)

    def _matcher(self, grammar: str) -> Any:
        from llguidance import LLMatcher

        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
                return self._kept[grammar]
        if self.guarded:
            _check_in_child(grammar)
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=self._limits)
        if matcher.is_error():
            raise UserError(f"schema: {_first_line(matcher.get_error())}")
        with self._lock:
            self._kept[grammar] = matcher
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return matcher


def _check_in_child(grammar: str) -> None:
    command = [sys.executable, "-I", "-c", _CHILD]
    grammar = re.sub(r"<\[\d+\]>", '"<tag>"', grammar)  # its tokens are bytes: it has no tags
    try:
        done = subprocess.run(command, input=grammar.encode(), capture_output=True, timeout=30 * CHILD_SECONDS)
    except subprocess.TimeoutExpired:
        raise UserError("schema: it takes too long to compile") from None
    if done.returncode != 0:
        raise UserError("schema: it takes too long or too much memory to compile")
    if problem := done.stdout.decode(errors="replace").strip():
        raise UserError(f"schema: {_first_line(problem)}")


def _check(schema: Mapping[str, Any]) -> None:
    """Bounds the size of a schema; and its references must be local, and none may lead back to itself without a value
    in between: masks would never end."""
    sound: set[str] = set()
    nodes = 0

    def target(reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise UserError(f"schema: the reference {reference!r} is not a local one (#/…)")
        node: Any = schema
        for part in reference.lstrip("#").split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(node, Mapping) or part not in node:
                raise UserError(f"schema: the reference {reference!r} leads nowhere")
            node = node[part]
        return node

    def in_place(node: Any, open_: tuple[str, ...]) -> None:
        if not isinstance(node, Mapping):
            return
        reference = node.get("$ref")
        if reference is not None:
            if not isinstance(reference, str):
                raise UserError("schema: a reference ($ref) that is no text")
            if reference in open_:
                raise UserError(f"schema: the reference {reference!r} leads back to itself")
            if reference not in sound:
                in_place(target(reference), (*open_, reference))
                sound.add(reference)
        for key in ("allOf", "anyOf", "oneOf"):
            for inner in node[key] if isinstance(node.get(key), list) else ():
                in_place(inner, open_)

    def every(node: Any, is_schema: bool = True) -> None:
        nonlocal nodes
        nodes += 1
        if nodes > MAX_NODES:
            raise UserError(f"schema: it has more than {MAX_NODES} parts")
        if isinstance(node, str) and len(node) > MAX_STRING:
            raise UserError(f"schema: a text in it has {len(node)} characters; {MAX_STRING} are read")
        if isinstance(node, Mapping):
            if len(node) > MAX_PROPERTIES or any(len(str(key)) > MAX_STRING for key in node):
                raise UserError(
                    f"schema: an object in it has more than {MAX_PROPERTIES} keys, or one of them is too long"
                )
            if is_schema:  # else its keys are names: one of them may be called $ref
                in_place(node, ("#",) if node is schema else ())
            for key, inner in node.items():
                every(inner, not (is_schema and key in _BY_NAME))
        elif isinstance(node, list):
            for inner in node:
                every(inner)

    every(schema)


def _first_line(text: Any) -> str:
    return str(text).strip().partition("\n")[0][:300]


def _json(schema: Mapping[str, Any]) -> str:
    """The schema as a grammar's rule, in one line."""
    schema = _without_notes(schema)
    _check(schema)
    return "%json " + json.dumps({**schema, "x-guidance": STYLE}, ensure_ascii=True)


def _without_notes(node: Any, is_schema: bool = True) -> Any:
    """A schema less its descriptions, titles, defaults and examples; names of properties stay, whatever they are."""
    if isinstance(node, Mapping):
        notes = ("description", "title", "default", "examples", "$comment") if is_schema else ()
        return {
            key: inner if is_schema and key in ("const", "enum") else _without_notes(inner, key not in _BY_NAME)
            for key, inner in node.items()
            if key not in notes
        }
    return [_without_notes(inner) for inner in node] if isinstance(node, list) else node


_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
