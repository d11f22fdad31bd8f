"""`sm120 gate`: judge an image, find the case of a kernel, judge patches, tune a kernel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline import app
from pipeline.app.workspace import Workspace
from pipeline.cli import options
from pipeline.cli.gate_tables import (
    show_kernels,
    show_numbers,
    show_objects,
    show_parsers,
    show_templates,
    show_unreached,
)
from pipeline.cli.options import Numbers, command, flag_option, many_option, query
from pipeline.cli.output import answer_keys, say_json
from pipeline.core import log
from pipeline.images.gate.arch import ARCHITECTURES, target_of
from pipeline.images.gate.stage import shown_result

if TYPE_CHECKING:
    from pipeline.app.gate import GateRequest, GateResults
    from pipeline.app.on_slurm import SlurmOrder

arch_option = click.option(
    "--arch",
    metavar="sm_NNN",
    help="Architecture of the target card [default: the first that image.yaml names].",
)
series_option = click.option(
    "--series",
    metavar="NAME",
    help="Use the patches of patches/NAME.yaml instead of the image's own.",
)


class FamilyPath(click.ParamType[Any]):
    """`FAMILY=PATH`: a family of models, and where its weights are."""

    name = "FAMILY=PATH"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, Path]:
        """The two parts."""
        name, sign, path = str(value).partition("=")
        if not (sign and path and re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,60}", name)):
            self.fail(f"{value!r} is not FAMILY=PATH, such as kimi-k2.5=/models/kimi-k2.6")
        if not Path(path).exists():
            self.fail(f"{path}: there is no such file or folder")
        return name, Path(path)


@query
@click.argument("image", metavar="IMAGE")
@many_option(
    "--only",
    type=click.Choice(["smem", "numerics", "parsers", "templates", "arch"]),
    help="Run only this gate. Repeatable [default: all that the image names].",
)
@click.option("--case", metavar="PATTERN", help="Judge only cases such as 'extend-mla-*'.")
@click.option(
    "--arch",
    metavar="sm_NNN",
    help="Architecture of the target card [default: those that image.yaml names].",
)
@flag_option("--unpatched", help="Judge the engine as published, without patches.")
@series_option
@many_option(
    "--weights",
    type=FamilyPath(),
    help="Compare with the tokenizer and render with the template of these weights. Repeatable.",
)
@flag_option("--only-failed", help="Show only what failed or could not be judged.")
@flag_option("--all", "show_all", help="List every case, also those that passed.")
@flag_option("--discover", help="List the kernels that no case reaches yet.")
@options.slurm_options
@options.platform_option
@options.mirror_option
@options.offline_option
def gate_run_command(
    workspace: Workspace,
    /,
    only_failed: bool,
    show_all: bool,
    discover: bool,
    mirrors: tuple[str, ...],
    offline: bool,
    slurm: SlurmOrder | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Judge whether an image runs on its card. No GPU is needed.

    smem: the image's own Triton compiles the kernels that the engine's own functions launch, and
    the shared memory they need is compared with what the card has.

    numerics: the same functions run under Triton's interpreter, with the block sizes chosen for
    the card and small seeded inputs; what they write is compared with a float64 reference.

    parsers: the image's own endpoints read known answers, cut in every way; a client must get the
    reasoning, the content and the tool calls that were meant. Cases have names such as
    'kimi-k2/call', and 'kimi-k2/call/required' where the request requires a call.

    templates: the image's own code renders conversations with a model's chat template; the text
    must be the one that a reference renders. Cases have names such as 'kimi-k2.5/late-system-turn'.

    arch: every object of the built image that holds CUDA code must hold code that the card can
    run. This needs none of NVIDIA's tools, and judges amd64 images on arm64, too.

    With --on slurm, nodes answer the cases of smem, numerics and parsers, in chunks; this machine
    judges their answers and keeps them. Cases that the store has an answer for are not asked again.
    """
    request = app.gate.GateRequest(**options)
    if discover and request.case:
        raise click.UsageError("--discover looks at all cases; leave --case out")
    if only_failed and show_all:
        raise click.UsageError("--all lists what --only-failed leaves out; choose one")
    if only_failed and (as_json or discover):
        raise click.UsageError("--only-failed is about the tables of verdicts; use it alone")
    if "arch" in request.only and not request.is_own:
        raise click.UsageError("--only arch judges the built image; leave the other choices out")
    if len({name for name, _ in request.weights}) < len(request.weights):
        raise click.UsageError("--weights names a family twice")
    gates = workspace.checkout().spec(request.image).gates
    if request.weights and not {"parsers", "templates"} & {*(request.only or gates)}:
        raise click.UsageError("--weights is about parsers and templates; add --only parsers")
    if request.arch and not discover and request.wants_objects(gates):
        try:
            known = target_of(request.arch).arch in ARCHITECTURES
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--arch") from error
        if not known:
            listed = ", ".join(f"sm_{number}" for number in ARCHITECTURES)
            message = f"{request.arch} is not known (known: {listed})"
            raise click.BadParameter(message, param_hint="--arch")
    done = app.gate.run_gates(
        workspace, request, kernels_only=discover, mirrors=mirrors, offline=offline, slurm=slurm
    )
    if as_json:
        smem, built = shown_result(done.runs), done.built
        parsers = next((run.parsers for run in done.runs if run.parsers), None)
        templates = next((run.templates for run in done.runs if run.templates), None)
        reports = [run.evidence.model_dump(mode="json") for run in done.runs if run.report]
        say_json(
            {
                "image": request.image,
                "smem": smem.model_dump(mode="json") if smem else None,
                "parsers": parsers.model_dump(mode="json") if parsers else None,
                "templates": templates.model_dump(mode="json") if templates else None,
                "arch": {"digest": built.digest, "reports": reports} if built else None,
            }
        )
    else:
        # of a few chosen cases each is listed; of all, those that passed are counted
        hide_passed = not show_all and request.case is None
        click.echo("\n\n".join(_texts(request, done, discover, only_failed, hide_passed)))
    if not discover:
        done.require_passed()


@command
@click.argument("image", metavar="IMAGE")
@click.option(
    "--only",
    required=True,
    type=click.Choice(["smem", "parsers", "warm"]),
    help="The gate; smem has the cases of numerics, too; warm compiles for `sm120 image warm`.",
)
@arch_option
@flag_option("--unpatched", help="Ask the engine as published, without patches.")
@series_option
@options.platform_option
@options.mirror_option
@options.offline_option
def gate_answer_command(
    workspace: Workspace,
    /,
    only: str,
    mirrors: tuple[str, ...],
    offline: bool,
    **options: Any,
) -> None:
    """Answer the cases whose keys come on stdin, a key a line.

    `sm120 gate run --on slurm` and `sm120 image warm --on slurm` run this on a node. Prints a line
    of JSON when it begins, one with the digests of what decides answers, and one for each answer.
    A key that no case here has is left out.
    """
    request = app.gate.GateRequest(only=(only,), **options)
    answer_keys(
        lambda keys: app.gate.answer_cases(
            workspace, request, keys, mirrors=mirrors, offline=offline
        )
    )


def _texts(
    request: GateRequest, done: GateResults, discover: bool, only_failed: bool, hide_passed: bool
) -> list[str]:
    kernels = shown_result(done.runs)
    texts = []
    if kernels and discover:
        texts.append(show_unreached(kernels))
    elif kernels:
        listing = {"only_failed": only_failed, "hide_passed": hide_passed}
        if kernels.cases:
            texts.append(show_kernels(kernels, **listing))
        texts += [show_numbers(kernels, **listing)] if kernels.numerics else []
    for parsers in [run.parsers for run in done.runs if run.parsers]:
        texts.append(show_parsers(parsers, only_failed=only_failed, hide_passed=hide_passed))
    for templates in [run.templates for run in done.runs if run.templates]:
        texts.append(show_templates(templates, only_failed=only_failed, hide_passed=hide_passed))
    for report in [run.report for run in done.runs if run.report]:
        assert done.arch_spec is not None
        texts.append(show_objects(request.image, report, done.arch_spec, only_failed=only_failed))
    return texts


@query
@click.argument("image", metavar="IMAGE")
@options.platform_option
def gate_show_command(
    workspace: Workspace, image: str, platform: str | None, as_json: bool
) -> None:
    """Show the kept results of an image's gates, as they go into its evidence.

    Nothing is judged anew; `sm120 gate run` does that. With --json every row is printed.
    """
    gates = app.gate.kept_gates(workspace, image, platform)
    if as_json:
        return say_json(gates.model_dump(mode="json"))
    rows, bad = [], list[str]()
    for result in gates.results:
        found = [row.verdict for row in result.rows]
        listed = log.counts_by_kind(found, dict.fromkeys(found))
        rows.append([result.gate, result.arch, result.verdict, listed or result.message])
        failed = [row for row in result.rows if row.verdict in ("failed", "unknown")]
        bad += [f"{result.gate}: {row.name}: {row.message}" for row in failed]
    click.echo(log.table(["gate", "card", "verdict", "cases"], rows))
    click.echo("\n".join(["", *bad, f"{image} for {gates.platform}: {gates.image_digest}"]))


@query
@click.argument("kernels", metavar="[KERNEL]...", nargs=-1)
@click.option(
    "--traceback",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    metavar="FILE",
    help="Find the cases of the kernels in this log's tracebacks; `-` reads standard input.",
)
@click.option("--image", metavar="NAME", help="Look in this image only [default: in all].")
def gate_find_command(
    workspace: Workspace,
    kernels: tuple[str, ...],
    traceback: Path | None,
    image: str | None,
    as_json: bool,
) -> None:
    """Find the gate cases that judge a kernel, by its name or by a traceback.

    KERNEL is the name of a kernel, or of the function that launches it; `*mla*` matches several.
    Nothing is compiled or downloaded.
    """
    if not all(kernels) or not (kernels or traceback):
        raise click.UsageError("name a kernel, or a log with --traceback FILE")
    cases, not_found = app.gate.find_cases(workspace, kernels, traceback, image)
    if as_json:
        say_json([case.model_dump(mode="json") for case in cases])
    elif cases:
        # images that share a file of cases stand together
        images: dict[tuple[str, str], list[str]] = {}
        for each in cases:
            images.setdefault((each.case, ", ".join(each.found_by)), []).append(each.image)
        stands_for = {each.case: ", ".join(each.stands_for) for each in cases}
        rows = [
            [case, ", ".join(found_in), found_by, stands_for[case]]
            for (case, found_by), found_in in images.items()
        ]
        click.echo(log.table(["case", "images", "found by", "stands for"], rows))
        first = cases[0]
        click.echo(f"\nNext: sm120 gate run {first.image} --only smem --case '{first.case}*'")
    if not_found:
        raise not_found


@query
@click.argument("name", metavar="IMAGE")
@click.option(
    "--against",
    metavar="VERSION",
    help="Judge against another engine version or range, such as >=0.5.9.",
)
@flag_option(
    "--without-sandbox", help="With --against, run the other version although there is no sandbox."
)
@series_option
@arch_option
@options.platform_option
@options.mirror_option
@options.offline_option
def gate_patches_command(workspace: Workspace, /, name: str, as_json: bool, **options: Any) -> None:
    """Judge each patch: needed, upstreamed, superseded, inert or in conflict.

    At a version older than the locked one a patch may also be not needed yet. One that says under
    `no_gate` why no gate can judge it is listed with that reason.

    The gate decides, with the patch and without it. `--against 0.5.9` or `--against ">=0.5.9"`
    judges other versions on the index and downloads only the engine's own wheel.
    """
    done = app.gate.judge_all_patches(workspace, name, **options)
    if as_json:
        say_json([v.model_dump(mode="json") for v in done.verdicts])
    else:
        rows = [
            # a compiler's message can be pages long; --json has all of it
            [v.patch, v.version, v.state, ", ".join(v.requires) or "–", v.message[:120]]
            for v in done.verdicts
        ]
        click.echo(log.table(["patch", "version", "verdict", "requires", "why"], rows))
        if facts := done.environment:
            click.echo(
                f"\nAll judged with Triton {facts.triton} and torch {facts.torch}, to which {name}"
                " is locked; `requires` is what each version itself asks for."
            )
    if done.missing:
        log.say(done.missing)
    if done.error:
        raise done.error


@query
@click.argument("name", metavar="IMAGE")
@click.argument("case", metavar="CASE")
@arch_option
@click.option("--warps", type=Numbers("4,8", 1), default="4,8", help="Numbers of warps to try.")
@click.option("--stages", type=Numbers("1,2", 1), default="1,2", help="Numbers of pipeline stages.")
@click.option("--top", default=20, help="Number of rows to show.")
@options.platform_option
def gate_tune_command(
    workspace: Workspace, /, name: str, case: str, top: int, as_json: bool, **options: Any
) -> None:
    """Try other block sizes, warps and stages for one case, and rank them.

    Shows what fits and what spills registers. Which is fastest, only a card can show.
    """
    tuning, card = app.gate.tune_case(workspace, name, case, **options)
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
