"""Gives FlashInfer the modules that an image brings compiled.

Part of images with warm kernels. FlashInfer looks for a package of this name before it compiles a
module (`flashinfer/jit/env.py`): up to 0.6 it asks for a folder, since 0.7 for providers, whose
architectures it compares with the card's. It never looks into a library before it loads it. So a
module is offered only if its file has the digest that the index lists, and if FlashInfer, its place
and FLASHINFER_CUDA_ARCH_LIST are those that it was compiled for. Whatever is missing or damaged is
compiled as before, and why is said on stderr.

SM120_WARM_ONLY=1 makes FlashInfer refuse to compile: proof that the image brings what is used.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flashinfer import version

FOLDER = Path(os.environ.get("SM120_WARM", "/opt/warm"))
ARCH_LIST = "FLASHINFER_CUDA_ARCH_LIST"
# What FlashInfer compares with its own; what is for another one is not offered below.
__version__: str = version.__version__
if os.environ.get("SM120_WARM_ONLY") == "1":
    os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")


@functools.cache
def read_modules() -> tuple[frozenset[str], frozenset[str]]:
    """The modules that are as the index lists them, and those that are not."""
    here = {"flashinfer": version.__version__, "architectures": os.environ.get(ARCH_LIST, "")}
    here["site"] = str(Path(version.__file__).parents[1])
    try:
        index = json.loads((FOLDER / "index.json").read_text(encoding="utf-8"))["modules"]
        made_for = {name: index[name] for name in here}
        entries = {name: entry["sha256"] for name, entry in index["entries"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"sm120: no warm modules: {FOLDER}/index.json: {error}", file=sys.stderr)
        return frozenset(), frozenset()
    if made_for != here:
        print(f"sm120: no warm modules: made for {made_for}, this is {here}", file=sys.stderr)
        return frozenset(), frozenset(entries)
    good = set()
    for name, digest in entries.items():
        path = FOLDER / "flashinfer" / name / f"{name}.so"
        try:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            found = str(error)
        if found == digest:
            good.add(name)
        else:
            print(f"sm120: {path} is {found}, not {digest}: not used", file=sys.stderr)
    return frozenset(good), frozenset(entries) - good


def get_jit_cache_dir() -> str:
    """The folder of modules, as FlashInfer 0.6 asks; it takes whatever lies there, or nothing."""
    good, refused = read_modules()
    folder = FOLDER / "flashinfer"
    unlisted = sorted({path.name for path in folder.iterdir()} - good) if good else []
    if unlisted and not refused:
        print(f"sm120: {folder / unlisted[0]} is not in the index: none is used", file=sys.stderr)
    return str(folder if good and not refused and not unlisted else FOLDER / "no-modules")


def get_jit_cache_providers() -> list[Any]:
    """The modules and their architectures, as FlashInfer 0.7 asks."""
    good, _ = read_modules()
    architectures = os.environ.get(ARCH_LIST, "").replace(".", "").split()
    return [
        SimpleNamespace(
            provider_id="sm120-warm",
            distribution="sm120-warm",
            version=__version__,
            jit_cache_dir=str(FOLDER / "flashinfer"),
            cuda_architectures=[f"sm{each}" for each in architectures],
            modules=sorted(good),
        )
    ]
