"""Results of the gates that run an image's kernels: shared memory and numbers, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from pipeline import log
from pipeline.gate.smem.results import CaseResult, GateResult, NumericsResult

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
    rows = [_row(case, result.card.shared_bytes) for case in shown]
    facts, covered = result.environment, result.coverage
    lines = [log.table([*head, "blocks"], rows), ""] if rows else []
    lines += _messages(shown)
    where = "the image's own files" if facts.kind == "image" else f"wheels for {facts.platform}"
    number = len(result.patches)
    held = f"with {log.count(number, 'patch', 'patches')}" if number else "unpatched"
    lines.append(
        f"{result.engine} {result.engine_version} {held}, Triton {facts.triton},"
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
    counts = {v: sum(c.verdict == v for c in result.cases) for v in _VERDICTS}
    summary = ", ".join(f"{n} {v}" for v, n in counts.items() if n)
    lines.append(
        f"{result.image} on {result.card.arch}: {summary} in {log.seconds(result.seconds)}"
        f"{_kept(result.cases)}"
    )
    if counts["passed"]:
        lines.append(_unchecked(result, counts["passed"]))
    return "\n".join(lines)


_Judged = TypeVar("_Judged", CaseResult, NumericsResult)


def _sorted(cases: Sequence[_Judged], only_failed: bool, hide_passed: bool) -> list[_Judged]:
    """What failed first; cases of one verdict in the order of their files."""
    listed = _BAD if only_failed else _ORDER[:4] if hide_passed else _ORDER
    chosen = [case for case in cases if case.verdict in listed]
    return sorted(chosen, key=lambda case: _ORDER.index(case.verdict))


def _messages(cases: Sequence[_Judged]) -> list[str]:
    """What there is to say of cases, each once; of those that failed last."""
    ordered = sorted(cases, key=lambda case: -_ORDER.index(case.verdict))
    names: dict[str, list[str]] = {}
    for case in ordered:
        if case.message:
            names.setdefault(case.message, []).append(case.name)
    return [f"{', '.join(of)}: {message}" for message, of in names.items()]


def _kept(cases: Sequence[_Judged]) -> str:
    """How many answers are kept ones: the seconds beside them are not what judging takes."""
    number = sum(case.cached for case in cases)
    if not number:
        return ""
    return f", {'all' if number == len(cases) else number} judged before"


def _unchecked(result: GateResult, passed: int) -> str:
    """How much of what fits was also seen to compute the right thing."""
    if result.numerics is None:
        cases = log.count(passed, "passed case")
        return f"The numerics of {cases} were not checked (--only numerics)"
    unchecked = len(result.without_numbers)
    return f"Passed cases without a check of their numerics: {unchecked} of {passed}"


def _row(case: CaseResult, limit: int) -> list[str]:
    # the kernel that needs most decides: if it fits, all launches of the case do
    worst = case.worst
    if worst is None:
        return [case.name, "–", "–", str(limit), case.verdict, "–", "–", "–", "–", ""]
    record = worst.record
    # other numbers known at compile time (head sizes, flags) are in --json
    sizes = [f"{k}={v}" for k, v in record.blocks.items() if "BLOCK" in k]
    blocks = " ".join([*sizes, *record.uses])
    numbers = [record.registers, record.spill_bytes, record.num_warps, record.num_stages]
    return [
        *(case.name, record.kernel, str(record.shared_bytes), str(limit), case.verdict),
        *("–" if n is None else str(n) for n in numbers),
        blocks,
    ]


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
    lines = ["", log.table(_HEAD, [_numbers_row(case) for case in shown]), ""] if shown else [""]
    lines += _messages(shown)
    versions = ", ".join(f"{name} {version}" for name, version in sorted(numerics.versions.items()))
    counts = {v: sum(c.verdict == v for c in numerics.cases) for v in ("right", "wrong", "unknown")}
    summary = ", ".join(f"{n} {v}" for v, n in counts.items() if n) or "no case has numerics"
    fixes = log.count(len(numerics.repairs), "fix", "fixes")
    lines += [
        "An error is relative to the sum of the magnitudes that were added up.",
        f"Triton's interpreter on the CPU, with {fixes} ({versions})",
        f"{result.image}'s numerics: {summary} in {log.seconds(numerics.seconds)}"
        f"{_kept(numerics.cases)}",
    ]
    return "\n".join(lines)


def _numbers_row(case: NumericsResult) -> list[str]:
    shares = [c.max_share for c in case.computed]
    # an output with missing numbers has no largest error, and so the case has none
    worst = None if None in shares else max((s for s in shares if s is not None), default=None)
    blocks = case.launches[0].blocks if case.launches else {}
    return [
        *(case.name, case.reference, case.verdict),
        "–" if worst is None else f"{worst:.2e}",
        *(f"{case.tolerance:.2e}", f"{case.seconds:.1f}"),
        " ".join(f"{k}={v}" for k, v in blocks.items() if "BLOCK" in k),
    ]
