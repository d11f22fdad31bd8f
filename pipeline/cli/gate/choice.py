"""What a person asked `sm120 gate run` for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GateChoice:
    """Which gates of an image are to run, on what of it, and for which card."""

    name: str
    platform: str | None
    only: tuple[str, ...]
    case: str | None
    arch: str | None
    unpatched: bool
    series: str | None

    @property
    def is_own(self) -> bool:
        """Whether the image is judged as it is built, with all of its cases."""
        return not (self.case or self.unpatched or self.series)

    def wants_kernels(self, gates: list[str]) -> bool:
        if self.only:
            return bool({"smem", "numerics"} & {*self.only})
        # an image that names no gate gets the error that it has no cases
        return "smem" in gates or "arch" not in gates

    def wants_objects(self, gates: list[str]) -> bool:
        # chosen cases or other patches say nothing about the objects of the built image
        return "arch" in self.only if self.only else "arch" in gates and self.is_own

    def asks_for(self, gate: str) -> bool:
        """Whether a gate runs and its result is shown."""
        return not self.only or gate in self.only
