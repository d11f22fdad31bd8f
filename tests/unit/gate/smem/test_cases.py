"""Case files: what they may say, and what they may not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.core.errors import GateInvalid
from pipeline.images.gate.parsers.cases import read_parser_gates
from pipeline.images.gate.patches import PARSERS, TEMPLATES
from pipeline.images.gate.smem.cases import Gates, read_gates
from pipeline.images.gate.templates.sources import read_template_gates
from pipeline.images.spec.checkout import Checkout

CASE: dict[str, Any] = {
    "name": "decode",
    "stands_for": ["a model"],
    "function": ["engine.ops:decode"],
    "arguments": {"q": {"tensor": {"shape": [4, "heads", "2*head"]}}, "scale": 0.5, "mask": None},
    "dims": {"heads": 8, "head": 64},
    "kernels": ["_fwd"],
}


def read(tmp_path: Path, case: dict[str, Any] | None = None, **changes: Any) -> Gates:
    folder = tmp_path / "images" / "tiny" / "gates"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "engine.yaml").write_text(yaml.safe_dump({"package": "engine"}))
    why = "because a test wants to see it"
    gate = {"engine": "engine", "why": why, "cases": [case or CASE], **changes}
    (folder / "smem-decode.yaml").write_text(yaml.safe_dump(gate, sort_keys=False))
    return read_gates(Checkout(tmp_path), "tiny")


def test_sizes_are_numbers_names_and_products(tmp_path: Path) -> None:
    (case,) = read(tmp_path).cases()
    assert case.arguments["q"]["tensor"]["shape"] == [4, 8, 128]
    assert case.arguments["scale"] == {"value": 0.5}
    assert case.arguments["mask"] == {"none": True}


def test_each_makes_one_case_for_every_combination(tmp_path: Path) -> None:
    spec = {**CASE, "each": {"heads": [8, 16], "head": [64, 128]}}
    names = [case.name for case in read(tmp_path, spec).cases()]
    assert names == ["decode-8-64", "decode-8-128", "decode-16-64", "decode-16-128"]


def test_other_gates_of_the_folder_are_not_read(tmp_path: Path) -> None:
    read(tmp_path)
    (tmp_path / "images" / "tiny" / "gates" / "arch.yaml").write_text("something: else\n")
    assert len(read_gates(Checkout(tmp_path), "tiny").cases()) == 1


def test_an_object_may_be_given_by_its_fields(tmp_path: Path) -> None:
    fields = {"k": {"tensor": {"shape": ["heads", 4]}}, "pages": {"size": "2*heads"}}
    (case,) = read(tmp_path, {**CASE, "arguments": {"pool": {"fields": fields}}}).cases()
    made = case.arguments["pool"]["fields"]
    assert (made["k"]["tensor"]["shape"], made["pages"]) == ([8, 4], {"value": 16})


def test_of_what_a_function_returns_one_item_may_be_asked_for(tmp_path: Path) -> None:
    call = {"function": "engine.ops:pack"}
    spec = {**CASE, "arguments": {"all": {"call": call}, "one": {"call": {**call, "item": 2}}}}
    (case,) = read(tmp_path, spec).cases()
    assert "item" not in case.arguments["all"]["call"]
    assert case.arguments["one"]["call"]["item"] == 2
    for item in (-1, 16, "first", 1.5):
        with pytest.raises(GateInvalid):
            read(tmp_path, {**CASE, "arguments": {"one": {"call": {**call, "item": item}}}})


@pytest.mark.parametrize(
    "function",
    [
        "os:system",
        "subprocess:run",
        "builtins:eval",
        "enginex.ops:decode",
        "engine.ops:__class__",
        "engine.__globals__:decode",
        "engine.ops",
        "engine/ops:decode",
        "engine.ops:decode()",
        "../engine.ops:decode",
    ],
)
def test_a_function_outside_the_engine_is_refused(tmp_path: Path, function: str) -> None:
    with pytest.raises(GateInvalid):
        read(tmp_path, {**CASE, "function": [function]})


def test_a_hidden_call_outside_the_engine_is_refused(tmp_path: Path) -> None:
    call = {"call": {"function": "os:system", "arguments": {"command": "reboot"}}}
    deep = {"deep": {"items": [call]}}
    for argument in (call, {"items": [call]}, {"mapping": deep}, {"fields": deep}):
        with pytest.raises(GateInvalid, match="is not a function of engine"):
            read(tmp_path, {**CASE, "arguments": {"q": argument}})


@pytest.mark.parametrize(
    "argument",
    [
        {"tensor": {"shape": [1], "dtype": "object"}},
        {"tensor": {"shape": [1], "data": "x"}},
        {"tensor": {"shape": ["__import__('os')"]}},
        {"tensor": {"shape": [1 << 40]}},
        {"tensor": {"shape": ["heads*heads*heads*heads", 1 << 20]}},
        {"tensor": {"shape": ["nobody"]}},
        {"pickle": "gASVIAAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAVlY2hvlIWUUpQu"},
        {"value": 1, "none": True},
        {"device": "meta"},
        {},
        "a word with spaces; rm -rf /",
        ["a", "list"],
    ],
)
def test_an_argument_is_one_plain_thing(tmp_path: Path, argument: Any) -> None:
    with pytest.raises(GateInvalid):
        read(tmp_path, {**CASE, "arguments": {"q": argument}})


@pytest.mark.parametrize(
    "changes",
    [
        {"kernels": []},
        {"stands_for": []},
        {"timeout_s": 0},
        {"timeout_s": 10**6},
        {"run": "rm -rf /"},
        {"arguments": {"q; import os": 1}},
    ],
)
def test_a_case_has_no_field_that_was_not_declared(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(GateInvalid):
        read(tmp_path, {**CASE, **changes})


@pytest.mark.parametrize(
    "accepted",
    [
        {"kernel": "_fwd", "most_bytes": 1, "reason": "short", "upstream": ["https://x.org/1"]},
        {"kernel": "_fwd", "most_bytes": 1, "reason": "long enough to be a reason", "upstream": []},
        {"kernel": "_fwd", "reason": "long enough to be a reason", "upstream": ["https://x.org"]},
        {
            "kernel": "_fwd",
            "most_bytes": 1,
            "reason": "long enough to be a reason",
            "upstream": ["javascript:alert(1)"],
        },
    ],
)
def test_what_is_accepted_has_a_size_a_reason_and_a_link(
    tmp_path: Path, accepted: dict[str, Any]
) -> None:
    with pytest.raises(GateInvalid):
        read(tmp_path, accepted=[accepted])


def test_a_case_like_another_says_only_what_differs(tmp_path: Path) -> None:
    narrow = {"name": "narrow", "like": "decode", "dims": {"head": 32}, "arguments": {"scale": 2.0}}
    third = {"name": "third", "like": "narrow", "kernels": ["_other"]}
    first, second, last = read(tmp_path, cases=[CASE, narrow, third]).cases()
    assert first.arguments["q"]["tensor"]["shape"] == [4, 8, 128]
    assert second.arguments["q"]["tensor"]["shape"] == [4, 8, 64]
    assert (second.arguments["scale"], second.kernels) == ({"value": 2.0}, ["_fwd"])
    assert last.arguments == second.arguments
    assert (last.name, last.kernels, last.stands_for) == ("third", ["_other"], ["a model"])


@pytest.mark.parametrize(
    "other",
    [
        {"name": "b", "like": "none"},
        {"name": "b", "like": "b"},
        {"name": "b", "like": "later"},
        {"name": "b", "like": "../decode"},
        {"name": "b", "like": "decode", "function": ["os:system"]},
        {"name": "b", "like": "decode", "arguments": {"q": {"call": {"function": "os:system"}}}},
        {"name": "b", "like": "decode", "kernels": []},
        {"name": "b", "arguments": {}},
        {"name": "decode", "like": "decode"},
    ],
)
def test_a_case_like_another_is_judged_as_a_whole(tmp_path: Path, other: dict[str, Any]) -> None:
    with pytest.raises(GateInvalid):
        read(tmp_path, cases=[CASE, other, {**CASE, "name": "later"}])


def test_two_gates_may_not_have_cases_of_one_name(tmp_path: Path) -> None:
    read(tmp_path)
    folder = tmp_path / "images" / "tiny" / "gates"
    (folder / "smem-again.yaml").write_text((folder / "smem-decode.yaml").read_text())
    with pytest.raises(GateInvalid, match="two cases are called decode"):
        read_gates(Checkout(tmp_path), "tiny")


def test_two_cases_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GateInvalid, match="two cases"):
        read(tmp_path, cases=[CASE, copy.deepcopy(CASE)])


def test_an_image_without_gates_says_so(tmp_path: Path) -> None:
    with pytest.raises(GateInvalid, match="has no gates"):
        read_gates(Checkout(tmp_path), "tiny")


def test_an_unknown_dimension_is_named(tmp_path: Path) -> None:
    unknown = {"q": {"tensor": {"shape": [4, "2*tokens"]}}}
    with pytest.raises(GateInvalid, match=r"decode.*: there is no dimension 'tokens'"):
        read(tmp_path, cases=[{**CASE, "arguments": unknown}]).cases()


def test_every_shipped_case_file_is_valid() -> None:
    checkout = Checkout(Path(__file__).resolve().parents[4])
    for image in ("sglang-k2", "sglang", "vllm"):
        gates = read_gates(checkout, image)
        assert len(gates.cases()) >= 30
        for spec in checkout.series(checkout.spec(image)).patches:
            if (family := (spec.gate or "").removeprefix(PARSERS)) != spec.gate:
                cases = read_parser_gates(checkout, image).cases
                assert family in {case.family for case in cases}, spec.file
                continue
            if (family := (spec.gate or "").removeprefix(TEMPLATES)) != spec.gate:
                assert family in read_template_gates(checkout, image).file.families, spec.file
                continue
            assert gates.cases(only=spec.gate), f"{spec.file} names no gate of {image}"


def accepting(case: object) -> dict[str, Any]:
    reason = "because a test wants to see it"
    upstream = ["https://example.org/1"]
    return {"kernel": "_fwd", "case": case, "most_bytes": 1, "reason": reason, "upstream": upstream}


@pytest.mark.parametrize("case", ["decode", ["decode"], None, "decode-8"])
def test_what_is_accepted_names_a_case_that_is_there(tmp_path: Path, case: object) -> None:
    spec = {**CASE, "each": {"heads": [8]}}
    assert read(tmp_path, spec, accepted=[accepting(case)]).gates["smem-decode"].accepted


@pytest.mark.parametrize("case", ["decod", "decode-16", ["decode", "prefill"], ["Decode"]])
def test_a_case_that_is_accepted_and_not_there_is_an_error(tmp_path: Path, case: object) -> None:
    spec = {**CASE, "each": {"heads": [8]}}
    with pytest.raises(GateInvalid, match="accepted: there is no case"):
        read(tmp_path, spec, accepted=[accepting(case)])


def routed(part: str, to: list[int]) -> dict[str, Any]:
    return {**CASE, "arguments": {**CASE["arguments"], "ids": {"route": {"part": part, "to": to}}}}


def test_a_route_is_handed_on_as_it_is(tmp_path: Path) -> None:
    (case,) = read(tmp_path, routed("pairs", [2, 0, 2])).cases()
    want = {"part": "pairs", "to": [2, 0, 2], "config": "config"}
    assert case.arguments["ids"] == {"route": want}


@pytest.mark.parametrize(("part", "to"), [("tokens", [1]), ("pairs", []), ("pairs", [-2])])
def test_a_route_to_nowhere_is_an_error(tmp_path: Path, part: str, to: list[int]) -> None:
    with pytest.raises(GateInvalid):
        read(tmp_path, routed(part, to))
