"""Hosts that fetch one set at the same time, over loopback: who sends what, who is believed."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import DigestMismatch, PipelineError
from pipeline.core.net.http import NetClient
from pipeline.core.net.settings import NetworkSettings
from pipeline.weights.disk.blocks import MOST_BLOCK_BYTES, all_blocks, block_bytes_of, hash_blocks
from pipeline.weights.disk.hashing import FileUnreadable
from pipeline.weights.place import LockedFolder, new_place
from pipeline.weights.serve import prover as proving
from pipeline.weights.serve.api import HubApi, ServedSets
from pipeline.weights.serve.http import Request, Response
from pipeline.weights.serve.prover import Prover
from pipeline.weights.serve.server import HubServer
from pipeline.weights.transfer import peers
from pipeline.weights.transfer.fetch import fetch_files
from pipeline.weights.transfer.peers import PeerGroup
from pipeline.weights.transfer.sources import find_routes, neighbour_route
from pipeline.weights.transfer.workers import Options
from tests.testbed.locked_set import contents, make_set, random_bytes

MB = 1 << 20
LARGE = {
    "model-1.safetensors": random_bytes(5 * MB + 17, 1),
    "model-2.safetensors": random_bytes(4 * MB, 2),
    "model-3.safetensors": random_bytes(3 * MB + 1, 3),
}
SMALL = {"config.json": b'{"model_type": "tiny"}', "empty.txt": b""}
Change = Callable[[Request, Response], Response]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "_TICK_S", 0.02)
    monkeypatch.setattr(peers, "ASK_S", 0.02)
    monkeypatch.setattr(peers, "_ASK_A_PEER_S", 0.0)


@dataclass
class Served:
    """A server, and how it changes its answers."""

    server: HubServer
    targets: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"


@contextmanager
def served(hub: HubApi, change: Change = lambda request, answer: answer) -> Iterator[Served]:
    def answer(request: Request) -> Response:
        running.targets.append(request.target)
        return change(request, hub.answer(request))

    running = Served(HubServer(answer, is_quiet=True))
    running.server.listen()
    thread = threading.Thread(target=running.server.run)
    thread.start()
    try:
        yield running
    finally:
        running.server.stop()
        thread.join(10)


@contextmanager
def origin_of(place: LockedFolder, change: Change = lambda r, a: a) -> Iterator[Served]:
    sets = ServedSets([place])
    prover = Prover(sets.files)
    prover.start()
    try:
        with served(HubApi(sets, prover), change) as running:
            for held in prover.files:
                assert held.judged.wait(20)
            yield running
    finally:
        prover.stop()


@dataclass
class Host:
    """One host: its folder, its group and its server."""

    place: LockedFolder
    group: PeerGroup
    client: NetClient
    share: Served

    def fetch(
        self, endpoint: str, *, jobs: int = 4, offline: bool = False, stall_s: float = 20.0
    ) -> None:
        routes = find_routes(
            self.client,
            self.place.lock,
            endpoint=endpoint,
            token=None,
            offline=offline,
            stall_s=stall_s,
            with_xet=False,
        )
        options = Options(jobs=jobs, first_wait_s=0.01)
        with self.group.running():
            fetch_files(
                self.place,
                self.place.lock.files,
                routes,
                client=self.client,
                options=options,
                group=self.group,
            )


class Rack(ExitStack):
    """Hosts that know each other, and what the set is."""

    def __init__(self, tmp_path: Path) -> None:
        super().__init__()
        self.tmp_path = tmp_path
        self.whole = make_set(tmp_path / "origin", SMALL, LARGE)
        self.hosts: list[Host] = []

    def origin(self, change: Change = lambda r, a: a) -> Served:
        return self.enter_context(origin_of(self.whole, change))

    def add(self, change: Change = lambda r, a: a) -> Host:
        """A host with an empty folder; `change` is what it makes of its answers."""
        place = new_place(
            self.tmp_path / f"host{len(self.hosts)}", self.whole.lock, hub_cache=False
        )
        client = NetClient(NetworkSettings(()))
        group = PeerGroup(place, client, [])
        hub = HubApi(ServedSets([place]), Prover([]), holder=group)
        host = Host(place, group, client, self.enter_context(served(hub, change)))
        self.hosts.append(host)
        self.introduce(*self.hosts)
        return host

    def introduce(self, *hosts: Host) -> None:
        """Every host gets the same list, with itself in it, as from one inventory."""
        for host in hosts:
            self.peer_of(host, *(other.share.url for other in hosts))

    def peer_of(self, host: Host, *urls: str) -> None:
        lock, client = self.whole.lock, host.client
        routes = [neighbour_route(client, lock, url, "--peers", 2.0) for url in urls]
        host.group.peers = [peers.Peer(route) for route in routes]

    def fetch(self, endpoint: str, *hosts: Host, **more: Any) -> None:
        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(h.fetch, endpoint, **more) for h in hosts or self.hosts]:
                done.result(60)

    def require_right(self, *hosts: Host) -> None:
        for host in hosts or self.hosts:
            assert contents(host.place.root) == contents(self.whole.root)


@pytest.fixture
def rack(tmp_path: Path) -> Iterator[Rack]:
    with Rack(tmp_path) as made:
        yield made


def blocks_asked(origin: Served) -> int:
    return sum("/resolve/" in target for target in origin.targets)


def test_hosts_that_fetch_together_ask_the_origin_for_little_more_than_one_copy(rack: Rack) -> None:
    for _ in range(4):
        rack.add()
    origin = rack.origin()
    rack.fetch(origin.url)
    rack.require_right()
    size = rack.whole.lock.size_bytes
    came = [(host.group.origin_bytes, host.group.peer_bytes) for host in rack.hosts]
    assert all(own + others == size for own, others in came)
    # loopback is so fast that two hosts may ask before they hear of each other
    assert sum(own for own, _ in came) <= 2 * size
    assert sum(others for _, others in came) >= 2 * size


def test_a_host_takes_all_from_a_peer_that_has_all_and_asks_the_origin_for_nothing(
    rack: Rack,
) -> None:
    first, second = rack.add(), rack.add()
    origin = rack.origin()
    rack.fetch(origin.url, first)
    before = blocks_asked(origin)
    rack.fetch(origin.url, second)
    rack.require_right()
    assert (second.group.origin_bytes, blocks_asked(origin)) == (0, before)


def test_a_slow_peer_is_waited_for_where_there_is_no_origin(rack: Rack) -> None:
    asked: list[str] = []

    def slow_at_first(request: Request, answer: Response) -> Response:
        if "/held/" in request.target and not asked:
            asked.append(request.target)
            time.sleep(1.5)
        return answer

    first, second = rack.add(slow_at_first), rack.add()
    rack.fetch(rack.origin().url, first)
    asked.clear()
    rack.fetch("http://127.0.0.1:9", second, offline=True)
    rack.require_right()
    assert asked


def test_a_plain_server_of_weights_is_a_peer_too(rack: Rack) -> None:
    host, plain = rack.add(), rack.origin()
    rack.peer_of(host, plain.url)
    rack.fetch("http://127.0.0.1:9", host, offline=True)
    rack.require_right()
    assert host.group.peer_bytes == rack.whole.lock.size_bytes


def _flipped(request: Request, answer: Response) -> Response:
    """Other bytes than the host has; of the last of a part, where nobody looks by chance."""
    if "/resolve/" not in request.target or not answer.length:
        return answer
    data, part = bytearray(answer.body), answer.part
    if part is not None:
        data = bytearray(os.pread(part.handle, part.length, part.start))
        os.close(part.handle)
    data[-1] ^= 1
    return Response(answer.status, answer.headers, bytes(data))


def test_a_peer_with_wrong_bytes_is_named_dropped_and_costs_nothing_but_its_blocks(
    rack: Rack, capsys: pytest.CaptureFixture[str]
) -> None:
    liar, honest, host = rack.add(_flipped), rack.add(), rack.add()
    origin = rack.origin()
    rack.fetch(origin.url, liar, honest)
    capsys.readouterr()
    before = blocks_asked(origin)
    rack.fetch(origin.url, host)
    rack.require_right(host)
    name = liar.share.url.removeprefix("http://")
    assert f"{name}: sent wrong bytes of " in capsys.readouterr().err
    assert [peer.lied for peer in host.group.peers if peer.route.name == name] == [True]
    # what it had to offer came from the other one, not from the origin
    assert blocks_asked(origin) == before


def test_where_all_peers_lie_everything_comes_from_the_origin(
    rack: Rack, capsys: pytest.CaptureFixture[str]
) -> None:
    liars, host = [rack.add(_flipped), rack.add(_flipped)], rack.add()
    origin = rack.origin()
    rack.fetch(origin.url, *liars)
    capsys.readouterr()
    rack.fetch(origin.url, host)
    rack.require_right(host)
    assert host.group.origin_bytes == rack.whole.lock.size_bytes
    assert capsys.readouterr().err.count("it is not asked any more") == 2


def test_a_peer_that_claims_blocks_it_does_not_have_is_left(rack: Rack) -> None:
    def boast(request: Request, answer: Response) -> Response:
        if "/held/" not in request.target or answer.status != 200:
            return answer
        says = json.loads(answer.body)
        files = rack.whole.lock.files
        says["files"] = {p.want: f"{all_blocks(p.size_bytes, MB):x}" for p in files}
        return Response(200, answer.headers, json.dumps(says).encode())

    rack.add(boast)
    host, origin = rack.add(), rack.origin()
    rack.fetch(origin.url, host)
    rack.require_right(host)
    assert host.group.origin_bytes == rack.whole.lock.size_bytes


def test_claims_of_a_host_that_receives_nothing_do_not_hold_up_the_others(
    rack: Rack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def claim(request: Request, answer: Response) -> Response:
        if "/held/" not in request.target or answer.status != 200:
            return answer
        says = json.loads(answer.body)
        files = rack.whole.lock.files
        says["asked"] = {p.want: f"{all_blocks(p.size_bytes, MB):x}" for p in files}
        return Response(200, answer.headers, json.dumps(says).encode())

    monkeypatch.setattr(peers, "_IDLE_S", 0.5)
    rack.add(claim)
    host, origin = rack.add(), rack.origin()
    rack.fetch(origin.url, host)
    rack.require_right(host)


def test_a_peer_that_sends_nothing_is_left(rack: Rack) -> None:
    gone = threading.Event()

    def stall(request: Request, answer: Response) -> Response:
        if answer.part is not None:
            gone.wait(20)
        return answer

    slow, host = rack.add(stall), rack.add()
    origin = rack.origin()
    rack.fetch(origin.url, slow)
    try:
        rack.fetch(origin.url, host, stall_s=1.0)
    finally:
        gone.set()
    rack.require_right()
    assert host.group.origin_bytes == rack.whole.lock.size_bytes


def test_a_peer_that_disappears_is_no_error(rack: Rack) -> None:
    first, second = rack.add(), rack.add()
    origin = rack.origin()
    rack.fetch(origin.url, first)
    # it hands on some blocks, and is gone
    rack.peer_of(second, first.share.url)
    leaving = threading.Timer(0.1, first.share.server.close)
    leaving.start()
    rack.fetch(origin.url, second)
    leaving.join()
    rack.require_right()


def test_peers_that_are_not_there_at_all_are_no_error(rack: Rack) -> None:
    host, origin = rack.add(), rack.origin()
    rack.peer_of(host, "http://127.0.0.1:9", "http://127.0.0.1:10")
    rack.fetch(origin.url, host)
    rack.require_right()


def test_without_block_lists_whole_files_are_exchanged(rack: Rack) -> None:
    """As with the Hub itself for an origin, which knows nothing of blocks."""

    def no_lists(request: Request, answer: Response) -> Response:
        # as slow as a line is: over loopback all is there before a host hears of the others
        time.sleep(0.1 if "/resolve/" in request.target else 0)
        return Response(404) if "/blocks/" in request.target else answer

    for _ in range(3):
        rack.add()
    origin = rack.origin(no_lists)
    rack.fetch(origin.url)
    rack.require_right()
    assert sum(host.group.peer_bytes for host in rack.hosts) > 0


@pytest.mark.parametrize("first_is_origin", [True, False])
def test_a_false_block_list_costs_time_only(
    rack: Rack, capsys: pytest.CaptureFixture[str], first_is_origin: bool
) -> None:
    def lie(request: Request, answer: Response) -> Response:
        if "/blocks/" not in request.target or answer.status != 200:
            return answer
        says = json.loads(answer.body)
        says["sha256"] = ["0" * 64 for _ in says["sha256"]]
        return Response(200, answer.headers, json.dumps(says).encode())

    def no_lists(request: Request, answer: Response) -> Response:
        return Response(404) if "/blocks/" in request.target else answer

    peer, host = rack.add() if first_is_origin else rack.add(lie), rack.add()
    origin = rack.origin(lie if first_is_origin else no_lists)
    rack.fetch(origin.url, peer)
    rack.fetch(origin.url, host)
    rack.require_right()
    said = capsys.readouterr().err
    # who gave the list is named, or the peer whose right blocks contradict it
    assert "is of other bytes than the locked ones" in said or "sent wrong bytes" in said


def test_an_origin_with_wrong_bytes_is_an_error_and_nothing_wrong_is_kept(rack: Rack) -> None:
    host, origin = rack.add(), rack.origin(_flipped)
    with pytest.raises(PipelineError) as raised:
        rack.fetch(origin.url, host)
    assert isinstance(raised.value, DigestMismatch)
    assert not list(host.place.root.glob("*.safetensors"))


def test_a_run_that_was_killed_hands_on_what_it_had_and_fetches_only_the_rest(rack: Rack) -> None:
    first, second = rack.add(), rack.add()
    origin = rack.origin()
    pin = next(p for p in rack.whole.lock.files if p.path == "model-1.safetensors")
    # the first two blocks and a half, as a killed run left them
    folder = first.place.partial_folder
    folder.mkdir(parents=True)
    data = LARGE[pin.path]
    (folder / pin.want).write_bytes(data[: 2 * MB + 99] + bytes(len(data) - 2 * MB - 99))
    (folder / f"{pin.want}.journal").write_text(f"0 {2 * MB + 99}\n", encoding="ascii")
    rack.fetch(origin.url, first)
    assert first.group.origin_bytes == rack.whole.lock.size_bytes - 2 * MB
    rack.fetch(origin.url, second)
    rack.require_right()


def test_only_verified_blocks_are_handed_on(rack: Rack) -> None:
    host = rack.add()
    pin = next(p for p in rack.whole.lock.files if p.path == "model-1.safetensors")
    with pytest.raises(FileUnreadable, match="is still being fetched"):
        host.group.open_held(pin, 0, MB)
    hub = HubApi(ServedSets([host.place]), Prover([]), holder=host.group)
    asked = Request("GET", f"/org/tiny/resolve/main/{pin.path}", {"host": "localhost"})
    assert hub.answer(asked).status == 503


def test_a_host_waits_for_those_that_still_need_it(rack: Rack) -> None:
    first, second = rack.add(), rack.add()
    origin = rack.origin()
    rack.fetch(origin.url, first)
    with first.group.running():
        over = threading.Thread(target=first.group.wait)
        over.start()
        # the second has only begun: it answers, and received something a moment ago
        over.join(1.0)
        assert over.is_alive()
        rack.fetch(origin.url, second)
        over.join(10)
        assert not over.is_alive()


@pytest.mark.parametrize(
    ("query", "status", "why"),
    [
        ("?block_bytes=1048576", 200, ""),
        ("?block_bytes=1048577", 400, "is not a power of two"),
        ("?block_bytes=524288", 400, "is not a power of two from 1 MiB"),
        ("?block_bytes=4194304", 409, "the blocks here have 1048576 bytes"),
        ("?block_bytes=x", 400, "is not a number"),
    ],
)
def test_a_question_about_blocks_of_another_size_is_refused(
    rack: Rack, query: str, status: int, why: str
) -> None:
    host = rack.add()
    hub = HubApi(ServedSets([host.place]), Prover([]), holder=host.group)
    commit = rack.whole.lock.commit
    got = hub.answer(
        Request("GET", f"/api/models/org/tiny/held/{commit}{query}", {"host": "localhost"})
    )
    assert (got.status, why in got.headers.get("X-Error-Message", "")) == (status, True)


def test_a_list_of_a_file_that_is_not_proved_is_refused(rack: Rack) -> None:
    path = rack.whole.root / "model-1.safetensors"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    with origin_of(rack.whole) as origin:
        host = rack.add()
        routes = [neighbour_route(host.client, rack.whole.lock, origin.url, "--from")]
        pins = {pin.path: pin for pin in rack.whole.lock.files}
        assert host.group.blocks(routes[0], pins["model-1.safetensors"]) is None
        assert len(host.group.blocks(routes[0], pins["model-2.safetensors"]) or ()) == 4


def test_blocks_of_a_set_have_one_size_and_a_large_set_has_large_ones(tmp_path: Path) -> None:
    assert [block_bytes_of(n) for n in (0, MB, 2048 * MB, 2048 * MB + 1)] == [MB, MB, MB, 2 * MB]
    assert block_bytes_of(600_000_000_000) == MOST_BLOCK_BYTES
    path = tmp_path / "file"
    path.write_bytes(b"x" * (MB + 1))
    handle = os.open(path, os.O_RDONLY)
    assert len(hash_blocks(handle, MB + 1, MB).sha256) == 2
    os.close(handle)
    assert [all_blocks(n, MB) for n in (0, 1, MB, MB + 1)] == [0, 1, 1, 3]
