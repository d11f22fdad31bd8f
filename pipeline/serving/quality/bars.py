"""What vendors publish for the same measures, each with its source (`bars.yaml`)."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import HttpUrl

from pipeline.core.model import Frozen, Line
from pipeline.core.yaml_file import read_yaml


class VendorBar(Frozen):
    """One published number, for models whose name holds a pattern."""

    model: Line
    measure: Literal["schema"]
    text: Line
    source: HttpUrl


class VendorBars(Frozen):
    """`bars.yaml`."""

    bars: list[VendorBar]


@cache
def vendor_bars() -> VendorBars:
    """All of them; the first that fits a model counts."""
    return read_yaml(Path(__file__).with_name("bars.yaml"), VendorBars)


def vendor_bar(model: str, measure: str) -> str:
    """What the vendor of a model gives, with its source; empty where nothing is known."""
    name = re.sub(r"[\s_.]+", "-", model.lower())
    for bar in vendor_bars().bars:
        if bar.measure == measure and re.search(bar.model, name):
            return f"{bar.text}: {bar.source}"
    return ""
