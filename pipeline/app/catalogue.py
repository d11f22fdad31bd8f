"""The catalogue: which release of an engine fits which card, and with which patch.

Each release is locked as an image of this checkout would be, and the kernels that have broken on
SM120 are compiled with that lock's own Triton: as published, and with the patches that help.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from pydantic import ValidationError

from pipeline import __version__
from pipeline.app.bump import (
    LockFacts,
    engine_of_image,
    findings_path,
    lock_facts,
    make_candidate,
)
from pipeline.app.gate import make_gate_context
from pipeline.app.pages import Block, write_pages
from pipeline.app.signing import Signing
from pipeline.app.statements import FileStatement, keep_statement
from pipeline.app.workspace import Workspace, pick_platform
from pipeline.artifacts.attest.envelope import SUFFIX
from pipeline.artifacts.attest.names import REPORT
from pipeline.artifacts.attest.predicates import Report
from pipeline.artifacts.attest.statement import make_statement, moment
from pipeline.core import log
from pipeline.core.errors import Interrupted, PipelineError, ResolveFailed, SpecInvalid
from pipeline.core.files import read_at_most, sha256_of_file, write_bytes
from pipeline.core.model import Frozen
from pipeline.core.verdict import GateVerdict
from pipeline.images.assemble.plan import plan_image
from pipeline.images.gate.files import has_cases
from pipeline.images.gate.patches import PARSERS, TEMPLATES, PatchVerdict, judge_patches
from pipeline.images.gate.smem.engine import locked_wheel
from pipeline.images.gate.smem.image_gate import open_gate
from pipeline.images.gate.smem.limits import card_for
from pipeline.images.gate.smem.results import overall_of_cases
from pipeline.images.spec.image import PatchSeries, PatchSpec

CARDS = ("sm_120", "sm_121")
_NAMES = {"sm_120": "RTX PRO 6000 Blackwell, RTX 5090", "sm_121": "DGX Spark (GB10)"}
_MOST_BYTES = 64 << 20
_DAYS = 366  # twelve months
Fit = Literal["fits", "fits with patches", "fits in part", "does not fit", "unknown"]


@dataclass(frozen=True)
class CatalogueRequest:
    """Which releases to judge, and where the page goes."""

    engines: tuple[str, ...] = ()  # requirements such as vllm>=0.27; none: every engine
    output: Path = Path("catalogue")  # without its ending
    most: int = 24  # newest releases of each engine
    fresh: bool = False
    mirrors: tuple[str, ...] = ()
    offline: bool = False


class CardFit(Frozen):
    """How the judged kernels of a release fit one card."""

    arch: str
    limit_bytes: int
    published: GateVerdict
    published_bytes: dict[str, int]  # case file → the most that a kernel of it needs
    patched: GateVerdict  # with those of the patches that are needed
    patched_bytes: dict[str, int]
    patches: list[PatchVerdict]
    bad: list[str] = []  # what does not fit, or is not known, also with the patches

    @property
    def over(self) -> dict[str, int]:
        """Case files with kernels over the limit even when patched, and what they need."""
        return {f: n for f, n in self.patched_bytes.items() if n > self.limit_bytes}

    @property
    def fit(self) -> Fit:
        """The answer for this card; unknown never fits."""
        if self.patched == "failed":
            return "does not fit"
        if self.patched == "unknown":
            return "unknown"
        # the case files of an image may accept a kernel that its models do not need
        if self.over:
            return "fits in part"
        return "fits" if self.published in ("passed", "accepted") else "fits with patches"

    @property
    def answer(self) -> str:
        """The answer in words: whether it fits, and with which patch."""
        needed = [verdict.patch for verdict in self.patches if verdict.state == "needed"]
        with_them = f" with {', '.join(needed)}" if needed else ""
        if self.fit in ("does not fit", "unknown"):
            return f"{self.fit}{with_them}: {self.bad[0] if self.bad else 'no reason is known'}"
        if self.fit == "fits in part":
            over = ", ".join(f"{file} ({size} bytes)" for file, size in self.over.items())
            return f"fits in part{with_them}: not {over}"
        return f"fits{with_them}"


class EngineRelease(Frozen):
    """One release of an engine: its lock, and how it fits each card."""

    engine: str
    version: str
    image: str = ""  # whose spec it was locked with
    error: str = ""  # why it could not be locked or judged
    facts: LockFacts | None = None
    case_files: dict[str, int] = {}  # judged case files, and how many cases each has
    cards: list[CardFit] = []
    seconds: float = 0.0


class EngineCatalogue(Frozen):
    """All releases that were judged, newest first."""

    format: Literal[1] = 1
    made: str
    tool: str
    releases: list[EngineRelease]

    @property
    def blocks(self) -> list[Block]:
        """The page: the answer for each card first, then what it rests on."""
        judged = [each for each in self.releases if each.cards]
        head = ["engine", "release", *(f"{arch}: {_NAMES[arch]}" for arch in CARDS)]
        head += ["torch", "Triton", "CUDA", "download"]
        rows = []
        for each in judged:
            fits = {card.arch: card.answer for card in each.cards}
            facts = each.facts
            about = (
                [facts.torch, facts.triton, facts.cuda, log.size(facts.size_bytes)] if facts else []
            )
            rows.append([each.engine, each.version, *(fits.get(a, "–") for a in CARDS), *about])
        files = sorted({(r.engine, file, n) for r in judged for file, n in r.case_files.items()})
        named = ", ".join(
            f"{file} of {engine} ({log.count(n, 'case')})" for engine, file, n in files
        )
        lines = [
            "Judged is whether kernels fit a card's shared memory, compiled without a GPU by the"
            " Triton that the release is locked with.",
            f"Of each engine these cases, whose kernels have broken on SM120 before: {named}."
            " Kernels beyond them were not judged here; `sm120 bump` judges all.",
            "`fits` is without any patch of this project. A patch is named where the cases fail"
            " without it and fit with it, with the right numbers where they are compared.",
            "`fits in part`: some kernels of these cases are over the limit, and the image whose"
            " spec and cases the release is judged with accepts that, with a reason in its cases.",
            "Locks and wheels are those for linux/amd64, also where the kernels are for sm_121.",
            "Not judged here: parsers, templates, machine code, speed and start.",
        ]
        found = [Block("Which release fits my card?", lines, head, rows)]
        head = ["release", "card", "cases", "as published", "with patches", "limit"]
        rows = [
            [
                *(f"{each.engine} {each.version}", card.arch, file),
                *(
                    f"{sizes[file]} bytes" if file in sizes else "unknown"
                    for sizes in (card.published_bytes, card.patched_bytes)
                ),
                f"{card.limit_bytes} bytes",
            ]
            for each in judged
            for card in each.cards
            for file in each.case_files
        ]
        found.append(Block("Shared memory, the most that a kernel needs", (), head, rows))
        head = ["release", "card", "patch", "verdict", "why"]
        rows = [
            [f"{each.engine} {each.version}", card.arch, v.patch, v.state, v.message]
            for each in judged
            for card in each.cards
            for v in card.patches
        ]
        found.append(Block("Patches", (), head, rows))
        rows = [[r.engine, r.version, r.error] for r in self.releases if r.error]
        if rows:
            lines = ["As the index of the machine that made this page had it."]
            head = ["engine", "release", "why"]
            found.append(Block("Releases that could not be locked or judged", lines, head, rows))
        return found


def make_catalogue(
    workspace: Workspace, request: CatalogueRequest
) -> tuple[EngineCatalogue, list[FileStatement]]:
    """Judge the releases that are not judged yet, and write the page; keep its older rows."""
    checkout, store = workspace.checkout(), workspace.store()
    images: dict[str, list[str]] = {}
    for name in checkout.images():
        # an image with an extra has the same engine as the one that it links to
        if has_cases(checkout, name) and not (checkout.folder(name) / "gates").is_symlink():
            images.setdefault(engine_of_image(checkout, name), []).append(name)
    asked: dict[str, Requirement] = {}
    for text in request.engines or tuple(images):
        try:
            wanted = Requirement(text)
        except InvalidRequirement as error:
            hint = "Write an engine, or ENGINE>=VERSION."
            raise SpecInvalid(f"--engine {text}: is not a requirement", hint) from error
        asked[str(canonicalize_name(wanted.name))] = wanted
    if unknown := [engine for engine in asked if engine not in images]:
        hint = f"There are: {', '.join(images)}."
        raise SpecInvalid(f"--engine {unknown[0]}: no image of this checkout has it", hint)
    data = request.output.with_name(f"{request.output.name}.json")
    known: dict[tuple[str, str], EngineRelease] = {}
    with suppress(FileNotFoundError, ValidationError):
        before = EngineCatalogue.model_validate_json(read_at_most(data, _MOST_BYTES) or b"")
        known = {(each.engine, each.version): each for each in before.releases}
    since = datetime.now(UTC) - timedelta(days=_DAYS)
    made, tool = f"{datetime.now(UTC):%Y-%m-%d}", f"sm120-pipeline {__version__}"
    with store.in_use():
        finder = make_gate_context(workspace, request.mirrors, request.offline).make_finder()
        for engine, wanted in asked.items():
            every = finder.versions(engine, since=since)
            released = [v for v in every if wanted.specifier.contains(v, prereleases=False)]
            for version in sorted(released, reverse=True)[: request.most]:
                with ExitStack() as held, log.step(f"Judging {engine} {version}"):
                    for name in images[engine]:
                        # `sm120 bump` may be judging the same one
                        held.enter_context(store.locked(f"bump-{name}-at-{version}"))
                    found = _judge_release(workspace, request, images[engine], str(version), every)
                known[engine, str(version)] = found
                # after each: a run that is stopped loses one release at most
                releases = sorted(
                    known.values(), key=lambda r: (r.engine, Version(r.version)), reverse=True
                )
                body = EngineCatalogue(made=made, tool=tool, releases=releases)
                write_bytes(data, (body.model_dump_json(indent=1) + "\n").encode())
    if not known:
        raise SpecInvalid("no release of an engine fits --engine", "Name a range that has some.")
    catalogue = EngineCatalogue.model_validate_json(read_at_most(data, _MOST_BYTES) or b"")
    title = "Which engine release fits which SM120 card"
    digest = sha256_of_file(data)
    about = f"Made {catalogue.made} by {catalogue.tool}. Data: {data.name}, {digest}."
    pages = write_pages(request.output, title, about, catalogue.blocks)
    claim = Report(title=title, runs=[], data=digest).model_dump(mode="json", exclude_unset=True)
    stated = []
    for path in (data, *pages):
        statement = make_statement(path.name, sha256_of_file(path), REPORT, claim, moment())
        stated.append(keep_statement(path.with_name(f"{path.name}{SUFFIX}"), statement, Signing()))
    return catalogue, stated


def _judge_release(
    workspace: Workspace,
    request: CatalogueRequest,
    images: Sequence[str],
    version: str,
    every: Sequence[Version],
) -> EngineRelease:
    """Lock a release with the spec of the nearest image that takes it, and judge its kernels."""
    start, checkout = time.monotonic(), workspace.checkout()
    engine = engine_of_image(checkout, images[0])
    found = EngineRelease(engine=engine, version=version)

    # how many releases lie between it and what each image is locked to
    apart: dict[str, int] = {}
    for name in images:
        platform = pick_platform(checkout.spec(name), None)
        locked = Version(locked_wheel(plan_image(checkout, name, platform), engine).version)
        places = [sum(each < x for each in every) for x in (locked, Version(version))]
        apart[name] = abs(places[0] - places[1])
    kernel_patches: dict[str, list[PatchSpec]] = {
        name: [
            spec
            for spec in checkout.series(checkout.spec(name)).patches
            if spec.gate and not spec.gate.startswith((PARSERS, TEMPLATES))
        ]
        for name in images
    }
    candidate, error, image = None, "", ""
    for name in sorted(images, key=lambda name: apart[name]):
        platform = pick_platform(checkout.spec(name), None)
        try:
            candidate = make_candidate(
                workspace, name, version, [platform], fresh=request.fresh, offline=request.offline
            )
            image = name
            break
        except ResolveFailed as failure:
            # of the nearest, whose spec is most like what this release needs
            error = error or f"it cannot be locked: {failure}"
    if candidate is None:
        return found.model_copy(update={"error": error})
    copy, own = candidate.workspace.checkout(), candidate.image
    saved_path = findings_path(
        workspace, ["catalogue", CARDS, version, candidate.locks[platform].seal]
    )
    with suppress(FileNotFoundError, ValidationError):
        if not request.fresh:
            return EngineRelease.model_validate_json(saved_path.read_bytes())
    folder = copy.folder(own) / "patches"
    specs: list[PatchSpec] = []
    for name, patches in kernel_patches.items():
        for spec in patches:
            # those of other images with this engine may help, too: under a name of their own
            file = spec.file if name == image else f"{name}-{spec.file}"
            source = checkout.folder(name) / Path(checkout.spec(name).patches or "").parent
            write_bytes(folder / file, (source / spec.file).read_bytes())
            specs.append(spec.model_copy(update={"file": file}))
    context = make_gate_context(candidate.workspace, request.mirrors, request.offline)
    cards: list[CardFit] = []
    counts: dict[str, int] = {}
    try:
        gate = open_gate(context, plan_image(copy, own, platform))
        names = sorted({spec.gate for spec in specs if spec.gate in gate.gates.gates})
        cases = [case for name in names for case in gate.gates.cases(only=name)]
        counts = {name: sum(case.gate == name for case in cases) for name in names}
        series = [spec for spec in specs if spec.gate in names]
        gate = replace(gate, series=PatchSeries(patches=series))
        for arch in CARDS:
            card = card_for(arch)
            published = gate.judge(gate.tree, card, cases)
            verdicts = judge_patches(gate, card)
            needed = {verdict.patch for verdict in verdicts if verdict.state == "needed"}
            kept_series = PatchSeries(patches=[spec for spec in series if spec.file in needed])
            patched = gate.judge(gate.patched(kept_series), card, cases) if needed else published
            sizes: list[dict[str, int]] = []
            for results in (published, patched):
                most: dict[str, int] = {}
                for case, result in zip(cases, results, strict=True):
                    if result.worst is not None:
                        size = result.worst.record.shared_bytes or 0
                        most[case.gate] = max(most.get(case.gate, 0), size)
                sizes.append(most)
            bad = [r for r in patched if r.verdict in ("failed", "unknown")]
            bad.sort(key=lambda result: result.verdict)
            cards.append(
                CardFit(
                    arch=arch,
                    limit_bytes=card.shared_bytes,
                    published=overall_of_cases(published),
                    published_bytes=sizes[0],
                    patched=overall_of_cases(patched),
                    patched_bytes=sizes[1],
                    patches=verdicts,
                    bad=[f"{result.name}: {result.message}" for result in bad[:4]],
                )
            )
    except Interrupted:
        raise
    except PipelineError as failure:
        return found.model_copy(update={"image": image, "error": str(failure)})
    found = found.model_copy(
        update={
            "image": image,
            "facts": lock_facts(copy, own, platform, engine),
            "case_files": counts,
            "cards": cards,
            "seconds": round(time.monotonic() - start, 1),
        }
    )
    write_bytes(saved_path, found.model_dump_json().encode())
    return found
