from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pipeline.core.errors import DigestMismatch, OfflineMiss, SourceUnreachable
from pipeline.weights.place import new_place
from pipeline.weights.transfer.router import Attempts
from tests.testbed import hub_faults as fault
from tests.testbed.hub import ALWAYS, TestHub, test_hub
from tests.unit.weights.conftest import BIG, RANGE_BYTES, SMALL, Bed, big_bytes

FILE_BYTES = len(big_bytes())
MIDDLE = FILE_BYTES // 2


def test_a_neighbour_is_asked_first_and_without_the_hubs_token(bed: Bed) -> None:
    with test_hub() as neighbour:
        neighbour.add("org/tiny", bed.files)
        bed.lock()
        bed.hub.asked.clear()
        bed.fetch(neighbours=(neighbour.url,))
        assert neighbour.sent_bytes(BIG) == FILE_BYTES
        assert not any(a.has_token for a in neighbour.asked)
    assert bed.hub.asked == []
    bed.require_right()


@contextmanager
def neighbours(bed: Bed, count: int) -> Iterator[list[TestHub]]:
    """Other machines that serve the same set, slow enough that none does all by itself."""
    with ExitStack() as stack:
        served = [stack.enter_context(test_hub(bytes_per_s=2 << 20)) for _ in range(count)]
        for each in served:
            each.add("org/tiny", bed.files)
        yield served


def test_two_neighbours_are_both_used_and_the_hub_is_not(bed: Bed) -> None:
    bed.lock()
    bed.hub.asked.clear()
    with neighbours(bed, 2) as (one, other):
        bed.fetch(neighbours=(one.url, other.url))
        assert one.sent_bytes() + other.sent_bytes() == sum(map(len, bed.files.values()))
        for each in (one, other):
            assert each.sent_bytes(BIG) > RANGE_BYTES
    assert bed.hub.asked == []
    bed.require_right()


def test_a_folder_and_a_neighbour_are_both_used(bed: Bed, tmp_path: Path) -> None:
    bed.publish({f"part-{i}.safetensors": big_bytes(seed=i) for i in range(4)})
    bed.fetch(new_place(tmp_path / "source", bed.lock(), hub_cache=False))
    sent = bed.hub.sent_bytes()
    with neighbours(bed, 1) as (one,):
        bed.fetch(neighbours=(str(tmp_path / "source"), one.url))
        assert 0 < one.sent_bytes() < 4 * FILE_BYTES
    assert bed.hub.sent_bytes() == sent
    bed.require_right()


@pytest.mark.parametrize("liar", [0, 1])
def test_one_of_two_neighbours_that_lies_is_found_out_without_the_hub(bed: Bed, liar: int) -> None:
    bed.lock()
    with neighbours(bed, 2) as served:
        for at in range(0, FILE_BYTES, RANGE_BYTES):
            served[liar].fail(BIG, fault.flip(at + 7), times=ALWAYS)
        bed.fetch(neighbours=tuple(each.url for each in served), endpoint="http://127.0.0.1:9")
    bed.require_right()


def test_two_neighbours_that_both_lie_end_with_an_error_and_no_file(bed: Bed) -> None:
    bed.lock()
    with neighbours(bed, 2) as served:
        for each in served:
            each.fail(BIG, fault.flip(MIDDLE), times=ALWAYS)
        bed.hub.fail(BIG, fault.flip(MIDDLE), times=ALWAYS)
        with pytest.raises(DigestMismatch, match=BIG):
            bed.fetch(neighbours=tuple(each.url for each in served))
    bed.require_absent()
    assert list(bed.place().partial_folder.glob("*")) == []


def test_a_neighbour_that_dies_on_the_way_leaves_its_part_to_the_other(bed: Bed) -> None:
    bed.lock()
    with neighbours(bed, 2) as (one, other):
        one.fail(BIG, fault.cut(RANGE_BYTES // 2), times=1)
        one.fail("*", fault.status(503), times=ALWAYS)
        bed.fetch(neighbours=(one.url, other.url), endpoint="http://127.0.0.1:9")
        assert other.sent_bytes(BIG) > FILE_BYTES // 2
    bed.require_right()


def test_what_a_neighbour_lacks_comes_from_the_hub(bed: Bed) -> None:
    place = bed.place()
    with test_hub() as neighbour:
        commit = neighbour.add("org/tiny", {SMALL: bed.files[SMALL]})
        repository = neighbour.repositories["org/tiny"]
        repository.commits[bed.commit] = repository.commits.pop(commit)
        bed.fetch(place, neighbours=(neighbour.url,))
        assert neighbour.sent_bytes(SMALL) > 0
    assert bed.hub.sent_bytes(BIG) == FILE_BYTES
    bed.require_right()


def test_a_neighbour_that_lies_is_found_out_and_the_hub_asked(bed: Bed) -> None:
    with test_hub() as neighbour:
        neighbour.add("org/tiny", bed.files)
        neighbour.fail(BIG, fault.flip(MIDDLE), times=ALWAYS)
        bed.fetch(neighbours=(neighbour.url,))
    bed.require_right()


def test_a_neighbour_that_is_switched_off_does_not_matter(bed: Bed) -> None:
    bed.fetch(neighbours=("http://127.0.0.1:9",))
    bed.require_right()


def test_where_nobody_delivers_everybody_is_named(bed: Bed) -> None:
    place = bed.place()
    with pytest.raises(SourceUnreachable) as error:
        bed.fetch(place, neighbours=("http://127.0.0.1:9",), endpoint="http://127.0.0.1:19")
    assert "(127.0.0.1:9)" in str(error.value)
    assert "(plain HTTP)" in str(error.value)


def test_without_network_a_fetch_ends_after_each_way_was_tried(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed.lock()
    pauses: list[float] = []
    monkeypatch.setattr(Attempts, "_wait", lambda self, wait_s: pauses.append(wait_s))
    with pytest.raises(SourceUnreachable, match="Connection refused"):
        bed.fetch(endpoint="http://127.0.0.1:19", pins=[bed.pin()], jobs=1)
    # a pause after each failure but the last: plain HTTP, Xet where it is here, and one again
    assert len(pauses) == 1 + (importlib.util.find_spec("hf_xet") is not None)


def test_a_folder_delivers_offline(bed: Bed, tmp_path: Path) -> None:
    place = bed.place()
    for hub_cache in (False, True):
        source = tmp_path / f"source-{hub_cache}"
        bed.fetch(new_place(source, place.lock, hub_cache=hub_cache))
        target = new_place(tmp_path / f"target-{hub_cache}", place.lock, hub_cache=False)
        bed.hub.asked.clear()
        bed.fetch(target, neighbours=(str(source),), offline=True, endpoint="http://127.0.0.1:9")
        assert bed.hub.asked == []
        bed.require_right(target)


def test_a_folder_with_wrong_bytes_is_not_trusted(bed: Bed, tmp_path: Path) -> None:
    source = tmp_path / "source"
    bed.fetch(new_place(source, bed.lock(), hub_cache=False))
    with (source / BIG).open("r+b") as handle:
        handle.write(b"\0")
    with pytest.raises(DigestMismatch, match=BIG):
        bed.fetch(neighbours=(str(source),), offline=True)
    bed.require_absent()
    bed.fetch(neighbours=(str(source),))
    bed.require_right()


def test_offline_without_a_folder_names_the_first_missing_file(bed: Bed) -> None:
    with pytest.raises(OfflineMiss):
        bed.fetch(offline=True)


def test_offline_with_everything_there_is_content(bed: Bed) -> None:
    bed.fetch()
    assert bed.fetch(offline=True) == []
