"""Audit images: find known vulnerabilities with a database on disk, and who holds a package."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pipeline import __version__
from pipeline.app.images import image_spec
from pipeline.app.signing import signer_of
from pipeline.app.verify import VerifyRequest, walk_artifact
from pipeline.app.workspace import Workspace, platforms_of
from pipeline.artifacts.attest import predicates
from pipeline.artifacts.attest.envelope import read_envelope
from pipeline.artifacts.attest.names import AUDIT, CYCLONEDX, parse_purl
from pipeline.artifacts.attest.statement import make_statement, moment, stamp
from pipeline.artifacts.attest.strict import read_signed_json
from pipeline.artifacts.registry.access import Access
from pipeline.core import errors, log
from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.core.model import canonical_json
from pipeline.evidence.audit.database import AdvisoryDatabase, read_database
from pipeline.evidence.audit.match import HeldPackage, match_packages
from pipeline.evidence.audit.packages import BilledPackage, packages_of
from pipeline.evidence.audit.vex import VexSubject, cyclonedx_vex, openvex
from pipeline.evidence.statements.bill import bill_of
from pipeline.evidence.statements.image import keep_all
from pipeline.evidence.statements.inventory import Toolchain
from pipeline.evidence.statements.sbom import cyclonedx
from pipeline.evidence.verify.artifact import read_bounded
from pipeline.images.assemble.image import Built, find_built
from pipeline.images.assemble.plan import plan_image
from pipeline.images.lock.model import DebPin
from pipeline.images.spec.image import AcceptedAdvisory

# `sm120 host status --json` writes a few megabytes for a thousand hosts
_MOST_HOSTS_BYTES = 64 << 20


@dataclass(frozen=True)
class AuditRequest:
    """What to audit, by which advisories, and what counts as too much."""

    subjects: tuple[str, ...] = ()  # images, bills, layouts and references [all of the checkout]
    database: Path | None = None
    holds: tuple[HeldPackage, ...] = ()
    hosts_path: Path | None = None
    platform: str | None = None
    max_age_days: int = 30
    fail_on: predicates.Severity | None = None
    attest: bool = False
    key_path: Path | None = None
    trust_path: Path | None = None
    access: Access = field(default_factory=Access)

    @property
    def serving(self) -> dict[str, list[str]]:
        """Read which hosts serve each digest from the output of `sm120 host status --json`."""
        found: dict[str, list[str]] = {}
        if self.hosts_path is None:
            return found
        try:
            data = read_bounded(self.hosts_path, _MOST_HOSTS_BYTES)
            for row in read_json(data, most_bytes=_MOST_HOSTS_BYTES):
                for line in row["served"]:
                    found.setdefault(str(line["status"]["digest"]), []).append(str(row["host"]))
        except (JsonInvalid, KeyError, TypeError) as error:
            raise errors.RecordInvalid(
                f"{self.hosts_path}: is not what `sm120 host status --json` prints ({error})",
                "Write that to a file, and name it with --hosts.",
            ) from error
        return found

    def bills(self, workspace: Workspace, name: str, now: datetime) -> Iterator[AuditedImage]:
        """Find the bills that a name means: a file, an artifact's evidence, or an image."""
        path = Path(name)
        if path.is_file():
            data = read_bounded(path)
            body = read_signed_json(data, path.name)
            if isinstance(body, dict) and "payloadType" in body:
                statement = read_envelope(data, path.name).statement
                if statement.predicate_type != CYCLONEDX:
                    raise errors.RecordInvalid(f"{path}: is no statement of a bill in CycloneDX")
                body = statement.predicate
            if not isinstance(body, dict):
                raise errors.RecordInvalid(f"{path}: is no bill of materials")
            yield _from_bill(body, str(path), "a file, whose signatures were not judged")
            return
        if path.is_dir() or "/" in name or ":" in name:
            asked = VerifyRequest(
                name, trust_path=self.trust_path, platform=self.platform, access=self.access
            )
            for part in walk_artifact(workspace, asked, now)[0].parts:
                believed = [x for x in part.believed if x.statement.predicate_type == CYCLONEDX]
                others = [
                    x
                    for x, passed in part.opened
                    if x.statement.predicate_type == CYCLONEDX and not passed
                ]
                if not believed and not others:
                    raise errors.EvidenceIncomplete(
                        f"{part.node.title}: no bill of materials is attached to it",
                        "`sm120 publish` attaches one; or name a bill as a file.",
                    )
                note = "" if believed else "nobody that is trusted signed its bill"
                yield _from_bill((believed or others)[0].statement.predicate, name, note)
            return
        checkout, store = workspace.checkout(), workspace.store_to_read()
        for each in platforms_of(image_spec(checkout, name), self.platform):
            plan = plan_image(checkout, name, each)
            built = find_built(store, plan)
            if built:
                with store.in_use():
                    bill = cyclonedx(bill_of(checkout, store, built))
                found = _from_bill(bill, f"{name} {each}", "")
                yield replace(found, built=built, platform=each)
                continue
            # as a bill names them; only built images tell what wheels carry inside
            components = []
            for package in Toolchain(plan, plan.key).parts:
                source = package.pin.source if isinstance(package.pin, DebPin) else None
                noted = [{"name": "sm120:source", "value": source}] if source else []
                named = {"purl": package.purl, "bom-ref": package.purl}
                components.append({**named, "properties": noted})
            bill = {"bomFormat": "CycloneDX", "specVersion": "1.6", "components": components}
            yield AuditedImage(
                title=f"{name} {each}",
                name=name,
                digest=None,
                platform=each,
                purl=f"pkg:oci/{name}?arch={plan.architecture}",
                packages=packages_of(bill, name),
                note="by its lock: it is not built here, so what wheels carry inside is not known",
            )


@dataclass(frozen=True)
class AuditedImage:
    """One image: its packages, what was found, and the hosts that serve it."""

    title: str
    name: str  # the name that a checkout may know it by
    digest: str | None  # none where only its lock is known
    platform: str
    purl: str
    packages: list[BilledPackage]
    serial: str = ""
    note: str = ""  # what the bill does not cover, or who vouches for it
    built: Built | None = None
    audit: predicates.Audit | None = None
    held: tuple[BilledPackage, ...] = ()
    hosts: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        audit = self.audit.model_dump(mode="json") if self.audit else None
        return {
            "title": self.title,
            "digest": self.digest,
            "platform": self.platform,
            "note": self.note,
            "hosts": list(self.hosts),
            "audit": audit,
            "held": [{"purl": x.purl, "via": x.via or None, "title": x.title} for x in self.held],
        }


@dataclass(frozen=True)
class AuditResult:
    """Every image with its findings, and the error that follows from them."""

    images: list[AuditedImage]
    now: datetime
    database: AdvisoryDatabase | None
    unplaced: dict[str, list[str]]  # digests that hosts serve and nobody named, with the hosts
    error: errors.PipelineError | None = None

    @property
    def findings(self) -> list[tuple[AuditedImage, predicates.KnownVulnerability]]:
        return [(x, f) for x in self.images for f in (x.audit.findings if x.audit else [])]

    @property
    def rows(self) -> list[list[str]]:
        """The findings as rows of a table."""
        rows, today = [], self.now.date()
        for image, each in self.findings:
            state = "open"
            if each.accepted:
                until = each.accepted.until
                state = f"{'expired' if each.is_open(today) else 'accepted until'} {until}"
            owner = parse_purl(each.via) if each.via else None
            package = f"{each.package} {each.version}" + (f" in {owner.name}" if owner else "")
            fixed = ", ".join(each.fixed) or "-"
            rows.append([image.title, package, each.id, each.severity, fixed, state])
        return rows

    @property
    def lines(self) -> list[str]:
        """Say what each image's audit compared, what nobody named, and how old the database is."""
        lines, today = [], self.now.date()
        for image in self.images:
            line = f"{image.title}: {log.count(len(image.packages), 'package')}"
            if audit := image.audit:
                counts = Counter(f.severity for f in audit.findings if f.is_open(today))
                known = ", ".join(
                    f"{counts[s]} {s}" for s in reversed(predicates.SEVERITIES) if counts[s]
                )
                compared = log.count(audit.packages, "package")
                line = f"{image.title}: {compared} compared, {known or 'none known'}"
                accepted = len(audit.findings) - counts.total()
                line += f", {accepted} accepted" if accepted else ""
                line += (
                    f"; {audit.unmatched} of other kinds not compared" if audit.unmatched else ""
                )
                line += f"; {len(audit.undecided)} undecided" if audit.undecided else ""
            line += f"; {image.note}" if image.note else ""
            lines.append(line + (f"; served by {', '.join(image.hosts)}" if image.hosts else ""))
        for digest, hosts in self.unplaced.items():
            lines.append(f"{digest}: served by {', '.join(hosts)}, and not among these images")
        if self.database:
            records = log.count(self.database.records, "advisory", "advisories")
            newest = f"{self.database.newest:%Y-%m-%d %H:%M} UTC"
            lines.append(f"database: {records}, the newest of {newest}")
        return lines

    def vex(self, form: str) -> dict[str, Any]:
        """The findings as one VEX document."""
        subjects = [
            VexSubject(x.purl, x.serial, {p.purl: p.ref for p in x.packages}, x.audit.findings)
            for x in self.images
            if x.audit
        ]
        return (
            openvex(subjects, self.now) if form == "openvex" else cyclonedx_vex(subjects, self.now)
        )


def audit_images(workspace: Workspace, request: AuditRequest) -> AuditResult:
    """Match every package of every image with the advisories; asks no network but a registry."""
    now, serving = datetime.now(UTC), request.serving
    # reports a missing key before minutes of reading
    signer = signer_of(request.key_path) if request.attest else None
    names = dict.fromkeys(request.subjects or workspace.checkout().images())
    images = [image for name in names for image in request.bills(workspace, name, now)]
    for image in images if signer else ():
        if image.built is None:
            raise errors.UnknownImage(
                f"{image.title}: only an image that is built here can be stated",
                f"Run `sm120 build {image.title.split()[0]}` first, or leave --attest out.",
            )
    wanted = {(p.ecosystem, p.name) for x in images for p in x.packages if p.ecosystem}
    database = read_database(request.database, wanted, now) if request.database else None
    checkout, done = workspace.checkout_or_none(), list[AuditedImage]()
    for image in images:
        audit, accepted = None, list[AcceptedAdvisory]()
        # also of a published image: what its spec accepts today counts, not what it did then
        if checkout and checkout.written(image.name) in checkout.images():
            chain = plan_image(checkout, image.name, image.platform).chain()
            accepted = [x for each in chain for x in each.spec.advisories]
        if database:
            matched = match_packages(image.packages, database, accepted)
            audit = predicates.Audit(
                image=image.built.name if image.built else image.title,
                platform=image.platform,
                database=predicates.AuditDatabase(
                    digest=database.digest,
                    files=database.files,
                    records=database.records,
                    newest=stamp(database.newest),
                ),
                packages=len(image.packages) - matched.unmatched,
                unmatched=matched.unmatched,
                undecided=matched.undecided,
                findings=matched.findings,
                tool=predicates.Tool(name="sm120-pipeline", version=__version__),
            )
        held = [p for p in image.packages if any(x.accepts(p) for x in request.holds)]
        hosts = sorted(serving.pop(image.digest or "", []))
        done.append(replace(image, audit=audit, held=tuple(held), hosts=tuple(hosts)))
        if signer and audit and image.built:
            store, when = workspace.store(), moment(now)
            body, subject = audit.model_dump(mode="json"), (image.built.name, image.built.digest)
            statement = make_statement(*subject, AUDIT, body, when)
            with store.in_use():
                keep_all(store, image.built, {"audit": statement}, [signer], when)
    result = AuditResult(done, now, database, serving)
    # what the exit code says: an old database first, as it proves nothing
    if database and now - database.newest > timedelta(days=request.max_age_days):
        return replace(
            result,
            error=errors.DatabaseOld(
                f"{request.database}: its newest advisory is of {database.newest:%Y-%m-%d},"
                f" {log.count((now - database.newest).days, 'day')} ago"
            ),
        )
    least = (
        predicates.SEVERITIES.index(request.fail_on)
        if request.fail_on
        else len(predicates.SEVERITIES)
    )
    bad = [
        f"{x.title}: {f.package} {f.version} has {f.id}, {f.severity}"
        for x, f in result.findings
        if predicates.SEVERITIES.index(f.severity) >= least and f.is_open(now.date())
    ]
    more = f", and {len(bad) - 1} more" if bad[1:] else ""
    return replace(result, error=errors.KnownVulnerable(f"{bad[0]}{more}") if bad else None)


def _from_bill(bill: dict[str, Any], title: str, note: str) -> AuditedImage:
    """Read an image from a bill of materials, whoever wrote it."""
    metadata = bill.get("metadata")
    about = metadata.get("component") if isinstance(metadata, dict) else None
    about = about if isinstance(about, dict) else {}

    def tables(name: str) -> list[dict[str, Any]]:
        rows = about.get(name)
        return [x for x in rows if isinstance(x, dict)] if isinstance(rows, list) else []

    found = [x.get("content") for x in tables("hashes") if x.get("alg") == "SHA-256"]
    noted = [x for x in tables("properties") if x.get("name") == "sm120:platform"]
    platforms = [str(x.get("value")) for x in noted]
    packages, serial = packages_of(bill, title), bill.get("serialNumber")
    # an unreadable self-description of a wheel may hide anything
    unread = canonical_json(bill).count(b'"name":"sm120:sbom:unread"')
    if unread:
        gap = f"{log.count(unread, 'bill')} inside wheels could not be read"
        note = f"{note}; {gap}" if note else gap
    return AuditedImage(
        title=title,
        name=str(about.get("name") or title),
        digest=f"sha256:{found[0]}" if found else None,
        platform=next((x for x in platforms if x in ("linux/amd64", "linux/arm64")), "linux/amd64"),
        purl=str(about.get("purl") or title),
        packages=packages,
        serial=serial if isinstance(serial, str) else "",
        note=note,
    )
