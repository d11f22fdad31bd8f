"""The same image published again, by an honest publisher or by somebody who puts things back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.attest.cosign import read_payload, signature_attachment
from pipeline.artifacts.attest.envelope import Envelope, enclose
from pipeline.artifacts.attest.keys import LocalSigner
from pipeline.artifacts.attest.statement import Moment, stamp
from pipeline.artifacts.registry.pull import plan_pull, pull_layout
from pipeline.artifacts.registry.referrers import fallback_tag
from pipeline.artifacts.store.store import open_store
from pipeline.evidence.publish.evidence import EvidenceBundle, Naming, plan_naming
from pipeline.evidence.publish.publish import plan_upload
from pipeline.evidence.statements.image import image_statements
from pipeline.evidence.verify.artifact import open_layout
from pipeline.evidence.verify.chain import VerifyContext, judge_attached
from pipeline.evidence.verify.evidence import attached_in
from pipeline.evidence.verify.naming import TagMemory
from pipeline.evidence.verify.verdict import Node, Verdict, show
from tests.testbed.oci_door import oci_door
from tests.testbed.tiny_registry import TinyRegistry
from tests.unit.registry.support import NAME
from tests.unit.verify.test_registry_evidence import AMD64, Site
from tests.unit.verify.world import NOW, World, rebuild_statement

FIRST, SECOND, THIRD = (NOW - timedelta(hours=h) for h in (3, 2, 1))
AHEAD = NOW + timedelta(days=20)


@pytest.fixture
def site(world: World, tmp_path: Path) -> Iterator[Site]:
    tiny = TinyRegistry(has_referrers=False)
    with oci_door(tiny) as door:
        yield Site(world, tiny, door, tmp_path)


@pytest.fixture
def memory(tmp_path: Path) -> TagMemory:
    return TagMemory(open_store(tmp_path / "verifier"))


def stated_at(world: World, at: datetime) -> list[Envelope]:
    """Everything about the image as a fresh store states it at that time."""
    when = Moment(at=stamp(at), invocation=f"urn:uuid:{at:%d%H}")
    statements = image_statements(world.checkout, world.store, world.built, when, spdx=True)
    signer = LocalSigner(world.key)
    statements["rebuild"] = rebuild_statement(world.built, signer, "", when)
    signed = {name: enclose(s, [signer]) for name, s in statements.items()}
    return list(world.with_set(signed, when=when).values())


def publish_at(site: Site, at: datetime, tag: str = "v1", *, index: bool = False) -> str:
    signer = LocalSigner(site.world.key)
    bundle = EvidenceBundle({AMD64: stated_at(site.world, at)}, signer, at)
    shipment = plan_upload(site.world.store, [site.world.built], index=index)
    return site.publish(tag, bundle=bundle, shipment=shipment).digest


def unsigned_bills(node: Node) -> list[Node]:
    image = node.children[-1]
    return [c for c in image.children if c.title.startswith("unsigned SBOM")]


def test_an_image_published_again_from_a_fresh_store_verifies_by_every_tag(site: Site) -> None:
    publish_at(site, FIRST)
    publish_at(site, SECOND, "v2")
    for tag in (":v1", ":v2"):
        node = site.judge(tag)
        assert node.verdict is Verdict.VALID, show(node)
    copies = [bill.message for bill in unsigned_bills(site.judge())]
    assert sum("which does not count now" in each for each in copies) == 2
    assert sum("the same as in" in each for each in copies) == 2


def test_so_does_a_layout_that_was_pulled_with_both(site: Site) -> None:
    publish_at(site, FIRST)
    publish_at(site, SECOND)
    repository, folder = site.repository, site.folder / "layout"
    plan = plan_pull(repository, repository.manifest("v1"), with_evidence=True)
    pull_layout(repository, plan, folder)
    opened = open_layout(folder)
    context = VerifyContext(site.world.trust, site.world.checkout, NOW)
    node = judge_attached(opened, attached_in(folder, opened.digest), context).node
    assert node.verdict is Verdict.VALID, show(node)


def test_a_bill_that_nobody_signed_is_refused_also_after_a_second_publish(site: Site) -> None:
    publish_at(site, FIRST)
    publish_at(site, SECOND)
    site.attach(b'{"bomFormat":"CycloneDX"}', kind="application/vnd.cyclonedx+json")
    node = site.judge()
    assert node.verdict is Verdict.BROKEN
    assert "is not a bill of materials that was signed" in node.culprit().message


def test_a_changed_copy_of_the_older_bill_is_refused(site: Site) -> None:
    publish_at(site, FIRST)
    publish_at(site, SECOND)
    media = "application/vnd.cyclonedx+json"
    old = next(e for e in stated_at(site.world, FIRST) if "cyclonedx" in str(e.statement))
    changed = json.dumps({**old.statement.predicate, "components": []}).encode()
    site.attach(changed, kind=media)
    assert "is not a bill of materials" in site.judge().culprit().message


def test_what_was_published_with_a_clock_ahead_is_replaced_by_the_next_publish(
    site: Site, memory: TagMemory
) -> None:
    publish_at(site, AHEAD)
    node = site.judge(memory=memory)
    assert node.verdict is Verdict.BROKEN
    assert "in the future" in json.dumps(node.as_json())
    publish_at(site, SECOND)
    node = site.judge(memory=memory)
    assert node.verdict is Verdict.VALID, show(node)
    assert f"at {SECOND:%Y-%m-%d %H:%M:%S} UTC" in node.children[0].message
    assert "is dated in the future and does not count" in json.dumps(node.as_json())


def test_a_statement_of_the_future_that_was_not_stated_again_stays_broken(site: Site) -> None:
    publish_at(site, SECOND)
    world = site.world
    when = Moment(at=stamp(AHEAD), invocation="urn:uuid:9")
    signer = LocalSigner(world.other_key)
    lone = enclose(rebuild_statement(world.built, signer, "", when), [LocalSigner(world.key)])
    site.attach(lone.dump())
    node = site.judge()
    assert node.verdict is Verdict.BROKEN
    assert "which is in the future" in node.culprit().message


def keep_of(tiny: TinyRegistry) -> dict[str, dict[object, object]]:
    return {name: dict(getattr(tiny, name)) for name in ("manifests", "tags")}


def put_back(tiny: TinyRegistry, before: dict[str, dict[object, object]]) -> None:
    for name, things in before.items():
        getattr(tiny, name).clear()
        getattr(tiny, name).update(things)


def test_an_older_set_of_one_platform_put_back_is_reported_by_who_saw_the_newer(
    site: Site, memory: TagMemory
) -> None:
    index = publish_at(site, FIRST, index=True)
    before = keep_of(site.tiny)
    assert site.judge(memory=memory).verdict is Verdict.VALID
    assert publish_at(site, SECOND, index=True) == index
    assert site.judge(memory=memory).verdict is Verdict.VALID
    put_back(site.tiny, before)
    node = site.judge(memory=memory)
    assert node.verdict is Verdict.MOVED, show(node)
    assert node.culprit().message.startswith("older evidence was put back: builder gave")
    assert site.digest in node.culprit().message


def test_a_tag_moved_from_an_index_to_one_of_its_images_is_found_out(
    site: Site, memory: TagMemory
) -> None:
    index = publish_at(site, FIRST, index=True)
    assert site.judge(memory=memory).verdict is Verdict.VALID
    site.tiny.tags[NAME, "v1"] = site.digest
    for remembers in (memory, None):
        node = site.judge(memory=remembers)
        assert node.verdict is Verdict.MOVED, show(node)
        assert f"signed {index} under it" in node.culprit().message
    assert site.judge(f"@{site.digest}").verdict is Verdict.VALID


def test_also_where_the_publisher_did_not_sign_which_index_it_was(
    site: Site, memory: TagMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As images that were published before are signed."""

    def plan(*given: Any) -> Naming:
        naming = plan_naming(*given)
        assert naming is not None
        return replace(naming, index=None)

    monkeypatch.setattr("pipeline.evidence.publish.publish.plan_naming", plan)
    index = publish_at(site, FIRST, index=True)
    for _ in range(2):
        assert site.judge(memory=memory).verdict is Verdict.VALID
    site.tiny.tags[NAME, "v1"] = site.digest
    node = site.judge(memory=memory)
    assert node.verdict is Verdict.MOVED
    assert f"signed {index} under it" in node.culprit().message


def test_who_moves_a_tag_from_an_index_to_an_image_signs_that(
    site: Site, memory: TagMemory
) -> None:
    publish_at(site, FIRST, index=True)
    assert site.judge(memory=memory).verdict is Verdict.VALID
    publish_at(site, SECOND)
    assert site.judge(memory=memory).verdict is Verdict.VALID
    publish_at(site, THIRD, index=True)
    assert site.judge(memory=memory).verdict is Verdict.VALID


def test_where_names_of_the_future_are_there_two_times_are_signed(site: Site) -> None:
    publish_at(site, AHEAD)
    publish_at(site, SECOND)
    tag = f"{fallback_tag(site.digest)}.sig"
    body = json.loads(site.tiny.manifests[NAME, site.tiny.tags[NAME, tag]][1])
    names = [read_payload(site.tiny.blobs[NAME, x["digest"]]) for x in body["layers"]]
    assert [name.at for name in names] == [AHEAD, SECOND, AHEAD + timedelta(seconds=1)]


def test_the_index_of_a_name_is_part_of_what_is_signed(world: World) -> None:
    signer, digest = LocalSigner(world.key), world.built.digest
    made = signature_attachment(digest, "x.example/y:v1", signer, NOW, None, digest)
    assert read_payload(made.data).index == digest
