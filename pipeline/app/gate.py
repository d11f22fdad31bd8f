"""Judge an image without a GPU: its gates, its patches, and whether it starts."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pipeline.app.image_statements import state_gates, state_runs
from pipeline.app.images import find_image
from pipeline.app.on_slurm import NodeReply, SlurmNodes, SlurmOrder
from pipeline.app.signing import Signing
from pipeline.app.workspace import Workspace, host_platform, pick_platform
from pipeline.artifacts.containers.backend import Wanted
from pipeline.artifacts.containers.container_engine import find_backend
from pipeline.artifacts.containers.sandbox import find_sandbox, require_isolation
from pipeline.core import errors, log
from pipeline.core.files import bounded_lines, opened_log
from pipeline.core.net.http import NetClient
from pipeline.core.net.settings import read_settings
from pipeline.images.assemble.image import Built
from pipeline.images.assemble.plan import ImagePlan, plan_image
from pipeline.images.engine.parser_flags import ParserFlags, find_parser_flags, flags_folder
from pipeline.images.fetch.inputs import make_fetcher
from pipeline.images.gate import patches, tracebacks
from pipeline.images.gate.arch import ArchSpec, read_arch_spec
from pipeline.images.gate.evidence import ImageGates, gate_error, keep_evidence, read_evidence
from pipeline.images.gate.files import has_cases, read_setup
from pipeline.images.gate.numerics import numeric_cases, read_numeric_cases
from pipeline.images.gate.parsers.cases import read_parser_gates
from pipeline.images.gate.parsers.judge import ParserGate, open_parser_gate
from pipeline.images.gate.runs import ImageRun
from pipeline.images.gate.smem.cases import read_gates
from pipeline.images.gate.smem.engine import GateContext, WheelFinder, engine_pin, engine_work
from pipeline.images.gate.smem.environment import EnvironmentFacts, environment_work
from pipeline.images.gate.smem.image_gate import (
    CaseTuning,
    ImageGate,
    chosen_cases,
    find_case,
    open_gate,
)
from pipeline.images.gate.smem.image_gate import sweep_launches as sweep
from pipeline.images.gate.smem.limits import Card, card_for
from pipeline.images.gate.smem.run import kept_or_asked
from pipeline.images.gate.stage import (
    GateRun,
    run_arch,
    run_numerics,
    run_parsers,
    run_smem,
    run_templates,
)
from pipeline.images.gate.templates.judge import open_template_gate
from pipeline.images.gate.templates.sources import read_template_gates
from pipeline.images.start_test.expected import engine_of
from pipeline.images.start_test.prove import prove_start
from pipeline.images.warm.modules import module_cases, open_modules
from pipeline.images.warm.target import open_warm
from pipeline.serving.quality.texts import served_text

# Of one core, for a case that was never judged: compiled, or run by Triton's interpreter.
_SECONDS = {"smem": 6.0, "numerics": 2.5}


@dataclass(frozen=True)
class GateRequest:
    """Which gates of an image to run, on what of it, and for which card."""

    image: str
    platform: str | None = None
    only: tuple[str, ...] = ()
    case: str | None = None
    arch: str | None = None
    unpatched: bool = False
    series: str | None = None
    weights: tuple[tuple[str, Path], ...] = ()  # families of models, and where their weights are

    @property
    def is_own(self) -> bool:
        """Whether to judge the image as built, with all of its cases."""
        return not (self.case or self.unpatched or self.series)

    def wants_objects(self, gates: list[str]) -> bool:
        # chosen cases or other patches say nothing about the objects of the built image
        return "arch" in self.only if self.only else "arch" in gates and self.is_own

    def asks_for(self, gate: str) -> bool:
        """Whether a gate runs and its result is shown."""
        return not self.only or gate in self.only


@dataclass(frozen=True)
class GateResults:
    """Every gate that ran, and the error from the first that failed."""

    runs: list[GateRun]
    built: Built | None  # the image whose objects were judged
    arch_spec: ArchSpec | None
    error: errors.PipelineError | None

    def require_passed(self) -> None:
        """Raise the error, where a gate failed or could not judge."""
        if self.error:
            raise self.error


def make_gate_context(
    workspace: Workspace, mirrors: tuple[str, ...] = (), offline: bool = False
) -> GateContext:
    """Prepare what gates need; make network clients only when a gate downloads something."""
    store = workspace.store()
    return GateContext(
        workspace.checkout(),
        store,
        host_platform(),
        # made when they are first needed: most gates find everything in the store
        lambda: make_fetcher(store, mirrors, offline),
        # reading pip's settings starts a process
        lambda: WheelFinder(NetClient(read_settings(mirrors))),
    )


def chosen_card(
    gate_context: GateContext, name: str, platform: str | None, arch: str | None
) -> Card:
    """The card that --arch names, else the one that the image is for."""
    if arch is not None:
        return card_for(arch)
    spec = gate_context.checkout.spec(name)
    return card_for(spec.on(pick_platform(spec, platform)).main_arch)


def _plan_of(context: GateContext, name: str, platform: str | None) -> ImagePlan:
    checkout = context.checkout
    return plan_image(checkout, name, pick_platform(checkout.spec(name), platform))


def run_gates(
    workspace: Workspace,
    request: GateRequest,
    *,
    kernels_only: bool = False,
    mirrors: tuple[str, ...] = (),
    offline: bool = False,
    slurm: SlurmOrder | None = None,
) -> GateResults:
    """Judge whether an image runs on its card, and state the result; no GPU is needed.

    With `slurm`, nodes of a cluster answer the cases of kernels and parsers.
    """
    signing, built, arch_spec = Signing(), None, None
    runs: list[GateRun] = []
    context = make_gate_context(workspace, mirrors, offline)
    checkout, name = context.checkout, request.image
    spec = checkout.spec(name)
    # an image that names no gate gets the error that it has no cases
    judges_kernels = "smem" in spec.gates or not {"arch", "parsers"} & {*spec.gates}
    # no kernel's name has a slash, so a name with one means an answer
    judges_kernels = judges_kernels and "/" not in (request.case or "")
    judges_parsers = "parsers" in spec.gates and "/" in (request.case or "/")
    judges_templates = "templates" in spec.gates and request.case is None
    if request.only:
        judges_parsers, judges_templates = (x in request.only for x in ("parsers", "templates"))
        judges_kernels = bool({"smem", "numerics"} & {*request.only})

    def asking(gate: str) -> GateContext:
        """Return the context; with --on slurm, nodes answer its cases."""
        if slurm is None:
            return context
        words = ["gate", "answer", name, "--only", gate]
        words += ["--platform", pick_platform(spec, request.platform)]
        words += ["--arch", request.arch] if request.arch else []
        words += ["--series", request.series] if request.series else []
        words += ["--unpatched"] if request.unpatched else []
        words += ["--offline"] if offline else []
        return replace(context, ask=SlurmNodes(slurm, words, checkout.root).ask)

    with context.store.in_use():
        if judges_kernels:
            runs += _judge_kernels(asking("smem"), request, signing)
        if judges_parsers and not kernels_only:
            runs.append(_judge_chat(asking("parsers"), request, signing, is_rendering=False))
        if judges_templates and not kernels_only:
            runs.append(_judge_chat(context, request, signing, is_rendering=True))
        if request.wants_objects(spec.gates) and not kernels_only:
            try:
                built = find_image(checkout, context.store, name, request.platform)
            except errors.UnknownImage as missing:
                # kernels can be judged before the image is built, machine code cannot
                if request.only:
                    raise
                log.say(f"{missing}: its machine code was not judged")
            if built:
                promised = built.plan.spec.promised_archs
                judged = run_arch(context, built, [request.arch] if request.arch else promised)
                # a card that the image does not promise is judged for the user alone
                results = [run.evidence for run in judged if run.evidence.arch in promised]
                keep_evidence(context.store, built.name, built.platform, built.digest, results)
                state_gates(checkout, context.store, built.plan, signing)
                runs += judged
                platform = pick_platform(spec, request.platform)
                arch_spec = read_arch_spec(checkout, name, platform)
    error: errors.PipelineError | None = None
    # every gate has run by now, also after one that failed
    for each in runs:
        if request.asks_for(each.evidence.gate) and (error := gate_error(name, each.evidence)):
            if request.unpatched and checkout.series(spec).patches:
                error.hint = "The image is built with patches: leave --unpatched out to judge them."
            break
    return GateResults(runs, built, arch_spec, error)


def answer_cases(
    workspace: Workspace,
    request: GateRequest,
    keys: Sequence[str],
    *,
    mirrors: tuple[str, ...] = (),
    offline: bool = False,
) -> Iterator[NodeReply]:
    """Answer the cases of one gate that keys name, for a machine that asks over Slurm.

    A key that matches no case on this machine gets no answer.
    """
    # at once: whoever asked counts the time from here, not from the queue
    yield NodeReply(node=socket.gethostname())
    context = make_gate_context(workspace, mirrors, offline)
    plan = _plan_of(context, request.image, request.platform)
    gate: ParserGate | ImageGate
    target: Any  # of one kind or the other, as its cases are
    asked: list[tuple[Any, list[Any]]] = []
    with context.store.in_use(), ExitStack() as stack:
        if "parsers" in request.only:
            gate = open_parser_gate(context, plan, request.series)
            target = gate.target(gate.tree if request.unpatched else gate.patched())
            asked.append((target, list(gate.gates.cases)))
        elif "warm" in request.only and plan.warm:
            gate = open_gate(context, plan.warm.base)
            warm = replace(plan.warm, arch=request.arch or "")
            target = stack.enter_context(open_warm(gate, warm))
            asked.append((target, list(gate.gates.cases())))
            others = {*keys} - {target.key(case) for case in gate.gates.cases()}
            # their root takes half a minute to unpack
            if others and (modules := module_cases(warm)):
                asked.append((stack.enter_context(open_modules(gate, warm)), list(modules)))
        else:
            gate = open_gate(context, plan, request.series)
            card = chosen_card(context, request.image, request.platform, request.arch)
            target = gate.target(gate.tree if request.unpatched else gate.patched(), card)
            asked.append((target, [*gate.gates.cases(), *numeric_cases(gate)]))
        for target, cases in asked:
            yield NodeReply(about=target.digests)
            by_key = {target.key(case): case for case in cases}
            by_key = {key: by_key[key] for key in keys if key in by_key}
            answers = kept_or_asked(target, list(by_key.values()))
            for key, (_, answer, _) in zip(by_key, answers, strict=True):
                # as the store would hold it: NaN becomes null
                yield NodeReply(key=key, answer=json.loads(answer.model_dump_json()))


def _judge_kernels(context: GateContext, request: GateRequest, signing: Signing) -> list[GateRun]:
    name, unpatched, only = request.image, request.unpatched, request.case
    card = chosen_card(context, name, request.platform, request.arch)
    plan, gates = _plan_of(context, name, request.platform), read_gates(context.checkout, name)
    of_gates = {
        "smem": gates.cases(),
        "numerics": read_numeric_cases(context.checkout, name, gates),
    }
    asked = {gate: cases for gate, cases in of_gates.items() if request.asks_for(gate)}
    # numerics has cases of its own: a pattern is wrong only where neither has one
    chosen = {c.name for c in chosen_cases([c for cs in asked.values() for c in cs], only)}
    counts = {gate: sum(c.name in chosen for c in cases) for gate, cases in asked.items()}
    counts = {gate: count for gate, count in counts.items() if count}
    cores = len(os.sched_getaffinity(0))
    minutes = max(1, round(sum(n * _SECONDS[gate] for gate, n in counts.items()) / cores / 60))
    # none where an index must be asked first
    made = environment_work(context, plan, gates.setup.wheels)
    fetch = f"wheels for {context.host}, this machine, would be looked up in the index"
    if made is not None:
        engine = engine_work(context, plan, engine_pin(context, plan, gates.setup.package, None))
        pins = {pin.sha256: pin for pin in (*made.fetch, *engine.fetch)}.values()
        size = log.size(sum(pin.size_bytes for pin in pins))
        fetch = f"{log.count(len(pins), 'file')} to fetch, {size}" if pins else "nothing to fetch"
    cases = " and ".join(f"{log.count(n, 'case')} of {gate}" for gate, n in counts.items())
    log.say(
        f"{name}: {cases}, {fetch}; about {minutes} min on {log.count(cores, 'core')}, less for"
        " cases that were judged before"
    )
    opened = open_image_gate(context, name, request.platform, request.series)
    runs: list[GateRun] = []
    with log.step(f"Judging {name} for {card.arch}"):
        if "smem" in counts:
            runs.append(run_smem(opened, card, unpatched=unpatched, only=only))
        if "numerics" in counts:
            smem = runs[0].result if runs else None
            runs.append(run_numerics(opened, card, smem, unpatched=unpatched, only=only))
    if runs and runs[0].result and (digest := runs[0].result.image_digest):
        store, evidence = context.store, [run.evidence for run in runs]
        keep_evidence(store, name, opened.plan.platform, digest, evidence)
        state_gates(context.checkout, store, opened.plan, signing)
    return runs


def _judge_chat(
    context: GateContext, request: GateRequest, signing: Signing, *, is_rendering: bool
) -> GateRun:
    """Judge how the chat endpoint parses answers, or renders conversations."""
    name, only, checkout = request.image, request.case, context.checkout
    plan = _plan_of(context, name, request.platform)
    # before fetching anything: a pattern may match no case
    if is_rendering:
        talks = read_template_gates(checkout, name).chosen(only, [n for n, _ in request.weights])
        count = log.count(sum(len(each) for each in talks.values()), "conversation")
        families, how = len(talks), "rendered by the image and by the reference"
    else:
        gates = read_parser_gates(checkout, name)
        answers = gates.chosen(only)
        for family, path in request.weights:
            gates.check_markers(family, served_text(path).added_tokens, str(path))
            log.say(f"{path}: its tokenizer has the markers of {family}")
        count = log.count(len(answers), "answer")
        families, how = len({case.family for case in answers}), "cut in every way"
    several = log.count(families, "family", "families")
    log.say(f"{name}: {count} of {several} of models, {how}; needs no GPU")
    choices: dict[str, Any] = {"unpatched": request.unpatched, "only": only}
    if is_rendering:
        texts = {family: served_text(path) for family, path in request.weights}
        rendering = open_template_gate(context, plan, texts, only, request.series)
        with log.step(f"Judging how {name} renders conversations"):
            run = run_templates(rendering, plan.spec.main_arch, **choices)
    else:
        parsing = open_parser_gate(context, plan, request.series)
        with log.step(f"Judging the parsers of {name}"):
            run = run_parsers(parsing, plan.spec.main_arch, **choices)
    result = run.templates or run.parsers
    if result and (digest := result.image_digest):
        keep_evidence(context.store, name, plan.platform, digest, [run.evidence])
        state_gates(checkout, context.store, plan, signing)
    return run


def kept_gates(workspace: Workspace, name: str, platform: str | None = None) -> ImageGates:
    """Read the kept results of a built image's gates."""
    checkout, store = workspace.checkout(), workspace.store_to_read()
    built = find_image(checkout, store, name, platform)
    gates = read_evidence(store, built.name, built.platform, built.digest)
    if gates is None:
        raise errors.GateUnknown(
            f"{name} for {built.platform}: no gate was run on this image",
            f"`sm120 gate run {name}` judges it.",
        )
    return gates


def open_image_gate(
    context: GateContext, name: str, platform: str | None, series: str | None = None
) -> ImageGate:
    """An image with its cases, its patches and the environment that compiles its kernels."""
    return open_gate(context, _plan_of(context, name, platform), series)


@dataclass(frozen=True)
class JudgedPatches:
    """A verdict on each patch, what judged them, and the error that follows."""

    verdicts: list[patches.PatchVerdict]
    environment: EnvironmentFacts | None  # none where no patch is for a gate
    missing: str  # what the sandbox lacks on this machine
    error: errors.PipelineError | None


def judge_all_patches(
    workspace: Workspace,
    name: str,
    *,
    against: str | None = None,
    without_sandbox: bool = False,
    series: str | None = None,
    arch: str | None = None,
    platform: str | None = None,
    mirrors: tuple[str, ...] = (),
    offline: bool = False,
) -> JudgedPatches:
    """Judge each patch of an image, at the locked version of its engine or `against` others."""
    if against is None and series is None:
        checkout = workspace.checkout()
        plan = plan_image(checkout, name, pick_platform(checkout.spec(name), platform))
        specs = checkout.series(plan.spec).patches
        # where no patch is for a gate, no engine is needed to list them
        if specs and not any(spec.gate for spec in specs):
            known = [patches.without_gate(spec, spec.made_for or spec.applies_to) for spec in specs]
            return JudgedPatches(known, None, "", None)
    sandbox = find_sandbox()
    # a person chose the locked version, the others are only on an index
    if against is not None and not without_sandbox:
        require_isolation(sandbox)
    context = make_gate_context(workspace, mirrors, offline)
    card = chosen_card(context, name, platform, arch)
    with context.store.in_use():
        # an answer from an index is small; what opening an image's gates fetches is not
        versions = []
        if against is not None:
            package = read_setup(context.checkout, name).package
            locked = engine_pin(context, _plan_of(context, name, platform), package, None)
            versions = patches.versions_against(context, locked, against)
        opened = open_image_gate(context, name, platform, series)
        if against is None:
            with log.step(f"Judging the patches of {name} for {card.arch}"):
                verdicts = patches.judge_patches(opened, card)
        else:
            verdicts = patches.judge_against(opened, card, versions)
    error: errors.PipelineError | None = None
    unknown = [v for v in verdicts if v.state == "unknown"]
    if against is not None and unknown:
        named = ", ".join(f"{v.patch} at {v.version}" for v in unknown[:4])
        error = errors.GateUnknown(
            f"{name}: {log.count(len(unknown), 'verdict is', 'verdicts are')} unknown: {named}"
        )
    elif against is None and patches.unproved(verdicts):
        named = ", ".join(f"{v.patch} is {v.state}" for v in patches.unproved(verdicts))
        error = errors.PatchUnproved(f"{name}: {named}")
    missing = sandbox.sentence() if sandbox.missing else ""
    return JudgedPatches(verdicts, opened.environment.facts, missing, error)


def tune_case(
    workspace: Workspace,
    name: str,
    case: str,
    warps: Sequence[int],
    stages: Sequence[int],
    *,
    arch: str | None = None,
    platform: str | None = None,
) -> tuple[CaseTuning, Card]:
    """Try other block sizes, warps and stages for one case, and rank them."""
    context = make_gate_context(workspace)
    card = chosen_card(context, name, platform, arch)
    # before gigabytes are downloaded
    chosen = find_case(read_gates(context.checkout, name), case)
    with context.store.in_use():
        opened = open_image_gate(context, name, platform)
        with log.step(f"Trying other launch parameters for {case}"):
            return sweep(opened, card, chosen, list(warps), list(stages)), card


def find_cases(
    workspace: Workspace,
    kernels: Sequence[str],
    traceback: Path | None = None,
    image: str | None = None,
) -> tuple[list[tracebacks.FoundCase], errors.CaseNotFound | None]:
    """Find the cases that judge kernels, by name or a log's tracebacks; and what is missing."""
    checkout = workspace.checkout()
    if image is not None:
        checkout.spec(image)  # an error that lists the images, where there is none of this name
    names = [image] if image else [n for n in checkout.images() if has_cases(checkout, n)]
    gates = {name: read_gates(checkout, name) for name in names}
    found = {name: tracebacks.find_by_name(gates, name) for name in kernels}
    if traceback is not None:
        reader, is_stdin = tracebacks.TracebackReader(), traceback == Path("-")
        opened = nullcontext(sys.stdin.buffer) if is_stdin else opened_log(traceback)
        with opened as file:
            deque(reader.watch(bounded_lines(file)), maxlen=0)  # to its end, and keeps no line
        if not reader.tracebacks:
            raise errors.CaseNotFound(
                "the log holds no Python traceback",
                "Give the log with the whole traceback; `sm120 doctor` reads single lines.",
            )
        found["the traceback"] = [
            case for each in reader.tracebacks for case in tracebacks.find_by_traceback(gates, each)
        ]
    cases = list({(f.image, f.case): f for each in found.values() for f in each}.values())
    missing = [name for name, each in found.items() if not each]
    if not missing:
        return cases, None
    message = f"{', '.join(missing)}: no case of {', '.join(gates) or 'this checkout'} judges it"
    # the reasons that images give for having no case for a kernel
    known = [item for each in gates.values() for item in each.setup.not_judged.items()]
    for name in missing:
        if reasons := [reason for pattern, reason in known if fnmatchcase(name, pattern)]:
            hint = "`not_judged` in the image's gates/engine.yaml says so."
            return cases, errors.CaseNotFound(f"{message}. {reasons[0]}", hint)
    judged = {name for each in tracebacks.find_by_name(gates, "*") for name in each.found_by}
    near: list[str] = []
    for part in [name.strip("*") for name in kernels if name in missing]:
        # names that contain it, the shortest first; else those with a similar spelling
        holding = sorted((each for each in judged if part in each), key=lambda n: (len(n), n))
        near += holding or get_close_matches(part, sorted(judged), n=2, cutoff=0.8)
    hint = f"{errors.did_you_mean(near[:3])}{errors.CaseNotFound.hint}" if near else ""
    return cases, errors.CaseNotFound(message, hint)


Results = dict[Built, ImageRun]


def prove_starts(
    workspace: Workspace, names: Sequence[str], platform: str | None = None, wanted: Wanted = "auto"
) -> Results:
    """Run each image without a GPU, and state what of it works and what does not."""
    checkout, store, signing = workspace.checkout(), workspace.store(), Signing()
    results = Results()
    with store.in_use():
        images = [find_image(checkout, store, name, platform) for name in dict.fromkeys(names)]
        backend = find_backend(wanted)
        for image in images:
            # the flags that recipes are checked against, where they are known
            flags: ParserFlags | None = None
            file: Path | None = None
            folder = flags_folder(checkout)
            if parser := engine_of(image.plan):
                with suppress(errors.RecipeInvalid):
                    flags = find_parser_flags(folder, parser.engine, image.name)
                    file = folder / f"{flags.image}.yaml"
            results[image] = prove_start(store, image, backend, flags, file)
            # a failure is stated like a success
            state_runs(checkout, store, image, [results[image]], signing)
    return results


def require_started(results: Results) -> None:
    """Raise the error of the first image that failed, else of the first that is unknown."""
    kinds: dict[str, type[errors.SmokeNotPassed]] = {
        "failed": errors.StartFails,
        "unknown": errors.StartUnknown,
    }
    for verdict, kind in kinds.items():
        for image, run in results.items():
            first = next((test for test in run.tests if test.verdict == verdict), None)
            if run.verdict == verdict and first:
                raise kind(f"{image.name} for {image.platform}: {first.name}: {first.message}")
