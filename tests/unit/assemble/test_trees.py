"""What a compiled tree is made of: which toolchain, which outputs, and what its key covers."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import SpecInvalid
from pipeline.images.assemble.plan import TreePlan, plan_image, plan_tree
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import CompiledSpec
from pipeline.images.spec.source import OutputSpec

SHIPPED = Checkout(Path(__file__).resolve().parents[3])
AMD64, ARM64 = "linux/amd64", "linux/arm64"
FOR_ARM64 = CompiledSpec(source="ik-llama", build="cpu-arm64")
FOR_THE_CPU = CompiledSpec(source="llama-cpp", build="cpu")
FOR_CUDA = CompiledSpec(source="llama-cpp", build="cuda")


def with_build(plan: TreePlan, **update: Any) -> TreePlan:
    """The same plan with another spec of its build."""
    build = plan.build.model_copy(update=update)
    builds = {**plan.source.builds, plan.name: build}
    return replace(plan, source=plan.source.model_copy(update={"builds": builds}))


def edited(tmp_path: Path, source: str, before: str, after: str) -> Checkout:
    """The shipped checkout with one edit of a source's spec."""
    for folder in ("images", "lockfiles"):
        shutil.copytree(SHIPPED.root / folder, tmp_path / folder)
    path = tmp_path / "images" / "sources" / source / "source.yaml"
    text = path.read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after), encoding="utf-8")
    return Checkout(tmp_path)


def test_a_toolchain_may_run_on_another_platform_than_its_result() -> None:
    plan = plan_tree(SHIPPED, FOR_ARM64, ARM64)
    assert (plan.platform, plan.toolchain.platform) == (ARM64, AMD64)


def test_without_a_platform_of_its_own_a_toolchain_runs_on_that_of_its_result() -> None:
    plan = plan_tree(SHIPPED, FOR_THE_CPU, AMD64)
    assert plan.toolchain.platform == plan.platform == AMD64


def test_a_build_for_another_platform_is_refused() -> None:
    with pytest.raises(SpecInvalid, match="its build cpu-arm64 is not for linux/amd64"):
        plan_tree(SHIPPED, FOR_ARM64, AMD64)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("toolchain_platform: linux/amd64", "toolchain_platform: linux/arm64"),
        ("    toolchain_platform: linux/amd64\n", ""),
    ],
)
def test_a_toolchain_that_does_not_run_on_the_named_platform_is_refused(
    tmp_path: Path, before: str, after: str
) -> None:
    checkout = edited(tmp_path, "ik-llama", before, after)
    with pytest.raises(SpecInvalid, match="cross-toolchain is not for linux/arm64"):
        plan_tree(checkout, FOR_ARM64, ARM64)


def test_a_toolchains_platform_is_in_the_key_by_the_toolchain_itself() -> None:
    plan = plan_tree(SHIPPED, FOR_THE_CPU, AMD64)
    other = replace(plan, toolchain=plan_image(SHIPPED, "toolchain", ARM64))
    assert other.key != plan.key
    assert with_build(plan, toolchain_platform=AMD64).key == plan.key


def test_a_build_has_the_outputs_of_its_source_and_its_own() -> None:
    common = [x.to for x in plan_tree(SHIPPED, FOR_THE_CPU, AMD64).outputs]
    with_gpu = [x.to for x in plan_tree(SHIPPED, FOR_CUDA, AMD64).outputs]
    assert with_gpu == [*common, "libggml-cuda.so"]


@pytest.mark.parametrize(
    "outputs",
    [
        [],
        [{"from": "bin/libggml-cuda.so", "to": "other.so"}],
        [{"from": "bin/libggml-cuda.so", "to": "libggml-cuda.so", "executable": True}],
    ],
)
def test_the_outputs_of_a_build_are_in_its_key(outputs: list[dict[str, Any]]) -> None:
    plan = plan_tree(SHIPPED, FOR_CUDA, AMD64)
    others = [OutputSpec.model_validate(x) for x in outputs]
    assert with_build(plan, outputs=others).key != plan.key


def test_the_key_of_a_build_without_either_is_what_it_was_before_there_were_any() -> None:
    plan = plan_tree(SHIPPED, CompiledSpec(source="ik-llama", build="cpu-avx2"), AMD64)
    build = plan.inputs["build"]
    assert isinstance(build, dict)
    assert not {"outputs", "toolchain_platform"} & build.keys()
