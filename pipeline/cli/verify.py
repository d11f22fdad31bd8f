"""`sm120 verify`: walk an artifact's evidence back and end by what was found."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline import log
from pipeline.cli.common import (
    checkout_of,
    host_platform,
    json_option,
    pick_platform,
    platform_option,
    say_json,
    store_of,
)
from pipeline.cli.keys import trust_of, trust_option
from pipeline.errors import PolicyRefused, UnknownImage

if TYPE_CHECKING:
    from pipeline.verify.artifact import Artifact
    from pipeline.verify.evidence import Exhibit
    from pipeline.verify.verdict import Node
    from pipeline.wish.load import Checkout


@click.command()
@click.argument("artifact", metavar="IMAGE|FILE|LAYOUT")
@click.option(
    "--evidence",
    "places",
    multiple=True,
    type=click.Path(path_type=Path),
    help="An envelope, or a folder of them; else what lies beside it. Repeatable.",
)
@trust_option
@click.option(
    "--policy", "policy_path", type=click.Path(path_type=Path), help="What must be there, for CI."
)
@click.option("--all", "everything", is_flag=True, help="Show every package.")
@platform_option
@json_option
@click.pass_context
def verify(
    context: click.Context,
    artifact: str,
    places: tuple[Path, ...],
    trust_path: Path | None,
    policy_path: Path | None,
    everything: bool,
    platform: str | None,
    as_json: bool,
) -> None:
    """Check evidence, offline: who signed it, whether it is about these bytes, what is behind it.

    Ends with 0 only when all of it holds. Stale, incomplete, unsigned and broken have their own
    exit codes; what could not be checked is never called valid.
    """
    from pipeline.verify.policy import judge_policy, read_policy
    from pipeline.verify.verdict import Verdict, ending, show
    from pipeline.verify.walk import walk

    now = datetime.now(UTC)
    trust = trust_of(context, trust_path)
    policy = read_policy(policy_path) if policy_path else None
    checkout = _checkout(context)
    with log.step(f"Reading {artifact}"):
        opened, exhibits = _opened(context, artifact, places, platform, checkout)
    found = walk(opened, exhibits, trust, checkout, now)
    asked = judge_policy(policy, found, now) if policy else None
    if as_json:
        answer = found.node.as_json()
        say_json({**answer, "policy": asked.as_json()} if asked else answer)
    else:
        click.echo("\n".join(show(n, everything=everything) for n in _both(found.node, asked)))
    if error := ending(found.node):
        raise error
    if asked and asked.verdict is not Verdict.VALID:
        culprit = asked.culprit()
        raise PolicyRefused(f"{policy_path}: {culprit.title}: {culprit.words}")


def _both(node: Node, asked: Node | None) -> list[Node]:
    return [node, asked] if asked else [node]


def _checkout(context: click.Context) -> Checkout | None:
    try:
        return checkout_of(context)
    except UnknownImage:
        return None


def _opened(
    context: click.Context,
    artifact: str,
    places: tuple[Path, ...],
    platform: str | None,
    checkout: Checkout | None,
) -> tuple[Artifact, list[Exhibit]]:
    from pipeline.record.shelf import kept
    from pipeline.verify.artifact import open_file, open_image, open_layout
    from pipeline.verify.evidence import beside, gather

    path = Path(artifact)
    if path.is_dir():
        chosen = host_platform() if platform == "host" else platform
        return open_layout(path, chosen), gather(places or beside(path))
    if path.exists():
        return open_file(path), gather(places or beside(path))
    if checkout is None:
        raise UnknownImage(f"{artifact}: no such file, and there is no checkout to know images of")
    store = store_of(context)
    chosen = pick_platform(checkout.wish(artifact), platform)
    record = store.image_record(artifact, chosen)
    if record is None:
        raise UnknownImage(f"{artifact} for {chosen} is not built")
    digest = record["descriptor"]["digest"]
    blobs = store.blob_path(digest).parent
    with store.in_use():
        found = gather(places or kept(store, artifact, chosen, digest))
        return open_image(blobs, digest, f"{artifact} {chosen}"), found
