from __future__ import annotations

import gzip
import hashlib
import io
import os
import random
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.oci.record import FileRow, Kind, WrittenLayer
from pipeline.core.errors import CorruptArchive, HostileArchive, PipelineError, StoreDamaged
from pipeline.images.assemble import layer
from pipeline.images.assemble.deflate import compress
from pipeline.images.assemble.layer import (
    Deflated,
    Entry,
    Slice,
    read_layer_file,
    with_parents,
    write_layer,
)
from tests.makers import make_wheel

ROOT = Path(__file__).parents[3]
NOISE = random.Random(7).randbytes(3_500_000)
ZEROS = bytes(5 << 20)


def file(path: str, data: bytes = b"", mode: int = 0o644) -> Entry:
    return Entry(path, Kind.FILE, mode, data)


def link(path: str, target: str) -> Entry:
    return Entry(path, Kind.SYMLINK, 0o777, target=target)


def deflated(place: Path, path: str, data: bytes) -> Entry:
    """A file as a wheel holds it, with bytes of others around it."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    stream = packer.compress(data) + packer.flush()
    source = place / path.replace("/", "_")
    source.write_bytes(b"before" + stream + b"after, not ours")
    content = Deflated(str(source), 6, len(stream), len(data), zlib.crc32(data))
    digest = hashlib.sha256(data).hexdigest()
    return Entry(path, Kind.FILE, 0o644, content, sha256=digest)


def sliced(place: Path, path: str, data: bytes) -> Entry:
    source = place / path.replace("/", "_")
    source.write_bytes(b"before" + data + b"after")
    return Entry(path, Kind.FILE, 0o755, Slice(str(source), 6, len(data)))


def many_entries(place: Path) -> list[Entry]:
    return [
        file("etc/empty"),
        file("etc/small", b"words\n"),
        file("etc/large", NOISE),
        file("usr/" + "long" * 30 + "/" + "name" * 20, b"long"),
        file("usr/" + "x/" * 200 + "deep", b"deep"),
        file("usr/Főtanúsítvány 日本.crt", "őű".encode()),
        link("usr/lib64", "lib"),
        link("usr/far", "up/" * 90 + "there"),
        link("usr/fremd", "größe"),
        Entry("usr/second", Kind.HARDLINK, 0o644, target="etc/small"),
        Entry("var/tmp", Kind.DIR, 0o1777),
        Entry("home/app", Kind.DIR, 0o755, uid=1000, gid=1001),
        deflated(place, "opt/pure", b"import this\n" * 1000),
        deflated(place, "opt/zeros", ZEROS),
        deflated(place, "opt/noise", NOISE),
        deflated(place, "opt/nothing", b""),
        sliced(place, "lib/tool", NOISE[:2_100_000]),
    ]


def written(entries: Sequence[Entry], blob: Path) -> WrittenLayer:
    with blob.open("wb") as out:
        return write_layer(with_parents(list(entries)), out)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layer")


@pytest.fixture(scope="module")
def entries(place: Path) -> list[Entry]:
    return many_entries(place)


@pytest.fixture(scope="module")
def made(place: Path, entries: list[Entry]) -> WrittenLayer:
    return written(entries, place / "blob")


def plain(entry: Entry) -> bytes:
    content = entry.content
    if isinstance(content, Slice):
        return Path(content.path).read_bytes()[content.offset :][: content.size_bytes]
    if isinstance(content, Deflated):
        raw = Path(content.path).read_bytes()[content.offset :][: content.packed_bytes]
        return zlib.decompress(raw, -15)
    return content or b""


def test_pythons_tarfile_reads_every_entry_back(
    place: Path, entries: list[Entry], made: WrittenLayer
) -> None:
    with tarfile.open(place / "blob") as tar:
        infos = {info.name: info for info in tar}
        for entry in with_parents(entries):
            info = infos.pop(entry.path)
            assert (info.mode, info.uid, info.gid) == (entry.mode, entry.uid, entry.gid)
            assert info.linkname == entry.target
            if entry.kind is Kind.FILE:
                handle = tar.extractfile(info)
                assert handle is not None
                assert handle.read() == plain(entry)
    assert not infos


@pytest.mark.parametrize("command", [["gzip", "-tv"], ["tar", "-tzf"]])
def test_the_usual_tools_accept_it(place: Path, made: WrittenLayer, command: list[str]) -> None:
    blob = (place / "blob").rename(place / "blob.gz")
    done = subprocess.run([*command, str(blob)], capture_output=True, text=True, check=False)
    blob.rename(place / "blob")
    assert (done.returncode, "rror" in done.stderr) == (0, False)


def test_digest_and_sizes_are_those_of_the_blob(place: Path, made: WrittenLayer) -> None:
    raw = (place / "blob").read_bytes()
    tar = gzip.decompress(raw)
    assert made.record.digest == "sha256:" + hashlib.sha256(raw).hexdigest()
    assert made.record.diff_id == "sha256:" + hashlib.sha256(tar).hexdigest()
    assert (made.record.size_bytes, made.record.unpacked_bytes) == (len(raw), len(tar))
    assert len(tar) % 512 == 0


def test_entries_are_sorted_and_every_parent_comes_before(made: WrittenLayer) -> None:
    paths = [row.path for row in made.rows]
    assert paths == sorted(paths)
    assert all(p.rpartition("/")[0] in ("", *paths[:i]) for i, p in enumerate(paths))


def test_a_wheels_own_bytes_are_in_the_blob(place: Path, entries: list[Entry]) -> None:
    raw = (place / "blob").read_bytes()
    for entry in entries:
        if isinstance(entry.content, Deflated) and entry.content.size_bytes:
            content = entry.content
            stream = Path(content.path).read_bytes()[content.offset :][: content.packed_bytes]
            assert stream in raw


def test_each_file_is_found_by_its_row(
    place: Path, entries: list[Entry], made: WrittenLayer
) -> None:
    rows = {row.path: row for row in made.rows}
    for entry in entries:
        if entry.kind is Kind.FILE:
            row = rows[entry.path]
            assert read_layer_file(place / "blob", row) == plain(entry)
            assert row.sha256 == hashlib.sha256(plain(entry)).hexdigest()


def test_members_that_end_where_a_read_ends_are_followed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "CHUNK_BYTES", 1000)
    text = NOISE[:1250].hex().encode()
    row = written([file("a", text)], tmp_path / "blob").rows[0]
    member_bytes = len(compress(text[:1000]))
    for more in range(-2, 30):
        monkeypatch.setattr(layer, "CHUNK_BYTES", member_bytes + more)
        assert read_layer_file(tmp_path / "blob", row) == text


def test_any_order_in_gives_the_same_bytes_out(
    place: Path, entries: list[Entry], made: WrittenLayer, tmp_path: Path
) -> None:
    shuffled = list(entries)
    random.Random(1).shuffle(shuffled)
    assert written(shuffled, tmp_path / "other") == made


def test_a_layer_of_nothing_is_still_an_archive(tmp_path: Path) -> None:
    written([], tmp_path / "blob")
    with tarfile.open(tmp_path / "blob") as tar:
        assert tar.getnames() == []


def test_thousands_of_links_and_empty_files_fit(tmp_path: Path) -> None:
    entries = [link(f"l/{i:05}", "x") for i in range(2000)] + [
        file(f"e/{i:05}") for i in range(2000)
    ]
    written(entries, tmp_path / "blob")
    with tarfile.open(tmp_path / "blob") as tar:
        assert len(tar.getnames()) == 4002


def test_this_layer_has_this_digest_on_every_machine(tmp_path: Path) -> None:
    entries = [file("a/b", b"words\n" * 99), link("c", "a/b"), file("größe", b"1" * 600)]
    assert (
        written(entries, tmp_path / "blob").record.digest
        == "sha256:9a0d48f2367dc47276e4bb95afcce74a20f063f555140d7e804ab4d930089577"
    )


BUILD = """
import io, os, sys
from pathlib import Path
from typing import Any
from pipeline.images.assemble.layer import with_parents
from pipeline.images.assemble.layer import write_layer
from pipeline.images.assemble.venv import Venv
from pipeline.images.assemble.wheel import open_wheel
from pipeline.images.assemble.venv import wheel_entries
os.umask(int(sys.argv[2], 8))
path = Path(sys.argv[1])
entries = wheel_entries(open_wheel(path, path.name), Venv())
print(write_layer(with_parents(entries), io.BytesIO()).record.digest)
"""


def test_umask_zone_locale_and_hash_seed_change_nothing(tmp_path: Path) -> None:
    names = [f"pkg/m{i}.py" for i in range(50)] + ["pkg/größe.txt"]
    wheel = make_wheel(tmp_path, "pkg", {n: n.encode() * 20 for n in names})
    worlds = [
        ("022", {"TZ": "UTC", "LC_ALL": "C", "PYTHONHASHSEED": "1"}),
        ("077", {"TZ": "Asia/Tokyo", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "2"}),
        ("000", {"TZ": "America/New_York", "LC_ALL": "tr_TR.UTF-8", "PYTHONHASHSEED": "3"}),
    ]
    digests = set()
    for umask, env in worlds:
        done = subprocess.run(
            [sys.executable, "-c", BUILD, str(wheel), umask],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **env},
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
        )
        digests.add(done.stdout)
    assert len(digests) == 1


def refused(entry: Entry, match: str) -> None:
    with pytest.raises(CorruptArchive, match=match):
        write_layer([entry], io.BytesIO())


def changed(entry: Entry, **fields: Any) -> Entry:
    assert isinstance(entry.content, Deflated)
    return replace(entry, content=replace(entry.content, **fields))


@pytest.mark.parametrize(
    "path",
    [
        *(
            "etc/.wh.passwd",
            ".wh..wh..opq",
            ".wh.usr/x",
            "a/../../b",
            "a//b",
            "./a",
            "",
            "/a",
            "a/",
        ),
        *("x" * 256, "a/" + "é" * 128, "/".join(["z" * 99] * 40)),
    ],
)
@pytest.mark.parametrize("kind", list(Kind))
def test_a_path_that_no_layer_may_have_is_refused_whoever_brings_it(path: str, kind: Kind) -> None:
    with pytest.raises(HostileArchive, match=r"^pkg: /"):
        write_layer([Entry(path, kind, 0o644, target="t", owner="pkg")], io.BytesIO())


def test_a_link_to_a_path_longer_than_any_is_refused() -> None:
    write_layer([Entry("a", Kind.SYMLINK, 0o777, target="t" * 4095)], io.BytesIO())
    with pytest.raises(HostileArchive, match="the image: /a is a link to a path that is too long"):
        write_layer([Entry("a", Kind.SYMLINK, 0o777, target="t" * 4096)], io.BytesIO())


def test_a_wrong_crc_is_refused(tmp_path: Path) -> None:
    refused(changed(deflated(tmp_path, "a", b"words"), crc32=1), r"^a: CRC is")


def test_a_wrong_promise_is_refused(tmp_path: Path) -> None:
    entry = replace(deflated(tmp_path, "a", b"words"), sha256="0" * 64)
    refused(entry, r"^a: its RECORD promises 0{64}")
    refused(replace(sliced(tmp_path, "a", b"words"), sha256="0" * 64), "its RECORD promises")


def test_a_wrong_promise_about_an_empty_file_is_refused() -> None:
    refused(replace(file("a"), sha256="0" * 64), "its RECORD promises")


@pytest.mark.parametrize("size", [1, 4, 6, 1 << 40])
def test_a_wrong_size_is_refused(tmp_path: Path, size: int) -> None:
    refused(changed(deflated(tmp_path, "a", b"words"), size_bytes=size), "bytes it states")


@pytest.mark.parametrize("more", [-1, 1, 5])
def test_a_stream_that_ends_elsewhere_is_refused(tmp_path: Path, more: int) -> None:
    entry = deflated(tmp_path, "a", b"words")
    assert isinstance(entry.content, Deflated)
    refused(changed(entry, packed_bytes=entry.content.packed_bytes + more), "^a: ")


def test_a_source_that_ends_early_is_refused(tmp_path: Path) -> None:
    entry = sliced(tmp_path, "a", b"words")
    (tmp_path / "a").write_bytes(b"beforewo")
    refused(entry, "ends 3 bytes early")


def test_a_damaged_stream_is_refused(tmp_path: Path) -> None:
    entry = deflated(tmp_path, "a", b"words" * 100)
    raw = bytearray((tmp_path / "a").read_bytes())
    raw[6] = 0xFF
    (tmp_path / "a").write_bytes(raw)
    refused(entry, "damaged deflate stream")


def one_file(tmp_path: Path) -> tuple[Path, FileRow]:
    row = written([file("a", NOISE[:5000])], tmp_path / "blob").rows[0]
    return tmp_path / "blob", row


def test_a_flipped_byte_in_the_blob_is_found_when_the_file_is_read(tmp_path: Path) -> None:
    blob, row = one_file(tmp_path)
    good = blob.read_bytes()
    for at in range(row.offset + 5, row.offset + 5000, 501):
        raw = bytearray(good)
        raw[at] ^= 0x10
        blob.write_bytes(raw)
        with pytest.raises(StoreDamaged):
            read_layer_file(blob, row)


def test_a_cut_blob_is_found_when_the_file_is_read(tmp_path: Path) -> None:
    blob, row = one_file(tmp_path)
    blob.write_bytes(blob.read_bytes()[:1000])
    with pytest.raises(StoreDamaged, match="ends inside a"):
        read_layer_file(blob, row)


@pytest.mark.parametrize(
    "change", [{"offset": 0}, {"offset": 200}, {"size_bytes": 5001}, {"sha256": "0" * 64}]
)
def test_a_row_that_lies_is_found(tmp_path: Path, change: dict[str, int | str]) -> None:
    blob, row = one_file(tmp_path)
    with pytest.raises(PipelineError):
        read_layer_file(blob, FileRow(**{**row._asdict(), **change}))
