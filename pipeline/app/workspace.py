"""The checkout and the store that a function works on, and the platforms of images."""

from __future__ import annotations

import platform as host
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.errors import NoCheckout, SpecInvalid

if TYPE_CHECKING:
    from pipeline.artifacts.store.store import Store
    from pipeline.images.spec.checkout import Checkout
    from pipeline.images.spec.image import ImageSpec


@dataclass(frozen=True)
class Workspace:
    """A checkout with specs and locks, and a store; each is opened when a function needs it."""

    checkout_path: Path | None = None  # else the one around the current folder
    store_path: Path | None = None  # else that of SM120_STORE, or the user's own

    # the modules below read YAML, which `sm120 --help` need not wait for

    def checkout(self) -> Checkout:
        """The checkout; raises if there is none."""
        from pipeline.images.spec.checkout import find_checkout

        # resolved: it is searched upwards, and `.` has no parents
        return find_checkout((self.checkout_path or Path.cwd()).resolve())

    def checkout_or_none(self) -> Checkout | None:
        """The checkout, or None, for commands that also work outside one."""
        try:
            return self.checkout()
        except NoCheckout:
            return None

    def store(self) -> Store:
        """The store, created if missing."""
        from pipeline.artifacts.store.store import open_store

        return open_store(self.store_path)

    def store_to_read(self) -> Store:
        """The same store for reading only: it may be read-only, or not exist yet."""
        from pipeline.artifacts.store.store import open_to_read

        return open_to_read(self.store_path)

    def store_root(self) -> Path:
        """Where the store is; opens nothing."""
        from pipeline.artifacts.store.store import default_root

        return self.store_path or default_root()


def platforms_of(spec: ImageSpec, chosen: str | None) -> list[str]:
    """The platforms to work on: all of an image's, or the chosen one."""
    if chosen is None:
        return list(spec.platforms)
    platform = named_platform(chosen)
    if platform not in spec.platforms:
        raise SpecInvalid(
            f"{spec.name}: is not for {platform} (only {', '.join(spec.platforms)})",
            "Choose one of its platforms, or leave --platform out.",
        )
    return [str(platform)]


def pick_platform(spec: ImageSpec, chosen: str | None) -> str:
    """Pick a platform of an image: the chosen one, else the host's, else the first."""
    platforms = platforms_of(spec, chosen)
    # this machine can load and run only images for its own platform
    return host_platform() if chosen is None and host_platform() in platforms else platforms[0]


def named_platform(chosen: str | None) -> str | None:
    """Read --platform where there is no spec to compare it with."""
    return host_platform() if chosen == "host" else chosen


def host_platform() -> str:
    """This machine, as images name it."""
    # Python names processors as the kernel does, OCI as Go does
    names = {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
    return f"linux/{names.get(host.machine(), host.machine())}"
