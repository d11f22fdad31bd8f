from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.core.yaml_file import schema
from pipeline.images.spec.image import ImageFile, ImageSpec, PatchSeries, PatchSpec
from tests.unit.spec.json_schema import problems
from tests.unit.support import AMD64, ROOT, tiny_spec

SHIPPED = sorted((ROOT / "images").glob("*/image.yaml"))
SERIES = sorted((ROOT / "images").glob("*/patches/*.yaml"))


def spec(**changes: Any) -> ImageSpec:
    return ImageSpec.model_validate(tiny_spec(**changes))


def test_a_small_spec_is_enough() -> None:
    assert spec().platforms == [AMD64]


BAD: dict[str, dict[str, Any]] = {
    "an unknown key": {"colour": "blue"},
    "an unknown key inside": {"python": {"requirements": ["a"], "colour": "blue"}},
    "base and debian": {"base": "other"},
    "neither base nor debian": {"debian": None},
    "accounts on a base": {
        "debian": None,
        "base": "other",
        "accounts": [{"name": "a", "uid": 1, "gid": 1, "home": "/a"}],
    },
    "a number for a name": {"name": 3},
    "a name with a slash": {"name": "a/b"},
    "a name that goes up": {"name": "../a"},
    "a name with a newline": {"name": "a\n"},
    "a name in capitals": {"name": "Tiny"},
    "a name that is too long": {"name": "a" * 81},
    "a short summary": {"summary": "short"},
    "no platform": {"platforms": []},
    "another platform": {"platforms": ["windows/amd64"]},
    "a platform that is no list": {"platforms": AMD64},
    "no requirement": {"python": {"requirements": []}},
    "a requirement that is none": {"python": {"requirements": ["a b c"]}},
    "an option as a requirement": {"python": {"requirements": ["--index-url https://x"]}},
    "a file as a requirement": {"python": {"requirements": ["-r other.txt"]}},
    "two requirements in one": {"python": {"requirements": ["a\nb"]}},
    "a requirement with an address": {"python": {"requirements": ["a @ https://h/a.whl"]}},
    "a float for Python's version": {"python": {"requirements": ["a"], "version": 3.11}},
    "another Python": {"python": {"requirements": ["a"], "version": "2.7"}},
    "a file from above": {"files": [{"from": "../x", "to": "/x"}]},
    "a file from the root": {"files": [{"from": "/etc/passwd", "to": "/x"}]},
    "a file from nowhere": {"files": [{"from": "a//b", "to": "/x"}]},
    "a file to above": {"files": [{"from": "x", "to": "/../x"}]},
    "a file to above in the middle": {"files": [{"from": "x", "to": "/a/../../x"}]},
    "a file to a relative place": {"files": [{"from": "x", "to": "x"}]},
    "a file to the root itself": {"files": [{"from": "x", "to": "/"}]},
    "a file to a folder": {"files": [{"from": "x", "to": "/x/"}]},
    "a file that deletes another": {"files": [{"from": "x", "to": "/etc/.wh.passwd"}]},
    "a file that empties a folder": {"files": [{"from": "x", "to": "/etc/.wh..wh..opq"}]},
    "a file under its other name": {"files": [{"source": "x", "to": "/x"}]},
    "a mode that is a number": {"files": [{"from": "x", "to": "/x", "mode": 644}]},
    "a mode that sets the user id": {"files": [{"from": "x", "to": "/x", "mode": "4755"}]},
    "patches from above": {"patches": "../series.yaml"},
    "a working folder above": {"workdir": "/a/.."},
    "a port that is none": {"ports": [0]},
    "a port that is too high": {"ports": [65536]},
    "a port that is a word": {"ports": ["http"]},
    "a variable with an equals sign": {"env": {"A=B": "c"}},
    "a variable that is a number": {"env": {"A": 1}},
    "a variable that is a list": {"env": {"A": ["b"]}},
    "an account that is root": {"accounts": [{"name": "a", "uid": 0, "gid": 1, "home": "/a"}]},
    "an account that lives above": {"accounts": [{"name": "a", "uid": 1, "gid": 1, "home": "/.."}]},
    "an account too high": {"accounts": [{"name": "a", "uid": 60001, "gid": 1, "home": "/a"}]},
    "an account with a dot": {"accounts": [{"name": "a.b", "uid": 1, "gid": 1, "home": "/a"}]},
    "an account of a digit": {"accounts": [{"name": "1", "uid": 1, "gid": 1, "home": "/a"}]},
    "an account in a hidden home": {"accounts": [{"name": "a", "uid": 1, "gid": 1, "home": "/.a"}]},
    "an account at the root": {"accounts": [{"name": "a", "uid": 1, "gid": 1, "home": "/"}]},
    "a CUDA home above": {"cuda": {"from": ["nvidia"], "home": "/usr/../x"}},
    "CUDA from above": {"cuda": {"from": ["../x"]}},
    "an architecture that is none": {"cuda": {"from": ["x"], "architectures": ["sm_120x"]}},
    "a command that is a string": {"command": "ls"},
    "an override without a reason": {"python": {"requirements": ["a"], "override": {"b==1": ""}}},
    "an override that is none": {
        "python": {"requirements": ["a"], "override": {"b at 1": "of 2 there is no wheel"}}
    },
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_spec_is_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        spec(**BAD[name])


def test_a_spec_cannot_change() -> None:
    with pytest.raises(ValidationError):
        setattr(spec(), "name", "other")  # noqa: B010


LOCK_CHANGES: list[dict[str, Any]] = [
    {"debs": ["bash"]},
    {"python": {"requirements": ["thing==2"]}},
    {"python": {"requirements": ["thing"], "version": "3.12"}},
    {"python": {"requirements": ["thing"], "omit": {"other": "not needed"}}},
    {"python": {"requirements": ["thing"], "override": {"other==2": "of 1 there is no wheel"}}},
    {"python": None},
    {"debian": {"suite": "trixie"}},
    {"debian": {"suite": "bookworm", "security": True}},
    {"debian": {"suite": "bookworm", "exclude": {"dpkg": "not needed"}}},
    {"debian": None, "base": "other"},
]
NO_LOCK_CHANGES: list[dict[str, Any]] = [
    {"summary": "quite another summary"},
    {"env": {"A": "b"}},
    {"files": [{"from": "x", "to": "/x"}]},
    {"python": {"requirements": ["thing"], "prefer": ["thing"]}},
    {"python": {"requirements": ["thing"], "rewrite_record": {"thing": "published so"}}},
    {"labels": {"a": "b"}},
]


@pytest.mark.parametrize("changes", LOCK_CHANGES)
def test_what_decides_the_lock_changes_its_digest(changes: dict[str, Any]) -> None:
    assert spec(**changes).lock_digest() != spec().lock_digest()


@pytest.mark.parametrize("changes", NO_LOCK_CHANGES)
def test_what_does_not_decide_the_lock_leaves_its_digest(changes: dict[str, Any]) -> None:
    assert spec(**changes).lock_digest() == spec().lock_digest()


def test_the_order_of_debs_does_not_matter() -> None:
    one, other = spec(debs=["a", "b"]), spec(debs=["b", "a"])
    assert one.lock_digest() == other.lock_digest()


SCHEMA: dict[str, Any] = json.loads(schema(ImageFile))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.parent.name)
def test_the_schema_accepts_the_shipped_specs(path: Path) -> None:
    assert problems(yaml.safe_load(path.read_text()), SCHEMA, SCHEMA) == []


@pytest.mark.parametrize("path", SERIES, ids=lambda p: p.parent.parent.name)
def test_the_schema_accepts_the_shipped_series(path: Path) -> None:
    rules = json.loads(schema(PatchSeries))
    assert problems(yaml.safe_load(path.read_text()), rules, rules) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"colour": "blue"},
        {"python": {"requirements": ["a"], "colour": "blue"}},
        {"python": {"requirements": []}},
        {"name": "../x"},
        {"platforms": AMD64},
        {"ports": [70000]},
        {"files": [{"source": "x", "to": "/x"}]},
        {"summary": None},
    ],
)
def test_the_schema_refuses_what_the_spec_refuses(changes: dict[str, Any]) -> None:
    assert problems(tiny_spec(**changes), SCHEMA, SCHEMA)


def test_every_object_of_the_schema_is_closed() -> None:
    objects = [SCHEMA, *SCHEMA["$defs"].values()]
    assert all(o["additionalProperties"] is False for o in objects)


@given(st.text("abc./-", max_size=12))
def test_no_path_of_a_file_leaves_the_image(text: str) -> None:
    try:
        to = spec(files=[{"from": "x", "to": f"/{text}"}]).files[0].to
    except ValidationError:
        return
    assert not {"", ".", ".."} & set(to.removeprefix("/").split("/"))


PATCH: dict[str, Any] = {
    "file": "0001.patch",
    "why": "because a test needs a reason that is long enough",
    "applies_to": "thing==1.0",
    "files": [{"path": "thing.py"}],
}
UPSTREAM, GATE = {"upstream": ["https://example.org/1"]}, {"gate": "smem-attention"}
NO_UPSTREAM, NO_GATE = {"no_upstream": "our own greeting"}, {"no_gate": "changes no kernel"}


@pytest.mark.parametrize("upstream", [UPSTREAM, NO_UPSTREAM])
@pytest.mark.parametrize("gate", [GATE, NO_GATE])
def test_a_patch_names_upstream_and_its_gate_or_says_why_there_is_none(
    upstream: dict[str, Any], gate: dict[str, Any]
) -> None:
    assert PatchSpec.model_validate({**PATCH, **upstream, **gate}).file == "0001.patch"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (GATE, "upstream"),
        (UPSTREAM, "gate"),
        ({**GATE, "upstream": []}, "upstream"),
        ({**GATE, **UPSTREAM, **NO_UPSTREAM}, "upstream"),
        ({**GATE, **UPSTREAM, **NO_GATE}, "gate"),
        ({**UPSTREAM, "no_gate": "none"}, "no_gate"),
    ],
)
def test_a_patch_with_neither_or_with_both_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        PatchSpec.model_validate({**PATCH, **fields})


def test_fields_that_came_later_count_in_a_digest_only_where_they_are_used() -> None:
    plain = PatchSpec.model_validate({**PATCH, **UPSTREAM, **GATE}).model_dump(mode="json")
    assert plain.keys() == {"file", "why", "upstream", "applies_to", "gate", "files"}
    told = PatchSpec.model_validate({**PATCH, **NO_UPSTREAM, **NO_GATE}).model_dump(mode="json")
    assert told["no_gate"] == "changes no kernel"
    python = spec(python={"requirements": ["thing"]}).dumped()["python"]
    assert "override" not in python
