"""What a node without a network needs to have `sm120`: our wheel, all others, and the weights."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tests.testbed.playbook import ROOT

REQUIREMENTS = ROOT / "lockfiles" / "tool" / "run.txt"


def build_wheel(folder: Path) -> Path:
    """This project as a wheel."""
    folder.mkdir()
    code = f"from flit_core.buildapi import build_wheel; build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def wheelhouse(folder: Path) -> Path:
    """The locked wheels, as a site without an index would keep them."""
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps"]
    # of the node's minor version, whichever runs here; a late one: what is for early ones is below
    command += ["--only-binary", ":all:", "--python-version", "3.11.9", "--dest", str(folder)]
    subprocess.run([*command, "--require-hashes", "--requirement", str(REQUIREMENTS)], check=True)
    # the node's Python may be another 3.11 than ours, and some pins are for one of them only
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    others = [line.split()[0] for line in lines if "python_full_version < '3.11" in line]
    for pin in others:
        subprocess.run([*command, pin], check=True)
    return folder


@contextmanager
def neighbour_serving(folder: Path, address: str) -> Iterator[str]:
    """`sm120 weights serve` on this machine's address among the nodes."""
    command = [sys.executable, "-m", "pipeline", "weights", "serve", str(folder), "--json"]
    with subprocess.Popen(
        [*command, "--host", address, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    ) as process:
        try:
            assert process.stdout
            port = urlsplit(json.loads(process.stdout.readline())["endpoint"]).port
            yield f"http://{address}:{port}"
        finally:
            process.terminate()
