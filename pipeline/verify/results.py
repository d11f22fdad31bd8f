"""Test results read back: what a gate found, and whether it still speaks of today's cases."""

from __future__ import annotations

from collections.abc import Collection

from pipeline.evidence.gate_result import TestResult
from pipeline.gate.files import gate_files
from pipeline.model import sha256_of, stays_below
from pipeline.spec.checkout import Checkout
from pipeline.verify.verdict import Node, Verdict


def judge_tests(
    found: TestResult,
    image: str | None,
    checkout: Checkout | None,
    cards: Collection[str] | None = None,
) -> Node:
    """A gate that failed breaks the chain; one that could not judge leaves it incomplete.

    What a gate says about a card that the image is not for decides nothing, here as at publishing.
    """
    title = f"gate {found.gate} on {found.card}"
    if cards is not None and found.card not in cards:
        return Node(title, words=f"{found.verdict}; the image is not for this card")
    counts = f"{len(found.passed)} passed, {len(found.warned)} accepted"
    if not found.passed and not found.warned:
        counts = "nothing in it to judge"
    if found.verdict == "failed":
        return Node(title, Verdict.BROKEN, f"failed: {', '.join(found.failed[:3])}")
    if found.verdict == "unknown":
        first = found.unknown[0]
        return Node(title, Verdict.INCOMPLETE, f"unknown: {first.test}: {first.why}")
    moved = _moved(found, image, checkout) if image and checkout else []
    if moved:
        return Node(title, Verdict.STALE, f"{counts}, but has changed since: {', '.join(moved)}")
    return Node(title, words=counts)


def _moved(found: TestResult, image: str, checkout: Checkout) -> list[str]:
    """Case files and patches that are not what the gate saw, and cases that it did not see."""
    saw = {item.name for item in found.configuration}
    files = gate_files(checkout, image, found.gate)
    moved = sorted(files.keys() - saw)
    for item in found.configuration:
        if not item.name.startswith(("gates/", "common/gates/", "patches/")):
            continue
        try:
            path = files.get(item.name) or checkout.folder(image) / stays_below(item.name)
            same = sha256_of(path.read_bytes()) == f"sha256:{item.digest.sha256}"
        except (OSError, ValueError):
            same = False
        if not same:
            moved.append(item.name)
    return moved
