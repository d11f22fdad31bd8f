"""Commands about gates: does an image fit the card, and which patches does it need?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipeline import log
from pipeline.cli.common import (
    checkout_of,
    host_platform,
    json_option,
    mirror_option,
    offline_option,
    pick_platform,
    platform_option,
    say_json,
    store_of,
)
from pipeline.cli.signing import Signing
from pipeline.cli.statements import leave_gate_statements
from pipeline.errors import GateFailed, GateInvalid, GateUnknown, PatchUnproved

if TYPE_CHECKING:
    from pipeline.gate.patches import PatchVerdict
    from pipeline.gate.smem.context import GateContext
    from pipeline.gate.smem.image_gate import ImageGate
    from pipeline.gate.smem.results import CaseResult, GateResult

arch_option = click.option(
    "--arch", default="sm_120", show_default=True, help="Which card: sm_120, sm_121, sm_100, …"
)

series_option = click.option(
    "--series", metavar="NAME", help="Patches of patches/NAME.yaml, in place of the image's own."
)


class _Door(click.Group):
    """`sm120 gate IMAGE` is `sm120 gate run IMAGE`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {*self.commands, "-h", "--help"}
        return super().parse_args(ctx, args if not args or args[0] in known else ["run", *args])


@click.group(cls=_Door)
def gate() -> None:
    """Does an image fit its card? Says so without one: `sm120 gate IMAGE`."""


def make_gate_context(
    context: click.Context, mirrors: tuple[str, ...] = (), offline: bool = False
) -> GateContext:
    """What gates need to make environments; network things only when they are asked for."""
    from pipeline.cli.images import make_fetcher
    from pipeline.fetch.http import Client
    from pipeline.fetch.settings import read_settings
    from pipeline.gate.smem.context import GateContext
    from pipeline.gate.smem.wheels import WheelFinder

    store = store_of(context)
    return GateContext(
        checkout_of(context),
        store,
        host_platform(),
        lambda: make_fetcher(store, mirrors, offline),
        lambda: WheelFinder(Client(read_settings(mirrors))),
        offline,
    )


def _opened(
    gate_context: GateContext, name: str, platform: str | None, series: str | None = None
) -> ImageGate:
    from pipeline.assemble.plan import plan_image
    from pipeline.gate.smem.image_gate import open_gate

    chosen = pick_platform(gate_context.checkout.spec(name), platform)
    return open_gate(gate_context, plan_image(gate_context.checkout, name, chosen), series)


@gate.command("run")
@click.argument("name", metavar="IMAGE")
@arch_option
@click.option("--unpatched", is_flag=True, help="Judge the engine as published.")
@series_option
@click.option("--only", metavar="PATTERN", help="Cases by name, e.g. 'extend-mla-*'.")
@click.option("--discover", is_flag=True, help="List the kernels that no case reaches yet.")
@click.option(
    "--numerics",
    is_flag=True,
    help="Also run the kernels on the CPU and compare their numbers with float64.",
)
@platform_option
@mirror_option
@offline_option
@json_option
@click.pass_context
def run(
    context: click.Context,
    name: str,
    arch: str,
    unpatched: bool,
    series: str | None,
    only: str | None,
    discover: bool,
    numerics: bool,
    platform: str | None,
    mirrors: tuple[str, ...],
    offline: bool,
    as_json: bool,
) -> None:
    """Compile an image's Triton kernels for a card and compare their need with what it has.

    Needs no GPU: the image's own Triton compiles what the engine's own functions would launch.

    With `--numerics` the same functions also run under Triton's interpreter, with the block sizes
    chosen for the card and small seeded inputs: several sequences, cached prefixes, masks, lengths
    that are no multiple of a block. What they write is compared with a reference in float64.
    """
    from pipeline.cli.numerics import require_right, show_numbers
    from pipeline.gate.evidence import keep_evidence
    from pipeline.gate.findings import gate_evidence
    from pipeline.gate.numerics.check import add_numbers
    from pipeline.gate.smem.image_gate import chosen_cases, run_gate
    from pipeline.gate.smem.limits import card_for

    if discover and only:
        raise click.UsageError("--discover looks at all cases; leave --only out")
    card, signing = card_for(arch), Signing()
    gate_context = make_gate_context(context, mirrors, offline)
    with gate_context.store.in_use():
        opened = _opened(gate_context, name, platform, series)
        count = len(chosen_cases(opened.gates.cases(), only))
        with log.step(f"Judging {count} cases of {name} for {arch}"):
            result = run_gate(opened, card, unpatched=unpatched, only=only)
            if numerics:
                result = add_numbers(opened, result, unpatched=unpatched, only=only)
        if result.image_digest:
            found = gate_evidence(opened, result)
            keep_evidence(gate_context.store, name, result.platform, result.image_digest, found)
            leave_gate_statements(gate_context.checkout, gate_context.store, opened.plan, signing)
    if as_json:
        say_json(result.model_dump(mode="json"))
    else:
        click.echo(_discovered(result) if discover else show(result))
        click.echo(show_numbers(result), nl=result.numerics is not None)
    if not discover:
        require_passed(result)
        require_right(result)


@gate.command("tune")
@click.argument("name", metavar="IMAGE")
@click.argument("case", metavar="CASE")
@arch_option
@click.option("--warps", default="4,8", show_default=True, help="Numbers of warps to try.")
@click.option("--stages", default="1,2", show_default=True, help="Numbers of stages to try.")
@click.option("--top", default=20, show_default=True, help="How many to show.")
@platform_option
@json_option
@click.pass_context
def tune(
    context: click.Context,
    name: str,
    case: str,
    arch: str,
    warps: str,
    stages: str,
    top: int,
    platform: str | None,
    as_json: bool,
) -> None:
    """Try other block sizes, warps and stages for one case and rank them.

    Says what fits and what spills; only a card can say what is fastest.
    """
    from pipeline.gate.smem.image_gate import find_case
    from pipeline.gate.smem.limits import card_for
    from pipeline.gate.smem.tune import tune as sweep

    card = card_for(arch)
    gate_context = make_gate_context(context)
    with gate_context.store.in_use():
        opened = _opened(gate_context, name, platform)
        chosen = find_case(opened, case)
        with log.step(f"Trying other launch parameters for {case}"):
            tuning = sweep(opened, card, chosen, _numbers(warps), _numbers(stages))
    if as_json:
        return say_json(tuning.model_dump(mode="json"))
    shown = [c for i, c in enumerate(tuning.choices) if i < top or c.who]
    names = list(tuning.choices[0].values)
    head = [*names, "shared", "fits", "regs", "spill", "tile", "blocks/SM", "whose"]
    rows = [
        [
            *(str(c.values[n]) for n in names),
            *("–" if n is None else str(n) for n in (c.shared_bytes,)),
            "yes" if c.fits else "no",
            *("–" if n is None else str(n) for n in (c.registers, c.spill_bytes)),
            *(str(c.tile), "–" if c.blocks_per_sm is None else str(c.blocks_per_sm)),
            ", ".join(c.who) or c.message[:60],
        ]
        for c in shown
    ]
    click.echo(log.table(head, rows))
    fitting = sum(c.fits for c in tuning.choices)
    click.echo(
        f"\n{tuning.kernel} of {case}: {fitting} of {len(tuning.choices)} fit"
        f" {tuning.limit_bytes} bytes on {arch}"
    )


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise GateInvalid(f"{text}: not a list of numbers, e.g. 4,8") from error


def require_passed(result: GateResult) -> None:
    """Turn a verdict into the command's ending."""
    bad = [case for case in result.cases if case.verdict == result.verdict]
    named = ", ".join(case.name for case in bad[:4]) + (" …" if len(bad) > 4 else "")
    if result.verdict == "failed":
        raise GateFailed(f"{result.image}: {len(bad)} cases fail on {result.card.arch}: {named}")
    if result.verdict == "unknown":
        raise GateUnknown(f"{result.image}: {len(bad)} cases could not be judged: {named}")


def show(result: GateResult) -> str:
    """The result as a table, one line a case: its hungriest kernel."""
    head = ["case", "kernel", "shared", "limit", "verdict", "regs", "spill", "warps", "stages"]
    rows = [_row(case, result.card.shared_bytes) for case in result.cases]
    facts, covered = result.environment, result.coverage
    lines = [log.table([*head, "blocks"], rows), ""]
    lines += [f"{case.name}: {case.message}" for case in result.cases if case.message]
    where = "the image's own files" if facts.kind == "image" else f"wheels for {facts.platform}"
    held = {0: "unpatched", 1: "with 1 patch"}.get(
        len(result.patches), f"with {len(result.patches)} patches"
    )
    lines.append(
        f"{result.engine} {result.engine_version} {held}, Triton {facts.triton},"
        f" torch {facts.torch} ({where}, GPU libraries are stubs)"
    )
    if facts.stand_in:
        lines.append(facts.stand_in)
    if result.sandbox and result.sandbox.missing:
        lines.append(result.sandbox.sentence())
    if covered:
        lines.append(
            f"{covered.reached} of the engine's {covered.kernels} Triton kernels are reached;"
            f" `sm120 gate {result.image} --discover` names the rest"
        )
    counts = {v: sum(c.verdict == v for c in result.cases) for v in _VERDICTS}
    told = ", ".join(f"{n} {v}" for v, n in counts.items() if n)
    lines.append(f"{result.image} on {result.card.arch}: {told} in {log.seconds(result.seconds)}")
    if counts["passed"]:
        lines.append(_unchecked(result, counts["passed"]))
    return "\n".join(lines)


def _unchecked(result: GateResult, passed: int) -> str:
    """How much of what fits was also seen to compute the right thing."""
    if result.numerics is None:
        return f"No numbers were compared for the {passed} passed; --numerics does that"
    return f"{len(result.without_numbers)} of the {passed} passed have no number check"


_VERDICTS = ("passed", "accepted", "failed", "unknown")


def _row(case: CaseResult, limit: int) -> list[str]:
    worst = case.worst
    if worst is None:
        return [case.name, "–", "–", str(limit), case.verdict, "–", "–", "–", "–", ""]
    record = worst.record
    blocks = " ".join(f"{k}={v}" for k, v in record.blocks.items() if "BLOCK" in k)
    numbers = [record.registers, record.spill_bytes, record.num_warps, record.num_stages]
    return [
        *(case.name, record.kernel, str(record.shared_bytes), str(limit), case.verdict),
        *("–" if n is None else str(n) for n in numbers),
        blocks,
    ]


def _discovered(result: GateResult) -> str:
    covered = result.coverage
    assert covered is not None
    rows = [[k.module, k.name, str(k.line), ", ".join(k.launched_by)] for k in covered.rest]
    told = (
        f"{covered.reached} of {covered.kernels} kernels are reached by cases; the rest are below."
        f" Not counted: {covered.elsewhere} for other makers' cards or tests, {covered.helpers}"
        f" helpers that only kernels call, {covered.idle} that nothing launches."
    )
    return "\n".join([told, "", log.table(["module", "kernel", "line", "launched by"], rows)])


@click.command()
@click.argument("name", metavar="IMAGE")
@click.option("--against", metavar="VERSION", help="Another version of the engine, or a range.")
@click.option(
    "--without-sandbox",
    is_flag=True,
    help="With --against, run the other version's code although this system isolates nothing.",
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
    arch: str,
    platform: str | None,
    mirrors: tuple[str, ...],
    offline: bool,
    as_json: bool,
) -> None:
    """Say of each patch whether it is needed, upstreamed, superseded, inert or in conflict.

    At a version older than the locked one it may also be not needed yet.

    The gate decides, with the patch and without it. `--against 0.5.9` or `--against ">=0.5.9"`
    asks about other versions on the index and fetches only the engine's own wheel.
    """
    from pipeline.gate.patches import judge_against, judge_patches, unproved, versions_against
    from pipeline.gate.sandbox.sandbox import find_sandbox, require_isolation
    from pipeline.gate.smem.limits import card_for

    card = card_for(arch)
    sandbox = find_sandbox()
    if against is not None and not without_sandbox:
        require_isolation(sandbox)
    gate_context = make_gate_context(context, mirrors, offline)
    with gate_context.store.in_use():
        opened = _opened(gate_context, name, platform, series)
        if against is None:
            with log.step(f"Judging the patches of {name} for {arch}"):
                found = judge_patches(opened, card)
        else:
            found = judge_against(opened, card, versions_against(opened, against), log.say)
    if as_json:
        say_json([v.model_dump(mode="json") for v in found])
    else:
        head = ["patch", "version", "verdict", "asks for", "why"]
        click.echo(log.table(head, [_told(v) for v in found]))
        facts = opened.environment.facts
        click.echo(
            f"\nAll judged with Triton {facts.triton} and torch {facts.torch}, to which {name} is"
            " locked; `asks for` is what each version itself requires."
        )
    if sandbox.missing:
        log.say(sandbox.sentence())
    unknown = [v for v in found if v.state == "unknown"]
    if against is not None and unknown:
        named = ", ".join(f"{v.patch} at {v.version}" for v in unknown[:4])
        raise GateUnknown(f"{name}: {len(unknown)} verdicts are unknown: {named}")
    if against is None and unproved(found):
        named = ", ".join(f"{v.patch} is {v.state}" for v in unproved(found))
        raise PatchUnproved(f"{name}: {named}")


def _told(verdict: PatchVerdict) -> list[str]:
    asks = ", ".join(verdict.requires) or "–"
    return [verdict.patch, verdict.version, verdict.state, asks, verdict.message[:120]]
