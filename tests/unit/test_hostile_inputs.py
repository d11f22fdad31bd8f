"""Sixty inputs that no honest sender makes: each ends with one error of ours, or harms nothing."""

from __future__ import annotations

import asyncio
import bz2
import gzip
import io
import json
import lzma
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.artifacts.store.store import is_store
from pipeline.core import log
from pipeline.core.errors import PipelineError, SpecInvalid
from pipeline.core.files import bounded_lines, folder_below, opened_log
from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.core.net.wire import Address
from pipeline.core.yaml_file import read_yaml
from pipeline.hosts.facts.drift import read_recorded_facts
from pipeline.hosts.facts.source import read_capture
from pipeline.hosts.rules.issues import issue_findings, match_lines
from pipeline.images.assemble import patch, patch_series
from pipeline.images.gate.tracebacks import TracebackReader
from pipeline.images.source.archive import unpack_source
from pipeline.images.spec.source import ArchiveSpec
from pipeline.serving.smoke.client import ChatClient, Unsound
from pipeline.serving.smoke.model import ChatLimits
from tests.testbed.hostile import CHUNKED, OK, Script, body, forever, hostile_server, sends

_MOST_S = 20.0


def ending(act: Callable[[], object]) -> str:
    """The message of an error of ours; empty where there was none."""
    try:
        act()
    except (PipelineError, Unsound) as error:
        return str(error)
    return ""


def header(
    name: bytes, kind: bytes = b"0", size: bytes = b"00000000004", link: bytes = b""
) -> bytes:
    """A tar header byte by byte, with a right checksum."""
    block = bytearray(512)
    block[: len(name)] = name[:100]
    block[100:108], block[108:116], block[116:124] = b"0000644\0", b"0000000\0", b"0000000\0"
    block[124 : 124 + len(size)] = size
    block[136:148], block[148:156], block[156:157] = b"00000000000\0", b" " * 8, kind
    block[157 : 157 + len(link)] = link[:100]
    block[257:265] = b"ustar\x0000"
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def pax_of(records: bytes, then: bytes) -> bytes:
    head = header(b"pax", b"x", b"%011o" % len(records))
    return head + records + bytes(-len(records) % 512) + then


TEXT = b"text" + bytes(508)
END = bytes(1024)
GOOD = header(b"top/a") + TEXT


def one_line(key: bytes, value: bytes) -> bytes:
    length = len(key) + len(value) + 3
    while len(b"%d %s=%s\n" % (length, key, value)) != length:
        length += 1
    return b"%d %s=%s\n" % (length, key, value)


ARCHIVES: dict[str, bytes] = {
    "a folder entry over a link": header(b"top/d", b"2", link=b"/tmp")
    + header(b"top/d/", b"5", b"0" * 11)
    + header(b"top/d/x")
    + TEXT
    + END,
    "three links that lead out together": b"".join(
        [
            header(b"top/p/q/r/s") + TEXT,
            header(b"top/p/q/up", b"2", b"0" * 11, b".."),
            header(b"top/p/up2", b"2", b"0" * 11, b"q/up/.."),
            header(b"top/out", b"2", b"0" * 11, b"p/up2/../../etc"),
            END,
        ]
    ),
    "a link whose target is empty": header(b"top/l", b"2", b"0" * 11) + GOOD + END,
    "a link of slashes": header(b"top/l", b"2", b"0" * 11, b"//" * 40) + GOOD + END,
    "a chain of 50 links": b"".join(
        header(b"top/%d" % n, b"2", b"0" * 11, b"%d" % (n + 1)) for n in range(50)
    )
    + GOOD
    + END,
    "a hard link to a link": header(b"top/l", b"2", b"0" * 11, b"a")
    + header(b"top/h", b"1", b"0" * 11, b"top/l")
    + GOOD
    + END,
    "a size of base 256 below zero": header(b"top/a", size=b"\xff" * 12) + TEXT + END,
    "a size of 8 EiB": header(b"top/a", size=b"\x80" + b"\0" * 3 + b"\x7f" + b"\xff" * 7) + END,
    "a size of letters": header(b"top/a", size=b"zzzzzzzzzzz") + TEXT + END,
    "a pax length of nothing": pax_of(b" path=x\n", GOOD + END),
    "a pax length that leads back": pax_of(b"-5 path=x\n", GOOD + END),
    "a pax length beyond its block": pax_of(b"999999 path=x\n", GOOD + END),
    "a pax path that leaves": pax_of(one_line(b"path", b"../../out"), GOOD + END),
    "a pax path of a line end": pax_of(one_line(b"path", b"top/a\nb"), GOOD + END),
    "a pax size of 10**30": pax_of(one_line(b"size", b"1" + b"0" * 30), GOOD + END),
    "a pax hdrcharset of BINARY": pax_of(
        one_line(b"hdrcharset", b"BINARY") + one_line(b"path", b"top/\xff\xfe"), GOOD + END
    ),
    "a GNU long name without an end": header(b"L", b"L", b"%011o" % 600) + b"top/" + b"x" * 508,
    "a GNU long name of 8 GiB": header(b"L", b"L", b"77777777777") + bytes(4096),
    "an old sparse header": header(b"top/a", b"S", b"00000001000") + bytes(512) + END,
    "a multi-volume part": header(b"top/a", b"M") + TEXT + END,
    "a kind that nobody knows": header(b"top/a", b"\x80") + TEXT + END,
    "a name of dots": header(b"top/.../a/./b") + TEXT + END,
    "a checksum that is wrong": GOOD[:148] + b"000000\0 " + GOOD[156:] + END,
    "a gzip in a gzip": gzip.compress(gzip.compress(GOOD + END)),
    "a bz2 with a second stream of rubbish": bz2.compress(GOOD + END) + b"BZh9rubbish",
    "an xz with a wrong end": lzma.compress(GOOD + END)[:-4] + b"\0\0\0\0",
    "names that differ in a combining mark": header("top/é".encode())
    + TEXT
    + header("top/e\u0301".encode())
    + TEXT
    + END,
    "a name that is an escape": header(b"top/\x1b[2Jx\xc2\x9b") + TEXT + END,
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_archives(tmp_path: Path, name: str) -> None:
    path = tmp_path / "source.tar"
    path.write_bytes(ARCHIVES[name])
    began = time.monotonic()
    spec = ArchiveSpec(file="source.tar")
    error = ending(lambda: unpack_source(path, spec, tmp_path / "tree", "source.tar"))
    assert not error or error.startswith("source.tar: ")
    assert log.printable(error).isprintable()
    assert {p.name for p in tmp_path.iterdir()} <= {"source.tar", "tree"}
    assert time.monotonic() - began < _MOST_S


DIFFS: dict[str, str] = {
    "a hunk of 10**18 lines": "--- a/x\n+++ b/x\n@@ -1,1000000000000000000 +1 @@\n-a\n+b\n",
    "a hunk at line 10**30": "--- a/x\n+++ b/x\n@@ -" + "9" * 30 + " +1 @@\n-a\n+b\n",
    "numbers of another script": "--- a/x\n+++ b/x\n@@ -١ +١ @@\n-a\n+b\n",
    "a path that leaves": "--- a/../../x\n+++ b/../../x\n@@ -1 +1 @@\n-a\n+b\n",
    "only signs of a missing end": "--- a/x\n+++ b/x\n@@ -1 +1 @@\n" + "\\ No newline\n" * 50_000,
    "a NUL in a path": "--- a/x\0y\n+++ b/x\0y\n@@ -1 +1 @@\n-a\n+b\n",
    "100,000 empty hunks": "--- a/x\n+++ b/x\n" + "@@ -0,0 +0,0 @@\n" * 100_000,
}


@pytest.mark.parametrize("name", DIFFS)
def test_diffs(name: str) -> None:
    began = time.monotonic()
    files = SimpleNamespace(
        find=lambda path: None, plan=SimpleNamespace(spec=SimpleNamespace(name="tiny"))
    )
    assert ending(lambda: patch_series.new_patch(cast(Any, files), DIFFS[name].encode(), "x"))
    error = ending(
        lambda: [
            patch.apply(change, b"a\n", "x.patch") for change in patch.parse(DIFFS[name], "x.patch")
        ]
    )
    assert not error or error.startswith("x.patch: ")
    assert time.monotonic() - began < _MOST_S


YAMLS: dict[str, bytes] = {
    "a name of 10,000 anchors": b"".join(b"- &a%d x\n" % n for n in range(10_000)),
    "an alias to itself": b"&a [*a]",
    "a number of base sixty": b"max: 190:20:30:" + b"59:" * 5000 + b"1",
    "a date of the year 0": b"when: 0000-00-00",
    "a tag of Python's": b"!!python/object/apply:os.system ['true']",
    "a merge of a merge": b"a: &a\n  <<: *a\n",
    "UTF-16 with a mark": "name: x".encode("utf-16"),
    "a key that is a mapping": b"? {a: b}\n: c\n",
}


@pytest.mark.parametrize("name", YAMLS)
def test_yaml_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(YAMLS[name])
    began = time.monotonic()
    with pytest.raises(SpecInvalid):
        read_yaml(path, ArchiveSpec)
    assert time.monotonic() - began < _MOST_S


JSONS: dict[str, bytes] = {
    "numbers of 100,000 digits": b"[" + b"9" * 100_000 + b"]",
    "a surrogate alone as a key": b'{"\\ud800": 1}',
    "100,000 open brackets": b"[" * 100_000,
    "a NUL after the end": b"{}\0",
}


@pytest.mark.parametrize("name", JSONS)
def test_json_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(JSONS[name])
    with pytest.raises(JsonInvalid):
        read_json(JSONS[name], most_bytes=1 << 20)
    for act in (lambda: read_recorded_facts(path), lambda: read_capture(path)):
        assert ending(act), "refused"


ANSWERS: dict[str, Script] = {
    "two lengths in one header": sends(OK + b"Content-Length: 2, 2\r\n\r\n{}"),
    "a chunk's extension without end": forever(CHUNKED + b"2;", b"x" * 4096),
    "a head of a hundred notes, then silence": sends(b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    "a status of another script": sends("HTTP/1.1 ٢٠٠ OK\r\n\r\n{}".encode()),
    "an answer of marks": body(b"\xef\xbb\xbf" * 1000),
    "a JSON of 10 MB of blanks": body(b" " * (10 << 20) + b"{}"),
    "a header without a name": sends(OK + b": x\r\n:\r\nContent-Length: 2\r\n\r\n[]"),
    "a negative zero": sends(OK + b"Content-Length: -0\r\n\r\n"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name: str) -> None:
    began = time.monotonic()
    with hostile_server(ANSWERS[name]) as url:
        client = ChatClient(Address.read(url), ChatLimits(request_s=5.0))
        # any other error than one of ours goes on
        ending(lambda: asyncio.run(client.get("/v1/models")))
    assert time.monotonic() - began < _MOST_S


def test_a_log_of_one_line_without_an_end_takes_no_memory() -> None:
    class Endless(io.RawIOBase):
        left = 1 << 28

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            size = min(len(buffer), self.left)
            buffer[:size] = bytes(size)
            self.left -= size
            return int(size)

    file = io.BufferedReader(Endless(), 1 << 20)
    assert [len(line) for line in bounded_lines(file)] == [1 << 16]


def test_a_log_of_20_000_different_overruns_is_read_in_time() -> None:
    lines = [
        f"OutOfResources: out of resource: shared memory, Required: {n}, Hardware limit: 101376\n"
        for n in range(110_000, 130_000)
    ]
    reader, began = TracebackReader(), time.monotonic()
    found = issue_findings([match_lines("log", reader.watch(lines))])
    assert max(each.times for each in found) == 20_000
    assert all(len(each.seen) == 5 for each in found)
    assert len(reader.overruns) == 20
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("place", ["/dev/zero", "/dev/full", "pipe"])
def test_a_log_without_an_end_or_a_writer_is_refused(tmp_path: Path, place: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PipelineError), opened_log(tmp_path / place, 0.1):
        pass


def test_a_mark_of_a_store_that_is_a_pipe_or_a_link_is_no_mark(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "store.json")
    with pytest.raises(PipelineError):
        is_store(tmp_path)


def test_a_folder_that_becomes_a_link_while_it_is_used_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "top" / "a").mkdir(parents=True)
    with folder_below(tmp_path / "top", ["a"]) as handle:
        (tmp_path / "top" / "a").rename(tmp_path / "top" / "b")
        (tmp_path / "top" / "a").symlink_to(tmp_path)
        os.mkdir("made", dir_fd=handle)
    assert (tmp_path / "top" / "b" / "made").is_dir()
    assert not (tmp_path / "made").exists()


def test_a_screen_keeps_json_readable_whatever_is_in_it() -> None:
    out = io.StringIO()
    value = {"x": "".join(map(chr, [*range(0, 0x300), *range(0x2000, 0x2070), 0xE0001]))}
    log.Screen(out).write(log.json_text(value))
    assert json.loads(out.getvalue()) == value
