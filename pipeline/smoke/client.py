"""Requests to an OpenAI-compatible server; every one is kept as evidence, good or bad."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.foreign_json import JsonInvalid, read_json
from pipeline.model import sha256_of
from pipeline.smoke.model import Exchange, Limits
from pipeline.smoke.wire import Address, Lost, Raw, send

_KEPT_CHARACTERS = 20_000
# Answers that say "this server does not do that", rather than "this failed".
_NOT_OFFERED = (404, 405, 501)


class Unsound(Exception):
    """What a sound server does not do."""


class Gone(Unsound):
    """Nobody answers any more: further checks would only wait."""


class Refused(Unsound):
    """A status that is not 200."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class NotOffered(Exception):
    """The server refuses something that it need not have."""


@dataclass
class Client:
    """One server. `check` names what is being looked at, for the evidence."""

    address: Address
    limits: Limits = field(default_factory=Limits)
    headers: Mapping[str, str] = field(default_factory=dict)
    check: str = ""
    exchanges: list[Exchange] = field(default_factory=list)

    async def get(self, path: str, *, optional: bool = False) -> tuple[Exchange, Any]:
        """A small answer as JSON; none where there is no body.

        What is `optional` may be missing: `NotOffered` is no fault.
        """
        exchange, raw = await self._exchange("GET", path, b"")
        self._require_good(exchange, optional)
        return exchange, self._json(raw.data) if raw.data.strip() else None

    async def post(
        self, path: str, body: Mapping[str, Any], *, optional: bool = False
    ) -> tuple[Exchange, Any]:
        """A whole answer as JSON."""
        exchange, raw = await self._exchange("POST", path, _dump(body))
        self._require_good(exchange, optional)
        return exchange, self._json(raw.data)

    async def text(self, path: str) -> str:
        """A small answer that is no JSON, and that a server need not have."""
        exchange, raw = await self._exchange("GET", path, b"")
        self._require_good(exchange, optional=True)
        return raw.data.decode(errors="replace")

    async def stream(
        self, path: str, body: Mapping[str, Any], *, has_done: bool = True
    ) -> tuple[Exchange, list[tuple[float, Any]]]:
        """The events of a stream as JSON, with the time of each; `[DONE]` is not among them."""
        exchange, raw = await self._exchange("POST", path, _dump(body))
        self._require_good(exchange, optional=False)
        if "text/event-stream" not in raw.headers.get("content-type", ""):
            raise Unsound("a stream was asked for, and the answer is none")
        return exchange, [
            (at, self._json(data)) for at, data in read_events(raw, has_done=has_done)
        ]

    async def _exchange(self, method: str, path: str, body: bytes) -> tuple[Exchange, Raw]:
        headers = {"Content-Type": "application/json", **self.headers}
        try:
            raw = await send(
                self.address,
                method,
                path,
                body,
                headers,
                limit_s=self.limits.request_s,
                most_bytes=self.limits.most_bytes,
            )
        except Lost as error:
            data = b"".join(piece for _, piece in error.pieces)
            self._keep(method, path, body, 0, data, self.limits.request_s, None, str(error))
            kind = Unsound if error.pieces else Gone
            raise kind(str(error)) from error
        first = raw.pieces[0][0] if raw.pieces else None
        return self._keep(method, path, body, raw.status, raw.data, raw.seconds, first), raw

    def _keep(
        self,
        method: str,
        path: str,
        body: bytes,
        status: int,
        data: bytes,
        seconds: float,
        first_s: float | None,
        error: str = "",
    ) -> Exchange:
        exchange = Exchange(
            number=len(self.exchanges),
            check=self.check,
            method=method,
            path=path,
            request=_shortened(body),
            status=status,
            answer=_shortened(data),
            seconds=round(seconds, 6),
            first_s=first_s,
            error=error,
        )
        self.exchanges.append(exchange)
        return exchange

    def _require_good(self, exchange: Exchange, optional: bool) -> None:
        if exchange.status == 200:
            return
        message = f"{exchange.path}: status {exchange.status}: {exchange.answer[:200]}"
        if optional and exchange.status in _NOT_OFFERED:
            raise NotOffered(message)
        raise Refused(message, exchange.status)

    def _json(self, data: bytes) -> Any:
        try:
            return read_json(data, most_bytes=self.limits.most_bytes, any_int=True)
        except JsonInvalid as error:
            raise Unsound(f"the answer {error}") from error


def read_events(raw: Raw, *, has_done: bool) -> list[tuple[float, bytes]]:
    """The data of each server-sent event; a stream without its end is refused.

    https://html.spec.whatwg.org/multipage/server-sent-events.html
    """
    events: list[tuple[float, bytes]] = []
    rest = b""
    for at, piece in raw.pieces:
        # one server ends lines with \n, another with \r\n; a character may be cut between pieces
        *lines, rest = (rest + piece).split(b"\n")
        events += [(at, line[5:].strip()) for line in lines if line.startswith(b"data:")]
    if rest.startswith(b"data:"):
        # the last line of a server that ends none
        events.append((raw.seconds, rest[5:].strip()))
    if not has_done:
        return events
    if not events or events[-1][1] != b"[DONE]":
        raise Unsound("the stream ended without [DONE]")
    return events[:-1]


def _dump(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


def _shortened(data: bytes) -> str:
    """As much as evidence keeps, and the digest where that is not all."""
    text = data.decode(errors="replace")
    if len(text) <= _KEPT_CHARACTERS:
        return text
    half = _KEPT_CHARACTERS // 2
    return f"{text[:half]} […{len(data)} bytes, {sha256_of(data)}…] {text[-half:]}"
