"""`sm120 verify`: walk an artifact's evidence back and end by what was found."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline import log
from pipeline.cli.common import (
    host_platform,
    json_option,
    pick_platform,
    platform_option,
    say_json,
    store_of,
    store_to_read,
)
from pipeline.cli.keys import trust_of, trust_option
from pipeline.cli.registry import open_registry, registry_options
from pipeline.cli.weights_places import checkout_or_none
from pipeline.errors import (
    DiskFull,
    PolicyRefused,
    ReferenceInvalid,
    StoreUnwritable,
    UnknownImage,
    WeightsUnknown,
)

if TYPE_CHECKING:
    from pipeline.oci.reference import Reference
    from pipeline.registry.repository import Repository
    from pipeline.verify.chain import Chain, Judge
    from pipeline.verify.naming import Memory


@click.command()
@click.argument("artifact", metavar="IMAGE|FILE|DIR|REGISTRY/REPO:TAG|@DIGEST")
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
@click.option("--deep", is_flag=True, help="Read every layer in a registry, every weights file.")
@click.option("--all", "everything", is_flag=True, help="Show every package.")
@platform_option
@registry_options
@json_option
@click.pass_context
def verify(
    context: click.Context,
    artifact: str,
    places: tuple[Path, ...],
    trust_path: Path | None,
    policy_path: Path | None,
    deep: bool,
    everything: bool,
    platform: str | None,
    insecure_http: bool,
    ca: Path | None,
    jobs: int,
    as_json: bool,
) -> None:
    """Check evidence, offline: who signed it, whether it is about these bytes, what is behind it.

    Of an image in a registry, only that registry is asked; which image a tag was last seen on is
    remembered in the store, so that a tag moved back is noticed. Ends with 0 only when all of it
    holds.
    Stale, incomplete, unsigned, moved and broken have their own exit codes; what could not be
    checked is never called valid.
    """
    from pipeline.verify.chain import Judge
    from pipeline.verify.policy import judge_policy, read_policy
    from pipeline.verify.verdict import Verdict, error_of, show

    now = datetime.now(UTC)
    trust = trust_of(context, trust_path)
    policy = read_policy(policy_path) if policy_path else None
    judge = Judge(trust, checkout_or_none(context), now, deep, jobs)
    chosen = host_platform() if platform == "host" else platform
    with log.step(f"Reading {artifact}"):
        if reference := _reference(artifact):
            judge = replace(judge, memory=_memory(context) if reference.tag else None)
            repository = open_registry(reference, insecure_http, ca)
            found = _remote(repository, reference, chosen, judge, places)
        else:
            found = _local(context, artifact, places, chosen, judge)
    asked = [judge_policy(policy, w, now) for w in found.walks] if policy else []
    if as_json:
        answer = found.node.as_json()
        if asked:
            # one for each image; most references name one
            judged = [a.as_json() for a in asked]
            answer["policy"] = judged[0] if len(judged) == 1 else judged
        say_json(answer)
    else:
        click.echo("\n".join(show(n, everything=everything) for n in (found.node, *asked)))
    if error := error_of(found.node):
        raise error
    for each in asked:
        if each.verdict is not Verdict.VALID:
            culprit = each.culprit()
            raise PolicyRefused(f"{policy_path}: {culprit.title}: {culprit.message}")


def _reference(artifact: str) -> Reference | None:
    """A place in a registry; what exists on this disk, or is an image's plain name, is none."""
    from pipeline.oci.reference import parse_reference

    if Path(artifact).exists() or "/" not in artifact:
        return None
    try:
        return parse_reference(artifact)
    except ReferenceInvalid as error:
        message = f"{artifact}: no such file or folder, and no image in a registry"
        raise ReferenceInvalid(f"{message} ({str(error).removeprefix(f'{artifact}: ')})") from error


def _remote(
    repository: Repository,
    reference: Reference,
    platform: str | None,
    judge: Judge,
    places: tuple[Path, ...],
) -> Chain:
    from pipeline.verify.chain import judge_remote
    from pipeline.verify.evidence import gather
    from pipeline.verify.remote import open_remote

    try:
        remote = open_remote(repository, reference, platform)
        return judge_remote(remote, judge, gather(places))
    except KeyboardInterrupt:
        repository.client.hang_up()
        raise


def _memory(context: click.Context) -> Memory | None:
    """What was seen of tags before; a machine that cannot remember still verifies, and says so."""
    from pipeline.verify.naming import Memory

    try:
        return Memory(store_of(context))
    except (StoreUnwritable, DiskFull) as error:
        log.say(f"nothing new is remembered of this tag: {error}")
    with suppress(StoreUnwritable):
        return Memory(store_to_read(context), is_kept=False)
    return None


def _local(
    context: click.Context,
    artifact: str,
    places: tuple[Path, ...],
    platform: str | None,
    judge: Judge,
) -> Chain:
    from pipeline.attest.envelope import SUFFIX
    from pipeline.verify.artifact import open_file
    from pipeline.verify.chain import Chain, judge_statement
    from pipeline.verify.evidence import beside, gather
    from pipeline.verify.walk import walk

    path = Path(artifact)
    if path.is_dir():
        return _folder(path, places, platform, judge)
    if path.exists():
        about = path.with_name(path.name.removesuffix(SUFFIX))
        if about != path and not about.exists():
            found = judge_statement(gather([path])[0], judge)
            return Chain(found.node, (found,))
        if about != path:
            path, places = about, (path,)
        items = gather(places or beside(path))
        found = walk(open_file(path), items, judge.trust, judge.checkout, judge.now)
        return Chain(found.node, (found,))
    return _built(context, artifact, places, platform, judge)


def _folder(path: Path, places: tuple[Path, ...], platform: str | None, judge: Judge) -> Chain:
    """An OCI layout, or weights."""
    from pipeline.verify.artifact import open_layout
    from pipeline.verify.chain import Chain, judge_attached
    from pipeline.verify.evidence import attached_in, beside, gather

    if not (path / "index.json").exists():
        return _weights(path, places, judge)
    opened = open_layout(path, platform)
    attached = attached_in(path, opened.digest)
    attached.items += gather(places or beside(path))
    found = judge_attached(opened, attached, judge)
    return Chain(found.node, (found,))


def _weights(path: Path, places: tuple[Path, ...], judge: Judge) -> Chain:
    from pipeline.verify.chain import Chain
    from pipeline.verify.evidence import gather
    from pipeline.verify.verdict import Node
    from pipeline.verify.weights import judge_weights
    from pipeline.weights.model import kept_locks
    from pipeline.weights.place import find_places
    from pipeline.weights.sign.record import record_path

    try:
        sets = find_places(path, kept_locks(judge.checkout) if judge.checkout else ())
    except WeightsUnknown as error:
        raise UnknownImage(
            f"{path}: is neither an OCI layout nor a locked set of weights",
            "Name a folder that `sm120 export`, `pull` or `weights fetch` made.",
        ) from error
    walks = []
    for place in sets:
        kept = [record_path(place)] if record_path(place).exists() else []
        walks.append(judge_weights(place, sets, gather(places or kept), judge))
    if len(walks) == 1:
        return Chain(walks[0].node, tuple(walks))
    return Chain(Node(str(path), children=tuple(w.node for w in walks)), tuple(walks))


def _built(
    context: click.Context,
    artifact: str,
    places: tuple[Path, ...],
    platform: str | None,
    judge: Judge,
) -> Chain:
    from pipeline.evidence.evidence_set import kept
    from pipeline.verify.artifact import open_image
    from pipeline.verify.chain import Chain
    from pipeline.verify.evidence import gather
    from pipeline.verify.walk import walk

    if judge.checkout is None:
        raise UnknownImage(f"{artifact}: no such file, and there is no checkout to know images of")
    store = store_to_read(context)
    chosen = pick_platform(judge.checkout.spec(artifact), platform)
    record = store.image_record(artifact, chosen)
    if record is None:
        raise UnknownImage(f"{artifact} for {chosen} is not built")
    digest = record.digest
    with store.in_use():
        items = gather(places or kept(store, artifact, chosen, digest))
        opened = open_image(store.blob_path(digest).parent, digest, f"{artifact} {chosen}")
    given = (judge.trust, judge.checkout, judge.now)
    found = walk(opened, items, *given, gates_may_wait=not places)
    if not items:
        message = f"{found.node.message}; `sm120 build {artifact}` states what it is made of"
        found = replace(found, node=replace(found.node, message=message))
    return Chain(found.node, (found,))
