from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.core.model import canonical_json
from pipeline.core.yaml_file import schema
from pipeline.images.assemble.golden import read_golden
from pipeline.images.assemble.plan import plan_image
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import ImageFile, ImageSpec
from tests.unit.spec.json_schema import problems
from tests.unit.support import AMD64, ARM64, ROOT, tiny_spec

CUDA = {"from": ["nvidia/cu13"], "architectures": ["sm_120"]}
PYTHON = {"requirements": ["engine==1.0"], "prefer": ["engine"], "omit": {"a": "not needed here"}}
ENV = {"CARD": "12.0", "HOME": "/home/engine"}
BODY: dict[str, Any] = {"cuda": CUDA, "python": PYTHON, "env": ENV}
RULES: dict[str, Any] = json.loads(schema(ImageFile))


def image_file(overrides: Any = None, platforms: tuple[str, ...] = (AMD64, ARM64)) -> ImageFile:
    more = {} if overrides is None else {"overrides": overrides}
    return ImageFile.model_validate(tiny_spec(**BODY, platforms=list(platforms), **more))


def alone(platform: str = AMD64, **changes: Any) -> ImageSpec:
    """The spec of an image that has one platform."""
    return ImageSpec.model_validate(tiny_spec(**{**BODY, **changes}, platforms=[platform]))


def hashed(spec: ImageSpec) -> bytes:
    return canonical_json(spec.dumped())


def test_without_overrides_a_spec_is_the_same_on_all_platforms() -> None:
    plain = ImageSpec.model_validate(tiny_spec(**BODY, platforms=[AMD64, ARM64]))
    assert hashed(image_file().on(AMD64)) == hashed(image_file().on(ARM64)) == hashed(plain)
    assert b"overrides" not in hashed(image_file().on(AMD64))


def test_a_platform_with_overrides_leaves_the_others_as_they_were_before_it() -> None:
    file = image_file({ARM64: {"env": {"CARD": "12.1"}}})
    assert hashed(file.on(AMD64)) == hashed(alone())
    assert file.on(AMD64).lock_digest() == alone().lock_digest()


def test_mappings_are_merged_and_everything_else_is_replaced() -> None:
    changes: dict[str, Any] = {
        "summary": "The same for another card",
        "debs": ["libnuma1"],
        "python": {"requirements": ["engine==1.1", "more==2"], "omit": {"b": "not on this one"}},
        "cuda": {"architectures": ["sm_121"]},
        "compiled": [{"source": "engine", "build": "arm"}],
        "env": {"CARD": "12.1", "MORE": "1"},
    }
    omitted = {"a": "not needed here", "b": "not on this one"}
    merged = {
        **changes,
        "python": {**PYTHON, **changes["python"], "omit": omitted},
        "cuda": {**CUDA, "architectures": ["sm_121"]},
        "env": {**ENV, "CARD": "12.1", "MORE": "1"},
    }
    assert image_file({ARM64: changes}).on(ARM64) == alone(ARM64, **merged)


def test_the_lock_of_a_platform_follows_from_its_own_requirements() -> None:
    file = image_file({ARM64: {"python": {"requirements": ["engine==1.1"]}}})
    assert file.on(ARM64).lock_digest() != file.on(AMD64).lock_digest()
    only_env = image_file({ARM64: {"env": {"CARD": "12.1"}}})
    assert only_env.on(ARM64).lock_digest() == only_env.on(AMD64).lock_digest()


def test_another_platform_than_the_images_own_gets_the_common_spec() -> None:
    file = image_file({ARM64: {"env": {}}}, platforms=(ARM64,))
    assert file.on(AMD64).env == ENV


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"linux/riscv64": {}}, "should match pattern"),
        ({"arm64": {}}, "should match pattern"),
        ({ARM64: {"colour": "blue"}}, "Extra inputs"),
        ({ARM64: {"name": "other"}}, "Extra inputs"),
        ({ARM64: {"base": "other"}}, "Extra inputs"),
        ({ARM64: {"gates": []}}, "Extra inputs"),
        ({ARM64: {"platforms": [ARM64]}}, "Extra inputs"),
        ({ARM64: {"overrides": {}}}, "Extra inputs"),
        ({ARM64: {"python": {"version": "3.12"}}}, "Extra inputs"),
        ({ARM64: {"python": {"requirements": []}}}, "at least 1 item"),
        ({ARM64: {"python": {"requirements": ["a @ https://h/a.whl"]}}}, "names a location"),
        ({ARM64: {"cuda": {"architectures": ["120"]}}}, "should match pattern"),
        ({ARM64: {"env": {"A B": "1"}}}, "should match pattern"),
        ({ARM64: {"env": "CARD=1"}}, "valid dictionary"),
        ([ARM64], "valid dictionary"),
    ],
)
def test_what_no_platform_can_have_is_refused(overrides: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        image_file(overrides)


def test_overrides_for_a_platform_that_the_image_has_not_are_refused() -> None:
    with pytest.raises(ValidationError, match="linux/arm64, which is not in `platforms`"):
        image_file({ARM64: {"env": {}}}, platforms=(AMD64,))


@pytest.mark.parametrize("field", ["python", "cuda"])
def test_overrides_cannot_change_what_the_image_has_not(field: str) -> None:
    body = tiny_spec(platforms=[AMD64, ARM64], overrides={ARM64: {field: {}}})
    with pytest.raises(ValidationError, match=f"changes `{field}`, which the image has not"):
        ImageFile.model_validate({**body, field: None})


def test_the_schema_knows_what_a_platform_may_override() -> None:
    body = tiny_spec(**BODY, platforms=[AMD64, ARM64])
    assert problems({**body, "overrides": {ARM64: {"env": {"A": "1"}}}}, RULES, RULES) == []
    assert problems({**body, "overrides": {ARM64: {"colour": "blue"}}}, RULES, RULES)


GOLDEN = read_golden(Checkout(ROOT).golden_path).images


@pytest.mark.parametrize("label", sorted(GOLDEN))
def test_the_inputs_of_every_golden_digest_are_those_of_today(label: str) -> None:
    name, _, architecture = label.rpartition(".")
    plan = plan_image(Checkout(ROOT), name, f"linux/{architecture}")
    assert plan.inputs == GOLDEN[label].inputs


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_the_engines_for_spark_are_for_its_card(name: str) -> None:
    file = Checkout(ROOT).spec(name)
    spark, server = file.on(ARM64), file.on(AMD64)
    assert spark.cuda
    assert server.cuda
    assert (server.cuda.architectures, spark.cuda.architectures) == (["sm_120"], ["sm_121"])
    assert spark.env["CUTE_DSL_ARCH"] == "sm_121a"
    assert spark.env.keys() == server.env.keys()
