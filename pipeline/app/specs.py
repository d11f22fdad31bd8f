"""Specs, patches and locks of images: files that people start and commands complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from pipeline.app.workspace import (
    Workspace,
    host_platform,
    named_platform,
    pick_platform,
    platforms_of,
)
from pipeline.core import log
from pipeline.core.errors import SpecInvalid
from pipeline.core.files import read_limited
from pipeline.core.net.settings import local_folder, named_mirrors
from pipeline.core.sealed import read_or_none
from pipeline.core.yaml_file import mistakes
from pipeline.images.assemble.image import wheel_tree
from pipeline.images.assemble.patch_series import NewPatch, installed_files, new_patch
from pipeline.images.assemble.plan import plan_image
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
from pipeline.images.spec.image import ForeignBase, PatchSpec, parse_foreign
from pipeline.images.spec.new import add_to_series, copy_image, new_image, next_patch_name

_MOST_BYTES = 16 << 20  # of a patch, or of an edited file


class AddedPatch(NamedTuple):
    """A new patch, and the files that were written for it, below the checkout."""

    made: NewPatch
    written: list[Path]


def new_spec(
    workspace: Workspace,
    name: str,
    base: str,
    *,
    copied: bool = False,
    summary: str | None = None,
    requirements: tuple[str, ...] = (),
    platforms: Sequence[str] = (),
) -> Path:
    """Write the spec of an image that adds to a base; returns its file, below the checkout.

    With `copied`, copies the whole spec of the base, to be changed.
    """
    checkout = workspace.checkout()
    if copied:
        return copy_image(checkout, name, base).relative_to(checkout.root)
    chosen: Sequence[str] = [str(named_platform(each)) for each in platforms]
    if not chosen:
        chosen = [host_platform()] if parse_foreign(base) else checkout.spec(base).platforms
    about = summary or f"{base} with changes of our own"
    path = new_image(checkout, name, base, chosen, about, requirements)
    return path.relative_to(checkout.root)


def add_patch(
    workspace: Workspace,
    name: str,
    file: Path,
    *,
    why: str,
    of: str | None = None,
    upstream: Sequence[str] = (),
    no_upstream: str | None = None,
    gate: str | None = None,
    no_gate: str | None = None,
    platform: str | None = None,
) -> AddedPatch:
    """Add a patch to an image: a diff, or an edited copy of the file that `of` names."""
    checkout, store = workspace.checkout(), workspace.store_to_read()
    plan = plan_image(checkout, name, pick_platform(checkout.spec(name), platform))
    with store.in_use():
        files = installed_files(checkout, plan, wheel_tree(store, plan))
        data = read_limited(file, _MOST_BYTES, SpecInvalid)
        made = new_patch(files, data, file.name, of or "")
    # where the image's other patches are
    folder = (checkout.folder(name) / (plan.spec.patches or "patches/x")).parent
    reasons = {"no_upstream": no_upstream, "gate": gate, "no_gate": no_gate}
    body = {
        "file": next_patch_name(folder, file.stem),
        "why": why,
        "upstream": list(upstream),
        **{field: value for field, value in reasons.items() if value},
        "applies_to": made.applies_to,
        "files": [each.model_dump() for each in made.files],
    }
    try:
        spec = PatchSpec.model_validate(body)
    except ValidationError as error:
        hint = (
            "Nothing was written; `sm120 image add-patch --help` has an option for each of these."
        )
        raise SpecInvalid(f"{file.name}: {mistakes(error)}", hint) from error
    written = add_to_series(checkout, plan.spec, spec, made.text)
    return AddedPatch(made, [path.relative_to(checkout.root) for path in written])


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
        folders = tuple(f for m in named_mirrors() if (f := local_folder(m)))
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
        if checkout.written(name) != name:
            full = checkout.written(name)
            raise SpecInvalid(f"{name}: has the lock of {full}", f"`sm120 image lock {full}`")
        for each in platforms_of(checkout.spec(name), platform):
            # `dry_run` does not write a base's lock, but its image must still see it
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
