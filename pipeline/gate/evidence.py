"""The results of an image's gates, kept beside it: `images/<name>/<platform>/gates.json`.

The same findings give the same bytes, wherever and whenever they were made; how long it took and
when it was lies in `gates.times.json`. A failure is kept like a success.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from pipeline.errors import (
    GateFailed,
    GateUnknown,
    GateWrong,
    NoKernelImage,
    PatchUnproved,
    PipelineError,
    StoreDamaged,
)
from pipeline.files import write_bytes
from pipeline.gate.smem.limits import Card
from pipeline.gate.smem.results import CaseVerdict, worst
from pipeline.model import Digest, Frozen, canonical_json
from pipeline.store.store import Store, read_own

GateKind = Literal["smem", "numerics", "patches", "arch"]
# The order in which they are run, and in which files list them.
_ORDER = ("smem", "numerics", "patches", "arch")
_FAILURES: dict[GateKind, type[PipelineError]] = {
    "smem": GateFailed,
    "numerics": GateWrong,
    "patches": PatchUnproved,
    "arch": NoKernelImage,
}


class EvidenceRow(Frozen):
    """One thing that was judged: a case, a patch, an object."""

    name: str
    verdict: CaseVerdict
    message: str = ""
    facts: dict[str, Any] = {}


class Evidence(Frozen):
    """One gate's result: what it was asked about, what decided it, what came out."""

    gate: GateKind
    arch: str
    verdict: CaseVerdict
    message: str = ""
    inputs: dict[str, Digest]  # beyond the image itself: case files, patches, wheels
    made_by: dict[str, str]  # versions, and digests of the judging code
    card: Card | None = None
    summary: dict[str, Any] = {}
    rows: list[EvidenceRow] = []


class ImageGates(Frozen):
    """All results of one image."""

    format: Literal[2] = 2
    image: str
    platform: str
    image_digest: Digest
    results: list[Evidence]

    @property
    def verdict(self) -> CaseVerdict:
        return worst([result.verdict for result in self.results])


def error_of(image: str, result: Evidence) -> PipelineError | None:
    """The error that a command with this result ends with; none where it may go on."""
    if result.verdict in ("passed", "accepted"):
        return None
    bad = [row for row in result.rows if row.verdict == result.verdict]
    first = f"{bad[0].name}: {bad[0].message}" if bad else result.message
    more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
    kind = GateUnknown if result.verdict == "unknown" else _FAILURES[result.gate]
    return kind(f"{image}, gate {result.gate} on {result.arch}: {first}{more}")


def evidence_path(store: Store, image: str, platform: str) -> Path:
    """Where an image's results lie."""
    return store.image_folder(image, platform) / "gates.json"


def read_evidence(store: Store, image: str, platform: str, digest: str) -> ImageGates | None:
    """The results of this very image; none where there are only those of another one."""
    path = evidence_path(store, image, platform)
    try:
        gates = ImageGates.model_validate_json(read_own(path))
    except FileNotFoundError:
        return None
    except (OSError, StoreDamaged, ValidationError) as error:
        hint = f"Judge it again: `sm120 build {image} --gate`."
        raise StoreDamaged(f"{path}: the record of its gates cannot be read", hint) from error
    return gates if gates.image_digest == digest else None


def keep_evidence(
    store: Store,
    image: str,
    platform: str,
    digest: str,
    new: Sequence[tuple[Evidence, float]],
) -> ImageGates:
    """Put results, each with its seconds, in the place of older ones of the same gate and card."""
    with store.locked(f"gates-{image}-{platform.replace('/', '-')}"):
        before = None
        with suppress(StoreDamaged):  # what cannot be read is replaced
            before = read_evidence(store, image, platform, digest)
        results = {(e.gate, e.arch): e for e in (before.results if before else [])}
        results |= {(e.gate, e.arch): e for e, _ in new}
        ordered = sorted(results.values(), key=lambda e: (_ORDER.index(e.gate), e.arch))
        gates = ImageGates(image=image, platform=platform, image_digest=digest, results=ordered)
        path = evidence_path(store, image, platform)
        write_bytes(path, (gates.model_dump_json(indent=1) + "\n").encode())
        _keep_times(path.with_name("gates.times.json"), digest, new)
    return gates


class _Times(Frozen):
    """When each gate ended and how long it took."""

    image_digest: Digest
    gates: dict[str, dict[str, str | float]]


def _keep_times(path: Path, digest: str, results: Sequence[tuple[Evidence, float]]) -> None:
    try:
        before = _Times.model_validate_json(read_own(path))
    except (OSError, StoreDamaged, ValidationError):
        before = _Times(image_digest=digest, gates={})
    known = before.gates if before.image_digest == digest else {}
    ended = datetime.now(UTC).isoformat(timespec="seconds")
    new: dict[str, dict[str, str | float]] = {
        f"{e.gate} {e.arch}": {"ended": ended, "seconds": round(seconds, 3)}
        for e, seconds in results
    }
    times = _Times(image_digest=digest, gates={**known, **new})
    write_bytes(path, canonical_json(times.model_dump()) + b"\n")
