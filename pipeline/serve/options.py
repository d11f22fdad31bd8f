"""What a user chose for one start, kept with the attempt so that the same can be started again."""

from __future__ import annotations

from pipeline.model import Frozen
from pipeline.recipe.launch import Overrides
from pipeline.serve.host_nccl import HostNccl

# Weights of 600 GB take a quarter of an hour, and kernels may be compiled at the first start.
START_S = 3600.0


class ServeOptions(Frozen):
    """All that a recipe leaves open."""

    overrides: Overrides = Overrides()
    weights: str | None = None  # whole paths: the same may be started from another folder
    draft: str | None = None
    cards: tuple[int, ...] = ()
    lan: bool = False
    host_nccl: HostNccl | None = None
    timeout_s: float = START_S
    skipped: tuple[str, ...] = ()

    def drafting(self, wanted: bool) -> ServeOptions:
        """The same with speculation turned on or off."""
        overrides = self.overrides.model_copy(update={"enable_eagle3": wanted})
        return self.model_copy(update={"overrides": overrides})
