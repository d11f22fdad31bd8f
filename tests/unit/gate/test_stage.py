"""Gates as a stage of a build: whatever they find, the image and their results are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.images.spec.checkout import Checkout
from tests import makers
from tests.testbed.deb_file import Item
from tests.unit.binary.arch_files import DATA
from tests.unit.support import Command, Ended

WHY = "an attention kernel for Hopper; nothing calls it on this card"


pytestmark = pytest.mark.usefixtures("no_slow_helpers")


SPARK: dict[str, Any] = {
    "cuda": {"from": ["engine"], "architectures": ["sm_120"]},
    "overrides": {makers.AMD64: {"cuda": {"architectures": ["sm_121"]}}},
}


def make(
    root: Path, gates: list[str], *names: str, more: dict[str, Any] | None = None, **files: str
) -> Checkout:
    """A checkout with one engine of compiled objects that asks for gates."""
    parts: dict[str, bytes | makers.Part] = {
        f"engine/{name}": (DATA / name).read_bytes() for name in names
    }
    wheel = makers.make_wheel(root / "mirror", "engine", parts)
    deb = makers.make_deb(root / "mirror", "tool", Item("./usr/bin/tool", b"#!/bin/sh\n"))
    image = makers.wheel_image("engine", [wheel], gates=gates, **(more or {}))
    image.files.update({f"gates/{name}.yaml": text for name, text in files.items()})
    return makers.make_checkout(root, makers.root_image([deb]), image)


def build(sm120: Command, *args: str) -> Ended:
    mirror = sm120.cwd / "mirror"
    message = ["build", "engine", "--accept", "--gate", "--offline", "--mirror", str(mirror), *args]
    return sm120("--store", sm120.cwd / "store", *message)


def record(root: Path) -> Any:
    return json.loads((root / "store/images/engine/linux-amd64/gates.json").read_text())


def test_an_image_that_passes_has_its_results_in_the_answer_and_beside_it(
    sm120: Command, tmp_path: Path
) -> None:
    make(tmp_path, ["arch"], "mixed.so", "plain.so")
    (built,) = build(sm120, "--json").json
    assert built["verdict"] == "passed"
    assert built["gates"] == record(tmp_path)
    assert record(tmp_path)["image_digest"] == built["digest"]
    (result,) = record(tmp_path)["results"]
    assert (result["gate"], result["arch"]) == ("arch", "sm_120")
    assert result["made_by"].keys() == {"sm120-pipeline", "reader"}
    assert [row["verdict"] for row in result["rows"]] == ["passed"]


def test_an_image_that_fails_is_kept_with_what_was_found(sm120: Command, tmp_path: Path) -> None:
    make(tmp_path, ["arch"], "hopper.so")
    ended = build(sm120)
    assert ended.error == "NoKernelImage"
    assert "hopper.so: no kernel image" in ended.err
    assert "arch" in ended.out  # the table is shown all the same
    assert record(tmp_path)["results"][0]["verdict"] == "failed"
    assert sm120("--store", tmp_path / "store", "image", "list", "--json").json[0]["built"]


def test_what_is_accepted_is_named_in_the_record_with_the_file_that_accepts_it(
    sm120: Command, tmp_path: Path
) -> None:
    text = json.dumps({"accepted": {"*/engine/hopper.so": WHY}})
    make(tmp_path, ["arch"], "hopper.so", arch=text)
    (built,) = build(sm120, "--json").json
    (result,) = built["gates"]["results"]
    assert result["verdict"] == "accepted"
    assert result["inputs"].keys() == {"gates/arch.yaml"}
    assert result["rows"][0]["facts"]["accepted_by"] == "*/engine/hopper.so"


def test_a_gate_that_cannot_begin_is_recorded_as_unknown_and_the_next_one_still_runs(
    sm120: Command, tmp_path: Path
) -> None:
    make(tmp_path, ["smem", "arch"], "mixed.so")
    ended = build(sm120)
    assert ended.error == "GateInvalid"  # it has no cases
    result = {e["gate"]: e for e in record(tmp_path)["results"]}
    assert result["smem"]["verdict"] == result["patches"]["verdict"] == "unknown"
    assert "has no gates" in result["smem"]["message"]
    assert result["arch"]["verdict"] == "passed"


def test_the_card_of_an_override_is_the_one_that_is_judged(sm120: Command, tmp_path: Path) -> None:
    make(tmp_path, ["smem", "arch"], "mixed.so", more=SPARK)
    build(sm120)
    assert {(e["gate"], e["arch"]) for e in record(tmp_path)["results"]} == {
        *(("smem", "sm_121"), ("patches", "sm_121"), ("arch", "sm_121")),
    }


def test_code_for_sm_120a_alone_does_not_fit_sm_121(sm120: Command, tmp_path: Path) -> None:
    make(tmp_path, ["arch"], "sm_120a.cubin", more=SPARK)
    ended = build(sm120)
    assert ended.error == "NoKernelImage"
    assert "sm_120a.cubin: no kernel image" in ended.err
    store = tmp_path / "store"
    assert sm120("--store", store, "gate", "run", "engine", "--arch", "sm_120").code == 0


def test_an_engine_without_triton_is_unknown_not_passed(sm120: Command, tmp_path: Path) -> None:
    case = {"name": "one", "stands_for": ["x"], "function": ["engine.ops:f"]}
    smem = {
        "engine": "engine",
        "why": "a gate for an engine that has none",
        "cases": [{**case, "arguments": {}, "kernels": ["k"]}],
    }
    files: dict[str, Any] = {
        "engine": json.dumps({"package": "engine"}),
        "smem-one": json.dumps(smem),
    }
    make(tmp_path, ["smem"], "mixed.so", **files)
    ended = build(sm120)
    assert ended.error == "GateEnvironment"
    assert "has no wheel of triton" in ended.err
    assert {e["verdict"] for e in record(tmp_path)["results"]} == {"unknown"}


def test_the_record_says_the_same_after_a_second_run(sm120: Command, tmp_path: Path) -> None:
    make(tmp_path, ["arch"], "mixed.so", "hopper.so")
    build(sm120)
    first = record(tmp_path)
    build(sm120)
    assert record(tmp_path) == first


def test_an_image_that_asks_for_no_gate_has_no_record(sm120: Command, tmp_path: Path) -> None:
    make(tmp_path, [], "hopper.so")
    assert build(sm120).code == 0
    assert not (tmp_path / "store/images/engine/linux-amd64/gates.json").exists()


def test_gate_arch_alone_puts_its_result_into_the_same_record(
    sm120: Command, tmp_path: Path
) -> None:
    make(tmp_path, [], "mixed.so")
    build(sm120)
    store = tmp_path / "store"
    assert sm120("--store", store, "gate", "run", "engine", "--only", "arch").code == 0
    assert (
        sm120("--store", store, "gate", "run", "engine", "--only", "arch", "--arch", "sm_90").code
        == 0
    )
    assert [e["arch"] for e in record(tmp_path)["results"]] == ["sm_120"]  # the promised card


@pytest.mark.parametrize("card", ["sm_77", "sm_12", "sm_999"])
def test_a_card_that_does_not_exist_is_refused_with_those_that_do(
    sm120: Command, tmp_path: Path, card: str
) -> None:
    make(tmp_path, [], "mixed.so")
    ended = sm120("gate", "run", "engine", "--only", "arch", "--arch", card)
    assert ended.code == 2
    assert "sm_121" in ended.err


def test_parsers_that_could_not_be_judged_are_kept_as_unknown(
    sm120: Command, tmp_path: Path
) -> None:
    make(tmp_path, ["parsers"], "plain.so")
    ended = build(sm120)
    assert ended.error == "GateInvalid"
    assert "has no parsers to judge" in ended.err
    (result,) = record(tmp_path)["results"]
    assert (result["gate"], result["verdict"]) == ("parsers", "unknown")
    assert "has no parsers to judge" in result["message"]


def test_gate_run_names_what_is_missing_to_judge_parsers(sm120: Command, tmp_path: Path) -> None:
    make(tmp_path, ["parsers"], "plain.so")
    ended = sm120("--store", tmp_path / "store", "gate", "run", "engine", "--only", "parsers")
    assert ended.error == "GateInvalid"
    assert "holds no parsers.yaml" in ended.err


def test_templates_that_could_not_be_judged_are_kept_as_unknown_and_shown(
    sm120: Command, tmp_path: Path
) -> None:
    make(tmp_path, ["templates", "arch"], "mixed.so")
    show = ("--store", tmp_path / "store", "gate", "show", "engine")
    assert build(sm120).error == "GateInvalid"
    kept = record(tmp_path)["results"]
    assert [(e["gate"], e["verdict"]) for e in kept] == [
        ("templates", "unknown"),
        ("arch", "passed"),
    ]
    shown = sm120(*show)
    assert shown.code == 0
    assert "templates  sm_120  unknown  engine: has no templates to judge" in shown.out
    assert "arch       sm_120  passed   1 passed" in shown.out
    assert sm120(*show, "--json").json == record(tmp_path)
    # results of another image are none of this one
    (tmp_path / "store/images/engine/linux-amd64/gates.json").unlink()
    assert sm120(*show).error == "GateUnknown"
    assert sm120("--store", tmp_path / "none", "gate", "show", "engine").error == "UnknownImage"


def test_gate_run_names_what_is_missing_to_judge_templates(sm120: Command, tmp_path: Path) -> None:
    make(tmp_path, ["templates"], "plain.so")
    ended = sm120("--store", tmp_path / "store", "gate", "run", "engine", "--only", "templates")
    assert ended.error == "GateInvalid"
    assert "holds no templates.yaml" in ended.err
