"""Building images."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline import log
from pipeline.assemble.image import Built, build_images
from pipeline.assemble.plan import ImagePlan
from pipeline.cli.context import (
    checkout_of,
    host_platform,
    own_name,
    pick_platform,
    say_json,
    store_of,
    store_to_read,
)
from pipeline.cli.gate.stage import judge_images, require_all_passed, stage_json, stage_table
from pipeline.cli.image.plan import show_plan
from pipeline.cli.image_statements import evidence_table, leave_statements
from pipeline.cli.images import plans_of
from pipeline.cli.options import (
    LayerSettings,
    base_options,
    json_option,
    layers_options,
    mirror_option,
    offline_option,
    platform_option,
)
from pipeline.cli.signing import Signing
from pipeline.cli.source.compile import compile_missing, missing_trees, offered_layers
from pipeline.errors import StoreDamaged, UnknownImage
from pipeline.spec.checkout import Checkout
from pipeline.store.store import Store

if TYPE_CHECKING:
    from pipeline.fetch.base_settings import BaseSettings
    from pipeline.fetch.inputs import Fetcher


@click.command()
@click.argument("names", metavar="[IMAGE]...", nargs=-1)
@platform_option
@click.option(
    "--accept",
    is_flag=True,
    help="Take the result as expected: write its golden digest and the hashes of edited patches.",
)
@click.option("--keep-inputs", is_flag=True, help="Keep wheels after they became layers.")
@click.option(
    "--gate",
    "gated",
    is_flag=True,
    help="Then run the gates: shared memory, numerics, patches, machine code.",
)
@click.option(
    "--dry-run", is_flag=True, help="Show what would be fetched and built, as `sm120 plan` does."
)
@mirror_option
@layers_options
@offline_option
@base_options
@json_option
@click.pass_context
def build(
    context: click.Context,
    names: tuple[str, ...],
    platform: str | None,
    accept: bool,
    keep_inputs: bool,
    gated: bool,
    dry_run: bool,
    mirrors: tuple[str, ...],
    layers: LayerSettings | None,
    offline: bool,
    bases: BaseSettings,
    as_json: bool,
) -> None:
    """Build images into the store; without IMAGE, all that need no compiling first.

    Needs no Docker, no root and no emulation. It can be interrupted: run again, it continues. A
    digest that differs from the committed one is an error. With --gate, so is an image that does
    not fit its card; the image is kept, with the results of its gates.

    What an image needs compiled is compiled here, for minutes or hours. With --layers-from, what
    another machine compiled and signed is fetched instead: by its digest, and only if a key that
    you trust signed it for exactly this source, these patches and this toolchain. A layer that
    fails a check ends the build; one that is not there is compiled.

    What each image is made of, and the results of its gates, are stated beside it: signed where
    there is a key, unsigned otherwise. `sm120 verify IMAGE` checks them.
    """
    start = time.monotonic()
    checkout, signing = checkout_of(context), Signing()
    store = store_to_read(context) if dry_run else store_of(context)
    plans = plans_of(checkout, names, platform)
    trees = missing_trees(store, plans)
    offered = offered_layers(context, trees, layers, bases.access, offline=offline)
    if not names:
        plans = _without_compiling(store, plans, offered)
        if not plans and not dry_run:
            message = "there is no image to build that is not compiled first"
            raise UnknownImage(message, "Name those to compile and build: `sm120 build IMAGE`.")
    if dry_run:
        return show_plan(plans, store, as_json, offered)

    # a function: a build with nothing to fetch reads no settings and runs no pip
    def fetcher() -> Fetcher:
        from pipeline.fetch.transport import make_fetcher  # slow; often nothing is fetched

        return make_fetcher(store, mirrors, offline, bases)

    with store.in_use():
        compile_missing(checkout, store, plans, fetcher, offered)
        built = build_images(
            checkout,
            store,
            plans,
            fetcher,
            keep_inputs=keep_inputs,
            accept=accept,
        )
        # a damaged record of gates is an error, unless gates run now and replace it
        with suppress(*([StoreDamaged] if gated else [])):
            left = leave_statements(checkout, store, built, signing)
    # after the image is stated and kept: a failed gate must not cost the build
    stages = judge_images(context, built, mirrors, offline) if gated else {}
    if gated:
        with store.in_use():
            left = leave_statements(checkout, store, built, signing)
    elapsed = time.monotonic() - start
    if as_json:
        rows = [{**_built_json(b), "evidence": left[b].as_json()} for b in built]
        # printed before the error: a script gets the digests of what failed, too
        say_json([{**row, **stage_json(stages.get(b))} for row, b in zip(rows, built, strict=True)])
        return require_all_passed(stages)
    click.echo(_built_table(built))
    if stages:
        click.echo(f"\n{stage_table(stages)}")
    click.echo(f"\n{evidence_table(left.values(), signing)}")
    # never with --json, where nobody reads it
    signing.offer_key(store, any(not x.stated.signed_by for x in left.values()))
    require_all_passed(stages)
    what = "nothing to do" if all(b.cached for b in built) else "done"
    click.echo(f"\n{what} in {log.seconds(elapsed)}; store {store.root}")
    # of several platforms the one that runs here
    nearest = next((b for b in built if b.platform == host_platform()), built[0])
    for line in _next_lines(checkout, nearest):
        click.echo(line)


def _next_lines(checkout: Checkout, built: Built) -> list[str]:
    """What brings a built image to where it runs: with Docker, and without it."""
    me, name = own_name(), built.name
    # another platform than this machine's is not found without its name
    is_found = pick_platform(checkout.spec(name), None) == built.platform
    more = "" if is_found else f" --platform {built.platform}"
    load, export = f"{me} load {name}{more}", f"{me} image export {name} DIR{more}"
    lines = {
        load: "loads it into Docker",
        export: "without Docker: a layout for Podman, skopeo, containerd",
    }
    if is_found and built.platform == host_platform() and (recipe := _tiny_recipe(checkout, name)):
        lines[f"{me} serve {recipe}"] = "starts it with a tiny model, in Docker or Podman"
    width = max(map(len, lines))
    texts = [f"{command:{width}}   {what}" for command, what in lines.items()]
    return [f"Next: {texts[0]}", *(f"      {text}" for text in texts[1:])]


def _tiny_recipe(checkout: Checkout, image: str) -> str | None:
    """A recipe of an image that starts on any machine."""
    folder = checkout.root / "recipes"
    # most images have none, and reading all recipes takes as long as the rest of a build
    if not any(_mentions(path, "tiny", image) for path in folder.glob("*.yaml")):
        return None
    from pipeline.cli.image.run_lines import recipe_for_any_machine
    from pipeline.recipe.find import Recipes

    return recipe_for_any_machine(Recipes([folder]), image)


def _mentions(path: Path, *words: str) -> bool:
    # editors leave links to nowhere beside recipes: no reason to end a build with an error
    with suppress(OSError):
        text = path.read_text(errors="replace")
        return all(word in text for word in words)
    return False


def _without_compiling(
    store: Store, plans: list[ImagePlan], offered: Collection[str]
) -> list[ImagePlan]:
    """Of all images, those that are not compiled for minutes or hours first."""
    ready: list[ImagePlan] = []
    for plan in plans:
        missing = [x for x in missing_trees(store, [plan]) if x.key not in offered]
        if not missing:
            ready.append(plan)
            continue
        name, minutes = plan.spec.name, sum(tree.build.cpu_minutes for tree in missing)
        log.say(
            f"{name} for {plan.platform} is left out: it is compiled first, {minutes} CPU-minutes."
            f" `sm120 build {name}` does it."
        )
    return ready


def _built_table(built: list[Built]) -> str:
    rows = [
        [
            b.name,
            b.platform,
            b.digest,
            log.size(b.size_bytes),
            log.size(b.record.unpacked_bytes),
            len(b.layers),
            "cached" if b.cached else log.seconds(b.time_s),
        ]
        for b in built
    ]
    return log.table(["image", "platform", "digest", "size", "unpacked", "layers", "time"], rows)


def _built_json(built: Built) -> dict[str, Any]:
    return {
        "image": built.name,
        "platform": built.platform,
        "digest": built.digest,
        "size_bytes": built.size_bytes,
        "unpacked_bytes": built.record.unpacked_bytes,
        "cached": built.cached,
        # milliseconds: more digits only make two results differ
        "time_s": round(built.time_s, 3),
        "layers": [{"title": x.title, **x.record.model_dump()} for x in built.layers],
    }
