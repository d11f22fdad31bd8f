from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifacts.oci.document import (
    DOCKER_MANIFEST,
    OCI_INDEX,
    OCI_MANIFEST,
    TITLE,
    Descriptor,
    as_descriptor,
    descriptor_json,
    index_json,
    read_descriptor,
    read_document,
    read_document_json,
)
from pipeline.core.errors import RegistryBroken
from pipeline.core.model import sha256_of
from tests.unit.registry.support import EMPTY_INDEX, manifest_json

GOOD = manifest_json(b"config", b"layer")


def read(document: Any, claimed: str = "") -> Any:
    return read_document(json.dumps(document).encode(), claimed)


def test_a_manifest_is_read_with_its_parts() -> None:
    document = read(GOOD, f"{OCI_MANIFEST}; charset=utf-8")
    assert document.kind == "manifest"
    assert [b.size_bytes for b in document.blobs] == [6, 5]


def test_an_index_is_read() -> None:
    assert read(EMPTY_INDEX, OCI_INDEX).kind == "index"


DIGESTS = [f"sha256:{digit * 64}" for digit in "abc"]
PLAIN = {"mediaType": "x/y", "digest": DIGESTS[0], "size": 0}
WHOLE = {
    **PLAIN,
    "artifactType": "z/w",
    "platform": {"os": "linux", "architecture": "arm", "variant": "v7"},
    "annotations": {"a": "b"},
}


def test_a_descriptor_is_written_as_it_was_read() -> None:
    read_back = read_descriptor(WHOLE)
    assert read_back == Descriptor(
        media_type="x/y",
        digest=DIGESTS[0],
        size_bytes=0,
        artifact_type="z/w",
        platform="linux/arm/v7",
        annotations={"a": "b"},
    )
    assert descriptor_json(read_back) == WHOLE
    assert descriptor_json(read_descriptor(PLAIN)) == PLAIN
    assert as_descriptor(WHOLE) == as_descriptor(read_back) == read_back
    odd = {"platform": "linux", "artifactType": 5, "annotations": None, "more": 1}
    assert descriptor_json(read_descriptor({**PLAIN, **odd})) == PLAIN
    assert read_descriptor({**PLAIN, "platform": {"variant": ""}}).platform is None
    assert read_descriptor({**PLAIN, "platform": {"os": "linux"}}).platform == "linux"


def test_an_index_is_written_in_one_way() -> None:
    entries = [read_descriptor(PLAIN)]
    start, rest = b'{"manifests":[{"digest":"', b'","mediaType":"x/y","size":0}],"mediaType":"'
    end = b'","schemaVersion":2}'
    body = start + DIGESTS[0].encode() + rest + OCI_INDEX.encode() + end
    assert index_json(entries) == body
    assert index_json(entries, {"a": "b"}) == b'{"annotations":{"a":"b"},' + body[1:]
    assert read_document(index_json(entries)).manifests == tuple(entries)


def test_everything_that_a_manifest_says_is_kept() -> None:
    layers = [{**PLAIN, "digest": digest} for digest in (DIGESTS[1], DIGESTS[2], DIGESTS[1])]
    given = changed(config=PLAIN, layers=layers, subject=WHOLE, artifactType="q/r")
    document = read({**given, "annotations": {"k": "v"}})
    assert (document.media_type, document.kind) == (OCI_MANIFEST, "manifest")
    assert document.config == read_descriptor(PLAIN)
    assert [layer.digest for layer in document.layers] == [DIGESTS[i] for i in (1, 2, 1)]
    assert [blob.digest for blob in document.blobs] == DIGESTS
    assert (document.subject, document.artifact_type) == (read_descriptor(WHOLE), "q/r")
    assert (document.annotations, document.manifests) == ({"k": "v"}, ())
    assert descriptor_json(document.descriptor) == {
        "mediaType": OCI_MANIFEST,
        "digest": sha256_of(document.data),
        "size": len(document.data),
    }
    assert document.part(DIGESTS[1]) == "layer 1 of 3"
    assert document.part(DIGESTS[2]) == "layer 2 of 3"


@pytest.mark.parametrize(
    ("own", "claimed", "wanted"),
    [
        (None, "", OCI_MANIFEST),
        (None, f" {DOCKER_MANIFEST.upper()} ; charset=utf-8", DOCKER_MANIFEST),
        (DOCKER_MANIFEST, "", DOCKER_MANIFEST),
        (DOCKER_MANIFEST, "application/octet-stream", DOCKER_MANIFEST),
        (OCI_MANIFEST, OCI_MANIFEST, OCI_MANIFEST),
    ],
)
def test_a_manifest_has_the_type_it_states_or_else_the_one_it_is_sent_as(
    own: str | None, claimed: str, wanted: str
) -> None:
    assert read(changed(mediaType=own), claimed).media_type == wanted


def test_a_document_may_have_a_thousand_parts() -> None:
    assert len(read(changed(layers=[GOOD["config"]] * 1000)).layers) == 1000
    assert len(read({**EMPTY_INDEX, "manifests": [PLAIN] * 1000}).manifests) == 1000


def test_a_part_is_called_what_it_is() -> None:
    plain = read(GOOD)
    layer = {**GOOD["layers"][0], "annotations": {TITLE: "torch\x1b[2J 2.9"}}
    named = read(changed(layers=[layer], annotations={TITLE: "sglang"}))
    digests = [named.digest, *(d.digest for d in named.blobs)]
    assert [named.part(digest) for digest in digests] == [
        "manifest of sglang",
        "config of sglang",
        "layer 1 of 1 (torch [2J 2.9) of sglang",
    ]
    assert plain.part(GOOD["layers"][0]["digest"]) == "layer 1 of 1"


def changed(**changes: Any) -> dict[str, Any]:
    return {**GOOD, **changes}


@pytest.mark.parametrize(
    ("document", "claimed", "message"),
    [
        ([], "", "not a JSON object"),
        ("text", "", "not a JSON object"),
        (changed(schemaVersion=1), "", "Docker's schema version 1, which is no longer supported"),
        (changed(schemaVersion=3), "", "has an unknown schema version"),
        ({**EMPTY_INDEX, "config": {}}, "", "as a manifest and as an index"),
        ({**EMPTY_INDEX, "fsLayers": []}, "", "as a manifest and as an index"),
        (changed(mediaType=None), "text/html", "is a manifest that calls itself 'text/html'"),
        (changed(manifests=[]), "", "as a manifest and as an index"),
        ({**EMPTY_INDEX, "layers": []}, "", "as a manifest and as an index"),
        (changed(mediaType=OCI_INDEX), "", "calls itself"),
        (changed(mediaType=7), "", "calls itself"),
        ({**EMPTY_INDEX, "mediaType": OCI_MANIFEST}, "", "calls itself"),
        (GOOD, OCI_INDEX, "sent as"),
        (GOOD, DOCKER_MANIFEST, "sent as"),
        (changed(layers="x"), "", "not a list"),
        (changed(layers=[7]), "", "not a JSON object"),
        (changed(layers=[{}]), "", "not a sha256 digest"),
        (changed(config={"digest": "sha256:../../etc/passwd"}), "", "not a sha256 digest"),
        (changed(config={**GOOD["config"], "digest": "md5:00"}), "", "not a sha256 digest"),
        (changed(config={**GOOD["config"], "size": -1}), "", "bytes"),
        (changed(config={**GOOD["config"], "size": True}), "", "bytes"),
        (changed(config={**GOOD["config"], "size": "6"}), "", "bytes"),
        (changed(config={**GOOD["config"], "size": 1.5}), "", "bytes"),
        (changed(config={**GOOD["config"], "mediaType": ""}), "", "media type"),
        (changed(config=None), "", "not a JSON object"),
        (changed(annotations={"a": 1}), "", "annotations"),
        (changed(annotations=["a"]), "", "annotations"),
        (changed(subject=[]), "", "not a JSON object"),
        ({k: v for k, v in GOOD.items() if k != "config"}, "", "no config"),
        (changed(layers=[GOOD["config"]] * 1001), "", "too long"),
    ],
)
def test_a_document_that_is_not_sound_is_refused(document: Any, claimed: str, message: str) -> None:
    with pytest.raises(RegistryBroken, match=message):
        read(document, claimed)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"a": 1, "a": 2}',
        b'{"x": {"digest": "1", "digest": "2"}}',
        b"[" * 100_000,
        b'{"a":' * 30 + b"1" + b"}" * 30,
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": 1} {"b": 2}',
    ],
)
def test_json_that_two_readers_could_read_differently_is_refused(data: bytes) -> None:
    with pytest.raises(RegistryBroken):
        read_document_json(data, "it")


def test_brackets_inside_texts_are_no_depth() -> None:
    text = json.dumps({"a": "[" * 100, "b": '\\"[[[' * 20})
    assert read_document_json(text.encode(), "it")["a"] == "[" * 100


@given(st.binary(max_size=200))
def test_any_bytes_are_a_document_or_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(RegistryBroken):
        read_document(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=9,
)


@given(st.sampled_from(sorted(GOOD)), JSON)
def test_any_value_in_any_field_is_read_or_an_error_of_ours(name: str, value: Any) -> None:
    try:
        document = read({**GOOD, name: value})
    except RegistryBroken:
        return
    assert document.kind == "manifest"
    assert json.loads(document.data)[name] == value
