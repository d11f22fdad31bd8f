from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from pipeline.core.errors import SpecInvalid
from pipeline.core.yaml_file import MAX_FILE_BYTES, read_yaml
from pipeline.images.assemble.golden import Golden
from pipeline.images.spec.image import ImageSpec, PatchSeries
from tests.growth import grows_linearly
from tests.unit.support import tiny_spec

GOOD = yaml.safe_dump(tiny_spec())
LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join(['*' + old] * 9)}]\n" for old, new in pairwise("abcdefghi")
)


def read(tmp_path: Path, text: str | bytes) -> ImageSpec:
    path = tmp_path / "image.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_yaml(path, ImageSpec)


def test_a_good_file_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, GOOD).name == "tiny"


def test_the_hint_names_a_committed_file_so_that_git_finds_it(tmp_path: Path) -> None:
    path = tmp_path / "golden.yaml"
    path.write_text("colour: blue\n")
    with pytest.raises(SpecInvalid) as caught:
        read_yaml(path, Golden)
    assert f"`git checkout {path}`" in caught.value.hint


BAD: dict[str, tuple[str | bytes, str]] = {
    "an empty file": ("", "is not a mapping"),
    "only a comment": ("# nothing\n", "is not a mapping"),
    "a list": ("- a\n", "is not a mapping"),
    "a word": ("hello\n", "is not a mapping"),
    "a tab": ("a:\n\t- b\n", "not valid YAML"),
    "an unknown key": (GOOD + "colour: blue\n", "colour: Extra inputs"),
    "a key written twice": (GOOD + "name: other\n", "'name' appears twice"),
    "a key written twice inside": (GOOD + "env: {A: b, A: c}\n", "'A' appears twice"),
    "a number written in two ways": ("1: a\n0x1: b\n", "appears twice"),
    "two documents": (GOOD + "---\n" + GOOD, "not valid YAML"),
    "bytes that are no UTF-8": (b"name: \xff\n", "not valid YAML"),
    "UTF-16": (GOOD.encode("utf-16"), "not valid YAML"),
    "a NUL byte": ("name: a\0\n", "not valid YAML"),
    "a Python object": ("name: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
    "a list as a key": ("? [a]\n: b\n", "not valid YAML"),
    "a date that is none": (GOOD + "labels: {a: 2026-99-99}\n", "not valid YAML"),
    "a number that is none": (GOOD + "labels: {a: !!int x}\n", "not valid YAML"),
    "a time that is none": (GOOD + "labels: {a: !!timestamp x}\n", "not valid YAML"),
    "a number with 5000 digits": (GOOD + f"labels: {{a: {'1' * 5000}}}\n", "not valid YAML"),
    "an alias": ("a: &a b\nc: *a\n", "aliases are not allowed"),
    "an alias of itself": ("a: &a [*a]\n", "aliases are not allowed"),
    "a billion laughs": (LAUGHS, "aliases are not allowed"),
    "a billion laughs in a label": (
        GOOD + "labels:\n" + "".join(f"  {line}\n" for line in LAUGHS.splitlines()),
        "aliases are not allowed",
    ),
    "a merge": (GOOD + "env:\n  <<: {A: b}\n", "not valid YAML"),
    "100,000 open brackets": ("[" * 100_000, "levels deep"),
    "100,000 brackets": ("[" * 100_000 + "]" * 100_000, "levels deep"),
    "100 folders deep": ("\n".join(" " * n + "a:" for n in range(100)), "levels deep"),
    "a huge file": ("#" * (MAX_FILE_BYTES + 1), "larger than"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_an_error_in_one_line_that_names_it(tmp_path: Path, name: str) -> None:
    text, message = BAD[name]
    with pytest.raises(SpecInvalid, match=message) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(str(tmp_path / "image.yaml"))
    assert "\n" not in str(caught.value)


def test_the_wrong_field_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecInvalid, match=r"python\.requirements\.0: .*not a requirement"):
        read(tmp_path, yaml.safe_dump(tiny_spec(python={"requirements": ["a b"]})))


def test_many_keys_take_no_long_time(tmp_path: Path) -> None:
    def read_keys(keys: int) -> None:
        with pytest.raises(SpecInvalid):
            read(tmp_path, "".join(f"k{n}: 1\n" for n in range(keys)))

    assert grows_linearly(read_keys, 1_500)


@pytest.mark.parametrize("kind", ["nothing", "a folder"])
def test_what_cannot_be_read_is_an_error_that_names_it(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "image.yaml"
    if kind == "a folder":
        path.mkdir()
    with pytest.raises(SpecInvalid, match=r"image\.yaml: cannot be read"):
        read_yaml(path, ImageSpec)


def test_an_edited_file_of_the_same_size_is_read_anew(tmp_path: Path) -> None:
    before, after = (GOOD.replace("tiny", name) for name in ("one1", "two2"))
    assert [read(tmp_path, text).name for text in (before, after)] == ["one1", "two2"]


def test_all_wrong_fields_are_named_at_once(tmp_path: Path) -> None:
    wrong = tiny_spec(summary="short", colour="blue", ports=[0])
    del wrong["platforms"]
    with pytest.raises(SpecInvalid) as caught:
        read(tmp_path, yaml.safe_dump(wrong))
    for field in ("summary: ", "colour: ", "ports.0: ", "platforms: "):
        assert field in str(caught.value)


def test_of_very_many_mistakes_the_first_are_named_and_the_rest_counted(tmp_path: Path) -> None:
    with pytest.raises(SpecInvalid, match=r"k0: .*; and \d+ more$"):
        read(tmp_path, "".join(f"k{n}: 1\n" for n in range(40)))


def test_the_hint_names_a_schema_that_there_is(tmp_path: Path) -> None:
    path = tmp_path / "series.yaml"
    path.write_text("patches: 1\n", encoding="utf-8")
    with pytest.raises(SpecInvalid) as caught:
        read_yaml(path, PatchSeries)
    assert "`sm120 image schema series`" in caught.value.hint
    # a lock's model has no schema that people could want
    with pytest.raises(SpecInvalid) as caught:
        read_yaml(path, Golden)
    assert "image schema" not in caught.value.hint


def test_what_cannot_be_read_has_no_field_to_correct(tmp_path: Path) -> None:
    with pytest.raises(SpecInvalid) as caught:
        read_yaml(tmp_path / "nothing", PatchSeries)
    assert "schema" not in caught.value.hint
    assert "may read it" in caught.value.hint


def test_a_check_of_our_own_is_told_in_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(SpecInvalid, match=r"image\.yaml: an image has either `base`"):
        read(tmp_path, yaml.safe_dump(tiny_spec(base="other")))
    with pytest.raises(SpecInvalid, match=r"python\.requirements\.0: 'a b' is not a requirement"):
        read(tmp_path, yaml.safe_dump(tiny_spec(python={"requirements": ["a b"]})))
