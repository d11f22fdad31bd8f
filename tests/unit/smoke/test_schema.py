"""Values judged by a schema, as a library for schemas judges them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from pipeline.serving.smoke.schema import SchemaUnknown, same_json, schema_fault

_POINT = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
SCHEMAS: list[Any] = [
    True,
    False,
    {},
    {"type": "integer", "minimum": 0, "maximum": 9},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 40, "multipleOf": 0.5},
    {"type": ["string", "null"], "minLength": 1, "maxLength": 3},
    {"enum": [1, "a", None, [1], {"x": 1.0}, True]},
    {"const": {"x": [1, 2]}},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
    {"type": "array", "uniqueItems": True, "prefixItems": [{"type": "string"}]},
    {**_POINT, "additionalProperties": False},
    {**_POINT, "additionalProperties": {"type": "string"}, "minProperties": 1, "maxProperties": 2},
    {"anyOf": [{"type": "string"}, _POINT]},
    {"oneOf": [{"type": "integer"}, {"minimum": 5}]},
    {"allOf": [{"type": "number"}, {"minimum": 1}]},
    {"not": {"type": "string"}},
    {"$ref": "#/$defs/p", "$defs": {"p": _POINT}},
    {"type": "object", "properties": {"größe": {"$ref": "#/$defs/p"}, "e-mail": {}},
     "required": ["größe"], "$defs": {"p": _POINT}},
]  # fmt: skip
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 1.0, 2.5, 5, 40, 40.0, -3, 1e300, "", "a", "abcd", "é👩‍🚢"),
    *([], [1], [1, 1], [1.0, True], ["a", "b"], ["a", "a", 3], [[1], [1.0]]),
    *({}, {"x": 1}, {"x": "1"}, {"x": 1, "y": "z"}, {"x": 1, "y": 2}, {"x": [1, 2]}),
    *({"größe": {"x": 1}}, {"größe": {}}, {"größe": {"x": 0}, "e-mail": 3}, {"a": 1, "b": 2}),
]


def test_every_value_is_judged_as_the_library_judges_it() -> None:
    # not at the top: it compiles grammars for 3 s, in every test process
    import jsonschema  # type: ignore[import-untyped]

    for schema, value in itertools.product(SCHEMAS, VALUES):
        good = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert (schema_fault(schema, value) == "") is good, (schema, value)


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "(a+)+$"},
        {"type": "integr"},
        {"$ref": "http://example.com/x"},
        {"$ref": "#/$defs/none"},
        {"$ref": "#"},
        {"properties": {"x": 7}},
        [],
    ],
)
def test_a_schema_that_is_not_understood_judges_nothing(schema: Any) -> None:
    with pytest.raises(SchemaUnknown):
        schema_fault(schema, {"x": 1})


def test_a_fault_names_the_place() -> None:
    schema = {"properties": {"a": {"items": {"type": "object", "properties": {"b": False}}}}}
    assert schema_fault(schema, {"a": [{}, {"b": 1}]}) == "a[1].b: is not allowed"


def test_numbers_are_the_same_as_json_and_booleans_are_no_numbers() -> None:
    assert same_json({"a": [1, 2.0]}, {"a": [1.0, 2]})
    assert not same_json(1, True)
    assert not same_json({"a": 1}, {"a": 1, "b": None})
