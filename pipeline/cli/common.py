"""What several commands share: finding the checkout, the store and the sources; JSON out."""

from __future__ import annotations

import functools
import json
import platform as host
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pipeline.errors import SpecInvalid

if TYPE_CHECKING:
    from pipeline.spec.checkout import Checkout
    from pipeline.spec.image import ImageSpec
    from pipeline.store.store import Store

Command = TypeVar("Command", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Answer as JSON.")
offline_option = click.option(
    "--offline", is_flag=True, envvar="SM120_OFFLINE", help="Ask no server; use store and folders."
)
mirror_option = click.option(
    "--mirror",
    "mirrors",
    multiple=True,
    help="A folder or address that may hold locked files, tried first. Repeatable [SM120_MIRRORS].",
)
platform_option = click.option(
    "--platform",
    type=click.Choice(["linux/amd64", "linux/arm64", "host"]),
    help="Which platform, where an image has several. `host` is this machine's.",
)


def base_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Where foreign base images may be fetched from; the command gets them as `bases`."""

    @click.option(
        "--base-registry",
        "registries",
        metavar="REGISTRY[/PREFIX]",
        multiple=True,
        envvar="SM120_BASE_REGISTRIES",
        help="Where foreign base images are. Repeatable; asked in order [SM120_BASE_REGISTRIES].",
    )
    @click.option(
        "--ca",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="That registry's own CA, besides the system's and Docker's certs.d.",
    )
    @click.option("--insecure-http", is_flag=True, help="Speak plain http to that registry.")
    @functools.wraps(command)
    def packed(
        *args: Any, registries: tuple[str, ...], ca: Path | None, insecure_http: bool, **rest: Any
    ) -> Any:
        from pipeline.fetch.base import BaseSettings
        from pipeline.registry.client import Access

        access = Access(ca_file=ca, insecure_http=insecure_http)
        return command(*args, bases=BaseSettings(registries=registries, access=access), **rest)

    return packed


def checkout_of(context: click.Context) -> Checkout:
    """The checkout named by --checkout, else the one around the current folder."""
    from pipeline.spec.checkout import find_checkout

    chosen: Path | None = context.obj["checkout"]
    return find_checkout((chosen or Path.cwd()).resolve())


def store_of(context: click.Context) -> Store:
    """The store named by --store or SM120_STORE, else the user's own."""
    from pipeline.store.store import open_store

    return open_store(context.obj["store"])


def store_to_read(context: click.Context) -> Store:
    """The same store for a command that only looks: it may be read-only, or not there yet."""
    from pipeline.store.store import open_to_read

    return open_to_read(context.obj["store"])


def platforms_of(spec: ImageSpec, chosen: str | None) -> list[str]:
    """The platforms to work on: all of an image's, or the one that was chosen."""
    if chosen is None:
        return list(spec.platforms)
    wanted = host_platform() if chosen == "host" else chosen
    if wanted not in spec.platforms:
        raise SpecInvalid(
            f"{spec.name}: is not for {wanted} (only {', '.join(spec.platforms)})",
            "Choose one of its platforms, or leave --platform out.",
        )
    return [wanted]


def host_platform() -> str:
    """This machine, as images name it."""
    names = {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
    return f"linux/{names.get(host.machine(), host.machine())}"


def pick_platform(spec: ImageSpec, chosen: str | None) -> str:
    """One platform for commands about one image: the host's where the image has it."""
    found = platforms_of(spec, chosen)
    return host_platform() if chosen is None and host_platform() in found else found[0]


def own_name() -> str:
    """How to call this command again: by its path where it lies below the current folder."""
    here = Path(sys.argv[0])
    if here.name == "sm120" and here.is_absolute() and here.is_relative_to(Path.cwd()):
        return str(here.relative_to(Path.cwd()))
    return "sm120"


def say_json(value: Any) -> None:
    """A result for programs, on stdout."""
    click.echo(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False))
