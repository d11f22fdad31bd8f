from __future__ import annotations

import json

import pytest

from pipeline.artifacts.oci.document import Document
from pipeline.artifacts.registry.referrers import fallback_tag
from pipeline.artifacts.store.store import Store
from pipeline.core.errors import DeleteDisabled, NotInRegistry, PipelineError, RegistryBroken
from pipeline.evidence.publish.gc import CleanPlan, plan_gc, run_gc
from pipeline.evidence.publish.known import KnownRepository
from pipeline.evidence.publish.publish import push_with_evidence
from tests.testbed.oci_door import Door, status, with_body
from tests.testbed.tiny_registry import TinyRegistry
from tests.unit.publish.conftest import MakeOrder
from tests.unit.registry.support import (
    EMPTY_INDEX,
    NAME,
    described,
    index_json,
    put,
    put_image,
    repository_at,
)


def plan(store: Store, door: Door, *patterns: str) -> CleanPlan:
    return plan_gc(store, repository_at(door), patterns or ("v*",))


def digests(cleared: CleanPlan) -> tuple[set[str], set[str]]:
    return {h.digest for h in cleared.kept}, {h.digest for h in cleared.gone}


def attached(tiny: TinyRegistry, image: Document, message: bytes, tag: str = "") -> Document:
    return put_image(tiny, tag, message, subject=described(image.data, image.media_type))


def test_kept_tags_stay_and_the_rest_goes(store: Store, door: Door, tiny: TinyRegistry) -> None:
    kept, gone = put_image(tiny, "v1", b"1"), put_image(tiny, "old", b"22")
    cleared = plan(store, door)
    assert digests(cleared) == ({kept.digest}, {gone.digest})
    assert cleared.freed_bytes == len(b"22") + len(b"config of old")
    run_gc(store, repository_at(door), cleared)
    assert set(tiny.tags.values()) == {kept.digest}


def test_a_plan_deletes_nothing(store: Store, door: Door, tiny: TinyRegistry) -> None:
    put_image(tiny, "v1", b"1")
    put_image(tiny, "old", b"2")
    plan(store, door)
    assert door.count("DELETE") == 0


def test_images_below_a_kept_index_stay(store: Store, door: Door, tiny: TinyRegistry) -> None:
    one, two = put_image(tiny, "", b"1"), put_image(tiny, "old", b"2")
    index = put(tiny, index_json((one, "linux/amd64"), (two, "linux/arm64")), "v1")
    assert digests(plan(store, door)) == ({one.digest, two.digest, index.digest}, set())


def test_images_below_an_index_that_goes_go_with_it_unless_something_else_keeps_them(
    store: Store, door: Door, tiny: TinyRegistry
) -> None:
    one, two = put_image(tiny, "", b"1"), put_image(tiny, "v1", b"2")
    index = put(tiny, index_json((one, "linux/amd64"), (two, "linux/arm64")), "old")
    cleared = plan(store, door)
    assert digests(cleared) == ({two.digest}, {one.digest, index.digest})
    assert cleared.gone[0].digest == index.digest  # what a tag names goes first


@pytest.mark.parametrize("has_api", [True, False])
def test_evidence_of_a_kept_image_stays_and_that_of_others_goes(
    store: Store, door: Door, tiny: TinyRegistry, has_api: bool
) -> None:
    tiny.has_referrers = has_api
    kept, gone = put_image(tiny, "v1", b"1"), put_image(tiny, "old", b"2")
    stays, goes = attached(tiny, kept, b"note 1"), attached(tiny, gone, b"note 2")
    about = attached(tiny, stays, b"a signature on the note")
    keep, drop = {kept.digest, stays.digest, about.digest}, {gone.digest, goes.digest}
    if not has_api:
        for image, note, side in ((kept, stays, keep), (stays, about, keep), (gone, goes, drop)):
            entry = described(note.data, note.media_type)
            index = {**EMPTY_INDEX, "manifests": [entry]}
            side.add(put(tiny, index, fallback_tag(image.digest)).digest)
    assert digests(plan(store, door)) == (keep, drop)


@pytest.mark.parametrize("suffix", [".sig", ".att", ".sbom"])
def test_cosigns_tags_stay_with_their_image(
    store: Store, door: Door, tiny: TinyRegistry, suffix: str
) -> None:
    kept, gone = put_image(tiny, "v1", b"1"), put_image(tiny, "old", b"2")
    signed = put_image(tiny, fallback_tag(kept.digest) + suffix, b"sig 1")
    other = put_image(tiny, fallback_tag(gone.digest) + suffix, b"sig 2")
    orphan = put_image(tiny, "sha256-" + "0" * 64 + suffix, b"sig 3")
    want = {kept.digest, signed.digest}, {gone.digest, other.digest, orphan.digest}
    assert digests(plan(store, door)) == want


def test_a_foreign_entry_in_kept_evidence_is_kept_too(
    store: Store, door: Door, tiny: TinyRegistry
) -> None:
    tiny.has_referrers = False
    kept, other = put_image(tiny, "v1", b"1"), put_image(tiny, "old", b"2")
    index = {**EMPTY_INDEX, "manifests": [described(other.data, other.media_type)]}
    put(tiny, index, fallback_tag(kept.digest))
    assert digests(plan(store, door))[1] == set()


def test_manifests_without_a_tag_are_found_where_this_store_remembers_them(
    store: Store, order: MakeOrder, door: Door, tiny: TinyRegistry
) -> None:
    first = push_with_evidence(store, order())
    kept = put_image(tiny, "v1", b"another image now")
    assert first.digest not in tiny.tags.values()
    cleared = plan(store, door)
    assert digests(cleared)[0] == {kept.digest}
    assert digests(cleared)[1] == {first.digest, *first.platforms.values()}
    run_gc(store, repository_at(door), cleared)
    assert set(tiny.manifests) == {(NAME, kept.digest)}
    assert digests(plan(store, door))[1] == set()


def test_remembered_manifests_that_are_gone_are_no_matter(
    store: Store, door: Door, tiny: TinyRegistry
) -> None:
    put_image(tiny, "v1", b"1")
    known = KnownRepository(store, repository_at(door))
    known.remember(manifests=["sha256:" + "0" * 64])
    assert digests(plan(store, door))[1] == set()


def test_when_no_tag_would_stay_nothing_is_deleted(
    store: Store, door: Door, tiny: TinyRegistry
) -> None:
    put_image(tiny, "v1", b"1")
    with pytest.raises(NotInRegistry, match="everything would be deleted"):
        plan(store, door, "w*")


@pytest.mark.parametrize("place", ["tags/list", "manifests/v1", "manifests/old", "referrers/"])
def test_an_error_while_reading_ends_it_before_the_first_deletion(
    store: Store, door: Door, tiny: TinyRegistry, place: str
) -> None:
    put_image(tiny, "v1", b"1")
    put_image(tiny, "old", b"2")
    door.fail("GET", place, status(500), times=99)
    with pytest.raises(PipelineError):
        plan(store, door)
    assert door.count("DELETE") == 0


def test_a_damaged_kept_index_ends_it(store: Store, door: Door, tiny: TinyRegistry) -> None:
    put_image(tiny, "v1", b"1")
    door.fail("GET", "manifests/v1", with_body(b"{}"))
    with pytest.raises(RegistryBroken):
        plan(store, door)


def test_a_registry_that_does_not_delete_says_so(
    store: Store, door: Door, tiny: TinyRegistry
) -> None:
    tiny.may_delete = False
    put_image(tiny, "v1", b"1")
    put_image(tiny, "old", b"2")
    with pytest.raises(DeleteDisabled, match="does not allow"):
        run_gc(store, repository_at(door), plan(store, door))
    assert json.loads(json.dumps(sorted(t for _, t in tiny.tags))) == ["old", "v1"]
