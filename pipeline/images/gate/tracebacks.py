"""From a log to a kernel: the tracebacks in it, and the cases, patches and images that know it.

Triton ends a launch with `OutOfResources: shared memory, Required: …, Hardware limit: …`. Lines of
a log carry prefixes (a time, a rank), so nothing here is bound to the start of a line. The same
bytes do not prove that it is the same kernel: a traceback, where the log has one, tells more.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import takewhile

from pydantic import ValidationError

from pipeline.artifacts.store.store import Store, read_own
from pipeline.core.errors import GateInvalid, StoreDamaged
from pipeline.core.model import Frozen
from pipeline.images.gate.evidence import ImageGates, evidence_path
from pipeline.images.gate.smem.cases import CaseSpec, GateFile, Gates, KernelCase, read_gates
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import PatchSpec

_BEGINS = "Traceback (most recent call last)"
_FRAME = re.compile(r'File "([^"\n]{1,1000}\.py)", line \d+, in (\w+)')
# `_fwd_kernel[grid](`, as the line of source below a frame shows a launch
_LAUNCH = re.compile(r"\b(\w+)\[[^\]\n]*\]\(")
# Inductor writes no commas and no second space: `Required: 147456 Hardware limit:101376`.
_OVERRUN = re.compile(r"Required: ?(\d{1,9}),? ?Hardware limit: ?(\d{1,9})")
# An engine's own frames are among the last dozens, below those of its server and above Triton's.
_MOST_FRAMES = 60
# Of one log: a server that fails at every request repeats few.
_MOST_TRACEBACKS = 100
# Each is looked up in the cases of every image; a crash has one, or one for each size it tried.
_MOST_OVERRUNS = 20
_LONGEST_LINE = 4000


class Frame(Frozen):
    """One step of a traceback."""

    path: str
    function: str

    def shared_parts(self, path: str) -> int:
        """Counts the parts that are the same at the ends of its own path and of another one."""
        pairs = zip(reversed(self.path.split("/")), reversed(path.split("/")), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def is_in(self, path: str) -> bool:
        """Whether it is in a file of a package, wherever that is installed."""
        return self.shared_parts(path) == path.count("/") + 1

    def calls(self, function: str) -> bool:
        """Whether it is in that function, in a file of the same whole path."""
        path, name = _place(function)
        return self.function == name and self.is_in(path)


def _place(function: str) -> tuple[str, str]:
    module, _, name = function.partition(":")
    return f"{module.replace('.', '/')}.py", name


class Traceback(Frozen):
    """The active functions of one traceback, and the kernels that they launch."""

    frames: tuple[Frame, ...] = ()
    launched: tuple[str, ...] = ()

    def called(self, functions: Iterable[str]) -> set[str]:
        """Returns the functions of cases that it goes through.

        For each frame it takes the one in the nearest file. Packages are installed anywhere, and
        engines move their files from version to version: where nothing more is the same, the name
        of the file is enough, and then there may be several.
        """
        called, places = set(), [(f, *_place(f)) for f in set(functions)]
        for frame in self.frames:
            shared = {f: frame.shared_parts(p) for f, p, name in places if name == frame.function}
            most = max(shared.values(), default=0)
            called |= {function for function, n in shared.items() if n == most and n}
        return called


class Overrun(Frozen):
    """A launch that asked for more shared memory than its card has."""

    required_bytes: int
    limit_bytes: int
    traceback: Traceback = Traceback()


class TracebackReader:
    """Notes tracebacks and overruns, each once, in lines that it hands on."""

    def __init__(self) -> None:
        self._frames: deque[Frame] = deque(maxlen=_MOST_FRAMES)
        self._launched: deque[str] = deque(maxlen=_MOST_FRAMES)
        self._has_begun = False
        self._tracebacks: dict[Traceback, None] = {}
        self._overruns: dict[tuple[int, int], Overrun] = {}

    @property
    def tracebacks(self) -> list[Traceback]:
        """In the order of the log; a lone line of source counts as one, too."""
        return list(self._tracebacks)

    @property
    def overruns(self) -> list[Overrun]:
        return list(self._overruns.values())

    def watch(self, lines: Iterable[str]) -> Iterator[str]:
        """The same lines, one by one: a log may be a pipe, which can be read only once."""
        for line in lines:
            self._note(line[:_LONGEST_LINE])
            yield line
        self._end()
        self._has_begun = False

    def _note(self, line: str) -> None:
        if _BEGINS in line:
            # before the first one come lines of a log that look like source
            self._end(is_kept=self._has_begun)
            self._has_begun = True
        self._frames.extend(Frame(path=f[1], function=f[2]) for f in _FRAME.finditer(line))
        # few lines have it, and to look for whole words in each takes long
        if "](" in line:
            self._launched.extend(_LAUNCH.findall(line))
        if match := _OVERRUN.search(line):
            required, limit = int(match[1]), int(match[2])
            overrun = Overrun(required_bytes=required, limit_bytes=limit, traceback=self._end())
            known = self._overruns.get((required, limit))
            is_new = known is None and len(self._overruns) < _MOST_OVERRUNS
            # the first that has a traceback: later lines often only repeat the message
            if is_new or (known and not known.traceback.frames):
                self._overruns[required, limit] = overrun

    def _end(self, *, is_kept: bool = True) -> Traceback:
        traceback = Traceback(frames=tuple(self._frames), launched=tuple(self._launched))
        self._frames.clear()
        self._launched.clear()
        if is_kept and traceback != Traceback():
            self._tracebacks[traceback] = None
            # a crash is at the end of a log
            if len(self._tracebacks) > _MOST_TRACEBACKS:
                del self._tracebacks[next(iter(self._tracebacks))]
        return traceback


class KnownKernel(Frozen):
    """A kernel of an image that a launch may be, and what was done about it."""

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
    """Finds the kernels of all images that an overrun may be, the likeliest first."""
    gates: dict[str, Gates] = {}
    for image in checkout.images():
        with suppress(GateInvalid):  # an image without gates has nothing to compare with
            gates[image] = read_gates(checkout, image)
    functions = {f for each in gates.values() for case in each.cases() for f in case.function}
    called = overrun.traceback.called(functions)
    known: list[KnownKernel] = []
    for image, each in gates.items():
        patches = checkout.series(checkout.spec(image)).patches
        measured: set[str] = set()  # cases that were seen to need exactly these bytes
        for platform in checkout.spec(image).platforms:
            # of any build: whether these are the latest bytes does not matter for a number
            with suppress(FileNotFoundError, StoreDamaged, ValidationError):
                text = read_own(evidence_path(store, image, platform))
                results = ImageGates.model_validate_json(text).results
                for row in (row for x in results if x.gate == "smem" for row in x.rows):
                    needs = [kernel["record"]["shared_bytes"] for kernel in row.facts["kernels"]]
                    measured |= {row.name} if overrun.required_bytes in needs else set()
        for name, gate in sorted(each.gates.items()):
            own = [patch for patch in patches if patch.gate == name]
            kernel = _known(image, gate, each.cases(name), overrun, own, measured, called)
            known += [kernel] if kernel else []
    known.sort(key=lambda k: (not k.same_bytes, k.patch is None, k.image, k.gate))
    # what a traceback names is surer than a number that two kernels may share
    named = [k for k in known if k.in_traceback]
    return [k for k in named if k.same_bytes] or named or known


def _known(
    image: str,
    gate: GateFile,
    cases: Sequence[KernelCase],
    overrun: Overrun,
    patches: Sequence[PatchSpec],
    recorded: set[str],
    functions: set[str],
) -> KnownKernel | None:
    frames = overrun.traceback.frames

    def names_bytes(patch: PatchSpec) -> bool:
        # a patch's reason also states the limit, and what the patched kernel needs
        is_over = overrun.required_bytes > overrun.limit_bytes
        return is_over and str(overrun.required_bytes) in re.findall(r"\d+", patch.why)

    def changes_it(patch: PatchSpec) -> bool:
        return any(frame.is_in(file.path) for frame in frames for file in patch.files)

    patch = next((p for p in patches if names_bytes(p) or changes_it(p)), None)
    called = [case for case in cases if functions & {*case.function}]
    accepted = next((a for a in gate.accepted if a.most_bytes == overrun.required_bytes), None)
    measured = [c for c in cases if c.name in recorded or (accepted and accepted.covers(c.name))]
    same_bytes = bool(measured or (patch and names_bytes(patch)))
    is_patched = patch is not None and changes_it(patch)
    if not (same_bytes or called or is_patched):
        return None
    chosen = called or measured or cases
    # one pattern for all of the cases; the first alone where they begin differently
    names = [case.name for case in chosen]
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    start = "".join(letters[0] for letters in same)
    return KnownKernel(
        image=image,
        engine=gate.engine,
        gate=chosen[0].gate,
        kernels=_each_once(k for case in chosen for k in case.kernels),
        functions=_each_once(f.partition(":")[2] for case in chosen for f in case.function),
        stands_for=_each_once(name for case in chosen for name in case.stands_for),
        same_bytes=same_bytes,
        in_traceback=bool(called) or is_patched,
        same_path=is_patched
        or any(x.calls(f) for case in called for f in case.function for x in frames),
        patch=patch.file if patch else None,
        applies_to=patch.applies_to if patch else None,
        accepted=accepted.reason if accepted else None,
        case=names[0] if len(names) == 1 or not start else f"{start}*",
    )


def _each_once(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


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
    """Finds cases that judge a kernel, or call a function, of a name such as `*mla*`."""
    found = []
    for image, gate, case in _cases(gates):
        if matched := sorted(name for name in _names(case) if fnmatchcase(name, pattern)):
            found.append(_found(image, gate, case, matched))
    return found


def _names(case: CaseSpec) -> set[str]:
    return {*case.kernels, *(function.partition(":")[2] for function in case.function)}


def find_by_traceback(gates: Mapping[str, Gates], traceback: Traceback) -> list[FoundCase]:
    """Finds cases that call a function of the traceback or judge a kernel it launches.

    Many kernels are called `_fwd_kernel`: a case that has function and kernel in common with the
    traceback comes before one that has only either. Images of the engine that crashed come first.
    """
    called = traceback.called(f for _, _, case in _cases(gates) for f in case.function)
    ranked = []
    for image, gate, case in _cases(gates):
        matched = [f.partition(":")[2] for f in case.function if f in called][:1]
        matched += [kernel for kernel in case.kernels if kernel in traceback.launched][:1]
        if matched:
            ranked.append((len(matched), _found(image, gate, case, matched)))
    most = max((number for number, _ in ranked), default=0)
    parts = {part for frame in traceback.frames for part in frame.path.split("/")}
    best = [found for number, found in ranked if number == most]
    return sorted(best, key=lambda found: gates[found.image].setup.package not in parts)


def _cases(gates: Mapping[str, Gates]) -> Iterator[tuple[str, str, CaseSpec]]:
    for image, each in gates.items():
        for name, gate in sorted(each.gates.items()):
            for case in gate.whole_cases():
                yield image, name, case


def _found(image: str, gate: str, case: CaseSpec, found_by: list[str]) -> FoundCase:
    return FoundCase(
        image=image,
        gate=gate,
        case=case.name,
        kernels=case.kernels,
        function=case.function[0],
        stands_for=case.stands_for,
        found_by=found_by,
    )
