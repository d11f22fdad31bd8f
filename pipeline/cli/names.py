"""Names of images and recipes for shell completion, found without loading what reads them.

A shell waits for the answer at every press of the key: the modules that read specs take a second,
and an error would end up in the middle of the line that is being typed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

import click
from click.shell_completion import CompletionItem

from pipeline.images.spec.root import checkout_above

Kind: TypeAlias = Literal["image", "recipe"]


def complete_names(kind: Kind, context: click.Context, incomplete: str) -> list[CompletionItem]:
    """The names that begin so, sorted; none where nothing can be read."""
    with suppress(OSError):
        names = {name for name in _names(kind, context) if name.startswith(incomplete)}
        return [CompletionItem(name) for name in sorted(names)]
    return []


def _names(kind: Kind, context: click.Context) -> Iterator[str]:
    # the checkout of --checkout, else the one around the current folder
    start = Path(context.find_root().params.get("checkout") or Path.cwd())
    root = checkout_above(start.resolve())
    if kind == "image":
        yield from (p.parent.name for p in root.glob("images/*/image.yaml")) if root else ()
        return
    # the folders of --recipes, else of its variable
    typed = context.params.get("folders") or os.environ.get("SM120_RECIPES", "").split(os.pathsep)
    folders = [Path(folder) for folder in typed if folder] + ([root / "recipes"] if root else [])
    yield from (path.stem for folder in folders for path in folder.glob("*.yaml"))
