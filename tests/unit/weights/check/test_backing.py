"""Whose word a lock is: one that was sealed again beside changed files is not believed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from pipeline.artifacts.attest.keys import key_id, read_key_file, read_public
from pipeline.artifacts.attest.trust import trust_entry
from pipeline.weights.model import FilePin, WeightsLock, write_weights_lock
from tests.unit.support import Command
from tests.unit.weights.disk_set import DiskSet, make_set, pin_of

SHARD, CODE = "model-1.safetensors", "modeling.py"
NOTHING = "judged by the lock beside the files, which nothing vouches for"


@dataclass
class Bed:
    """A set, and a checkout that may know it."""

    disk: DiskSet
    sm120: Command

    @property
    def weights(self) -> Path:
        return self.sm120.cwd / "lockfiles" / "weights"

    def make_checkout(self, lock: WeightsLock | None = None, name: str = "tiny") -> None:
        (self.sm120.cwd / "images").mkdir(exist_ok=True)
        self.weights.mkdir(parents=True, exist_ok=True)
        if lock:
            write_weights_lock(self.weights / f"{name}.lock.yaml", lock)

    def reseal(self, **changes: object) -> None:
        """As somebody does who can write the folder."""
        changed = self.disk.place.lock.model_copy(update=changes).sealed()
        write_weights_lock(self.disk.place.lock_file, changed)

    def forge(self, path: str, data: bytes, **changes: object) -> None:
        """Change a file, and say in the lock beside it that this is right."""
        self.disk.path(path).write_bytes(data)
        new = pin_of(path, data)
        pins = [new if pin.path == path else pin for pin in self.disk.place.lock.files]
        self.reseal(files=pins, **changes)

    def weights_command(self, command: str, *more: str) -> tuple[str, str, str]:
        ended = self.sm120("weights", command, str(self.disk.place.root), *more)
        return ended.error, ended.out, ended.err

    def verify(self, *more: str) -> tuple[str, str, str]:
        return self.weights_command("verify", *more)

    def trust(self, name: str = "builder", **changes: object) -> Path:
        """A key of that name, and a trust file that knows it."""
        assert self.sm120("evidence", "new-key", name, "--output", "keys").code == 0
        self.make_checkout()
        public = read_key_file(self.sm120.cwd / "keys" / f"{name}.pub")
        key = read_public(public, name)
        entry = trust_entry(name, public.decode(), key_id(key), datetime.now(UTC))
        (report,) = yaml.safe_load(f"keys:\n{entry}\n")["keys"]
        text = json.dumps({"keys": [{**report, **changes}]}, default=lambda t: t.isoformat())
        (self.sm120.cwd / "lockfiles" / "trust.yaml").write_text(text)
        return self.sm120.cwd / "keys" / f"{name}.pem"


@pytest.fixture
def bed(tmp_path: Path, sm120: Command) -> Bed:
    return Bed(make_set(tmp_path / "disk"), sm120)


def test_without_a_checkout_the_answer_says_that_nothing_vouches_for_the_lock(bed: Bed) -> None:
    error, out, _ = bed.verify()
    assert (error, NOTHING in out) == ("", True)
    (report,) = json.loads(bed.verify("--json")[1])["sets"]
    assert (report["lock_from"], report["vouched_by"]) == ("beside", "")


def test_a_resealed_lock_is_used_only_with_a_warning(bed: Bed) -> None:
    bed.forge(SHARD, b"x" * 300_000)
    error, out, _ = bed.verify()
    assert (error, NOTHING in out) == ("", True)


def test_the_checkouts_lock_vouches_for_the_same_lock(bed: Bed) -> None:
    bed.make_checkout(bed.disk.place.lock)
    error, out, _ = bed.verify()
    assert (error, "vouched for by the checkout" in out) == ("", True)
    (report,) = json.loads(bed.verify("--json")[1])["sets"]
    assert (report["lock_from"], report["vouched_by"]) == ("beside", "the checkout")


def test_a_checkout_that_does_not_know_the_set_vouches_for_nothing(bed: Bed) -> None:
    bed.make_checkout()
    assert NOTHING in bed.verify()[1]


@pytest.mark.parametrize(("path", "data"), [(SHARD, b"x" * 300_000), (CODE, b"import os\n")])
def test_a_resealed_lock_is_held_against_the_checkouts(bed: Bed, path: str, data: bytes) -> None:
    bed.make_checkout(bed.disk.place.lock)
    bed.forge(path, data)
    for more in ((), ("--full",), ("--repair", "--offline"), ("--json",), ("--only", "*.json")):
        error, out, err = bed.verify(*more)
        assert (error, out) == ("LocksDisagree", "")
        assert str(bed.disk.place.lock_file) in err
        assert "tiny.lock.yaml" in err
        assert path in err
    assert bed.disk.path(path).read_bytes() == data


def test_a_forged_lock_under_another_name_is_held_against_the_others_of_its_commit(
    bed: Bed,
) -> None:
    bed.make_checkout(bed.disk.place.lock)
    bed.forge(SHARD, b"x" * 300_000, name="other")
    error, _, err = bed.verify()
    assert (error, "tiny.lock.yaml" in err) == ("LocksDisagree", True)


Change = Callable[[WeightsLock], dict[str, object]]


def without_code(lock: WeightsLock) -> dict[str, object]:
    return {"files": [pin for pin in lock.files if pin.path != CODE]}


def with_more_code(lock: WeightsLock) -> dict[str, object]:
    sha1 = hashlib.sha1(b"").hexdigest()
    return {"files": [*lock.files, FilePin(path="more.py", size_bytes=0, git_sha1=sha1)]}


CHANGES: dict[str, Change] = {
    "another commit": lambda lock: {"commit": "f" * 40},
    "another repository": lambda lock: {"repository": "org/other"},
    "a file less": without_code,
    "a file more": with_more_code,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_lock_of_another_set_than_the_checkouts_is_named(bed: Bed, change: Change) -> None:
    bed.make_checkout(bed.disk.place.lock)
    bed.reseal(**change(bed.disk.place.lock))
    error, out, err = bed.verify()
    assert (error, out) == ("LockStale", "")
    assert str(bed.disk.place.lock_file) in err
    assert "tiny.lock.yaml" in err


def test_the_user_may_choose_which_lock_judges(bed: Bed) -> None:
    bed.make_checkout(bed.disk.place.lock)
    bed.forge(SHARD, b"x" * 300_000)
    error, out, _ = bed.verify("--lock", str(bed.disk.place.lock_file))
    assert (error, "judged by the lock that --lock names" in out) == ("", True)
    assert bed.verify("--lock", str(bed.weights / "tiny.lock.yaml"))[0] == "WeightsDamaged"


def test_nothing_is_signed_recorded_served_or_scrubbed_by_a_resealed_lock(bed: Bed) -> None:
    key = bed.trust()
    bed.make_checkout(bed.disk.place.lock)
    bed.forge(SHARD, b"x" * 300_000)
    commands = {
        "sign": ("--key", str(key)),
        "attest": ("--full",),
        "serve": ("--port", "0"),
        "scrub": (),
    }
    for command, more in commands.items():
        error, out, err = bed.weights_command(command, *more)
        assert (error, out) == ("LocksDisagree", ""), command
        assert "tiny.lock.yaml" in err


def test_a_scrub_goes_on_where_the_checkout_has_moved_to_another_revision(bed: Bed) -> None:
    moved = bed.disk.place.lock.model_copy(update={"commit": "f" * 40}).sealed()
    bed.make_checkout(moved)
    error, _, err = bed.weights_command("scrub")
    assert error == ""
    assert "f" * 40 in err
    assert NOTHING in err
    assert bed.weights_command("attest", "--full")[0] == "LockStale"


def test_the_evidence_of_a_resealed_lock_is_broken_and_not_only_stale(bed: Bed) -> None:
    bed.make_checkout(bed.disk.place.lock)
    bed.forge(SHARD, b"x" * 300_000)
    ended = bed.sm120("verify", str(bed.disk.place.root), "--deep")
    assert ended.error == "EvidenceBroken"
    assert "contradicts the checkout's tiny.lock.yaml" in ended.out
    bed.reseal(commit="f" * 40)
    assert "are of different sets" in bed.sm120("verify", str(bed.disk.place.root)).out


def signed(bed: Bed, **changes: object) -> None:
    key = bed.trust(**changes)  # type: ignore[arg-type]
    error, _, err = bed.weights_command("sign", "--key", str(key))
    assert error == "", err


def test_a_trusted_signature_vouches_for_the_lock(bed: Bed) -> None:
    signed(bed)
    assert "vouched for by the signature of builder" in bed.verify()[1]


@pytest.mark.parametrize(("path", "data"), [(SHARD, b"x" * 300_000), (CODE, b"import os\n")])
def test_a_resealed_lock_is_held_against_the_signature(bed: Bed, path: str, data: bytes) -> None:
    signed(bed)
    bed.forge(path, data)
    for more in ((), ("--repair", "--offline")):
        error, out, err = bed.verify(*more)
        assert (error, out) == ("ModelSignatureInvalid", "")
        assert path in err
        assert "builder" in err
        assert str(bed.disk.place.lock_file) in err


def test_a_lock_that_names_more_than_the_signature_is_not_vouched_for(bed: Bed) -> None:
    signed(bed)
    bed.reseal(**with_more_code(bed.disk.place.lock))
    (bed.disk.place.root / "more.py").write_bytes(b"")
    assert NOTHING in bed.verify("--only", "config.json")[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "somebody"},
        {"for": ["provenance"]},
        {"revoked": {"since": "2020-01-01T00:00:00Z", "reason": "stolen", "compromised": True}},
    ],
    ids=["unknown", "for another kind", "revoked"],
)
def test_a_signature_by_nobody_who_is_trusted_vouches_for_nothing(
    bed: Bed, changes: dict[str, object]
) -> None:
    signed(bed)
    bed.trust("another") if "name" in changes else bed.trust("third", **changes)
    if "name" not in changes:
        key = bed.sm120.cwd / "keys" / "third.pem"
        assert bed.weights_command("sign", "--key", str(key))[0] == ""
    error, out, _ = bed.verify()
    assert (error, NOTHING in out) == ("", True)


def recorded(bed: Bed) -> None:
    key = bed.trust()
    assert bed.weights_command("attest", "--full", "--key", str(key))[0] == ""


def test_a_trusted_record_of_the_same_lock_is_named_but_does_not_vouch_for_it(bed: Bed) -> None:
    recorded(bed)
    assert f"{NOTHING}; it is the one of the record that builder signed" in bed.verify()[1]
    (report,) = json.loads(bed.verify("--json")[1])["sets"]
    assert (report["vouched_by"], report["recorded_by"]) == ("", "builder")


@pytest.mark.parametrize(("path", "data"), [(SHARD, b"x" * 300_000), (CODE, b"import os\n")])
def test_a_resealed_lock_is_held_against_a_trusted_record(bed: Bed, path: str, data: bytes) -> None:
    recorded(bed)
    bed.forge(path, data)
    error, out, err = bed.verify()
    assert (error, out) == ("LockEdited", "")
    assert "is not the lock that builder signed" in err


def test_a_record_of_another_revision_says_nothing(bed: Bed) -> None:
    recorded(bed)
    bed.reseal(commit="f" * 40)
    assert NOTHING in bed.verify()[1]


def test_a_damaged_record_or_signature_says_nothing(bed: Bed) -> None:
    recorded(bed)
    (bed.disk.place.state / "record.dsse.json").write_bytes(b"{")
    (bed.disk.place.state / "model.sig").write_bytes(b"\xff")
    assert NOTHING in bed.verify()[1]
