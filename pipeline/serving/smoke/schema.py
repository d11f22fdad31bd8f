"""JSON schemas of tools: what is wrong with a value, and the keywords that are understood."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "number": (int, float),
    "integer": (int, float),
}
_NOTES = {
    *("title", "description", "default", "examples", "format", "deprecated", "readOnly"),
    *("writeOnly", "nullable", "$schema", "$id", "id", "$comment", "$defs", "definitions"),
}
_JUDGED = {
    *("type", "enum", "const", "properties", "required", "additionalProperties", "items", "$ref"),
    *("prefixItems", "minItems", "maxItems", "uniqueItems", "minLength", "maxLength", "minimum"),
    *("maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minProperties"),
    *("maxProperties", "anyOf", "oneOf", "allOf", "not"),
}
_MOST_DEPTH = 64


class SchemaUnknown(Exception):
    """A schema that we do not understand: its values are not judged."""


def schema_fault(schema: Any, value: Any) -> str:
    """What is wrong with a value, and where; empty where it fits.

    https://json-schema.org/draft/2020-12/json-schema-validation
    """
    return _fault(schema, value, "", schema, 0)


def _fault(schema: Any, value: Any, at: str, root: Any, depth: int) -> str:
    if depth > _MOST_DEPTH:
        raise SchemaUnknown("the schema goes on without an end")
    if isinstance(schema, bool):
        return "" if schema else f"{at or 'the value'}: is not allowed"
    if not isinstance(schema, Mapping):
        raise SchemaUnknown(f"{at or 'the schema'}: is no schema")
    if unknown := sorted(set(schema) - _NOTES - _JUDGED):
        raise SchemaUnknown(f"{at or 'the schema'}: {', '.join(unknown[:4])} is not understood")
    here, given = at or "the value", schema.get
    wanted: Any = given("type", [])

    def below(part: Any, each: Any, name: str = at) -> str:
        return _fault(part, each, name, root, depth + 1)

    if (ref := given("$ref")) and (fault := below(_named(root, ref), value)):
        return fault
    kinds: list[str] = [wanted] if isinstance(wanted, str) else list(wanted)
    if kinds and not any(_is(value, kind) for kind in kinds):
        return f"{here}: is {_shown(value)}, not {' or '.join(kinds)}"
    if "enum" in schema and not any(same_json(value, each) for each in schema["enum"]):
        return f"{here}: {_shown(value)} is none of {_shown(schema['enum'])}"
    if "const" in schema and not same_json(value, schema["const"]):
        return f"{here}: is {_shown(value)}, not {_shown(schema['const'])}"
    for name, good in (("anyOf", any), ("allOf", all), ("oneOf", lambda found: sum(found) == 1)):
        parts = given(name)
        if parts and not good([not below(part, value) for part in parts]):
            return f"{here}: {_shown(value)} does not fit {name}"
    if "not" in schema and not below(schema["not"], value):
        return f"{here}: fits what it must not"
    sizes: list[tuple[str, float, str, str]] = []
    if _is(value, "number"):
        if given("exclusiveMinimum") is not None and not value > given("exclusiveMinimum"):
            return f"{here}: {value} is not above {given('exclusiveMinimum')}"
        if given("exclusiveMaximum") is not None and not value < given("exclusiveMaximum"):
            return f"{here}: {value} is not below {given('exclusiveMaximum')}"
        steps = value / given("multipleOf") if given("multipleOf") else 0
        if abs(steps - round(steps)) > 1e-9:
            return f"{here}: {value} is no multiple of {given('multipleOf')}"
        sizes.append(("", value, "minimum", "maximum"))
    if isinstance(value, str):
        sizes.append(("length ", len(value), "minLength", "maxLength"))
    if isinstance(value, list):
        sizes.append(("number of items ", len(value), "minItems", "maxItems"))
        first = given("prefixItems") or []
        for number, each in enumerate(value):
            part = first[number] if number < len(first) else given("items", True)
            if fault := below(part, each, f"{at}[{number}]"):
                return fault
        if given("uniqueItems") and any(
            same_json(a, b) for n, a in enumerate(value) for b in value[:n]
        ):
            return f"{here}: has an item twice"
    if isinstance(value, dict):
        sizes.append(("number of fields ", len(value), "minProperties", "maxProperties"))
        if missing := [name for name in given("required") or [] if name not in value]:
            return f"{here}: {_shown(missing[0])} is missing"
        fields, others = given("properties") or {}, given("additionalProperties", True)
        for name, each in value.items():
            if name not in fields and others is False:
                return f"{here}: has {_shown(name)}, which it must not"
            if fault := below(fields.get(name, others), each, f"{at}.{name}".lstrip(".")):
                return fault
    for what, size, low, high in sizes:
        least, most = given(low), given(high)
        if least is not None and size < least:
            return f"{here}: {what}{size} is less than {least}"
        if most is not None and size > most:
            return f"{here}: {what}{size} is more than {most}"
    return ""


def _is(value: Any, kind: str) -> bool:
    if kind not in _TYPES:
        raise SchemaUnknown(f"there is no type {kind!r}")
    if isinstance(value, bool):
        return kind == "boolean"
    # 40.0 is an integer: json-schema.org/draft/2020-12/json-schema-core#section-4.2.3
    is_whole = not isinstance(value, float) or value.is_integer()
    return isinstance(value, _TYPES[kind]) and (kind != "integer" or is_whole)


def same_json(one: Any, other: Any) -> bool:
    """Equal as JSON: 1 is 1.0, and no number is true or false."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    return bool(one == other)


def _named(root: Any, ref: Any) -> Any:
    """A part of the same schema; nothing is fetched from anywhere."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        raise SchemaUnknown(f"$ref {str(ref)[:80]!r} leads out of the schema")
    found = root
    for part in ref[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or name not in found:
            raise SchemaUnknown(f"$ref {ref[:80]!r} leads nowhere")
        found = found[name]
    return found


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:60]
