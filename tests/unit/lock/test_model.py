from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.core.errors import LockEdited, LockMissing, LockStale
from pipeline.images.lock.model import (
    BasePin,
    DebPin,
    ImageLock,
    WheelPin,
    current_lock,
    diff_locks,
    read_lock,
    sealed_lock,
    write_lock,
)
from pipeline.images.spec.checkout import Checkout
from tests.unit.support import AMD64, ARM64, ROOT, lock_to, make_checkout, tiny_spec, write_spec

HEX = "ab" * 32
DIGEST = f"sha256:{HEX}"
WHEEL = WheelPin(
    name="thing", version="1.0", file="thing-1.0-py3-none-any.whl", size_bytes=7, sha256=HEX
)
DEB = DebPin(
    name="bash", version="5.2-1", path="pool/main/b/bash_5.2-1_amd64.deb", size_bytes=9, sha256=HEX
)
LOCK = sealed_lock("tiny", AMD64, DIGEST, None, [WHEEL], [DEB])

names = st.from_regex(r"[a-z0-9][a-z0-9.+-]{0,20}", fullmatch=True)
versions = st.from_regex(r"[A-Za-z0-9.+~:!_-]{1,20}", fullmatch=True)
hexes = st.binary(min_size=32, max_size=32).map(bytes.hex)
sizes = st.integers(1, 2**40)
file_names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.+~!%:-]{0,30}", fullmatch=True)
paths = st.lists(
    st.from_regex(r"[A-Za-z0-9_+~%:@-][A-Za-z0-9._+~%:@-]{0,9}", fullmatch=True), min_size=1
).map("/".join)
wheels = st.builds(
    WheelPin, name=names, version=versions, file=file_names, size_bytes=sizes, sha256=hexes
)
debs = st.builds(DebPin, name=names, version=versions, path=paths, size_bytes=sizes, sha256=hexes)
locks = st.builds(
    sealed_lock,
    names,
    st.sampled_from([AMD64, ARM64]),
    hexes.map("sha256:{}".format),
    st.none() | hexes.map("sha256:{}".format),
    st.lists(wheels, max_size=4),
    st.lists(debs, max_size=4),
)


@pytest.fixture(scope="module")
def lock_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("locks") / "tiny.amd64.lock.yaml"


def written(lock: ImageLock) -> str:
    """The text of a lock's file."""
    with tempfile.TemporaryDirectory() as folder:
        write_lock(Path(folder, "lock.yaml"), lock)
        return Path(folder, "lock.yaml").read_text()


def read_text(path: Path, text: str) -> ImageLock:
    path.write_text(text)
    return read_lock(path)


@settings(max_examples=40, deadline=None)
@given(lock=locks)
def test_a_lock_is_read_as_it_was_written_and_names_no_place(
    lock_path: Path, lock: ImageLock
) -> None:
    text = written(lock)
    assert read_text(lock_path, text) == lock
    assert written(read_lock(lock_path)) == text
    assert "://" not in text
    assert text.endswith("\n")


@pytest.mark.parametrize("name", ["123", "1.5", "null", "true", "yes", "0x1f", "2026-01-01"])
def test_a_name_that_yaml_takes_for_something_else_survives(lock_path: Path, name: str) -> None:
    lock = sealed_lock(name, AMD64, DIGEST, None, [], [])
    assert read_text(lock_path, written(lock)).image == name


def test_the_seal_does_not_hang_on_the_order_in_which_pins_were_found() -> None:
    other = WHEEL.model_copy(update={"name": "other"})
    one = sealed_lock("tiny", AMD64, DIGEST, None, [WHEEL, other], [])
    assert one == sealed_lock("tiny", AMD64, DIGEST, None, [other, WHEEL], [])


def changed_fields() -> list[tuple[str, str]]:
    """A lock's text with each value in it changed, one at a time."""
    text, edits = written(LOCK), []
    for field in ("image", "platform", "spec", "seal", "base_lock", "format"):
        line = next(row for row in text.splitlines() if row.startswith(f"{field}:"))
        other = {
            "image": "image: other",
            "platform": "platform: linux/arm64",
            "base_lock": f"base_lock: {DIGEST}",
            "format": "format: 2",
        }.get(field, f"{field}: sha256:{'cd' * 32}")
        edits.append((field, text.replace(line, other)))
    for pin in (WHEEL, DEB):
        row = json.dumps(pin.model_dump())
        for field, value in pin.model_dump().items():
            changed = value + 1 if isinstance(value, int) else f"{value[:-1]}9"
            edited = json.dumps({**pin.model_dump(), field: changed})
            edits.append((f"{pin.name}.{field}", text.replace(row, edited)))
        edits.append((f"no {pin.name}", text.replace(f"- {row}\n", "")))
        edits.append((f"{pin.name} twice", text.replace(f"- {row}\n", f"- {row}\n- {row}\n")))
    return edits


@pytest.mark.parametrize(("field", "text"), changed_fields(), ids=lambda v: "" if "\n" in v else v)
def test_a_lock_in_which_anything_was_changed_is_refused(
    lock_path: Path, field: str, text: str
) -> None:
    assert text != written(LOCK)
    with pytest.raises(LockEdited):
        read_text(lock_path, text)


@pytest.mark.parametrize("cut", range(2, len(written(LOCK)), 29))
def test_a_truncated_lock_is_refused(lock_path: Path, cut: int) -> None:
    with pytest.raises(LockEdited):
        read_text(lock_path, written(LOCK)[:-cut])


def test_an_added_address_is_refused(lock_path: Path) -> None:
    text = written(LOCK).replace('"sha256"', '"url": "https://example.invalid/x", "sha256"', 1)
    with pytest.raises(LockEdited, match="url"):
        read_text(lock_path, text)


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../x.whl"},
        {"file": "a/b.whl"},
        {"file": ".hidden"},
        {"file": "https://example.invalid/x.whl"},
        {"size_bytes": 0},
        {"size_bytes": -1},
        {"sha256": "AB" * 32},
        {"sha256": "ab" * 20},
        {"sha256": f"sha256:{HEX}"},
        {"version": ""},
        {"version": "1 0"},
        {"name": "Thing"},
    ],
)
def test_a_pin_cannot_be_vague_or_leave_its_place(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        WheelPin.model_validate({**WHEEL.model_dump(), **change})


@pytest.mark.parametrize("path", ["/pool/x", "pool/../x", "http://example.invalid/x", "a//b", ""])
def test_a_debs_path_stays_below_the_mirror(path: str) -> None:
    with pytest.raises(ValidationError):
        DebPin.model_validate({**DEB.model_dump(), "path": path})


def test_a_missing_lock_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(LockMissing) as caught:
        read_lock(tmp_path / "tiny.amd64.lock.yaml")
    assert "sm120 image lock" in caught.value.hint


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = make_checkout(tmp_path)
    lock_to(made, "tiny", [WHEEL])
    return made


def test_a_lock_that_answers_the_spec_is_current(checkout: Checkout) -> None:
    assert current_lock(checkout, checkout.spec("tiny"), AMD64).wheels == [WHEEL]


def test_a_lock_of_an_older_spec_is_stale(checkout: Checkout) -> None:
    write_spec(checkout, tiny_spec(python={"requirements": ["thing>1"]}))
    with pytest.raises(LockStale, match="the spec has changed"):
        current_lock(checkout, checkout.spec("tiny"), AMD64)


def test_a_lock_for_another_platform_is_missing_or_refused(checkout: Checkout) -> None:
    write_spec(checkout, tiny_spec(platforms=[AMD64, ARM64]))
    with pytest.raises(LockMissing):
        current_lock(checkout, checkout.spec("tiny"), ARM64)
    checkout.lock_path("tiny", AMD64).rename(checkout.lock_path("tiny", ARM64))
    with pytest.raises(LockEdited, match="is the lock of tiny for linux/amd64"):
        current_lock(checkout, checkout.spec("tiny"), ARM64)


def test_a_lock_of_another_image_is_refused(checkout: Checkout) -> None:
    write_spec(checkout, tiny_spec("other"))
    checkout.lock_path("tiny", AMD64).rename(checkout.lock_path("other", AMD64))
    with pytest.raises(LockEdited, match="is the lock of tiny"):
        current_lock(checkout, checkout.spec("other"), AMD64)


def test_a_lock_on_an_older_base_is_stale(checkout: Checkout) -> None:
    write_spec(checkout, tiny_spec("upper", base="tiny", debian=None))
    base = read_lock(checkout.lock_path("tiny", AMD64))
    lock_to(checkout, "upper", [], base_lock=base.seal)
    current_lock(checkout, checkout.spec("upper"), AMD64)
    lock_to(checkout, "tiny", [])
    with pytest.raises(LockStale, match="its base tiny has changed"):
        current_lock(checkout, checkout.spec("upper"), AMD64)
    checkout.lock_path("tiny", AMD64).unlink()
    with pytest.raises(LockMissing):
        current_lock(checkout, checkout.spec("upper"), AMD64)


@pytest.mark.parametrize("path", sorted((ROOT / "lockfiles" / "images").glob("*.yaml")), ids=str)
def test_the_committed_locks_are_whole_and_name_no_place(path: Path) -> None:
    assert written(read_lock(path)) == path.read_text()
    assert "://" not in path.read_text()


def test_writing_the_same_lock_again_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.lock.yaml"
    write_lock(path, LOCK)
    before = path.stat()
    write_lock(path, LOCK)
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert yaml.safe_load(path.read_text())["seal"] == LOCK.seal


def test_equal_locks_do_not_differ() -> None:
    assert diff_locks(LOCK, LOCK) == []


def test_a_first_lock_brings_everything() -> None:
    moves = [(m.kind, m.name, m.before, m.after) for m in diff_locks(None, LOCK)]
    assert moves == [("wheel", "thing", None, "1.0"), ("deb", "bash", None, "5.2-1")]


def test_a_lock_without_packages_of_its_own_is_told_when_it_is_written() -> None:
    empty = sealed_lock("tiny", AMD64, DIGEST, None, [], [])
    (first,) = diff_locks(None, empty)
    assert (first.kind, first.name, first.before, first.after) == ("lock", "tiny", None, empty.seal)
    assert diff_locks(empty, empty) == []


@pytest.mark.parametrize(("spec", "base_lock"), [("sha256:" + "9" * 64, None), (DIGEST, DIGEST)])
def test_another_spec_or_base_is_told_though_no_package_moved(
    spec: str, base_lock: str | None
) -> None:
    after = sealed_lock("tiny", AMD64, spec, base_lock, [WHEEL], [DEB])
    (move,) = diff_locks(LOCK, after)
    assert (move.kind, move.before, move.after) == ("lock", LOCK.seal, after.seal)


def test_what_came_went_or_moved_is_told() -> None:
    moved = WHEEL.model_copy(update={"version": "2.0", "sha256": "cd" * 32})
    new = WHEEL.model_copy(update={"name": "new"})
    after = sealed_lock("tiny", AMD64, DIGEST, None, [moved, new], [])
    moves = [(m.name, m.before, m.after) for m in diff_locks(LOCK, after)]
    assert moves == [("new", None, "1.0"), ("thing", "1.0", "2.0"), ("bash", "5.2-1", None)]


def test_other_bytes_under_the_same_version_are_told_apart() -> None:
    moved = WHEEL.model_copy(update={"sha256": "cd" * 32})
    (move,) = diff_locks(LOCK, sealed_lock("tiny", AMD64, DIGEST, None, [moved], [DEB]))
    assert (move.before, move.after) == ("1.0 (abababababab)", "1.0 (cdcdcdcdcdcd)")


GZIPPED = "application/vnd.oci.image.layer.v1.tar+gzip"


def on_base(letter: str) -> ImageLock:
    def blob(name: str) -> dict[str, Any]:
        return {"digest": f"sha256:{name * 64}", "size_bytes": 7}

    base = BasePin.model_validate(
        {
            "repository": f"library/{letter}",
            "index": None,
            "manifest": blob(letter),
            "config": blob("e"),
            "layers": [{**blob("f"), "diff_id": DIGEST, "media_type": GZIPPED}],
        }
    )
    return sealed_lock("tiny", AMD64, DIGEST, None, [WHEEL], [DEB], base)


def test_another_foreign_base_is_told_by_its_digests() -> None:
    one, other = on_base("a"), on_base("b")
    (moved,) = diff_locks(one, other)
    assert (moved.image, moved.platform, moved.kind) == ("tiny", AMD64, "base")
    assert (moved.name, moved.before, moved.after) == (
        "library/b",
        f"sha256:{'a' * 64}",
        f"sha256:{'b' * 64}",
    )
    assert diff_locks(one, on_base("a")) == []


def test_a_foreign_base_that_came_or_went_is_told() -> None:
    based = on_base("a")
    (came,), (went,) = diff_locks(LOCK, based), diff_locks(based, LOCK)
    assert (came.name, came.before, came.after) == ("library/a", None, f"sha256:{'a' * 64}")
    assert (went.name, went.before, went.after) == ("library/a", f"sha256:{'a' * 64}", None)
