"""Where a checkout is; apart from what reads one, which takes a second to load."""

from __future__ import annotations

from pathlib import Path


def checkout_above(start: Path) -> Path | None:
    """The nearest folder upwards that has `images/` and `lockfiles/`."""
    # both: many projects have an images/ folder
    wanted = ("images", "lockfiles")
    above = (start, *start.parents)
    return next((x for x in above if all((x / name).is_dir() for name in wanted)), None)
