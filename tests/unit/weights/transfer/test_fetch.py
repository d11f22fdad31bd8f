from __future__ import annotations

import hashlib
import os
import random
import subprocess
import threading
import time
from pathlib import Path

import pytest

from pipeline.core.errors import (
    DigestMismatch,
    DiskFull,
    HubBroken,
    HubRefused,
    PipelineError,
    RevisionMoved,
    SourceUnreachable,
    SpecInvalid,
    StoreUnwritable,
)
from pipeline.core.net.http import NetClient
from pipeline.weights.model import FilePin, sealed_weights_lock
from pipeline.weights.place import new_place
from pipeline.weights.transfer.fetch import fetch_range
from pipeline.weights.transfer.sources import find_routes
from pipeline.weights.transfer.workers import Options, PartialFile
from tests.testbed import hub_faults as fault
from tests.testbed.hub import ALWAYS, test_hub
from tests.unit.weights.conftest import BIG, RANGE_BYTES, SMALL, TOKEN, Bed, big_bytes

FILE_BYTES = len(big_bytes())
MIDDLE = FILE_BYTES // 2


@pytest.mark.parametrize("hub_cache", [False, True])
def test_every_file_comes_to_its_name_and_a_second_fetch_asks_for_nothing(
    bed: Bed, hub_cache: bool
) -> None:
    place = bed.place(hub_cache=hub_cache)
    assert sorted(bed.fetch(place)) == sorted(bed.files)
    bed.require_right(place)
    sent = bed.hub.sent_bytes()
    assert sent == sum(map(len, bed.files.values()))
    assert bed.fetch(place) == []
    assert bed.hub.sent_bytes() == sent


def test_a_large_file_comes_in_ranges_over_several_connections(bed: Bed) -> None:
    bed.fetch(jobs=4)
    asked = [a.range for a in bed.hub.bodies(BIG)]
    assert len(set(asked)) == len(asked) == 11
    assert bed.hub.sent_bytes(BIG) == FILE_BYTES


def test_bytes_that_come_in_order_are_hashed_without_reading_them_again(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> bytes:
        raise AssertionError("read from the disk")

    bed.publish({f"part-{i}.safetensors": big_bytes(seed=i) for i in range(3)})
    monkeypatch.setattr(os, "pread", never)
    bed.fetch(jobs=1)
    monkeypatch.undo()
    bed.require_right()


def test_the_hub_is_asked_once_where_a_large_file_lies(bed: Bed) -> None:
    bed.fetch(jobs=1)
    assert len([a for a in bed.hub.asked if a.stage == "resolve" and a.name == BIG]) == 1


def test_a_link_that_no_longer_works_is_asked_for_again(bed: Bed) -> None:
    bed.hub.fail(BIG, fault.status(403), times=ALWAYS)
    client = NetClient(bed.settings)
    routes = find_routes(client, bed.lock(), endpoint=bed.hub.url, token=TOKEN)
    bed.hub.forgive()
    assert b"".join(fetch_range(routes, bed.pin(), 0, 1000, client=client))
    bed.hub.fail(BIG, fault.status(403))
    assert b"".join(fetch_range(routes, bed.pin(), 1000, 2000, client=client))
    assert len([a for a in bed.hub.asked if a.stage == "resolve"]) == 2


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 410])
def test_an_expired_link_is_asked_for_again_whatever_the_status(bed: Bed, status: int) -> None:
    client = NetClient(bed.settings)
    routes = find_routes(client, bed.lock(), endpoint=bed.hub.url, token=TOKEN, with_xet=False)
    assert b"".join(fetch_range(routes, bed.pin(), 0, 1000, client=client))
    bed.hub.fail(BIG, fault.status(status))
    got = b"".join(fetch_range(routes, bed.pin(), 1000, 2000, client=client))
    assert got == bed.files[BIG][1000:2000]
    stages = [a.stage for a in bed.hub.asked if a.name == BIG]
    assert stages == ["resolve", "body", "body", "resolve", "body"]


@pytest.mark.parametrize("status", [416, 500])
def test_a_link_with_another_trouble_is_not_called_expired(bed: Bed, status: int) -> None:
    client = NetClient(bed.settings)
    routes = find_routes(client, bed.lock(), endpoint=bed.hub.url, token=TOKEN, with_xet=False)
    assert b"".join(fetch_range(routes, bed.pin(), 0, 1000, client=client))
    bed.hub.fail(BIG, fault.status(status), times=ALWAYS)
    options = Options(first_wait_s=0.001)
    with pytest.raises(PipelineError, match=BIG):
        list(fetch_range(routes, bed.pin(), 1000, 2000, client=client, options=options))
    assert len([a for a in bed.hub.asked if a.stage == "resolve"]) == 1


@pytest.mark.parametrize("jobs", [1, 4])
@pytest.mark.parametrize("status", [404, 410])
def test_a_file_that_the_hub_no_longer_has_does_not_keep_the_others_away(
    bed: Bed, jobs: int, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    bed.publish({**bed.files, "gone.json": b"gone", "late.bin": big_bytes(seed=7)})
    bed.lock()
    bed.hub.fail("gone.json", fault.status(status), times=ALWAYS)
    with pytest.raises(HubRefused, match=rf"gone\.json: the server answers {status}"):
        bed.fetch(jobs=jobs)
    # of four connections, the others may have ended before
    assert jobs > 1 or "going on with the other files" in capfd.readouterr().err
    for path, data in bed.files.items():
        assert path == "gone.json" or (bed.folder / path).read_bytes() == data
    assert not (bed.folder / "gone.json").exists()
    bed.hub.forgive()
    assert bed.fetch(jobs=jobs) == ["gone.json"]


def test_a_set_that_is_closed_to_us_ends_at_its_first_file(bed: Bed) -> None:
    bed.publish({f"part-{i}.json": b"%d" % i for i in range(30)})
    bed.lock()
    bed.hub.fail("*", fault.gated(403), times=ALWAYS)
    with pytest.raises(HubRefused, match="gated"):
        bed.fetch(jobs=1)
    assert len(bed.hub.bodies()) <= 2


@pytest.mark.parametrize(
    "headers",
    [
        {"RateLimit": '"resolvers";r=0;t=1'},
        {"RateLimit": "limit=100, remaining=0, reset=1"},
        {"X_RateLimit_Remaining": "0", "X_RateLimit_Reset": "1"},
    ],
)
def test_the_pause_that_the_hub_asks_for_is_kept(bed: Bed, headers: dict[str, str]) -> None:
    bed.hub.fail(BIG, fault.status(429, **headers))
    start = time.monotonic()
    bed.fetch(jobs=1)
    assert time.monotonic() - start >= 1
    bed.require_right()


WIRE_FAULTS = {
    "same-size wrong byte": fault.flip(MIDDLE),
    "wrong first byte": fault.flip(0),
    "wrong last byte": fault.flip(FILE_BYTES - 1),
    "stall at 99 %": fault.stall(FILE_BYTES * 99 // 100),
    "no headers": fault.silent(),
    "cut off": fault.cut(MIDDLE),
    "reset": fault.reset(MIDDLE),
    "whole file instead of a range": fault.whole_file(),
    "too short a body": fault.short(1000),
    "too long a body": fault.long(1000),
    "another range": fault.shifted(1),
    "another range under the right name": fault.lying_shift(1),
    "a proxy's page": fault.instead(b"<html>please log in</html>"),
    "busy": fault.status(429, Retry_After="0"),
    "server error": fault.status(503),
}


@pytest.mark.parametrize("name", WIRE_FAULTS)
@pytest.mark.parametrize("jobs", [1, 4])
def test_a_transfer_fault_is_noticed_and_repaired(bed: Bed, name: str, jobs: int) -> None:
    bed.hub.fail(BIG, WIRE_FAULTS[name])
    bed.fetch(jobs=jobs, stall_s=1.0 if name in ("stall at 99 %", "no headers") else 20.0)
    bed.require_right()


ENDINGS: dict[str, type[PipelineError]] = {
    "same-size wrong byte": DigestMismatch,
    "wrong first byte": DigestMismatch,
    "wrong last byte": DigestMismatch,
    "stall at 99 %": SourceUnreachable,
    "cut off": SourceUnreachable,
    "reset": SourceUnreachable,
    "too short a body": DigestMismatch,
    "too long a body": DigestMismatch,
    "another range": HubBroken,
    "another range under the right name": DigestMismatch,
    "a proxy's page": DigestMismatch,
    "server error": SourceUnreachable,
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_fault_that_stays_ends_with_its_own_error_and_no_file(bed: Bed, name: str) -> None:
    bed.hub.fail(BIG, WIRE_FAULTS[name], times=ALWAYS)
    stall_s = 0.1 if name == "stall at 99 %" else 20.0
    with pytest.raises(ENDINGS[name], match=BIG):
        bed.fetch(pins=[bed.pin()], stall_s=stall_s)
    bed.require_absent()


def test_a_server_that_sends_only_whole_files_will_do(bed: Bed) -> None:
    bed.hub.fail(BIG, fault.whole_file(), times=ALWAYS)
    bed.fetch()
    bed.require_right()


def test_wrong_bytes_are_never_kept_for_a_later_run(bed: Bed) -> None:
    bed.hub.fail(BIG, fault.flip(MIDDLE), times=ALWAYS)
    with pytest.raises(DigestMismatch):
        bed.fetch()
    assert list(bed.place().partial_folder.glob("*")) == []
    bed.hub.forgive()
    bed.fetch()
    bed.require_right()


def test_one_bad_file_does_not_keep_the_others_away(bed: Bed) -> None:
    bed.publish({**bed.files, "other.safetensors": big_bytes(seed=2)})
    bed.hub.fail(BIG, fault.flip(MIDDLE), times=ALWAYS)
    with pytest.raises(DigestMismatch, match=BIG):
        bed.fetch()
    assert (bed.folder / "other.safetensors").read_bytes() == big_bytes(seed=2)
    bed.require_absent()


@pytest.mark.parametrize(
    ("second", "message"), [(MIDDLE, "both times"), (MIDDLE + 1, r"received \w{64} after \w{64}")]
)
def test_bytes_that_are_wrong_twice_are_reported_as_equal_or_not(
    bed: Bed, second: int, message: str
) -> None:
    bed.hub.fail(BIG, fault.flip(MIDDLE))
    bed.hub.fail(BIG, fault.flip(second), times=ALWAYS)
    with pytest.raises(DigestMismatch, match=message):
        bed.fetch()


def test_a_wrong_small_file_is_refused_too(bed: Bed) -> None:
    bed.hub.fail(SMALL, fault.flip(3), times=ALWAYS)
    with pytest.raises(DigestMismatch, match=SMALL):
        bed.fetch()
    bed.require_absent(SMALL)


def test_another_file_under_the_name_is_refused_before_its_first_byte(bed: Bed) -> None:
    lock = bed.lock()
    other = bed.hub.add("org/tiny", {**bed.files, BIG: big_bytes(seed=9)}, "other")
    place = new_place(bed.folder, lock.model_copy(update={"commit": other}), hub_cache=False)
    with pytest.raises(DigestMismatch, match=BIG):
        bed.fetch(place)
    assert bed.hub.sent_bytes(BIG) == 0


def test_a_server_that_asks_for_a_pause_gets_it(bed: Bed) -> None:
    bed.hub.fail(BIG, fault.status(429, Retry_After="1"), stage="resolve")
    start = time.monotonic()
    bed.fetch(jobs=1)
    assert 1.0 <= time.monotonic() - start < 20
    bed.require_right()


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        (fault.gated(403), HubRefused),
        (fault.gated(401), HubRefused),
        (fault.status(401), HubRefused),
        (fault.status(403), HubRefused),
        (fault.status(404, X_Error_Code="EntryNotFound"), HubRefused),
        (fault.status(404, X_Error_Code="RevisionNotFound"), RevisionMoved),
    ],
)
def test_a_refusal_has_its_own_ending(
    bed: Bed, refusal: fault.Fault, error: type[PipelineError]
) -> None:
    bed.hub.fail(BIG, refusal, times=ALWAYS, stage="resolve")
    with pytest.raises(error, match=BIG):
        bed.fetch()
    bed.require_absent()


def test_a_commit_that_is_gone_is_reported_as_gone(bed: Bed) -> None:
    place = bed.place()
    bed.hub.repositories["org/tiny"].commits.clear()
    with pytest.raises(RevisionMoved):
        bed.fetch(place)


def test_a_gated_repository_opens_for_the_right_token_only(bed: Bed) -> None:
    bed.hub.repositories["org/tiny"].gated_for = TOKEN
    with pytest.raises(HubRefused, match="gated"):
        bed.fetch(token=None)
    with pytest.raises(HubRefused, match="gated"):
        bed.fetch(token="hf_wrong")
    bed.fetch()
    bed.require_right()


def test_the_token_goes_to_the_hub_and_never_to_where_it_sends_us(bed: Bed) -> None:
    bed.fetch()
    cdn = [a for a in bed.hub.asked if a.origin == "cdn"]
    assert cdn
    assert not any(a.has_token for a in cdn)
    assert all(a.has_token for a in bed.hub.asked if a.origin == "hub" and a.stage == "resolve")


def test_the_token_is_not_sent_after_a_redirect_to_another_host_and_back(bed: Bed) -> None:
    with test_hub() as other:
        other.add("org/tiny", bed.files)
        to = f"{other.url}/org/tiny/resolve/{bed.commit}/{BIG}"
        bed.hub.fail(BIG, fault.redirect(to), times=ALWAYS, stage="resolve")
        bed.fetch()
        assert other.asked
        assert not any(a.has_token for a in other.asked)
    bed.require_right()


def test_a_netrc_entry_does_not_take_the_tokens_place(
    bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login somebody password else\n")
    monkeypatch.setenv("NETRC", str(netrc))
    bed.hub.repositories["org/tiny"].gated_for = TOKEN
    bed.fetch()
    bed.require_right()


def test_redirects_without_end_are_left(bed: Bed) -> None:
    to = f"{bed.hub.url}/org/tiny/resolve/{bed.commit}/{BIG}"
    bed.hub.fail(BIG, fault.redirect(to), times=ALWAYS, stage="resolve")
    with pytest.raises(HubBroken, match="redirects"):
        bed.fetch()


def test_a_redirect_to_a_file_of_this_machine_is_not_followed(bed: Bed) -> None:
    bed.hub.fail(BIG, fault.redirect("file:///etc/passwd"), times=ALWAYS, stage="resolve")
    with pytest.raises(HubBroken, match="file:"):
        bed.fetch()


def test_only_the_missing_bytes_come_after_an_interruption(bed: Bed) -> None:
    bed.hub.fail(BIG, fault.cut(MIDDLE), times=ALWAYS)
    with pytest.raises(SourceUnreachable):
        bed.fetch(jobs=1)
    bed.hub.forgive()
    bed.hub.asked.clear()
    bed.fetch(jobs=1)
    assert bed.hub.sent_bytes(BIG) == FILE_BYTES - MIDDLE
    bed.require_right()


@pytest.mark.parametrize(("every_s", "notes"), [(0.0, 3), (3600.0, 1)])
def test_what_came_over_a_slow_line_is_noted_by_time_too(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, every_s: float, notes: int
) -> None:
    noted: list[tuple[int, int]] = []
    note = PartialFile.note

    def noting(self: PartialFile, start: int, stop: int) -> None:
        note(self, start, stop)
        if self.pin.path == BIG and start < stop:
            noted.append((start, stop))

    monkeypatch.setattr(PartialFile, "note", noting)
    monkeypatch.setattr("pipeline.weights.transfer.workers.NOTE_S", every_s)
    bed.fetch(jobs=1, range_bytes=1 << 20)
    assert len(noted) >= notes
    assert len(noted) == 1 or every_s == 0.0
    bed.require_right()


def test_bytes_that_rotted_between_two_runs_are_found(bed: Bed) -> None:
    bed.hub.fail(BIG, fault.cut(MIDDLE), times=ALWAYS)
    with pytest.raises(SourceUnreachable):
        bed.fetch(jobs=1)
    bed.hub.forgive()
    partial = bed.place().partial_folder / bed.pin().want
    with partial.open("r+b") as handle:
        handle.seek(7)
        handle.write(b"\0\0\0")
    bed.fetch()
    bed.require_right()


@pytest.mark.parametrize(
    "text",
    ["", "junk\n", "0 99999999999\n", "5 3\n", "\xff", "0 100", "-1 5\n", "9" * 5000 + " 1\n"],
)
def test_a_damaged_journal_costs_bytes_never_truth(bed: Bed, text: str) -> None:
    pin, folder = bed.pin(), bed.place().partial_folder
    folder.mkdir(parents=True)
    (folder / pin.want).write_bytes(b"\0" * pin.size_bytes)
    (folder / f"{pin.want}.journal").write_text(text, encoding="latin-1")
    bed.fetch()
    bed.require_right()


def test_a_file_that_is_there_but_wrong_is_replaced(bed: Bed) -> None:
    bed.fetch()
    data = bytearray(bed.files[BIG])
    data[77] ^= 1
    (bed.folder / BIG).write_bytes(data)
    (bed.folder / SMALL).write_bytes(b"short")
    assert sorted(bed.fetch()) == sorted([BIG, SMALL])
    bed.require_right()


def test_a_subset_leaves_the_rest_of_an_interrupted_fetch_alone(bed: Bed) -> None:
    bed.hub.fail(BIG, fault.cut(MIDDLE), times=ALWAYS)
    with pytest.raises(SourceUnreachable):
        bed.fetch(jobs=1)
    bed.hub.forgive()
    bed.fetch(pins=[bed.pin(SMALL)])
    assert (bed.place().partial_folder / bed.pin().want).exists()
    bed.require_absent()


def test_partial_files_that_no_lock_names_are_dropped(bed: Bed) -> None:
    folder = bed.place().partial_folder
    folder.mkdir(parents=True)
    (folder / ("0" * 64)).write_bytes(b"of an older lock")
    bed.fetch()
    assert not folder.exists()


def test_two_names_of_one_content_are_one_download(bed: Bed) -> None:
    bed.publish({**bed.files, "again/copy.safetensors": bed.files[BIG]})
    bed.fetch()
    bed.require_right()
    assert bed.hub.sent_bytes("*.safetensors") == FILE_BYTES


def test_an_empty_file_and_odd_names_arrive(bed: Bed) -> None:
    bed.publish({"empty.txt": b"", "a b/ü#?%.json": b"{}", "big #1?.bin": big_bytes(70_000)})
    bed.fetch()
    bed.require_right()


@pytest.mark.parametrize(
    "size", [1, RANGE_BYTES - 1, RANGE_BYTES, RANGE_BYTES + 1, 2 * RANGE_BYTES]
)
def test_sizes_around_a_range_arrive(bed: Bed, size: int) -> None:
    bed.publish({"a.bin": big_bytes(size)})
    bed.fetch(jobs=3)
    bed.require_right()


def test_a_limit_holds_over_all_connections(bed: Bed) -> None:
    start = time.monotonic()
    bed.fetch(jobs=4, limit_bytes_per_s=FILE_BYTES)
    assert 0.6 < time.monotonic() - start < 20
    bed.require_right()


def test_too_small_a_disk_is_refused_before_the_first_byte(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.weights.transfer import fetch

    monkeypatch.setattr(fetch, "LEAVE_FREE_BYTES", 1 << 60)
    with pytest.raises(DiskFull):
        bed.fetch()
    assert bed.hub.sent_bytes() == 0


def test_a_disk_that_fills_up_on_the_way_keeps_what_came(
    bed: Bed, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.weights.transfer import fetch

    bed.publish({"big.safetensors": big_bytes(4 << 20)})
    bed.folder = small_disk
    monkeypatch.setattr(fetch, "LEAVE_FREE_BYTES", -(1 << 30))
    with pytest.raises(DiskFull):
        bed.fetch()
    bed.require_absent("big.safetensors")


def test_a_real_small_disk_is_measured(bed: Bed, small_disk: Path) -> None:
    bed.folder = small_disk
    with pytest.raises(DiskFull, match="are free"):
        bed.fetch()
    assert bed.hub.sent_bytes() == 0


def test_a_folder_of_another_set_is_refused(bed: Bed) -> None:
    bed.fetch()
    other = sealed_weights_lock(bed.spec(name="other"), bed.commit, bed.lock().files)
    new_place(bed.folder, other, hub_cache=False).keep_lock()
    before = bed.place().lock_file.read_bytes()
    (bed.folder / SMALL).write_bytes(b"of the other set")
    with pytest.raises(SpecInvalid, match="holds other"):
        bed.fetch()
    assert bed.place().lock_file.read_bytes() == before
    assert (bed.folder / SMALL).read_bytes() == b"of the other set"


_BY_CASE = {"a.json": b"small", "A.json": b"LARGE", "d/b.bin": b"1", "D/b.bin": b"2"}


@pytest.mark.parametrize("hub_cache", [False, True])
def test_names_that_differ_in_letter_case_are_fetched_side_by_side(
    bed: Bed, hub_cache: bool
) -> None:
    bed.publish(_BY_CASE)
    place = bed.place(hub_cache=hub_cache)
    bed.fetch(place=place)
    files = {pin.path: place.name(pin).read_bytes() for pin in place.lock.files}
    assert files == _BY_CASE


def test_a_disk_that_ignores_letter_case_is_asked_before_the_first_byte(bed: Bed) -> None:
    bed.publish({"a.json": b"small", "A.json": b"LARGE"})
    (bed.folder / ".SM120").mkdir(parents=True)  # such a disk finds .sm120 under this name, too
    with pytest.raises(StoreUnwritable, match=r"A\.json and a\.json are one file on this disk"):
        bed.fetch()
    assert bed.hub.sent_bytes() == 0
    bed.publish({"a.json": b"small"})
    bed.fetch()


def test_a_folder_under_a_files_name_is_refused(bed: Bed) -> None:
    (bed.folder / BIG).mkdir(parents=True)
    with pytest.raises(StoreUnwritable, match="is a folder"):
        bed.fetch()
    assert bed.hub.sent_bytes() == 0


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_to_another_folder_is_not_written_through(
    bed: Bed, tmp_path: Path, is_there: bool
) -> None:
    bed.publish({"sub/deep/model.safetensors": big_bytes(), "config.json": b"{}"})
    outside = tmp_path / "outside"
    if is_there:
        (outside / "deep").mkdir(parents=True)
        (outside / "deep" / "model.safetensors").write_bytes(b"of another model")
    bed.folder.mkdir()
    (bed.folder / "sub").symlink_to(outside)
    with pytest.raises(StoreUnwritable, match=r"sub/deep: leads out of .*, to .*outside/deep"):
        bed.fetch()
    assert bed.hub.sent_bytes() == 0
    kept = [path.read_bytes() for path in outside.rglob("*") if path.is_file()]
    assert kept == ([b"of another model"] if is_there else [])


def test_a_link_to_a_folder_beside_it_is_followed(bed: Bed) -> None:
    bed.publish({"sub/model.safetensors": big_bytes(), "config.json": b"{}"})
    (bed.folder / "real").mkdir(parents=True)
    (bed.folder / "sub").symlink_to("real")
    bed.fetch()
    assert (bed.folder / "real" / "model.safetensors").read_bytes() == big_bytes()


def test_a_file_in_the_place_of_a_folder_is_refused_before_the_first_byte(bed: Bed) -> None:
    bed.publish({"sub/deep/model.safetensors": big_bytes()})
    bed.folder.mkdir()
    (bed.folder / "sub").write_bytes(b"x")
    with pytest.raises(StoreUnwritable, match="sub: is not a folder"):
        bed.fetch()
    assert bed.hub.sent_bytes() == 0


def test_a_folder_that_is_a_file_is_refused(bed: Bed) -> None:
    bed.folder.write_bytes(b"")
    with pytest.raises(StoreUnwritable):
        bed.fetch()


def test_a_read_only_folder_is_refused(bed: Bed) -> None:
    bed.folder.mkdir(mode=0o500)
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(bed.folder)]
    is_root = os.geteuid() == 0  # whom no mode keeps out
    if is_root and subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("Root may write everywhere here.")
    try:
        with pytest.raises(StoreUnwritable):
            bed.fetch()
    finally:
        if is_root:
            subprocess.run(["umount", "--lazy", str(bed.folder)], check=True)
    assert bed.hub.sent_bytes() == 0


def test_two_fetches_at_once_share_the_work(bed: Bed) -> None:
    place = bed.place()
    bed.hub.bytes_per_s = 2_000_000
    errors: list[BaseException] = []

    def work() -> None:
        try:
            bed.fetch(place)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert bed.hub.sent_bytes(BIG) == FILE_BYTES
    bed.require_right(place)


def test_a_range_is_delivered_as_the_source_has_it(bed: Bed) -> None:
    client = NetClient(bed.settings)
    routes = find_routes(client, bed.lock(), endpoint=bed.hub.url, token=TOKEN)
    for start, stop in ((0, 10), (5, 5), (1000, 300_000), (FILE_BYTES - 1, FILE_BYTES)):
        bed.hub.fail(BIG, fault.cut(start + (stop - start) // 2))
        got = b"".join(fetch_range(routes, bed.pin(), start, stop, client=client))
        assert got == bed.files[BIG][start:stop]


def test_a_range_from_a_server_without_ranges_is_still_the_range(bed: Bed) -> None:
    client = NetClient(bed.settings)
    routes = find_routes(client, bed.lock(), endpoint=bed.hub.url, token=TOKEN)
    bed.hub.fail(BIG, fault.whole_file(), times=ALWAYS)
    got = b"".join(fetch_range(routes, bed.pin(), 70_000, 90_000, client=client))
    assert got == bed.files[BIG][70_000:90_000]


def test_random_faults_leave_no_wrong_file(bed: Bed) -> None:
    chance = random.Random(4)
    kinds = (fault.flip, fault.cut, fault.reset)
    for _ in range(25):
        bed.hub.forgive()
        for _ in range(chance.randrange(1, 4)):
            bed.hub.fail(BIG, chance.choice(kinds)(chance.randrange(FILE_BYTES)))
        target = new_place(bed.folder, bed.lock(), hub_cache=False)
        (bed.folder / BIG).unlink(missing_ok=True)
        try:
            bed.fetch(target, jobs=chance.randrange(1, 5), pins=[bed.pin()])
        except DigestMismatch:
            bed.require_absent()
            continue
        assert hashlib.sha256((bed.folder / BIG).read_bytes()).hexdigest() == bed.pin().want


def test_a_partial_file_hashes_in_order_whatever_order_the_ranges_come_in(tmp_path: Path) -> None:
    data = big_bytes(1000)
    pin = FilePin(path="a", size_bytes=1000, sha256=hashlib.sha256(data).hexdigest())
    partial_file = PartialFile(pin, tmp_path, 100)
    partial_file.begin()
    spans = []
    while span := partial_file.take():
        spans.append(span)
    for start, stop in reversed(spans):
        partial_file.write((start, stop), start, memoryview(data[start:stop]))
        partial_file.note(start, stop)
        partial_file.give_back([])
        partial_file.catch_up()
    assert partial_file.claim_end()
    assert not partial_file.claim_end()
    assert partial_file.hash.digest == pin.want
    partial_file.forget()


@pytest.mark.parametrize("fails", [False, True])
def test_noted_bytes_go_to_the_disk_before_the_sync_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    begun: list[tuple[int, int]] = []

    def begin_writing(file: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        begun.append((start, length))
        if fails:
            raise OSError("this file system takes no advice")

    monkeypatch.setattr(os, "posix_fadvise", begin_writing)
    data = big_bytes(1000)
    pin = FilePin(path="a", size_bytes=1000, sha256=hashlib.sha256(data).hexdigest())
    partial_file = PartialFile(pin, tmp_path, 500)
    partial_file.begin()
    for span in (partial_file.take(), partial_file.take()):
        assert span is not None
        partial_file.write(span, span[0], memoryview(data[slice(*span)]))
        partial_file.note(*span)
        partial_file.give_back([])
    assert begun == [(0, 500), (500, 500)]
    partial_file.catch_up()
    assert partial_file.claim_end()
    assert partial_file.hash.digest == pin.want
    partial_file.forget()


def test_a_link_in_the_place_of_a_file_gives_way_to_the_file(bed: Bed, tmp_path: Path) -> None:
    place = bed.place()
    bed.fetch(place)
    path = place.file(next(p for p in place.lock.files if p.path == BIG))
    elsewhere = path.rename(tmp_path / "elsewhere")
    path.symlink_to(elsewhere)
    assert bed.fetch(place) == [BIG]
    assert not path.is_symlink()
    bed.require_right(place)
