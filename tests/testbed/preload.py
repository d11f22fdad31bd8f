"""All that a command may import, for a process that forks once for each command."""

from __future__ import annotations

import importlib
import pkgutil

import pipeline.app
import pipeline.cli

for package in (pipeline.cli, pipeline.app):
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
