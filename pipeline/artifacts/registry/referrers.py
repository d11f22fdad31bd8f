"""Attachments of an image: OCI 1.1 referrers, or the fallback tag where there is no such API.

A registry's list is a hint, never evidence: we read each manifest by its digest, and it counts only
if it names the image as its subject.
https://github.com/opencontainers/distribution-spec/blob/main/spec.md#listing-referrers
"""

from __future__ import annotations

import json

from pipeline.artifacts.oci.document import (
    OCI_INDEX,
    Descriptor,
    Document,
    descriptor_json,
    read_document,
)
from pipeline.artifacts.registry.repository import Repository
from pipeline.core.errors import NotInRegistry, RegistryBroken
from pipeline.core.model import canonical_json

_MOST_PAGES = 100  # as many as the entries below need at a hundred a page
# an image has some ten; a hostile list must end
_MOST_LISTED = 10_000
# enough for two publishers that write the tag at the same time
_TRIES = 5


def fallback_tag(digest: str) -> str:
    """The tag under which clients look where a registry has no referrers API."""
    return digest.replace(":", "-")


def listed_referrers(repository: Repository, digest: str) -> tuple[list[Descriptor], str]:
    """What the registry lists for an image, unproved, and where: `api` or `tag`."""
    listed = _from_api(repository, digest)
    if listed is not None:
        return listed, "api"
    index = _fallback_index(repository, digest)
    return list(index.manifests) if index else [], "tag"


def referrers(repository: Repository, digest: str) -> list[Document]:
    """The manifests that really have this image as their subject, in order of digest."""
    listed, _ = listed_referrers(repository, digest)
    documents = []
    # skip one that is gone by now, or of another image: lists are late
    for entry in sorted({d.digest for d in listed}):
        document = repository.find_manifest(entry)
        if document and document.subject and document.subject.digest == digest:
            documents.append(document)
    return documents


def everything_listed(repository: Repository, digest: str) -> list[Descriptor]:
    """Asks the API and the fallback tag: the registry may have gained the API after a push."""
    index = _fallback_index(repository, digest)
    listed = [*(_from_api(repository, digest) or []), *(index.manifests if index else ())]
    return list({d.digest: d for d in listed}.values())


def artifact_kind(document: Document) -> str:
    """The artifact's type: of the manifest, else of its config, as the specification says."""
    return document.artifact_type or (document.config.media_type if document.config else "")


def _from_api(repository: Repository, digest: str) -> list[Descriptor] | None:
    """All pages of the referrers API; none where the registry has no such API."""
    place = f"{repository.path}/referrers/{digest}"
    listed: list[Descriptor] = []
    try:
        for page in repository.pages(place, "list of referrers", _MOST_PAGES):
            index = read_document(page.data, page.header("Content-Type"))
            if index.kind != "index":
                raise RegistryBroken(f"{repository}: lists referrers in a {index.kind}")
            listed += index.manifests
            if len(listed) > _MOST_LISTED:
                limit = f"more than {_MOST_LISTED} referrers of {digest}"
                raise RegistryBroken(f"{repository}: lists {limit}")
    except NotInRegistry:
        return None
    return listed


def _fallback_index(repository: Repository, digest: str) -> Document | None:
    index = repository.find_manifest(fallback_tag(digest))
    if index is not None and index.kind != "index":
        raise RegistryBroken(f"{repository}: the tag {fallback_tag(digest)} is not an index")
    return index


def list_in_fallback_tag(repository: Repository, subject: str, new: list[Descriptor]) -> None:
    """Adds entries to the fallback tag, keeps those of others, and checks that they stayed.

    Two writers at once can undo each other, as the specification admits: each checks again.
    """
    wanted = {d.digest for d in new}
    for attempt in range(_TRIES):
        index = _fallback_index(repository, subject)
        listed = list(index.manifests) if index else []
        missing = [d for d in new if d.digest not in {x.digest for x in listed}]
        if index and not missing:
            return
        # other tools' entries are written back as they are, with fields that we do not know
        raw = json.loads(index.data)["manifests"] if index else []
        entries = [*raw, *(descriptor_json(d) for d in missing)]
        data = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}
        repository.put_manifest(fallback_tag(subject), canonical_json(data), OCI_INDEX)
        after = _fallback_index(repository, subject)
        if after and wanted <= {d.digest for d in after.manifests}:
            return
        repository.client.retry_policy.pause(attempt)
    raise RegistryBroken(f"{repository}: the tag {fallback_tag(subject)} does not keep its entries")
