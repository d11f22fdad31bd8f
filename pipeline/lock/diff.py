"""What moved between two locks."""

from __future__ import annotations

from pipeline.lock.model import ImageLock, Pin
from pipeline.model import Frozen


class Move(Frozen):
    """A package that appeared, went, changed its version, or changed its bytes."""

    image: str
    platform: str
    kind: str
    name: str
    before: str | None
    after: str | None


def diff_locks(old: ImageLock | None, new: ImageLock) -> list[Move]:
    """Every difference, sorted by name."""
    moves = _base_moves(old, new)
    for kind in ("wheels", "debs"):
        before: dict[str, Pin] = {p.name: p for p in (getattr(old, kind) if old else [])}
        after: dict[str, Pin] = {p.name: p for p in getattr(new, kind)}
        for name in sorted(before.keys() | after.keys()):
            was, now = before.get(name), after.get(name)
            if was == now:
                continue
            moves.append(
                Move(
                    image=new.image,
                    platform=new.platform,
                    kind=kind.removesuffix("s"),
                    name=name,
                    before=_said(was, now),
                    after=_said(now, was),
                )
            )
    return moves


def _base_moves(old: ImageLock | None, new: ImageLock) -> list[Move]:
    was, now = old.base_image if old else None, new.base_image
    named = now or was
    if was == now or named is None:
        return []
    return [
        Move(
            image=new.image,
            platform=new.platform,
            kind="base",
            name=named.repository,
            before=was.manifest.digest if was else None,
            after=now.manifest.digest if now else None,
        )
    ]


def _said(pin: Pin | None, other: Pin | None) -> str | None:
    """The version; with the file's digest where only the bytes differ."""
    if pin is None:
        return None
    if other is not None and pin.version == other.version:
        return f"{pin.version} ({pin.sha256[:12]})"
    return pin.version
