from __future__ import annotations

import hashlib
import lzma
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest

from pipeline.core.errors import IndexBroken, PipelineError, ResolveFailed, UnknownPackage
from pipeline.images.lock.debs import find_debian_source
from pipeline.images.lock.model import ArchivePin
from pipeline.images.spec.source import DebianSourceSpec
from tests.testbed.signer import Signer, new_signer

pytestmark = pytest.mark.skipif(
    not (shutil.which("gpg") and shutil.which("gpgv")), reason="This machine has no GnuPG."
)
HASH = "ab" * 32
BEFORE = datetime(2026, 1, 1, 12, tzinfo=UTC)
AFTER = datetime(2026, 2, 1, tzinfo=UTC)


def stanza(
    version: str = "1.2-3", files: tuple[str, ...] = ("orig.tar.xz",), directory: str = "pool/n"
) -> str:
    upstream = version.partition("-")[0]
    rows = "".join(f" {HASH} 10 thing_{upstream}.{file}\n" for file in files)
    return (
        f"Package: thing\nVersion: {version}\nDirectory: {directory}\n"
        f"Files:\n {'c' * 32} 10 thing_{upstream}.orig.tar.xz\nChecksums-Sha256:\n{rows}\n"
    )


@dataclass
class Mirror:
    """A small signed archive in memory."""

    signer: Signer
    files: dict[str, bytes] = field(default_factory=dict)

    def publish(self, sources: str) -> None:
        packed = lzma.compress(sources.encode())
        digest = hashlib.sha256(packed).hexdigest()
        release = (
            "Codename: s\nDate: Thu, 01 Jan 2026 10:00:00 UTC\n"
            "Valid-Until: Fri, 02 Jan 2026 10:00:00 UTC\nAcquire-By-Hash: yes\n"
            f"SHA256:\n {digest} {len(packed)} contrib/source/Sources.xz\n"
        )
        self.files["dists/s/InRelease"] = self.signer.sign(release)
        self.files[f"dists/s/contrib/source/by-hash/SHA256/{digest}"] = packed

    def find(self, *, now: datetime = BEFORE, **wanted: str) -> ArchivePin:
        spec = {"package": "thing", "suite": "s", "component": "contrib", **wanted}
        return find_debian_source(
            DebianSourceSpec.model_validate(spec),
            lambda path, _: self.files[path],
            self.signer.keyring,
            now=now,
        )


@pytest.fixture(scope="module")
def signer() -> Iterator[Signer]:
    with new_signer("archive@example.invalid") as made:
        yield made


@pytest.fixture
def mirror(signer: Signer) -> Mirror:
    return Mirror(signer)


def test_the_upstream_archive_is_chosen_among_the_files_of_a_source_package(mirror: Mirror) -> None:
    extra = ("orig.tar.xz.asc", "orig-vendor.tar.xz", "debian.tar.xz", "orig.tar.xz", "dsc")
    mirror.publish(stanza(files=extra))
    pin = mirror.find()
    assert (pin.kind, pin.file, pin.path) == (
        "debian",
        "thing_1.2.orig.tar.xz",
        "pool/n/thing_1.2.orig.tar.xz",
    )
    assert (pin.sha256, pin.size_bytes, pin.version) == (HASH, 10, "1.2-3")


def test_the_newest_version_is_taken_and_a_named_one_before_it(mirror: Mirror) -> None:
    mirror.publish(stanza("1.9-1") + stanza("1.10-1") + stanza("1.10~rc1-1"))
    assert mirror.find().version == "1.10-1"
    assert mirror.find(version="1.9-1").version == "1.9-1"


def test_the_archive_of_a_native_package_is_its_own(mirror: Mirror) -> None:
    mirror.publish(stanza("7", files=("tar.xz", "dsc")))
    assert mirror.find().file == "thing_7.tar.xz"


def test_an_expired_index_will_do_only_for_a_version_that_the_spec_names(mirror: Mirror) -> None:
    mirror.publish(stanza())
    assert mirror.find(now=AFTER, version="1.2-3").version == "1.2-3"
    with pytest.raises(IndexBroken, match="expired on 2026-01-02"):
        mirror.find(now=AFTER)


@pytest.mark.parametrize(
    ("sources", "wanted", "error"),
    [
        (stanza(), {"package": "other"}, UnknownPackage),
        (stanza(), {"version": "1.2-4"}, ResolveFailed),
        (stanza(), {"component": "main"}, IndexBroken),
        (stanza(files=("dsc", "debian.tar.xz")), {}, ResolveFailed),
        (stanza(files=("orig.tar.xz", "orig.tar.gz")), {}, ResolveFailed),
        (stanza(directory="../../etc"), {}, IndexBroken),
        (stanza(directory="/etc"), {}, IndexBroken),
        (stanza().replace(HASH, "short"), {}, IndexBroken),
        (stanza().replace(f"{HASH} 10", f"{HASH} many"), {}, IndexBroken),
        (stanza().replace(f"{HASH} 10", HASH), {}, IndexBroken),
        (stanza().replace("Version: 1.2-3", "Version: -"), {}, PipelineError),
    ],
)
def test_a_source_package_that_is_not_there_or_cannot_be_used_is_refused(
    mirror: Mirror, sources: str, wanted: dict[str, str], error: type[PipelineError]
) -> None:
    mirror.publish(sources)
    with pytest.raises(error):
        mirror.find(now=BEFORE, **wanted)


def test_an_index_with_other_bytes_than_promised_is_refused(mirror: Mirror) -> None:
    mirror.publish(stanza())
    (name,) = (path for path in mirror.files if "by-hash" in path)
    mirror.files[name] = mirror.files[name][:-1]
    with pytest.raises(IndexBroken, match="promises"):
        mirror.find(version="1.2-3")
