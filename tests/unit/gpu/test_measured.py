"""What was measured on a borrowed card is kept with the numbers; when it moves, so must they."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.images.spec.checkout import Checkout
from tests.gpu.launches import padded
from tests.unit.support import ROOT

FOLDER = ROOT / "tests" / "gpu" / "measured"
MEASURED = sorted(FOLDER.glob("nvidia-*.json"))


def told(path: Any) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", MEASURED, ids=lambda p: p.stem)
def test_what_was_measured_are_the_patches_of_today(path: Any) -> None:
    checkout = Checkout(ROOT)
    for image, engine in told(path)["engines"].items():
        patches = checkout.series(checkout.spec(image)).patches
        (file,) = [f for patch in patches for f in patch.files if f.path == engine["file"]]
        assert engine["sha256"]["published"] == file.before
        assert engine["sha256"]["patched"] == file.after, f"{image}: measure again"


@pytest.mark.parametrize("path", MEASURED, ids=lambda p: p.stem)
def test_every_row_is_right_and_says_which_card_it_came_from(path: Any) -> None:
    measured = told(path)
    assert measured["facts"]["card"]
    assert measured["facts"]["like_sm120"]
    for row in measured["rows"]:
        assert row["right"], row
        assert row["max_error_share"] <= row["tolerance"]
        assert all(k["matrix"] != ["wgmma.mma_async"] for k in row["kernels"].values())


def times(path: Any, subject: str, variant: str) -> dict[str, float]:
    return {
        row["shape"]: row["ms"]
        for row in told(path)["rows"]
        if subject in row["subject"] and row["variant"] == variant
    }


@pytest.mark.parametrize("kind", ["MLA 192/128", "GQA 128"])
@pytest.mark.parametrize("path", MEASURED, ids=lambda p: p.stem)
def test_our_blocks_beat_those_of_pr_17908_at_every_shape_where_they_differ(
    path: Any, kind: str
) -> None:
    ours, other = times(path, kind, "patched for SM120"), times(path, kind, "sglang PR 17908")
    assert len(ours) == 6
    assert all(ours[shape] < other[shape] for shape in ours)


def test_first_calls_found_all_that_was_compiled_and_gave_the_same_numbers() -> None:
    measured = told(FOLDER / "first-calls-nvidia-h200.json")
    assert measured["card"]
    ran = {image: measured[image]["cases"] for image in ("sglang-k2", "sglang", "vllm")}
    assert {image: len(cases) for image, cases in ran.items()} == {
        "sglang-k2": 205,
        "sglang": 233,
        "vllm": 495,
    }
    other_numbers = set()
    for image, cases in ran.items():
        assert not cases.keys() & set().union(*measured[image]["not_run"].values())
        for name, case in cases.items():
            assert case["hit"], name
            assert (case["miss"], case["disk"], case["refused"]) == (0, 0, 0), name
            if not case["same numbers"]:
                other_numbers.add(name)
    # it takes its places with atomic_add, in any order
    assert other_numbers == {"ep-scatter"}


def test_modules_compiled_beforehand_were_called_and_spoiled_ones_refused() -> None:
    measured = told(FOLDER / "modules-nvidia-h200.json")
    assert measured["card"]
    assert measured["ahead"].keys() == measured["calls"].keys()
    assert all(made["ended"] == "compiled" for made in measured["ahead"].values())
    assert len(measured["must_fail"]) == 5
    assert all(fault["refused"] and fault["said"] for fault in measured["must_fail"].values())


def test_a_launch_is_padded_to_the_number_of_blocks_that_sm120_would_hold() -> None:
    assert padded(71680) == 232448  # one block either way
    assert 233472 // (padded(35328) + 1024) == 102400 // (35328 + 1024) == 2
    assert padded(106496) == 106496  # SM120 would hold none: left as it is
