"""Wheels that are damaged, lie about themselves or reach beyond their place: all are refused."""

from __future__ import annotations

import io
import stat
import struct
import time
import zipfile
import zlib
from pathlib import Path

import pytest

from pipeline.core.errors import CorruptArchive, HostileArchive, PipelineError
from pipeline.images.assemble.wheel import UNPACKED_LIMIT_BYTES, open_wheel, read_member
from tests.makers import Part, Parts, make_wheel, record_of, wheel_parts, write_zip
from tests.unit.assemble.wheel_values import (
    GOOD,
    INFO,
    LIES,
    MODULE,
    SITE,
    TRUE,
    lying,
    opened,
    placed,
    with_points,
    written,
)


def refused(path: Path, kind: type[PipelineError] = CorruptArchive, match: str = ".") -> None:
    with pytest.raises(kind, match=match):
        written(path)


def header_at(raw: bytes | bytearray, name: str, *, local: bool) -> int:
    """Where an entry's header begins: in front of its bytes, or in the directory."""
    encoded = name.encode()
    return raw.index(encoded) - 30 if local else raw.rindex(encoded) - 46


def edited(path: Path, name: str, at: int, form: str, value: int, *, local: bool = False) -> Path:
    """One field of one header, changed; CRC and sizes in both, as a forger would do it."""
    raw = bytearray(path.read_bytes())
    struct.pack_into(form, raw, header_at(raw, name, local=local) + at, value)
    if not local and at in (CRC, PACKED, SIZE):
        struct.pack_into(form, raw, header_at(raw, name, local=True) + at - 2, value)
    path.write_bytes(raw)
    return path


def field_of(path: Path, name: str, at: int, form: str = "<I") -> int:
    raw = path.read_bytes()
    number: int = struct.unpack_from(form, raw, header_at(raw, name, local=False) + at)[0]
    return number


FLAGS, METHOD, CRC, PACKED, SIZE, ATTRIBUTES, OFFSET = 8, 10, 16, 20, 24, 38, 42


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return make_wheel(tmp_path, "pkg", GOOD)


@pytest.mark.parametrize("keep", [0, 1, 21, 100, -1, -30])
def test_a_truncated_file_is_refused(wheel: Path, keep: int) -> None:
    wheel.write_bytes(wheel.read_bytes()[:keep])
    refused(wheel)


def test_a_file_that_is_no_zip_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pkg-1.0-py3-none-any.whl").write_bytes(b"<html>404</html>" * 99)
    refused(tmp_path / "pkg-1.0-py3-none-any.whl", match="not a readable zip")


def test_a_name_that_is_no_wheels_is_refused(wheel: Path) -> None:
    with pytest.raises(CorruptArchive, match="not a wheel's file name"):
        open_wheel(wheel, "pkg.zip")


def test_a_flipped_byte_in_the_data_is_found(wheel: Path) -> None:
    raw = wheel.read_bytes()
    start = header_at(raw, "pkg/mod.py", local=True) + 40
    for at in range(start, start + field_of(wheel, "pkg/mod.py", PACKED)):
        changed = bytearray(raw)
        changed[at] ^= 0x01
        wheel.write_bytes(changed)
        refused(wheel)


def test_a_flipped_byte_whose_crc_was_made_to_fit_is_found_by_RECORD(tmp_path: Path) -> None:
    stored = Part(MODULE, method=zipfile.ZIP_STORED)
    wheel = make_wheel(tmp_path, "pkg", {"pkg/mod.py": stored})
    forged = MODULE.replace(b"return 0", b"return 1", 1)
    wheel.write_bytes(wheel.read_bytes().replace(MODULE, forged))
    edited(wheel, "pkg/mod.py", CRC, "<I", zlib.crc32(forged))
    refused(wheel, match="its RECORD promises")


def test_a_wrong_crc_alone_is_found(wheel: Path) -> None:
    refused(edited(wheel, "pkg/mod.py", CRC, "<I", 7), match="CRC is")


def test_a_wrong_crc_of_RECORD_itself_is_found(wheel: Path) -> None:
    refused(edited(wheel, f"{INFO}/RECORD", CRC, "<I", 7), match="CRC is wrong")


STORED: Parts = {**GOOD, "pkg/mod.py": Part(MODULE, method=zipfile.ZIP_STORED)}


def test_a_wrong_crc_of_a_file_that_is_not_packed_is_found(tmp_path: Path) -> None:
    written(make_wheel(tmp_path, "pkg", STORED))
    refused(edited(make_wheel(tmp_path, "pkg", STORED), "pkg/mod.py", CRC, "<I", 7), match="CRC is")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_wrong_crc_of_an_empty_file_is_found(tmp_path: Path, method: int) -> None:
    wheel = make_wheel(tmp_path, "pkg", {**GOOD, "pkg/none.py": Part(b"", method=method)})
    refused(edited(wheel, "pkg/none.py", CRC, "<I", 7), match="CRC is")


def test_a_file_that_states_no_bytes_and_holds_some_is_refused(wheel: Path) -> None:
    edited(wheel, "pkg/mod.py", CRC, "<I", 0)
    refused(edited(wheel, "pkg/mod.py", SIZE, "<I", 0))


@pytest.mark.parametrize("at", [14, 18, 22])
def test_a_header_with_another_crc_or_size_than_the_directory_is_refused(
    wheel: Path, at: int
) -> None:
    refused(edited(wheel, "pkg/mod.py", at, "<I", 5, local=True), match="contradicts")


def test_crc_and_sizes_may_follow_the_bytes(tmp_path: Path) -> None:
    class Pipe(io.BytesIO):
        """What cannot be gone back in: zip writers then put CRC and sizes behind the bytes."""

        def seekable(self) -> bool:
            return False

        def tell(self) -> int:
            raise OSError

    out = Pipe()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in wheel_parts("pkg", "1.0", GOOD).items():
            assert isinstance(data, bytes)
            archive.writestr(name, data)
    path = tmp_path / "pkg-1.0-py3-none-any.whl"
    path.write_bytes(out.getvalue())
    with zipfile.ZipFile(path) as archive:
        assert all(info.flag_bits & 8 for info in archive.infolist())
    written(path)


@pytest.mark.parametrize("where", ["both", "directory", "header"])
def test_a_second_name_in_an_extra_field_is_refused(tmp_path: Path, where: str) -> None:
    second = b"\x01" + struct.pack("<I", zlib.crc32(b"pkg/mod.py")) + b"pkg/bad.py"
    field = struct.pack("<HH", 0x7075, len(second)) + second
    harmless = struct.pack("<HH", 0x5455, len(second)) + second
    path = tmp_path / "pkg-1.0-py3-none-any.whl"
    for extra in (harmless, field):
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in wheel_parts("pkg", "1.0", GOOD).items():
                info = zipfile.ZipInfo(name)
                info.extra = extra if name == "pkg/mod.py" else b""
                assert isinstance(data, bytes)
                archive.writestr(info, data)
        if extra is harmless:
            written(path)
    raw = path.read_bytes()
    if where != "both":
        cut = raw.index(field) if where == "directory" else raw.rindex(field)
        path.write_bytes(raw[:cut] + harmless + raw[cut + len(field) :])
    refused(path, HostileArchive, "second name|readable zip")


def test_a_script_that_is_rewritten_is_checked_before(tmp_path: Path) -> None:
    name = "pkg-1.0.data/scripts/tool"
    parts = wheel_parts("pkg", "1.0", {**GOOD, name: b"#!python\nprint(1)\n"})
    parts[name] = b"#!python\nprint(2)\n"
    refused(write_zip(tmp_path / "pkg-1.0-py3-none-any.whl", parts), match="its RECORD promises")


@pytest.mark.parametrize("record", LIES.values(), ids=LIES.keys())
def test_a_RECORD_that_lies_is_refused(tmp_path: Path, record: str) -> None:
    refused(lying(tmp_path, record))


def test_the_RECORD_of_these_tests_is_fine_when_it_is_true(tmp_path: Path) -> None:
    paths = {row.path for row in written(lying(tmp_path, TRUE)).rows}
    assert {f"{SITE}/pkg/__init__.py", f"{SITE}/pkg/mod.py"} <= paths


BAD_NAMES = {
    "parent": "../evil.py",
    "parent inside": "pkg/../../evil.py",
    "absolute": "/etc/passwd",
    "double slash": "pkg//evil.py",
    "dot": "pkg/./evil.py",
    "backslash": "pkg\\..\\evil.py",
    "drive": "C:/evil.py",
    "newline": "pkg/a\nb.py",
    "escape": "pkg/\x1b[2J.py",
    "line separator": "pkg/a\u2028b.py",
    "whiteout": "pkg/.wh.mod.py",
    "whiteout of a folder": ".wh.numpy/x.py",
    "opaque folder": "pkg/.wh..wh..opq",
    "whiteout by a script": "pkg-1.0.data/scripts/.wh.python",
    "whiteout by data": "pkg-1.0.data/data/lib/.wh.python3.11",
    "256 letters": "pkg/" + "x" * 256,
    "256 bytes of 128 letters": "pkg/" + "é" * 128,
    "a folder of 300 letters": "y" * 300 + "/x.py",
    "a path of 4,000 letters": "/".join(["z" * 99] * 40),
    "501 parts": "a/" * 500 + "b",
}


@pytest.mark.parametrize("name", BAD_NAMES.values(), ids=BAD_NAMES.keys())
def test_a_name_that_is_no_plain_path_is_refused(tmp_path: Path, name: str) -> None:
    refused(make_wheel(tmp_path, "pkg", {**GOOD, name: b"x"}), HostileArchive)


@pytest.mark.parametrize(
    "name", ["pkg/" + "x" * 255, "pkg/" + "é" * 127, "pkg/.whale", "pkg/a.wh.b"]
)
def test_a_name_that_a_file_system_can_hold_is_fine(tmp_path: Path, name: str) -> None:
    path = make_wheel(tmp_path, "pkg", {**GOOD, name: b"x"})
    assert f"{SITE}/{name}" in {row.path for row in written(path).rows}


def test_a_name_with_a_nul_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "pkg", {**GOOD, "pkg/a?.py": b"x"})
    wheel.write_bytes(wheel.read_bytes().replace(b"pkg/a?.py", b"pkg/a\0.py"))
    refused(wheel, HostileArchive)


MODES = {
    "symlink": stat.S_IFLNK | 0o777,
    "character device": stat.S_IFCHR | 0o666,
    "block device": stat.S_IFBLK | 0o666,
    "pipe": stat.S_IFIFO | 0o666,
    "socket": stat.S_IFSOCK | 0o666,
    "folder": stat.S_IFDIR | 0o755,
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_anything_but_a_file_is_refused(tmp_path: Path, mode: int) -> None:
    wheel = make_wheel(tmp_path, "pkg", {**GOOD, "pkg/odd": Part(b"/etc/passwd", mode)})
    refused(wheel, HostileArchive, "link or a device")


def test_a_name_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "pkg", {**GOOD, "pkg/mod.px": MODULE})
    wheel.write_bytes(wheel.read_bytes().replace(b"pkg/mod.px", b"pkg/mod.py"))
    refused(wheel, HostileArchive, "appears twice")


def test_a_header_with_another_name_than_the_directory_is_refused(wheel: Path) -> None:
    raw = wheel.read_bytes().replace(b"pkg/mod.py", b"pkg/bad.py", 1)
    wheel.write_bytes(raw)
    refused(wheel, HostileArchive, "another name in its own header")


def test_a_header_with_another_method_than_the_directory_is_refused(wheel: Path) -> None:
    refused(edited(wheel, "pkg/mod.py", 8, "<H", 0, local=True), match="contradicts")


def test_a_header_that_is_none_is_refused(wheel: Path) -> None:
    refused(edited(wheel, "pkg/mod.py", 0, "<I", 0, local=True), match="contradicts")


def test_entries_that_share_bytes_are_refused(wheel: Path) -> None:
    first = field_of(wheel, "pkg/__init__.py", OFFSET)
    refused(edited(wheel, "pkg/mod.py", OFFSET, "<I", first), HostileArchive)


def test_an_entry_that_reaches_into_the_next_is_refused(wheel: Path) -> None:
    packed = field_of(wheel, "pkg/mod.py", PACKED)
    refused(edited(wheel, "pkg/mod.py", PACKED, "<I", packed + 9), HostileArchive, "overlaps")


@pytest.mark.parametrize("more", [1, 8, 1 << 30])
def test_an_entry_that_reaches_into_the_directory_is_refused(wheel: Path, more: int) -> None:
    name = f"{INFO}/RECORD"
    packed = field_of(wheel, name, PACKED)
    refused(edited(wheel, name, PACKED, "<I", packed + more), match="runs into the directory")


def test_an_entry_that_begins_past_the_end_is_refused(wheel: Path) -> None:
    refused(edited(wheel, f"{INFO}/RECORD", OFFSET, "<I", 1 << 30))


@pytest.mark.parametrize("size", [0, 1, len(MODULE) - 1, len(MODULE) + 1, 1 << 30])
def test_a_size_that_is_not_the_streams_is_refused(wheel: Path, size: int) -> None:
    refused(edited(wheel, "pkg/mod.py", SIZE, "<I", size))


@pytest.mark.parametrize("junk", [b"\0", b"junk", b"junk" * 100])
def test_bytes_behind_a_deflate_stream_are_refused(tmp_path: Path, junk: bytes) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    stream = packer.compress(MODULE) + packer.flush() + junk
    wheel = make_wheel(
        tmp_path, "pkg", {**GOOD, "pkg/mod.py": Part(stream, method=zipfile.ZIP_STORED)}
    )
    for at, form, value in (
        (METHOD, "<H", 8),
        (SIZE, "<I", len(MODULE)),
        (CRC, "<I", zlib.crc32(MODULE)),
    ):
        edited(wheel, "pkg/mod.py", at, form, value)
    edited(wheel, "pkg/mod.py", 8, "<H", 8, local=True)
    refused(wheel, match=r"pkg/mod\.py: ")


def test_an_encrypted_entry_is_refused(wheel: Path) -> None:
    refused(edited(wheel, "pkg/mod.py", FLAGS, "<H", 1), match="is encrypted")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_packing_that_wheels_do_not_use_is_refused(tmp_path: Path, method: int) -> None:
    wheel = make_wheel(tmp_path, "pkg", {**GOOD, "pkg/odd.py": Part(MODULE, method=method)})
    refused(wheel, match="packed in a way")


def test_an_unknown_packing_is_refused(wheel: Path) -> None:
    edited(wheel, "pkg/mod.py", 8, "<H", 99, local=True)
    refused(edited(wheel, "pkg/mod.py", METHOD, "<H", 99))


def test_two_metadata_folders_are_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "pkg", {**GOOD, "other-1.0.dist-info/METADATA": b""})
    refused(wheel, match=r"2 \.dist-info folders")


def test_no_metadata_folder_is_refused(tmp_path: Path) -> None:
    refused(write_zip(tmp_path / "pkg-1.0-py3-none-any.whl", GOOD), match=r"0 \.dist-info")


def test_the_metadata_of_another_project_is_refused(tmp_path: Path) -> None:
    parts = wheel_parts("other", "1.0", GOOD)
    refused(write_zip(tmp_path / "pkg-1.0-py3-none-any.whl", parts), match="its metadata folder is")


@pytest.mark.parametrize("name", ["METADATA", "WHEEL", "RECORD"])
def test_metadata_that_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    parts = wheel_parts("pkg", "1.0", GOOD)
    del parts[f"{INFO}/{name}"]
    refused(write_zip(tmp_path / "pkg-1.0-py3-none-any.whl", parts), match=f"has no .*{name}")


BAD_POINTS = {
    "path up": "../../bin/sh = pkg.mod:main",
    "absolute path": "/bin/sh = pkg.mod:main",
    "hidden": ".bashrc = pkg.mod:main",
    "two dots": ".. = pkg.mod:main",
    "space": "a b = pkg.mod:main",
    "code in the function": "x = pkg.mod:main();__import__('os')",
    "code in the module": "x = pkg.mod import y\\nimport os;:main",
    "code in the extra": "x = pkg.mod:main [a]; evil()",
    "a second line": "x = pkg.mod:main\n  evil:run",
    "no function": "x = pkg.mod",
    "empty": "x =",
    "quote": "x = pkg.mod:ma'in",
}


@pytest.mark.parametrize("line", BAD_POINTS.values(), ids=BAD_POINTS.keys())
def test_an_entry_point_that_is_not_plain_is_refused(tmp_path: Path, line: str) -> None:
    wheel = make_wheel(tmp_path, "pkg", with_points(f"[console_scripts]\n{line}\n"))
    refused(wheel, HostileArchive, "is not valid")


@pytest.mark.parametrize("text", ["x = pkg:main", "[console_scripts\nx", "[console_scripts]\nx"])
def test_entry_points_that_cannot_be_read_are_refused(tmp_path: Path, text: str) -> None:
    refused(make_wheel(tmp_path, "pkg", with_points(text)), match="entry_points.txt")


def test_entry_points_that_are_no_text_are_refused(tmp_path: Path) -> None:
    parts = {**GOOD, f"{INFO}/entry_points.txt": b"\xff\xfe[console_scripts]"}
    refused(make_wheel(tmp_path, "pkg", parts), match="entry_points.txt")


@pytest.mark.parametrize("name", ["stdlib/x", "../x", "purelib", "Scripts/x"])
def test_an_unknown_scheme_is_refused(tmp_path: Path, name: str) -> None:
    refused(make_wheel(tmp_path, "pkg", {**GOOD, f"pkg-1.0.data/{name}": b"x"}), PipelineError)


def test_a_huge_stated_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.images.assemble.wheel.UNPACKED_LIMIT_BYTES", 1 << 20)
    wheel = edited(make_wheel(tmp_path, "pkg", GOOD), "pkg/mod.py", SIZE, "<I", 1 << 21)
    refused(wheel, HostileArchive, "unpacks to more than")
    assert UNPACKED_LIMIT_BYTES < 1 << 40


@pytest.mark.parametrize("name", [f"{INFO}/RECORD", f"{INFO}/entry_points.txt"])
def test_metadata_of_absurd_size_is_not_read_into_memory(tmp_path: Path, name: str) -> None:
    wheel = make_wheel(tmp_path, "pkg", with_points("[console_scripts]\nx = pkg:main"))
    refused(edited(wheel, name, SIZE, "<I", 1 << 31), HostileArchive, "are too many")


def test_a_wrong_crc_is_found_when_one_file_is_read(wheel: Path) -> None:
    edited(wheel, "pkg/mod.py", CRC, "<I", 7)
    with pytest.raises(CorruptArchive, match="CRC is wrong"):
        read_member(opened(wheel).members["pkg/mod.py"])


def test_no_flipped_byte_ends_in_anything_but_our_own_error_or_the_same_files(wheel: Path) -> None:
    raw = wheel.read_bytes()
    whole = written(wheel).rows
    refused_at = 0
    for at in range(0, len(raw), 3):
        changed = bytearray(raw)
        changed[at] ^= 0xFF
        wheel.write_bytes(changed)
        try:
            assert written(wheel).rows == whole
        except PipelineError:
            refused_at += 1
    assert refused_at > len(raw) // 6


# Metadata that is not the wheel's own.

OTHER = b"Metadata-Version: 2.1\nName: other\nVersion: 9\n"


@pytest.mark.parametrize(
    "name",
    [
        "pkg-1.0.data/purelib/other-9.dist-info/METADATA",
        "pkg-1.0.data/platlib/pkg-9.dist-info/METADATA",
        "pkg-1.0.data/data/lib/python3.11/site-packages/other-9.dist-info/METADATA",
        "pkg-1.0.data/purelib/Other-9.DIST-INFO/METADATA",
        "other-9.DIST-INFO/METADATA",
        "other-9.dist-info/METADATA",
        "other-9.egg-info/PKG-INFO",
        "other.egg-info",
        "pkg-1.0.data/purelib/other.Egg-Info",
    ],
)
def test_metadata_of_another_package_is_refused(tmp_path: Path, name: str) -> None:
    refused(
        make_wheel(tmp_path, "pkg", {**GOOD, name: OTHER}),
        PipelineError,
        "other|2 .dist-info|pkg-9",
    )


@pytest.mark.parametrize(
    "name", ["pkg/_vendor/other-9.dist-info/METADATA", "pkg.egg-info/PKG-INFO", "PKG-1.0.egg-info"]
)
def test_metadata_below_a_package_or_of_ones_own_is_fine(tmp_path: Path, name: str) -> None:
    layer = written(make_wheel(tmp_path, "pkg", {**GOOD, name: OTHER}))
    assert f"{SITE}/{name}" in {row.path for row in layer.rows}


@pytest.mark.parametrize("info", ["pkg-1.1.dist-info", "pkg.dist-info", "pkg-x.dist-info"])
def test_a_metadata_folder_of_another_version_is_refused(tmp_path: Path, info: str) -> None:
    parts = {n.replace(INFO, info): p for n, p in wheel_parts("pkg", "1.0", GOOD).items()}
    del parts[f"{info}/RECORD"]
    parts[f"{info}/RECORD"] = record_of(parts, f"{info}/RECORD").encode()
    refused(write_zip(tmp_path / "pkg-1.0-py3-none-any.whl", parts), match="metadata folder")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Name: pkg\n",
        "Version: 1.0\n",
        "Name: other\nVersion: 1.0\n",
        "Name: pkg\nVersion: 1.1\n",
        "Name: pkg\nVersion: one\n",
        "Name: pkg\nName: other\nVersion: 1.0\n",
        "Metadata-Version: 2.1\n\nName: pkg\nVersion: 1.0\n",
    ],
)
def test_metadata_that_names_another_release_is_refused(tmp_path: Path, text: str) -> None:
    parts = {**GOOD, f"{INFO}/METADATA": text.encode()}
    refused(make_wheel(tmp_path, "pkg", parts), match="names another release")


@pytest.mark.parametrize(
    "text", ["Name: PKG\r\nVersion: 1.0.0\r\n\r\nName: x\n", "name:pkg\nversion:v1.0"]
)
def test_metadata_may_be_written_otherwise(tmp_path: Path, text: str) -> None:
    layer = written(make_wheel(tmp_path, "pkg", {**GOOD, f"{INFO}/METADATA": text.encode()}))
    assert f"{SITE}/pkg/mod.py" in {row.path for row in layer.rows}


# Entry points without end.


@pytest.mark.parametrize("count", [1_001, 5_000, 1_000_000])
def test_more_scripts_than_anybody_ships_are_refused_at_once(tmp_path: Path, count: int) -> None:
    lines = "".join(f"t{number}=pkg.mod:main\n" for number in range(count))
    wheel = make_wheel(tmp_path, "pkg", with_points("[console_scripts]\n" + lines))
    start = time.process_time()
    refused(wheel, HostileArchive, "are too many")
    assert time.process_time() - start < 3


def test_a_thousand_scripts_are_fine(tmp_path: Path) -> None:
    lines = "".join(f"t{number}=pkg.mod:main\n" for number in range(1_000))
    paths = placed(make_wheel(tmp_path, "pkg", with_points("[console_scripts]\n" + lines)))
    assert "opt/venv/bin/t999" in paths


def test_no_section_of_entry_points_adds_to_the_others(tmp_path: Path) -> None:
    text = "[DEFAULT]\nevil = pkg.mod:main\n[console_scripts]\ngood = pkg.mod:main\n"
    paths = placed(make_wheel(tmp_path, "pkg", with_points(text)))
    assert "opt/venv/bin/good" in paths
    assert "opt/venv/bin/evil" not in paths


@pytest.mark.parametrize(
    ("told", "is_good"),
    [
        (b'{"variants": {"x86_64_v3": {"x86_64": {"level": ["v3"]}}}}', True),
        (b'{"variants": {"x86_64_v4": {}}}', False),
        (b"{}", False),
        (b"[]", False),
        (b"{", False),
        (None, False),
    ],
)
def test_a_variant_must_know_the_label_in_its_name(
    told: bytes | None, is_good: bool, tmp_path: Path
) -> None:
    parts: Parts = {"pkg/__init__.py": b""}
    if told is not None:
        parts = {**parts, "pkg-1.0.dist-info/variant.json": told}
    path = make_wheel(tmp_path, "pkg", parts)
    name = "pkg-1.0-py3-none-any-x86_64_v3.whl"
    if is_good:
        assert open_wheel(path, name).project == "pkg"
        return
    with pytest.raises(CorruptArchive, match=r"its variant\.json knows no variant 'x86_64_v3'"):
        open_wheel(path, name)
