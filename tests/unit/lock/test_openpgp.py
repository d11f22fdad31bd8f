"""Keys that stand on SHA-1 alone are distinguished from those that do not."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.core.errors import SignatureInvalid
from pipeline.images.lock.release import (
    DEBIAN_12_KEYRING,
    read_keyring,
    sha1_bound,
)
from tests.testbed.signer import Signer, new_old_signer, new_signer

pytestmark = pytest.mark.skipif(not shutil.which("gpg"), reason="This machine has no GnuPG.")
UNLOCKED = ("--pinentry-mode", "loopback", "--passphrase", "")


@pytest.fixture
def old() -> Iterator[Signer]:
    with new_old_signer("old@example.invalid") as signer:
        yield signer


def test_a_key_whose_own_signature_is_sha1_is_found(old: Signer) -> None:
    assert sha1_bound(old.keyring.read_bytes()) == {old.fingerprint()}


def test_a_subkey_of_it_is_no_better(old: Signer) -> None:
    old.gpg(*UNLOCKED, "--quick-add-key", old.fingerprint(), "ed25519", "sign", "never")
    assert len(sha1_bound(old.gpg("--export"))) == 2


def test_a_subkey_that_is_bound_by_sha1_is_found_under_a_good_key() -> None:
    with new_signer("new@example.invalid", "rsa3072") as new:
        add = ("--quick-add-key", new.fingerprint(), "rsa3072", "encr", "never")
        new.gpg(*UNLOCKED, "--cert-digest-algo", "SHA1", *add)
        weak = sha1_bound(new.gpg("--export"))
        assert len(weak) == 1
        assert weak != {new.fingerprint()}


def test_a_key_that_signed_itself_again_with_sha512_is_good(old: Signer) -> None:
    old.gpg(*UNLOCKED, "--cert-digest-algo", "SHA512", "--quick-add-uid", old.fingerprint(), "b")
    assert sha1_bound(old.gpg("--export")) == frozenset()


def test_a_strangers_strong_signature_binds_nothing(old: Signer) -> None:
    with new_signer("friend@example.invalid") as friend:
        friend.gpg("--import", stdin=old.gpg("--export"))
        friend.gpg(*UNLOCKED, "--yes", "--quick-sign-key", old.fingerprint())
        certified = friend.gpg("--export", old.fingerprint())
    assert len(certified) > len(old.keyring.read_bytes())
    assert sha1_bound(certified) == {old.fingerprint()}


def in_the_newer_form(keys: bytes) -> bytes:
    """The same packets, with lengths of one or two bytes as RFC 9580 has them."""
    made, place = b"", 0
    while place < len(keys):
        wide = 1 << (keys[place] & 3)
        start = place + 1 + wide
        end = start + int.from_bytes(keys[place + 1 : start])
        size = end - start
        length = bytes([size]) if size < 192 else (size - 192 + (192 << 8)).to_bytes(2)
        made += bytes([0xC0 | keys[place] >> 2 & 15]) + length + keys[start:end]
        place = end
    return made


def test_packets_in_the_newer_form_are_read_too(old: Signer) -> None:
    newer = in_the_newer_form(old.keyring.read_bytes())
    # the shortest length of two bytes begins with 192
    assert newer[:2] == b"\xc6\xc0"
    assert sha1_bound(newer) == {old.fingerprint()}


def test_todays_keys_and_debians_are_good() -> None:
    with new_signer("new@example.invalid") as new:
        assert sha1_bound(new.keyring.read_bytes()) == frozenset()
    assert sha1_bound(DEBIAN_12_KEYRING.read_bytes()) == frozenset()


def test_bytes_that_are_no_packets_are_left_to_gpgv(old: Signer) -> None:
    key = old.keyring.read_bytes()
    for data in (b"", b"\x00" * 40, b"\x99", b"\xc6\xff\xff\xff\xff\xff", key[:-1], key[:40]):
        assert sha1_bound(data) == frozenset()


def keys_in(tmp_path: Path, data: bytes) -> bytes:
    path = tmp_path / "keys.gpg"
    path.write_bytes(data)
    return read_keyring(path)


def test_a_keybox_and_a_binary_key_are_taken_as_they_are(old: Signer, tmp_path: Path) -> None:
    keybox = b"\x00\x00\x00\x20\x01\x01\x00\x02KBXf" + bytes(20)
    for data in (keybox, old.keyring.read_bytes()):
        assert keys_in(tmp_path, data) == data
    assert keys_in(tmp_path, old.armored()) == old.keyring.read_bytes()


@pytest.mark.parametrize("data", [b"", b"key", b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nmDM=\n"])
def test_what_is_no_key_is_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(SignatureInvalid, match=r"keys\.gpg holds no OpenPGP public key"):
        keys_in(tmp_path, data)


def test_a_large_file_that_is_no_key_is_refused_at_once(tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(SignatureInvalid):
        keys_in(tmp_path, b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n" * 20_000)
    assert sha1_bound(b"\x9a" + (70_000).to_bytes(4) + b"\x04" + bytes(69_999)) == frozenset()
    assert time.monotonic() - begun < 20
