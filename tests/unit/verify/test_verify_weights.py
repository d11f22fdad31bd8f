"""Weights on a disk are judged by their lock, their bytes, and what was signed of them."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.attest.envelope import enclose
from pipeline.artifacts.attest.keys import LocalSigner, make_private_key
from pipeline.artifacts.attest.names import EVIDENCE_SET, HOST_FACTS, REPORT, predicate_kind
from pipeline.artifacts.attest.statement import make_statement
from pipeline.artifacts.attest.trust import OwnKeys, Trust
from pipeline.evidence.verify.chain import VerifyContext
from pipeline.evidence.verify.evidence import read_item
from pipeline.evidence.verify.verdict import Node, Verdict
from pipeline.evidence.verify.weights import judge_weights
from pipeline.images.spec.checkout import Checkout
from pipeline.weights.check.verify import WeightsVerifyOptions, verify_files
from pipeline.weights.model import lock_path, write_weights_lock
from pipeline.weights.place import LockedFolder
from pipeline.weights.sign import signing
from pipeline.weights.sign.record import set_digest
from tests.testbed.locked_set import SMALL, make_set
from tests.unit.verify.world import NOW, trust_in, trusted

LARGE = {"model.safetensors": b"weights" * 1000, "sub dir/b.safetensors": b"more"}
KEY, OTHER = make_private_key(), make_private_key()
BY = VerifyContext(trust_in(trusted(KEY)), None, NOW)
FILES = len(SMALL) + len(LARGE)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LockedFolder:
    """A set that was verified once, well after it was written."""
    place = make_set(tmp_path / "set", SMALL, LARGE)
    now = time.time_ns()
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.weights.disk.receipt.disk_time_ns", lambda _: now + 3_600 * 10**9)
        verify_files(place, WeightsVerifyOptions(full=True))
    return place


def judged(place: LockedFolder, context: VerifyContext = BY, **changes: Any) -> dict[str, Node]:
    walked = judge_weights(place, [], [], replace(context, **changes))
    assert walked.node.title == f"tiny {set_digest(place.lock)}"
    return {node.title: node for node in walked.node.children}


def sign(place: LockedFolder) -> None:
    signing.sign_folder(place, KEY, signing.default_signature(place))


def test_a_verified_set_that_nobody_signed_is_unsigned_and_not_read(place: LockedFolder) -> None:
    nodes = judged(place)
    assert list(nodes) == ["lock", "files", "signature"]
    assert nodes["signature"].own is Verdict.UNSIGNED
    assert nodes["files"].own is Verdict.VALID
    assert nodes["files"].message.startswith(f"{FILES} as the receipt saw them, not read")
    assert nodes["lock"].message == f"{FILES} files of org/tiny at {place.lock.commit[:12]}"


def test_a_set_that_nothing_vouches_for_is_incomplete_until_it_is_read(tmp_path: Path) -> None:
    place = make_set(tmp_path / "set", SMALL, LARGE)
    files = judged(place)["files"]
    assert files.own is Verdict.INCOMPLETE
    assert files.message == f"{FILES} have no receipt; --deep reads them"
    read = judged(place, deep=True)["files"]
    assert (read.own, read.message.partition(",")[0]) == (Verdict.VALID, f"{FILES} read")


@pytest.mark.parametrize("deep", [False, True])
def test_damage_is_broken_and_named(place: LockedFolder, deep: bool) -> None:
    (place.root / "config.json").unlink()
    files = judged(place, deep=deep)["files"]
    assert files.own is Verdict.BROKEN
    assert files.message.startswith("config.json: missing")


def test_bytes_that_changed_under_the_receipt_are_found_by_reading(place: LockedFolder) -> None:
    path = place.root / "model.safetensors"
    path.write_bytes(b"Weights" * 1000)
    assert judged(place)["files"].own is Verdict.INCOMPLETE
    files = judged(place, deep=True)["files"]
    assert files.own is Verdict.BROKEN
    assert files.message.startswith("model.safetensors: ")


def test_a_signed_set_is_valid_for_a_trusted_key_and_says_what_was_read(
    place: LockedFolder,
) -> None:
    sign(place)
    nodes = judged(place)
    assert list(nodes) == ["lock", "files", "model signature"]
    signature = nodes["model signature"]
    assert signature.own is Verdict.VALID
    small = len(SMALL) - 1  # no signature covers .gitattributes
    files = small + len(LARGE)
    assert signature.message == f"by builder, over {files} files, {small} read"
    deep = judged(place, deep=True)["model signature"]
    assert deep.message == f"by builder, over {files} files, {files} read"


def test_without_a_trust_file_a_signature_proves_nothing(place: LockedFolder) -> None:
    sign(place)
    signature = judged(place, trust=None)["model signature"]
    assert signature.own is Verdict.INCOMPLETE
    assert "no key that is trusted here" in signature.message
    own = judged(place, trust=OwnKeys(keys=trust_in(trusted(OTHER)).keys))["model signature"]
    assert own.own is Verdict.INCOMPLETE


@pytest.mark.parametrize("keys", [[OTHER], [OTHER, make_private_key()]])
def test_a_signature_by_a_key_that_nobody_trusts_is_broken(
    place: LockedFolder, keys: list[Any]
) -> None:
    sign(place)
    trust = trust_in(*(trusted(key, f"key-{at}") for at, key in enumerate(keys)))
    signature = judged(place, trust=trust)["model signature"]
    assert signature.own is Verdict.BROKEN
    assert ("no key of the trust file made it" in signature.message) is (len(keys) > 1)


def test_the_right_key_is_found_among_others(place: LockedFolder) -> None:
    sign(place)
    trust = trust_in(trusted(OTHER, "another"), trusted(KEY))
    assert judged(place, trust=trust)["model signature"].message.startswith("by builder")


@pytest.mark.parametrize(
    "change",
    [
        {"for": ["host-facts"]},
        {"until": datetime(2026, 1, 2, tzinfo=UTC)},
        {
            "revoked": {
                "since": datetime(2026, 1, 1, tzinfo=UTC),
                "reason": "was lost",
                "compromised": False,
            }
        },
    ],
)
def test_a_key_that_is_not_for_weights_or_not_for_now_is_broken(
    place: LockedFolder, change: dict[str, Any]
) -> None:
    sign(place)
    signature = judged(place, trust=trust_in(trusted(KEY, **change)))["model signature"]
    assert signature.own is Verdict.BROKEN
    assert "the key builder" in signature.message


def test_the_lock_is_compared_with_that_of_the_checkout(
    place: LockedFolder, tmp_path: Path
) -> None:
    checkout = Checkout(tmp_path / "checkout")
    assert judged(place, checkout=checkout)["lock"].message.endswith(place.lock.commit[:12])
    path = lock_path(checkout, "tiny")
    path.parent.mkdir(parents=True)
    write_weights_lock(path, place.lock)
    same = judged(place, checkout=checkout)["lock"]
    assert (same.own, same.message.rpartition(", ")[2]) == (Verdict.VALID, "as in the checkout")
    newer = make_set(tmp_path / "newer", SMALL, LARGE, commit="f" * 40).lock
    write_weights_lock(path, newer)
    stale = judged(place, checkout=checkout)["lock"]
    assert stale.own is Verdict.STALE
    assert stale.message.endswith(f"org/tiny at {place.lock.commit}, org/tiny at {newer.commit}")
    lying = make_set(tmp_path / "lying", SMALL, {**LARGE, "model.safetensors": b"x"}).lock
    write_weights_lock(path, lying)
    assert judged(place, checkout=checkout)["lock"].own is Verdict.BROKEN
    path.write_text("edited\n")
    edited = judged(place, checkout=checkout)["lock"]
    assert edited.own is Verdict.INCOMPLETE
    assert edited.message.partition(": ")[0] == str(path)


def test_a_record_about_something_else_breaks_the_set(place: LockedFolder) -> None:
    statement = make_statement("x", "sha256:" + "0" * 64, HOST_FACTS, {})
    item = read_item("facts", enclose(statement, [LocalSigner(KEY)]).dump())
    walked = judge_weights(place, [], [item], BY)
    assert walked.node.verdict is Verdict.BROKEN
    assert "signature" not in {node.title for node in walked.node.children}


@pytest.mark.parametrize(
    ("is_signed", "trust", "want"),
    [
        (False, BY.trust, Verdict.UNSIGNED),
        (True, None, Verdict.UNSIGNED),
        (True, BY.trust, Verdict.VALID),
    ],
)
def test_an_unsigned_record_takes_nothing_from_a_set_whose_signature_holds(
    place: LockedFolder, is_signed: bool, trust: Trust | None, want: Verdict
) -> None:
    statement = make_statement("tiny", set_digest(place.lock), "urn:of:others", {"anything": 1})
    item = read_item("note", enclose(statement, []).dump())
    if is_signed:
        sign(place)
    walked = judge_weights(place, [], [item], replace(BY, trust=trust))
    (node,) = [n for n in walked.node.children if "note" in n.title]
    assert node.verdict is want
    assert ("the model signature vouches" in node.message) is (want is Verdict.VALID)


@pytest.mark.parametrize("kind", [REPORT, EVIDENCE_SET, HOST_FACTS])
def test_a_key_that_is_trusted_for_another_kind_does_not_vouch_for_weights(
    place: LockedFolder, kind: str
) -> None:
    statement = make_statement("tiny", set_digest(place.lock), kind, {})
    item = read_item("x", enclose(statement, [LocalSigner(KEY)]).dump())
    trust = trust_in(trusted(KEY, "builder", **{"for": [predicate_kind(kind)]}))
    walked = judge_weights(place, [], [item], replace(BY, trust=trust))
    assert walked.node.verdict is Verdict.BROKEN
    assert walked.node.culprit().message == (
        f"is a statement of the kind {predicate_kind(kind)}, not weights"
    )
    assert walked.believed == ()
