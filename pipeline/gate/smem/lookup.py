"""From a kernel's name, or a traceback that an engine left, to the cases that judge it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from pipeline.gate.smem.case_spec import CaseSpec
from pipeline.gate.smem.cases import Gates
from pipeline.model import Frozen

# Lines of a log carry prefixes (a time, a rank): nothing here is bound to the start of a line.
_BEGINS = "Traceback (most recent call last)"
_FRAME = re.compile(r'File "([^"\n]+)\.py", line \d+, in (\w+)')
# `_fwd_kernel[grid](`, as the line of source below a frame shows a launch
_LAUNCH = re.compile(r"(\w+)\[[^\]\n]*\]\(")


class Clue(Frozen):
    """What one traceback tells of a kernel: the active functions, and what they launch."""

    functions: list[tuple[str, str]] = []  # the path of a file without .py, a function in it
    launched: list[str] = []


class FoundCase(Frozen):
    """A case of an image, and by what it was found."""

    image: str
    gate: str
    case: str
    kernels: list[str]
    function: str
    stands_for: list[str]
    found_by: list[str]


def read_tracebacks(text: str) -> list[Clue]:
    """One clue for each traceback of a log; a lone line of source counts as one, too."""
    parts = text.split(_BEGINS)
    clues = [
        Clue(functions=_FRAME.findall(part), launched=_LAUNCH.findall(part))
        for part in (parts[1:] or parts)
    ]
    return [clue for clue in clues if clue.functions or clue.launched]


def find_by_name(gates: Mapping[str, Gates], pattern: str) -> list[FoundCase]:
    """Cases that judge a kernel, or call a function, of a name such as `*mla*`."""
    found = []
    for image, gate, case in _cases(gates):
        names = {*case.kernels, *(function.partition(":")[2] for function in case.function)}
        if matched := sorted(name for name in names if fnmatchcase(name, pattern)):
            found.append(_found(image, gate, case, matched))
    return found


def find_by_clue(gates: Mapping[str, Gates], clue: Clue) -> list[FoundCase]:
    """Cases that call a function of the traceback or judge a kernel it launches, the nearest ones.

    Many kernels are called `_fwd_kernel`: a case that has function and kernel in common with the
    traceback stands before one that has only either.
    """
    ranked = [
        (len(matched), _found(image, gate, case, matched))
        for image, gate, case in _cases(gates)
        if (matched := [*_called(case, clue), *_launched(case, clue)])
    ]
    most = max((number for number, _ in ranked), default=0)
    return [found for number, found in ranked if number == most]


def why_not_judged(gates: Mapping[str, Gates], name: str) -> list[str]:
    """Reasons that images give for having no case for a kernel."""
    return [
        reason
        for each in gates.values()
        for pattern, reason in each.setup.not_judged.items()
        if fnmatchcase(name, pattern)
    ]


def _called(case: CaseSpec, clue: Clue) -> list[str]:
    """The case's function, where the traceback goes through it in a file of the same name."""
    for function in case.function:
        module, _, name = function.partition(":")
        # by the file's name alone: engines move their files from version to version
        stem = module.rpartition(".")[2]
        for path, active in clue.functions:
            if active == name and path.rpartition("/")[2] == stem:
                return [name]
    return []


def _launched(case: CaseSpec, clue: Clue) -> list[str]:
    return [kernel for kernel in case.kernels if kernel in clue.launched][:1]


def _cases(gates: Mapping[str, Gates]) -> Iterator[tuple[str, str, CaseSpec]]:
    for image, each in gates.items():
        for name, gate in sorted(each.gates.items()):
            for case in gate.whole_cases():
                yield image, name, case


def _found(image: str, gate: str, case: CaseSpec, found_by: Sequence[str]) -> FoundCase:
    return FoundCase(
        image=image,
        gate=gate,
        case=case.name,
        kernels=case.kernels,
        function=case.function[0],
        stands_for=case.stands_for,
        found_by=list(found_by),
    )
