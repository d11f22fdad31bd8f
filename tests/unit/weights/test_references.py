from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline.core.errors import LockEdited, SpecInvalid
from pipeline.images.spec.checkout import Checkout
from pipeline.weights.model import (
    FilePin,
    WeightsSpec,
    current_weights_lock,
    lock_path,
    read_spec,
    sealed_weights_lock,
    spec_path,
    weights_spec,
    write_weights_lock,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PIN = FilePin(path="config.json", size_bytes=2, git_sha1="9e26dfeeb6e641a33dae4961196235bdb965b21b")


def write_spec(path: Path, spec: WeightsSpec) -> None:
    """As `weights lock` saves it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(spec.model_dump(exclude_defaults=True)), encoding="utf-8")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    (tmp_path / "lockfiles" / "weights").mkdir(parents=True)
    return Checkout(tmp_path)


@pytest.mark.parametrize(
    ("reference", "name", "revision"),
    [
        ("Qwen/Qwen3-0.6B", "qwen--qwen3-0.6b", "main"),
        ("Qwen/Qwen3-0.6B@v1.0", "qwen--qwen3-0.6b--v1.0", "v1.0"),
        ("a/b_c@refs/pr/1", "a--b+c--refs+pr+1", "refs/pr/1"),
        (f"org/name@{COMMIT}", "org--name--0123456789ab", COMMIT),
    ],
)
def test_a_model_is_named_by_its_repository_and_revision(
    reference: str, name: str, revision: str
) -> None:
    spec = weights_spec(reference)
    assert (spec.name, spec.revision) == (name, revision)
    assert spec.repository == reference.partition("@")[0]
    assert spec.wants("any/file.at-all")


@pytest.mark.parametrize(
    "reference",
    [
        *("../name", "org/..", "org/../..", "/etc/passwd", "org/name/more", "org/", "/name", "@"),
        *("org/name@", "org/name@..", "org/name@a/../../../../x", "org/name@/etc", "org/name@a//b"),
        *("org/name@main@main", "org/na me", "org/name\n", "org/name@main\n", "org/\x1b[2Jname"),
        *("-o/name", "org/-name", "org/name?x=1", "org/name#x", "örg/name", f"org/{'n' * 300}"),
        *("https://huggingface.co/org/name", "name@main", f"org/name@{'r' * 300}", "org/name@-x"),
    ],
)
def test_what_the_hub_cannot_have_is_refused_before_it_is_asked(reference: str) -> None:
    with pytest.raises(SpecInvalid) as refused:
        weights_spec(reference)
    assert "organisation/model@revision" in refused.value.hint
    assert str(refused.value).isprintable()


def test_names_that_are_too_long_for_a_spec_stay_apart() -> None:
    one, other = weights_spec(f"org/{'n' * 150}-a"), weights_spec(f"org/{'n' * 150}-b")
    assert len(one.name) == len(other.name) == 80
    assert one.name != other.name


def test_a_lock_is_found_by_its_reference_without_a_spec(checkout: Checkout) -> None:
    spec = read_spec(checkout, "org/tiny")
    lock = sealed_weights_lock(spec, COMMIT, [PIN])
    write_weights_lock(lock_path(checkout, spec.name), lock)
    assert current_weights_lock(checkout, "org/tiny") == lock


def test_a_saved_spec_leaves_the_lock_current_and_may_be_edited(checkout: Checkout) -> None:
    spec = read_spec(checkout, "org/tiny@v1")
    write_weights_lock(lock_path(checkout, spec.name), sealed_weights_lock(spec, COMMIT, [PIN]))
    write_spec(spec_path(checkout, spec.name), spec)
    assert read_spec(checkout, spec.name) == spec
    assert current_weights_lock(checkout, spec.name) == current_weights_lock(
        checkout, "org/tiny@v1"
    )
    with spec_path(checkout, spec.name).open("a", encoding="utf-8") as file:
        file.write('include: ["*.json"]\n')
    assert not read_spec(checkout, "org/tiny@v1").wants("README.md")


def test_a_spec_of_another_model_under_that_name_is_not_used(checkout: Checkout) -> None:
    other = weights_spec("Org/Tiny").model_copy(update={"name": "org--tiny"})
    write_spec(spec_path(checkout, "org--tiny"), other)
    with pytest.raises(SpecInvalid, match="is of Org/Tiny at main"):
        read_spec(checkout, "org/tiny")


def test_a_lock_of_another_model_under_that_name_is_not_used(checkout: Checkout) -> None:
    other = weights_spec("Org/Tiny")
    write_weights_lock(lock_path(checkout, "org--tiny"), sealed_weights_lock(other, COMMIT, [PIN]))
    with pytest.raises(LockEdited, match="Org/Tiny"):
        current_weights_lock(checkout, "org/tiny")
