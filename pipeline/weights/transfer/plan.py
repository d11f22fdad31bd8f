"""What a fetch would do, found out without reading a file, asking a server or writing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pipeline.core.model import Frozen
from pipeline.weights.disk.receipt import proved_identities
from pipeline.weights.disk.survey import right_size
from pipeline.weights.model import FilePin
from pipeline.weights.place import Place
from pipeline.weights.transfer.fetch import Options, require_own_folder, require_space
from pipeline.weights.transfer.partial_file import PartialFile

State = Literal["right", "to be read", "begun", "missing"]


class PlannedFile(Frozen):
    """One file: what is known of it, and how much of it is still to be fetched."""

    path: str
    size_bytes: int
    state: State
    fetch_bytes: int


def plan_fetch(place: Place, pins: Sequence[FilePin], options: Options) -> list[PlannedFile]:
    """Each file's state; raises what a fetch would raise before its first byte."""
    require_own_folder(place, pins)
    proved = proved_identities(place)
    planned: list[PlannedFile] = []
    seen: set[str] = set()  # two names of one content are one download
    for pin in pins:
        state: State
        if identity := right_size(place.file(pin), pin):
            # whether its bytes are right only reading tells, which takes minutes for a large set
            state, missing = "right" if proved.get(pin.path) == identity else "to be read", 0
        else:
            fetched = PartialFile(pin, place.partial_folder, options.range_bytes).kept_bytes
            state, missing = "begun" if fetched else "missing", pin.size_bytes - fetched
        size, missing = pin.size_bytes, 0 if pin.want in seen else missing
        planned.append(
            PlannedFile(path=pin.path, size_bytes=size, state=state, fetch_bytes=missing)
        )
        seen.add(pin.want)
    require_space(place.root, sum(file.fetch_bytes for file in planned))
    return planned
