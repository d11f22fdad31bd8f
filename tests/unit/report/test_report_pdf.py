"""How a browser is asked; a real one prints in tests/integration."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.core.errors import MissingTool, PrintFailed
from pipeline.serving.report.pdf import print_pdf


def browser(folder: Path, body: str) -> None:
    """A stand-in for chromium."""
    path = folder / "chromium"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}")
    return folder


COPY = (
    'for a in "$@"; do case "$a" in --print-to-pdf=*) echo "%PDF of $HOME" > "${a#*=}";; esac; done'
)


def test_without_a_browser_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(MissingTool) as raised:
        print_pdf(b"<p>", tmp_path / "r.pdf")
    assert "print it" in raised.value.hint


def test_a_stand_in_for_a_browser_gets_a_home_of_its_own(path: Path, tmp_path: Path) -> None:
    browser(path, COPY)
    print_pdf(b"<p>", tmp_path / "r.pdf")
    assert (tmp_path / "r.pdf").read_text().startswith("%PDF of /")
    assert "sm120-report-" in (tmp_path / "r.pdf").read_text()


@pytest.mark.parametrize("body", ["echo no display >&2; exit 1", "exit 0"])
def test_a_browser_that_prints_nothing_leaves_no_file(
    path: Path, tmp_path: Path, body: str
) -> None:
    browser(path, body)
    with pytest.raises(PrintFailed):
        print_pdf(b"<p>", tmp_path / "r.pdf")
    assert not (tmp_path / "r.pdf").exists()
