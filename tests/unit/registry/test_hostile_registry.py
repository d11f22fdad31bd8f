"""Every question to a registry, answered by a server that means harm."""

from __future__ import annotations

import base64
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.artifacts.oci.document import Descriptor, read_document
from pipeline.artifacts.oci.reference import parse_reference
from pipeline.artifacts.registry.access import Access
from pipeline.artifacts.registry.client import RegistryClient
from pipeline.artifacts.registry.pull import plan_pull, receive_blob
from pipeline.artifacts.registry.referrers import referrers
from pipeline.artifacts.registry.repository import Repository
from pipeline.artifacts.registry.upload import push_blob
from pipeline.core.errors import RegistryBroken, RegistryRefused, RegistryUnreachable
from pipeline.core.log import NoBar
from pipeline.core.net.timing import HttpLimits
from tests.testbed import hostile
from tests.testbed.hostile import hostile_server
from tests.testbed.oci_door import Door, oci_door, status, with_body, with_headers
from tests.testbed.tiny_registry import TinyRegistry, digest_of
from tests.unit.fetch.test_hostile_sources import PARTS, WHOLE, resuming
from tests.unit.registry.support import (
    NAME,
    blob_of,
    index_json,
    keep_login,
    put,
    put_image,
    repository_at,
)

DATA = b"x" * 5000
BLOB = Descriptor(media_type="a/b", digest=digest_of(DATA), size_bytes=len(DATA))
NOWHERE = [
    *("http://[", "http://x:99999/t", "http://x:" + "9" * 400, "//[", "ftp://x/"),
    *("http://u:p@x/", "https://\x7f/", "file:///etc/passwd"),
]


@pytest.fixture(autouse=True)
def one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends the first time ends the fifth time, too."""
    monkeypatch.setattr("pipeline.core.net.timing.ATTEMPTS", 1)
    monkeypatch.setenv("no_proxy", "*")


def hostile_repository(url: str, limits: HttpLimits = hostile.PATIENT) -> Repository:
    reference = parse_reference(f"{url.removeprefix('http://')}/{NAME}")
    access = Access(first_wait_s=0.001, insecure_http=True, limits=limits)
    return Repository(RegistryClient(reference, access), NAME)


ASKS: dict[str, Callable[[Repository, Path], object]] = {
    "tags": lambda repository, _: repository.tags(),
    "manifest": lambda repository, _: repository.manifest("v1"),
    "referrers": lambda repository, _: referrers(repository, BLOB.digest),
    "small blob": lambda repository, _: repository.read_blob(BLOB, 9999),
    "checked blob": lambda repository, _: receive_blob(repository, BLOB, None, NoBar()),
    "pulled blob": lambda repository, path: receive_blob(repository, BLOB, path, NoBar()),
    "upload": lambda repository, _: push_blob(repository, blob_of(DATA), NoBar()),
}


@pytest.mark.parametrize("name", ASKS)
def test_whatever_a_server_answers_ends_in_time_with_an_error_of_ours(
    name: str, tmp_path: Path
) -> None:
    def ask(url: str) -> object:
        partial = tmp_path / url.rpartition(":")[2]
        return ASKS[name](hostile_repository(url, hostile.SHORT), partial)

    assert hostile.endings(ask, hostile.ANSWERS) == {}


@pytest.mark.parametrize("name", ["tags", "manifest", "referrers"])
def test_json_with_two_meanings_is_refused(name: str, tmp_path: Path) -> None:
    def ask(url: str) -> object:
        return ASKS[name](hostile_repository(url, hostile.SHORT), tmp_path)

    assert hostile.endings(ask, hostile.JSON_ANSWERS) == {}


@pytest.fixture
def login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, door: Door, tiny: TinyRegistry) -> None:
    tiny.login = "ann:secret"
    auth = base64.b64encode(b"ann:secret").decode()
    keep_login(monkeypatch, tmp_path / "docker", {"auths": {door.host_port: {"auth": auth}}})


@pytest.mark.parametrize("kind", ["ANSWERS", "JSON_ANSWERS"])
def test_a_hostile_token_service_ends_like_any_other_server(login: None, kind: str) -> None:
    def ask(url: str) -> object:
        tiny = TinyRegistry(login="ann:secret", realm=f"{url}/token")
        with oci_door(tiny) as door:
            return repository_at(door, insecure_http=True, limits=hostile.SHORT).tags()

    assert hostile.endings(ask, getattr(hostile, kind)) == {}


@pytest.mark.parametrize("place", NOWHERE)
def test_a_token_service_that_is_no_address_gets_no_login(
    login: None, door: Door, tiny: TinyRegistry, place: str
) -> None:
    tiny.realm = place
    with pytest.raises((RegistryBroken, RegistryRefused), match="token service"):
        repository_at(door).tags()


@pytest.mark.parametrize("place", NOWHERE)
def test_a_location_that_is_no_address_is_the_registrys_fault(door: Door, place: str) -> None:
    repository = repository_at(door)
    door.fail("GET", "tags", status(307, Location=place))
    with pytest.raises(RegistryBroken, match="not a valid address"):
        repository.tags()
    door.fail("POST", "uploads", status(202, Location=place))
    with pytest.raises(RegistryBroken, match="not a valid address"):
        push_blob(repository, blob_of(DATA), NoBar())


@pytest.mark.parametrize("place", ["http://[/x", "http://x:99999/x", "http://x:abc/", "http:///x"])
def test_a_next_page_that_is_no_address_is_the_registrys_fault(
    door: Door, tiny: TinyRegistry, place: str
) -> None:
    put_image(tiny, "v1", b"layer")
    repository = repository_at(door)
    door.fail("GET", "tags", with_headers(Link=f'<{place}>; rel="next"'))
    with pytest.raises(RegistryBroken, match="not a valid address"):
        repository.tags()


@pytest.mark.parametrize("size", ["1" + "0" * 400, "1" + "0" * 5000, str(2**63), "1e400", "-1"])
def test_an_absurd_size_in_a_manifest_is_refused(size: str) -> None:
    part = f'{{"mediaType": "a/b", "digest": "{BLOB.digest}", "size": {size}}}'
    text = f'{{"schemaVersion": 2, "config": {part}, "layers": []}}'
    with pytest.raises(RegistryBroken):
        read_document(text.encode())


def test_a_manifest_of_brackets_and_quotes_is_refused_in_linear_time() -> None:
    for data in (b'{"' * 20_000, b'"' * 40_001, b'{"a": "' + b"\\" * 40_000, b'"\\' * 20_000):
        start = time.process_time()
        with pytest.raises(RegistryBroken):
            read_document(data)
        assert time.process_time() - start < 1


def test_a_size_in_an_index_does_not_lift_the_bound_of_a_manifest(
    door: Door, tiny: TinyRegistry
) -> None:
    image = put_image(tiny, "v1", b"layer")
    index = index_json((image, "linux/amd64"))
    index["manifests"][0]["size"] = 1 << 60
    root = put(tiny, index)
    door.fail("GET", image.digest, with_body(b" " * (5 << 20)))
    with pytest.raises(RegistryBroken, match="larger than 4194304"):
        plan_pull(repository_at(door), root, "linux/amd64")


def test_a_blob_cut_in_the_middle_of_a_chunk_is_gone_on_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pipeline.core.net.timing.ATTEMPTS", 2)
    data, asked = random.Random(1).randbytes(300_000), list[bytes]()
    blob = Descriptor(media_type="a/b", digest=digest_of(data), size_bytes=len(data))

    def answer(conn: socket.socket, request: bytes) -> None:
        asked.append(request)
        if len(asked) == 1:
            hostile.sends(hostile.CHUNKED + b"493e0\r\n" + data[:290_000])(conn, request)
            return
        head = b"HTTP/1.1 206 Partial\r\nContent-Range: bytes 262144-299999/300000\r\n"
        hostile.body(data[262_144:], head)(conn, request)

    with hostile.hostile_server(answer) as url:
        receive_blob(hostile_repository(url), blob, tmp_path / "partial", NoBar())
    assert (tmp_path / "partial").read_bytes() == data
    assert [b"Range: bytes=262144-" in request for request in asked] == [False, True]


def test_a_blob_that_is_always_cut_in_a_chunk_is_unreachable_not_broken(tmp_path: Path) -> None:
    cut = hostile.sends(hostile.CHUNKED + b"1388\r\n" + DATA[:1000])
    with hostile.hostile_server(cut) as url:
        repository = hostile_repository(url)
        with pytest.raises(RegistryUnreachable, match="broke off"):
            receive_blob(repository, BLOB, tmp_path / "partial", NoBar())
        with pytest.raises(RegistryUnreachable, match="broke off"):
            receive_blob(repository, BLOB, None, NoBar())


def test_a_registry_that_says_when_to_come_back_in_a_ratelimit_is_obeyed(
    door: Door, tiny: TinyRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.core.net.timing.ATTEMPTS", 2)
    put_image(tiny, "v1", b"layer")
    repository = repository_at(door)
    door.fail("GET", "tags", status(429, RateLimit='"pulls";r=0;t=1'))
    start = time.monotonic()
    assert repository.tags() == ["v1"]
    assert time.monotonic() - start >= 1


def test_a_proxys_login_is_sent_for_registries_too(
    door: Door, tiny: TinyRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_image(tiny, "v1", b"layer")
    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv("http_proxy", door.url.replace("://", "://ann:s%40fe@"))
    client = RegistryClient(parse_reference("reg.example/team/app"), Access(insecure_http=True))
    assert Repository(client, NAME).tags() == ["v1"]
    login = "Basic " + base64.b64encode(b"ann:s@fe").decode()
    assert door.asked[-1].headers["proxy-authorization"] == login


def test_an_error_of_nonsense_is_still_one_line(door: Door) -> None:
    repository = repository_at(door)
    for data in (b'{"errors": ' + b"[" * 4000, b'{"errors": 7}', b'{"errors": [7]}', b"\xff"):
        door.fail("GET", "tags", status(418, data))
        with pytest.raises(RegistryBroken, match="answers 418"):
            repository.tags()


@pytest.mark.parametrize("name", PARTS)
def test_a_blob_is_gone_on_with_whatever_a_registry_makes_of_ranges(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.core.net.timing.ATTEMPTS", 9)
    monkeypatch.setattr("pipeline.core.net.download._PROGRESS_BYTES", 100)
    blob = Descriptor(media_type="a/b", digest=digest_of(WHOLE), size_bytes=len(WHOLE))
    (tmp_path / "partial").write_bytes(WHOLE[:1000])
    with hostile_server(resuming(name)) as url:
        receive_blob(hostile_repository(url), blob, tmp_path / "partial", NoBar())
    assert (tmp_path / "partial").read_bytes() == WHOLE


@pytest.mark.parametrize("link", ["?n=9&last=a", "list?last=a", "/v2/team/app/tags/list?last=a"])
def test_a_next_page_may_be_named_from_where_we_are(link: str) -> None:
    def answer(conn: socket.socket, request: bytes) -> None:
        place = request.split()[1]
        if not place.startswith(b"/v2/team/app/tags/list?"):
            conn.sendall(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")
        elif b"last" in place:
            hostile.body(b'{"tags": ["b"]}')(conn, request)
        else:
            more = f"Link: <{link}>; rel=next\r\n".encode()
            hostile.body(b'{"tags": ["a"]}', hostile.OK + more)(conn, request)

    with hostile_server(answer) as url:
        assert hostile_repository(url).tags() == ["a", "b"]


@pytest.mark.parametrize("name", ["tags", "referrers"])
def test_a_list_that_ends_in_the_middle_is_not_taken_for_the_whole(name: str) -> None:
    page = b'{"schemaVersion": 2, "manifests": [], "tags": ["a"]}'

    def answer(conn: socket.socket, request: bytes) -> None:
        if b"more" in request.split()[1]:
            conn.sendall(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")
        else:
            link = b"HTTP/1.1 200 OK\r\nLink: <?more>; rel=next\r\n"
            hostile.body(page, link)(conn, request)

    with (
        hostile_server(answer) as url,
        pytest.raises(RegistryBroken, match="ends in the middle"),
    ):
        ASKS[name](hostile_repository(url), Path())
