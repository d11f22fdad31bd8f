from __future__ import annotations

import itertools
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest

from pipeline.core.errors import IndexBroken
from pipeline.images.lock.debian import read_stanza, read_stanzas, version_key


def test_stanzas_are_parted_by_empty_lines_however_many() -> None:
    stanzas = list(read_stanzas("\nA: 1\nB: 2\n\n \n\nA: 3\n"))
    assert stanzas == [{"A": "1", "B": "2"}, {"A": "3"}]


def test_a_continuation_line_belongs_to_the_field_above_it() -> None:
    assert read_stanza("A: 1\n two\n  three\nB: 4") == {"A": "1\ntwo\n three", "B": "4"}


def test_only_the_fields_asked_for_are_kept_and_named_as_asked() -> None:
    text = "package: a\nDescription: long\n story\nversion: 1\n"
    assert read_stanza(text, ("Package", "Version")) == {"Package": "a", "Version": "1"}


def test_a_comment_inside_a_stanza_is_not_read() -> None:
    assert read_stanza("A: 1\n# B: 2\nC: 3\n") == {"A": "1", "C": "3"}


def test_a_colon_in_a_value_stays() -> None:
    assert read_stanza("URIs: http://example.invalid:80/x\n") == {
        "URIs": "http://example.invalid:80/x"
    }


def test_stanzas_come_one_by_one_from_endless_lines() -> None:
    def lines() -> Iterator[str]:
        for number in itertools.count():
            yield f"Package: p{number}\n"
            yield "\n"

    assert [s["Package"] for s in itertools.islice(read_stanzas(lines()), 3)] == ["p0", "p1", "p2"]


@pytest.mark.parametrize(
    "text",
    [
        "no field here\n",
        " continued before any field\n",
        "A: 1\nA: 2\n",
        "A: 1\na: 2\n",
        ": no name\n",
        "two words: 1\n",
        "-----BEGIN PGP: 1\n",
    ],
)
def test_what_is_not_deb822_is_refused(text: str) -> None:
    with pytest.raises(IndexBroken):
        list(read_stanzas(text))


@pytest.mark.parametrize("text", ["", "\n\n", "A: 1\n\nA: 2\n"])
def test_a_file_that_must_have_one_stanza_has_one(text: str) -> None:
    with pytest.raises(IndexBroken):
        read_stanza(text)


def test_a_tenth_of_debian_is_read_in_well_under_a_second() -> None:
    body = "".join(f"Field-{n}: some value of usual length\n" for n in range(20))
    text = "".join(f"Package: p{n}\n{body}\n" for n in range(6300))
    start = time.process_time()
    assert sum(1 for _ in read_stanzas(text, ("Package",))) == 6300
    assert time.process_time() - start < 2


def test_a_field_of_very_many_lines_is_read_in_linear_time() -> None:
    start = time.process_time()
    (stanza,) = read_stanzas("Package: a\nX: 0\n" + " y\n" * 400_000 + "Z: 1\n")
    assert stanza["X"] == "0" + "\ny" * 400_000
    assert stanza["Z"] == "1"
    (last,) = read_stanzas("X:\n" + " y\n" * 3)
    assert last == {"X": "\ny\ny\ny"}
    assert time.process_time() - start < 3


# Each list is in rising order.
RISING = [
    ["1.0~~", "1.0~~a", "1.0~", "1.0", "1.0-1", "1.0-1+b1", "1.0a", "1.0+b1", "1.0.1"],
    ["1.2", "1.10", "1.10a", "1.10.0", "1.11~rc1", "1.11"],
    ["9:0", "10:0"],
    ["99999999999999999999", "1:0"],
    ["2.36-9", "2.36-9+b1", "2.36-9+deb12u9", "2.36-9+deb12u14", "2.36-10"],
    ["1.0-1~bpo12+1", "1.0-1", "1.0-1.1", "1.0-2"],
    ["3.0.22-1~deb12u1", "3.0.22-1~deb12u2", "3.0.22-1"],
    ["1.0a", "1.0b", "1.0z", "1.0+", "1.0.", "1.0.a"],
    ["1.0A", "1.0Z", "1.0a"],
    ["0~", "0", "00a", "0.0"],
    ["1.0-a-1", "1.0-a-2", "1.0-b-1"],
]
EQUAL = [
    ("1.0", "1.0-0"),
    ("1.0", "0:1.0"),
    ("1.00", "1.0"),
    ("1.0-01", "1.0-1"),
    ("1.0~", "1.0~0"),
    ("0001:1", "1:1"),
]
PAIRS = [(a, "lt", b) for row in RISING for i, a in enumerate(row) for b in row[i + 1 :]]
PAIRS += [(a, "eq", b) for a, b in EQUAL]


@pytest.mark.parametrize(("one", "relation", "other"), PAIRS)
def test_versions_sort_as_debian_says(one: str, relation: str, other: str) -> None:
    if relation == "lt":
        assert version_key(one) < version_key(other)
    else:
        assert version_key(one) == version_key(other)


@pytest.mark.skipif(shutil.which("dpkg") is None, reason="This machine has no dpkg to ask.")
def test_dpkg_agrees_with_the_whole_table() -> None:
    # One shell for all questions: a process for each would take most of a second.
    asks = "\n".join(
        f"dpkg --compare-versions {a} {r} {b} || echo {a} {r} {b}" for a, r, b in PAIRS
    )
    done = subprocess.run(["sh"], input=asks, capture_output=True, text=True, check=True)
    assert done.stdout == ""


@pytest.mark.parametrize(
    "version", ["", ":1", "a:1", "-1", "1:", "1:-1", "1.0-", "1.0 1", "1:1_0", "²:1"]
)
def test_what_is_no_version_is_refused(version: str) -> None:
    with pytest.raises(IndexBroken):
        version_key(version)
