"""Ports for servers that a test starts later, or never."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

# Linux hands out 32768 and more (`ip_local_port_range`): to every server that asks for port 0 and
# to every connection of the tests that run at the same time. A port from there that was free a
# minute ago may be taken.
_LOWEST, _PAST = 12_000, 32_768


def unused_port() -> int:
    """A port that nobody has, and that nobody gets who does not name it."""
    chance = random.SystemRandom()
    while True:
        port = chance.randrange(_LOWEST, _PAST)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
