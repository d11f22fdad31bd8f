"""Argument parsers read out of real images, as `sm120 recipe flags` does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.app.workspace import host_platform
from pipeline.core.yaml_file import read_yaml
from pipeline.images.engine.parser_flags import ParserFlags
from tests.integration.built import build_image, need_sandbox, run_sm120, sm120
from tests.testbed.forked import ROOT


def read_again(store: Path, image: str) -> ParserFlags:
    """What the image's own code says, on this machine's platform."""
    done = sm120(store, "recipe", "flags", image, "--platform", "host", "--read", "--json")
    return ParserFlags.model_validate(json.loads(done.stdout))


def assert_as_committed(read: ParserFlags) -> None:
    committed = read_yaml(ROOT / "lockfiles" / "flags" / f"{read.image}.yaml", ParserFlags)
    told = {"also", "platform", "digest"}
    assert read.model_dump(exclude=told) == committed.model_dump(exclude=told)


def test_the_flags_of_the_small_image_are_those_that_are_committed(small_store: Path) -> None:
    need_sandbox()
    build_image(small_store, "llama-cpp-cpu", host_platform())
    assert_as_committed(read_again(small_store, "llama-cpp-cpu"))
    assert not list((small_store / "tmp").iterdir())


def test_an_image_that_is_not_built_is_named_with_the_command_that_builds_it(
    small_store: Path,
) -> None:
    done = run_sm120(small_store, "recipe", "flags", "sglang-k2", "--read")
    assert done.returncode == 41
    assert "sm120 build sglang-k2" in done.stderr


@pytest.mark.big
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("image", ["vllm", "sglang"])
def test_the_flags_of_an_engine_image_are_those_that_are_committed(
    big_store: Path, image: str
) -> None:
    build_image(big_store, image, host_platform())
    assert_as_committed(read_again(big_store, image))
