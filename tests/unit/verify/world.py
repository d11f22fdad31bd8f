"""A small image with all its evidence, signed; and ways to tell lies about it."""

from __future__ import annotations

import copy
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.artifacts.attest.envelope import Envelope, Signature, enclose
from pipeline.artifacts.attest.keys import (
    LocalSigner,
    PrivateKey,
    Signer,
    key_id,
    make_private_key,
    public_pem,
)
from pipeline.artifacts.attest.names import KINDS
from pipeline.artifacts.attest.statement import Moment, Statement
from pipeline.artifacts.attest.trust import Trust
from pipeline.artifacts.store.store import Store, open_store
from pipeline.core.model import canonical_json, sha256_of
from pipeline.core.verdict import GateVerdict
from pipeline.evidence.statements.evidence_set import NAME as SET
from pipeline.evidence.statements.evidence_set import set_statement
from pipeline.evidence.statements.image import image_statements, record_rebuild
from pipeline.evidence.verify.artifact import Artifact, open_image
from pipeline.evidence.verify.evidence import EvidenceItem, read_item
from pipeline.evidence.verify.verdict import Node, Verdict
from pipeline.evidence.verify.walk import JudgedEvidence, walk_evidence
from pipeline.images.assemble.image import Built
from pipeline.images.gate.evidence import Evidence, EvidenceRow, GateKind, keep_evidence
from pipeline.images.spec.checkout import Checkout
from tests.makers import (
    AMD64,
    Edit,
    build_in,
    make_deb,
    make_wheel,
    patch_files,
    root_image,
    wheel_image,
)
from tests.testbed.deb_file import Item, symlink

NOW = datetime(2026, 6, 1, 12, 0, tzinfo=UTC)
WHEN = Moment(at="2026-05-31T08:00:00Z", invocation="urn:uuid:00000000-0000-4000-8000-000000000000")
EDIT = Edit("pkg/code.py", b"size = 64\n", b"size = 32\n")
COPYRIGHT = (
    b"Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\n"
    b"Files: *\nCopyright: somebody\nLicense: GPL-2+ and Expat\n"
)
METADATA = (
    b"Metadata-Version: 2.4\nName: pkg\nVersion: 1.0\nLicense-Expression: mit OR apache-2.0\n"
)


def trusted(key: PrivateKey, name: str = "builder", **changes: Any) -> dict[str, Any]:
    """A key as a trust file lists it."""
    public = key.public_key()
    return {
        "name": name,
        "id": key_id(public),
        "public": public_pem(public),
        "for": list(KINDS),
        "not_before": datetime(2026, 1, 1, tzinfo=UTC),
        "until": datetime(2027, 1, 1, tzinfo=UTC),
        **changes,
    }


def trust_in(*entries: dict[str, Any]) -> Trust:
    return Trust.model_validate({"format": 1, "keys": list(entries)})


def evidence(
    store: Store, gate: GateKind, verdict: GateVerdict, checkout: Checkout, message: str = ""
) -> Evidence:
    """A gate's result that depends on a case file and a patch of the checkout."""
    folder = checkout.folder("engine")
    names = ("gates/smem-a.yaml", "patches/0001.patch")
    return Evidence(
        gate=gate,
        arch="sm_120",
        verdict=verdict,
        inputs={n: sha256_of((folder / n).read_bytes()) for n in names} | {"x.whl": sha256_of(b"")},
        made_by={"triton": "3.5.1"},
        rows=[
            EvidenceRow(name="case-1", verdict="passed"),
            EvidenceRow(name="case-2", verdict=verdict, message=message),
        ],
    )


def rebuild_statement(built: Built, signer: Signer, *about: Any) -> Statement:
    """A rebuild as somebody else states it, in a store of their own."""
    with tempfile.TemporaryDirectory() as folder:
        return record_rebuild(open_store(Path(folder) / "store"), built, signer, *about).statement


@dataclass(frozen=True)
class World:
    """All that a verifier can be given."""

    place: Path
    checkout: Checkout
    store: Store
    built: Built
    key: PrivateKey
    other_key: PrivateKey
    statements: dict[str, Statement]

    @property
    def trust(self) -> Trust:
        return trust_in(trusted(self.key))

    @cached_property
    def artifact(self) -> Artifact:
        return open_image(self.store.blob_path(self.built.digest).parent, self.built.digest, "it")

    def signed(self, name: str, key: PrivateKey | None = None) -> Envelope:
        return enclose(self.statements[name], [LocalSigner(key or self.key)])

    @cached_property
    def _good(self) -> dict[str, Envelope]:
        return self.with_set({name: self.signed(name) for name in self.statements})

    def with_set(
        self, envelopes: dict[str, Envelope], ungated: str | None = None, when: Moment = WHEN
    ) -> dict[str, Envelope]:
        """Envelopes and the set of them, signed with the good key: also of a liar's."""
        kept = {name: e for name, e in envelopes.items() if name != SET}
        readable = [read_item(name, e.dump()).envelope for name, e in kept.items()]
        subject = (self.built.name, AMD64, self.built.digest)
        listed = set_statement(*subject, [e for e in readable if e], ungated, when)
        return {**kept, SET: enclose(listed, [LocalSigner(self.key)])}

    def envelopes(self) -> dict[str, Envelope]:
        return dict(self._good)

    def lie(self, name: str, change: Callable[[dict[str, Any]], None]) -> Envelope:
        """A statement changed at will and signed with the good key."""
        body = json.loads(self.statements[name].dump())
        change(body)
        return sign_bytes(canonical_json(body), self.key)

    def walk(
        self,
        envelopes: dict[str, Envelope] | Sequence[EvidenceItem] | None = None,
        trust: Trust | None = None,
        **changes: Any,
    ) -> JudgedEvidence:
        items = self.envelopes() if envelopes is None else envelopes
        if isinstance(items, dict) and SET not in items and "artifact" not in changes:
            items = self.with_set(items)
        if isinstance(items, dict):
            items = [read_item(name, e.dump()) for name, e in items.items()]
        given: dict[str, Any] = {"artifact": self.artifact, "checkout": self.checkout, "now": NOW}
        given |= {"trust": trust or self.trust, "items": items, **changes}
        return walk_evidence(**given)

    def judge(self, **changed: Envelope | None) -> Node:
        """The verdict when some of the evidence is replaced, or taken away, and signed so."""
        chosen = {k.replace("-", "_"): v for k, v in self.envelopes().items() if k != SET}
        chosen |= {k: v for k, v in changed.items() if v is not None}
        return self.walk({k: v for k, v in chosen.items() if changed.get(k, v) is not None}).node

    def checkout_copy(self, to: Path) -> Checkout:
        shutil.copytree(self.checkout.root, to / "checkout")
        return Checkout(to / "checkout")


def texts(nodes: Iterable[Node]) -> list[str]:
    """What checks say, without digests."""
    said = (f"{n.title}: {n.message}" if n.message else n.title for n in nodes)
    return [re.sub(r"(sha256:)?([0-9a-f]{64}|[0-9a-f]{12}…)", "…", text) for text in said]


def reasons(node: Node) -> list[str]:
    """What is not valid, each once; a bill repeats what the record says."""
    wrong = (n for n in node.every() if n.own is not Verdict.VALID)
    return list(dict.fromkeys(texts(n for n in wrong if n.title != "bill of materials")))


def sign_bytes(payload: bytes, key: PrivateKey) -> Envelope:
    """An envelope around any bytes: what a liar with a good key can make."""
    from pipeline.artifacts.attest.envelope import pae
    from pipeline.artifacts.attest.names import PAYLOAD

    signer = LocalSigner(key)
    signature = Signature(signer.key_id, signer.sign(pae(PAYLOAD, payload)))
    return Envelope(payload, (signature,), Statement.model_construct())


def make_world(place: Path) -> World:
    """Build, context, state and sign."""
    mirror = place / "mirror"
    doc = "./usr/share/doc/tool/copyright"
    deb = make_deb(mirror, "tool", Item("./usr/bin/tool", b"#!"), Item(doc, COPYRIGHT))
    more = make_deb(mirror, "more", symlink("./usr/share/doc/more", "tool"))
    parts = {
        "pkg/code.py": EDIT.before,
        "pkg/__init__.py": b"",
        "pkg-1.0.dist-info/METADATA": METADATA,
    }
    image = wheel_image(
        "engine",
        [make_wheel(mirror, "pkg", parts), make_wheel(mirror, "other")],
        gates=["smem"],
        patches="patches/series.yaml",
        files=[{"from": "serve.py", "to": "/opt/serve.py", "mode": "0755"}],
    )
    image.files |= {"serve.py": "print()\n", "gates/smem-a.yaml": "{}\n", **patch_files(EDIT)}
    checkout, store, built = build_in(place, root_image([deb, more]), image)
    gates = [evidence(store, g, "passed", checkout) for g in ("smem", "patches")]
    keep_evidence(store, "engine", AMD64, built.digest, gates)
    key = make_private_key()
    statements = image_statements(checkout, store, built, WHEN, spdx=True)
    statements["rebuild"] = rebuild_statement(built, LocalSigner(key), "", WHEN)
    return World(place, checkout, store, built, key, make_private_key(), copy.copy(statements))
