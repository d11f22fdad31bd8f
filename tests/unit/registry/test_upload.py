from __future__ import annotations

import random
from pathlib import Path

import pytest

from pipeline.artifacts.registry import upload
from pipeline.artifacts.registry.repository import Repository
from pipeline.artifacts.registry.upload import LocalBlob, push_blob
from pipeline.core.errors import PipelineError, RegistryBroken, RegistryUnreachable, StoreDamaged
from pipeline.core.log import NoBar
from tests.testbed.oci_door import Door, Reply, cut, drop, lose_answer, oci_door, status
from tests.testbed.oci_door import changed as changed_answer
from tests.testbed.tiny_registry import TinyRegistry, digest_of
from tests.unit.registry.support import NAME, blob_of, push

KB = 1 << 10
DATA = random.Random(2).randbytes(10 * KB - 1) + b"."  # the same in every run


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "CHUNK_BYTES", 4 * KB)
    monkeypatch.setattr(upload, "SMALL_CHUNK_BYTES", KB)
    monkeypatch.setattr(upload, "_PIECE_BYTES", KB)


class CountingBar:
    """What a person would have seen."""

    def __init__(self) -> None:
        self.done = 0

    def advance(self, n_bytes: int) -> None:
        self.done += n_bytes


def test_a_small_blob_goes_in_one_request(
    repository: Repository, door: Door, tiny: TinyRegistry
) -> None:
    assert push(repository, b"small") == "sent"
    assert tiny.blobs[NAME, digest_of(b"small")] == b"small"
    assert door.count("PATCH") == 0


def test_a_file_is_sent_to_its_last_byte(
    repository: Repository, tiny: TinyRegistry, tmp_path: Path
) -> None:
    path = tmp_path / "blob"
    path.write_bytes(DATA)
    blob = LocalBlob(digest_of(DATA), len(DATA), path)
    assert b"".join(blob.pieces(5, 3 * KB)) == DATA[5 : 5 + 3 * KB]
    blob.require_whole()
    assert push_blob(repository, blob, CountingBar()) == "sent"
    assert tiny.blobs[NAME, digest_of(DATA)] == DATA


def test_waits_begin_short_and_grow_with_each_failure_in_a_row(
    repository: Repository, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[int] = []
    monkeypatch.setattr(
        repository.client.retry_policy, "pause", lambda turn, lost: waited.append(turn)
    )
    door.fail("PATCH", "uploads", drop(), times=99)
    with pytest.raises(RegistryUnreachable):
        push(repository, DATA)
    assert waited == [0, 1, 2, 3]


@pytest.mark.parametrize("code", [403, 409, 422])
def test_a_chunk_that_is_refused_for_good_is_not_sent_in_another_way(
    repository: Repository, door: Door, code: int
) -> None:
    door.fail("PATCH", "uploads", status(code), times=9)
    with pytest.raises(PipelineError, match=str(code)):
        push(repository, DATA)
    assert (door.count("PATCH"), door.count("PUT")) == (1, 0)


def test_a_large_blob_goes_in_chunks(
    repository: Repository, door: Door, tiny: TinyRegistry
) -> None:
    push(repository, DATA)
    assert tiny.blobs[NAME, digest_of(DATA)] == DATA
    assert door.count("PATCH") == 3
    assert door.uploaded_bytes == len(DATA)


def test_an_empty_blob_is_sent(repository: Repository, tiny: TinyRegistry) -> None:
    push(repository, b"")
    assert tiny.blobs[NAME, digest_of(b"")] == b""


def test_a_blob_of_a_neighbour_is_mounted_not_sent(
    repository: Repository, door: Door, tiny: TinyRegistry
) -> None:
    tiny.blobs["base", digest_of(DATA)] = DATA
    assert push(repository, DATA, "base") == "mounted"
    assert door.uploaded_bytes == 0
    assert tiny.blobs[NAME, digest_of(DATA)] == DATA


def test_a_mount_that_is_not_possible_becomes_an_upload(
    repository: Repository, tiny: TinyRegistry
) -> None:
    assert push(repository, DATA, "base") == "sent"
    assert tiny.blobs[NAME, digest_of(DATA)] == DATA


@pytest.mark.parametrize("code", [401, 403, 405])
def test_a_neighbour_that_is_closed_to_us_costs_only_the_upload(
    repository: Repository, door: Door, tiny: TinyRegistry, code: int
) -> None:
    tiny.blobs["base", digest_of(DATA)] = DATA
    door.fail("POST", "mount=", status(code, WWW_Authenticate='Basic realm="x"'), times=2)
    assert push(repository, DATA, "base") == "sent"
    assert tiny.blobs[NAME, digest_of(DATA)] == DATA


@pytest.mark.parametrize("after", [0, 1, 1500, 4 * KB - 1])
def test_a_cut_chunk_goes_on_where_the_registry_stands(
    repository: Repository, door: Door, tiny: TinyRegistry, after: int
) -> None:
    door.fail("PATCH", "", cut(after))
    bar = CountingBar()
    push_blob(repository, blob_of(DATA), bar)
    assert tiny.blobs[NAME, digest_of(DATA)] == DATA
    # one byte cannot be told from none (registries write both as 0-0): it is sent again
    assert door.uploaded_bytes <= len(DATA) + 1
    assert bar.done == len(DATA)


def test_a_cut_in_a_single_request_goes_on(
    repository: Repository, door: Door, tiny: TinyRegistry
) -> None:
    data = DATA[: 4 * KB]
    door.fail("PUT", "uploads", cut(2 * KB))
    push(repository, data)
    assert tiny.blobs[NAME, digest_of(data)] == data
    assert door.uploaded_bytes == len(data)


@pytest.mark.parametrize("method", ["PATCH", "PUT"])
def test_an_answer_that_is_lost_is_asked_for(
    repository: Repository, door: Door, tiny: TinyRegistry, method: str
) -> None:
    door.fail(method, "uploads", lose_answer())
    push(repository, DATA)
    assert tiny.blobs[NAME, digest_of(DATA)] == DATA
    assert door.uploaded_bytes == len(DATA)


@pytest.mark.parametrize("code", [429, 500, 503])
@pytest.mark.parametrize("method", ["POST", "PATCH", "PUT"])
def test_a_bad_moment_at_any_step_passes(
    repository: Repository, door: Door, tiny: TinyRegistry, method: str, code: int
) -> None:
    door.fail(method, "uploads", status(code, Retry_After="0"), times=2)
    push(repository, DATA)
    assert tiny.blobs[NAME, digest_of(DATA)] == DATA


@pytest.mark.parametrize("method", ["POST", "PATCH", "PUT"])
def test_a_bad_day_at_any_step_is_an_error_in_bounded_tries(
    repository: Repository, door: Door, method: str
) -> None:
    door.fail(method, "uploads", status(500), times=99)
    with pytest.raises(RegistryUnreachable):
        push(repository, DATA)
    assert len(door.asked) < 40


def test_a_lost_session_begins_the_blob_again(
    repository: Repository, door: Door, tiny: TinyRegistry
) -> None:
    def forget(reply: Reply) -> Reply:
        tiny.uploads.clear()
        return reply

    door.fail("PATCH", "", changed_answer(forget))
    push(repository, DATA)
    assert tiny.blobs[NAME, digest_of(DATA)] == DATA
    assert door.count("POST") == 2


def test_a_registry_that_loses_every_session_is_given_up(
    repository: Repository, door: Door, tiny: TinyRegistry
) -> None:
    door.fail("PATCH", "", status(404), times=99)
    with pytest.raises(RegistryUnreachable):
        push(repository, DATA)
    assert door.count("POST") <= 6


def test_a_registry_without_chunks_gets_the_blob_whole(
    repository: Repository, door: Door, tiny: TinyRegistry
) -> None:
    tiny.takes_chunks = False
    push(repository, DATA)
    assert tiny.blobs[NAME, digest_of(DATA)] == DATA
    assert door.count("PATCH") == 1


@pytest.mark.parametrize(("method", "size"), [("PUT", 4 * KB), ("PATCH", 10 * KB)])
def test_a_proxy_that_finds_it_too_much_gets_smaller_pieces(
    repository: Repository, door: Door, tiny: TinyRegistry, method: str, size: int
) -> None:
    door.fail(method, "uploads", status(413))
    push(repository, DATA[:size])
    assert tiny.blobs[NAME, digest_of(DATA[:size])] == DATA[:size]
    assert max(a.size_bytes for a in door.asked[-4:]) <= KB


def test_a_proxy_that_finds_everything_too_much_is_an_error(
    repository: Repository, door: Door
) -> None:
    door.fail("PUT", "uploads", status(413), times=99)
    door.fail("PATCH", "uploads", status(413), times=99)
    with pytest.raises(PipelineError, match="413"):
        push(repository, DATA)
    assert len(door.asked) < 20


def test_a_registry_that_claims_more_than_was_sent_is_refused(
    repository: Repository, door: Door
) -> None:
    door.fail("PATCH", "", status(202, Location="/v2/x/blobs/uploads/1", Range="0-999999"))
    with pytest.raises(RegistryBroken, match="claims"):
        push(repository, DATA)


def test_a_registry_that_keeps_nothing_is_given_up(repository: Repository, door: Door) -> None:
    nothing = status(202, Location=f"/v2/{NAME}/blobs/uploads/1", Range="0-0")
    door.fail("PATCH", "", nothing, times=99)
    door.fail("GET", "uploads", status(204, Range="0-0"), times=99)
    with pytest.raises(RegistryUnreachable, match="kept none"):
        push(repository, DATA)


def test_an_upload_without_a_place_to_go_on_is_refused(repository: Repository, door: Door) -> None:
    door.fail("POST", "uploads", status(202))
    with pytest.raises(RegistryBroken, match="Location"):
        push(repository, DATA)


def test_another_digest_in_the_last_answer_is_refused(repository: Repository, door: Door) -> None:
    door.fail("PUT", "uploads", status(201, Docker_Content_Digest="sha256:" + "0" * 64))
    with pytest.raises(RegistryBroken, match="received"):
        push(repository, DATA)


def test_an_upload_sent_elsewhere_takes_no_login_along(
    repository: Repository, door: Door, tiny: TinyRegistry
) -> None:
    repository.client.authority._headers[repository.may("pull,push")] = "Basic secret"
    with oci_door(tiny) as other:
        tiny.uploads["1"] = bytearray()
        door.fail("POST", "uploads", status(202, Location=f"{other.url}/v2/{NAME}/blobs/uploads/1"))
        push(repository, b"small")
        assert other.uploaded_bytes == 5
        assert [a.headers.get("authorization") for a in other.asked] == [None]
    assert any(a.headers.get("authorization") for a in door.asked)


def test_a_redirected_chunk_is_sent_again_to_the_new_place(
    repository: Repository, door: Door, tiny: TinyRegistry
) -> None:
    with oci_door(tiny) as other:

        def elsewhere(reply: Reply) -> Reply:
            session = next(iter(tiny.uploads))
            tiny.uploads[session].clear()
            return Reply(307, {"Location": f"{other.url}/v2/{NAME}/blobs/uploads/{session}"})

        door.fail("PATCH", "", changed_answer(elsewhere))
        push(repository, DATA)
    assert tiny.blobs[NAME, digest_of(DATA)] == DATA


def test_a_file_that_is_not_what_its_name_says_is_found_out(
    repository: Repository, tmp_path: Path, tiny: TinyRegistry
) -> None:
    path = tmp_path / "blob"
    path.write_bytes(DATA[:-1] + b"x")
    with pytest.raises(StoreDamaged):
        push_blob(repository, LocalBlob(digest_of(DATA), len(DATA), path), NoBar())
    assert not tiny.blobs


def test_a_file_that_is_too_short_is_found_out(repository: Repository, tmp_path: Path) -> None:
    path = tmp_path / "blob"
    path.write_bytes(DATA[:-1])
    with pytest.raises(StoreDamaged):
        push_blob(repository, LocalBlob(digest_of(DATA), len(DATA), path), NoBar())


def test_a_registry_that_calls_good_bytes_wrong_is_broken(
    repository: Repository, door: Door
) -> None:
    body = b'{"errors":[{"code":"DIGEST_INVALID"}]}'
    door.fail("PUT", "uploads", status(400, body))
    with pytest.raises(RegistryBroken, match="DIGEST_INVALID"):
        push(repository, DATA)


def test_a_blob_that_is_there_with_another_size_is_a_contradiction(
    repository: Repository, tiny: TinyRegistry
) -> None:
    tiny.blobs[NAME, digest_of(DATA)] = DATA
    assert repository.has_blob(digest_of(DATA), len(DATA))
    with pytest.raises(RegistryBroken, match="bytes"):
        repository.has_blob(digest_of(DATA), len(DATA) + 1)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_goes_wrong_the_blob_is_whole_or_not_there(
    repository: Repository, door: Door, tiny: TinyRegistry, seed: int
) -> None:
    dice = random.Random(seed)
    faults = [drop(), lose_answer(), cut(dice.randrange(3000)), status(500)]
    for _ in range(dice.randrange(1, 9)):
        method = dice.choice(["POST", "PATCH", "PUT", "GET", "HEAD"])
        door.fail(method, "blobs", dice.choice(faults))
    try:
        push(repository, DATA)
    except PipelineError:
        assert tiny.blobs.get((NAME, digest_of(DATA)), DATA) == DATA
        return
    assert tiny.blobs[NAME, digest_of(DATA)] == DATA
