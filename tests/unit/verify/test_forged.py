"""A corpus of forged evidence: every piece is refused, each with words of its own."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from pipeline.artifacts.attest.envelope import Envelope, Signature, enclose
from pipeline.artifacts.attest.keys import LocalSigner
from pipeline.artifacts.attest.statement import Moment, make_statement
from pipeline.artifacts.attest.trust import Trust
from pipeline.core.model import canonical_json
from pipeline.evidence.verify.evidence import read_item
from pipeline.evidence.verify.verdict import Node, Verdict
from tests.unit.verify.world import World, sign_bytes, trust_in, trusted

Body = dict[str, Any]
Forge = Callable[[World], Envelope | bytes]


def dependencies(body: Body) -> list[Body]:
    resources: list[Body] = body["predicate"]["buildDefinition"]["resolvedDependencies"]
    return resources


def byproducts(body: Body) -> list[Body]:
    resources: list[Body] = body["predicate"]["runDetails"]["byproducts"]
    return resources


def external(body: Body) -> Body:
    parameters: Body = body["predicate"]["buildDefinition"]["externalParameters"]
    return parameters


def wheel(body: Body) -> Body:
    return next(x for x in dependencies(body) if x["uri"].startswith("pkg:pypi/pkg"))


def layers(body: Body) -> list[Body]:
    return [x for x in byproducts(body) if ":layer:" in x["uri"]]


def lie(change: Callable[[Body], Any], name: str = "provenance") -> Forge:
    """The good key signs something untrue."""
    return lambda world: world.lie(name, lambda body: (change(body), None)[1])


def bare(change: Callable[[bytes], bytes], name: str = "provenance") -> Forge:
    """The envelope's own bytes are changed."""
    return lambda world: change(world.signed(name).dump())


def payload(change: Callable[[bytes], bytes]) -> Forge:
    """The statement's bytes are changed, and signed like that by the good key."""
    return lambda world: sign_bytes(change(world.statements["provenance"].dump()), world.key)


def rewritten(change: Callable[[Body], Any]) -> Forge:
    """The envelope's JSON is changed."""

    def forge(world: World) -> bytes:
        body = json.loads(world.signed("provenance").dump())
        change(body)
        return canonical_json(body)

    return forge


def swap_payload(world: World) -> Envelope:
    other = world.statements["sbom-spdx"]
    return replace(world.signed("provenance"), payload=other.dump(), statement=other)


def flipped_signature(world: World) -> Envelope:
    good = world.signed("provenance")
    sig = bytearray(good.signatures[0].sig)
    sig[-1] ^= 1
    return replace(good, signatures=(Signature(good.signatures[0].key_id, bytes(sig)),))


def stranger(world: World) -> Envelope:
    return world.signed("provenance", world.other_key)


def borrowed_name(world: World) -> Envelope:
    """Signed by a stranger under the good key's name."""
    forged = world.signed("provenance", world.other_key)
    name = LocalSigner(world.key).key_id
    return replace(forged, signatures=(Signature(name, forged.signatures[0].sig),))


def nameless_stranger(world: World) -> Envelope:
    forged = world.signed("provenance", world.other_key)
    return replace(forged, signatures=(Signature(None, forged.signatures[0].sig),))


def not_pae(world: World) -> Envelope:
    """A signature over the statement alone, without DSSE's frame."""
    good = world.signed("provenance")
    sig = LocalSigner(world.key).sign(good.payload)
    return replace(good, signatures=(Signature(good.signatures[0].key_id, sig),))


def twice(world: World) -> bytes:
    body = json.loads(world.signed("provenance").dump())
    return canonical_json({**body, "signatures": body["signatures"] * 2})


def from_tomorrow(world: World) -> Envelope:
    when = Moment(at="2026-06-02T00:00:00Z", invocation="urn:uuid:x")
    statement = world.statements["provenance"]
    again = make_statement(
        "engine", world.built.digest, statement.predicate_type, statement.predicate, when
    )
    return enclose(again, [LocalSigner(world.key)])


def other_subject(body: Body) -> None:
    body["subject"][0]["digest"]["sha256"] = "1" * 64


def extra_layer(body: Body) -> None:
    byproducts(body).append({**layers(body)[-1], "digest": {"sha256": "2" * 64}})


def one_layer_less(body: Body) -> None:
    byproducts(body).remove(layers(body)[-1])


def layers_turned(body: Body) -> None:
    listed = layers(body)
    rest = [x for x in byproducts(body) if x not in listed]
    body["predicate"]["runDetails"]["byproducts"] = [*rest, *reversed(listed)]


def other_base(body: Body) -> None:
    next(x for x in dependencies(body) if ":layer:" in x["uri"])["digest"]["sha256"] = "3" * 64


def claim_to_be_root(body: Body) -> None:
    external(body)["image"] = "root"


def hide_a_wheel(body: Body) -> None:
    dependencies(body).remove(wheel(body))


def cross_script(body: Body) -> None:
    body["subject"][0]["name"] = "engin\u0435"  # a Cyrillic letter that looks like e


BROKEN: dict[str, tuple[Forge, str]] = {
    # the envelope
    "empty file": (bare(lambda d: b""), "is not JSON (Expecting value at 0)"),
    "truncated": (bare(lambda d: d[: len(d) // 2]), "is not JSON (Unterminated string"),
    "bytes after the end": (bare(lambda d: d + b"{}"), "is not JSON (Extra data"),
    "no object": (bare(lambda d: b"[]"), "the envelope: Input should be a valid dictionary"),
    "not UTF-8": (bare(lambda d: d.replace(b"payload", b"p\xffyload", 1)), "is not UTF-8"),
    "byte order mark": (bare(lambda d: b"\xef\xbb\xbf" + d), "byte order mark"),
    "a key twice": (
        bare(lambda d: d.replace(b'{"payload":', b'{"payload":"","payload":', 1)),
        "the key 'payload' appears twice",
    ),
    "a key in disguise": (
        bare(lambda d: d.replace(b'{"payload":', b'{"\\u0440ayload":"","payload":', 1)),
        "is not plain ASCII",
    ),
    "deep nesting": (bare(lambda d: b"[" * 100_000), "levels deep"),
    "a field more": (rewritten(lambda b: b.update(more=1)), "more: Extra inputs"),
    "no payload": (rewritten(lambda b: b.pop("payload")), "payload: Field required"),
    "other payload type": (
        rewritten(lambda b: b.update(payloadType="text/plain")),
        "payloadType: Input should be 'application/vnd.in-toto+json'",
    ),
    "base64 of another alphabet": (
        rewritten(lambda b: b.update(payload="-_-_")),
        "payload: is not base64",
    ),
    "base64 with loose bits": (
        rewritten(lambda b: b.update(payload="QR==")),
        "payload: is not base64 in its canonical form",
    ),
    "base64 with a line end": (
        rewritten(lambda b: b["signatures"][0].update(sig="QUJD\nREVG")),
        "signature: is not base64",
    ),
    "an odd key name": (
        rewritten(lambda b: b["signatures"][0].update(keyid="../../key")),
        "signatures.0.keyid",
    ),
    "too many signatures": (
        rewritten(lambda b: b.update(signatures=b["signatures"] * 17)),
        "at most 16 items",
    ),
    "one key twice": (twice, "one key signed twice"),
    # the signature
    "signature of other bytes": (swap_payload, "is not over these bytes"),
    "flipped bit": (flipped_signature, "is not over these bytes"),
    "signature without the frame": (not_pae, "is not over these bytes"),
    "an unknown key": (stranger, "a key that the trust file does not know"),
    "an unknown key under a good name": (borrowed_name, "is not over these bytes"),
    "an unknown key without a name": (nameless_stranger, "no key of the trust file made"),
    "made tomorrow": (from_tomorrow, "which is in the future"),
    # the statement
    "statement of another kind": (
        payload(lambda d: d.replace(b"Statement/v1", b"Statement/v0.1")),
        "statement: _type: Input should be",
    ),
    "statement with a key twice": (
        payload(lambda d: d.replace(b'"name":"engine"', b'"name":"x","name":"engine"', 1)),
        "the key 'name' appears twice",
    ),
    "statement with NaN": (
        payload(lambda d: d.replace(b'"format":1', b'"format":NaN', 1)),
        "NaN is not a number",
    ),
    "statement with infinity": (
        payload(lambda d: d.replace(b'"format":1', b'"format":1e999', 1)),
        "1e999 is too large a number",
    ),
    "statement with a huge number": (
        payload(lambda d: d.replace(b'"format":1', b'"format":' + b"9" * 5000, 1)),
        "99999999999999999999 is too large a number",
    ),
    "hidden character": (
        payload(lambda d: d.replace(b"a small engine", b"a small\\u202eengine", 1)),
        "contains the invisible character U+202E",
    ),
    "lone surrogate": (
        payload(lambda d: d.replace(b"a small engine", b"a small\\ud800engine", 1)),
        "holds U+D800, which is half a character",
    ),
    "not in normal form": (
        payload(lambda d: d.replace(b"a small engine", b"a small e\\u0301ngine", 1)),
        "is not in Unicode normal form C",
    ),
    "look-alike name": (lie(cross_script), "subject.0.name: String should match"),
    "no subject": (lie(lambda b: b.update(subject=[])), "subject: List should have at least 1"),
    "subject without sha256": (
        lie(lambda b: b["subject"][0].update(digest={"sha1": "a" * 40})),
        "subject.0.digest.sha256: Field required",
    ),
    "subject with a second hash": (
        lie(lambda b: b["subject"][0]["digest"].update(md5="a" * 32)),
        "subject.0.digest.md5: Extra inputs",
    ),
    "digest in capitals": (
        lie(lambda b: b["subject"][0]["digest"].update(sha256="A" * 64)),
        "subject.0.digest.sha256: String should match",
    ),
    "a time that is none": (
        lie(lambda b: b["predicate"]["runDetails"]["metadata"].update(finishedOn="yesterday")),
        "'yesterday': is not a time",
    ),
    "a time in the wrong place": (
        lie(lambda b: b["predicate"].update(runDetails="now")),
        "metadata: its parent is not a JSON object",
    ),
    # the subject
    "swapped statement": (lie(other_subject), "is about engine sha256:1111"),
    # the predicate
    "a kind nobody is trusted for": (
        lie(lambda b: b.update(predicateType="urn:example:anything")),
        "is not trusted for urn:example:anything",
    ),
    "an old format of provenance": (
        lie(lambda b: b.update(predicateType="https://slsa.dev/provenance/v0.2")),
        "is not trusted for https://slsa.dev/provenance/v0.2",
    ),
    "provenance under another type": (
        lie(lambda b: b.update(predicateType="urn:sm120-pipeline:predicate:host-facts:v1")),
        "host-facts:v1: host: Field required",
    ),
    "other build type": (
        lie(lambda b: b["predicate"]["buildDefinition"].update(buildType="urn:x")),
        "urn:x: is not a build type of ours",
    ),
    "a field more in provenance": (
        lie(lambda b: b["predicate"].update(slsaLevel=3)),
        "provenance: slsaLevel: Extra inputs",
    ),
    "no materials": (
        lie(lambda b: dependencies(b).clear()),
        "buildDefinition.resolvedDependencies: List should have at least 1",
    ),
    "a material without digest": (
        lie(lambda b: wheel(b).pop("digest")),
        "has no digest",
    ),
    "a material of no kind": (
        lie(lambda b: wheel(b).update(uri="urn:x:y")),
        "urn:x:y: is not a known kind of material",
    ),
    "a material twice": (
        lie(lambda b: dependencies(b).append({**wheel(b), "digest": {"sha256": "4" * 64}})),
        "whl: is listed twice",
    ),
    "another image's spec": (
        lie(lambda b: external(b).update(image="root2")),
        "names an image without its spec",
    ),
    "a lock of a strange image": (
        lie(lambda b: byproducts(b)[0].update(uri="urn:sm120-pipeline:lock:..:x")),
        "names an image without its spec",
    ),
    # the materials
    "extra layer in the record": (lie(extra_layer), "is recorded, but missing from the image"),
    "extra layer in the image": (lie(one_layer_less), "is in the image, but not in its provenance"),
    "layers in another order": (lie(layers_turned), "recorded in another order"),
    "the record of another image of the same bytes": (
        lie(claim_to_be_root),
        "org.opencontainers.image.title is engine, but root was recorded",
    ),
    "another lock than the manifest's": (
        lie(lambda b: byproducts(b)[1]["digest"].update(sha256="a" * 64)),
        "but sha256:aaaa",
    ),
    "another format than the manifest's": (
        lie(lambda b: b["predicate"]["buildDefinition"]["internalParameters"].update(format=9)),
        "sm120.format is 1, but 9 was recorded",
    ),
    "other diffID": (
        lie(lambda b: layers(b)[0]["annotations"].update(diffId="sha256:" + "5" * 64)),
        "their diffIDs are not those",
    ),
    "other base": (lie(other_base), "the base layer '2 Debian packages' is not in it"),
    "a wheel swapped": (
        lie(lambda b: wheel(b)["digest"].update(sha256="6" * 64)),
        "is not in the lock that the provenance names",
    ),
    "a wheel left out": (lie(hide_a_wheel), "is locked, but missing from the provenance"),
    "a wheel under another name": (
        lie(lambda b: wheel(b).update(uri="pkg:pypi/evil@1.0")),
        "is recorded as pkg:pypi/evil@1.0, but locked as pkg:pypi/pkg@1.0",
    ),
    "a wheel of another size": (
        lie(lambda b: wheel(b)["annotations"].update(sizeBytes=1)),
        "is recorded as 1, but locked as",
    ),
    "a wheel in another file": (
        lie(lambda b: wheel(b).update(name="evil.whl")),
        "is recorded as evil.whl, but locked as pkg-1.0-py3-none-any.whl",
    ),
    "a strange builder": (
        lie(lambda b: b["predicate"]["runDetails"]["builder"].update(id="urn:hosted")),
        "urn:hosted: is not a builder of ours",
    ),
    "a wheel in no layer": (
        lie(lambda b: wheel(b)["annotations"].update(layer="sha256:" + "7" * 64)),
        "is in a layer that this image does not have",
    ),
    "a wheel of nobody": (
        lie(lambda b: wheel(b)["annotations"].update(image="nobody")),
        "belongs to nobody, which has no lock in the provenance",
    ),
    "a lock left out": (
        lie(lambda b: byproducts(b).pop(0)),
        "the provenance names no lock for it",
    ),
    "a file outside": (
        lie(
            lambda b: next(x for x in dependencies(b) if ":checkout:" in x["uri"]).update(
                uri="urn:sm120-pipeline:checkout:images/../../../etc/passwd"
            )
        ),
        "its path leads out of the checkout",
    ),
}


def forged(
    world: World, forge: Forge, name: str = "provenance", trust: Trust | None = None
) -> Node:
    """The verdict on the good evidence with one forged piece among it."""
    made = forge(world)
    data = made if isinstance(made, bytes) else made.dump()
    items = [
        read_item(key, data if key == name else good.dump())
        for key, good in world.envelopes().items()
    ]
    return world.walk(items, trust).node


@pytest.mark.parametrize("name", BROKEN)
def test_forged_provenance_is_refused(world: World, name: str) -> None:
    forge, message = BROKEN[name]
    node = forged(world, forge)
    assert node.verdict is Verdict.BROKEN
    assert message in node.culprit().message


OTHERS: dict[str, tuple[str, Forge, str]] = {
    "a bill with a package more": (
        "sbom-cyclonedx",
        lie(
            lambda b: b["predicate"]["components"].append(
                {**b["predicate"]["components"][0], "purl": "pkg:pypi/evil@1", "type": "framework"}
            ),
            "sbom-cyclonedx",
        ),
        "lists pkg:pypi/evil@1, which is not in the provenance",
    ),
    "a bill with a package less": (
        "sbom-cyclonedx",
        lie(lambda b: b["predicate"]["components"].pop(0), "sbom-cyclonedx"),
        "leaves out pkg:deb/debian/more",
    ),
    "a bill with another hash": (
        "sbom-spdx",
        lie(
            lambda b: next(p for p in b["predicate"]["packages"] if p["name"] == "pkg")[
                "checksums"
            ][0].update(checksumValue="8" * 64),
            "sbom-spdx",
        ),
        "lists pkg:pypi/pkg@1.0",
    ),
    "a bill of an old format": (
        "sbom-cyclonedx",
        lie(lambda b: b["predicate"].update(specVersion="1.2"), "sbom-cyclonedx"),
        "CycloneDX '1.2', not 1.6",
    ),
    "an SPDX bill of an old format": (
        "sbom-spdx",
        lie(lambda b: b["predicate"].update(spdxVersion="SPDX-2.1"), "sbom-spdx"),
        "'SPDX-2.1', not SPDX-2.3",
    ),
    "a bill that is none": (
        "sbom-cyclonedx",
        lie(lambda b: b["predicate"].update(components=1), "sbom-cyclonedx"),
        "is not in the format it claims",
    ),
    "a bill without hashes": (
        "sbom-cyclonedx",
        lie(lambda b: b["predicate"]["components"][0].update(hashes=[]), "sbom-cyclonedx"),
        "is not in the format it claims (KeyError('SHA-256'))",
    ),
    "a bill with a list for a name": (
        "sbom-cyclonedx",
        lie(lambda b: b["predicate"]["components"][0].update(purl=[]), "sbom-cyclonedx"),
        "is not in the format it claims (TypeError",
    ),
    "a bill with a number for a name": (
        "sbom-spdx",
        lie(
            lambda b: next(p for p in b["predicate"]["packages"] if p["name"] == "pkg")[
                "externalRefs"
            ][0].update(referenceLocator=1),
            "sbom-spdx",
        ),
        "lists a package by 1, which is not a name",
    ),
    "a gate that failed": (
        "gate-smem-sm_120",
        lie(
            lambda b: b["predicate"].update(
                result="FAILED", failedTests=["case-9"], sm120_verdict="failed"
            ),
            "gate-smem-sm_120",
        ),
        "failed: case-9",
    ),
    "a gate that says passed over failures": (
        "gate-smem-sm_120",
        lie(lambda b: b["predicate"].update(failedTests=["case-9"]), "gate-smem-sm_120"),
        "the verdict is passed, but its tests amount to failed",
    ),
    "a gate that says passed over unknowns": (
        "gate-smem-sm_120",
        lie(
            lambda b: b["predicate"].update(
                sm120_unknown=[{"test": "case-9", "verdict": "unknown", "why": "died"}]
            ),
            "gate-smem-sm_120",
        ),
        "the verdict is passed, but its tests amount to unknown",
    ),
    "a gate that passed what it warned of": (
        "gate-smem-sm_120",
        lie(lambda b: b["predicate"].update(warnedTests=["case-9"]), "gate-smem-sm_120"),
        "the verdict is passed, but its tests amount to accepted",
    ),
    "a gate with a result of its own": (
        "gate-smem-sm_120",
        lie(lambda b: b["predicate"].update(result="SKIPPED"), "gate-smem-sm_120"),
        "test result: result: Input should be",
    ),
    "a rebuild that differed": (
        "rebuild",
        lie(
            lambda b: b["predicate"].update(identical=False, difference="layer 1"),
            "rebuild",
        ),
        "gave a different digest",
    ),
    "a rebuild by somebody else": (
        "rebuild",
        lie(lambda b: b["predicate"].update(rebuilt_by="sha256:" + "9" * 64), "rebuild"),
        "which did not sign it",
    ),
    "a rebuild with a difference": (
        "rebuild",
        lie(lambda b: b["predicate"].update(difference="a small one"), "rebuild"),
        "claims to be identical, but names a difference",
    ),
    "a rebuild of other inputs": (
        "rebuild",
        lie(lambda b: b["predicate"].update(inputs="sha256:" + "9" * 64), "rebuild"),
        "was of other inputs than the manifest names",
    ),
    "a gate that ran no test": (
        "gate-smem-sm_120",
        lie(lambda b: b["predicate"].update(passedTests=[]), "gate-smem-sm_120"),
        "the verdict is passed, but its tests amount to unknown",
    ),
    "a rebuild that claims a level": (
        "rebuild",
        lie(lambda b: b["predicate"].update(claims="SLSA Build L3"), "rebuild"),
        "rebuild:v1: claims: Input should be",
    ),
    "a rebuild with a number for a truth": (
        "rebuild",
        lie(lambda b: b["predicate"].update(identical=1), "rebuild"),
        "rebuild:v1: identical: Input should be a valid boolean",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_forged_evidence_is_refused(world: World, name: str) -> None:
    kind, forge, message = OTHERS[name]
    node = forged(world, forge, kind)
    assert node.verdict is Verdict.BROKEN
    assert message in node.culprit().message


YEAR: dict[str, Any] = {
    "not_before": datetime(2025, 1, 1, tzinfo=UTC),
    "until": datetime(2026, 1, 1, tzinfo=UTC),
}
STOLEN = {"since": datetime(2026, 6, 1, tzinfo=UTC), "reason": "stolen in May", "compromised": True}
RETIRED = {"since": datetime(2026, 5, 1, tzinfo=UTC), "reason": "replaced", "compromised": False}
KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "expired": (YEAR, "made after the key builder expired (2026-01-01)"),
    "not yet": ({"not_before": datetime(2026, 7, 1, tzinfo=UTC)}, "not trusted before 2026-07-01"),
    "stolen": ({"revoked": STOLEN}, "is revoked: stolen in May"),
    "used after it was replaced": ({"revoked": RETIRED}, "is revoked: replaced"),
    "for other kinds": ({"for": ["host-facts"]}, "is not trusted for provenance"),
}


@pytest.mark.parametrize("name", KEYS)
def test_a_good_signature_by_a_key_that_is_not_believed_is_refused(world: World, name: str) -> None:
    changes, message = KEYS[name]
    node = world.walk(trust=trust_in(trusted(world.key, **changes))).node
    assert node.verdict is Verdict.BROKEN
    assert message in node.culprit().message


def test_a_statement_without_a_time_is_judged_by_the_present(world: World) -> None:
    def change(body: Body) -> None:
        del body["predicate"]["runDetails"]["metadata"]

    good = {name: e for name, e in world.envelopes().items() if name != "evidence-set"}
    envelopes = {**good, "provenance": world.lie("provenance", change)}
    assert world.walk(envelopes).node.verdict is Verdict.VALID
    node = world.walk(envelopes, trust_in(trusted(world.key, **YEAR))).node
    assert node.verdict is Verdict.BROKEN


def test_a_gate_that_could_not_judge_leaves_the_chain_incomplete(world: World) -> None:
    def change(body: Body) -> None:
        unknown = [{"test": "case-9", "verdict": "unknown", "why": "timed out"}]
        body["predicate"] |= {"sm120_unknown": unknown, "failedTests": ["case-9"]}
        body["predicate"] |= {"result": "FAILED", "sm120_verdict": "unknown"}

    node = world.judge(gate_smem_sm_120=world.lie("gate-smem-sm_120", change))
    assert node.verdict is Verdict.INCOMPLETE
    assert node.culprit().message == "unknown: case-9: timed out"


def test_evidence_of_an_image_says_nothing_of_a_file(world: World) -> None:
    artifact = replace(world.artifact, layers=None, diff_ids=())
    node = world.walk(artifact=artifact).node
    assert node.verdict is Verdict.BROKEN
    assert "this is a file" in node.culprit().message


def test_refusals_can_be_told_apart(world: World) -> None:
    """Only ways of signing badly that nobody can tell apart share their words."""
    messages = [message for _, message in BROKEN.values()] + [
        message for _, _, message in OTHERS.values()
    ]
    shared = {message for message in messages if messages.count(message) > 1}
    assert shared == {
        "is not over these bytes",
        "names an image without its spec",
        "the verdict is passed, but its tests amount to unknown",
    }


def test_the_corpus_holds_many_more_lies_than_truths() -> None:
    assert len(BROKEN) + len(OTHERS) + len(KEYS) >= 70


def test_base64_of_the_payload_is_the_only_spelling(world: World) -> None:
    """The same payload, spelled with line ends as MIME does, is not taken."""
    body = json.loads(world.signed("provenance").dump())
    text = base64.encodebytes(base64.b64decode(body["payload"])).decode()
    item = read_item("x", canonical_json({**body, "payload": text}))
    assert item.envelope is None
