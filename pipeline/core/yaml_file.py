"""YAML files that people write, as closed models: unknown and doubled fields are errors."""

from __future__ import annotations

import json
from collections import Counter
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import BaseModel, ValidationError

from pipeline.core.errors import PipelineError, SpecInvalid
from pipeline.core.files import read_limited

Model = TypeVar("Model", bound=BaseModel)
# No spec or lock comes near it; it keeps a file named by mistake from filling the memory.
MAX_FILE_BYTES = 8 << 20
MAX_DEPTH = 32
_MOST_SHOWN = 12
# libyaml's loader is some ten times as fast; it is not in every build of PyYAML
_FastLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _UniqueKeys(_FastLoader):  # type: ignore[misc, valid-type]
    """YAML in which a key written twice is an error, not a silent choice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        doubled = [key for key, times in Counter(map(repr, keys)).items() if times > 1]
        if doubled:
            raise yaml.YAMLError(f"key {doubled[0]} appears twice")
        result: dict[Any, Any] = super().construct_mapping(node, deep)
        return result


def read_yaml(path: Path, model: type[Model], invalid: type[PipelineError] = SpecInvalid) -> Model:
    """Reads a file as a closed model; the error names the file and every wrong field."""
    return parse_yaml(read_limited(path, MAX_FILE_BYTES, invalid), model, path, invalid)


def parse_yaml(
    data: bytes, model: type[Model], path: Path, invalid: type[PipelineError] = SpecInvalid
) -> Model:
    """Does the same with the bytes that will be written to the file."""
    try:
        return cast(Model, _parsed(data, model))
    except ValidationError as error:
        raise invalid(f"{path}: {mistakes(error, model)}", _hint(path, model)) from error
    # besides its own errors, PyYAML lets those of int(), float() and date() through
    except (yaml.YAMLError, ValueError, AttributeError) as error:
        message = f"{path}: not valid YAML: {' '.join(str(error).split())}"
        raise invalid(message, _hint(path, model)) from error


def mistakes(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """Lists every wrong field in one line, so that the author corrects all of them at once."""
    found = []
    for each in error.errors(include_url=False):
        place, message = each["loc"], each["msg"]
        # a message of our own checks is a whole sentence, with pydantic's word before it
        plain = message.removeprefix("Value error, ")
        if each["type"] == "model_type" and not place:
            plain = "is not a mapping: write a line `KEY: VALUE` for each field"
        elif each["type"] == "extra_forbidden" and model is not None:
            near = get_close_matches(str(place[-1]), _keys(model), n=1)
            plain += f" (did you mean `{near[0]}`?)" if near else ""
        is_own = not place and each["type"] == "value_error"
        where = ".".join(map(str, place)) or "the file"
        found.append(plain if is_own else f"{where}: {plain}")
    more = f"; and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
    return "; ".join(found[:_MOST_SHOWN]) + more


@lru_cache
def _keys(model: type[BaseModel]) -> tuple[str, ...]:
    """Every key that stands somewhere in a file."""
    schema = model.model_json_schema(by_alias=True)
    parts = [schema, *schema.get("$defs", {}).values()]
    return tuple({key: None for part in parts for key in part.get("properties", {})})


def _hint(path: Path, model: type[BaseModel]) -> str:
    name = getattr(model, "schema_name", None)
    if name is None:
        return f"Correct it, or take the committed file again (`git checkout {path}`)."
    return f"Correct it; `sm120 image schema {name}` prints what the file may hold."


# One command reads the same spec and lock for its plan, its gates and its evidence: the same bytes
# are parsed once, and a checkout has some 240. Keyed by content, so an edited file is never
# answered from here.
@lru_cache(maxsize=256)
def _parsed(data: bytes, model: type[BaseModel]) -> BaseModel:
    text = data.decode("utf-8")
    # no aliases, which can unfold without end, and no depth that overflows the C parser
    depth = 0
    for event in yaml.parse(text, Loader=_FastLoader):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"*{event.anchor}: write it out, aliases are not allowed")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise yaml.YAMLError(f"more than {MAX_DEPTH} levels deep")
    # a loader derived from the safe one: no tag makes a Python object
    return model.model_validate(yaml.load(text, Loader=_UniqueKeys))  # noqa: S506


def schema(model: type[BaseModel]) -> str:
    """The JSON schema an editor needs to complete and check a file."""
    return json.dumps(model.model_json_schema(by_alias=True), indent=2, sort_keys=True) + "\n"
