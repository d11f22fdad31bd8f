"""What is stated of an image on a foreign base: its digest, its layers, and nothing of the rest."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest

from pipeline.evidence.statements.bill import Bill, bill_of
from pipeline.evidence.statements.sbom import cyclonedx, cyclonedx_bytes, spdx, spdx_bytes
from tests.testbed.foreign_image import REPOSITORY
from tests.testbed.tiny_registry import digest_of
from tests.unit.statements.test_recorded_image import spdx_problems
from tests.unit.verify.test_foreign_evidence import IMAGE, INDEX, make_foreign_world
from tests.unit.verify.world import World


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_foreign_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def bill(foreign: World) -> Bill:
    return bill_of(foreign.checkout, foreign.store, foreign.built)


def test_provenance_names_the_base_and_its_layers(foreign: World) -> None:
    definition = foreign.statements["provenance"].predicate["buildDefinition"]
    resources = definition["resolvedDependencies"]
    base = resources[0]
    assert base["uri"] == f"pkg:oci/base@{quote(IMAGE.digest, safe='')}?arch=amd64"
    assert base["name"] == REPOSITORY
    assert base["digest"]["sha256"] == IMAGE.digest.removeprefix("sha256:")
    assert base["annotations"]["index"] == digest_of(INDEX)
    assert base["annotations"]["contents"].startswith("unknown")
    layers = [x["digest"]["sha256"] for x in resources if ":layer:mine:base%20layer" in x["uri"]]
    assert [f"sha256:{x}" for x in layers] == [digest_of(x.blob) for x in IMAGE.layers]


def test_the_bill_names_the_base_and_says_that_its_contents_are_unknown(bill: Bill) -> None:
    document = cyclonedx(bill)
    base = document["components"][0]
    assert (base["type"], base["name"]) == ("container", REPOSITORY)
    assert base["hashes"][0]["content"] == IMAGE.digest.removeprefix("sha256:")
    notes = {p["name"]: p["value"] for p in base["properties"]}
    assert notes["sm120:contents"].startswith("unknown")
    assert document["compositions"] == [
        {"aggregate": "incomplete", "assemblies": [bill.purl]},
        {"aggregate": "unknown", "assemblies": [base["bom-ref"]]},
    ]


def test_the_bills_are_valid_by_their_own_tools(bill: Bill, tmp_path: Path) -> None:
    # slow to import: the grammars of every URI are compiled
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(cyclonedx_bytes(bill).decode()) is None
    assert spdx_problems(spdx_bytes(bill), tmp_path) == []


def test_SPDX_says_that_the_image_descends_from_the_base_and_what_holds_what(bill: Bill) -> None:
    document = spdx(bill)
    base = next(p for p in document["packages"] if p["SPDXID"] == "SPDXRef-BaseImage")
    assert (base["name"], base["versionInfo"]) == (REPOSITORY, IMAGE.digest)
    assert base["comment"].startswith("unknown")
    related = {
        (r["spdxElementId"], r["relationshipType"], r["relatedSpdxElement"])
        for r in document["relationships"]
    }
    layers = [digest_of(x.blob).removeprefix("sha256:") for x in IMAGE.layers]
    assert ("SPDXRef-Image", "DESCENDANT_OF", "SPDXRef-BaseImage") in related
    for layer in layers:
        assert ("SPDXRef-BaseImage", "CONTAINS", f"SPDXRef-Layer-{layer}") in related
    (part,) = bill.parts
    wheel = f"SPDXRef-Wheel-pkg-1.0-{part.part.pin.sha256[:12]}"
    held_by = part.part.layer.record.digest.removeprefix("sha256:")
    assert held_by not in layers
    assert (f"SPDXRef-Layer-{held_by}", "CONTAINS", wheel) in related
    files = {f"SPDXRef-File-{f.path.replace('/', '-')}-{f.digest[7:19]}" for f in bill.files}
    assert {("SPDXRef-Image", "CONTAINS", name) for name in files} <= related
