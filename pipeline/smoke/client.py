"""Requests to an OpenAI-compatible server; every one is kept as evidence, good or bad."""

from __future__ import annotations

import asyncio
import json
import re
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from pipeline.foreign_json import JsonInvalid, read_json
from pipeline.log import redacted
from pipeline.model import sha256_of
from pipeline.net.timing import retry_after_s
from pipeline.smoke.model import Exchange, Limits
from pipeline.smoke.wire import Address, Lost, Raw, send

_KEPT_CHARACTERS = 20_000
# Of an answer at most, beside what its tokens take: the longest chunks have five logprobs.
_FRAME_BYTES, _TOKEN_BYTES = 1 << 20, 1 << 12
# Answers that say "this server does not do that", rather than "this failed": of a whole page,
_NOT_OFFERED = (404, 405, 501)
# and of a field in a request.
_FIELD_REFUSED = (400, 422, 501)
WAIT = 429  # there is a place later: rfc-editor.org/rfc/rfc6585
_LONGEST_PAUSE_S = 8.0
# Lines of a stream may end in three ways.
_BOM = b"\xef\xbb\xbf"
_LINE = re.compile(rb"([^\r\n]*)(?:\r\n|\n|\r|\Z)")


class Unsound(Exception):
    """What a sound server does not do."""


class Gone(Unsound):
    """Nobody answers any more: further checks would only wait."""


class Refused(Unsound):
    """A status that is not 200."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_of_field(self) -> bool:
        """Whether a server says so that does not know something in the request."""
        return self.status in _FIELD_REFUSED


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
        exchange, raw = await self._exchange("POST", path, _dump(body), _most_bytes(body))
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
        exchange, raw = await self._exchange("POST", path, _dump(body), _most_bytes(body))
        self._require_good(exchange, optional=False)
        if "text/event-stream" not in raw.headers.get("content-type", "").lower():
            raise Unsound("a stream was asked for, and the answer is none")
        return exchange, [
            (at, self._json(data)) for at, data in read_events(raw, has_done=has_done)
        ]

    async def _exchange(
        self, method: str, path: str, body: bytes, most_bytes: int | None = None
    ) -> tuple[Exchange, Raw]:
        """One answer; a server that takes only so many requests at once is asked again."""
        deadline, tries = time.monotonic() + self.limits.request_s, 0
        while True:
            exchange, raw = await self._exchange_once(method, path, body, most_bytes)
            pause = _pause_s(raw, tries, exchange.number)
            if raw.status != WAIT or time.monotonic() + pause > deadline:
                return exchange, raw
            await asyncio.sleep(pause)
            tries += 1

    async def _exchange_once(
        self, method: str, path: str, body: bytes, most_bytes: int | None
    ) -> tuple[Exchange, Raw]:
        headers = {"Content-Type": "application/json", **self.headers}
        began = time.monotonic()
        try:
            raw = await send(
                self.address,
                method,
                path,
                body,
                headers,
                limit_s=self.limits.request_s,
                most_bytes=min(most_bytes or self.limits.most_bytes, self.limits.most_bytes),
            )
        except Lost as error:
            data = b"".join(piece for _, piece in error.pieces)
            seconds = time.monotonic() - began
            self._keep(method, path, body, 0, data, seconds, None, str(error))
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
        if 200 <= exchange.status < 300:
            return
        message = f"{exchange.path}: status {exchange.status}: {exchange.answer[:200]}"
        if optional and exchange.status in _NOT_OFFERED:
            raise NotOffered(message)
        raise Refused(message, exchange.status)

    def _json(self, data: bytes) -> Any:
        try:
            return read_json(
                data.removeprefix(_BOM), most_bytes=self.limits.most_bytes, any_int=True
            )
        except JsonInvalid as error:
            raise Unsound(f"the answer {error}") from error


def read_events(raw: Raw, *, has_done: bool) -> list[tuple[float, bytes]]:
    """The data of each server-sent event; a stream without its end is refused.

    https://html.spec.whatwg.org/multipage/server-sent-events.html
    """
    events: list[tuple[float, bytes]] = []
    data: list[bytes] = []
    for at, line in _lines(raw):
        if line.startswith(b"data:"):
            data.append(line[5:].strip())
        elif not line and data:
            events.append((at, b"\n".join(data)))
            data = []
    is_done = bool(events) and events[-1][1] == b"[DONE]"
    if has_done and not is_done:
        raise Unsound("the stream ended without [DONE]")
    # vLLM sends it in /v1/messages, too, where message_stop is the end
    return events[:-1] if is_done else events


def _lines(raw: Raw) -> Iterator[tuple[float, bytes]]:
    """Lines with the time at which each was whole; an empty one at the end ends the last event.

    Pieces are joined first: one may end in a line, in a character, or between \\r and \\n.
    """
    ends = list(accumulate(len(piece) for _, piece in raw.pieces))
    # a stream may begin with it: html.spec.whatwg.org/multipage/server-sent-events.html
    skipped = len(_BOM) if raw.data.startswith(_BOM) else 0
    for line in _LINE.finditer(raw.data.removeprefix(_BOM)):
        piece = bisect_left(ends, line.end() + skipped)
        yield raw.pieces[piece][0] if piece < len(ends) else raw.seconds, line[1]


def _pause_s(raw: Raw, tries: int, number: int) -> float:
    """What the server asks for; longer each time where it names nothing."""
    wanted = retry_after_s(raw.headers.get("retry-after", ""))
    # not all at the same moment again
    spread = 1 + number % 8 / 8
    return min(wanted or 0.05 * 2.0 ** min(tries, 5), _LONGEST_PAUSE_S) * spread


def _most_bytes(body: Mapping[str, Any]) -> int:
    """A hundred answers that never end must fit into memory."""
    return _FRAME_BYTES + _TOKEN_BYTES * int(body["max_tokens"])


def _dump(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


def _shortened(data: bytes) -> str:
    """As much as evidence keeps, and the digest where that is not all."""
    # a server may repeat the key that it was sent
    text: str = redacted(data.decode(errors="replace"))
    if len(text) <= _KEPT_CHARACTERS:
        return text
    half = _KEPT_CHARACTERS // 2
    return f"{text[:half]} […{len(data)} bytes, {sha256_of(data)}…] {text[-half:]}"
