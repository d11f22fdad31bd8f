from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.core.net.http import NetClient
from pipeline.core.net.settings import plain_settings
from pipeline.weights.check import repair
from pipeline.weights.check.repair import Repaired, RouteSupply
from pipeline.weights.disk import hashing
from pipeline.weights.disk.hashing import BLOCK_BYTES
from pipeline.weights.disk.install import make_way
from pipeline.weights.disk.receipt import keep_receipt, read_receipt
from pipeline.weights.model import FilePin, WeightsLock
from pipeline.weights.place import new_place
from pipeline.weights.transfer.router import Route
from pipeline.weights.transfer.sources import FolderRoute
from pipeline.weights.transfer.workers import merged, missing
from tests.unit.support import Command
from tests.unit.weights.disk_set import (
    Copy,
    DiskSet,
    FolderSource,
    flip,
    lock_of,
    make_set,
    random_bytes,
    settle,
    supply_of,
)

SHARD = "model-1.safetensors"
BIG = "big.safetensors"
BIG_BYTES = 5 * BLOCK_BYTES + 1000


@dataclass
class Counting:
    """A copy that remembers which bytes were asked for, and may be wrong or fall silent."""

    inner: Copy
    asked: list[tuple[str, int, int]] = field(default_factory=list)
    wrong: bool = False
    ends_early: int = 0

    def read(self, pin: FilePin, start: int, stop: int) -> Iterator[bytes]:
        self.asked.append((pin.path, start, stop))
        for data in self.inner.read(pin, start, stop - self.ends_early):
            yield bytes(len(data)) if self.wrong else data

    @property
    def asked_bytes(self) -> int:
        return sum(stop - start for _, start, stop in self.asked)


@pytest.fixture(autouse=True)
def one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.weights.transfer.router.ATTEMPTS", 1)


@pytest.fixture(params=[False, True], ids=["plain", "hub"])
def a_set(request: pytest.FixtureRequest, tmp_path: Path) -> DiskSet:
    return make_set(tmp_path, hub_cache=request.param)


@pytest.fixture
def big(tmp_path: Path, quick_clock: None) -> DiskSet:
    """One file of several blocks, verified once, so that its blocks are known."""
    made = make_set(tmp_path, {BIG: random_bytes(1, BIG_BYTES)})
    assert made.report().is_whole
    return made


def mend(a_set: DiskSet, *sources: Copy) -> list[Repaired]:
    return repair.repair_damage(
        a_set.place, a_set.check(full=True), supply_of(sources or [a_set.source])
    )


def is_right(a_set: DiskSet) -> bool:
    return a_set.report(full=True).is_whole and a_set.holds_all()


def left_over(a_set: DiskSet) -> list[Path]:
    return list(a_set.place.partial_folder.glob("*"))


def test_only_what_is_wrong_is_fetched(a_set: DiskSet) -> None:
    flip(a_set.path(SHARD), 9)
    a_set.path("config.json").unlink()
    source = Counting(a_set.source)
    mend(a_set, source)
    assert {path for path, _, _ in source.asked} == {SHARD, "config.json"}
    assert is_right(a_set)
    assert left_over(a_set) == []


def test_a_flipped_byte_costs_one_block(big: DiskSet) -> None:
    flip(big.path(BIG), 2 * BLOCK_BYTES + 5)
    source = Counting(big.source)
    (repaired,) = mend(big, source)
    assert source.asked == [(BIG, 2 * BLOCK_BYTES, 3 * BLOCK_BYTES)]
    assert (repaired.how, repaired.fetched_bytes) == ("1 range fetched", BLOCK_BYTES)
    assert is_right(big)


def test_damage_in_two_places_costs_two_ranges(big: DiskSet) -> None:
    for at in (5, BLOCK_BYTES, BIG_BYTES - 1):
        flip(big.path(BIG), at)
    source = Counting(big.source)
    (repaired,) = mend(big, source)
    first, second, last = 0, BLOCK_BYTES, 5 * BLOCK_BYTES
    assert source.asked == [
        (BIG, first, second),
        (BIG, second, 2 * BLOCK_BYTES),
        (BIG, last, BIG_BYTES),
    ]
    assert repaired.how == "2 ranges fetched"
    assert repaired.fetched_bytes == 2 * BLOCK_BYTES + 1000
    assert is_right(big)


def test_damage_that_goes_on_is_fetched_in_longer_steps(tmp_path: Path, quick_clock: None) -> None:
    made = make_set(tmp_path, {BIG: random_bytes(1, 12 * BLOCK_BYTES)})
    assert made.report().is_whole
    with made.path(BIG).open("r+b") as handle:
        handle.seek(BLOCK_BYTES)
        handle.write(bytes(8 * BLOCK_BYTES))
    source = Counting(made.source)
    mend(made, source)
    steps = [(start // BLOCK_BYTES, stop // BLOCK_BYTES) for _, start, stop in source.asked]
    assert steps == [(1, 2), (2, 3), (3, 5), (5, 9)]
    assert is_right(made)


def test_blocks_that_a_killed_repair_had_fetched_are_not_asked_for_again(big: DiskSet) -> None:
    for at in (5, 3 * BLOCK_BYTES):
        flip(big.path(BIG), at)
    source = Counting(big.source)

    def dying(pin: FilePin, start: int, stop: int) -> Iterator[bytes]:
        if start:
            raise KeyboardInterrupt
        return Counting.read(source, pin, start, stop)

    with pytest.raises(KeyboardInterrupt):
        mend(big, SimpleNamespace(read=dying))
    assert left_over(big)
    mend(big, source)
    assert [asked[1] for asked in source.asked] == [0, 3 * BLOCK_BYTES]
    assert is_right(big)
    assert left_over(big) == []


def test_a_partial_file_of_other_bytes_is_not_used(big: DiskSet) -> None:
    flip(big.path(BIG), 5)

    def dying(pin: FilePin, start: int, stop: int) -> Iterator[bytes]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mend(big, SimpleNamespace(read=dying))
    (partial,) = left_over(big)
    partial.write_bytes(random_bytes(9, BIG_BYTES))
    source = Counting(big.source)
    mend(big, source)
    assert source.asked == [(BIG, 0, BLOCK_BYTES)]
    assert is_right(big)


@pytest.mark.parametrize("size", [BIG_BYTES - 100, BIG_BYTES + 4])
def test_a_file_that_was_cut_or_grew_keeps_its_right_blocks(big: DiskSet, size: int) -> None:
    os.truncate(big.path(BIG), size)
    source = Counting(big.source)
    mend(big, source)
    last = (BIG, 5 * BLOCK_BYTES, BIG_BYTES)
    assert source.asked == ([last] if size < BIG_BYTES else [])
    assert is_right(big)


def test_a_short_file_that_is_wrong_as_well_costs_both_blocks(big: DiskSet) -> None:
    flip(big.path(BIG), 3)
    os.truncate(big.path(BIG), BIG_BYTES - 100)
    source = Counting(big.source)
    mend(big, source)
    assert source.asked == [(BIG, 0, BLOCK_BYTES), (BIG, 5 * BLOCK_BYTES, BIG_BYTES)]
    assert is_right(big)


def test_a_changed_file_whose_blocks_are_unknown_is_fetched_whole(tmp_path: Path) -> None:
    made = make_set(tmp_path, {BIG: random_bytes(1, BIG_BYTES)})
    flip(made.path(BIG), 3)
    source = Counting(made.source)
    mend(made, source)
    assert source.asked == [(BIG, 0, BIG_BYTES)]
    assert is_right(made)


def test_marks_of_other_bytes_are_not_trusted(big: DiskSet) -> None:
    flip(big.path(BIG), 3)
    known = read_receipt(big.place)[BIG]
    keep_receipt(big.place, [known.model_copy(update={"marks": known.marks[::-1]})], [])
    source = Counting(big.source)
    mend(big, source)
    assert source.asked[-1] == (BIG, 0, BIG_BYTES)
    assert is_right(big)


def test_marks_that_hide_the_damage_are_not_trusted(
    big: DiskSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(big.path(BIG), 3)
    monkeypatch.setattr(repair, "mark_of", lambda hasher: "0" * 16)
    known = read_receipt(big.place)[BIG]
    keep_receipt(big.place, [known.model_copy(update={"marks": "0" * len(known.marks)})], [])
    source = Counting(big.source)
    mend(big, source)
    assert source.asked == [(BIG, 0, BIG_BYTES)]
    assert is_right(big)


def test_two_swapped_files_need_no_source(a_set: DiskSet, tmp_path: Path) -> None:
    one, two = a_set.path(SHARD), a_set.path("model-2.safetensors")
    one.rename(tmp_path / "x")
    two.rename(one)
    (tmp_path / "x").rename(two)
    source = Counting(a_set.source)
    mend(a_set, source)
    assert source.asked == []
    assert is_right(a_set)
    assert a_set.path(SHARD).stat().st_nlink == 1


def test_a_missing_file_that_has_another_name_here_is_not_fetched(big: DiskSet) -> None:
    big.path(BIG).rename(big.place.root / "old.bak")
    source = Counting(big.source)
    mend(big, source)
    assert source.asked == []
    assert is_right(big)


def test_a_wrong_source_changes_nothing(a_set: DiskSet) -> None:
    flip(a_set.path(SHARD), 9)
    before = a_set.path(SHARD).read_bytes()
    (repaired,) = mend(a_set, Counting(a_set.source, wrong=True))
    assert "both times" in repaired.error
    assert a_set.path(SHARD).read_bytes() == before
    assert a_set.kinds() == {SHARD: "changed"}


def test_a_wrong_source_is_passed_over_for_a_right_one(a_set: DiskSet) -> None:
    flip(a_set.path(SHARD), 9)
    a_set.path("sub/more.json").unlink()
    mend(a_set, Counting(a_set.source, wrong=True), FolderSource(Path("/nowhere")), a_set.source)
    assert is_right(a_set)


def test_a_source_that_falls_silent_is_named_and_what_came_is_gone_on_with(big: DiskSet) -> None:
    big.path(BIG).unlink()
    (repaired,) = mend(big, Counting(big.source, ends_early=1000))
    assert "bytes early" in repaired.error
    assert not big.path(BIG).exists()
    source = Counting(big.source)
    mend(big, source)
    assert source.asked == [(BIG, BIG_BYTES - 1000, BIG_BYTES)]
    assert is_right(big)


def test_a_rotten_partial_file_is_not_gone_on_with_twice(big: DiskSet) -> None:
    big.path(BIG).unlink()
    mend(big, Counting(big.source, wrong=True, ends_early=1000))
    source = Counting(big.source)
    mend(big, source)
    assert source.asked == [(BIG, BIG_BYTES - 1000, BIG_BYTES), (BIG, 0, BIG_BYTES)]
    assert is_right(big)


def test_without_a_source_the_reason_is_given(a_set: DiskSet) -> None:
    flip(a_set.path(SHARD), 9)
    (repaired,) = repair.repair_damage(a_set.place, a_set.check(), supply_of([]))
    assert "no server may be asked" in repaired.error


def test_a_full_disk_is_reported_before_the_first_byte(
    a_set: DiskSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(a_set.path(SHARD), 9)
    source = Counting(a_set.source)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=299_999))
    (repaired,) = mend(a_set, source)
    assert "are free" in repaired.error
    assert source.asked == []


def test_bad_sectors_cost_only_their_blocks(big: DiskSet, monkeypatch: pytest.MonkeyPatch) -> None:
    real_read, real_pread = hashing.hash_file, os.pread
    path = big.path(BIG)

    def unreadable(where: Path, *args: Any, **kwargs: Any) -> Any:
        if where == path:
            raise OSError(errno.EIO, "Input/output error")
        return real_read(where, *args, **kwargs)

    def bad_sector(handle: int, length: int, at: int) -> bytes:
        is_damaged = os.fstat(handle).st_ino == path.stat().st_ino
        if is_damaged and at <= BLOCK_BYTES + 7 < at + length:
            raise OSError(errno.EIO, "Input/output error")
        return real_pread(handle, length, at)

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.weights.check.verify.hash_file", unreadable)
        patch.setattr(os, "pread", bad_sector)
        source = Counting(big.source)
        assert big.kinds(full=True) == {BIG: "unreadable"}
        mend(big, source)
    assert source.asked == [(BIG, BLOCK_BYTES, 2 * BLOCK_BYTES)]
    assert is_right(big)


def test_extra_code_is_set_aside_and_not_lost(a_set: DiskSet) -> None:
    (a_set.place.snapshot / "evil.py").write_bytes(b"import os")
    (a_set.place.snapshot / "notes.md").write_bytes(b"mine")
    mend(a_set)
    assert is_right(a_set)
    (kept,) = (a_set.place.state / "aside").iterdir()
    assert kept.read_bytes() == b"import os"
    assert (a_set.place.snapshot / "notes.md").read_bytes() == b"mine"


@pytest.mark.parametrize("odd", ["folder", "pipe", "link out", "link to nothing"])
def test_odd_things_in_a_files_place_make_way(a_set: DiskSet, odd: str, tmp_path: Path) -> None:
    path = a_set.path(SHARD)
    path.unlink()
    victim = tmp_path / "victim"
    victim.write_bytes(b"not to be touched")
    if odd == "folder":
        path.mkdir()
        (path / "inside.txt").write_bytes(b"kept")
    elif odd == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(victim if odd == "link out" else "nothing")
    mend(a_set)
    assert is_right(a_set)
    assert victim.read_bytes() == b"not to be touched"
    if odd == "folder":
        (kept,) = (a_set.place.state / "aside").iterdir()
        assert (kept / "inside.txt").read_bytes() == b"kept"


def test_a_folder_that_leads_out_is_set_aside_and_nothing_is_written_there(
    tmp_path: Path,
) -> None:
    made = make_set(tmp_path)
    outside = tmp_path / "outside"
    made.path("sub/more.json").parent.rename(outside)
    (made.place.root / "sub").symlink_to(outside)
    (outside / "more.json").write_bytes(b"theirs")
    mend(made)
    assert is_right(made)
    assert (outside / "more.json").read_bytes() == b"theirs"


@pytest.mark.parametrize("trick", ["gone", "elsewhere", "a file", "folder"])
def test_a_wrong_link_is_repaired_without_fetching(tmp_path: Path, trick: str) -> None:
    hub = make_set(tmp_path, hub_cache=True)
    name = hub.place.name(hub.pin("sub/more.json"))
    name.unlink()
    if trick == "elsewhere":
        name.symlink_to(hub.copy / "config.json")
    elif trick == "a file":
        name.write_bytes(b"mine")
    elif trick == "folder":
        name.mkdir()
    source = Counting(hub.source)
    mend(hub, source)
    assert source.asked == []
    assert is_right(hub)


@pytest.mark.parametrize("kind", ["changed", "missing"])
def test_the_routes_of_a_fetch_are_asked_one_after_the_other(tmp_path: Path, kind: str) -> None:
    hub = make_set(tmp_path / "a", hub_cache=True)
    plain = make_set(tmp_path / "b")
    lock = plain.place.lock
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    (wrong / SHARD).write_bytes(bytes(300_000))
    for folder in (hub.place.root, hub.place.root.parent):
        if kind == "missing":
            plain.path(SHARD).unlink()
        else:
            flip(plain.path(SHARD), 0)
        folders = [tmp_path, wrong, folder]
        routes: list[Route] = [FolderRoute(f, lock) for f in folders]
        supply = RouteSupply(routes, NetClient(plain_settings(), first_wait_s=0.01))
        repair.repair_damage(plain.place, plain.check(), supply)
        assert is_right(plain)


def test_after_a_repair_the_receipt_is_right_again(big: DiskSet) -> None:
    flip(big.path(BIG), 1)
    mend(big)
    settle()
    assert big.report().is_whole
    assert big.report().files_read == 0
    flip(big.path(BIG), BLOCK_BYTES)
    source = Counting(big.source)
    mend(big, source)
    assert source.asked_bytes == BLOCK_BYTES


def test_ranges_are_found_joined_and_turned_around() -> None:
    assert merged([(0, 1), (1, 2), (3, 4)]) == [(0, 2), (3, 4)]
    assert missing([(0, 2), (5, 10)], 10) == [(2, 5)]
    assert missing([], 10) == [(0, 10)]
    assert missing([], 0) == []


def test_the_command_repairs_and_says_what_it_fetched(a_set: DiskSet, sm120: Command) -> None:
    flip(a_set.path(SHARD), 5)
    root = a_set.place.root
    ended = sm120("weights", "verify", root, "--repair", "--offline", "--from", a_set.copy)
    assert ended.code == 0
    assert "fetched whole" in ended.out
    assert is_right(a_set)


def test_the_command_obeys_the_switches_of_the_hub_as_a_fetch_does(
    a_set: DiskSet, sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def find_routes(client: NetClient, lock: WeightsLock, **options: Any) -> list[Route]:
        given.update(options)
        return [FolderRoute(a_set.copy, lock)]

    monkeypatch.setattr("pipeline.weights.transfer.sources.find_routes", find_routes)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_TOKEN", "secret")
    flip(a_set.path(SHARD), 5)
    assert sm120("weights", "verify", a_set.place.root, "--repair").code == 0
    assert (given["with_xet"], given["offline"], given["token"]) == (False, True, None)


def test_the_command_does_not_call_a_failed_repair_a_success(
    a_set: DiskSet, sm120: Command
) -> None:
    flip(a_set.path(SHARD), 5)
    (a_set.copy / SHARD).write_bytes(b"x" * 300_000)
    ended = sm120(
        "weights", "verify", a_set.place.root, "--repair", "--offline", "--from", a_set.copy
    )
    assert ended.error == "WeightsDamaged"
    assert "both times" in ended.out


def test_files_repaired_at_once_below_a_linked_folder_set_that_link_aside_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link of a folder is looked at by all before any has moved it."""
    files = {f"deep/{n}": bytes([n]) for n in range(4)}
    place = new_place(tmp_path / "set", lock_of(files), hub_cache=False)
    (tmp_path / "disk").mkdir()
    place.root.mkdir()
    (place.root / "deep").symlink_to(tmp_path / "disk")
    is_symlink = Path.is_symlink

    def slow(path: Path) -> bool:
        seen = is_symlink(path)
        time.sleep(0.02)
        return seen

    monkeypatch.setattr(Path, "is_symlink", slow)
    targets = [place.file(pin) for pin in place.lock.files]

    def install(target: Path) -> None:
        make_way(place, target)
        target.write_bytes(b"whole")

    with ThreadPoolExecutor(len(targets)) as pool:
        list(pool.map(install, targets))
    assert all(target.read_bytes() == b"whole" for target in targets)
    assert [p.name for p in (place.state / "aside").iterdir()] == ["1-deep"]


def test_bytes_that_a_disk_takes_in_parts_are_all_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole, data = os.pwrite, random_bytes(3, BLOCK_BYTES + 7)
    monkeypatch.setattr(os, "pwrite", lambda f, piece, at: whole(f, piece[: 1 << 20], at))
    monkeypatch.setattr(os, "copy_file_range", _not_supported)
    (tmp_path / "taken").write_bytes(data)
    with repair.open_both(tmp_path / "taken", tmp_path / "made", len(data)) as (taken, made):
        repair.copy_range(taken, made, 0, len(data))
    assert (tmp_path / "made").read_bytes() == data


def test_a_disk_that_is_full_in_mid_write_is_an_error_and_no_short_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(handle: int, piece: bytes, at: int) -> int:
        if at:
            raise OSError(errno.ENOSPC, "no space left on device")
        return 100

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(os, "copy_file_range", _not_supported)
    (tmp_path / "taken").write_bytes(bytes(1000))
    with (
        repair.open_both(tmp_path / "taken", tmp_path / "made", 1000) as (taken, made),
        pytest.raises(OSError, match="no space left"),
    ):
        repair.copy_range(taken, made, 0, 1000)


def _not_supported(*_: object) -> int:
    raise OSError(errno.EXDEV, "another disk")
