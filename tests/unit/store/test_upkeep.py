from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.artifacts.store import upkeep
from pipeline.artifacts.store.store import Store, open_store
from pipeline.images.spec.checkout import Checkout
from tests import makers
from tests.unit.support import AMD64, Command, build_tiny, make_checkout, make_wheel, misnamed

pytestmark = pytest.mark.usefixtures("no_slow_helpers")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("SM120_STORE", str(tmp_path / "store"))
    return open_store(tmp_path / "store")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    wheel = make_wheel(tmp_path / "mirror", "thing")
    (tmp_path / "images" / "tiny").mkdir(parents=True)
    (tmp_path / "images" / "tiny" / "f").write_bytes(b"ours")
    return make_checkout(tmp_path, [wheel], files=[{"from": "f", "to": "/f"}])


@pytest.fixture
def digest(checkout: Checkout, store: Store, sm120: Command) -> str:
    """A built image."""
    return built(sm120, "--accept")


def built(sm120: Command, *args: str) -> str:
    return str(build_tiny(sm120, "--json", *args).json[0]["digest"])


def blobs(store: Store) -> list[Path]:
    return sorted((store.root / "oci" / "blobs" / "sha256").iterdir())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_show_counts_what_is_there(store: Store, digest: str, sm120: Command) -> None:
    sections = {s["name"]: s for s in sm120("store", "show", "--json").json["sections"]}
    assert sections["layers"]["files"] == len(blobs(store))
    assert sections["inputs"]["files"] == 1
    assert "tables of contents" in sm120("store", "show").out


def test_a_whole_store_is_reported_as_whole(digest: str, sm120: Command) -> None:
    ended = sm120("store", "check")
    assert (ended.code, ended.out) == (0, "the store is undamaged\n")
    assert sm120("store", "check", "--json").json == {"damaged": [], "repaired": False}


@pytest.mark.parametrize("number", range(4))
def test_a_flipped_bit_in_any_blob_is_found_and_repaired(
    store: Store, digest: str, sm120: Command, number: int
) -> None:
    bad = blobs(store)[number]
    flip(bad)
    ended = sm120("store", "check")
    assert ended.error == "StoreDamaged"
    assert ended.out == f"damaged: {bad}\n"
    assert "--repair" in ended.err
    assert sm120("store", "check", "--json").error == "StoreDamaged"
    assert bad.exists()
    assert sm120("store", "check", "--repair").code == 0
    assert not bad.exists()
    assert built(sm120) == digest
    assert misnamed(store.root) == []


def test_a_flipped_bit_in_an_input_is_found(store: Store, digest: str, sm120: Command) -> None:
    bad = next((store.root / "inputs").iterdir())
    flip(bad)
    assert sm120("store", "check", "--repair").out.startswith(f"removed: {bad}")
    assert sm120("store", "check").code == 0


def test_damaged_tables_of_contents_are_found_and_made_again(
    store: Store, checkout: Checkout, digest: str, sm120: Command
) -> None:
    for table in (store.root / "contents").iterdir():
        table.write_bytes(table.read_bytes()[:-9])
    (checkout.folder("tiny") / "f").write_bytes(b"changed, so that tables are read")
    ended = sm120("build", "--offline")
    assert ended.error == "StoreDamaged"
    assert sm120("store", "check").error == "StoreDamaged"
    assert sm120("store", "check", "--repair").code == 0
    assert built(sm120, "--accept") != digest


def test_a_damaged_record_of_an_image_is_found_and_made_again(
    store: Store, digest: str, sm120: Command
) -> None:
    (store.image_folder("tiny", AMD64) / "image.json").write_text("{}")
    assert sm120("store", "trim", "--yes").error == "StoreDamaged"
    assert sm120("store", "check").error == "StoreDamaged"
    assert sm120("store", "check", "--repair").code == 0
    assert built(sm120) == digest


def test_trim_only_says_what_could_go(store: Store, digest: str, sm120: Command) -> None:
    (store.root / "oci" / "blobs" / "sha256" / ("0" * 64)).write_bytes(b"old")
    before = sorted(store.root.rglob("*"))
    ended = sm120("store", "trim")
    assert ended.code == 0
    assert "can go" in ended.out
    assert "--yes" in ended.out
    assert sorted(store.root.rglob("*")) == before


def test_trim_keeps_what_a_built_image_needs(store: Store, digest: str, sm120: Command) -> None:
    needed = blobs(store)
    (store.root / "oci" / "blobs" / "sha256" / ("0" * 64)).write_bytes(b"old")
    (store.root / "contents" / f"{'0' * 64}.json").write_bytes(b"[]")
    assert "freed" in sm120("store", "trim", "--yes").out
    assert blobs(store) == needed
    assert list((store.root / "inputs").iterdir()) == []
    assert len(list((store.root / "contents").iterdir())) == 2
    answer = sm120("build", "--offline", "--json").json
    assert (answer[0]["digest"], answer[0]["cached"]) == (digest, True)


def test_trim_keeps_the_documents_of_a_foreign_base(store: Store) -> None:
    kept, gone = "1" * 64, "2" * 64
    folder = store.root / "oci" / "blobs" / "sha256"
    for name in (kept, gone):
        (folder / name).write_bytes(b"document")
    digest = f"sha256:{'3' * 64}"
    store.keep_image("tiny", AMD64, makers.image_record(digest, base=(f"sha256:{kept}",)))
    assert upkeep.unreachable(store) == [folder / gone]
    assert upkeep.remove_files(upkeep.unreachable(store)) == len(b"document")
    assert [p.name for p in blobs(store)] == [kept]


def test_nothing_is_trimmed_behind_a_folder_that_became_a_link(
    store: Store, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ("0" * 64)).write_bytes(b"mine")
    (store.root / "inputs").rmdir()
    (store.root / "inputs").symlink_to(elsewhere)
    assert upkeep.unreachable(store) == []
    assert upkeep.remove_files(upkeep.unreachable(store)) == 0
    assert (elsewhere / ("0" * 64)).exists()


def test_a_file_that_vanishes_before_it_is_trimmed_frees_nothing(store: Store) -> None:
    assert upkeep.remove_files([store.root / "inputs" / ("0" * 64)]) == 0


def test_trim_keeps_downloads_that_may_still_go_on(store: Store, sm120: Command) -> None:
    fresh, stale = store.partial_path("a" * 64), store.partial_path("b" * 64)
    fresh.write_bytes(b"x")
    stale.write_bytes(b"x")
    month_ago = time.time() - 30 * 24 * 3600
    os.utime(stale, (month_ago, month_ago))
    sm120("store", "trim", "--yes")
    assert (fresh.exists(), stale.exists()) == (True, False)


def test_an_empty_store_can_be_looked_after(store: Store, sm120: Command) -> None:
    for args in (["show"], ["check"], ["check", "--repair"], ["trim"], ["trim", "--yes"]):
        assert sm120("store", *args).code == 0


def test_a_rebuild_leaves_nothing_behind(store: Store, digest: str, sm120: Command) -> None:
    ended = sm120("image", "rebuild", "tiny", "--offline", "--json")
    assert ended.json["digest"] == digest
    assert ended.json["identical"]
    assert list(store.tmp.iterdir()) == []
    assert not list(store.root.glob("rebuild-*"))


# Files that a build takes away while the store is looked at.


def test_a_file_that_vanishes_during_a_check_is_no_damage(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    paths = sorted(store.blob_path(store.put_blob(bytes([n]))) for n in range(4))
    seen: list[int] = []

    def advance(n_bytes: int) -> None:
        seen.append(n_bytes)
        paths[-1].unlink(missing_ok=True)
        paths[-2].unlink(missing_ok=True)

    assert upkeep.damaged(store, advance) == []
    assert seen == [1, 1]


def test_a_file_that_vanishes_hides_no_damage_of_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    paths = sorted(store.blob_path(store.put_blob(bytes([n]))) for n in range(3))
    paths[-1].write_bytes(b"bad")

    def advance(n_bytes: int) -> None:
        paths[1].unlink(missing_ok=True)

    assert upkeep.damaged(store, advance) == [paths[-1]]


def test_a_table_or_record_that_vanishes_during_a_check_is_no_damage(
    store: Store, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("read_layer_table", "read_image_record"):
        real = getattr(upkeep, name)

        def read(path: Path, real: Callable[[Path], object] = real) -> object:
            path.unlink()
            return real(path)

        monkeypatch.setattr(upkeep, name, read)
    assert upkeep.damaged(store, lambda n_bytes: None) == []
    assert list((store.root / "contents").iterdir()) == []


def test_a_file_that_vanishes_while_the_store_is_counted_counts_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = upkeep._files

    def files(folder: Path) -> Iterator[Path]:
        yield from real(folder)
        yield folder / ("0" * 64)

    monkeypatch.setattr(upkeep, "_files", files)
    assert {s.size_bytes for s in upkeep.sections(store)} == {0}
    assert upkeep.total_bytes(store) == 0
