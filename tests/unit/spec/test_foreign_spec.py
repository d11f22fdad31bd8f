"""A ask for a foreign base names a repository and a digest, and no place."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.images.spec.image import ImageSpec, parse_foreign

DIGEST = "sha256:" + "ab" * 32


def spec(base: Any) -> ImageSpec:
    return ImageSpec.model_validate(
        {
            "name": "mine",
            "summary": "something on a base",
            "platforms": ["linux/amd64"],
            "base": base,
        }
    )


@pytest.mark.parametrize(
    ("base", "repository"),
    [
        (f"python@{DIGEST}", "python"),
        (f"team/python@{DIGEST}", "team/python"),
        (f"library/python:3.11-slim@{DIGEST}", "library/python"),
        (f"a/b__c/d-e.f@{DIGEST}", "a/b__c/d-e.f"),
    ],
)
def test_repository_and_digest_are_a_foreign_base(base: str, repository: str) -> None:
    image = spec(base)
    assert image.foreign is not None
    assert (image.foreign.repository, image.foreign.digest) == (repository, DIGEST)
    assert image.parent is None


def test_a_plain_name_is_an_image_of_this_checkout() -> None:
    image = spec("debian-python")
    assert (image.parent, image.foreign) == ("debian-python", None)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("team/python:3.11", "no digest is given"),
        ("python:3.11", "no digest is given"),
        ("team/python", "no digest is given"),
        ("python:latest@", "is not a sha256 digest"),
        ("team/python@sha256:abc", "is not a sha256 digest"),
        (f"team/python@md5:{'ab' * 16}", "is not a sha256 digest"),
        (f"team/python@{DIGEST.upper()}", "is not a sha256 digest"),
        (f"team/python@{DIGEST}@{DIGEST}", "is not a sha256 digest"),
        (f"registry.example/team/python@{DIGEST}", "names a registry"),
        (f"localhost/python@{DIGEST}", "names a registry"),
        (f"host:5000/python@{DIGEST}", "names a registry"),
        (f"Team/python@{DIGEST}", "is not a repository name"),
        (f"team//python@{DIGEST}", "is not a repository name"),
        (f"../python@{DIGEST}", "names a registry"),
        (f"team/python:@{DIGEST}", "is not a repository name"),
        (f"{'a' * 201}@{DIGEST}", "is not a repository name"),
        (f"team/python@{DIGEST}\n", "is not a sha256 digest"),
        (f"té/python@{DIGEST}", "is not a repository name"),
        (f"@{DIGEST}", "is not a repository name"),
        ("", "no digest is given"),
        (5, "valid string"),
        ({"image": "x"}, "valid string"),
    ],
)
def test_what_does_not_pin_a_base_is_refused_with_a_reason(base: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        spec(base)


def test_accounts_need_a_root_of_our_own() -> None:
    account = {"name": "a", "uid": 1, "gid": 1, "home": "/home/a"}
    body = spec(f"a@{DIGEST}").model_dump(by_alias=True)
    with pytest.raises(ValidationError, match="`accounts` belong"):
        ImageSpec.model_validate({**body, "accounts": [account]})


def test_another_digest_makes_a_lock_stale() -> None:
    other = "sha256:" + "cd" * 32
    assert spec(f"a@{DIGEST}").lock_digest() != spec(f"a@{other}").lock_digest()


def test_a_name_of_ours_is_never_read_as_foreign() -> None:
    assert parse_foreign("debian-python") is None
