"""Indexes, apt archives and the Hub, each answered for by a server that means harm."""

from __future__ import annotations

import hashlib
import json
import socket
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.core.errors import HubBroken, PipelineError, SourceUnreachable
from pipeline.core.log import NoBar
from pipeline.core.net.http import NetClient, download_file
from pipeline.core.net.settings import NetworkSettings
from pipeline.core.net.timing import HttpLimits
from pipeline.images.fetch.index import find_file, list_index_files
from pipeline.images.fetch.sources import read_below, snapshot_places
from pipeline.weights.hub import Hub
from tests.testbed import hostile
from tests.testbed.hostile import SHORT, hostile_server
from tests.unit.support import deb_pin_for

REPOSITORY, COMMIT = "org/tiny", "a" * 40
FILE = "thing-1.0-py3-none-any.whl"
MOST = 1 << 20


@pytest.fixture(autouse=True)
def one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends the first time ends the fifth time, too; and a page is small."""
    for place in ("core.net.timing.ATTEMPTS", "images.fetch.index.PAGE_ATTEMPTS"):
        monkeypatch.setattr(f"pipeline.{place}", 1)
    for place in ("images.fetch.index", "weights.hub"):
        monkeypatch.setattr(f"pipeline.{place}.MOST_PAGE_BYTES", MOST)
    monkeypatch.setenv("no_proxy", "*")


def client(limits: HttpLimits = hostile.PATIENT) -> NetClient:
    return NetClient(NetworkSettings(indexes=()), first_wait_s=0.001, limits=limits)


def hub(url: str, limits: HttpLimits = hostile.PATIENT) -> Hub:
    return Hub(NetworkSettings(indexes=()), endpoint=url, first_wait_s=0.001, limits=limits)


def fetched(url: str, folder: Path) -> None:
    partial = folder / url.rpartition(":")[2]
    download_file(client(SHORT), f"{url}/f", partial, sha256="a" * 64, size_bytes=9, bar=NoBar())


ASKS: dict[str, Callable[[str], object]] = {
    "index, one file": lambda url: find_file(client(SHORT), f"{url}/simple/", "thing", FILE),
    "index, all files": lambda url: list_index_files(client(SHORT), f"{url}/simple/", "thing"),
    "apt index": lambda url: read_below(client(SHORT), [url], "dists/x/InRelease", MOST),
    "Hub, commit": lambda url: hub(url, SHORT).commit_of(REPOSITORY, "main"),
    "Hub, listing": lambda url: hub(url, SHORT).files(REPOSITORY, COMMIT),
}
# an archive's file is whatever its bytes are: what is damaged shows when it is verified
AS_IT_LIES = (
    *("damaged gzip", "gzip cut off", "an unknown encoding", "a gzip bomb"),
    *("gzip and garbage", "gzip in gzip"),
)


@pytest.mark.parametrize("name", ASKS)
def test_whatever_a_server_answers_ends_in_time_with_an_error_of_ours(name: str) -> None:
    answers = dict(hostile.ANSWERS)
    if name == "apt index":
        for lies in AS_IT_LIES:
            del answers[lies]
    if name.startswith("index"):
        # a page of another kind: the type decides how it is read
        answers = {n: as_page(script) for n, script in answers.items()}
    assert hostile.endings(ASKS[name], answers) == {}


def as_page(script: hostile.Script) -> hostile.Script:
    """The same answer, called a page of an index."""
    kind = b"application/vnd.pypi.simple.v1+json"

    class Conn:
        def __init__(self, conn: socket.socket) -> None:
            self._conn = conn

        def sendall(self, data: bytes) -> None:
            self._conn.sendall(data.replace(b"application/json", kind))

        def __getattr__(self, name: str) -> object:
            return getattr(self._conn, name)

    return lambda conn, request: script(Conn(conn), request)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [n for n in ASKS if n != "apt index"])
def test_json_with_two_meanings_is_refused(name: str) -> None:
    answers = {n: as_page(script) for n, script in hostile.JSON_ANSWERS.items()}
    assert hostile.endings(ASKS[name], answers) == {}


def test_a_download_ends_at_every_hostile_answer_and_keeps_nothing_that_is_too_long(
    tmp_path: Path,
) -> None:
    assert hostile.endings(lambda url: fetched(url, tmp_path), hostile.ANSWERS) == {}
    assert all(path.stat().st_size <= 9 for path in tmp_path.iterdir())


def test_a_snapshot_archive_that_means_harm_offers_nothing() -> None:
    def places(script: hostile.Script) -> list[object]:
        with hostile_server(script) as url:
            return list(snapshot_places(client(SHORT), url, deb_pin_for(b"x")))

    for name in ("a dripping body", "a gzip bomb", "redirects without end", "no HTTP"):
        assert places(hostile.ANSWERS[name]) == []
    for data in (*hostile.BAD_JSON.values(), b'{"fileinfo": 7}', b'{"fileinfo": {"a": [7]}}'):
        assert places(hostile.body(data)) == []


def entry(**changes: object) -> dict[str, object]:
    return {"type": "file", "oid": "a" * 40, "size": 1, "path": "a.json", **changes}


@pytest.mark.parametrize(
    "size", ["1" + "0" * 400, "1" + "0" * 5000, str(2**63), "1e400", "NaN", "1.5", "true", "-1"]
)
def test_an_absurd_size_in_a_listing_is_refused(size: str) -> None:
    text = json.dumps([entry(size=12345)]).replace("12345", size).encode()
    with hostile_server(hostile.body(text)) as url, pytest.raises(HubBroken):
        hub(url).files(REPOSITORY, COMMIT)
    page = {"filename": FILE, "url": "x.whl", "hashes": {"sha256": "a" * 64}, "size": 12345}
    pages = {"meta": {"api-version": "1.0"}, "name": "thing", "files": [page]}
    text = json.dumps(pages).replace("12345", size).encode()
    if size in ("1.5", "true", "-1"):
        return
    with hostile_server(as_page(hostile.body(text))) as url, pytest.raises(SourceUnreachable):
        find_file(client(), f"{url}/simple/", "thing", FILE)


@pytest.mark.parametrize("place", ["http://[", "http://x:99999/", "//[", "ftp://x/"])
def test_an_address_in_an_answer_that_is_none_is_the_servers_fault(place: str) -> None:
    link = b'Link: <%b>; rel="next"\r\n' % place.encode()
    with (
        hostile_server(hostile.body(b"[]", hostile.OK + link)) as url,
        pytest.raises(HubBroken, match="not a valid address"),
    ):
        hub(url).files(REPOSITORY, COMMIT)
    page = {"filename": FILE, "url": place, "hashes": {"sha256": "a" * 64}}
    text = json.dumps({"meta": {"api-version": "1.0"}, "name": "thing", "files": [page]}).encode()
    with hostile_server(as_page(hostile.body(text))) as url, pytest.raises(SourceUnreachable):
        client().read(find_file(client(), f"{url}/simple/", "thing", FILE)[0].url, 9)


@pytest.mark.parametrize("url", ["http://[", "http://x:99999", "http://", "gopher://x"])
def test_a_configured_address_that_is_none_is_reported_as_such(url: str) -> None:
    for ask in ASKS.values():
        with pytest.raises(PipelineError, match="not a valid address"):
            ask(url)


def endless_pages(make: Callable[[int], bytes]) -> hostile.Script:
    """Each page has a next one that is new."""
    asked = iter(range(10**6))

    def answer(conn: socket.socket, request: bytes) -> None:
        number, here = next(asked), request.split(b" ")[1].partition(b"?")[0]
        link = b'Link: <%b?cursor=%d>; rel="next"\r\n' % (here, number)
        hostile.body(make(number), hostile.OK + link)(conn, request)

    return answer


@pytest.mark.parametrize(
    "make",
    [
        lambda n: b"[]",
        lambda n: json.dumps([entry(type="directory", path=f"d{n}")]).encode(),
        lambda n: json.dumps([entry(path=f"f{n}")]).encode(),
    ],
)
def test_pages_without_end_end(
    make: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.weights.hub._MOST_PAGES", 20)
    with hostile_server(endless_pages(make)) as url, pytest.raises(HubBroken, match="20 pages"):
        hub(url).files(REPOSITORY, COMMIT)


def test_folders_without_end_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.weights.hub._MOST_ENTRIES", 500)
    folders = json.dumps([entry(type="directory", path=f"d{i}") for i in range(200)]).encode()
    with (
        hostile_server(endless_pages(lambda n: folders)) as url,
        pytest.raises(HubBroken, match="more than"),
    ):
        hub(url).files(REPOSITORY, COMMIT)


def test_a_listing_has_a_total_time() -> None:
    limits = HttpLimits(pages_s=0.2)
    asker = Hub(NetworkSettings(indexes=()), endpoint="", limits=limits)
    with hostile_server(endless_pages(lambda n: b"[]")) as url:
        asker.endpoint = url
        with pytest.raises(HubBroken, match=r"0\.2 s"):
            asker.files(REPOSITORY, COMMIT)


def test_an_endless_page_takes_no_more_memory_than_the_limit() -> None:
    for name in ("an endless gzip bomb", "an endless body"):
        with hostile_server(as_page(hostile.ANSWERS[name])) as url:
            tracemalloc.start()
            with pytest.raises(PipelineError):
                ASKS["index, one file"](url)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 6 * MOST


def test_a_model_with_huge_numbers_in_its_settings_still_has_a_commit() -> None:
    text = b'{"sha": "%b", "config": {"model_max_length": 1%b}}' % (COMMIT.encode(), b"0" * 30)
    with hostile_server(hostile.body(text)) as url:
        assert hub(url).commit_of(REPOSITORY, "main") == COMMIT


WHOLE = bytes(range(256)) * 16
PART = b"HTTP/1.1 206 Partial Content\r\n"


def part(stated: str, data: bytes, more: str = "") -> bytes:
    head = f"Content-Range: {stated}\r\nContent-Length: {len(data)}\r\n{more}\r\n"
    return PART + head.encode() + data


# what a server answers to "bytes=1000-" of a file of 4096 bytes
PARTS: dict[str, Callable[[int], bytes]] = {
    "the rest": lambda at: part(f"bytes {at}-4095/4096", WHOLE[at:]),
    "less than was asked for": lambda at: part(
        f"bytes {at}-{min(at + 999, 4095)}/4096", WHOLE[at : at + 1000]
    ),
    "of a size it does not say": lambda at: part(f"bytes {at}-4095/*", WHOLE[at:]),
    "cut off once": lambda at: part(f"bytes {at}-4095/4096", WHOLE[at:])[
        : -500 if at == 1000 else None
    ],
    "the whole, called the rest": lambda at: part(f"bytes {at}-4095/4096", WHOLE),
    "of a file of another size": lambda at: part(f"bytes {at}-4999/5000", WHOLE[at:] + bytes(904)),
    "backwards": lambda at: part(f"bytes {at}-0/4096", b""),
    "without a range": lambda at: PART + b"Content-Length: 4\r\n\r\nabcd",
    "from elsewhere": lambda at: part("bytes 0-9/4096", WHOLE[:10]),
    "in several parts": lambda at: part("", b"--x", "Content-Type: multipart/byteranges\r\n"),
    "wrong bytes": lambda at: part(f"bytes {at}-4095/4096", bytes(4096 - at)),
    "none": lambda at: b"HTTP/1.1 416 No\r\nContent-Length: 0\r\n\r\n",
}


def resuming(name: str) -> hostile.Script:
    """A server whose parts are odd, and whose whole file is right."""

    def answer(conn: socket.socket, request: bytes) -> None:
        _, _, rest = request.partition(b"Range: bytes=")
        if rest:
            conn.sendall(PARTS[name](int(rest.partition(b"-")[0])))
        else:
            hostile.body(WHOLE)(conn, request)

    return answer


@pytest.mark.parametrize("name", PARTS)
def test_a_download_goes_on_whatever_a_server_makes_of_ranges(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.core.net.timing.ATTEMPTS", 9)
    monkeypatch.setattr("pipeline.core.net.download._PROGRESS_BYTES", 100)
    (tmp_path / "partial").write_bytes(WHOLE[:1000])
    want = hashlib.sha256(WHOLE).hexdigest()
    with hostile_server(resuming(name)) as url:
        download_file(
            client(), url, tmp_path / "partial", sha256=want, size_bytes=len(WHOLE), bar=NoBar()
        )
    assert (tmp_path / "partial").read_bytes() == WHOLE
