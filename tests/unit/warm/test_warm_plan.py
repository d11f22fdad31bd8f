"""`warm` in an image's spec: what it may stand in, and what makes a layer stale."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from pipeline.core.errors import SpecInvalid
from pipeline.images.assemble import plan as plans
from pipeline.images.assemble.image import image_config
from pipeline.images.assemble.plan import ImagePlan, plan_image
from pipeline.images.lock.model import read_lock, sealed_lock, write_lock
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import ImageFile

SHIPPED = Path(__file__).resolve().parents[3]
AMD64 = "linux/amd64"
SPEC: dict[str, Any] = {
    "name": "k2-warm",
    "summary": "The image sglang-k2 with its kernels compiled",
    "base": "sglang-k2",
    "platforms": [AMD64],
    "warm": {"recipes": {"kimi-k2-thinking-nvfp4-sglang-8x": ["extend-mla-*"]}},
}


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """The shipped images, and a warm one on one of them."""
    for folder in ("images", "lockfiles"):
        shutil.copytree(SHIPPED / folder, tmp_path / folder, symlinks=True)
    return with_spec(Checkout(tmp_path), SPEC)


def with_spec(checkout: Checkout, spec: dict[str, Any]) -> Checkout:
    folder = checkout.folder(spec["name"])
    folder.mkdir(exist_ok=True)
    (folder / "image.yaml").write_text(yaml.safe_dump(spec))
    return checkout


def plan_of(checkout: Checkout) -> ImagePlan:
    spec = checkout.spec("k2-warm").on(AMD64)
    below = read_lock(checkout.lock_path("sglang-k2", AMD64)).seal
    lock = sealed_lock("k2-warm", AMD64, spec.lock_digest(), below, [], [])
    write_lock(checkout.lock_path("k2-warm", AMD64), lock)
    return plan_image(checkout, "k2-warm", AMD64)


def test_a_warm_image_has_a_layer_for_the_card_of_its_base(checkout: Checkout) -> None:
    plan = plan_of(checkout)
    assert plan.warm
    assert plan.warm.card == "sm_120"
    assert plan.inputs["warm"] == plan.warm.inputs
    names = [name for name, _ in plan.warm.cases]
    # the cases that several images share, and those of its base alone
    assert "sglang/smem-extend-attention.yaml" in names
    assert "gates/smem-fused-moe.yaml" in names
    assert "gates/engine.yaml" in names


def test_its_reader_is_named_by_the_image_itself(checkout: Checkout) -> None:
    variables = image_config(plan_of(checkout), [])["config"]["Env"]
    assert "TRITON_CACHE_MANAGER=sm120_warm:WarmCache" in variables
    base = plan_image(checkout, "sglang-k2", AMD64)
    assert "TRITON_CACHE_MANAGER" not in str(image_config(base, [])["config"]["Env"])


def test_the_same_inputs_give_the_same_key(checkout: Checkout) -> None:
    first, second = plan_of(checkout).warm, plan_of(checkout).warm
    assert first
    assert second
    assert first.key == second.key


def changed_flag(checkout: Checkout) -> None:
    path = checkout.folder("sglang-k2") / "image.yaml"
    path.write_text(path.read_text().replace("CUTE_DSL_ARCH: sm_120a", "CUTE_DSL_ARCH: sm_121a"))


def changed_source(checkout: Checkout) -> None:
    path = checkout.folder("sglang-k2") / "patches" / "0002-kimi-k2-stream.patch"
    path.write_text(path.read_text() + "\n")


def changed_case(checkout: Checkout) -> None:
    path = checkout.folder("common/gates/sglang") / "smem-cache.yaml"
    path.write_text(path.read_text() + "# another\n")


def changed_recipes(checkout: Checkout) -> None:
    with_spec(checkout, {**SPEC, "warm": {"recipes": {"kimi": ["decode-*"]}}})


@pytest.mark.parametrize("line", ['shared: "sglang"', "'shared': sglang", "shared :  sglang"])
def test_shared_cases_count_however_their_folder_is_written(line: str, checkout: Checkout) -> None:
    setup = checkout.folder("sglang-k2") / "gates/engine.yaml"
    assert "shared: sglang\n" in setup.read_text()
    setup.write_text(setup.read_text().replace("shared: sglang", line))
    before = plan_of(checkout).warm
    changed_case(checkout)
    after = plan_of(checkout).warm
    assert before
    assert after
    assert "sglang/smem-cache.yaml" in dict(before.cases)
    assert before.key != after.key


@pytest.mark.parametrize(
    ("change", "input_name"),
    [
        (changed_flag, "base"),
        (changed_source, "base"),
        (changed_case, "cases"),
        (changed_recipes, "recipes"),
    ],
)
def test_what_decides_the_entries_makes_a_layer_stale(
    change: Callable[[Checkout], None], input_name: str, checkout: Checkout
) -> None:
    before = plan_of(checkout).warm
    change(checkout)
    after = plan_of(checkout).warm
    assert before
    assert after
    assert before.key != after.key
    assert [k for k in before.inputs if before.inputs[k] != after.inputs[k]] == [input_name]


@pytest.mark.parametrize("name", ["GATE_WORKER", "WARM_WORKER", "MODULE_COMPILER"])
def test_another_program_of_ours_makes_a_layer_stale_and_no_other_image(
    name: str, checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = plan_of(checkout)
    shutil.copytree(getattr(plans, name), changed := tmp_path / "changed")
    part = min(changed.rglob("*.py"))
    part.write_text(part.read_text() + "# another\n")
    monkeypatch.setattr(plans, name, changed)
    after = plan_of(checkout)
    assert before.warm
    assert after.warm
    assert before.warm.key != after.warm.key
    # the same entries make the same image
    assert before.inputs == after.inputs


@pytest.mark.parametrize(
    "change",
    [
        {"base": f"some/image@sha256:{'0' * 64}"},
        {"python": {"requirements": ["greeter==1"]}},
        {"warm": {"recipes": {"kimi": []}}},
        {"warm": {"recipes": {"kimi": ["a b"]}}},
        {"warm": {"flashinfer": True}},
        {"env": {"FLASHINFER_CUDA_ARCH_LIST": "12.1a"}},
        {"cuda": {"from": ["nvidia/cu"], "architectures": ["sm_121a"]}},
        {"patches": "patches/series.yaml"},
    ],
)
def test_what_cannot_be_warmed_is_refused(change: dict[str, Any]) -> None:
    ImageFile.model_validate(SPEC)
    with pytest.raises(ValidationError):
        ImageFile.model_validate({**SPEC, **change})


def test_a_base_without_cases_has_nothing_to_compile(checkout: Checkout) -> None:
    spec = {**SPEC, "base": "debian-python"}
    below = read_lock(checkout.lock_path("debian-python", AMD64)).seal
    image = ImageFile.model_validate(spec).on(AMD64)
    lock = sealed_lock("k2-warm", AMD64, image.lock_digest(), below, [], [])
    write_lock(checkout.lock_path("k2-warm", AMD64), lock)
    with pytest.raises(SpecInvalid, match="debian-python has no cases of a shared-memory gate"):
        plan_image(with_spec(checkout, spec), "k2-warm", AMD64)


def test_an_image_without_it_has_the_hash_that_it_had() -> None:
    spec = ImageFile.model_validate({k: v for k, v in SPEC.items() if k != "warm"})
    assert "warm" not in spec.on(AMD64).dumped()
