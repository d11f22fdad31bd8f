"""Which cases are run for their numbers: what the file may say, and what it may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.errors import GateInvalid
from pipeline.gate.numerics.cases import read_numeric_cases
from pipeline.gate.smem.cases import Case, read_gates
from pipeline.spec.checkout import Checkout
from tests.unit.gate.smem.test_cases import CASE, read

NUMERICS: dict[str, Any] = {
    "reference": "decode-attention",
    "outputs": ["o"],
    "dims": {"heads": 2},
    "arguments": {"index": {"tensor": {"shape": [9], "dtype": "int64", "fill": "permutation"}}},
}
NUMERIC: dict[str, Any] = {
    **CASE,
    "arguments": {
        **CASE["arguments"],
        "o": {"tensor": {"shape": [4, "heads"]}},
        "index": {"tensor": {"shape": [4], "dtype": "int64"}},
        "scales": {"tensor": {"shape": [1], "dtype": "float32", "fill": "ones"}},
    },
}


def numeric(tmp_path: Path, specs: Any, case: dict[str, Any] = NUMERIC) -> list[Case]:
    gates = read(tmp_path, case)
    path = tmp_path / "images" / "tiny" / "gates" / "numerics.yaml"
    path.write_text(yaml.safe_dump(specs, sort_keys=False))
    return read_numeric_cases(Checkout(tmp_path), "tiny", gates)


def test_an_image_may_have_no_numerics(tmp_path: Path) -> None:
    assert read_numeric_cases(Checkout(tmp_path), "tiny", read(tmp_path)) == []


def test_a_numeric_case_is_the_same_call_with_its_own_sizes_and_fills(tmp_path: Path) -> None:
    (small,) = numeric(tmp_path, {"smem-decode": {"decode": NUMERICS}})
    (plain,) = read(tmp_path, NUMERIC).cases()
    assert plain.numerics is None
    assert plain.arguments["q"]["tensor"] == {
        **{"shape": [4, 8, 128], "dtype": "bfloat16", "fill": "zeros", "step": 1, "values": None}
    }
    assert small.name == plain.name
    assert small.function == plain.function
    fills = {k: v["tensor"]["fill"] for k, v in small.arguments.items() if "tensor" in v}
    assert fills == {"q": "random", "o": "nan", "index": "permutation", "scales": "ones"}
    assert small.arguments["q"]["tensor"]["shape"] == [4, 2, 128]
    assert small.numerics is not None
    assert small.numerics.seed == 1


def test_numerics_may_name_fewer_combinations(tmp_path: Path) -> None:
    spec = {**NUMERIC, "each": {"head": [64, 128]}}
    some = {"smem-decode": {"decode": {**NUMERICS, "each": {"head": [64]}}}}
    assert [c.name for c in numeric(tmp_path, some, spec)] == ["decode-64"]
    every = {"smem-decode": {"decode": NUMERICS}}
    assert [c.name for c in numeric(tmp_path, every, spec)] == ["decode-64", "decode-128"]


@pytest.mark.parametrize(
    "change",
    [
        {"reference": "whatever-comes-out"},
        {"reference": "os:system"},
        {"outputs": []},
        {"outputs": ["nothing"]},
        {"arguments": {"nothing": 1}},
        {"dims": {"nothing": 1}},
        {"each": {"heads": [1]}},
        {"rounds_to": "anything"},
        {"seed": -1},
        {"timeout_s": 0},
        {"tolerance": 100},
        {"arguments": {"o": {"call": {"function": "os:system"}}}},
        {"arguments": {"o": {"tensor": {"shape": [4], "fill": "lucky"}}}},
        {"dims": {"heads": 1 << 40}},
    ],
)
def test_numerics_that_are_not_of_this_call_are_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    with pytest.raises(GateInvalid):
        numeric(tmp_path, {"smem-decode": {"decode": {**NUMERICS, **change}}})


@pytest.mark.parametrize(
    "specs", [[], {"smem-decode": []}, {"smem-decode": {"gone": NUMERICS}}, {"x": {"y": NUMERICS}}]
)
def test_numerics_of_cases_that_are_not_there_are_refused(tmp_path: Path, specs: Any) -> None:
    with pytest.raises(GateInvalid):
        numeric(tmp_path, specs)


@pytest.mark.parametrize("image", ["sglang-k2", "sglang", "vllm"])
def test_every_gate_that_proves_a_patch_also_has_its_numbers_compared(image: str) -> None:
    checkout = Checkout(Path(__file__).resolve().parents[4])
    result = read_numeric_cases(checkout, image, read_gates(checkout, image))
    patches = checkout.series(checkout.spec(image)).patches
    assert patches
    for patch in patches:
        assert patch.gate in {case.gate for case in result}, patch.file
