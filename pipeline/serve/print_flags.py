"""Describes an engine's argument parser as JSON. Runs inside an image; standard library only.

    python print_flags.py vllm RESULT
    python print_flags.py sglang RESULT
    python print_flags.py script RESULT FILE
    python print_flags.py program RESULT FOLDER COMMAND…

RESULT is the file to write. What a value may be is found out by giving some to the parser's own
converters, or to the program.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import re
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Json = dict[str, Any]
_DEEPEST = 4  # of settings within settings
# A word that no engine knows, then one of each kind; several, where a range may be asked for.
_TEXT, _BROKEN_JSON = "x7q", "{x7q}"
_KINDS = {"json": ("{}", "[]"), "number": ("1.5", "0.5"), "size": ("1k",), "integer": ("1", "8000")}
_WORDS = ("auto", "None", "none")
# How code names a variable: os.environ["X"], os.getenv("X"), get_bool_env_var("X").
_READ = re.compile(r"""env\w*(?:\.\w+)?[(\[]\s*["']([A-Z][A-Z0-9_]+)["']""")


# Words that no program knows, and how llama.cpp and ik_llama.cpp name the first of them.
_NOBODYS = ("--x7q1", "--x7q2", "--x7q3")
_REFUSED = re.compile(r"^error: (?:unknown|invalid) argument: (\S+)$", re.MULTILINE)
_ENDS = ("-h", "--help", "--usage", "--version")  # they print and end, whatever follows
_PROGRAM_S = 60.0
_NAME = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")
_STRING = re.compile(rb"(?<=\0)[!-~]{2,60}(?=\0)")
_VARIABLE = re.compile(rb"LLAMA_ARG_[A-Z0-9_]+")
_LISTED = re.compile(r"^[^{(\[]*[{(\[]([\w-]+(?:[|,] ?[\w-]+)+)[})\]]")
_AGAIN = re.compile(r"be repeated|repeat to|multiple times|more than once", re.IGNORECASE)
# Each one counts, and the help does not say so.
_REPEATED = {"--override-tensor", "-ot", "--override-kv", "--image", "--logit-bias", "-l"}
_RULES = {"--allowlist-unicode-rule"}  # begins with a number, and goes on


def describe(parser: argparse.ArgumentParser) -> Json:
    """All flags of a parser, and which of them exclude each other."""
    flags = {}
    for action in parser._actions:
        if action.option_strings:
            on, off = _spellings(action)
            flags[on[0]] = {"aliases": on[1:], "off": off, **_describe_action(action)}
    exclusive = [
        [action.option_strings[0] for action in group._group_actions if action.option_strings]
        for group in parser._mutually_exclusive_groups
    ]
    plain = sum(not action.option_strings for action in parser._actions)
    return {"flags": flags, "exclusive": exclusive, "plain_words": plain}


def _spellings(action: argparse.Action) -> tuple[list[str], list[str]]:
    """The names of a flag, long ones first, and those that turn it off."""
    names = sorted(action.option_strings, key=lambda name: not name.startswith("--"))
    if not isinstance(action, argparse.BooleanOptionalAction):
        return names, []
    off = [name for name in names if name.startswith("--no-") and "--" + name[5:] in names]
    return [name for name in names if name not in off], off


def _describe_action(action: argparse.Action) -> Json:
    takes = _takes(action)
    result: Json = {"takes": takes, "repeats": _repeats(action)}
    # an action that only stops the engine and names what took the flag's place
    if message := getattr(action, "error_message", None):
        result["retired"] = " ".join(str(message).split())
    if takes == "none":
        return result
    settings = _settings_class(action.type)
    result["type"] = "json" if settings else _kind(action.type)
    if settings:
        result["fields"] = sorted(set(_fields(settings, "", 0)))
    if result["type"] not in ("text", "json-or-text"):
        result["words"] = [word for word in _WORDS if _accepts(action.type, word)]
    if action.choices is not None:
        # sorted: some are sets, whose order is another in every run
        result["choices"] = sorted(_as_typed(each) for each in action.choices if each is not None)
    return result


def _takes(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "none"
    if action.nargs == "?":
        return "optional"
    return "one" if action.nargs in (None, 1) else "many"


def _repeats(action: argparse.Action) -> bool:
    adding = (argparse._AppendAction, argparse._AppendConstAction, argparse._CountAction)
    return isinstance(action, adding) or "append" in type(action).__name__.lower()


def _as_typed(choice: object) -> str:
    return str(getattr(choice, "value", choice))


def _accepts(convert: Any, value: str) -> bool:
    try:
        (convert or str)(value)
    except (Exception, SystemExit):
        return False
    return True


def _kind(convert: Any) -> str:
    if _accepts(convert, _TEXT):
        return "text" if _accepts(convert, _BROKEN_JSON) else "json-or-text"
    # in this order: JSON's reader takes numbers too, and a number's reader integers
    for kind, samples in _KINDS.items():
        if any(_accepts(convert, sample) for sample in samples):
            return kind
    return "text"


def _settings_class(convert: Any) -> type | None:
    """The data class that a flag's JSON becomes, where its converter holds one."""
    if not isinstance(convert, types.FunctionType):
        return None
    held = [
        *(convert.__defaults__ or ()),
        *(cell.cell_contents for cell in convert.__closure__ or ()),
    ]
    for each in held:
        if isinstance(each, type) and dataclasses.is_dataclass(each):
            return each
        if inner := _settings_class(each):
            return inner
    return None


def _fields(settings: type, above: str, depth: int) -> Iterator[str]:
    """Every name in a data class as a dotted path; `*` where any name may follow."""
    try:
        hints = typing.get_type_hints(settings)
    except Exception:
        hints = {}
    for field in dataclasses.fields(settings):
        if not field.init:
            continue
        path = above + field.name
        yield path
        inner = list(_classes(hints.get(field.name, field.type)))
        below = [c for c in inner if isinstance(c, type) and dataclasses.is_dataclass(c)]
        if depth < _DEEPEST and below:
            for each in below:
                yield from _fields(each, f"{path}.", depth + 1)
        elif any(_is_open(each) for each in inner):
            yield f"{path}.*"


def _is_open(kind: Any) -> bool:
    """Whether any name may stand in a value of a type: a dictionary, or a type not known here."""
    return issubclass(kind, Mapping) if isinstance(kind, type) else True


def _classes(hint: Any) -> Iterator[Any]:
    """The types in a hint: of `X | None`, `Annotated[X, …]` and the like."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        for each in typing.get_args(hint):
            yield from _classes(each)
    elif origin is typing.Annotated:
        yield from _classes(typing.get_args(hint)[0])
    elif origin is typing.Literal:
        yield from (type(each) for each in typing.get_args(hint))
    else:
        yield origin or hint


def variables_read(package: str, prefixes: Iterable[str]) -> set[str]:
    """The variables that a package's code names where it reads the environment."""
    found: set[str] = set()
    folder = Path(str(importlib.import_module(package).__file__)).parent
    for path in folder.rglob("*.py"):
        found.update(_READ.findall(path.read_text(encoding="utf-8", errors="replace")))
    return {name for name in found if name.startswith(tuple(prefixes))}


def vllm() -> Json:
    """`vllm serve`, as it is on a machine with NVIDIA cards."""
    # It asks NVML for the platform and, where there is none, makes no parser; its own class for
    # CUDA does not load without a driver.
    interface = importlib.import_module("vllm.platforms.interface")
    names = {"_enum": interface.PlatformEnum.CUDA, "device_type": "cuda", "device_name": "cuda"}
    card = type("CardPlatform", (interface.Platform,), names)
    setattr(importlib.import_module("vllm.platforms"), "_current_platform", card())  # noqa: B010
    serve = importlib.import_module("vllm.entrypoints.cli.serve")
    kind = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    subparsers = kind().add_subparsers()
    parser = serve.cmd_init()[0].subparser_init(subparsers)
    described = describe(parser)
    for flag, values in _vllm_registered():
        described["flags"][flag].update(values)
    envs = importlib.import_module("vllm.envs")
    prefixes = ["VLLM_"]
    known = {name for name in envs.environment_variables if name.startswith("VLLM_")}
    return {
        **described,
        "syntax": "vllm",
        "version": importlib.import_module("vllm.version").__version__,
        "prefixes": prefixes,
        "variables": sorted(known | variables_read("vllm", prefixes)),
    }


def _vllm_registered() -> Iterator[tuple[str, Json]]:
    """Values that its parser lets through and that it refuses after it."""
    tools = importlib.import_module("vllm.tool_parsers").ToolParserManager.list_registered()
    yield "--tool-call-parser", {"choices": tools, "opened_by": "--tool-parser-plugin"}
    reasoning = importlib.import_module("vllm.reasoning").ReasoningParserManager.list_registered()
    yield "--reasoning-parser", {"choices": reasoning, "opened_by": "--reasoning-parser-plugin"}
    layers = importlib.import_module("vllm.model_executor.layers.quantization")
    yield "--quantization", {"choices": sorted(layers.QUANTIZATION_METHODS)}
    backends = importlib.import_module("vllm.v1.attention.backends.registry").AttentionBackendEnum
    names = sorted(["auto", *(each.name for each in backends)])
    yield "--attention-backend", {"choices": names, "any_case": True}


def sglang() -> Json:
    """`python -m sglang.launch_server`."""
    arguments = importlib.import_module("sglang.srt.server_args").ServerArgs
    parser = argparse.ArgumentParser()
    arguments.add_cli_args(parser)
    envs = importlib.import_module("sglang.srt.environ")
    prefixes = ["SGLANG_", "SGL_"]
    known = {name for name in dir(envs.Envs) if name.startswith(tuple(prefixes))}
    return {
        **describe(parser),
        "syntax": "argparse",
        "version": importlib.import_module("sglang.version").__version__,
        "prefixes": prefixes,
        "variables": sorted(known | variables_read("sglang", prefixes)),
    }


def script(path: str) -> Json:
    """A start script of ours that has its parser in `build_parser`."""
    spec = importlib.util.spec_from_file_location("start_script", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # data classes look their module up
    spec.loader.exec_module(module)
    return {
        **describe(module.build_parser()),
        "syntax": "argparse",
        "prefixes": [],
        "variables": [],
    }


class Program:
    """A program that has no parser to import: it is asked about each name that it may know.

    It stops at the first word that it does not know and names it, before it does anything else. So
    with three words after a flag that nobody knows, it says how many of them the flag took.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.command = command

    def output(self, *words: str) -> str:
        """All that it prints."""
        done = subprocess.run(
            [*self.command, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PROGRAM_S,
            check=False,
        )
        return done.stdout.decode(errors="replace")

    def refused(self, *words: str) -> str | None:
        """The word that it does not know."""
        known = _REFUSED.search(self.output(*words))
        return known and known[1]

    def takes(self, name: str) -> str | None:
        """How many values follow a flag; nothing where there is no such flag."""
        refused = self.refused(name, *_NOBODYS)
        if refused in (name, name.replace("_", "-")):
            return None
        if refused == _NOBODYS[0] or name in _ENDS:
            return "none"
        if refused in _NOBODYS:
            return "many" if refused == _NOBODYS[2] else "one"
        # it did not like what it took: with numbers it may
        one, two = (self.refused(name, *["1"] * n, _NOBODYS[0]) == _NOBODYS[0] for n in (1, 2))
        return "many" if two and not one else "one"

    def accepts(self, name: str, value: str) -> bool:
        """Whether a flag takes this value."""
        return self.refused(name, value, _NOBODYS[0]) == _NOBODYS[0]

    def kind(self, name: str) -> str:
        """What its one value may be."""
        if name in _RULES or self.accepts(name, _TEXT):
            return "text"
        if self.accepts(name, "{}"):
            return "json"
        # a reader of fractions takes `.5`; one of integers does not
        if self.accepts(name, ".5"):
            return "number"
        return "integer" if self.accepts(name, "1") else "text"


def program(folder: str, *command: str) -> Json:
    """The flags of a program, by asking it.

    Names come from its help and from its own bytes: in ik_llama.cpp the help is written by hand,
    and `--override-tensor` is missing there. The help says which names mean the same.
    """
    asked = Program(command)
    text = asked.output("--help")
    objects = [path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()]
    names = {*_names_in(text), *(name for data in objects for name in _names_in_bytes(data))}
    known = {name: takes for name in sorted(names) if (takes := asked.takes(name))}
    entries = [*_help_entries(text), *((name, "") for name in known)]
    flags: dict[str, Json] = {}
    seen: set[str] = set()
    for heading, about in entries:
        spellings = [n for n in _names_in(heading) if n in known and n not in seen]
        # names that take another number of values mean something else, whatever the help says
        spellings = [n for n in spellings if known[n] == known[spellings[0]]]
        if spellings:
            spellings.sort(key=lambda name: not name.startswith("--"))
            flags[spellings[0]] = _asked_flag(asked, spellings, known, f"{heading} {about}")
            seen.update(spellings)
    found = {name.decode() for data in objects for name in _VARIABLE.findall(data)}
    return {
        "flags": flags,
        "exclusive": [
            [f"--{n[5:]}", n] for n in flags if n[:5] == "--no-" and f"--{n[5:]}" in flags
        ],
        "plain_words": 0,
        "syntax": "llama",
        "version": _version(asked.output("--version")),
        "prefixes": ["LLAMA_ARG_"],
        "variables": sorted(found),
    }


def _asked_flag(asked: Program, names: list[str], known: dict[str, str], entry: str) -> Json:
    result: Json = {"takes": known[names[0]], "aliases": names[1:]}
    result["repeats"] = bool(_AGAIN.search(entry) or set(names) & _REPEATED)
    if result["takes"] != "one":
        return result
    listed = _LISTED.search(entry)
    values = re.split(r"[|,]", listed[1]) if listed else []
    values = [value.strip() for value in values]
    if values and all(asked.accepts(names[0], value) for value in values):
        # one that takes anything names its values for people only
        if not asked.accepts(names[0], _TEXT):
            result["choices"] = values
        return result
    result["type"] = asked.kind(names[0])
    return result


def _version(text: str) -> str:
    """The commit, as `version: 0 (55d3c05b)` names it."""
    found = re.search(r"^version: .*?\(?([0-9a-f]{7,40})\)?$", text, re.MULTILINE)
    return found[1] if found else ""


def _names_in(text: str) -> list[str]:
    """Names as the program compares them: it takes underscores for dashes."""
    found = _NAME.findall(text)
    return list(dict.fromkeys(n.replace("_", "-") if n[:2] == "--" else n for n in found))


def _names_in_bytes(data: bytes) -> Iterator[str]:
    """Strings that look like a flag; also the ends of others, which linkers let them share."""
    for string in set(_STRING.findall(data)):
        text = string.decode("ascii")
        for start in (i for i, character in enumerate(text) if character == "-"):
            if _NAME.fullmatch(text[start:]):
                yield text[start:]


def _help_entries(text: str) -> Iterator[tuple[str, str]]:
    """The flags of a help text as it lists them, each with what it says about them."""
    heading, about = "", ""
    for line in text.splitlines():
        if re.match(r" {0,10}-", line):
            if heading:
                yield heading, about
            # two spaces part the names from what is said about them, but not "-t,    --threads"
            parts = re.split(r"(?<![, ]) {2,}", line.strip(), maxsplit=1)
            heading, about = parts[0], " ".join(parts[1:])
        else:
            about += " " + line.strip()
    if heading:
        yield heading, about


KINDS: dict[str, Callable[..., Json]] = {
    "vllm": vllm,
    "sglang": sglang,
    "script": script,
    "program": program,
}


def main(kind: str, result: str, *arguments: str) -> None:
    """Write the description of one parser."""
    described = KINDS[kind](*arguments)
    Path(result).write_text(json.dumps(described), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
