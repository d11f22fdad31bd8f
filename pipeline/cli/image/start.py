"""`sm120 image test`: a built image proves that it starts, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from pipeline import log
from pipeline.assemble.image import Built
from pipeline.cli.context import checkout_of, say_json, store_of
from pipeline.cli.image_statements import leave_runs
from pipeline.cli.images import find_image
from pipeline.cli.options import json_option, platform_option
from pipeline.cli.signing import Signing
from pipeline.errors import RecipeInvalid, SmokeNotPassed, StartFails, StartUnknown
from pipeline.evidence.runs import Run, TestVerdict
from pipeline.recipe.parser_flags import ParserFlags, find_parser_flags, flags_folder
from pipeline.source.box import KINDS, Wanted, find_way
from pipeline.spec.checkout import Checkout
from pipeline.starts.expected import engine_of
from pipeline.starts.prove import prove_start

_MOST_SHOWN = 110
Results = dict[Built, Run]


@click.command("test")
@click.argument("names", metavar="IMAGE...", nargs=-1, required=True)
@platform_option
@click.option(
    "--engine",
    "wanted",
    type=click.Choice(["auto", *KINDS]),
    default="auto",
    help="What runs it: Linux namespaces, Docker or Podman; auto is the first that works here.",
)
@json_option
@click.pass_context
def test_images(
    context: click.Context,
    names: tuple[str, ...],
    platform: str | None,
    wanted: Wanted,
    as_json: bool,
) -> None:
    """Prove that built images start. No GPU and no network are needed.

    Each image is run as its own user, with its own variables. The engine's modules must import and
    its argument parser must answer; gcc, nvcc, ptxas and ninja must compile as they will at run
    time; every shared library must be there but the driver's; and home, caches and /tmp must be
    writable. An image for another processor runs in an emulator where one is registered, which
    takes an hour.

    The result is stated beside the image, signed where there is a key: `sm120 verify IMAGE` shows
    it, and `sm120 publish` attaches it. What a server answers is for `sm120 smoke`.
    """
    checkout, store, signing = checkout_of(context), store_of(context), Signing()
    results = Results()
    with store.in_use():
        images = [find_image(checkout, store, name, platform) for name in dict.fromkeys(names)]
        way = find_way(wanted)
        for image in images:
            flags, file = committed_flags(checkout, image)
            results[image] = prove_start(store, image, way, flags, file)
            # a failure is stated like a success
            leave_runs(checkout, store, image, [results[image]], signing)
    if as_json:
        say_json([run_json(image, run) for image, run in results.items()])
    else:
        click.echo(show_runs(results))
    require_started(results)


def committed_flags(checkout: Checkout, image: Built) -> tuple[ParserFlags | None, Path | None]:
    """The flags that recipes are checked against, where they are known."""
    parser = engine_of(image.plan)
    if parser is None:
        return None, None
    folder = flags_folder(checkout)
    try:
        flags = find_parser_flags(folder, parser.engine, image.name)
    except RecipeInvalid:
        return None, None
    return flags, folder / f"{flags.image}.yaml"


def run_json(image: Built, run: Run) -> dict[str, Any]:
    """A run for programs."""
    about = {"image": image.name, "platform": image.platform, "digest": image.digest}
    return {**about, "verdict": run.verdict, **run.model_dump(mode="json")}


def show_runs(results: Results) -> str:
    """Every test of every image, and a line for each image at the end."""
    rows = [
        [image.name, test.verdict, test.name, test.message[:_MOST_SHOWN]]
        for image, run in results.items()
        for test in run.tests
    ]
    lines = [
        f"{image.name} for {image.platform} {run.summary()}: {_counts(run)}"
        for image, run in results.items()
    ]
    return "\n".join([log.table(["image", "verdict", "test", "message"], rows), "", *lines])


def _counts(run: Run) -> str:
    verdicts = [test.verdict for test in run.tests]
    kinds: Sequence[TestVerdict] = ("passed", "failed", "unknown", "skipped")
    return ", ".join(f"{n} {kind}" for kind in kinds if (n := verdicts.count(kind)))


def require_started(results: Results) -> None:
    """Raise the error of the first image that failed, else of the first that nobody could judge."""
    kinds: dict[str, type[SmokeNotPassed]] = {"failed": StartFails, "unknown": StartUnknown}
    for verdict, kind in kinds.items():
        for image, run in results.items():
            first = next((test for test in run.tests if test.verdict == verdict), None)
            if run.verdict == verdict and first:
                raise kind(f"{image.name} for {image.platform}: {first.name}: {first.message}")
