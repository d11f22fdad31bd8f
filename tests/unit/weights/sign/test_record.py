from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from pipeline.artifacts.attest.names import WEIGHTS
from pipeline.artifacts.attest.predicates import WeightsVerification, check_predicate
from pipeline.core.errors import RecordInvalid
from pipeline.weights.check.verify import WeightsVerifyOptions, verify_files
from pipeline.weights.place import LockedFolder, find_places
from pipeline.weights.sign.record import set_digest, verification, weights_statement
from tests.testbed.locked_set import SMALL, make_set
from tests.unit.support import Command

LARGE = {"model.safetensors": b"weights" * 1000}


def at_noon(result: WeightsVerification) -> WeightsVerification:
    return result.model_copy(update={"at": "2026-01-02T12:00:00Z"})


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LockedFolder:
    monkeypatch.setattr("pipeline.weights.disk.receipt.CLOCK_TICK_NS", -(10**9))
    return make_set(tmp_path / "set", SMALL, LARGE)


def test_a_record_of_one_moment_is_the_same_bytes_every_time(place: LockedFolder) -> None:
    verify_files(place, WeightsVerifyOptions())
    first, second = (
        json.dumps(weights_statement(place, at_noon(verification(place))).as_json())
        for _ in range(2)
    )
    assert first == second
    assert json.loads(first)["predicate"]["verification"]["at"] == "2026-01-02T12:00:00Z"


def test_its_subjects_are_the_lock_file_and_the_set(place: LockedFolder, tmp_path: Path) -> None:
    lock, files = weights_statement(place, verification(place)).as_json()["subject"]
    assert lock["digest"]["sha256"] == hashlib.sha256(place.lock_file.read_bytes()).hexdigest()
    assert files["name"] == f"org/tiny@{place.lock.commit}"
    other = make_set(tmp_path / "other", {**SMALL, "config.json": b"{}"}, LARGE)
    assert set_digest(other.lock) != set_digest(place.lock)


def test_what_no_receipt_vouches_for_is_unknown_and_says_why(place: LockedFolder) -> None:
    result = verification(place)
    assert (result.result, result.files_read) == ("unknown", 0)
    assert "no receipt vouches for 6 files" in result.why[0]


def test_a_receipt_or_a_full_read_makes_it_verified(place: LockedFolder) -> None:
    full = verification(place, full=True)
    assert (full.result, full.how, full.files_read) == ("verified", "full", 6)
    later = verification(place)
    assert (later.result, later.how, later.files_by_receipt) == ("verified", "receipt", 6)


@pytest.mark.parametrize("fault", ["flipped", "short", "missing", "extra code", "touched"])
def test_a_moved_file_is_never_verified(place: LockedFolder, fault: str) -> None:
    verify_files(place, WeightsVerifyOptions())
    path = place.root / "model.safetensors"
    data = path.read_bytes()
    if fault == "flipped":
        path.write_bytes(b"?" + data[1:])
    if fault == "short":
        path.write_bytes(data[:-1])
    if fault == "missing":
        path.unlink()
    if fault == "extra code":
        (place.root / "evil.py").write_bytes(b"")
    if fault == "touched":
        os.utime(path, ns=(1, 1))
    quick = verification(place)
    assert quick.result == ("unknown" if fault in ("flipped", "touched") else "damaged")
    assert quick.why
    full = verification(place, full=True)
    assert full.result == ("verified" if fault == "touched" else "damaged")


def test_sets_that_share_a_snapshot_are_no_damage_to_each_other(tmp_path: Path) -> None:
    make_set(tmp_path, {}, {"q3.gguf": b"three"}, name="q3", hub_cache=True)
    make_set(tmp_path, {}, {"q4.gguf": b"four"}, name="q4", hub_cache=True)
    places = find_places(tmp_path)
    results = [verification(p, places, full=True).result for p in places]
    assert results == ["verified", "verified"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("files", -1), ("commit", "main"), ("layout", "zip"), ("more", 1), ("repository", "x")),
        *(("repository", "org/tinỵ"), ("tool", {"version": "1"}), ("lock", {"name": "a b"})),
    ],
)
def test_a_record_cannot_hold_what_the_model_does_not_allow(
    place: LockedFolder, name: str, value: object
) -> None:
    predicate = weights_statement(place, verification(place)).predicate
    check_predicate(WEIGHTS, predicate)
    with pytest.raises(RecordInvalid):
        check_predicate(WEIGHTS, {**predicate, name: value})


def test_a_record_says_why_even_where_there_is_nothing_to_say(place: LockedFolder) -> None:
    predicate = weights_statement(place, verification(place, full=True)).predicate
    check_predicate(WEIGHTS, predicate)
    assert predicate["verification"].pop("why") == []
    with pytest.raises(RecordInvalid, match="why"):
        check_predicate(WEIGHTS, predicate)


def test_the_command_prints_it_and_fails_on_damage(place: LockedFolder, sm120: Command) -> None:
    done = sm120("weights", "attest", str(place.root), "--full")
    assert (done.code, json.loads(done.out)["predicate"]["lock"]["seal"]) == (0, place.lock.seal)
    (place.root / "config.json").unlink()
    bad = sm120("weights", "attest", str(place.root))
    assert bad.error == "WeightsDamaged"
    assert json.loads(bad.out)["predicate"]["verification"]["result"] == "damaged"
