"""Hub caches by each of their paths: those that the Hub's own client made, and ours."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import HfApi, snapshot_download

from pipeline.weights.disk.hashing import BLOCK_BYTES
from pipeline.weights.place import in_hub_cache
from tests.testbed.hub import TestHub, test_hub
from tests.unit.fit.test_fit_config import LLAMA
from tests.unit.support import Command, Ended
from tests.unit.weights.disk_set import flip, random_bytes, settle

BIG, SECOND = "model-1.safetensors", "sub/model-2.safetensors"
FILES = {
    "config.json": json.dumps(LLAMA).encode(),
    "modeling.py": b"one = 1\n",
    BIG: random_bytes(1, 2 * BLOCK_BYTES + 99),
    SECOND: random_bytes(2, 300_000),
}
SPEC = {
    "name": "tiny",
    "repository": "org/tiny",
    "format": "safetensors",
    "quant": "bf16",
    "about": "A set of weights that is only here for the tests.",
}


@dataclass
class Cache:
    """A checkout with a lock, a Hub, and a cache with its one snapshot."""

    hub: TestHub
    sm120: Command
    commit: str

    @property
    def root(self) -> Path:
        return self.sm120.cwd / "hf"

    @property
    def repository(self) -> Path:
        return self.root / "models--org--tiny"

    @property
    def snapshot(self) -> Path:
        return self.repository / "snapshots" / self.commit

    def blob(self, path: str) -> Path:
        return (self.snapshot / path).resolve()

    def by_stock_client(self, revision: str = "", cache: Path | None = None) -> None:
        snapshot_download(
            "org/tiny",
            revision=revision or self.commit,
            endpoint=self.hub.url,
            cache_dir=cache or self.root,
            token=False,
        )

    def verify(self, *more: str, at: Path | None = None) -> Ended:
        settle()
        return self.sm120("weights", "verify", str(at or self.snapshot), *more)

    def damage(self, *more: str) -> dict[str, str]:
        (result,) = json.loads(self.verify("--json", *more).out)["sets"]
        return {f["path"]: f["kind"] for f in result["findings"] if f["damage"]}

    def repair(self, *more: str) -> int:
        """How many bytes the Hub had to send."""
        before = self.hub.sent_bytes()
        ended = self.verify("--repair", *more)
        assert ended.code == 0, ended.err
        return self.hub.sent_bytes() - before

    def require_sound(self) -> None:
        """Judged by the stock client: the layout is its own, and every byte is right."""
        for path, data in FILES.items():
            assert (self.snapshot / path).is_symlink(), path
            assert (self.snapshot / path).resolve().parent.name == "blobs", path
            assert (self.snapshot / path).read_bytes() == data, path
        api = HfApi(endpoint=self.hub.url, token=False)
        result = api.verify_repo_checksums("org/tiny", revision=self.commit, cache_dir=self.root)
        assert (result.mismatches, result.missing_paths) == ([], [])

    def aside(self) -> list[Path]:
        return list(self.repository.glob(".sm120/*/aside/*"))


@pytest.fixture
def cache(
    sm120: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_clock: None
) -> Iterator[Cache]:
    (tmp_path / "images").mkdir()
    (tmp_path / "lockfiles" / "weights").mkdir(parents=True)
    (tmp_path / "lockfiles" / "weights" / "tiny.yaml").write_text(yaml.safe_dump(SPEC))
    with test_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        made = Cache(hub, sm120, hub.add("org/tiny", FILES))
        assert sm120("weights", "lock", "tiny").code == 0
        yield made


@pytest.fixture(params=["stock", "ours"])
def filled(cache: Cache, request: pytest.FixtureRequest) -> Cache:
    if request.param == "stock":
        cache.by_stock_client()
    else:
        assert cache.sm120("weights", "fetch", "tiny", "--output", "hf", "--hub-cache").code == 0
    cache.require_sound()
    return cache


@pytest.fixture
def stock(cache: Cache) -> Cache:
    """As `hf download` leaves it: no lock lies beside the files."""
    cache.by_stock_client()
    return cache


def lock_file(cache: Cache) -> str:
    return str(cache.sm120.cwd / "lockfiles" / "weights" / "tiny.lock.yaml")


PATHS: dict[str, Callable[[Cache], Path]] = {
    "cache": lambda c: c.root,
    "repository": lambda c: c.repository,
    "snapshot": lambda c: c.snapshot,
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
@pytest.mark.parametrize("names_lock", [False, True])
def test_each_path_of_a_cache_is_verified(
    filled: Cache, path: Callable[[Cache], Path], names_lock: bool
) -> None:
    named = ["--lock", lock_file(filled)] if names_lock else []
    ended = filled.verify(*named, at=path(filled))
    assert ended.code == 0, ended.err
    assert "4 files" in ended.out
    assert not (filled.snapshot / ".sm120").exists()
    flip(filled.blob(SECOND), 5)
    assert filled.verify(*named, at=path(filled)).error == "WeightsDamaged"
    filled.blob(BIG).unlink()
    assert filled.verify(*named, at=path(filled)).error == "WeightsDamaged"


def test_a_link_to_a_snapshot_and_the_home_of_a_cache_are_understood(stock: Cache) -> None:
    (stock.sm120.cwd / "k26").symlink_to(stock.snapshot)
    assert stock.verify(at=stock.sm120.cwd / "k26").code == 0
    home = stock.sm120.cwd / "home"
    home.mkdir()
    stock.root.rename(home / "hub")
    assert stock.verify(at=home).code == 0
    assert stock.verify("--lock", lock_file(stock), at=home).code == 0


def test_the_path_that_a_fetch_prints_can_be_verified(cache: Cache) -> None:
    ended = cache.sm120("weights", "fetch", "tiny", "--output", "hf", "--hub-cache")
    printed = cache.sm120.cwd / ended.out.partition(":")[0]
    assert printed == cache.snapshot
    assert cache.verify(at=printed).code == 0


def test_a_repair_of_a_sound_snapshot_fetches_nothing_and_changes_nothing(stock: Cache) -> None:
    before = {p: os.lstat(p).st_ino for p in stock.repository.rglob("*") if ".sm120" not in str(p)}
    assert stock.repair("--lock", lock_file(stock)) == 0
    for path, inode in before.items():
        assert os.lstat(path).st_ino == inode, path
    stock.require_sound()


def test_a_flipped_byte_costs_one_block_and_the_link_stays(filled: Cache) -> None:
    assert filled.verify().code == 0
    flip(filled.blob(BIG), BLOCK_BYTES + 5)
    assert filled.damage() == {BIG: "changed"}
    assert filled.repair() == BLOCK_BYTES
    filled.require_sound()
    assert filled.damage("--full") == {}


def test_a_missing_blob_is_fetched_alone_and_the_link_stays(filled: Cache) -> None:
    filled.blob(SECOND).unlink()
    assert filled.damage() == {SECOND: "missing"}
    assert filled.repair() == len(FILES[SECOND])
    filled.require_sound()


def test_a_missing_link_is_made_again_without_a_fetch(stock: Cache) -> None:
    (stock.snapshot / SECOND).unlink()
    assert stock.damage() == {SECOND: "name"}
    assert stock.repair() == 0
    stock.require_sound()


def test_a_file_in_the_place_of_a_link_is_named_and_becomes_one_again(stock: Cache) -> None:
    """As a repair did that took the snapshot for a plain folder."""
    (stock.snapshot / BIG).unlink()
    (stock.snapshot / BIG).write_bytes(FILES[BIG])
    assert stock.damage() == {BIG: "name"}
    assert stock.repair() == 0
    stock.require_sound()
    assert stock.aside() == []  # a second copy of good bytes would only fill the disk


def test_a_wrong_file_in_the_place_of_a_link_is_set_aside(stock: Cache) -> None:
    (stock.snapshot / BIG).unlink()
    (stock.snapshot / BIG).write_bytes(b"my own")
    assert stock.damage() == {BIG: "name"}
    assert stock.repair() == 0
    stock.require_sound()
    assert [path.read_bytes() for path in stock.aside()] == [b"my own"]


def test_a_right_file_is_kept_where_its_blob_is_wrong_and_cannot_be_had(stock: Cache) -> None:
    assert stock.verify().code == 0
    blob, name = stock.blob(BIG), stock.snapshot / BIG
    name.unlink()
    name.write_bytes(FILES[BIG])
    flip(blob, 5)
    assert stock.verify("--repair", "--offline").error == "WeightsDamaged"
    assert name.read_bytes() == FILES[BIG]


def test_a_link_out_of_the_folder_is_refused_and_repaired_without_a_fetch(stock: Cache) -> None:
    outside = stock.sm120.cwd / "outside"
    outside.write_bytes(FILES[BIG])
    (stock.snapshot / BIG).unlink()
    (stock.snapshot / BIG).symlink_to(outside)
    assert stock.damage() == {BIG: "name"}
    assert stock.repair() == 0
    stock.require_sound()


def test_a_blob_that_is_a_link_out_is_refused_and_its_bytes_are_copied(stock: Cache) -> None:
    blob, outside = stock.blob(BIG), stock.sm120.cwd / "outside"
    shutil.move(blob, outside)
    blob.symlink_to(outside)
    assert stock.damage() == {BIG: "link"}
    assert stock.repair() == 0
    stock.require_sound()
    assert outside.read_bytes() == FILES[BIG]


def test_wrong_bytes_behind_a_link_out_are_not_taken(stock: Cache) -> None:
    blob, outside = stock.blob(SECOND), stock.sm120.cwd / "outside"
    outside.write_bytes(random_bytes(9, len(FILES[SECOND])))
    blob.unlink()
    blob.symlink_to(outside)
    assert stock.repair() == len(FILES[SECOND])
    stock.require_sound()


def test_blobs_on_another_disk_are_copied_back_and_not_fetched(stock: Cache) -> None:
    blobs, disk = stock.repository / "blobs", stock.sm120.cwd / "disk"
    blobs.rename(disk)
    blobs.symlink_to(disk)
    assert set(stock.damage().values()) >= {"link"}
    assert stock.repair() == 0
    stock.require_sound()


def test_a_folder_of_links_into_a_cache_is_refused_and_filled_without_a_fetch(stock: Cache) -> None:
    farm = stock.sm120.cwd / "farm"
    for path in FILES:
        (farm / path).parent.mkdir(parents=True, exist_ok=True)
        (farm / path).symlink_to((stock.snapshot / path).resolve())
    named = ("--lock", lock_file(stock))
    assert stock.verify(*named, at=farm).error == "WeightsDamaged"
    before = stock.hub.sent_bytes()
    ended = stock.verify("--repair", *named, at=farm)
    assert ended.code == 0, ended.err
    assert stock.hub.sent_bytes() == before
    assert "on this machine already, not fetched: 4 files" in ended.err
    assert not any((farm / path).is_symlink() for path in FILES)
    stock.require_sound()


def test_renamed_files_are_found_again(stock: Cache) -> None:
    plain = stock.sm120.cwd / "plain"
    shutil.copytree(stock.snapshot, plain)
    (plain / BIG).rename(plain / "old.safetensors")
    (plain / "modeling.py").unlink()
    before = stock.hub.sent_bytes()
    ended = stock.verify("--repair", "--lock", lock_file(stock), at=plain)
    assert ended.code == 0, ended.err
    assert stock.hub.sent_bytes() - before == len(FILES["modeling.py"])
    assert (plain / BIG).read_bytes() == FILES[BIG]


def test_this_users_own_cache_is_asked_before_the_hub(
    stock: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(stock.root))
    empty = stock.sm120.cwd / "empty"
    empty.mkdir()
    before = stock.hub.sent_bytes()
    ended = stock.verify("--repair", "--lock", lock_file(stock), at=empty)
    assert ended.code == 0, ended.err
    assert stock.hub.sent_bytes() == before


def test_a_repair_says_first_how_much_it_will_fetch(stock: Cache) -> None:
    for path in FILES:
        stock.blob(path).unlink()
    ended = stock.verify("--repair")
    assert "to be fetched whole: 4 files, 8.7 MB (the set has 8.7 MB)" in ended.err
    assert "that is most of the set" in ended.err
    flip(stock.blob(BIG), 5)
    ended = stock.verify("--repair")
    assert f"to be fetched only where they differ: {BIG}" in ended.err
    assert "most of the set" not in ended.err


def test_a_snapshot_of_another_revision_is_refused_and_left_alone(stock: Cache) -> None:
    old = stock.commit
    new = stock.hub.add("org/tiny", {**FILES, "config.json": b"{}"})
    stock.by_stock_client(new)
    other = stock.repository / "snapshots" / new
    for more in ((), ("--repair",)):
        ended = stock.verify("--lock", lock_file(stock), *more, at=other)
        assert ended.error == "WeightsUnknown"
        assert new in ended.err
        assert old in ended.err
        assert stock.verify(*more, at=other).error == "WeightsUnknown"
    assert stock.verify().code == 0
    assert (other / "config.json").read_bytes() == b"{}"
    stock.require_sound()


def test_a_newer_lock_finds_the_blobs_of_the_old_revision(stock: Cache) -> None:
    new = stock.hub.add("org/tiny", {**FILES, "config.json": b"{}"})
    assert stock.sm120("weights", "lock", "tiny").code == 0
    before = stock.hub.sent_bytes()
    ended = stock.verify("--repair", "--lock", lock_file(stock), at=stock.repository)
    assert ended.code == 0, ended.err
    assert stock.hub.sent_bytes() - before == 2
    assert stock.verify(at=stock.repository / "snapshots" / new).code == 0
    stock.require_sound()


def test_the_cache_of_another_repository_is_refused(stock: Cache) -> None:
    other = stock.root / "models--org--other"
    shutil.copytree(stock.repository, other, symlinks=True)
    for path in (other, other / "snapshots" / stock.commit):
        ended = stock.verify("--repair", "--lock", lock_file(stock), at=path)
        assert ended.error == "WeightsUnknown"
        assert "org/other" in ended.err
        assert "org/tiny" in ended.err


def test_for_a_folder_inside_a_cache_the_hint_says_what_to_name(stock: Cache) -> None:
    for inside in (stock.snapshot / "sub", stock.repository / "blobs"):
        ended = stock.verify(at=inside)
        assert ended.error == "WeightsUnknown"
        assert "models--org--tiny" in ended.err.splitlines()[-1]


def test_a_cache_on_a_disk_without_links_is_as_good(stock: Cache) -> None:
    """There the Hub's client moves the file itself to its name."""
    for path in FILES:
        blob = stock.blob(path)
        (stock.snapshot / path).unlink()
        blob.rename(stock.snapshot / path)
    assert stock.damage() == {}
    flip(stock.snapshot / BIG, 5)
    assert stock.damage() == {BIG: "changed"}
    (stock.snapshot / SECOND).unlink()
    assert stock.damage().keys() == {BIG, SECOND}
    assert stock.repair() == BLOCK_BYTES + len(FILES[SECOND])
    for path, data in FILES.items():
        assert (stock.snapshot / path).read_bytes() == data, path


def test_a_fetch_to_a_snapshot_keeps_its_links(filled: Cache) -> None:
    before = filled.hub.sent_bytes()
    ended = filled.sm120("weights", "fetch", "tiny", "--output", str(filled.snapshot))
    assert ended.code == 0, ended.err
    assert filled.hub.sent_bytes() == before
    filled.require_sound()
    ended = filled.sm120(
        "weights", "fetch", "tiny", "--output", str(filled.repository), "--hub-cache"
    )
    assert ended.code == 0, ended.err
    assert not (filled.repository / "models--org--tiny").exists()
    assert filled.hub.sent_bytes() == before


def test_a_fetch_to_the_snapshot_of_another_revision_is_refused(stock: Cache) -> None:
    other = stock.repository / "snapshots" / ("f" * 40)
    other.mkdir()
    ended = stock.sm120("weights", "fetch", "tiny", "--output", str(other))
    assert ended.error == "WeightsUnknown"
    assert list(other.iterdir()) == []


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
def test_the_other_commands_take_the_same_paths(
    stock: Cache, path: Callable[[Cache], Path]
) -> None:
    at, sm120 = str(path(stock)), stock.sm120
    assert stock.verify(at=Path(at)).code == 0
    assert sm120("evidence", "new-key", "k", "--output", "keys").code == 0
    private, public = "keys/k.pem", "keys/k.pub"
    commands: dict[str, Any] = {
        "scrub": ("weights", "scrub", at),
        "sign": ("weights", "sign", at, "--key", private),
        "check-signature": ("weights", "check-signature", at, "--public-key", public),
        "attest": ("weights", "attest", at),
        "fit": ("weights", "fit", at, "--gpu-count", "1", "--ctx", "64"),
    }
    for name, command in commands.items():
        ended = sm120(*command)
        assert ended.code == 0, (name, ended.err)
    assert "org/tiny" in ended.out or path(stock) == stock.root
    assert not (stock.snapshot / ".sm120").exists()


def test_what_looks_like_a_cache_and_is_none(tmp_path: Path) -> None:
    for path in ("models--a--b", "x/snapshots/main", f"x/snapshots/{'a' * 40}", "y/blobs"):
        (tmp_path / path).mkdir(parents=True)
    for path in ("models--a--b", "x/snapshots/main", f"x/snapshots/{'a' * 40}", "y", "none"):
        assert in_hub_cache(tmp_path / path) is None
