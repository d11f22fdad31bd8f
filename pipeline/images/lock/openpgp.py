"""OpenPGP public keys: out of their ASCII armor, and which of them stand on SHA-1 alone.

gpgv reads binary keyrings only, and vendors publish armored keys. Packets are those of RFC 4880.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator

_BEGIN, _END = (b"-----%s PGP PUBLIC KEY BLOCK-----" % word for word in (b"BEGIN", b"END"))
_PUBLIC_KEY, _SUBKEY, _SIGNATURE = 6, 14, 2
# the self-signatures that make a key usable: user IDs, the key itself, its subkeys
_BINDINGS = (0x10, 0x11, 0x12, 0x13, 0x18, 0x1F)
_ISSUER, _ISSUER_FINGERPRINT = 16, 33
# SHA-256, SHA-384, SHA-512, SHA3-256, SHA3-512: the digests that apt and Sequoia believe
STRONG_DIGESTS = frozenset({8, 9, 10, 12, 14})


class KeyUnreadable(ValueError):
    """The bytes are not public keys."""


def binary_keyring(data: bytes) -> bytes:
    """The keys as gpgv reads them, whether they came armored or not."""
    # a keybox, as newer GnuPG writes them, or packets, whose first byte has its high bit set
    if data[8:12] == b"KBXf" or (data and data[0] & 0x80):
        return data
    lines = [line.strip() for line in data.splitlines()]
    keys = b""
    # whatever stands around the blocks
    while _BEGIN in lines and _END in (rest := lines[lines.index(_BEGIN) + 1 :]):
        end = rest.index(_END)
        block, lines = rest[:end], rest[end + 1 :]
        # headers such as `Version:` end at an empty line; `=` begins the checksum
        body = block[block.index(b"") + 1 :] if b"" in block else block
        try:
            keys += base64.b64decode(b"".join(x for x in body if x[:1] != b"="), validate=True)
        except binascii.Error as error:
            raise KeyUnreadable("is a damaged ASCII-armored key") from error
    if not keys:
        # the likeliest mistake, and one that its owner must hear of
        private = b"BEGIN PGP PRIVATE KEY" in data
        raise KeyUnreadable("holds a private key" if private else "holds no OpenPGP public key")
    return keys


def sha1_bound(keyring: bytes) -> frozenset[str]:
    """Fingerprints of the keys that no signature with a strong digest binds, in capitals.

    gpgv takes such a key; Sequoia, with which Debian 13's apt verifies, does not.
    """
    primaries: dict[str, str] = {}  # of each key and subkey
    digests: dict[str, set[int]] = {}  # of the signatures that bind each of them
    name = primary = ""
    try:
        for tag, body in _packets(keyring):
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
    issuers = [
        value.hex().upper() if kind == _ISSUER else value[1:].hex().upper()
        for kind, value in _subpackets(signature)
        if kind in (_ISSUER, _ISSUER_FINGERPRINT)
    ]
    # an issuer may be named by the last eight bytes of its fingerprint
    return any(primary.endswith(issuer) for issuer in issuers)


def _subpackets(signature: bytes) -> Iterator[tuple[int, bytes]]:
    """The hashed and the unhashed ones of a version 4 signature."""
    start = 4
    for _ in range(2):
        end = start + 2 + int.from_bytes(signature[start : start + 2])
        start += 2
        while start < end:
            length, start = _new_length(signature, start)
            if length == 0:
                raise ValueError("an empty subpacket")
            yield signature[start] & 0x7F, signature[start + 1 : start + length]
            start += length


def _packets(data: bytes) -> Iterator[tuple[int, bytes]]:
    place = 0
    while place < len(data):
        first = data[place]
        if not first & 0x80:
            raise ValueError("not a packet")
        if first & 0x40:
            tag = first & 0x3F
            length, start = _new_length(data, place + 1)
        else:
            tag, width = (first >> 2) & 0x0F, 1 << (first & 3)
            # the old format's `until the end of the file`, which no exported key uses
            if width == 8:
                raise ValueError("a packet of unknown length")
            length, start = int.from_bytes(data[place + 1 : place + 1 + width]), place + 1 + width
        if start + length > len(data):
            raise ValueError("a packet is cut off")
        yield tag, data[start : start + length]
        place = start + length


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
