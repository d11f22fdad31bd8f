"""Statements and envelopes: the same findings give the same bytes, and those are what is signed."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.attest.cosign import (
    SIGNATURE_NOTE,
    attestation_attachment,
    read_payload,
    signature_attachment,
)
from pipeline.artifacts.attest.envelope import countersigned, enclose, pae, read_envelope
from pipeline.artifacts.attest.keys import LocalSigner, is_valid_signature, make_private_key
from pipeline.artifacts.attest.names import (
    CYCLONEDX,
    HOST_FACTS,
    PAYLOAD,
    PROVENANCE,
    SPDX,
    WEIGHTS,
    deb_purl,
    predicate_kind,
    wheel_purl,
)
from pipeline.artifacts.attest.statement import (
    Moment,
    make_statement,
    moment,
    read_stamp,
    read_statement,
    stamp,
)
from pipeline.artifacts.store.store import open_store
from pipeline.core.errors import RecordInvalid
from pipeline.evidence.statements.evidence_set import evidence_folder, kept_envelopes, sign_and_keep

DIGEST, OTHER_DIGEST = "sha256:" + "a" * 64, "sha256:" + "b" * 64
EARLY = Moment(at="2026-01-01T00:00:00Z", invocation="urn:uuid:1")
LATE = Moment(at="2026-02-01T00:00:00Z", invocation="urn:uuid:2")
PREDICATES: dict[str, dict[str, Any]] = {
    PROVENANCE: {"runDetails": {"builder": {"id": "x"}}},
    CYCLONEDX: {"bomFormat": "CycloneDX", "metadata": {"tools": {}}},
    SPDX: {"spdxVersion": "SPDX-2.3", "creationInfo": {"creators": []}},
    HOST_FACTS: {"host": "x"},
    WEIGHTS: {"verification": {"result": "verified"}},
}


@pytest.mark.parametrize("kind", PREDICATES)
def test_when_it_was_made_is_kept_apart_from_what_was_found(kind: str) -> None:
    early = make_statement("x", DIGEST, kind, PREDICATES[kind], EARLY)
    late = make_statement("x", DIGEST, kind, PREDICATES[kind], LATE)
    assert early.dump() != late.dump()
    assert early.core() == late.core()
    assert early.recorded == datetime(2026, 1, 1, tzinfo=UTC)
    assert make_statement("x", DIGEST, kind, PREDICATES[kind]).recorded is None
    assert read_statement(early.dump(), "it") == early


def payload_of(digest: str, reference: str, *more: Any) -> bytes:
    return signature_attachment(digest, reference, LocalSigner(make_private_key()), *more).data


def test_another_finding_is_another_core() -> None:
    one = make_statement("x", DIGEST, HOST_FACTS, {"host": "x"}, EARLY)
    assert one.core() != make_statement("x", DIGEST, HOST_FACTS, {"host": "y"}, EARLY).core()
    assert (
        one.core()
        != make_statement("x", "sha256:" + "b" * 64, HOST_FACTS, {"host": "x"}, EARLY).core()
    )


def test_bytes_do_not_depend_on_the_order_of_fields() -> None:
    one = make_statement("x", DIGEST, HOST_FACTS, {"a": 1, "b": 2})
    assert one.dump() == make_statement("x", DIGEST, HOST_FACTS, {"b": 2, "a": 1}).dump()


def test_a_moment_is_now_in_whole_seconds() -> None:
    when = moment(datetime(2026, 3, 4, 5, 6, 7, 999, tzinfo=UTC))
    assert when.at == "2026-03-04T05:06:07Z"
    assert moment().invocation != moment().invocation
    assert read_stamp(stamp(datetime(2026, 3, 4, tzinfo=UTC))) == datetime(2026, 3, 4, tzinfo=UTC)


@pytest.mark.parametrize("text", ["2026-13-01T00:00:00Z", "2026-01-01", "", 5, "2026-01-01T00:00Z"])
def test_other_times_are_refused(text: Any) -> None:
    with pytest.raises(RecordInvalid, match="is not a time"):
        read_stamp(text)


def test_a_kind_of_others_is_its_own_name() -> None:
    assert predicate_kind(PROVENANCE) == "provenance"
    assert predicate_kind("urn:x:y") == "urn:x:y"


def test_what_parts_a_package_url_is_quoted_in_its_pieces() -> None:
    wheel = wheel_purl("pkg", "1!2.0/x+y", "pkg 1/2?.whl")
    assert wheel == "pkg:pypi/pkg@1%212.0%2Fx%2By?file_name=pkg%201%2F2%3F.whl"
    deb = deb_purl("g++/x", "1:2+b/1", "amd64", distro="deb 12/x")
    assert deb == "pkg:deb/debian/g%2B%2B%2Fx@1%3A2%2Bb%2F1?arch=amd64&distro=deb%2012%2Fx"


def test_the_frame_is_the_one_of_the_DSSE_specification() -> None:
    assert pae("http://example.com/HelloWorld", b"hello world") == (
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )


def test_an_envelope_comes_back_as_it_was() -> None:
    one, other = LocalSigner(make_private_key()), LocalSigner(make_private_key())
    envelope = enclose(make_statement("x", DIGEST, HOST_FACTS, {"host": "x"}), [one, other])
    again = read_envelope(envelope.dump(), "it")
    assert again == envelope
    assert again.payload == envelope.statement.dump()
    for signer, signature in zip((one, other), again.signatures, strict=True):
        assert signature.key_id == signer.key_id
        assert is_valid_signature(
            signer.key.public_key(), signature.sig, pae(PAYLOAD, again.payload)
        )


def test_a_key_signs_only_once() -> None:
    signer = LocalSigner(make_private_key())
    envelope = enclose(make_statement("x", DIGEST, HOST_FACTS, {}), [signer])
    assert len(countersigned(envelope, signer).signatures) == 1


def test_a_statement_is_kept_as_it_was_first_signed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    folder = evidence_folder(store, "image", "linux/amd64", DIGEST)
    one, other = LocalSigner(make_private_key()), LocalSigner(make_private_key())
    first = sign_and_keep(
        store, folder, "facts", make_statement("x", DIGEST, HOST_FACTS, {}, EARLY), [one]
    )
    again = sign_and_keep(
        store, folder, "facts", make_statement("x", DIGEST, HOST_FACTS, {}, LATE), [one]
    )
    assert again == first
    both = sign_and_keep(
        store, folder, "facts", make_statement("x", DIGEST, HOST_FACTS, {}, LATE), [other]
    )
    assert both.payload == first.payload
    assert [s.key_id for s in both.signatures] == [one.key_id, other.key_id]
    assert [p.name for p in kept_envelopes(store, "image", "linux/amd64", DIGEST)] == [
        "facts.dsse.json"
    ]


def test_a_new_finding_takes_the_old_ones_place(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    folder = evidence_folder(store, "image", "linux/amd64", DIGEST)
    signer = LocalSigner(make_private_key())
    sign_and_keep(
        store, folder, "facts", make_statement("x", DIGEST, HOST_FACTS, {"a": 1}, EARLY), [signer]
    )
    new = sign_and_keep(
        store, folder, "facts", make_statement("x", DIGEST, HOST_FACTS, {"a": 2}, LATE), []
    )
    assert new.statement.predicate["a"] == 2
    assert new.signatures == ()
    (folder / "facts.dsse.json").write_bytes(b"damaged")
    sign_and_keep(store, folder, "facts", new.statement, [signer])
    assert read_envelope((folder / "facts.dsse.json").read_bytes(), "it").signatures


def test_an_image_signature_is_what_cosign_reads() -> None:
    signer = LocalSigner(make_private_key())
    layer = signature_attachment(DIGEST, "registry.example/engine", signer)
    body = json.loads(layer.data)
    assert body["critical"]["image"] == {"docker-manifest-digest": DIGEST}
    assert body["critical"]["type"] == "cosign container image signature"
    assert layer.data == payload_of(DIGEST, "registry.example/engine")
    sig = base64.b64decode(layer.annotations[SIGNATURE_NOTE])
    assert is_valid_signature(signer.key.public_key(), sig, layer.data)


def test_a_payload_says_digest_name_time_and_set_and_others_may_say_more() -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    signed = read_payload(payload_of(DIGEST, "registry.example/engine", at, OTHER_DIGEST))
    assert (signed.digest, signed.reference) == (DIGEST, "registry.example/engine")
    assert (signed.at, signed.evidence_set) == (at, OTHER_DIGEST)
    plain = json.loads(payload_of(DIGEST, "registry.example/engine"))
    assert plain["optional"] is None
    signed = read_payload(json.dumps(plain | {"optional": {"creator": "cosign"}}).encode())
    assert (signed.digest, signed.at, signed.evidence_set) == (DIGEST, None, None)


@pytest.mark.parametrize(
    "change",
    [
        {"critical": {}},
        {"optional": {"sm120.named_at": "yesterday"}},
        {"optional": {"sm120.evidence_set": "latest"}},
        {"optional": []},
        {"more": 1},
    ],
)
def test_a_payload_of_another_shape_is_refused(change: dict[str, Any]) -> None:
    body = json.loads(payload_of(DIGEST, "registry.example/engine"))
    with pytest.raises(RecordInvalid):
        read_payload(json.dumps(body | change).encode())


def test_an_attestation_is_attached_as_it_was_signed() -> None:
    envelope = enclose(
        make_statement("x", DIGEST, PROVENANCE, {}), [LocalSigner(make_private_key())]
    )
    layer = attestation_attachment(envelope)
    assert layer.annotations == {SIGNATURE_NOTE: "", "predicateType": PROVENANCE}
    assert read_envelope(layer.data, "it") == envelope
