from __future__ import annotations

import errno
import hashlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from pipeline.app import weights_hub as weights_serve
from pipeline.core.errors import AddressUnusable, LockEdited
from pipeline.core.files import remove_tree
from pipeline.core.net.address import is_loopback
from pipeline.weights.disk.hashing import identity_of, open_pin
from pipeline.weights.place import LockedFolder, find_places
from pipeline.weights.serve import http as wire
from pipeline.weights.serve import prover as proving
from pipeline.weights.serve.api import HubApi, ServedSets
from pipeline.weights.serve.prover import Prover
from pipeline.weights.serve.server import ClientConnection, ConnectionLimits, HubServer
from tests.testbed.locked_set import COMMIT, SMALL, make_set, pin_of, random_bytes
from tests.unit.support import Command

BIG = random_bytes(9_000_001)
LARGE = {"model.safetensors": BIG, "sub dir/part.safetensors": b"short but large by name"}
OTHER = "f" * 40


@dataclass
class Got:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Running:
    server: HubServer
    prover: Prover

    def ask(
        self,
        path: str,
        method: str = "GET",
        body: bytes | None = None,
        **headers: str,
    ) -> Got:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=20)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, sent)
        answer = connection.getresponse()
        got = Got(answer.status, answer.headers, answer.read())  # type: ignore[arg-type]
        connection.close()
        return got

    def file(self, path: str, revision: str = "main", **more: Any) -> Got:
        return self.ask(f"/org/tiny/resolve/{revision}/{quote(path)}", **more)

    def raw(self, data: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=20) as sock:
            sock.sendall(data)
            return b"".join(iter(lambda: sock.recv(65536), b""))

    def wait_until_judged(self) -> None:
        for held in self.prover.files:
            assert held.judged.wait(20)


def served_by(folders: Iterable[Path]) -> ServedSets:
    """What lies in some folders, as the command serves them."""
    return ServedSets(place for folder in folders for place in find_places(folder))


@contextmanager
def running(*folders: Path, tokens: frozenset[str] = frozenset(), **more: Any) -> Iterator[Running]:
    served = served_by(folders)
    prover = Prover(served.files)
    hub = HubApi(served, prover, tokens)
    server = HubServer(hub.answer, may_read=hub.may_read, **more)
    server.listen()
    prover.start()
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield Running(server, prover)
    finally:
        server.stop()
        prover.stop()
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture(autouse=True)
def disk_with_a_fine_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "_TICK_S", 0.02)


@pytest.fixture
def place(tmp_path: Path) -> LockedFolder:
    return make_set(tmp_path / "set", SMALL, LARGE)


@pytest.fixture
def hub(place: LockedFolder) -> Iterator[Running]:
    with running(place.root) as running_hub:
        running_hub.wait_until_judged()
        yield running_hub


@pytest.mark.parametrize("hub_cache", [False, True])
def test_every_file_is_served_byte_for_byte(tmp_path: Path, hub_cache: bool) -> None:
    make_set(tmp_path / "set", SMALL, LARGE, hub_cache=hub_cache)
    with running(tmp_path / "set") as hub:
        hub.wait_until_judged()
        for path, data in {**SMALL, **LARGE}.items():
            for revision in ("main", COMMIT):
                got = hub.file(path, revision)
                assert (got.status, got.body) == (200, data)
                assert got.headers["X-Repo-Commit"] == COMMIT


def test_head_says_what_a_client_needs_and_sends_nothing(hub: Running) -> None:
    got = hub.file("model.safetensors", method="HEAD")
    digest = hashlib.sha256(BIG).hexdigest()
    assert (got.status, got.body) == (200, b"")
    assert got.headers["ETag"] == got.headers["X-Linked-Etag"] == f'"{digest}"'
    assert got.headers["Content-Length"] == got.headers["X-Linked-Size"] == str(len(BIG))
    assert got.headers["Accept-Ranges"] == "bytes"
    small = hub.file("config.json", method="HEAD")
    assert small.headers["ETag"] == f'"{pin_of("x", SMALL["config.json"], large=False).want}"'
    assert small.headers["X-Linked-Etag"] is None


@pytest.mark.parametrize("path", ["model.safetensors", "sub dir/ü ñ/modèle #1%.json"])
@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [("bytes=0-0", 0, 1), ("bytes=5-9", 5, 10), ("bytes=990-", 990, None), ("bytes=-7", -7, None)],
)
def test_a_range_is_exactly_that_range(
    hub: Running, path: str, asked: str, first: int, last: int | None
) -> None:
    data = {**SMALL, **LARGE}[path]
    got = hub.file(path, Range=asked)
    assert (got.status, got.body) == (206, data[first:last])
    start = first % len(data)
    end = (last or len(data)) - 1
    assert got.headers["Content-Range"] == f"bytes {start}-{end}/{len(data)}"


@pytest.mark.parametrize("asked", ["bytes=9000001-", "bytes=5-4", "bytes=x", "bytes=-0", "bytes=-"])
def test_a_range_that_is_not_there_is_416(hub: Running, asked: str) -> None:
    got = hub.file("model.safetensors", Range=asked)
    assert got.status == 416
    assert got.headers["Content-Range"] == "bytes */9000001"


def test_several_ranges_or_another_unit_get_the_whole_file(hub: Running) -> None:
    assert hub.file("model.safetensors", Range="bytes=0-1,4-5").body == BIG
    assert hub.file("model.safetensors", Range="lines=0-1").body == BIG


@pytest.mark.parametrize("asked", ["bytes=0-", "bytes=0-0", "bytes=-1"])
def test_a_range_of_an_empty_file_does_not_exist(tmp_path: Path, asked: str) -> None:
    make_set(tmp_path / "set", {"empty.txt": b""}, {})
    with running(tmp_path / "set") as hub:
        got = hub.file("empty.txt", Range=asked)
    assert (got.status, got.headers["Content-Range"]) == (416, "bytes */0")
    assert got.headers["X-Error-Message"] == "the file does not have this range"


def test_a_resume_of_another_version_gets_the_whole_file(hub: Running) -> None:
    etag = hub.file("model.safetensors", method="HEAD").headers["ETag"]
    same = hub.file("model.safetensors", Range="bytes=5-", If_Range=etag)
    other = hub.file("model.safetensors", Range="bytes=5-", If_Range='"other"')
    assert (same.status, other.status) == (206, 200)
    assert other.body == BIG


def test_what_a_client_already_has_is_not_sent_again(hub: Running) -> None:
    etag = hub.file("model.safetensors", method="HEAD").headers["ETag"]
    got = hub.file("model.safetensors", If_None_Match=etag)
    assert (got.status, got.body) == (304, b"")


def test_the_tree_has_the_hubs_fields_and_gits_own_ids(hub: Running, tmp_path: Path) -> None:
    rows = hub.ask(f"/api/models/org/tiny/tree/{COMMIT}?recursive=True&expand=False").json
    files = {row["path"]: row for row in rows if row["type"] == "file"}
    assert set(files) == {*SMALL, *LARGE}
    assert {row["path"] for row in rows if row["type"] == "directory"} == {
        "sub dir",
        "sub dir/ü ñ",
    }
    large = files["model.safetensors"]
    assert large["lfs"]["oid"] == hashlib.sha256(BIG).hexdigest()
    pointer = (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{large['lfs']['oid']}\n"
        f"size {len(BIG)}\n"
    )
    assert large["lfs"]["pointerSize"] == len(pointer)
    assert large["oid"] == hashlib.sha1(f"blob {len(pointer)}\0{pointer}".encode()).hexdigest()
    top = hub.ask("/api/models/org/tiny/tree/main").json
    assert {row["path"] for row in top} == {p.split("/")[0] for p in {**SMALL, **LARGE}}
    below = hub.ask("/api/models/org/tiny/tree/main/sub%20dir?recursive=true").json
    assert {row["path"] for row in below} == {
        "sub dir/part.safetensors",
        "sub dir/ü ñ",
        "sub dir/ü ñ/modèle #1%.json",
    }


def test_a_long_tree_comes_in_pages(tmp_path: Path) -> None:
    make_set(tmp_path, {f"f{n:04}.json": b"%d" % n for n in range(2500)}, {})
    with running(tmp_path) as hub:
        path, listed = "/api/models/org/tiny/tree/main?recursive=True", []
        pages = 0
        while path:
            got = hub.ask(path)
            listed += [row["path"] for row in got.json]
            pages += 1
            link = got.headers["Link"] or ""
            assert not link or link.startswith(f"<http://127.0.0.1:{hub.server.port}/")
            path = link[1:].partition(">")[0].partition(str(hub.server.port))[2]
    assert (pages, listed) == (3, [f"f{n:04}.json" for n in range(2500)])


def test_the_models_page_lists_files_with_sizes_where_asked(hub: Running) -> None:
    for path in ("/api/models/org/tiny", "/api/models/org/tiny/revision/main"):
        got = hub.ask(path).json
        assert (got["sha"], got["id"]) == (COMMIT, "org/tiny")
        assert {s["rfilename"] for s in got["siblings"]} == {*SMALL, *LARGE}
    rows = hub.ask("/api/models/org/tiny?blobs=True").json["siblings"]
    sizes = {row["rfilename"]: row["size"] for row in rows}
    assert sizes == {path: len(data) for path, data in {**SMALL, **LARGE}.items()}


def test_paths_are_looked_up_by_form_and_by_json(hub: Running) -> None:
    path = "/api/models/org/tiny/paths-info/main"
    form = b"paths=config.json&paths=sub+dir&paths=nothing&expand=False"
    kind = "application/x-www-form-urlencoded"
    got = hub.ask(path, "POST", form, Content_Type=kind).json
    assert [(row["path"], row["type"]) for row in got] == [
        ("config.json", "file"),
        ("sub dir", "directory"),
    ]
    text = json.dumps({"paths": ["empty.txt"]}).encode()
    assert hub.ask(path, "POST", text, Content_Type="application/json").json[0]["size"] == 0


@pytest.mark.parametrize("body", [b"[1]", b'{"paths": [1]}', b'{"paths": {}}', b"{", b"[" * 9999])
def test_a_question_that_is_no_list_of_paths_is_refused(hub: Running, body: bytes) -> None:
    path = "/api/models/org/tiny/paths-info/main"
    assert hub.ask(path, "POST", body, Content_Type="application/json").status == 400


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/api/models/org/other", "RepoNotFound"),
        ("/org/other/resolve/main/config.json", "RepoNotFound"),
        ("/api/datasets/org/tiny", "RepoNotFound"),
        ("/", "RepoNotFound"),
        ("/config.json", "RepoNotFound"),
        (f"/api/models/org/tiny/revision/{OTHER}", "RevisionNotFound"),
        (f"/org/tiny/resolve/{OTHER}/config.json", "RevisionNotFound"),
        ("/org/tiny/resolve/v1.0/config.json", "RevisionNotFound"),
        ("/org/tiny/resolve/main/nothing.json", "EntryNotFound"),
        ("/org/tiny/resolve/main/sub%20dir", "EntryNotFound"),
        ("/api/models/org/tiny/tree/main/nothing", "EntryNotFound"),
        ("/api/models/org/tiny/commits/main", "EntryNotFound"),
        ("/org/tiny/resolve/main/.sm120/lock.yaml", "EntryNotFound"),
        ("/org/tiny/resolve/main/../../../../etc/passwd", "EntryNotFound"),
        ("/org/tiny/resolve/main/%2e%2e/%2e%2e/etc/passwd", "EntryNotFound"),
        ("/org/tiny/resolve/main/..%2f..%2fetc%2fpasswd", "EntryNotFound"),
        ("/org/tiny/resolve/main//etc/passwd", "EntryNotFound"),
        ("/org/tiny/resolve/main/%2Fetc%2Fpasswd", "EntryNotFound"),
        ("/org/tiny/resolve/main/config.json%00", "EntryNotFound"),
        ("/org/tiny/resolve/main/./config.json", "EntryNotFound"),
        ("/org/tiny/resolve/main/CONFIG.JSON", "EntryNotFound"),
        ("/org/tiny/resolve/%2e%2e/config.json", "RevisionNotFound"),
    ],
)
def test_what_is_not_locked_does_not_exist(hub: Running, path: str, code: str) -> None:
    got = hub.ask(path)
    assert (got.status, got.headers["X-Error-Code"]) == (404, code)
    assert b"root:" not in got.body


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "POST", "TRACE"])
def test_nothing_can_be_written(hub: Running, method: str) -> None:
    got = hub.file("config.json", method=method)
    assert (got.status, got.headers["Allow"]) == (405, "GET, HEAD")
    assert hub.ask("/api/models/org/tiny", method).status == 405


@pytest.mark.parametrize("size_class", ["config.json", "model.safetensors"])
def test_a_byte_flipped_after_the_proof_is_never_sent(
    hub: Running, place: LockedFolder, size_class: str
) -> None:
    assert hub.file(size_class).status == 200
    path = place.root / size_class
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    before = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    for method in ("GET", "HEAD"):
        got = hub.file(size_class, method=method)
        assert got.status == 409
        assert "does not have the locked bytes" in got.headers["X-Error-Message"]
    assert hub.ask("/healthz").json["status"] == "damaged"


def test_a_repaired_file_is_served_again_without_a_restart(
    hub: Running, place: LockedFolder
) -> None:
    path = place.root / "model.safetensors"
    path.write_bytes(BIG[:-1] + b"?")
    assert hub.file("model.safetensors").status == 409
    path.unlink()
    path.write_bytes(BIG)
    assert hub.file("model.safetensors").body == BIG


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("fault", ["gone", "short", "link", "folder", "pipe"])
def test_a_file_that_is_not_the_locked_one_is_refused(
    hub: Running, place: LockedFolder, tmp_path: Path, name: str, fault: str
) -> None:
    path = place.root / name
    data = path.read_bytes()
    path.unlink()
    if fault == "short":
        path.write_bytes(data[:-1])
    if fault == "link":  # even to the same bytes: what is outside may change unseen
        (tmp_path / "outside").write_bytes(data)
        path.symlink_to(tmp_path / "outside")
    if fault == "folder":
        path.mkdir()
    if fault == "pipe":
        os.mkfifo(path)
    assert hub.file(name).status == 409


def test_a_folder_that_became_a_link_is_not_followed(
    hub: Running, place: LockedFolder, tmp_path: Path
) -> None:
    (place.root / "sub dir").rename(tmp_path / "elsewhere")
    (place.root / "sub dir").symlink_to(tmp_path / "elsewhere")
    assert hub.file("sub dir/part.safetensors").status == 409


def test_a_file_that_changes_while_it_is_sent_never_arrives_whole(
    hub: Running, place: LockedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_ONCE_BYTES", 1 << 16)
    path = place.root / "model.safetensors"
    with socket.create_connection(("127.0.0.1", hub.server.port), timeout=20) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        sock.sendall(
            b"GET /org/tiny/resolve/main/model.safetensors HTTP/1.1\r\n"
            b"Host: 127.0.0.1\r\nConnection: close\r\n\r\n"
        )
        first = sock.recv(4096)
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"?")
        rest = b"".join(iter(lambda: sock.recv(1 << 20), b""))
    body = (first + rest).partition(b"\r\n\r\n")[2]
    assert first.startswith(b"HTTP/1.1 200")
    assert len(body) < len(BIG)


def test_before_it_is_proved_a_file_is_answered_with_come_back_later(
    place: LockedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proving, "_WAIT_S", 0.05)
    monkeypatch.setattr(proving, "_TICK_S", 30.0)  # the proof cannot begin
    with running(place.root) as hub:
        got = hub.file("model.safetensors")
        assert (got.status, got.headers["Retry-After"]) == (503, "10")
        assert "being checked" in got.headers["X-Error-Message"]
        assert hub.file("config.json").status == 200
        assert hub.ask("/healthz").json["status"] == "proving"


def test_a_receipt_proves_only_the_very_file(place: LockedFolder) -> None:
    pin = next(p for p in place.lock.files if p.path == "model.safetensors")
    handle = open_pin(place, pin)
    seen = identity_of(os.fstat(handle))
    os.close(handle)
    for known, state in ((seen, "proved"), (seen._replace(inode=1), "unproved")):
        receipt = {pin.path: known}
        prover = Prover(served_by([place.root]).files, lambda _, receipt=receipt: receipt)  # type: ignore[misc]
        assert {h.pin.path: h.state for h in prover.files}[pin.path] == state


def test_a_token_opens_the_server_and_nothing_else_does(place: LockedFolder) -> None:
    with running(place.root, tokens=frozenset({"hf_right_token"})) as hub:
        hub.wait_until_judged()
        assert hub.file("config.json", Authorization="Bearer hf_right_token").status == 200
        none = hub.file("config.json")
        assert (none.status, none.headers["X-Error-Message"][:18]) == (401, "this server needs ")
        for wrong in ("Bearer hf_wrong_token", "Bearer ", "Basic hf_right_token", "Bearer é"):
            got = hub.file("config.json", Authorization=wrong)
            assert got.status == 401
            assert got.headers["X-Error-Message"] == "Invalid credentials in Authorization header"
        assert hub.ask("/api/models/org/other").status == 401
        assert "sets" not in hub.ask("/healthz").json
        shown = hub.ask("/healthz", Authorization="Bearer hf_right_token").json
        assert shown["sets"][0]["repository"] == "org/tiny"


def test_the_log_has_a_line_a_request_and_no_token(
    place: LockedFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(place.root, tokens=frozenset({"hf_right_token"})) as hub:
        hub.file("config.json", Authorization="Bearer hf_right_token")
        hub.ask("/org/tiny/resolve/main/config.json?token=hf_right_token")
    output = capfd.readouterr().err
    lines = sorted(line for line in output.splitlines() if "config.json" in line)
    assert len(lines) == 2
    assert " 200 23 " in lines[0]
    assert " 401 " in lines[1]
    assert "hf_right_token" not in output


def test_a_browsers_page_cannot_reach_a_loopback_server_by_a_name_of_its_own(hub: Running) -> None:
    assert hub.file("config.json", Host="evil.example:8080").status == 421
    assert hub.file("config.json", Host="localhost:8080").status == 200


REFUSED = {
    "a huge header": (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 40000 + b"\r\n\r\n", 431),
    "an endless header": (b"GET / HTTP/1.1\r\nA: " + b"a" * 40000, 431),
    "too many headers": (b"GET / HTTP/1.1\r\n" + b"A: 1\r\n" * 101 + b"\r\n", 431),
    "no host": (b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n", 400),
    "a host that is none": (
        b"GET / HTTP/1.1\r\nHost: a b\r\nConnection: close\r\n\r\n",
        400,
    ),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    "a folded header": (b"GET / HTTP/1.1\r\nHost: a\r\n b\r\n\r\n", 400),
    "a space before the colon": (b"GET / HTTP/1.1\r\nHost : a\r\n\r\n", 400),
    "bare newlines": (b"GET / HTTP/1.1\nHost: a\n\r\n\r\n", 400),
    "a NUL in the target": (b"GET /\0 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "another protocol": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\r\n\r\n", 400),
    "a chunked body": (
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        411,
    ),
    "a huge body": (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n", 413),
    "a negative length": (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400),
    "two lengths": (
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
        400,
    ),
    "no UTF-8": (b"GET /%ff HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n", 400),
    "no path": (b"GET config.json HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n", 400),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_plain_request_is_refused(hub: Running, name: str) -> None:
    data, status = REFUSED[name]
    assert hub.raw(data).startswith(b"HTTP/1.1 %d " % status)
    assert hub.file("config.json").status == 200


def test_an_answer_cannot_be_split_by_what_was_asked(hub: Running) -> None:
    got = hub.raw(
        b"GET /api/models/org/tiny/tree/main?limit=1&x=%0d%0aEvil:%201 HTTP/1.1\r\n"
        b"Host: 127.0.0.1\r\nConnection: close\r\n\r\n"
    )
    assert b"\r\nEvil" not in got


def test_a_client_that_dribbles_its_request_is_cut_off(
    hub: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HEAD_S", 0.3)
    start = time.monotonic()
    with socket.create_connection(("127.0.0.1", hub.server.port), timeout=20) as sock:
        answer = b""
        for byte in b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" * 10:
            try:
                sock.send(bytes([byte]))
                sock.settimeout(0.05)
                answer = sock.recv(100)
            except TimeoutError:
                continue
            break
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - start < 20


def test_a_client_that_does_not_read_is_cut_off(
    hub: Running, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wire, "STALL_S", 0.3)
    with socket.create_connection(("127.0.0.1", hub.server.port)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(
            b"GET /org/tiny/resolve/main/model.safetensors HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        )
        said, deadline = "", time.monotonic() + 20
        while "does not read" not in said and time.monotonic() < deadline:
            time.sleep(0.05)
            said += capfd.readouterr().err
    assert "does not read" in said


def test_a_client_that_asks_nothing_is_let_go(
    hub: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HEAD_S", 0.2)
    assert hub.raw(b"") == b""


GET = b"GET /org/tiny/resolve/main/%s HTTP/1.1\r\nHost: 127.0.0.1\r\n"
TOKENS = frozenset({"hf_right_token"})
TOKEN_LINE = b"Authorization: Bearer hf_right_token\r\n"


class Crowd:
    """Connections of somebody's, from an address of this machine."""

    def __init__(self, hub: Running, stack: ExitStack) -> None:
        self._hub, self._stack = hub, stack

    def connect(self, source: str = "127.0.0.1", *, slow: bool = False) -> socket.socket:
        sock = self._stack.enter_context(socket.socket())
        if slow:  # so that a large answer does not fit on the way
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.bind((source, 0))
        sock.settimeout(10)
        sock.connect(("127.0.0.1", self._hub.server.port))
        return sock

    def asked(self, sock: socket.socket, path: bytes, *lines: bytes) -> bytes:
        """The answer's first bytes."""
        sock.sendall(GET % path + b"".join(lines) + b"\r\n")
        return sock.recv(4096)


@contextmanager
def crowded(place: LockedFolder, **more: Any) -> Iterator[tuple[Running, Crowd]]:
    with running(place.root, **more) as hub, ExitStack() as stack:
        hub.wait_until_judged()
        yield hub, Crowd(hub, stack)


def is_closed(sock: socket.socket) -> bool:
    sock.settimeout(5)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_silent_unknown_clients_leave_room_for_one_with_a_token(place: LockedFolder) -> None:
    few = ConnectionLimits(most=4, most_unknown=6, most_unknown_of_one=3)
    with crowded(place, tokens=TOKENS, connections=few) as (hub, crowd):
        silent = [crowd.connect() for _ in range(40)]
        assert crowd.asked(crowd.connect(), b"config.json", TOKEN_LINE).startswith(b"HTTP/1.1 200 ")
        assert len(hub.server.connections) <= 3 + 1
        assert is_closed(silent[0])


def test_unknown_clients_that_keep_asking_do_not_outlast_a_newcomer(place: LockedFolder) -> None:
    few = ConnectionLimits(most=4, most_unknown=6, most_unknown_of_one=3)
    with crowded(place, tokens=TOKENS, connections=few) as (_, crowd):
        loud = [crowd.connect() for _ in range(3)]
        newcomer = crowd.connect()
        for sock in loud[1:]:
            assert crowd.asked(sock, b"config.json").startswith(b"HTTP/1.1 401 ")
        crowd.connect()
        assert is_closed(loud[0])
        assert crowd.asked(newcomer, b"config.json", TOKEN_LINE).startswith(b"HTTP/1.1 200 ")


def test_one_that_has_asked_and_was_not_read_yet_is_not_sent_away() -> None:
    few = ConnectionLimits(most=4, most_unknown=6, most_unknown_of_one=2)
    pairs = [socket.socketpair() for _ in range(8)]
    held = [ClientConnection(ours, "127.0.0.1") for ours, _ in pairs]
    for (_, theirs), connection in zip(pairs[:4], held, strict=False):
        theirs.send(b"GET")
        few.add(connection)
    assert len(few) == 4
    for connection in held[4:6]:  # they are silent: the second makes the first go
        few.add(connection)
    assert len(few) == 5
    assert is_closed(pairs[4][1])
    for _, theirs in pairs[6:]:
        theirs.send(b"GET")
    for connection in held[6:]:  # but there is an end to it
        few.add(connection)
    assert len(few) == 6
    for pair in pairs:
        for sock in pair:
            sock.close()


def test_unknown_clients_of_many_addresses_do_not_shut_out_another(place: LockedFolder) -> None:
    few = ConnectionLimits(most=4, most_unknown=6, most_unknown_of_one=3)
    with crowded(place, tokens=TOKENS, connections=few) as (hub, crowd):
        newcomer = crowd.connect("127.0.0.9")
        for n in range(12):
            crowd.connect(f"127.0.0.{10 + n % 3}")
        assert crowd.asked(newcomer, b"config.json", TOKEN_LINE).startswith(b"HTTP/1.1 200 ")
        assert len(hub.server.connections) <= 6 + 1


def test_a_reader_that_is_silent_makes_way_for_the_next(place: LockedFolder) -> None:
    few = ConnectionLimits(most=2, most_unknown=6, most_unknown_of_one=6)
    with crowded(place, tokens=TOKENS, connections=few) as (_, crowd):
        readers = [crowd.connect() for _ in range(3)]
        for sock in readers:
            assert crowd.asked(sock, b"config.json", TOKEN_LINE).startswith(b"HTTP/1.1 200 ")
            deadline = time.monotonic() + 10
            while not all(c.is_waiting for c in list(few._open) if c.may_read):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert is_closed(readers[0])
        assert crowd.asked(readers[1], b"config.json", TOKEN_LINE).startswith(b"HTTP/1.1 200 ")


def test_more_readers_than_allowed_get_a_retry_after(place: LockedFolder) -> None:
    few = ConnectionLimits(most=2, most_unknown=6, most_unknown_of_one=6)
    with crowded(place, tokens=TOKENS, connections=few) as (_, crowd):
        for _ in range(2):
            crowd.asked(crowd.connect(slow=True), b"model.safetensors", TOKEN_LINE)
        third = crowd.asked(crowd.connect(), b"config.json", TOKEN_LINE)
        assert third.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 5" in third


def test_one_address_cannot_have_all_places_where_no_token_is_asked_for(
    place: LockedFolder,
) -> None:
    few = ConnectionLimits(most=4, most_unknown=6, most_unknown_of_one=6)
    with crowded(place, connections=few, most_of_one=2) as (_, crowd):
        for _ in range(2):
            crowd.asked(crowd.connect(slow=True), b"model.safetensors")
        assert crowd.asked(crowd.connect(), b"config.json").startswith(b"HTTP/1.1 503 ")
        assert crowd.asked(crowd.connect("127.0.0.9"), b"config.json").startswith(b"HTTP/1.1 200 ")


def test_whoever_was_refused_is_not_waited_for_as_long(
    place: LockedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HEAD_S", 1.5)
    with crowded(place, tokens=TOKENS) as (_, crowd):
        refused, reader = crowd.connect(), crowd.connect()
        assert crowd.asked(refused, b"config.json").startswith(b"HTTP/1.1 401 ")
        assert crowd.asked(reader, b"config.json", TOKEN_LINE).startswith(b"HTTP/1.1 200 ")
        assert is_closed(refused)
        assert crowd.asked(reader, b"config.json", TOKEN_LINE).startswith(b"HTTP/1.1 200 ")


def out_of(number: int) -> Callable[..., Any]:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fails


TROUBLES = [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO]


@pytest.mark.parametrize("number", TROUBLES, ids=errno.errorcode.get)
@pytest.mark.parametrize("path", ["config.json", "model.safetensors"])
def test_a_file_that_cannot_be_opened_now_is_not_called_wrong(
    hub: Running, monkeypatch: pytest.MonkeyPatch, path: str, number: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", out_of(number))
        got = hub.file(path)
    assert (got.status, got.headers["Retry-After"]) == (503, "10")
    assert os.strerror(number) in got.headers["X-Error-Message"]
    assert hub.ask("/healthz").json["status"] == "ready"
    assert hub.file(path).status == 200


@pytest.mark.parametrize("number", TROUBLES, ids=errno.errorcode.get)
def test_a_file_that_cannot_be_read_while_it_is_judged_is_judged_again(
    place: LockedFolder, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(proving, "_RETRY_S", 0.05)
    monkeypatch.setattr(proving, "_WAIT_S", 0.3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", out_of(number))
        with running(place.root) as hub:
            # on a busy machine it may not have been read at all yet
            while (
                "still being checked"
                in (got := hub.file("model.safetensors")).headers["X-Error-Message"]
            ):
                assert got.status == 503
            assert (got.status, got.headers["Retry-After"]) == (503, "10")
            assert os.strerror(number) in got.headers["X-Error-Message"]
            assert hub.ask("/healthz").json["wrong"] == 0
            patch.undo()
            # on a busy machine the next try takes longer than the short wait above
            monkeypatch.setattr(proving, "_WAIT_S", 30)
            assert hub.file("model.safetensors").body == BIG
            assert hub.ask("/healthz").json["wrong"] == 0


def test_a_small_file_that_cannot_be_read_now_keeps_its_proof(
    hub: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", out_of(errno.EIO))
        assert hub.file("config.json").status == 503
    assert hub.ask("/healthz").json["status"] == "ready"
    assert hub.file("config.json").status == 200


@pytest.mark.parametrize("asked", ["bytes=1-2", "bytes=99999999-", "bytes=x"])
@pytest.mark.parametrize("path", ["config.json", "model.safetensors"])
def test_head_knows_no_ranges(hub: Running, path: str, asked: str) -> None:
    got = hub.file(path, method="HEAD", Range=asked)
    whole = hub.file(path)
    assert (got.status, got.body) == (200, b"")
    assert got.headers["Content-Length"] == str(len(whole.body))
    assert "Content-Range" not in got.headers


def test_one_connection_carries_many_requests(hub: Running) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", hub.server.port, timeout=20)
    for path, data in {**SMALL, **LARGE}.items():
        connection.request("GET", f"/org/tiny/resolve/main/{quote(path)}")
        assert connection.getresponse().read() == data
    assert len(hub.server.connections) == 1
    connection.close()


def test_no_file_stays_open_after_its_answer(hub: Running) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    hub.file("model.safetensors")
    before = count()
    for headers in ({}, {"Range": "bytes=1-2"}, {"Range": "bytes=99999999-"}):
        for method in ("GET", "HEAD"):
            hub.file("model.safetensors", method=method, **headers)
    deadline = time.monotonic() + 5
    while count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert count() <= before


def test_two_sets_of_one_commit_are_one_repository(tmp_path: Path) -> None:
    make_set(tmp_path / "a", SMALL, {"q4.gguf": b"four"}, name="q4")
    make_set(tmp_path / "b", SMALL, {"q3.gguf": b"three"}, name="q3")
    with running(tmp_path / "a", tmp_path / "b") as hub:
        assert hub.file("q4.gguf").body == b"four"
        assert hub.file("q3.gguf").body == b"three"


def test_two_commits_of_one_repository_have_no_main(tmp_path: Path) -> None:
    make_set(tmp_path / "a", {"config.json": b"a"}, {})
    make_set(tmp_path / "b", {"config.json": b"b"}, {}, commit=OTHER)
    with running(tmp_path / "a", tmp_path / "b") as hub:
        assert hub.file("config.json", COMMIT).body == b"a"
        assert hub.file("config.json", OTHER).body == b"b"
        got = hub.file("config.json", "main")
        assert (got.status, got.headers["X-Error-Code"]) == (404, "RevisionNotFound")
        assert OTHER in got.headers["X-Error-Message"]


def test_a_hub_cache_knows_the_names_of_its_revisions(tmp_path: Path) -> None:
    place = make_set(tmp_path, {"config.json": b"a"}, {}, hub_cache=True)
    for name, commit in (("refs/pr/1", COMMIT), ("v1", COMMIT), ("v2", OTHER)):
        path = place.root / "refs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit, encoding="utf-8")
    with running(tmp_path) as hub:
        assert hub.file("config.json", "v1").status == 200
        assert hub.file("config.json", "refs%2Fpr%2F1").status == 200
        assert hub.file("config.json", "v2").status == 404
        branches = hub.ask("/api/models/org/tiny/refs").json["branches"]
        assert {b["name"] for b in branches} == {"main", "v1", "refs/pr/1"}


def test_odd_things_among_a_caches_names_are_passed_over(tmp_path: Path) -> None:
    place = make_set(tmp_path / "set", SMALL, {}, hub_cache=True)
    refs = place.root / "refs"
    refs.mkdir(exist_ok=True)
    os.mkfifo(refs / "pipe")
    (refs / "loop").symlink_to("loop")
    (refs / "up").symlink_to("..")
    (refs / "long").write_text(COMMIT + " " * 9999)
    (refs / "v1").write_text(f"{COMMIT}\n")
    here = os.open(refs, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        here, above = os.open("d", os.O_RDONLY, dir_fd=here), here
        os.close(above)
    os.close(here)
    names = served_by([tmp_path / "set"]).names("org/tiny")
    assert names["v1"] == COMMIT
    assert not {"pipe", "loop", "up", "long"} & set(names)
    remove_tree(refs)


def test_locks_that_contradict_each_other_are_not_served(tmp_path: Path) -> None:
    make_set(tmp_path / "a", {"config.json": b"a"}, {})
    make_set(tmp_path / "b", {"config.json": b"b"}, {})
    with pytest.raises(LockEdited, match="two ways"):
        served_by([tmp_path / "a", tmp_path / "b"])


def test_an_edited_lock_is_not_served(place: LockedFolder) -> None:
    text = place.lock_file.read_text(encoding="utf-8")
    place.lock_file.write_text(text.replace("org/tiny", "org/evil"), encoding="utf-8")
    with pytest.raises(LockEdited):
        served_by([place.root])


def test_an_address_in_use_is_named_in_the_error(hub: Running, place: LockedFolder) -> None:
    taken: Callable[[], AbstractContextManager[Running]] = lambda: running(  # noqa: E731
        place.root, port=hub.server.port
    )
    with pytest.raises(AddressUnusable, match="cannot listen"), taken():
        pass


BAD_STARTS = {
    "an empty token file": ("", ["--token-file", "tokens"], 42),
    "a short token": ("short", ["--token-file", "tokens"], 42),
    "a token with a space": ("two words here", ["--token-file", "tokens"], 42),
    "a certificate that is none": ("not a certificate", ["--tls-cert", "tokens"], 42),
    "an address of another machine": ("", ["--host", "192.0.2.1"], 42),
}


@pytest.mark.parametrize("name", BAD_STARTS)
def test_the_command_does_not_start_with(
    place: LockedFolder, tmp_path: Path, sm120: Command, name: str
) -> None:
    text, options, code = BAD_STARTS[name]
    (tmp_path / "tokens").write_text(text, encoding="utf-8")
    done = sm120("weights", "serve", str(place.root), "--port", "0", *options)
    assert (done.code, done.out) == (code, "")
    assert done.err.count("sm120: ") == 1


def test_the_command_does_not_serve_what_is_not_locked(
    place: LockedFolder, tmp_path: Path, sm120: Command
) -> None:
    (tmp_path / "empty").mkdir()
    assert sm120("weights", "serve", str(tmp_path / "empty")).error == "WeightsUnknown"
    text = place.lock_file.read_text(encoding="utf-8")
    place.lock_file.write_text(text.replace("org/tiny", "org/evil"), encoding="utf-8")
    assert sm120("weights", "serve", str(place.root)).error == "LockEdited"


@pytest.mark.parametrize(
    ("host", "loopback", "name"),
    [
        ("127.0.0.1", True, "127.0.0.1"),
        ("127.9.9.9", True, "127.9.9.9"),
        ("::1", True, "[::1]"),
        ("localhost", True, "localhost"),
        ("0.0.0.0", False, socket.gethostname()),
        ("::", False, socket.gethostname()),
        ("10.0.0.5", False, "10.0.0.5"),
        ("node7", False, "node7"),
    ],
)
def test_the_printed_address_is_one_that_clients_can_use(
    host: str, loopback: bool, name: str
) -> None:
    assert is_loopback(f"[{host}]") is loopback
    assert weights_serve._name(host) == name
