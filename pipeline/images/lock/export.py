"""A lock for others: what moved since the last one, and as pip's and PEP 751's files."""

from __future__ import annotations

import json
from functools import partial

from pipeline.core.model import Frozen
from pipeline.images.lock.model import ImageLock, Pin
from pipeline.images.spec.image import PythonSpec


class Move(Frozen):
    """A package that appeared, went, changed its version, or changed its bytes.

    Of a lock in which none did, the lock itself: by its seal.
    """

    image: str
    platform: str
    kind: str
    name: str
    before: str | None
    after: str | None


def diff_locks(old: ImageLock | None, new: ImageLock) -> list[Move]:
    """Every difference, sorted by name."""
    moves: list[Move] = []
    move = partial(Move, image=new.image, platform=new.platform)
    was_base, base = old.base_image if old else None, new.base_image
    if (named := base or was_base) and was_base != base:
        before, after = (each.manifest.digest if each else None for each in (was_base, base))
        moves.append(move(kind="base", name=named.repository, before=before, after=after))
    for kind, pins in (("wheel", "wheels"), ("deb", "debs")):
        old_pins: dict[str, Pin] = {p.name: p for p in (getattr(old, pins) if old else [])}
        new_pins: dict[str, Pin] = {p.name: p for p in getattr(new, pins)}
        for name in sorted(old_pins.keys() | new_pins.keys()):
            was, now = old_pins.get(name), new_pins.get(name)
            if was != now:
                before, after = _shown(was, now), _shown(now, was)
                moves.append(move(kind=kind, name=name, before=before, after=after))
    seal = old.seal if old else None
    # an image may have no package of its own, and a spec may change without moving one
    if not moves and seal != new.seal:
        moves.append(move(kind="lock", name=new.image, before=seal, after=new.seal))
    return moves


def _shown(pin: Pin | None, other: Pin | None) -> str | None:
    """The version; with the file's digest where only the bytes differ."""
    if pin is None:
        return None
    # the same version twice would look like no change
    if other is not None and pin.version == other.version:
        return f"{pin.version} ({pin.sha256[:12]})"
    return pin.version


def requirements(lock: ImageLock) -> str:
    """For `pip install --no-deps --require-hashes -r`."""
    # a lock is of one platform, which neither format can state
    head = f"# {lock.image} for {lock.platform}, from the lock {lock.seal}\n"
    lines = [f"{w.name}=={w.version} \\\n    --hash=sha256:{w.sha256}\n" for w in lock.wheels]
    return head + "".join(lines)


def pylock(lock: ImageLock, python: PythonSpec) -> str:
    """PEP 751, which wants a place for each wheel: a file beside it, as a lock has no addresses."""
    lines = [
        f"# {lock.image} for {lock.platform}, from the lock {lock.seal}",
        'lock-version = "1.0"',
        'created-by = "sm120-pipeline"',
        f'requires-python = "=={python.version}.*"',
    ]
    for wheel in lock.wheels:
        file = json.dumps(wheel.file)
        lines += [
            "",
            "[[packages]]",
            f"name = {json.dumps(wheel.name)}",
            f"version = {json.dumps(wheel.version)}",
            f"wheels = [{{ name = {file}, path = {file}, size = {wheel.size_bytes},"
            f' hashes = {{ sha256 = "{wheel.sha256}" }} }}]',
        ]
    return "\n".join(lines) + "\n"
