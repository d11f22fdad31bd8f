from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from pipeline.core.errors import StoreUnwritable
from pipeline.weights.check import repair
from pipeline.weights.check.scrub import (
    CATCH_UP_NIGHTS,
    DAY_S,
    ScrubPace,
    ScrubSlice,
    ScrubState,
    read_slice,
)
from pipeline.weights.disk import receipt
from pipeline.weights.disk.hashing import identity_of
from pipeline.weights.place import LockedFolder
from tests.unit.support import ROOT, Command
from tests.unit.weights.disk_set import (
    DiskSet,
    flip,
    lock_of,
    make_set,
    random_bytes,
    settle,
    supply_of,
    write_set,
)

START_S = 1_800_000_000


def ten_files() -> dict[str, bytes]:
    return {f"{i}.gguf": random_bytes(i, 1000) for i in range(10)}


@pytest.fixture
def ten(tmp_path: Path) -> DiskSet:
    return make_set(tmp_path, ten_files())


def night(
    a_set: DiskSet | LockedFolder, number: float, pace: ScrubPace | None = None
) -> ScrubSlice:
    place = a_set.place if isinstance(a_set, DiskSet) else a_set
    return read_slice(place, pace or ScrubPace(every_days=5), START_S + int(number * DAY_S))


def test_a_slice_a_night_reads_everything_in_the_days_asked_for(ten: DiskSet) -> None:
    nights = [night(ten, n).read for n in range(10)]
    assert [len(read) for read in nights] == [2] * 10
    assert sorted(path for read in nights[:5] for path in read) == sorted(ten.files)
    assert nights[5:] == nights[:5]


def test_files_of_all_sizes_are_each_read_in_time(tmp_path: Path) -> None:
    sizes = [50_000, 3, 20_000, 20_000, 900, 900, 1, 7_000]
    made = make_set(tmp_path, {f"{i}.gguf": random_bytes(i, s) for i, s in enumerate(sizes)})
    last = dict.fromkeys(made.files, 0.0)
    total = 0
    for n in range(40):
        done = night(made, n, ScrubPace(every_days=7))
        assert done.overdue == []
        total += done.bytes_read
        last |= dict.fromkeys(done.read, n)
        assert n < 7 or min(last.values()) >= n - 8
    assert total <= sum(sizes) * (40 / 7 + 1)


def test_one_big_file_is_not_read_every_night(tmp_path: Path) -> None:
    made = make_set(tmp_path, {"big.gguf": random_bytes(1, 100_000)})
    nights = [bool(night(made, n, ScrubPace(every_days=10)).read) for n in range(31)]
    assert [n for n, was_read in enumerate(nights) if was_read] == [0, 10, 20, 30]


def test_running_it_again_and_again_does_not_read_faster(ten: DiskSet) -> None:
    assert len(night(ten, 0).read) == 2
    assert night(ten, 0).read == []
    assert sum(len(night(ten, n / 100).read) for n in range(1, 201)) == 2 * 2 + 1


def test_missed_nights_are_made_up_for_within_a_limit(tmp_path: Path) -> None:
    files = {f"{i:03}.gguf": random_bytes(i, 100) for i in range(100)}
    made = make_set(tmp_path, files)
    pace = ScrubPace(every_days=50)
    assert len(night(made, 0, pace).read) == 2
    assert len(night(made, 3, pace).read) == 6
    after_a_year = night(made, 368, pace)
    assert len(after_a_year.read) == 2 * CATCH_UP_NIGHTS
    assert len(after_a_year.overdue) == 100 - 2 * CATCH_UP_NIGHTS
    n = 368
    while night(made, n, pace).overdue:
        n += 1
    assert n < 368 + 50 / CATCH_UP_NIGHTS + 2


def test_a_budget_is_kept_and_overdue_files_are_reported(ten: DiskSet) -> None:
    pace = ScrubPace(every_days=5, budget_bytes=1000)
    nights = [night(ten, n, pace) for n in range(10)]
    assert [len(n.read) for n in nights] == [1] * 10
    assert nights[4].overdue == []
    assert nights[6].overdue == ["0.gguf", "7.gguf", "8.gguf", "9.gguf"]


def test_an_added_file_comes_first(ten: DiskSet) -> None:
    for n in range(5):
        night(ten, n)
    files = {**ten_files(), "new.gguf": b"new"}
    place = LockedFolder(ten.place.root, lock_of(files))
    write_set(place, files)
    assert "new.gguf" in night(place, 5).read


def test_a_file_locked_anew_is_read_anew(ten: DiskSet) -> None:
    for n in range(5):
        night(ten, n)
    files = {**ten_files(), "7.gguf": b"changed in the next version"}
    place = LockedFolder(ten.place.root, lock_of(files))
    write_set(place, files)
    assert "7.gguf" in night(place, 5).read


def test_rot_is_found_within_the_days_and_reported_until_it_is_repaired(
    ten: DiskSet, quick_clock: None
) -> None:
    settle()
    ten.report()
    flip(ten.path("6.gguf"), 5)
    settle()
    entry = receipt.read_receipt(ten.place)["6.gguf"]
    as_rot = entry.model_copy(update={"identity": identity_of(os.lstat(ten.path("6.gguf")))})
    receipt.keep_receipt(ten.place, [as_rot], [])
    assert ten.kinds() == {}  # the receipt cannot see rot
    reported = [bool(night(ten, n).findings) for n in range(8)]
    assert reported == [False] * 3 + [True] * 5
    assert ten.kinds() == {"6.gguf": "changed"}
    repair.repair_damage(ten.place, ten.check(), supply_of([ten.source]))
    assert "6.gguf" in night(ten, 8).read
    assert night(ten, 9).findings == []


def test_a_damaged_file_does_not_keep_the_others_from_their_turn(ten: DiskSet) -> None:
    flip(ten.path("0.gguf"), 5)
    nights = [night(ten, n) for n in range(5)]
    assert all([f.path for f in n.findings] == ["0.gguf"] for n in nights)
    assert {path for n in nights for path in n.read} == set(ten.files)


def test_a_missing_file_is_reported_every_night(ten: DiskSet) -> None:
    ten.path("9.gguf").unlink()
    for n in range(3):
        assert [(f.path, f.kind) for f in night(ten, n).findings] == [("9.gguf", "missing")]


def test_a_file_back_in_its_place_is_read_soon(ten: DiskSet) -> None:
    for n in range(5):
        night(ten, n)
    flip(ten.path("3.gguf"), 0)
    while not night(ten, n).findings:
        n += 1
    ten.path("3.gguf").write_bytes(ten.files["3.gguf"])
    seen = [night(ten, n + i) for i in range(1, 7)]
    assert any("3.gguf" in s.read for s in seen)
    assert seen[-1].findings == []


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"format": 1, "files": {"a": 1}}'])
def test_a_damaged_position_is_begun_anew(ten: DiskSet, data: bytes) -> None:
    night(ten, 0)
    (ten.place.state / "scrub.json").write_bytes(data)
    assert night(ten, 1).read == ["0.gguf", "1.gguf"]


def test_a_clock_that_was_put_back_stops_nothing(ten: DiskSet) -> None:
    for n in range(100, 105):
        night(ten, n)
    nights = [night(ten, n) for n in range(7)]
    assert {path for n in nights for path in n.read} == set(ten.files)
    state = ScrubState.model_validate_json((ten.place.state / "scrub.json").read_bytes())
    assert state.last_run_s == START_S + 6 * DAY_S


@pytest.fixture
def humble(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """The command runs in our process, and what gives way cannot come back."""
    instead = mock.Mock()
    monkeypatch.setattr("pipeline.app.weights.lower_priority", instead)
    return instead


# niceness, and the class of this process's reading and writing, before and after
RANKS = """
import ctypes, os, platform
from pipeline.weights.check.scrub import lower_priority
get = {"x86_64": 252, "aarch64": 31}[platform.machine()]
before = os.nice(0)
lower_priority()
print(before, os.nice(0), ctypes.CDLL(None).syscall(get, 1, 0) >> 13)
"""


def test_a_process_of_low_priority_gives_way_on_cores_and_disk() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RANKS], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    before, after, disk = map(int, done.stdout.split())
    assert (after, disk) == (min(before + 10, 19), 3)


def test_the_command_reads_a_slice_and_answers_a_timer(
    ten: DiskSet, sm120: Command, humble: mock.Mock
) -> None:
    answer = sm120("weights", "scrub", ten.place.root, "--every-days", "5", "--json").json
    humble.assert_called_once_with()
    assert answer["whole"] is True
    assert answer["sets"][0]["read"] == ["0.gguf", "1.gguf"]
    flip(ten.path("9.gguf"), 5)
    ten.path("8.gguf").unlink()
    ended = sm120("weights", "scrub", ten.place.root, "--json")
    assert ended.error == "WeightsDamaged"
    assert [f["path"] for f in json.loads(ended.out)["sets"][0]["findings"]] == ["8.gguf"]
    ended = sm120("weights", "scrub", ten.place.root)
    assert ended.error == "WeightsDamaged"
    assert "1 missing" in ended.err


@pytest.mark.parametrize("budget", ["x", "", "-", "5X", "1e999"])
def test_a_budget_that_is_no_size_is_refused(ten: DiskSet, sm120: Command, budget: str) -> None:
    assert sm120("weights", "scrub", ten.place.root, "--budget", budget).code == 2


@pytest.mark.usefixtures("humble")
def test_a_budget_may_be_written_with_a_unit(ten: DiskSet, sm120: Command) -> None:
    args = ("weights", "scrub", ten.place.root, "--every-days", "1", "--json", "--budget")
    assert len(sm120(*args, "2.5k").json["sets"][0]["read"]) == 3


@pytest.mark.parametrize("name", [".", "partial", "aside"])
def test_nothing_is_written_through_a_linked_folder_of_ours(
    ten: DiskSet, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    state = ten.place.state
    if name == ".":
        for path in state.iterdir():
            path.rename(other / path.name)
        state.rmdir()
        state.symlink_to(other)
    else:
        (state / name).symlink_to(other)
    before = sorted(p.name for p in other.iterdir())
    with pytest.raises(StoreUnwritable, match="is a link; this tool writes only into folders"):
        night(ten, 0)
    # a receipt only saves time: verify goes on without one
    receipt.keep_receipt(ten.place, [], ())
    assert "no receipt is kept" in capsys.readouterr().err
    assert receipt.disk_time_ns(ten.place) is None
    assert sorted(p.name for p in other.iterdir()) == before


def test_a_lock_file_that_is_a_link_is_not_opened(ten: DiskSet, tmp_path: Path) -> None:
    (ten.place.state / "scrub.lock").symlink_to(tmp_path / "made")
    with pytest.raises(StoreUnwritable, match=r"scrub\.lock"):
        night(ten, 0)
    assert not (tmp_path / "made").exists()
