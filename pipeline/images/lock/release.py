"""A suite's InRelease file, believed only where a known key signed it, and OpenPGP public keys.

gpgv reads binary keyrings only, and vendors publish armored keys. Packets are those of RFC 4880.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import tempfile
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from pipeline.core import proc
from pipeline.core.errors import IndexBroken, SignatureInvalid
from pipeline.core.model import Frozen
from pipeline.images.lock.debian import read_stanza

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


def read_release(
    inrelease: bytes,
    *,
    keyring: Path = DEBIAN_12_KEYRING,
    now: datetime | None = None,
    may_be_old: bool = False,
) -> Release:
    """Reads the verified content of an InRelease file, valid today unless it `may_be_old`."""
    text, signers = verify_release(inrelease, keyring)
    fields = read_stanza(text, _FIELDS)
    files: dict[str, IndexFile] = {}
    for line in filter(None, map(str.strip, fields.get("SHA256", "").splitlines())):
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
    release = Release(
        suite=fields.get("Suite", ""),
        codename=fields.get("Codename", ""),
        date=_date(fields, "Date"),
        valid_until=_date(fields, "Valid-Until") if "Valid-Until" in fields else None,
        by_hash=fields.get("Acquire-By-Hash", "no").lower() == "yes",
        files=files,
        signers=signers,
    )
    expires = None if may_be_old else release.valid_until
    if expires is not None and expires < (now or datetime.now(UTC)):
        raise IndexBroken(
            f"{release.codename or release.suite}: the Release file expired on "
            f"{expires:%Y-%m-%d %H:%M} UTC",
            "The mirror is out of date, or this machine's clock is wrong.",
        )
    return release


def verify_release(inrelease: bytes, keyring: Path) -> tuple[str, frozenset[str]]:
    """The signed text and who signed it: a good signature with a strong digest, and no bad one.

    The text is what gpgv wrote out, never the bytes that came over the wire.
    """
    # no key signs the text around the signed block, so we do not read it
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
        done = proc.read(args, env=proc.child_environment(LC_ALL="C"))
        status = done.stdout.decode(errors="replace").splitlines()
        # gpgv's exit code cannot say whether to believe it: Debian signs with the next release's
        # key as well, and a signature by a key we do not have makes gpgv fail. Nor can its
        # `--weak-digest SHA1`: that judges the key's own signatures too, and NVIDIA's key for
        # Ubuntu 24.04 and Debian 12 is bound by SHA-1 (NVIDIA/cuda-repo-management#39).
        rows = [
            words for line in status if line.startswith("[GNUPG:] ") and (words := line.split()[1:])
        ]
        seen = {words[0] for words in rows}
        # also beside a good signature: the text was changed
        if "BADSIG" in seen:
            raise SignatureInvalid("InRelease was changed after it was signed")
        valid, good = [], False
        for words in rows:
            # https://github.com/gpg/gnupg/blob/master/doc/DETAILS lists the fields of these lines
            if words[0] == "VALIDSIG":
                # an expired key's signature is valid and not good
                valid += [words] if good and len(words) > 10 else []
            if words[0] in ("NEWSIG", "GOODSIG", "VALIDSIG"):
                good = words[0] == "GOODSIG"
        if not valid:
            why = "; ".join(x for word, x in _REASONS.items() if word in seen) or "unreadable"
            raise SignatureInvalid(f"InRelease has no valid signature by a known key ({why})")
        strong = frozenset(words[1] for words in valid if int(words[8]) in STRONG_DIGESTS)
        if not strong:
            raise SignatureInvalid(
                "InRelease is signed with a digest that can be forged (SHA-1 or older)",
                "Nothing was used. Ask its owner to sign with SHA-256, or use another mirror.",
            )
        try:
            return text.read_bytes().decode(), strong
        except UnicodeDecodeError as error:
            raise IndexBroken("the Release file is not UTF-8") from error


def read_keyring(path: Path) -> bytes:
    """The public keys of a file, armored or binary, as gpgv reads them."""
    if not path.is_file():
        raise SignatureInvalid(
            f"there is no keyring {path}",
            "Install the package that has it (debian-archive-keyring), or name another.",
        )
    hint = "Name the repository's public key; as published, armored or binary, will do."
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SignatureInvalid(f"{path}: {error}", hint) from error
    # a keybox, as newer GnuPG writes them, or packets, whose first byte has its high bit set
    if data[8:12] == b"KBXf" or (data and data[0] & 0x80):
        return data
    lines = [line.strip() for line in data.splitlines()]
    keys = b""
    # whatever stands around the blocks
    while _KEY_BEGIN in lines and _KEY_END in (rest := lines[lines.index(_KEY_BEGIN) + 1 :]):
        end = rest.index(_KEY_END)
        block, lines = rest[:end], rest[end + 1 :]
        # headers such as `Version:` end at an empty line; `=` begins the checksum
        body = block[block.index(b"") + 1 :] if b"" in block else block
        try:
            keys += base64.b64decode(b"".join(x for x in body if x[:1] != b"="), validate=True)
        except binascii.Error as error:
            message = f"{path.name} is a damaged ASCII-armored key"
            raise SignatureInvalid(message, hint) from error
    if not keys:
        # the likeliest mistake, and one that its owner must hear of
        private = b"BEGIN PGP PRIVATE KEY" in data
        what = "a private key" if private else "no OpenPGP public key"
        raise SignatureInvalid(f"{path.name} holds {what}", hint)
    return keys


def _date(fields: dict[str, str], name: str) -> datetime:
    try:
        moment = parsedate_to_datetime(fields[name])
    except (KeyError, ValueError) as error:
        raise IndexBroken(f"the Release file has no readable {name}") from error
    # a date without a zone is in UTC: archives write no other
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


_KEY_BEGIN, _KEY_END = (b"-----%s PGP PUBLIC KEY BLOCK-----" % word for word in (b"BEGIN", b"END"))
_PUBLIC_KEY, _SUBKEY, _SIGNATURE = 6, 14, 2
# the self-signatures that make a key usable: user IDs, the key itself, its subkeys
_BINDINGS = (0x10, 0x11, 0x12, 0x13, 0x18, 0x1F)
_ISSUER, _ISSUER_FINGERPRINT = 16, 33
# SHA-256, SHA-384, SHA-512, SHA3-256, SHA3-512: the digests that apt and Sequoia believe
STRONG_DIGESTS = frozenset({8, 9, 10, 12, 14})


def sha1_bound(keyring: bytes) -> frozenset[str]:
    """Fingerprints of the keys that no signature with a strong digest binds, in capitals.

    gpgv takes such a key; Sequoia, with which Debian 13's apt verifies, does not.
    """
    primaries: dict[str, str] = {}  # of each key and subkey
    digests: dict[str, set[int]] = {}  # of the signatures that bind each of them
    name = primary = ""
    place = 0
    try:
        while place < len(keyring):
            first = keyring[place]
            if not first & 0x80:
                raise ValueError("not a packet")
            if first & 0x40:
                tag = first & 0x3F
                length, start = _new_length(keyring, place + 1)
            else:
                tag, width = (first >> 2) & 0x0F, 1 << (first & 3)
                # the old format's `until the end of the file`, which no exported key uses
                if width == 8:
                    raise ValueError("a packet of unknown length")
                start = place + 1 + width
                length = int.from_bytes(keyring[place + 1 : start])
            place = start + length
            if place > len(keyring):
                raise ValueError("a packet is cut off")
            body = keyring[start:place]
            if tag in (_PUBLIC_KEY, _SUBKEY):
                if body[0] != 4:
                    raise ValueError("not a version 4 key")
                # a name, not a proof: RFC 4880 makes version 4 fingerprints so
                packet = b"\x99" + len(body).to_bytes(2) + body
                name = hashlib.sha1(packet, usedforsecurity=False).hexdigest().upper()
                primary = name if tag == _PUBLIC_KEY else primary
                primaries[name] = primary
            elif tag == _SIGNATURE and name and _binds(body, primary):
                digests.setdefault(name, set()).add(body[3])
    except (IndexError, ValueError, OverflowError):
        return frozenset()  # a keybox, or packets that gpgv will judge
    weak = {name for name, used in digests.items() if not STRONG_DIGESTS & used}
    return frozenset(name for name, primary in primaries.items() if weak & {name, primary})


def _binds(signature: bytes, primary: str) -> bool:
    """Whether a signature is the key's own; other people's certifications bind nothing."""
    # version 3 has no subpackets, which say whose signature it is
    if signature[0] != 4 or signature[1] not in _BINDINGS:
        return False
    start, issuers = 4, []
    # the hashed subpackets, then the unhashed ones
    for _ in range(2):
        end = start + 2 + int.from_bytes(signature[start : start + 2])
        start += 2
        while start < end:
            length, start = _new_length(signature, start)
            if length == 0:
                raise ValueError("an empty subpacket")
            kind, value = signature[start] & 0x7F, signature[start + 1 : start + length]
            if kind in (_ISSUER, _ISSUER_FINGERPRINT):
                issuers.append((value if kind == _ISSUER else value[1:]).hex().upper())
            start += length
    # an issuer may be named by the last eight bytes of its fingerprint
    return any(primary.endswith(issuer) for issuer in issuers)


def _new_length(data: bytes, place: int) -> tuple[int, int]:
    """A length in the newer form, and where what it measures begins."""
    first = data[place]
    if first < 192:
        return first, place + 1
    if first < 224:
        return ((first - 192) << 8) + data[place + 1] + 192, place + 2
    if first == 255:
        return int.from_bytes(data[place + 1 : place + 5]), place + 5
    raise ValueError("a length in parts")
