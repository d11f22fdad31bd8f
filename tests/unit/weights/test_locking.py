from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from pipeline.core.errors import DigestMismatch, HubBroken, RevisionMoved, SpecInvalid
from pipeline.weights.model import FilePin, WeightsLock, sealed_weights_lock
from pipeline.weights.transfer.lookup import diff_weights_locks, look_up
from tests.testbed import hub_faults as fault
from tests.testbed.hub import Stage
from tests.unit.weights.conftest import BIG, SMALL, Bed, big_bytes

INDEX = "model.safetensors.index.json"


def index(*shards: str) -> bytes:
    return json.dumps({"weight_map": {f"w{i}": s for i, s in enumerate(shards)}}).encode()


def reader(bed: Bed) -> Callable[[FilePin, str], bytes]:
    return lambda pin, commit: bed.files[pin.path]


def test_a_lock_names_every_wanted_file_of_one_commit(bed: Bed) -> None:
    looked = look_up(bed.spec(exclude=["*.py"]), bed.asker(), reader(bed))
    assert looked.lock.commit == bed.commit
    assert [pin.path for pin in looked.lock.files] == [SMALL, BIG]
    assert looked.warnings == []


def test_remote_code_is_part_of_the_set_unless_excluded(bed: Bed) -> None:
    looked = look_up(bed.spec(), bed.asker(), reader(bed))
    assert "code/modeling.py" in [pin.path for pin in looked.lock.files]


def test_the_same_commit_gives_the_same_seal(bed: Bed) -> None:
    first, second = (look_up(bed.spec(), bed.asker(), reader(bed)).lock for _ in range(2))
    assert first == second


def test_a_revision_that_moves_in_between_is_refused(bed: Bed) -> None:
    def move() -> None:
        bed.hub.add("org/tiny", {"new.json": b"{}"})

    stages: tuple[Stage, ...] = ("info", "tree")
    for stage in stages:
        bed.publish(bed.files)
        bed.hub.fail("*", fault.then(move), stage=stage)
        with pytest.raises(RevisionMoved, match=bed.commit):
            look_up(bed.spec(), bed.asker(), reader(bed))


def test_a_spec_for_a_commit_cannot_move(bed: Bed) -> None:
    spec = bed.spec(revision=bed.commit)
    bed.hub.add("org/tiny", {"new.json": b"{}"})
    assert look_up(spec, bed.asker(), reader(bed)).lock.commit == bed.commit


def test_a_hub_that_takes_another_commit_for_the_specified_one_is_refused(bed: Bed) -> None:
    spec = bed.spec(revision="0" * 40)
    bed.hub.repositories["org/tiny"].refs["0" * 40] = bed.commit
    with pytest.raises(HubBroken, match="0000"):
        look_up(spec, bed.asker(), reader(bed))


def test_a_spec_that_fits_no_file_is_refused(bed: Bed) -> None:
    with pytest.raises(SpecInvalid, match="all of 3"):
        look_up(bed.spec(include=["*.gguf"]), bed.asker(), reader(bed))


def test_names_that_differ_in_letter_case_are_two_files(bed: Bed) -> None:
    bed.publish({"a.json": b"1", "A.json": b"2"})
    lock = look_up(bed.spec(), bed.asker(), reader(bed)).lock
    assert [pin.path for pin in lock.files] == ["A.json", "a.json"]


def test_shards_that_an_index_names_and_the_repository_lacks_are_reported(bed: Bed) -> None:
    bed.publish({**bed.files, INDEX: index(BIG, "gone.safetensors")})
    (warning,) = look_up(bed.spec(), bed.asker(), reader(bed)).warnings
    assert "1 shards that the repository lacks (gone.safetensors)" in warning


def test_shards_that_the_spec_leaves_out_are_reported(bed: Bed) -> None:
    other = "other.safetensors"
    bed.publish({**bed.files, other: big_bytes(seed=2), f"sub/{INDEX}": index("a.safetensors")})
    bed.publish({**bed.files, INDEX: index(BIG, other)})
    looked = look_up(bed.spec(exclude=["other*", "sub/*"]), bed.asker(), reader(bed))
    assert len(looked.warnings) == 1
    assert "the spec leaves out (other.safetensors)" in looked.warnings[0]


def test_an_index_in_a_folder_names_its_neighbours(bed: Bed) -> None:
    bed.publish({f"sub/{INDEX}": index("a.safetensors"), "sub/a.safetensors": b"1"})
    assert look_up(bed.spec(), bed.asker(), reader(bed)).warnings == []


def test_a_whole_index_is_quiet(bed: Bed) -> None:
    bed.publish({**bed.files, INDEX: index(BIG)})
    assert look_up(bed.spec(), bed.asker(), reader(bed)).warnings == []


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (index(BIG)[:-1], HubBroken),
        (b"[]", HubBroken),
        (b'{"weight_map": {"a": 1}}', HubBroken),
        (b'{"weight_map": {"a": "b", "a": "c"}}', HubBroken),
        (b"[" * 100_000, HubBroken),
    ],
)
def test_an_index_that_is_none_is_refused(bed: Bed, data: bytes, error: type[HubBroken]) -> None:
    bed.publish({**bed.files, INDEX: data})
    with pytest.raises(error, match=INDEX):
        look_up(bed.spec(), bed.asker(), reader(bed))


def test_an_index_that_comes_with_other_bytes_is_refused(bed: Bed) -> None:
    bed.publish({**bed.files, INDEX: index(BIG)})
    with pytest.raises(DigestMismatch, match=INDEX):
        look_up(bed.spec(), bed.asker(), lambda pin, commit: index("other"))


def test_parts_that_are_not_all_there_are_reported(bed: Bed) -> None:
    bed.publish({f"q-0000{i}-of-00003.gguf": b"%d" % i for i in (1, 3)})
    (warning,) = look_up(bed.spec(), bed.asker(), reader(bed)).warnings
    assert warning == "q-*-of-00003.gguf: only 2 of 3 parts"


def test_a_diff_says_what_came_went_and_changed(bed: Bed) -> None:
    def lock(**files: str) -> WeightsLock:
        pins = [FilePin(path=p, size_bytes=1, sha256=c * 64) for p, c in files.items()]
        return sealed_weights_lock(bed.spec(), files["a"] * 40, pins)

    old, new = lock(a="1", b="2", c="3"), lock(a="1", b="4", d="5")
    moves = [(m.kind, m.path) for m in diff_weights_locks(old, new)]
    assert moves == [("changed", "b"), ("removed", "c"), ("added", "d")]
    assert diff_weights_locks(old, old) == []
    assert [m.kind for m in diff_weights_locks(None, old)] == ["commit", "added", "added", "added"]
    assert diff_weights_locks(old, lock(a="6", b="2", c="3"))[0].kind == "commit"
