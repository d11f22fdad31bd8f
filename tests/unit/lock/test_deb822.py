from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest

from pipeline.errors import IndexBroken
from pipeline.lock.deb822 import read_stanza, read_stanzas


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
    start = time.perf_counter()
    assert sum(1 for _ in read_stanzas(text, ("Package",))) == 6300
    assert time.perf_counter() - start < 2


def test_a_field_of_very_many_lines_is_read_in_linear_time() -> None:
    start = time.process_time()
    (stanza,) = read_stanzas("Package: a\nX: 0\n" + " y\n" * 400_000 + "Z: 1\n")
    assert stanza["X"] == "0" + "\ny" * 400_000
    assert stanza["Z"] == "1"
    (last,) = read_stanzas("X:\n" + " y\n" * 3)
    assert last == {"X": "\ny\ny\ny"}
    assert time.process_time() - start < 3
