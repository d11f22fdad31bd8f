"""What a server's answer to a range request is worth, before the first byte of it is used."""

from __future__ import annotations

import re

from pipeline.errors import (
    DigestMismatch,
    HubBroken,
    HubRefused,
    PipelineError,
    RevisionMoved,
)
from pipeline.net.answer import Answer
from pipeline.net.waits import asked_wait_s
from pipeline.weights.model import FilePin
from pipeline.weights.transfer.routes import Lost, NotHere, wrong_bytes

_MAY_PASS = (408, 425, 429)
_HEX = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SPAN = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
_NUMBER = re.compile(r"\d{1,18}")


def require_same_file(answer: Answer, pin: FilePin) -> None:
    """Before a large file is followed elsewhere, the Hub says which one it is."""
    etag = answer.header("X-Linked-Etag").removeprefix("W/").strip('"')
    size = answer.header("X-Linked-Size")
    if _HEX.fullmatch(etag) and len(etag) == len(pin.want) and etag != pin.want:
        wrong = wrong_bytes(f"{pin.path}: locked as {pin.want}, the server has {etag}")
        raise NotHere(wrong, only_this=True)
    if _NUMBER.fullmatch(size) and int(size) != pin.size_bytes:
        raise NotHere(_other_size(pin, int(size)), only_this=True)


def _other_size(pin: FilePin, size: int) -> DigestMismatch:
    return wrong_bytes(f"{pin.path}: locked with {pin.size_bytes} bytes, the server has {size}")


def judge(answer: Answer, pin: FilePin, start: int, stop: int) -> bool:
    """Refuse what cannot be the range that was asked for; whether the whole file comes instead."""
    status = answer.status
    if status not in (200, 206):
        raise _refusal(answer, pin)
    if answer.header("Content-Encoding") not in ("", "identity"):
        raise Lost(f"{pin.path}: comes compressed, though that was declined", ending=HubBroken)
    is_part = (start, stop) != (0, pin.size_bytes)
    length, want = answer.header("Content-Length"), pin.size_bytes
    if status == 206:
        span = _SPAN.fullmatch(answer.header("Content-Range"))
        # it may end early: a server need not send all that it was asked for
        if not is_part or not span or not start == int(span[1]) <= int(span[2]) < stop:
            raise Lost(f"{pin.path}: another range than {start}-{stop - 1} came", ending=HubBroken)
        if span[3] not in ("*", str(pin.size_bytes)):
            raise Lost(str(_other_size(pin, int(span[3]))), ending=wrong_bytes)
        want = int(span[2]) + 1 - start
    if length and (not _NUMBER.fullmatch(length) or int(length) != want):
        raise Lost(
            f"{pin.path}: {want} bytes are locked, an answer of {length[:20]} came",
            ending=wrong_bytes,
        )
    return is_part and status == 200


def _refusal(answer: Answer, pin: FilePin) -> Exception:
    """What a status means for us."""
    status, code = answer.status, answer.header("X-Error-Code")
    if status >= 500 or status in _MAY_PASS:
        wait_s = asked_wait_s(answer.headers)
        return Lost(f"{pin.path}: the server answers {status}", wait_s=wait_s)
    is_own = status in (404, 410, 416) and code in ("", "EntryNotFound")
    return NotHere(_ending(status, code, pin), only_this=is_own)


def _ending(status: int, code: str, pin: FilePin) -> PipelineError:
    if code == "GatedRepo":
        return HubRefused(f"{pin.path}: the repository is gated, and not open to this user")
    if code == "RevisionNotFound":
        return RevisionMoved(f"{pin.path}: the repository no longer has the locked commit")
    if status == 416:
        return wrong_bytes(f"{pin.path}: the server's file is shorter than the locked one")
    if status in (401, 403):
        return HubRefused(f"{pin.path}: the server answers {status}: not for this user")
    return HubRefused(
        f"{pin.path}: the server answers {status} {code}".rstrip(),
        "It has no such file at the locked commit; see `sm120 weights lock NAME --diff`.",
    )
