"""`sm120 gate run`: every gate of an image, or some of them."""

from __future__ import annotations

from typing import Any

import click

from pipeline import log
from pipeline.assemble.image import Built
from pipeline.cli.context import pick_platform, say_json
from pipeline.cli.gate.choice import GateChoice
from pipeline.cli.gate.context import chosen_card, make_gate_context, open_image_gate, series_option
from pipeline.cli.gate.dry_run import say_what_it_takes, show_gate_plan
from pipeline.cli.gate.kernels import show_kernels, show_numbers, show_unreached
from pipeline.cli.gate.objects import show_objects
from pipeline.cli.image_statements import leave_gate_statements
from pipeline.cli.images import find_image
from pipeline.cli.options import json_option, mirror_option, offline_option, platform_option
from pipeline.cli.signing import Signing
from pipeline.errors import UnknownImage
from pipeline.gate.arch import ARCHITECTURES, card_of, read_arch_spec
from pipeline.gate.evidence import error_of, keep_evidence
from pipeline.gate.smem.context import GateContext
from pipeline.gate.stage import (
    GateRun,
    run_arch,
    run_numerics,
    run_smem,
    shown_result,
)
from pipeline.spec.checkout import Checkout


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
@click.option("--only-failed", is_flag=True, help="Show only what failed or could not be judged.")
@click.option("--all", "show_all", is_flag=True, help="List every case, also those that passed.")
@click.option("--discover", is_flag=True, help="List the kernels that no case reaches yet.")
@click.option("--dry-run", is_flag=True, help="Show what would be judged and fetched.")
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
    only_failed: bool,
    show_all: bool,
    discover: bool,
    dry_run: bool,
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
    if discover and dry_run:
        raise click.UsageError("--discover judges every case; leave --dry-run out")
    if discover and case:
        raise click.UsageError("--discover looks at all cases; leave --case out")
    if only_failed and show_all:
        raise click.UsageError("--all lists what --only-failed leaves out; choose one")
    if only_failed and (as_json or discover):
        raise click.UsageError("--only-failed is about the tables of verdicts; use it alone")
    choice = GateChoice(name, platform, only, case, arch, unpatched, series)
    if "arch" in only and not choice.is_own:
        raise click.UsageError("--only arch judges the built image; leave the other choices out")
    if dry_run:
        looking = make_gate_context(context, reading=True)
        if choice.wants_objects(looking.checkout.spec(name).gates):
            _require_architecture(arch)
        return show_gate_plan(looking, choice, as_json)
    signing, built = Signing(), None
    runs: list[GateRun] = []
    gate_context = make_gate_context(context, mirrors, offline)
    gates = gate_context.checkout.spec(name).gates
    with gate_context.store.in_use():
        if choice.wants_kernels(gates):
            runs += _judge_kernels(gate_context, choice, signing)
        if choice.wants_objects(gates) and not discover:
            _require_architecture(arch)
            built = _built(gate_context, choice)
            runs += _judge_objects(gate_context, choice, built, signing) if built else []
    if as_json:
        say_json(_as_json(name, built, runs))
    else:
        # of a few chosen cases each is listed; of all, those that passed are counted
        listing = {"only_failed": only_failed, "hide_passed": not show_all and case is None}
        click.echo("\n\n".join(_texts(gate_context.checkout, choice, runs, discover, listing)))
    # every gate has run by now, also after one that failed
    for each in runs if not discover else []:
        if choice.asks_for(each.evidence.gate) and (error := error_of(name, each.evidence)):
            if unpatched and gate_context.checkout.series(gate_context.checkout.spec(name)).patches:
                error.hint = "The image is built with patches: leave --unpatched out to judge them."
            raise error


def _judge_kernels(
    gate_context: GateContext, choice: GateChoice, signing: Signing
) -> list[GateRun]:
    card = chosen_card(gate_context, choice.name, choice.platform, choice.arch)
    gates = say_what_it_takes(gate_context, choice)
    opened = open_image_gate(gate_context, choice.name, choice.platform, choice.series)
    unpatched, only = choice.unpatched, choice.case
    runs: list[GateRun] = []
    with log.step(f"Judging {choice.name} for {card.arch}"):
        if "smem" in gates:
            runs.append(run_smem(opened, card, unpatched=unpatched, only=only))
        if "numerics" in gates:
            smem = runs[0].result if runs else None
            runs.append(run_numerics(opened, card, smem, unpatched=unpatched, only=only))
    if runs and runs[0].result and (digest := runs[0].result.image_digest):
        store, evidence = gate_context.store, [run.evidence for run in runs]
        keep_evidence(store, choice.name, opened.plan.platform, digest, evidence)
        leave_gate_statements(gate_context.checkout, store, opened.plan, signing)
    return runs


def _built(gate_context: GateContext, choice: GateChoice) -> Built | None:
    checkout, store = gate_context.checkout, gate_context.store
    try:
        return find_image(checkout, store, choice.name, choice.platform)
    except UnknownImage as error:
        # kernels can be judged before the image is built, machine code cannot
        if choice.only:
            raise
        log.say(f"{error}: its machine code was not judged")
        return None


def _judge_objects(
    gate_context: GateContext, choice: GateChoice, built: Built, signing: Signing
) -> list[GateRun]:
    promised = built.plan.spec.promised_archs
    runs = run_arch(gate_context, built, [choice.arch] if choice.arch else promised)
    # a card that the image does not promise is judged for the user alone
    kept = [run.evidence for run in runs if run.evidence.arch in promised]
    keep_evidence(gate_context.store, built.name, built.platform, built.digest, kept)
    leave_gate_statements(gate_context.checkout, gate_context.store, built.plan, signing)
    return runs


def _require_architecture(arch: str | None) -> None:
    try:
        known = arch is None or card_of(arch) in ARCHITECTURES
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--arch") from error
    if not known:
        listed = ", ".join(f"sm_{number}" for number in ARCHITECTURES)
        raise click.BadParameter(f"{arch} is not known (known: {listed})", param_hint="--arch")


def _as_json(name: str, built: Built | None, runs: list[GateRun]) -> dict[str, Any]:
    smem = shown_result(runs)
    reports = [run.evidence.model_dump(mode="json") for run in runs if run.report]
    return {
        "image": name,
        "smem": smem.model_dump(mode="json") if smem else None,
        "arch": {"digest": built.digest, "reports": reports} if built else None,
    }


def _texts(
    checkout: Checkout,
    choice: GateChoice,
    runs: list[GateRun],
    discover: bool,
    listing: dict[str, bool],
) -> list[str]:
    kernels = shown_result(runs)
    texts = []
    if kernels and discover:
        texts.append(show_unreached(kernels))
    elif kernels:
        if kernels.cases:
            texts.append(show_kernels(kernels, **listing))
        texts += [show_numbers(kernels, **listing)] if kernels.numerics else []
    if reports := [run.report for run in runs if run.report]:
        platform = pick_platform(checkout.spec(choice.name), choice.platform)
        spec = read_arch_spec(checkout, choice.name, platform)
        texts += [
            show_objects(choice.name, report, spec, only_failed=listing["only_failed"])
            for report in reports
        ]
    return texts
