"""Prints the page as PDF with an installed browser, which draws it as readers see it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from subprocess import TimeoutExpired

from pipeline.core import proc
from pipeline.core.errors import MissingTool, PrintFailed
from pipeline.core.files import atomic_file

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_HINT = (
    "Install chromium, or open the HTML file in any browser and print it: its style sheet has rules"
    " for paper."
)
# A page with some hundred charts takes a few seconds.
_PRINT_S = 120


def print_pdf(page: bytes, target: Path) -> None:
    """Write a page as PDF; write nothing if the browser fails."""
    # distributions call the same program by different names
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise MissingTool("no browser that can print a PDF is installed", _HINT)
    with tempfile.TemporaryDirectory(prefix="sm120-report-") as folder:
        source, printed = Path(folder, "report.html"), Path(folder, "report.pdf")
        source.write_bytes(page)
        # browsers refuse to run as root with their sandbox; the page is ours, and its policy strict
        as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
        args = [
            *(browser, "--headless=new", *as_root, "--disable-gpu", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update"),
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={Path(folder, 'profile')}",
            *("--no-pdf-header-footer", f"--print-to-pdf={printed}", source.as_uri()),
        ]
        try:
            # a home of its own: a browser of the user's may be running with its profile
            done = proc.read(args, env=proc.child_environment(HOME=folder), timeout_s=_PRINT_S)
        except TimeoutExpired as error:
            raise PrintFailed(f"{browser}: no PDF after {_PRINT_S} s") from error
        if done.returncode or not printed.exists():
            reason = proc.last_line(done.stderr.decode(errors="replace"))
            raise PrintFailed(f"{browser}: {reason[:300]}")
        with atomic_file(target) as out:
            out.write(printed.read_bytes())
