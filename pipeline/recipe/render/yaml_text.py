"""YAML as Compose and Kubernetes read it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

# no line of ours is folded: a value is found by searching for it
_WIDTH = 1 << 20


# YAML 1.1, which PyYAML writes, and 1.2, which these tools read, differ in what is a number
# (`1e3`, `0o17`) and in what is a switch (`y`).
_UNSURE = re.compile(r"[-+.]?[0-9.].*|[yYnN]", re.DOTALL)


class _Dumper(yaml.SafeDumper):
    """A dumper that writes the same list twice, and texts that every reader takes for texts."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    style = "'" if _UNSURE.fullmatch(value) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def dump(documents: Sequence[dict[str, Any]]) -> str:
    """Documents in the order of their fields."""
    return yaml.dump_all(
        documents, Dumper=_Dumper, sort_keys=False, width=_WIDTH, allow_unicode=True
    )


def with_dollars_doubled(value: Any) -> Any:
    """The same value, in which no `$` begins a variable."""
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, list):
        return [with_dollars_doubled(each) for each in value]
    if isinstance(value, dict):
        return {key: with_dollars_doubled(each) for key, each in value.items()}
    return value
