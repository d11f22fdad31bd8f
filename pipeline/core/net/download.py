"""One large file: resumed after a break, hashed as it arrives, never longer than it should be."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from pipeline.core.files import hash_so_far, os_errors_explained, size_so_far
from pipeline.core.log import Gauge
from pipeline.core.net.address import goes_on, shown_address
from pipeline.core.net.answer import Answer
from pipeline.core.net.failures import BadAnswer, Lost
from pipeline.core.net.timing import RetryPolicy, most_attempts

# A connection that brings this much before each break is slow, not broken.
_PROGRESS_BYTES = 1 << 20

# An answer that begins at this byte: 200, or for a later byte also 206 or 416; one try.
OpenAt = Callable[[int], Answer]


def download_blob(
    open_at: OpenAt,
    partial: Path,
    digest: str,
    size_bytes: int,
    gauge: Gauge,
    retry_policy: RetryPolicy,
) -> str:
    """Completes `partial` and returns the digest of what came; keeps nothing that differs.

    `Lost` where it does not come, `BadAnswer` where the server states another size.
    """
    failures, started_over = 0, False
    while True:
        before = have = size_so_far(partial)
        gauge.at(0)
        if have > size_bytes:
            partial.unlink()
            have = 0
        try:
            # only hash a complete file: servers refuse a Range beyond the end
            if have == size_bytes and have:
                got = f"sha256:{hash_so_far(partial, gauge.advance).hexdigest()}"
            else:
                answer = open_at(have)
                span = answer.header("Content-Range")
                is_rest = answer.status == 206 and goes_on(span, have, size_bytes)
                # a server without Range support answers 200 with the whole file; one that answers
                # anything else is asked for all of it
                is_rest = is_rest and (answer.length or 0) <= size_bytes - have
                if answer.status != 200 and not is_rest:
                    answer.close()
                    answer = open_at(0)
                with answer:
                    if answer.status == 200:
                        # before the beginning is given up: another server may go on with it
                        require_length(answer, size_bytes)
                        partial.unlink(missing_ok=True)
                    sha = hash_so_far(partial, gauge.advance)
                    with os_errors_explained(partial), partial.open("ab") as out:
                        got = pour(answer, sha, out.tell(), size_bytes, gauge, out.write)
        except Lost as lost:
            failures = 1 if size_so_far(partial) >= before + _PROGRESS_BYTES else failures + 1
            if failures >= most_attempts(lost):
                raise
            retry_policy.pause(failures - 1, lost)
            continue
        if got == digest:
            return got
        partial.unlink(missing_ok=True)
        gauge.at(0)
        if started_over or not before:
            return got
        # the beginning that was kept may be what is wrong: once more, from the first byte
        started_over = True


def require_length(answer: Answer, size_bytes: int) -> None:
    """Refuses a file of another size before its first byte."""
    if answer.length not in (None, size_bytes):
        raise BadAnswer(f"has {answer.length} bytes instead of {size_bytes}")


def pour(
    answer: Answer,
    sha: hashlib._Hash,
    got: int,
    size_bytes: int,
    gauge: Gauge,
    write: Callable[[memoryview], object] = lambda piece: None,
) -> str:
    """Passes the rest of a file on; returns the digest of all of it, or that it is too long."""
    for piece in answer.pieces():
        got += len(piece)
        if got > size_bytes:
            return f"more than {size_bytes} bytes"
        write(piece)
        sha.update(piece)
        gauge.advance(len(piece))
    # only a chunked body marks its own end; any other that is short was cut off
    is_chunked = answer.status == 200 and answer.header("Transfer-Encoding").lower() == "chunked"
    if got < size_bytes and not is_chunked:
        raise Lost(f"{shown_address(answer.url)}: ended after {got} of {size_bytes} bytes")
    return f"sha256:{sha.hexdigest()}"
