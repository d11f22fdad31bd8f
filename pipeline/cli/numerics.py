"""A gate's numbers on the terminal, and how the command ends because of them."""

from __future__ import annotations

from pipeline import log
from pipeline.errors import GateUnknown, GateWrong
from pipeline.gate.smem.results import GateResult, NumericsResult

_HEAD = ["case", "reference", "verdict", "largest error", "allowed", "seconds", "blocks"]


def show_numbers(result: GateResult) -> str:
    """The numbers as a table, one line a case; nothing where they were not asked for."""
    found = result.numerics
    if found is None:
        return ""
    lines = ["", log.table(_HEAD, [_row(case) for case in found.cases]), ""]
    lines += [f"{case.name}: {case.message}" for case in found.cases if case.message]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(found.versions.items()))
    counts = {v: sum(c.verdict == v for c in found.cases) for v in ("right", "wrong", "unknown")}
    told = ", ".join(f"{n} {v}" for v, n in counts.items() if n) or "no case has numerics"
    lines += [
        "Errors are shares of the sum of magnitudes that a number is the sum of.",
        f"Triton's interpreter on the CPU, with {len(found.repairs)} repairs ({versions})",
        f"{result.image}'s numbers: {told} in {log.seconds(found.seconds)}",
    ]
    return "\n".join(lines)


def _row(case: NumericsResult) -> list[str]:
    shares = [c.max_share for c in case.computed]
    worst = None if None in shares else max((s for s in shares if s is not None), default=None)
    blocks = case.launches[0].blocks if case.launches else {}
    return [
        *(case.name, case.reference, case.verdict),
        "–" if worst is None else f"{worst:.2e}",
        *(f"{case.tolerance:.2e}", f"{case.seconds:.1f}"),
        " ".join(f"{k}={v}" for k, v in blocks.items() if "BLOCK" in k),
    ]


def require_right(result: GateResult) -> None:
    """Turn a verdict on numbers into the command's ending."""
    found = result.numerics
    if found is None or found.verdict == "right":
        return
    bad = [case.name for case in found.cases if case.verdict == found.verdict]
    named = ", ".join(bad[:4]) + (" …" if len(bad) > 4 else "")
    if found.verdict == "wrong":
        raise GateWrong(f"{result.image}: {len(bad)} cases compute wrong numbers: {named}")
    raise GateUnknown(f"{result.image}: the numbers of {len(bad)} cases are not known: {named}")
