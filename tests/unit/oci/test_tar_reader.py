"""Somebody else's layers, read as tar's own reader reads them, or refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import random
import tarfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.artifacts.oci.document import GZIP_LAYER
from pipeline.artifacts.oci.record import FileRow
from pipeline.artifacts.oci.tar_reader import TarStream, open_layer
from pipeline.core.errors import CorruptArchive, HostileArchive
from tests.growth import grows_linearly
from tests.testbed.foreign_image import PLAIN_LAYER, Thing, folder, link, tar_of

THINGS = (
    folder("./usr"),
    Thing("./usr/short", b"a" * 511, 0o4755, 3, 4),
    Thing("usr/" + "long/" * 30 + "name", b"b" * 513),
    Thing("/usr/ünï", b""),
    link("usr/link", "/else/../where"),
    link("usr/far", "x" * 150),
    Thing("usr/hard", kind=tarfile.LNKTYPE, target="./usr/short"),
    Thing("dev/null", kind=tarfile.CHRTYPE, mode=0o666),
    Thing("run/pipe", kind=tarfile.FIFOTYPE),
    Thing("big-owner", b"x", uid=3_000_000, gid=5_000_000),
)


def read(data: bytes, pieces: int = 4096) -> tuple[list[tuple[FileRow, bytes]], str]:
    source = (data[i : i + pieces] for i in range(0, len(data), pieces))
    stream = TarStream(source, "it")
    entries = [(h, b"".join(stream.content(h))) for h in stream.entries()]
    return entries, stream.diff_id


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("pieces", [1, 100, 512, 1 << 20])
def test_entries_are_those_that_pythons_own_reader_finds(form: int, pieces: int) -> None:
    data = tar_of(*THINGS, form=form)
    entries, diff_id = read(data, pieces)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = archive.getmembers()
        expected = [(m.name.strip("./"), m.mode, m.uid, m.gid, m.size) for m in members]
        bodies = [archive.extractfile(m).read() if m.isreg() else b"" for m in members]  # type: ignore[union-attr]
    assert [(h.path, h.mode, h.uid, h.gid, h.size_bytes) for h, _ in entries] == expected
    assert [body for _, body in entries] == bodies
    assert diff_id == f"sha256:{hashlib.sha256(data).hexdigest()}"
    kinds = [h.kind for h, _ in entries]
    assert kinds[4:9] == ["symlink", "symlink", "hardlink", "device", "fifo"]
    assert entries[6][0].target == "usr/short"
    assert entries[5][0].target == "x" * 150


def test_content_that_nobody_reads_is_passed_over() -> None:
    data = tar_of(*THINGS)
    stream = TarStream(iter([data]), "it")
    assert len(list(stream.entries())) == len(THINGS)
    assert stream.diff_id == f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_gzip_members_in_a_row_are_one_layer(tmp_path: Path) -> None:
    data = tar_of(*THINGS)
    path = tmp_path / "blob"
    path.write_bytes(b"".join(gzip.compress(data[i : i + 700]) for i in range(0, len(data), 700)))
    with open_layer(path, GZIP_LAYER) as stream:
        assert len(list(stream.entries())) == len(THINGS)
    assert stream.unpacked_bytes == len(data)


def test_what_was_packed_with_the_largest_window_is_read(tmp_path: Path) -> None:
    far = random.Random(1).randbytes(30_000)
    data = tar_of(Thing("far", far + far))
    packed = gzip.compress(data)
    assert len(packed) < 40_000  # the second half repeats the first
    (tmp_path / "blob").write_bytes(packed)
    with open_layer(tmp_path / "blob", GZIP_LAYER) as stream:
        assert [b"".join(stream.content(header)) for header in stream.entries()] == [far + far]


def test_names_that_would_steer_a_terminal_are_shown_by_their_numbers() -> None:
    entries, _ = read(tar_of(Thing("a\x1b[2J\nb", b"x")))
    assert entries[0][0].path == r"a\x1b[2J\x0ab"


def test_a_name_that_is_no_UTF8_is_kept_apart() -> None:
    data = tar_of(Thing("aXb", b"x"), form=tarfile.USTAR_FORMAT)
    broken = bytearray(data)
    broken[1] = 0xFF
    broken[148:156] = b"%06o\0 " % (sum(data[:512]) - sum(data[148:156]) + 256 + 0xFF - ord("X"))
    assert read(bytes(broken))[0][0][0].path == r"a\xffb"


@pytest.mark.parametrize(
    ("thing", "error"),
    [
        (Thing("a", pax={"GNU.sparse.major": "1"}), CorruptArchive),
        (Thing("a", kind=b"S"), CorruptArchive),
        (Thing("a", kind=b"V"), CorruptArchive),
        (Thing("a", pax={"size": "-1"}), CorruptArchive),
        (Thing("a", pax={"uid": "9" * 30}), CorruptArchive),
        (Thing("a", pax={"size": "999999999999"}), CorruptArchive),
        (Thing("a", pax={"uid": str(2**32 - 1)}), CorruptArchive),
        (Thing("a", pax={"gid": str(2**40)}), CorruptArchive),
        (Thing("a", pax={"path": "x" * 70_000}), HostileArchive),
        (Thing("a", kind=b"2", pax={"linkpath": "x" * 70_000}), HostileArchive),
        (Thing("a", pax={"path": "../../x"}), HostileArchive),
        (Thing("a", kind=b"1", pax={"linkpath": "/../x"}), HostileArchive),
    ],
)
def test_what_layers_do_not_have_is_refused(thing: Thing, error: type[Exception]) -> None:
    with pytest.raises(error):
        read(tar_of(thing))


@pytest.mark.parametrize(
    "body",
    [
        *(b"8 path=x\n", b"99999 path=x\n", b"x path=y\n", b"7 path\n", b"-5 a=b\n", b"\xff" * 9),
        *(
            b"0 a=b\n",
            b" a=b\n",
            b"1 a=b\n",
            b"2 a=b\n",
            b"0000000006 a=b\n",
            b"6 a=b\n6 a=",
            b"6a=bc\n",
        ),
    ],
)
def test_a_damaged_pax_header_is_refused(body: bytes) -> None:
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, len(body)
    head = info.tobuf(tarfile.USTAR_FORMAT) + body.ljust(512, b"\0")
    with pytest.raises(CorruptArchive):
        read(head + tar_of(Thing("a")))


def pax_header(body: bytes) -> bytes:
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, len(body)
    return info.tobuf(tarfile.USTAR_FORMAT) + body + b"\0" * (-len(body) % 512)


@pytest.mark.parametrize("line", [b"6 a=b\n", b"8 a=bcd\n"])
def test_a_pax_header_takes_time_by_its_length_only(line: bytes) -> None:
    def read_header(lines: int) -> None:
        entries, _ = read(pax_header(line * lines) + tar_of(Thing("a")), 1 << 20)
        assert entries[0][0].path == "a"

    assert grows_linearly(read_header, 100_000)


def test_pax_headers_in_a_row_take_no_more_memory_than_one() -> None:
    body = b"".join(pax_line(f"key{n}", b"x" * 900) for n in range(1000))
    start = tar_of(Thing("a"))

    def source() -> Iterator[bytes]:
        for _ in range(30):
            yield pax_header(body)
        yield start

    tracemalloc.start()
    try:
        assert len(list(TarStream(source(), "it").entries())) == 1
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()


def pax_line(key: str, value: bytes) -> bytes:
    rest = b" " + key.encode() + b"=" + value + b"\n"
    return str(len(rest) + 3).encode() + rest


def test_the_last_of_several_pax_headers_counts() -> None:
    first, last = pax_line("path", b"f" * 100), pax_line("path", b"l" * 100)
    entries, _ = read(pax_header(first) + pax_header(last) + tar_of(Thing("a")))
    assert entries[0][0].path == "l" * 100


def test_an_empty_blob_is_no_layer(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"")
    for kind in (GZIP_LAYER, PLAIN_LAYER):
        with pytest.raises(CorruptArchive), open_layer(tmp_path / "blob", kind) as stream:
            list(stream.entries())


GOOD = tar_of(*THINGS)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=8),
    st.integers(0, len(GOOD)),
)
def test_no_damage_ends_in_anything_but_an_error_of_ours(
    flips: list[tuple[int, int]], end: int
) -> None:
    data = bytearray(GOOD)
    for place, value in flips:
        data[place] = value
    try:
        entries, _ = read(bytes(data[:end]))
    except (CorruptArchive, HostileArchive):
        return
    assert all(".." not in h.path.split("/") and not h.path.startswith("/") for h, _ in entries)
