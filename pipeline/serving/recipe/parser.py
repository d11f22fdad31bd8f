"""Checks a launch against the engine's own argument parser, before anything starts.

An engine reports a wrong flag after a minute of imports, on the machine with the cards; some take
the last of two, or a flag for a value. These checks find the same on any machine, and suggest the
nearest name.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import zip_longest
from typing import Any, NamedTuple

from pipeline.core.errors import RecipeInvalid
from pipeline.images.engine.parser_flags import (
    FlagSpec,
    ParserFlags,
    find_parser_flags,
    flags_folder,
)
from pipeline.images.spec.checkout import Checkout
from pipeline.serving.recipe.launch import Launch

_NEGATIVE = re.compile(r"^-\d+$|^-\d*\.\d+$")  # argparse's own idea of one
_MOST_NAMES, _MOST_VALUES = 3, 12
_LIKE = 0.6
# Each engine has its own letters, and powers of 1024 take no fraction:
# vllm/utils/argparse_utils.py and sglang/srt/utils/common.py.
_SIZES = {
    "vllm": re.compile(r"\d+(\.\d+)?[kmgt]|\d+[KMGT]"),
    "sglang": re.compile(r"\d+(\.\d+)?[kMGT]|\d+[KMGT]i"),
}


class FlagProblem(NamedTuple):
    """Why the engine would not start, or would start with something other than what is written."""

    flag: str  # or the variable, as it is written
    message: str
    nearest: Sequence[str] = ()

    def __str__(self) -> str:
        near = f"; did you mean {' or '.join(self.nearest)}?" if self.nearest else ""
        return f"{self.flag}: {self.message}{near}"


# What vLLM asks of two flags once they are parsed: the first needs the second, or forbids it. Each
# is an error of its own: vllm/entrypoints/launchers/cli_args.py of vLLM 0.32.0.
_NEEDS = {
    "--enable-auto-tool-choice": "--tool-call-parser",
    "--enable-log-outputs": "--enable-log-requests",
}
_FORBIDS = {
    "--enable-per-request-metrics": "--disable-log-stats",
    "--grpc": "--grpc-port",
    "--headless": "--api-server-count",
}
# Each process of an engine has a card of its own, and there is one for each product of these.
_TENSOR, _DECODE = "--tensor-parallel-size", "--decode-context-parallel-size"
_PROCESSES = (_TENSOR, "--pipeline-parallel-size", "--prefill-context-parallel-size")
# With these another program starts the processes, also on other machines.
_ELSEWHERE = {"ray", "external_launcher"}


class Given(NamedTuple):
    """A flag on a command line, with the words that the parser gives to it."""

    written: str  # without its value
    name: str | None  # the flag's first name; none where the parser knows no such flag
    values: Sequence[str] = ()
    path: str = ""  # below it, as in `--compilation-config.pass_config.fuse_norm_quant`
    superfluous: str | None = None  # a value after `=` that the flag does not take
    is_off: bool = False  # by the name with the opposite meaning


class CommandLine(NamedTuple):
    """A command line as an engine's parser splits it, in order."""

    given: list[Given]
    plain: list[str]  # words that belong to no flag


def split_command_line(arguments: Sequence[str], flags: ParserFlags) -> CommandLine:
    """Reads a command line as the engine's parser does."""
    given: list[Given] = []
    plain: list[str] = []
    rest: list[str] = []
    # vLLM makes --optimization-level of `-O3`, `-O=3` and `-O 3` before it looks at flags
    for word, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        if flags.syntax == "vllm" and word == "-O" and following in ("0", "1", "2", "3"):
            rest.append("--optimization-level")
        elif flags.syntax == "vllm" and word.startswith("-O") and word != "-O":
            rest += ["--optimization-level", word[2:].removeprefix("=")]
        else:
            rest.append(word)
    while rest:
        word = rest.pop(0)
        if not _is_flag(word, flags):
            plain.append(word)
            continue
        # llama.cpp knows no `=`
        written, equals, value = (word, "", "") if flags.syntax == "llama" else word.partition("=")
        head, path = written, ""
        if flags.syntax == "vllm":
            head, _, path = written.partition(".")
            path = path.removesuffix("+")
        spelling = _spelled(head, flags)
        if spelling not in flags.spellings and len(fitting := _beginnings(spelling, flags)) == 1:
            spelling = fitting[0]
        if spelling not in flags.spellings:
            # how many values it takes is not known: those that follow are not judged
            _take(rest, "many", flags)
            given.append(Given(written, None, path=path))
            continue
        name = flags.spellings[spelling]
        takes, extra = "one" if path else flags.flags[name].takes, None
        if equals and takes == "none":
            values, extra = [], value
        else:
            values = [value] if equals else _take(rest, takes, flags)
        given.append(Given(written, name, values, path, extra, spelling in flags.flags[name].off))
    return CommandLine(given, plain)


def _is_flag(word: str, flags: ParserFlags) -> bool:
    """Whether the parser takes a word for a flag, and not for a value."""
    if not word.startswith("-") or len(word) < 2:
        return False
    # vLLM takes -0.5 for a name with a dot in it
    if _NEGATIVE.match(word) and not (flags.syntax == "vllm" and "." in word):
        return False
    # argparse: a word with a space in it is a value, if it is no flag with `=`
    return flags.syntax == "llama" or " " not in word.partition("=")[0]


def _beginnings(name: str, flags: ParserFlags) -> list[str]:
    """The names that begin like this: argparse takes `--tp` for `--tp-size`, if no other does."""
    if flags.syntax == "llama" or not name.startswith("--") or len(name) < 3:
        return []
    return sorted(each for each in flags.spellings if each.startswith(name))


def _spelled(written: str, flags: ParserFlags) -> str:
    """A name as the parser compares it: vLLM and llama.cpp take underscores for dashes."""
    underscored = flags.syntax in ("vllm", "llama") and written.startswith("--")
    return written.replace("_", "-") if underscored else written


def _take(rest: list[str], takes: str, flags: ParserFlags) -> list[str]:
    """Removes the values after a flag from `rest`."""
    taken: list[str] = []
    most = {"none": 0, "one": 1, "optional": 1}.get(takes, len(rest))
    while rest and len(taken) < most:
        # llama.cpp takes any word as a value; one that is a flag is a value forgotten
        is_next = _spelled(rest[0], flags) in flags.spellings
        if is_next if flags.syntax == "llama" else _is_flag(rest[0], flags):
            break
        taken.append(rest.pop(0))
    return taken


def require_known_flags(checkout: Checkout, launch: Launch) -> None:
    """Stops a launch that the engine of its image would refuse, by the committed files."""
    flags = find_parser_flags(flags_folder(checkout), launch.engine, launch.image)
    if problems := check_flags(launch, flags):
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise RecipeInvalid(
            f"{launch.recipe}: {problems[0]}{more}",
            f"`sm120 recipe flags {flags.image}` shows what {flags.title} accepts.",
        )


def check_flags(launch: Launch, flags: ParserFlags) -> list[FlagProblem]:
    """Everything that the engine's parser, or the engine right after it, would not accept."""
    line = split_command_line(launch.arguments, flags)
    names = {given.name for given in line.given}
    problems = [each for given in line.given for each in _judge(given, flags, names)]
    for word in line.plain[flags.plain_words :]:
        problems.append(FlagProblem(word, "is a word that no flag takes"))
    # flags of which only the last would count, and flags turned on and off
    seen: dict[str, Given] = {}
    for given in line.given:
        if given.name is None or flags.flags[given.name].repeats:
            continue
        before = seen.setdefault(f"{given.name}.{given.path}", given)
        if given.is_off != before.is_off:
            problems.append(FlagProblem(given.written, f"contradicts {before.written}"))
        elif before is not given:
            message = "is given twice, and only the last one counts"
            problems.append(FlagProblem(given.written, message))
        elif given.path and (whole := seen.get(f"{given.name}.")):
            # vLLM joins the parts and passes them to the flag once more
            message = f"only the parts count beside {whole.written}: write all of it in one way"
            problems.append(FlagProblem(given.written, message))
    # flags that exclude each other, by the parser or by the engine's own rules
    named = {given.name: given.written for given in line.given}
    for group in flags.exclusive:
        present = [named[name] for name in group if name in named]
        if len(present) > 1:
            message = f"cannot stand beside {', '.join(present[:-1])}"
            problems.append(FlagProblem(present[-1], message))
    on = {given.name for given in line.given if given.name and not given.is_off}
    is_on = {flag: flags.engine == "vllm" and flag in on for flag in (*_NEEDS, *_FORBIDS)}
    for flag, other in _NEEDS.items():
        if is_on[flag] and other not in on:
            problems.append(FlagProblem(flag, f"needs {other}"))
    for flag, other in _FORBIDS.items():
        if is_on[flag] and other in on:
            problems.append(FlagProblem(flag, f"cannot stand beside {other}"))
    problems += _parallel(line, flags, launch.cards)
    for name in launch.environment:
        # variables of others (NCCL_, CUDA_) are not the engine's business
        if name.startswith(tuple(flags.prefixes)) and name not in flags.variables:
            near = _nearest(name, flags.variables)
            problems.append(FlagProblem(name, f"is no variable of {flags.title}", near))
    return problems


def _judge(given: Given, flags: ParserFlags, names: set[str | None]) -> Iterator[FlagProblem]:
    """What is wrong with one flag."""
    written = given.written
    if given.name is None:
        head = _spelled(written.partition(".")[0] if flags.syntax == "vllm" else written, flags)
        # argparse completes a beginning, but only one that fits a single flag
        if fitting := _beginnings(head, flags):
            yield FlagProblem(
                written, "is the beginning of more than one flag", fitting[:_MOST_NAMES]
            )
        else:
            near = _nearest(head, flags.spellings)
            yield FlagProblem(written, f"is no flag of {flags.title}", near)
        return
    flag = flags.flags[given.name]
    needs_value = given.path or (flag.takes in ("one", "many") and not given.is_off)
    if flag.retired:
        yield FlagProblem(written, f"was removed: {flag.retired}")
    elif given.superfluous is not None:
        yield FlagProblem(written, "takes no value")
    elif given.path and flag.type not in ("json", "json-or-text"):
        yield FlagProblem(written, f"takes no JSON, so {flags.title} knows nothing below it")
    elif needs_value and not given.values:
        yield FlagProblem(written, "needs a value")
    elif given.path:
        if flag.fields and not _is_field(given.path, flag):
            head = written.partition(".")[0]
            near = [f"{head}.{path}" for path in _nearest(given.path, flag.fields)]
            yield FlagProblem(written, f"has no setting {given.path!r}", near)
    elif flag.opened_by is None or flag.opened_by not in names:
        for value in given.values:
            if why := _wrong_value(value, flag, flags.engine):
                shown = value if len(value) <= 60 else value[:57] + "..."
                yield FlagProblem(written, f"{shown!r} {why}")


def _nearest(name: str, known: Iterable[str]) -> list[str]:
    """The known names that look most like it, the nearest first."""
    return difflib.get_close_matches(name, sorted(known), n=_MOST_NAMES, cutoff=_LIKE)


def _wrong_value(value: str, flag: FlagSpec, engine: str) -> str:
    """Why a flag does not take a value; empty where it does."""
    if value in flag.words:
        return ""
    if (choices := flag.choices) is not None and value not in choices:
        folded = [choice.lower() for choice in choices] if flag.any_case else []
        if value.lower() not in folded:
            more = ", …" if len(choices) > _MOST_VALUES else ""
            some = f"it has {', '.join(choices[:_MOST_VALUES])}{more}"
            near = ", ".join(_nearest(value, choices))
            return f"is not among its values ({f'nearest: {near}' if near else some})"
    if flag.type == "json" or (flag.type == "json-or-text" and value.startswith("{")):
        try:
            body = json.loads(value)
        except ValueError as error:
            return f"is not JSON ({error})"
        if flag.fields and not isinstance(body, dict):
            return "is no JSON object"
        for path in _paths(body) if flag.fields else ():
            if not _is_field(path, flag):
                near = ", ".join(_nearest(path, flag.fields))
                return f"has no setting {path!r}" + (f" (nearest: {near})" if near else "")
        return ""
    if flag.type == "size" and engine in _SIZES and _SIZES[engine].fullmatch(value.strip()):
        return ""
    try:
        if flag.type in ("integer", "size"):
            int(value)
        elif flag.type == "number":
            float(value)
    except ValueError:
        return f"is no {flag.type}"
    return ""


def _paths(body: dict[str, Any], above: str = "") -> Iterator[str]:
    """Every key of a JSON object, as a dotted path."""
    for key, value in body.items():
        yield above + key
        if isinstance(value, dict):
            yield from _paths(value, f"{above}{key}.")


def _is_field(path: str, flag: FlagSpec) -> bool:
    return any(fnmatchcase(path, each) for each in flag.fields)


def _parallel(line: CommandLine, flags: ParserFlags, cards: int) -> Iterator[FlagProblem]:
    """Parts of a model that find no card, and ways to divide it that an engine does not have.

    vLLM 0.32.0: config/parallel.py, engine/arg_utils.py. SGLang 0.5.8, 0.5.23:
    check_server_args.
    """
    given = {each.name: each for each in line.given if each.values and not each.path}
    tensor, *others = (_size_of(name, given, flags) for name in _PROCESSES)
    parts = tensor * math.prod(others)
    nodes, data = (_size_of(each, given, flags) for each in ("--nnodes", "--data-parallel-size"))
    is_vllm = flags.engine == "vllm"
    # replicas of vLLM count among the ranks of all nodes; those of SGLang's attention do not
    parts *= data if nodes > 1 and is_vllm else 1
    backend = given.get("--distributed-executor-backend")
    is_elsewhere = backend is not None and backend.values[0] in _ELSEWHERE
    if cards and not is_elsewhere and parts > cards * nodes:
        names = (flags.spellings.get(spelling) for spelling in _PROCESSES)
        written = " × ".join(given[name].written for name in names if name in given)
        found = f"{nodes} nodes with {cards} each" if nodes > 1 else str(cards)
        yield FlagProblem(written, f"{parts} parts need a GPU each, and the recipe is for {found}")
    if parts % nodes:
        yield FlagProblem("--nnodes", f"{parts} parts cannot be shared evenly by {nodes} nodes")
    for flag in ("--distributed-executor-backend", "--data-parallel-backend"):
        if is_vllm and nodes > 1 and flag in given and given[flag].values[0] != "mp":
            yield FlagProblem(flag, f"{given[flag].values[0]!r} takes no --nnodes: only mp does")
    present = {each.name for each in line.given}
    if not is_vllm and nodes > 1 and data > 1 and "--enable-dp-attention" not in present:
        message = "over several nodes SGLang divides data in attention alone"
        yield FlagProblem("--dp-size", f"{message}: it needs --enable-dp-attention")
    if flags.engine == "sglang" and others[0] > 1:
        drafts = given.get("--speculative-algorithm")
        # 0.5.8 knows no drafts beside a pipeline, 0.5.23 those of EAGLE
        if drafts and (drafts.values[0] != "EAGLE" or flags.version.startswith("0.5.8")):
            yield FlagProblem("--pp-size", f"cannot stand beside {drafts.values[0]} speculation")
        if "--enable-mixed-chunk" in present:
            yield FlagProblem("--pp-size", "cannot stand beside --enable-mixed-chunk")
    decode = _size_of(_DECODE, given, flags)
    if is_vllm and others[1] == 1 and tensor % decode:
        yield FlagProblem(_DECODE, f"{decode} does not divide {_TENSOR} {tensor}")


def _size_of(spelling: str, given: Mapping[str | None, Given], flags: ParserFlags) -> int:
    """A number of parts; one where none is named, or no number, which another check reports."""
    found = given.get(flags.spellings.get(spelling, spelling))
    return max(int(found.values[0]), 1) if found and found.values[0].isdecimal() else 1
