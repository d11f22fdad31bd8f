"""Paths that are not in an image: which ones were most likely meant."""

from __future__ import annotations

import pytest

from pipeline.images.assemble.inside import nearest_paths

PATHS = {
    "opt": None,
    "opt/site": None,
    "opt/site/vllm": None,
    "opt/site/vllm/__init__.py": None,
    "opt/site/vllm/attention": None,
    "opt/site/vllm/attention/utils.py": None,
    "opt/site/vllm/v1": None,
    "opt/site/vllm/v1/utils.py": None,
    "usr": None,
    "usr/lib": None,
    "usr/lib/utils.py": None,
}


@pytest.mark.parametrize(
    ("wanted", "near"),
    [
        (["opt/site/vlm/__init__.py"], ["opt/site/vllm/__init__.py"]),
        (["vllm/__init_.py", "opt/site/vllm/__init_.py"], ["opt/site/vllm/__init__.py"]),
        (["src/attention/utils.py"], ["opt/site/vllm/attention/utils.py", "usr/lib/utils.py"]),
        (["attention"], ["opt/site/vllm/attention"]),
        (["nothing/like/it"], []),
        (["opt/site/torch/__main__.py"], []),
        ([""], []),
    ],
)
def test_a_slip_is_corrected_and_a_name_found_elsewhere(wanted: list[str], near: list[str]) -> None:
    assert nearest_paths(PATHS, wanted)[: len(near) or None] == near
