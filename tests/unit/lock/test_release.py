from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline.core.errors import IndexBroken, MissingTool, SignatureInvalid
from pipeline.images.lock.release import DEBIAN_12_KEYRING, read_release, verify_release
from tests.testbed.signer import Signer, new_old_signer, new_signer

pytestmark = pytest.mark.skipif(
    not (shutil.which("gpg") and shutil.which("gpgv")), reason="This machine has no GnuPG."
)

HASH = "ab" * 32
THEN = ("--faked-system-time", "20240101T000000!")
NOW = datetime(2026, 1, 10, tzinfo=UTC)
TEXT = f"""Suite: stable
Codename: bookworm
Date: Thu, 01 Jan 2026 10:00:00 UTC
Acquire-By-Hash: yes
SHA256:
 {HASH}  123 main/binary-amd64/Packages.xz
 {HASH}       4 main/binary-arm64/Packages
"""


@pytest.fixture(scope="module")
def archive() -> Iterator[Signer]:
    with new_signer("archive@example.invalid") as signer:
        yield signer


@pytest.fixture(scope="module")
def unknown() -> Iterator[Signer]:
    with new_signer("unknown@example.invalid") as signer:
        yield signer


def test_a_signed_release_is_read(archive: Signer) -> None:
    release = read_release(archive.sign(TEXT), keyring=archive.keyring, now=NOW)
    assert (release.suite, release.codename) == ("stable", "bookworm")
    assert release.date == datetime(2026, 1, 1, 10, tzinfo=UTC)
    assert (release.valid_until, release.by_hash) == (None, True)
    packages = release.files["main/binary-amd64/Packages.xz"]
    assert (packages.sha256, packages.size_bytes) == (HASH, 123)


def test_a_release_is_good_until_its_last_day(archive: Signer) -> None:
    text = TEXT + "Valid-Until: Sun, 11 Jan 2026 10:00:00 UTC\n"
    release = read_release(archive.sign(text), keyring=archive.keyring, now=NOW)
    assert release.valid_until == datetime(2026, 1, 11, 10, tzinfo=UTC)


def test_a_second_signature_by_an_unknown_key_does_no_harm(
    archive: Signer, unknown: Signer
) -> None:
    both = _sign_with_both(archive, unknown, TEXT)
    assert verify_release(both, archive.keyring)[0] == TEXT


def test_the_keys_we_ship_are_debian_12s_three() -> None:
    args = ["gpg", "--show-keys", "--with-colons", str(DEBIAN_12_KEYRING)]
    shown = subprocess.run(args, capture_output=True, text=True, check=True).stdout
    owners = sorted(line.split(":")[9] for line in shown.splitlines() if line.startswith("uid:"))
    assert [owner.partition(" <")[0] for owner in owners] == [
        "Debian Archive Automatic Signing Key (12/bookworm)",
        "Debian Security Archive Automatic Signing Key (12/bookworm)",
        "Debian Stable Release Key (12/bookworm)",
    ]


def test_an_expired_release_is_refused(archive: Signer) -> None:
    signed = archive.sign(TEXT + "Valid-Until: Fri, 09 Jan 2026 10:00:00 UTC\n")
    with pytest.raises(IndexBroken, match="expired on 2026-01-09"):
        read_release(signed, keyring=archive.keyring, now=NOW)


def test_a_changed_letter_is_found(archive: Signer) -> None:
    changed = archive.sign(TEXT).replace(b"Codename: bookworm", b"Codename: bookwurm")
    with pytest.raises(SignatureInvalid, match="changed after it was signed"):
        verify_release(changed, archive.keyring)


def test_an_added_hash_is_found(archive: Signer) -> None:
    line = f" {HASH}  123 main".encode()
    changed = archive.sign(TEXT).replace(line, b" " + b"cd" * 32 + b" 9 evil\n" + line)
    with pytest.raises(SignatureInvalid):
        verify_release(changed, archive.keyring)


def test_a_signature_by_an_unknown_key_is_refused(archive: Signer, unknown: Signer) -> None:
    with pytest.raises(SignatureInvalid, match="unknown key"):
        verify_release(unknown.sign(TEXT), archive.keyring)


def test_debians_keyring_does_not_know_a_throwaway_key(archive: Signer) -> None:
    with pytest.raises(SignatureInvalid, match="unknown key"):
        read_release(archive.sign(TEXT))


def test_one_good_signature_does_not_excuse_a_bad_one(
    archive: Signer, unknown: Signer, tmp_path: Path
) -> None:
    keyring = tmp_path / "both.gpg"
    keyring.write_bytes(archive.keyring.read_bytes() + unknown.keyring.read_bytes())
    assert verify_release(_sign_with_both(archive, unknown, TEXT), keyring)[0] == TEXT
    with pytest.raises(SignatureInvalid, match="changed after it was signed"):
        verify_release(_sign_with_both(archive, unknown, TEXT, "other text\n"), keyring)


@pytest.mark.parametrize("place", ["before", "after"])
def test_text_around_the_signed_block_is_refused(archive: Signer, place: str) -> None:
    evil = TEXT.replace("bookworm", "evil").encode() + b"\n"
    signed = archive.sign(TEXT)
    with pytest.raises(SignatureInvalid, match="from first line to last"):
        verify_release(evil + signed if place == "before" else signed + evil, archive.keyring)


def test_two_signed_blocks_are_one_too_many(archive: Signer) -> None:
    with pytest.raises(SignatureInvalid, match="more than one"):
        verify_release(archive.sign(TEXT) + archive.sign(TEXT), archive.keyring)


def test_text_between_the_block_and_its_signature_header_breaks_it(archive: Signer) -> None:
    marker = b"-----BEGIN PGP SIGNATURE-----"
    changed = archive.sign(TEXT).replace(marker, b"Codename: evil\n" + marker)
    with pytest.raises(SignatureInvalid):
        verify_release(changed, archive.keyring)


@pytest.mark.parametrize("kept", [0.05, 0.5, 0.8, 0.95])
def test_a_truncated_file_is_refused(archive: Signer, kept: float) -> None:
    signed = archive.sign(TEXT)
    with pytest.raises(SignatureInvalid):
        verify_release(signed[: int(len(signed) * kept)], archive.keyring)


@pytest.mark.parametrize("raw", [b"", b"\n", TEXT.encode(), b"<html>captive portal</html>"])
def test_what_is_not_signed_is_refused(archive: Signer, raw: bytes) -> None:
    with pytest.raises(SignatureInvalid):
        verify_release(raw, archive.keyring)


def test_a_missing_keyring_is_named(archive: Signer, tmp_path: Path) -> None:
    with pytest.raises(SignatureInvalid, match="no keyring"):
        verify_release(archive.sign(TEXT), tmp_path / "none.gpg")


def test_an_empty_keyring_trusts_nobody(archive: Signer, tmp_path: Path) -> None:
    (tmp_path / "empty.gpg").touch()
    with pytest.raises(SignatureInvalid):
        verify_release(archive.sign(TEXT), tmp_path / "empty.gpg")


def test_a_machine_without_gpgv_is_told_what_to_install(
    archive: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed = archive.sign(TEXT)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(MissingTool) as caught:
        verify_release(signed, archive.keyring)
    assert "apt-get install gpgv" in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "Suite: stable\nDate: Thu, 01 Jan 2026 10:00:00 UTC\n",
        TEXT.replace("Date: Thu, 01 Jan 2026 10:00:00 UTC\n", ""),
        TEXT.replace("Thu, 01 Jan 2026", "some day"),
        TEXT.replace(HASH, HASH[:-1]),
        TEXT.replace("  123 ", "  -1 "),
        TEXT + f" {'cd' * 32} 123 main/binary-amd64/Packages.xz\n",
        TEXT + "\n" + TEXT,
    ],
    ids=["no table", "no date", "no such date", "short hash", "size", "two hashes", "two stanzas"],
)
def test_a_signed_release_that_contradicts_itself_is_refused(archive: Signer, text: str) -> None:
    with pytest.raises(IndexBroken):
        read_release(archive.sign(text), keyring=archive.keyring, now=NOW)


def _sign_with_both(
    archive: Signer, unknown: Signer, text: str, unknowns_text: str = "", weak: str = ""
) -> bytes:
    """One text with two signatures, as Debian signs with this release's key and the next's."""
    one = archive.sign(text, *(("--digest-algo", weak) if weak else ()))
    when = THEN if weak else ()
    two = unknown.gpg(*when, "--detach-sign", stdin=_as_signed(unknowns_text or text))
    head, marker, armor = one.partition(b"-----BEGIN PGP SIGNATURE-----")
    packets = archive.gpg("--dearmor", stdin=marker + armor) + two
    enarmored = archive.gpg("--enarmor", stdin=packets)
    return head + enarmored.replace(b"ARMORED FILE", b"SIGNATURE")


def _as_signed(text: str) -> bytes:
    """Cleartext signatures are made over lines that end in CR LF, without the last end."""
    return text.removesuffix("\n").replace("\n", "\r\n").encode()


@pytest.fixture(scope="module")
def old() -> Iterator[Signer]:
    """A key like NVIDIA's 3BF863CC: its own signature is SHA-1."""
    with new_old_signer("old@example.invalid") as signer:
        yield signer


@pytest.mark.parametrize("digest", ["SHA256", "SHA512"])
def test_a_key_bound_by_sha1_may_sign_with_a_strong_digest(old: Signer, digest: str) -> None:
    assert verify_release(old.sign(TEXT, "--digest-algo", digest), old.keyring)[0] == TEXT


@pytest.mark.parametrize("digest", ["SHA1", "RIPEMD160", "SHA224"])
def test_a_release_signed_with_a_weak_digest_is_refused(old: Signer, digest: str) -> None:
    with pytest.raises(SignatureInvalid, match="digest that can be forged"):
        verify_release(old.sign(TEXT, "--digest-algo", digest), old.keyring)


def test_a_release_signed_with_md5_is_refused(old: Signer) -> None:
    with pytest.raises(SignatureInvalid):
        verify_release(
            old.sign(TEXT, "--allow-weak-digest-algos", "--digest-algo", "MD5"), old.keyring
        )


def test_a_changed_release_by_a_key_bound_by_sha1_is_found(old: Signer) -> None:
    changed = old.sign(TEXT, "--digest-algo", "SHA512").replace(b"bookworm", b"bookwurm")
    with pytest.raises(SignatureInvalid, match="changed after it was signed"):
        verify_release(changed, old.keyring)


def test_a_key_bound_by_sha1_is_no_pass_for_an_unknown_key(old: Signer, unknown: Signer) -> None:
    with pytest.raises(SignatureInvalid, match="unknown key"):
        verify_release(unknown.sign(TEXT), old.keyring)


def test_a_strong_signature_by_an_expired_key_does_not_lift_a_weak_one(
    old: Signer, tmp_path: Path
) -> None:
    with new_signer("gone@example.invalid", "ed25519", *THEN, expires="1d") as gone:
        both = _sign_with_both(old, gone, TEXT, weak="SHA1")
        both = both.replace(b"Hash: SHA1\n", b"Hash: SHA1,SHA256\n")
        keyring = tmp_path / "both.gpg"
        keyring.write_bytes(old.keyring.read_bytes() + gone.keyring.read_bytes())
        with pytest.raises(SignatureInvalid, match="digest that can be forged"):
            verify_release(both, keyring)


def test_an_expired_key_is_refused_and_named() -> None:
    with new_signer("gone@example.invalid", "ed25519", *THEN, expires="1d") as gone:
        signed = gone.sign(TEXT, *THEN)
        with pytest.raises(SignatureInvalid, match="the key has expired"):
            verify_release(signed, gone.keyring)


def test_a_revoked_key_is_refused_and_named() -> None:
    with new_signer("lost@example.invalid") as lost:
        signed = lost.sign(TEXT)
        note = next((lost.home / "openpgp-revocs.d").glob("*.rev"))
        lost.gpg("--import", stdin=note.read_bytes().replace(b":-----BEGIN", b"-----BEGIN"))
        lost.keyring.write_bytes(lost.gpg("--export"))
        with pytest.raises(SignatureInvalid, match="the key was revoked"):
            verify_release(signed, lost.keyring)


def test_an_armored_key_is_as_good_as_a_binary_one(archive: Signer, tmp_path: Path) -> None:
    armored = tmp_path / "3bf863cc.pub"
    armored.write_bytes(archive.armored())
    assert verify_release(archive.sign(TEXT), armored)[0] == TEXT
    # from a web page: a header, Windows' line ends, text around it, two keys in one file
    lines = archive.armored().replace(b"BLOCK-----\n\n", b"BLOCK-----\nVersion: 1\n\n", 1)
    armored.write_bytes(b"# the key\r\n" + lines.replace(b"\n", b"\r\n"))
    assert verify_release(archive.sign(TEXT), armored)[0] == TEXT


def test_two_armored_keys_in_one_file_are_both_known(
    archive: Signer, unknown: Signer, tmp_path: Path
) -> None:
    both = tmp_path / "both.asc"
    both.write_bytes(unknown.armored() + archive.armored())
    for signer in (archive, unknown):
        assert verify_release(signer.sign(TEXT), both)[0] == TEXT


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"<html>404 Not Found</html>", "holds no OpenPGP public key"),
        (b"", "holds no OpenPGP public key"),
        (b"-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nlQ==\n", "holds a private key"),
        (
            b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nm%DM\n-----END PGP PUBLIC KEY BLOCK-----\n",
            "damaged",
        ),
    ],
)
def test_a_file_that_is_no_public_key_is_named_with_what_to_give_instead(
    archive: Signer, tmp_path: Path, data: bytes, message: str
) -> None:
    wrong = tmp_path / "key.gpg"
    wrong.write_bytes(data)
    with pytest.raises(SignatureInvalid, match=f"key.gpg .*{message}") as caught:
        verify_release(archive.sign(TEXT), wrong)
    assert "public key" in caught.value.hint
