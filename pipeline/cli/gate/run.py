"""`sm120 gate run`: every gate of an image, or some of them."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import click

from pipeline import log
from pipeline.assemble.image import Built
from pipeline.cli.context import say_json
from pipeline.cli.gate.context import make_gate_context, open_image_gate, series_option
from pipeline.cli.gate.kernels import (
    require_passed,
    require_right,
    show_kernels,
    show_numbers,
    show_unreached,
)
from pipeline.cli.gate.objects import failure, show_objects
from pipeline.cli.image_statements import leave_gate_statements
from pipeline.cli.images import find_image
from pipeline.cli.options import json_option, mirror_option, offline_option, platform_option
from pipeline.cli.signing import Signing
from pipeline.errors import NoKernelImage, UnknownImage
from pipeline.gate.arch.report import ArchReport, report_json
from pipeline.gate.arch.spec import ArchSpec, read_arch_spec
from pipeline.gate.arch.verdict import ARCHITECTURES, card_of
from pipeline.gate.evidence import keep_evidence
from pipeline.gate.findings import gate_evidence
from pipeline.gate.numerics.check import add_numbers, numeric_cases
from pipeline.gate.smem.context import GateContext
from pipeline.gate.smem.image_gate import ImageGate, chosen_cases, run_gate
from pipeline.gate.smem.limits import card_for
from pipeline.gate.smem.results import GateResult
from pipeline.gate.stage import DEFAULT_ARCH, promised_archs, run_arch


@dataclass(frozen=True)
class _Choice:
    """Which gates of an image are to run, on what of it, and for which card."""

    name: str
    platform: str | None
    only: tuple[str, ...]
    case: str | None
    arch: str | None
    unpatched: bool
    series: str | None

    @property
    def is_own(self) -> bool:
        """Whether the image is judged as it is built, with all of its cases."""
        return not (self.case or self.unpatched or self.series)

    def wants_kernels(self, gates: list[str]) -> bool:
        if self.only:
            return bool({"smem", "numerics"} & {*self.only})
        # an image that names no gate gets the error that it has no cases
        return "smem" in gates or "arch" not in gates

    def wants_objects(self, gates: list[str]) -> bool:
        return "arch" in self.only if self.only else "arch" in gates and self.is_own


@dataclass(frozen=True)
class _Objects:
    """Reports of the architecture gate on a built image, one for each card."""

    built: Built
    spec: ArchSpec
    reports: list[ArchReport]

    def as_json(self) -> dict[str, Any]:
        return {"digest": self.built.digest, "reports": [report_json(r) for r in self.reports]}


@click.command()
@click.argument("name", metavar="IMAGE")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(["smem", "numerics", "arch"]),
    help="Run only this gate. Repeatable [default: all that the image names].",
)
@click.option("--case", metavar="PATTERN", help="Judge only cases such as 'extend-mla-*'.")
@click.option(
    "--arch",
    metavar="sm_NNN",
    help="Architecture of the target card [default: those that image.yaml names].",
)
@click.option("--unpatched", is_flag=True, help="Judge the engine as published, without patches.")
@series_option
@click.option("--discover", is_flag=True, help="List the kernels that no case reaches yet.")
@platform_option
@mirror_option
@offline_option
@json_option
@click.pass_context
def run(
    context: click.Context,
    name: str,
    only: tuple[str, ...],
    case: str | None,
    arch: str | None,
    unpatched: bool,
    series: str | None,
    discover: bool,
    platform: str | None,
    mirrors: tuple[str, ...],
    offline: bool,
    as_json: bool,
) -> None:
    """Judge whether an image runs on its card. No GPU is needed.

    smem: the image's own Triton compiles the kernels that the engine's own functions launch, and
    the shared memory they need is compared with what the card has.

    numerics: the same functions run under Triton's interpreter, with the block sizes chosen for
    the card and small seeded inputs; what they write is compared with a float64 reference.

    arch: every object of the built image that holds CUDA code must hold code that the card can
    run. This needs none of NVIDIA's tools, and judges amd64 images on arm64, too.
    """
    if discover and case:
        raise click.UsageError("--discover looks at all cases; leave --case out")
    choice = _Choice(name, platform, only, case, arch, unpatched, series)
    if "arch" in only and not choice.is_own:
        raise click.UsageError("--only arch judges the built image; leave the other choices out")
    signing, kernels, objects = Signing(), None, None
    gate_context = make_gate_context(context, mirrors, offline)
    gates = gate_context.checkout.spec(name).gates
    with gate_context.store.in_use():
        if choice.wants_kernels(gates):
            kernels = _judge_kernels(gate_context, choice, signing)
        if choice.wants_objects(gates) and not discover:
            objects = _judge_objects(gate_context, choice, signing)
    if as_json:
        smem = kernels.model_dump(mode="json") if kernels else None
        say_json({"image": name, "smem": smem, "arch": objects.as_json() if objects else None})
    else:
        click.echo("\n\n".join(_texts(choice, kernels, objects, discover)))
    if not discover:
        _require(choice, kernels, objects)


def _judge_kernels(gate_context: GateContext, choice: _Choice, signing: Signing) -> GateResult:
    card = card_for(choice.arch or DEFAULT_ARCH)
    opened = open_image_gate(gate_context, choice.name, choice.platform, choice.series, choice.case)
    count = len(chosen_cases(opened.gates.cases(), choice.case))
    with log.step(f"Judging {log.count(count, 'case')} of {choice.name} for {card.arch}"):
        result = run_gate(opened, card, unpatched=choice.unpatched, only=choice.case)
        if _wants_numbers(choice, opened):
            result = add_numbers(opened, result, unpatched=choice.unpatched, only=choice.case)
    if result.image_digest:
        evidence = gate_evidence(opened, result)
        store = gate_context.store
        keep_evidence(store, choice.name, result.platform, result.image_digest, evidence)
        leave_gate_statements(gate_context.checkout, store, opened.plan, signing)
    return result


def _wants_numbers(choice: _Choice, opened: ImageGate) -> bool:
    if choice.only:
        return "numerics" in choice.only
    return any(fnmatchcase(case.name, choice.case or "*") for case in numeric_cases(opened))


def _judge_objects(gate_context: GateContext, choice: _Choice, signing: Signing) -> _Objects | None:
    checkout, store, name = gate_context.checkout, gate_context.store, choice.name
    promised = promised_archs(checkout.spec(name))
    archs = [_checked(choice.arch)] if choice.arch else promised
    try:
        built = find_image(checkout, store, name, choice.platform)
    except UnknownImage as error:
        # kernels can be judged before the image is built, machine code cannot
        if choice.only:
            raise
        log.say(f"{error}: its machine code was not judged")
        return None
    runs = run_arch(gate_context, built, archs)
    # a card that the image does not promise is judged for the user alone
    kept = [(r.evidence, r.seconds) for r in runs if r.detail.arch in promised]
    keep_evidence(store, name, built.platform, built.digest, kept)
    leave_gate_statements(checkout, store, built.plan, signing)
    return _Objects(built, read_arch_spec(checkout, name), [r.detail for r in runs])


def _checked(arch: str) -> str:
    try:
        known = card_of(arch) in ARCHITECTURES
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--arch") from error
    if not known:
        listed = ", ".join(f"sm_{number}" for number in ARCHITECTURES)
        raise click.BadParameter(f"{arch} is not known (known: {listed})", param_hint="--arch")
    return arch


def _texts(
    choice: _Choice, kernels: GateResult | None, objects: _Objects | None, discover: bool
) -> list[str]:
    texts = []
    if kernels and discover:
        texts.append(show_unreached(kernels))
    elif kernels:
        texts += [show_kernels(kernels)] if choice.only != ("numerics",) else []
        texts += [show_numbers(kernels)] if kernels.numerics else []
    if objects:
        texts += [show_objects(choice.name, report, objects.spec) for report in objects.reports]
    return texts


def _require(choice: _Choice, kernels: GateResult | None, objects: _Objects | None) -> None:
    """Raise the first error; every gate has run by now, also after one that failed."""
    if kernels and choice.only != ("numerics",):
        require_passed(kernels)
    if kernels:
        require_right(kernels)
    for report in objects.reports if objects else []:
        if not report.passed:
            raise NoKernelImage(f"{choice.name}: {failure(report)}")
