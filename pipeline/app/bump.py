"""Judge other versions of an image's engine before a person decides: locks, patches, gates, start.

A candidate is a copy of the checkout in the store (`bumps/IMAGE-at-VERSION`) in which one pin is
another one. Everything that judges an image judges the candidate as well, under a name of its own,
so that neither the checkout nor the image that was built from it changes.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from pydantic import ValidationError

from pipeline import __version__
from pipeline.app.build import BuildRequest, build_images
from pipeline.app.gate import (
    GateRequest,
    judge_all_patches,
    make_gate_context,
    prove_starts,
    run_gates,
)
from pipeline.app.on_slurm import SlurmOrder
from pipeline.app.pages import Block, write_pages
from pipeline.app.specs import lock_images
from pipeline.app.workspace import Workspace, pick_platform, platforms_of
from pipeline.core import errors, log
from pipeline.core.files import os_errors_explained, remove_tree, write_bytes
from pipeline.core.model import Frozen, canonical_json, sha256_of
from pipeline.core.sealed import read_or_none
from pipeline.core.verdict import GateVerdict
from pipeline.evidence.statements.bill import licences_of
from pipeline.evidence.statements.inventory import package_parts
from pipeline.images.assemble.image import find_built
from pipeline.images.assemble.plan import GATE_WORKER, plan_image, program_digest
from pipeline.images.engine.parser_flags import (
    find_parser_flags,
    flags_folder,
    write_parser_flags,
)
from pipeline.images.gate.arch import reader_digest
from pipeline.images.gate.evidence import Evidence
from pipeline.images.gate.files import has_cases, read_setup
from pipeline.images.gate.patches import PatchVerdict, versions_against
from pipeline.images.gate.smem.engine import locked_wheel
from pipeline.images.gate.smem.environment import cuda_of
from pipeline.images.lock.model import (
    ImageLock,
    Move,
    diff_locks,
    read_lock,
    sealed_lock,
    write_lock,
)
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.new import copy_image
from pipeline.images.start_test.expected import engine_of

Advice = Literal["take", "take with patches", "wait", "nothing newer"]
# Part of the key of every kept result: raised when the judgement of the same findings changes.
_FORMAT = 1
_FOLDER = "bumps"
# a whole version, as `--to` may name it; anything else is a range
_NAMED = re.compile(r"\d+(\.\d+)*((a|b|rc|\.post|\.dev)\d+)?")
_LONGEST = 280  # of the first reason, in a line
_MOST_ROWS = 8  # of what failed, on a page; the commands that it names show all
# The candidate leaves out a patch in one of these states, and its gate passes without it.
GONE = ("upstreamed", "superseded", "not needed yet")
_KEPT = ("needed", "no gate")
_NOT_BUILT = "not judged: the image was not built (--no-build)"
_QUICK = "only the cases that patches name were judged (--quick)"


@dataclass(frozen=True)
class BumpRequest:
    """Which images to judge at which versions, and what to leave out or write."""

    names: tuple[str, ...] = ()
    everything: bool = False
    to: tuple[str, ...] = ()  # versions, or requirements such as vllm>=0.30; none: the newest
    platform: str | None = None
    output: Path | None = None  # the page, without its ending
    built: bool = True
    quick: bool = False  # of the gates only the cases that patches name
    fresh: bool = False
    write: bool = False
    mirrors: tuple[str, ...] = ()
    offline: bool = False


class LockFacts(Frozen):
    """What a lock means for a machine: how much it fetches, and what it runs on."""

    version: str
    wheels: int
    size_bytes: int
    cuda: str  # empty: nothing in it is for a GPU
    torch: str
    triton: str


class LicenceMove(Frozen):
    """A package whose licence is new, or another one than before."""

    name: str
    before: str | None  # none where it was not there
    after: str


class JudgedGate(Frozen):
    """One gate's verdict on a candidate, with what did not pass."""

    gate: str
    arch: str
    verdict: GateVerdict
    counts: dict[str, int] = {}
    bad: list[str] = []  # the first of them, each with its reason

    @property
    def sentence(self) -> str:
        """Its verdict, with the first thing that did not pass."""
        where = f" on {self.arch}" if self.arch else ""
        counts = ", ".join(f"{n} {kind}" for kind, n in self.counts.items())
        first = f": {self.bad[0]}" if self.bad else ""
        return f"{self.gate}{where}: {self.verdict}{f' ({counts})' if counts else ''}{first}"

    @classmethod
    def of(cls, result: Evidence) -> JudgedGate:
        """Reduce a gate's evidence to the numbers and names that a page shows."""
        bad = [row for row in result.rows if row.verdict == result.verdict]
        passed = result.verdict in ("passed", "accepted")
        # what a kernel needs says nothing without what the card has
        is_over = result.gate == "smem" and result.card and result.verdict == "failed"
        has = f" of {result.card.shared_bytes}" if is_over and result.card else ""
        reasons = [f"{row.name}: {row.message}{has}" for row in bad[:_MOST_ROWS]]
        return cls(
            gate=result.gate,
            # parsers and templates are the same for every card
            arch="" if result.gate in ("parsers", "templates") else result.arch,
            verdict=result.verdict,
            counts=dict(Counter[str](row.verdict for row in result.rows)),
            bad=[] if passed else reasons or [result.message],
        )


Found = TypeVar("Found")


class Bump(Frozen):
    """An image at another version of its engine: what changes, what was judged, what follows."""

    image: str
    platform: str
    engine: str
    locked: str
    version: str
    error: str = ""  # why there is no lock
    before: LockFacts | None = None
    after: LockFacts | None = None
    moves: list[Move] = []
    licences: list[LicenceMove] | None = None  # none where there is no build to read them from
    patches: list[PatchVerdict] = []
    gates: list[JudgedGate] = []
    seconds: float = 0.0
    is_kept: bool = False  # an earlier run judged it

    @property
    def failures(self) -> list[str]:
        """What was judged and is not good."""
        lost = self.before and self.before.cuda and self.after and not self.after.cuda
        bad = [v for v in self.patches if v.state not in (*_KEPT, *GONE, "unknown")]
        return [
            *([self.error] if self.error else []),
            *(["it lost its CUDA build: no CUDA runtime is locked any more"] if lost else []),
            *(gate.sentence for gate in self.gates if gate.verdict == "failed"),
            *(f"{v.patch} is {v.state}: {v.message.removeprefix(f'{v.patch}: ')}" for v in bad),
        ]

    @property
    def reasons(self) -> list[str]:
        """What speaks against it, failures first; unknown never passes."""
        unknown = [gate.sentence for gate in self.gates if gate.verdict == "unknown"]
        unproved = [v for v in self.patches if v.state == "unknown"]
        patches = [f"{v.patch} is unknown: {v.message}" for v in unproved]
        return [*self.failures, *unknown, *patches]

    @property
    def advice(self) -> Advice:
        """What to do: wait if anything failed or is unknown."""
        if self.version == self.locked:
            return "nothing newer"
        if self.reasons:
            return "wait"
        has_patches = any(verdict.state in _KEPT for verdict in self.patches)
        return "take with patches" if has_patches else "take"

    @property
    def why(self) -> str:
        """What the advice rests on, in a line."""
        if self.advice == "wait":
            more = len(self.reasons) - 1
            others = f" And {log.count(more, 'reason')} more." if more else ""
            first = self.reasons[0].rstrip(".")
            # lines of an engine's code, and a resolver's full message, follow further below
            first = f"{first[:_LONGEST]}…" if len(first) > _LONGEST else f"{first}."
            return f"{first}{others}"
        needed = [verdict.patch for verdict in self.patches if verdict.state in _KEPT]
        gone = [verdict.patch for verdict in self.patches if verdict.state in GONE]
        with_them = f"With {', '.join(needed)}. " if needed else ""
        without = f"Leave out {', '.join(gone)}: no longer needed." if gone else ""
        return f"{with_them}{without}".strip()

    @property
    def sentence(self) -> str:
        """The recommendation, as a person would say it."""
        if self.advice == "nothing newer":
            return f"{self.image}: {self.engine} {self.locked} is the newest that the index has."
        what = f"{self.image} with {self.engine} {self.version} (now {self.locked})"
        if self.advice == "wait":
            return f"{what}: wait. {self.why[:1].upper()}{self.why[1:]}"
        return f"{what}: take it. {self.why}".strip()

    @property
    def as_json(self) -> dict[str, Any]:
        """The findings and the advice, for programs."""
        more = {"advice": self.advice, "reasons": self.reasons, "sentence": self.sentence}
        return {**self.model_dump(mode="json"), **more}

    @property
    def blocks(self) -> list[Block]:
        """Its part of the page: the recommendation first, then what it rests on."""
        title = f"{self.image}: {self.engine} {self.version}"
        if self.advice == "nothing newer":
            return [Block(title, [self.sentence])]
        against = [f"Against it: {reason}" for reason in self.reasons]
        found = [
            Block(title, [f"Advice: {self.advice}.", *against] if against else [self.sentence])
        ]
        if self.before and self.after:
            sides = (self.before, self.after)
            rows: list[list[object]] = [["size", *(log.size(side.size_bytes) for side in sides)]]
            for name in ("wheels", "cuda", "torch", "triton"):
                rows.append([name, *(getattr(side, name) or "none" for side in sides)])
            kinds = {"added": 0, "removed": 0, "moved": 0}
            for move in self.moves:
                kind = "moved" if move.before and move.after else "added"
                kinds["removed" if not move.after else kind] += 1
            counts = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
            head = ["", f"now ({self.locked})", f"then ({self.version})"]
            lines = [f"Packages: {counts}."]
            found.append(Block("What the lock holds", lines, head, rows, 3))
            moved = [
                [m.platform, m.kind, m.name, m.before or "–", m.after or "–"] for m in self.moves
            ]
            head = ["platform", "kind", "package", "now", "then"]
            found.append(Block("Packages that move", (), head, moved, 3))
            licences = [[x.name, x.before or "new", x.after] for x in self.licences or []]
            note = "Not compared: licences are read from a built image."
            note = note if self.licences is None else "No other licence." if not licences else ""
            head = ["package", "now", "then"]
            found.append(Block("Licences", [note] if note else [], head, licences, 3))
        verdicts = [[v.patch, v.gate or "–", v.state, v.message] for v in self.patches]
        head = ["patch", "gate", "verdict", "why"]
        found.append(Block("Patches", [] if verdicts else ["None."], head, verdicts, 3))
        judged = [
            [
                *(gate.gate, gate.arch or "–", gate.verdict),
                ", ".join(f"{n} {kind}" for kind, n in gate.counts.items()) or "–",
                "; ".join(gate.bad[:_MOST_ROWS]) or "–",
            ]
            for gate in self.gates
        ]
        head = ["gate", "card", "verdict", "cases", "what did not pass"]
        found.append(Block("Gates and start", [] if judged else ["None ran."], head, judged, 3))
        return found


@dataclass(frozen=True)
class Candidate:
    """A checkout of its own in which an image has another version of its engine."""

    workspace: Workspace
    image: str  # its name there
    engine: str
    locks: dict[str, ImageLock]  # by platform


def engine_of_image(checkout: Checkout, name: str) -> str:
    """The package whose version is an image's version; empty where it has none of its own."""
    spec = checkout.spec(name)
    if has_cases(checkout, name):
        return read_setup(checkout, name).package
    wanted = spec.python.requirements if spec.python and not spec.compiled else []
    # of several none is the engine; a toolchain's pins stand there for reasons of their own
    return str(canonicalize_name(Requirement(wanted[0]).name)) if len(wanted) == 1 else ""


def make_candidate(
    workspace: Workspace,
    name: str,
    version: str,
    platforms: Sequence[str],
    *,
    fresh: bool = False,
    offline: bool = False,
) -> Candidate:
    """Copy the checkout, change one pin in the copy, and lock it; the same pin is locked once."""
    checkout, store = workspace.checkout(), workspace.store()
    engine, image = engine_of_image(checkout, name), f"{name}-at-{version}"
    folder = store.root / _FOLDER / image
    remove_tree(folder)
    with os_errors_explained(folder):
        for part in ("images", "lockfiles"):
            ignore = shutil.ignore_patterns("__pycache__", "weights")
            shutil.copytree(checkout.root / part, folder / part, symlinks=True, ignore=ignore)
    copy = Checkout(folder)
    path = copy.folder(name) / "image.yaml"
    text = path.read_text(encoding="utf-8")
    pin = re.compile(rf"((?<![\w-]){re.escape(engine)}(?:\[[^\]]*\])?==)[\w.+!]+", re.I)
    if not pin.search(text):
        raise errors.SpecInvalid(
            f"{name}: its spec does not pin {engine} with ==",
            f"`sm120 image lock {name} --dry-run` shows what a newer lock would have.",
        )
    old = locked_wheel(plan_image(checkout, name, platforms[0]), engine).version
    lines = [
        # a summary that names the version says what the image is
        line.replace(old, version) if re.match(r"\s*summary:", line) else line
        for line in pin.sub(rf"\g<1>{version}", text).splitlines(keepends=True)
    ]
    write_bytes(path, "".join(lines).encode())
    copy_image(copy, image, name)
    with suppress(errors.RecipeInvalid):
        parser = engine_of(plan_image(checkout, name, platforms[0]))
        # the start test asks whether the parser still knows the flags that recipes use
        if parser:
            flags = find_parser_flags(flags_folder(copy), parser.engine, name)
            write_parser_flags(flags_folder(copy), flags.model_copy(update={"image": image}))
    own = Workspace(folder, store.root)
    locks: dict[str, ImageLock] = {}
    for platform in platforms:
        spec = copy.spec(image).on(platform)
        base = read_lock(copy.lock_path(spec.parent, platform)).seal if spec.parent else ""
        # what decides a lock; who asks again the next day gets the one that was judged
        key = sha256_of(canonical_json([image, platform, spec.lock_digest(), base]))
        lock_path = store.root / _FOLDER / "locks" / f"{key.removeprefix('sha256:')}.yaml"
        if offline and not lock_path.is_file():
            raise errors.OfflineMiss(
                f"{name} with {engine} {version}: the store keeps no lock of it for {platform}",
                "Only an index says what it needs: run it once without --offline.",
            )
        if (fresh and not offline) or not lock_path.is_file():
            lock_images(own, (image,), platform)
            write_lock(lock_path, read_lock(copy.lock_path(image, platform)))
        locks[platform] = read_lock(lock_path)
        write_lock(copy.lock_path(image, platform), locks[platform])
    return Candidate(own, image, engine, locks)


def lock_facts(checkout: Checkout, name: str, platform: str, engine: str) -> LockFacts:
    """Read from an image's lock the numbers that people compare."""
    plan = plan_image(checkout, name, platform)
    versions, cuda = {pin.name: pin.version for pin in plan.lock.wheels}, ""
    with suppress(errors.GateEnvironment):  # nothing in it is for a GPU
        cuda = cuda_of(plan)
    return LockFacts(
        version=versions.get(engine, ""),
        wheels=len(plan.lock.wheels),
        size_bytes=sum(pin.size_bytes for pin in plan.lock.pins),
        cuda=cuda,
        torch=versions.get("torch", ""),
        triton=versions.get("triton", ""),
    )


def findings_path(workspace: Workspace, about: list[Any]) -> Path:
    """Return where findings are kept; specs, cases, patches and judging code decide the name."""
    root = workspace.checkout().root
    files = sorted(path for path in (root / "images").rglob("*") if path.is_file())
    read = [[str(path.relative_to(root)), sha256_of(path.read_bytes())] for path in files]
    by = [_FORMAT, __version__, program_digest(GATE_WORKER), reader_digest()]
    key = sha256_of(canonical_json([by, about, read])).removeprefix("sha256:")
    return workspace.store_root() / _FOLDER / "results" / f"{key}.json"


def keep_patches(candidate: Candidate, verdicts: Sequence[PatchVerdict], version: str) -> None:
    """Drop the patches that a candidate does not need, and the old files' hashes."""
    checkout = candidate.workspace.checkout()
    spec = checkout.spec(candidate.image)
    if spec.patches is None:
        return
    path = checkout.folder(candidate.image) / spec.patches
    text = path.read_text(encoding="utf-8")
    needed = {verdict.patch for verdict in verdicts if verdict.state in _KEPT}
    entries = dict(yaml.compose(text, Loader=yaml.SafeLoader).value)
    patches = next(value for key, value in entries.items() if key.value == "patches")
    body = yaml.safe_load(text)["patches"]
    if patches.flow_style:
        for entry in body:
            entry["applies_to"] = f"{candidate.engine}=={version}"
            entry["files"] = [{"path": file["path"]} for file in entry["files"]]
        chosen = [entry for entry in body if entry["file"] in needed]
        write_bytes(path, json.dumps({"patches": chosen}).encode())
        return
    lines = text.splitlines(keepends=True)
    starts = [node.start_mark.line for node in patches.value]
    new = lines[: starts[0]] if needed else [lines[0] if lines[0].startswith("#") else ""]
    for entry, start, end in zip(body, starts, [*starts[1:], len(lines)], strict=True):
        for line in lines[start:end] if entry["file"] in needed else ():
            # `build --accept` writes those of the new version
            if not re.match(r"\s*(before|after): sha256:", line):
                pin = f"applies_to: {candidate.engine}=={version}"
                new.append(re.sub(r"applies_to: .*", pin, line))
    write_bytes(path, "".join([*new, *([] if needed else ["patches: []\n"])]).encode())


def bump_images(
    workspace: Workspace, request: BumpRequest, slurm: SlurmOrder | None = None
) -> list[Bump]:
    """Judge images at other versions of their engines, write one page, and change nothing else.

    With `write`, the pins, locks and patches of those that may be taken are written.
    """
    checkout, store = workspace.checkout(), workspace.store()
    names = [*dict.fromkeys(request.names)]
    if request.everything:
        names = [name for name in checkout.images() if engine_of_image(checkout, name)]
    engines = {engine for name in names if (engine := engine_of_image(checkout, name))}
    asked: dict[str, list[str]] = {}
    for each in request.to:
        try:
            wanted = Requirement(each) if re.match(r"[A-Za-z]", each) else None
        except InvalidRequirement as error:
            hint = "Write a version such as 0.32.0, or ENGINE>=0.30,<0.33."
            raise errors.SpecInvalid(
                f"--to {each}: is neither a version nor a requirement", hint
            ) from error
        engine = str(canonicalize_name(wanted.name)) if wanted else ""
        if engine and engines and engine not in engines:
            named = " or ".join(sorted(engines))
            raise errors.SpecInvalid(
                f"--to {each}: is neither a version nor a requirement of {named}",
                f"Write a version such as 0.32.0, or a range such as '{min(engines)}>=0.30'.",
            )
        # `==0.30` as a range would also match 0.30.0.post1
        text = str(wanted.specifier).removeprefix("==") if wanted else each
        asked.setdefault(engine, []).append(text)
    results: list[Bump] = []
    with store.in_use():
        context = make_gate_context(workspace, request.mirrors, request.offline)
        for name in names:
            engine = engine_of_image(checkout, name)
            if not engine:
                raise errors.SpecInvalid(
                    f"{name}: no single package decides its version",
                    "Name an image of an engine; `sm120 source lock` moves compiled sources.",
                )
            platform = pick_platform(checkout.spec(name), request.platform)
            locked = locked_wheel(plan_image(checkout, name, platform), engine)
            ranges = [*asked.get(engine, []), *asked.get("", [])]
            if request.offline:
                # a named version needs no index if its lock is kept
                versions = [part.strip() for each in ranges for part in each.split(",")]
                if not asked or not all(_NAMED.fullmatch(part) for part in versions):
                    raise errors.OfflineMiss(
                        f"only an index says which versions of {engine} there are",
                        f"Name each with --to, such as --to {locked.version}, or leave"
                        " --offline out.",
                    )
            else:
                versions = [v for each in ranges for v in versions_against(context, locked, each)]
            if not asked:
                released = [
                    v for v in context.make_finder().versions(engine) if not v.is_prerelease
                ]
                versions = [str(max([*released, Version(locked.version)]))]
            for version in dict.fromkeys(versions):
                title = f"Judging {name} with {engine} {version}"
                # the folder of a candidate is made anew by whoever judges it
                with store.locked(f"bump-{name}-at-{version}"), log.step(title):
                    results.append(_judge_bump(workspace, request, name, version, platform, slurm))
    results.sort(key=lambda each: (each.image, Version(each.version)))
    target = request.output or store.root / _FOLDER / "bump"
    rows = [
        [*(each.image, each.engine, each.locked, each.version, each.advice), each.why]
        for each in results
    ]
    head = ["image", "engine", "now", "judged", "advice", "why"]
    blocks = [Block("Recommendations", head=head, rows=rows)]
    blocks += [block for bump in results for block in bump.blocks]
    files = write_pages(
        target, "Newer versions of engines", f"Made by sm120-pipeline {__version__}.", blocks
    )
    document = canonical_json([each.as_json for each in results])
    write_bytes(target.with_name(f"{target.name}.json"), document + b"\n")
    log.say(f"pages: {', '.join(map(str, files))}")
    if request.write:
        _write_taken(workspace, request, results)
    return results


def require_takeable(results: Sequence[Bump]) -> None:
    """Raise the error of the first that must wait: not passed before not judged."""
    waiting = [each for each in results if each.advice == "wait"]
    failed = [each for each in waiting if each.failures]
    if waiting:
        kind, first = (errors.BumpWaits, failed[0]) if failed else (errors.GateUnknown, waiting[0])
        more = f" (and {len(waiting) - 1} more)" if waiting[1:] else ""
        raise kind(f"{first.sentence}{more}")


def _judge_bump(
    workspace: Workspace,
    request: BumpRequest,
    name: str,
    version: str,
    platform: str,
    slurm: SlurmOrder | None,
) -> Bump:
    """Judge one image at one version: lock, patches, gates, start; or read the kept result."""
    start, checkout, store = time.monotonic(), workspace.checkout(), workspace.store()
    engine = engine_of_image(checkout, name)
    before = lock_facts(checkout, name, platform, engine)
    found = Bump(
        image=name, platform=platform, engine=engine, locked=before.version, version=version
    )
    if version == before.version:
        return found
    platforms = platforms_of(checkout.spec(name), request.platform)
    try:
        candidate = make_candidate(
            workspace, name, version, platforms, fresh=request.fresh, offline=request.offline
        )
    except errors.ResolveFailed as error:
        seconds = round(time.monotonic() - start, 1)
        return found.model_copy(
            update={"error": f"it cannot be locked: {error}", "seconds": seconds}
        )
    own, image, copy = candidate.workspace, candidate.image, candidate.workspace.checkout()
    seals = {each: lock.seal for each, lock in candidate.locks.items()}
    about = [request.built, request.quick, name, version, platform, seals, before.version]
    saved_path = findings_path(workspace, about)
    with suppress(FileNotFoundError, ValidationError):
        if not request.fresh:
            found = Bump.model_validate_json(saved_path.read_bytes())
            return found.model_copy(update={"is_kept": True})
    moves = []
    for each, lock in candidate.locks.items():
        old = read_or_none(read_lock, checkout.lock_path(name, each))
        moves += [m.model_copy(update={"image": name}) for m in diff_locks(old, lock)]
    network: dict[str, Any] = {"mirrors": request.mirrors, "offline": request.offline}
    gates: list[JudgedGate] = []
    is_whole = True

    def attempt(gate: str, judge: Callable[[], Found]) -> Found | None:
        """Run one stage; if it cannot judge, record unknown and let the next stage run."""
        nonlocal is_whole
        try:
            return judge()
        except errors.Interrupted:
            raise
        except errors.PipelineError as error:
            # a patch fits or not; any other failure may be this machine's alone, and is tried again
            is_conflict = isinstance(error, errors.PatchConflict)
            is_whole &= is_conflict
            verdict: GateVerdict = "failed" if is_conflict else "unknown"
            gates.append(JudgedGate(gate=gate, arch="", verdict=verdict, bad=[str(error)]))
        return None

    def judge_gate(*only: str) -> list[JudgedGate]:
        asked = GateRequest(image, platform, only)
        runs = run_gates(own, asked, slurm=slurm, **network).runs
        return [JudgedGate.of(run.evidence) for run in runs if asked.asks_for(run.evidence.gate)]

    def start_test() -> list[JudgedGate]:
        (run,) = prove_starts(own, [image], platform).values()
        bad = [f"{t.name}: {t.message}" for t in run.tests if t.verdict in ("failed", "unknown")]
        counts = dict(Counter[str](test.verdict for test in run.tests))
        return [JudgedGate(gate="start", arch="", verdict=run.verdict, counts=counts, bad=bad)]

    spec = checkout.spec(name)
    judge = partial(judge_all_patches, own, image, platform=platform, **network)
    done = attempt("patches", judge) if spec.patches else None
    verdicts = done.verdicts if done else []
    keep_patches(candidate, verdicts, version)
    kernels = ("smem", "numerics")
    for only in (kernels, ("parsers",), ("templates",)):
        if only[0] in spec.gates and request.quick:
            gates.append(JudgedGate(gate=only[0], arch="", verdict="unknown", bad=[_QUICK]))
        elif only[0] in spec.gates:
            gates += attempt(only[0], partial(judge_gate, *only)) or []
    licences: list[LicenceMove] | None = None
    wanted: dict[str, Callable[[], list[JudgedGate]]] = {
        "arch": partial(judge_gate, "arch"),
        "start": start_test,
    }
    left = [gate for gate in wanted if gate in (*spec.gates, "start")]
    if request.built:
        order = BuildRequest((image,), platform, accept=True, **network)
        attempt("build", partial(build_images, own, order))
        built = find_built(store, plan_image(copy, image, platform))
        for gate in left if built else ():
            gates += attempt(gate, wanted[gate]) or []
        if built:
            now = find_built(store, plan_image(checkout, name, platform))
            sides = []
            for side in (now, built):
                parts = package_parts(side) if side else []
                read = licences_of(store, parts)
                known = {part.pin.name: read[part.purl] for part in parts}
                sides.append({n: x.expression or x.name or "not stated" for n, x in known.items()})
            changed = {move.name for move in moves if move.after}
            added = {move.name for move in moves if not move.before}
            licences = [
                LicenceMove(name=each, before=sides[0].get(each), after=sides[1][each])
                for each in sorted(changed & sides[1].keys())
                # says nothing about what only moved where the old one was not built here
                if sides[0].get(each) != sides[1][each] and (each in sides[0] or each in added)
            ]
        # its layers stay until `sm120 store trim`; the candidate is no image of this store
        remove_tree(store.image_folder(image, platform).parent)
    else:
        gates += [JudgedGate(gate=g, arch="", verdict="unknown", bad=[_NOT_BUILT]) for g in left]
    found = found.model_copy(
        update={
            "before": before,
            "after": lock_facts(copy, image, platform, engine),
            "moves": moves,
            "licences": licences,
            "patches": verdicts,
            "gates": gates,
            "seconds": round(time.monotonic() - start, 1),
        }
    )
    if is_whole:
        write_bytes(saved_path, found.model_dump_json().encode())
    return found


def _write_taken(workspace: Workspace, request: BumpRequest, results: Sequence[Bump]) -> None:
    """Write what may be taken into the checkout: pin, locks and patches, for a person to commit."""
    checkout, store = workspace.checkout(), workspace.store()
    newest = {each.image: each for each in results if each.advice.startswith("take")}
    for name, bump in newest.items():
        image = f"{name}-at-{bump.version}"
        copy = Checkout(store.root / _FOLDER / image)
        spec, folder = checkout.spec(name), checkout.folder(name)
        series = folder / spec.patches if spec.patches else None
        if series and series.resolve().parent.parent != folder.resolve():
            log.say(f"{name}: its patches are those of another image, which writes them")
            series = None
        write_bytes(folder / "image.yaml", (copy.folder(name) / "image.yaml").read_bytes())
        for platform in platforms_of(spec, request.platform):
            new = read_lock(copy.lock_path(image, platform))
            body = (new.spec, new.base_lock, new.wheels, new.debs, new.base_image)
            write_lock(checkout.lock_path(name, platform), sealed_lock(name, platform, *body))
        if series and spec.patches:
            write_bytes(series, (copy.folder(image) / spec.patches).read_bytes())
            for verdict in bump.patches:
                if verdict.state in GONE:
                    (series.parent / verdict.patch).unlink(missing_ok=True)
        above = [each for each in checkout.images() if checkout.spec(each).parent == name]
        locks = f", then `sm120 image lock {' '.join(above)}`" if above else ""
        what = f"{name}: written for {bump.engine} {bump.version}"
        log.say(f"{what}; `sm120 build {name} --gate --accept` builds it{locks}")
