"""YAML as Compose and Kubernetes read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

# no line of ours is folded: a value is found by searching for it
_WIDTH = 1 << 20


class _Dumper(yaml.SafeDumper):
    """A dumper that writes the same list twice, not a reference to the first."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


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
