"""What a verb works on: the checkout, the store and the platforms; and how it answers."""

from __future__ import annotations

import os
import platform as host
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline import log
from pipeline.errors import NoCheckout, SpecInvalid
from pipeline.spec.checkout import Checkout, find_checkout
from pipeline.store.store import Store, open_store, open_to_read

if TYPE_CHECKING:
    from pipeline.spec.image import ImageSpec


def checkout_of(context: click.Context) -> Checkout:
    """The checkout named by --checkout, else the one around the current folder."""
    chosen: Path | None = context.obj["checkout"]
    # resolved: it is searched upwards, and `.` has no parents
    return find_checkout((chosen or Path.cwd()).resolve())


def checkout_or_none(context: click.Context) -> Checkout | None:
    """The same, for verbs that also work outside a checkout."""
    try:
        return checkout_of(context)
    except NoCheckout:
        return None


def store_of(context: click.Context) -> Store:
    """The store named by --store or SM120_STORE, else the user's own."""
    return open_store(context.obj["store"])


def store_to_read(context: click.Context) -> Store:
    """The same store for a verb that only looks: it may be read-only, or not there yet."""
    return open_to_read(context.obj["store"])


def platforms_of(spec: ImageSpec, chosen: str | None) -> list[str]:
    """The platforms to work on: all of an image's, or the one that was chosen."""
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
    """One platform for verbs about one image: the host's where the image has it."""
    platforms = platforms_of(spec, chosen)
    # an image can be loaded and run here only where it is for this machine
    return host_platform() if chosen is None and host_platform() in platforms else platforms[0]


def named_platform(chosen: str | None) -> str | None:
    """What --platform names, for a verb that has no spec to compare it with."""
    return host_platform() if chosen == "host" else chosen


def host_platform() -> str:
    """This machine, as images name it."""
    # Python names processors as the kernel does, OCI as Go does
    names = {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
    return f"linux/{names.get(host.machine(), host.machine())}"


def own_name() -> str:
    """How to call this command again: by its path where it is not on the user's PATH."""
    here = Path(sys.argv[0])
    # nox puts it on the PATH of its own session alone
    found = None if "NOX_CURRENT_SESSION" in os.environ else shutil.which("sm120")
    if found and here.exists() and here.samefile(found):
        return "sm120"
    # a line that can be pasted: in a checkout, sm120 is often not on the PATH
    if here.name == "sm120" and here.is_absolute() and here.is_relative_to(Path.cwd()):
        return str(here.relative_to(Path.cwd()))
    return "sm120"


def show_moves(
    head: Sequence[str], rows: Sequence[Sequence[object]], dry_run: bool, about: str = ""
) -> None:
    """What locking changed, or would change, as a table."""
    if not rows:
        return click.echo("nothing would change" if dry_run else "locked; nothing changed")
    verb = "would change" if dry_run else "changed"
    click.echo(f"{log.table(head, rows)}\n\n{len(rows)} {verb}{about}")


def say_bytes(data: bytes) -> None:
    """Bytes of others on stdout: as they are for a program, and on a terminal nothing that acts."""
    if sys.stdout.isatty():
        click.echo(data.decode(errors="replace"), nl=False)
    else:
        click.echo(data, nl=False)
    sys.stdout.flush()


def say_json(value: Any) -> None:
    """A result for programs, on stdout."""
    # sorted: two results can be compared with diff
    click.echo(log.json_text(value, indent=2, sort_keys=True))
