"""The `sm120` command: its options, and the one place where errors become exit codes."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

import click

from pipeline import __version__
from pipeline.app.workspace import Workspace
from pipeline.cli.verbs import DAILY, GROUPS, Verb, VerbGroup
from pipeline.core import log
from pipeline.core.errors import Interrupted, MissingTool, PipelineError, StoreUnwritable
from pipeline.core.files import explained


class _RootGroup(VerbGroup):
    """A group that does not take a closed pipe (`| head`) for a failure."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # nobody reads any more, so nothing is printed; 141 is what a shell gives for SIGPIPE
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(141)


@click.group(
    cls=_RootGroup,
    verbs={
        **DAILY,
        # groups are loaded already, so they name no module
        **{str(each.name): Verb("", str(each.help)) for each in GROUPS},
        "completion": Verb(
            "completion:completion_command", "Print completion for bash, zsh or fish."
        ),
    },
    parts={
        "Daily commands": list(DAILY),
        "Groups of commands, listed by `sm120 GROUP --help`": [
            *(str(each.name) for each in GROUPS),
            "completion",
        ],
    },
    # click has only --help, and hides what an option is where nobody names it
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(__version__, prog_name="sm120")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option("--quiet", "-q", is_flag=True, help="Show no steps and no progress.")
@click.option(
    "--checkout", type=click.Path(path_type=Path), help="Folder that holds images/ and lockfiles/."
)
@click.option(
    "--store",
    "store_root",
    type=click.Path(path_type=Path),
    help="Folder of the store [SM120_STORE].",
)
@click.pass_context
def cli(
    context: click.Context, debug: bool, quiet: bool, checkout: Path | None, store_root: Path | None
) -> None:
    """Engine images for SM120 GPUs from hash-locked parts, bit for bit reproducible."""
    log.set_quiet(quiet)
    context.obj = Workspace(checkout, store_root)


for _group in GROUPS:
    cli.add_command(_group)


class _Stops:
    """Whether a signal asked this process to stop.

    A library may turn the KeyboardInterrupt into an error of its own: pydantic does, where it is
    raised while a model is being made.
    """

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            # a shell that starts a command in the background has Ctrl-C ignored
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        # where Python cannot raise it, as in a callback from C, it would print it
        sys.unraisablehook = lambda unraisable: None
        raise KeyboardInterrupt


def main() -> None:
    """Run a command line, and exit with the code of its error."""
    # read from argv: an error may come before click has parsed the options
    stops, debug = _Stops(), "--debug" in sys.argv
    # a closed stream (`sm120 ... >&-`) points at nothing: otherwise the next file that is opened
    # gets its number, and the store gets what we print
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            # the lowest number that is free, which is this one
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))
    sys.stdout = cast(TextIO, log.Screen(sys.stdout))
    try:
        try:
            Path.cwd()  # paths without a root have no meaning in a folder that was deleted
        except FileNotFoundError as error:
            message = "the working folder of this shell was deleted"
            raise StoreUnwritable(message, "Change into another folder: `cd`.") from error
        require_own_code(Path(sys.argv[0]), Path(sys.prefix))
        _run()
        sys.stdout.flush()
    except (KeyboardInterrupt, click.Abort):
        _end(Interrupted("stopped"), debug)
    except Exception as error:
        # also of a library: nobody should meet a traceback without --debug
        ours = as_ours(error)
        was_stopped = stops.asked and not isinstance(ours, Interrupted)
        _end(Interrupted("stopped") if was_stopped else ours, debug)


def require_own_code(program: Path, prefix: Path) -> None:
    """Refuse to run from a checkout that was copied with its `.nox`.

    The first line of a program names the original's Python, which runs the original's code.
    """
    home = program.resolve().parent.parent
    if home.parent.name == ".nox" and home != prefix.resolve():
        message = f"{program} is a copy: it would run the code of {prefix.parent.parent}"
        hint = "In this checkout, `python3 noxfile.py -s gate -- --help` makes its own environment."
        raise MissingTool(message, hint)


def _run() -> None:
    try:
        # not standalone: click would turn Ctrl-C and errors into exit codes of its own
        cli(prog_name="sm120", standalone_mode=False)
    # usage errors keep click's text and its code 2
    except click.ClickException as error:
        explained = _explained(error, sys.argv) or error
        if (text := _shown(explained.message)) != explained.message:
            explained = click.UsageError(text, getattr(explained, "ctx", None))
        explained.show()
        sys.exit(error.exit_code)


# Options of earlier versions, each with what it may be called now.
_RENAMED = {
    "--to": ("--output", "--trust"),
    "--out": ("--output",),
    "--keep": ("--output",),
    "--save": ("--output",),
    "--from": ("--trust",),
    "--engine": ("--runtime",),
    "--runner": ("--runtime",),
    "--sandbox": ("--runtime",),
    "--gpus": ("--gpu-count",),
    "--input": ("--input-tokens",),
}


def _explained(error: click.ClickException, words: Sequence[str]) -> click.UsageError | None:
    """A better answer to an option that stands in another place, or has a dash too few."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return None
    context, name, here = error.ctx, error.option_name, _options(error.ctx)
    if context.command is not cli and (option := _options(context.find_root()).get(name)):
        root, _, verb = context.command_path.partition(" ")
        line = " ".join([root, name, *([] if option.is_flag else ["PATH"]), verb])
        place = f"It stands before the command: `{line}`."
        return click.UsageError(f"No such option {name!r} here. {place}", context)
    if new := next((now for now in _RENAMED.get(name, ()) if now in here), None):
        return click.UsageError(f"No such option {name!r}: it is {new!r} now.", context)
    # click takes `-platform` for `-p` and seven more
    typed = [f"-{w.partition('=')[0]}" for w in words if w.startswith(name) and w[:2] != "--"]
    near = [option for option in here if typed and option.startswith(typed[0].lower())]
    # click names every option that is near: `--layers-from`, too, for `--platfrom`
    near = near or (get_close_matches(name, here, n=1) if name.startswith("--") else [])
    if not near:
        return None
    shown = typed[0][1:] if typed else name
    return click.UsageError(f"No such option {shown!r}. Did you mean {near[0]!r}?", context)


def _options(context: click.Context) -> dict[str, click.Option]:
    options = [o for o in context.command.get_params(context) if isinstance(o, click.Option)]
    return {name: option for option in options for name in option.opts}


def as_ours(error: Exception) -> PipelineError:
    """The same as an error with an exit code and a hint."""
    if isinstance(error, PipelineError):
        return error
    if isinstance(error, OSError):
        try:
            # a full disk or a refused write may surface anywhere
            return explained(error)
        except OSError:
            where = f"{error.filename}: " if error.filename else ""
            message = f"{where}{error.strerror or error}"
            return PipelineError(message, "Is that the right path? --debug shows who needs it.")
    message = f"{type(error).__name__}: {error}"
    return PipelineError(message, "This is a defect; --debug shows where. Please report it.")


def _shown(text: str) -> str:
    """A message may quote what others wrote, and an address with its password."""
    return log.printable(log.redacted(text, logins=True))


def _end(error: PipelineError, debug: bool) -> None:
    # a second Ctrl-C must not cut off the message about the first
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        sys.stdout.flush()
    except OSError:
        # the output has no room or no reader: Python would try again at its end, and exit with 120
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with suppress(BrokenPipeError):
        if debug:
            print(_shown(traceback.format_exc()), file=sys.stderr)
        if "--json" in sys.argv:
            # on stderr: stdout may already hold the result, and stays one JSON document
            body = log.redacted(error.as_json(), logins=True)
            print(log.json_text(body), file=sys.stderr)
        else:
            name = log.coloured("sm120:", "failed", sys.stderr)
            print(f"{name} {_shown(' '.join(str(error).split()))}", file=sys.stderr)
            if error.hint:
                print(f"       {_shown(error.hint)}", file=sys.stderr)
    sys.exit(error.exit_code)
