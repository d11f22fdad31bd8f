"""A small image of some megabytes, built without a network, to publish and to interrupt."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from tests import makers
from tests.testbed.forked import run_forked
from tests.testbed.oci_door import Door
from tests.unit.support import make_checkout

ACCEPT = {"Accept": "application/vnd.oci.image.manifest.v1+json"}


@dataclass(frozen=True)
class Bench:
    """A checkout with one small image, and the store it is built in."""

    checkout: Path
    store: Path

    def command(self, *args: str) -> list[str]:
        head = [sys.executable, "-m", "pipeline", "--checkout", str(self.checkout)]
        return [*head, "--store", str(self.store), *args]

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        return run_forked("--checkout", str(self.checkout), "--store", str(self.store), *args)

    def publish(self, door: Door, tag: str = "v1", *args: str) -> dict[str, Any]:
        ended = self.run("publish", "tiny", f"{door.host_port}/app:{tag}", "--json", *args)
        assert ended.returncode == 0, ended.stderr
        found: dict[str, Any] = json.loads(ended.stdout)
        return found


def make_bench(home: Path, **sizes: int) -> Bench:
    """An image of wheels that hold so many bytes each."""
    dice = random.Random(1)
    wheels = [
        makers.make_wheel(home / "mirror", name, {f"{name}/data.bin": dice.randbytes(size)})
        for name, size in sizes.items()
    ]
    checkout = make_checkout(home, wheels)
    found = Bench(checkout.root, home / "store")
    ended = found.run(
        *("build", "tiny", "--offline", "--accept", "--json", "--mirror", str(home / "mirror"))
    )
    assert ended.returncode == 0, ended.stderr
    return found


def complete_digest(door: Door, tag: str = "v1") -> str | None:
    """The digest behind a tag whose every blob is there and true; none where there is no tag."""
    answer = requests.get(f"{door.url}/v2/app/manifests/{tag}", headers=ACCEPT, timeout=60)
    if answer.status_code == 404:
        return None
    manifest = answer.json()
    for part in [manifest["config"], *manifest["layers"]]:
        blob = requests.get(f"{door.url}/v2/app/blobs/{part['digest']}", timeout=60)
        assert blob.status_code == 200, "the tag points to something incomplete"
        assert f"sha256:{hashlib.sha256(blob.content).hexdigest()}" == part["digest"]
    return f"sha256:{hashlib.sha256(answer.content).hexdigest()}"
