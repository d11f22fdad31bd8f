"""The verdict on an image with all that is attached to it, and on what a reference names.

A policy for CI asks for more: what evidence must be there, by whom, how old, how well gates did.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StrictBool

from pipeline.artifacts.attest.names import (
    AUDIT,
    BILL_MEDIA,
    CYCLONEDX,
    PROVENANCE,
    REBUILD,
    SPDX,
    TEST_RESULT,
    Kind,
    predicate_kind,
)
from pipeline.artifacts.attest.predicates import (
    SEVERITIES,
    Audit,
    Rebuild,
    Severity,
    check_predicate,
)
from pipeline.artifacts.attest.statement import read_stamp
from pipeline.artifacts.attest.strict import plain, read_signed_json
from pipeline.artifacts.attest.trust import Trust
from pipeline.core import log
from pipeline.core.errors import RecordInvalid, TrustInvalid
from pipeline.core.model import FILE_VERSION, Digest, Frozen, Name, canonical_json
from pipeline.core.yaml_file import read_yaml
from pipeline.evidence.statements.provenance import read_provenance
from pipeline.evidence.verify import naming
from pipeline.evidence.verify.artifact import Artifact, open_file
from pipeline.evidence.verify.evidence import AttachedEvidence, EvidenceItem
from pipeline.evidence.verify.remote import (
    RemoteImage,
    attached_to,
    named_elsewhere,
    open_remote_image,
)
from pipeline.evidence.verify.signature import Opened, judge_signatures
from pipeline.evidence.verify.verdict import Node, Verdict, broken, incomplete, worst_verdict
from pipeline.evidence.verify.walk import JudgedEvidence, judge_bill, judge_results, walk_evidence
from pipeline.images.gate.runs import EXCHANGES
from pipeline.images.spec.checkout import Checkout


@dataclass(frozen=True)
class VerifyContext:
    """What to judge evidence by: trusted keys, a checkout, the time, and how deep to read."""

    trust: Trust | None
    checkout: Checkout | None
    now: datetime
    deep: bool = False
    jobs: int = 4
    memory: naming.TagMemory | None = None


@dataclass(frozen=True)
class Chain:
    """A tree, and what was judged in it: one for each image."""

    node: Node
    parts: tuple[JudgedEvidence, ...]


def judge_attached(
    artifact: Artifact,
    attached: AttachedEvidence,
    context: VerifyContext,
    *,
    is_named: bool = False,
) -> JudgedEvidence:
    """Judges an image with its evidence; `is_named` if an index over it has a signed name."""
    # names are judged after statements: they must cover one of the believed sets
    judged = walk_evidence(artifact, attached.items, context.trust, context.checkout, context.now)
    names, doubts = naming.believed_names(attached.signatures, context.trust, context.now)
    nodes = naming.judge_names(artifact.digest, names, judged.sets)
    # Without a set, or without any name, other checks say what is missing. An index is signed like
    # the images in it, so it tells of an image whose own name was deleted.
    is_covered = any(name.evidence_set in judged.sets for name in names)
    if judged.sets and (names or is_named) and not is_covered:
        message = "no signed name covers its evidence set"
        why = f"{message}: the evidence may be older than what was published"
        nodes.append(incomplete("image signature", why))
    # the first of each content: a registry keeps copies of replaced bills, too
    signed: dict[tuple[str, bytes], tuple[Opened, str]] = {}
    for each, passed_over in judged.opened:
        if media := BILL_MEDIA.get(each.statement.predicate_type):
            key = media, canonical_json(each.statement.predicate)
            signed.setdefault(key, (each, passed_over))
    for bill in attached.bills:
        title = f"unsigned SBOM {bill.name}"
        # published with a newline at the end, see publish/evidence.py
        copied, passed_over = signed.get((bill.media_type, bill.data.strip()), (None, ""))
        if copied is None:
            message = "is not a bill of materials that was signed for this image"
            nodes.append(broken(title, message))
        elif passed_over:
            message = f"a copy of {copied.name}, which does not count now"
            nodes.append(Node(title, message=message))
        else:
            # as far as the statement itself is believed
            verdict = worst_verdict(check.verdict for check in copied.checks)
            nodes.append(Node(title, verdict, f"the same as in {copied.name}"))
    for note in attached.notes:
        title = f"note {note.name}"
        try:
            body = read_signed_json(note.data, "note")
            message = plain(f"{body['gates']}; {body['reason']}")
        except (RecordInvalid, KeyError, TypeError):
            nodes.append(broken(title, "cannot be read"))
        else:
            nodes.append(incomplete(title, f"published although its gates did not pass: {message}"))
    nodes += _skipped([*attached.skipped, *doubts])
    return replace(judged, node=replace(judged.node, children=(*judged.node.children, *nodes)))


def _skipped(messages: Sequence[str]) -> list[Node]:
    return [Node("skipped", message=plain(each).replace("\n", " ")) for each in messages]


def judge_remote(
    remote: RemoteImage, context: VerifyContext, more: Sequence[EvidenceItem] = ()
) -> Chain:
    """Judges all images that a reference names and, for a tag, whether it may name them."""
    parts, own = [], []
    names: list[naming.TrustedName] = []
    # an index has a signed name of its own, and no statements
    if remote.root not in remote.images:
        attached = attached_to(remote, remote.root, context.jobs)
        of_index, doubts = naming.believed_names(attached.signatures, context.trust, context.now)
        own += naming.judge_names(remote.root.digest, of_index)
        own += _skipped([*attached.skipped, *doubts])
        names += of_index
    is_named = bool(names)
    for image in remote.images:
        artifact = open_remote_image(remote, image, deep=context.deep, jobs=context.jobs)
        attached = attached_to(remote, image, context.jobs)
        names += naming.believed_names(attached.signatures, context.trust, context.now)[0]
        # files that the user names count for each image; the subject tells which it is about
        attached.items += more
        parts.append(judge_attached(artifact, attached, context, is_named=is_named))
    count = sum(len(image.layers) for image in remote.images)
    how = "every byte read" if context.deep else "there, not read (--deep reads them)"
    depth = Node("in the registry", message=f"{count} layers, {how}")
    nodes, digest = [depth, *own, *(w.node for w in parts)], remote.root.digest
    reference, memory = remote.reference, context.memory
    # the first thing that a person asks: is this tag what was published?
    if remote.tag and remote.tag_digest not in (None, digest):
        # `:TAG@DIGEST` was asked for, and the tag has moved on
        message = f"names {remote.tag_digest} now, not {digest}"
        nodes.insert(0, Node(f"tag {remote.tag}", Verdict.MOVED, message))
    elif remote.tag:
        seen = memory.recall(reference, context.trust, context.now) if memory else []
        tag = naming.judge_tag(reference, digest, names, seen)
        # costs a request for each signed image of the repository: only where nothing else decides
        if tag.verdict is Verdict.INCOMPLETE:
            others = named_elsewhere(remote, context.trust, context.now, context.jobs)
            tag = naming.judge_tag(reference, digest, names, others)
        # only verified names are remembered: a forged one must not block the true one
        elif memory and tag.verdict is Verdict.VALID:
            # of an index also the names of each image in it
            held = {digest, *(image.digest for image in remote.images)}
            memory.remember(reference, digest, [n for n in names if n.digest in held])
        nodes.insert(0, tag)
    return Chain(Node(f"{reference} {digest}", children=tuple(nodes)), tuple(parts))


def judge_statement(item: EvidenceItem, context: VerifyContext) -> JudgedEvidence:
    """A statement alone is never valid: its subject must be there to compare."""
    if item.envelope is None:
        return JudgedEvidence(broken(item.name, item.error))
    statement = item.envelope.statement
    kind, predicate = statement.predicate_type, statement.predicate
    signature, keys = judge_signatures(item.envelope, context.trust, context.now)
    content = Node("predicate", message="well formed")
    try:
        if kind == PROVENANCE:
            read_provenance(predicate)
        elif kind == TEST_RESULT:
            # without image and checkout only the verdict itself can be judged
            content = judge_results(predicate, None, None)
        elif kind in (CYCLONEDX, SPDX):
            content = judge_bill(kind, predicate, None)
        else:
            check_predicate(kind, predicate)
    except RecordInvalid as error:
        content = broken("predicate", str(error))
    about = statement.subject[0]
    artifact = f"{about.name} sha256:{about.digest.sha256}"
    message = f"{artifact} is not here; verify that file with this statement"
    nodes = (signature, content, incomplete("subject", message))
    node = Node(f"{predicate_kind(kind)} ({item.name})", children=nodes)
    # a policy may still ask who signed it
    opened = Opened(item.name, item.envelope, (signature,), tuple(keys))
    return JudgedEvidence(node, (opened,) if keys else ())


def judge_ladder(
    path: Path,
    items: Sequence[EvidenceItem],
    context: VerifyContext,
    exchanges_name: str = EXCHANGES,
) -> JudgedEvidence:
    """A `smoke.json` or `quality.json` with its statements, and the exchanges that they name."""
    judged = walk_evidence(open_file(path), items, context.trust, context.checkout, context.now)
    if not items:
        return judged
    beside = path.with_name(exchanges_name)
    if not beside.exists():
        exchanges = Node(exchanges_name, Verdict.INCOMPLETE, "is not beside the result")
    else:
        digest = open_file(beside).digest
        stated = [x.statement for x, _ in judged.opened if x.is_about_this]
        exchanges = (
            Node(exchanges_name, message="these bytes")
            if any(statement.is_about(digest) for statement in stated)
            else Node(exchanges_name, Verdict.BROKEN, f"has {digest}, which was not stated")
        )
    return replace(judged, node=replace(judged.node, children=(*judged.node.children, exchanges)))


Least = Literal["passed", "accepted"]


class AuditPolicy(Frozen):
    """What `sm120 evidence audit --attest` may have found, and how long ago."""

    # nothing as bad as this, or worse, may be known and open
    severity: Severity = "critical"
    older_than_days: Annotated[int, Field(ge=0, le=36_500)] = Field(
        default=0, description="a younger advisory is no reason to refuse yet"
    )
    database_max_age_days: Annotated[int, Field(ge=1, le=36_500)] = 30
    # most of Debian's are not rated: they count only where somebody wants that
    count_unrated: StrictBool = False

    def judge(self, counted: Sequence[Opened], now: datetime) -> Node:
        """Whether the latest audit that counts found nothing that the policy refuses."""
        audits = []
        for each in (x for x in counted if x.statement.predicate_type == AUDIT):
            with suppress(RecordInvalid):  # reported where that statement is judged
                claims = check_predicate(AUDIT, each.statement.predicate)
                audits += [claims] if isinstance(claims, Audit) else []
        title = "audit"
        if not audits:
            return broken(title, "is required, but missing or without enough signatures")
        latest = max(audits, key=lambda x: x.database.newest)
        age = now - read_stamp(latest.database.newest)
        if age > timedelta(days=self.database_max_age_days):
            message = f"its newest advisory is of {latest.database.newest}"
            return broken(title, f"{message}, more than {self.database_max_age_days} days ago")
        known = [x for x in latest.findings if x.is_open(now.date())]
        grace = timedelta(days=self.older_than_days)
        refused = [
            x
            for x in known
            # an advisory without a time may be as old as any
            if not x.published or now - read_stamp(x.published) > grace
            if SEVERITIES.index(x.severity) >= SEVERITIES.index(self.severity)
            or (self.count_unrated and x.severity == "unrated")
        ]
        if refused:
            first, more = refused[0], f", and {len(refused) - 1} more" if refused[1:] else ""
            message = f"{first.package} {first.version} has {first.id}, {first.severity}{more}"
            return broken(title, message)
        unrated = sum(x.severity == "unrated" for x in known)
        message = f"{len(known)} known and open, {unrated} of them unrated; none that is refused"
        return Node(title, message=message)


class RebuildPolicy(Frozen):
    """How many people must have got the same bytes."""

    keys: Annotated[int, Field(ge=1, le=16)] = 1
    architectures: Annotated[int, Field(ge=1, le=4)] = Field(
        default=1, description="of the machines that they rebuilt it on"
    )
    independent: StrictBool = Field(
        default=False, description="who signed the provenance does not count"
    )

    def judge(self, judged: JudgedEvidence, counted: Sequence[str] | None) -> Node:
        """Whether enough different keys state that they got the same bytes, and on what."""
        # each is signed by its maker alone: signatures that a policy asks for are not asked here
        made = [b for b in judged.believed if b.statement.predicate_type == PROVENANCE]
        left_out = {key.id for b in made for key in b.keys if self.independent}
        found: dict[str, str] = {}
        machines: set[str] = set()
        for each in (b for b in judged.believed if b.statement.predicate_type == REBUILD):
            claims = None
            with suppress(RecordInvalid):  # reported where that statement is judged
                claims = check_predicate(REBUILD, each.statement.predicate)
            if not isinstance(claims, Rebuild) or not (claims.identical or claims.equivalent):
                continue
            for key in (k for k in each.keys if k.id == claims.rebuilt_by):
                if key.id in left_out or (counted is not None and key.id not in counted):
                    continue
                found[key.id] = f"{key.name} on {claims.machine or 'an unknown machine'}"
                machines |= {claims.machine} if claims.machine else set()
        message = ", ".join(sorted(found.values())) or "nobody whose key counts"
        # statements that name no machine prove one architecture at most
        known = max(len(machines), int(bool(found)))
        if len(found) >= self.keys and known >= self.architectures:
            return Node("rebuilt by", message=message)
        wanted = (
            f"{log.count(self.keys, 'key')} and {log.count(self.architectures, 'architecture')}"
        )
        return broken("rebuilt by", f"{message}; {wanted} are required")


class Policy(Frozen):
    """A policy file. It requires only the evidence that it names."""

    schema_name: ClassVar[str] = "policy"

    format: Annotated[Literal[1], FILE_VERSION] = 1
    require: list[Kind] = []
    keys: list[Digest] | None = Field(default=None, description="only these keys count")
    signatures: Annotated[int, Field(ge=1, le=16)] = 1
    # a hundred years; a bound that no date can hold would be none
    max_age_days: Annotated[int, Field(ge=1, le=36_500)] | None = None
    gates: dict[Name, Least] = {}
    audit: AuditPolicy | None = None
    rebuilds: RebuildPolicy | None = None


def read_policy(path: Path) -> Policy:
    """The policy file, or an error with the reason why it cannot be used."""
    return read_yaml(path, Policy, TrustInvalid)


def judge_policy(policy: Policy, judged: JudgedEvidence, now: datetime) -> Node:
    """What the policy asks for and did not get; the walk's own verdict counts, too."""
    # a policy may ask for two people: several signatures by one key count once
    counted = [
        b
        for b in judged.believed
        if sum(policy.keys is None or key.id in policy.keys for key in b.keys) >= policy.signatures
    ]
    nodes = []
    for kind in policy.require:
        if any(b.kind == kind for b in counted):
            nodes.append(Node(f"{kind} is there"))
        else:
            nodes.append(broken(kind, "is required, but missing or without enough signatures"))
    # the age that a statement claims: its signer's clock is all there is
    for each in counted if policy.max_age_days else ():
        title, made_at = f"age of {each.name}", each.statement.recorded
        days = policy.max_age_days or 0
        if made_at is None:
            nodes.append(broken(title, "it has no time"))
        elif now - made_at > timedelta(days=days):
            nodes.append(broken(title, f"made {made_at:%Y-%m-%d}, more than {days} days ago"))
        else:
            nodes.append(Node(title))
    # the cards that the image is for, by its provenance
    cards: list[str] | None = None
    for statement in (each.statement for each in counted if policy.gates):
        if cards is None and statement.predicate_type == PROVENANCE:
            with suppress(RecordInvalid):
                external = read_provenance(statement.predicate).definition.external
                cards = external.images[external.image].cards
    for gate, least in policy.gates.items():
        title, tests = f"gate {gate}", [b.test for b in counted if b.test and b.test.gate == gate]
        # a result for a card that the image is not for decides nothing
        results = [test for test in tests if cards is None or test.card in cards]
        enough = ("passed",) if least == "passed" else ("passed", "accepted")
        # every result counts: one that failed is not outweighed by one that passed
        if bad := next((result for result in results if result.verdict not in enough), None):
            nodes.append(broken(title, f"{bad.verdict} on {bad.card}, {least} is required"))
        elif results:
            message = ", ".join(f"{result.verdict} on {result.card}" for result in results)
            nodes.append(Node(title, message=message))
        else:
            others = ", ".join(sorted({test.card for test in tests}))
            other = f" (for another card: {others})" if tests else ""
            nodes.append(broken(title, f"has no result that counts{other}"))
    if policy.rebuilds:
        nodes.append(policy.rebuilds.judge(judged, policy.keys))
    if policy.audit:
        nodes.append(policy.audit.judge(counted, now))
    return Node("policy", children=tuple(nodes))
