"""Ways to a file's bytes: a route opens any range of a locked file, or gives a reason.

Nothing that a route delivers is trusted: the hash in the lock decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pipeline.errors import DigestMismatch, OfflineMiss, PipelineError, SourceUnreachable
from pipeline.weights.model import FilePin

NEIGHBOUR_TOKEN = "SM120_NEIGHBOUR_TOKEN"  # noqa: S105 - the variable's name
NEIGHBOUR_LOGIN = f"Set {NEIGHBOUR_TOKEN} to a token that the machine named with --from accepts."


class ByteStream(Protocol):
    """Bytes that arrive. `is_whole`: the server ignored the range and sends the whole file."""

    is_whole: bool

    def readinto(self, buffer: memoryview) -> int:
        """Fill the buffer, or as much of it as the range still has; raises `AttemptFailed`."""
        ...

    def close(self) -> None: ...


class Route(Protocol):
    """One way to a locked set's files. `is_shared`: named by the user, as others may be."""

    name: str
    is_shared: bool

    def open(self, pin: FilePin, start: int, stop: int) -> ByteStream:
        """The bytes from `start` up to `stop`; raises `AttemptFailed` or `NotAvailable`."""
        ...


class AttemptFailed(Exception):
    """Another attempt or another route may succeed; `error_type` is raised if none does."""

    def __init__(
        self,
        reason: str,
        *,
        is_stall: bool = False,
        is_unreached: bool = False,
        wait_s: float | None = None,
        error_type: Callable[[str], PipelineError] | None = None,
    ) -> None:
        super().__init__(reason)
        # a stall has cost its time already, so the router leaves the route at once; see `Attempts`
        self.is_stall, self.is_unreached = is_stall, is_unreached
        self.wait_s, self.error_type = wait_s, error_type or not_delivered
        self.is_wrong = error_type is not None  # an answer that no sound server gives


class NotAvailable(Exception):
    """This route will never deliver this file; `error` is raised if no other route does.

    `only_this_file` where the reason is the file's own, like a 404: other files may still come.
    """

    def __init__(self, error: PipelineError, *, only_this_file: bool = False) -> None:
        super().__init__(str(error))
        self.error, self.only_this_file = error, only_this_file


def not_delivered(message: str) -> SourceUnreachable:
    """No source could be asked, or none of them sent the file."""
    return SourceUnreachable(
        message,
        "Check the network, HF_ENDPOINT and what --from names, then run it again: finished files"
        " are kept.",
    )


def wrong_bytes(message: str) -> DigestMismatch:
    """A source has other bytes than the lock names."""
    return DigestMismatch(
        message,
        "Nothing wrong was kept. Try another --from or HF_ENDPOINT; if upstream itself changed,"
        " `sm120 weights lock NAME --dry-run` shows it.",
    )


def not_offline(message: str) -> OfflineMiss:
    """A file that cannot be had without asking a server."""
    return OfflineMiss(message, "Run without --offline, or name a folder that has it with --from.")
