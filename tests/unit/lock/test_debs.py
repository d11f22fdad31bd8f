from __future__ import annotations

import gzip
import hashlib
import lzma
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

import pytest

from pipeline.core.errors import IndexBroken, PipelineError, SignatureInvalid
from pipeline.images.lock.debs import Get, inflated, resolve_debs
from tests.testbed.signer import Signer, new_signer

pytestmark = pytest.mark.skipif(
    not (shutil.which("gpg") and shutil.which("gpgv")), reason="This machine has no GnuPG."
)

Packer = Callable[[bytes], bytes]
PACKERS: dict[str, Packer] = {".xz": lzma.compress, ".gz": gzip.compress, "": bytes}


def stanza(name: str, version: str = "1.0") -> str:
    pool = "pool/updates/main" if "u" in version else "pool/main"
    return (
        f"Package: {name}\nVersion: {version}\nArchitecture: amd64\n"
        f"Filename: {pool}/{name}_{version}_amd64.deb\nSize: 10\nSHA256: {'ab' * 32}\n\n"
    )


@dataclass
class Mirror:
    """A small signed archive in memory, which notes what was asked of it."""

    signer: Signer
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def get(self, path: str, most_bytes: int) -> bytes:
        self.asked.append(path)
        assert len(self.files[path]) <= most_bytes
        return self.files[path]

    def add(
        self,
        suite: str,
        packages: str,
        *,
        packing: str = ".xz",
        by_hash: bool = False,
        codename: str = "",
    ) -> str:
        """Publish a suite and return the path of its index."""
        packed = PACKERS[packing](packages.encode())
        digest = hashlib.sha256(packed).hexdigest()
        name = f"main/binary-amd64/Packages{packing}"
        release = (
            f"Suite: stable\nCodename: {codename or suite}\n"
            f"Date: Thu, 01 Jan 2026 10:00:00 UTC\n"
            f"Acquire-By-Hash: {'yes' if by_hash else 'no'}\n"
            f"SHA256:\n {digest} {len(packed)} {name}\n"
        )
        place = f"main/binary-amd64/by-hash/SHA256/{digest}" if by_hash else name
        self.files[f"dists/{suite}/InRelease"] = self.signer.sign(release)
        self.files[f"dists/{suite}/{place}"] = packed
        return f"dists/{suite}/{place}"

    def resolve(self, *more: tuple[str, Get], component: str = "main") -> list[str]:
        suites = [("s", self.get), *more]
        pins = resolve_debs(["a"], [], suites, [component], "amd64", self.signer.keyring)
        return [pin.path for pin in pins]


@pytest.fixture(scope="module")
def signer() -> Iterator[Signer]:
    with new_signer("archive@example.invalid") as made:
        yield made


@pytest.fixture
def mirror(signer: Signer) -> Mirror:
    return Mirror(signer)


@pytest.mark.parametrize("packing", [".xz", ".gz", ""])
def test_a_signed_index_is_resolved_however_it_is_packed(mirror: Mirror, packing: str) -> None:
    mirror.add("s", stanza("a"), packing=packing)
    assert mirror.resolve() == ["pool/main/a_1.0_amd64.deb"]


def test_an_index_is_asked_for_by_its_hash_where_the_archive_can(mirror: Mirror) -> None:
    place = mirror.add("s", stanza("a"), by_hash=True)
    mirror.resolve()
    assert mirror.asked == ["dists/s/InRelease", place]


def test_the_security_suite_comes_from_its_own_archive(signer: Signer) -> None:
    main, security = Mirror(signer), Mirror(signer)
    main.add("s", stanza("a"))
    security.add("s-security", stanza("a", "1.0+u1"))
    paths = main.resolve(("s-security", security.get))
    assert paths == ["pool/updates/main/a_1.0+u1_amd64.deb"]
    assert all("security" not in path for path in main.asked)


def test_nothing_but_the_release_is_asked_for_when_its_signature_is_bad(mirror: Mirror) -> None:
    mirror.add("s", stanza("a"))
    inrelease = mirror.files["dists/s/InRelease"]
    mirror.files["dists/s/InRelease"] = inrelease.replace(b"Codename: s", b"Codename: t")
    with pytest.raises(SignatureInvalid):
        mirror.resolve()
    assert mirror.asked == ["dists/s/InRelease"]


@pytest.mark.parametrize("day", [1, 3])
def test_an_expired_release_is_judged_by_the_time_it_is_given(mirror: Mirror, day: int) -> None:
    index = mirror.add("s", stanza("a"))
    text = (
        "Codename: s\nDate: Thu, 01 Jan 2026 10:00:00 UTC\n"
        "Valid-Until: Fri, 02 Jan 2026 10:00:00 UTC\n"
        f"SHA256:\n {hashlib.sha256(mirror.files[index]).hexdigest()} {len(mirror.files[index])}"
        " main/binary-amd64/Packages.xz\n"
    )
    mirror.files["dists/s/InRelease"] = mirror.signer.sign(text)
    now = datetime(2026, 1, day, tzinfo=UTC)
    resolve = partial(resolve_debs, ["a"], [], [("s", mirror.get)], ["main"], "amd64")
    if day == 1:
        assert [row.name for row in resolve(mirror.signer.keyring, now=now)] == ["a"]
        return
    with pytest.raises(IndexBroken, match="expired on 2026-01-02"):
        resolve(mirror.signer.keyring, now=now)


def test_another_suites_release_is_refused_though_its_signature_is_good(mirror: Mirror) -> None:
    mirror.add("s", stanza("a"), codename="older")
    with pytest.raises(IndexBroken, match="asked for suite s, received older"):
        mirror.resolve()


def _flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    "damage",
    [_flip, lambda d: d[:-1], lambda d: d + b"\0", lambda _: b"", lambda d: d * 2],
    ids=["flipped", "short", "long", "empty", "twice"],
)
@pytest.mark.parametrize("by_hash", [True, False])
def test_an_index_with_other_bytes_than_promised_is_refused(
    mirror: Mirror, damage: Packer, by_hash: bool
) -> None:
    place = mirror.add("s", stanza("a"), by_hash=by_hash)
    mirror.files[place] = damage(mirror.files[place])
    with pytest.raises(IndexBroken, match="the Release file promises"):
        mirror.resolve()


def test_a_component_that_the_suite_lacks_is_named(mirror: Mirror) -> None:
    mirror.add("s", stanza("a"))
    with pytest.raises(IndexBroken, match="no contrib/binary-amd64/Packages"):
        mirror.resolve(component="contrib")


@pytest.mark.parametrize(
    ("packed", "packing"),
    [
        (lzma.compress(b"\0" * 2000), ".xz"),
        (gzip.compress(b"\0" * 2000), ".gz"),
        (b"\0" * 2000, ""),
        (lzma.compress(b"x")[:-4], ".xz"),
        (gzip.compress(b"x")[:-4], ".gz"),
        (b"not packed", ".xz"),
        (b"not packed", ".gz"),
    ],
    ids=["large xz", "large gzip", "large", "cut xz", "cut gzip", "no xz", "no gzip"],
)
def test_an_index_that_inflates_too_far_or_not_at_all_is_refused(
    packed: bytes, packing: str
) -> None:
    with pytest.raises(PipelineError):
        inflated(packed, packing, 1000)


PACKED = {".xz": lzma.compress(b"Package: a\n" * 80), ".gz": gzip.compress(b"Package: a\n" * 80)}
# an xz file ends with its index and a footer, a gzip file with a checksum and a length
ENDS = {".xz": 36, ".gz": 8}


@pytest.mark.parametrize("packing", [".xz", ".gz"])
def test_no_damage_to_the_end_of_an_index_file_is_passed_over(packing: str) -> None:
    whole = PACKED[packing]
    assert inflated(whole, packing, 1000) == b"Package: a\n" * 80
    for at in range(1, ENDS[packing] + 1):
        packed = bytearray(whole)
        packed[-at] ^= 0x10
        with pytest.raises(IndexBroken, match="cannot be decompressed"):
            inflated(bytes(packed), packing, 1000)
        with pytest.raises(IndexBroken, match="cannot be decompressed"):
            inflated(whole[:-at], packing, 1000)


@pytest.mark.parametrize("packing", [".xz", ".gz"])
def test_an_index_file_of_just_the_limit_is_read_and_its_end_is_checked(packing: str) -> None:
    whole = PACKED[packing]
    assert len(inflated(whole, packing, 880)) == 880
    with pytest.raises(IndexBroken, match="larger than 879"):
        inflated(whole, packing, 879)
    packed = whole[:-1] + bytes([whole[-1] ^ 1])
    with pytest.raises(IndexBroken, match="cannot be decompressed"):
        inflated(packed, packing, 880)
