"""How the small Hub answers: the calls that `huggingface_hub` makes, with the Hub's own headers."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

if TYPE_CHECKING:
    from tests.testbed.hub import Asked, Blob, Repository, Stage, TestHub

_REPO = r"(?P<repo>[^/]+/[^/]+)"
_INFO = re.compile(rf"/api/models/{_REPO}(?:/revision/(?P<revision>[^/]+))?")
_TREE = re.compile(rf"/api/models/{_REPO}/tree/(?P<revision>[^/]+)")
_XET = re.compile(rf"/api/models/{_REPO}/xet-read-token/(?P<revision>[^/]+)")
_FILE = re.compile(rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
_CDN = re.compile(r"/cdn/(?P<sha256>[0-9a-f]{64})/(?P<path>.+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class Handler(BaseHTTPRequestHandler):
    """One connection to the Hub or its CDN."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    hub: TestHub
    origin: Literal["hub", "cdn"]
    asked: Asked

    def do_GET(self) -> None:
        from tests.testbed.hub import Asked

        headers = {name.lower(): value for name, value in self.headers.items()}
        self.asked = Asked(self.origin, self.command, self.path, None, "", headers)
        self.hub.asked.append(self.asked)
        with suppress(BrokenPipeError, ConnectionResetError):
            (self._answer_cdn if self.origin == "cdn" else self._answer_hub)()
            self.wfile.flush()

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.do_GET()

    def _answer_hub(self) -> None:
        calls = {_INFO: self._info, _TREE: self._tree, _XET: self._xet, _FILE: self._resolve}
        target = urlsplit(self.path).path
        for shape, answer in calls.items():
            if match := shape.fullmatch(target):
                repository = self.hub.repositories.get(match["repo"])
                if repository is None or not self._may_see(repository):
                    return self.refuse(401 if repository is None else 404, "RepoNotFound")
                revision = unquote(match["revision"] or "main")
                parts = {**match.groupdict(), "revision": revision}
                return answer(repository, repository.commit_of(revision), parts)
        self.refuse(404, "")

    def _may_see(self, repository: Repository) -> bool:
        return not repository.token or self._token() == repository.token

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _info(self, repository: Repository, commit: str | None, parts: dict[str, str]) -> None:
        if commit is None:
            return self.refuse(404, "RevisionNotFound")
        siblings = [{"rfilename": path} for path in repository.commits[commit]]
        facts = {"id": parts["repo"], "modelId": parts["repo"], "sha": commit, "private": False}
        self._api("info", parts["revision"], {**facts, "siblings": siblings}, {})

    def _tree(self, repository: Repository, commit: str | None, parts: dict[str, str]) -> None:
        if commit is None:
            return self.refuse(404, "RevisionNotFound")
        query = parse_qs(urlsplit(self.path).query)
        start = int(query.get("cursor", ["0"])[0])
        stop = start + self.hub.page_entries
        entries = self.hub.tree(repository, commit)
        link = {}
        if stop < len(entries):
            here = f"{self.hub.url}{urlsplit(self.path).path}"
            link["Link"] = f'<{here}?recursive=True&expand=False&cursor={stop}>; rel="next"'
        self._api("tree", parts["revision"], entries[start:stop], link)

    def _api(self, stage: Stage, name: str, value: Any, headers: Mapping[str, str]) -> None:
        body = json.dumps(value).encode()
        self.answer(stage, name, 200, {"Content-Type": "application/json", **headers}, body)

    def _xet(self, repository: Repository, commit: str | None, parts: dict[str, str]) -> None:
        """No Xet store can be reached from here, so nobody gets a token for one."""
        self.asked.stage, self.asked.name = "xet", parts["revision"]
        self.refuse(403, "")

    def _resolve(self, repository: Repository, commit: str | None, parts: dict[str, str]) -> None:
        if repository.gated_for and self._token() != repository.gated_for:
            return self.refuse(403 if self._token() else 401, "GatedRepo")
        if commit is None:
            return self.refuse(404, "RevisionNotFound")
        path = unquote(parts["path"])
        blob = repository.commits[commit].get(path)
        named = {"X-Repo-Commit": commit}
        if blob is None:
            return self.refuse(404, "EntryNotFound", named)
        if not blob.large or not self.hub.redirects:
            return self._file(blob, path, {**named, "ETag": f'"{blob.etag}"'})
        named |= {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(blob.size)}
        if self.hub.xet:
            route = f"{self.hub.url}/api/models/{parts['repo']}/xet-read-token/{commit}"
            named |= {"X-Xet-Hash": blob.sha256, "X-Xet-Refresh-Route": route}
            named["Link"] = f'<{route}>; rel="xet-auth"'
        to = {"Location": self.hub.cdn_address(blob, path)}
        self.answer("resolve", path, 302, {**named, **to}, b"")

    def _answer_cdn(self) -> None:
        match = _CDN.fullmatch(urlsplit(self.path).path)
        blob = self.hub.blob_of(match["sha256"]) if match else None
        if match is None or blob is None:
            return self.refuse(404, "")
        self._file(blob, unquote(match["path"]), {"ETag": '"an-md5-of-the-store"'})

    def _file(self, blob: Blob, path: str, headers: dict[str, str]) -> None:
        start, stop = 0, blob.size
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        if asked:
            start = int(asked[1])
            stop = min(int(asked[2]) + 1, blob.size) if asked[2] else blob.size
            if start >= stop:
                return self.send(416, {"Content-Range": f"bytes */{blob.size}"}, b"")
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{blob.size}"
        headers["Accept-Ranges"] = "bytes"
        self.answer("body", path, 206 if asked else 200, headers, blob, start, stop)

    def answer(
        self,
        stage: Stage,
        name: str,
        status: int,
        headers: Mapping[str, str],
        body: bytes | Blob,
        start: int = 0,
        stop: int = 0,
    ) -> None:
        """The good answer, or the bad one that was ordered for this request."""
        self.asked.stage, self.asked.name = stage, name
        is_idle = self.command == "HEAD" and stage == "body"
        fault = None if is_idle else self.hub.next_fault(stage, name, start, stop)
        if fault is None:
            return self.send(status, headers, body, start, stop)
        fault.act(self, status, dict(headers), body, start, stop)

    def send(
        self,
        status: int,
        headers: Mapping[str, str],
        body: bytes | Blob,
        start: int = 0,
        stop: int = 0,
    ) -> None:
        """Status, headers and body, with the length that the body has."""
        self.begin(status, headers, len(body) if isinstance(body, bytes) else stop - start)
        if self.command == "HEAD":
            return
        if isinstance(body, bytes):
            return self.pour([body])
        if isinstance(body.content, Path) and not self.hub.bytes_per_s:
            return self._send_from_disk(body.content, start, stop)
        self.pour(body.pieces(start, stop))

    def begin(self, status: int, headers: Mapping[str, str], length: int | None) -> None:
        self.asked.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def pour(self, pieces: Iterable[bytes]) -> None:
        """Write slowly where asked to, and count."""
        for piece in pieces:
            self.wfile.write(piece)
            self.wfile.flush()
            self.asked.sent_bytes += len(piece)
            if self.hub.bytes_per_s:
                time.sleep(len(piece) / self.hub.bytes_per_s)

    def _send_from_disk(self, path: Path, start: int, stop: int) -> None:
        self.wfile.flush()
        with path.open("rb") as handle:
            while start < stop:
                sent = self.connection.sendfile(handle, start, min(1 << 22, stop - start))
                start += sent
                self.asked.sent_bytes += sent

    def hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True

    def refuse(self, status: int, code: str, headers: Mapping[str, str] | None = None) -> None:
        """No, and the Hub's own word for why."""
        why = {"X-Error-Code": code} if code else {}
        body = b'{"error": "no"}'
        self.begin(status, {**(headers or {}), **why}, len(body))
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return
