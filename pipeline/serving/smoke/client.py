"""Sends requests to an OpenAI-compatible server, and keeps each as evidence, good or bad."""

from __future__ import annotations

import asyncio
import json
import re
import time
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from pipeline.core.foreign_json import JsonInvalid, read_json, value_at
from pipeline.core.log import redacted
from pipeline.core.model import sha256_of
from pipeline.core.net.timing import retry_after_s
from pipeline.core.net.wire import Address, AnswerLost, KeptConnection, Raw, send
from pipeline.serving.smoke.model import ChatLimits, Exchange

_JSON = {"Content-Type": "application/json"}
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
    """The server no longer answers: further checks would only wait."""


class RequestRefused(Unsound):
    """A status that is not 200."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(f"{exchange.path}: status {exchange.status}: {exchange.answer[:200]}")
        self.status, self.answer = exchange.status, exchange.answer

    @property
    def is_of_field(self) -> bool:
        """Whether the status says that the server does not know something in the request."""
        return self.status in _FIELD_REFUSED


class HungUp(Exception):
    """The client closed the connection in mid-answer, as it was asked to."""


class NotOffered(Exception):
    """The server refuses something that it need not have."""


@dataclass
class ChatClient:
    """One server. `check` names what is being looked at, for the evidence."""

    address: Address
    limits: ChatLimits = field(default_factory=ChatLimits)
    headers: Mapping[str, str] = field(default_factory=dict)
    check: str = ""
    exchanges: list[Exchange] = field(default_factory=list)
    kept: KeptConnection | None = None  # carries all requests of this client, one after the other

    async def get(self, path: str, *, optional: bool = False) -> tuple[Exchange, Any]:
        """Gets a small answer as JSON; if `optional`, it may be missing (`NotOffered`)."""
        exchange, raw = await self._exchange("GET", path, None, optional)
        return exchange, self._json(raw.data)

    async def post(
        self, path: str, body: Mapping[str, Any], *, optional: bool = False
    ) -> tuple[Exchange, Any]:
        """Posts a request for a whole answer as JSON."""
        exchange, raw = await self._exchange("POST", path, body, optional)
        return exchange, self._json(raw.data)

    async def text(self, path: str) -> str:
        """Gets a small answer that is no JSON, and that a server need not have."""
        _, raw = await self._exchange("GET", path, None, optional=True)
        return raw.data.decode(errors="replace")

    async def stream(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        has_done: bool = True,
        optional: bool = False,
        has_names: bool = False,
    ) -> tuple[Exchange, list[tuple[float, Any]]]:
        """Asks for a stream; returns its events as JSON with the time of each, without `[DONE]`.

        Refuses a stream without its end, and one whose events lack the names of their types where
        it must have them. https://html.spec.whatwg.org/multipage/server-sent-events.html
        """
        exchange, raw = await self._exchange("POST", path, body, optional)
        if "text/event-stream" not in raw.headers.get("content-type", "").lower():
            raise Unsound("a stream was asked for, and the answer is none")
        events = _events(raw)
        is_done = bool(events) and events[-1][1] == b"[DONE]"
        if has_done and not is_done:
            raise Unsound("the stream ended without [DONE]" + _error_words(raw))
        # vLLM sends it in /v1/messages, too, where message_stop is the end
        whole = events[:-1] if is_done else events
        values = [(at, self._json(each)) for at, each, _ in whole]
        for (_, value), (_, _, name) in zip(values, whole, strict=True):
            kind = value_at(value, "type")
            if has_names and kind != name and not _error_words(raw):
                # Claude Code then asks for the same answer again, without a stream
                raise Unsound(f"{path}: the event {kind!r} has the name {name!r} (`event:`)")
        return exchange, values

    async def hang_up(self, path: str, body: Mapping[str, Any], after: int) -> None:
        """Ask for a stream, and close the connection after so many pieces of it."""
        with suppress(HungUp):
            await self._exchange("POST", path, body, hang_up_after=after)

    async def _exchange(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        optional: bool = False,
        hang_up_after: int | None = None,
    ) -> tuple[Exchange, Raw]:
        """Returns one good answer; asks again if the server takes only so many requests at once."""
        deadline, tries = time.monotonic() + self.limits.request_s, 0
        lost: AnswerLost | None
        headers, most_bytes, data = {**_JSON, **self.headers}, self.limits.most_bytes, b""
        if body is not None:
            data = json.dumps(body, ensure_ascii=False).encode()
            # a hundred answers that never end must fit into memory
            asked_tokens = int(body.get("max_tokens") or body.get("max_output_tokens") or 0)
            most_bytes = min(most_bytes, _FRAME_BYTES + _TOKEN_BYTES * asked_tokens)
        request = self.address, method, path, data, headers
        while True:
            began, lost = time.monotonic(), None
            is_reused = bool(self.kept and self.kept.streams)
            try:
                raw = await send(
                    *request,
                    limit_s=self.limits.request_s,
                    most_bytes=most_bytes,
                    kept=self.kept,
                    hang_up_after=hang_up_after,
                )
            except AnswerLost as error:
                # a server may end a connection that waits: rfc-editor.org/rfc/rfc9112#section-9.3.1
                if is_reused and not error.pieces:
                    continue
                lost, raw = error, Raw(0, {}, error.pieces, time.monotonic() - began)
            exchange = Exchange(
                number=len(self.exchanges),
                check=self.check,
                method=method,
                path=path,
                request=_shortened(data),
                status=raw.status,
                answer=_shortened(raw.data),
                seconds=round(raw.seconds, 6),
                first_s=raw.pieces[0][0] if raw.pieces and not lost else None,
                error=str(lost or ""),
            )
            self.exchanges.append(exchange)
            if lost and hang_up_after is not None and len(lost.pieces) >= hang_up_after:
                raise HungUp
            if lost:
                kind = Unsound if lost.pieces else Gone
                raise kind(str(lost) + _error_words(raw)) from lost
            # what the server asks for; longer each time where it names nothing
            asked = retry_after_s(raw.headers.get("retry-after", ""))
            pause = min(asked or 0.05 * 2.0 ** min(tries, 5), _LONGEST_PAUSE_S)
            pause *= 1 + exchange.number % 8 / 8  # so that not all ask at the same moment again
            if raw.status != WAIT or time.monotonic() + pause > deadline:
                break
            await asyncio.sleep(pause)
            tries += 1
        if 200 <= raw.status < 300:
            return exchange, raw
        refused = RequestRefused(exchange)
        raise NotOffered(str(refused)) if optional and raw.status in _NOT_OFFERED else refused

    def _json(self, data: bytes) -> Any:
        try:
            return read_json(
                data.removeprefix(_BOM), most_bytes=self.limits.most_bytes, any_int=True
            )
        except JsonInvalid as error:
            raise Unsound(f"the answer {error}") from error


def _events(raw: Raw) -> list[tuple[float, bytes, str]]:
    """Each event: when its last line was whole, its data, and its name."""
    events: list[tuple[float, bytes, str]] = []
    data: list[bytes] = []
    name = ""
    # pieces are joined first: one may end in a line, in a character, or between CR and LF
    ends = list(accumulate(len(piece) for _, piece in raw.pieces))
    # a stream may begin with a byte order mark
    skipped = len(_BOM) if raw.data.startswith(_BOM) else 0
    # an empty line at the very end ends the last event
    for match in _LINE.finditer(raw.data.removeprefix(_BOM)):
        line = match[1]
        if line.startswith(b"data:"):
            data.append(line[5:].strip())
        elif line.startswith(b"event:"):
            name = line[6:].strip().decode(errors="replace")
        elif not line and data:
            piece = bisect_left(ends, match.end() + skipped)
            at = raw.pieces[piece][0] if piece < len(ends) else raw.seconds
            events.append((at, b"\n".join(data), name))
            data, name = [], ""
    return events


def error_in(value: Any) -> str:
    """A server's own words for what went wrong, where an answer holds an error; else empty."""
    if not isinstance(value, dict):
        return ""
    error = value.get("error")
    # vLLM also wrote the error without an envelope
    if not error and value.get("object") == "error":
        error = value
    words = error.get("message") if isinstance(error, dict) else error
    return str(words or error or "")[:200]


def _error_words(raw: Raw) -> str:
    """The error that a stream ended with, if it told one."""
    for _, data, _ in reversed(_events(raw)):
        try:
            words = error_in(read_json(data, most_bytes=1 << 20, any_int=True))
        except JsonInvalid:
            continue
        if words:
            return f"; the server said: {words}"
    return ""


def _shortened(data: bytes) -> str:
    """As much as evidence keeps, and the digest where that is not all."""
    # a server may repeat the key that it was sent
    text: str = redacted(data.decode(errors="replace"))
    if len(text) <= _KEPT_CHARACTERS:
        return text
    half = _KEPT_CHARACTERS // 2
    return f"{text[:half]} […{len(data)} bytes, {sha256_of(data)}…] {text[-half:]}"
