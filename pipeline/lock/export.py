"""Locks for other tools: hashed requirements for pip, PEP 751 `pylock.toml` for the rest."""

from __future__ import annotations

import json
from collections.abc import Callable

from pipeline.lock.model import ImageLock, WheelPin
from pipeline.spec.image import PythonSpec


def requirements(lock: ImageLock) -> str:
    """For `pip install --no-deps --require-hashes -r`."""
    head = f"# {lock.image} for {lock.platform}, from the lock {lock.seal}\n"
    lines = [f"{w.name}=={w.version} \\\n    --hash=sha256:{w.sha256}\n" for w in lock.wheels]
    return head + "".join(lines)


def pylock(
    lock: ImageLock, python: PythonSpec, url_of: Callable[[WheelPin], str | None] | None = None
) -> str:
    """PEP 751. It must name a place: the address asked of the index, else a file beside it."""
    lines = [
        f"# {lock.image} for {lock.platform}, from the lock {lock.seal}",
        'lock-version = "1.0"',
        'created-by = "sm120-pipeline"',
        f'requires-python = "=={python.version}.*"',
    ]
    for wheel in lock.wheels:
        url = url_of(wheel) if url_of else None
        place = f"url = {json.dumps(url)}" if url else f"path = {json.dumps(wheel.file)}"
        lines += [
            "",
            "[[packages]]",
            f"name = {json.dumps(wheel.name)}",
            f"version = {json.dumps(wheel.version)}",
            f"wheels = [{{ name = {json.dumps(wheel.file)}, {place}, size = {wheel.size_bytes},"
            f' hashes = {{ sha256 = "{wheel.sha256}" }} }}]',
        ]
    return "\n".join(lines) + "\n"
