"""Whether a command that a page names is one that the program has."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from functools import cache

import click

from pipeline.cli.main import cli
from tests.docs.pages import ROOT

# sessions of the noxfile that hand what follows `--` to a command
_SESSIONS = {
    "build-sm120": ["build"],
    "gate": ["gate", "run"],
    "provision": ["host", "provision"],
    "verify-hosts": ["host", "verify"],
    "publish": ["publish"],
}
# options that a session takes for itself
_OF_SESSIONS = {"build-sm120": ("--smoke",)}


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
    own = _OF_SESSIONS.get(session, ())
    rest = [word for word in rest if word.partition("=")[0] not in own]
    return _of_sm120([*_SESSIONS[session], *rest]) if session in _SESSIONS and rest else ""


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
