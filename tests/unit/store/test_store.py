from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipeline.artifacts.oci.document import OCI_MANIFEST
from pipeline.artifacts.oci.record import FileRow, LayerRecord, WrittenLayer
from pipeline.artifacts.store.store import Store, default_root, open_store
from pipeline.core import files
from pipeline.core.errors import DiskFull, Interrupted, PipelineError, StoreDamaged, StoreUnwritable
from pipeline.core.files import atomic_file, explained, is_free, locked, write_bytes
from pipeline.core.log import NoBar
from pipeline.core.model import sha256_of
from pipeline.core.net.http import NetClient
from pipeline.core.net.settings import NetworkSettings
from pipeline.images.assemble.image import assemble_images
from pipeline.images.assemble.plan import plan_image
from pipeline.images.fetch.inputs import Fetcher
from pipeline.images.fetch.sources import Sources
from tests import makers
from tests.makers import folder_fetcher
from tests.testbed.fault_server import FaultServer
from tests.unit.support import (
    AMD64,
    Command,
    make_checkout,
    make_wheel,
    misnamed,
    pin_for,
    temporary_files,
)

KEY = "sha256:" + "ab" * 32
ROWS = [FileRow("a", "file", 0o644, 1, "00", 0, "", "x")]


@pytest.fixture
def store(store_root: Path) -> Store:
    return open_store(store_root)


def kept_layer(store: Store, data: bytes = b"layer") -> WrittenLayer:
    """A layer that was made and kept."""
    digest, n_bytes = sha256_of(data), len(data)
    record = LayerRecord(digest=digest, diff_id=digest, size_bytes=n_bytes, unpacked_bytes=n_bytes)
    facts = WrittenLayer(record, ROWS)
    with store.new_blob() as blob:
        blob.path.write_bytes(data)
        blob.keep(facts.record.digest)
    store.keep_layer(KEY, facts)
    return facts


def all_files(root: Path) -> dict[str, bytes]:
    paths = [p for p in root.rglob("*") if p.is_file() and "locks" not in p.parts]
    return {str(p.relative_to(root)): p.read_bytes() for p in paths}


# Files that are whole or not there.


def test_a_file_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with atomic_file(path) as out:
        out.write(b"half")
        out.flush()
        assert not path.exists()
    assert path.read_bytes() == b"half"
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_file_that_is_not_finished_is_not_there(
    tmp_path: Path, error: type[BaseException]
) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def write_half() -> None:
        with atomic_file(tmp_path / "file") as out:
            out.write(b"new")
            raise error

    with pytest.raises(error):
        write_half()
    assert all_files(tmp_path) == {"file": b"old"}


def test_a_file_that_says_the_same_is_left_alone(tmp_path: Path) -> None:
    write_bytes(tmp_path / "file", b"same")
    before = (tmp_path / "file").stat()
    write_bytes(tmp_path / "file", b"same")
    assert (tmp_path / "file").stat().st_ino == before.st_ino


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOSPC, DiskFull),
        (errno.EDQUOT, DiskFull),
        (errno.EROFS, StoreUnwritable),
        (errno.EACCES, StoreUnwritable),
        (errno.EPERM, StoreUnwritable),
        (errno.ENOTDIR, StoreUnwritable),
        (errno.EISDIR, StoreUnwritable),
        (errno.ELOOP, StoreUnwritable),
        (errno.ENAMETOOLONG, StoreUnwritable),
    ],
)
def test_the_disks_refusals_have_their_own_errors(number: int, error: type[PipelineError]) -> None:
    assert type(explained(OSError(number, "x"), Path("/p"))) is error


def test_an_error_without_an_ending_stays_what_it_is() -> None:
    with pytest.raises(BlockingIOError):
        explained(BlockingIOError(errno.EAGAIN, "x"), Path("/p"))


def test_a_lock_keeps_others_out_until_its_process_ends(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = "import sys, time\nfrom pathlib import Path\nfrom pipeline.core.files import locked\n"
    code += "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)\n"
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    assert not is_free(path)
    child.kill()
    child.wait()
    assert is_free(path)


def test_a_thread_that_waits_for_a_lock_can_be_stopped(tmp_path: Path) -> None:
    stop = threading.Event()
    threading.Timer(0.05, stop.set).start()
    with (
        locked(tmp_path / "lock"),
        pytest.raises(Interrupted),
        locked(tmp_path / "lock", stop=stop),
    ):
        pass


@pytest.mark.parametrize("can_stop", [True, False])
def test_who_has_to_wait_for_a_lock_says_so_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], can_stop: bool
) -> None:
    path, stop, entered = tmp_path / "lock", threading.Event(), threading.Event()

    def wait() -> None:
        with locked(path, stop=stop if can_stop else None, waiting="waits for the other"):
            entered.set()

    with locked(path, waiting="waits for nobody"):
        second = threading.Thread(target=wait, daemon=True)
        second.start()
        said, deadline = "", time.monotonic() + 20
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
            said += capsys.readouterr().err
        assert not entered.is_set()
    assert entered.wait(20)
    second.join()
    assert said + capsys.readouterr().err == "waits for the other\n"


def test_readers_share_a_lock(tmp_path: Path) -> None:
    with locked(tmp_path / "lock", shared=True), locked(tmp_path / "lock", shared=True):
        assert not is_free(tmp_path / "lock")


# The store itself.


def test_the_store_is_an_oci_layout(store: Store) -> None:
    layout = json.loads((store.root / "oci" / "oci-layout").read_bytes())
    assert layout == {"imageLayoutVersion": "1.0.0"}


def test_its_place_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM120_STORE", "~/s")
    assert default_root() == Path.home() / "s"
    monkeypatch.delenv("SM120_STORE")
    assert default_root() == Path.home() / ".cache" / "sm120"
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert default_root() == Path("/c/sm120")


def test_a_small_blob_is_checked_when_it_is_read(store: Store) -> None:
    digest = store.put_blob(b"{}")
    assert json.loads(store.read_blob(digest)) == {}
    store.blob_path(digest).write_bytes(b"[]")
    with pytest.raises(StoreDamaged, match="does not match its digest"):
        store.read_blob(digest)
    store.blob_path(digest).unlink()
    with pytest.raises(StoreDamaged, match="not in the store"):
        store.read_blob(digest)


def test_a_kept_layer_is_found_with_its_contents(store: Store) -> None:
    facts = kept_layer(store)
    layer = store.layer(KEY)
    assert layer is not None
    assert layer.digest == facts.record.digest
    assert store.contents(facts.record) == ROWS


def test_a_foreign_layer_has_a_table_of_its_own(store: Store) -> None:
    facts = kept_layer(store)
    other = "sha256:" + "cd" * 32
    record = LayerRecord(
        digest=facts.record.digest, diff_id=KEY, size_bytes=5, unpacked_bytes=5, is_foreign=True
    )
    rows = [FileRow("b", "file", 0o600, 2, "11", 0, "", "y")]
    store.keep_layer(other, WrittenLayer(record, rows))
    assert store.layer(other) == record
    assert store.contents(record) == rows
    assert store.contents(facts.record) == ROWS


def test_a_row_is_found_by_the_end_of_its_path(store: Store) -> None:
    layer = kept_layer(store).record
    assert store.find_rows(layer, "a") == ROWS
    assert store.find_rows(layer, "b") == []
    unknown = layer.model_copy(update={"digest": "sha256:" + "0" * 64})
    with pytest.raises(StoreDamaged, match="table of contents of sha256:0"):
        store.find_rows(unknown, "a")


def test_a_small_file_with_other_content_is_replaced(store: Store) -> None:
    path = store.root / "layers" / "x.json"
    for data in (b"one", b"one", b"two"):
        store.write(path, data)
        assert path.read_bytes() == data


def test_many_may_use_a_store_and_one_alone_waits_for_all(store: Store) -> None:
    lock = store.root / "locks" / "store"
    entered = threading.Event()

    def use() -> None:
        with store.in_use():
            entered.set()

    with store.in_use():
        second = threading.Thread(target=use, daemon=True)
        second.start()
        assert entered.wait(20)
        second.join()
        assert not is_free(lock)
    with store.alone():
        assert not is_free(lock)
    assert is_free(lock)


def test_a_store_whose_tmp_cannot_be_written_is_noticed_when_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp = open_store(tmp_path / "store").tmp

    def refuse(*_: object, dir: Path | None = None) -> None:
        if dir == tmp:
            raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(StoreUnwritable, match="Read-only file system"):
        open_store(tmp_path / "store")


@pytest.mark.parametrize(
    "damage",
    [
        lambda store, facts: store.blob_path(facts.record.digest).unlink(),
        lambda store, facts: store.blob_path(facts.record.digest).write_bytes(b"lay"),
        lambda store, facts: shutil.rmtree(store.root / "contents"),
        lambda store, facts: (store.root / "layers" / f"{'ab' * 32}.json").write_bytes(b"{"),
        lambda store, facts: (store.root / "layers" / f"{'ab' * 32}.json").write_bytes(b"{}"),
        lambda store, facts: (store.root / "layers" / f"{'ab' * 32}.json").unlink(),
    ],
)
def test_a_layer_that_lost_a_part_is_made_again(store: Store, damage: object) -> None:
    facts = kept_layer(store)
    assert callable(damage)
    damage(store, facts)
    assert store.layer(KEY) is None


@pytest.mark.parametrize("text", ["", "{", "[[1]]", "[1]", "3", "null", "\xff"])
def test_a_damaged_table_of_contents_is_reported_as_damaged(store: Store, text: str) -> None:
    layer = kept_layer(store).record
    table = store.root / "contents" / f"{layer.digest.removeprefix('sha256:')}.json"
    table.write_bytes(text.encode("latin-1"))
    with pytest.raises(StoreDamaged, match="table of contents"):
        store.contents(layer)


def test_a_built_image_is_remembered_and_named_in_the_index(store: Store) -> None:
    record = makers.image_record(KEY)
    store.keep_image("tiny", AMD64, record)
    assert store.image_record("tiny", AMD64) == record
    index = json.loads((store.root / "oci" / "index.json").read_bytes())
    assert index == {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [{"mediaType": OCI_MANIFEST, "digest": KEY, "size": 1}],
    }


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"descriptor": 3}', "null"])
def test_a_damaged_record_of_an_image_counts_as_not_built(store: Store, text: str) -> None:
    store.keep_image("tiny", AMD64, makers.image_record(KEY))
    (store.image_folder("tiny", AMD64) / "image.json").write_text(text)
    assert store.image_record("tiny", AMD64) is None
    with pytest.raises(StoreDamaged, match=r"image\.json: is damaged"):
        store.keep_image("other", AMD64, makers.image_record(KEY))


def test_what_a_kill_leaves_of_a_small_file_is_swept(store: Store) -> None:
    code = "import os, sys\nfrom pathlib import Path\n"
    code += "from pipeline.artifacts.store.store import Store\n"
    code += "os.replace = lambda *a: os.kill(os.getpid(), 9)\n"
    code += "Store(Path(sys.argv[1])).put_blob(b'x')\n"
    done = subprocess.run([sys.executable, "-c", code, str(store.root)], check=False)
    assert done.returncode == -9
    assert len(list(store.tmp.iterdir())) == 1
    assert misnamed(store.root) == []
    open_store(store.root)
    assert temporary_files(store.root) == []


def test_a_scratch_folder_is_gone_afterwards_also_after_an_error(store: Store) -> None:
    with pytest.raises(FileNotFoundError), store.scratch() as folder:
        (folder / "missing" / "x").write_bytes(b"x")
    assert list(store.tmp.iterdir()) == []


def test_only_what_the_dead_left_is_swept(store: Store) -> None:
    for name in ("dead", "dead without a lock"):
        (store.tmp / name).mkdir()
        (store.tmp / name / "blob").write_bytes(b"x")
    (store.tmp / "dead" / "in-use").touch()
    with store.scratch() as living:
        store.sweep()
        assert list(store.tmp.iterdir()) == [living]


def test_no_scratch_folder_is_swept_while_it_is_being_made(store: Store) -> None:
    ended = threading.Event()

    def sweep() -> None:
        while not ended.is_set():
            store.sweep()

    thread = threading.Thread(target=sweep)
    thread.start()
    try:
        for _ in range(100):
            with store.scratch() as folder:
                (folder / "x").write_bytes(b"x")
                time.sleep(0.0005)
                assert (folder / "x").exists()
    finally:
        ended.set()
        thread.join()


def test_too_little_space_is_noticed_before_the_first_byte(store: Store) -> None:
    store.need_space(1)
    with pytest.raises(DiskFull, match=r"1000000\.00 GB needed"):
        store.need_space(10**15)


def test_a_store_that_is_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreUnwritable):
            open_store(root)


# Real disks: full, and read-only.


def test_a_full_disk_leaves_nothing_half_written(small_disk: Path) -> None:
    store = open_store(small_disk)
    before = all_files(small_disk)
    with pytest.raises(DiskFull):
        store.put_blob(bytes(3_000_000))
    with pytest.raises(DiskFull), store.new_blob() as blob, files.os_errors_explained(blob.path):
        blob.path.write_bytes(bytes(3_000_000))
    assert all_files(small_disk) == before


def test_a_download_onto_a_full_disk_ends_so_and_goes_on_later(
    small_disk: Path, server: FaultServer
) -> None:
    store, data = open_store(small_disk), os.urandom(1_500_000)
    pin = pin_for(data)
    server.add(pin.file, data)
    client = NetClient(NetworkSettings(indexes=(server.index,)), first_wait_s=0.001)
    fetcher = Fetcher(store, client, Sources(client), offline=False)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(1_200_000))
    with pytest.raises(DiskFull):
        list(fetcher.fetch_all([pin], NoBar()))
    assert not store.input_path(pin.sha256).exists()
    filler.unlink()
    list(fetcher.fetch_all([pin], NoBar()))
    assert store.input_path(pin.sha256).read_bytes() == data
    assert server.starts(pin.file)[-1] > 0


def test_a_layer_onto_a_full_disk_ends_so_and_leaves_nothing(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(tmp_path / "mirror", "thing", files={"thing/big": os.urandom(1_200_000)})
    checkout = make_checkout(tmp_path / "checkout", [wheel])
    store = open_store(small_disk)
    monkeypatch.setattr(Store, "need_space", lambda self, n_bytes: None)
    fetcher = folder_fetcher(store, tmp_path / "mirror")
    with pytest.raises(DiskFull):
        assemble_images(checkout, store, [plan_image(checkout, "tiny", AMD64)], lambda: fetcher)
    assert misnamed(small_disk) == []
    assert temporary_files(small_disk) == []
    assert list((store.root / "oci" / "blobs" / "sha256").iterdir()) == []


def test_a_build_that_cannot_fit_says_so_before_it_begins(
    small_disk: Path, tmp_path: Path, sm120: Command
) -> None:
    wheel = make_wheel(tmp_path / "mirror", "thing", files={"thing/big": os.urandom(1_800_000)})
    make_checkout(tmp_path, [wheel])
    ended = sm120("--store", small_disk, "build", "--mirror", tmp_path / "mirror", "--offline")
    assert (ended.error, ended.out) == ("DiskFull", "")
    assert "needed" in ended.err
    assert list((small_disk / "inputs").iterdir()) == []


@pytest.mark.parametrize("is_new", [True, False])
def test_a_read_only_store_cannot_be_built_into_but_looked_at(
    small_disk: Path, tmp_path: Path, sm120: Command, is_new: bool
) -> None:
    make_checkout(tmp_path, [make_wheel(tmp_path / "mirror", "thing")])
    if not is_new:
        open_store(small_disk)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for args in (["build"], ["store", "trim", "--yes"], ["store", "check", "--repair"]):
        ended = sm120("--store", small_disk, *args)
        assert ended.error == "StoreUnwritable"
        assert "SM120_STORE" in ended.err
    for args in (["image", "list"], ["plan"], ["store", "show"], ["store", "check"]):
        assert sm120("--store", small_disk, *args).code == 0


def test_a_store_of_somebody_else_ends_with_its_own_code(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("Only root can become somebody else here.")
    root = tmp_path / "store"
    open_store(root)
    code = "import os, sys\nfrom pathlib import Path\n"
    code += "from pipeline.artifacts.store.store import Store\n"
    code += "from pipeline.core.errors import StoreUnwritable\n"
    code += "os.setgid(65534)\nos.setuid(65534)\ntry:\n    Store(Path(sys.argv[1])).prepare()\n"
    code += "except StoreUnwritable as e:\n    sys.exit(e.exit_code)\n"
    done = subprocess.run([sys.executable, "-c", code, str(root)], check=False)
    assert done.returncode == 40
