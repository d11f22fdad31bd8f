from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.images.gate.arch import (
    ArchReport,
    ArchSpec,
    ObjectVerdict,
    judge_image,
    promised_code,
    read_image,
)
from tests.compiled import CompiledWorld, CopyingBackend, build_compiled, source_spec
from tests.unit.binary.arch_files import DATA

HOPPER, PLAIN = ((DATA / f"{x}.so").read_bytes() for x in ("hopper", "plain"))
ACCEPTING = ArchSpec(accepted={"opt/hello/*": "a reason that is long enough for a test"})


def world_of(place: Path, library: bytes, architectures: list[str]) -> CompiledWorld:
    spec = source_spec()
    for build in spec["builds"].values():
        build["architectures"] = architectures
    # a library that is named like a text, beside a program that is none
    files = {"hello": b"#!/bin/sh\n", "notes": library}
    return build_compiled(place, CopyingBackend(lambda _: files), **spec)


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> CompiledWorld:
    return world_of(tmp_path_factory.mktemp("hopper"), HOPPER, ["sm_90a"])


def judged(
    world: CompiledWorld, card: str, promise: dict[str, list[str]] | None = None
) -> ArchReport:
    compiled = promised_code(world.built) if promise is None else promise
    return judge_image(read_image(world.store, world.built), ACCEPTING, card, compiled=compiled)


def test_every_object_that_was_compiled_here_is_read_whatever_its_name(
    hopper: CompiledWorld,
) -> None:
    report = judged(hopper, "sm_90a")
    assert promised_code(hopper.built) == {"opt/hello/": ["sm_90a"], "opt/other/": ["sm_90a"]}
    assert [x.path for x in report.objects] == ["opt/hello/notes", "opt/other/notes"]
    assert {x.judgement.verdict for x in report.objects} == {ObjectVerdict.RUNS}
    assert report.passed


@pytest.mark.parametrize("promise", [["sm_90"], ["sm_120"], ["sm_90a", "sm_120"], []])
def test_a_tree_with_other_code_than_its_build_promises_fails(
    hopper: CompiledWorld, promise: list[str]
) -> None:
    report = judged(hopper, "sm_90a", {"opt/hello/": promise})
    assert [(x.path, x.judgement.verdict) for x in report.failures] == [
        ("opt/hello/notes", ObjectVerdict.WRONG_VARIANT)
    ]
    assert "holds sm_90a where exactly" in report.failures[0].judgement.message


def test_code_for_another_card_does_not_pass_for_the_promised_one(hopper: CompiledWorld) -> None:
    report = judge_image(read_image(hopper.store, hopper.built), ArchSpec(), "sm_120")
    assert {x.judgement.verdict for x in report.failures} == {ObjectVerdict.NO_KERNEL_IMAGE}


def test_a_tree_that_lost_its_code_fails_although_no_object_does(tmp_path: Path) -> None:
    world = world_of(tmp_path, PLAIN, [])
    assert judged(world, "sm_120").passed
    report = judged(world, "sm_120", {"opt/hello/": ["sm_120"], "opt/other/": []})
    assert (report.failures, report.unmatched) == ([], ("opt/hello/*",))
    assert not report.passed
