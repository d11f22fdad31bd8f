"""Working on patches: whether each is needed, and which launch parameters fit instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from pipeline import log
from pipeline.assemble.plan import plan_image
from pipeline.cli.context import checkout_of, pick_platform, say_json
from pipeline.cli.gate.context import (
    arch_option,
    chosen_card,
    locked_engine,
    make_gate_context,
    open_image_gate,
    series_option,
)
from pipeline.cli.options import json_option, mirror_option, offline_option, platform_option
from pipeline.errors import GateInvalid, GateUnknown, PatchUnproved
from pipeline.gate.patches import (
    PatchVerdict,
    judge_against,
    judge_patches,
    unproved,
    versions_against,
    without_gate,
)
from pipeline.gate.smem.cases import read_gates
from pipeline.gate.smem.image_gate import find_case
from pipeline.gate.smem.image_gate import tune as sweep
from pipeline.sandbox.sandbox import find_sandbox, require_isolation


@click.command()
@click.argument("name", metavar="IMAGE")
@click.option(
    "--against",
    metavar="VERSION",
    help="Judge against another engine version or range, such as >=0.5.9.",
)
@click.option(
    "--without-sandbox",
    is_flag=True,
    help="With --against, run the other version although there is no sandbox.",
)
@series_option
@arch_option
@platform_option
@mirror_option
@offline_option
@json_option
@click.pass_context
def patches(
    context: click.Context,
    name: str,
    against: str | None,
    without_sandbox: bool,
    series: str | None,
    arch: str | None,
    platform: str | None,
    mirrors: tuple[str, ...],
    offline: bool,
    as_json: bool,
) -> None:
    """Judge each patch: needed, upstreamed, superseded, inert or in conflict.

    At a version older than the locked one a patch may also be not needed yet. One that says under
    `no_gate` why no gate can judge it is listed with that reason.

    The gate decides, with the patch and without it. `--against 0.5.9` or `--against ">=0.5.9"`
    judges other versions on the index and downloads only the engine's own wheel.
    """
    if against is None and series is None and (known := _not_for_gates(context, name, platform)):
        return say_json(_json(known)) if as_json else click.echo(_table(known))
    sandbox = find_sandbox()
    # the locked version was chosen by somebody, the others only lie on an index
    if against is not None and not without_sandbox:
        require_isolation(sandbox)
    gate_context = make_gate_context(context, mirrors, offline)
    card = chosen_card(gate_context, name, platform, arch)
    with gate_context.store.in_use():
        # an answer from an index is small; what opening an image's gates fetches is not
        versions = []
        if against is not None:
            locked = locked_engine(gate_context, name, platform)
            versions = versions_against(gate_context, locked, against)
        opened = open_image_gate(gate_context, name, platform, series)
        if against is None:
            with log.step(f"Judging the patches of {name} for {card.arch}"):
                verdicts = judge_patches(opened, card)
        else:
            verdicts = judge_against(opened, card, versions, log.say)
    if as_json:
        say_json(_json(verdicts))
    else:
        click.echo(_table(verdicts))
        facts = opened.environment.facts
        click.echo(
            f"\nAll judged with Triton {facts.triton} and torch {facts.torch}, to which {name} is"
            " locked; `requires` is what each version itself asks for."
        )
    if sandbox.missing:
        log.say(sandbox.sentence())
    unknown = [v for v in verdicts if v.state == "unknown"]
    if against is not None and unknown:
        named = ", ".join(f"{v.patch} at {v.version}" for v in unknown[:4])
        raise GateUnknown(
            f"{name}: {log.count(len(unknown), 'verdict is', 'verdicts are')} unknown: {named}"
        )
    if against is None and unproved(verdicts):
        named = ", ".join(f"{v.patch} is {v.state}" for v in unproved(verdicts))
        raise PatchUnproved(f"{name}: {named}")


def _not_for_gates(context: click.Context, name: str, platform: str | None) -> list[PatchVerdict]:
    """The patches of an image where none is for a gate: no engine is needed to list them."""
    checkout = checkout_of(context)
    plan = plan_image(checkout, name, pick_platform(checkout.spec(name), platform))
    specs = checkout.series(plan.spec).patches
    if any(spec.gate for spec in specs):
        return []
    return [without_gate(spec, spec.applies_to.rpartition("==")[2]) for spec in specs]


def _json(verdicts: Sequence[PatchVerdict]) -> list[dict[str, Any]]:
    return [v.model_dump(mode="json") for v in verdicts]


def _table(verdicts: Sequence[PatchVerdict]) -> str:
    head = ["patch", "version", "verdict", "requires", "why"]
    return log.table(head, [_row(v) for v in verdicts])


def _row(verdict: PatchVerdict) -> list[str]:
    asks = ", ".join(verdict.requires) or "–"
    # a compiler's message can be pages long; --json has all of it
    return [verdict.patch, verdict.version, verdict.state, asks, verdict.message[:120]]


@click.command()
@click.argument("name", metavar="IMAGE")
@click.argument("case", metavar="CASE")
@arch_option
@click.option(
    "--warps",
    default="4,8",
    show_default=True,
    help="Numbers of warps to try, separated by commas.",
)
@click.option(
    "--stages",
    default="1,2",
    show_default=True,
    help="Numbers of pipeline stages to try, separated by commas.",
)
@click.option("--top", default=20, show_default=True, help="Number of rows to show.")
@platform_option
@json_option
@click.pass_context
def tune(
    context: click.Context,
    name: str,
    case: str,
    arch: str | None,
    warps: str,
    stages: str,
    top: int,
    platform: str | None,
    as_json: bool,
) -> None:
    """Try other block sizes, warps and stages for one case, and rank them.

    Shows what fits and what spills registers. Which is fastest, only a card can show.
    """
    tried = (_numbers(warps), _numbers(stages))
    gate_context = make_gate_context(context)
    card = chosen_card(gate_context, name, platform, arch)
    # before gigabytes are downloaded
    chosen = find_case(read_gates(gate_context.checkout, name), case)
    with gate_context.store.in_use():
        opened = open_image_gate(gate_context, name, platform)
        with log.step(f"Trying other launch parameters for {case}"):
            tuning = sweep(opened, card, chosen, *tried)
    if as_json:
        return say_json(tuning.model_dump(mode="json"))
    # what the engine and our patch use is shown however far down it ranks
    shown = [c for i, c in enumerate(tuning.choices) if i < top or c.who]
    # every configuration sets the same parameters
    names = list(tuning.choices[0].values)
    head = [*names, "shared", "fits", "regs", "spill", "tile", "blocks/SM", "used by"]
    rows = [
        [
            *(str(c.values[n]) for n in names),
            *(_cell(c.shared_bytes), "yes" if c.fits else "no"),
            *(_cell(n) for n in (c.registers, c.spill_bytes, c.tile, c.blocks_per_sm)),
            ", ".join(c.who) or c.message[:60],
        ]
        for c in shown
    ]
    click.echo(log.table(head, rows))
    fitting = sum(c.fits for c in tuning.choices)
    click.echo(
        f"\n{tuning.kernel} of {case}: {fitting} of {len(tuning.choices)} fit"
        f" {tuning.limit_bytes} bytes on {card.arch}"
    )


def _cell(number: int | None) -> str:
    return "–" if number is None else str(number)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise GateInvalid(f"{text}: is not a list of numbers", "Write it as 4,8.") from error
