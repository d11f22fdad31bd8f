"""What is stated of an image: its making, its parts, what its gates found; the same every time."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import quote

import pytest

from pipeline.artifacts.attest.envelope import Envelope
from pipeline.artifacts.attest.keys import LocalSigner
from pipeline.artifacts.attest.names import KINDS, TEST_RESULT
from pipeline.artifacts.attest.predicates import MODELS, check_predicate
from pipeline.artifacts.oci.record import TitledLayer
from pipeline.artifacts.store.store import open_store
from pipeline.core.errors import RecordInvalid, StoreDamaged
from pipeline.core.model import sha256_of
from pipeline.core.yaml_file import schema
from pipeline.evidence.statements.bill import Bill, bill_of, licences_of
from pipeline.evidence.statements.evidence_set import (
    evidence_folder,
    keep_set,
    kept_envelopes,
    read_set,
    readable,
    set_statement,
)
from pipeline.evidence.statements.image import (
    image_statements,
    keep_all,
    record_image,
    record_rebuild,
)
from pipeline.evidence.statements.inventory import package_parts, placed_layers
from pipeline.evidence.statements.licence import Licence
from pipeline.evidence.statements.provenance import image_provenance
from pipeline.evidence.statements.results import gate_statements
from pipeline.evidence.statements.sbom import cyclonedx, cyclonedx_bytes, spdx, spdx_bytes
from pipeline.images.assemble.image import Built
from pipeline.images.gate.evidence import Evidence, EvidenceRow, ImageGates
from tests.makers import (
    AMD64,
    build_in,
    make_deb,
    make_wheel,
    patch_files,
    root_image,
    wheel_image,
)
from tests.testbed.deb_file import Item
from tests.unit.verify.world import EDIT, WHEN, World, make_world

# of `sm120 image schema KIND`: whoever changes the form of a signed statement does it knowingly
SCHEMAS = {
    "bundle": "sha256:0f54fecc140ae81539f0d202b169b4809e23d3daa6bf03cfa0d600dfea3c162e",
    "rebuild": "sha256:e2f2f6303b9d3e880330c6185e7e61346b111e9f1e4e84dc3f7e6ad1c3d1c06b",
    "audit": "sha256:902379c480e356be333b460dcfa866455e1a036665933cbc487ba1ed3a7863aa",
    "kernel-table": "sha256:4d465247826cefa7cc7f2bb96cc39cb4a29bdddbfe88a749ea737d4ec1bc4441",
    "weights": "sha256:db8c5cf81285b98528692a0605f3192e40b7c810fc9bf22187f578900e47f829",
    "host-facts": "sha256:0ad6592829716461276eb3181566d79c591a5259ab33a35fc6660a6376489969",
    "benchmark-run": "sha256:e2cc51910af7d15123f4299d36d39261bb6fe3937d4697bf937060637a22f02f",
    "report": "sha256:d59e2a5ab183cbaea3022e444c3ea10e1bf028719169f7d0de1bc72c22e54916",
    "ungated": "sha256:4084bbb2bb47da7a43acabce347926f2c289dced4cd9b704b47465d39a5a7845",
    "evidence-set": "sha256:482959a6b15d7ce820eb2affa0a0b209b6b74799db428125f7caf03b8d84ef8f",
    "compiled-file": "sha256:6d58a201f68f9a30279929826623a0e5c5f648177ca9663e0e73a77b3ffbcf29",
}


@pytest.fixture
def bill(world: World) -> Bill:
    return bill_of(world.checkout, world.store, world.built)


def test_provenance_names_every_input_by_digest(world: World) -> None:
    predicate = world.statements["provenance"].predicate
    resources = predicate["buildDefinition"]["resolvedDependencies"]
    named = {x["name"]: x["digest"]["sha256"] for x in resources}
    pins = [p for plan in world.built.plan.chain() for p in plan.lock.pins]
    assert {p.file: p.sha256 for p in pins}.items() <= named.items()
    patch = world.checkout.folder("engine") / "patches" / "0001.patch"
    want = sha256_of(patch.read_bytes()).removeprefix("sha256:")
    assert named["images/engine/patches/0001.patch"] == want
    assert len(resources) == len(pins) + 3  # a patch, a file, the base's layer
    spec = predicate["buildDefinition"]["externalParameters"]["images"]["engine"]["spec"]
    assert spec["gates"] == ["smem"]
    assert spec["files"][0].keys() == {"from", "to", "mode"}  # as they are written by hand
    for part in package_parts(world.built):
        (entry,) = [x for x in resources if x["uri"] == part.purl]
        assert entry["annotations"] == {
            "image": part.image,
            "layer": part.layer.record.digest,
            "sizeBytes": part.pin.size_bytes,
        }
    (layer,) = [x for x in resources if ":layer:" in x["uri"]]
    title = quote(layer["name"], safe="")
    assert layer["uri"] == f"urn:sm120-pipeline:layer:root:{title}"


def test_intotos_own_definitions_accept_our_statements(world: World) -> None:
    pytest.importorskip("in_toto_attestation", reason="in-toto-attestation is not installed.")
    from google.protobuf import json_format
    from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
    from in_toto_attestation.predicates.test_result.v0.test_result_pb2 import TestResult
    from in_toto_attestation.v1.statement_pb2 import Statement

    for statement in world.statements.values():
        json_format.ParseDict(json.loads(statement.dump()), Statement())
    json_format.ParseDict(world.statements["provenance"].predicate, Provenance())
    gate = world.statements["gate-smem-sm_120"].predicate
    known = {k: v for k, v in gate.items() if not k.startswith("sm120_")}
    json_format.ParseDict(known, TestResult())
    with pytest.raises(json_format.ParseError):
        json_format.ParseDict({**known, "result": []}, TestResult())


def test_no_place_is_named_in_any_statement(world: World) -> None:
    standard = ("https://in-toto.io/", "https://slsa.dev/", "https://cyclonedx.org/bom")
    for statement in world.statements.values():
        text = statement.dump().decode()
        for known in (*standard, "https://spdx.dev/", "https://example.org/1"):
            text = text.replace(known, "")
        assert "http" not in text
        assert str(world.place) not in text


def test_another_machine_states_the_same(world: World, tmp_path: Path) -> None:
    other = make_world(tmp_path)
    for name, statement in world.statements.items():
        if name != "rebuild":  # which names the key of who made it
            assert other.statements[name].dump() == statement.dump()


def test_a_wheel_of_two_builds_is_in_its_layer(world: World) -> None:
    placed = placed_layers(world.built)
    assert [p.image for p in placed] == ["root", "engine", "engine", "engine"]
    assert [p.layer.title for p in placed][-2:] == ["engine files", "patches"]
    assert {p.pin.name for p in package_parts(world.built)} == {*("tool", "more", "pkg", "other")}


def with_layers(built: Built, layers: tuple[TitledLayer, ...]) -> Built:
    return replace(built, record=built.record.model_copy(update={"layers": layers}))


def test_a_layer_that_nothing_accounts_for_is_refused(world: World) -> None:
    more = with_layers(world.built, (*world.built.layers, world.built.layers[0]))
    with pytest.raises(StoreDamaged, match="nothing accounts for"):
        placed_layers(more)
    with pytest.raises(StoreDamaged, match="is not in the image"):
        placed_layers(with_layers(world.built, world.built.layers[1:]))


def test_licences_are_read_from_the_image_itself(world: World) -> None:
    licences = licences_of(world.store, package_parts(world.built))
    by_name = {purl.partition("@")[0]: licence for purl, licence in licences.items()}
    assert by_name["pkg:pypi/pkg"].expression == "MIT OR Apache-2.0"
    assert by_name["pkg:deb/debian/tool"].expression == "GPL-2.0-or-later AND MIT"
    assert by_name["pkg:deb/debian/more"] == by_name["pkg:deb/debian/tool"]  # behind a link
    assert by_name["pkg:pypi/other"].reason == "its METADATA names no licence"


def test_the_bills_list_every_part_with_hash_layer_and_licence(bill: Bill) -> None:
    parts = {c["name"]: c for c in cyclonedx(bill)["components"]}
    assert parts["pkg"]["licenses"] == [{"expression": "MIT OR Apache-2.0"}]
    assert parts["pkg"]["modified"] is True
    (patch,) = parts["pkg"]["pedigree"]["patches"]
    assert patch["resolves"][0]["id"].endswith("0001.patch")
    text = base64.b64decode(patch["diff"]["text"]["content"])
    assert sha256_of(text) == patch["resolves"][0]["name"] == bill.patches[0].digest
    notes = {p["name"]: p["value"] for p in parts["other"]["properties"]}
    assert notes["sm120:licence:source"] == "NOASSERTION: its METADATA names no licence"
    assert notes["sm120:layer"] in {x.layer.record.digest for x in bill.layers}
    assert "licenses" not in parts["other"]
    assert parts["/opt/serve.py"]["type"] == "file"
    packages = {p["name"]: p for p in spdx(bill)["packages"]}
    assert packages["tool"]["licenseDeclared"] == "GPL-2.0-or-later AND MIT"
    assert packages["other"]["licenseComments"].startswith("NOASSERTION: ")
    kinds = {r["relationshipType"] for r in spdx(bill)["relationships"]}
    assert kinds == {"DESCRIBES", "CONTAINS", "PATCH_FOR"}


def test_a_licence_that_is_only_a_name_stands_as_one(bill: Bill) -> None:
    first = replace(bill.parts[0], licence=Licence(name="Some words", reason="free text"))
    named = replace(bill, parts=(first, *bill.parts[1:]))
    assert cyclonedx(named)["components"][0]["licenses"] == [{"license": {"name": "Some words"}}]


def test_a_licence_by_reference_is_declared_in_SPDX(bill: Bill, tmp_path: Path) -> None:
    message = "MIT AND LicenseRef-NVIDIA-Proprietary"
    first = replace(bill.parts[0], licence=Licence(message, reason="METADATA License-Expression"))
    named = replace(bill, parts=(first, *bill.parts[1:]))
    (document,) = spdx(named)["hasExtractedLicensingInfos"]
    assert document["licenseId"] == "LicenseRef-NVIDIA-Proprietary"
    pytest.importorskip("spdx_tools", reason="spdx-tools is not installed.")
    assert spdx_problems(spdx_bytes(named), tmp_path) == []


def spdx_problems(data: bytes, folder: Path) -> list[Any]:
    """What SPDX's own tools say."""
    from spdx_tools.spdx.parser.parse_anything import parse_file
    from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

    path = folder / "it.spdx.json"
    path.write_bytes(data)
    return list(validate_full_spdx_document(parse_file(str(path))))


def test_bills_are_the_same_bytes_every_time(world: World, bill: Bill) -> None:
    again = bill_of(world.checkout, world.store, world.built)
    assert cyclonedx_bytes(bill) == cyclonedx_bytes(again)
    assert spdx_bytes(bill) == spdx_bytes(again)


def test_the_bill_is_valid_by_cyclonedxs_own_schema(bill: Bill) -> None:
    pytest.importorskip("cyclonedx", reason="cyclonedx-python-lib is not installed.")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(cyclonedx_bytes(bill).decode()) is None
    broken = {**cyclonedx(bill), "specVersion": 16}
    assert validator.validate_str(json.dumps(broken)) is not None


def test_the_signed_bill_is_valid_by_cyclonedxs_own_schema_too(world: World) -> None:
    pytest.importorskip("cyclonedx", reason="cyclonedx-python-lib is not installed.")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = json.dumps(world.statements["sbom-cyclonedx"].predicate)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None


def test_the_bill_is_valid_by_SPDXs_own_tools(bill: Bill, tmp_path: Path) -> None:
    pytest.importorskip("spdx_tools", reason="spdx-tools is not installed.")
    assert spdx_problems(spdx_bytes(bill), tmp_path) == []
    broken = {**spdx(bill), "documentNamespace": "no address"}
    assert spdx_problems(json.dumps(broken).encode(), tmp_path) != []


def outcome(verdict: Any, *rows: EvidenceRow, message: str = "") -> Evidence:
    return Evidence(
        gate="smem",
        arch="sm_120",
        verdict=verdict,
        message=message,
        inputs={},
        made_by={},
        rows=[*rows],
    )


def predicate_of(result: Evidence) -> dict[str, Any]:
    gates = ImageGates(
        image="engine", platform=AMD64, image_digest=f"sha256:{'0' * 64}", results=[result]
    )
    return gate_statements(gates)["smem-sm_120"].predicate


ROWS = {
    "passed": EvidenceRow(name="a", verdict="passed"),
    "accepted": EvidenceRow(name="b", verdict="accepted", message="a known one"),
    "failed": EvidenceRow(name="c", verdict="failed", message="needs 106496 bytes"),
    "unknown": EvidenceRow(name="d", verdict="unknown", message="died"),
}


@pytest.mark.parametrize(
    ("verdict", "result"),
    [("passed", "PASSED"), ("accepted", "WARNED"), ("failed", "FAILED"), ("unknown", "FAILED")],
)
def test_a_gates_verdict_is_a_test_result(verdict: str, result: str) -> None:
    predicate = predicate_of(outcome(verdict, ROWS["passed"], ROWS[verdict]))
    assert predicate["result"] == result
    assert (result == "PASSED") == (not predicate["failedTests"] and not predicate["warnedTests"])


def test_unknown_is_listed_with_failures_and_says_why() -> None:
    predicate = predicate_of(outcome("failed", *ROWS.values()))
    assert predicate["passedTests"] == ["a"]
    assert predicate["warnedTests"] == ["b"]
    assert predicate["failedTests"] == ["c", "d"]
    assert predicate["sm120_unknown"] == [{"test": "d", "verdict": "unknown", "why": "died"}]
    assert {"test": "c", "verdict": "failed", "why": "needs 106496 bytes"} in predicate["sm120_why"]


def test_a_gate_that_could_not_begin_is_unknown_and_says_why() -> None:
    predicate = predicate_of(outcome("unknown", message="no index answers"))
    assert predicate["failedTests"] == ["smem"]
    assert predicate["sm120_unknown"][0]["why"] == "no index answers"
    assert predicate_of(outcome("unknown"))["sm120_unknown"][0]["why"] == "no test was run"


def test_each_gate_and_card_has_its_statement(world: World) -> None:
    gates = ImageGates(
        image="engine",
        platform=AMD64,
        image_digest=world.built.digest,
        results=[outcome("passed", ROWS["passed"]), outcome("failed", ROWS["failed"])],
    )
    (statement,) = gate_statements(gates).values()
    assert statement.predicate_type == TEST_RESULT
    assert statement.is_about(world.built.digest)


def test_an_image_without_gate_results_has_no_gate_statement(world: World, tmp_path: Path) -> None:
    gates = world.store.image_folder("engine", AMD64) / "gates.json"
    kept_aside = gates.read_bytes()
    gates.unlink()
    try:
        statements = image_statements(world.checkout, world.store, world.built)
    finally:
        gates.write_bytes(kept_aside)
    assert set(statements) == {"provenance", "sbom-cyclonedx"}


def test_an_image_without_a_golden_digest_says_so(world: World, tmp_path: Path) -> None:
    checkout = world.checkout_copy(tmp_path)
    checkout.golden_path.unlink()
    predicate = image_provenance(checkout, world.built).predicate
    (golden,) = [x for x in predicate["runDetails"]["byproducts"] if x["name"] == "golden digest"]
    assert "digest" not in golden
    assert "no golden digest" in golden["annotations"]["unknown"]


def test_everything_is_kept_beside_the_image(world: World) -> None:
    signer = LocalSigner(world.key)
    args = (world.checkout, world.store, world.built, [signer])
    record_rebuild(world.store, world.built, signer, "", WHEN)
    first = record_image(*args, WHEN)
    names = [p.name for p in kept_envelopes(world.store, "engine", AMD64, world.built.digest)]
    assert {"provenance.dsse.json", "evidence-set.dsse.json"} <= set(names)
    assert f"rebuild-{signer.key_id[7:19]}.dsse.json" in names
    again = record_image(*args, WHEN)
    assert again == first
    assert {f"{name}.dsse.json" for name in again} < set(names)
    assert list(again)[-1] == "evidence-set"


def test_a_rebuild_that_differed_is_stated_too(world: World, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    signer = LocalSigner(world.key)
    envelope = record_rebuild(store, world.built, signer, "layer 'x': /a differs", WHEN)
    assert envelope.statement.predicate["identical"] is False
    assert envelope.statement.predicate["difference"] == "layer 'x': /a differs"


@pytest.mark.parametrize("kind", [k for k, uri in KINDS.items() if uri in MODELS])
def test_the_form_of_a_predicate_has_not_changed(kind: str) -> None:
    assert sha256_of(schema(MODELS[KINDS[kind]]).encode()) == SCHEMAS[kind]


UNKNOWN = {"unknown": "this machine has no card"}
BENCHMARK: dict[str, Any] = {
    **dict.fromkeys(("image", "weights", "recipe", "host_facts"), UNKNOWN),
    "client": sha256_of(b"client"),
    "workload": sha256_of(b"workload"),
    "outcome": "complete",
}


def test_a_field_is_there_or_says_why_not() -> None:
    check_predicate(KINDS["benchmark-run"], BENCHMARK)
    check_predicate("urn:of:others", {"anything": 1})
    with pytest.raises(RecordInvalid, match="anything"):
        check_predicate(KINDS["benchmark-run"], {**BENCHMARK, "anything": 1})


@pytest.mark.parametrize(
    "changes",
    [
        {"image": None},
        {"image": ""},
        {"image": {"unknown": ""}},
        {"image": {"unknown": "why", "digest": "x"}},
        {"image": "latest"},
        {"outcome": "fine"},
        {"client": UNKNOWN},
        {"fields": [1]},
        {"lines": "/cells/0/trials/0"},
        {"tokens_per_s": 5816},
    ],
)
def test_a_field_that_is_neither_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RecordInvalid, match="benchmark-run"):
        check_predicate(KINDS["benchmark-run"], {**BENCHMARK, **changes})


@pytest.mark.parametrize("field", BENCHMARK)
def test_no_field_may_be_left_out(field: str) -> None:
    less = {k: v for k, v in BENCHMARK.items() if k != field}
    with pytest.raises(RecordInvalid, match=field):
        check_predicate(KINDS["benchmark-run"], less)


def test_a_wheel_of_two_images_is_billed_as_patched_only_where_it_was(tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    wheel = make_wheel(mirror, "pkg", {EDIT.path: EDIT.before})
    below = wheel_image("below", [wheel])
    above = wheel_image("above", [wheel], base="below", patches="patches/series.yaml")
    above.files |= patch_files(EDIT)
    deb = make_deb(mirror, "tool", Item("./usr/bin/tool", b"#!"))
    checkout, store, built = build_in(tmp_path, root_image([deb]), below, above)
    bill = bill_of(checkout, store, built)
    patches = {(p.part.image, p.part.pin.name): len(p.patches) for p in bill.parts}
    assert patches == {("root", "tool"): 0, ("below", "pkg"): 0, ("above", "pkg"): 1}


def test_a_copy_of_a_statement_is_named_once_in_the_set(world: World) -> None:
    envelopes = [world.signed("provenance"), world.signed("rebuild"), world.signed("provenance")]
    listed = read_set(set_statement("engine", AMD64, world.built.digest, envelopes, None, WHEN))
    assert [c.title for c in listed.statements] == ["provenance", listed.statements[1].title]
    assert listed.statements[1].title.endswith(", identical")


def test_a_set_is_later_than_the_one_it_replaces_also_where_the_clock_went_back(
    world: World, tmp_path: Path
) -> None:
    store, about = open_store(tmp_path / "store"), ("engine", AMD64, world.built.digest)
    first = set_statement(*about, [world.signed("provenance")], None, WHEN)
    keep_set(store, tmp_path / "shelf", first, [])
    other = set_statement(*about, [world.signed("rebuild")], None, WHEN)
    kept_set = keep_set(store, tmp_path / "shelf", other, [LocalSigner(world.key)])
    assert first.recorded is not None
    assert kept_set.statement.recorded == first.recorded + timedelta(seconds=1)
    again = keep_set(store, tmp_path / "shelf", other, [LocalSigner(world.other_key)])
    assert again.payload == kept_set.payload
    assert len(again.signatures) == 2


def test_what_is_recorded_of_other_layers_than_the_image_has_is_refused(world: World) -> None:
    other = with_layers(world.built, world.built.layers[:-1])
    with pytest.raises(StoreDamaged, match="other layers than the manifest"):
        image_statements(world.checkout, world.store, other)


def test_two_stages_that_state_one_image_at_once_are_both_in_the_last_set(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_has_read, second_is_done = Event(), Event()

    def slowly(folder: Path) -> dict[str, Envelope]:
        envelopes = readable(folder)
        if not first_has_read.is_set():
            first_has_read.set()
            second_is_done.wait(0.5)
        return envelopes

    monkeypatch.setattr("pipeline.evidence.statements.image.readable", slowly)
    store = open_store(tmp_path)

    def leave(name: str) -> None:
        keep_all(store, world.built, {name: world.statements[name]}, [], WHEN)

    first = Thread(target=leave, args=["provenance"])
    first.start()
    first_has_read.wait(10)
    leave("gate-smem-sm_120")
    second_is_done.set()
    first.join()
    folder = evidence_folder(store, "engine", AMD64, world.built.digest)
    named = read_set(readable(folder)["evidence-set"].statement).statements
    assert len(named) == 2
