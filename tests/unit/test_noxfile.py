"""The menu's own small decisions."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

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


@pytest.mark.parametrize(
    ("words", "want"),
    [
        ([], ["sglang-k2", "sglang", "vllm"]),
        (["--gate"], ["sglang-k2", "sglang", "vllm", "--gate"]),
        (["--mirror", "wheels"], ["sglang-k2", "sglang", "vllm", "--mirror", "wheels"]),
        (
            ["--mirror=wheels", "--gate"],
            ["sglang-k2", "sglang", "vllm", "--mirror=wheels", "--gate"],
        ),
        (["vllm"], ["vllm"]),
        (["vllm", "--gate"], ["vllm", "--gate"]),
        (["--platform", "host", "debian-python"], ["--platform", "host", "debian-python"]),
    ],
)
def test_options_alone_are_for_the_engine_images(
    menu: ModuleType, words: list[str], want: list[str]
) -> None:
    assert menu.with_images(words) == want
