"""What an image must show when it starts, from its spec and its config."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.artifacts.oci.config import ImageConfig
from pipeline.core.yaml_file import read_yaml
from pipeline.images.assemble.plan import plan_image
from pipeline.images.engine.parser_flags import find_parser_flags, flags_folder
from pipeline.images.spec.checkout import Checkout
from pipeline.images.start_test.expected import (
    OPTIONAL,
    OptionalLibraries,
    StartExpectations,
    wanted_of,
)
from pipeline.images.start_test.inside.check import CHECKS
from tests.unit.support import ROOT

CHECKOUT = Checkout(ROOT)


def config_of(name: str, platform: str) -> ImageConfig:
    """The config as the builder writes it, as far as it is read here."""
    chain = plan_image(CHECKOUT, name, platform).chain()
    env = {key: value for plan in chain for key, value in plan.spec.env.items()}
    spec = chain[-1].spec
    settings: dict[str, Any] = {
        "Env": [f"{key}={value}" for key, value in env.items()],
        "User": "1000:1000",
        "WorkingDir": "/home/engine",
        "Entrypoint": spec.entrypoint,
        "Cmd": spec.command,
    }
    rootfs = {"type": "layers", "diff_ids": ["sha256:" + "a" * 64]}
    body = {"os": "linux", "architecture": "amd64", "config": settings, "rootfs": rootfs}
    return ImageConfig.model_validate(body)


def wanted(name: str, platform: str = "linux/amd64", **more: Any) -> StartExpectations:
    flags = (
        find_parser_flags(flags_folder(CHECKOUT), "vllm", name) if more.pop("flags", 0) else None
    )
    return wanted_of(plan_image(CHECKOUT, name, platform), config_of(name, platform), flags, **more)


@pytest.mark.parametrize("name", ["vllm", "sglang", "sglang-k2"])
def test_an_engine_image_must_show_everything(name: str) -> None:
    want = wanted(name)
    assert want.checks == list(CHECKS)
    assert (want.user, want.arch) == ("engine", "sm_120")
    assert want.command[-1] == "--help"
    assert want.parser


def test_an_engine_is_imported_from_the_ground_up() -> None:
    assert wanted("vllm").modules[0] == "torch"
    assert wanted("vllm").modules[-1] == "vllm.entrypoints.openai.api_server"
    assert wanted("sglang-k2").modules[-1] == "sglang.launch_server"


def test_folders_are_home_its_caches_and_tmp() -> None:
    folders = wanted("vllm").folders
    assert folders[:4] == [
        "/home/engine",
        "/tmp",
        "/home/engine/.cache",
        "/home/engine/.cache/cute-dsl",
    ]
    assert "/home/engine/.cache/triton" in folders
    assert len(folders) == len(set(folders))
    assert "/usr/local/cuda" not in folders


def test_an_image_without_variables_has_the_home_of_its_account() -> None:
    assert wanted("llama-cpp-cpu").folders == ["/home/engine", "/tmp", "/home/engine/.cache"]


def test_only_what_a_spec_promises_is_asked_for() -> None:
    small = wanted("llama-cpp-cpu")
    assert not {"nvcc", "triton", "ninja", "command"} & {*small.checks}
    assert {"c", "cxx", "modules", "parser"} <= {*small.checks}
    base = wanted("debian-python")
    assert not {"modules", "parser", "command"} & {*base.checks}
    assert base.parser is None
    assert "numactl" not in base.programs
    assert "numactl" in wanted("vllm").programs


def test_another_platform_has_its_own_card() -> None:
    assert wanted("vllm", "linux/arm64").arch == "sm_121"


def test_the_flags_that_recipes_are_checked_against_must_be_known() -> None:
    parser = wanted("vllm", flags=1).parser
    assert parser
    assert "--max-model-len" in parser.flags
    assert parser.file == "lockfiles/flags/vllm.yaml"
    nothing = wanted("vllm").parser
    assert nothing
    assert (nothing.flags, nothing.file) == ([], "")


def test_an_emulator_gets_more_time() -> None:
    assert wanted("vllm", emulated=True).limit_s > wanted("vllm").limit_s


def test_what_may_be_missing_is_of_named_files_with_reasons() -> None:
    askers = read_yaml(OPTIONAL, OptionalLibraries).askers
    assert all(pattern.strip("*").count("/") >= 1 for pattern in askers)
    assert all(len(why) > 20 for why in askers.values())
