from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifacts.oci.reference import parse_reference, parse_repository
from pipeline.core.errors import ReferenceInvalid
from pipeline.core.net.address import is_loopback

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("localhost/app", ("localhost", "app", None, None)),
        ("localhost:5000/app:v1", ("localhost:5000", "app", "v1", None)),
        ("reg.example/team/app.x__y-z:v1.0_a", ("reg.example", "team/app.x__y-z", "v1.0_a", None)),
        (f"reg.example:443/app@{DIGEST}", ("reg.example:443", "app", None, DIGEST)),
        (f"[::1]:5000/app:v1@{DIGEST}", ("[::1]:5000", "app", "v1", DIGEST)),
    ],
)
def test_a_name_is_taken_apart_and_put_together_again(
    text: str, parts: tuple[str | None, ...]
) -> None:
    reference = parse_reference(text)
    assert (reference.registry, reference.repository, reference.tag, reference.digest) == parts
    assert str(reference) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "app",
        "team/app",  # no registry: nothing is assumed
        "reg.example",
        "reg.example/",
        "reg.example/App",
        "reg.example/a//b",
        "reg.example/../etc",
        "reg.example/a/./b",
        "reg.example/a.-b",
        "reg.example/a___b",
        "reg.example/app:",
        "reg.example/app:-v",
        "reg.example/app:" + "v" * 129,
        "reg.example/app:v 1",
        "reg.example/app@sha256:abc",
        "reg.example/app@sha512:" + "a" * 128,
        "reg.example/app@" + DIGEST.upper(),
        "reg.example/app@" + DIGEST + "\n",
        "reg.example:99999/app",
        "user:password@reg.example/app",
        "https://reg.example/app",
        "reg.example/app?x=1",
        "reg.example/" + "a" * 300,
        "rég.example/app",
        "reg.example/app\x00",
    ],
)
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(ReferenceInvalid):
        parse_reference(text)


def test_a_repository_has_neither_tag_nor_digest() -> None:
    assert parse_repository("reg.example/app").repository == "app"
    for text in ("reg.example/app:v1", f"reg.example/app@{DIGEST}"):
        with pytest.raises(ReferenceInvalid):
            parse_repository(text)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:5000", "127.8.9.1", "[::1]:5000"])
def test_this_machine_is_known_by_its_names(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    ["10.0.0.1", "reg.example", "127.0.0.1.example", "localhost.example", "[::2]", "0.0.0.0"],
)
def test_other_machines_are_not_this_one(host: str) -> None:
    assert not is_loopback(host)


@given(st.text(max_size=60))
def test_any_text_is_a_name_that_writes_itself_or_an_error(text: str) -> None:
    try:
        reference = parse_reference(text)
    except ReferenceInvalid:
        return
    assert str(reference) == text


@pytest.mark.parametrize(
    "text",
    [
        "ann:s3cret@reg.example/app:v1",
        "https://ann:s3cret@reg.example/app",
        "ann:s3cret@reg.example/App",
        "ann:s3cret@reg.example/app@sha256:1",
    ],
)
def test_a_password_in_a_name_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(ReferenceInvalid) as caught:
        parse_reference(text)
    assert "s3cret" not in f"{caught.value} {caught.value.hint}"
    assert "***@" in str(caught.value)
