"""The menu's own small decisions."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from pipeline.spec.checkout import Checkout
from tests.unit.support import ROOT


@pytest.fixture(scope="module")
def menu() -> ModuleType:
    pytest.importorskip("nox", reason="There is no nox here to load the menu with.")
    spec = importlib.util.spec_from_file_location("menu", ROOT / "noxfile.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["menu"] = module
    spec.loader.exec_module(module)
    return module


ENGINES, AMD64 = ("sglang-k2", "sglang", "vllm"), ("--platform", "linux/amd64")


@pytest.mark.parametrize(
    ("words", "want"),
    [
        ([], [*ENGINES, *AMD64]),
        (["--gate"], [*ENGINES, "--gate", *AMD64]),
        (["--mirror", "wheels"], [*ENGINES, "--mirror", "wheels", *AMD64]),
        (["--mirror=wheels", "--gate"], [*ENGINES, "--mirror=wheels", "--gate", *AMD64]),
        (["--platform", "linux/arm64"], [*ENGINES, "--platform", "linux/arm64"]),
        (["vllm"], ["vllm"]),
        (["vllm", "--gate"], ["vllm", "--gate"]),
        (["--platform", "host", "debian-python"], ["--platform", "host", "debian-python"]),
    ],
)
def test_options_alone_are_for_the_engine_images(
    menu: ModuleType, words: list[str], want: list[str]
) -> None:
    assert menu.with_images(words) == want


def test_what_is_not_built_by_default_exists_and_is_named(menu: ModuleType) -> None:
    checkout = Checkout(ROOT)
    for name in menu.OTHERS:
        image, *platform = name.split(" --platform ")
        assert set(platform) <= set(checkout.spec(image).platforms)
        assert image not in menu.ENGINES or platform
