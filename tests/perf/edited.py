"""A checkout of our own in which one line is edited, as a person would."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGINE = "sglang-k2"
PATCH = "0001-extend-attention-sm120-blocks.patch"


def copy_checkout(target: Path) -> Path:
    """A checkout of our own to edit a patch in."""
    for name in ("images", "lockfiles"):
        shutil.copytree(ROOT / name, target / name)
    return target


def edit_patch(checkout: Path, words: str) -> None:
    """Change one added line of the engine's patch: a comment."""
    path = checkout / "images" / ENGINE / "patches" / PATCH
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    at = next(i for i, x in enumerate(lines) if x.startswith("+") and "#" in x)
    lines[at] = lines[at].split("#")[0] + f"# {words}\n"
    path.write_text("".join(lines), encoding="utf-8")
