"""An image and a patch of one's own: the files that begin them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from pipeline.app.workspace import Workspace, host_platform, named_platform, pick_platform
from pipeline.core.errors import SpecInvalid
from pipeline.core.files import read_limited
from pipeline.core.yaml_file import mistakes
from pipeline.images.assemble.image import wheel_tree
from pipeline.images.assemble.patch_series import NewPatch, installed, new_patch
from pipeline.images.assemble.plan import plan_image
from pipeline.images.spec.image import PatchSpec, parse_foreign
from pipeline.images.spec.new import add_to_series, copy_image, new_image, next_patch_name

_MOST_BYTES = 16 << 20  # of a patch, or of an edited file


class AddedPatch(NamedTuple):
    """A new patch, and the files that were written for it, below the checkout."""

    made: NewPatch
    written: list[Path]


def copy_spec(workspace: Workspace, name: str, like: str) -> Path:
    """Copy the whole spec of an image, to be changed; returns its file, below the checkout."""
    checkout = workspace.checkout()
    return copy_image(checkout, name, like).relative_to(checkout.root)


def new_spec(
    workspace: Workspace,
    name: str,
    base: str,
    *,
    summary: str | None = None,
    requirements: tuple[str, ...] = (),
    platforms: Sequence[str] = (),
) -> Path:
    """Write the spec of an image that adds to a base; returns its file, below the checkout."""
    checkout = workspace.checkout()
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
    of: str = "",
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
        files = installed(checkout, plan, wheel_tree(store, plan))
        data = read_limited(file, _MOST_BYTES, SpecInvalid)
        made = new_patch(files, data, file.name, of)
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
