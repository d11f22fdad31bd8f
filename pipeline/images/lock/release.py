"""A suite's InRelease file: believed only where a known key signed it."""

from __future__ import annotations

import re
import tempfile
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from pipeline.core import proc
from pipeline.core.errors import IndexBroken, SignatureInvalid
from pipeline.core.model import Frozen
from pipeline.images.lock.debian import read_stanza
from pipeline.images.lock.openpgp import STRONG_DIGESTS, KeyUnreadable, binary_keyring

# Shipped with us, so that a lock can be made on any system.
DEBIAN_12_KEYRING = Path(__file__).parent / "keys" / "debian-12.gpg"

_BEGIN = b"-----BEGIN PGP SIGNED MESSAGE-----"
_END = b"-----END PGP SIGNATURE-----"
# digest, size, path; other tables (MD5Sum, SHA1) are never read
_HASH_LINE = re.compile(r"([0-9a-f]{64})\s+(\d{1,15})\s+(\S+)")
_REASONS = {  # by the word in gpgv's status
    "NO_PUBKEY": "signed by an unknown key",
    "EXPKEYSIG": "the key has expired",
    "REVKEYSIG": "the key was revoked",
    "EXPSIG": "the signature has expired",
}
_FIELDS = ("Suite", "Codename", "Date", "Valid-Until", "Acquire-By-Hash", "SHA256")


class IndexFile(Frozen):
    """What a Release file promises about one of its index files."""

    sha256: str
    size_bytes: int


class Release(Frozen):
    """The signed description of one suite."""

    suite: str
    codename: str
    date: datetime
    valid_until: datetime | None
    by_hash: bool
    files: dict[str, IndexFile]
    signers: frozenset[str] = frozenset()


class Verified(Frozen):
    """A text, and the fingerprints of the keys that signed it."""

    text: str
    signers: frozenset[str]


def read_release(
    inrelease: bytes,
    *,
    keyring: Path = DEBIAN_12_KEYRING,
    now: datetime | None = None,
    may_be_old: bool = False,
) -> Release:
    """The verified content of an InRelease file, still valid unless an old one will do."""
    verified = verify(inrelease, keyring)
    fields = read_stanza(verified.text, _FIELDS)
    release = Release(
        suite=fields.get("Suite", ""),
        codename=fields.get("Codename", ""),
        date=_date(fields, "Date"),
        valid_until=_date(fields, "Valid-Until") if "Valid-Until" in fields else None,
        by_hash=fields.get("Acquire-By-Hash", "no").lower() == "yes",
        files=_index_files(fields.get("SHA256", "")),
        signers=verified.signers,
    )
    expires = None if may_be_old else release.valid_until
    if expires is not None and expires < (now or datetime.now(UTC)):
        raise IndexBroken(
            f"{release.codename or release.suite}: the Release file expired on "
            f"{expires:%Y-%m-%d %H:%M} UTC",
            "The mirror is out of date, or this machine's clock is wrong.",
        )
    return release


def verify(inrelease: bytes, keyring: Path) -> Verified:
    """The signed text with its signers; at least one good signature with a strong digest.

    The text is what gpgv wrote out, never the bytes that came over the wire.
    """
    # text around the signed block is signed by no key, so it is not read
    lines = inrelease.rstrip().split(b"\n")
    if lines[0].rstrip() != _BEGIN or lines[-1].rstrip() != _END:
        raise SignatureInvalid("InRelease is not one signed message from first line to last")
    if sum(line.startswith(_BEGIN) for line in lines) != 1:
        raise SignatureInvalid("InRelease holds more than one signed message")
    gpgv = proc.find_tool("gpgv", "Install it: `apt-get install gpgv`.")
    keys = read_keyring(keyring)
    # a home of its own: the user's keyring and gpg.conf must not decide what is believed
    with tempfile.TemporaryDirectory(prefix="sm120-gpgv-") as home:
        signed, text, trusted = (Path(home, name) for name in ("InRelease", "text", "keys.gpg"))
        signed.write_bytes(inrelease)
        trusted.write_bytes(keys)
        args = [gpgv, "--homedir", home, "--keyring", str(trusted)]
        # status lines are for programs; messages on stderr change with the language
        args += ["--status-fd", "1", "--output", str(text), str(signed)]
        done = proc.read(args, env=proc.environment(LC_ALL="C"))
        signers = _signers(done.stdout.decode(errors="replace"))
        try:
            return Verified(text=text.read_bytes().decode(), signers=signers)
        except UnicodeDecodeError as error:
            raise IndexBroken("the Release file is not UTF-8") from error


def read_keyring(path: Path) -> bytes:
    """The public keys of a file, armored or binary, as gpgv reads them."""
    if not path.is_file():
        raise SignatureInvalid(
            f"there is no keyring {path}",
            "Install the package that has it (debian-archive-keyring), or name another.",
        )
    try:
        return binary_keyring(path.read_bytes())
    except (KeyUnreadable, OSError) as error:
        raise SignatureInvalid(
            f"{path.name} {error}" if isinstance(error, KeyUnreadable) else f"{path}: {error}",
            "Name the repository's public key; as published, armored or binary, will do.",
        ) from error


def _signers(status: str) -> frozenset[str]:
    """Who signed: at least one good signature with a strong digest, and no bad one.

    gpgv's exit code cannot say this: Debian signs with the next release's key as well, and
    a signature by a key we do not have makes gpgv fail. Nor can its `--weak-digest SHA1`: that
    judges the key's own signatures too, and NVIDIA's key for Ubuntu 24.04 and Debian 12 is bound
    by SHA-1 (NVIDIA/cuda-repo-management#39).
    """
    lines = [line.split()[1:] for line in status.splitlines() if line.startswith("[GNUPG:] ")]
    seen = {line[0] for line in lines if line}
    # also beside a good signature: the text was changed
    if "BADSIG" in seen:
        raise SignatureInvalid("InRelease was changed after it was signed")
    valid, good = [], False
    for line in filter(None, lines):
        # https://github.com/gpg/gnupg/blob/master/doc/DETAILS lists the fields of these lines
        if line[0] == "VALIDSIG":
            # an expired key's signature is valid and not good
            valid += [line] if good and len(line) > 10 else []
        if line[0] in ("NEWSIG", "GOODSIG", "VALIDSIG"):
            good = line[0] == "GOODSIG"
    if not valid:
        why = "; ".join(text for word, text in _REASONS.items() if word in seen) or "unreadable"
        raise SignatureInvalid(f"InRelease has no valid signature by a known key ({why})")
    strong = [line for line in valid if int(line[8]) in STRONG_DIGESTS]
    if not strong:
        raise SignatureInvalid(
            "InRelease is signed with a digest that can be forged (SHA-1 or older)",
            "Nothing was used. Ask its owner to sign with SHA-256, or use another mirror.",
        )
    return frozenset(line[1] for line in strong)


def _date(fields: dict[str, str], name: str) -> datetime:
    try:
        moment = parsedate_to_datetime(fields[name])
    except (KeyError, ValueError) as error:
        raise IndexBroken(f"the Release file has no readable {name}") from error
    # a date without a zone is in UTC: archives write no other
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _index_files(table: str) -> dict[str, IndexFile]:
    files: dict[str, IndexFile] = {}
    for line in filter(None, map(str.strip, table.splitlines())):
        match = _HASH_LINE.fullmatch(line)
        if match is None:
            raise IndexBroken(f"not a line of a SHA256 table: {line[:100]!r}")
        sha256, size, path = match.groups()
        row = IndexFile(sha256=sha256, size_bytes=int(size))
        # two answers for one file would let the mirror choose
        if files.setdefault(path, row) != row:
            raise IndexBroken(f"the Release file gives two hashes for {path}")
    if not files:
        raise IndexBroken("the Release file has no SHA256 table")
    return files
