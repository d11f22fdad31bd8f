"""Libraries inside wheels, by the bills that wheels ship of them (PEP 770)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.store.store import Store
from pipeline.evidence.audit.packages import packages_of
from pipeline.evidence.statements.bill import bill_of
from pipeline.evidence.statements.sbom import cyclonedx, spdx
from pipeline.images.assemble.image import Built
from pipeline.images.spec.checkout import Checkout
from tests.makers import build_in, make_deb, make_wheel, root_image, wheel_image
from tests.testbed.deb_file import Item

CYCLONEDX = {
    "bomFormat": "CycloneDX",
    "specVersion": "1.6",
    "components": [
        {"type": "library", "name": "pkg", "purl": "pkg:pypi/pkg@1.0"},
        {
            "type": "library",
            "name": "libgfortran",
            "purl": "pkg:rpm/almalinux/libgfortran@8.5.0-22.el8",
            "components": [
                {"type": "library", "name": "libz", "purl": "pkg:deb/debian/zlib1g@1:1.2"}
            ],
        },
        {"type": "file", "name": "a file"},
        # as Pillow 13 has them
        {"type": "library", "name": "PIL._avif", "purl": "pkg:pypi/pkg@1.0#c-ext/PIL._avif"},
        {"type": "library", "name": "FreeType", "version": "2.14.3"},
    ],
}
SPDX = {
    "spdxVersion": "SPDX-2.3",
    "packages": [
        {
            "externalRefs": [
                {"referenceType": "purl", "referenceLocator": "pkg:cargo/serde@1.0.9"},
                {"referenceType": "cpe23Type", "referenceLocator": "cpe:2.3:a:x"},
            ]
        },
        {"name": "without references"},
    ],
}


def built_with(folder: Path, **files: bytes) -> tuple[Checkout, Store, Built]:
    parts = {"pkg/__init__.py": b"x = 1\n"}
    parts |= {f"pkg-1.0.dist-info/sboms/{name}": data for name, data in files.items()}
    deb = make_deb(folder / "mirror", "tool", Item("./usr/bin/tool", b"#!"))
    images = root_image([deb]), wheel_image("engine", [make_wheel(folder / "mirror", "pkg", parts)])
    return build_in(folder, *images)


def component(bill: dict[str, Any]) -> dict[str, Any]:
    return next(x for x in bill["components"] if x.get("name") == "pkg")


def test_what_a_wheel_carries_inside_is_billed_below_it(tmp_path: Path) -> None:
    files = {"auditwheel.cdx.json": json.dumps(CYCLONEDX), "rust.spdx.json": json.dumps(SPDX)}
    world = built_with(tmp_path, **{k: v.encode() for k, v in files.items()})
    bill = cyclonedx(bill_of(*world))
    inside = [x.get("purl") or x["name"] for x in component(bill)["components"]]
    # of the wheel itself nothing: it is the component
    assert inside == [
        "pkg:rpm/almalinux/libgfortran@8.5.0-22.el8",
        "pkg:deb/debian/zlib1g@1:1.2",
        "FreeType",
        "pkg:cargo/serde@1.0.9",
        "without references",
    ]
    titles = [x.title for x in packages_of(bill, "it") if x.via]
    assert titles == [
        "libgfortran 8.5.0-22.el8 in pkg",
        "zlib1g 1:1.2 in pkg",
        "FreeType 2.14.3 in pkg",
        "serde 1.0.9 in pkg",
        "without references in pkg",
    ]
    assert spdx(bill_of(*world))["spdxVersion"] == "SPDX-2.3"
    pytest.importorskip("cyclonedx", reason="cyclonedx-python-lib is not installed.")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bill)) is None


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a.json", b"{", "is not JSON"),
        ("a.json", b"[]", "is no JSON object"),
        ("a.json", b"{}", "neither CycloneDX nor SPDX"),
        ("a.json", b'{"bomFormat": "CycloneDX", "specVersion": "9"}', "is CycloneDX '9'"),
        (
            "a.json",
            b'{"bomFormat": "CycloneDX", "specVersion": "1.6", "components": [1]}',
            "no JSON",
        ),
        ("a.json", b'{"spdxVersion": "SPDX-2.3", "packages": [1]}', "a.json"),
        ("a.xml", b"<bom/>", "no JSON"),
    ],
)
def test_a_bill_that_cannot_be_read_is_named_and_stops_nothing(
    name: str, data: bytes, why: str, tmp_path: Path
) -> None:
    found = component(cyclonedx(bill_of(*built_with(tmp_path, **{name: data}))))
    assert "components" not in found
    (unread,) = [x["value"] for x in found["properties"] if x["name"] == "sm120:sbom:unread"]
    assert why in unread


def test_a_wheel_without_bills_is_billed_as_before(tmp_path: Path) -> None:
    found = component(cyclonedx(bill_of(*built_with(tmp_path))))
    assert "components" not in found
    assert not [x for x in found["properties"] if "sbom" in x["name"]]
