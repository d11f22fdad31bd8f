"""A throwaway OpenPGP key that signs as a Debian archive does."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.testbed.packages import ensure_debian_packages, find_program


@dataclass(frozen=True)
class Signer:
    """One key in a GnuPG home of its own."""

    home: Path
    keyring: Path

    def sign(self, text: str) -> bytes:
        """The text as an InRelease file."""
        return self.gpg("--clearsign", "--output", "-", stdin=text.encode())

    def gpg(self, *args: str, stdin: bytes = b"") -> bytes:
        """Run gpg with this key."""
        command = [find_program("gpg"), "--homedir", str(self.home), "--batch", "--quiet", *args]
        return subprocess.run(command, input=stdin, capture_output=True, check=True).stdout


@contextmanager
def new_signer(name: str) -> Iterator[Signer]:
    """A fresh key, gone with its agent at the end."""
    ensure_debian_packages(["gpg", "gpg-agent"])
    # Not below pytest's folder: a socket's path may have 107 characters at most.
    home = Path(tempfile.mkdtemp(prefix="gpg-"))
    signer = Signer(home, home / "public.gpg")
    try:
        unlocked = ("--pinentry-mode", "loopback", "--passphrase", "")
        signer.gpg(*unlocked, "--quick-generate-key", name, "ed25519", "sign", "never")
        signer.keyring.write_bytes(signer.gpg("--export"))
        yield signer
    finally:
        kill = [find_program("gpgconf"), "--homedir", str(home), "--kill", "gpg-agent"]
        subprocess.run(kill, check=False)
        shutil.rmtree(home, ignore_errors=True)
