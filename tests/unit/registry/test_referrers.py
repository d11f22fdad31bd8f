from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.artifacts.attest.cosign import Content
from pipeline.artifacts.oci.document import Document
from pipeline.artifacts.registry.referrers import (
    artifact_kind,
    fallback_tag,
    list_in_fallback_tag,
    listed_referrers,
    referrers,
)
from pipeline.artifacts.registry.repository import Repository
from pipeline.core.errors import RegistryBroken
from pipeline.evidence.publish.attachment import Attachment, attach
from tests.testbed.oci_door import Door, Reply, changed, status, with_body
from tests.testbed.tiny_registry import TinyRegistry
from tests.unit.registry.support import NAME, described, put, put_image

NOTE = "application/vnd.example.note+json"


def note(message: bytes = b"{}", kind: str = NOTE) -> Attachment:
    return Attachment(artifact_type=kind, layers=(Content(media_type=kind, data=message),))


@pytest.fixture(params=["api", "tag"])
def image(request: pytest.FixtureRequest, tiny: TinyRegistry) -> Document:
    """An image in a registry with the referrers API, and in one without."""
    tiny.has_referrers = request.param == "api"
    return put_image(tiny, "v1", b"layer")


def test_what_was_attached_is_found_from_the_image(
    repository: Repository, image: Document, tiny: TinyRegistry
) -> None:
    attached = attach(repository, image, [note(b"1"), note(b"2", "text/plain")])
    documents = referrers(repository, image.digest)
    assert {d.digest for d in documents} == {a.digest for a in attached}
    (plain,) = [d for d in documents if artifact_kind(d) == "text/plain"]
    assert plain.digest == attached[1].digest
    assert listed_referrers(repository, image.digest)[1] == ("api" if tiny.has_referrers else "tag")


def test_attaching_the_same_twice_changes_nothing(
    repository: Repository, image: Document, tiny: TinyRegistry
) -> None:
    attach(repository, image, [note()])
    before = dict(tiny.manifests), dict(tiny.tags)
    attach(repository, image, [note()])
    assert (tiny.manifests, tiny.tags) == before


def test_the_fallback_tag_is_written_only_where_there_is_no_api(
    repository: Repository, image: Document, tiny: TinyRegistry
) -> None:
    attach(repository, image, [note()])
    assert ((NAME, fallback_tag(image.digest)) in tiny.tags) is not tiny.has_referrers


@pytest.fixture
def without_api(tiny: TinyRegistry) -> Document:
    tiny.has_referrers = False
    return put_image(tiny, "v1", b"layer")


def fallback_entries(tiny: TinyRegistry, image: Document) -> list[dict[str, Any]]:
    digest = tiny.tags[NAME, fallback_tag(image.digest)]
    entries: list[dict[str, Any]] = json.loads(tiny.manifests[NAME, digest][1])["manifests"]
    return entries


def put_fallback(tiny: TinyRegistry, image: Document, *entries: Any) -> None:
    index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json"}
    put(tiny, {**index, "manifests": list(entries)}, fallback_tag(image.digest))


def test_foreign_entries_of_the_fallback_tag_stay_as_they_are(
    repository: Repository, without_api: Document, tiny: TinyRegistry
) -> None:
    other = put_image(tiny, "v2", b"other")
    foreign = {**described(other.data, other.media_type), "x-unknown": {"a": [1]}}
    put_fallback(tiny, without_api, foreign)
    attach(repository, without_api, [note()])
    entries = fallback_entries(tiny, without_api)
    assert entries[0] == foreign
    assert len(entries) == 2


@pytest.mark.parametrize("subject", ["none", "another image"])
def test_an_entry_that_does_not_belong_is_never_trusted(
    repository: Repository, without_api: Document, tiny: TinyRegistry, subject: str
) -> None:
    other = put_image(tiny, "v2", b"other")
    more = {} if subject == "none" else {"subject": described(other.data, other.media_type)}
    outsider = put_image(tiny, "v3", b"stranger", artifactType=NOTE, **more)
    put_fallback(tiny, without_api, described(outsider.data, outsider.media_type))
    listed, _ = listed_referrers(repository, without_api.digest)
    assert [d.digest for d in listed] == [outsider.digest]
    assert referrers(repository, without_api.digest) == []


def test_an_entry_that_is_not_there_is_passed_over(
    repository: Repository, without_api: Document, tiny: TinyRegistry
) -> None:
    put_fallback(tiny, without_api, described(b"gone", NOTE))
    assert referrers(repository, without_api.digest) == []


def test_an_api_that_lists_a_stranger_is_not_believed(
    repository: Repository, tiny: TinyRegistry, door: Door
) -> None:
    image, other = put_image(tiny, "v1", b"layer"), put_image(tiny, "v2", b"other")
    index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json"}
    listed = {**index, "manifests": [described(other.data, other.media_type)]}
    door.fail("GET", "referrers", with_body(json.dumps(listed).encode()))
    assert referrers(repository, image.digest) == []


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"schemaVersion":2,"manifests":7}', b""])
def test_a_damaged_list_is_an_error_not_an_empty_one(
    repository: Repository, tiny: TinyRegistry, door: Door, body: bytes
) -> None:
    image = put_image(tiny, "v1", b"layer")
    door.fail("GET", "referrers", with_body(body))
    with pytest.raises(RegistryBroken):
        referrers(repository, image.digest)


def test_a_fallback_tag_that_is_no_index_is_an_error_and_stays(
    repository: Repository, without_api: Document, tiny: TinyRegistry
) -> None:
    other = put_image(tiny, fallback_tag(without_api.digest), b"not an index")
    with pytest.raises(RegistryBroken, match="not an index"):
        attach(repository, without_api, [note()])
    assert tiny.tags[NAME, fallback_tag(without_api.digest)] == other.digest


def test_an_entry_that_another_writer_undid_is_written_again(
    repository: Repository, without_api: Document, tiny: TinyRegistry, door: Door
) -> None:
    def undo(reply: Reply) -> Reply:
        put_fallback(tiny, without_api)
        return reply

    door.fail("PUT", fallback_tag(without_api.digest), changed(undo))
    attach(repository, without_api, [note()])
    assert len(fallback_entries(tiny, without_api)) == 1


def test_a_fallback_tag_that_keeps_nothing_is_given_up(
    repository: Repository, without_api: Document, tiny: TinyRegistry, door: Door
) -> None:
    document = put(tiny, json.loads(note().manifest(without_api).data))
    door.fail("PUT", "sha256-", status(201), times=9)
    with pytest.raises(RegistryBroken, match="does not keep"):
        list_in_fallback_tag(repository, without_api.digest, [document.descriptor])
