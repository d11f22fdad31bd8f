"""`sm120 source publish`."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline import log
from pipeline.assemble.golden import read_golden
from pipeline.assemble.plan import plan_tree
from pipeline.cli.context import checkout_of, host_platform, say_json, store_of
from pipeline.cli.options import json_option, key_option, platform_option, registry_options
from pipeline.cli.registry.look import open_registry
from pipeline.cli.signing import signer_of
from pipeline.oci.reference import parse_repository
from pipeline.publish.publish import publish as push
from pipeline.publish.publish import rehearse
from pipeline.publish.tree import order_tree
from pipeline.registry.access import Access
from pipeline.spec.image import CompiledSpec


@click.command()
@click.argument("name", metavar="SOURCE")
@click.argument("build", metavar="BUILD")
@click.argument("place", metavar="REGISTRY/REPO")
@platform_option
@key_option
@click.option("--dry-run", is_flag=True, help="Show what would be sent and send nothing.")
@registry_options
@json_option
@click.pass_context
def publish(
    context: click.Context,
    name: str,
    build: str,
    place: str,
    platform: str | None,
    key_path: Path | None,
    dry_run: bool,
    access: Access,
    jobs: int,
    as_json: bool,
) -> None:
    """Push the layer of a compiled source, with a signed statement of what it was compiled from.

    Other machines then need not compile it: `sm120 build IMAGE --layers-from REGISTRY/REPO` takes
    it where your key is trusted (`sm120 evidence trust-key`), and checks that it is the layer of
    the very source, patches and toolchain that their checkout asks for. A key is needed: nobody
    takes an unsigned layer. One repository holds the layers of all sources; the tag of each is made
    from its name and key. After an interruption, run it again: it continues.
    """
    reference = parse_repository(place)
    checkout, store = checkout_of(context), store_of(context)
    chosen = host_platform() if platform in (None, "host") else str(platform)
    plan = plan_tree(checkout, CompiledSpec(source=name, build=build), chosen)
    # also for a dry run: a key that cannot be read should be known before the real one
    signer = signer_of(key_path)
    with store.in_use(), open_registry(reference, access) as repository:
        golden = read_golden(checkout.golden_path)
        order = order_tree(store, repository, plan, golden, signer, dry_run=dry_run)
        done = rehearse(order) if dry_run else push(store, order)
    layer = order.shipment.blobs[0]
    if as_json:
        return say_json(
            {
                "source": name,
                "build": build,
                "platform": chosen,
                "key": plan.key,
                "layer": layer.digest,
                "size_bytes": layer.size_bytes,
                "reference": done.reference,
                "tag": done.tag,
                "signed_by": signer.key_id,
                "sent_bytes": done.sent_bytes,
                "dry_run": dry_run,
            }
        )
    verb = "would be sent" if dry_run else f"sent in {log.seconds(done.seconds)}"
    rows = [
        ["layer", layer.digest],
        ["size", f"{log.size(layer.size_bytes)}, {log.size(done.sent_bytes)} {verb}"],
        ["tag", f"{reference}:{done.tag}"],
        ["signed by", signer.key_id],
    ]
    click.echo(log.table([name, build], rows))
    if dry_run:
        return click.echo("\nnothing was sent")
    click.echo(f"\nNext, on another machine: `sm120 build IMAGE --layers-from {reference}`")
