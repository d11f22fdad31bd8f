"""The few words of JSON schema that the ladder's own schemas use."""

from __future__ import annotations

from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


def violation(value: Any, schema: dict[str, Any], path: str = "the value") -> str:
    """Where a value is not what its schema says; empty where it is."""
    kinds = _TYPES[schema["type"]]
    # True is an int for Python, not for JSON
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        return f"{path} is {type(value).__name__}, not {schema['type']}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{path} is {value!r}, not one of {schema['enum']}"
    if isinstance(value, list):
        found = (violation(v, schema["items"], f"{path}[{i}]") for i, v in enumerate(value))
        return next(filter(None, found), "")
    return _object_violation(value, schema, path) if isinstance(value, dict) else ""


def _object_violation(value: dict[str, Any], schema: dict[str, Any], path: str) -> str:
    properties = schema.get("properties", {})
    if missing := [k for k in schema.get("required", []) if k not in value]:
        return f"{path} has no {missing[0]!r}"
    if unknown := [k for k in value if k not in properties]:
        return f"{path} has {unknown[0]!r}, which the schema does not know"
    found = (violation(v, properties[k], f"{path}.{k}") for k, v in value.items())
    return next(filter(None, found), "")
