"""Reads compiled kernels that an image brings, in the place of Triton's cache on disk.

Part of images with warm kernels; TRITON_CACHE_MANAGER names it. Triton asks `get_group` for the
files of a kernel and `get_file` for a launcher. An entry is used only if each of its files has the
digest that the index lists, and if Triton and the place of its files are those
that it was compiled with: another one would be another kernel. Whatever is missing or damaged is
compiled as before, into TRITON_CACHE_DIR, and what is damaged is said on stderr.

SM120_WARM_LOG=FILE appends a line for each lookup (`hit`, `disk`, `miss` or `refused`, key, file).
SM120_WARM_ONLY=1 makes all but a hit an error, which proves that the image brings what is used.
`table` is neither: the times that Triton's autotuner measured, which only a card makes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import triton
from triton.runtime import jit
from triton.runtime.cache import FileCacheManager

FOLDER = Path(os.environ.get("SM120_WARM", "/opt/warm"))


def know_callees_first(finder: type[Any]) -> None:
    """Makes a kernel's key the same whatever was called before it.

    Before 3.8 (triton#10494), Triton asks a function that a kernel calls for its global values and
    looks for them afterwards: the key has them only if another kernel called the function earlier.
    """
    update = finder._update_hash

    def update_hash(self: Any, function: Any) -> None:
        function.cache_key  # noqa: B018 - looks for them now
        update(self, function)

    finder._update_hash = update_hash


# Triton starts its driver, for which it opens its cache and imports this file, before any key
know_callees_first(jit.DependenciesFinder)


@functools.cache
def read_index() -> dict[str, dict[str, str]]:
    """The digests of each entry's files, by its key; none where they are not for this Triton."""
    here = {"triton": triton.__version__, "site": str(Path(triton.__file__).parents[1])}
    try:
        index = json.loads((FOLDER / "index.json").read_text(encoding="utf-8"))
        made_for = {name: index[name] for name in here}
        entries = {key: dict(entry["files"]) for key, entry in index["entries"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"sm120: no warm kernels: {FOLDER}/index.json: {error}", file=sys.stderr)
        return {}
    if made_for != here:
        print(f"sm120: no warm kernels: made for {made_for}, this is {here}", file=sys.stderr)
        return {}
    return entries


class WarmCache(FileCacheManager):  # type: ignore[misc]
    """Triton's own cache on disk, with the image's entries before it."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._key, self._paths = key, dict[str, str]()
        self._asked, self._is_open = (key, override, dump), False
        files = {} if override or dump else read_index().get(key, {})
        for name, digest in files.items():
            path = FOLDER / "triton" / key / name
            try:
                found = hashlib.sha256(path.read_bytes()).hexdigest()
            except OSError as error:
                found = str(error)
            if found != digest:
                # nothing of it: machine code with another description would run wrongly
                self._paths = {}
                self._note("refused", name)
                print(f"sm120: {path} is {found}, not {digest}: not used", file=sys.stderr)
                return
            self._paths[name] = str(path)

    def __getattr__(self, name: str) -> Any:
        """Opens Triton's own cache when something of it is asked for: a hit makes no folder."""
        if name.startswith("_") or self._is_open:
            raise AttributeError(name)
        self._is_open = True
        super().__init__(*self._asked)
        return getattr(self, name)

    def get_group(self, filename: str) -> Any:
        """The paths of an entry's files; Triton asks for it by its description."""
        if filename in self._paths:
            self._note("hit", filename)
            return dict(self._paths)
        return self._else(filename, super().get_group(filename))

    def get_file(self, filename: str) -> Any:
        """The path of one file, as launchers are asked for."""
        if filename in self._paths:
            self._note("hit", filename)
            return self._paths[filename]
        return self._else(filename, super().get_file(filename))

    def _else(self, filename: str, on_disk: Any) -> Any:
        """What TRITON_CACHE_DIR has; nothing where the image must have it."""
        if filename.endswith(".autotune.json"):
            self._note("table", filename)
            return on_disk
        self._note("disk" if on_disk else "miss", filename)
        if os.environ.get("SM120_WARM_ONLY") == "1":
            raise RuntimeError(f"sm120: {filename} ({self._key}) is no warm kernel of this image")
        return on_disk

    def _note(self, what: str, filename: str) -> None:
        if path := os.environ.get("SM120_WARM_LOG"):
            try:
                # one write for each line: several processes append to it
                with Path(path).open("a", encoding="utf-8") as log:
                    log.write(f"{what} {self._key} {filename}\n")
            except OSError as error:
                print(
                    f"sm120: {what} {self._key} {filename} is not noted: {error}", file=sys.stderr
                )
