from __future__ import annotations

import gzip
import io
import lzma
import re
import tarfile
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.artifacts.oci.record import Kind
from pipeline.core.errors import CorruptArchive, HostileArchive, PipelineError
from pipeline.images.assemble.deb import DebContents, unpack_deb
from pipeline.images.assemble.layer import Entry, Slice
from tests.testbed.deb_file import (
    TAR_END,
    Item,
    ar_member,
    control,
    deb_bytes,
    folder,
    hard_link,
    symlink,
    tar,
    tar_header,
    write_deb,
)

GOOD = [
    folder("./"),
    folder("./usr/"),
    folder("./usr/bin/"),
    Item("./usr/bin/tool", b"#!/bin/sh\n", mode=0o4755, uid=7),
    hard_link("./usr/bin/tool2", "./usr/bin/tool"),
    symlink("./usr/bin/tool3", "tool"),
    symlink("./usr/bin/tool4", "/usr/bin/tool"),
    symlink("./usr/up", "../usr/bin"),
    Item("./usr/empty"),
]
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "tar": bytes,
    "tar.gz": gzip.compress,
    "tar.xz": lzma.compress,
}


def unpacked(tmp_path: Path, data: bytes) -> DebContents:
    deb = tmp_path / "sample.deb"
    deb.write_bytes(data)
    return unpack_deb(deb, tmp_path)


def content(entry: Entry) -> bytes:
    assert isinstance(entry.content, Slice)
    whole = Path(entry.content.path).read_bytes()
    return whole[entry.content.offset : entry.content.offset + entry.content.size_bytes]


def by_path(contents: DebContents) -> dict[str, Entry]:
    return {entry.path: entry for entry in contents.entries}


def test_a_good_deb_is_listed_with_its_files_in_the_scratch_file(tmp_path: Path) -> None:
    entries = by_path(unpack_deb(write_deb(tmp_path, "good", GOOD), tmp_path))
    assert list(entries)[:3] == ["usr", "usr/bin", "usr/bin/tool"]
    tool = entries["usr/bin/tool"]
    assert (tool.kind, tool.mode, tool.uid, content(tool)) == (
        Kind.FILE,
        0o4755,
        7,
        b"#!/bin/sh\n",
    )
    assert entries["usr/bin/tool2"].target == "usr/bin/tool"
    assert entries["usr/bin/tool4"].target == "/usr/bin/tool"
    assert content(entries["usr/empty"]) == b""


def test_the_control_file_comes_parsed_and_as_it_was(tmp_path: Path) -> None:
    text = control("sample", extra="Depends: a, b\n")
    contents = unpacked(tmp_path, deb_bytes(tar(GOOD), text))
    assert (contents.control["Package"], contents.control["Depends"]) == ("sample", "a, b")
    assert contents.control_text == text


def test_a_long_name_and_one_in_another_script_are_kept(tmp_path: Path) -> None:
    names = ["usr/" + "x" * 150 + "/" + "y" * 90, "usr/Főtanúsítvány.crt"]
    contents = unpacked(tmp_path, deb_bytes(tar([Item(f"./{name}", b"1") for name in names])))
    assert [entry.path for entry in contents.entries] == names


def test_a_name_in_two_fields_of_the_header_is_joined(tmp_path: Path) -> None:
    name = "usr/" + "x" * 90 + "/" + "y" * 90
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        info = tarfile.TarInfo(f"./{name}")
        info.size = 1
        archive.addfile(info, io.BytesIO(b"1"))
    (entry,) = unpacked(tmp_path, data_member(gzip.compress(raw.getvalue()))).entries
    assert (entry.path, content(entry)) == (name, b"1")


@pytest.mark.parametrize("packing", ["tar", "tar.gz", "tar.xz"])
def test_every_packing_gives_the_same(tmp_path: Path, packing: str) -> None:
    # Long enough to need many chunks, and not all the same.
    items = [Item("./big", bytes(range(256)) * 20_000)]
    contents = unpacked(
        tmp_path, whole(data=ar_member(f"data.{packing}", PACKERS[packing](tar(items))))
    )
    assert content(contents.entries[0]) == items[0].content


def test_memory_stays_flat_while_a_large_deb_is_unpacked(tmp_path: Path) -> None:
    deb = write_deb(tmp_path, "large", [Item("./large", b"\0" * 24 * 1024**2)])
    tracemalloc.start()
    unpack_deb(deb, tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # xz's own window is 8 MiB of it.
    assert peak < 16 * 1024**2


def whole(
    version: bytes | None = None, control_member: bytes | None = None, data: bytes | None = None
) -> bytes:
    """A .deb of which some members are replaced."""
    control_tar = tar([Item("./control", control("sample").encode())])
    return b"".join(
        (
            b"!<arch>\n",
            ar_member("debian-binary", b"2.0\n") if version is None else version,
            ar_member("control.tar.gz", gzip.compress(control_tar))
            if control_member is None
            else control_member,
            ar_member("data.tar.gz", gzip.compress(tar(GOOD))) if data is None else data,
        )
    )


def data_member(raw: bytes, packing: str = "gz", size: int | None = None) -> bytes:
    return whole(data=ar_member(f"data.tar.{packing}", raw, size))


PACKED = gzip.compress(tar(GOOD))
XZ = lzma.compress(tar(GOOD))
BAD_HEADER = b"x" + tar_header(GOOD[3])[1:]
CORRUPT = {
    "empty": b"",
    "not ar": b"PK\3\4" + whole()[4:],
    "magic only": b"!<arch>\n",
    "half a header": whole()[:40],
    "no data": whole(data=b""),
    "no control": whole(control_member=b""),
    "members swapped": whole(
        control_member=ar_member("data.tar.gz", PACKED), data=ar_member("control.tar.gz", PACKED)
    ),
    "a fourth member": whole() + ar_member("extra", b"1234"),
    "trailing garbage": whole() + b"garbage!" * 10,
    "another format": whole(version=ar_member("debian-binary", b"3.0\n")),
    "size too large": data_member(PACKED, size=len(PACKED) + 1000),
    "size too small": data_member(PACKED, size=len(PACKED) - 20),
    "size not a number": whole().replace(str(len(PACKED)).encode().ljust(10), b"-1        "),
    "unknown packing": data_member(PACKED, "zst"),
    "truncated gzip": data_member(PACKED[:-12]),
    "truncated xz": data_member(XZ[:-12], "xz"),
    "gzip crc": data_member(PACKED[:-8] + b"\0\0\0\0" + PACKED[-4:]),
    "xz flipped": data_member(XZ[:60] + bytes([XZ[60] ^ 255]) + XZ[61:], "xz"),
    "bytes after gzip": data_member(PACKED + b"more"),
    "two gzip members": data_member(PACKED + PACKED),
    "bytes after xz": data_member(XZ + b"more", "xz"),
    "not gzip": data_member(b"plain text"),
    "truncated whole": whole()[:-30],
    "tar without end": data_member(gzip.compress(tar(GOOD, end=b""))),
    "tar with half an end": data_member(gzip.compress(tar(GOOD, end=b"\0" * 512))),
    "bytes after tar": data_member(gzip.compress(tar(GOOD) + tar(GOOD))),
    "tar checksum": data_member(gzip.compress(BAD_HEADER + TAR_END)),
    "tar cut": data_member(gzip.compress(tar(GOOD)[:700])),
    "tar size lies": data_member(gzip.compress(tar_header(GOOD[3], size=10**9) + TAR_END)),
    "directory with content": deb_bytes(tar([Item("./a/", b"x", flag=b"5")])),
    "same path twice": deb_bytes(tar([Item("./a", b"1"), Item("./a", b"2")])),
    "same path spelled otherwise": deb_bytes(tar([Item("./a/b", b"1"), Item("./a//./b", b"2")])),
    "link to nothing": deb_bytes(tar([symlink("./a", "")])),
    "long name at the end": deb_bytes(tar([Item("L", b"a\0", flag=b"L")])),
    "long target at the end": deb_bytes(tar([Item("K", b"a\0", flag=b"K")])),
    "name that is no UTF-8": deb_bytes(tar([Item("L", b"\xff\0", flag=b"L"), Item("./a")])),
    "no control file": whole(
        control_member=ar_member("control.tar.gz", gzip.compress(tar([Item("./md5sums")])))
    ),
    "control is no stanza": deb_bytes(tar(GOOD), "no field\n"),
    "no package": deb_bytes(tar(GOOD), "Version: 1.0\nArchitecture: amd64\n"),
    "an empty package": deb_bytes(tar(GOOD), control("")),
    "a package in small letters": deb_bytes(tar(GOOD), control("a").lower()),
    "two control stanzas": deb_bytes(tar(GOOD), control("a") + "\n" + control("b")),
}
HOSTILE = {
    "absolute path": [Item("/etc/passwd", b"x")],
    "parent path": [Item("./../etc/passwd", b"x")],
    "parent inside": [Item("./usr/../../etc/passwd", b"x")],
    "empty name": [Item("", b"x")],
    "newline in name": [Item("./a\nb", b"x")],
    "escape in name": [Item("./a\x1b[2J", b"x")],
    "relative link out": [symlink("./a/b", "../../etc")],
    "absolute link out": [symlink("./a", "/../etc")],
    "link down and out": [symlink("./a", "b/../../etc")],
    "through a link": [symlink("./a", "/etc"), Item("./a/passwd", b"x")],
    "through a later link": [Item("./a/b/passwd", b"x"), symlink("./a", "/etc")],
    "through a file": [Item("./a", b"x"), Item("./a/b", b"x")],
    "hard link out": [hard_link("./a", "/etc/passwd")],
    "hard link up": [hard_link("./a", "../etc/passwd")],
    "hard link to nothing here": [hard_link("./a", "./b")],
    "hard link to a link": [symlink("./b", "/etc/passwd"), hard_link("./a", "./b")],
    "hard link to itself": [hard_link("./a", "./a")],
    "character device": [Item("./dev/null", flag=b"3")],
    "block device": [Item("./dev/sda", flag=b"4")],
    "fifo": [Item("./pipe", flag=b"6")],
    "pax header": [Item("./x", b"12 path=/etc\n", flag=b"x"), Item("./a")],
    "two long names": [Item("L", b"a\0", flag=b"L"), Item("L", b"b\0", flag=b"L"), Item("./a")],
    "whiteout": [Item("./usr/.wh.bin", b"")],
    "whiteout of a file": [folder("./etc/"), Item("./etc/.wh.passwd")],
    "opaque folder": [Item("./usr/bin/.wh..wh..opq")],
    "whiteout as a folder": [folder("./.wh.usr/")],
    "whiteout as a link": [symlink("./etc/.wh.shadow", "x")],
    "whiteout as a hard link": [Item("./a", b"x"), hard_link("./.wh.etc", "./a")],
    "256 letters": [Item("./" + "x" * 256)],
    "256 bytes of 128 letters": [Item("./" + "é" * 128)],
    "a path of 4,000 letters": [Item("./" + "/".join(["z" * 99] * 40))],
    "endless long name": [Item("L", b"a" * 5000, flag=b"L"), Item("./a")],
}


# what each is refused with, to the end or as far as a library's own words begin
REASONS = {
    "empty": "not an ar archive",
    "not ar": "not an ar archive",
    "magic only": "not a .deb: it holds []",
    "half a header": "a header of the ar archive is damaged",
    "no data": "not a .deb: it holds ['debian-binary', 'control.tar.gz']",
    "no control": "not a .deb: it holds ['debian-binary', 'data.tar.gz']",
    "members swapped": "not a .deb: it holds ['debian-binary', 'data.tar.gz', 'control.tar.gz']",
    "a fourth member": "64 bytes follow the data archive",
    "trailing garbage": "80 bytes follow the data archive",
    "another format": "not a .deb of format 2",
    "size too large": "data.tar.gz claims more bytes than the file has",
    "size too small": "20 bytes follow the data archive",
    "size not a number": "a header of the ar archive is damaged",
    "unknown packing": (
        "data.tar.zst is packed in a way that is not supported (only xz and gzip are)"
    ),
    "truncated gzip": "data.tar.gz ends too early",
    "truncated xz": "data.tar.xz ends too early",
    "gzip crc": "data.tar.gz cannot be decompressed: ",
    "xz flipped": "data.tar.xz cannot be decompressed: ",
    "bytes after gzip": "bytes follow the end of data.tar.gz",
    "two gzip members": "bytes follow the end of data.tar.gz",
    "bytes after xz": "bytes follow the end of data.tar.xz",
    "not gzip": "data.tar.gz cannot be decompressed: ",
    "truncated whole": "data.tar.gz claims more bytes than the file has",
    "tar without end": "the tar archive ends too early",
    "tar with half an end": "the tar archive ends too early",
    "bytes after tar": "bytes follow the end of the tar archive",
    "tar checksum": "a tar header's checksum is wrong",
    "tar cut": "the tar archive ends too early",
    "tar size lies": "a tar entry claims more bytes than the archive has",
    "directory with content": "a is not a file but has content",
    "same path twice": "a appears twice",
    "same path spelled otherwise": "a/b appears twice",
    "link to nothing": "the link a has no target",
    "long name at the end": "a long name stands at the end of the tar archive",
    "long target at the end": "a long name stands at the end of the tar archive",
    "name that is no UTF-8": "a name in the tar archive is not UTF-8: b'\\xff\\x00'",
    "no control file": "it has no control file",
    "control is no stanza": "control file: not a field: 'no field'",
    "no package": "its control file names no package",
    "an empty package": "its control file names no package",
    "a package in small letters": "its control file names no package",
    "two control stanzas": "control file: expected one stanza, got 2",
    "absolute path": "the path '/etc/passwd' leaves the package's root",
    "parent path": "the path './../etc/passwd' leaves the package's root",
    "parent inside": "the path './usr/../../etc/passwd' leaves the package's root",
    "empty name": "the path '' leaves the package's root",
    "newline in name": "a name in the tar archive has control characters: './a\\nb'",
    "escape in name": "a name in the tar archive has control characters: './a\\x1b[2J'",
    "relative link out": "the link a/b -> ../../etc leaves the image",
    "absolute link out": "the link a -> /../etc leaves the image",
    "link down and out": "the link a -> b/../../etc leaves the image",
    "through a link": "a/passwd would be written through a",
    "through a later link": "a/b/passwd would be written through a",
    "through a file": "a/b would be written through a",
    "hard link out": "the path '/etc/passwd' leaves the package's root",
    "hard link up": "the path '../etc/passwd' leaves the package's root",
    "hard link to nothing here": "a is a hard link to b, no file in here",
    "hard link to a link": "a is a hard link to b, no file in here",
    "hard link to itself": "a is a hard link to a, no file in here",
    "character device": "dev/null is neither file, directory nor link",
    "block device": "dev/sda is neither file, directory nor link",
    "fifo": "pipe is neither file, directory nor link",
    "pax header": "x is neither file, directory nor link",
    "two long names": "a tar entry's long name is out of bounds",
    "whiteout": "the path 'usr/.wh.bin' would delete other files when it is unpacked",
    "whiteout of a file": "the path 'etc/.wh.passwd' would delete other files when it is unpacked",
    "opaque folder": "the path 'usr/bin/.wh..wh..opq' would delete other files when it is unpacked",
    "whiteout as a folder": "the path '.wh.usr' would delete other files when it is unpacked",
    "whiteout as a link": "the path 'etc/.wh.shadow' would delete other files when it is unpacked",
    "whiteout as a hard link": "the path '.wh.etc' would delete other files when it is unpacked",
    "256 letters": "the path has a name that is too long for a file",
    "256 bytes of 128 letters": "the path has a name that is too long for a file",
    "a path of 4,000 letters": "the path is too long for a path",
    "endless long name": "a tar entry's long name is out of bounds",
}


def reason_in(error: Exception) -> str:
    """Without a long path, and without what a library adds."""
    text = re.sub(r"'(x+|é+|z[z/]+)' ", "", str(error).removeprefix("sample.deb: "))
    return re.sub(r"(cannot be decompressed: ).*", r"\1", text)


@pytest.mark.parametrize("name", CORRUPT)
def test_a_damaged_deb_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CorruptArchive, match=r"^sample\.deb: ") as caught:
        unpacked(tmp_path, CORRUPT[name])
    assert reason_in(caught.value) == REASONS[name]


def test_a_deb_has_a_bound_of_entries_and_of_long_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = b"./" + b"/".join([b"n" * 99] * 20) + b"\0"
    name = [Item("L", longest.ljust(4096, b"\0"), flag=b"L"), Item("./a", b"1")]
    assert [e.path for e in unpacked(tmp_path, deb_bytes(tar(name))).entries] == [
        longest[2:-1].decode()
    ]
    more = [Item("L", longest.ljust(4097, b"\0"), flag=b"L"), Item("./a", b"1")]
    with pytest.raises(HostileArchive, match="a tar entry's long name is out of bounds"):
        unpacked(tmp_path, deb_bytes(tar(more)))
    monkeypatch.setattr("pipeline.images.assemble.deb._MAX_ENTRIES", 2)
    two = [Item("./a", b"1"), Item("./b", b"2")]
    assert len(unpacked(tmp_path, deb_bytes(tar(two))).entries) == 2
    with pytest.raises(HostileArchive, match="it holds more than 2 entries"):
        unpacked(tmp_path, deb_bytes(tar([*two, Item("./c")])))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_deb_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(HostileArchive, match=r"^sample\.deb: ") as caught:
        unpacked(tmp_path, deb_bytes(tar(HOSTILE[name])))
    assert reason_in(caught.value) == REASONS[name]


@pytest.mark.parametrize(
    "name",
    [
        "../../evil",
        "/etc/passwd",
        "a/b",
        "..",
        ".wh.x",
        "Tool",
        "a b",
        "a\n b",
        "-a",
        "x" * 101,
        "ä",
    ],
)
def test_a_package_whose_name_is_none_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(HostileArchive, match=r"^sample\.deb: its control file names"):
        unpacked(tmp_path, deb_bytes(tar(GOOD), control(name)))


@pytest.mark.parametrize("field", ["Status", "status"])
def test_a_package_that_says_whether_it_is_installed_is_refused(tmp_path: Path, field: str) -> None:
    text = control("sample", extra=f"{field}: deinstall ok config-files\n")
    with pytest.raises(HostileArchive, match="has a Status field"):
        unpacked(tmp_path, deb_bytes(tar(GOOD), text))


@pytest.mark.parametrize("name", ["libstdc++6", "0ad", "python3.11", "a", "x" * 100])
def test_a_package_may_have_any_name_that_debian_gives(tmp_path: Path, name: str) -> None:
    assert unpacked(tmp_path, deb_bytes(tar(GOOD), control(name))).control["Package"] == name


def test_a_name_that_a_file_system_can_hold_is_fine(tmp_path: Path) -> None:
    items = [Item("./" + "x" * 255), Item("./" + "é" * 127), Item("./.whale"), Item("./a.wh.b")]
    assert len(unpacked(tmp_path, deb_bytes(tar(items))).entries) == 4


@pytest.mark.parametrize("packing", ["tar", "tar.gz", "tar.xz"])
def test_unpacking_stops_at_the_limit(tmp_path: Path, packing: str) -> None:
    bomb = PACKERS[packing](tar([Item("./zeros", b"\0" * 8 * 1024**2)]))
    (tmp_path / "bomb.deb").write_bytes(whole(data=ar_member(f"data.{packing}", bomb)))
    with pytest.raises(HostileArchive, match="unpacks to more than"):
        unpack_deb(tmp_path / "bomb.deb", tmp_path, limit_bytes=3 * 1024**2)
    assert sum(p.stat().st_size for p in tmp_path.glob("*.data.tar")) <= 3 * 1024**2


def test_an_xz_stream_that_wants_all_memory_is_refused(tmp_path: Path) -> None:
    small = lzma.compress(b"x")
    # In a block header, byte 4 is the size of the dictionary: 37 stands for 1.5 GiB.
    header = small[12:16] + bytes([37]) + small[17:20]
    checksum = zlib.crc32(header).to_bytes(4, "little")
    with pytest.raises(CorruptArchive, match="Memory usage limit exceeded"):
        unpacked(tmp_path, data_member(small[:12] + header + checksum + small[24:], "xz"))


@pytest.mark.parametrize("at", range(0, len(whole()), 7))
def test_no_flipped_byte_ends_in_anything_but_our_own_error(tmp_path: Path, at: int) -> None:
    raw = bytearray(whole())
    raw[at] ^= 0xFF
    try:
        unpacked(tmp_path, bytes(raw))
    except PipelineError:
        return
