"""Which images there are, and what building them would take."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from pipeline import log
from pipeline.assemble.image import staleness
from pipeline.assemble.plan import (
    ImagePlan,
    TreePlan,
    Work,
    layer_bytes_guess,
    plan_image,
    work_for,
)
from pipeline.cli.context import checkout_of, say_json, store_to_read
from pipeline.cli.images import plans_of
from pipeline.cli.options import (
    LayerSettings,
    access_options,
    json_option,
    layers_options,
    platform_option,
)
from pipeline.cli.source.compile import missing_archives, missing_trees, offered_layers
from pipeline.errors import PipelineError
from pipeline.registry.access import Access
from pipeline.source.toolchain import NOT_HERE, why_not_here
from pipeline.spec.checkout import Checkout
from pipeline.store.store import Store

if TYPE_CHECKING:
    from pipeline.verify.layers import OfferedLayer


@click.command("list")
@json_option
@click.pass_context
def list_images(context: click.Context, as_json: bool) -> None:
    """List the images of this checkout, and whether they are locked and built."""
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
                    "stale": _stale(checkout, store, name, platform) if record else None,
                    "summary": spec.on(platform).summary,
                }
            )
    if as_json:
        return say_json(rows)
    for row in rows:
        # as short as Docker shows an image's id
        built = str(row["built"])[7:19] if row["built"] else None
        stale = ", stale" if row["stale"] else ""
        row["state"] = f"{built}{stale}" if built else "locked" if row["locked"] else "no lock"
    head = ["image", "platform", "state", "summary"]
    click.echo(log.table(head, [[row[name] for name in head] for row in rows]))


def _stale(checkout: Checkout, store: Store, name: str, platform: str) -> str:
    """Why a built image is not that of today's checkout; empty where it is."""
    try:
        return staleness(checkout, store, plan_image(checkout, name, platform))
    except PipelineError as error:
        # a lock that is missing or out of date, for example: the build would say the same
        return str(error)


@click.command()
@click.argument("names", metavar="[IMAGE]...", nargs=-1)
@platform_option
@layers_options
@access_options
@json_option
@click.pass_context
def plan(
    context: click.Context,
    names: tuple[str, ...],
    platform: str | None,
    layers: LayerSettings | None,
    access: Access,
    as_json: bool,
) -> None:
    """Show what a build would fetch, what is cached and how much disk it needs.

    Nothing is fetched. Without IMAGE, all images are planned. With --layers-from, the registry is
    asked what a build would take from it, and the signatures are checked.
    """
    checkout, store = checkout_of(context), store_to_read(context)
    plans = plans_of(checkout, names, platform)
    offered = offered_layers(context, missing_trees(store, plans), layers, access)
    show_plan(plans, store, as_json, offered)


def work_of(
    plans: list[ImagePlan], store: Store, offered: Collection[str] = ()
) -> tuple[Work, list[TreePlan]]:
    """What a store lacks for images, and the trees that are compiled for them first."""
    trees = [tree for tree in missing_trees(store, plans) if tree.key not in offered]
    # what compiles them is built first, where it is missing
    work = work_for([*plans, *(tree.toolchain for tree in trees)], store)
    return replace(work, fetch=(*work.fetch, *missing_archives(store, trees))), trees


def layer_rows(work: Work, trees: list[TreePlan]) -> list[list[str]]:
    """Every layer, tree and foreign base, with its size and what becomes of it."""
    rows = [
        [x.title, log.size(layer_bytes_guess(x)), "cached" if x in work.cached else "to build"]
        for x in [*work.cached, *work.missing]
    ]
    rows += [
        [tree.title, "-", f"to compile, {tree.build.cpu_minutes} CPU-minutes"] for tree in trees
    ]
    for base in work.bases:
        rows.append([str(base), log.size(sum(b.size_bytes for b in base.blobs)), "to fetch"])
    return rows


def show_plan(
    plans: list[ImagePlan], store: Store, as_json: bool, offered: Mapping[str, OfferedLayer]
) -> None:
    """What building these images would take."""
    work, trees = work_of(plans, store, offered)
    taken = [
        (tree, offered[tree.key]) for tree in missing_trees(store, plans) if tree.key in offered
    ]
    taken_bytes = sum(layer.record.size_bytes for _, layer in taken)
    disk_bytes = work.disk_bytes + taken_bytes
    not_here = {tree.title: why for tree in trees if (why := why_not_here(tree))}
    if as_json:
        return say_json(
            {
                "images": [p.spec.name for p in plans],
                "fetch_files": len(work.fetch),
                "fetch_bytes": work.fetch_bytes,
                "base_bytes": work.base_bytes,
                "disk_bytes": disk_bytes,
                "layers_missing": [x.title for x in work.missing],
                "layers_cached": [x.title for x in work.cached],
                "compile": [
                    {"tree": tree.title, "cpu_minutes": tree.build.cpu_minutes} for tree in trees
                ],
                "take": [
                    {
                        "tree": tree.title,
                        "digest": layer.record.digest,
                        "size_bytes": layer.record.size_bytes,
                        "from": str(layer.repository),
                        "signed_by": list(layer.signed_by),
                    }
                    for tree, layer in taken
                ],
                "not_here": list(not_here.values()),
            }
        )
    for why in not_here.values():
        click.echo(f"{why}.\n{NOT_HERE}\n")
    rows = layer_rows(work, trees)
    for tree, layer in taken:
        state = f"to take from {layer.repository}, signed by {', '.join(layer.signed_by)}"
        rows.append([tree.title, log.size(layer.record.size_bytes), state])
    click.echo(log.table(["layer", "size (about)", "state"], rows))
    more = f", and {log.size(work.base_bytes)} of foreign bases" if work.bases else ""
    more += f", and {log.size(taken_bytes)} of compiled layers" if taken else ""
    click.echo(
        f"\n{log.count(len(work.fetch), 'file')} to fetch, {log.size(work.fetch_bytes)}{more};"
        f" disk needed {log.size(disk_bytes)}; store {store.root}"
    )
