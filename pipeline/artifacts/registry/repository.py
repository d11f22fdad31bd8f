"""One repository of a registry: its manifests, tags and small blobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urljoin

from pipeline.artifacts.oci.document import (
    ACCEPT,
    MOST_MANIFEST_BYTES,
    Descriptor,
    Document,
    read_document,
    read_document_json,
)
from pipeline.artifacts.oci.reference import TAG
from pipeline.artifacts.registry.auth import Scope
from pipeline.artifacts.registry.client import Refusal, RegistryClient, RegistryRequest
from pipeline.core.errors import DeleteDisabled, NotInRegistry, RegistryBroken
from pipeline.core.model import sha256_of
from pipeline.core.net.address import (
    linked_page,
    number_in,
    shown_address,
    split_address,
    without_controls,
)
from pipeline.core.net.answer import Pages
from pipeline.core.net.client import Reply, Small
from pipeline.core.net.failures import BadAddress, BadAnswer

# with 1000 tags a page, ten times the tags that are accepted
_MOST_PAGES = 1000
_MOST_TAGS = 100_000


@dataclass(frozen=True)
class Repository:
    """Where manifests, blobs and tags of one name live."""

    client: RegistryClient
    name: str

    def __str__(self) -> str:
        return f"{self.client.name}/{self.name}"

    @property
    def path(self) -> str:
        return f"/v2/{self.name}"

    def may(self, actions: str, also_from: str = "") -> Scope:
        return Scope(self.name, actions, also_from)

    def manifest(self, name: str, most_bytes: int = MOST_MANIFEST_BYTES) -> Document:
        """The manifest of a tag or digest; of a digest, exactly those bytes."""
        document = self.find_manifest(name, most_bytes)
        if document is None:
            raise NotInRegistry(f"{self}: holds no {name}")
        return document

    def find_manifest(self, name: str, most_bytes: int = MOST_MANIFEST_BYTES) -> Document | None:
        """As `manifest`, but none where it is missing."""
        answer = self.look(f"{self.path}/manifests/{name}", most_bytes, headers={"Accept": ACCEPT})
        if answer is None:
            return None
        document = read_document(answer.data, answer.header("Content-Type"))
        # what a tag names can change between two requests: the header says what was sent
        claimed = answer.header("Docker-Content-Digest")
        wanted = name if name.startswith("sha256:") else claimed
        if wanted and document.digest != wanted:
            raise RegistryBroken(f"{self}: asked for {wanted}, received {document.digest}")
        if claimed.startswith("sha256:") and claimed != document.digest:
            raise RegistryBroken(f"{self}: calls {document.digest} {without_controls(claimed)}")
        return document

    def look(
        self, place: str, most_bytes: int, headers: Mapping[str, str] | None = None
    ) -> Reply | None:
        """Fetches a small answer with its body; none on 404."""
        request = RegistryRequest("GET", place, self.may("pull"), (200, 404), headers or {})
        answer = self.client.ask(request, most_bytes)
        return answer if answer.status == 200 else None

    def has_blob(self, digest: str, size_bytes: int) -> bool:
        """Whether the registry has a blob already; one of another size is a contradiction."""
        # some registries leave the length out of a HEAD: then the digest alone counts
        place, scope = f"{self.path}/blobs/{digest}", self.may("pull")
        answer = self.client.ask(RegistryRequest("HEAD", place, scope, (200, 404)))
        if answer.status == 404:
            return False
        length = number_in(answer.header("Content-Length"))
        if length is not None and length != size_bytes:
            raise RegistryBroken(f"{self}: has {digest} with {length} bytes, not {size_bytes}")
        return True

    def read_blob(self, blob: Descriptor, most_bytes: int) -> bytes:
        """A small blob in memory."""
        if blob.size_bytes > most_bytes:
            raise RegistryBroken(f"{blob.digest}: {blob.size_bytes} bytes, more than {most_bytes}")
        answer = self.look(f"{self.path}/blobs/{blob.digest}", blob.size_bytes)
        if answer is None:
            raise NotInRegistry(f"{self}: holds no {blob.digest}")
        if (got := sha256_of(answer.data)) != blob.digest:
            raise RegistryBroken(f"{blob.digest}: received {got}")
        return answer.data

    def put_document(self, name: str, document: Document) -> Reply:
        """Puts a document under its digest or a tag, and reads it back: the same, byte for byte."""
        answer = self.put_manifest(name, document.data, document.media_type)
        back = self.manifest(name)
        if back.data != document.data:
            raise RegistryBroken(f"{self}: {name} came back as {back.digest}")
        return answer

    def put_manifest(self, name: str, data: bytes, media_type: str) -> Reply:
        """Puts a manifest under its digest or a tag."""
        place, kind = f"{self.path}/manifests/{name}", {"Content-Type": media_type}
        scope = self.may("pull,push")
        return self.client.ask(RegistryRequest("PUT", place, scope, (201,), kind, Small(data)))

    def tags(self) -> list[str]:
        """All tags, page by page."""
        tags: list[str] = []
        # the page size is a request: registries may return fewer, and a Link to the rest
        for page in self.pages(f"{self.path}/tags/list?n=1000", "list of tags", _MOST_PAGES):
            body = read_document_json(page.data, f"{self}: the list of tags")
            listed = body.get("tags") if isinstance(body, dict) else ""
            # Go writes a list that was never filled as null
            listed = [] if listed is None else listed
            is_list = isinstance(listed, list)
            if not is_list or not all(isinstance(t, str) and TAG.fullmatch(t) for t in listed):
                raise RegistryBroken(f"{self}: the list of tags holds an invalid tag")
            tags += listed
            if len(tags) > _MOST_TAGS:
                raise RegistryBroken(f"{self}: lists more than {_MOST_TAGS} tags")
        return sorted(set(tags))

    def pages(self, first: str, what: str, most_pages: int) -> Iterator[Reply]:
        """Yields the pages of a list; `NotInRegistry` where even the first one is missing."""
        counter = Pages(f"{self}: its {what}", most_pages, self.client.pages_s)
        place: str | None = first
        while place is not None:
            try:
                counter.take(place)
            except BadAnswer as error:
                raise RegistryBroken(str(error)) from error
            page = self.look(place, MOST_MANIFEST_BYTES)
            if page is None and place != first:
                raise RegistryBroken(f"{self}: its {what} ends in the middle")
            if page is None:
                hint = "Correct its name; a repository begins with the first `sm120 publish` to it."
                raise NotInRegistry(f"{self}: there is no such repository", hint)
            yield page
            place = linked_page(page.header("Link"))
            if place is not None:
                try:
                    is_whole = "://" in place.partition("?")[0]
                    parts = split_address(place if is_whole else urljoin(page.url, place))
                except (ValueError, BadAddress) as error:
                    message = f"its next page {shown_address(place)!r} is not a valid address"
                    raise RegistryBroken(f"{shown_address(page.url)}: {message}") from error
                # without its host: registries behind a proxy write their inner name there
                place = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    def delete_manifest(self, digest: str) -> None:
        """Deletes a manifest; many registries do not allow it."""
        try:
            place, scope = f"{self.path}/manifests/{digest}", self.may("delete,pull,push")
            self.client.ask(RegistryRequest("DELETE", place, scope, (202, 200, 204, 404)))
        except Refusal as refused:
            # Docker's registry deletes only with REGISTRY_STORAGE_DELETE_ENABLED=true
            if refused.status == 405 or "UNSUPPORTED" in refused.codes:
                raise DeleteDisabled(f"{self}: does not allow deleting manifests") from refused
            raise
