"""Entries of Triton's cache, judged for the card and packed as a layer with an index.

`entry_fault` judges one by the rules of the gates, `pack_entries` puts those of all cases together,
and `write_warm` makes the layer of them.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from pipeline.artifacts.oci.record import Kind, LayerRecord
from pipeline.artifacts.store.store import Store
from pipeline.core.errors import NotReproducible, StepFailed, StoreDamaged
from pipeline.core.files import os_errors_explained, unpacked_whole
from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.core.model import Frozen, canonical_json
from pipeline.images.assemble.layer import Entry, read_layer_file, with_parents, write_layer
from pipeline.images.assemble.plan import WARM_READER, WarmPlan
from pipeline.images.gate.arch import ObjectVerdict, judge_bytes
from pipeline.images.gate.smem.cases import KernelCase
from pipeline.images.gate.smem.limits import Card
from pipeline.images.warm.modules import WarmModules
from pipeline.images.warm.target import WarmAnswer, WarmTarget

# Read-only in the image, and no place that `serve` mounts a volume over.
FOLDER = "opt/warm"
INDEX = f"{FOLDER}/index.json"
# The largest kernels have a quarter of a megabyte.
_MOST_BYTES = 64 << 20
_MOST_INDEX_BYTES = 256 << 20
_KEY, _FILE = re.compile(r"[A-Z2-7]{20,60}"), re.compile(r"\w[\w.-]{0,200}")


class IndexedEntry(Frozen):
    """An entry of the layer: its files with their digests, and what it is there for."""

    kernel: str
    module: str = ""
    files: dict[str, str]
    cases: list[str]
    recipes: list[str] = []
    too_large: str = ""  # why it never runs: a tuner asks for it, reads its size and drops it


class EntryFault(NamedTuple):
    """Why a card cannot run an entry; the size is known before the code is loaded."""

    message: str = ""
    is_size: bool = False


class LackingKernel(Frozen):
    """A kernel that a case names and the layer lacks, and why."""

    case: str
    kernel: str
    reason: str


class WarmIndex(Frozen):
    """What a warm layer holds; `sm120_warm.py` reads it in the image."""

    format: int = 1
    image: str  # whose engine it is
    card: str
    triton: str
    site: str
    entries: dict[str, IndexedEntry]
    missing: list[LackingKernel]
    modules: WarmModules | None = None  # of FlashInfer; `flashinfer_jit_cache.py` reads them
    python_files: int = 0  # compiled, below `PYCACHE`


def entry_fault(files: dict[str, bytes], card: Card) -> EntryFault:
    """Why a card cannot run an entry; without a message for a good one, and for a launcher.

    The gates' own rules: machine code for the card, and no more shared memory than it has.
    """
    cubins = {name: data for name, data in files.items() if name.endswith(".cubin")}
    for name, data in cubins.items():
        verdict = judge_bytes(data, card.arch)
        if verdict.verdict is not ObjectVerdict.RUNS:
            return EntryFault(f"{name}: {verdict.message}")
        try:
            about: Any = read_json(
                files[name.removesuffix("cubin") + "json"], most_bytes=_MOST_BYTES
            )
            arch, shared = int(about["target"]["arch"]), int(about["shared"])
        except (KeyError, TypeError, ValueError, JsonInvalid) as error:
            return EntryFault(f"{name}: its description cannot be read ({error})")
        if arch != int(card.arch.removeprefix("sm_")):
            return EntryFault(f"{name}: was compiled for sm_{arch}")
        if shared > card.shared_bytes:
            needs = f"needs {shared} bytes of shared memory, the card has {card.shared_bytes}"
            return EntryFault(needs, is_size=True)
    has_code = cubins or any(name.endswith(".so") for name in files)
    return EntryFault() if has_code else EntryFault("has no machine code")


def pack_entries(
    target: WarmTarget,
    answered: Sequence[tuple[KernelCase, WarmAnswer]],
    python: dict[str, bytes],
    modules: tuple[WarmModules | None, dict[str, bytes]] = (None, {}),
) -> tuple[WarmIndex, dict[str, bytes]]:
    """Puts the entries of all cases together: the index, and the layer's files by their path.

    `python` are files that the layer gets besides, compiled from the image's own, and `modules`
    those of FlashInfer with what the index says of them.
    """
    plan, files = target.plan, {**python, **modules[1]}
    served, faults = defaultdict[str, set[str]](set), dict[str, EntryFault]()
    made_for = defaultdict[str, set[str]](set)
    about: dict[str, dict[str, Any]] = {}
    missing: list[LackingKernel] = []
    for case, answer in answered:
        # an autotuner passes over what does not compile: one configuration of a group is enough
        tuned = {record.group for record in answer.records if record.group and not record.error}
        reached = dict.fromkeys((record.kernel for record in answer.records), "")
        for record in answer.records:
            if record.error and record.group not in tuned:
                reached[record.kernel] = reached[record.kernel] or record.error
        failed = {kernel for kernel, why in reached.items() if why}
        unpacked, damaged = dict[str, dict[str, bytes]](), set[str]()
        for entry in answer.entries:
            try:
                data = {
                    name: unpacked_whole(base64.b85decode(text), _MOST_BYTES)
                    for name, text in entry.files.items()
                }
            except ValueError as error:
                message = f"{case.name}: an entry of {entry.kernel} cannot be unpacked ({error})"
                raise StepFailed(message) from error
            if not _KEY.fullmatch(entry.key) or not all(map(_FILE.fullmatch, data)):
                raise StepFailed(f"{case.name}: {entry.key!r} is no entry of Triton's cache")
            unpacked[entry.key] = data
            digests = {n: hashlib.sha256(each).hexdigest() for n, each in sorted(data.items())}
            known = about.setdefault(
                entry.key, {"kernel": entry.kernel, "module": entry.module, "files": digests}
            )
            if known["files"] != digests:
                # two workers compiled it, each for its own case
                raise NotReproducible(
                    f"{entry.kernel} ({entry.key}): compiled for {case.name} it has other bytes"
                    f" than for {min(made_for[entry.key])}",
                    "A compiler that is not the same twice gives no layer; report it.",
                )
            made_for[entry.key].add(case.name)
            if entry.key not in faults:
                faults[entry.key] = entry_fault(data, target.card)
        with_entry = {each.kernel for each in answer.entries if not faults[each.key].message}
        for entry in answer.entries:
            message, is_size = faults[entry.key]
            # a tuner that does not find what is too large compiles it, to drop it by its size
            if message and not (is_size and entry.kernel in with_entry):
                reached[entry.kernel] = reached.get(entry.kernel) or message
                if not is_size:
                    damaged.add(entry.kernel)
                continue
            served[entry.key].add(case.name)
            files |= {
                f"{FOLDER}/triton/{entry.key}/{n}": data for n, data in unpacked[entry.key].items()
            }
        # those that the case must reach, and what else its call failed with
        for kernel in sorted({*case.kernels} | {k for k, why in reached.items() if why}):
            if kernel not in with_entry or kernel in damaged | failed:
                why = reached.get(kernel) or answer.message or "the case does not reach it"
                missing.append(LackingKernel(case=case.name, kernel=kernel, reason=why[:400]))
    by_case = {
        case.name: {
            recipe
            for recipe, patterns in plan.spec.recipes.items()
            if any(fnmatchcase(case.name, pattern) for pattern in patterns)
        }
        for case, _ in answered
    }
    index = WarmIndex(
        image=plan.base.spec.name,
        card=target.card.arch,
        triton=target.environment.facts.triton,
        site=target.site,
        entries={
            key: IndexedEntry(
                **about[key],
                cases=sorted(served[key]),
                recipes=sorted({r for case in served[key] for r in by_case[case]}),
                too_large=faults[key].message,
            )
            for key in sorted(served)
        },
        missing=sorted(missing, key=lambda each: (each.case, each.kernel)),
        modules=modules[0],
        python_files=len(python),
    )
    files[INDEX] = canonical_json(index.model_dump(mode="json")) + b"\n"
    files[f"{plan.base.venv.site}/{WARM_READER.name}"] = WARM_READER.read_bytes()
    return index, files


def write_warm(store: Store, plan: WarmPlan, files: dict[str, bytes]) -> LayerRecord:
    """Writes the layer, and keeps it under the plan's key."""
    owner = plan.image
    entries = [Entry(path, Kind.FILE, 0o644, data, owner=owner) for path, data in files.items()]
    with store.new_blob() as blob:
        with os_errors_explained(blob.path), blob.path.open("wb") as out:
            written = write_layer(with_parents(entries), out)
        blob.keep(written.record.digest)
    return store.keep_layer(plan.key, written)


def read_warm(store: Store, plan: WarmPlan) -> WarmIndex | None:
    """The index of the layer that the store has for a plan, if it has one."""
    layer = store.layer(plan.key)
    if layer is None:
        return None
    row = next((row for row in store.find_rows(layer, INDEX) if row.path == INDEX), None)
    try:
        if row is None:
            raise ValueError("it has no index")
        data = read_layer_file(store.blob_path(layer.digest), row)
        return WarmIndex.model_validate_json(data)
    except ValueError as error:
        raise StoreDamaged(f"{plan.title}: {layer.digest} cannot be read ({error})") from error
