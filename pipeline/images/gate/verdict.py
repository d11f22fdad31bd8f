"""A gate's verdict on a case, and on several together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

CaseVerdict = Literal["passed", "accepted", "failed", "unknown"]


def worst(verdicts: Sequence[CaseVerdict]) -> CaseVerdict:
    """The verdict on all together; none at all is unknown."""
    for verdict in ("failed", "unknown", "accepted"):
        if verdict in verdicts:
            return verdict
    return "passed" if verdicts else "unknown"
