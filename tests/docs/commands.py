"""Whether a command that a page names is one that the program has."""

from __future__ import annotations

import ast
import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from functools import cache
from unittest import mock

import click

from pipeline.cli.main import cli
from pipeline.images.spec.checkout import Checkout
from tests.chaos.__main__ import read_options as chaos_options
from tests.docs.pages import ROOT
from tests.mutants.__main__ import arguments as mutants_options
from tests.perf.__main__ import read_options as perf_options

# sessions of the noxfile that hand what follows `--` to a command
_SESSIONS = {
    "build-sm120": ["build"],
    "gate": ["gate", "run"],
    "provision": ["host", "provision"],
    "verify-hosts": ["host", "verify"],
    "publish": ["publish"],
    "lock": ["image", "lock"],
}
# sessions that hand it to a program of the tests
_PROGRAMS: dict[str, Callable[[Sequence[str]], object]] = {
    "chaos": chaos_options,
    "perf": perf_options,
    "mutants": mutants_options,
}
# what stands for such an argument; `demo`, `mine`, `notes` and `engine` are made by the pages
_NAMES = {
    "IMAGE": {*Checkout(ROOT).images(), "demo", "mine", "notes", "engine"},
    "RECIPE": {path.stem for path in (ROOT / "recipes").glob("*.yaml")},
}
# options that a session takes for itself
_OF_SESSIONS = {"build-sm120": ("--smoke", "--bench", "--on", "-i")}


def complaint(line: list[str]) -> str:
    """What is wrong with a command line of a page; nothing, if it is right or not ours."""
    line = line[1:] if line[:1] == ["nice"] else line
    if not line:
        return ""
    if line[0].rpartition("/")[2] == "sm120":
        return _of_sm120(line[1:])
    if line[:2] == ["nox", "-s"]:
        return _of_nox(line[2:])
    if line[:3] == ["python3", "noxfile.py", "-s"]:
        return _of_nox(line[3:])
    return ""


def _of_sm120(line: list[str]) -> str:
    """Also of several at once: `sm120 weights lock|fetch`."""
    each = itertools.product(*(word.split("|") for word in line))
    return next(filter(None, (_of_one(list(one)) for one in each)), "")


def _of_one(line: list[str]) -> str:
    context, rest = click.Context(cli, info_name="sm120", **cli.context_settings), list(line)
    while rest and isinstance(context.command, click.Group):
        group = context.command
        if rest[0].startswith("-"):
            if wrong := _unknown(context, rest[0]):
                return wrong
            rest = rest[2 if _takes_value(context, rest[0]) else 1 :]
        elif command := group.get_command(context, rest[0]):
            context = click.Context(command, info_name=rest.pop(0), parent=context)
        elif rest[0] in ("…", "..."):
            return ""
        else:
            return f"{context.command_path}: there is no {rest[0]!r}"
    return next(filter(None, (_unknown(context, word) for word in rest)), "")


def _unknown(context: click.Context, word: str) -> str:
    option = word.partition("=")[0]
    if not option.startswith("-") or option in ("-", "--"):
        return ""
    known = {name for one in context.command.get_params(context) for name in _names(one)}
    return "" if option in known else f"{context.command_path}: there is no option {option}"


def _names(parameter: click.Parameter) -> list[str]:
    return [*parameter.opts, *parameter.secondary_opts]


def _takes_value(context: click.Context, option: str) -> bool:
    matches = [p for p in context.command.get_params(context) if option in p.opts]
    return any(isinstance(p, click.Option) and not p.is_flag for p in matches)


def _of_nox(line: list[str]) -> str:
    session, _, rest = line[0], *_split(line[1:])
    if session not in sessions():
        return f"noxfile.py: there is no session {session!r}"
    if session in _PROGRAMS and rest:
        return _of_program(_PROGRAMS[session], rest)
    own = _OF_SESSIONS.get(session, ())
    rest = [word for word in rest if word.partition("=")[0] not in own]
    return _of_sm120([*_SESSIONS[session], *rest]) if session in _SESSIONS and rest else ""


def _of_program(read: Callable[[Sequence[str]], object], words: list[str]) -> str:
    """What argparse says against words, which it would print before it ends the program."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            read(words)
    except SystemExit:
        return said.getvalue().strip().rpartition("\n")[2]
    return ""


def refusal(line: list[str]) -> str:
    """What the parser itself says against a command of ours that is typed as it stands.

    Values count, too: one that is missing, too many or none of the choices, and an image or a
    recipe that is not there. Whether a file of somebody's machine is there does not.
    """
    if line[:2] in (["nox", "-s"], ["python3", "noxfile.py"]):
        session, *rest = line[line.index("-s") + 1 :]
        head, (_, words) = _SESSIONS.get(session), _split(rest)
        is_own = bool(set(words) & set(_OF_SESSIONS.get(session, ())))
        # what a session adds by itself where nothing follows is tested with the menu
        return _parsed([*head, *words]) if head and words and not is_own else ""
    if not line or line[0].rpartition("/")[2] != "sm120":
        return ""
    return _parsed(list(itertools.takewhile(lambda word: word not in (">", ">>"), line[1:])))


def _parsed(words: list[str]) -> str:
    context = click.Context(cli, info_name="sm120", **cli.context_settings)
    try:
        while isinstance(group := context.command, click.Group):
            _, words, _ = group.make_parser(context).parse_args(list(words))
            if not words:
                return ""
            name, command, words = group.resolve_command(context, words)
            assert command is not None
            context = click.Context(command, info_name=name, parent=context)
        with mock.patch.object(click.Path, "convert", lambda self, value, param, ctx: value):
            made = context.command.make_context(
                context.info_name, list(words), parent=context.parent
            )
    except click.exceptions.Exit:
        return ""
    except click.UsageError as error:
        return f"{context.command_path}: {error.format_message()}"
    return next(filter(None, (_unknown_name(made, one) for one in made.command.params)), "")


def _unknown_name(context: click.Context, parameter: click.Parameter) -> str:
    """An image or a recipe that this checkout does not have."""
    kind = (parameter.metavar or "").strip("[].")
    value = context.params.get(parameter.name or "")
    values = value if isinstance(value, tuple) else (value,) if value else ()
    # a folder of somebody's own has recipes that nobody knows here
    values = () if kind == "RECIPE" and context.params.get("folders") else values
    wrong = [v for v in values if kind in _NAMES and v not in _NAMES[kind]]
    return f"{context.command_path}: there is no {kind} {wrong[0]!r}" if wrong else ""


def _split(line: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in line:
        return line, []
    at = line.index("--")
    return line[:at], line[at + 1 :]


@cache
def options() -> frozenset[str]:
    """Every option of every command."""
    top = click.Context(cli, info_name="sm120", **cli.context_settings)
    return frozenset(
        name
        for context in (top, *below(top))
        for parameter in context.command.get_params(context)
        for name in _names(parameter)
    )


def below(context: click.Context) -> Iterator[click.Context]:
    """Every command under a group, each after the group it belongs to."""
    group = context.command
    if not isinstance(group, click.Group):
        return
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if command.hidden:
            continue
        inner = click.Context(command, info_name=name, parent=context)
        yield inner
        yield from below(inner)


@cache
def sessions() -> frozenset[str]:
    """The sessions of the noxfile, read without nox."""
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    return frozenset(
        name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if (name := _session(node.name, decorator))
    )


def _session(function: str, decorator: ast.expr) -> str:
    if ast.unparse(decorator) == "nox.session":
        return function
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "nox.session":
        names = [k.value for k in decorator.keywords if k.arg == "name"]
        return str(ast.literal_eval(names[0])) if names else function
    return ""
