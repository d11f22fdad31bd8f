from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import (
    CorruptArchive,
    HostileArchive,
    PatchConflict,
    PipelineError,
    SpecInvalid,
)
from pipeline.core.model import canonical_json, sha256_of
from pipeline.images.source import archive
from pipeline.images.source.archive import add_files, apply_patches, unpack_source
from pipeline.images.spec.source import ArchiveSpec, SourceSpec

Member = tuple[str, dict[str, Any], bytes]


def file(name: str, content: bytes = b"text", **more: Any) -> Member:
    return name, more, content


def link(name: str, target: str) -> Member:
    return name, {"type": tarfile.SYMTYPE, "linkname": target}, b""


def tar_of(*members: Member) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
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
        return unpack_source(path, wanted, tmp_path / "tree", "source.tar")

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


def pax(name: str, **headers: str) -> Member:
    return name, {"pax_headers": headers}, b"text"


DEEP = "top/" + "d/" * 2000 + "f"
HOSTILE_NAMES: dict[str, tuple[list[Member], str]] = {
    "two links that lead out only together": (
        [file("top/a/b/x"), link("top/a/b/c", "../.."), link("top/evil", "a/b/c/../../OUT")],
        "evil is a link to .* leads out of the source",
    ),
    "the same the other way round": (
        [link("top/evil", "a/b/c/../../OUT"), link("top/a/b/c", "../..")],
        "evil is a link to .* leads out of the source",
    ),
    "a file below a link that stays inside": (
        [file("top/sub/x"), link("top/in", "sub"), file("top/in/y")],
        "in/y is in it twice, or below a link or a file",
    ),
    "a link to itself": ([link("top/a", "a")], "leads in a circle"),
    "a circle of two": ([link("top/a", "b/x"), link("top/b", "a/x")], "leads in a circle"),
    "a file below a circle": (
        [link("top/a", "b"), link("top/b", "a"), file("top/a/x")],
        "below a link or a file",
    ),
    "two thousand folders": ([file(DEEP)], "is too long for a path"),
    "six hundred folders": ([file("top/" + "d/" * 600 + "f")], "has too many folders above it"),
    "a part of 300 bytes": ([file("top/" + "x" * 300)], "has a name that is too long"),
    "a path that is not UTF-8": ([file("top/\udcff\udcfe")], "is not UTF-8 text"),
    "a link that is not UTF-8": ([link("top/l", "\udcff")], "a name that is not UTF-8 text"),
    "a NUL in a pax path": ([pax("top/x", path="top/a\0b")], "is not UTF-8 text"),
    "a NUL in a pax link": (
        [("top/l", {"type": tarfile.SYMTYPE, "pax_headers": {"linkpath": "a\0b"}}, b"")],
        "a name that is not UTF-8 text",
    ),
    "a sparse file": (
        [pax("top/x", **{"GNU.sparse.map": "0,4", "GNU.sparse.size": "4"})],
        "is a sparse file",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE_NAMES)
def test_a_name_that_no_honest_archive_has_is_refused_with_its_reason(
    opened: Callable[..., archive.Unpacked], tmp_path: Path, kind: str
) -> None:
    members, reason = HOSTILE_NAMES[kind]
    with pytest.raises(HostileArchive, match=reason):
        opened(tar_of(*members))
    assert {path.name for path in tmp_path.iterdir()} <= {"source.tar", "tree"}


def test_links_that_stay_inside_are_kept_also_where_they_lead_to_nothing(
    opened: Callable[..., archive.Unpacked], tmp_path: Path
) -> None:
    members = [link("top/a/up", ".."), link("top/b", "a/up/a/none"), file("top/a/x")]
    assert opened(tar_of(*members)).files == 3
    assert (tmp_path / "tree/b").is_symlink()


@pytest.mark.parametrize(
    "headers",
    [
        {"GNU.sparse.map": "0,x", "GNU.sparse.size": "4"},
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "z"},
        {"GNU.sparse.map": "0", "GNU.sparse.size": "9" * 40},
        {"size": "-4"},
    ],
)
def test_a_broken_sparse_map_is_one_clear_error(
    opened: Callable[..., archive.Unpacked], headers: dict[str, str]
) -> None:
    # some Pythons end such an archive before its first file: then it is one without a folder
    errors = (CorruptArchive, HostileArchive, SpecInvalid)
    with pytest.raises(errors, match=r"^source\.tar: "):
        opened(tar_of(pax("top/x", **headers)))


def test_headers_without_end_are_refused(opened: Callable[..., archive.Unpacked]) -> None:
    long_name = pax("top/x", comment="x" * (5 << 20))
    with pytest.raises(HostileArchive, match="a header in it is larger than any of a source"):
        opened(gzip.compress(tar_of(long_name)))
    # each is read by a call within the last one
    block = tarfile.TarInfo("h")
    block.type, block.size = tarfile.XHDTYPE, 0
    many = block.tobuf(tarfile.USTAR_FORMAT) * 5000 + tar_of(*GOOD)
    with pytest.raises(CorruptArchive, match="not a whole tar archive"):
        opened(many)


def test_damage_in_the_middle_of_a_large_file_is_damage(
    opened: Callable[..., archive.Unpacked],
) -> None:
    packed = bytearray(gzip.compress(tar_of(file("top/x", os.urandom(3 << 20))), 1))
    packed[1 << 20 : (1 << 20) + 4096] = bytes(4096)
    with pytest.raises(CorruptArchive, match="not a whole tar archive"):
        opened(bytes(packed), below="top")


def source_of(**more: Any) -> SourceSpec:
    body = {
        "name": "small",
        "summary": "a source for this test",
        "licence": "MIT",
        "archive": {"file": "source.tar"},
        "upstream": {"repository": "none", "commit": "none"},
        "outputs": [{"from": "x", "to": "x"}],
        "builds": {
            "plain": {
                "toolchain": "t",
                "to": "/opt",
                "platforms": ["linux/amd64"],
                "steps": [{"name": "make", "run": ["make"]}],
                "cpu_minutes": 1,
            }
        },
    }
    return SourceSpec.model_validate({**body, **more})


@pytest.mark.parametrize(
    ("to", "reason"),
    [
        ("/way/out/new.c", "way/out/new.c is below a link or a file of the source"),
        ("/way", "way is already in the source"),
        ("/a.c/new.c", "a.c/new.c is below a link or a file of the source"),
    ],
)
def test_our_own_files_are_never_written_through_a_link(
    tmp_path: Path, to: str, reason: str
) -> None:
    own, source = tmp_path / "own", tmp_path / "tree"
    own.mkdir()
    source.mkdir()
    (own / "new.c").write_text("new")
    (source / "a.c").write_text("text")
    (source / "way").symlink_to(tmp_path)
    with pytest.raises(SpecInvalid, match=reason):
        add_files(source_of(files=[{"from": "new.c", "to": to}]), own, source)
    assert {x.name for x in tmp_path.iterdir()} == {"own", "tree"}
    add_files(source_of(files=[{"from": "new.c", "to": "/b/c/new.c"}]), own, source)
    assert (source / "b/c/new.c").read_text() == "new"


@pytest.mark.parametrize("path", ["way/a.c", "way", "none"])
def test_a_patch_changes_no_file_through_a_link(tmp_path: Path, path: str) -> None:
    own, source = tmp_path / "own", tmp_path / "tree"
    own.mkdir()
    source.mkdir()
    outside = tmp_path / "a.c"
    outside.write_text("old\n")
    (source / "way").symlink_to(tmp_path if "/" in path else outside)
    diff = f"--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-old\n+new\n"
    (own / "p.patch").write_text(diff)
    hashes = {"before": sha256_of(b"old\n"), "after": sha256_of(b"new\n")}
    entry = {
        "file": "p.patch",
        "why": "it stands for any patch of a source",
        "upstream": ["none"],
        "files": [{"path": path, **hashes}],
    }
    with pytest.raises(PatchConflict, match=f"the source has no file {path}"):
        apply_patches(source_of(patches=[entry]), own, source)
    assert outside.read_text() == "old\n"


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
