"""Lock images: look up exact versions and hashes, and write them down."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.app.workspace import Workspace, platforms_of
from pipeline.core import log
from pipeline.core.errors import SpecInvalid
from pipeline.core.net.settings import folder_of, named_mirrors
from pipeline.core.sealed import read_or_none
from pipeline.images.fetch.base import Bases
from pipeline.images.fetch.base_settings import BaseSettings
from pipeline.images.fetch.inputs import make_transport
from pipeline.images.lock.make import make_lock
from pipeline.images.lock.model import (
    BasePin,
    ImageLock,
    Move,
    current_lock,
    diff_locks,
    pylock,
    read_lock,
    requirements,
    write_lock,
)
from pipeline.images.spec.image import ForeignBase


def lock_images(
    workspace: Workspace,
    names: tuple[str, ...] = (),
    platform: str | None = None,
    *,
    dry_run: bool = False,
    bases: BaseSettings | None = None,
) -> list[Move]:
    """Look up exact versions and hashes of images, and write their locks; returns what changed."""
    checkout = workspace.checkout()

    def find_base(base: ForeignBase, platform: str) -> BasePin:
        # first in the store and in folders that SM120_MIRRORS names
        folders = tuple(f for m in named_mirrors() if (f := folder_of(m)))
        settings = replace(bases or BaseSettings(), folders=folders)
        # opened late: most images have no foreign base, and need no store
        return Bases(workspace.store(), settings).resolve(base, platform)

    def depth(name: str) -> int:
        # how many images it is based on, the same on every platform
        return len(checkout.chain(name, checkout.spec(name).platforms[0]))

    moves: list[Move] = []
    transport = replace(make_transport(), find_base=find_base)
    fresh: dict[str, dict[str, ImageLock]] = {}
    # base images before those that are based on them, whose locks name theirs
    for name in sorted({*(names or checkout.images())}, key=lambda n: (depth(n), n)):
        for each in platforms_of(checkout.spec(name), platform):
            # with `dry_run` the lock of a base is not written, and its image must still see it
            known, path = fresh.setdefault(each, {}), checkout.lock_path(name, each)
            with log.step(f"Locking {name} for {each}"):
                known[name] = make_lock(checkout, name, each, transport, known)
                moves += diff_locks(read_or_none(read_lock, path), known[name])
                if not dry_run:
                    write_lock(path, known[name])
    return moves


def check_locks(
    workspace: Workspace, names: tuple[str, ...] = (), platform: str | None = None
) -> list[dict[str, Any]]:
    """Check that locks match their specs; needs no network."""
    checkout, rows = workspace.checkout(), []
    for name in names or tuple(checkout.images()):
        spec = checkout.spec(name)
        for each in platforms_of(spec, platform):
            current = current_lock(checkout, spec.on(each), each)
            counts = {"wheels": len(current.wheels), "debs": len(current.debs)}
            rows.append({"image": name, "platform": each, "seal": current.seal, **counts})
    return rows


def export_lock(
    workspace: Workspace, names: tuple[str, ...], platform: str | None, form: str
) -> str:
    """The locked wheels of one image for other tools: `pylock` or `requirements`."""
    checkout = workspace.checkout()
    # both formats describe one environment
    if len(names) != 1:
        raise SpecInvalid(
            "--export takes exactly one image", "sm120 image lock IMAGE --export pylock"
        )
    file = checkout.spec(names[0])
    chosen = platforms_of(file, platform)[0]
    spec = file.on(chosen)
    current = current_lock(checkout, spec, chosen)
    if spec.python is None:
        raise SpecInvalid(
            f"{spec.name}: has no wheels to export",
            "Name an image with `python:` in its spec, such as its base.",
        )
    return requirements(current) if form == "requirements" else pylock(current, spec.python)
