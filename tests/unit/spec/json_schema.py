"""As much of JSON Schema as pydantic writes; an unknown keyword is an error, not a pass."""

from __future__ import annotations

import re
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_INSIDE = ("properties", "patternProperties", "items", "additionalProperties", "propertyNames")
_WORDS = {"title", "description", "default", "discriminator", "$defs"}


def problems(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str = "") -> list[str]:
    """What is wrong with a value; empty when it fits."""
    if "type" in schema and not _fits("type", schema["type"], value):
        return [f"{at}: is no {schema['type']}"]
    result: list[str] = []
    for keyword, wanted in schema.items():
        if keyword in _WORDS:
            continue
        if keyword == "$ref":
            result += problems(value, root["$defs"][wanted.rpartition("/")[2]], root, at)
        elif keyword == "anyOf":
            options = [problems(value, option, root, at) for option in wanted]
            result += [] if [] in options else options[0]
        elif keyword == "oneOf":
            fitting = [o for o in wanted if not problems(value, o, root, at)]
            result += [] if len(fitting) == 1 else [f"{at}: fits {len(fitting)} of {len(wanted)}"]
        elif keyword in _INSIDE:
            result += _inside(keyword, value, schema, root, at)
        elif not _fits(keyword, wanted, value):
            result.append(f"{at}: {keyword} {wanted!r}")
    return result


def _inside(
    keyword: str, value: Any, schema: dict[str, Any], root: dict[str, Any], at: str
) -> list[str]:
    wanted = schema[keyword]
    if keyword == "items":
        return [p for n, x in enumerate(value) for p in problems(x, wanted, root, f"{at}.{n}")]
    if keyword == "propertyNames":
        return [p for name in value for p in problems(name, wanted, root, f"{at}.{name}")]
    if keyword == "patternProperties":
        matching = [(n, s) for n in value for key, s in wanted.items() if re.search(key, n)]
        return [p for n, s in matching for p in problems(value[n], s, root, f"{at}.{n}")]
    known = schema.get("properties", {})
    if keyword == "properties":
        shared = [n for n in value if n in known]
        return [p for n in shared for p in problems(value[n], known[n], root, f"{at}.{n}")]
    more = [n for n in value if n not in known]
    if isinstance(wanted, bool):
        return [] if wanted else [f"{at}.{n}: unknown" for n in more]
    return [p for n in more for p in problems(value[n], wanted, root, f"{at}.{n}")]


def _fits(keyword: str, wanted: Any, value: Any) -> bool:
    match keyword:
        case "type":
            is_bool = isinstance(value, bool) and wanted != "boolean"
            return isinstance(value, _TYPES[wanted]) and not is_bool
        case "required":
            return not set(wanted) - set(value)
        case "pattern":
            return re.search(wanted, value) is not None
        case "minLength" | "minItems" | "minProperties":
            return len(value) >= int(wanted)
        case "maxLength" | "maxItems" | "maxProperties":
            return len(value) <= int(wanted)
        case "enum":
            return value in wanted
        case "const":
            return bool(value == wanted)
        case "exclusiveMinimum":
            return bool(value > wanted)
        case "minimum":
            return bool(value >= wanted)
        case "maximum":
            return bool(value <= wanted)
    raise AssertionError(f"this test knows no {keyword}")
