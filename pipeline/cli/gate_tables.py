"""Results of gates as tables: shared memory and numbers of kernels, parsers, and objects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from pipeline.artifacts.binary.fatbin import CUBIN, PTX, CodeTarget
from pipeline.core import log
from pipeline.images.gate.arch import ArchReport, ArchSpec, JudgedObject, ObjectVerdict
from pipeline.images.gate.parsers.judge import ParserResult, ParserResults
from pipeline.images.gate.smem.results import CaseResult, EngineResult, GateResult, NumericsResult
from pipeline.images.gate.templates.judge import RenderedCase, TemplateResults

_VERDICTS = ("passed", "accepted", "failed", "unknown")


# Of both gates; what comes first in a table is said last below it, so that neither scrolls away.
_ORDER = ("failed", "wrong", "unknown", "accepted", "passed", "right")


_BAD = _ORDER[:3]


_HEAD = ["case", "reference", "verdict", "largest error", "allowed", "seconds", "blocks"]


def show_kernels(
    result: GateResult, *, only_failed: bool = False, hide_passed: bool = False
) -> str:
    """The result as a table, one line a case: the kernel that needs most."""
    shown = _sorted(result.cases, only_failed, hide_passed)
    head = ["case", "kernel", "shared", "limit", "verdict", "regs", "spill", "warps", "stages"]
    limit, rows = str(result.card.shared_bytes), []
    for case in shown:
        # the kernel that needs most decides: if it fits, all launches of the case do
        worst = case.worst
        if worst is None:
            rows.append([case.name, "–", "–", limit, case.verdict, "–", "–", "–", "–", ""])
            continue
        record = worst.record
        # other numbers known at compile time (head sizes, flags) are in --json
        sizes = [f"{k}={v}" for k, v in record.blocks.items() if "BLOCK" in k]
        numbers = [record.registers, record.spill_bytes, record.num_warps, record.num_stages]
        rows.append(
            [
                *(case.name, record.kernel, str(record.shared_bytes), limit, case.verdict),
                *("–" if n is None else str(n) for n in numbers),
                " ".join([*sizes, *record.uses]),
            ]
        )
    facts, covered = result.environment, result.coverage
    lines = _table([*head, "blocks"], rows, shown)
    where = "the image's own files" if facts.kind == "image" else f"wheels for {facts.platform}"
    lines.append(
        f"{_engine(result)}, Triton {facts.triton},"
        f" torch {facts.torch} ({where}, GPU libraries are stubs)"
    )
    # what was judged is not quite what runs: the reader must know
    if facts.stand_in:
        lines.append(facts.stand_in)
    # what held needs no line in every run; what did not hold does
    if result.sandbox and result.sandbox.missing:
        lines.append(result.sandbox.sentence())
    if covered:
        lines.append(
            f"{covered.reached} of the engine's {covered.kernels} Triton kernels are reached;"
            f" `sm120 gate run {result.image} --discover` names the rest"
        )
    lines.append(
        f"{result.image} on {result.card.arch}: {_summary(result.cases)} in"
        f" {log.seconds(result.seconds)}{_kept(result.cases)}"
    )
    # how much of what fits was also seen to compute the right thing
    passed = sum(case.verdict == "passed" for case in result.cases)
    if passed and result.numerics is None:
        cases = log.count(passed, "passed case")
        lines.append(f"The numerics of {cases} were not checked (--only numerics)")
    elif passed:
        unchecked = len(result.without_numbers)
        lines.append(f"Passed cases without a check of their numerics: {unchecked} of {passed}")
    return "\n".join(lines)


_Judged = TypeVar("_Judged", CaseResult, NumericsResult, ParserResult, RenderedCase)


def _sorted(cases: Sequence[_Judged], only_failed: bool, hide_passed: bool) -> list[_Judged]:
    """What failed first; cases of one verdict in the order of their files."""
    listed = _BAD if only_failed else _ORDER[:4] if hide_passed else _ORDER
    chosen = [case for case in cases if case.verdict in listed]
    return sorted(chosen, key=lambda case: _ORDER.index(case.verdict))


def _table(
    head: Sequence[str], rows: Sequence[Sequence[object]], cases: Sequence[_Judged]
) -> list[str]:
    """The table, then what there is to say of cases, each once; of those that failed last."""
    ordered = sorted(cases, key=lambda case: -_ORDER.index(case.verdict))
    names: dict[str, list[str]] = {}
    for case in ordered:
        if case.message:
            names.setdefault(case.message, []).append(case.name)
    messages: list[str] = [f"{', '.join(of)}: {message}" for message, of in names.items()]
    return [*([log.table(head, rows), ""] if rows else []), *messages]


def _engine(result: EngineResult) -> str:
    number = len(result.patches)
    held = f"with {log.count(number, 'patch', 'patches')}" if number else "unpatched"
    return f"{result.engine} {result.engine_version} {held}"


def _kept(cases: Sequence[_Judged]) -> str:
    """How many answers are kept ones: the seconds beside them are not what judging takes."""
    number = sum(case.cached for case in cases)
    if not number:
        return ""
    return f", {'all' if number == len(cases) else number} judged before"


def show_unreached(result: GateResult) -> str:
    """The kernels of the engine that no case reaches yet."""
    covered = result.coverage
    # only --case leaves the coverage out, and --discover refuses it
    assert covered is not None
    rows = [[k.module, k.name, str(k.line), ", ".join(k.launched_by)] for k in covered.rest]
    summary = (
        f"{covered.reached} of {covered.kernels} kernels are reached by cases; the rest are below."
        f" Not counted: {covered.elsewhere} for other makers' cards or tests, {covered.helpers}"
        f" helpers that only kernels call, {covered.idle} that nothing launches."
    )
    return "\n".join([summary, "", log.table(["module", "kernel", "line", "launched by"], rows)])


def show_numbers(
    result: GateResult, *, only_failed: bool = False, hide_passed: bool = False
) -> str:
    """The check of numbers as a table, one line a case; empty where it was not done."""
    numerics = result.numerics
    if numerics is None:
        return ""
    shown = _sorted(numerics.cases, only_failed, hide_passed)
    rows = []
    for case in shown:
        shares = [c.max_share for c in case.computed]
        # an output with missing numbers has no largest error, and so the case has none
        worst = None if None in shares else max((s for s in shares if s is not None), default=None)
        error = "–" if worst is None else f"{worst:.2e}"
        blocks = case.launches[0].blocks if case.launches else {}
        sizes = " ".join(f"{k}={v}" for k, v in blocks.items() if "BLOCK" in k)
        numbers = [error, f"{case.tolerance:.2e}", f"{case.seconds:.1f}", sizes]
        rows.append([case.name, case.reference, case.verdict, *numbers])
    lines = ["", *_table(_HEAD, rows, shown)]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(numerics.versions.items()))
    found = log.counts_by_kind((c.verdict for c in numerics.cases), ("right", "wrong", "unknown"))
    summary = found or "no case has numerics"
    fixes = log.count(len(numerics.repairs), "fix", "fixes")
    lines += [
        "An error is relative to the sum of the magnitudes that were added up.",
        f"Triton's interpreter on the CPU, with {fixes} ({versions})",
        f"{result.image}'s numerics: {summary} in {log.seconds(numerics.seconds)}"
        f"{_kept(numerics.cases)}",
    ]
    return "\n".join(lines)


def show_parsers(
    result: ParserResults, *, only_failed: bool = False, hide_passed: bool = False
) -> str:
    """The parsers' verdicts as a table, one line an answer, and what was judged."""
    shown = _sorted(result.cases, only_failed, hide_passed)
    head = ["case", "parsers", "verdict", "breaks", "streams", "failed", "what is wrong"]
    rows = [
        [
            *(case.name, " ".join(dict.fromkeys(case.parsers.values())), case.verdict),
            *(case.severity or "–", str(case.streams), str(case.failed)),
            ", ".join(case.faults) or "–",
        ]
        for case in shown
    ]
    lines = [*_table(head, rows, shown), *_judged_endpoint(result)]
    streams = sum(case.streams for case in result.cases)
    lines.append(
        f"{result.image}'s parsers: {_summary(result.cases)} in {streams} streams,"
        f" {log.seconds(result.seconds)}{_kept(result.cases)}"
    )
    return "\n".join(lines)


def _judged_endpoint(result: ParserResults | TemplateResults) -> list[str]:
    """What was judged, and what was not, of a gate that drives the chat endpoint."""
    where = "the image's own" if result.environment.kind == "image" else "this machine's"
    lines = [
        f"{_engine(result)}, {where} Python"
        f" {result.environment.python}, without torch, server and model"
    ]
    # the verdicts are about these routes alone
    for route, address in dict.fromkeys((c.route, c.address) for c in result.cases if c.route):
        lines.append(f"Judged: {route}, as {address} calls it")
    lines += [f"Not judged: {name}: {why}" for name, why in result.not_judged.items()]
    if result.sandbox and result.sandbox.missing:
        lines.append(result.sandbox.sentence())
    return lines


def _summary(cases: Sequence[_Judged]) -> str:
    return log.counts_by_kind((case.verdict for case in cases), _VERDICTS)


def show_templates(
    result: TemplateResults, *, only_failed: bool = False, hide_passed: bool = False
) -> str:
    """The verdicts on rendered conversations as a table, and what was judged."""
    shown = _sorted(result.cases, only_failed, hide_passed)
    rows = [
        [
            *(case.name, case.verdict, str(case.characters) if case.want else "refused"),
            "–" if case.tokens is None else str(case.tokens),
            "–" if case.difference is None else str(case.difference.at),
        ]
        for case in shown
    ]
    head = ["case", "verdict", "characters", "tokens", "differs after"]
    lines = [*_table(head, rows, shown), *_judged_endpoint(result)]
    families = log.count(len(result.templates), "template")
    lines.append(
        f"{result.image}'s conversations: {_summary(result.cases)} with {families},"
        f" {log.seconds(result.seconds)}{_kept(result.cases)}"
    )
    return "\n".join(lines)


# What stands before this in a path is the same for all wheels of an image.
_PACKAGES = "site-packages/"


def show_objects(
    name: str, report: ArchReport, spec: ArchSpec, *, only_failed: bool = False
) -> str:
    """A report as a table of the objects that hold CUDA code, and what was accepted."""
    # objects without CUDA code are counted below, not listed: an image has hundreds
    carrying = [x for x in report.objects if x.judgement.verdict is not ObjectVerdict.NO_CUDA_CODE]
    head = ["object", "machine code (sm_)", "PTX (compute_)", "modules that run", "verdict"]
    rows = _rows(report.failures if only_failed else carrying)
    lines = [log.table(head, rows), ""] if rows else []
    counts = [f"{number} {verdict}" for verdict, number in report.summary.items() if number]
    accepted = sum(x.accepted is not None for x in report.objects)
    lines.append(f"{name} on {report.arch}: {', '.join(counts)}; {accepted} accepted")
    used = dict.fromkeys(x.accepted for x in report.objects if x.accepted)
    lines += [f"  accepted: {glob}: {spec.accepted[glob]}" for glob in used]
    lines += [f"  accepted without need: {glob}" for glob in report.unused]
    lines += [f"  demanded, but no object matches: {glob}" for glob in report.unmatched]
    return "\n".join(lines)


def _rows(objects: list[JudgedObject]) -> list[list[str]]:
    """The worst first; objects that one line of arch.yaml accepts are one row, though thousands."""
    order = list(ObjectVerdict)
    groups: dict[tuple[str, str], list[JudgedObject]] = {}
    for judged in objects:
        key = (judged.accepted or judged.path, judged.judgement.message)
        groups.setdefault(key, []).append(judged)
    ranked = sorted(
        groups.values(),
        key=lambda g: (not g[0].failed, order.index(g[0].judgement.verdict), g[0].path),
    )
    rows = []
    for group in ranked:
        first, judgements = group[0], [x.judgement for x in group]
        # below site-packages a path begins with its package, which is what a reader looks for
        name = first.path.rpartition(_PACKAGES)[2]
        if len(group) > 1:
            name = f"{str(first.accepted).removeprefix('*/')} ({len(group)} objects)"
        targets = {t for judged in group for t in judged.facts.targets}
        verdict = first.judgement.message + (", accepted" if first.accepted else "")
        jitted = sum(x.jitted for x in judgements)
        running = f"{sum(x.running for x in judgements)}{f' + {jitted} jit' if jitted else ''}"
        modules = f"{running} of {sum(x.modules for x in judgements)}"
        rows.append([name, _short(targets, CUBIN), _short(targets, PTX), modules, verdict])
    return rows


def _short(targets: Iterable[CodeTarget], kind: int) -> str:
    """`75 80 90a 120f`: the numbers are what differs."""
    names = sorted(
        {(t.arch, "?" if t.suffix is None else t.suffix) for t in targets if t.kind == kind}
    )
    return " ".join(f"{arch}{suffix}" for arch, suffix in names) or "–"
