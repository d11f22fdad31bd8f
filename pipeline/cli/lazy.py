"""Commands that are loaded when they are asked for: `weights verify` need not wait for `build`."""

from __future__ import annotations

from collections import UserDict
from importlib import import_module
from typing import Any


class Lazily(UserDict[str, Any]):
    """Commands by name; one that was not asked for yet is where to find it, as module:name."""

    def __getitem__(self, name: str) -> Any:
        found = self.data[name]
        if isinstance(found, str):
            module, _, attribute = found.partition(":")
            found = self.data[name] = getattr(import_module(f"pipeline.cli.{module}"), attribute)
        return found
