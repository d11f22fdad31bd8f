from __future__ import annotations

import posixpath

import pytest

from pipeline.artifacts.oci.record import Kind
from pipeline.images.assemble.venv import Venv

VENV = Venv()


def test_the_skeleton_is_what_python_itself_would_make() -> None:
    entries = {entry.path.removeprefix("opt/venv/"): entry for entry in VENV.skeleton()}
    links = {path: e.target for path, e in entries.items() if e.kind is Kind.SYMLINK}
    assert links == {
        "lib64": "lib",
        "bin/python": "/usr/bin/python3.11",
        "bin/python3": "python",
        "bin/python3.11": "python",
    }
    config = entries["pyvenv.cfg"].content
    assert isinstance(config, bytes)
    assert b"home = /usr/bin\ninclude-system-site-packages = false\n" in config


def test_another_version_moves_every_path() -> None:
    other = Venv(version="3.12")
    assert other.site == "opt/venv/lib/python3.12/site-packages"
    assert other.scheme("headers", "pkg") == "opt/venv/include/site/python3.12/pkg"
    assert "opt/venv/bin/python3.12" in {entry.path for entry in other.skeleton()}


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("purelib", VENV.site),
        ("platlib", VENV.site),
        ("scripts", "opt/venv/bin"),
        ("data", "opt/venv"),
        ("headers", "opt/venv/include/site/python3.11/pkg"),
    ],
)
def test_schemes_lead_to_their_folders(name: str, want: str) -> None:
    assert VENV.scheme(name, "pkg") == want


@pytest.mark.parametrize("name", ["", "stdlib", "Scripts", "..", "include", "purelib "])
def test_an_unknown_scheme_leads_nowhere(name: str) -> None:
    assert VENV.scheme(name, "pkg") is None


@pytest.mark.parametrize("path", ["bin/tool", "share/a/b", "lib/python3.11/site-packages/a.py"])
def test_a_record_path_leads_back_from_site_packages(path: str) -> None:
    relative = VENV.record_path(f"opt/venv/{path}")
    assert posixpath.normpath(f"{VENV.site}/{relative}") == f"opt/venv/{path}"
