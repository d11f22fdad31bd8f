"""The event loop of the client and its stub: uvloop where it is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Literal

try:
    import uvloop
except ImportError:
    uvloop = None

EVENT_LOOP: Literal["uvloop", "asyncio"] = "uvloop" if uvloop else "asyncio"


def run_loop(work: Coroutine[Any, Any, None]) -> None:
    """To the end of the work."""
    factory = uvloop.new_event_loop if uvloop else None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(work)
