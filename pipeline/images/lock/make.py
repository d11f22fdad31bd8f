"""The only step that may ask "what is newest": a spec in, a lock out."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.core.errors import BaseUnplaced
from pipeline.images.lock.debs import Get, resolve_debs
from pipeline.images.lock.model import BasePin, DebPin, ImageLock, read_lock, sealed
from pipeline.images.lock.release import DEBIAN_12_KEYRING
from pipeline.images.lock.wheels import SizeFinder, resolve_wheels
from pipeline.images.spec.base import ForeignBase
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import ImageSpec

FindBase = Callable[[ForeignBase, str], BasePin]


@dataclass(frozen=True)
class Transport:
    """How a lock reaches the outside; where that is, is configuration."""

    debian: Get
    debian_security: Get
    wheel_size: SizeFinder
    index_args: Sequence[str] = ()
    index_env: Mapping[str, str] = field(default_factory=dict)
    keyring: Path = DEBIAN_12_KEYRING
    find_base: FindBase | None = None


def make_lock(
    checkout: Checkout,
    name: str,
    platform: str,
    ask: Transport,
    fresh: Mapping[str, ImageLock] | None = None,
) -> ImageLock:
    """Resolve one image for one platform. What it stands on is locked already, or `fresh`."""
    chain = checkout.chain(name, platform)
    spec = chain[-1]
    # a base that is locked in the same run is not in its file yet
    below = [
        (fresh or {}).get(link.name) or read_lock(checkout.lock_path(link.name, platform))
        for link in chain[:-1]
    ]
    wheels = []
    if spec.python:
        # uv reads its requirements from a file and writes its answer to one
        with tempfile.TemporaryDirectory() as scratch:
            wheels = resolve_wheels(
                spec.python,
                platform,
                ask.wheel_size,
                ask.index_args,
                Path(scratch),
                ask.index_env,
                needs_cuda=any(link.cuda for link in chain),
            )
    base_seal = below[-1].seal if below else None
    base = None
    if spec.foreign is not None:
        if ask.find_base is None:
            raise BaseUnplaced(f"{spec.foreign}: the base of {spec.name} cannot be looked up")
        base = ask.find_base(spec.foreign, platform)
    debs = _debs(chain, below, platform, ask)
    return sealed(name, platform, spec.lock_digest(), base_seal, wheels, debs, base)


def _debs(
    chain: list[ImageSpec], below: list[ImageLock], platform: str, ask: Transport
) -> list[DebPin]:
    """The image's .debs and what they need, without those its base already has."""
    debian, spec = chain[0].debian, chain[-1]
    if not spec.debs or debian is None:
        return []
    in_base = {pin.name for lock in below for pin in lock.debs}
    suites = [(debian.suite, ask.debian)]
    if debian.security:
        suites.append((f"{debian.suite}-security", ask.debian_security))
    # resolved together with what the base has: its packages may already satisfy a dependency
    wanted, exclude = sorted({*spec.debs, *in_base}), list(debian.exclude)
    architecture = platform.partition("/")[2]
    pins = resolve_debs(wanted, exclude, suites, debian.components, architecture, ask.keyring)
    return [pin for pin in pins if pin.name not in in_base]
