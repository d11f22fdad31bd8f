"""A Hub, a mirror or a neighbour that means harm, asked for the bytes of a file."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

import pytest

from pipeline.core.errors import PipelineError
from pipeline.core.net.http import NetClient
from pipeline.core.net.settings import NetworkSettings
from pipeline.weights.model import FilePin, WeightsLock, WeightsSpec, sealed_weights_lock
from pipeline.weights.place import new_place
from pipeline.weights.transfer.fetch import fetch_files, fetch_range
from pipeline.weights.transfer.router import AttemptFailed, NotAvailable
from pipeline.weights.transfer.sources import HttpRoute, HubRepository, XetRoute, find_routes
from pipeline.weights.transfer.workers import Options
from tests.testbed import hostile
from tests.testbed.hostile import hostile_server
from tests.unit.fetch.test_hostile_sources import WHOLE, resuming

COMMIT = "a" * 40
PIN = FilePin(path="model.safetensors", size_bytes=5000, sha256="b" * 64)


def lock_of(*pins: FilePin) -> WeightsLock:
    about = "A set of weights that is only here for the tests."
    names = {"name": "tiny", "repository": "org/tiny", "format": "safetensors", "quant": "bf16"}
    return sealed_weights_lock(
        WeightsSpec.model_validate({**names, "about": about}), COMMIT, list(pins)
    )


@pytest.fixture(autouse=True)
def one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.weights.transfer.router.ATTEMPTS", 1)
    monkeypatch.setenv("no_proxy", "*")


def test_no_hostile_answer_leaves_a_file_or_a_defect(tmp_path: Path) -> None:
    def ask(url: str) -> object:
        folder = tmp_path / url.rpartition(":")[2]
        client, lock = NetClient(NetworkSettings(indexes=())), lock_of(PIN)
        there = HubRepository(url, "org/tiny", COMMIT, "hf_secret")
        routes = [HttpRoute(client, there, "plain HTTP", 0.2)]
        place, options = (
            new_place(folder, lock, hub_cache=False),
            Options(jobs=1, first_wait_s=0.001),
        )
        return fetch_files(place, [PIN], routes, client=client, options=options)

    assert hostile.endings(ask, hostile.ANSWERS) == {}
    assert list(tmp_path.rglob(PIN.path)) == []


def test_no_hostile_answer_about_xet_is_a_defect() -> None:
    client = NetClient(NetworkSettings(indexes=()))
    for name, script in hostile.ANSWERS.items():
        if name in hostile.ENDLESS and "head" not in name and "silence" not in name:
            continue  # a HEAD has no body that could be endless
        with hostile_server(script) as url:
            there = HubRepository(url, "org/tiny", COMMIT, "hf_secret")
            with pytest.raises((AttemptFailed, NotAvailable)):
                XetRoute(client, there, 0.2, (None, None)).open(PIN, 0, 10)


@pytest.mark.parametrize(
    "address", ["http://[", "http://x:99999", "http://ann:s3cret@[", "ftp://x"]
)
def test_a_neighbour_with_a_malformed_address_is_named_without_its_password(address: str) -> None:
    client = NetClient(NetworkSettings(indexes=()))
    with pytest.raises(PipelineError, match="--from") as caught:
        find_routes(client, lock_of(PIN), endpoint="http://x", token=None, neighbours=[address])
    assert "s3cret" not in str(caught.value)
    assert caught.value.exit_code > 1


@pytest.mark.parametrize("endpoint", ["http://[", "http://x:99999", "nowhere"])
def test_an_endpoint_that_is_no_address_ends_without_a_defect(
    endpoint: str, tmp_path: Path
) -> None:
    client, lock = NetClient(NetworkSettings(indexes=())), lock_of(PIN)
    routes = find_routes(client, lock, endpoint=endpoint, token="t", with_xet=False)
    place, options = new_place(tmp_path, lock, hub_cache=False), Options(jobs=1, first_wait_s=0.001)
    with pytest.raises(PipelineError, match="not a valid address"):
        fetch_files(place, [PIN], routes, client=client, options=options)


PINNED = FilePin(path="m", size_bytes=len(WHOLE), sha256=hashlib.sha256(WHOLE).hexdigest())


@pytest.mark.parametrize("name", ["the rest", "less than was asked for", "cut off once"])
def test_a_range_comes_in_as_many_parts_as_the_server_likes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.weights.transfer.router.ATTEMPTS", 3)
    client = NetClient(NetworkSettings(indexes=()))
    with hostile_server(resuming(name)) as url:
        route = HttpRoute(client, HubRepository(url, "org/tiny", COMMIT), "plain HTTP", 20)
        options = Options(first_wait_s=0.001)
        pieces = fetch_range([route], PINNED, 1000, 4096, client=client, options=options)
        assert b"".join(pieces) == WHOLE[1000:]


@pytest.mark.parametrize(
    "name", ["of a file of another size", "backwards", "without a range", "from elsewhere"]
)
def test_a_range_that_is_not_the_one_asked_for_is_not_used(name: str) -> None:
    client = NetClient(NetworkSettings(indexes=()))
    with hostile_server(resuming(name)) as url:
        route = HttpRoute(client, HubRepository(url, "org/tiny", COMMIT), "plain HTTP", 20)
        with pytest.raises(PipelineError):
            b"".join(fetch_range([route], PINNED, 1000, 4096, client=client))


def test_a_login_in_the_endpoint_is_sent_where_there_is_no_token() -> None:
    heads: list[bytes] = []

    def answer(conn: socket.socket, request: bytes) -> None:
        heads.append(request)
        hostile.body(WHOLE)(conn, request)

    with hostile_server(answer) as url:
        mirror = url.replace("//", "//ann:s3cret@")
        for token in (None, "hf_token"):
            there = HubRepository(mirror, "org/tiny", COMMIT, token)
            HttpRoute(NetClient(NetworkSettings(indexes=())), there, "plain HTTP", 20).open(
                PINNED, 0, 4096
            )
    assert b"Authorization: Basic YW5uOnMzY3JldA==" in heads[0]
    assert b"Authorization: Bearer hf_token" in heads[1]


class _Answered:
    def __init__(self, status: int, location: str = "") -> None:
        self.status, self._location = status, location
        self.headers: dict[str, str] = {}

    def header(self, name: str) -> str:
        return self._location if name == "Location" else ""

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("home", "there", "is_shown"),
    [
        ("http://hub.test", "https://hub.test", True),  # the same host, one step up
        ("https://hub.test", "https://hub.test", True),
        ("http://hub.test", "https://other.test", False),
        ("http://hub.test:8080", "https://hub.test", False),
        ("http://hub.test", "https://hub.test:8443", False),
    ],
)
def test_a_token_goes_where_the_listing_sends_it_too(
    monkeypatch: pytest.MonkeyPatch, home: str, there: str, is_shown: bool
) -> None:
    shown: list[bool] = []

    def ask(method: str, url: str, *, headers: dict[str, str], **rest: object) -> _Answered:
        shown.append("Authorization" in headers)
        return _Answered(302, f"{there}/elsewhere") if len(shown) == 1 else _Answered(404)

    client = NetClient(NetworkSettings(indexes=()))
    monkeypatch.setattr(client, "ask", ask)
    route = HttpRoute(client, HubRepository(home, "org/tiny", COMMIT, "hf_token"), "plain HTTP")
    with pytest.raises(NotAvailable):
        route.open(PINNED, 0, 10)
    assert shown == [True, is_shown]
