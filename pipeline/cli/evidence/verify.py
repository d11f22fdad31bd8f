"""`sm120 verify`: follow the evidence of an artifact back to its parts, and judge it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import click

from pipeline import log
from pipeline.attest.envelope import SUFFIX
from pipeline.attest.trust import judges_strangers, with_named_keys
from pipeline.bench.place import REQUESTS_FILE, RUN_FILE, run_folder, runs_in
from pipeline.cli.context import (
    checkout_or_none,
    named_platform,
    pick_platform,
    say_json,
    store_of,
    store_to_read,
)
from pipeline.cli.images import not_built
from pipeline.cli.options import (
    ANY_PATH,
    EXISTING_FILE,
    json_option,
    look_in_option,
    platform_option,
    registry_options,
    trust_option,
)
from pipeline.cli.recipe.recipes import own_recipes_option
from pipeline.cli.registry.look import open_registry
from pipeline.cli.signing import trust_of
from pipeline.errors import (
    DiskFull,
    EvidenceBroken,
    EvidenceIncomplete,
    EvidenceUnsigned,
    PolicyRefused,
    ReferenceInvalid,
    StoreDamaged,
    StoreUnwritable,
    UnknownImage,
    WeightsUnknown,
)
from pipeline.evidence.evidence_set import kept
from pipeline.evidence.runs import RESULT
from pipeline.net.address import masked
from pipeline.oci.reference import Reference, parse_reference
from pipeline.registry.access import Access
from pipeline.report.head import is_report
from pipeline.store.store import Store
from pipeline.verify.artifact import Artifact, open_file, open_image, open_layout
from pipeline.verify.chain import (
    Chain,
    Judge,
    judge_attached,
    judge_climb,
    judge_remote,
    judge_statement,
)
from pipeline.verify.evidence import EvidenceItem, attached_in, beside, gather
from pipeline.verify.host_facts import how_to_add_facts
from pipeline.verify.naming import Memory
from pipeline.verify.policy import judge_policy, read_policy
from pipeline.verify.remote import open_remote
from pipeline.verify.verdict import Code, Node, Verdict, error_of, show
from pipeline.verify.walk import walk
from pipeline.verify.weights import judge_weights
from pipeline.weights.model import kept_locks
from pipeline.weights.place import find_places
from pipeline.weights.sign.record import record_path

_HEAD = 4096  # bytes of a file that tell a report
_TRUST = "`--key FILE.pub` once, `sm120 evidence trust-key FILE.pub` from now on."
# only a file ends so; an image that is called so has its tag behind it
_FILE_ENDINGS = (".html", ".json", ".jsonl", ".md", ".csv", ".pdf")
_REPORTS_WITHOUT_DATA = (".md", ".csv", ".pdf")
# in the order in which they must be stated
_STATED_BY = {
    "host-facts": "`sm120 host attest`",
    "benchmark-run": "`sm120 bench`",
    "report": "`sm120 report`",
}
_IN_REGISTRY = "For an image in a registry, write REGISTRY/REPOSITORY:TAG."


@click.command()
@click.argument("artifact", metavar="IMAGE|RUN|REPORT|FILE|DIR|REGISTRY/REPO:TAG|@DIGEST")
@click.option(
    "--evidence",
    "places",
    multiple=True,
    # a mistyped name is no broken evidence
    type=click.Path(exists=True, path_type=Path),
    help="Statement file or folder of them [default: those beside it]. Repeatable.",
)
@look_in_option
@trust_option
@click.option(
    "--key",
    "key_paths",
    multiple=True,
    type=EXISTING_FILE,
    metavar="FILE.pub",
    help="Public key to believe for this once, about everything. Repeatable.",
)
@click.option(
    "--policy", "policy_path", type=ANY_PATH, help="File of what the evidence must hold, for CI."
)
@click.option("--deep", is_flag=True, help="Read every layer in a registry and every weights file.")
@click.option(
    "--all", "everything", is_flag=True, help="Show every package, not only what is wrong."
)
@own_recipes_option
@platform_option
@registry_options
@json_option
@click.pass_context
def verify(
    context: click.Context,
    artifact: str,
    places: tuple[Path, ...],
    folders: tuple[Path, ...],
    own_recipes: tuple[Path, ...],
    trust_path: Path | None,
    key_paths: tuple[Path, ...],
    policy_path: Path | None,
    deep: bool,
    everything: bool,
    platform: str | None,
    access: Access,
    jobs: int,
    as_json: bool,
) -> None:
    """Check evidence: who signed it, whether it is about these bytes, and what is behind it.

    Works offline; for an image in a registry, only that registry is asked. The store remembers
    which image a tag named last, so that a tag which was moved back is noticed.

    The exit code is 0 only when everything holds. Stale, incomplete, unsigned, moved and broken
    have their own exit codes; what could not be checked never counts as valid.
    """
    now = datetime.now(UTC)
    trust = with_named_keys(trust_of(context, trust_path), key_paths)
    policy = read_policy(policy_path) if policy_path else None
    judge = Judge(trust, checkout_or_none(context), now, deep, jobs)
    # a run of a recipe of one's own is compared with that recipe, as `serve` found it
    folders = (*folders, *own_recipes)
    # not compared with a spec: the image may be of somebody else's checkout
    chosen = named_platform(platform)
    with log.step(f"Reading {masked(artifact)}"):
        if reference := _reference(artifact):
            # a digest cannot move; only what a tag named is worth remembering
            judge = replace(judge, memory=_memory(context) if reference.tag else None)
            with open_registry(reference, access) as repository:
                remote = open_remote(repository, reference, chosen)
                chain = judge_remote(remote, judge, gather(places))
        else:
            chain = _local(context, artifact, places, folders, chosen, judge)
    asked = [judge_policy(policy, w, now) for w in chain.walks] if policy else []
    if as_json:
        answer = chain.node.as_json()
        if asked:
            # one for each image; most references name one
            judged = [a.as_json() for a in asked]
            answer["policy"] = judged[0] if len(judged) == 1 else judged
        say_json(answer)
    else:
        click.echo("\n".join(show(n, everything=everything) for n in (chain.node, *asked)))
    # evidence before policy: a policy over evidence that does not hold says nothing
    if error := error_of(chain.node):
        if isinstance(error, EvidenceIncomplete):
            error.hint = _what_is_missing(artifact, chain.node, judge) or error.hint
        elif isinstance(error, EvidenceUnsigned):
            error.hint = _how_to_sign(chain.node) or error.hint
        elif chain.node.culprit().code is Code.STRANGER:
            error.hint = f"Do not use it before you know whose key that is. If you do: {_TRUST}"
        raise error
    for each in asked:
        if each.verdict is not Verdict.VALID:
            culprit = each.culprit()
            raise PolicyRefused(f"{policy_path}: {culprit.title}: {culprit.message}")


def _what_is_missing(artifact: str, node: Node, judge: Judge) -> str:
    """How to get further than incomplete, where the reason is one that every newcomer meets."""
    if not node.children and artifact.endswith(_REPORTS_WITHOUT_DATA):
        return (
            "Of a report, only the HTML page is stated and can be verified: `sm120 report RUN --to"
            " FILE.html`. Statements of any other file are named with --evidence."
        )
    if not node.children:  # no tree shows what is missing
        return "Name its statements with --evidence."
    is_unjudged = any(each.code is Code.UNJUDGED_SIGNER for each in node.every())
    if is_unjudged and not judges_strangers(judge.trust):
        return (
            "Nothing contradicts, but whether to believe the signer is yours to say: with the key,"
            f" {_TRUST}"
        )
    if node.culprit().code is Code.NO_REQUESTS:
        return (
            f"Put the run's own {REQUESTS_FILE} back beside its {RUN_FILE}, from where it was"
            " measured."
        )
    return how_to_add_facts(node)


def _how_to_sign(node: Node) -> str:
    """Which commands state again what is no part of the store; a new key signs only that."""
    unsigned = {each.subject for each in node.every() if each.verdict is Verdict.UNSIGNED}
    again = [verb for kind, verb in _STATED_BY.items() if kind in unsigned]
    return (
        "A key signs what is stated after it was made: `sm120 evidence new-key NAME`, then the same"
        f" {' and '.join(again)} again."
        if again
        else ""
    )


def _reference(artifact: str) -> Reference | None:
    """A place in a registry; what exists on this disk, or is an image's plain name, is none."""
    # no registry is guessed for a bare name, unlike Docker, which asks its own Hub
    if Path(artifact).exists():
        return None
    if ":" not in artifact and artifact.endswith(_FILE_ENDINGS):
        raise UnknownImage(f"{artifact}: no such file", "Check its name, and the folder it is in.")
    if "/" not in artifact:
        return None
    if artifact.startswith(("/", "./", "../", "~")):
        raise UnknownImage(f"{artifact}: no such file or folder", f"Check it. {_IN_REGISTRY}")
    try:
        return parse_reference(artifact)
    except ReferenceInvalid as error:
        reason = str(error).removeprefix(f"{masked(artifact)}: ")
        name = masked(artifact)
        message = f"{name}: no such file or folder, and no image in a registry ({reason})"
        raise ReferenceInvalid(message) from error


def _memory(context: click.Context) -> Memory | None:
    """Which image each tag named before; a machine that cannot keep that verifies without it."""
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
    folders: tuple[Path, ...],
    platform: str | None,
    judge: Judge,
) -> Chain:
    path = Path(artifact)
    if (path / RESULT).is_file():
        path /= RESULT
    if path.is_dir() and not (path / RUN_FILE).is_file():
        if runs := runs_in(path):
            return _together(path, [_run(context, r, places, folders, judge) for r in runs])
        return _folder(path, places, platform, judge)
    if path.exists():
        # who names a statement means the file that it lies beside
        about = path.with_name(path.name.removesuffix(SUFFIX))
        if about != path and not about.exists():
            walked = judge_statement(gather([path])[0], judge)
            return Chain(walked.node, (walked,))
        if about != path:
            path, places = about, (path,)
        if path.is_dir() or path.name == RUN_FILE:
            return _run(context, run_folder(path), places, folders, judge)
        items = gather(places or beside(path))
        if path.name == RESULT:
            walked = judge_climb(path, items, judge)
            return Chain(walked.node, (walked,))
        if _is_report(path):
            return _report(context, path, items, folders, judge)
        walked = walk(open_file(path), items, judge.trust, judge.checkout, judge.now)
        return Chain(walked.node, (walked,))
    return _built(context, artifact, places, platform, judge)


def _is_report(path: Path) -> bool:
    """A page of `sm120 report`; its name may be anything."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return is_report(file.read(_HEAD))


def _report(
    context: click.Context,
    path: Path,
    items: Sequence[EvidenceItem],
    folders: tuple[Path, ...],
    judge: Judge,
) -> Chain:
    """A page, and the runs that it shows."""
    # loaded for results alone, with the rooms that they come from: a third of all that verify needs
    from pipeline.verify.reports import judge_report
    from pipeline.verify.runs import Behind

    walked = judge_report(path, items, judge, Behind(store_to_read(context), folders))
    return Chain(walked.node, (walked,))


def _run(
    context: click.Context,
    folder: Path,
    places: tuple[Path, ...],
    folders: tuple[Path, ...],
    judge: Judge,
) -> Chain:
    """A benchmark, by the folder of its result."""
    from pipeline.verify.runs import Behind, judge_run

    items = gather(places or beside(folder / RUN_FILE))
    behind = Behind(store_to_read(context), (*folders, folder, folder.parent))
    walked = judge_run(folder, items, judge, behind)
    return Chain(walked.node, (walked,))


def _folder(path: Path, places: tuple[Path, ...], platform: str | None, judge: Judge) -> Chain:
    """An OCI layout, or weights."""
    # of an OCI layout: github.com/opencontainers/image-spec/blob/main/image-layout.md
    # any of them: a copy or a pull that was cut short has no index
    if not any((path / name).exists() for name in ("index.json", "oci-layout", "blobs/sha256")):
        return _weights(path, places, judge)
    opened = open_layout(path, platform)
    attached = attached_in(path, opened.digest)
    attached.items += gather(places or beside(path))
    walked = judge_attached(opened, attached, judge)
    return Chain(walked.node, (walked,))


def _weights(path: Path, places: tuple[Path, ...], judge: Judge) -> Chain:
    try:
        sets = find_places(path, kept_locks(judge.checkout) if judge.checkout else ())
    except WeightsUnknown as error:
        raise UnknownImage(
            f"{path}: holds no OCI layout, no locked weights, no run of a benchmark, no smoke.json",
            "Name a folder that `image export`, `registry pull`, `weights fetch` or `bench` made.",
        ) from error
    walks = []
    # a Hub cache holds several sets; each has its own lock and its own statement
    for place in sets:
        kept = [record_path(place)] if record_path(place).exists() else []
        walks.append(judge_weights(place, sets, gather(places or kept), judge))
    return _together(path, [Chain(walked.node, (walked,)) for walked in walks])


def _together(path: Path, chains: Sequence[Chain]) -> Chain:
    """What a folder holds: one thing by itself, several below its name."""
    if len(chains) == 1:
        return chains[0]
    walks = tuple(walked for chain in chains for walked in chain.walks)
    return Chain(Node(str(path), children=tuple(chain.node for chain in chains)), walks)


def _built(
    context: click.Context,
    artifact: str,
    places: tuple[Path, ...],
    platform: str | None,
    judge: Judge,
) -> Chain:
    if judge.checkout is None:
        raise UnknownImage(
            f"{artifact}: no such file, and no checkout is here that could name an image",
            f"Name a file or a folder, or run it in a checkout. {_IN_REGISTRY}",
        )
    store = store_to_read(context)
    try:
        spec = judge.checkout.spec(artifact)
    except UnknownImage as error:
        raise UnknownImage(str(error), f"{error.hint} {_IN_REGISTRY}") from error
    chosen = pick_platform(spec, platform)
    record = store.image_record(artifact, chosen)
    if record is None:
        raise not_built(store, spec, chosen)
    digest = record.digest
    with store.in_use():
        items = gather(places or kept(store, artifact, chosen, digest))
        opened = _open_built(store, digest, f"{artifact} {chosen}")
    given = (judge.trust, judge.checkout, judge.now)
    # gates of an image just built may still run; of evidence that was handed over they are missing
    walked = walk(opened, items, *given, gates_may_wait=not places)
    if not items:
        message = f"{walked.node.message}; `sm120 build {artifact}` states what it is made of"
        walked = replace(walked, node=replace(walked.node, message=message))
    return Chain(walked.node, (walked,))


def _open_built(store: Store, digest: str, title: str) -> Artifact:
    try:
        return open_image(store.blob_path(digest).parent, digest, title)
    except EvidenceBroken as error:
        # a folder that was copied here is copied again; what lies in the store is made again
        raise EvidenceBroken(str(error), StoreDamaged.hint) from error
