"""Options that several verbs share, so that one word means one thing everywhere."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pipeline import app
from pipeline.artifacts.oci.reference import parse_repository
from pipeline.artifacts.registry.access import Access
from pipeline.images.fetch.base_settings import BaseSettings
from pipeline.serving.fit.units import read_card_size, read_size, read_tokens

if TYPE_CHECKING:
    from pipeline.app.sources import LayerSettings

Command = TypeVar("Command", bound=Callable[..., Any])


class _AnyPath(click.Path):
    """A path that need not be there; an empty one, as of an unset variable, would mean here."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As it was typed."""
        if value == "":
            self.fail("the path is empty", param, ctx)
        return super().convert(value, param, ctx)


# checked while the options are parsed, before anything is downloaded or asked
EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
EXISTING_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
ANY_PATH = _AnyPath(path_type=Path)
many_option = functools.partial(click.option, multiple=True)
path_option = functools.partial(click.option, type=ANY_PATH)
file_option = functools.partial(click.option, type=EXISTING_FILE)


class Read(click.ParamType[Any]):
    """A value that a function reads from text; a ValueError becomes a usage error."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value; one that was read before stays."""
        try:
            return self._read(str(value)) if not isinstance(value, list | tuple) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _rate(text: str) -> int:
    try:
        return read_size(text.removesuffix("/s"), bare=True)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a rate; write it like 200MB/s") from error


SIZE = Read("size", read_size)  # an amount of bytes such as 96GiB
PLAIN_SIZE = Read("size", functools.partial(read_size, bare=True))  # a plain number will do, too
CARD_SIZE = Read("size", read_card_size)  # such as 96GB, which is how 96 GiB are sold
TOKENS = Read("tokens", read_tokens)  # such as 131072 or 128k
RATE = Read("rate", _rate)  # bytes a second, such as 200MB/s


class Numbers(click.ParamType[Any]):
    """Numbers with commas, in the order that was typed, none of them less than the least."""

    name = "numbers"

    def __init__(self, example: str, least: float = 0, kind: type[int] | type[float] = int) -> None:
        self._example, self._least, self._kind = example, least, kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The list; one that was read before stays."""
        if isinstance(value, list):
            return value
        try:
            found = [self._kind(part) for part in str(value).split(",")]
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as {self._example}", param, ctx)
        # also not a number, which compares with nothing
        if not all(each >= self._least for each in found):
            self.fail(f"each must be {self._least:g} or more", param, ctx)
        return found


def _different(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    from pipeline.serving.recipe.container import MOST_GPUS

    if value is not None and (len({*value}) != len(value) or max(value) >= MOST_GPUS):
        raise click.BadParameter(f"name different GPUs, each below {MOST_GPUS}", context, parameter)
    return value and tuple(value)


COUNTS = Numbers("1,2,8", least=1)


class Duration(click.ParamType[Any]):
    """A time such as 90s, 30m or 8h, in seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The seconds; a number that was read before stays."""
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([smh])", str(value).strip())
        seconds = float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]] if found else 0.0
        if not seconds:
            self.fail(f"{value!r} is not a time such as 90s, 30m or 8h", param, ctx)
        return seconds


DURATION = Duration()


class _Mirror(click.Path):
    """An address, or a folder that is there: one that is not would be passed over in silence."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As it was typed."""
        if "://" not in str(value):
            super().convert(Path(value).expanduser(), param, ctx)
        return value


def command(function: Callable[..., Any]) -> click.Command:
    """A command whose function gets the workspace first, then its options."""
    return click.command()(click.pass_obj(function))


def query(function: Callable[..., Any]) -> click.Command:
    """The same for a command that answers a question, which programs ask with --json."""
    made = command(function)
    made.params.append(click.Option(["--json", "as_json"], is_flag=True, help=_JSON))
    return made


def flag_option(*names: str, help: str) -> Callable[[Command], Command]:
    """An option that is on or off."""
    return click.option(*names, is_flag=True, help=help)


_JSON = "Print the result as JSON."
json_option = flag_option("--json", "as_json", help=_JSON)
offline_option = click.option(
    "--offline",
    is_flag=True,
    # the environment, too, so that a CI job can forbid the network for all of its commands
    envvar="SM120_OFFLINE",
    help="Use the store and folders only, no network [SM120_OFFLINE].",
)

mirror_option = many_option(
    "--mirror",
    "mirrors",
    # what may be read shows when it is: access(2) asks for the real user, not for capabilities
    type=_Mirror(exists=True, file_okay=False, readable=False),
    metavar="FOLDER|URL",
    help="Look for locked files here first. Repeatable [SM120_MIRRORS].",
)
# no other platform has NVIDIA wheels for Linux
PLATFORM = click.Choice(["linux/amd64", "linux/arm64", "host"])
platform_option = click.option(
    "--platform", type=PLATFORM, help="Platform of the image; `host` is that of this machine."
)
key_option = path_option(
    "--key", "key_path", help="Private key to sign with [SM120_SIGNING_KEY, SM120_SIGNING_AGENT]."
)
trust_option = path_option(
    "--trust",
    "trust_path",
    envvar="SM120_TRUST",
    help="Trust file [SM120_TRUST; default: lockfiles/trust.yaml, your own file and keys].",
)
look_in_option = many_option(
    "--look-in",
    "folders",
    type=EXISTING_FOLDER,
    help="Folder of runs, weights, host facts, recipes or a layout, for a benchmark. Repeatable.",
)
locking_dry_run_option = flag_option("--dry-run", help="Show what would change and write nothing.")
# for CI: fails when somebody edited a spec and forgot to lock
lock_check_option = flag_option(
    "--check", help="Only check that locks match their specs; needs no network."
)


def jobs_option(help_text: str, most: int, default: int | None = None) -> Callable[[Any], Any]:
    """How many things a verb does at the same time."""
    option: Callable[[Any], Any] = click.option(
        "--jobs", type=click.IntRange(1, most), default=default, help=help_text
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


def packed(
    name: str, make: Callable[..., Any], *given: Callable[[Any], Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Several options as one value: the command gets what `make` makes of them, under a name."""
    taken = [*inspect.signature(make).parameters]

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @all_of(given)
        @functools.wraps(command)
        def run(*args: Any, **rest: Any) -> Any:
            value = make(**{each: rest.pop(each) for each in taken})
            return command(*args, **{name: value}, **rest)

        return run

    return add


def _layers(place: str | None, trust_path: Path | None) -> LayerSettings | None:
    # an unset variable of a CI job is empty
    return app.sources.LayerSettings(parse_repository(place), trust_path) if place else None


_ca = file_option("--ca", help="CA of the registry, besides the system's and Docker's certs.d.")
# how a registry is reached
access_options = packed(
    "access",
    lambda ca, insecure_http: Access(ca_file=ca, insecure_http=insecure_http),
    _ca,
    flag_option("--insecure-http", help="Use plain HTTP for the registry."),
)
registry_options = all_of([jobs_option("Parallel transfers.", most=32, default=4), access_options])
_layers_from = click.option(
    "--layers-from",
    "place",
    metavar="REGISTRY/REPO",
    envvar="SM120_LAYERS_FROM",
    help="Take what `sm120 source publish` put there, if a trusted key signed it, instead of"
    " compiling it [SM120_LAYERS_FROM].",
)
layers_options = packed("layers", _layers, _layers_from, trust_option)

_jobs_of_slurm = (
    click.option(
        "--chunk",
        type=click.IntRange(1, 500),
        metavar="N",
        help="Cases in one job of Slurm [default: 24], or images or workloads [default: 1].",
    ),
    click.option(
        "--time-limit",
        "time_limit_s",
        type=DURATION,
        metavar="TIME",
        help="How long a job may take, such as 30m; Slurm rounds up to minutes [default: 1h].",
    ),
    click.option(
        "--node-command",
        envvar="SM120_NODE_COMMAND",
        metavar="COMMAND",
        help="Path of `sm120` on the nodes, with options such as --store DIR; others can read it"
        " [SM120_NODE_COMMAND; default: the path that it has here].",
    ),
)
# nodes of a cluster that do the work; the command gets them as `slurm`, none for this machine
slurm_options = packed(
    "slurm",
    lambda on, chunk, time_limit_s, node_command: app.on_slurm.SlurmOrder.read(
        on, chunk, time_limit_s, node_command
    ),
    click.option(
        "--on",
        metavar="slurm[:PARTITION]",
        help="Let nodes of a Slurm cluster answer what the store has no answer for.",
    ),
    *_jobs_of_slurm,
)
# the same beside `on_options`: the command calls `slurm` with what --on names
slurm_job_options = packed(
    "slurm",
    lambda chunk, time_limit_s, node_command: (
        lambda on: app.on_slurm.SlurmOrder.read(on, chunk, time_limit_s, node_command)
    ),
    *_jobs_of_slurm,
)
_registries = many_option(
    "--base-registry",
    "registries",
    metavar="REGISTRY[/PREFIX]",
    envvar="SM120_BASE_REGISTRIES",
    help="Registry of foreign base images. Repeatable, in order [SM120_BASE_REGISTRIES].",
)
# where foreign base images are fetched from
base_options = packed(
    "bases",
    lambda registries, access: BaseSettings(registries=registries, access=access),
    _registries,
    access_options,
)


def _recipes(name: str) -> Callable[[Any], Any]:
    option: Callable[[Any], Any] = many_option(
        "--recipes",
        name,
        type=EXISTING_FOLDER,
        envvar="SM120_RECIPES",
        help="Folder with recipes of your own. Repeatable [SM120_RECIPES].",
    )
    return option


recipes_option = _recipes("folders")
# where `folders` are those to look for evidence in
own_recipes_option = _recipes("own_recipes")
gpus_option = click.option(
    "--gpus",
    type=Numbers("0,1"),
    callback=_different,
    metavar="N,N",
    help="GPUs to use, by number [default: all].",
)
engine_option = click.option(
    "--runtime",
    "engine",
    type=click.Choice(["auto", "docker", "podman"]),
    default="auto",
    help="Container runtime; auto starts in Docker where it answers, else in Podman, and finds what"
    " is served in either.",
)
_OVERRIDES = (
    click.option("--model-path", metavar="PATH", help="Model in place of the recipe's."),
    click.option("--served-model-name", metavar="NAME", help="Name that clients ask for."),
    click.option("--max-model-len", type=int, metavar="N", help="Context, in tokens."),
    click.option(
        "--gpu-memory-utilization", type=float, metavar="F", help="Share of each GPU's memory."
    ),
    click.option("--port", type=click.IntRange(1, 65535), metavar="N", help="Port to serve on."),
    click.option(
        "--enable-eagle3/--disable-eagle3",
        "--eagle3/--no-eagle3",
        "enable_eagle3",
        default=None,
        help="Speculate with a draft model.",
    ),
    click.option("--eagle3-model", metavar="PATH", help="Draft model in place of the recipe's."),
)


def override_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What a user changes for one start; the command gets it as `overrides`, to be completed."""

    @all_of(_OVERRIDES)
    @functools.wraps(command)
    def packed(*args: Any, **rest: Any) -> Any:
        from pipeline.serving.recipe.launch import Overrides

        given = {name: rest.pop(name) for name in Overrides.model_fields}
        # values are checked when the recipe is known, with those of the environment
        return command(*args, overrides=Overrides.model_construct(**given), **rest)

    return packed


hosts_option = click.option(
    "--hosts",
    type=Read("addresses", lambda text: tuple(filter(None, text.split(",")))),
    default="",
    metavar="ADDRESS,...",
    help="Addresses of the nodes, in the order of their ranks; the first one answers clients.",
)


def on_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Which machine; the command gets it as `on`, none for this one."""

    @click.option(
        "--on",
        metavar="HOST",
        help="Another host, over SSH: user@host, or a name of the inventory.",
    )
    @many_option(
        "-i", "--inventory", "inventories", help="Ansible inventory that names HOST. Repeatable."
    )
    @functools.wraps(command)
    def packed(*args: Any, on: str | None, inventories: tuple[str, ...], **rest: Any) -> Any:
        if inventories and not on:
            raise click.UsageError("-i names the inventory of a host: add --on HOST")
        folders = {f"--{name}": rest.get(name) for name in ("weights", "draft")}
        for option, folder in folders.items() if on else ():
            if folder and not folder.is_absolute():
                raise click.UsageError(f"{option}: write the whole path of a folder of {on}")
        return command(*args, on=app.serve.RemoteHost(on, inventories) if on else None, **rest)

    return packed
