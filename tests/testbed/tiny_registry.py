"""A registry in memory that follows the OCI distribution specification, for unit tests.

Unlike Debian's docker-registry it goes on with a cut upload and has the referrers API.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import uuid
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

from tests.testbed.oci_door import Reply, Request

_UPLOADS = re.compile(r"/v2/(.+)/blobs/uploads/(.*)")
_BLOB = re.compile(r"/v2/(.+)/blobs/(sha256:[0-9a-f]{64})")
_MANIFEST = re.compile(r"/v2/(.+)/manifests/(.+)")
_TAGS = re.compile(r"/v2/(.+)/tags/list")
_REFERRERS = re.compile(r"/v2/(.+)/referrers/(sha256:[0-9a-f]{64})")


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def refused(status: int, code: str, **headers: str) -> Reply:
    body = json.dumps({"errors": [{"code": code, "message": code.lower()}]}).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(status, {"content-type": "application/json", **named}, body)


@dataclass
class TinyRegistry:
    """Blobs, manifests and tags by repository, and what this registry can do."""

    has_referrers: bool = True
    may_delete: bool = True
    takes_chunks: bool = True
    login: str = ""
    token: str = ""
    realm: str = ""
    page_size: int = 1000
    blobs: dict[tuple[str, str], bytes] = field(default_factory=dict)
    manifests: dict[tuple[str, str], tuple[str, bytes]] = field(default_factory=dict)
    tags: dict[tuple[str, str], str] = field(default_factory=dict)
    uploads: dict[str, bytearray] = field(default_factory=dict)

    def __call__(self, request: Request) -> Reply:
        if wanted := self._unknown(request):
            request.body()
            return wanted
        if found := _UPLOADS.fullmatch(request.path):
            return self._upload(request, *found.groups())
        if found := _BLOB.fullmatch(request.path):
            return self._blob(request, *found.groups())
        if found := _MANIFEST.fullmatch(request.path):
            return self._manifest(request, *found.groups())
        if found := _TAGS.fullmatch(request.path):
            return self._tags(request, found[1])
        if (found := _REFERRERS.fullmatch(request.path)) and self.has_referrers:
            return self._referrers(*found.groups())
        if request.path == "/token":
            return self._give_token(request)
        return Reply(200 if request.path == "/v2/" else 404)

    def _unknown(self, request: Request) -> Reply | None:
        got = request.headers.get("authorization", "")
        if request.path == "/token" or not self.login:
            return None
        if self.realm:
            if got == f"Bearer {self.token}":
                return None
            ask = f'Bearer realm="{self.realm}",service="tiny",scope="repository:x:pull"'
            return refused(401, "UNAUTHORIZED", www_authenticate=ask)
        if got == f"Basic {base64.b64encode(self.login.encode()).decode()}":
            return None
        return refused(401, "UNAUTHORIZED", www_authenticate='Basic realm="tiny"')

    def _give_token(self, request: Request) -> Reply:
        got = request.headers.get("authorization", "")
        sent = parse_qs(request.body().decode())
        if got == f"Basic {base64.b64encode(self.login.encode()).decode()}" or (
            sent.get("refresh_token") == [self.login]
        ):
            return Reply(200, body=json.dumps({"token": self.token}).encode())
        return Reply(401)

    def _upload(self, request: Request, name: str, session: str) -> Reply:
        query = parse_qs(request.query)
        if request.method == "POST":
            source, digest = query.get("from", [""])[0], query.get("mount", [""])[0]
            if (source, digest) in self.blobs:
                self.blobs[name, digest] = self.blobs[source, digest]
                return Reply(201, {"Location": f"/v2/{name}/blobs/{digest}"})
            session = uuid.uuid4().hex
            self.uploads[session] = bytearray()
            return Reply(202, self._where(name, session))
        kept = self.uploads.get(session)
        if kept is None:
            request.body()
            return refused(404, "BLOB_UPLOAD_UNKNOWN")
        if request.method == "GET":
            return Reply(204, self._where(name, session))
        if request.method == "PATCH" and not self.takes_chunks:
            request.body()
            return refused(405, "UNSUPPORTED")
        start = request.headers.get("content-range", f"{len(kept)}-").partition("-")[0]
        if int(start) != len(kept):
            request.body()
            return refused(416, "BLOB_UPLOAD_INVALID")
        for piece in request.pieces():
            kept += piece
        if request.method == "PATCH":
            return Reply(202, self._where(name, session))
        return self._close(name, session, query["digest"][0])

    def _close(self, name: str, session: str, digest: str) -> Reply:
        data = bytes(self.uploads.pop(session))
        if digest_of(data) != digest:
            return refused(400, "DIGEST_INVALID")
        self.blobs[name, digest] = data
        place = {"Location": f"/v2/{name}/blobs/{digest}", "Docker-Content-Digest": digest}
        return Reply(201, place)

    def _where(self, name: str, session: str) -> dict[str, str]:
        last = max(0, len(self.uploads[session]) - 1)
        return {"Location": f"/v2/{name}/blobs/uploads/{session}", "Range": f"0-{last}"}

    def _blob(self, request: Request, name: str, digest: str) -> Reply:
        data = self.blobs.get((name, digest))
        if data is None:
            return refused(404, "BLOB_UNKNOWN")
        headers = {"Docker-Content-Digest": digest}
        if request.method == "HEAD":
            return Reply(200, {**headers, "x-length": str(len(data))})
        asked = re.fullmatch(r"bytes=(\d+)-", request.headers.get("range", ""))
        if not asked:
            return Reply(200, headers, data)
        start = int(asked[1])
        span = f"bytes {start}-{len(data) - 1}/{len(data)}"
        return Reply(206, {**headers, "Content-Range": span}, data[start:])

    def _manifest(self, request: Request, name: str, place: str) -> Reply:
        if request.method == "PUT":
            return self._put_manifest(request, name, place)
        digest = self.tags.get((name, place), place)
        if (name, digest) not in self.manifests:
            return refused(404, "MANIFEST_UNKNOWN")
        if request.method == "DELETE":
            if not self.may_delete:
                return refused(405, "UNSUPPORTED")
            del self.manifests[name, digest]
            self.tags = {k: v for k, v in self.tags.items() if (k[0], v) != (name, digest)}
            return Reply(202)
        kind, data = self.manifests[name, digest]
        headers = {"Content-Type": kind, "Docker-Content-Digest": digest}
        if request.method == "HEAD":
            return Reply(200, {**headers, "x-length": str(len(data))})
        return Reply(200, headers, data)

    def _put_manifest(self, request: Request, name: str, place: str) -> Reply:
        data = request.body()
        found: dict[str, Any] = json.loads(data)
        digest = digest_of(data)
        blobs = [found["config"], *found["layers"]] if "layers" in found else []
        if any((name, b["digest"]) not in self.blobs for b in blobs):
            return refused(400, "MANIFEST_BLOB_UNKNOWN")
        if any((name, m["digest"]) not in self.manifests for m in found.get("manifests", [])):
            return refused(400, "MANIFEST_BLOB_UNKNOWN")
        if place.startswith("sha256:") and place != digest:
            return refused(400, "DIGEST_INVALID")
        self.manifests[name, digest] = request.headers["content-type"], data
        if not place.startswith("sha256:"):
            self.tags[name, place] = digest
        headers = {"Docker-Content-Digest": digest, "Location": f"/v2/{name}/manifests/{digest}"}
        if self.has_referrers and "subject" in found:
            headers["OCI-Subject"] = found["subject"]["digest"]
        return Reply(201, headers)

    def _tags(self, request: Request, name: str) -> Reply:
        query = parse_qs(request.query)
        after = query.get("last", [""])[0]
        known = sorted(t for n, t in self.tags if n == name)
        if not known and not any(n == name for n, _ in self.manifests):
            return refused(404, "NAME_UNKNOWN")
        page = [t for t in known if t > after][: self.page_size]
        more = page and page[-1] != known[-1]
        link = {"Link": f'</v2/{name}/tags/list?n=9&last={page[-1]}>; rel="next"'} if more else {}
        return Reply(200, link, json.dumps({"name": name, "tags": page}).encode())

    def _referrers(self, name: str, digest: str) -> Reply:
        kind = "application/vnd.oci.image.index.v1+json"
        entries = []
        for (n, own), (media_type, data) in self.manifests.items():
            if n == name and json.loads(data).get("subject", {}).get("digest") == digest:
                entries.append({"mediaType": media_type, "digest": own, "size": len(data)})
        index = {"schemaVersion": 2, "mediaType": kind, "manifests": entries}
        return Reply(200, {"Content-Type": kind}, json.dumps(index).encode())
