"""Compressed answers, never larger than they may be."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from pipeline.net.failures import BadAnswer

_GZIP = 16 + zlib.MAX_WBITS
_MOST_AT_ONCE = 1 << 18


def decoded(pieces: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    """The pieces of a body as they were before compression, a little at a time."""
    if encoding in ("", "identity"):
        yield from pieces
    elif encoding in ("gzip", "x-gzip"):
        yield from _gunzipped(pieces)
    else:
        raise BadAnswer(f"comes encoded as {encoding[:20]!r}, which was not asked for")


def _gunzipped(pieces: Iterable[bytes]) -> Iterator[bytes]:
    inflater, is_open = zlib.decompressobj(_GZIP), False
    for piece in pieces:
        data = piece
        while data:
            try:
                plain = inflater.decompress(data, _MOST_AT_ONCE)
            except zlib.error as error:
                raise BadAnswer("comes with damaged compression") from error
            is_open = not inflater.eof
            data = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
            if inflater.eof:
                inflater = zlib.decompressobj(_GZIP)
            if plain:
                yield plain
    if is_open:
        raise BadAnswer("ends in the middle of its compression")
