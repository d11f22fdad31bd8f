"""A base image from elsewhere, as a spec names it: repository and digest, never a place."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

from pipeline.core.model import REPOSITORY, Digest, Frozen, RepositoryPath

# No slash and no @: a name of ours can never be taken for an image from elsewhere.
_OWN = r"[a-z0-9][a-z0-9.+-]{0,79}"
_TAG = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_DIGEST = r"sha256:[0-9a-f]{64}"
_FOREIGN = re.compile(rf"({REPOSITORY})(?::{_TAG})?@({_DIGEST})")
_LONGEST_REPOSITORY = 200  # names with their registry have 255 characters at most
_PATTERN = rf"^{_OWN}$|^{REPOSITORY}(?::{_TAG})?@{_DIGEST}$"


class ForeignBase(Frozen):
    """An OCI image: the name is for people and registries, the digest is what is used."""

    repository: RepositoryPath
    digest: Digest

    def __str__(self) -> str:
        return f"{self.repository}@{self.digest}"


def parse_foreign(text: str) -> ForeignBase | None:
    """The image from elsewhere that a spec's `base` names; none where it is one of ours."""
    match = _FOREIGN.fullmatch(text)
    return ForeignBase(repository=match[1], digest=match[2]) if match else None


def _is_base(text: str) -> str:
    if re.fullmatch(_OWN, text):
        return text
    name, at, digest = text.partition("@")
    # a registry in the spec would make the image depend on where it is built
    first, slash, _ = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        raise ValueError(
            f"{first!r} names a registry; write REPOSITORY@sha256:…, and name the registry with"
            " --base-registry or SM120_BASE_REGISTRIES"
        )
    if not at:
        raise ValueError(
            f"{text!r} is not an image of this checkout, and no digest is given; a tag can move, so"
            " write REPOSITORY@sha256:… (`sm120 registry tags` shows the digest of a tag)"
        )
    if not re.fullmatch(_DIGEST, digest):
        raise ValueError(f"{digest!r} is not a sha256 digest")
    if not _FOREIGN.fullmatch(text) or len(name) > _LONGEST_REPOSITORY:
        raise ValueError(
            f"{name!r} is not a repository name (lower case, digits and . _ - / between)"
        )
    return text


# An image of this checkout by name, or `REPOSITORY@sha256:…`.
BaseText = Annotated[
    str, AfterValidator(_is_base), WithJsonSchema({"type": "string", "pattern": _PATTERN})
]
