"""Bring images elsewhere: into Docker, into a folder, or their inputs to a machine offline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.app.images import find_image
from pipeline.app.workspace import Workspace, named_platform, platforms_of
from pipeline.artifacts.oci.layout import export_layout
from pipeline.bootstrap import FOLDER
from pipeline.core import log
from pipeline.evidence.statements.evidence_set import kept_envelopes
from pipeline.images.assemble.image import Built
from pipeline.images.assemble.plan import plan_image
from pipeline.images.fetch.base_settings import BaseSettings
from pipeline.images.fetch.inputs import collect as collect_files
from pipeline.images.fetch.inputs import collect_base, make_fetcher
from pipeline.images.fetch.tool import ToolTarget, collect_tool, own_python
from pipeline.images.lock.model import BasePin, Pin


class Loaded(NamedTuple):
    """An image in Docker."""

    built: Built
    tags: list[str]
    id: str


class Collected(NamedTuple):
    """Files in a folder, and their bytes."""

    files: int
    size_bytes: int

    def __str__(self) -> str:
        return f"{log.count(self.files, 'file')}, {log.size(self.size_bytes)}"


def load_image(
    workspace: Workspace, name: str, tags: Sequence[str] = (), platform: str | None = None
) -> Loaded:
    """Load a built image into the Docker daemon that DOCKER_HOST names."""
    # loads Docker's library, which nothing else in this module needs
    from pipeline.artifacts.containers.docker import Docker, default_tag, moving_tag

    checkout, store = workspace.checkout(), workspace.store_to_read()
    with store.in_use():
        built = find_image(checkout, store, name, platform)
        # by digest first, so that a later image does not take its name away
        names = list(tags) or [default_tag(name, built.digest), moving_tag(name)]
        image_id = Docker().load(store, name, built.digest, names)
    return Loaded(built, names, image_id)


def export_image(
    workspace: Workspace, name: str, folder: Path, platform: str | None = None
) -> Built:
    """Write a built image and its evidence to a new folder, as an OCI layout."""
    checkout, store = workspace.checkout(), workspace.store_to_read()
    with store.in_use():
        built = find_image(checkout, store, name, platform)
        evidence = kept_envelopes(store, name, built.platform, built.digest)
        export_layout(store, built.record, folder, evidence)
    return built


def inputs_of(
    workspace: Workspace, wanted: Sequence[tuple[str, str | None]]
) -> tuple[dict[str, Pin], dict[str, BasePin]]:
    """Map hashes to the locked files that build images, and names to the foreign bases."""
    checkout = workspace.checkout()
    pins: dict[str, Pin] = {}
    foreign: dict[str, BasePin] = {}
    for name, platform in wanted:
        # platforms of the image, not of its base, which may have more
        for each in platforms_of(checkout.spec(name), platform):
            plan = plan_image(checkout, name, each)
            trees = plan.all_trees()
            # by hash: images of one chain share most of their wheels
            pins.update({tree.lock.archive.sha256: tree.lock.archive for tree in trees})
            # what compiles a tree is an image, too
            for part in (plan, *(tree.toolchain for tree in trees)):
                for link in part.chain():
                    pins.update({p.sha256: p for p in link.lock.pins})
                    if link.lock.base_image:
                        foreign[str(link.lock.base_image)] = link.lock.base_image
    return pins, foreign


def collect_images(
    workspace: Workspace,
    names: Sequence[str],
    folder: Path,
    platform: str | None = None,
    *,
    dry_run: bool = False,
    mirrors: tuple[str, ...] = (),
    bases: BaseSettings | None = None,
) -> Collected:
    """Download every locked file of images into a folder."""
    pins, foreign = inputs_of(workspace, [(name, platform) for name in names])
    if dry_run:
        sizes = [p.size_bytes for p in pins.values()]
        sizes += [b.size_bytes for base in foreign.values() for b in base.blobs]
        return Collected(len(sizes), sum(sizes))
    store = workspace.store()
    with store.in_use():
        fetcher = make_fetcher(store, mirrors, False, bases)
        total = collect_files(store, fetcher, list(pins.values()), folder)
        sizes = [n for pin in foreign.values() for n in collect_base(store, fetcher, pin, folder)]
    return Collected(len(pins) + len(sizes), total + sum(sizes))


def collect_own_tool(
    workspace: Workspace, folder: Path, platform: str = "host", python: str | None = None
) -> Collected:
    """Download the wheels that this tool itself is installed from."""
    target = ToolTarget(platform=named_platform(platform) or "", python=python or own_python())
    return Collected(*collect_tool(workspace.checkout().root, target, folder / FOLDER))
