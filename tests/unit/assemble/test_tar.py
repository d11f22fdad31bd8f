from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.artifacts.oci.record import Kind
from pipeline.artifacts.oci.tar_reader import BLOCK, END, MTIME, padding
from pipeline.images.assemble.layer import Entry, tar_header

NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1)
PATHS = st.lists(NAMES.filter(lambda n: n not in (".", "..")), min_size=1, max_size=12).map(
    "/".join
)


def read_back(entry: Entry, size: int = 0) -> tarfile.TarInfo:
    archive = io.BytesIO(tar_header(entry, size) + END)
    with tarfile.open(fileobj=archive) as tar:
        info = tar.next()
    assert info is not None
    return info


def long_path(length: int) -> str:
    folders = "/".join(["folder"] * 60)
    return folders[: length - 9] + "/file.txt" if length > 9 else "f" * length


@given(PATHS)
@settings(max_examples=200)
def test_any_path_is_read_back_as_it_was(path: str) -> None:
    assert read_back(Entry(path, Kind.FILE, 0o644)).name == path


@given(PATHS)
def test_any_link_target_is_read_back_as_it_was(target: str) -> None:
    info = read_back(Entry("a", Kind.SYMLINK, 0o777, target=target))
    assert (info.linkname, info.issym()) == (target, True)


@pytest.mark.parametrize("length", [99, 100, 101, 155, 156, 255, 256, 257, 400])
def test_paths_around_the_limits_of_ustar_are_read_back(length: int) -> None:
    path = long_path(length)
    assert len(path) == length
    assert read_back(Entry(path, Kind.FILE, 0o644)).name == path
    info = read_back(Entry(path, Kind.DIR, 0o755))
    assert (info.name, info.isdir()) == (path, True)


def test_a_path_that_ustar_can_say_needs_no_pax_record() -> None:
    assert len(tar_header(Entry(long_path(200), Kind.FILE, 0o644), 0)) == BLOCK
    assert len(tar_header(Entry("n" * 101, Kind.FILE, 0o644), 0)) == 3 * BLOCK


def test_mode_owner_and_time_are_what_they_should_be() -> None:
    info = read_back(Entry("tmp", Kind.DIR, 0o1777, uid=1000, gid=1001))
    assert (info.mode, info.uid, info.gid) == (0o1777, 1000, 1001)
    assert (info.mtime, info.uname, info.gname) == (MTIME, "", "")


@pytest.mark.parametrize("uid", [0, 8**7 - 1, 8**7, 8**8, 2**32 - 2])
@pytest.mark.parametrize("gid", [0, 8**7 - 1, 8**7, 2**32 - 2])
def test_any_owner_is_read_back_as_it_was(uid: int, gid: int) -> None:
    entry = Entry("a", Kind.DIR, 0o755, uid=uid, gid=gid)
    info = read_back(entry)
    assert (info.name, info.isdir(), info.uid, info.gid) == ("a", True, uid, gid)
    has_record = uid >= 8**7 or gid >= 8**7
    assert len(tar_header(entry, 0)) == (3 * BLOCK if has_record else BLOCK)


def test_a_hard_link_names_its_file() -> None:
    info = read_back(Entry("b", Kind.HARDLINK, 0o644, target="a" * 120))
    assert (info.islnk(), info.linkname, info.size) == (True, "a" * 120, 0)


@pytest.mark.parametrize("size", [0, 1, 8**11 - 1])
def test_sizes_that_fit_stand_in_the_header(size: int) -> None:
    assert (
        tarfile.TarInfo.frombuf(tar_header(Entry("a", Kind.FILE, 0o644), size), "utf-8", "").size
        == size
    )


def test_a_size_beyond_8_gib_stands_in_a_pax_record() -> None:
    raw = tar_header(Entry("a", Kind.FILE, 0o644), 8**11)
    assert b"size=8589934592\n" in raw
    assert len(raw) == 3 * BLOCK


@pytest.mark.parametrize(("size", "want"), [(0, 0), (1, 511), (511, 1), (512, 0), (513, 511)])
def test_padding_fills_the_block(size: int, want: int) -> None:
    assert padding(size) == bytes(want)
