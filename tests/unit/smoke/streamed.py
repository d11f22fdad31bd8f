"""The events of an answer, as the client of the smoke test reads them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from pipeline.core.net.wire import Address, Raw
from pipeline.serving.smoke.client import ChatClient


class _Heard(ChatClient):
    """A client that was given this answer, and shows the bytes of each event."""

    answer: Raw

    async def _exchange(self, *_: Any, **__: Any) -> Any:
        return None, replace(self.answer, headers={"content-type": "text/event-stream"})

    def _json(self, data: bytes) -> Any:
        return data


def events_of(answer: Raw, *, has_done: bool = True) -> list[tuple[float, bytes]]:
    client = _Heard(Address.read("http://127.0.0.1:1"))
    client.answer = answer
    return asyncio.run(client.stream("/v1/chat/completions", {}, has_done=has_done))[1]
