"""Gate files that images share, and what an image's own files make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import GateInvalid
from pipeline.images.gate.arch import read_arch_spec
from pipeline.images.gate.files import gate_files
from pipeline.images.gate.numerics import read_numeric_cases
from pipeline.images.gate.smem.cases import KernelCase, read_gates
from pipeline.images.spec.checkout import Checkout
from tests.unit.support import AMD64, ARM64

WHY = "because a test wants to see it"
OUT = {"tensor": {"shape": ["tokens"]}}
CASE: dict[str, Any] = {
    **{"name": "decode", "stands_for": ["a model"], "function": ["engine.new:decode"]},
    **{"dims": {"tokens": 4}, "arguments": {"o": OUT, "scale": 1.0}, "kernels": ["_fwd"]},
}
LIKE = {"name": "decode-more", "like": "decode", "dims": {"tokens": 8}}
ACCEPTED = {"kernel": "_fwd", "case": "decode", "most_bytes": 9, "reason": WHY}
ACCEPTED |= {"upstream": ["https://example.org/1"]}
NUMERICS = {"reference": "decode-attention", "outputs": ["o"]}
SHARED = {"engine": "engine", "why": WHY, "cases": [CASE, LIKE]}


def put(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    common = tmp_path / "images" / "common" / "gates" / "engines"
    put(common / "smem-decode.yaml", SHARED)
    put(common / "numerics.yaml", {"smem-decode": {"decode": NUMERICS, "decode-more": NUMERICS}})
    for image in ("older", "newer"):
        setup = {"package": "engine", "shared": "engines"}
        put(tmp_path / "images" / image / "gates" / "engine.yaml", setup)
    return Checkout(tmp_path)


def own(checkout: Checkout, **parts: Any) -> dict[str, KernelCase]:
    """The cases of an image that has a file of its own beside the shared one."""
    path = checkout.folder("older") / "gates" / "smem-decode.yaml"
    put(path, {"engine": "engine", "why": WHY, **parts})
    return {case.name: case for case in read_gates(checkout, "older").cases()}


def test_images_that_share_files_have_the_same_cases(checkout: Checkout) -> None:
    older, newer = (read_gates(checkout, image) for image in ("older", "newer"))
    assert [case.name for case in older.cases()] == ["decode", "decode-more"]
    assert older.cases() == newer.cases()
    assert older.setup == newer.setup


def test_an_own_file_of_the_same_name_adds_cases(checkout: Checkout) -> None:
    cases = own(checkout, cases=[{"name": "extend", "like": "decode"}])
    assert list(cases) == ["decode", "decode-more", "extend"]
    assert [case.name for case in read_gates(checkout, "newer").cases()] == list(cases)[:2]


def test_a_case_of_a_shared_name_changes_only_what_it_says(checkout: Checkout) -> None:
    cases = own(checkout, cases=[{"name": "decode", "arguments": {"scale": 2.0}}])
    assert cases["decode"].arguments["scale"] == {"value": 2.0}
    assert cases["decode"].arguments["o"]["tensor"]["shape"] == [4]
    assert cases["decode"].kernels == ["_fwd"]
    # what is like the changed case is like it as it is in this image
    assert cases["decode-more"].arguments["scale"] == {"value": 2.0}
    assert cases["decode-more"].arguments["o"]["tensor"]["shape"] == [8]


def test_what_one_image_accepts_no_other_accepts(checkout: Checkout) -> None:
    own(checkout, accepted=[ACCEPTED])
    assert len(read_gates(checkout, "older").gates["smem-decode"].accepted) == 1
    assert read_gates(checkout, "newer").gates["smem-decode"].accepted == []


def test_numbers_are_shared_too_and_an_own_entry_takes_the_place_of_the_shared_one(
    checkout: Checkout,
) -> None:
    entry = {"smem-decode": {"decode": {**NUMERICS, "seed": 7}}}
    put(checkout.folder("older") / "gates" / "numerics.yaml", entry)

    def seeds(image: str) -> list[int]:
        cases = read_numeric_cases(checkout, image, read_gates(checkout, image))
        return [case.numerics.seed for case in cases if case.numerics]

    assert (seeds("older"), seeds("newer")) == ([7, 1], [1, 1])


@pytest.mark.parametrize(
    "parts",
    [
        {"cases": [{"name": "other", "dims": {"tokens": 1}}]},
        {"cases": [{"name": "other", "like": "none"}]},
        {"cases": [{"name": "decode", "kernels": []}]},
        {"cases": [{"name": "decode", "function": ["os:system"]}]},
        {"cases": [{"name": "decode"}, {"name": "decode"}]},
        {"accepted": [{**ACCEPTED, "case": "none"}]},
        {"engine": "other", "cases": []},
    ],
)
def test_an_own_file_is_held_to_the_same_rules(checkout: Checkout, parts: dict[str, Any]) -> None:
    with pytest.raises(GateInvalid):
        own(checkout, **parts)


@pytest.mark.parametrize("shared", ["none", "..", "../engines", "a/b", ""])
def test_a_shared_folder_must_be_there_and_below_images(checkout: Checkout, shared: str) -> None:
    path = checkout.folder("older") / "gates" / "engine.yaml"
    put(path, {"package": "engine", "shared": shared})
    with pytest.raises(GateInvalid, match="shared"):
        read_gates(checkout, "older")


def test_a_gate_without_a_case_is_an_error(checkout: Checkout) -> None:
    put(checkout.folder("older") / "gates" / "smem-x.yaml", {"engine": "engine", "why": WHY})
    with pytest.raises(GateInvalid, match=r"smem-x\.yaml: it has no cases"):
        read_gates(checkout, "older")


def test_evidence_names_every_file_that_decides_a_gate(checkout: Checkout) -> None:
    own(checkout, accepted=[ACCEPTED])
    put(checkout.folder("older") / "gates" / "arch.yaml", {})
    cases = {
        *("common/gates/engines/smem-decode.yaml", "gates/engine.yaml", "gates/smem-decode.yaml"),
    }
    numbers = {*cases, "common/gates/engines/numerics.yaml"}
    assert gate_files(checkout, "older", "smem").keys() == cases
    assert gate_files(checkout, "older", "numerics").keys() == numbers
    assert gate_files(checkout, "older", "patches").keys() == numbers
    assert gate_files(checkout, "older", "arch").keys() == {"gates/arch.yaml"}
    assert gate_files(checkout, "older", "unheard of") == {}
    assert all(path.is_file() for path in gate_files(checkout, "older", "patches").values())


def test_a_platform_may_have_its_own_file_about_objects(checkout: Checkout) -> None:
    gates, why = checkout.folder("older") / "gates", "needed by nobody who has such a card"
    put(gates / "arch.yaml", {"accepted": {"*/hopper.so": why}})
    put(gates / "arch.arm64.yaml", {"accepted": {"*/other.so": why}})
    assert gate_files(checkout, "older", "arch", ARM64).keys() == {"gates/arch.arm64.yaml"}
    assert gate_files(checkout, "older", "arch", AMD64).keys() == {"gates/arch.yaml"}
    assert gate_files(checkout, "newer", "arch", ARM64) == {}
    assert list(read_arch_spec(checkout, "older", ARM64).accepted) == ["*/other.so"]
    assert list(read_arch_spec(checkout, "older", AMD64).accepted) == ["*/hopper.so"]
    assert read_arch_spec(checkout, "newer", ARM64).accepted == {}
