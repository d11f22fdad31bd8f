"""Odd things among the files: none hangs, none is a defect, none writes to a terminal."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.core import files
from pipeline.core.errors import DiskFull
from pipeline.weights.check.repair import repair_damage
from pipeline.weights.disk.survey import shown_name
from pipeline.weights.model import dump_weights_lock
from tests.unit.support import Command
from tests.unit.weights.disk_set import DiskSet, flip, make_set, supply_of

SHARD = "model-1.safetensors"


@pytest.fixture
def a_set(tmp_path: Path) -> DiskSet:
    return make_set(tmp_path / "disk")


def a_folder(path: Path) -> None:
    path.mkdir()


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


ODD: dict[str, Callable[[Path], None]] = {"pipe": os.mkfifo, "folder": a_folder, "endless": endless}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
@pytest.mark.parametrize("name", ["receipt.json", "record.dsse.json", "model.sig", "receipt.lock"])
def test_odd_things_in_the_place_of_our_own_files_hinder_no_verify(
    a_set: DiskSet, sm120: Command, name: str, odd: Callable[[Path], None]
) -> None:
    odd(a_set.place.state / name)
    assert sm120("weights", "verify", a_set.place.root).code == 0
    flip(a_set.path(SHARD), 5)
    assert sm120("weights", "verify", a_set.place.root).error == "WeightsDamaged"
    a_set.path(SHARD).unlink()
    assert sm120("weights", "verify", a_set.place.root).error == "WeightsDamaged"


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
def test_odd_things_in_the_place_of_the_scrubs_book_end_plainly(
    a_set: DiskSet, sm120: Command, odd: Callable[[Path], None]
) -> None:
    odd(a_set.place.state / "scrub.json")
    assert sm120("weights", "scrub", a_set.place.root).error == (
        "StoreUnwritable" if odd is a_folder else ""
    )
    a_set.path(SHARD).unlink()
    assert sm120("weights", "scrub", a_set.place.root).error == (
        "StoreUnwritable" if odd is a_folder else "WeightsDamaged"
    )


def test_a_pipe_in_the_place_of_another_sets_lock_is_not_waited_for(
    tmp_path: Path, sm120: Command
) -> None:
    made = make_set(tmp_path / "disk", hub_cache=True)
    (made.place.state.parent / "other").mkdir()
    os.mkfifo(made.place.state.parent / "other" / "lock.yaml")
    assert sm120("weights", "verify", made.place.root).code == 0


def test_a_disk_without_room_for_a_receipt_fails_no_verify(
    a_set: DiskSet, sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise DiskFull(f"{path}: no space left")

    monkeypatch.setattr(files, "write_bytes", full)
    ended = sm120("weights", "verify", a_set.place.root)
    assert ended.code == 0
    assert "no receipt is kept" in ended.err
    flip(a_set.path(SHARD), 5)
    assert sm120("weights", "verify", a_set.place.root).error == "WeightsDamaged"


NAMES = [b"\xff\xfe.py", b"\x1b]0;evil\x07.py", b"a\nb.py", "mode\u0301l.safetensors".encode()]


@pytest.mark.parametrize("name", NAMES)
def test_odd_names_are_spelled_out_and_set_aside(
    a_set: DiskSet, sm120: Command, name: bytes
) -> None:
    path = a_set.place.root / os.fsdecode(name)
    path.write_bytes(b"x")
    for command in (("verify",), ("verify", "--json"), ("scrub",), ("attest", "--full")):
        ended = sm120("weights", command[0], a_set.place.root, *command[1:])
        assert ended.error == "WeightsDamaged", (command, ended.err)
        assert "\x1b" not in ended.out + ended.err
        assert shown_name(os.fsdecode(name)) in ended.out.replace("\\\\", "\\")
    ended = sm120("weights", "verify", a_set.place.root, "--repair", "--offline", "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["whole"]
    assert not path.exists()


def test_long_names_of_many_bytes_are_set_aside(a_set: DiskSet, sm120: Command) -> None:
    root = a_set.place.root
    deep = root / ("深" * 80) / ("深" * 80)
    deep.mkdir(parents=True)
    for path in (root / f"{'好' * 84}.py", deep / f"{'好' * 80}.py"):
        path.write_bytes(b"x")
    ended = sm120("weights", "verify", root, "--repair", "--offline")
    assert ended.code == 0, ended.err
    kept = [path.name for path in (root / ".sm120" / "aside").iterdir()]
    assert all(name.endswith("好.py") for name in kept)
    assert len(kept) == 2


def test_plain_names_of_any_script_are_shown_as_they_are() -> None:
    for name in ("config.json", "模型-1.safetensors", "sub dir/ü ñ #1%.json"):
        assert shown_name(name) == name


def test_folders_deeper_than_the_stack_are_walked(a_set: DiskSet, sm120: Command) -> None:
    at = os.open(a_set.place.root, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("a", dir_fd=at)
        below = os.open("a", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(os.open("x.py", os.O_CREAT | os.O_WRONLY, dir_fd=at))
    os.close(at)
    assert sm120("weights", "verify", a_set.place.root).error == "WeightsDamaged"
    a_set.path(SHARD).unlink()
    repair_damage(a_set.place, a_set.check(), supply_of([a_set.source]))
    assert a_set.holds_all()
    subprocess.run(["rm", "-r", str(a_set.place.root / "a")], check=True)  # pytest could not


@pytest.mark.parametrize("size", [2**44 + 1, 10**30, 10**400])
@pytest.mark.parametrize("command", ["verify", "scrub", "attest"])
def test_a_lock_with_an_absurd_size_is_refused(
    a_set: DiskSet, sm120: Command, size: int, command: str
) -> None:
    text = dump_weights_lock(a_set.place.lock).replace(
        '"size_bytes": 300000', f'"size_bytes": {size}'
    )
    a_set.place.lock_file.write_text(text)
    assert sm120("weights", command, a_set.place.root).error == "LockEdited"


@pytest.mark.parametrize("name", ["x" * 256, "ü" * 128, f"a/{'b' * 300}/c"])
def test_a_lock_with_a_name_that_no_disk_can_have_is_refused(
    a_set: DiskSet, sm120: Command, name: str
) -> None:
    text = dump_weights_lock(a_set.place.lock).replace("config.json", name)
    a_set.place.lock_file.write_text(text)
    ended = sm120("weights", "verify", a_set.place.root)
    assert ended.error == "LockEdited"
    assert "more than 255 bytes" in ended.err


@pytest.mark.parametrize("address", ["http://[", "http://host:99999", "http://", "ftp://host/x"])
def test_what_is_no_address_is_refused_before_anything_is_asked(
    a_set: DiskSet, sm120: Command, address: str
) -> None:
    flip(a_set.path(SHARD), 5)
    ended = sm120("weights", "verify", a_set.place.root, "--repair", "--from", address)
    assert ended.error == "SpecInvalid"
    assert address in ended.err


@pytest.mark.parametrize("budget", ["-5G", "nan", "inf", "-1"])
def test_a_budget_that_is_no_size_is_refused(a_set: DiskSet, sm120: Command, budget: str) -> None:
    assert sm120("weights", "scrub", a_set.place.root, f"--budget={budget}").code == 2


@pytest.mark.parametrize("data", [b"\xff" * 40, b"", b"x" * (2 << 20)])
def test_a_token_file_that_holds_no_token_is_refused(
    a_set: DiskSet, sm120: Command, tmp_path: Path, data: bytes
) -> None:
    (tmp_path / "tokens").write_bytes(data)
    ended = sm120("weights", "serve", a_set.place.root, "--token-file", tmp_path / "tokens")
    assert ended.error == "AddressUnusable"


def test_a_small_file_is_written_over_whatever_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    files.write_bytes(tmp_path / "pipe", b"x")
    assert files.read_plain(tmp_path / "pipe", 10) == b"x"
    assert files.read_plain(tmp_path / "pipe", 0) is None
