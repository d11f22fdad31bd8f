"""How a registry is reached: what options say, before anything is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.core.net.timing import HttpLimits

# a registry on slow storage is silent for minutes while it hashes an uploaded layer of gigabytes
_LIMITS = HttpLimits(silence_s=300.0, head_s=300.0)


@dataclass(frozen=True)
class Access:
    """How a registry may be reached."""

    ca_file: Path | None = None
    insecure_http: bool = False
    first_wait_s: float = 0.5
    limits: HttpLimits = _LIMITS
