"""What a file is, by its beginning: a page of ours or not."""

from __future__ import annotations


def is_report(head: bytes) -> bool:
    """Whether a file's first bytes look like a page of ours."""
    return head.startswith(b"<!doctype html>") and b"Content-Security-Policy" in head[:2000]
