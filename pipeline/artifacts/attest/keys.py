"""Keys that sign: ECDSA on P-256, the curve of `cosign generate-key-pair`, so cosign can verify.

The model-signing format allows larger curves too: its readers pass `curves=ANY_NIST`.
"""

from __future__ import annotations

import os
import shlex
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from pipeline.artifacts.attest.keyring import own_key
from pipeline.core import proc
from pipeline.core.errors import KeyExists, KeyInvalid, SigningFailed, StoreUnwritable
from pipeline.core.files import os_errors_explained, read_limited, sync
from pipeline.core.model import sha256_of

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey
_ALGORITHM = ec.ECDSA(hashes.SHA256())
# keys are below a kilobyte; a device or a wrong file must not be read whole
_MOST_BYTES = 1 << 16
# as OpenSSL names the curve
P256 = ("secp256r1",)
ANY_NIST = ("secp256r1", "secp384r1", "secp521r1")


class Signer(Protocol):
    """Whatever can sign bytes: a key, or a program that guards one."""

    @property
    def key_id(self) -> str: ...

    @property
    def public(self) -> PublicKey: ...

    def sign(self, data: bytes) -> bytes: ...


_SPKI = serialization.PublicFormat.SubjectPublicKeyInfo


def key_id(public: PublicKey) -> str:
    """A key's name: the digest of its DER SubjectPublicKeyInfo."""
    return sha256_of(public.public_bytes(serialization.Encoding.DER, _SPKI))


def public_pem(public: PublicKey) -> str:
    """The public key as cosign and openssl read it."""
    return public.public_bytes(serialization.Encoding.PEM, _SPKI).decode()


def is_valid_signature(public: PublicKey, signature: bytes, data: bytes) -> bool:
    """Whether this key made this signature over these bytes."""
    try:
        public.verify(signature, data, _ALGORITHM)
    except InvalidSignature:
        return False
    return True


def make_private_key() -> PrivateKey:
    """A fresh private key."""
    return ec.generate_private_key(ec.SECP256R1())


def write_key(
    path: Path, key: PrivateKey, passphrase: bytes | None = None, *, is_half: bool = False
) -> Path:
    """Writes a new key for its owner alone, and the public half next to it; never over another.

    With `is_half`, after a killed run left the private half alone, it writes the public half.
    """
    guard: serialization.KeySerializationEncryption = serialization.NoEncryption()
    # BestAvailableEncryption is PBES2 with AES, which openssl reads too
    if passphrase:
        guard = serialization.BestAvailableEncryption(passphrase)
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, guard)
    public = path.with_suffix(".pub")
    # check this first: a private half without its public one is of no use
    if public.exists():
        raise KeyExists(f"{public}: already exists")
    halves = (path, pem, 0o600), (public, public_pem(key.public_key()).encode(), 0o644)
    try:
        with os_errors_explained(path):
            # the names of keys are private, too
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # whole before it has its name: half a key that a kill or a full disk leaves would be
            # in the way of the next try
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as folder:
                for file, data, mode in halves[1:] if is_half else halves:
                    new = Path(folder, file.name)
                    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
                    with os.fdopen(handle, "wb") as out:
                        out.write(data)
                        out.flush()
                        os.fsync(out.fileno())
                    try:
                        # never over another file or link: a lost key cannot be made again
                        os.link(new, file)
                    except FileExistsError as error:
                        raise KeyExists(f"{file}: already exists") from error
            # a key that signed something must survive a power cut, with its name
            sync(path.parent)
    except FileNotFoundError as error:  # how /proc refuses a new folder
        raise StoreUnwritable(f"{path.parent}: cannot be made") from error
    return public


def read_private(
    pem: bytes, what: str, passphrase: bytes | None = None, curves: Sequence[str] = P256
) -> PrivateKey:
    """A private key, if it is of our kind."""
    try:
        key = serialization.load_pem_private_key(pem, passphrase)
    # how cryptography says that a passphrase is missing or not wanted
    except TypeError as error:
        problem = "needs its passphrase" if passphrase is None else "has no passphrase"
        raise KeyInvalid(f"{what}: {problem}", "Set SM120_KEY_PASSPHRASE, or unset it.") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise KeyInvalid(
            f"{what}: is not a private key, or the passphrase is wrong",
            "--key names the private half, SM120_KEY_PASSPHRASE its passphrase.",
        ) from error
    if not isinstance(key, PrivateKey) or key.curve.name not in curves:
        raise _wrong_kind(what, curves)
    return key


def _wrong_kind(what: str, curves: Sequence[str]) -> KeyInvalid:
    named = " or ".join(f"P-{name[4:7]}" for name in curves)
    return KeyInvalid(f"{what}: is not an ECDSA key on {named}")


def read_public(pem: bytes, what: str, curves: Sequence[str] = P256) -> PublicKey:
    """A public key, if it is of our kind."""
    try:
        key = serialization.load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise KeyInvalid(
            f"{what}: is not a public key",
            "Name the public half: `sm120 evidence new-key` ends its name in .pub.",
        ) from error
    if not isinstance(key, PublicKey) or key.curve.name not in curves:
        raise _wrong_kind(what, curves)
    return key


def read_private_file(
    path: Path, passphrase: bytes | None = None, curves: Sequence[str] = P256
) -> PrivateKey:
    """A private key from a file that only its owner can read."""
    data = read_key_file(path)
    # as ssh does: a key that others could read may have been copied; a public one may be
    if b"PRIVATE KEY" in data and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise KeyInvalid(f"{path}: others can read it", f"chmod 600 {path}; better a new key.")
    return read_private(data, str(path), passphrase, curves)


def read_key_file(path: Path) -> bytes:
    """A key's file, if it can be one."""
    return read_limited(path, _MOST_BYTES, KeyInvalid)


@dataclass(frozen=True)
class LocalSigner:
    """A key in this process."""

    key: PrivateKey

    @property
    def key_id(self) -> str:
        return key_id(self.public)

    @property
    def public(self) -> PublicKey:
        return self.key.public_key()

    def sign(self, data: bytes) -> bytes:
        return self.key.sign(data, _ALGORITHM)


@dataclass(frozen=True)
class AgentSigner:
    """A program that reads bytes and answers with their signature (DER), such as an HSM's."""

    command: tuple[str, ...]
    public: PublicKey

    @property
    def key_id(self) -> str:
        return key_id(self.public)

    def sign(self, data: bytes) -> bytes:
        try:
            # agents are often reached through the user's ssh-agent; nothing else is passed on
            done = proc.read(self.command, env=proc.child_environment("SSH_AUTH_SOCK"), stdin=data)
        except OSError as error:
            raise SigningFailed(
                f"{self.command[0]}: {error.strerror}",
                "SM120_SIGNING_AGENT names the program that signs.",
            ) from error
        if done.returncode != 0:
            output = " ".join(done.stderr.decode(errors="replace").split())[-200:]
            raise SigningFailed(
                f"{self.command[0]}: exit code {done.returncode}: {output}",
                "Run the program that SM120_SIGNING_AGENT names by hand to see why.",
            )
        # the agent may hold another key than the configured one: check before anything is kept
        if not is_valid_signature(self.public, done.stdout, data):
            raise SigningFailed(
                f"{self.command[0]}: its output is not a signature by {self.key_id}",
                "Nothing was signed. The agent must hold the key whose public half is configured.",
            )
        return done.stdout


def find_signer(path: Path | None, environment: Mapping[str, str]) -> Signer | None:
    """Finds the named key, else the environment's or its agent, else the user's own; or none."""
    passphrase = environment.get("SM120_KEY_PASSPHRASE")
    secret = passphrase.encode() if passphrase else None
    if path is not None:
        return LocalSigner(read_private_file(path, secret))
    # CI systems hand secrets over in variables, not in files
    if pem := environment.get("SM120_SIGNING_KEY"):
        if "PRIVATE KEY" not in pem:
            raise KeyInvalid(
                "SM120_SIGNING_KEY: is not a private key",
                "It holds the key's text, not its path; --key takes a path.",
            )
        return LocalSigner(read_private(pem.encode(), "SM120_SIGNING_KEY", secret))
    if agent := environment.get("SM120_SIGNING_AGENT"):
        named = environment.get("SM120_SIGNING_PUBLIC_KEY")
        if not named:
            raise SigningFailed(
                "SM120_SIGNING_AGENT is set, but its public key is not named",
                "Set SM120_SIGNING_PUBLIC_KEY to the file of the agent's public key.",
            )
        public = read_public(read_key_file(Path(named)), named)
        return AgentSigner(tuple(shlex.split(agent)), public)
    own = own_key(environment)
    return LocalSigner(read_private_file(own, secret)) if own else None
