from __future__ import annotations

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envace_jax.config import UserError
from envace_jax.text.tool_schema import CallError, check_call, check_tools
from envace_jax.text.transcript import ToolCall

pytestmark = pytest.mark.quick
RULES = settings(derandomize=True, deadline=None, max_examples=120)
PARAMETERS = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^O-[0-9]+$"},
        "items": {
            "type": "array",
            "items": {"type": "object", "properties": {"qty/n": {"type": "integer", "minimum": 1}}},
        },
        "reason": {"enum": ["damaged", "late", None]},
    },
    "required": ["id"],
}


def tool(parameters=None, name="refund", **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def check(arguments, parameters=PARAMETERS, name="refund", checks=("whitelist", "arguments", "schema"), **more):
    return check_call(ToolCall(name, arguments), [tool({}, "other"), tool(parameters, **more)], checks=checks)


def test_a_good_call():
    assert check({"id": "O-1", "items": [{"qty/n": 2}], "reason": None}) is None
    bare = {"name": "refund", "parameters": PARAMETERS}
    assert check_call(ToolCall("refund", {"id": "O-1"}), [bare]) is None
    assert check_call(ToolCall("refund", {"id": "x"}), [bare]).code == "SCHEMA_VALIDATION_FAILED"


def test_whitelist():
    error = check({}, name="refnud")
    assert error == CallError("TOOL_NOT_AVAILABLE", "There is no tool refnud. Available tools: other, refund.", "")
    assert check({}, name="refnud", checks=("arguments", "schema")) is None
    assert "none" in check_call(ToolCall("f", {}), []).message


def test_arguments_must_be_an_object():
    for arguments in ([], "x", None, 3):
        assert check(arguments).code == "INVALID_PARAMETERS"
        assert check(arguments, checks=("whitelist",)) is None
    assert check({"id": 3}, checks=("whitelist", "arguments")) is None
    with pytest.raises(ValueError, match="checks"):
        check({}, checks=("everything",))


BROKEN = {
    "missing": ({}, "", '"id" is a required property'),
    "wrong type": ({"id": 3}, "/id", 'not of type "string"'),
    "pattern": ({"id": "O-x"}, "/id", "does not match"),
    "nested": ({"id": "O-1", "items": [{}, {"qty/n": 0}]}, "/items/1/qty~1n", "less than the minimum"),
    "a bool is no integer": ({"id": "O-1", "items": [{"qty/n": True}]}, "/items/0/qty~1n", "integer"),
    "enum": ({"id": "O-1", "reason": "cheap"}, "/reason", "damaged"),
    "unknown key": ({"id": "O-1", "why": 1}, "", "'why' was unexpected"),
}


@pytest.mark.parametrize("arguments, path, words", BROKEN.values(), ids=BROKEN)
def test_errors_have_paths(arguments, path, words):
    error = check(arguments)
    assert (error.code, error.path) == ("SCHEMA_VALIDATION_FAILED", path)
    assert words in error.message and "refund" in error.message and (path or "arguments") in error.message


def test_messages_stay_short_and_in_order():
    many = {f"k{i}": {"type": "integer"} for i in range(20)}
    error = check(dict.fromkeys(reversed(many), "x" * 10000), {"type": "object", "properties": many})
    assert error.path == "/k0" and "and 15 more" in error.message and len(error.message) < 1500


def test_unknown_keys():
    extra = {"id": "O-1", "why": 1}
    assert check(extra).code == "SCHEMA_VALIDATION_FAILED"
    assert check(extra, strict=True).code == "SCHEMA_VALIDATION_FAILED"
    assert check(extra, strict=False) is None
    assert check(extra, {**PARAMETERS, "additionalProperties": True}) is None
    assert check(extra, {**PARAMETERS, "additionalProperties": {"type": "string"}}).path == "/why"
    assert check(extra, {"type": "object"}) is None  # it names no keys at all
    for nothing in (None, {}, {"type": "object", "properties": {}}):
        assert check({}, nothing) is None
        assert check({"a": 1}, nothing).code == "SCHEMA_VALIDATION_FAILED"


def test_type_names_of_python_docs():
    python = {
        "type": "dict",
        "properties": {
            "a": {"type": "float"},
            "b": {"type": "tuple", "items": {"type": "dict"}},
            "c": {"type": "any"},
            "d": {"type": ["dict", "null"]},
            "type": {"type": "string"},  # a parameter of that name
            "e": {"enum": [{"type": "dict"}]},  # data, not a schema
        },
    }
    assert check({"a": 1.5, "b": [{}], "c": 3, "d": None, "type": "x", "e": {"type": "dict"}}, python) is None
    for bad in ({"a": "x"}, {"b": {}}, {"b": [1]}, {"d": 1}, {"type": 1}, {"e": {"type": "object"}}):
        assert check(bad, python).code == "SCHEMA_VALIDATION_FAILED", bad


def test_a_hostile_pattern_costs_nothing():
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}}
    # A backtracking engine would double its time with each of these characters.
    assert check({"a": "a" * 50_000 + "b"}, parameters).path == "/a"


UNUSABLE = {
    "look-ahead": {"type": "object", "properties": {"a": {"pattern": "(?=a)b"}}},
    "back reference": {"type": "object", "properties": {"a": {"pattern": r"(a)\1"}}},
    "huge pattern": {"type": "object", "properties": {"a": {"pattern": "a{1000}{1000}"}}},
    "remote reference": {"$ref": "http://127.0.0.1:1/x.json"},
    "file reference": {"$ref": "file:///etc/hostname"},
    "broken keyword": {"type": "object", "required": "id"},
    "not a schema": ["object"],
}


@pytest.mark.parametrize("parameters", UNUSABLE.values(), ids=UNUSABLE)
def test_unusable_schemas_are_named(parameters):
    with pytest.raises(UserError, match="refund"):
        check({}, parameters)
    with pytest.raises(UserError, match="refund"):
        check_tools([tool(parameters)])


def test_other_documents_are_not_read(tmp_path):
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    with pytest.raises(UserError, match="refund.*Retrieval is disabled"):
        check({}, {"$ref": (tmp_path / "schema.json").as_uri()})


def test_check_tools():
    check_tools([tool(PARAMETERS), tool({}, "other"), {"name": "bare"}])
    deep: dict = {}
    for _ in range(80):
        deep = {"type": "object", "properties": {"a": deep}}
    with pytest.raises(UserError) as err:
        check_tools([tool(), tool(), tool({}, " "), "x", tool(deep, "deep"), tool({"enum": ["x" * 300_000]}, "long")])
    for words in (r"tools[1]: a second tool named refund", "tools[2]: no name", "tools[3]: no name", "deep", "long"):
        assert words in str(err.value)


def test_internal_references_and_drafts():
    parameters = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "definitions": {"id": {"type": "integer"}},
        "properties": {"a": {"$ref": "#/definitions/id"}, "b": {"type": "array", "items": [{"type": "string"}]}},
    }
    assert check({"a": 1, "b": ["x", 2]}, parameters) is None
    assert check({"a": "1"}, parameters).path == "/a"
    assert check({"b": [1]}, parameters).path == "/b/0"


def test_numbers():
    whole = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 10**20}}}
    assert check({"a": 10**20}, whole) is None and check({"a": 1.0}, whole) is None
    assert check({"a": 10**20 + 1}, whole).path == "/a" and check({"a": 10**400}, whole).path == "/a"


NAMES = st.sampled_from(["a", "b", "c"])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([0.5, 1.0, -2.5])
    | st.sampled_from(["", "a", "ab", "é"])
)
INSTANCES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6
)
TYPES = st.sampled_from(["string", "number", "integer", "boolean", "null", "object", "array"])
KEYWORDS = {
    "type": TYPES | st.lists(TYPES, min_size=1, max_size=3, unique=True),
    "enum": st.lists(SCALARS, min_size=1, max_size=3, unique_by=repr),
    "const": SCALARS,
    "minimum": st.integers(-2, 2),
    "exclusiveMaximum": st.integers(-2, 2),
    "multipleOf": st.integers(1, 3),
    "minLength": st.integers(0, 2),
    "maxLength": st.integers(0, 2),
    "pattern": st.sampled_from(["^a", "b$", "a+b?", "[^a]"]),
    "minItems": st.integers(0, 2),
    "maxItems": st.integers(0, 2),
    "uniqueItems": st.booleans(),
    "required": st.lists(NAMES, max_size=2, unique=True),
    "minProperties": st.integers(0, 2),
}


def _some(keywords, most):
    """Schemas of a few keywords."""
    one = st.one_of([values.map(lambda value, key=key: (key, value)) for key, values in keywords.items()])
    return st.lists(one, max_size=most).map(dict)


def _bigger(inner):
    nested = {
        "items": inner,
        "contains": inner,
        "prefixItems": st.lists(inner, min_size=1, max_size=2),
        "properties": st.dictionaries(NAMES, inner, max_size=2),
        "additionalProperties": inner | st.booleans(),
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "b"]), inner, max_size=1),
        "propertyNames": inner,
        "anyOf": st.lists(inner, min_size=1, max_size=2),
        "oneOf": st.lists(inner, min_size=1, max_size=2),
        "allOf": st.lists(inner, min_size=1, max_size=2),
        "not": inner,
        "if": inner,
        "then": inner,
    }
    return _some({**KEYWORDS, **nested}, 3)


SCHEMAS = st.recursive(_some(KEYWORDS, 2), _bigger, max_leaves=3)


@given(st.dictionaries(NAMES, SCHEMAS, min_size=1, max_size=3), st.dictionaries(NAMES, INSTANCES, max_size=3))
@RULES
def test_agrees_with_python_jsonschema(properties, arguments):
    parameters = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    expected = sorted(
        "".join(f"/{p}" for p in e.absolute_path)
        for e in jsonschema.Draft202012Validator(parameters).iter_errors(arguments)
    )
    error = check(arguments, parameters)
    assert (error is None) == (not expected)
    if error:
        assert error.path in expected and error.code == "SCHEMA_VALIDATION_FAILED"
