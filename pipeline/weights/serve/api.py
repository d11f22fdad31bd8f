"""Answers as the Hub gives them, for the part of it that clients need to load a model."""

from __future__ import annotations

import hmac
import json
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from pipeline.weights.disk.proof import FileUnfit
from pipeline.weights.serve import http
from pipeline.weights.serve.http import Refused, Request, Response
from pipeline.weights.serve.prover import NotYet, Prover, ServedFile
from pipeline.weights.serve.served import MAIN, ServedSets, Snapshot, absent

PAGE_ENTRIES = 1000  # as the Hub has on a page
_RETRY_S = 10  # a shard of 5 GB is hashed in less
_LOOPBACK = re.compile(r"(127\.[0-9.]+|localhost|\[::1\])(:[0-9]+)?", re.I)
_HOST = re.compile(r"[A-Za-z0-9._-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")


@dataclass(frozen=True)
class HubApi:
    """A read-only Hub over some locked sets."""

    served: ServedSets
    prover: Prover
    tokens: frozenset[str] = frozenset()
    only_loopback: bool = True
    scheme: str = "http"

    def answer(self, request: Request) -> Response:
        """The answer to a request; none of them changes anything."""
        try:
            return self._answer(request)
        except NotYet as reason:
            refused = Refused(503, f"the file {reason}: try later", {"Retry-After": str(_RETRY_S)})
        except FileUnfit as reason:
            # not a 5xx: clients would ask for half a minute more, and the file stays as it is
            refused = Refused(409, f"the file is refused: it {reason}")
        except Refused as reason:
            refused = reason
        headers = {"X-Error-Message": str(refused), "Content-Type": "application/json"}
        body = json.dumps({"error": str(refused)}).encode()
        return Response(refused.status, headers | refused.extra, body)

    def _answer(self, request: Request) -> Response:
        parts, query = request.split()
        host = request.header("host")
        if not _HOST.fullmatch(host):
            raise Refused(400, "the Host header is missing or malformed")
        # DNS rebinding: a page's own name may lead to 127.0.0.1, but its Host header shows the name
        if self.only_loopback and not self.tokens and not _LOOPBACK.fullmatch(host):
            raise Refused(421, "this server listens on loopback only; use localhost or 127.0.0.1")
        # before the token is asked for: load balancers and systemd probes have none
        if parts == ["healthz"]:
            _check_method(request, "GET", "HEAD")
            return _json(self.served.health(in_detail=self.may_read(request)))
        if not self.may_read(request):
            # the Hub's own message for a wrong token: its client recognises it
            message = "Invalid credentials in Authorization header"
            if not request.header("authorization"):
                message = "this server needs a token: set HF_TOKEN"
            raise Refused(401, message, {"WWW-Authenticate": "Bearer"})
        match parts:
            # POST, as the Hub's client asks: a list of paths may be longer than a URL
            case ["api", "models", owner, name, "paths-info", revision]:
                _check_method(request, "POST")
                snapshot = self.served.find(f"{owner}/{name}", revision)
                return _json(snapshot.paths_info(request.asked_paths()), snapshot)
            case ["api", "models", owner, name, *rest]:
                _check_method(request, "GET", "HEAD")
                return self._api(request, f"{owner}/{name}", rest, query)
            case [owner, name, "resolve", revision, *path] if path:
                _check_method(request, "GET", "HEAD")
                snapshot = self.served.find(f"{owner}/{name}", revision)
                return self._file(request, snapshot, snapshot.held("/".join(path)))
        _check_method(request, "GET", "HEAD", "POST")
        raise absent("RepoNotFound", "this server has only model repositories, read-only")

    def _api(
        self, request: Request, repository: str, rest: list[str], query: http.Query
    ) -> Response:
        match rest:
            case [] | ["revision", _]:
                snapshot = self.served.find(repository, rest[1] if rest else MAIN)
                return _json(snapshot.model_info(blobs=http.is_set(query, "blobs")), snapshot)
            case ["refs"]:
                return _json(self.served.refs(repository))
            case ["tree", revision, *path]:
                snapshot = self.served.find(repository, revision)
                below = "/".join(path).strip("/")
                rows = snapshot.tree(below, recursive=http.is_set(query, "recursive"))
                limit = min(http.number(query, "limit", PAGE_ENTRIES), PAGE_ENTRIES) or PAGE_ENTRIES
                start, extra = http.number(query, "cursor", 0), {}
                if len(rows) > start + limit:
                    asked = {name: values[0] for name, values in query.items()}
                    text = urlencode({**asked, "limit": limit, "cursor": start + limit})
                    place = f"{request.header('host')}{quote(request.path, safe='/%')}"
                    extra["Link"] = f'<{self.scheme}://{place}?{text}>; rel="next"'
                return _json(rows[start : start + limit], snapshot, extra)
        raise absent("EntryNotFound", "this server does not have this part of the Hub's API")

    def _file(self, request: Request, snapshot: Snapshot, held: ServedFile) -> Response:
        pin, etag = held.pin, f'"{held.pin.want}"'
        headers = {
            "Content-Type": "application/octet-stream",
            "ETag": etag,
            "X-Repo-Commit": snapshot.commit,
            "Accept-Ranges": "bytes",
            # a proxy must ask again: by now the file may be refused
            "Cache-Control": "no-cache",
        }
        if pin.sha256:
            # the Hub's client takes hash and size of a large file from these, not from its ETag
            headers |= {"X-Linked-Etag": etag, "X-Linked-Size": str(pin.size_bytes)}
        if etag in request.header("if-none-match"):
            return Response(304, headers)
        asked = request.header("range")
        # RFC 9110, 13.1.5: the client has a part of another file, so it needs all of this one
        if request.header("if-range") not in ("", etag) or request.method == "HEAD":
            asked = ""
        span = http.wanted_range(asked, pin.size_bytes)
        start, length = span or (0, pin.size_bytes)
        if span:
            headers["Content-Range"] = f"bytes {start}-{start + length - 1}/{pin.size_bytes}"
        status = 206 if span else 200
        if held.is_small:
            return Response(status, headers, self.prover.read(held)[start : start + length])
        handle, seen = self.prover.open(held)
        return Response(status, headers, part=http.FilePart(handle, start, length, seen))

    def may_read(self, request: Request) -> bool:
        """Whether a request shows a token, or none is needed."""
        kind, _, given = request.header("authorization").partition(" ")
        token = given.strip().encode("latin-1", "replace")
        # all are compared, in constant time: the answer's delay must not show how much was right
        matches = [hmac.compare_digest(token, known.encode()) for known in self.tokens]
        return not self.tokens or (kind.lower() == "bearer" and any(matches))


def _check_method(request: Request, *allowed: str) -> None:
    if request.method not in allowed:
        names = ", ".join(allowed)
        raise Refused(405, f"only {names} may be used here", {"Allow": names})


def _json(
    value: Any, snapshot: Snapshot | None = None, extra: dict[str, str] | None = None
) -> Response:
    headers = {"Content-Type": "application/json; charset=utf-8", **(extra or {})}
    if snapshot:
        headers["X-Repo-Commit"] = snapshot.commit
    return Response(200, headers, json.dumps(value, ensure_ascii=False).encode())
