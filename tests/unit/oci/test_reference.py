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


ODD, NO_REPOSITORY = "characters that are not allowed", "names no repository after a registry"
NO_REGISTRY, WRONG = "does not begin with a registry", "is not a repository name"
NO_TAG, NO_DIGEST = "is not a tag", "is not a sha256 digest"
LABEL = "a" * 60
HOW = "Write REGISTRY/REPOSITORY, such as registry.example/library/python."


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", NO_REPOSITORY),
        ("app", NO_REPOSITORY),
        ("team/app", NO_REGISTRY),  # nothing is assumed
        ("reg.example", NO_REPOSITORY),
        ("reg.example/", WRONG),
        ("reg.example/App", WRONG),
        ("reg.example/a//b", WRONG),
        ("reg.example/../etc", WRONG),
        ("reg.example/a/./b", WRONG),
        ("reg.example/a.-b", WRONG),
        ("reg.example/a___b", WRONG),
        ("reg.example/app:", NO_TAG),
        ("reg.example/app:-v", NO_TAG),
        ("reg.example/app:" + "v" * 129, NO_TAG),
        ("reg.example/app:v 1", ODD),
        ("reg.example/app@sha256:abc", NO_DIGEST),
        ("reg.example/app@sha512:" + "a" * 128, NO_DIGEST),
        ("reg.example/app@" + DIGEST.upper(), NO_DIGEST),
        ("reg.example/app@" + DIGEST + "\n", ODD),
        ("reg.example/app@", NO_DIGEST),
        ("reg.example:99999/app", NO_REGISTRY),
        ("reg.example:65536/app", NO_REGISTRY),
        ("-reg.example/app", NO_REGISTRY),
        ("user:password@reg.example/app", "has a user name or password in it"),
        ("https://reg.example/app", "is an address, not a name"),
        ("reg.example/app?x=1", WRONG),
        (f"reg.example/{LABEL}/{LABEL}/{LABEL}/{LABEL}xx", WRONG),
        ("rég.example/app", ODD),
        ("reg.example/app\x00", ODD),
    ],
)
def test_what_is_no_name_is_refused(text: str, why: str) -> None:
    with pytest.raises(ReferenceInvalid, match=why):
        parse_reference(text)


@pytest.mark.parametrize(
    "text",
    [
        "reg.example:65535/app",
        "reg.example/app:" + "v" * 128,
        f"reg.example/{LABEL}/{LABEL}/{LABEL}/{LABEL}",  # 11 and 243 characters
        f"reg.example:1/{LABEL}/{LABEL}/{LABEL}/{LABEL[2:]}x",  # 255 in all
    ],
)
def test_a_name_may_be_as_long_as_this(text: str) -> None:
    assert str(parse_reference(text)) == text


def test_docker_s_own_name_stands_for_where_its_registry_answers() -> None:
    assert parse_reference("docker.io/library/python").host_port == "registry-1.docker.io"
    assert parse_reference("reg.example:5000/app").host_port == "reg.example:5000"


def test_a_repository_has_neither_tag_nor_digest() -> None:
    assert parse_repository("reg.example/app").repository == "app"
    for text in ("reg.example/app:v1", f"reg.example/app@{DIGEST}"):
        with pytest.raises(ReferenceInvalid, match="and a repository is wanted") as caught:
            parse_repository(text)
        assert caught.value.hint == HOW
    with pytest.raises(ReferenceInvalid, match="names no repository") as caught:
        parse_repository("app")
    assert caught.value.hint == HOW
    # a hint that says more stays
    with pytest.raises(ReferenceInvalid, match="is an address") as caught:
        parse_repository("https://reg.example/app")
    assert caught.value.hint.startswith("Leave out what stands before")


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
