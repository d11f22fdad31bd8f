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

    def sign(self, text: str, *options: str) -> bytes:
        """The text as an InRelease file."""
        return self.gpg(*options, "--clearsign", "--output", "-", stdin=text.encode())

    def armored(self) -> bytes:
        """The public key as vendors publish it."""
        return self.gpg("--armor", "--export")

    def fingerprint(self) -> str:
        """The key's own."""
        shown = self.gpg("--with-colons", "--list-keys").decode().splitlines()
        return next(line.split(":")[9] for line in shown if line.startswith("fpr:"))

    def gpg(self, *args: str, stdin: bytes = b"") -> bytes:
        """Run gpg with this key."""
        command = [find_program("gpg"), "--homedir", str(self.home), "--batch", "--quiet", *args]
        return subprocess.run(command, input=stdin, capture_output=True, check=True).stdout


@contextmanager
def new_signer(
    name: str, kind: str = "ed25519", *options: str, expires: str = "never"
) -> Iterator[Signer]:
    """A fresh key, gone with its agent at the end."""
    ensure_debian_packages(["gpg", "gpg-agent"])
    # Not below pytest's folder: a socket's path may have 107 characters at most.
    home = Path(tempfile.mkdtemp(prefix="gpg-"))
    signer = Signer(home, home / "public.gpg")
    try:
        unlocked = ("--pinentry-mode", "loopback", "--passphrase", "")
        signer.gpg(*unlocked, *options, "--quick-generate-key", name, kind, "sign", expires)
        signer.keyring.write_bytes(signer.gpg("--export"))
        yield signer
    finally:
        kill = [find_program("gpgconf"), "--homedir", str(home), "--kill", "gpg-agent"]
        subprocess.run(kill, check=False)
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def new_old_signer(name: str) -> Iterator[Signer]:
    """A key that is bound by SHA-1 alone, as NVIDIA's 3BF863CC is."""
    with new_signer(name, "rsa3072", "--cert-digest-algo", "SHA1") as signer:
        yield signer
