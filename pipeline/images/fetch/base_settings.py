"""Where foreign base images may be: what options say, before anything is looked up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.artifacts.registry.access import Access


@dataclass(frozen=True)
class BaseSettings:
    """Where foreign bases may be: folders with blobs, and registries by name."""

    folders: tuple[Path, ...] = ()
    registries: tuple[str, ...] = ()  # REGISTRY or REGISTRY/PREFIX
    access: Access | None = None
    jobs: int = 4
