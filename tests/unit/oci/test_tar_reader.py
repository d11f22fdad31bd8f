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
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.artifacts.oci.document import GZIP_LAYER, ZSTD_LAYER
from pipeline.artifacts.oci.record import FileRow
from pipeline.artifacts.oci.tar_reader import (
    TarStream,
    header_name,
    header_size,
    open_layer,
    padding,
    read_number,
)
from pipeline.core.errors import CorruptArchive, HostileArchive, StoreDamaged
from pipeline.core.files import gunzipped, unpacked_zstd
from tests.growth import grows_linearly
from tests.testbed.foreign_image import PLAIN_LAYER, Thing, folder, link, tar_of, zstd_packed

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


NO_KIND, NO_NUMBER = (
    "a: a tar entry of a kind that layers do not have",
    "not a number in a pax header",
)
LONGEST = 1 << 16


@pytest.mark.parametrize(
    ("thing", "error", "why"),
    [
        (Thing("a", pax={"GNU.sparse.major": "1"}), CorruptArchive, NO_KIND),
        (Thing("a", kind=b"S"), CorruptArchive, f"{NO_KIND}: b'S'"),
        (Thing("a", kind=b"V"), CorruptArchive, NO_KIND),
        (Thing("a", pax={"size": "-1"}), CorruptArchive, f"{NO_NUMBER}: '-1'"),
        (Thing("a", pax={"size": "٣"}), CorruptArchive, NO_NUMBER),
        (Thing("a", pax={"uid": "9" * 30}), CorruptArchive, NO_NUMBER),
        (Thing("a", pax={"uid": "0" * 19}), CorruptArchive, NO_NUMBER),
        (Thing("a", pax={"size": "999999999999"}), CorruptArchive, "it: the tar archive ends too"),
        (
            Thing("a", pax={"uid": str(2**32 - 1)}),
            CorruptArchive,
            "a: belongs to 4294967295, which",
        ),
        (Thing("a", pax={"gid": str(2**40)}), CorruptArchive, "a: belongs to 1099511627776, which"),
        (Thing("a", pax={"path": "x" * LONGEST}), HostileArchive, "it: a path of 65537 bytes"),
        (
            Thing("a", kind=b"2", pax={"linkpath": "x" * 70_000}),
            HostileArchive,
            "it: a linkpath of",
        ),
        (Thing("a", pax={"path": "../../x"}), HostileArchive, "'../../x' leaves the image"),
        (Thing("a", kind=b"1", pax={"linkpath": "/../x"}), HostileArchive, "'/../x' leaves the"),
    ],
)
def test_what_layers_do_not_have_is_refused(thing: Thing, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        read(tar_of(thing))


@pytest.mark.parametrize(
    ("pax", "wanted"),
    [
        ({"uid": "0" * 17 + "7"}, ("a", 7, 0)),
        ({"uid": str(2**32 - 2), "gid": str(2**32 - 2)}, ("a", 2**32 - 2, 2**32 - 2)),
        ({"path": "x" * (LONGEST - 1)}, ("x" * (LONGEST - 1), 0, 0)),
    ],
)
def test_what_is_just_within_bounds_is_read(
    pax: dict[str, str], wanted: tuple[str, int, int]
) -> None:
    ((row, _),) = read(tar_of(Thing("a", pax=pax)))[0]
    assert (row.path, row.uid, row.gid) == wanted


@pytest.mark.parametrize(("flag", "what"), [(b"L", "name"), (b"K", "name"), (b"x", "pax header")])
def test_a_long_name_or_header_has_a_bound(flag: bytes, what: str) -> None:
    info = tarfile.TarInfo("long")
    most = LONGEST if what == "name" else 4 << 20
    for size, why in ((most + 1, f"it: a {what} of {most + 1} bytes"), (most, "ends too early")):
        info.type, info.size = flag, size
        with pytest.raises((HostileArchive, CorruptArchive), match=why):
            read(info.tobuf(tarfile.GNU_FORMAT))


def test_an_old_archive_s_folder_is_a_file_whose_name_ends_with_a_slash() -> None:
    data = bytearray(tar_of(Thing("a/", b""), Thing("b", b""), form=tarfile.USTAR_FORMAT))
    for at in (0, 512):
        data[at + 156 : at + 157] = b"\0"
        data[at + 148 : at + 156] = b" " * 8
        data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    assert [(row.path, row.kind) for row, _ in read(bytes(data))[0]] == [
        ("a", "dir"),
        ("b", "file"),
    ]


def test_a_long_name_of_POSIX_is_put_together() -> None:
    name = f"{'p' * 120}/{'n' * 90}"
    block = tar_of(Thing(name, b""), form=tarfile.USTAR_FORMAT)[:512]
    assert header_name(block) == name.encode()
    gnu = block[:257] + b"ustar  \0" + block[265:]  # there the field holds times
    assert header_name(gnu) == b"n" * 90


def test_a_header_s_numbers_are_octal_or_binary_and_its_checksum_counts() -> None:
    assert read_number(b"0000644\0") == 0o644
    assert (read_number(b"\0" * 8), read_number(b"  7 \0")) == (0, 7)
    assert read_number(b"\x80" + (1 << 40).to_bytes(11)) == 1 << 40
    with pytest.raises(CorruptArchive, match="not a number in a tar header: b'0000648"):
        read_number(b"0000648\0")
    block = tar_of(Thing("a", b"x" * 700))[:512]
    assert header_size(block) == 700
    large = tarfile.TarInfo("large")
    for size in (7 << 30, 9 << 30):  # eleven digits, and too large for them
        large.size = size
        assert header_size(large.tobuf(tarfile.GNU_FORMAT)) == size
    with pytest.raises(CorruptArchive, match="a tar header's checksum is wrong"):
        header_size(b"b" + block[1:])
    assert [len(padding(n)) for n in (0, 1, 511, 512, 513)] == [0, 511, 1, 0, 511]


def test_only_zeros_may_follow_the_end_and_they_count() -> None:
    data = tar_of(Thing("a", b"x")) + b"\0" * 5000
    assert read(data)[1] == f"sha256:{hashlib.sha256(data).hexdigest()}"
    for more in (b"x", b"\0" * 5000 + b"x"):
        with pytest.raises(CorruptArchive, match="it: bytes follow the end of the tar archive"):
            read(data + more)


def test_a_layer_has_a_bound_of_entries_and_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    data = tar_of(Thing("a"), Thing("b"))
    place = "pipeline.artifacts.oci.tar_reader"
    monkeypatch.setattr(f"{place}._MOST_ENTRIES", 3)  # the last is the end itself
    monkeypatch.setattr(f"{place}._MOST_BYTES", len(data))
    assert len(read(data)[0]) == 2
    with pytest.raises(HostileArchive, match=f"it: unpacks to more than {len(data)} bytes"):
        read(data + b"\0")
    monkeypatch.setattr(f"{place}._MOST_ENTRIES", 2)
    with pytest.raises(HostileArchive, match="it: holds more than 2 entries"):
        read(data)


def test_a_blob_that_is_missing_cut_or_no_gzip_says_so(tmp_path: Path) -> None:
    blob, heard = tmp_path / "blob", list[int]()
    with (
        pytest.raises(StoreDamaged, match="the layer sha256:blob: not in the store"),
        open_layer(blob, GZIP_LAYER),
    ):
        pass
    packed = gzip.compress(GOOD)
    for data, why in (
        (packed[: len(packed) // 2], "its compressed stream ends too early"),
        (b"no gzip at all", "cannot be inflated"),
    ):
        blob.write_bytes(data)
        with (
            pytest.raises(CorruptArchive, match=f"the layer sha256:blob: {why}"),
            open_layer(blob, GZIP_LAYER) as stream,
        ):
            list(stream.entries())
    blob.write_bytes(packed)
    with open_layer(blob, GZIP_LAYER, heard.append) as stream:
        list(stream.entries())
    assert sum(heard) == len(packed)


@pytest.mark.parametrize(
    ("unpack", "member"),
    [(gunzipped, gzip.compress(b"")), (unpacked_zstd, b"\x50\x2a\x4d\x18" + bytes(4))],
    ids=["gzip", "zstd"],
)
def test_any_number_of_empty_members_takes_linear_time(unpack: Any, member: bytes) -> None:
    assert grows_linearly(lambda n: sum(map(len, unpack([member * n], 1 << 20))), 12_000)


@pytest.mark.parametrize("frames", [1, 3])
def test_zstd_frames_in_a_row_are_one_layer(tmp_path: Path, frames: int) -> None:
    far = random.Random(1).randbytes(300_000)
    data = tar_of(Thing("far", far + far), *THINGS)
    path = tmp_path / "blob"
    path.write_bytes(zstd_packed(data, frames=frames).blob)
    with open_layer(path, ZSTD_LAYER) as stream:
        assert len(list(stream.entries())) == len(THINGS) + 1
    assert stream.unpacked_bytes == len(data)
    assert stream.diff_id == f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_a_zstd_layer_that_is_cut_foreign_damaged_or_asks_for_gigabytes_says_so(
    tmp_path: Path,
) -> None:
    blob, data = tmp_path / "blob", tar_of(Thing("x", random.Random(2).randbytes(300_000)))
    whole = zstd_packed(data).blob
    flipped = bytearray(whole)
    flipped[2] ^= 0x01
    for bad, why in (
        (whole[: len(whole) // 2], "its compressed stream ends too early"),
        (whole[:-3], "its compressed stream ends too early"),
        (bytes(flipped), "cannot be inflated"),
        (gzip.compress(data), "cannot be inflated"),
        (whole + b"more", "cannot be inflated|ends too early"),
        (zstd_packed(data, window_log=28).blob, "cannot be inflated .*too much memory"),
    ):
        blob.write_bytes(bad)
        with (
            pytest.raises(CorruptArchive, match=f"the layer sha256:blob: {why}"),
            open_layer(blob, ZSTD_LAYER) as stream,
        ):
            list(stream.entries())


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
    with pytest.raises(CorruptArchive, match="it: a pax header is damaged"):
        read(head + tar_of(Thing("a")))


def pax_header(body: bytes) -> bytes:
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, len(body)
    return info.tobuf(tarfile.USTAR_FORMAT) + body + b"\0" * (-len(body) % 512)


@pytest.mark.share(1)
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
        with (
            pytest.raises(CorruptArchive, match="ends too early"),
            open_layer(tmp_path / "blob", kind) as stream,
        ):
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
