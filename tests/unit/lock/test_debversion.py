from __future__ import annotations

import shutil
import subprocess

import pytest

from pipeline.errors import IndexBroken
from pipeline.lock.debversion import version_key

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
