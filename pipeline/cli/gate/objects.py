"""Results of the architecture gate: which objects of an image hold code that a card can run."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline import log
from pipeline.binary.fatbin import CUBIN, PTX, Target
from pipeline.gate.arch import ArchReport, ArchSpec, JudgedObject, ObjectVerdict

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
    return [_row(group) for group in ranked]


def _row(group: list[JudgedObject]) -> list[str]:
    first = group[0]
    # below site-packages a path begins with its package, which is what a reader looks for
    name = first.path.rpartition(_PACKAGES)[2]
    if len(group) > 1:
        name = f"{str(first.accepted).removeprefix('*/')} ({len(group)} objects)"
    targets = {t for judged in group for t in judged.facts.targets}
    verdict = first.judgement.message + (", accepted" if first.accepted else "")
    return [name, _short(targets, CUBIN), _short(targets, PTX), _modules(group), verdict]


def _modules(group: list[JudgedObject]) -> str:
    judgements = [x.judgement for x in group]
    jitted = sum(x.jitted for x in judgements)
    more = f" + {jitted} jit" if jitted else ""
    return f"{sum(x.running for x in judgements)}{more} of {sum(x.modules for x in judgements)}"


def _short(targets: Iterable[Target], kind: int) -> str:
    """`75 80 90a 120f`: the numbers are what differs."""
    names = sorted(
        {(t.arch, "?" if t.suffix is None else t.suffix) for t in targets if t.kind == kind}
    )
    return " ".join(f"{arch}{suffix}" for arch, suffix in names) or "–"
