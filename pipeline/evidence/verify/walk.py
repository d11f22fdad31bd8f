"""The walk from an artifact back to every byte: signature, subject, materials. Needs no network."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline.artifacts.attest import names
from pipeline.artifacts.attest.predicates import (
    Audit,
    CompiledFile,
    Rebuild,
    Ungated,
    Weights,
    check_predicate,
)
from pipeline.artifacts.attest.strict import plain
from pipeline.artifacts.attest.trust import Trust
from pipeline.artifacts.oci.document import TITLE
from pipeline.core import log
from pipeline.core.errors import PipelineError, RecordInvalid
from pipeline.core.known import Unknown
from pipeline.core.model import sha256_of, stays_below
from pipeline.evidence.statements.provenance import Provenance, read_provenance
from pipeline.evidence.statements.results import (
    RunResult,
    read_run_result,
    read_test_result,
)
from pipeline.evidence.statements.sbom import IMAGE_ID
from pipeline.evidence.verify.artifact import Artifact
from pipeline.evidence.verify.evidence import EvidenceItem, distinct
from pipeline.evidence.verify.materials import judge_materials
from pipeline.evidence.verify.signature import Opened, SetJudge, judge_signatures
from pipeline.evidence.verify.trees import may_differ
from pipeline.evidence.verify.verdict import Code, Node, Verdict, broken, incomplete, stale
from pipeline.images.assemble.plan import plan_tree
from pipeline.images.gate.files import gate_files
from pipeline.images.gate.runs import MARK, about_run
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import CompiledSpec


@dataclass(frozen=True)
class JudgedEvidence:
    """The tree of verdicts on one artifact, and the statements in it that count."""

    node: Node
    believed: tuple[Opened, ...] = ()
    sets: frozenset[str] = frozenset()  # digests of the believed sets, also of older ones
    # all that could be read, each with the reason why it is passed over, if it is
    opened: tuple[tuple[Opened, str], ...] = ()


def walk_evidence(
    artifact: Artifact,
    items: Sequence[EvidenceItem],
    trust: Trust | None,
    checkout: Checkout | None,
    now: datetime,
    *,
    gates_may_wait: bool = False,
    only: str | None = None,
) -> JudgedEvidence:
    """Judges all evidence of an artifact.

    `only`: the one predicate type that says anything about such an artifact. A key may be trusted
    for other kinds alone, and must not vouch by a statement of those.
    `gates_may_wait`: for an image that was built here and is not published yet. It shows that gates
    have not run; the set still misses a gate result that somebody removed.
    """
    title = f"{artifact.title} {artifact.digest}"
    if not items:
        message = "there is no evidence for it"
        return JudgedEvidence(Node(title, Verdict.INCOMPLETE, message, code=Code.NO_EVIDENCE))
    # provenance first, as the rest is read in its light; a registry may hold one statement
    # several times, with more and fewer signatures
    kinds = [
        (x.envelope.statement.predicate_type if x.envelope else "", x) for x in distinct(items)
    ]
    ordered = [x for _, x in sorted(kinds, key=lambda each: each[0] != names.PROVENANCE)]
    opened = [_open(x, artifact, trust, now, only) for x in ordered]
    readable = [x for x in opened if isinstance(x, Opened)]
    # Trusted statements judge the rest: a forged one beside them must not decide anything. Where
    # none is trusted, nothing is valid, but contradictions and gaps are still reported.
    about = [x for x in readable if x.is_about_this]
    counted = [x for x in about if x.is_believed] or about
    made: Provenance | None = None
    for statement in (x.statement for x in counted):
        if made is None and statement.predicate_type == names.PROVENANCE:
            with suppress(RecordInvalid):  # reported where that statement is judged
                made = read_provenance(statement.predicate)
    name = made.definition.external.image if made else ""
    if made and checkout and checkout.written(name) not in checkout.images():
        # a checkout of other images has nothing to compare this one with
        checkout = None
    sets = SetJudge(readable, counted)
    nodes: list[Node] = []
    judged: list[tuple[Opened, str]] = []
    for each in opened:
        if isinstance(each, Node):
            nodes.append(each)
            continue
        reason = sets.passed_over(each) if artifact.is_image else ""
        judged.append((each, reason))
        checks: tuple[Node, ...] = ()
        if not reason:
            checks = (*each.checks, *_checks(each, artifact, made, checkout, trust))
        name = f"{each.kind} ({each.name})"
        nodes.append(Node(name, message=reason, children=checks, subject=each.kind))
    believed = tuple(x for x, reason in judged if x.is_believed and not reason)
    if artifact.is_image:
        nodes += sets.judge(made)
        nodes += _missing(counted, made, gates_may_wait=gates_may_wait)
    return JudgedEvidence(
        Node(title, children=tuple(nodes)), believed, sets.believed, tuple(judged)
    )


def _open(
    item: EvidenceItem, artifact: Artifact, trust: Trust | None, now: datetime, only: str | None
) -> Opened | Node:
    """Judges the signatures and the subject of an envelope; a node if that settles it."""
    envelope = item.envelope
    if envelope is None:
        return broken(item.name, item.error)
    kind = envelope.statement.predicate_type
    if only not in (None, kind):
        got, wanted = names.predicate_kind(kind), names.predicate_kind(only or "")
        message = f"is a statement of the kind {got}, not {wanted}"
        # a signer claims to vouch by it; an unsigned statement says nothing either way
        verdict = Verdict.BROKEN if envelope.signatures else Verdict.UNSIGNED
        return Node(item.name, verdict, message)
    signature, keys = judge_signatures(envelope, trust, now)
    subject = Node("subject", message="these bytes")
    if not envelope.statement.is_about(artifact.digest):
        # the first of several subjects is enough to recognise it
        other = envelope.statement.subject[0]
        message = f"is about {other.name} sha256:{other.digest.sha256}, not about this"
        subject = broken("subject", message)
    return Opened(item.name, envelope, (signature, subject), tuple(keys))


def _checks(
    opened: Opened,
    artifact: Artifact,
    made: Provenance | None,
    checkout: Checkout | None,
    trust: Trust | None,
) -> tuple[Node, ...]:
    """Judges what a statement says, where it is about this artifact."""
    if not opened.is_about_this:
        return ()
    kind, predicate = opened.statement.predicate_type, opened.statement.predicate
    try:
        if kind == names.PROVENANCE:
            return judge_materials(read_provenance(predicate), artifact, checkout, trust)
        if kind == names.TEST_RESULT:
            if made is None:
                # without provenance nothing says for which cards the image is
                return (judge_results(predicate, None, checkout),)
            external = made.definition.external
            cards = external.images[external.image].cards
            image, platform = external.image, external.platform
            return (judge_results(predicate, image, checkout, cards, platform),)
        if kind in (names.CYCLONEDX, names.SPDX):
            return (judge_bill(kind, predicate, made),)
        claims = check_predicate(kind, predicate)
    except RecordInvalid as error:
        return (broken("predicate", str(error)),)
    if isinstance(claims, Weights):
        return (_weights(claims),)
    if isinstance(claims, CompiledFile):
        return (_compiled(claims, checkout),)
    if isinstance(claims, Rebuild):
        return (_rebuild(opened, claims, artifact, made),)
    if isinstance(claims, Audit):
        # what was known by then; a policy says whether that is too much, or too long ago
        accepted = sum(each.accepted is not None for each in claims.findings)
        known = log.count(len(claims.findings), "known vulnerability", "known vulnerabilities")
        message = f"{known}, {accepted} accepted, by advisories until {claims.database.newest}"
        return (Node("audit", message=message),)
    if isinstance(claims, Ungated):
        message = f"published although its gates did not pass: {claims.reason}"
        return (incomplete("ungated", message),)
    return ()


def _weights(weights: Weights) -> Node:
    verification = weights.verification
    title, result = f"weights, {verification.how}", verification.result
    if result == "verified":
        return Node(title, message=f"verified at {verification.at}")
    # `unknown`: the files could not be read, which proves nothing
    verdict = Verdict.BROKEN if result == "damaged" else Verdict.INCOMPLETE
    return Node(title, verdict, f"{result}: {'; '.join(verification.why) or 'no reason given'}")


def _compiled(made: CompiledFile, checkout: Checkout | None) -> Node:
    """Whether the checkout still compiles the file from the same inputs."""
    title = f"compiled {made.source} ({made.build}) for {made.platform}"
    if checkout is None or made.source not in checkout.sources():
        return Node(title, message=f"inputs {made.inputs}")
    try:
        wanted = CompiledSpec(source=made.source, build=made.build)
        now = plan_tree(checkout, wanted, made.platform).key
    except PipelineError as error:
        return incomplete(title, f"cannot be compared with the checkout: {error}")
    if now != made.inputs:
        return stale(title, "the checkout compiles it from other inputs now: export it again")
    return Node(title, message="from the inputs that the checkout has")


def _rebuild(opened: Opened, rebuild: Rebuild, artifact: Artifact, made: Provenance | None) -> Node:
    title, differences = "rebuild", rebuild.equivalent or []
    if not rebuild.identical and not differences:
        return broken(title, "gave a different digest")
    if rebuild.identical and (differences or not isinstance(rebuild.difference, Unknown)):
        return broken(title, "claims to be identical, but names a difference")
    if differences and made is None:
        return incomplete(title, "there is no provenance that says which files may differ")
    declared = may_differ(made) if made else {}
    for each in differences:
        if declared.get(each.path) != each.reason:
            message = f"{plain(each.path)} differs, and no build declares that with this reason"
            return broken(title, message)
    # the manifest's labels are part of its digest, so a rebuild of other inputs cannot pass
    labels = artifact.annotations.get(TITLE), artifact.annotations.get("sm120.inputs")
    if labels != (rebuild.image, rebuild.inputs):
        return broken(title, "was of other inputs than the manifest names")
    # otherwise one key could claim a rebuild in the name of another
    if opened.keys and rebuild.rebuilt_by not in {key.id for key in opened.keys}:
        return broken(title, f"names {rebuild.rebuilt_by} as its maker, which did not sign it")
    same = "the same digest again"
    if differences:
        same = f"equivalent, {log.count(len(differences), 'file')} with declared differences"
    # people know keys by the names that a trust file gives them
    by = next(
        (k.name for k in opened.keys if k.id == rebuild.rebuilt_by), rebuild.rebuilt_by[:19] + "…"
    )
    on = f" on {rebuild.machine}" if rebuild.machine else ""
    return Node(title, message=f"{same}, by {by}{on}")


def _missing(
    counted: Sequence[Opened], made: Provenance | None, *, gates_may_wait: bool
) -> list[Node]:
    """Evidence that an image must have and this one lacks."""
    if not counted:
        return []  # reported as broken already
    if made is None:
        return [incomplete("provenance", "no statement names what it was made of")]
    external = made.definition.external
    # each statement's own check says whether it passed; this only asks whether there is one
    tests = [x.test for x in counted]
    judged = {(test.gate, test.card) for test in tests if test}
    wanted = external.images[external.image].required_results
    missing = [f"{gate} on {card}" for gate, card in wanted if (gate, card) not in judged]
    if missing and gates_may_wait:
        message = f"not run yet: {', '.join(missing)} (`sm120 build {external.image} --gate`)"
        return [Node("gates", message=message)]
    why = "is required by the spec, but has no result"
    return [incomplete(f"gate {each}", why) for each in missing]


def judge_results(
    predicate: dict[str, Any],
    image: str | None,
    checkout: Checkout | None,
    cards: Collection[str] | None = None,
    platform: str = "",
) -> Node:
    """A test result of either kind: of a gate, or of running the image.

    A gate that failed breaks the chain; one that could not judge leaves it incomplete. A result for
    a card that the image is not for decides nothing, as at publishing.
    """
    if MARK in predicate:
        return judge_image_run(read_run_result(predicate), checkout)
    result = read_test_result(predicate)
    title = f"gate {result.gate} on {result.card}"
    if cards is not None and result.card not in cards:
        return Node(title, message=f"{result.verdict}; the image is not for this card")
    if result.verdict == "failed":
        return broken(title, f"failed: {', '.join(result.failed[:3])}")
    if result.verdict == "unknown":
        first = result.unknown[0]
        return incomplete(title, f"unknown: {first.test}: {first.why}")
    counts = f"{len(result.passed)} passed, {len(result.warned)} accepted"
    if not result.passed and not result.warned:
        # a gate may pass without a case, which must not look like many that passed
        counts = "nothing in it to judge"
    if image is None or checkout is None:
        return Node(title, message=counts)
    files = gate_files(checkout, image, result.gate, platform)
    # cases that the gate did not see, then case files and patches that it saw otherwise
    moved = sorted(files.keys() - {item.name for item in result.configuration})
    for item in result.configuration:
        # wheels and the like are materials: the provenance and the lock answer for them
        if not item.name.startswith(("gates/", "common/gates/", "patches/")):
            continue
        known = files.get(item.name)
        folder, name = (known.parent, known.name) if known else (checkout.folder(image), item.name)
        if not _is_same(folder, name, item.digest.sha256):
            moved.append(item.name)
    if moved:
        return stale(title, f"{counts}, but has changed since: {', '.join(moved)}")
    return Node(title, message=counts)


def judge_image_run(result: RunResult, checkout: Checkout | None) -> Node:
    """An image that does not start breaks the chain.

    A ladder that failed is of one recipe on one machine, and another may come further: it proves
    the image up to a rung and leaves the chain incomplete.
    """
    title = about_run(result.kind, result.recipe)
    if result.verdict == "unknown":
        first = result.unknown[0]
        return incomplete(title, f"unknown: {first.test}: {first.why}")
    if result.verdict == "failed":
        worst = Verdict.BROKEN if result.kind == "start" else Verdict.INCOMPLETE
        return Node(title, worst, f"{result.summary()}: failed: {', '.join(result.failed[:3])}")
    counts = f"{result.summary()}: {len(result.passed)} passed, {len(result.skipped)} skipped"
    if result.behind:
        unknown = tuple(incomplete(k, v.unknown) for k, v in result.behind.items())
        return Node(title, message=counts, children=unknown)
    # weights, requests and answers are not in the checkout
    inputs = [x for x in result.configuration if x.name.startswith(("recipes/", "lockfiles/"))]
    moved = [
        x.name for x in inputs if checkout and not _is_same(checkout.root, x.name, x.digest.sha256)
    ]
    if moved:
        return stale(title, f"{counts}, but has changed since: {', '.join(moved)}")
    return Node(title, message=counts)


def _is_same(folder: Path, name: str, sha256: str) -> bool:
    try:
        return sha256_of((folder / stays_below(name)).read_bytes()) == f"sha256:{sha256}"
    except (OSError, ValueError):
        return False


def judge_bill(predicate_type: str, bill: dict[str, Any], made: Provenance | None) -> Node:
    """Whether a bill lists exactly what went in, each by package URL and hash."""
    title = "bill of materials"
    try:
        if predicate_type == names.CYCLONEDX:
            # 1.7 only adds fields: cyclonedx.org/docs/1.7/json
            if (version := bill["specVersion"]) not in ("1.6", "1.7"):
                raise RecordInvalid(f"{title}: CycloneDX {version!r}, not 1.6 or 1.7")
            listed = {
                (x["purl"], {h["alg"]: h["content"] for h in x["hashes"]}["SHA-256"])
                for x in bill["components"]
                if x["type"] != "file"  # whatever else it calls itself must have gone in
            }
        else:
            if (version := bill["spdxVersion"]) != "SPDX-2.3":
                raise RecordInvalid(f"{title}: {version!r}, not SPDX-2.3")
            listed = {
                (ref["referenceLocator"], x["checksums"][0]["checksumValue"])
                for x in bill["packages"]
                if x["SPDXID"] != IMAGE_ID
                for ref in x.get("externalRefs", [])
            }
    # a format of others, too large to model: only its packages are read
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise RecordInvalid(f"{title}: is not in the format it claims ({error!r})") from error
    for package in listed:
        # sets of them are sorted and shown below
        if not all(isinstance(part, str) for part in package):
            raise RecordInvalid(f"{title}: lists a package by {package[0]}, which is not a name")
    if made is None:
        return incomplete(title, "there is no provenance to compare it with")
    # files of the checkout are components without a package URL
    resources = (*made.bases, *made.packages("pypi"), *made.packages("deb"))
    recorded = {(x.uri, x.sha256) for x in resources}
    made_from = (*made.trees, *made.archives, *made.toolchains, *made.build_time)
    recorded |= {(str(x.annotations.get("purl")), x.sha256) for x in made_from}
    if extra := sorted(listed - recorded):
        return broken(title, f"lists {extra[0][0]}, which is not in the provenance")
    if missing := sorted(recorded - listed):
        return broken(title, f"leaves out {missing[0][0]}")
    message = log.count(len(listed) - len(made.bases), "package")
    if made.bases or made.trees:
        # a bill may claim to list everything; SPDX has no field for that
        compositions = bill.get("compositions", [])
        if not isinstance(compositions, list) or any(
            not isinstance(x, dict) or x.get("aggregate") == "complete" for x in compositions
        ):
            what = "a base image" if made.bases else "compiled sources"
            return broken(title, f"claims to be complete, but contains {what}")
    message += " and a base image whose contents are not listed" if made.bases else ""
    if made.trees:
        message += f", with all that {log.count(len(made.trees), 'compiled tree')} came from"
    return Node(title, message=f"{message}, the same as in the provenance")
