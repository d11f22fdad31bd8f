from __future__ import annotations

import itertools

import pytest

from pipeline.core.errors import IndexBroken, PipelineError, ResolveFailed, UnknownPackage
from pipeline.images.lock.debian import Stanza, resolve_closure


def package(name: str, version: str = "1.0", **fields: str) -> Stanza:
    stanza = {
        "Package": name,
        "Version": version,
        "Architecture": "amd64",
        "Filename": f"pool/main/{name[0]}/{name}/{name}_{version}_amd64.deb",
        "Size": "10",
        "SHA256": "ab" * 32,
    }
    return stanza | {key.replace("_", "-"): value for key, value in fields.items()}


def names(
    index: list[Stanza], *wanted: str, exclude: tuple[str, ...] = (), architecture: str = "amd64"
) -> list[str]:
    return [row.name for row in resolve_closure([index], wanted, architecture, exclude)]


def test_depends_and_pre_depends_are_followed_and_recommends_are_not() -> None:
    index = [
        package("a", Depends="b", Recommends="x"),
        package("b", Pre_Depends="c"),
        package("c"),
        package("x"),
    ]
    assert names(index, "a") == ["a", "b", "c"]


def test_a_circle_of_dependencies_ends() -> None:
    index = [package("a", Depends="b"), package("b", Depends="a")]
    assert names(index, "a") == ["a", "b"]


def test_a_package_that_two_others_need_keeps_nobody_from_being_followed() -> None:
    index = [
        package("a", Depends="d, b, c"),
        package("b"),
        package("c", Depends="b"),
        package("d", Depends="e"),
        package("e"),
    ]
    assert names(index, "a") == ["a", "b", "c", "d", "e"]


def test_a_name_that_is_nearly_right_is_corrected_and_another_is_not() -> None:
    index = [package("python3"), package("abcde")]
    with pytest.raises(UnknownPackage) as near:
        names(index, "pyton3")
    assert near.value.hint == "Did you mean python3?"
    with pytest.raises(UnknownPackage) as far:
        names(index, "abcxy")
    assert "Did you mean" not in str(far.value.hint)


def test_an_essential_package_comes_only_when_needed() -> None:
    index = [package("a"), package("bash", Essential="yes")]
    assert names(index, "a") == ["a"]


def test_a_row_says_what_a_lock_needs() -> None:
    (row,) = resolve_closure([[package("a", "2:1.0-1")]], ["a"], "amd64")
    assert row.model_dump() == {
        "name": "a",
        "version": "2:1.0-1",
        "path": "pool/main/a/a/a_2:1.0-1_amd64.deb",
        "size_bytes": 10,
        "sha256": "ab" * 32,
    }


def test_the_highest_version_over_all_suites_wins_whatever_their_order() -> None:
    old, new = [package("a", "1.9")], [package("a", "1.10")]
    for indexes in ([old, new], [new, old]):
        assert [row.version for row in resolve_closure(indexes, ["a"], "amd64")] == ["1.10"]


def test_packages_of_other_architectures_do_not_exist() -> None:
    index = [package("a", Architecture="arm64"), package("b", Architecture="all")]
    assert names(index, "b") == ["b"]
    with pytest.raises(UnknownPackage):
        names(index, "a")


def test_the_first_alternative_that_exists_is_taken() -> None:
    index = [package("a", Depends="gone | b | c"), package("b"), package("c")]
    assert names(index, "a") == ["a", "b"]


def test_an_alternative_that_is_wanted_anyway_is_preferred() -> None:
    index = [package("a", Depends="b | c"), package("b"), package("c")]
    assert names(index, "a", "c") == ["a", "c"]


def test_an_alternative_that_something_else_needs_is_preferred() -> None:
    index = [
        package("a", Depends="b | c, z"),
        package("b"),
        package("c"),
        package("z", Depends="c"),
    ]
    assert names(index, "a") == ["a", "c", "z"]


def test_the_order_of_the_spec_changes_nothing() -> None:
    index = [
        package("a", Depends="v"),
        package("b", Depends="y | x"),
        package("c", Depends="x | y"),
        package("x", Provides="v"),
        package("y", Provides="v"),
    ]
    results = {tuple(names(index, *order)) for order in itertools.permutations("abc")}
    assert len(results) == 1


def test_a_virtual_package_stands_for_its_first_provider_by_name() -> None:
    index = [package("a", Depends="awk"), package("mawk", Provides="awk"), package("gawk")]
    index[2]["Provides"] = "awk"
    assert names(index, "a") == ["a", "gawk"]


def test_a_real_package_comes_before_its_providers() -> None:
    index = [package("a", Depends="m"), package("a-m", Provides="m"), package("m")]
    assert names(index, "a") == ["a", "m"]


def test_a_versioned_dependency_needs_a_versioned_provider() -> None:
    index = [
        package("a", Depends="v (>= 2)"),
        package("b", Provides="v"),
        package("c", Provides="v (= 1)"),
        package("d", Provides="v (= 2.1)"),
    ]
    assert names(index, "a") == ["a", "d"]


def test_an_alternative_whose_version_does_not_fit_is_passed_over() -> None:
    index = [package("a", Depends="b (>= 2) | c"), package("b", "1.9"), package("c")]
    assert names(index, "a") == ["a", "c"]


@pytest.mark.parametrize("qualifier", ["any", "native", "amd64"])
def test_an_architecture_after_a_name_is_understood(qualifier: str) -> None:
    index = [package("a", Depends=f"python3:{qualifier} (>= 3.11)"), package("python3", "3.11.2")]
    assert names(index, "a") == ["a", "python3"]


def test_an_excluded_dependency_is_left_out_with_all_it_needs() -> None:
    index = [package("a", Depends="b, c"), package("b", Depends="d"), package("c"), package("d")]
    assert names(index, "a", exclude=("b",)) == ["a", "c"]


def test_an_excluded_choice_is_not_replaced_by_the_next_one() -> None:
    index = [
        package("a", Depends="debconf (>= 0.5) | debconf-2.0"),
        package("cdebconf", Provides="debconf-2.0"),
        package("debconf", "1.5"),
    ]
    assert names(index, "a", exclude=("debconf",)) == ["a"]


def test_an_excluded_virtual_name_is_left_out_too() -> None:
    index = [package("a", Depends="awk"), package("mawk", Provides="awk")]
    assert names(index, "a", exclude=("awk",)) == ["a"]


def test_an_unknown_name_brings_near_names() -> None:
    with pytest.raises(UnknownPackage, match=r"no package python3\.12-minimal for amd64") as caught:
        names([package("python3.11-minimal"), package("zlib1g")], "python3.12-minimal")
    assert "python3.11-minimal" in caught.value.hint


def test_a_wanted_virtual_package_brings_its_providers() -> None:
    with pytest.raises(UnknownPackage) as caught:
        names([package("mawk", Provides="awk")], "awk")
    assert "mawk" in caught.value.hint


@pytest.mark.parametrize(
    ("index", "error"),
    [
        ([package("a", Depends="gone")], ResolveFailed),
        ([package("a", Depends="b (>= 2)"), package("b", "1")], ResolveFailed),
        ([package("a", Depends="b (<< 1)"), package("b", "1")], ResolveFailed),
        ([package("a", Depends="b (>> 1)"), package("b", "1")], ResolveFailed),
        ([package("a", Depends="b (<= 1)"), package("b", "2")], ResolveFailed),
        ([package("a", Depends="b (= 1-2)"), package("b", "1-1")], ResolveFailed),
        ([package("a", Depends="b:i386"), package("b")], ResolveFailed),
        ([package("a", Depends="b (> 1)"), package("b")], IndexBroken),
        ([package("a", Depends="b [amd64]"), package("b")], IndexBroken),
        ([package("a", Depends="../b"), package("b")], IndexBroken),
        ([package("a", SHA256="ab")], IndexBroken),
        ([package("a", Size="many")], IndexBroken),
        ([package("a", Size="0")], IndexBroken),
        ([package("a", version="1 2")], IndexBroken),
        ([package("a", Filename="../../etc/passwd")], IndexBroken),
        ([package("a", Filename="/etc/passwd")], IndexBroken),
        ([package("a", Filename="pool/../../x.deb")], IndexBroken),
        ([{"Package": "a"}], IndexBroken),
    ],
)
def test_what_cannot_be_satisfied_or_understood_is_refused(
    index: list[Stanza], error: type[PipelineError]
) -> None:
    with pytest.raises(error):
        names(index, "a")


def test_a_package_cannot_be_wanted_and_excluded() -> None:
    with pytest.raises(ResolveFailed, match="both"):
        names([package("a")], "a", exclude=("a",))
