from __future__ import annotations

import errno
import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.core.errors import (
    KeyInvalid,
    PipelineError,
    RecordInvalid,
    RunInvalid,
    StoreUnwritable,
    WorkloadInvalid,
)
from pipeline.core.files import (
    change_file,
    explained,
    hash_so_far,
    link_or_copy,
    os_errors_explained,
    read_at_most,
    read_limited,
    size_so_far,
    write_bytes,
)


@pytest.mark.parametrize("size", [0, 1, 9, 10])
def test_a_file_up_to_the_bound_is_read_whole(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * size)
    assert read_at_most(path, 10) == b"x" * size


@pytest.mark.parametrize("size", [11, 12, 10_000_000])
def test_a_file_past_the_bound_is_not_read(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    with path.open("wb") as out:
        out.truncate(size)
    assert read_at_most(path, 10) is None


def test_a_file_without_end_ends_at_the_bound() -> None:
    assert read_at_most(Path("/dev/zero"), 10) is None


def test_a_file_that_is_not_there_is_an_error_and_not_a_large_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_at_most(tmp_path / "none", 10)


def test_what_cannot_be_read_is_an_error_of_the_kind_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10)
    assert read_limited(path, 10, KeyInvalid) == b"x" * 10
    cases: list[tuple[Path, type[PipelineError], str]] = [
        (tmp_path / "none", KeyInvalid, "none: cannot be read: No such file or directory"),
        (tmp_path, KeyInvalid, "cannot be read: Is a directory"),
        (path, RecordInvalid, "file: larger than 9 bytes"),
    ]
    for place, kind, message in cases:
        with pytest.raises(kind, match=message):
            read_limited(place, 9, KeyInvalid, too_large=RecordInvalid)
    with pytest.raises(KeyInvalid, match="larger than 9 bytes"):
        read_limited(path, 9, KeyInvalid)


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1, 5_000_000])
def test_what_has_come_is_hashed_and_counted_once(tmp_path: Path, size: int) -> None:
    path, data = tmp_path / "part", b"y" * size
    path.write_bytes(data)
    told: list[int] = []
    sha = hash_so_far(path, told.append)
    assert size_so_far(path) == sum(told) == size
    sha.update(b"rest")
    assert sha.digest() == hashlib.sha256(data + b"rest").digest()


def test_before_the_first_byte_nothing_has_come(tmp_path: Path) -> None:
    told: list[int] = []
    none = tmp_path / "none"
    assert hash_so_far(none, told.append).digest() == hashlib.sha256().digest()
    assert (size_so_far(none), told) == (0, [])


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.EACCES, "Change its owner or mode"),
        (errno.ENOTDIR, "in the way"),
        (errno.EISDIR, "in the way"),
        (errno.EROFS, "can only be read"),
        (errno.ENAMETOOLONG, "shorter path"),
        (errno.ENOSPC, "Free some space"),
        (errno.EIO, "dmesg"),
    ],
)
def test_the_hint_is_about_what_the_disk_refused(number: int, hint: str) -> None:
    assert hint in explained(OSError(number, ""), Path("/models/a")).hint


def test_an_error_names_the_file_that_was_to_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnwritable, match=str(tmp_path / "folder")), os_errors_explained():
        os.replace(tmp_path / "file", tmp_path / "folder")
    with pytest.raises(StoreUnwritable, match=str(tmp_path / "file")), os_errors_explained():
        (tmp_path / "file").mkdir()
    assert "a file of this command" in str(explained(OSError(errno.ENOSPC, "")))


def test_of_two_that_change_a_file_each_sees_what_the_other_wrote(tmp_path: Path) -> None:
    path, lock = tmp_path / "file", tmp_path / "lock"

    def add(data: bytes) -> bytes:
        time.sleep(0.01)
        return data + b"x"

    with ThreadPoolExecutor(8) as pool:
        for each in [pool.submit(change_file, path, lock, 10, add) for _ in range(8)]:
            each.result()
    assert path.read_bytes() == b"x" * 8


def test_a_file_that_is_too_large_or_a_link_is_begun_anew(tmp_path: Path) -> None:
    path, lock = tmp_path / "file", tmp_path / "lock"
    path.write_bytes(b"x" * 11)
    change_file(path, lock, 10, lambda data: data + b"new")
    assert path.read_bytes() == b"new"
    path.unlink()
    path.symlink_to("/dev/zero")
    change_file(path, lock, 10, lambda data: data + b"new")
    assert not path.is_symlink()
    assert path.read_bytes() == b"new"


def test_a_file_that_cannot_be_read_is_not_answered_with_its_contents(tmp_path: Path) -> None:
    for error in (KeyInvalid, WorkloadInvalid, RunInvalid):
        with pytest.raises(error, match="cannot be read") as caught:
            read_limited(tmp_path / "nothing", 10, error)
        assert caught.value.hint == "Check that the file is there and that you may read it."
    (tmp_path / "large").write_bytes(bytes(11))
    with pytest.raises(KeyInvalid, match="larger than 10 bytes") as caught:
        read_limited(tmp_path / "large", 10, KeyInvalid)
    assert "none of its kind is so large" in caught.value.hint


def test_a_copy_for_another_disk_is_on_that_disk_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    synced: list[int] = []
    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    (tmp_path / "a").write_bytes(b"some")
    link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"some"
    assert synced == [(tmp_path / "b").stat().st_ino]


def test_a_file_that_was_written_has_its_bytes_and_its_name_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    write_bytes(tmp_path / "lock.yaml", b"some")
    assert synced == [(tmp_path / "lock.yaml").stat().st_ino, tmp_path.stat().st_ino]
    # nothing to write, nothing to wait for
    write_bytes(tmp_path / "lock.yaml", b"some")
    assert len(synced) == 2
