from __future__ import annotations

import pytest

from pipeline.weights import receipt


@pytest.fixture
def quick_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk whose clock ticks every 10 ms, so that a test need not wait for FAT's two seconds."""
    monkeypatch.setattr(receipt, "_CLOCK_TICK_NS", 10_000_000)
