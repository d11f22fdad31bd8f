"""An image for arm64, unpacked and run on amd64: qemu-user in namespaces of its own.

The kernel is told how to start programs for arm64 (binfmt_misc) inside a user namespace only, so
nothing about this machine changes and nothing is left behind. There is no network inside.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

QEMU = "/usr/bin/qemu-aarch64-static"
# ELF, 64 bit, little endian, for AArch64, as Debian's binfmt-support registers it; F: the emulator
# is opened now, so that it need not be in the image.
_MAGIC = r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
_MASK = r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
_RULE = f":arm64:M::{_MAGIC}:{_MASK}:{QEMU}:F"
_INSIDE = """set -e
mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
printf '%s' "$RULE" > /proc/sys/fs/binfmt_misc/register
mount -t proc proc "$0/proc"
mount --rbind /dev "$0/dev"
mount -t tmpfs tmpfs "$0/tmp"
mkdir -p "$0/home/engine/.cache"
mount -t tmpfs -o mode=777 tmpfs "$0/home/engine/.cache"
exec chroot --userspec="$RUN_AS" "$0" "$@"
"""


@dataclass(frozen=True)
class EmulatedImage:
    """A root file system and how its image runs."""

    root: Path
    config: dict[str, Any]

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program as the image's user, with the image's variables."""
        own = dict(line.split("=", 1) for line in self.config["config"]["Env"])
        # the most of an ARM processor that the emulator knows
        fixed = {"RULE": _RULE, "RUN_AS": self.config["config"]["User"], "QEMU_CPU": "max"}
        inner = ["unshare", *("-m", "-n", "-p", "-f"), "sh", "-c", _INSIDE, str(self.root)]
        process = subprocess.Popen(
            ["unshare", "-U", "sh", "-c", 'read go; exec "$@"', "sh", *inner, *command],
            env={**own, **fixed, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        _map_users(process.pid)
        out, error = process.communicate("\n")
        return subprocess.CompletedProcess(list(command), process.returncode, out, error)


def _map_users(pid: int) -> None:
    """Give a new user namespace the same users as this one: the image's own is 1000."""
    outside = Path("/proc/self/ns/user").readlink()
    while Path(f"/proc/{pid}/ns/user").readlink() == outside:
        time.sleep(0.01)
    for kind in ("uid_map", "gid_map"):
        Path(f"/proc/{pid}/{kind}").write_text("0 0 65536", encoding="ascii")


def require_emulation() -> None:
    """Skip where programs for arm64 cannot be run this way."""
    if platform.machine() != "x86_64" or os.geteuid() != 0:
        pytest.skip("Emulating arm64 is for root on amd64.")
    if not Path(QEMU).exists():
        pytest.skip("There is no qemu-aarch64-static here (Debian: qemu-user-static).")


def unpack_image(blobs: Path, digest: str, folder: Path, needed_bytes: int) -> EmulatedImage:
    """Write all layers of an image into a folder, as a container engine would."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        pytest.skip(f"Unpacking takes {needed_bytes / 1e9:.0f} GB, {free / 1e9:.0f} are free.")

    def blob(name: str) -> Path:
        return blobs / name.removeprefix("sha256:")

    manifest = json.loads(blob(digest).read_bytes())
    root = folder / "root"
    for layer in manifest["layers"]:
        with tarfile.open(blob(layer["digest"]), "r:gz") as archive:
            archive.extractall(root, filter="fully_trusted")
    return EmulatedImage(root, json.loads(blob(manifest["config"]["digest"]).read_bytes()))
