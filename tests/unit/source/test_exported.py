from __future__ import annotations

import base64
import hashlib
import json
import shutil
from pathlib import Path

import pytest

from pipeline.artifacts.oci.record import Kind, LayerRecord
from pipeline.artifacts.store.store import Store, open_store
from pipeline.core.errors import PipelineError, StoreDamaged
from pipeline.images.assemble.layer import Entry, with_parents, write_layer
from pipeline.images.assemble.plan import plan_tree
from pipeline.images.source.compiled import export_tree
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import CompiledSpec
from tests.unit.support import ROOT, Command

KEY = "sha256:" + "1" * 64
OURS = ("--checkout", ROOT, "source", "export")
AMD64 = ("--platform", "linux/amd64")
LIBRARY = b"\x7fELF of a library" * 1000


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


@pytest.fixture
def record(store: Store) -> LayerRecord:
    """A compiled tree of a library and a header, as images have it."""
    entries = [
        Entry("opt/lib-x/libx.so.2", Kind.FILE, 0o755, LIBRARY),
        Entry("opt/lib-x/include/x.h", Kind.FILE, 0o644, b"int x;\n"),
    ]
    with store.new_blob() as blob:
        with blob.path.open("wb") as out:
            written = write_layer(with_parents(entries), out)
        blob.keep(written.record.digest)
    return store.keep_layer(KEY, written)


def test_files_lie_below_the_folder_with_their_bytes_and_modes(
    store: Store, record: LayerRecord, tmp_path: Path
) -> None:
    rows = export_tree(store, record, "/opt/lib-x", tmp_path / "out")
    library = tmp_path / "out" / "libx.so.2"
    assert library.read_bytes() == LIBRARY
    assert library.stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "out" / "include" / "x.h").read_bytes() == b"int x;\n"
    assert len(rows) == 2


def test_a_damaged_tree_leaves_no_library_behind(
    store: Store, record: LayerRecord, tmp_path: Path
) -> None:
    blob = store.blob_path(record.digest)
    blob.chmod(0o644)
    data = bytearray(blob.read_bytes())
    row = next(x for x in store.contents(record) if x.path.endswith("libx.so.2"))
    data[row.offset + 5] ^= 0xFF
    blob.write_bytes(data)
    with pytest.raises(StoreDamaged):
        export_tree(store, record, "/opt/lib-x", tmp_path / "out")
    assert not (tmp_path / "out" / "libx.so.2").exists()


def test_a_tree_whose_layer_is_gone_is_refused(
    store: Store, record: LayerRecord, tmp_path: Path
) -> None:
    store.blob_path(record.digest).unlink()
    with pytest.raises(StoreDamaged, match="not in the store"):
        export_tree(store, record, "/opt/lib-x", tmp_path / "out")


def test_a_folder_that_cannot_be_written_is_one_clear_error(
    store: Store, record: LayerRecord, tmp_path: Path
) -> None:
    (tmp_path / "out").write_text("a file, not a folder")
    with pytest.raises(PipelineError, match="out"):
        export_tree(store, record, "/opt/lib-x", tmp_path / "out")


@pytest.fixture
def compiled(tmp_path: Path) -> Store:
    """A store in which nccl-sm120 is compiled."""
    store = open_store(tmp_path / "store")
    wanted = CompiledSpec(source="nccl-sm120", build="sm120")
    key = plan_tree(Checkout(ROOT), wanted, "linux/amd64").key
    entries = [Entry("opt/nccl-sm120/libnccl.so.2", Kind.FILE, 0o755, LIBRARY)]
    with store.new_blob() as blob:
        with blob.path.open("wb") as out:
            written = write_layer(with_parents(entries), out)
        blob.keep(written.record.digest)
    store.keep_layer(key, written)
    return store


def test_the_command_writes_what_is_compiled_and_prints_hashes(
    sm120: Command, tmp_path: Path, compiled: Store
) -> None:
    ended = sm120("--store", compiled.root, *OURS, "nccl-sm120", "sm120", tmp_path / "out", *AMD64)
    assert ended.code == 0, ended.err
    assert hashlib.sha256(LIBRARY).hexdigest() in ended.out
    assert (tmp_path / "out" / "libnccl.so.2").read_bytes() == LIBRARY


@pytest.fixture
def library(sm120: Command, tmp_path: Path, compiled: Store) -> Path:
    """An exported library with its signed statement."""
    assert sm120("evidence", "new-key", "me").code == 0
    out = tmp_path / "out"
    ended = sm120("--store", compiled.root, *OURS, "nccl-sm120", "sm120", out, *AMD64, "--json")
    (row,) = ended.json
    assert row["statement"]["state"] == "signed by me"
    assert Path(row["statement"]["file"]) == out / "libnccl.so.2.dsse.json"
    return out / "libnccl.so.2"


@pytest.mark.parametrize("checkout", [("--checkout", ROOT), ()])
def test_an_exported_file_has_a_signed_statement_that_verify_believes(
    sm120: Command, library: Path, checkout: tuple[str | Path, ...]
) -> None:
    ended = sm120(*checkout, "verify", library)
    assert ended.code == 0, ended.err
    assert "compiled nccl-sm120 (sm120) for linux/amd64" in ended.out


def test_a_changed_byte_of_an_exported_file_is_broken_evidence(
    sm120: Command, library: Path
) -> None:
    data = bytearray(library.read_bytes())
    data[7] ^= 1
    library.write_bytes(data)
    ended = sm120("verify", library)
    assert ended.error == "EvidenceBroken"
    assert "not about this" in ended.err


def test_an_export_that_another_key_signed_is_not_believed(
    sm120: Command, library: Path, tmp_path: Path
) -> None:
    assert sm120("evidence", "new-key", "other", "--output", tmp_path / "usb").code == 0
    trust = tmp_path / "trust.yaml"
    shown = sm120("evidence", "trust-key", tmp_path / "usb" / "other.pub", "--trust", trust)
    assert shown.code == 0, shown.err
    ended = sm120("verify", library, "--trust", trust)
    assert ended.error == "EvidenceBroken"


def test_a_statement_of_an_export_whose_claim_was_edited_is_not_believed(
    sm120: Command, library: Path
) -> None:
    path = library.with_name("libnccl.so.2.dsse.json")
    envelope = json.loads(path.read_text())
    payload = base64.b64decode(envelope["payload"]).replace(b"linux/amd64", b"linux/arm64")
    envelope["payload"] = base64.b64encode(payload).decode()
    path.write_text(json.dumps(envelope))
    assert sm120("verify", library).error == "EvidenceBroken"


def test_an_export_of_other_inputs_than_the_checkout_has_is_stale(
    sm120: Command, library: Path, tmp_path: Path
) -> None:
    changed = tmp_path / "checkout"
    for name in ("images", "lockfiles"):
        shutil.copytree(ROOT / name, changed / name, symlinks=True)
    own = next((changed / "images" / "sources" / "nccl-sm120").glob("*.cc"))
    own.write_text(own.read_text() + "// changed\n")
    ended = sm120("--checkout", changed, "verify", library)
    assert ended.error == "EvidenceStale", ended.err
    assert "export it again" in ended.out


def test_what_is_not_compiled_is_refused_with_the_command_that_does_it(
    sm120: Command, tmp_path: Path
) -> None:
    ended = sm120(*OURS, "nccl-sm120", "sm120", tmp_path / "out", *AMD64)
    assert ended.error == "UnknownSource"
    assert "sm120 source build nccl-sm120 sm120" in ended.err
    assert not (tmp_path / "out").exists()


def test_a_build_that_the_source_does_not_have_is_refused(sm120: Command, tmp_path: Path) -> None:
    ended = sm120(*OURS, "nccl-sm120", "sm90", tmp_path / "out", *AMD64)
    assert ended.error == "UnknownSource"
