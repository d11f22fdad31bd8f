"""The options that name another host, and the connection to it."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from pipeline import log
from pipeline.cli.context import checkout_of
from pipeline.cli.options import all_of
from pipeline.errors import NothingServed, WeightsUnknown
from pipeline.host.fleet.playbook import connection_of
from pipeline.host.fleet.tunnel import Tunnel, open_tunnel, plain_connection
from pipeline.serve.container_engine import ContainerEngine
from pipeline.serve.find_engine import Wanted, find_engine, find_engines
from pipeline.serve.run import find_among
from pipeline.serve.site import HERE, Site, find_there

_OPTIONS = (
    click.option(
        "--on",
        metavar="HOST",
        help="Another host, over SSH: user@host, or a name of the inventory.",
    ),
    click.option(
        "-i",
        "--inventory",
        "inventories",
        multiple=True,
        help="Ansible inventory that names HOST. Repeatable.",
    ),
)


@dataclass(frozen=True)
class OnHost:
    """A host as the user names it."""

    host: str
    inventories: tuple[str, ...] = ()

    def words(self) -> str:
        """The same options once more, for a command that a user may type next."""
        return " ".join(["--on", self.host, *(f"-i {shlex.quote(i)}" for i in self.inventories)])


def on_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Which machine; the command gets it as `on`, none for this one."""

    @all_of(_OPTIONS)
    @functools.wraps(command)
    def packed(*args: Any, on: str | None, inventories: tuple[str, ...], **rest: Any) -> Any:
        if inventories and not on:
            raise click.UsageError("-i names the inventory of a host: add --on HOST")
        return command(*args, on=OnHost(on, inventories) if on else None, **rest)

    return packed


@contextmanager
def machine_on(
    context: click.Context, on: OnHost | None, wanted: Wanted, holding: str | None = None
) -> Iterator[tuple[Site, ContainerEngine]]:
    """The machine that is meant and its container engine, for as long as the block lasts.

    Of several engines that are meant it is the one that has the container of the recipe `holding`.
    """
    if on is None:
        yield HERE, _holder(find_engines(wanted), holding) if holding else find_engine(wanted)
        return
    with _connected(context, on) as tunnel:
        site, engine = find_there(tunnel, on.host, wanted)
        log.say(f"{on.host}: {site.kind} answers")
        yield site, engine


@contextmanager
def machine_of_all(
    context: click.Context, on: OnHost | None, wanted: Wanted
) -> Iterator[tuple[Site, list[ContainerEngine]]]:
    """The same with every container engine that is meant: what is served may be in either."""
    if on is None:
        yield HERE, find_engines(wanted)
        return
    with machine_on(context, on, wanted) as (site, engine):
        yield site, [engine]


def _holder(engines: list[ContainerEngine], recipe: str) -> ContainerEngine:
    with suppress(NothingServed):
        return find_among(engines, recipe)[0]
    return engines[0]


@contextmanager
def _connected(context: click.Context, on: OnHost) -> Iterator[Tunnel]:
    if on.inventories:
        with log.step(f"Asking Ansible how {on.host} is reached"):
            connection = connection_of(checkout_of(context), on.inventories, on.host)
    else:
        connection = plain_connection(on.host)
    with open_tunnel(connection) as tunnel:
        yield tunnel


def folder_on(on: OnHost | None, folder: Path | None, option: str) -> str | None:
    """A folder as a whole path; on another host it is looked at there."""
    if folder is None:
        return None
    if on is None and not folder.is_dir():
        raise WeightsUnknown(f"{folder}: is not a folder", f"Name one with {option} DIR.")
    if on is None:
        return str(folder.resolve())
    if not folder.is_absolute():
        raise click.UsageError(f"{option}: write the whole path of a folder of {on.host}")
    return str(folder)
