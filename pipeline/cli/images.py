"""Commands about images: look, plan, build, load, export, rebuild."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline import log
from pipeline.cli.common import (
    base_options,
    checkout_of,
    json_option,
    mirror_option,
    offline_option,
    own_name,
    pick_platform,
    platform_option,
    platforms_of,
    say_json,
    store_of,
    store_to_read,
)
from pipeline.cli.signing import Signing
from pipeline.cli.stage import judge_images, require_all_passed, stage_json, stage_table
from pipeline.cli.statements import evidence_table, leave_statements
from pipeline.errors import NotReproducible, StoreDamaged, UnknownImage

if TYPE_CHECKING:
    from pipeline.assemble.image import Built
    from pipeline.assemble.plan import ImagePlan, Work
    from pipeline.attest.keys import Signer
    from pipeline.fetch.base import BaseSettings
    from pipeline.fetch.inputs import Fetcher
    from pipeline.lock.model import BasePin
    from pipeline.spec.checkout import Checkout
    from pipeline.store.store import Store


@click.command()
@json_option
@click.pass_context
def images(context: click.Context, as_json: bool) -> None:
    """List the images of this checkout and whether they are built."""
    checkout, store = checkout_of(context), store_to_read(context)
    rows = []
    for name in checkout.images():
        spec = checkout.spec(name)
        for platform in spec.platforms:
            record = store.image_record(name, platform)
            rows.append(
                {
                    "image": name,
                    "platform": platform,
                    "locked": checkout.lock_path(name, platform).exists(),
                    "built": record.digest if record else None,
                    "summary": spec.summary,
                }
            )
    if as_json:
        return say_json(rows)
    table = [
        [
            str(r["image"]),
            str(r["platform"]),
            str(r["built"])[7:19] if r["built"] else ("locked" if r["locked"] else "no lock"),
            str(r["summary"]),
        ]
        for r in rows
    ]
    click.echo(log.table(["image", "platform", "built", "summary"], table))


@click.command()
@click.argument("names", metavar="[IMAGE]...", nargs=-1)
@platform_option
@json_option
@click.pass_context
def plan(
    context: click.Context, names: tuple[str, ...], platform: str | None, as_json: bool
) -> None:
    """Say what a build would fetch, what is cached and how much disk it needs. Fetches nothing."""
    from pipeline.assemble.plan import layer_bytes_guess, work_for

    checkout, store = checkout_of(context), store_to_read(context)
    plans = _plans(checkout, names, platform)
    work = work_for(plans, store)
    if as_json:
        return say_json(
            {
                "images": [p.spec.name for p in plans],
                "fetch_files": len(work.fetch),
                "fetch_bytes": work.fetch_bytes,
                "base_bytes": work.base_bytes,
                "disk_bytes": work.disk_bytes,
                "layers_missing": [x.title for x in work.missing],
                "layers_cached": [x.title for x in work.cached],
            }
        )
    rows = [
        [x.title, log.size(layer_bytes_guess(x)), "cached" if x in work.cached else "to make"]
        for x in [*work.cached, *work.missing]
    ]
    rows += [[str(b), log.size(_bytes_of(b)), "to fetch"] for b in work.bases]
    click.echo(log.table(["layer", "about", "state"], rows))
    click.echo(
        f"\n{len(work.fetch)} files to fetch, {log.size(work.fetch_bytes)}{_of_bases(work)};"
        f" disk needed {log.size(work.disk_bytes)};"
        f" store {store.root}"
    )


def _of_bases(work: Work) -> str:
    return f", and {log.size(work.base_bytes)} of foreign bases" if work.bases else ""


def _bytes_of(base: BasePin) -> int:
    return sum(blob.size_bytes for blob in base.blobs)


def _plans(checkout: Checkout, names: tuple[str, ...], platform: str | None) -> list[ImagePlan]:
    from pipeline.assemble.plan import plan_image

    chosen = dict.fromkeys(names or checkout.images())
    if not chosen:
        raise UnknownImage(f"{checkout.root / 'images'}: holds no image")
    return [
        plan_image(checkout, name, found)
        for name in chosen
        for found in platforms_of(checkout.spec(name), platform)
    ]


def make_fetcher(
    store: Store, mirrors: tuple[str, ...], offline: bool, bases: BaseSettings | None = None
) -> Fetcher:
    """A fetcher over everything this machine is configured with."""
    from pipeline.fetch.http import Client
    from pipeline.fetch.inputs import Fetcher
    from pipeline.fetch.settings import read_settings
    from pipeline.fetch.sources import Sources

    client = Client(read_settings(mirrors))
    return Fetcher(store, client, Sources(client), offline=offline, bases=bases)


@click.command()
@click.argument("names", metavar="[IMAGE]...", nargs=-1)
@platform_option
@click.option("--accept", is_flag=True, help="Take the result as the new golden digest.")
@click.option("--keep-inputs", is_flag=True, help="Keep wheels also after they became layers.")
@click.option(
    "--gate",
    "gated",
    is_flag=True,
    help="Then run the images' gates: shared memory, patches, machine code.",
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
    mirrors: tuple[str, ...],
    offline: bool,
    bases: BaseSettings,
    as_json: bool,
) -> None:
    """Build images (all, if none is named) into the store.

    Needs no Docker, no root and no emulation. Interrupt it whenever you like: run it again and
    it goes on. A digest that differs from the committed one is an error. With --gate, so is an
    image that does not fit its card; it is kept, with what the gates said of it.

    What each image is made of, and what its gates found, is stated beside it: signed where there
    is a key, unsigned otherwise. `sm120 verify IMAGE` checks it.
    """
    from pipeline.assemble.image import build_images

    start = time.monotonic()
    checkout, store, signing = checkout_of(context), store_of(context), Signing()
    plans = _plans(checkout, names, platform)
    with store.in_use():
        built = build_images(
            checkout,
            store,
            plans,
            lambda: make_fetcher(store, mirrors, offline, bases),
            keep_inputs=keep_inputs,
            accept=accept,
        )
        # gates that run now may replace a record of gates that is damaged
        with suppress(*([StoreDamaged] if gated else [])):
            left = leave_statements(checkout, store, built, signing)
    stages = judge_images(context, built, mirrors, offline) if gated else {}
    if gated:
        with store.in_use():
            left = leave_statements(checkout, store, built, signing)
    elapsed = time.monotonic() - start
    if as_json:
        rows = [{**_built_json(b), "evidence": left[b].as_json()} for b in built]
        say_json([{**row, **stage_json(stages.get(b))} for row, b in zip(rows, built, strict=True)])
        return require_all_passed(stages)
    click.echo(_built_table(built))
    if stages:
        click.echo(f"\n{stage_table(stages)}")
    click.echo(f"\n{evidence_table(left.values(), signing)}")
    signing.offer_key(store, any(not x.stated.signed_by for x in left.values()))
    require_all_passed(stages)
    what = "nothing to do" if all(b.cached for b in built) else "done"
    click.echo(f"\n{what} in {log.seconds(elapsed)}; store {store.root}")
    me, name = own_name(), built[0].name
    click.echo(f"Next: {me} load {name}         puts it into Docker")
    click.echo(f"      {me} export {name} DIR   writes an OCI layout")


def _built_table(built: list[Built]) -> str:
    rows = [
        [
            b.name,
            b.platform,
            b.digest,
            log.size(b.size_bytes),
            log.size(b.record.unpacked_bytes),
            str(len(b.layers)),
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
        "time_s": round(built.time_s, 3),
        "layers": [{"title": x.title, **x.record.model_dump()} for x in built.layers],
    }


def find_image(checkout: Checkout, store: Store, name: str, platform: str | None) -> Built:
    """A built image that is up to date with the checkout, or an error that says what to do."""
    from pipeline.assemble.image import find_built
    from pipeline.assemble.plan import plan_image

    chosen = pick_platform(checkout.spec(name), platform)
    built = find_built(store, plan_image(checkout, name, chosen))
    if built is None:
        raise UnknownImage(f"{name} for {chosen} is not built", f"Run `sm120 build {name}` first.")
    return built


@click.command()
@click.argument("name", metavar="IMAGE")
@click.option("--tag", "tags", multiple=True, help="Name in Docker; repeatable.")
@platform_option
@json_option
@click.pass_context
def load(
    context: click.Context,
    name: str,
    tags: tuple[str, ...],
    platform: str | None,
    as_json: bool,
) -> None:
    """Put a built image into the Docker daemon that DOCKER_HOST names."""
    from pipeline.oci.docker import default_tag
    from pipeline.oci.docker import load as load_image

    checkout, store = checkout_of(context), store_to_read(context)
    with store.in_use():
        built = find_image(checkout, store, name, platform)
        names = list(tags) or [default_tag(name, built.digest)]
        image_id = load_image(store, name, built.digest, names)
    if as_json:
        return say_json({"image": name, "digest": built.digest, "id": image_id, "tags": names})
    click.echo(f"{names[0]} is in Docker as {image_id}")


@click.command()
@click.argument("name", metavar="IMAGE")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@platform_option
@click.pass_context
def export(context: click.Context, name: str, folder: Path, platform: str | None) -> None:
    """Write a built image as an OCI layout folder of its own."""
    from pipeline.oci.layout import export_layout

    checkout, store = checkout_of(context), store_to_read(context)
    with store.in_use():
        built = find_image(checkout, store, name, platform)
        export_layout(store, built.record, folder)
    click.echo(f"{folder}: {built.digest}")


@click.command()
@click.argument("name", metavar="IMAGE")
@click.option("--attest", is_flag=True, help="Sign and keep what came of it, good or bad.")
@click.option(
    "--key",
    "key_path",
    type=click.Path(path_type=Path),
    help="The private key for --attest [SM120_SIGNING_KEY, SM120_SIGNING_AGENT].",
)
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
    key_path: Path | None,
    platform: str | None,
    mirrors: tuple[str, ...],
    offline: bool,
    bases: BaseSettings,
    as_json: bool,
) -> None:
    """Build again in an empty store and say `identical`, or name the first file that differs.

    Kept inputs of the store are used where they are; everything else is fetched again. With
    --attest the key says so: a proof of equal bytes, not of a hosted builder.
    """
    from pipeline.assemble.rebuild import rebuild as build_again
    from pipeline.cli.records import signer_of
    from pipeline.store.store import open_store

    checkout, store = checkout_of(context), store_of(context)
    signer = signer_of(key_path) if attest else None
    with store.in_use(), store.scratch() as folder:
        first = find_image(checkout, store, name, platform)
        empty = open_store(folder / "store")
        # kept inputs, and the layers of a foreign base
        near = (str(store.root / "inputs"), str(store.root / "oci"))
        fetcher = make_fetcher(empty, (*mirrors, *near), offline, bases)
        with _attested(store, first, signer):
            second = build_again(checkout, first, store, empty, fetcher)
    if as_json:
        return say_json({"image": name, "digest": second.digest, "identical": True})
    click.echo(f"{name}: identical, {second.digest}")


@contextmanager
def _attested(store: Store, first: Built, signer: Signer | None) -> Iterator[None]:
    """State how a rebuild ended, where somebody signs; a difference is stated like a success."""
    from pipeline.attest.statement import moment
    from pipeline.evidence.image import record_rebuild

    try:
        yield
    except NotReproducible as error:
        if signer is not None:
            record_rebuild(store, first, signer, str(error), moment())
        raise
    if signer is not None:
        record_rebuild(store, first, signer, "", moment())
