"""Paths that are not in an image: which ones were most likely meant."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from pipeline.artifacts.oci.record import FileRow, Kind
from pipeline.core.errors import UnknownFile
from pipeline.images.assemble.image import Built
from pipeline.images.assemble.inside import locate

BUILT = cast(
    Built,
    SimpleNamespace(
        name="tiny",
        platform="linux/amd64",
        plan=SimpleNamespace(
            venv=SimpleNamespace(site="opt/site"), spec=SimpleNamespace(platforms=["linux/amd64"])
        ),
    ),
)
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
        ("opt/site/vlm/__init__.py", "/opt/site/vllm/__init__.py"),
        ("vllm/__init_.py", "/opt/site/vllm/__init__.py"),
        (
            "src/attention/utils.py",
            "/opt/site/vllm/attention/utils.py, /usr/lib/utils.py, /opt/site/vllm/v1/utils.py",
        ),
        ("attention", "/opt/site/vllm/attention"),
        ("nothing/like/it", ""),
        ("opt/site/torch/__main__.py", ""),
        ("/", ""),
    ],
)
def test_a_slip_is_corrected_and_a_name_found_elsewhere(wanted: str, near: str) -> None:
    rows = {path: FileRow(path, Kind.FILE, 0o644, 0, "", 0, "", "") for path in PATHS}
    with pytest.raises(UnknownFile, match="no such file in tiny") as caught:
        locate(rows, BUILT, wanted)
    assert caught.value.hint.startswith(
        f"The nearest: {near}. `" if near else "Give its whole path. `"
    )
