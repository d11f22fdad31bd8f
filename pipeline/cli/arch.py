"""The architecture gate's command: which objects of an image can run on a card."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from pipeline import log
from pipeline.cli.common import checkout_of, json_option, platform_option, say_json, store_of
from pipeline.cli.images import find_image
from pipeline.cli.signing import Signing
from pipeline.cli.statements import leave_gate_statements
from pipeline.errors import NoKernelImage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipeline.gate.arch.fatbin import Target
    from pipeline.gate.arch.report import ArchReport, JudgedObject
    from pipeline.gate.arch.spec import ArchSpec

_PACKAGES = "site-packages/"


@click.command("gate-arch")
@click.argument("name", metavar="IMAGE")
@click.option(
    "--arch",
    metavar="sm_NNN",
    help="The card to judge for; without it, those that image.yaml promises.",
)
@platform_option
@json_option
@click.pass_context
def gate_arch(
    context: click.Context, name: str, arch: str | None, platform: str | None, as_json: bool
) -> None:
    """Say for every object of a built image which CUDA code it holds and whether a card runs it.

    Needs no GPU and none of NVIDIA's tools, and judges amd64 images on arm64 too.
    """
    from pipeline.gate.arch.report import judge_image, read_image, report_json
    from pipeline.gate.arch.spec import read_arch_spec
    from pipeline.gate.evidence import keep_evidence
    from pipeline.gate.findings import arch_evidence
    from pipeline.gate.stage import promised_archs

    start, signing = time.monotonic(), Signing()
    checkout, store = checkout_of(context), store_of(context)
    spec, cards = read_arch_spec(checkout, name), promised_archs(checkout.spec(name))
    wanted = [_checked(arch)] if arch else cards
    with store.in_use():
        built = find_image(checkout, store, name, platform)
        objects = read_image(store, built)
        reports = [judge_image(objects, spec, x, promised=x in cards) for x in wanted]
        share = (time.monotonic() - start) / len(reports)
        said = [(arch_evidence(checkout, name, r), share) for r in reports if r.arch in cards]
        keep_evidence(store, name, built.platform, built.digest, said)
        leave_gate_statements(checkout, store, built.plan, signing)
    if as_json:
        found = [report_json(r) for r in reports]
        say_json({"image": name, "digest": built.digest, "reports": found})
    else:
        click.echo("\n\n".join(_text(name, r, spec) for r in reports))
    if bad := [r for r in reports if not r.passed]:
        raise NoKernelImage(f"{name}: {_failure(bad[0])}")


def _checked(arch: str) -> str:
    from pipeline.gate.arch.verdict import ARCHITECTURES, card_of

    try:
        known = card_of(arch) in ARCHITECTURES
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--arch") from error
    if not known:
        listed = ", ".join(f"sm_{number}" for number in ARCHITECTURES)
        raise click.BadParameter(f"{arch}: there is none (known: {listed})", param_hint="--arch")
    return arch


def _failure(report: ArchReport) -> str:
    if report.unmatched:
        return f"no object matches {report.unmatched[0]}, for which gates/arch.yaml has a demand"
    first, *more = report.failures
    others = f", and {len(more)} more" if more else ""
    return f"/{first.path}: {first.judgement.message} on {report.arch}{others}"


def _text(name: str, report: ArchReport, spec: ArchSpec) -> str:
    from pipeline.gate.arch.verdict import Verdict

    carrying = [x for x in report.objects if x.judgement.verdict is not Verdict.NO_CUDA_CODE]
    head = ["object", "machine code (sm_)", "PTX (compute_)", "modules that run", "verdict"]
    lines = [log.table(head, _rows(carrying)), ""]
    counts = [f"{number} {message}" for message, number in report.summary.items() if number]
    accepted = sum(x.accepted is not None for x in report.objects)
    lines.append(f"{name} on {report.arch}: {', '.join(counts)}; {accepted} accepted")
    lines += [f"  accepted: {g}: {spec.accepted[g]}" for g in _used_globs(report)]
    lines += [f"  accepted without need: {glob}" for glob in report.unused]
    lines += [f"  demanded, but no object matches: {glob}" for glob in report.unmatched]
    return "\n".join(lines)


def _used_globs(report: ArchReport) -> list[str]:
    return list(dict.fromkeys(x.accepted for x in report.objects if x.accepted))


def _rows(objects: list[JudgedObject]) -> list[list[str]]:
    """The worst first; thousands of objects that one line accepts are one row."""
    from pipeline.gate.arch.verdict import Verdict

    order = list(Verdict)
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
    from pipeline.gate.arch.fatbin import CUBIN, PTX

    first = group[0]
    name = first.path.rpartition(_PACKAGES)[2]
    if len(group) > 1:
        name = f"{str(first.accepted).removeprefix('*/')} ({len(group)} objects)"
    targets = {t for judged in group for t in judged.facts.targets}
    message = first.judgement.message + (", accepted" if first.accepted else "")
    return [name, _short(targets, CUBIN), _short(targets, PTX), _modules(group), message]


def _modules(group: list[JudgedObject]) -> str:
    found = [x.judgement for x in group]
    jitted = sum(x.jitted for x in found)
    more = f" + {jitted} jit" if jitted else ""
    return f"{sum(x.running for x in found)}{more} of {sum(x.modules for x in found)}"


def _short(targets: Iterable[Target], kind: int) -> str:
    """`75 80 90a 120f`: the numbers are what differs."""
    found = sorted(
        {(t.arch, "?" if t.suffix is None else t.suffix) for t in targets if t.kind == kind}
    )
    return " ".join(f"{arch}{suffix}" for arch, suffix in found) or "–"
