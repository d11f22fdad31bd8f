"""A tuned table on its way into a start: whether it is for this machine, and its files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pipeline.artifacts.attest.envelope import SUFFIX, Envelope, read_kept_envelope
from pipeline.artifacts.attest.predicates import KernelTable, check_predicate
from pipeline.artifacts.containers.arguments import Mount
from pipeline.core.errors import RecordInvalid
from pipeline.core.files import os_errors_explained, write_bytes
from pipeline.images.gate.smem.limits import card_for
from pipeline.serving.recipe.launch import Launch
from pipeline.serving.tune.moe import FOLDER_VARIABLES

# Read-only, and no folder in which an image has files.
_INSIDE = "/opt/tuned"


def find_table(folder: Path, recipe: str) -> tuple[Envelope, KernelTable] | None:
    """The table of a recipe among an image's statements, and the envelope that holds it."""
    path = folder / f"kernel-table-{recipe}{SUFFIX}"
    envelope = read_kept_envelope(path)
    if envelope is None:
        return None
    table = check_predicate(envelope.statement.predicate_type, envelope.statement.predicate)
    if not isinstance(table, KernelTable):
        raise RecordInvalid(f"{path.name}: holds no table of a kernel")
    return envelope, table


def unfit(table: KernelTable, *, recipe_digest: str, cards: Sequence[str], driver: str) -> str:
    """Why a table does not suit a start; empty if it does."""
    if table.recipe_digest != recipe_digest:
        return "the recipe changed since"
    if others := [name for name in cards if name != table.card.name]:
        return f"it is for {table.card.name}, and this machine has {others[0]}"
    if driver != table.card.driver:
        return f"it was measured with driver {table.card.driver}, and this machine has {driver}"
    major, _, minor = table.card.compute_capability.partition(".")
    room = card_for(f"sm_{major}{minor}").shared_bytes
    for size in table.sizes:
        sides = [size.config.get(f"BLOCK_SIZE_{side}", 0) for side in "MNK"]
        m, n, k = sides
        # the least that a pipelined product of two tiles holds at once
        stages = max(size.config.get("num_stages", 3) - 1, 1)
        least = stages * (m + n) * k * table.element_bytes
        if 0 in sides or least > room:
            return f"its sizes for {size.tokens} tokens cannot fit {room} bytes of shared memory"
    return ""


def write_table(table: KernelTable, folder: Path) -> Path:
    """Writes the table under the engine's own name for it; the folder that the engine is given."""
    place = folder
    if table.engine == "sglang":
        place = folder / "configs" / f"triton_{table.triton.replace('.', '_')}"
    rows = {str(size.tokens): size.config for size in sorted(table.sizes, key=lambda s: s.tokens)}
    with os_errors_explained(folder):
        place.mkdir(parents=True, exist_ok=True)
        write_bytes(place / table.file, json.dumps(rows, indent=4).encode() + b"\n")
    return folder


def with_table(launch: Launch, folder: Path) -> Launch:
    """The same launch, with an engine that reads the table."""
    variable = FOLDER_VARIABLES[launch.engine]
    mounts = [*launch.mounts, Mount(host=str(folder), inside=_INSIDE)]
    environment = {**launch.environment, variable: _INSIDE}
    return launch.model_copy(update={"mounts": mounts, "environment": environment})
