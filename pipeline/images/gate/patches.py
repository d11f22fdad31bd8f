"""Is a patch still needed? Its gate decides, with it and without it, at any version.

`git apply` and reverse-apply only compare text, so they miss a fix that upstream wrote differently
(sglang PR 17908 was superseded that way by PR 14311). A gate compares what the kernels need:

    needed      fails without the patch, passes with it
    upstreamed  passes without it, and upstream's file holds the patch's own lines
    superseded  passes without it, by other code
    inert       fails without it, and applying it changes nothing
    weak        fails without it, and still fails with it, differently
    conflict    fails without it, and it cannot be applied
    wrong       passes with it, and a kernel then computes wrong numbers
    not needed yet: as superseded, or without such code at all, in a version before the locked one
    no gate     series.yaml says why no gate can judge it, as it is not about a kernel
    unknown     a case could not be judged: never taken for any of the others
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from pipeline.core import log
from pipeline.core.errors import GateInvalid, PatchConflict, PipelineError
from pipeline.core.model import Frozen
from pipeline.core.verdict import worst
from pipeline.images.gate.numerics import check_numbers, numeric_cases
from pipeline.images.gate.parsers.judge import ParserResult, open_parser_gate
from pipeline.images.gate.smem import engine
from pipeline.images.gate.smem.engine import GateContext
from pipeline.images.gate.smem.image_gate import ImageGate, OpenedGate
from pipeline.images.gate.smem.limits import Card
from pipeline.images.gate.smem.results import (
    CaseResult,
    NumericsResult,
    NumericsResults,
    NumericsVerdict,
    fingerprint,
)
from pipeline.images.gate.templates.judge import RenderedCase, open_template_gate
from pipeline.images.lock.model import WheelPin
from pipeline.images.spec.image import PatchSpec

State = Literal[
    "needed",
    "upstreamed",
    "superseded",
    "not needed yet",
    "inert",
    "weak",
    "conflict",
    "wrong",
    "no gate",
    "unknown",
]
PARSERS = "parsers-"  # before the name of a family, in the gate of a patch of its parser
TEMPLATES = "templates-"  # and of what renders its conversations
ChatOrKernel: TypeAlias = CaseResult | ParserResult | RenderedCase
Judged = TypeVar("Judged")
# Each version is a wheel to fetch and every case of the patch to compile.
MOST_VERSIONS = 40
_VERSIONS = "Name a version that exists, or a range such as '>=0.5.8,<0.6'."


class PatchVerdict(Frozen):
    """One patch at one version of its engine."""

    patch: str
    gate: str | None
    version: str
    state: State
    message: str
    judged_with: dict[str, str] = {}  # the image's own Triton and torch, whatever the version
    requires: list[str] = []  # what this version's METADATA requires of those
    # case → the most shared memory a kernel of it needs; of parsers, the streams that fail
    without: dict[str, int] = {}
    with_patch: dict[str, int] = {}
    numerics: NumericsVerdict | None = None  # of the patched kernels; none where not asked for


def decide(
    without: Sequence[ChatOrKernel],
    with_patch: Sequence[ChatOrKernel] | None,
    *,
    applied: bool,
    conflict: str,
    is_older: bool = False,
    is_absent: bool = False,
) -> tuple[State, str]:
    """The verdict, from the gate's results; `with_patch` is none where it does not apply.

    `is_older`: the version is before the locked one; `is_absent`: no function that the
    gate calls is anywhere in it.
    """
    before = worst([case.verdict for case in without], "unknown")
    # before anything else: cases whose functions are gone are unknown, which this is not
    if is_older and is_absent:
        return "not needed yet", "this older version does not have the code yet"
    if before == "unknown":
        return "unknown", _first_message(without, "unknown")
    if before != "failed":
        if applied:
            return "upstreamed", "upstream holds the patch's own lines, and the gate passes"
        if is_older:
            return "not needed yet", "the gate passes without it at this older version"
        return "superseded", "the gate passes without it"
    if with_patch is None:
        return "conflict", conflict
    after = worst([case.verdict for case in with_patch], "unknown")
    # compared by what was compiled: a patch of code that no case reaches changes no verdict either
    if _findings(without) == _findings(with_patch):
        return "inert", f"changes nothing: {_first_message(with_patch, 'failed')}"
    if after == "unknown":
        return "unknown", _first_message(with_patch, "unknown")
    if after == "failed":
        return "weak", f"still fails with it: {_first_message(with_patch, 'failed')}"
    return "needed", _first_message(without, "failed")


def with_numbers(state: State, message: str, numbers: NumericsResults | None) -> tuple[State, str]:
    """A patch that fits is needed only if its kernels still compute the right thing."""
    if numbers is None or numbers.verdict == "right":
        return state, message
    if first := _first_message(numbers.cases, numbers.verdict):
        return numbers.verdict, first
    return "unknown", "no case has its numbers compared"


def _findings(cases: Sequence[ChatOrKernel]) -> list[object]:
    """What cases found, without times: equal for two engines that behave the same."""
    kernels = fingerprint([case for case in cases if isinstance(case, CaseResult)])
    answers = [case for case in cases if not isinstance(case, CaseResult)]
    return [*kernels, *(case.model_dump(exclude={"seconds", "cached"}) for case in answers)]


def _first_message(cases: Sequence[ChatOrKernel | NumericsResult], verdict: str) -> str:
    return next((f"{x.name}: {x.message}" for x in cases if x.verdict == verdict), "")


def judge_patches(gate: ImageGate, card: Card, version: str | None = None) -> list[PatchVerdict]:
    """Judges every patch of an image at one version: the locked one, or another of the index."""
    pin = engine.engine_pin(gate.context, gate.plan, gate.gates.setup.package, version)
    tree = engine.engine_tree(gate.context, gate.plan, pin)
    return [_judge(gate, card, tree, spec) for spec in gate.series.patches]


def without_gate(spec: PatchSpec, version: str) -> PatchVerdict:
    """A patch that is not about a kernel: no gate runs for it, and its reason is shown."""
    return PatchVerdict(
        patch=spec.file, gate=None, version=version, state="no gate", message=spec.no_gate or ""
    )


def _judge(gate: ImageGate, card: Card, tree: engine.EngineTree, spec: PatchSpec) -> PatchVerdict:
    if spec.gate is None:
        _, conflict = _with_patches(gate, tree, gate.series.patches, spec)
        known = without_gate(spec, tree.version)
        update = {"state": "conflict", "message": conflict}
        return known.model_copy(update=update) if conflict else known
    if spec.gate.startswith((PARSERS, TEMPLATES)):
        return judge_chat_patch(gate, tree, spec)
    cases = gate.gates.cases(only=spec.gate)
    if not cases:
        raise GateInvalid(
            f"{spec.file}: its gate {spec.gate} has no cases",
            "`gate` names a case file without .yaml; `no_gate` says why there is none.",
        )
    without, after, full, conflict = _both_ways(
        gate, tree, spec, partial(gate.judge, card=card, cases=cases)
    )
    # gone from the whole version, and not only from where the case looks for it
    is_absent = all(
        result.gone and not engine.modules_defining(tree, [f.partition(":")[2] for f in names])
        for names, result in zip((case.function for case in cases), without, strict=True)
    )
    state, message = decide(
        without,
        after,
        applied=engine.is_applied(tree, spec, gate.patch_folder),
        conflict=conflict,
        is_older=Version(tree.version) < Version(spec.made_for or gate.tree.version),
        is_absent=is_absent,
    )
    numbers = None
    # numbers take minutes, and only a patch that fits is worth them
    if state == "needed":
        small = [case for case in numeric_cases(gate) if case.gate == spec.gate]
        numbers = check_numbers(gate.target(full, card), small) if small else None
        state, message = with_numbers(state, message, numbers)
    return PatchVerdict(
        patch=spec.file,
        gate=spec.gate,
        version=tree.version,
        state=state,
        message=message,
        judged_with=gate.environment.facts.model_dump(include={"triton", "torch"}),
        requires=engine.compiler_requirements(tree),
        without=_needs(without),
        with_patch=_needs(after or []),
        numerics=numbers.verdict if numbers else None,
    )


def judge_chat_patch(
    gate: OpenedGate[Any], tree: engine.EngineTree, spec: PatchSpec
) -> PatchVerdict:
    """Judges a patch of a parser, or of rendering, by the cases of the family its gate names."""
    kind, _, family = (spec.gate or "").partition("-")
    judge: Callable[[engine.EngineTree], Sequence[ParserResult | RenderedCase]]
    if kind == "templates":
        # an error where there is no such family
        rendering = open_template_gate(gate.context, gate.plan, {}, f"{family}/*")
        judge = partial(rendering.judge, chosen=rendering.opened.gates.chosen(f"{family}/*"))
        python = rendering.opened.environment.facts.python
    else:
        parsing = open_parser_gate(gate.context, gate.plan)
        cases = [case for case in parsing.gates.cases if case.family == family]
        if not cases:
            raise GateInvalid(
                f"{spec.file}: its gate {spec.gate} has no cases",
                f"`gate: {PARSERS}FAMILY` names a family of gates/parsers.yaml.",
            )
        judge, python = partial(parsing.judge, cases=cases), parsing.environment.facts.python
    without: Sequence[ParserResult | RenderedCase]
    after: Sequence[ParserResult | RenderedCase] | None
    without, after, _, conflict = _both_ways(gate, tree, spec, judge)
    state, message = decide(
        without,
        after,
        applied=engine.is_applied(tree, spec, gate.patch_folder),
        conflict=conflict,
        is_older=Version(tree.version) < Version(spec.made_for or gate.tree.version),
        # a version that cannot even be imported here is unknown, and not without the code
        is_absent=not any((tree.folder / file.path).is_file() for file in spec.files),
    )
    return PatchVerdict(
        patch=spec.file,
        gate=spec.gate,
        version=tree.version,
        state=state,
        message=message,
        judged_with={"python": python},
        without={case.name: case.failed for case in without if case.failed},
        with_patch={case.name: case.failed for case in after or [] if case.failed},
    )


def _both_ways(
    gate: OpenedGate[Any],
    tree: engine.EngineTree,
    spec: PatchSpec,
    judge: Callable[[engine.EngineTree], Sequence[Judged]],
) -> tuple[Sequence[Judged], Sequence[Judged] | None, engine.EngineTree, str]:
    """What a gate finds without a patch and with it; the tree with it; and why it does not fit."""
    # with the others in place, as in the image: one patch may need another
    base, _ = _with_patches(gate, tree, [each for each in gate.series.patches if each is not spec])
    full, conflict = _with_patches(gate, tree, gate.series.patches, spec)
    return judge(base), None if conflict else judge(full), full, conflict


def _with_patches(
    gate: OpenedGate[Any],
    tree: engine.EngineTree,
    patches: Sequence[PatchSpec],
    judged: PatchSpec | None = None,
) -> tuple[engine.EngineTree, str]:
    """Applies the patches that fit to a tree; says why the judged one does not."""
    fitting: list[PatchSpec] = []
    conflict = ""
    for spec in patches:
        try:
            engine.patched_files(tree, [*fitting, spec], gate.patch_folder)
            fitting.append(spec)
        except PatchConflict as error:
            # another one that does not fit has a verdict of its own
            conflict = str(error) if spec is judged else conflict
    return engine.patched(tree, fitting, gate.patch_folder, gate.context), conflict


def _needs(cases: Sequence[CaseResult]) -> dict[str, int]:
    return {c.name: c.worst.record.shared_bytes or 0 for c in cases if c.worst is not None}


def versions_against(context: GateContext, locked: WheelPin, wanted: str) -> list[str]:
    """`0.5.9`, `0.5.9,0.5.10` or a range such as `>=0.5.9,<0.6`, as versions of the engine."""
    parts = [part.strip() for part in wanted.split(",") if part.strip()]
    with suppress(InvalidVersion):
        named = [Version(part) for part in parts]
        # the locked version's wheel is known by its hash and needs no index
        if others := [version for version in named if version != Version(locked.version)]:
            finder = context.make_finder()
            # a user who names a withdrawn version wants just that one
            offered = finder.versions(locked.name, withdrawn=True)
            if missing := [version for version in others if version not in offered]:
                newest = ", ".join(map(str, finder.versions(locked.name)[-3:])) or "none"
                raise GateInvalid(
                    f"{locked.name} {missing[0]}: no index has a wheel of this version"
                    f" (its newest: {newest})",
                    _VERSIONS,
                )
        if named:
            return [str(version) for version in named]
    try:
        accepted = SpecifierSet(wanted)
    except InvalidSpecifier:
        parts = []
    if not parts:
        raise GateInvalid(f"{wanted}: is neither a version nor a range of versions", _VERSIONS)
    offered = context.make_finder().versions(locked.name)
    # a release candidate is judged where it is named, not because a range reaches it
    versions = [str(v) for v in offered if accepted.contains(v, prereleases=False)]
    if not versions:
        raise GateInvalid(f"{locked.name}: no published version matches {wanted}", _VERSIONS)
    if len(versions) > MOST_VERSIONS:
        raise GateInvalid(
            f"{wanted}: matches {len(versions)} versions, more than {MOST_VERSIONS}",
            "Name a smaller range.",
        )
    return versions


def judge_against(gate: ImageGate, card: Card, versions: Sequence[str]) -> list[PatchVerdict]:
    """Judges patches at several versions; one that cannot be fetched is unknown, not an end."""
    verdicts: list[PatchVerdict] = []
    for version in versions:
        log.say(f"Judging the patches at {gate.gates.setup.package} {version}")
        try:
            verdicts += judge_patches(gate, card, version)
        except PipelineError as error:
            unknown = PatchVerdict(
                patch="", gate=None, version=version, state="unknown", message=str(error)
            )
            verdicts += [
                unknown.model_copy(update={"patch": spec.file, "gate": spec.gate})
                for spec in gate.series.patches
            ]
    return verdicts


def unproved(verdicts: Sequence[PatchVerdict]) -> list[PatchVerdict]:
    """Patches that must not be in a build."""
    return [v for v in verdicts if v.state not in ("needed", "no gate")]
