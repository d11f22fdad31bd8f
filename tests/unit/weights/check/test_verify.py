from __future__ import annotations

import json
import os
import threading
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import Interrupted, WeightsUnknown
from pipeline.weights.check.verify import WeightsVerifyOptions, verify_files
from pipeline.weights.disk import hashing
from pipeline.weights.disk.hashing import BLOCK_BYTES, Moved, NotPlain, hash_file
from pipeline.weights.model import write_weights_lock
from pipeline.weights.place import LockedFolder, new_place
from tests.testbed.locked_set import link_target
from tests.unit.support import Command
from tests.unit.weights.disk_set import (
    DiskSet,
    flip,
    lock_of,
    make_set,
    random_bytes,
    write_set,
)

SHARD = "model-1.safetensors"


@pytest.fixture(params=[False, True], ids=["plain", "hub"])
def a_set(request: pytest.FixtureRequest, tmp_path: Path) -> DiskSet:
    """A small set in both layouts."""
    return make_set(tmp_path, hub_cache=request.param)


@pytest.fixture
def plain(tmp_path: Path) -> DiskSet:
    return make_set(tmp_path)


@pytest.fixture
def hub(tmp_path: Path) -> DiskSet:
    return make_set(tmp_path, hub_cache=True)


def test_a_right_set_is_whole(a_set: DiskSet) -> None:
    report = a_set.report()
    assert report.is_whole
    assert report.findings == []
    assert (report.files, report.files_read) == (6, 6)
    assert report.bytes_read == sum(map(len, a_set.files.values()))


def test_every_kind_of_damage_is_named_in_one_run(a_set: DiskSet) -> None:
    flip(a_set.path(SHARD), 7)
    a_set.path("config.json").unlink()
    os.truncate(a_set.path("model-2.safetensors"), 299_999)
    with a_set.path("modeling.py").open("ab") as handle:
        handle.write(b"import os\n")
    a_set.path("sub/more.json").unlink()
    a_set.path("sub/more.json").mkdir()
    assert a_set.kinds() == {
        SHARD: "changed",
        "config.json": "missing",
        "model-2.safetensors": "short",
        "modeling.py": "long",
        "sub/more.json": "not a file",
    }


def test_a_git_blob_is_proved_by_gits_hash_of_it(a_set: DiskSet) -> None:
    flip(a_set.path("config.json"), 2)
    assert a_set.kinds() == {"config.json": "changed"}


def test_two_swapped_files_of_one_size_are_found(a_set: DiskSet) -> None:
    one, two = a_set.path(SHARD), a_set.path("model-2.safetensors")
    a, b = one.read_bytes(), two.read_bytes()
    one.write_bytes(b)
    two.write_bytes(a)
    assert set(a_set.kinds()) == {SHARD, "model-2.safetensors"}


def test_sizes_are_looked_at_before_anything_is_read(
    a_set: DiskSet, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    a_set.path("config.json").unlink()

    def no_reading(*args: Any, **kwargs: Any) -> None:
        assert "missing: config.json" in capfd.readouterr().err
        raise Interrupted("seen")

    monkeypatch.setattr("pipeline.weights.check.verify.hash_file", no_reading)
    with pytest.raises(Interrupted, match="seen"):
        a_set.report(jobs=1)


def test_a_subset_by_pattern_looks_at_nothing_else(a_set: DiskSet) -> None:
    flip(a_set.path(SHARD), 7)
    report = a_set.report(only=("*.json",))
    assert report.is_whole
    assert report.files == 2
    assert a_set.kinds(only=("*-1.*", "*.json")) == {SHARD: "changed"}


def test_a_pattern_that_matches_nothing_is_no_success(a_set: DiskSet) -> None:
    with pytest.raises(WeightsUnknown, match="nothing"):
        a_set.report(only=("nothing*",))


def test_a_pipe_in_a_files_place_does_not_make_it_wait(plain: DiskSet) -> None:
    plain.path("empty.txt").unlink()
    os.mkfifo(plain.path("empty.txt"))
    assert plain.kinds() == {"empty.txt": "not a file"}


@pytest.mark.parametrize("through", ["the file", "its folder"])
def test_a_link_out_of_the_folder_is_damage_even_to_the_right_bytes(
    plain: DiskSet, through: str
) -> None:
    if through == "the file":
        plain.path("sub/more.json").unlink()
        plain.path("sub/more.json").symlink_to(plain.copy / "sub" / "more.json")
    else:
        plain.path("sub/more.json").unlink()
        plain.path("sub/more.json").parent.rmdir()
        (plain.place.root / "sub").symlink_to(plain.copy / "sub")
    assert plain.kinds() == {"sub/more.json": "link"}


def test_a_link_within_the_folder_is_judged_by_its_bytes(plain: DiskSet) -> None:
    moved = plain.place.root / "sub" / "shard"
    plain.path(SHARD).rename(moved)
    plain.path(SHARD).symlink_to("sub/shard")
    assert plain.kinds() == {}
    flip(moved, 1)
    assert plain.kinds() == {SHARD: "changed"}


@pytest.mark.parametrize("target", ["nowhere", SHARD])
def test_a_link_to_nowhere_or_to_itself_is_never_passed(plain: DiskSet, target: str) -> None:
    plain.path(SHARD).unlink()
    plain.path(SHARD).symlink_to(target)
    assert plain.kinds()[SHARD] in ("missing", "unreadable", "not a file")


@pytest.mark.parametrize("trick", ["broken", "another blob", "outside", "a file", "gone", "folder"])
def test_a_name_that_does_not_lead_to_its_blob_is_found(hub: DiskSet, trick: str) -> None:
    name = hub.place.name(hub.pin(SHARD))
    other = link_target(hub.pin("model-2.safetensors"))
    name.unlink()
    if trick == "folder":
        name.mkdir()
    elif trick == "a file":
        name.write_bytes(hub.files[SHARD])
    elif trick != "gone":
        targets = {"broken": "../../blobs/none", "another blob": other}
        name.symlink_to(targets.get(trick, hub.copy / SHARD))
    assert hub.kinds() == {SHARD: "name"}


def test_a_blob_that_is_a_link_out_of_the_cache_is_found(hub: DiskSet) -> None:
    blob = hub.path(SHARD)
    blob.unlink()
    blob.symlink_to(hub.copy / SHARD)
    assert hub.kinds()[SHARD] == "link"


def test_equal_files_of_a_cache_are_one_blob_read_once(tmp_path: Path) -> None:
    data = random_bytes(3, 1000)
    equal = make_set(tmp_path, {"a.gguf": data, "b.gguf": data}, hub_cache=True)
    assert equal.report().is_whole
    flip(equal.path("a.gguf"), 0)
    assert equal.kinds() == {"a.gguf": "changed", "b.gguf": "changed"}


@pytest.mark.parametrize(
    "path",
    [
        "evil.py",
        "sub/evil.py",
        "new/folder/evil.py",
        "model-3.safetensors",
        "tokenizer.json",
        "sub/x.gguf",
        "chat_template.jinja",
        "MODEL.SAFETENSORS",
        "pytorch_model.bin",
    ],
)
def test_an_extra_file_that_an_engine_would_load_is_damage(a_set: DiskSet, path: str) -> None:
    extra = a_set.place.snapshot / path
    extra.parent.mkdir(parents=True, exist_ok=True)
    extra.write_bytes(b"x")
    assert a_set.kinds() == {path: "extra"}


@pytest.mark.parametrize(
    "path", ["README.md", "notes/run.log", "figures/a.json", ".cache/huggingface/x.json"]
)
def test_an_extra_file_that_no_engine_loads_is_reported_but_no_damage(
    a_set: DiskSet, path: str
) -> None:
    extra = a_set.place.snapshot / path
    extra.parent.mkdir(parents=True, exist_ok=True)
    extra.write_bytes(b"x")
    report = a_set.report()
    assert report.is_whole
    assert [f.path for f in report.findings] == ([path] if "huggingface" not in path else [])


def test_an_extra_link_to_code_is_damage(a_set: DiskSet) -> None:
    (a_set.place.snapshot / "evil.py").symlink_to("/nowhere")
    assert a_set.kinds() == {"evil.py": "extra"}


def test_two_sets_of_one_snapshot_know_each_others_files(tmp_path: Path) -> None:
    other_files = {"q4.gguf": b"four"}
    one = make_set(tmp_path, {"q3.gguf": b"three"}, hub_cache=True)
    other = new_place(tmp_path / "set", lock_of(other_files, "other"), hub_cache=True)
    write_set(other, other_files)
    assert one.kinds() == {"q4.gguf": "extra"}
    assert verify_files(one.place, WeightsVerifyOptions(), [other]).report.is_whole


def test_a_file_that_changes_while_it_is_read_is_not_passed(
    plain: DiskSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def touched_meanwhile(handle: int, *args: Any) -> int:
        os.utime(f"/proc/self/fd/{handle}")
        return real(handle, *args)

    monkeypatch.setattr(os, "preadv", touched_meanwhile)
    assert set(plain.kinds().values()) == {"moved"}


def test_a_file_that_is_replaced_while_it_is_read_is_not_passed(
    plain: DiskSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = hashing.read_open
    path = plain.path(SHARD)

    def replaced_meanwhile(*args: Any, **more: Any) -> Any:
        result = real(*args, **more)
        fresh = path.with_suffix(".new")
        fresh.write_bytes(b"x" * 300_000)
        os.replace(fresh, path)
        return result

    monkeypatch.setattr(hashing, "read_open", replaced_meanwhile)
    assert plain.kinds(only=(SHARD,)) == {SHARD: "moved"}


def test_a_disk_that_cannot_read_a_file_leaves_it_unproved(
    plain: DiskSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **more: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(hashing, "read_open", broken)
    report = plain.report()
    assert {f.kind for f in report.damage} == {"unreadable"}
    assert len(report.damage) == 6


def test_a_wrong_lock_finds_everything_wrong(plain: DiskSet) -> None:
    others = {path: random_bytes(9, len(data)) for path, data in plain.files.items()}
    place = LockedFolder(plain.place.root, lock_of(others))
    wrong = {f.path: f.kind for f in verify_files(place, WeightsVerifyOptions()).report.damage}
    assert wrong == {path: "changed" for path, data in plain.files.items() if data}


def test_the_hash_and_its_marks_are_those_of_the_bytes(tmp_path: Path) -> None:
    data = random_bytes(5, 2 * BLOCK_BYTES + 12_345)
    (tmp_path / "f").write_bytes(data)
    for direct in (False, True):
        seen: list[int] = []
        reading = hash_file(tmp_path / "f", sha256(), advance=seen.append, direct=direct)
        assert reading.digest == sha256(data).hexdigest()
        assert sum(seen) == len(data)
        ends = [BLOCK_BYTES, 2 * BLOCK_BYTES, len(data)]
        assert reading.marks == tuple(sha256(data[:end]).hexdigest()[:16] for end in ends)


def test_short_reads_of_a_strange_disk_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random_bytes(6, BLOCK_BYTES + 100_000)
    (tmp_path / "f").write_bytes(data)
    whole = hash_file(tmp_path / "f", sha256())
    real = os.preadv

    def little_by_little(handle: int, parts: Any, at: int, *flags: int) -> int:
        return real(handle, [parts[0][:70_001]], at, *flags)

    monkeypatch.setattr(os, "preadv", little_by_little)
    assert hash_file(tmp_path / "f", sha256()) == whole


def test_a_file_cut_short_while_it_is_read_is_not_passed(
    plain: DiskSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def cut_first(handle: int, *args: Any) -> int:
        os.truncate(plain.path(SHARD), 5)
        return real(handle, *args)

    monkeypatch.setattr(os, "preadv", cut_first)
    assert plain.kinds(only=(SHARD,)) == {SHARD: "moved"}


def test_a_stopped_read_ends_soon(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 5_000_000)
    stop = threading.Event()
    stop.set()
    with pytest.raises(Interrupted):
        hash_file(tmp_path / "f", sha256(), stop=stop)


def test_reading_goes_through_no_link_and_reads_no_folder(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    (tmp_path / "link").symlink_to("f")
    with pytest.raises(OSError, match="symbolic"):
        hash_file(tmp_path / "link", sha256())
    with pytest.raises(NotPlain):
        hash_file(tmp_path, sha256())
    assert issubclass(Moved, OSError)


def test_the_command_names_damage_and_ends_with_its_code(plain: DiskSet, sm120: Command) -> None:
    assert sm120("weights", "verify", plain.place.root).code == 0
    flip(plain.path(SHARD), 5)
    plain.path("config.json").unlink()
    ended = sm120("weights", "verify", plain.place.root)
    assert ended.error == "WeightsDamaged"
    assert "2 files are not as locked: 1 changed, 1 missing" in ended.err
    assert SHARD in ended.out


def test_the_command_answers_in_json(a_set: DiskSet, sm120: Command) -> None:
    root = a_set.place.root.parent if a_set.place.hub_cache else a_set.place.root
    assert sm120("weights", "verify", root, "--json").json["whole"] is True
    flip(a_set.path(SHARD), 5)
    ended = sm120("weights", "verify", root, "--json")
    assert ended.error == "WeightsDamaged"
    (result,) = json.loads(ended.out)["sets"]
    assert [(f["path"], f["kind"]) for f in result["findings"]] == [(SHARD, "changed")]


def test_the_command_takes_a_lock_for_a_folder_that_has_none(
    plain: DiskSet, sm120: Command, tmp_path: Path
) -> None:
    write_weights_lock(tmp_path / "x.lock.yaml", plain.place.lock)
    assert sm120("weights", "verify", plain.copy).error == "WeightsUnknown"
    assert sm120("weights", "verify", plain.copy, "--lock", "x.lock.yaml").code == 0
    (plain.copy / "config.json").write_bytes(b"other!!!\n")
    ended = sm120("weights", "verify", plain.copy, "--lock", "x.lock.yaml")
    assert ended.error == "WeightsDamaged"


def test_the_command_finds_a_hub_cache_by_its_lock(hub: DiskSet, sm120: Command) -> None:
    write_weights_lock(hub.copy / "x.lock.yaml", hub.place.lock)
    for root in (hub.place.root, hub.place.root.parent):
        assert sm120("weights", "verify", root, "--lock", hub.copy / "x.lock.yaml").code == 0
    hub.path(SHARD).unlink()
    for root in (hub.place.root, hub.place.root.parent):
        assert (
            sm120("weights", "verify", root, "--lock", hub.copy / "x.lock.yaml").error
            == "WeightsDamaged"
        )


def test_a_folder_nobody_may_look_into_is_not_passed(
    plain: DiskSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plain.place.root / "closed").mkdir()
    real = os.scandir

    def guarded(path: Any) -> Any:
        if str(path).rstrip("/").endswith("closed"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", guarded)
    assert plain.kinds() == {"closed/": "unreadable"}


def test_many_small_files_are_verified_in_one_go(tmp_path: Path) -> None:
    files = {f"f{i}.gguf": random_bytes(i, i) for i in range(300)}
    many = make_set(tmp_path, files)
    start = time.monotonic()
    assert many.report().is_whole
    assert time.monotonic() - start < 20
    flip(many.path("f299.gguf"), 298)
    many.path("f1.gguf").unlink()
    assert many.kinds() == {"f299.gguf": "changed", "f1.gguf": "missing"}
