from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import CorruptArchive, HostileArchive, PipelineError, SpecInvalid
from pipeline.model import canonical_json, sha256_of
from pipeline.source import archive
from pipeline.source.archive import unpack
from pipeline.spec.source import ArchiveSpec

Member = tuple[str, dict[str, Any], bytes]


def file(name: str, content: bytes = b"text", **more: Any) -> Member:
    return name, more, content


def link(name: str, target: str) -> Member:
    return name, {"type": tarfile.SYMTYPE, "linkname": target}, b""


def tar_of(*members: Member) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, fields, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for key, value in fields.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., archive.Unpacked]:
    def run(data: bytes, **spec: Any) -> archive.Unpacked:
        path = tmp_path / "source.tar"
        path.write_bytes(data)
        wanted = ArchiveSpec.model_validate({"file": "source.tar", **spec})
        return unpack(path, wanted, tmp_path / "tree", "source.tar")

    return run


GOOD = (
    file("top/a.c"),
    file("top/run.sh", b"#!", mode=0o755),
    link("top/sub/link", "../a.c"),
    file("top/models/big"),
)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_the_same_files_have_one_digest_however_they_are_packed(
    opened: Callable[..., archive.Unpacked], pack: Callable[[bytes], bytes]
) -> None:
    done = opened(pack(tar_of(*GOOD)), leave_out=["models"])
    assert done.files == 3
    rows = [
        ["a.c", "file", sha256_of(b"text")],
        ["run.sh", "program", sha256_of(b"#!")],
        ["sub/link", "link", "../a.c"],
    ]
    assert done.tree == sha256_of(canonical_json(rows))


def test_order_owners_and_times_of_an_archive_are_nothing_to_the_digest(
    opened: Callable[..., archive.Unpacked], tmp_path: Path
) -> None:
    first = opened(tar_of(*GOOD)).tree
    (tmp_path / "tree").rename(tmp_path / "before")
    moved = [(name, {**more, "mtime": 5, "uid": 7}, data) for name, more, data in GOOD]
    assert opened(tar_of(*reversed(moved))).tree == first


@pytest.mark.parametrize(
    ("members", "error"),
    [
        ([file("/etc/passwd")], HostileArchive),
        ([file("top/../../out")], HostileArchive),
        ([link("top/out", "/etc/passwd")], HostileArchive),
        ([link("top/out", "../../out")], HostileArchive),
        ([link("top/d/x", ".."), link("top/a", "d/x/.."), file("top/a/made/f")], HostileArchive),
        (
            [link("top/a", "sub"), link("top/sub", "."), file("top/a"), file("top/a")],
            HostileArchive,
        ),
        ([file("top/a"), file("top/a")], HostileArchive),
        ([file("top/a"), link("top/a", "b")], HostileArchive),
        ([file("top/a"), file("top/a/b")], HostileArchive),
        ([file("top/null", b"", type=tarfile.CHRTYPE, devmajor=1, devminor=3)], HostileArchive),
        ([file("top/pipe", b"", type=tarfile.FIFOTYPE)], HostileArchive),
        ([file("top/hard", b"", type=tarfile.LNKTYPE, linkname="/etc/passwd")], HostileArchive),
        ([file("one/a"), file("two/b")], SpecInvalid),
    ],
)
def test_a_hostile_archive_is_refused_and_reaches_nothing_outside(
    opened: Callable[..., archive.Unpacked],
    tmp_path: Path,
    members: list[Member],
    error: type[PipelineError],
) -> None:
    with pytest.raises(error):
        opened(tar_of(*members))
    assert {path.name for path in tmp_path.iterdir()} <= {"source.tar", "tree"}


@pytest.mark.parametrize("limit", ["_MOST_FILES", "_MOST_BYTES"])
@pytest.mark.parametrize("spec", [{}, {"leave_out": ["models"]}, {"below": "top/models"}])
def test_a_bomb_is_refused_before_it_is_unpacked(
    opened: Callable[..., archive.Unpacked],
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    spec: dict[str, Any],
) -> None:
    monkeypatch.setattr(archive, limit, 3)
    with pytest.raises(HostileArchive, match="more files or bytes"):
        opened(tar_of(*GOOD), **spec)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"<html>not found</html>",
        lambda data: gzip.compress(data)[:-20],
        lambda data: bz2.compress(data)[:40] + b"x" * 40,
        lambda data: lzma.compress(data)[:150],
        lambda data: data[:700],
    ],
)
def test_a_damaged_archive_is_called_that(
    opened: Callable[..., archive.Unpacked], damage: Callable[[bytes], bytes]
) -> None:
    with pytest.raises(CorruptArchive, match="not a whole tar archive"):
        opened(damage(tar_of(*GOOD)))


def test_a_folder_that_the_archive_lacks_is_named(opened: Callable[..., archive.Unpacked]) -> None:
    with pytest.raises(SpecInvalid, match="nothing below 'top/other'"):
        opened(tar_of(*GOOD), below="top/other")
