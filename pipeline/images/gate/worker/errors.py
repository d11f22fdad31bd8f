"""Why a case can end before its function was called."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


class FunctionGone(Exception):
    """None of the names a case gives leads to a function in this version."""


class Stopped(Exception):
    """A case cannot go on, for a reason a person should read."""
