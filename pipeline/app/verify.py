"""Verify an artifact: follow its evidence back to its parts, and judge it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from pipeline.app.images import not_built
from pipeline.app.registry import open_registry
from pipeline.app.signing import trust_of
from pipeline.app.workspace import Workspace, named_platform, pick_platform
from pipeline.artifacts.attest.envelope import SUFFIX
from pipeline.artifacts.attest.trust import judges_strangers, with_named_keys
from pipeline.artifacts.oci.reference import ImageReference, parse_reference
from pipeline.artifacts.registry.access import Access
from pipeline.core import errors, log
from pipeline.core.net.address import masked
from pipeline.evidence.statements.evidence_set import kept_envelopes
from pipeline.evidence.verify.artifact import open_file, open_image, open_layout
from pipeline.evidence.verify.chain import (
    Chain,
    VerifyContext,
    judge_attached,
    judge_ladder,
    judge_policy,
    judge_remote,
    judge_statement,
    read_policy,
)
from pipeline.evidence.verify.evidence import attached_in, beside, gather_envelopes
from pipeline.evidence.verify.naming import TagMemory
from pipeline.evidence.verify.remote import open_remote
from pipeline.evidence.verify.verdict import Code, Node, Verdict, how_to_add_facts, verdict_error
from pipeline.evidence.verify.walk import JudgedEvidence, walk_evidence
from pipeline.evidence.verify.weights import judge_weights
from pipeline.images.gate.runs import EXCHANGES, QUALITY_EXCHANGES, QUALITY_RESULT, RESULT
from pipeline.serving.bench.place import REQUESTS_FILE, RUN_FILE, run_folder, runs_in
from pipeline.serving.report.markup import is_report
from pipeline.weights.model import kept_locks
from pipeline.weights.place import find_places
from pipeline.weights.sign.record import weights_record_path

# results of runs against a server, and the file with their requests and answers
_RUN_RESULTS = {RESULT: EXCHANGES, QUALITY_RESULT: QUALITY_EXCHANGES}
_HEAD = 4096  # bytes of a file that tell a report
_TRUST = "`--key FILE.pub` once, `sm120 evidence trust-key FILE.pub` from now on."
# only a file ends like this; an image of that name has its tag after it
_FILE_ENDINGS = (".html", ".json", ".jsonl", ".md", ".csv", ".pdf")
_REPORTS_WITHOUT_DATA = (".md", ".csv", ".pdf")
# in the order in which they must be stated
_STATED_BY = {
    "host-facts": "`sm120 host attest`",
    "benchmark-run": "`sm120 bench`",
    "report": "`sm120 report`",
}
_IN_REGISTRY = "For an image in a registry, write REGISTRY/REPOSITORY:TAG."


@dataclass(frozen=True)
class VerifyRequest:
    """What to verify, by which evidence, and whom to trust."""

    artifact: str  # an image, a run, a report, a file, a folder or a reference of a registry
    places: tuple[Path, ...] = ()  # statements [those next to it]
    folders: tuple[Path, ...] = ()  # where runs, weights, host facts and recipes are looked for
    trust_path: Path | None = None
    key_paths: tuple[Path, ...] = ()  # public keys to believe about everything
    policy_path: Path | None = None
    deep: bool = False
    platform: str | None = None
    access: Access = field(default_factory=Access)
    jobs: int = 4


@dataclass(frozen=True)
class Verification:
    """The verdict on an artifact and on a policy, and the error that follows."""

    node: Node
    policy: list[Node]  # one for each image; most references name one
    error: errors.PipelineError | None

    def require_valid(self) -> None:
        """Raise the error if not everything holds."""
        if self.error:
            raise self.error


def verify_artifact(workspace: Workspace, request: VerifyRequest) -> Verification:
    """Check evidence: who signed it, whether it is about these bytes, and what it rests on.

    Works offline; of an image in a registry, it asks only that registry.
    """
    now, artifact = datetime.now(UTC), request.artifact
    policy = read_policy(request.policy_path) if request.policy_path else None
    chain, context = walk_artifact(workspace, request, now)
    asked = [judge_policy(policy, w, now) for w in chain.parts] if policy else []
    # evidence before policy: a policy over evidence that does not hold says nothing
    error: errors.PipelineError | None = verdict_error(chain.node)
    if isinstance(error, errors.EvidenceIncomplete):
        error.hint = _what_is_missing(artifact, chain.node, context) or error.hint
    elif isinstance(error, errors.EvidenceUnsigned):
        # a new key signs only what is in the store; the rest is stated again
        nodes = chain.node.every()
        unsigned = {each.subject for each in nodes if each.verdict is Verdict.UNSIGNED}
        if again := [verb for kind, verb in _STATED_BY.items() if kind in unsigned]:
            error.hint = (
                "A key signs what is stated after it was made: `sm120 evidence new-key NAME`, then"
                f" the same {' and '.join(again)} again."
            )
    elif error and chain.node.culprit().code is Code.STRANGER:
        error.hint = f"Do not use it before you know whose key that is. If you do: {_TRUST}"
    refused = [each.culprit() for each in asked if each.verdict is not Verdict.VALID]
    if refused and not error:
        message = f"{request.policy_path}: {refused[0].title}: {refused[0].message}"
        error = errors.PolicyRefused(message)
    return Verification(chain.node, asked, error)


def walk_artifact(
    workspace: Workspace, request: VerifyRequest, now: datetime
) -> tuple[Chain, VerifyContext]:
    """Read an artifact with its evidence and judge both, wherever they are; no policy is asked."""
    trust = with_named_keys(trust_of(workspace, request.trust_path), request.key_paths)
    context = VerifyContext(trust, workspace.checkout_or_none(), now, request.deep, request.jobs)
    with log.step(f"Reading {masked(request.artifact)}"):
        if reference := _reference(request.artifact):
            memory: TagMemory | None = None
            # a digest cannot move; only what a tag named is worth remembering
            if reference.tag:
                try:
                    memory = TagMemory(workspace.store())
                except (errors.StoreUnwritable, errors.DiskFull) as unkept:
                    log.say(f"nothing new is remembered of this tag: {unkept}")
                    with suppress(errors.StoreUnwritable):
                        memory = TagMemory(workspace.store_to_read(), is_kept=False)
            context = replace(context, memory=memory)
            with open_registry(reference, request.access) as repository:
                # not compared with a spec: the image may be of another checkout
                remote = open_remote(repository, reference, named_platform(request.platform))
                chain = judge_remote(remote, context, gather_envelopes(request.places))
        else:
            chain = _local(workspace, request, context)
    return chain, context


def _what_is_missing(artifact: str, node: Node, context: VerifyContext) -> str:
    """Explain how to get past incomplete, for the reasons that every newcomer meets."""
    if not node.children and artifact.endswith(_REPORTS_WITHOUT_DATA):
        return (
            "Of a report, only the HTML page is stated and can be verified:"
            " `sm120 report RUN --output FILE.html`."
            " Name statements of any other file with --evidence."
        )
    if not node.children:  # no tree shows what is missing
        return "Name its statements with --evidence."
    is_unjudged = any(each.code is Code.UNJUDGED_SIGNER for each in node.every())
    if is_unjudged and not judges_strangers(context.trust):
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


def _reference(artifact: str) -> ImageReference | None:
    """Parse a place in a registry; None for a local path or an image's plain name."""
    # no registry is guessed for a bare name, unlike Docker, which asks its own Hub
    if Path(artifact).exists():
        return None
    if ":" not in artifact and artifact.endswith(_FILE_ENDINGS):
        raise errors.UnknownImage(
            f"{artifact}: no such file", "Check its name, and the folder it is in."
        )
    if "/" not in artifact:
        return None
    if artifact.startswith(("/", "./", "../", "~")):
        raise errors.UnknownImage(
            f"{artifact}: no such file or folder", f"Check it. {_IN_REGISTRY}"
        )
    try:
        return parse_reference(artifact)
    except errors.ReferenceInvalid as error:
        reason = str(error).removeprefix(f"{masked(artifact)}: ")
        name = masked(artifact)
        message = f"{name}: no such file or folder, and no image in a registry ({reason})"
        raise errors.ReferenceInvalid(message) from error


def _local(workspace: Workspace, request: VerifyRequest, context: VerifyContext) -> Chain:
    path, places = Path(request.artifact), request.places
    # a folder may hold a ladder, a comparison of quality, or both
    results = [path / name for name in _RUN_RESULTS if (path / name).is_file()]
    if len(results) > 1:
        parts = [
            judge_ladder(
                each, gather_envelopes(places or beside(each)), context, _RUN_RESULTS[each.name]
            )
            for each in results
        ]
        return _together(path, parts)
    path = results[0] if results else path
    if path.is_dir() and not (path / RUN_FILE).is_file():
        if runs := runs_in(path):
            return _together(
                path, [_run(workspace, each, request, places, context) for each in runs]
            )
        # any of them: a copy or a pull that was cut short has no index
        # github.com/opencontainers/image-spec/blob/main/image-layout.md
        if any((path / name).exists() for name in ("index.json", "oci-layout", "blobs/sha256")):
            opened = open_layout(path, named_platform(request.platform))
            attached = attached_in(path, opened.digest)
            attached.items += gather_envelopes(places or beside(path))
            return _chain(judge_attached(opened, attached, context))
        return _weights(path, places, context)
    if not path.exists():
        return _built(workspace, request, context)
    # who names a statement means the file that it is about
    about = path.with_name(path.name.removesuffix(SUFFIX))
    if about != path and not about.exists():
        return _chain(judge_statement(gather_envelopes([path])[0], context))
    if about != path:
        path, places = about, (path,)
    if path.is_dir() or path.name == RUN_FILE:
        return _chain(_run(workspace, run_folder(path), request, places, context))
    items = gather_envelopes(places or beside(path))
    if path.name in _RUN_RESULTS:
        return _chain(judge_ladder(path, items, context, _RUN_RESULTS[path.name]))
    head = b""
    if path.is_file():
        with path.open("rb") as file:
            head = file.read(_HEAD)
    if is_report(head):  # its name may be anything
        # with the packages of benchmarks: a third of all that verify needs
        from pipeline.evidence.verify.runs import RunInputs, judge_report

        behind = RunInputs(workspace.store_to_read(), request.folders)
        return _chain(judge_report(path, items, context, behind))
    return _chain(
        walk_evidence(open_file(path), items, context.trust, context.checkout, context.now)
    )


def _chain(judged: JudgedEvidence) -> Chain:
    return Chain(judged.node, (judged,))


def _together(path: Path, parts: Sequence[JudgedEvidence]) -> Chain:
    """Join what a folder holds: one thing by itself, several below the folder's name."""
    if len(parts) == 1:
        return _chain(parts[0])
    return Chain(Node(str(path), children=tuple(each.node for each in parts)), tuple(parts))


def _run(
    workspace: Workspace,
    folder: Path,
    request: VerifyRequest,
    places: tuple[Path, ...],
    context: VerifyContext,
) -> JudgedEvidence:
    """A benchmark, by the folder of its result."""
    from pipeline.evidence.verify.runs import RunInputs, judge_bench_run

    items = gather_envelopes(places or beside(folder / RUN_FILE))
    behind = RunInputs(workspace.store_to_read(), (*request.folders, folder, folder.parent))
    return judge_bench_run(folder, items, context).with_inputs(behind, context)


def _weights(path: Path, places: tuple[Path, ...], context: VerifyContext) -> Chain:
    try:
        sets = find_places(path, kept_locks(context.checkout) if context.checkout else ())
    except errors.WeightsUnknown as error:
        raise errors.UnknownImage(
            f"{path}: holds no OCI layout, no locked weights, no run of a benchmark, no smoke.json",
            "Name a folder that `image export`, `registry pull`, `weights fetch` or `bench` made.",
        ) from error
    parts = []
    # a Hub cache holds several sets; each has its own lock and its own statement
    for place in sets:
        stated = [weights_record_path(place)] if weights_record_path(place).exists() else []
        parts.append(judge_weights(place, sets, gather_envelopes(places or stated), context))
    return _together(path, parts)


def _built(workspace: Workspace, request: VerifyRequest, context: VerifyContext) -> Chain:
    name, places = request.artifact, request.places
    if context.checkout is None:
        raise errors.UnknownImage(
            f"{name}: no such file, and no checkout is here that could name an image",
            f"Name a file or a folder, or run it in a checkout. {_IN_REGISTRY}",
        )
    store = workspace.store_to_read()
    try:
        spec = context.checkout.spec(name)
    except errors.UnknownImage as error:
        raise errors.UnknownImage(str(error), f"{error.hint} {_IN_REGISTRY}") from error
    chosen = pick_platform(spec, named_platform(request.platform))
    record = store.image_record(name, chosen)
    if record is None:
        raise not_built(store, spec, chosen)
    digest = record.digest
    with store.in_use():
        items = gather_envelopes(places or kept_envelopes(store, name, chosen, digest))
        try:
            opened = open_image(store.blob_path(digest).parent, digest, f"{name} {chosen}")
        except errors.EvidenceBroken as error:
            # copy a copied folder again; make again what is in the store
            raise errors.EvidenceBroken(str(error), errors.StoreDamaged.hint) from error
    given = (context.trust, context.checkout, context.now)
    # a local image's gates may still run; evidence from elsewhere without gates is incomplete
    judged = walk_evidence(opened, items, *given, gates_may_wait=not places)
    if not items:
        message = f"{judged.node.message}; `sm120 build {name}` states what it is made of"
        judged = replace(judged, node=replace(judged.node, message=message))
    return _chain(judged)
