"""A launch held against the engine's own argument parser, before anything starts.

An engine names a wrong flag after a minute of imports, on the machine with the cards; some take
the last of two, or a flag for a value. Here the same is found on any machine, with the nearest
name.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from pipeline.errors import RecipeInvalid
from pipeline.model import Frozen
from pipeline.recipe.command_line import (
    CommandLine,
    Given,
    beginnings,
    flag_of,
    spelled,
    split_command_line,
)
from pipeline.recipe.launch import Launch
from pipeline.recipe.parser_flags import FlagSpec, ParserFlags, find_parser_flags, flags_folder
from pipeline.spec.checkout import Checkout

_MOST_NAMES, _MOST_VALUES = 3, 12
_LIKE = 0.6
# Each engine has its own letters, and powers of 1024 take no fraction:
# vllm/utils/argparse_utils.py and sglang/srt/utils/common.py.
_SIZES = {
    "vllm": re.compile(r"\d+(\.\d+)?[kmgt]|\d+[KMGT]"),
    "sglang": re.compile(r"\d+(\.\d+)?[kMGT]|\d+[KMGT]i"),
}


class FlagProblem(Frozen):
    """Why the engine would not start, or would start with something else than what is written."""

    flag: str  # or the variable, as it is written
    message: str
    nearest: list[str] = []

    def __str__(self) -> str:
        near = f"; did you mean {' or '.join(self.nearest)}?" if self.nearest else ""
        return f"{self.flag}: {self.message}{near}"


class Rule(NamedTuple):
    """What an engine asks of two flags once they are parsed."""

    engine: str
    flag: str
    other: str
    together: bool  # whether the first needs the second, or forbids it


# Each is an error of the engine's own: vllm/entrypoints/launchers/cli_args.py of vLLM 0.32.0.
RULES = (
    Rule("vllm", "--enable-auto-tool-choice", "--tool-call-parser", True),
    Rule("vllm", "--enable-log-outputs", "--enable-log-requests", True),
    Rule("vllm", "--enable-per-request-metrics", "--disable-log-stats", False),
    Rule("vllm", "--grpc", "--grpc-port", False),
)


# Each process of an engine has a card of its own, and there is one for each product of these.
_TENSOR = "--tensor-parallel-size"
_PROCESSES = (_TENSOR, "--pipeline-parallel-size", "--prefill-context-parallel-size")
# With these the processes are also on other machines, or somebody else starts them.
_ELSEWHERE = {"ray", "external_launcher"}


def require_known_flags(checkout: Checkout, launch: Launch) -> None:
    """Stop a launch that the engine of its image would refuse, by the committed files."""
    require_flags(launch, find_parser_flags(flags_folder(checkout), launch.engine, launch.image))


def require_flags(launch: Launch, flags: ParserFlags) -> None:
    """Stop at what the engine would not start with."""
    problems = check_flags(launch, flags)
    if not problems:
        return
    first, others = str(problems[0]), len(problems) - 1
    more = f" (and {others} more)" if others else ""
    raise RecipeInvalid(
        f"{launch.recipe}: {first}{more}",
        f"`sm120 recipe flags {flags.image}` shows what {flags.title} accepts.",
    )


def check_flags(launch: Launch, flags: ParserFlags) -> list[FlagProblem]:
    """Everything that the engine's parser, or the engine right after it, would not accept."""
    line = split_command_line(launch.arguments, flags)
    names = {given.name for given in line.given}
    return [
        *(problem for given in line.given for problem in _judge(given, flags, names)),
        *_plain_words(line, flags),
        *_doubled(line, flags),
        *_exclusive(line, flags),
        *_rules(line, flags),
        *_parallel(line, flags, launch.cards),
        *_variables(launch.environment, flags),
    ]


def _judge(given: Given, flags: ParserFlags, names: Container[str | None]) -> Iterator[FlagProblem]:
    if given.name is None:
        yield _unknown(given.written, flags)
        return
    flag = flag_of(given, flags)
    if flag.retired:
        yield FlagProblem(flag=given.written, message=f"was removed: {flag.retired}")
    elif given.superfluous is not None:
        yield FlagProblem(flag=given.written, message="takes no value")
    elif given.path:
        yield from _judge_path(given, flag, flags)
    elif not given.values and _needs_value(flag, given):
        yield FlagProblem(flag=given.written, message="needs a value")
    elif flag.opened_by is None or flag.opened_by not in names:
        yield from (
            _wrong(given, value, why) for value, why in _wrong_values(given, flag, flags.engine)
        )


def _unknown(written: str, flags: ParserFlags) -> FlagProblem:
    head = spelled(written.partition(".")[0] if flags.syntax == "vllm" else written, flags)
    # argparse completes a beginning, but only one that fits a single flag
    if fitting := beginnings(head, flags):
        message = "is the beginning of more than one flag"
        return FlagProblem(flag=written, message=message, nearest=fitting[:_MOST_NAMES])
    message = f"is no flag of {flags.title}"
    return FlagProblem(flag=written, message=message, nearest=_nearest(head, flags.spellings))


def _nearest(name: str, known: Iterable[str]) -> list[str]:
    """The known names that look most like it, the nearest first."""
    return difflib.get_close_matches(name, sorted(known), n=_MOST_NAMES, cutoff=_LIKE)


def _needs_value(flag: FlagSpec, given: Given) -> bool:
    return flag.takes in ("one", "many") and not given.is_off


def _wrong(given: Given, value: str, why: str) -> FlagProblem:
    shown = value if len(value) <= 60 else value[:57] + "..."
    return FlagProblem(flag=given.written, message=f"{shown!r} {why}")


def _wrong_values(given: Given, flag: FlagSpec, engine: str) -> Iterator[tuple[str, str]]:
    for value in given.values:
        if value in flag.words:
            continue
        if flag.choices is not None and not _is_choice(value, flag):
            yield value, f"is not among its values ({_some(value, flag.choices)})"
        elif why := _unreadable(value, flag, engine):
            yield value, why


def _is_choice(value: str, flag: FlagSpec) -> bool:
    choices = flag.choices or []
    return value in choices or (
        flag.any_case and value.lower() in {choice.lower() for choice in choices}
    )


def _some(value: str, choices: list[str]) -> str:
    """The nearest values, or the first ones."""
    if near := _nearest(value, choices):
        return f"nearest: {', '.join(near)}"
    more = ", …" if len(choices) > _MOST_VALUES else ""
    return f"it has {', '.join(choices[:_MOST_VALUES])}{more}"


def _unreadable(value: str, flag: FlagSpec, engine: str) -> str | None:
    """Why a value is not of the flag's type."""
    as_json = flag.type == "json" or (flag.type == "json-or-text" and value.startswith("{"))
    if as_json:
        return _unreadable_json(value, flag)
    if flag.type == "size" and engine in _SIZES and _SIZES[engine].fullmatch(value.strip()):
        return None
    reader = _READERS.get(flag.type)
    try:
        if reader is not None:
            reader(value)
    except ValueError:
        return f"is no {flag.type}"
    return None


_READERS: dict[str, Callable[[str], object]] = {"integer": int, "number": float, "size": int}


def _unreadable_json(value: str, flag: FlagSpec) -> str | None:
    try:
        body = json.loads(value)
    except ValueError as error:
        return f"is not JSON ({error})"
    if not flag.fields:
        return None
    if not isinstance(body, dict):
        return "is no JSON object"
    for path in _paths(body):
        if not _is_field(path, flag):
            near = _nearest(path, flag.fields)
            return f"has no setting {path!r}" + (f" (nearest: {', '.join(near)})" if near else "")
    return None


def _paths(body: dict[str, Any], above: str = "") -> Iterator[str]:
    """Every key of a JSON object, as a dotted path."""
    for key, value in body.items():
        yield above + key
        if isinstance(value, dict):
            yield from _paths(value, f"{above}{key}.")


def _is_field(path: str, flag: FlagSpec) -> bool:
    return any(fnmatchcase(path, each) for each in flag.fields)


def _judge_path(given: Given, flag: FlagSpec, flags: ParserFlags) -> Iterator[FlagProblem]:
    """A dotted name: only flags that take JSON have something below them."""
    if flag.type not in ("json", "json-or-text"):
        message = f"takes no JSON, so {flags.title} knows nothing below it"
        yield FlagProblem(flag=given.written, message=message)
    elif not given.values:
        yield FlagProblem(flag=given.written, message="needs a value")
    elif flag.fields and not _is_field(given.path, flag):
        head = given.written.partition(".")[0]
        near = [f"{head}.{path}" for path in _nearest(given.path, flag.fields)]
        message = f"has no setting {given.path!r}"
        yield FlagProblem(flag=given.written, message=message, nearest=near)


def _plain_words(line: CommandLine, flags: ParserFlags) -> Iterator[FlagProblem]:
    for word in line.plain[flags.plain_words :]:
        yield FlagProblem(flag=word, message="is a word that no flag takes")


def _doubled(line: CommandLine, flags: ParserFlags) -> Iterator[FlagProblem]:
    """Flags of which only the last would count, and flags turned on and off."""
    seen: dict[str, Given] = {}
    for given in line.given:
        if given.name is None or flag_of(given, flags).repeats:
            continue
        before = seen.setdefault(f"{given.name}.{given.path}", given)
        if given.is_off != before.is_off:
            yield FlagProblem(flag=given.written, message=f"contradicts {before.written}")
        elif before is not given:
            message = "is given twice, and only the last one counts"
            yield FlagProblem(flag=given.written, message=message)
        elif given.path and (whole := seen.get(f"{given.name}.")):
            # vLLM puts the parts together and gives them to the flag once more
            message = f"only the parts count beside {whole.written}: write all of it in one way"
            yield FlagProblem(flag=given.written, message=message)


def _exclusive(line: CommandLine, flags: ParserFlags) -> Iterator[FlagProblem]:
    named = {given.name: given.written for given in line.given}
    for group in flags.exclusive:
        present = [named[name] for name in group if name in named]
        if len(present) > 1:
            message = f"cannot stand beside {', '.join(present[:-1])}"
            yield FlagProblem(flag=present[-1], message=message)


def _rules(line: CommandLine, flags: ParserFlags) -> Iterator[FlagProblem]:
    on = {given.name for given in line.given if given.name and not given.is_off}
    for rule in RULES:
        if rule.engine != flags.engine or rule.flag not in on:
            continue
        if rule.together and rule.other not in on:
            yield FlagProblem(flag=rule.flag, message=f"needs {rule.other}")
        elif not rule.together and rule.other in on:
            yield FlagProblem(flag=rule.flag, message=f"cannot stand beside {rule.other}")


def _parallel(line: CommandLine, flags: ParserFlags, cards: int) -> Iterator[FlagProblem]:
    """Parts of a model that find no card: vllm/config/parallel.py of vLLM 0.32.0 has both rules."""
    given = {each.name: each for each in line.given if each.values and not each.path}
    sizes = [_size_of(name, given, flags) for name in _PROCESSES]
    backend = given.get("--distributed-executor-backend")
    is_here = "--nnodes" not in given and not (backend and backend.values[0] in _ELSEWHERE)
    if cards and is_here and math.prod(sizes) > cards:
        message = f"{math.prod(sizes)} parts need a GPU each, and the recipe is for {cards}"
        yield FlagProblem(flag=" × ".join(_written(given, flags)), message=message)
    tensor, decode = sizes[0], _size_of("--decode-context-parallel-size", given, flags)
    if flags.engine == "vllm" and sizes[2] == 1 and tensor % decode:
        message = f"{decode} does not divide {_TENSOR} {tensor}"
        yield FlagProblem(flag="--decode-context-parallel-size", message=message)


def _size_of(spelling: str, given: Mapping[str | None, Given], flags: ParserFlags) -> int:
    """A number of parts; one where nothing is said, or no number, which is told elsewhere."""
    found = given.get(flags.spellings.get(spelling, spelling))
    return max(int(found.values[0]), 1) if found and found.values[0].isdecimal() else 1


def _written(given: Mapping[str | None, Given], flags: ParserFlags) -> Iterator[str]:
    names = (flags.spellings.get(spelling) for spelling in _PROCESSES)
    return (given[name].written for name in names if name in given)


def _variables(environment: Iterable[str], flags: ParserFlags) -> Iterator[FlagProblem]:
    """The engine's own variables; those of others (NCCL_, CUDA_) are not its business."""
    for name in environment:
        if name.startswith(tuple(flags.prefixes)) and name not in flags.variables:
            message = f"is no variable of {flags.title}"
            yield FlagProblem(flag=name, message=message, nearest=_nearest(name, flags.variables))
