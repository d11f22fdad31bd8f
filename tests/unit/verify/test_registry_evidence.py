"""Evidence in a registry: what verifies, and a corpus of registries that lie."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.attest.cosign import (
    ENVELOPE_MEDIA,
    SIGNATURE_MEDIA,
    SIGNATURE_NOTE,
    signature_attachment,
)
from pipeline.artifacts.attest.envelope import enclose
from pipeline.artifacts.attest.keys import LocalSigner
from pipeline.artifacts.attest.names import KINDS, UNGATED
from pipeline.artifacts.attest.predicates import Ungated
from pipeline.artifacts.attest.statement import Moment, make_statement
from pipeline.artifacts.attest.strict import MAX_BYTES
from pipeline.artifacts.attest.trust import OwnKeys, Trust
from pipeline.artifacts.oci.reference import parse_reference
from pipeline.artifacts.registry.pull import plan_pull, pull_layout
from pipeline.artifacts.registry.referrers import fallback_tag
from pipeline.artifacts.registry.repository import Repository
from pipeline.artifacts.store.store import open_store
from pipeline.core.errors import (
    EvidenceBroken,
    EvidenceIncomplete,
    NotInRegistry,
    PipelineError,
    RecordInvalid,
    RegistryBroken,
    RegistryUnreachable,
    TagMoved,
)
from pipeline.core.model import canonical_json
from pipeline.evidence.publish.evidence import (
    EvidenceBundle,
    for_cosign,
    plan_naming,
    read_cosign_tags,
)
from pipeline.evidence.publish.publish import (
    Published,
    PublishOrder,
    plan_upload,
    push_with_evidence,
)
from pipeline.evidence.verify.artifact import open_layout
from pipeline.evidence.verify.chain import VerifyContext, judge_attached, judge_remote
from pipeline.evidence.verify.evidence import attached_in
from pipeline.evidence.verify.remote import open_remote
from pipeline.evidence.verify.verdict import Node, Verdict, show, verdict_error
from pipeline.images.gate.state import GateState
from tests.testbed.oci_door import Door, cut_answer, oci_door
from tests.testbed.tiny_registry import TinyRegistry, digest_of
from tests.unit.publish.conftest import some_bytes
from tests.unit.registry.support import NAME, described, index_json, put, repository_at
from tests.unit.verify.world import NOW, WHEN, World, trust_in, trusted

AMD64 = "linux/amd64"
LATER = Moment(at="2026-05-31T09:00:00Z", invocation=WHEN.invocation)


@dataclass
class Site:
    """The world's image in a registry, published with its evidence."""

    world: World
    tiny: TinyRegistry
    door: Door
    folder: Path

    @property
    def repository(self) -> Repository:
        return repository_at(self.door)

    @property
    def digest(self) -> str:
        return self.world.built.digest

    def publish(self, tag: str = "v1", **changes: Any) -> Published:
        world = self.world
        given = {
            "shipment": plan_upload(world.store, [world.built]),
            "repository": self.repository,
            "tag": tag,
            "gates": [],
            "bundle": EvidenceBundle(
                {AMD64: list(world.envelopes().values())}, LocalSigner(world.key)
            ),
            **changes,
        }
        # a store of its own remembers what was published; the world's stays as it is
        return push_with_evidence(open_store(self.folder / "memory"), PublishOrder(**given))

    def judge(self, name: str = ":v1", trust: Trust | None = None, **more: Any) -> Node:
        return self.judge_by(trust or self.world.trust, name, **more)

    def judge_by(self, trust: Trust | None, name: str = ":v1", **more: Any) -> Node:
        asked = parse_reference(f"{self.door.host_port}/{NAME}{name}")
        context = VerifyContext(trust, self.world.checkout, NOW, jobs=2, **more)
        return judge_remote(open_remote(self.repository, asked, None), context).node

    @property
    def manifest(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.tiny.manifests[NAME, self.digest][1])
        return body

    def attach(self, *layers: bytes, kind: str = ENVELOPE_MEDIA, about: str = "") -> str:
        """What anybody who may push can add."""
        subject = {**described(b"", "x"), "mediaType": "application/vnd.oci.image.manifest.v1+json"}
        subject |= {"digest": about or self.digest}
        for data in (b"{}", *layers):
            self.tiny.blobs[NAME, digest_of(data)] = data
        body = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "artifactType": kind,
            "config": described(b"{}", "application/vnd.oci.empty.v1+json"),
            "layers": [described(data, kind) for data in layers],
        }
        if about != "nothing":
            body["subject"] = subject
        document = put(self.tiny, body)
        self.list(document.digest)
        return document.digest

    def list(self, digest: str, about: str = "") -> None:
        """Into the fallback tag."""
        tag = fallback_tag(about or self.digest)
        index = json.loads(self.tiny.manifests[NAME, self.tiny.tags[NAME, tag]][1])
        size = len(self.tiny.manifests.get((NAME, digest), ("", b""))[1])
        entry = {**described(b"", "application/vnd.oci.image.manifest.v1+json")}
        index["manifests"].append({**entry, "digest": digest, "size": size})
        put(self.tiny, index, tag)


@dataclass
class SharedSite:
    """Something is published once, under one address; each test gets a copy of all it left."""

    first: Site
    publish: Callable[[Site], object]
    is_published: bool = False

    def copy(self, tiny: TinyRegistry, folder: Path) -> Site:
        if not self.is_published:
            # not before the first test: a fixture of the module knows no closed door
            self.publish(self.first)
            self.is_published = True
        door, kept = self.first.door, self.first.tiny
        door.wait_until_idle()
        tiny.blobs |= kept.blobs
        tiny.manifests |= kept.manifests
        tiny.tags |= kept.tags
        shutil.copytree(self.first.folder, folder, dirs_exist_ok=True)
        door.backend = tiny
        door.asked.clear()
        door.faults.clear()
        return replace(self.first, tiny=tiny, folder=folder)


@contextmanager
def shared_site(
    world: World, folder: Path, publish: Callable[[Site], object]
) -> Iterator[SharedSite]:
    tiny = TinyRegistry(has_referrers=False)
    with oci_door(tiny) as door:
        yield SharedSite(Site(world, tiny, door, folder), publish)


@pytest.fixture
def tiny() -> TinyRegistry:
    return TinyRegistry(has_referrers=False)


@pytest.fixture(scope="module")
def shared(world: World, new_folder: Callable[[str], Path]) -> Iterator[SharedSite]:
    with shared_site(world, new_folder("site"), Site.publish) as made:
        yield made


@pytest.fixture
def site(shared: SharedSite, tiny: TinyRegistry, tmp_path: Path) -> Site:
    return shared.copy(tiny, tmp_path)


def test_what_was_published_is_valid_by_tag_and_by_digest(site: Site) -> None:
    by_tag = site.judge()
    assert by_tag.verdict is Verdict.VALID, show(by_tag)
    bills = [c for c in by_tag.children[-1].children if c.title.startswith("unsigned SBOM")]
    assert bills
    assert all(bill.message.startswith("the same as in sha256:") for bill in bills)
    assert "signed under it" in by_tag.children[0].message
    assert site.judge(f"@{site.digest}", deep=True).verdict is Verdict.VALID
    assert site.judge(f":v1@{site.digest}").verdict is Verdict.VALID


def test_a_registry_that_lists_referrers_itself_gives_the_same(
    site: Site, tiny: TinyRegistry
) -> None:
    tiny.has_referrers = True
    assert site.judge().verdict is Verdict.VALID
    del tiny.tags[NAME, fallback_tag(site.digest)]
    assert site.judge().verdict is Verdict.VALID


def test_publishing_again_changes_nothing_and_a_second_name_stands_beside_the_first(
    site: Site, tiny: TinyRegistry
) -> None:
    before = dict(tiny.tags)
    site.publish()
    assert tiny.tags == before
    site.publish("v2")
    assert site.judge().verdict is site.judge(":v2").verdict is Verdict.VALID


def test_every_platform_of_an_index_is_judged_and_the_index_is_signed(site: Site) -> None:
    world = site.world
    site.publish("both", shipment=plan_upload(world.store, [world.built], index=True))
    node = site.judge(":both")
    assert node.verdict is Verdict.VALID, show(node)
    assert any(world.built.digest in child.title for child in node.children)
    index = site.tiny.tags[NAME, "both"]
    loose = site.attach(b"hello", kind="text/plain", about=index)
    site.list(loose, about=index)
    (note,) = [c.message for c in site.judge(":both").children if c.title == "skipped"]
    assert "text/plain" in note


def test_a_pulled_layout_verifies_without_the_registry(site: Site) -> None:
    repository, folder = site.repository, site.folder / "layout"
    root = repository.manifest("v1")
    pull_layout(repository, plan_pull(repository, root, with_evidence=True), folder)
    site.tiny.manifests.clear()
    opened = open_layout(folder)
    context = VerifyContext(site.world.trust, site.world.checkout, NOW)
    node = judge_attached(opened, attached_in(folder, opened.digest), context).node
    assert node.verdict is Verdict.VALID, show(node)
    assert any("image signature" in child.title for child in node.children)


def test_a_name_that_nobody_signed_is_incomplete_and_says_what_was(
    site: Site, tiny: TinyRegistry
) -> None:
    tiny.tags[NAME, "stable"] = site.digest
    node = site.judge(":stable")
    assert node.verdict is Verdict.INCOMPLETE
    assert ":v1)" in node.culprit().message


def test_published_bare_there_is_nothing_to_believe(world: World, tmp_path: Path) -> None:
    tiny = TinyRegistry(has_referrers=False)
    with oci_door(tiny) as door:
        bare = Site(world, tiny, door, tmp_path)
        assert bare.publish(bundle=None).evidence == "left out"
        assert bare.judge().verdict is Verdict.INCOMPLETE
        assert bare.publish(bundle=EvidenceBundle({AMD64: []})).evidence == "none"
        only = EvidenceBundle({AMD64: list(world.envelopes().values())})
        assert bare.publish(bundle=only).evidence == "statements only"
        assert bare.judge().verdict is Verdict.INCOMPLETE
        assert bare.judge(f"@{world.built.digest}").verdict is Verdict.VALID


def test_that_gates_were_passed_over_stays_with_the_image_and_is_never_valid(site: Site) -> None:
    gates = [GateState(platform=AMD64, state="not passed", message="smem: not run")]
    site.publish(gates=gates, ungated_reason="no card here")
    node = site.judge()
    assert node.verdict is Verdict.INCOMPLETE
    assert "no card here" in node.culprit().message


def test_so_does_the_signed_statement_of_it(site: Site) -> None:
    ungated = Ungated(
        image="engine", platform=AMD64, reference="x", gates="smem: not run", reason="why not"
    )
    statement = make_statement("engine", site.digest, UNGATED, ungated.model_dump(), WHEN)
    envelope = enclose(statement, [LocalSigner(site.world.key)])
    envelopes = site.world.with_set(
        {**site.world.envelopes(), "ungated": envelope}, "why not", LATER
    )
    bundle = EvidenceBundle({AMD64: list(envelopes.values())}, LocalSigner(site.world.key))
    site.publish(bundle=bundle)
    node = site.judge()
    assert node.verdict is Verdict.INCOMPLETE, show(node)
    assert show(node).count("why not") == 2


def test_entries_that_do_not_belong_are_passed_over_and_named(site: Site) -> None:
    other = "sha256:" + "5" * 64
    envelope = next(iter(site.world.envelopes().values())).dump()
    foreign = site.attach(envelope, about=other)
    loose = site.attach(envelope, about="nothing")
    site.list("sha256:" + "6" * 64)
    site.attach(b"hello", kind="text/plain")
    node = site.judge()
    assert node.verdict is Verdict.VALID, show(node)
    skipped = [c.message for image in node.children for c in image.children if c.title == "skipped"]
    assert [foreign in skipped[i] or loose in skipped[i] for i in range(4)].count(True) == 2
    assert any("missing" in w for w in skipped)
    assert any("text/plain" in w for w in skipped)


def move_tag_to_stranger(site: Site) -> None:
    other = put(site.tiny, {**site.manifest, "annotations": {"a": "b"}})
    site.tiny.tags[NAME, "v1"] = other.digest


def extra_layer(site: Site) -> None:
    data = some_bytes("evil", 100)
    site.tiny.blobs[NAME, digest_of(data)] = data
    manifest = site.manifest
    manifest["layers"].append(described(data, manifest["layers"][0]["mediaType"]))
    put(site.tiny, manifest, "v1")


def whole_with_extra_layer(site: Site) -> str:
    """An image that is good in itself."""
    extra_layer(site)
    changed = site.tiny.tags[NAME, "v1"]
    config = json.loads(site.tiny.blobs[NAME, site.manifest["config"]["digest"]])
    config["rootfs"]["diff_ids"].append("sha256:" + "7" * 64)
    data = canonical_json(config)
    site.tiny.blobs[NAME, digest_of(data)] = data
    body = json.loads(site.tiny.manifests[NAME, changed][1])
    body["config"] = {**described(data, body["config"]["mediaType"])}
    return put(site.tiny, body, "v1").digest


def extra_layer_with_copied_evidence(site: Site) -> None:
    """All evidence is attached to the changed image as well, and its tags copied."""
    changed = whole_with_extra_layer(site)
    for ending_ in (".sig", ".att"):
        kept = site.tiny.tags[NAME, fallback_tag(site.digest) + ending_]
        copied = json.loads(site.tiny.manifests[NAME, kept][1])
        copied.pop("subject", None)
        put(site.tiny, copied, fallback_tag(changed) + ending_)


def swapped_statement(site: Site) -> None:
    """A good statement of another image, attached to this one."""
    world = site.world
    statement = json.loads(world.statements["provenance"].dump())
    statement["subject"][0]["digest"]["sha256"] = "8" * 64
    site.attach(world.lie("provenance", lambda body: body.update(statement)).dump())


def swapped_signature(site: Site) -> None:
    made = signature_attachment("sha256:" + "9" * 64, "x", LocalSigner(site.world.key))
    site.tiny.blobs[NAME, digest_of(made.data)] = made.data
    tag = f"{fallback_tag(site.digest)}.sig"
    body = json.loads(site.tiny.manifests[NAME, site.tiny.tags[NAME, tag]][1])
    body["layers"].append(
        {**described(made.data, made.media_type), "annotations": made.annotations}
    )
    put(site.tiny, body, tag)


def evidence_blob(site: Site) -> str:
    tag = f"{fallback_tag(site.digest)}.att"
    body = json.loads(site.tiny.manifests[NAME, site.tiny.tags[NAME, tag]][1])
    return str(body["layers"][0]["digest"])


def truncated(site: Site) -> None:
    digest = evidence_blob(site)
    site.tiny.blobs[NAME, digest] = site.tiny.blobs[NAME, digest][:-10]


def other_bytes(site: Site) -> None:
    digest = evidence_blob(site)
    data = site.tiny.blobs[NAME, digest]
    site.tiny.blobs[NAME, digest] = data[:-20] + bytes(20)


def longer(site: Site) -> None:
    site.tiny.blobs[NAME, evidence_blob(site)] += b" " * 100


def gone(site: Site) -> None:
    del site.tiny.blobs[NAME, evidence_blob(site)]


def oversized(site: Site) -> None:
    tag = f"{fallback_tag(site.digest)}.att"
    body = json.loads(site.tiny.manifests[NAME, site.tiny.tags[NAME, tag]][1])
    entry = {**body["layers"][0], "digest": "sha256:" + "3" * 64, "size": MAX_BYTES + 1}
    put(site.tiny, {**body, "layers": [entry]}, tag)


def junk(site: Site) -> None:
    site.attach(b'{"payloadType": 5}')


def foreign_bill(site: Site) -> None:
    site.attach(b'{"bomFormat":"CycloneDX"}', kind="application/vnd.cyclonedx+json")


def unreadable_note(site: Site) -> None:
    site.attach(b"[]", kind="application/vnd.sm120.ungated.v1+json")


def stranger_signed(site: Site) -> None:
    site.attach(site.world.signed("provenance", site.world.other_key).dump())


def layer_gone(site: Site) -> None:
    del site.tiny.blobs[NAME, site.manifest["layers"][-1]["digest"]]


def config_changed(site: Site) -> None:
    digest = site.manifest["config"]["digest"]
    site.tiny.blobs[NAME, digest] = site.tiny.blobs[NAME, digest].replace(b"linux", b"linuX")


def wrong_digest(site: Site) -> None:
    kind, data = site.tiny.manifests[NAME, site.digest]
    site.tiny.manifests[NAME, site.digest] = kind, data + b"\n"


def wrong_referrer(site: Site) -> None:
    tag = fallback_tag(site.digest)
    index = json.loads(site.tiny.manifests[NAME, site.tiny.tags[NAME, tag]][1])
    name = index["manifests"][0]["digest"]
    kind, data = site.tiny.manifests[NAME, name]
    site.tiny.manifests[NAME, name] = kind, data + b"\n"


def fallback_is_no_index(site: Site) -> None:
    site.tiny.tags[NAME, fallback_tag(site.digest)] = site.digest


def all_statements_gone(site: Site) -> None:
    for ending_ in ("", ".att"):
        del site.tiny.tags[NAME, fallback_tag(site.digest) + ending_]


def tag_gone(site: Site) -> None:
    del site.tiny.tags[NAME, "v1"]


Corpus = dict[str, tuple[Callable[[Site], object], Verdict | type[PipelineError], str]]
MUST_FAIL: Corpus = {
    "tag moved after signing": (move_tag_to_stranger, Verdict.MOVED, "moved after signing"),
    "extra layer at the tag": (extra_layer, EvidenceBroken, "layers, but"),
    "extra layer, fitting config": (whole_with_extra_layer, Verdict.MOVED, "moved after signing"),
    "extra layer, evidence copied": (extra_layer_with_copied_evidence, Verdict.BROKEN, "not about"),
    "statement of another image": (swapped_statement, Verdict.BROKEN, "is about engine"),
    "signature of another image": (swapped_signature, Verdict.BROKEN, "9999, not about this"),
    "evidence truncated": (truncated, Verdict.BROKEN, "received sha256"),
    "evidence with other bytes": (other_bytes, Verdict.BROKEN, "received sha256"),
    "evidence longer than named": (longer, Verdict.BROKEN, "is larger than"),
    "evidence gone": (gone, Verdict.BROKEN, "holds no sha256"),
    "evidence oversized": (oversized, Verdict.BROKEN, f"larger than {MAX_BYTES}"),
    "evidence is junk": (junk, Verdict.BROKEN, "payloadType"),
    "bill of somebody else": (
        foreign_bill,
        Verdict.BROKEN,
        "not a bill of materials that was signed",
    ),
    "note that cannot be read": (unreadable_note, Verdict.BROKEN, "cannot be read"),
    "statement by a stranger": (stranger_signed, Verdict.BROKEN, "does not know"),
    "layer gone": (layer_gone, EvidenceBroken, "is missing from the registry"),
    "config changed": (config_changed, RegistryBroken, "received sha256"),
    "image answered wrongly": (wrong_digest, RegistryBroken, "asked for sha256"),
    "referrer answered wrongly": (wrong_referrer, RegistryBroken, "asked for sha256"),
    "fallback tag is an image": (fallback_is_no_index, RegistryBroken, "is not an index"),
    "statements gone": (all_statements_gone, Verdict.BROKEN, "evidence set that is missing"),
    "tag gone": (tag_gone, NotInRegistry, "holds no v1"),
}


@pytest.mark.parametrize("name", MUST_FAIL)
def test_a_registry_that_lies_is_found_out(site: Site, name: str) -> None:
    spoil, wanted, message = MUST_FAIL[name]
    spoil(site)
    if isinstance(wanted, Verdict):
        node = site.judge()
        assert node.verdict is wanted, show(node)
        assert message in f"{node.culprit().title} {node.culprit().message}"
        assert verdict_error(node) is not None
        return
    with pytest.raises(wanted, match=message):
        site.judge()


NOBODY: dict[str, Callable[[Site], Trust | None]] = {
    "no key at all": lambda site: None,
    "one's own key": lambda site: OwnKeys(keys=trust_in(trusted(site.world.other_key)).keys),
}


@pytest.mark.parametrize("trust", NOBODY)
def test_a_good_image_whose_signer_nobody_here_trusts_is_incomplete(site: Site, trust: str) -> None:
    node = site.judge_by(NOBODY[trust](site))
    assert node.verdict is Verdict.INCOMPLETE, show(node)
    assert isinstance(verdict_error(node), EvidenceIncomplete)


@pytest.mark.parametrize("trust", NOBODY)
@pytest.mark.parametrize(
    "spoil", ["bill of somebody else", "statement of another image", "evidence is junk"]
)
def test_contradictions_are_found_also_where_nobody_is_trusted(
    site: Site, spoil: str, trust: str
) -> None:
    MUST_FAIL[spoil][0](site)
    assert site.judge_by(NOBODY[trust](site)).verdict is Verdict.BROKEN


def test_a_layer_with_other_bytes_is_found_only_by_reading_it(site: Site) -> None:
    digest = site.manifest["layers"][-1]["digest"]
    data = site.tiny.blobs[NAME, digest]
    site.tiny.blobs[NAME, digest] = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(RegistryBroken, match="received"):
        site.judge(deep=True)
    site.tiny.blobs[NAME, digest] = data[:-1]
    with pytest.raises(PipelineError):
        site.judge(deep=True)
    site.tiny.blobs[NAME, digest] = data + b"more"
    with pytest.raises(RegistryBroken, match="instead of"):
        site.judge(deep=True)


def test_a_deep_read_that_is_cut_begins_again_and_ends_when_it_never_works(site: Site) -> None:
    digest = site.manifest["layers"][-1]["digest"]
    site.door.fail("GET", digest, cut_answer(10))
    assert site.judge(deep=True).verdict is Verdict.VALID
    site.door.fail("GET", digest, cut_answer(10), times=50)
    with pytest.raises(RegistryUnreachable, match=r"ended \d+ bytes early|broke off"):
        site.judge(deep=True)


def test_a_tag_that_no_longer_names_the_digest_asked_for_has_moved(site: Site) -> None:
    move_tag_to_stranger(site)
    node = site.judge(f":v1@{site.digest}")
    assert node.verdict is Verdict.MOVED
    assert isinstance(verdict_error(node), TagMoved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"for": [k for k in KINDS if k != "image-signature"]}, "image-signature"),
        ({"until": "2026-05-31T12:00:00Z"}, "expired"),
    ],
)
def test_a_key_that_may_not_name_images_names_none(
    site: Site, change: dict[str, Any], message: str
) -> None:
    node = site.judge(trust=trust_in(trusted(site.world.key, **change)))
    assert node.verdict is Verdict.INCOMPLETE
    assert message in show(node)


@pytest.mark.parametrize(
    ("data", "note"),
    [
        (b"{}", ""),
        (b'{"critical":1}', "AAAA"),
        (b'{"critical":{},"critical":{}}', "AAAA"),
        (b"\xff", "!"),
    ],
)
def test_a_signature_that_cannot_be_read_is_passed_over_and_signs_nothing(
    site: Site, data: bytes, note: str
) -> None:
    tag = f"{fallback_tag(site.digest)}.sig"
    body = json.loads(site.tiny.manifests[NAME, site.tiny.tags[NAME, tag]][1])
    site.tiny.blobs[NAME, digest_of(data)] = data
    layer = {**described(data, SIGNATURE_MEDIA), "annotations": {SIGNATURE_NOTE: note}}
    body["layers"] = [layer]
    site.tiny.manifests.pop((NAME, site.tiny.tags[NAME, tag]))
    put(site.tiny, body, tag)
    node = site.judge()
    assert node.verdict is Verdict.INCOMPLETE
    assert f"image signature {digest_of(data)[:19]}" in show(node)


def test_more_evidence_than_anybody_needs_is_not_read(site: Site) -> None:
    for start in (0, 600):
        site.attach(*(b"%d" % i for i in range(start, start + 600)))
    with pytest.raises(RecordInvalid, match="more than 1000"):
        site.judge()


def test_more_entries_than_anybody_needs_are_not_followed(site: Site, tiny: TinyRegistry) -> None:
    tiny.has_referrers = True
    tag = fallback_tag(site.digest)
    index = json.loads(tiny.manifests[NAME, tiny.tags[NAME, tag]][1])
    entry = index["manifests"][0]
    index["manifests"] = [{**entry, "digest": f"sha256:{i:064x}"} for i in range(1000)]
    put(tiny, index, tag)
    with pytest.raises(RecordInvalid, match="lists 10"):
        site.judge()


def test_what_others_signed_under_cosigns_tag_stays(site: Site) -> None:
    other = LocalSigner(site.world.other_key)
    repository = site.repository
    there = read_cosign_tags(repository, site.digest, other)
    bundle = EvidenceBundle(signer=other)
    root = repository.manifest(site.digest)
    naming = plan_naming(repository, root, "v1", bundle, there.names)
    made = for_cosign(repository.manifest("v1"), [], naming, there)
    assert len(made) == 1
    assert (len(made[0].kept), len(made[0].layers)) == (1, 1)


def test_an_image_that_an_index_lists_for_another_platform_is_refused(site: Site) -> None:
    world = site.world
    site.publish("both", shipment=plan_upload(world.store, [world.built], index=True))
    index = json.loads(site.tiny.manifests[NAME, site.tiny.tags[NAME, "both"]][1])
    index["manifests"][0]["platform"] = {"architecture": "arm64", "os": "linux"}
    put(site.tiny, index, "both")
    with pytest.raises(EvidenceBroken, match="is listed for linux/arm64, but is for linux/amd64"):
        site.judge(":both")


def test_an_index_of_nothing_is_no_image(site: Site) -> None:
    put(site.tiny, index_json(), "none")
    with pytest.raises(EvidenceBroken, match="empty index"):
        site.judge(":none")


def test_a_place_without_tag_and_digest_names_nothing(site: Site) -> None:
    with pytest.raises(NotInRegistry, match="neither"):
        site.judge("")


def test_a_layout_with_evidence_of_another_image_names_it(site: Site) -> None:
    repository, folder = site.repository, site.folder / "layout"
    wanted = plan_pull(repository, repository.manifest("v1"), with_evidence=True)
    pull_layout(repository, wanted, folder)
    index = json.loads((folder / "index.json").read_bytes())
    artifact = index["manifests"][1]
    path = folder / "blobs" / "sha256" / artifact["digest"].removeprefix("sha256:")
    for subject in ("other", None):
        body = json.loads(path.read_bytes())
        body["subject"]["digest"] = "sha256:" + "4" * 64
        if subject is None:
            del body["subject"]
        data = canonical_json(body)
        (path.parent / digest_of(data).removeprefix("sha256:")).write_bytes(data)
        more = {**artifact, "digest": digest_of(data), "size": len(data)}
        index["manifests"].append(more)
    (folder / "index.json").write_bytes(canonical_json(index))
    attached = attached_in(folder, site.digest)
    assert len(attached.skipped) == 2
    path.write_bytes(b"{}")
    with pytest.raises(EvidenceBroken):
        attached_in(folder, site.digest)


def test_signatures_are_made_anew_for_each_key_only(site: Site, tiny: TinyRegistry) -> None:
    site.publish(bundle=replace(EvidenceBundle(), signer=LocalSigner(site.world.other_key)))
    tag = f"{fallback_tag(site.digest)}.sig"
    body = json.loads(tiny.manifests[NAME, tiny.tags[NAME, tag]][1])
    assert len(body["layers"]) == 2
    assert site.judge().verdict is Verdict.VALID
