from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.core.errors import LockEdited, LockMissing, LockStale, SpecInvalid, WeightsUnknown
from pipeline.images.spec.checkout import Checkout
from pipeline.weights.model import (
    FilePin,
    WeightsSpec,
    current_weights_lock,
    dump_weights_lock,
    lock_path,
    read_spec,
    read_weights_lock,
    sealed_weights_lock,
    spec_names,
    write_weights_lock,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SPEC = """\
name: tiny
repository: org/tiny
revision: main
include: ["*.safetensors", "*.json"]
exclude: ["original/*"]
format: safetensors
quant: bf16
about: A set of weights that is only here for the tests.
"""


def pin(path: str, data: bytes = b"bytes", *, large: bool = True) -> FilePin:
    if large:
        return FilePin(path=path, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return FilePin(path=path, size_bytes=len(data), git_sha1=blob)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    (tmp_path / "images").mkdir()
    folder = tmp_path / "lockfiles" / "weights"
    folder.mkdir(parents=True)
    (folder / "tiny.yaml").write_text(SPEC, encoding="utf-8")
    return Checkout(tmp_path)


def test_a_lock_is_written_and_read_back_the_same(checkout: Checkout) -> None:
    spec = read_spec(checkout, "tiny")
    lock = sealed_weights_lock(spec, COMMIT, [pin("b.safetensors"), pin("a b/ü.json", large=False)])
    write_weights_lock(lock_path(checkout, "tiny"), lock)
    assert current_weights_lock(checkout, "tiny") == lock
    assert [f.path for f in lock.files] == ["a b/ü.json", "b.safetensors"]
    assert spec_names(checkout) == ["tiny"]


def test_include_and_exclude_choose_files_in_any_folder(checkout: Checkout) -> None:
    spec = read_spec(checkout, "tiny")
    assert spec.wants("config.json")
    assert spec.wants("sub/model.safetensors")
    assert not spec.wants("original/model.safetensors")
    assert not spec.wants("README.md")


def test_an_edited_lock_is_refused(checkout: Checkout) -> None:
    path = lock_path(checkout, "tiny")
    write_weights_lock(
        path, sealed_weights_lock(read_spec(checkout, "tiny"), COMMIT, [pin("a.json")])
    )
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"size_bytes": 5', '"size_bytes": 6'), encoding="utf-8")
    with pytest.raises(LockEdited, match="seal"):
        read_weights_lock(path)


def test_a_lock_with_an_unknown_field_is_refused(checkout: Checkout) -> None:
    path = lock_path(checkout, "tiny")
    lock = sealed_weights_lock(read_spec(checkout, "tiny"), COMMIT, [pin("a.json")])
    path.write_text(dump_weights_lock(lock) + "more: 1\n", encoding="utf-8")
    with pytest.raises(LockEdited, match="more"):
        read_weights_lock(path)


def test_a_lock_of_an_older_spec_is_stale(checkout: Checkout) -> None:
    spec = read_spec(checkout, "tiny")
    older = spec.model_copy(update={"revision": "v1"})
    write_weights_lock(
        lock_path(checkout, "tiny"), sealed_weights_lock(older, COMMIT, [pin("a.json")])
    )
    with pytest.raises(LockStale):
        current_weights_lock(checkout, "tiny")


def test_another_description_does_not_make_a_lock_stale(checkout: Checkout) -> None:
    spec = read_spec(checkout, "tiny")
    other = spec.model_copy(update={"about": "The same files, described in other words."})
    assert spec.lock_digest() == other.lock_digest()


def test_a_missing_lock_says_how_to_make_it(checkout: Checkout) -> None:
    with pytest.raises(LockMissing) as caught:
        current_weights_lock(checkout, "tiny")
    assert "sm120 weights lock" in caught.value.hint


def test_an_unknown_set_names_the_known_ones(checkout: Checkout) -> None:
    with pytest.raises(WeightsUnknown, match="tiny"):
        read_spec(checkout, "other")
    with pytest.raises(SpecInvalid, match="repository"):
        read_spec(checkout, "../../etc/passwd")


def test_a_spec_in_another_file_than_its_name_is_refused(checkout: Checkout) -> None:
    other = checkout.root / "lockfiles" / "weights" / "other.yaml"
    other.write_text(SPEC, encoding="utf-8")
    with pytest.raises(SpecInvalid, match="name"):
        read_spec(checkout, "other")


@pytest.mark.parametrize(
    "path",
    [
        "../a",
        "/a",
        "a//b",
        "a/./b",
        "a\\b",
        "a\nb",
        "a\u202eb",
        "",
        ".sm120/x",
        ".SM120/x",
        "é.json",
        "a/..",
        "x" * 1025,
    ],
)
def test_a_path_that_could_leave_its_folder_or_fool_a_reader_is_refused(path: str) -> None:
    with pytest.raises(ValidationError):
        pin(path)


def test_a_file_has_exactly_one_hash() -> None:
    with pytest.raises(ValidationError):
        FilePin(path="a", size_bytes=1)
    with pytest.raises(ValidationError):
        FilePin(path="a", size_bytes=1, sha256="0" * 64, git_sha1="0" * 40)


@pytest.mark.parametrize("paths", [["a", "a"], ["a", "a/b"], ["a", "a/b/c"]])
def test_paths_that_cannot_lie_side_by_side_are_refused(
    checkout: Checkout, paths: list[str]
) -> None:
    with pytest.raises(ValidationError):
        sealed_weights_lock(read_spec(checkout, "tiny"), COMMIT, [pin(p) for p in paths])


def test_hashes_are_gits_own_for_small_files_and_plain_for_large_ones() -> None:
    for large in (True, False):
        wanted = pin("a", b"hello", large=large)
        sum_ = wanted.new_hash()
        sum_.update(b"hello")
        assert sum_.hexdigest() == wanted.want


def test_a_spec_with_a_moving_name_for_a_commit_is_allowed_but_a_lock_is_not() -> None:
    spec = WeightsSpec.model_validate(
        {
            "name": "x",
            "repository": "a/b",
            "format": "gguf",
            "quant": "IQ3_K",
            "about": "Twenty letters at the least.",
        }
    )
    with pytest.raises(ValidationError):
        sealed_weights_lock(spec, "main", [pin("a")])
