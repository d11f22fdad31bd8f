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
_UNKNOWN_WORDS = ("--x7q1", "--x7q2", "--x7q3")
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


def describe_parser(parser: argparse.ArgumentParser) -> Json:
    """All flags of a parser, and which of them exclude each other."""
    flags: dict[str, Json] = {}
    adding = (argparse._AppendAction, argparse._AppendConstAction, argparse._CountAction)
    for action in parser._actions:
        names = sorted(action.option_strings, key=lambda name: not name.startswith("--"))
        off, convert = [], action.type
        if isinstance(action, argparse.BooleanOptionalAction):
            off = [name for name in names if name.startswith("--no-") and "--" + name[5:] in names]
        on = [name for name in names if name not in off]
        if not on:
            continue
        # how many values follow it, and what they may be
        takes = {0: "none", "?": "optional", None: "one", 1: "one"}.get(action.nargs, "many")
        repeats = isinstance(action, adding) or "append" in type(action).__name__.lower()
        flag: Json = {"aliases": on[1:], "off": off, "takes": takes, "repeats": repeats}
        flags[on[0]] = flag
        # an action that only stops the engine and names what took the flag's place
        if message := getattr(action, "error_message", None):
            flag["retired"] = " ".join(str(message).split())
        if takes == "none":
            continue
        if settings := _settings_class(convert):
            flag |= {"type": "json", "fields": sorted(set(_fields(settings, "", 0)))}
        elif _accepts(convert, _TEXT):
            flag["type"] = "text" if _accepts(convert, _BROKEN_JSON) else "json-or-text"
        else:
            # in this order: JSON's reader takes numbers too, and a number's reader integers
            fitting = (k for k, tries in _KINDS.items() if any(_accepts(convert, x) for x in tries))
            flag["type"] = next(fitting, "text")
        if flag["type"] not in ("text", "json-or-text"):
            flag["words"] = [word for word in _WORDS if _accepts(convert, word)]
        if action.choices is not None:
            # sorted: some are sets, whose order is another in every run
            choices = [each for each in action.choices if each is not None]
            flag["choices"] = sorted(str(getattr(each, "value", each)) for each in choices)
    exclusive = [
        [action.option_strings[0] for action in group._group_actions if action.option_strings]
        for group in parser._mutually_exclusive_groups
    ]
    plain = sum(not action.option_strings for action in parser._actions)
    return {"flags": flags, "exclusive": exclusive, "plain_words": plain}


def _accepts(convert: Any, value: str) -> bool:
    try:
        (convert or str)(value)
    except (Exception, SystemExit):
        return False
    return True


def _settings_class(convert: Any) -> type | None:
    """The data class that a flag's JSON becomes, where its converter holds one."""
    if not isinstance(convert, types.FunctionType):
        return None
    cells = [cell.cell_contents for cell in convert.__closure__ or ()]
    for each in (*(convert.__defaults__ or ()), *cells):
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
        # any name may stand in a dictionary, and in a type that cannot be imported
        elif any(not isinstance(kind, type) or issubclass(kind, Mapping) for kind in inner):
            yield f"{path}.*"


def _classes(hint: Any) -> Iterator[Any]:
    """The types in a hint: of `X | None`, `Annotated[X, …]` and the like."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for each in parts:
            yield from _classes(each)
    elif origin is typing.Annotated:
        yield from _classes(parts[0])
    elif origin is typing.Literal:
        yield from map(type, parts)
    else:
        yield origin or hint


def _python(package: str, version: str, prefixes: list[str], known: Iterable[str]) -> Json:
    """The version of a Python engine, and the variables that it knows or that its code reads."""
    found = set(known)
    folder = Path(str(importlib.import_module(package).__file__)).parent
    for path in folder.rglob("*.py"):
        found.update(_READ.findall(path.read_text(encoding="utf-8", errors="replace")))
    return {
        "version": importlib.import_module(version).__version__,
        "prefixes": prefixes,
        "variables": sorted(name for name in found if name.startswith(tuple(prefixes))),
    }


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
    described = describe_parser(serve.cmd_init()[0].subparser_init(kind().add_subparsers()))
    # Values that its parser lets through and that it refuses after it.
    tools = importlib.import_module("vllm.tool_parsers").ToolParserManager.list_registered()
    reasoning = importlib.import_module("vllm.reasoning").ReasoningParserManager.list_registered()
    layers = importlib.import_module("vllm.model_executor.layers.quantization")
    backends = importlib.import_module("vllm.v1.attention.backends.registry").AttentionBackendEnum
    attention = sorted(["auto", *(each.name for each in backends)])
    for flag, values in {
        "--tool-call-parser": {"choices": tools, "opened_by": "--tool-parser-plugin"},
        "--reasoning-parser": {"choices": reasoning, "opened_by": "--reasoning-parser-plugin"},
        "--quantization": {"choices": sorted(layers.QUANTIZATION_METHODS)},
        "--attention-backend": {"choices": attention, "any_case": True},
    }.items():
        described["flags"][flag].update(values)
    known = importlib.import_module("vllm.envs").environment_variables
    return {**described, "syntax": "vllm", **_python("vllm", "vllm.version", ["VLLM_"], known)}


def sglang() -> Json:
    """`python -m sglang.launch_server`."""
    parser = argparse.ArgumentParser()
    importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    known = dir(importlib.import_module("sglang.srt.environ").Envs)
    about = _python("sglang", "sglang.version", ["SGLANG_", "SGL_"], known)
    return {**describe_parser(parser), "syntax": "argparse", **about}


def script(path: str) -> Json:
    """A start script of ours that has its parser in `build_parser`."""
    spec = importlib.util.spec_from_file_location("start_script", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # data classes look their module up
    spec.loader.exec_module(module)
    about = {"syntax": "argparse", "prefixes": [], "variables": []}
    return {**describe_parser(module.build_parser()), **about}


class Program:
    """A program that has no parser to import: it is asked about each name that it may know.

    It stops at the first word that it does not know and names it, before it does anything else. So
    after a flag and three unknown words, it says how many of them the flag took.
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
        refused, (first, _, third) = self.refused(name, *_UNKNOWN_WORDS), _UNKNOWN_WORDS
        if refused in (name, name.replace("_", "-")):
            return None
        if refused == first or name in _ENDS:
            return "none"
        if refused in _UNKNOWN_WORDS:
            return "many" if refused == third else "one"
        # it did not like what it took: with numbers it may
        one, two = (self.refused(name, *["1"] * n, first) == first for n in (1, 2))
        return "many" if two and not one else "one"

    def accepts(self, name: str, value: str) -> bool:
        """Whether a flag takes this value."""
        return self.refused(name, value, _UNKNOWN_WORDS[0]) == _UNKNOWN_WORDS[0]


def program(folder: str, *command: str) -> Json:
    """The flags of a program, by asking it.

    Names come from its help and from its own bytes: in ik_llama.cpp the help is written by hand,
    and `--override-tensor` is missing there. The help says which names mean the same.
    """
    asked = Program(command)
    text = asked.output("--help")
    names = set(_names_in(text))
    variables: set[str] = set()
    for path in sorted(Path(folder).iterdir()):
        data = path.read_bytes() if path.is_file() else b""
        variables.update(name.decode() for name in _VARIABLE.findall(data))
        for string in set(_STRING.findall(data)):
            # linkers let strings share their ends
            ends = [string[m.start() :].decode() for m in re.finditer(b"-", string)]
            names.update(end for end in ends if _NAME.fullmatch(end))
    known = {name: takes for name in sorted(names) if (takes := asked.takes(name))}
    # the flags as the help lists them, each with its description
    entries: list[tuple[str, str]] = []
    for line in text.splitlines():
        if re.match(r" {0,10}-", line):
            # two spaces part the names from their description, but not "-t,    --threads"
            heading, *words = re.split(r"(?<![, ]) {2,}", line.strip(), maxsplit=1)
            entries.append((heading, " ".join(words)))
        elif entries:
            heading, about = entries[-1]
            entries[-1] = (heading, f"{about} {line.strip()}")
    flags: dict[str, Json] = {}
    seen: set[str] = set()
    for heading, about in (*entries, *((name, "") for name in known)):
        spellings = [n for n in _names_in(heading) if n in known and n not in seen]
        # names that take another number of values mean something else, whatever the help says
        spellings = [n for n in spellings if known[n] == known[spellings[0]]]
        if spellings:
            spellings.sort(key=lambda name: not name.startswith("--"))
            name, entry = spellings[0], f"{heading} {about}"
            repeats = bool(_AGAIN.search(entry) or set(spellings) & _REPEATED)
            flags[name] = {"takes": known[name], "aliases": spellings[1:], "repeats": repeats}
            if known[name] == "one":
                flags[name] |= _asked_value(asked, name, entry)
            seen.update(spellings)
    # the commit, as `version: 0 (55d3c05b)` names it
    pattern = r"^version: .*?\(?([0-9a-f]{7,40})\)?$"
    version = re.search(pattern, asked.output("--version"), re.MULTILINE)
    return {
        "flags": flags,
        "exclusive": [
            [f"--{n[5:]}", n] for n in flags if n[:5] == "--no-" and f"--{n[5:]}" in flags
        ],
        "plain_words": 0,
        "syntax": "llama",
        "version": version[1] if version else "",
        "prefixes": ["LLAMA_ARG_"],
        "variables": sorted(variables),
    }


def _asked_value(asked: Program, name: str, entry: str) -> Json:
    """What the one value of a flag may be."""
    listed = _LISTED.search(entry)
    values = [value.strip() for value in re.split(r"[|,]", listed[1])] if listed else []
    takes_text = asked.accepts(name, _TEXT)
    if values and all(asked.accepts(name, value) for value in values):
        # one that takes anything names its values for people only
        return {} if takes_text else {"choices": values}
    if takes_text or name in _RULES:
        return {"type": "text"}
    # a reader of fractions takes `.5`; one of integers does not
    kinds = (("json", "{}"), ("number", ".5"), ("integer", "1"))
    return {"type": next((k for k, sample in kinds if asked.accepts(name, sample)), "text")}


def _names_in(text: str) -> list[str]:
    """Names as the program compares them: it takes underscores for dashes."""
    found = _NAME.findall(text)
    return list(dict.fromkeys(n.replace("_", "-") if n[:2] == "--" else n for n in found))


KINDS: dict[str, Callable[..., Json]] = {"vllm": vllm, "sglang": sglang}
KINDS |= {"script": script, "program": program}


if __name__ == "__main__":
    # which kind of parser, the file for its description, and what that kind asks for
    kind, result, *arguments = sys.argv[1:]
    Path(result).write_text(json.dumps(KINDS[kind](*arguments)), encoding="utf-8")
