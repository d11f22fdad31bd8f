"""One wheel to one layer, as a build's worker does it, in a process of its own to be measured."""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.images.assemble.layer import with_parents, write_layer
from pipeline.images.assemble.venv import Venv, wheel_entries
from pipeline.images.assemble.wheel import open_wheel


def main(wheel: Path, out: Path) -> None:
    """Write the layer, with every check a build makes."""
    entries = with_parents(wheel_entries(open_wheel(wheel, wheel.name), Venv()))
    with out.open("wb") as handle:
        write_layer(entries, handle)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
