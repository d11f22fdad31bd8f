"""An image and a patch of one's own: the files that begin them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from pydantic import ValidationError

from pipeline.assemble.image import wheel_tree
from pipeline.assemble.patch_series import (
    Installed,
    NewPatch,
    from_copy,
    from_diff,
    installed,
    is_diff,
)
from pipeline.assemble.plan import plan_image
from pipeline.cli.context import checkout_of, host_platform, own_name, pick_platform, store_to_read
from pipeline.cli.options import EXISTING_FILE, PLATFORM, platform_option
from pipeline.errors import SpecInvalid
from pipeline.files import read_limited
from pipeline.spec.base import parse_foreign
from pipeline.spec.checkout import Checkout
from pipeline.spec.image import PatchSpec
from pipeline.spec.new import add_to_series, copy_image, new_image, next_patch_name
from pipeline.yaml_file import mistakes

_MOST_BYTES = 16 << 20  # of a patch, or of an edited file


@click.command()
@click.argument("name", metavar="IMAGE")
@click.option("--base", metavar="IMAGE", help="Image that it stands on, as it is.")
@click.option("--like", metavar="IMAGE", help="Image whose whole spec is copied, to be changed.")
@click.option("--summary", help="One sentence about it.")
@click.option(
    "--require",
    "requirements",
    multiple=True,
    metavar="REQUIREMENT",
    help="Wheel to add, such as torch==2.13.0. Repeatable.",
)
@click.option(
    "--platform",
    "platforms",
    multiple=True,
    type=PLATFORM,
    help="Platform that it is for [default: those of its base]. Repeatable.",
)
@click.pass_context
def new(
    context: click.Context,
    name: str,
    base: str | None,
    like: str | None,
    summary: str | None,
    requirements: tuple[str, ...],
    platforms: tuple[str, ...],
) -> None:
    """Write images/IMAGE/image.yaml for an image of your own.

    With --base it holds all that the base holds, starts as it does, and adds to it: wheels,
    files, patches. With --like it is a copy of the spec, to change versions in.
    """
    checkout = checkout_of(context)
    if (base is None) == (like is None):
        raise click.UsageError("name one of --base and --like")
    if like and (summary or requirements or platforms):
        option = "--require" if requirements else "--platform" if platforms else "--summary"
        raise click.UsageError(f"{option} goes with --base; a copy (--like) is changed in its file")
    if like:
        path = copy_image(checkout, name, like)
    else:
        assert base is not None
        named = [host_platform() if each == "host" else each for each in platforms]
        chosen = named or _platforms(checkout, base)
        about = summary or f"{base} with changes of our own"
        path = new_image(checkout, name, base, chosen, about, requirements)
    click.echo(f"{path.relative_to(checkout.root)} is written; change in it what you like")
    click.echo(f"Next: {own_name()} image lock {name}")
    click.echo(f"      {own_name()} build {name} --accept")


def _platforms(checkout: Checkout, base: str) -> Sequence[str]:
    return [host_platform()] if parse_foreign(base) else checkout.spec(base).platforms


@click.command()
@click.argument("name", metavar="IMAGE")
@click.argument("file", metavar="FILE", type=EXISTING_FILE)
@click.option("--of", metavar="PATH", default="", help="File of the image that FILE is a copy of.")
@click.option("--why", required=True, help="What breaks without the patch, or what it is for.")
@click.option("--upstream", multiple=True, metavar="URL", help="Issue or pull request. Repeatable.")
@click.option("--no-upstream", metavar="REASON", help="Why it is nothing for upstream.")
@click.option("--gate", metavar="NAME", help="Case file that fails without it, without `.yaml`.")
@click.option("--no-gate", metavar="REASON", help="Why no gate can judge it.")
@platform_option
@click.pass_context
def add_patch(
    context: click.Context,
    name: str,
    file: Path,
    of: str,
    why: str,
    upstream: tuple[str, ...],
    no_upstream: str | None,
    gate: str | None,
    no_gate: str | None,
    platform: str | None,
) -> None:
    """Add a patch to an image: FILE is a diff, or an edited copy of the file that --of names.

    Writes the patch, its entry in series.yaml with the hashes before and after, and `patches` in
    image.yaml. A diff may come from upstream's repository: paths are found among the installed
    files, and what no wheel of the image has, such as tests, is left out. `sm120 image cat IMAGE
    PATH` prints the file to start from.
    """
    checkout, store = checkout_of(context), store_to_read(context)
    plan = plan_image(checkout, name, pick_platform(checkout.spec(name), platform))
    with store.in_use():
        files = installed(checkout, plan, wheel_tree(store, plan))
        made = _patch(files, file, of)
    # where the image's other patches lie
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
    for foreign in made.left_out:
        click.echo(f"left out, as no wheel of the image has it: {foreign}")
    for each in made.files:
        click.echo(f"changes {each.path} of {made.applies_to}")
    for path in written:
        click.echo(f"wrote {path.relative_to(checkout.root)}")
    click.echo(f"Next: {own_name()} build {name} --accept")


def _patch(files: Installed, file: Path, of: str) -> NewPatch:
    """The change that a file stands for: a diff, or a copy that was edited."""
    data = read_limited(file, _MOST_BYTES, SpecInvalid)
    text = data.decode(errors="replace")
    if of and not is_diff(text):
        return from_copy(files, data, file.name, of)
    return from_diff(files, text, file.name, of)
