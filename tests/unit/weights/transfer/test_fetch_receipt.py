from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import HubRefused, StoreUnwritable
from pipeline.weights.check.verify import WeightsVerifyOptions, verify_files
from pipeline.weights.disk import receipt
from pipeline.weights.disk.hashing import FileReading, hash_file, identity_of
from pipeline.weights.disk.install import install_file
from pipeline.weights.disk.receipt import ReceiptEntry, keep_receipt, read_receipt
from pipeline.weights.model import FilePin
from pipeline.weights.place import LockedFolder
from tests.testbed import hub_faults as fault
from tests.testbed.hub import ALWAYS
from tests.unit.weights.conftest import BIG, Bed, big_bytes
from tests.unit.weights.disk_set import flip, settle

FILE_BYTES = len(big_bytes())
MIDDLE = FILE_BYTES // 2


def note_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every file that a fetch or a verify reads from now on."""
    hashed: list[str] = []

    def note(path: Path, *args: Any, **options: Any) -> FileReading:
        hashed.append(str(path))
        return hash_file(path, *args, **options)

    for module in ("disk.receipt", "check.verify"):
        monkeypatch.setattr(f"pipeline.weights.{module}.hash_file", note)
    return hashed


def test_a_fetch_leaves_a_receipt_so_that_nothing_is_read_again(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = bed.place()
    bed.fetch(place)
    hashed = note_reads(monkeypatch)
    assert bed.fetch(place) == []
    report = verify_files(place, WeightsVerifyOptions()).report
    assert (report.is_whole, report.files_read, report.by_receipt) == (True, 0, 3)
    assert hashed == []


@pytest.mark.parametrize("jobs", [1, 4])
def test_the_receipt_of_a_fetch_has_the_marks_that_a_verify_would_find(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    monkeypatch.setattr("pipeline.weights.disk.hashing.BLOCK_BYTES", 100_000)
    bed.fetch(jobs=jobs)
    marks = read_receipt(bed.place())[BIG].each_mark
    assert marks == hash_file(bed.folder / BIG, bed.pin().new_hash()).marks
    assert len(marks) == -(-FILE_BYTES // 100_000)


def test_a_run_that_ends_early_leaves_proof_of_what_it_finished(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed.publish({**bed.files, "late.safetensors": big_bytes(FILE_BYTES + 1, seed=7)})
    bed.lock()
    bed.hub.fail("late.safetensors", fault.status(403), times=ALWAYS)
    with pytest.raises(HubRefused):
        bed.fetch(jobs=1)
    bed.hub.forgive()
    hashed = note_reads(monkeypatch)
    assert bed.fetch() == ["late.safetensors"]
    assert hashed == []


def test_a_new_file_is_vouched_for_at_once_and_any_later_write_shows(bed: Bed) -> None:
    place = bed.place()
    bed.fetch(place)
    assert verify_files(place, WeightsVerifyOptions()).report.files_read == 0
    flip(place.file(bed.pin()), 100)  # within the same tick of a slow clock, it may be
    damage = verify_files(place, WeightsVerifyOptions()).report.damage
    assert [(f.path, f.kind) for f in damage] == [(BIG, "changed")]


def test_a_new_file_whose_mtime_is_fresh_is_not_vouched_for(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "utime", fails)
    bed.fetch()
    entries = read_receipt(bed.place())
    assert [entries[path].identity for path in bed.files] == [None] * len(bed.files)


def test_a_new_file_that_is_gone_at_once_is_not_vouched_for(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(place: LockedFolder, partial: Path, pins: Sequence[FilePin]) -> None:
        install_file(place, partial, pins)
        place.file(pins[0]).unlink()

    monkeypatch.setattr("pipeline.weights.transfer.fetch.install_file", lose)
    bed.fetch()
    assert read_receipt(bed.place())[BIG].identity is None


def test_the_receipt_is_written_after_each_file(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    proofs: list[set[str]] = []
    whole = receipt.keep_receipt

    def noting(
        place: LockedFolder, entries: Iterable[ReceiptEntry], doubted: Iterable[str]
    ) -> None:
        whole(place, entries, doubted)
        proofs.append(set(read_receipt(place)))

    monkeypatch.setattr(receipt, "keep_receipt", noting)
    monkeypatch.setattr(receipt, "_PAUSE", 0)
    bed.fetch(jobs=1)
    assert [len(paths) for paths in proofs] == [1, 2, 3]


def test_files_that_were_here_before_are_read_once(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, quick_clock: None
) -> None:
    for path, data in bed.files.items():
        (bed.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (bed.folder / path).write_bytes(data)
    settle()
    hashed = note_reads(monkeypatch)
    assert bed.fetch() == bed.fetch() == []
    assert len(hashed) == len(bed.files)


@pytest.mark.parametrize("hub_cache", [False, True])
@pytest.mark.parametrize("size", [FILE_BYTES, FILE_BYTES - 5])
def test_two_files_that_were_swapped_are_put_right_without_a_fetch(
    bed: Bed, hub_cache: bool, size: int
) -> None:
    bed.publish({**bed.files, "other.safetensors": big_bytes(size, seed=2)})
    place = bed.place(hub_cache=hub_cache)
    bed.fetch(place)
    one, other = place.file(bed.pin()), place.file(bed.pin("other.safetensors"))
    spare = one.rename(one.with_name("spare"))
    other.rename(one)
    spare.rename(other)
    sent = bed.hub.sent_bytes()
    assert sorted(bed.fetch(place)) == [BIG, "other.safetensors"]
    assert bed.hub.sent_bytes() == sent
    bed.require_right(place)
    assert verify_files(place, WeightsVerifyOptions()).report.files_read == 0


def test_three_files_in_a_ring_and_one_that_is_wrong_cost_only_the_wrong_one(bed: Bed) -> None:
    names = ["a.safetensors", "b.safetensors", "c.safetensors"]
    bed.publish({name: big_bytes(40_000 + i, seed=i) for i, name in enumerate([*names, "d.bin"])})
    bed.fetch()
    data = [(bed.folder / name).read_bytes() for name in names]
    for i, name in enumerate(names):
        (bed.folder / name).write_bytes(data[i - 1])
    (bed.folder / "d.bin").write_bytes(data[0])
    sent = bed.hub.sent_bytes()
    bed.fetch()
    assert bed.hub.sent_bytes() - sent == len(bed.files["d.bin"])
    bed.require_right()


def test_swapped_files_are_put_right_on_a_full_disk(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed.publish({"a.bin": big_bytes(seed=1), "b.bin": big_bytes(seed=2)})
    bed.fetch()
    (bed.folder / "a.bin").rename(bed.folder / "c")
    (bed.folder / "b.bin").rename(bed.folder / "a.bin")
    (bed.folder / "c").rename(bed.folder / "b.bin")
    monkeypatch.setattr("pipeline.weights.transfer.fetch.LEAVE_FREE_BYTES", 1 << 60)
    bed.fetch(offline=True)
    bed.require_right()


def test_a_file_that_moved_since_its_receipt_is_read_again(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = bed.place()
    bed.fetch(place)
    pin = next(p for p in place.lock.files if p.path == BIG)
    path = place.file(pin)
    entry = ReceiptEntry(path=BIG, want=pin.want, identity=identity_of(path.stat()), marks="")
    keep_receipt(place, [entry], [])
    data = bytearray(path.read_bytes())
    data[MIDDLE] ^= 1
    path.write_bytes(data)
    assert bed.fetch(place) == [BIG]
    bed.require_right(place)


def test_files_that_cannot_be_read_for_the_moment_are_not_fetched_again(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed.fetch()
    bed.place().receipt_file.unlink()
    before = bed.hub.sent_bytes()

    def fails(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(receipt, "hash_file", fails)
    with pytest.raises(StoreUnwritable, match="Too many open files"):
        bed.fetch()
    assert bed.hub.sent_bytes() == before
