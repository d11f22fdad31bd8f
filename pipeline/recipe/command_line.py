"""A command line as an engine's parser splits it: flags with their values, and what is left."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from pipeline.recipe.parser_flags import FlagSpec, ParserFlags

_NEGATIVE = re.compile(r"^-\d+$|^-\d*\.\d+$")  # argparse's own idea of one


@dataclass(frozen=True)
class Given:
    """A flag on a command line, with the words that the parser gives to it."""

    written: str  # without its value
    name: str | None  # the flag's first name; none where the parser knows no such flag
    values: list[str] = field(default_factory=list)
    path: str = ""  # below it, as in `--compilation-config.pass_config.fuse_norm_quant`
    superfluous: str | None = None  # a value after `=` that the flag does not take
    is_off: bool = False  # by the name with the opposite meaning


@dataclass(frozen=True)
class CommandLine:
    """All of it, in order."""

    given: list[Given]
    plain: list[str]  # words that belong to no flag


def split_command_line(arguments: Sequence[str], flags: ParserFlags) -> CommandLine:
    """Read a command line as the engine's parser does."""
    given: list[Given] = []
    plain: list[str] = []
    rest = list(_spelled_out(arguments) if flags.syntax == "vllm" else arguments)
    while rest:
        word = rest.pop(0)
        if not is_flag(word, flags):
            plain.append(word)
            continue
        written, equals, value = _parted(word, flags)
        spelling, path = _named(written, flags)
        if spelling is None:
            # how many values it takes nobody knows: those that follow are not judged
            list(_taken(rest, "many", flags))
            given.append(Given(written, None, path=path))
            continue
        name = flags.spellings[spelling]
        takes = "one" if path else flags.flags[name].takes
        if equals:
            values, extra = ([], value) if takes == "none" else ([value], None)
        else:
            values, extra = list(_taken(rest, takes, flags)), None
        given.append(Given(written, name, values, path, extra, spelling in flags.flags[name].off))
    return CommandLine(given, plain)


def _spelled_out(arguments: Sequence[str]) -> Iterator[str]:
    """vLLM makes --optimization-level of `-O3`, `-O=3` and `-O 3` before it looks at flags."""
    for word, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        if word == "-O" and following in ("0", "1", "2", "3"):
            yield "--optimization-level"
        elif word.startswith("-O") and word != "-O":
            yield from ("--optimization-level", word[2:].removeprefix("="))
        else:
            yield word


def is_flag(word: str, flags: ParserFlags) -> bool:
    """Whether the parser takes a word for a flag, and not for a value."""
    if not word.startswith("-") or len(word) < 2:
        return False
    # vLLM takes -0.5 for a name with a dot in it
    negative = _NEGATIVE.match(word) and not (flags.syntax == "vllm" and "." in word)
    if flags.syntax == "llama":
        return not negative
    # argparse: a word with a space in it is a value, if it is no flag with `=`
    return not negative and " " not in word.partition("=")[0]


def _parted(word: str, flags: ParserFlags) -> tuple[str, bool, str]:
    if flags.syntax == "llama":
        return word, False, ""  # it knows no `=`
    written, equals, value = word.partition("=")
    return written, bool(equals), value


def _named(written: str, flags: ParserFlags) -> tuple[str | None, str]:
    """The name that is meant, as the parser has it, and the path below it."""
    head, path = written, ""
    if flags.syntax == "vllm":
        head, _, path = written.partition(".")
        path = path.removesuffix("+")
    name = spelled(head, flags)
    if name not in flags.spellings and len(fitting := beginnings(name, flags)) == 1:
        name = fitting[0]
    return name if name in flags.spellings else None, path


def beginnings(name: str, flags: ParserFlags) -> list[str]:
    """The names that begin like this: argparse takes `--tp` for `--tp-size`, if no other does."""
    if flags.syntax == "llama" or not name.startswith("--") or len(name) < 3:
        return []
    return sorted(each for each in flags.spellings if each.startswith(name))


def spelled(written: str, flags: ParserFlags) -> str:
    """A name as the parser compares it: vLLM and llama.cpp take underscores for dashes."""
    underscored = flags.syntax in ("vllm", "llama") and written.startswith("--")
    return written.replace("_", "-") if underscored else written


def _taken(rest: list[str], takes: str, flags: ParserFlags) -> Iterator[str]:
    """The values after a flag; they leave `rest`."""
    most = {"none": 0, "one": 1, "optional": 1}.get(takes, len(rest))
    while most and rest and not _ends_values(rest[0], flags):
        yield rest.pop(0)
        most -= 1


def _ends_values(word: str, flags: ParserFlags) -> bool:
    # llama.cpp takes any word as a value; one that is a flag is a value forgotten
    if flags.syntax == "llama":
        return spelled(word, flags) in flags.spellings
    return is_flag(word, flags)


def flag_of(given: Given, flags: ParserFlags) -> FlagSpec:
    """What the parser knows about a flag that it knows."""
    assert given.name is not None
    return flags.flags[given.name]
