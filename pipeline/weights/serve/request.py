"""What a request asks for: path, query and range, parsed without touching the disk."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qs, unquote_to_bytes

from pipeline.foreign_json import read_json
from pipeline.weights.serve.http import Refused, Request

Query = dict[str, list[str]]


def below_host(target: str) -> str:
    """The target without scheme and host, which clients send when they use a proxy."""
    match = re.match(r"https?://[^/?#]*", target, re.I)
    return target[match.end() :] if match else target


def split(target: str) -> tuple[list[str], Query]:
    """The parts of the path, each decoded by itself, and the query."""
    path, _, text = below_host(target).partition("?")
    if not path.startswith("/"):
        raise Refused(400, "the target is not a path")
    try:
        # decoded after splitting: an encoded slash belongs to a name (refs%2Fpr%2F1)
        parts = [unquote_to_bytes(part).decode() for part in path[1:].split("/")]
        # a bound on the fields, for parse_qs takes its time with thousands of them
        query = parse_qs(text, max_num_fields=50, errors="strict")
    except ValueError:
        raise Refused(400, "the target is not UTF-8") from None
    return parts, query


def asked_paths(request: Request) -> list[str]:
    """The paths of a question, as a form (the Hub's client) or as JSON (others)."""
    try:
        if "json" in request.header("content-type"):
            body = read_json(request.body, most_bytes=len(request.body))
            paths: Any = body.get("paths", [])
        else:
            paths = parse_qs(request.body.decode(), max_num_fields=20_000).get("paths", [])
    except (ValueError, AttributeError):
        raise Refused(400, "the body is neither a form nor JSON") from None
    paths = [paths] if isinstance(paths, str) else paths
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise Refused(400, "paths must be a list of names")
    return paths


def is_set(query: Query, name: str) -> bool:
    """Whether a switch is on, as Python and JavaScript clients spell it."""
    return query.get(name, [""])[0].lower() in ("true", "1")


def number(query: Query, name: str, default: int) -> int:
    """A number of the query."""
    text = query.get(name, [""])[0]
    if text and not re.fullmatch(r"[0-9]{1,9}", text):
        raise Refused(400, f"{name} is not a number")
    return int(text) if text else default


_ONE = re.compile(r"(\d{1,18})-(\d{0,18})|-(\d{1,18})")


class Unsatisfiable(Exception):
    """A range that the file does not have, or that cannot be parsed."""


def wanted_range(header: str, size: int) -> tuple[int, int] | None:
    """First byte and length; None where the whole file is to be sent.

    Several ranges in one request may be answered with the whole file, and so may a unit that is
    not known; a range in bytes that cannot be parsed is refused, for its author wanted little.
    """
    unit, _, text = header.partition("=")
    if not header or unit.strip().lower() != "bytes" or "," in text:
        return None
    match = _ONE.fullmatch(text.strip())
    if not match:
        raise Unsatisfiable
    # `-500`: the last 500 bytes
    if match[3] is not None:
        length = min(int(match[3]), size)
        start, end = size - length, size - 1
    else:
        start = int(match[1])
        end = min(int(match[2]), size - 1) if match[2] else size - 1
        if match[2] and int(match[2]) < start:
            raise Unsatisfiable
    if start >= size or end < start:
        raise Unsatisfiable
    return start, end - start + 1
