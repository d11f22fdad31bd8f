"""Names of images in registries: `REGISTRY/REPOSITORY:TAG` and `REGISTRY/REPOSITORY@DIGEST`."""

from __future__ import annotations

import re

from pipeline.core.errors import ReferenceInvalid
from pipeline.core.model import REPOSITORY, Frozen
from pipeline.core.net.address import masked

# https://github.com/opencontainers/distribution-spec/blob/main/spec.md#pulling-manifests
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_REGISTRY = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:.]+\])(?::[0-9]{{1,5}})?")
_REPOSITORY = re.compile(REPOSITORY)
# Registry and repository together, as Docker and the OCI specification bound them.
_LONGEST = 255
# Docker's own name for its registry, and where that answers
_ALIASES = {"docker.io": "registry-1.docker.io", "index.docker.io": "registry-1.docker.io"}


class ImageReference(Frozen):
    """A place in a registry; the digest, where there is one, is what counts."""

    registry: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"{self.registry}/{self.repository}{tag}{digest}"

    @property
    def host_port(self) -> str:
        """Where the registry's API answers."""
        return _ALIASES.get(self.registry, self.registry)


def parse_reference(text: str) -> ImageReference:
    """Reads a name as written; the registry must be named, nothing is assumed."""
    # a pasted address with a password in it must not reach a log
    shown = masked(text)
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ReferenceInvalid(f"{shown!r}: contains characters that are not allowed in a name")
    if "://" in text:
        raise ReferenceInvalid(
            f"{shown}: is an address, not a name",
            "Leave out what stands before the registry's name; --insecure-http is for plain HTTP.",
        )
    if shown != text:
        message = f"{shown}: has a user name or password in it"
        raise ReferenceInvalid(message, "Leave it out, and log in with `docker login`.")
    rest, at, digest = text.partition("@")
    registry, slash, path = rest.partition("/")
    if not slash:
        raise ReferenceInvalid(f"{shown}: names no repository after a registry")
    port = registry.rpartition("]")[2].partition(":")[2]
    # as Docker tells a registry from a repository's first part: `team/app` names no registry
    is_host = ":" in registry or "." in registry or registry == "localhost"
    if not _REGISTRY.fullmatch(registry) or not is_host or int(port or 0) >= 1 << 16:
        raise ReferenceInvalid(f"{shown}: does not begin with a registry")
    repository, colon, tag = path.partition(":")
    if not _REPOSITORY.fullmatch(repository) or len(registry) + len(repository) > _LONGEST:
        raise ReferenceInvalid(
            f"{shown}: {repository!r} is not a repository name"
            " (lower case, digits and . _ - / between)"
        )
    if colon and not TAG.fullmatch(tag):
        raise ReferenceInvalid(f"{shown}: {tag!r} is not a tag")
    if at and not DIGEST.fullmatch(digest):
        raise ReferenceInvalid(f"{shown}: {digest!r} is not a sha256 digest")
    names = {"registry": registry, "repository": repository}
    return ImageReference(**names, tag=tag or None, digest=digest or None)


def parse_repository(text: str) -> ImageReference:
    """A repository without tag or digest."""
    hint = "Write REGISTRY/REPOSITORY, such as registry.example/library/python."
    try:
        reference = parse_reference(text)
    except ReferenceInvalid as error:
        own = error.hint if error.hint != ReferenceInvalid.hint else hint
        raise ReferenceInvalid(str(error), own) from error
    if reference.tag or reference.digest:
        message = f"{reference}: has a tag or digest, and a repository is wanted"
        raise ReferenceInvalid(message, hint)
    return reference
