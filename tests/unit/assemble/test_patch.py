from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.errors import PatchConflict
from pipeline.images.assemble.patch import FilePatch, apply, parse, unified

BEFORE = b"".join(b"line %d\n" % n for n in range(1, 21))
HEAD = "--- a/pkg/mod.py\n+++ b/pkg/mod.py\n"
GOOD = (
    HEAD
    + "@@ -4,3 +4,4 @@ def f():\n line 4\n-line 5\n+line five\n+line five and a half\n line 6\n"
)


def applied(text: str, before: bytes = BEFORE) -> bytes:
    changes = parse(text, "0001.patch")
    assert [change.path for change in changes] == ["pkg/mod.py"]
    return apply(changes[0], before, "0001.patch")


def refused(text: str, match: str, before: bytes = BEFORE) -> None:
    with pytest.raises(PatchConflict, match=match):
        applied(text, before)


def test_a_hunk_is_applied_at_its_line() -> None:
    want = BEFORE.replace(b"line 5\n", b"line five\nline five and a half\n")
    assert applied(GOOD) == want


def test_several_hunks_are_applied_in_order() -> None:
    text = HEAD + "@@ -1 +1 @@\n-line 1\n+one\n@@ -20,1 +20,2 @@\n line 20\n+line 21\n"
    assert applied(text) == BEFORE.replace(b"line 1\n", b"one\n", 1) + b"line 21\n"


def test_a_hunk_that_only_adds_comes_after_the_line_it_names() -> None:
    assert applied(HEAD + "@@ -5,0 +6 @@\n+new\n") == BEFORE.replace(b"line 6\n", b"new\nline 6\n")
    assert applied(HEAD + "@@ -0,0 +1 @@\n+new\n") == b"new\n" + BEFORE
    assert applied(HEAD + "@@ -20,0 +21 @@\n+new\n") == BEFORE + b"new\n"


def test_a_hunk_that_only_takes_away_is_fine() -> None:
    assert applied(HEAD + "@@ -5,2 +4,0 @@\n-line 5\n-line 6\n") == BEFORE.replace(
        b"line 5\nline 6\n", b""
    )


def test_a_mail_around_the_diff_is_read_over() -> None:
    mail = "From: someone\nSubject: [PATCH]\n\nWhy.\n---\n 1 file changed\n\n"
    git = "diff --git a/pkg/mod.py b/pkg/mod.py\nindex 111..222 100644\n"
    assert applied(mail + git + GOOD + "-- \n2.39.5\n") == applied(GOOD)


def test_several_files_are_told_apart() -> None:
    text = GOOD + GOOD.replace("mod.py", "other.py")
    assert [change.path for change in parse(text, "x")] == ["pkg/mod.py", "pkg/other.py"]


def test_a_missing_last_newline_can_be_said() -> None:
    marker = "\\ No newline at end of file\n"
    text = HEAD + f"@@ -2 +2 @@\n-two\n{marker}+zwei\n{marker}"
    assert applied(text, b"one\ntwo") == b"one\nzwei"
    assert applied(HEAD + f"@@ -2 +2 @@\n-two\n{marker}+two\n", b"one\ntwo") == b"one\ntwo\n"


def test_only_a_line_feed_ends_a_line() -> None:
    before = "one\n\x0c\ntwo\x0b\x1c\u2028\x85 still two\nthree\n".encode()
    text = HEAD + "@@ -3,2 +3,2 @@\n two\x0b\x1c\u2028\x85 still two\n-three\n+drei\n"
    assert applied(text, before) == before.replace(b"three", b"drei")


def test_a_file_with_carriage_returns_keeps_them() -> None:
    before = b"one\r\ntwo\r\n"
    assert applied(HEAD + "@@ -2 +2 @@\n-two\r\n+zwei\r\n", before) == b"one\r\nzwei\r\n"


LINES = st.lists(st.sampled_from(["a", "b", "", "  c", "-", "+x", "@@"]), max_size=12)


@pytest.mark.skipif(shutil.which("diff") is None, reason="There is no diff here.")
@given(LINES, LINES, st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_what_diff_writes_is_applied(
    tmp_path_factory: pytest.TempPathFactory, old: list[str], new: list[str], context: int
) -> None:
    place = tmp_path_factory.mktemp("diff")
    texts = ["".join(f"{line}\n" for line in lines) for lines in (old, new)]
    for name, text in zip("ab", texts, strict=True):
        (place / name / "pkg").mkdir(parents=True)
        (place / name / "pkg/mod.py").write_text(text)
    command = ["diff", f"-U{context}", "a/pkg/mod.py", "b/pkg/mod.py"]
    diff = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False).stdout
    if diff:
        assert applied(diff, texts[0].encode()) == texts[1].encode()


def test_the_diff_for_people_can_be_applied_again() -> None:
    after = applied(GOOD)
    assert applied(unified("pkg/mod.py", BEFORE, after)) == after


@pytest.mark.parametrize("shift", [-3, -1, 1, 5])
def test_an_offset_is_refused(shift: int) -> None:
    refused(GOOD.replace("-4,3", f"-{4 + shift},3"), "expected 'line 4'")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("line 4", "line four"),
        (" line 6", " line  6"),
        ("-line 5", "-line 5 "),
        ("line 6", "Line 6"),
    ],
)
def test_fuzz_is_refused(old: str, new: str) -> None:
    refused(GOOD.replace(old, new), "expected")


def test_a_hunk_past_the_end_is_refused() -> None:
    refused(HEAD + "@@ -20,2 +20,1 @@\n line 20\n-line 21\n", "the end of the file")
    refused(HEAD + "@@ -25,0 +26 @@\n+new\n", "does not match at line 25")


def test_overlapping_hunks_are_refused() -> None:
    text = HEAD + "@@ -4,2 +4,1 @@\n line 4\n-line 5\n@@ -5,2 +4,1 @@\n-line 5\n line 6\n"
    refused(text, "overlap at line 5")


def test_hunks_in_the_wrong_order_are_refused() -> None:
    text = HEAD + "@@ -9 +9 @@\n-line 9\n+nine\n@@ -2 +2 @@\n-line 2\n+two\n"
    refused(text, "overlap at line 2")


def test_a_patch_applied_twice_is_refused() -> None:
    refused(GOOD, "expected 'line 5'", applied(GOOD))


@pytest.mark.parametrize("lines", range(1, 5))
def test_a_cut_hunk_is_refused(lines: int) -> None:
    text = "".join(GOOD.splitlines(keepends=True)[: 2 + lines])
    refused(text, "ends early")


@pytest.mark.parametrize(
    "counts", ["-4,2 +4,4", "-4,4 +4,4", "-4,3 +4,3", "-4,3 +4,5", "-4,2 +4,3"]
)
def test_wrong_counts_are_refused(counts: str) -> None:
    refused(GOOD.replace("-4,3 +4,4", counts), "counts its lines wrongly|ends early")


@pytest.mark.parametrize(
    "header", ["@@ -4,3 +4,4", "@@ 4,3 4,4 @@", "@@ -a,3 +4,4 @@", "@@@ -1 +1 @@@"]
)
def test_a_damaged_hunk_header_is_refused(header: str) -> None:
    refused(GOOD.replace("@@ -4,3 +4,4 @@", header), "damaged hunk header")


def test_a_file_without_hunks_is_refused() -> None:
    refused(HEAD, "no hunks")
    refused(HEAD + "\n" + GOOD, "no hunks")


@pytest.mark.parametrize("text", ["", "hello\n", "@@ -1 +1 @@\n-a\n+b\n"])
def test_text_that_is_no_diff_is_refused(text: str) -> None:
    refused(text, "is not a unified diff")


@pytest.mark.parametrize(
    "head",
    [
        "--- /dev/null\n+++ b/pkg/mod.py\n",
        "--- a/pkg/mod.py\n+++ /dev/null\n",
        "--- a/pkg/mod.py\n+++ b/pkg/other.py\n",
        "--- pkg/mod.py\n+++ pkg/mod.py\n",
        "--- a/pkg/mod.py\n+++ a/pkg/mod.py\n",
        "--- b/pkg/mod.py\n+++ b/pkg/mod.py\n",
        "--- a/pkg/mod.py\n",
        "--- a/pkg/mod.py\n??? b/pkg/mod.py\n",
    ],
)
def test_anything_but_a_change_in_place_is_refused(head: str) -> None:
    refused(GOOD.replace(HEAD, head), "in place")


@pytest.mark.parametrize(
    "line",
    [
        "GIT binary patch",
        "Binary files a/x.so and b/x.so differ",
        "new file mode 100644",
        "deleted file mode 100644",
        "old mode 100644",
        "rename from pkg/a.py",
        "copy from pkg/a.py",
    ],
)
def test_what_a_diff_cannot_show_is_refused_even_beside_a_good_change(line: str) -> None:
    refused(GOOD + f"diff --git a/x b/x\n{line}\n", "in place")


def test_carriage_returns_in_the_patch_alone_are_refused() -> None:
    refused(GOOD.replace("\n", "\r\n"), "expected")


def test_carriage_returns_in_the_file_alone_are_refused() -> None:
    refused(GOOD, "expected", BEFORE.replace(b"\n", b"\r\n"))


def test_a_missing_last_newline_that_is_not_said_is_refused() -> None:
    refused(HEAD + "@@ -2 +2 @@\n-two\n+zwei\n", "expected", b"one\ntwo")


def test_a_missing_last_newline_that_is_only_said_is_refused() -> None:
    marker = "\\ No newline at end of file\n"
    refused(HEAD + f"@@ -2 +2 @@\n-two\n{marker}+zwei\n", "expected", b"one\ntwo\n")


def test_the_end_of_the_file_in_its_middle_is_refused() -> None:
    marker = "\\ No newline at end of file\n"
    refused(HEAD + f"@@ -4,2 +4,2 @@\n-line 4\n+four\n{marker} line 5\n", "in its middle")
    refused(HEAD + f"@@ -4,2 +4 @@\n-line 4\n{marker}-line 5\n+four\n", "in its middle")
    refused(HEAD + f"@@ -4 +4 @@\n-line 4\n+four\n{marker}", "does not end at line 4")


@pytest.mark.parametrize("before", [b"\xff\xfe\x00", b"\x7fELF\x80\n"])
def test_a_binary_file_is_refused(before: bytes) -> None:
    refused(GOOD, "is not text", before)


def test_an_empty_file_is_refused_where_lines_are_expected() -> None:
    refused(GOOD, "the end of the file", b"")


def test_a_patch_is_a_value() -> None:
    assert parse(GOOD, "x") == parse(GOOD, "y")
    assert isinstance(parse(GOOD, "x")[0], FilePatch)


def test_the_whole_line_is_named_when_it_differs(tmp_path: Path) -> None:
    with pytest.raises(PatchConflict, match=r"^0001\.patch: pkg/mod\.py line 5 is 'line 5'"):
        applied(GOOD.replace("-line 5", "-line V"))


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (GOOD.replace("line 4", "line 3"), "Redo the patch for this version"),
        (GOOD.replace("+++ b/pkg/mod.py", "+++ /dev/null"), "`files` in image.yaml adds a file"),
        (f"new file mode 100644\n{GOOD}", "`files` in image.yaml adds a file"),
        (GOOD.replace("-4,3", "-4,9"), "Make the diff again"),
        ("no diff\n", "Make the diff again"),
    ],
)
def test_what_helps_depends_on_what_is_wrong_with_a_patch(text: str, hint: str) -> None:
    with pytest.raises(PatchConflict) as caught:
        applied(text)
    assert hint in caught.value.hint
