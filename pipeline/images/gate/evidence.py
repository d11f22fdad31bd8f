"""The results of an image's gates, kept with it: `images/<name>/<platform>/gates.json`.

The same findings give the same bytes, wherever and whenever they were made, so the file holds no
times. A failure is kept like a success.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pipeline.artifacts.store.store import Store
from pipeline.core import errors, log
from pipeline.core.files import write_bytes
from pipeline.core.model import FILE_VERSION, Digest, Frozen
from pipeline.core.verdict import GateVerdict, worst
from pipeline.images.gate.runs import read_beside
from pipeline.images.gate.smem.limits import Card

GateKind = Literal["smem", "numerics", "patches", "parsers", "templates", "arch"]
# The order in which they are run, and in which files list them.
_ORDER = ("smem", "numerics", "patches", "parsers", "templates", "arch")
# The error that a command ends with, and how its message counts the rows that did not pass.
_FAILED: dict[GateKind, tuple[type[errors.PipelineError], str, str]] = {
    "smem": (errors.GateFailed, "case fails", "cases fail"),
    "numerics": (errors.GateWrong, "case computes wrong numbers", "cases compute wrong numbers"),
    "patches": (errors.PatchUnproved, "patch fails", "patches fail"),
    "parsers": (errors.ParserWrong, "answer is lost or changed", "answers are lost or changed"),
    "templates": (
        *(errors.TemplateWrong, "conversation is rendered otherwise"),
        "conversations are rendered otherwise",
    ),
    "arch": (errors.NoKernelImage, "object fails", "objects fail"),
}
_UNKNOWN = (errors.GateUnknown, "result is unknown", "results are unknown")


class EvidenceRow(Frozen):
    """One thing that was judged: a case, a patch, an object."""

    name: str
    verdict: GateVerdict
    message: str = ""
    facts: dict[str, Any] = {}


class Evidence(Frozen):
    """One gate's result: what it was asked about, what decided it, what came out."""

    gate: GateKind
    arch: str
    verdict: GateVerdict
    message: str = ""
    inputs: dict[str, Digest]  # beyond the image itself: case files, patches, wheels
    made_by: dict[str, str]  # versions, and digests of the judging code
    card: Card | None = None
    summary: dict[str, Any] = {}
    rows: list[EvidenceRow] = []


class ImageGates(Frozen):
    """All results of one image."""

    format: Annotated[Literal[2], FILE_VERSION] = 2
    image: str
    platform: str
    image_digest: Digest
    results: list[Evidence]

    @property
    def verdict(self) -> GateVerdict:
        return worst([result.verdict for result in self.results], "unknown")


def gate_error(image: str, result: Evidence) -> errors.PipelineError | None:
    """The error that a command with this result ends with; none where it may go on."""
    if result.verdict in ("passed", "accepted"):
        return None
    kind, one, many = _UNKNOWN if result.verdict == "unknown" else _FAILED[result.gate]
    bad = [row for row in result.rows if row.verdict == result.verdict]
    if not bad:
        why = result.message or "nothing was judged"
        return kind(f"{image}, gate {result.gate} on {result.arch}: {why}")
    first = f"{bad[0].name}: {bad[0].message}" + (" …" if len(bad) > 1 else "")
    # parsers and templates are the same for every card
    where = "" if result.gate in ("parsers", "templates") else f" on {result.arch}"
    return kind(f"{image}: {log.count(len(bad), one, many)}{where}: {first}")


def evidence_path(store: Store, image: str, platform: str) -> Path:
    """The file of an image's results."""
    return store.image_folder(image, platform) / "gates.json"


def read_evidence(store: Store, image: str, platform: str, digest: str) -> ImageGates | None:
    """Reads the results of this very image; none where the file has those of another one."""
    path = evidence_path(store, image, platform)
    again = f"Judge it again: `sm120 build {image} --gate`."
    gates = read_beside(path, ImageGates, "its gates", again)
    # results of other bytes say nothing about these
    return gates if gates and gates.image_digest == digest else None


def keep_evidence(
    store: Store, image: str, platform: str, digest: str, new: Sequence[Evidence]
) -> ImageGates:
    """Replaces older results of the same gate and card."""
    # two gates of one image may end at the same time
    with store.locked(f"gates-{image}-{platform.replace('/', '-')}"):
        before = None
        with suppress(errors.StoreDamaged):  # the new results replace what cannot be read
            before = read_evidence(store, image, platform, digest)
        results = {(e.gate, e.arch): e for e in [*(before.results if before else []), *new]}
        ordered = sorted(results.values(), key=lambda e: (_ORDER.index(e.gate), e.arch))
        gates = ImageGates(image=image, platform=platform, image_digest=digest, results=ordered)
        path = evidence_path(store, image, platform)
        write_bytes(path, (gates.model_dump_json(indent=1) + "\n").encode())
    return gates
