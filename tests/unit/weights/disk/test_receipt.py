from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.weights.check import verify as module
from pipeline.weights.check.verify import WeightsVerifyOptions, verify_files
from pipeline.weights.disk import hashing, receipt
from pipeline.weights.disk.hashing import FileReading, identity_of
from pipeline.weights.place import LockedFolder
from tests.unit.weights.disk_set import (
    DiskSet,
    flip,
    lock_of,
    make_set,
    put_back_mtime,
    settle,
    small_files,
)

SHARD = "model-1.safetensors"
pytestmark = pytest.mark.usefixtures("quick_clock")


@pytest.fixture(params=[False, True], ids=["plain", "hub"])
def proved(request: pytest.FixtureRequest, tmp_path: Path) -> DiskSet:
    """A set that was verified once, in both layouts."""
    made = make_set(tmp_path, hub_cache=request.param)
    settle()
    assert made.report().is_whole
    return made


def read_again(a_set: DiskSet) -> int:
    report = a_set.report()
    assert report.is_whole
    return report.files_read


def test_the_next_verify_reads_nothing(proved: DiskSet) -> None:
    report = proved.report()
    assert report.is_whole
    assert (report.files_read, report.by_receipt, report.bytes_read) == (0, 6, 0)


def test_full_uses_no_receipt(proved: DiskSet) -> None:
    assert proved.report(full=True).files_read == 6


@pytest.mark.parametrize(("age_ns", "is_settled"), [(5_000_000, False), (20_000_000, True)])
def test_a_file_just_written_is_read_again_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_ns: int, is_settled: bool
) -> None:
    made = make_set(tmp_path)
    newest = max(made.path(path).stat().st_ctime_ns for path in made.files)
    with monkeypatch.context() as patch:
        patch.setattr(receipt, "disk_time_ns", lambda place: newest + age_ns)
        assert made.report().is_whole
    assert (proved_paths(made.place) == set(made.files)) is is_settled
    settle()
    made.report()
    assert read_again(made) == 0


def proved_paths(place: LockedFolder) -> set[str]:
    return {path for path, entry in receipt.read_receipt(place).items() if entry.identity}


def test_an_edit_whose_mtime_was_put_back_is_found(proved: DiskSet) -> None:
    path = proved.path(SHARD)
    before = path.stat()
    flip(path, 1234)
    put_back_mtime(path, before)
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert proved.kinds() == {SHARD: "changed"}


def test_an_edit_through_a_hard_link_is_found(proved: DiskSet, tmp_path: Path) -> None:
    os.link(proved.path(SHARD), tmp_path / "other-name")
    settle()
    proved.report()
    before = proved.path(SHARD).stat()
    flip(tmp_path / "other-name", 99)
    put_back_mtime(tmp_path / "other-name", before)
    assert proved.kinds() == {SHARD: "changed"}


def test_files_swapped_by_hard_links_are_found(proved: DiskSet, tmp_path: Path) -> None:
    one, two = proved.path(SHARD), proved.path("model-2.safetensors")
    os.link(one, tmp_path / "one")
    os.link(two, tmp_path / "two")
    os.replace(tmp_path / "one", two)
    os.replace(tmp_path / "two", one)
    assert set(proved.kinds()) == {SHARD, "model-2.safetensors"}


def test_another_file_of_the_same_size_and_mtime_is_found(proved: DiskSet) -> None:
    path = proved.path(SHARD)
    before = path.stat()
    fresh = path.with_suffix(".new")
    fresh.write_bytes(b"x" * before.st_size)
    put_back_mtime(fresh, before)
    os.replace(fresh, path)
    assert proved.kinds() == {SHARD: "changed"}


def test_a_receipt_copied_with_its_folder_vouches_for_nothing(tmp_path: Path) -> None:
    made = make_set(tmp_path)
    settle()
    made.report()
    shutil.copytree(made.place.root, tmp_path / "second")
    second = LockedFolder(tmp_path / "second", made.place.lock)
    flip(second.root / SHARD, 0)
    os.utime(second.root / SHARD, ns=(0, made.path(SHARD).stat().st_mtime_ns))
    report = verify_files(second, WeightsVerifyOptions()).report
    assert report.files_read == 6
    assert [f.path for f in report.damage] == [SHARD]


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["files"][0].update(want="0" * 40),
        lambda r: r.update(lock="sha256:" + "0" * 64),
        lambda r: r.update(machine="another"),
        lambda r: r.update(format=1),
        lambda r: r.update(format=3),
        lambda r: r.update(more=1),
        lambda r: r["files"].pop(),
        lambda r: r["files"][0]["identity"].__setitem__(2, 5),
        lambda r: r.update(seal=""),
        lambda r: r.update(block_bytes=1),
    ],
)
def test_an_edited_or_foreign_receipt_is_ignored(proved: DiskSet, change: Any) -> None:
    path = proved.place.receipt_file
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    assert read_again(proved) == 6
    assert read_again(proved) == 0  # and was written anew


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_a_half_written_receipt_is_ignored(proved: DiskSet, keep: int) -> None:
    path = proved.place.receipt_file
    data = path.read_bytes().rstrip()
    path.write_bytes(data[:keep])
    assert read_again(proved) == 6


@pytest.mark.parametrize("data", [b"\xff\xfe", b"[]", b"{}", b"null", b"[" * 100_000])
def test_a_receipt_of_rubbish_is_ignored(proved: DiskSet, data: bytes) -> None:
    proved.place.receipt_file.write_bytes(data)
    assert read_again(proved) == 6


def test_a_receipt_of_another_lock_vouches_only_for_what_both_name(proved: DiskSet) -> None:
    others = small_files() | {"config.json": b'{"a": 2}\n'}
    place = LockedFolder(proved.place.root, lock_of(others), hub_cache=proved.place.hub_cache)
    report = verify_files(place, WeightsVerifyOptions()).report
    assert "config.json" in {f.path for f in report.damage}
    # what the new lock names as the old one did need not be read again
    assert report.by_receipt == len(others) - 1


def test_a_receipt_of_another_machine_is_ignored(
    proved: DiskSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipt, "machine", lambda: "another")
    assert read_again(proved) == 6


def test_rot_that_moved_no_time_stamp_is_found_by_full_and_stays_found(
    proved: DiskSet,
) -> None:
    flip(proved.path(SHARD), 77)
    settle()
    forge(proved)
    assert proved.kinds() == {}  # as rot would: the receipt cannot see it
    assert proved.kinds(full=True) == {SHARD: "changed"}
    assert proved.kinds() == {SHARD: "changed"}


def forge(a_set: DiskSet) -> None:
    """A receipt that vouches for the file as it is now: what rot on a disk looks like."""
    place = a_set.place
    known = receipt.read_receipt(place)
    now = identity_of(os.lstat(a_set.path(SHARD)))
    receipt.keep_receipt(place, [known[SHARD].model_copy(update={"identity": now})], [])


def test_a_subset_leaves_the_rest_of_the_receipt_alone(proved: DiskSet) -> None:
    flip(proved.path("config.json"), 1)
    assert proved.kinds(only=("config.json",)) == {"config.json": "changed"}
    report = proved.report()
    assert report.files_read == 1
    assert [f.path for f in report.damage] == ["config.json"]


def test_a_folder_that_cannot_be_written_is_verified_without_a_receipt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_set(tmp_path)
    settle()
    monkeypatch.setattr(receipt, "disk_time_ns", lambda place: None)
    assert made.report().is_whole
    assert not made.place.receipt_file.exists()
    flip(made.path(SHARD), 3)
    assert made.kinds() == {SHARD: "changed"}


def test_what_was_proved_before_a_stop_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_set(tmp_path)
    settle()
    real = hashing.hash_file

    def stopped_at_the_smallest(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == "empty.txt":
            raise KeyboardInterrupt
        return real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, "hash_file", stopped_at_the_smallest)
        with pytest.raises(KeyboardInterrupt):
            made.report(jobs=1)
    assert read_again(made) == 1


def test_a_machine_without_a_file_handle_left_takes_no_proof_away(
    proved: DiskSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, is_kept in ((errno.EMFILE, True), (errno.ENOMEM, True), (errno.EIO, False)):

        def fails(*args: object, number: int = number, **kwargs: object) -> FileReading:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(module, "hash_file", fails)
            assert set(proved.kinds(full=True).values()) == {"unreadable"}
        assert (proved.report().files_read == 0) is is_kept
