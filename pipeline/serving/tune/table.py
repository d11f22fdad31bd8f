"""A tuned table on its way into a start: whether it is for this machine, and its files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.artifacts.attest.envelope import SUFFIX, Envelope, read_kept_envelope
from pipeline.artifacts.attest.predicates import KernelTable, check_predicate
from pipeline.artifacts.containers.arguments import Mount
from pipeline.artifacts.oci.record import Kind
from pipeline.artifacts.store.store import Store
from pipeline.core.errors import RecordInvalid
from pipeline.core.files import os_errors_explained, write_bytes
from pipeline.core.known import Unknown, then
from pipeline.hosts.facts.model import Gpu
from pipeline.images.assemble.image import Built
from pipeline.images.assemble.layer import read_layer_file
from pipeline.images.gate.smem.limits import card_for
from pipeline.serving.recipe.launch import Launch
from pipeline.serving.tune.moe import FOLDER_VARIABLES

# Read-only, and no folder in which an image has files.
_INSIDE = "/opt/tuned"
# Where SGLang's own tables are; its variable replaces this folder, where vLLM's adds one.
_SGLANG = "sglang/srt/layers/moe/fused_moe_triton/"


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


def unfit(
    table: KernelTable,
    *,
    started: Mapping[str, str],
    recipe_digest: str,
    gpus: Sequence[Gpu],
    driver: str,
) -> str:
    """Why a table does not suit a start; empty if it does. `started`: its image, recipe, engine."""
    for name, value in started.items():
        if (own := getattr(table, name)) != value:
            return f"it is for the {name} {own}, and this start is of {value}"
    if table.recipe_digest != recipe_digest:
        return "the recipe changed since"
    card = table.card
    if not gpus:
        return f"it is for {card.name}, and this machine has no card that the start could use"
    for gpu in gpus:
        if gpu.name != card.name:
            return f"it is for {card.name}, and this machine has {gpu.name}"
        # as nvidia-smi writes them; what the driver did not tell cannot be compared
        for what, want, got in (
            ("a power limit of {} W", card.power_limit_w, then(gpu.power.limit_w, "{:.2f}".format)),
            ("a highest clock of {} MHz", card.most_clock_mhz, then(gpu.clocks.sm_max_mhz, str)),
        ):
            if want not in (None, got):
                has = got.unknown if isinstance(got, Unknown) else got
                return f"it was measured with {what.format(want)}, and GPU {gpu.index} has {has}"
    if driver != card.driver:
        return f"it was measured with driver {card.driver}, and this machine has {driver}"
    major, _, minor = table.card.compute_capability.partition(".")
    room = card_for(f"sm_{major}{minor}").shared_bytes
    for size in table.sizes:
        sides = [size.config.get(f"BLOCK_SIZE_{side}", 0) for side in "MNK"]
        m, n, k = sides
        # the least that a pipelined product of two tiles holds at once
        stages = max(size.config.get("num_stages", 3) - 1, 1)
        least = stages * (m + n) * k * table.element_bytes
        if 0 in (*sides, size.config.get("num_warps")) or least > room:
            return f"its sizes for {size.tokens} tokens cannot fit {room} bytes of shared memory"
    return ""


def write_table(table: KernelTable, folder: Path, store: Store, built: Built) -> None:
    """Writes the table under the engine's own name for it into the folder that the engine is given.

    SGLang then sees no table of its image, so these are written beside it.
    """
    rows = {str(size.tokens): size.config for size in sorted(table.sizes, key=lambda s: s.tokens)}
    files, path = dict[str, bytes](), table.file
    if table.engine == "sglang":
        path = f"configs/triton_{table.triton.replace('.', '_')}/{path}"
        place = f"{built.plan.venv.site}/{_SGLANG}"
        for layer in (each.record for each in built.layers if not each.record.is_foreign):
            for row in store.find_rows(layer, ".json"):
                if row.kind == Kind.FILE and row.path.startswith(f"{place}configs/"):
                    data = read_layer_file(store.blob_path(layer.digest), row)
                    files[row.path.removeprefix(place)] = data
    files[path] = json.dumps(rows, indent=4).encode() + b"\n"
    with os_errors_explained(folder):
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_bytes(folder / name, data)
        # the image's user is not ours, and our umask may shut it out
        for each in (folder, *folder.rglob("*")):
            each.chmod(0o755 if each.is_dir() else 0o644)


def with_table(launch: Launch, folder: Path) -> Launch:
    """The same launch, with an engine that reads the table."""
    variable = FOLDER_VARIABLES[launch.engine]
    mounts = [*launch.mounts, Mount(host=str(folder), inside=_INSIDE)]
    environment = {**launch.environment, variable: _INSIDE}
    return launch.model_copy(update={"mounts": mounts, "environment": environment})
