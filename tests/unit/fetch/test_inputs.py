from __future__ import annotations

import errno
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.artifacts.store.store import Store, open_store
from pipeline.core.errors import (
    DigestMismatch,
    DiskFull,
    Interrupted,
    MirrorUnknown,
    OfflineMiss,
    PipelineError,
    SourceUnreachable,
)
from pipeline.core.net import timing
from pipeline.core.net.http import NetClient
from pipeline.core.net.settings import NetworkSettings
from pipeline.core.net.timing import HttpLimits
from pipeline.images.fetch.inputs import Fetcher, collect
from pipeline.images.fetch.sources import DebianMirror, Sources
from pipeline.images.lock.model import Pin, WheelPin
from tests.testbed import fault_server as faults
from tests.testbed.fault_server import Fault, FaultServer
from tests.unit.support import deb_pin_for, pin_for

NAME = "thing-1.0-py3-none-any.whl"
DATA = bytes(range(256)) * 2000
OTHER = DATA[:-1] + b"?"
DEAD = "http://127.0.0.1:9/simple/"


class Count:
    """A bar that only counts; it must end at the size of what was fetched."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self._lock = threading.Lock()

    def advance(self, n_bytes: int) -> None:
        with self._lock:
            self.n_bytes += n_bytes


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LONGEST_WAIT_S", 0.05)


@pytest.fixture
def store(store_root: Path) -> Store:
    return open_store(store_root)


def fetcher_of(
    store: Store,
    settings: NetworkSettings,
    *,
    offline: bool = False,
    mirror: Callable[[], DebianMirror] | None = None,
    silence_s: float = 20,
) -> Fetcher:
    client = NetClient(settings, first_wait_s=0.001, limits=HttpLimits(silence_s=silence_s))
    return Fetcher(store, client, Sources(client, mirror), offline=offline)


def from_index(server: FaultServer) -> NetworkSettings:
    return NetworkSettings(indexes=(server.index,))


def fetch(store: Store, settings: NetworkSettings, pin: Pin | None = None, fault: str = "") -> int:
    """Fetch one pin and judge the store; returns what the bar counted."""
    pin, bar = pin or pin_for(DATA), Count()
    # what answers well has as long as a busy machine may take
    silence_s = 1 if fault in ("silence", "a stall in the middle") else 20
    try:
        path = fetcher_of(store, settings, silence_s=silence_s).fetch(pin, bar)
    except PipelineError:
        assert bar.n_bytes == 0
        assert not store.input_path(pin.sha256).exists()
        raise
    assert path == store.input_path(pin.sha256)
    assert path.read_bytes() == DATA
    assert not store.partial_path(pin.sha256).exists()
    assert bar.n_bytes == pin.size_bytes
    return bar.n_bytes


def kept_partials(store: Store) -> list[bytes]:
    contents = [path.read_bytes() for path in (store.root / "partial").iterdir()]
    return [data for data in contents if data]


@pytest.mark.parametrize("page", [faults.JSON_PAGE, faults.HTML_PAGE])
@pytest.mark.parametrize("absolute", [True, False])
def test_a_file_is_found_through_the_index(
    store: Store, server: FaultServer, page: str, absolute: bool
) -> None:
    server.page_type, server.absolute_links = page, absolute
    server.add(NAME, DATA)
    fetch(store, from_index(server))


RECOVERABLE: dict[str, tuple[Fault, int]] = {
    "two 500s": (faults.status(500), 2),
    "a 429 that asks for time": (faults.status(429, Retry_After="1"), 1),
    "a 503 with a date": (faults.status(503, Retry_After="Wed, 21 Oct 2026 07:28:00 GMT"), 1),
    "a cut at the first byte": (faults.cut(0), 2),
    "a cut in the middle": (faults.cut(100_000), 3),
    "a cut of an answer without a length": (faults.cut_without_length(100_000), 1),
    "a stall in the middle": (faults.stall(100_000), 1),
    "silence": (faults.silent(), 1),
    "a length that is right and a body that is short": (faults.cut(len(DATA) - 1), 1),
    "whole files without a length": (faults.in_chunks(DATA), 1),
}


@pytest.mark.parametrize("name", RECOVERABLE)
def test_a_passing_fault_is_survived(store: Store, server: FaultServer, name: str) -> None:
    fault, times = RECOVERABLE[name]
    server.add(NAME, DATA)
    server.fail_file(NAME, fault, times)
    fetch(store, from_index(server), fault=name)


def test_a_link_that_breaks_often_but_moves_on_is_not_given_up(
    store: Store, server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.core.net.download._PROGRESS_BYTES", 1000)
    server.add(NAME, DATA)
    server.fail_file(NAME, faults.cut(50_000), timing.ATTEMPTS + 3)
    fetch(store, from_index(server))
    assert server.sent_bytes[f"/files/{NAME}"] == len(DATA)


LASTING: dict[str, tuple[Fault, type[PipelineError]]] = {
    "404": (faults.status(404), SourceUnreachable),
    "403": (faults.status(403), SourceUnreachable),
    "500": (faults.status(500), SourceUnreachable),
    "429": (faults.status(429, Retry_After="0"), SourceUnreachable),
    "416 for the whole file": (faults.status(416), SourceUnreachable),
    "206 for the whole file": (faults.span_from(0, 0), SourceUnreachable),
    "a cut at the first byte": (faults.cut(0), SourceUnreachable),
    "silence": (faults.silent(), SourceUnreachable),
    "other bytes of the same size": (faults.instead(OTHER), DigestMismatch),
    "other bytes without a length": (faults.in_chunks(OTHER), DigestMismatch),
    "more bytes": (faults.instead(DATA + b"!"), DigestMismatch),
    "more bytes without a length": (faults.in_chunks(DATA + b"!"), DigestMismatch),
    "fewer bytes": (faults.instead(DATA[:-1]), DigestMismatch),
    "fewer bytes without a length": (faults.in_chunks(DATA[:-1]), DigestMismatch),
    "an HTML page with 200": (faults.instead(b"<h1>Sorry</h1>", "text/html"), DigestMismatch),
    "an HTML page in chunks": (faults.in_chunks(b"<h1>Sorry</h1>"), DigestMismatch),
    "a claimed length that is too large": (
        faults.claiming_length(len(DATA) + 1),
        DigestMismatch,
    ),
    "a claimed length that is too small": (
        faults.claiming_length(len(DATA) - 1),
        DigestMismatch,
    ),
}


@pytest.mark.parametrize("name", LASTING)
def test_a_lasting_fault_ends_with_its_own_error_and_keeps_nothing(
    store: Store, server: FaultServer, name: str
) -> None:
    fault, error = LASTING[name]
    server.add(NAME, DATA)
    server.fail_file(NAME, fault, 50)
    with pytest.raises(error, match=r"127\.0\.0\.1"):
        fetch(store, from_index(server), fault=name)
    assert kept_partials(store) == []


@pytest.mark.parametrize(("status", "requests"), [(404, 1), (403, 1), (500, 5), (429, 5)])
def test_only_what_may_pass_is_asked_again(
    store: Store, server: FaultServer, status: int, requests: int
) -> None:
    server.add(NAME, DATA)
    server.fail_file(NAME, faults.status(status), 50)
    with pytest.raises(SourceUnreachable, match=f"answers {status}"):
        fetch(store, from_index(server))
    assert len(server.starts(NAME)) == requests


def test_a_file_of_another_size_is_refused_before_its_first_byte(
    store: Store, server: FaultServer
) -> None:
    server.add(NAME, DATA)
    server.fail_file(NAME, faults.instead(DATA * 2))
    with pytest.raises(DigestMismatch, match=f"{2 * len(DATA)} bytes instead of {len(DATA)}"):
        fetch(store, from_index(server))
    assert len(server.starts(NAME)) == 1


def test_a_redirect_is_followed(store: Store, server: FaultServer) -> None:
    server.add(NAME, DATA)
    elsewhere = server.add("elsewhere", DATA)
    server.fail_file(NAME, faults.redirect(elsewhere))
    fetch(store, from_index(server))


def test_a_redirect_in_a_circle_ends(store: Store, server: FaultServer) -> None:
    url = server.add(NAME, DATA)
    server.fail_file(NAME, faults.redirect(url), 100)
    with pytest.raises(SourceUnreachable, match=r"[Rr]edirect"):
        fetch(store, from_index(server))


def keep_partial(store: Store, data: bytes) -> None:
    store.partial_path(pin_for(DATA).sha256).write_bytes(data)


def test_a_download_goes_on_at_the_byte_where_it_stopped(store: Store, server: FaultServer) -> None:
    server.add(NAME, DATA)
    keep_partial(store, DATA[:300_000])
    fetch(store, from_index(server))
    assert server.starts(NAME) == [300_000]
    assert server.sent_bytes[f"/files/{NAME}"] == len(DATA) - 300_000


def test_a_whole_partial_file_is_used_without_a_request(store: Store, server: FaultServer) -> None:
    server.add(NAME, DATA)
    keep_partial(store, DATA)
    fetch(store, from_index(server))
    assert server.starts(NAME) == []


RESUMING: dict[str, Fault] = {
    "200 and everything": faults.whole_file(),
    "416": faults.status(416),
    "206 from another byte": faults.span_from(10, 10),
    "206 without saying from where": faults.status(206),
    "206 that lies": faults.span_from(300_000, 0),
    "the rest of other bytes": lambda handler, data, start: handler.send_file(OTHER, start),
    "a cut": faults.cut(10),
}


@pytest.mark.parametrize("name", RESUMING)
def test_a_server_that_cannot_resume_still_delivers(
    store: Store, server: FaultServer, name: str
) -> None:
    server.add(NAME, DATA)
    server.fail_file(NAME, RESUMING[name])
    keep_partial(store, DATA[:300_000])
    fetch(store, from_index(server))


@pytest.mark.parametrize("kept", [b"x" * 300_000, b"x" * len(DATA), b"x" * (len(DATA) + 1)])
def test_a_bad_beginning_is_thrown_away_and_the_file_fetched_from_the_first_byte(
    store: Store, server: FaultServer, kept: bytes
) -> None:
    server.add(NAME, DATA)
    keep_partial(store, kept)
    fetch(store, from_index(server))
    assert server.starts(NAME)[-1] == 0


def test_bad_bytes_after_a_bad_beginning_are_tried_once_more_and_no_oftener(
    store: Store, server: FaultServer
) -> None:
    server.add(NAME, DATA)
    server.fail_file(NAME, lambda handler, data, start: handler.send_file(OTHER, start), times=50)
    keep_partial(store, b"x" * 300_000)
    with pytest.raises(DigestMismatch):
        fetch(store, from_index(server))
    assert server.starts(NAME) == [300_000, 0]


def test_what_arrived_before_the_end_is_kept_for_the_next_run(
    store: Store, server: FaultServer
) -> None:
    server.add(NAME, DATA)
    server.fail_file(NAME, faults.cut(200_000))
    server.fail_file(NAME, faults.status(500), 50)
    with pytest.raises(SourceUnreachable):
        fetch(store, from_index(server))
    assert store.partial_path(pin_for(DATA).sha256).read_bytes() == DATA[:200_000]
    server.faults.clear()
    fetch(store, from_index(server))
    assert server.starts(NAME)[-1] == 200_000


def test_an_index_that_offers_other_bytes_is_believed_at_once(
    store: Store, server: FaultServer
) -> None:
    server.add(NAME, OTHER)
    with pytest.raises(DigestMismatch, match="the index offers"):
        fetch(store, from_index(server))
    assert server.starts(NAME) == []


def test_an_index_without_hashes_is_judged_by_the_bytes(store: Store, server: FaultServer) -> None:
    server.says_hash = False
    server.add(NAME, OTHER)
    with pytest.raises(DigestMismatch, match="received"):
        fetch(store, from_index(server))
    server.add(NAME, DATA)
    fetch(store, from_index(server))


PAGES: dict[str, Fault] = {
    "404": faults.status(404),
    "403": faults.status(403),
    "500": faults.status(500),
    "an HTML page with 200": faults.instead(b"<h1>Sorry</h1>", "text/html"),
    "no JSON": faults.instead(b"{", faults.JSON_PAGE),
    "JSON of another kind": faults.instead(b'{"meta": 1}', faults.JSON_PAGE),
    "JSON of a later version": faults.instead(
        b'{"meta": {"api-version": "9.0"}, "name": "thing", "files": []}', faults.JSON_PAGE
    ),
    "an image": faults.instead(b"\x89PNG", "image/png"),
    "a cut": faults.claiming_length(99),
    "silence": faults.silent(),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_bad_page_of_the_only_index_is_no_source(
    store: Store, server: FaultServer, name: str
) -> None:
    server.add(NAME, DATA)
    server.fail("/simple/thing/", PAGES[name], 50)
    with pytest.raises(SourceUnreachable):
        fetch(store, from_index(server), fault=name)


@pytest.mark.parametrize("name", PAGES)
def test_an_index_that_is_down_does_not_hide_one_that_works(
    store: Store, server: FaultServer, name: str
) -> None:
    server.add(NAME, DATA)
    server.fail("/broken/thing/", PAGES[name], 50)
    fetch(store, NetworkSettings(indexes=(f"{server.url}/broken/", server.index)), fault=name)


@pytest.mark.parametrize(
    "bad",
    [
        DEAD,
        "http://127.0.0.1:1",
        "ftp://127.0.0.1/simple",
        "nonsense://",
        "http://[::1",
        "http://no.example.invalid/simple/",
    ],
)
def test_an_index_that_cannot_be_reached_does_not_hide_one_that_works(
    store: Store, server: FaultServer, bad: str
) -> None:
    server.add(NAME, DATA)
    fetch(store, NetworkSettings(indexes=(bad, server.index), mirrors=(bad,)))


def test_wrong_bytes_from_one_source_do_not_hide_right_ones_from_another(
    store: Store, server: FaultServer, tmp_path: Path
) -> None:
    (tmp_path / NAME).write_bytes(OTHER)
    server.fail(f"/mirror/{NAME}", faults.instead(OTHER))
    server.add(NAME, DATA)
    fetch(
        store,
        NetworkSettings(indexes=(server.index,), mirrors=(str(tmp_path), f"{server.url}/mirror")),
    )


def test_wrong_bytes_are_the_verdict_even_if_other_sources_are_only_down(
    store: Store, server: FaultServer
) -> None:
    server.fail(f"/mirror/{NAME}", faults.instead(OTHER))
    with pytest.raises(DigestMismatch):
        fetch(store, NetworkSettings(indexes=(DEAD,), mirrors=(f"{server.url}/mirror",)))


def test_every_source_that_failed_is_named(store: Store, server: FaultServer) -> None:
    server.fail("/simple/thing/", faults.status(403))
    with pytest.raises(SourceUnreachable, match=r"127\.0\.0\.1:9/simple.*403"):
        fetch(store, NetworkSettings(indexes=(DEAD, server.index)))


def test_no_source_at_all_is_reported_plainly(store: Store) -> None:
    with pytest.raises(SourceUnreachable, match="no source has it"):
        fetch(store, NetworkSettings(indexes=()))


@pytest.mark.parametrize("place", ["{file}", "thing/{file}", "{sha256}", "sha256/{sha256}"])
def test_a_folder_holds_files_by_name_or_by_hash(store: Store, tmp_path: Path, place: str) -> None:
    path = tmp_path / "folder" / place.format(file=NAME, sha256=pin_for(DATA).sha256)
    path.parent.mkdir(parents=True)
    path.write_bytes(DATA)
    fetch(store, NetworkSettings(indexes=(), folders=(tmp_path / "folder",)))


def test_a_mirror_may_be_a_file_address(store: Store, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(DATA)
    fetch(store, NetworkSettings(indexes=(), mirrors=(tmp_path.as_uri(),)))


@pytest.mark.parametrize("place", ["{file}", "sha256/{sha256}"])
def test_a_mirror_by_address_is_asked_before_the_index(
    store: Store, server: FaultServer, place: str
) -> None:
    server.files["/m/" + place.format(file=NAME, sha256=pin_for(DATA).sha256)] = DATA
    fetch(store, NetworkSettings(indexes=(server.index,), mirrors=(f"{server.url}/m/",)))
    assert not any(a.path.startswith("/simple") for a in server.asked)


@pytest.mark.parametrize("data", [OTHER, DATA[:-1], b""])
def test_a_wrong_file_in_a_folder_is_not_kept(store: Store, tmp_path: Path, data: bytes) -> None:
    (tmp_path / NAME).write_bytes(data)
    with pytest.raises(DigestMismatch, match=NAME):
        fetch(store, NetworkSettings(indexes=(), folders=(tmp_path,)))
    assert kept_partials(store) == []


def test_a_folder_of_wrong_sizes_does_not_cost_what_was_downloaded(
    store: Store, server: FaultServer, tmp_path: Path
) -> None:
    (tmp_path / NAME).write_bytes(b"short")
    server.add(NAME, DATA)
    keep_partial(store, DATA[:300_000])
    fetch(store, NetworkSettings(indexes=(server.index,), folders=(tmp_path,)))
    assert server.starts(NAME) == [300_000]


def test_a_file_that_vanishes_from_a_folder_does_not_hide_the_index(
    store: Store, server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_file = Path.is_file

    def vanishes(path: Path) -> bool:
        was_there = is_file(path)
        if path == tmp_path / NAME:
            path.unlink(missing_ok=True)
        return was_there

    (tmp_path / NAME).write_bytes(DATA)
    monkeypatch.setattr(Path, "is_file", vanishes)
    server.add(NAME, DATA)
    fetch(store, NetworkSettings(indexes=(server.index,), folders=(tmp_path,)))


def test_offline_asks_no_server_and_says_what_is_missing(store: Store, server: FaultServer) -> None:
    server.add(NAME, DATA)
    settings = NetworkSettings(indexes=(server.index,), mirrors=(f"{server.url}/files",))
    with pytest.raises(OfflineMiss, match=NAME):
        fetcher_of(store, settings, offline=True).fetch(pin_for(DATA), Count())
    assert server.asked == []


def test_offline_uses_folders(store: Store, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(DATA)
    settings = NetworkSettings(indexes=(DEAD,), mirrors=(str(tmp_path),))
    fetcher_of(store, settings, offline=True).fetch(pin_for(DATA), Count())


def test_a_file_in_the_store_is_not_asked_for(store: Store) -> None:
    store.input_path(pin_for(DATA).sha256).write_bytes(DATA)
    fetch(store, NetworkSettings(indexes=(DEAD,)))


def test_a_file_of_the_wrong_size_in_the_store_is_fetched_again(
    store: Store, server: FaultServer
) -> None:
    server.add(NAME, DATA)
    store.input_path(pin_for(DATA).sha256).write_bytes(DATA[:-1])
    fetch(store, from_index(server))


def test_a_deb_comes_from_the_first_mirror_that_has_it(
    store: Store, server: FaultServer, tmp_path: Path
) -> None:
    pin = deb_pin_for(DATA)
    server.files[f"/debian/{pin.path}"] = DATA
    bases = (tmp_path.as_uri(), "http://127.0.0.1:9", f"{server.url}/none", f"{server.url}/debian")
    fetcher = fetcher_of(store, NetworkSettings(indexes=()), mirror=lambda: DebianMirror(bases, ()))
    assert fetcher.fetch(pin, Count()).read_bytes() == DATA


def test_a_deb_comes_from_a_mirror_that_is_a_folder(store: Store, tmp_path: Path) -> None:
    pin = deb_pin_for(DATA)
    (tmp_path / pin.path).parent.mkdir(parents=True)
    (tmp_path / pin.path).write_bytes(DATA)
    mirror = DebianMirror((tmp_path.as_uri(),), ())
    fetcher = fetcher_of(store, NetworkSettings(indexes=()), mirror=lambda: mirror)
    assert fetcher.fetch(pin, Count()).read_bytes() == DATA


def test_a_machine_without_a_mirror_says_so(store: Store) -> None:
    def unknown() -> DebianMirror:
        raise MirrorUnknown("no mirror")

    fetcher = fetcher_of(store, NetworkSettings(indexes=()), mirror=unknown)
    with pytest.raises(MirrorUnknown):
        fetcher.fetch(deb_pin_for(DATA), Count())


def test_a_version_that_left_the_mirror_comes_from_the_snapshot_archive(
    store: Store, server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = deb_pin_for(DATA)
    listing = b'{"fileinfo": {"ab": [{"size": 1}], "cd": [{"size": %d}]}}' % len(DATA)
    server.files["/mr/binary/thing/1.0/binfiles"] = listing
    server.files["/file/cd"] = DATA
    monkeypatch.setenv("SM120_DEBIAN_SNAPSHOT", server.url)
    mirror = DebianMirror((f"{server.url}/debian",), ())
    fetcher = fetcher_of(store, NetworkSettings(indexes=()), mirror=lambda: mirror)
    assert fetcher.fetch(pin, Count()).read_bytes() == DATA


def many(server: FaultServer, count: int) -> list[Pin]:
    pins: list[Pin] = []
    for number in range(count):
        data = bytes([number]) * (1000 + number)
        name = f"thing-{number}-py3-none-any.whl"
        server.add(name, data)
        pins.append(pin_for(data, name))
    return pins


def fetch_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if "_work" in t.name]


def test_many_files_arrive_and_every_byte_is_counted(store: Store, server: FaultServer) -> None:
    pins, bar = many(server, 20), Count()
    fetched = dict(fetcher_of(store, from_index(server)).fetch_all(pins, bar))
    assert fetched.keys() == set(pins)
    assert bar.n_bytes == sum(p.size_bytes for p in pins)
    assert fetch_threads() == []


def test_nothing_to_fetch_is_done_at_once(store: Store) -> None:
    assert list(fetcher_of(store, NetworkSettings(indexes=())).fetch_all([], Count())) == []


def test_one_failure_ends_the_whole_fetch_and_its_threads(
    store: Store, server: FaultServer
) -> None:
    pins = many(server, 8)
    server.fail_file(pins[0].file, faults.status(404))
    for pin in pins[3:]:
        server.fail_file(pin.file, faults.stall(30), 5)
    start = time.monotonic()
    with pytest.raises(SourceUnreachable, match="404"):
        list(fetcher_of(store, from_index(server), silence_s=30).fetch_all(pins, Count()))
    assert time.monotonic() - start < 20
    assert fetch_threads() == []


def test_a_caller_that_stops_early_leaves_no_thread(store: Store, server: FaultServer) -> None:
    pins = many(server, 8)
    for pin in pins[:5]:
        server.fail_file(pin.file, faults.stall(10), 5)
    fetcher = fetcher_of(store, from_index(server), silence_s=30)
    with closing(fetcher.fetch_all(pins, Count())) as arrivals:
        next(arrivals)
    assert fetch_threads() == []
    server.faults.clear()
    assert len(list(fetcher.fetch_all(pins, Count()))) == 8


def test_a_server_that_says_nothing_does_not_hold_up_the_end_for_long(
    store: Store, server: FaultServer
) -> None:
    pins = many(server, 3)
    server.fail_file(pins[0].file, faults.silent())
    start = time.monotonic()
    fetcher = fetcher_of(store, from_index(server), silence_s=30)
    with closing(fetcher.fetch_all(pins, Count())) as arrivals:
        next(arrivals)
    assert time.monotonic() - start < 20
    assert fetch_threads() == []


def test_a_thread_that_waits_for_another_process_can_be_stopped(
    store: Store, server: FaultServer
) -> None:
    pins = many(server, 2)
    fetcher = fetcher_of(store, from_index(server))
    with (
        store.locked(f"input-{pins[0].sha256}"),
        closing(fetcher.fetch_all(pins, Count())) as arrivals,
    ):
        assert next(arrivals)[0] == pins[1]
    assert fetch_threads() == []


def test_a_stop_ends_a_copy_from_a_folder(store: Store, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(DATA)
    client = NetClient(NetworkSettings(indexes=(), folders=(tmp_path,)))
    client.stop.set()
    with pytest.raises(Interrupted):
        Fetcher(store, client, Sources(client), offline=True).fetch(pin_for(DATA), Count())
    assert not store.input_path(pin_for(DATA).sha256).exists()


def test_two_fetchers_of_one_file_share_one_download(store: Store, server: FaultServer) -> None:
    server.add(NAME, DATA)
    server.bytes_per_s = 5_000_000
    pin = pin_for(DATA)
    fetchers = [fetcher_of(store, from_index(server)) for _ in range(3)]
    threads = [threading.Thread(target=f.fetch, args=(pin, Count())) for f in fetchers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.starts(NAME) == [0]
    assert store.input_path(pin.sha256).read_bytes() == DATA


def test_pins_of_one_file_under_two_names_are_one_file(store: Store, server: FaultServer) -> None:
    server.add(NAME, DATA)
    pin: WheelPin = pin_for(DATA)
    other = pin.model_copy(update={"file": "thing-1.0-py2-none-any.whl"})
    server.add(other.file, DATA)
    fetched = dict(fetcher_of(store, from_index(server)).fetch_all([pin, other], Count()))
    assert len(set(fetched.values())) == 1


def test_files_that_the_stores_disk_cannot_hold_are_not_asked_for(
    store: Store, server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add(NAME, DATA)
    monkeypatch.setattr("pipeline.core.files.free_bytes", lambda folder: len(DATA) - 1)
    with pytest.raises(DiskFull, match="needed"):
        collect(store, fetcher_of(store, from_index(server)), [pin_for(DATA)], tmp_path / "usb")
    assert server.starts(NAME) == []


@pytest.mark.parametrize(("is_other", "free"), [(True, 9), (True, 1 << 30), (False, 9)])
def test_a_folder_on_another_disk_needs_space_of_its_own(
    store: Store,
    server: FaultServer,
    tmp_path: Path,
    other_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_other: bool,
    free: int,
) -> None:
    server.add(NAME, DATA)
    fetcher, pin = fetcher_of(store, from_index(server)), pin_for(DATA)
    for _ in fetcher.fetch_all([pin], Count()):
        pass
    with tempfile.TemporaryDirectory(dir=other_disk if is_other else tmp_path) as folder:
        monkeypatch.setattr("pipeline.core.files.free_bytes", lambda folder: free)
        usb = Path(folder) / "to" / "usb"
        if is_other and free < len(DATA):
            with pytest.raises(DiskFull, match="needed"):
                collect(store, fetcher, [pin], usb)
            assert not list(usb.iterdir())
        else:  # a link takes no space
            collect(store, fetcher, [pin], usb)
            assert (usb / NAME).read_bytes() == DATA


@pytest.mark.parametrize(
    ("fault", "error"),
    [(OSError(errno.ENOSPC, "full"), DiskFull), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_a_copy_that_ends_halfway_leaves_nothing_in_the_folder_of_parts(
    store: Store,
    server: FaultServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: BaseException,
    error: type[BaseException],
) -> None:
    def half(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:9])
        raise fault

    server.add(NAME, DATA)
    monkeypatch.setattr("pipeline.images.fetch.inputs.link_or_copy", half)
    with pytest.raises(error):
        collect(store, fetcher_of(store, from_index(server)), [pin_for(DATA)], tmp_path / "usb")
    assert not list((tmp_path / "usb").iterdir())
