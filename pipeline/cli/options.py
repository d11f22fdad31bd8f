"""Options that several verbs share, so that one word means one thing everywhere."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from pipeline.fetch.base_settings import BaseSettings
from pipeline.fit.units import read_card_size, read_size, read_tokens
from pipeline.oci.reference import Reference, parse_repository
from pipeline.registry.access import Access

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class LayerSettings:
    """Where compiled layers may be taken from, and whose signature counts."""

    repository: Reference
    trust_path: Path | None


class _AnyPath(click.Path):
    """A path that need not be there; an empty one, as of an unset variable, would mean here."""

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str | bytes | os.PathLike[str]:
        """As it was typed."""
        if value == "":
            self.fail("the path is empty", param, ctx)
        return super().convert(value, param, ctx)


# checked while the options are parsed, before anything is downloaded or asked
EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
EXISTING_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
ANY_PATH = _AnyPath(path_type=Path)


class Size(click.ParamType[int]):
    """An amount of bytes such as 96GiB; where it is `bare`, a plain number will do."""

    name = "size"

    def __init__(self, *, bare: bool = False) -> None:
        self._bare = bare

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Bytes."""
        try:
            return read_size(str(value), bare=self._bare)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class CardSize(Size):
    """A card's memory such as 96GB, which is how 96 GiB are sold."""

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Bytes."""
        try:
            return read_card_size(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Tokens(click.ParamType[int]):
    """A number of tokens such as 131072 or 128k."""

    name = "tokens"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Tokens."""
        try:
            return read_tokens(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Rate(Size):
    """A bandwidth such as 200MB/s."""

    name = "rate"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Bytes a second."""
        try:
            return super().convert(str(value).removesuffix("/s"), param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} is not a rate; write it like 200MB/s", param, ctx)


class Numbers(click.ParamType[list[int]]):
    """Numbers such as 1,2,8."""

    name = "numbers"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        """In the order that was typed."""
        if isinstance(value, list):
            return value
        try:
            numbers = [int(part) for part in str(value).split(",")]
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 1,2,8", param, ctx)
        if min(numbers) < 1:
            self.fail("must be 1 or more", param, ctx)
        return numbers


class _Mirror(click.Path):
    """An address, or a folder that is there: one that is not would be passed over in silence."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As it was typed."""
        if "://" not in str(value):
            super().convert(Path(value).expanduser(), param, ctx)
        return value


def is_address(target: str) -> bool:
    """Whether a RECIPE|URL is a server's address: names of recipes have neither sign."""
    return ":" in target or "/" in target


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
offline_option = click.option(
    "--offline",
    is_flag=True,
    # the environment, too, so that a CI job can forbid the network for all of its commands
    envvar="SM120_OFFLINE",
    help="Use the store and folders only, no network [SM120_OFFLINE].",
)

mirror_option = click.option(
    "--mirror",
    "mirrors",
    multiple=True,
    # what may be read shows when it is: access(2) asks for the real user, not for capabilities
    type=_Mirror(exists=True, file_okay=False, readable=False),
    metavar="FOLDER|URL",
    help="Look for locked files here first. Repeatable [SM120_MIRRORS].",
)
# no other platform has NVIDIA wheels for Linux
PLATFORM = click.Choice(["linux/amd64", "linux/arm64", "host"])
platform_option = click.option(
    "--platform",
    type=PLATFORM,
    help="Platform of the image; `host` is that of this machine.",
)
key_option = click.option(
    "--key",
    "key_path",
    type=ANY_PATH,
    help="Private key to sign with [SM120_SIGNING_KEY, SM120_SIGNING_AGENT].",
)
trust_option = click.option(
    "--trust",
    "trust_path",
    envvar="SM120_TRUST",
    type=ANY_PATH,
    help="Trust file [SM120_TRUST; default: lockfiles/trust.yaml, your own file and keys].",
)
look_in_option = click.option(
    "--look-in",
    "folders",
    multiple=True,
    type=EXISTING_FOLDER,
    help="Folder of runs, weights, host facts, recipes or a layout, for a benchmark. Repeatable.",
)
locking_dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Show what would change and write nothing."
)
# for CI: fails when somebody edited a spec and forgot to lock
lock_check_option = click.option(
    "--check", is_flag=True, help="Only check that locks match their specs; needs no network."
)


def jobs_option(help_text: str, most: int, default: int | None = None) -> Callable[[Any], Any]:
    """How many things a verb does at the same time."""
    option: Callable[[Any], Any] = click.option(
        "--jobs",
        type=click.IntRange(1, most),
        default=default,
        show_default=default is not None,
        help=help_text,
    )
    return option


def all_of(options: Sequence[Callable[[Any], Any]]) -> Callable[[Command], Command]:
    """Several options as one decorator, listed in this order."""

    def add(command: Command) -> Command:
        # decorators apply from the bottom up, and click lists options from the top down
        for option in reversed(options):
            command = option(command)
        return command

    return add


def registry_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How a registry is reached; the command gets it as `access` and `jobs`."""
    with_jobs = jobs_option("Parallel transfers.", most=32, default=4)
    reached: Callable[..., Any] = with_jobs(access_options(command))
    return reached


def layers_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Where compiled layers may be taken from; the command gets it as `layers`."""

    @click.option(
        "--layers-from",
        "place",
        metavar="REGISTRY/REPO",
        envvar="SM120_LAYERS_FROM",
        help="Take what `sm120 source publish` put there, if a trusted key signed it, instead of"
        " compiling it [SM120_LAYERS_FROM].",
    )
    @trust_option
    @functools.wraps(command)
    def packed(*args: Any, place: str | None, trust_path: Path | None, **rest: Any) -> Any:
        # an unset variable of a CI job is empty
        layers = LayerSettings(parse_repository(place), trust_path) if place else None
        return command(*args, layers=layers, **rest)

    return packed


def base_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Where foreign base images are fetched from; the command gets it as `bases`."""

    @click.option(
        "--base-registry",
        "registries",
        metavar="REGISTRY[/PREFIX]",
        multiple=True,
        envvar="SM120_BASE_REGISTRIES",
        help="Registry of foreign base images. Repeatable, in order [SM120_BASE_REGISTRIES].",
    )
    @access_options
    @functools.wraps(command)
    def packed(*args: Any, registries: tuple[str, ...], access: Access, **rest: Any) -> Any:
        return command(*args, bases=BaseSettings(registries=registries, access=access), **rest)

    return packed


def access_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How a registry is reached; the command gets it as `access`."""

    @click.option(
        "--ca",
        type=EXISTING_FILE,
        help="CA of the registry, besides the system's and Docker's certs.d.",
    )
    @click.option("--insecure-http", is_flag=True, help="Use plain HTTP for the registry.")
    @functools.wraps(command)
    def packed(*args: Any, ca: Path | None, insecure_http: bool, **rest: Any) -> Any:
        access = Access(ca_file=ca, insecure_http=insecure_http)
        return command(*args, access=access, **rest)

    return packed
