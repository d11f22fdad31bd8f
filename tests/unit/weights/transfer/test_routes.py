from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.core.errors import (
    DigestMismatch,
    HubBroken,
    HubRefused,
    OfflineMiss,
    SourceUnreachable,
)
from pipeline.core.net.http import NetClient
from pipeline.core.net.timing import Watchdog, retry_after_s
from pipeline.weights.model import FilePin
from pipeline.weights.transfer.fetch import fetch_files, fetch_range
from pipeline.weights.transfer.router import (
    FAILURES,
    WRONG_ANSWERS,
    AttemptFailed,
    Attempts,
    ByteStream,
    NotAvailable,
    Route,
    Router,
)
from pipeline.weights.transfer.sources import (
    HttpRoute,
    HubRepository,
    XetRoute,
    check_answer,
)
from pipeline.weights.transfer.workers import Options, Throttle
from tests.testbed import hub_faults as fault
from tests.testbed.hub import ALWAYS
from tests.unit.weights.conftest import BIG, RANGE_BYTES, TOKEN, Bed, big_bytes

PIN = FilePin(path="a", size_bytes=1, sha256="a" * 64)


class Named:
    def __init__(self, name: str, *, is_shared: bool = False) -> None:
        self.name, self.is_shared = name, is_shared

    def open(self, pin: FilePin, start: int, stop: int) -> ByteStream:
        raise AttemptFailed("never")


def names(router: Router, tries: int = 4, costs: int = 2) -> list[str]:
    """Who is asked in turn where every attempt fails; two tries each are a turn."""
    asked, failed = list[str](), Counter[Route]()
    for _ in range(tries):
        route = router.pick(PIN, failed)
        router.release(route)
        failed[route] += costs
        asked.append(route.name)
    return asked


def first(router: Router, pin: FilePin = PIN) -> str:
    """Who is asked for a new range; the attempt stays open."""
    return router.pick(pin, Counter()).name


STALL, QUICK = AttemptFailed("slow", is_stall=True), AttemptFailed("cut")


def test_every_failed_turn_takes_the_next_route() -> None:
    router = Router([Named("http"), Named("xet")])
    assert names(router) == ["http", "xet", "http", "xet"]
    assert names(router, costs=1) == ["http", "http", "xet", "xet"]


def test_a_route_that_stalls_twice_is_asked_last_until_it_delivers() -> None:
    http, xet = Named("http"), Named("xet")
    router = Router([http, xet])
    router.failed(http, PIN, STALL)
    assert first(router) == "http"
    router.failed(http, PIN, STALL)
    assert names(router, 2) == ["xet", "http"]
    router.delivered(http)
    assert first(router) == "http"


def test_a_route_without_the_file_is_not_asked_again() -> None:
    http, xet = Named("http"), Named("xet")
    router = Router([http, xet])
    router.mark_missing(http, PIN, NotAvailable(HubRefused("gated")))
    assert names(router) == ["xet"] * 4


def test_the_most_telling_reason_is_given_when_no_route_is_left() -> None:
    routes = [Named("folder"), Named("http"), Named("xet")]
    router = Router(routes)
    router.mark_missing(routes[0], PIN, NotAvailable(OfflineMiss("not in the folder")))
    router.mark_missing(routes[1], PIN, NotAvailable(DigestMismatch("another file")))
    router.mark_missing(routes[2], PIN, NotAvailable(SourceUnreachable("not offered")))
    with pytest.raises(DigestMismatch):
        first(router)


def two_named() -> tuple[Router, Named, Named]:
    """Two sources of the user's, and the Hub."""
    one, other = Named("one", is_shared=True), Named("other", is_shared=True)
    return Router([one, other, Named("hub")]), one, other


def test_named_sources_share_the_ranges_and_the_hub_gets_none() -> None:
    router, _, _ = two_named()
    assert [first(router) for _ in range(6)] == ["one", "other"] * 3


def test_a_source_that_is_free_again_gets_the_next_range() -> None:
    router, _, other = two_named()
    for _ in range(4):
        first(router)
    for _ in range(2):  # the faster one has delivered
        router.release(other)
    assert first(router) == "other"


def test_after_a_failure_the_other_source_comes_before_the_hub() -> None:
    router, _, _ = two_named()
    first(router)
    assert names(router, 3) == ["other", "one", "hub"]


def test_a_source_that_fails_again_and_again_is_asked_last_until_it_delivers() -> None:
    router, one, _ = two_named()
    for _ in range(FAILURES - 1):
        router.failed(one, PIN, QUICK)
    assert names(router, 1) == ["one"]
    router.failed(one, PIN, QUICK)
    assert names(router, 3) == ["other", "hub", "one"]
    router.delivered(one)
    assert first(router) == "one"


def test_a_file_that_arrived_wrong_comes_from_one_source_at_a_time() -> None:
    router, _, _ = two_named()
    assert router.arrived_wrong(PIN)
    for alone in ("one", "other", "hub"):
        assert [first(router), first(router)] == [alone] * 2
        assert router.arrived_wrong(PIN) == (alone != "hub")


def test_a_source_that_sent_a_wrong_file_alone_is_not_asked_again() -> None:
    router, _, _ = two_named()
    for _ in range(2):
        assert router.arrived_wrong(PIN)
    other_file = PIN.model_copy(update={"sha256": "b" * 64})
    assert set(names(router, 6)) == {"other", "hub"}
    assert first(router, other_file) == "other"


def test_a_source_is_not_blamed_for_a_file_that_arrived_wrong_once() -> None:
    router, _, _ = two_named()
    assert router.arrived_wrong(PIN)
    assert first(router) == "one"


def test_the_only_source_is_asked_once_more_after_a_wrong_file() -> None:
    router = Router([Named("hub")])
    assert router.arrived_wrong(PIN)
    assert first(router) == "hub"
    assert not router.arrived_wrong(PIN)
    assert first(router) == "hub"


def wait_left_s(router: Router, route: Route) -> float:
    return router.not_before.get(route, 0.0) - time.monotonic()


def test_a_route_that_is_put_off_is_left_alone_that_long() -> None:
    http = Named("http")
    router = Router([http])
    assert wait_left_s(router, http) <= 0
    for wait_s in (5, 1):  # asked by two connections
        attempts = Attempts(router, threading.Event(), 0.0)
        attempts._route = http
        attempts.failed(PIN, AttemptFailed("busy", wait_s=wait_s))
    assert 4 < wait_left_s(router, http) <= 5


class Gone(Named):
    def open(self, pin: FilePin, start: int, stop: int) -> ByteStream:
        raise AttemptFailed(self.name, is_unreached=True)


def test_where_nobody_is_there_each_is_asked_whatever_others_find_out_meanwhile() -> None:
    near, xet, hub = Gone("near"), Gone("xet"), Gone("hub")
    router, asked = Router([near, xet, hub]), list[str]()
    attempts = Attempts(router, threading.Event(), first_wait_s=0.0)

    def ask() -> None:
        with pytest.raises(AttemptFailed) as gone:
            attempts.open(PIN, 0, 1)
        asked.append(str(gone.value))
        attempts.failed(PIN, gone.value)

    for _ in range(2):
        ask()
    for _ in range(FAILURES):  # by another connection
        router.failed(xet, PIN, QUICK)
    ask()
    with pytest.raises(SourceUnreachable, match=r"\(hub\)"):
        ask()
    assert asked == ["near", "xet", "hub", "near"]


@dataclass
class Stream:
    """What `hf_xet` hands out: an iterator of pieces that can be cancelled."""

    pieces: list[bytes]
    stalls: bool = False
    cancelled: threading.Event = field(default_factory=threading.Event)

    def __iter__(self) -> Iterator[bytes]:
        yield from self.pieces
        if self.stalls:
            self.cancelled.wait(10)

    def cancel(self) -> None:
        self.cancelled.set()


class Store:
    """A Xet store of the bed's bytes, by the Hub's name for them."""

    def __init__(self, bed: Bed, stalls: bool = False, refuses: bool = False) -> None:
        self._bed, self._stalls, self._refuses = bed, stalls, refuses
        self.asked: list[tuple[int, int]] = []

    def download_stream(self, info: Any, start: int, end: int) -> Stream:
        if self._refuses:
            raise RuntimeError("no token")
        data = next(d for p, d in self._bed.files.items() if self._bed.pin(p).want == info[0])
        self.asked.append((start, end))
        keep = end - 10 if self._stalls else end
        pieces = [data[at : min(at + 7_000, keep)] for at in range(start, keep, 7_000)]
        return Stream(pieces, self._stalls)


def both(bed: Bed, client: NetClient, store: Any, stall_s: float = 20.0) -> tuple[Route, Route]:
    there = HubRepository(bed.hub.url, "org/tiny", bed.commit, TOKEN)
    http = HttpRoute(client, there, "plain HTTP", stall_s)
    return http, XetRoute(client, there, stall_s, (store, lambda *name_and_size: name_and_size))


def pull(bed: Bed, client: NetClient, routes: tuple[Route, ...]) -> None:
    options = Options(jobs=2, range_bytes=RANGE_BYTES, first_wait_s=0.01)
    fetch_files(bed.place(), bed.lock().files, routes, client=client, options=options)
    bed.require_right()


def test_where_plain_http_stalls_xet_takes_over_and_stays(bed: Bed) -> None:
    bed.hub.xet = True
    bed.hub.fail(BIG, fault.stall(len(bed.files[BIG]) // 10), times=ALWAYS)
    for at in range(0, len(bed.files[BIG]), RANGE_BYTES):
        bed.hub.fail(BIG, fault.stall(at + 100), times=ALWAYS)
    client, store = NetClient(bed.settings), Store(bed)
    start = time.monotonic()
    pull(bed, client, both(bed, client, store, stall_s=1.0))
    assert store.asked
    # two connections stall a few times at most; after that nobody waits for plain HTTP again
    assert time.monotonic() - start < 20


def test_where_plain_http_only_fails_xet_takes_over(bed: Bed) -> None:
    bed.hub.xet = True
    bed.hub.fail(BIG, fault.status(503), times=ALWAYS)
    client, store = NetClient(bed.settings), Store(bed)
    pull(bed, client, both(bed, client, store))
    assert sum(stop - start for start, stop in store.asked) == len(bed.files[BIG])


def test_where_xet_stalls_plain_http_takes_over(bed: Bed) -> None:
    bed.hub.xet = True
    client, store = NetClient(bed.settings), Store(bed, stalls=True)
    http, xet = both(bed, client, store, stall_s=1.0)
    pull(bed, client, (xet, http))
    assert store.asked
    assert bed.hub.sent_bytes(BIG) > 0


def test_a_xet_store_that_refuses_leaves_it_to_plain_http(bed: Bed) -> None:
    bed.hub.xet = True
    client = NetClient(bed.settings)
    http, xet = both(bed, client, Store(bed, refuses=True))
    pull(bed, client, (xet, http))
    assert bed.hub.sent_bytes(BIG) == len(bed.files[BIG])


def test_the_reason_of_xet_is_reported_where_plain_http_fails_too(bed: Bed) -> None:
    bed.hub.xet = True
    bed.hub.fail(BIG, fault.status(503), times=ALWAYS)
    client = NetClient(bed.settings)
    http, xet = both(bed, client, Store(bed, refuses=True))
    for routes in ((http, xet), (xet, http)):
        with pytest.raises(SourceUnreachable, match=r"no token \(Xet\).*503 \(plain HTTP\)"):
            pull(bed, client, routes)


def test_the_reason_of_xet_is_reported_where_the_hub_has_no_such_file(bed: Bed) -> None:
    bed.hub.xet = True
    bed.hub.fail(BIG, fault.status(404), times=ALWAYS)
    client = NetClient(bed.settings)
    with pytest.raises(
        HubRefused, match=r"404 \(plain HTTP\); the Xet store refuses: no token \(Xet\)"
    ):
        pull(bed, client, both(bed, client, Store(bed, refuses=True)))


def test_a_busy_hub_is_not_taken_for_one_without_xet(bed: Bed) -> None:
    bed.hub.xet = True
    bed.hub.fail(BIG, fault.status(429, RateLimit='"resolvers";r=0;t=1'), stage="resolve")
    client, store = NetClient(bed.settings), Store(bed)
    _, xet = both(bed, client, store)
    with pytest.raises(AttemptFailed) as caught:
        xet.open(bed.pin(), 0, 10)
    assert caught.value.wait_s == 1
    xet.open(bed.pin(), 0, 10)
    assert store.asked == [(0, 10)]


def test_a_file_that_is_not_offered_through_xet_comes_by_plain_http(bed: Bed) -> None:
    client, store = NetClient(bed.settings), Store(bed)
    http, xet = both(bed, client, store)
    pull(bed, client, (xet, http))
    assert store.asked == []


def test_the_real_xet_client_without_a_token_is_a_refusal(
    bed: Bed,
) -> None:
    pytest.importorskip("hf_xet", reason="There is no hf_xet for this processor.")
    bed.hub.xet = True
    client = NetClient(bed.settings)
    there = HubRepository(bed.hub.url, "org/tiny", bed.commit, TOKEN)
    with pytest.raises(NotAvailable, match="Xet store refuses"):
        XetRoute(client, there, 5).open(bed.pin(), 0, 10)
    token_calls = [a for a in bed.hub.asked if a.stage == "xet"]
    assert token_calls
    assert all(a.origin == "hub" and a.has_token for a in token_calls)


def test_a_connection_that_only_drips_is_cut(bed: Bed) -> None:
    bed.publish({"a.bin": big_bytes(400_000)})
    bed.hub.bytes_per_s = 50_000  # a piece of 256 KiB takes five seconds
    client = NetClient(bed.settings)
    there = HubRepository(bed.hub.url, "org/tiny", bed.commit, TOKEN)
    route = HttpRoute(client, there, "plain HTTP", 1.0)
    body = route.open(bed.pin("a.bin"), 0, 400_000)
    with pytest.raises(AttemptFailed) as caught:
        body.readinto(memoryview(bytearray(400_000)))
    assert caught.value.is_stall


def test_the_watchdog_cuts_what_is_late_and_nothing_else() -> None:
    late, soon = threading.Event(), threading.Event()
    dog = Watchdog()
    dog.begin(1, late.set, 0.2)
    dog.begin(2, soon.set, 20)
    assert dog.end(2)
    assert late.wait(20)
    assert not dog.end(1)
    assert not soon.is_set()


def test_a_throttle_counts_all_threads_together() -> None:
    throttle = Throttle(100_000, threading.Event())
    start = time.monotonic()

    def work() -> None:
        for _ in range(4):
            throttle.take(5_000)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.5 <= time.monotonic() - start < 10


def test_a_range_ends_with_the_reason_of_the_last_route(bed: Bed) -> None:
    client = NetClient(bed.settings)
    bed.hub.fail(BIG, fault.status(500), times=ALWAYS)
    http, xet = both(bed, client, Store(bed))
    with pytest.raises(SourceUnreachable, match="500"):
        list(
            fetch_range(
                [http, xet], bed.pin(), 0, 10, client=client, options=Options(first_wait_s=0.01)
            )
        )


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("7", 7),
        ("", None),
        ("soon", None),
        ("-1", None),
        ("9" * 5000, None),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0),
    ],
)
def test_a_pause_may_be_seconds_or_a_date(text: str, wanted: float | None) -> None:
    assert retry_after_s(text) == wanted


class Wrong(Named):
    asked = 0

    def open(self, pin: FilePin, start: int, stop: int) -> ByteStream:
        self.asked += 1
        raise AttemptFailed(f"{pin.path}: sent another range", error_type=HubBroken)


def _ask_all(router: Router, connections: int, failure: AttemptFailed | None = None) -> None:
    """Each connection in turn, until one of them gives up."""
    for attempts in [Attempts(router, threading.Event(), 0.01) for _ in range(connections)] * 7:
        try:
            attempts.open(PIN, 0, 1)
        except AttemptFailed as failed:
            attempts.failed(PIN, failure or failed)


def test_a_source_that_always_answers_wrong_is_given_up_after_three_requests_in_all() -> None:
    hub, begun = Wrong("hub"), time.monotonic()
    with pytest.raises(HubBroken, match="a: sent another range"):
        _ask_all(Router([hub]), 8)
    assert hub.asked == WRONG_ANSWERS
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("asked_s", [1e9, 601.0])
def test_a_source_that_asks_for_days_is_not_waited_for(asked_s: float) -> None:
    hub = Named("hub")
    router, begun = Router([hub]), time.monotonic()
    with pytest.raises(SourceUnreachable, match="busy"):
        _ask_all(router, 1, AttemptFailed("a: busy", wait_s=asked_s))
    assert wait_left_s(router, hub) <= 0
    assert time.monotonic() - begun < 20


def test_a_source_that_asks_for_a_moment_is_left_alone_for_it() -> None:
    hub = Named("hub")
    router = Router([hub])
    attempts = Attempts(router, threading.Event(), 0.0)
    with pytest.raises(AttemptFailed):
        attempts.open(PIN, 0, 1)
    attempts.failed(PIN, AttemptFailed("a: busy", wait_s=30.0))
    assert 29 < wait_left_s(router, hub) <= 30


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("the file is refused: it is damaged", "409: the file is refused: it is damaged"),
        ("a\x1b[2Jb", r"409: a\[2Jb"),
        ("", "409$"),
    ],
)
def test_what_a_server_says_of_a_file_that_it_refuses_is_said(said: str, shown: str) -> None:
    answer = SimpleNamespace(
        status=409, headers={}, header=lambda name: said if name == "X-Error-Message" else ""
    )
    with pytest.raises(NotAvailable, match=shown) as refused:
        check_answer(cast(Any, answer), PIN, 0, 1)
    assert refused.value.only_this_file
    assert ("no such file" in refused.value.error.hint) == (not said)
