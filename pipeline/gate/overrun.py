"""From a crash to its kernel: which image, patch or case file has exactly these bytes.

The same bytes do not prove that it is the same kernel: a traceback, where the log has one, tells
more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import takewhile

from pydantic import ValidationError

from pipeline.errors import GateInvalid, StoreDamaged
from pipeline.gate.evidence import Evidence, ImageGates, evidence_path
from pipeline.gate.smem.case_spec import GateFile
from pipeline.gate.smem.cases import Case, Gates, read_gates
from pipeline.gate.tracebacks import Overrun
from pipeline.model import Frozen
from pipeline.spec.checkout import Checkout
from pipeline.spec.image import PatchSpec
from pipeline.store.store import Store, read_own


class KnownKernel(Frozen):
    """What is known here about a launch: a kernel of an image, and what was done about it."""

    image: str
    engine: str
    gate: str
    kernels: list[str]
    functions: list[str]
    stands_for: list[str]
    same_bytes: bool
    in_traceback: bool
    same_path: bool  # as in the traceback; else only function and name of the file are the same
    patch: str | None = None
    applies_to: str | None = None
    accepted: str | None = None
    case: str  # a pattern for `sm120 gate run --case`

    @property
    def commands(self) -> list[str]:
        """What to run: the image that has the patch, and the proof without a card."""
        judge = f"sm120 gate run {self.image} --only smem"
        if self.patch is None:
            return [f"{judge} --case '{self.case}'"]
        get = f"sm120 build {self.image} && sm120 load {self.image}"
        return [get, f"{judge} --unpatched --case '{self.case}'"]


def known_kernels(checkout: Checkout, store: Store, overrun: Overrun) -> list[KnownKernel]:
    """Kernels of all images that an overrun may be, the likeliest first."""
    gates = {image: read for image in checkout.images() if (read := _gates(checkout, image))}
    functions = {f for each in gates.values() for case in each.cases() for f in case.function}
    called = overrun.traceback.called(functions)
    known = [
        kernel
        for image, each in gates.items()
        for kernel in _of_image(checkout, store, image, each, overrun, called)
    ]
    known.sort(key=lambda k: (not k.same_bytes, k.patch is None, k.image, k.gate))
    # what a traceback names is surer than a number that two kernels may share
    named = [k for k in known if k.in_traceback]
    return [k for k in named if k.same_bytes] or named or known


def _gates(checkout: Checkout, image: str) -> Gates | None:
    with suppress(GateInvalid):  # an image without gates has nothing to compare with
        return read_gates(checkout, image)
    return None


def _of_image(
    checkout: Checkout,
    store: Store,
    image: str,
    gates: Gates,
    overrun: Overrun,
    called: set[str],
) -> Iterator[KnownKernel]:
    patches = checkout.series(checkout.spec(image)).patches
    recorded = _recorded(checkout, store, image, overrun.required_bytes)
    for name, gate in sorted(gates.gates.items()):
        patch = next((p for p in patches if p.gate == name and _is_about(p, overrun)), None)
        kernel = _known(image, gate, gates.cases(name), overrun, patch, recorded, called)
        if kernel:
            yield kernel


def _known(
    image: str,
    gate: GateFile,
    cases: Sequence[Case],
    overrun: Overrun,
    patch: PatchSpec | None,
    recorded: set[str],
    functions: set[str],
) -> KnownKernel | None:
    called = [case for case in cases if functions & {*case.function}]
    accepted = next((a for a in gate.accepted if a.most_bytes == overrun.required_bytes), None)
    measured = [c for c in cases if c.name in recorded or (accepted and accepted.covers(c.name))]
    same_bytes = bool(measured or (patch and _names_bytes(patch, overrun)))
    is_patched = patch is not None and _is_patched(patch, overrun)
    in_traceback = bool(called) or is_patched
    if not (same_bytes or in_traceback):
        return None
    chosen = called or measured or cases
    return KnownKernel(
        image=image,
        engine=gate.engine,
        gate=chosen[0].gate,
        kernels=_united(case.kernels for case in chosen),
        functions=_united([f.partition(":")[2] for f in case.function] for case in chosen),
        stands_for=_united(case.stands_for for case in chosen),
        same_bytes=same_bytes,
        in_traceback=in_traceback,
        same_path=is_patched or any(_has_path(case, overrun) for case in called),
        patch=patch.file if patch else None,
        applies_to=patch.applies_to if patch else None,
        accepted=accepted.reason if accepted else None,
        case=_pattern([case.name for case in chosen]),
    )


def _recorded(checkout: Checkout, store: Store, image: str, required_bytes: int) -> set[str]:
    """Cases of a built image that were seen to need exactly these bytes."""
    return {
        row.name
        for platform in checkout.spec(image).platforms
        for result in _results(store, image, platform)
        if result.gate == "smem"
        for row in result.rows
        if any(k["record"]["shared_bytes"] == required_bytes for k in row.facts["kernels"])
    }


def _results(store: Store, image: str, platform: str) -> list[Evidence]:
    # of any build: whether these are the latest bytes does not matter for a number
    with suppress(FileNotFoundError, StoreDamaged, ValidationError):
        text = read_own(evidence_path(store, image, platform))
        return ImageGates.model_validate_json(text).results
    return []


def _has_path(case: Case, overrun: Overrun) -> bool:
    frames = overrun.traceback.frames
    return any(frame.calls(function) for frame in frames for function in case.function)


def _is_about(patch: PatchSpec, overrun: Overrun) -> bool:
    return _names_bytes(patch, overrun) or _is_patched(patch, overrun)


def _names_bytes(patch: PatchSpec, overrun: Overrun) -> bool:
    """Whether the reason for a patch states these bytes as too many."""
    # it also states the limit, and what the patched kernel needs
    is_over = overrun.required_bytes > overrun.limit_bytes
    return is_over and str(overrun.required_bytes) in re.findall(r"\d+", patch.why)


def _is_patched(patch: PatchSpec, overrun: Overrun) -> bool:
    frames = overrun.traceback.frames
    return any(frame.is_in(file.path) for frame in frames for file in patch.files)


def _united(lists: Iterable[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(name for each in lists for name in each))


def _pattern(names: Sequence[str]) -> str:
    """One pattern for all of the cases; the first alone where they begin differently."""
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    start = "".join(letters[0] for letters in same)
    return names[0] if len(names) == 1 or not start else f"{start}*"
