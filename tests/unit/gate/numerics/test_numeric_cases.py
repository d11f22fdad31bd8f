"""Which cases are run for their numbers: what the file may say, and what it may not."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.core.errors import GateInvalid
from pipeline.images.gate.numerics import read_numeric_cases
from pipeline.images.gate.patches import PARSERS, TEMPLATES
from pipeline.images.gate.smem.cases import KernelCase, read_gates
from pipeline.images.spec.checkout import Checkout
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


def numeric(tmp_path: Path, specs: Any, case: dict[str, Any] = NUMERIC) -> list[KernelCase]:
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
    # parsers and templates compute nothing
    texts = (PARSERS, TEMPLATES)
    for patch in (each for each in patches if not (each.gate or "").startswith(texts)):
        assert patch.gate in {case.gate for case in result}, patch.file


MORE: dict[str, Any] = {"like": "decode", "arguments": {"sinks": {"tensor": {"shape": ["heads"]}}}}


def test_one_more_of_the_same_call_has_its_own_name_and_may_switch_arguments_on(
    tmp_path: Path,
) -> None:
    plain, more = numeric(tmp_path, {"smem-decode": {"decode": NUMERICS, "decode-sinks": MORE}})
    assert (more.name, more.base) == ("decode-sinks", "decode")
    assert more.arguments["sinks"]["tensor"]["fill"] == "random"
    assert {k: v for k, v in more.arguments.items() if k != "sinks"} == plain.arguments
    assert more.numerics == plain.numerics


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"decode-sinks": MORE}, "there is no entry 'decode' of a case"),
        (
            {"decode": NUMERICS, "a": MORE, "b": {"like": "a"}},
            "there is no entry 'a' of a case",
        ),
        ({"decode": {**MORE, "like": "decode"}}, "there is no entry 'decode' of a case"),
        ({"decode": {**NUMERICS, "outputs": []}}, "reference and outputs are missing"),
    ],
)
def test_one_more_of_a_call_that_is_not_there_is_refused(
    tmp_path: Path, specs: dict[str, Any], message: str
) -> None:
    with pytest.raises(GateInvalid, match=message):
        numeric(tmp_path, {"smem-decode": specs})


@pytest.mark.parametrize("image", ["sglang-k2", "sglang", "vllm", "vllm-b12x"])
def test_what_a_recipe_can_switch_on_is_switched_on_in_a_case(image: str) -> None:
    checkout = Checkout(Path(__file__).resolve().parents[4])
    cases = read_numeric_cases(checkout, image, read_gates(checkout, image))
    given = {name for case in cases for name, a in case.arguments.items() if a != {"none": True}}
    caps, bias = ("softcap", "B_bias") if image.startswith("vllm") else ("logit_cap", "bias")
    assert {"sinks", caps, bias, "B_zp"} <= given
    away = [
        a for c in cases for a in c.arguments.values() if -1 in a.get("route", {}).get("to", [])
    ]
    assert away, "no expert is another rank's"
    # the last split of a decode is filled by one sequence at least
    for case in cases:
        if "num_kv_splits" in case.arguments and "kv_indptr" in case.arguments:
            ends = case.arguments["kv_indptr"]["tensor"]["values"]
            splits = case.arguments["num_kv_splits"]["tensor"]["values"]
            most = case.arguments["max_kv_splits"]["value"]
            lengths = [b - a for a, b in itertools.pairwise(ends)]
            share = [math.ceil(n / s / 32) * 32 for n, s in zip(lengths, splits, strict=True)]
            assert max(math.ceil(n / s) for n, s in zip(lengths, share, strict=True)) == most, (
                case.name
            )
