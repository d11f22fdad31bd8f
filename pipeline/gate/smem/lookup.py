"""From a kernel's name, or a traceback that an engine left, to the cases that judge it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from pipeline.gate.smem.case_spec import CaseSpec
from pipeline.gate.smem.cases import Gates
from pipeline.gate.tracebacks import Traceback
from pipeline.model import Frozen


class FoundCase(Frozen):
    """A case of an image, and by what it was found."""

    image: str
    gate: str
    case: str
    kernels: list[str]
    function: str
    stands_for: list[str]
    found_by: list[str]


def find_by_name(gates: Mapping[str, Gates], pattern: str) -> list[FoundCase]:
    """Cases that judge a kernel, or call a function, of a name such as `*mla*`."""
    found = []
    for image, gate, case in _cases(gates):
        names = {*case.kernels, *(function.partition(":")[2] for function in case.function)}
        if matched := sorted(name for name in names if fnmatchcase(name, pattern)):
            found.append(_found(image, gate, case, matched))
    return found


def find_by_traceback(gates: Mapping[str, Gates], traceback: Traceback) -> list[FoundCase]:
    """Cases that call a function of the traceback or judge a kernel it launches, the nearest ones.

    Many kernels are called `_fwd_kernel`: a case that has function and kernel in common with the
    traceback stands before one that has only either.
    """
    called = traceback.called(f for _, _, case in _cases(gates) for f in case.function)
    ranked = [
        (len(matched), _found(image, gate, case, matched))
        for image, gate, case in _cases(gates)
        if (matched := [*_called(case, called), *_launched(case, traceback)])
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


def _called(case: CaseSpec, called: set[str]) -> list[str]:
    return [f.partition(":")[2] for f in case.function if f in called][:1]


def _launched(case: CaseSpec, traceback: Traceback) -> list[str]:
    return [kernel for kernel in case.kernels if kernel in traceback.launched][:1]


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
