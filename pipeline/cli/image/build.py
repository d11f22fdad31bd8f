"""Building images, and proving that they come out the same again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from pipeline import log
from pipeline.assemble.image import Built, build_images
from pipeline.assemble.plan import ImagePlan
from pipeline.attest.keys import Signer
from pipeline.attest.statement import moment
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
from pipeline.cli.image.rebuild_plan import show_rebuild
from pipeline.cli.image.run_lines import recipe_for_any_machine
from pipeline.cli.image_statements import evidence_table, leave_statements
from pipeline.cli.images import find_image, plans_of
from pipeline.cli.options import (
    base_options,
    json_option,
    key_option,
    mirror_option,
    offline_option,
    platform_option,
)
from pipeline.cli.signing import Signing, signer_of
from pipeline.cli.source.compile import compile_missing, missing_trees
from pipeline.errors import NotReproducible, OfflineMiss, StoreDamaged
from pipeline.evidence.image import record_rebuild
from pipeline.evidence.rebuilt import Rebuilt
from pipeline.evidence.rebuilt import rebuild as build_again
from pipeline.fetch.base import BaseSettings
from pipeline.fetch.inputs import Fetcher
from pipeline.fetch.transport import make_fetcher
from pipeline.recipe.find import Recipes
from pipeline.source.objects import objects_folder
from pipeline.spec.checkout import Checkout
from pipeline.store.store import Store, open_store


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
    offline: bool,
    bases: BaseSettings,
    as_json: bool,
) -> None:
    """Build images into the store; without IMAGE, all that need no compiling first.

    Needs no Docker, no root and no emulation. It can be interrupted: run again, it continues. A
    digest that differs from the committed one is an error. With --gate, so is an image that does
    not fit its card; the image is kept, with the results of its gates.

    What each image is made of, and the results of its gates, are stated beside it: signed where
    there is a key, unsigned otherwise. `sm120 verify IMAGE` checks them.
    """
    start = time.monotonic()
    checkout, signing = checkout_of(context), Signing()
    store = store_to_read(context) if dry_run else store_of(context)
    plans = plans_of(checkout, names, platform)
    if not names:
        plans = _without_compiling(store, plans)
    if dry_run:
        return show_plan(plans, store, as_json)

    # a function: a build with nothing to fetch reads no settings and runs no pip
    def fetcher() -> Fetcher:
        return make_fetcher(store, mirrors, offline, bases)

    with store.in_use():
        compile_missing(checkout, store, plans, fetcher)
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
    recipe = recipe_for_any_machine(Recipes([checkout.root / "recipes"]), name)
    if recipe and is_found and built.platform == host_platform():
        lines[f"{me} serve {recipe}"] = "starts it with a tiny model, in Docker or Podman"
    width = max(map(len, lines))
    texts = [f"{command:{width}}   {what}" for command, what in lines.items()]
    return [f"Next: {texts[0]}", *(f"      {text}" for text in texts[1:])]


def _without_compiling(store: Store, plans: list[ImagePlan]) -> list[ImagePlan]:
    """Of all images, those that are not compiled for minutes or hours first."""
    ready: list[ImagePlan] = []
    for plan in plans:
        missing = missing_trees(store, [plan])
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


@click.command()
@click.argument("name", metavar="IMAGE")
@click.option("--attest", is_flag=True, help="Sign and keep the result, good or bad.")
@click.option(
    "--keep-objects",
    is_flag=True,
    help="Take compiled objects from the store, and only link again.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be fetched and built again.")
@key_option
@platform_option
@mirror_option
@offline_option
@base_options
@json_option
@click.pass_context
def rebuild(
    context: click.Context,
    name: str,
    attest: bool,
    keep_objects: bool,
    dry_run: bool,
    key_path: Path | None,
    platform: str | None,
    mirrors: tuple[str, ...],
    offline: bool,
    bases: BaseSettings,
    as_json: bool,
) -> None:
    """Build an image again in an empty store, and compare every byte with the first build.

    One platform is built again: that of --platform, else this machine's where the image has it.
    Prints `identical`, or names the first file and byte that differ. Inputs that the store still
    has are used; everything else is fetched again, and compiled again. Files that a source declares
    under `may_differ` may differ: then it prints `equivalent`, and each of them with the reason.
    With --attest the result is signed: a proof of equal bytes, not of a hosted builder.
    """
    if attest and keep_objects:
        # objects that were compiled before prove nothing about compiling
        raise click.UsageError("--attest needs everything compiled again; leave --keep-objects out")
    checkout = checkout_of(context)
    signer = signer_of(key_path) if attest else None
    if dry_run:
        seen = store_to_read(context)
        first = find_image(checkout, seen, name, platform)
        return show_rebuild(first, seen, keep_objects=keep_objects, as_json=as_json)
    store = store_of(context)
    with store.in_use(), store.scratch() as folder:
        first = find_image(checkout, store, name, platform)
        # nothing that was built before can leak into the second build
        empty = open_store(folder / "store")
        # inputs that the store kept, and the layers of a foreign base, need not travel again
        near = (str(store.root / "inputs"), str(store.root / "oci"))
        fetcher = make_fetcher(empty, (*mirrors, *near), offline, bases)
        if keep_objects:
            objects_folder(store).mkdir(exist_ok=True)
            objects_folder(empty).symlink_to(objects_folder(store))
        with _attested(store, first, signer) as ended, _offline_hint(name):
            compile_missing(checkout, empty, [first.plan], lambda: fetcher)
            ended.append(build_again(checkout, first, store, empty, fetcher))
    (rebuilt,) = ended
    if as_json:
        return say_json(_rebuilt_json(rebuilt))
    click.echo(f"{name} for {first.platform}: {rebuilt.verdict}, {rebuilt.second.digest}")
    for each in rebuilt.declared:
        click.echo(f"  {each.path} differs: {each.reason}")


def _rebuilt_json(rebuilt: Rebuilt) -> dict[str, Any]:
    row = {
        "image": rebuilt.second.name,
        "platform": rebuilt.second.platform,
        "digest": rebuilt.second.digest,
        "identical": not rebuilt.declared,
        "verdict": rebuilt.verdict,
    }
    return {**row, "differences": [each.model_dump() for each in rebuilt.declared]}


@contextmanager
def _offline_hint(name: str) -> Iterator[None]:
    """What a rebuild lacks is not in the store after another run either: it keeps no inputs."""
    try:
        yield
    except OfflineMiss as error:
        fix = f"`sm120 image collect {name} --to DIR` fills a folder for --mirror DIR."
        raise OfflineMiss(str(error), f"Leave --offline out. {fix}") from error


@contextmanager
def _attested(store: Store, first: Built, signer: Signer | None) -> Iterator[list[Rebuilt]]:
    """State how a rebuild ended, where somebody signs; a difference is stated like a success."""
    ended: list[Rebuilt] = []
    try:
        yield ended
    except NotReproducible as error:
        if signer is not None:
            record_rebuild(store, first, signer, str(error), moment())
        which = f"{first.name} for {first.platform}"
        raise NotReproducible(f"{which}: {error}", error.hint) from error
    if signer is not None:
        declared = ended[0].declared
        text = f"{log.count(len(declared), 'file')} with declared differences" if declared else ""
        record_rebuild(store, first, signer, text, moment(), declared)
