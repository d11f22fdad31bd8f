"""How CPU time grows with the size of an input: a ratio, so that a slow machine judges the same."""

from __future__ import annotations

import time
from collections.abc import Callable

_TIMES = 4  # so much larger is the second input: 4 times the time is linear, 16 times is quadratic


def grows_linearly(run: Callable[[int], object], size: int) -> bool:
    """Does four times the input take clearly less than sixteen times the CPU time?"""

    def least_seconds(of: int) -> float:
        taken = []
        for _ in range(3):
            start = time.process_time()
            run(of)
            taken.append(time.process_time() - start)
        return min(taken)

    return least_seconds(size * _TIMES) < 2 * _TIMES * least_seconds(size)
