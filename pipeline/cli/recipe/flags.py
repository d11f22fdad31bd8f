"""`sm120 recipe flags`: what the argument parser of an image's engine accepts."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline import log
from pipeline.assemble.plan import ImagePlan, plan_image
from pipeline.cli.context import checkout_of, say_json, store_of
from pipeline.cli.images import find_image
from pipeline.cli.options import EXISTING_FILE, json_option, platform_option
from pipeline.errors import PipelineError
from pipeline.recipe.parser_flags import (
    FlagSpec,
    ParserFlags,
    find_parser_flags,
    flags_folder,
    write_parser_flags,
)
from pipeline.serve.read_flags import (
    find_parser,
    read_flags,
    read_program_flags,
    read_source_flags,
    read_wheel_flags,
)
from pipeline.source.box import find_way
from pipeline.spec.checkout import Checkout

_MOST_SHOWN = 60


@click.command()
@click.argument("image")
@platform_option
@click.option("--read", "again", is_flag=True, help="Read the built image, not its committed file.")
@click.option("--accept", is_flag=True, help="Read the built image and write its committed file.")
@click.option(
    "--program",
    type=EXISTING_FILE,
    help="Read this llama-server, compiled from the image's source, in place of the image.",
)
@click.option(
    "--archive",
    type=EXISTING_FILE,
    help="Read the source of llama.cpp in this archive, which the image is locked to.",
)
@click.option(
    "--wheel",
    type=EXISTING_FILE,
    help="Read this wheel of the engine, with what it imports from the image --inside.",
)
@click.option("--inside", metavar="IMAGE", help="A built image that this machine can run.")
@json_option
@click.pass_context
def flags(
    context: click.Context,
    image: str,
    platform: str | None,
    again: bool,
    accept: bool,
    program: Path | None,
    archive: Path | None,
    wheel: Path | None,
    inside: str | None,
    as_json: bool,
) -> None:
    """Show the flags that the engine of IMAGE accepts, and its own variables.

    They are read by running the engine's own argument parser in a sandbox, without network and
    without a GPU. Recipes are checked against the committed files in lockfiles/flags, so that this
    works on machines that have no image.
    """
    if (wheel is None) != (inside is None):
        raise click.UsageError("--wheel and --inside belong together")
    if sum(each is not None for each in (program, archive, wheel)) > 1:
        raise click.UsageError("give one of --program, --archive and --wheel")
    checkout = checkout_of(context)
    folder = flags_folder(checkout)
    if program:
        shown = read_program_flags(checkout, image, program.resolve())
    elif archive:
        shown = read_source_flags(checkout, image, archive)
    elif not (again or accept or wheel):
        engine = find_parser(plan_image(checkout, image, checkout.spec(image).platforms[0])).engine
        shown = find_parser_flags(folder, engine, image)
    else:
        store = store_of(context)
        built = find_image(checkout, store, inside or image, platform)
        way = find_way("auto")
        plan = plan_image(checkout, image, checkout.spec(image).platforms[0])
        shown = (
            read_wheel_flags(store, plan, wheel, built, way)
            if wheel
            else read_flags(store, built, way)
        )
    if accept:
        shown = shown.model_copy(update={"also": images_alike(checkout, image)})
        log.say(f"Written: {write_parser_flags(folder, shown)}")
    if as_json:
        return say_json(shown.model_dump(mode="json", exclude_defaults=True))
    click.echo(_table(shown))


def images_alike(checkout: Checkout, image: str) -> list[str]:
    """The other images with the same engine: its version, its patches or its source are equal."""
    own = [_engine_parts(plan) for plan in _plans(checkout, image)]
    alike = []
    for name in checkout.images():
        parts = [_engine_parts(plan) for plan in _plans(checkout, name)]
        if name != image and any(part in own for part in parts):
            alike.append(name)
    return alike


def _plans(checkout: Checkout, name: str) -> list[ImagePlan]:
    try:
        plans = [plan_image(checkout, name, each) for each in checkout.spec(name).platforms]
        return [plan for plan in plans if find_parser(plan)]
    except PipelineError:
        return []  # starts no engine


def _engine_parts(plan: ImagePlan) -> tuple[object, ...]:
    """What decides which flags an image accepts, on any platform."""
    parser = find_parser(plan)
    wheels = {
        (wheel.name, wheel.version)
        for each in plan.chain()
        for wheel in each.lock.wheels
        if wheel.name in ("vllm", "sglang", "xllamacpp")
    }
    patches = [digest for each in plan.chain() for digest in _digests(each.inputs["patches"])]
    trees = {t.lock.tree for t in plan.all_trees() if t.source.name in ("ik-llama", "llama-cpp")}
    return parser.engine, parser.arguments[0], frozenset(wheels), tuple(patches), frozenset(trees)


def _digests(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else []


def _table(shown: ParserFlags) -> str:
    names = sorted(shown.flags, key=lambda name: name.lstrip("-"))
    rows = [
        [name, ", ".join(shown.flags[name].aliases), *_value(shown.flags[name])] for name in names
    ]
    summary = (
        f"{shown.image}: {shown.title}, {log.count(len(rows), 'flag')},"
        f" {log.count(len(shown.variables), 'variable')} of its own; read from {shown.read_from}"
    )
    return f"{log.table(['flag', 'also', 'takes', 'values'], rows)}\n\n{summary}"


def _value(flag: FlagSpec) -> list[str]:
    if flag.retired:
        return ["–", f"removed: {flag.retired}"[:_MOST_SHOWN]]
    values = " ".join(
        [*(flag.choices or ([] if flag.takes == "none" else [flag.type])), *flag.words]
    )
    shown = values if len(values) <= _MOST_SHOWN else values[: _MOST_SHOWN - 1] + "…"
    return [flag.takes, shown or ", ".join(flag.off)]
