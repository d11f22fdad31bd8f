"""Compare a served model with its template, schemas and a reference; state and sign it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from pipeline import __version__
from pipeline.app.recipes import is_address, recipes_of
from pipeline.app.serve import RemoteHost, ServeContext, machine_on
from pipeline.app.signing import Signing
from pipeline.app.smoke import api_headers, find_server, state_recipe_run
from pipeline.app.statements import FileStatement, state_run
from pipeline.app.workspace import Workspace
from pipeline.artifacts.containers.container_engine import Wanted
from pipeline.core import errors, log
from pipeline.core.files import sha256_of_file
from pipeline.core.net.wire import Address
from pipeline.core.verdict import TestVerdict
from pipeline.images.gate.runs import QUALITY_OUTPUTS, ImageRun, RunTest
from pipeline.images.gate.templates.cases import conversations
from pipeline.images.gate.templates.files import ModelText
from pipeline.serving.quality.agreement import (
    AgreementReference,
    judge_agreement,
    read_reference,
    record_agreement,
    write_reference,
)
from pipeline.serving.quality.model import PartName, QualityPlan, QualityResult
from pipeline.serving.quality.probes import probes
from pipeline.serving.quality.run import PartJob, quality_run, run_quality
from pipeline.serving.quality.scores import ImportedScores, PublishedScore, read_scores
from pipeline.serving.quality.session import QualitySession
from pipeline.serving.quality.texts import served_text
from pipeline.serving.quality.token_counts import judge_tokens
from pipeline.serving.quality.tool_calls import judge_schema
from pipeline.serving.quality.tool_cases import read_tool_cases, tool_cases
from pipeline.serving.serve.attempts import ServeOptions, new_id
from pipeline.serving.smoke.client import ChatClient, Gone, Unsound


@dataclass(frozen=True)
class QualityChoices:
    """What the user wants in place of the defaults."""

    parts: tuple[PartName, ...] = ()  # none: all
    model: str | None = None
    cases: int | None = None
    tool_choice: str | None = None
    seed: int | None = None
    texts: int | None = None
    places: int | None = None
    at_once: int | None = None
    least_valid: float | None = None
    least_agreement: float | None = None
    most_nats: float | None = None

    def plan(self) -> QualityPlan:
        """The questions to ask, and the thresholds."""
        given = {k: v for k, v in self.__dict__.items() if v is not None and v != ()}
        return QualityPlan.model_validate(given)


@dataclass(frozen=True)
class QualityRequest:
    """Which server to compare, with what, and where to keep the result."""

    target: str  # a recipe or an address
    plan: QualityPlan = field(default_factory=QualityPlan)
    folders: tuple[Path, ...] = ()  # recipes of the user's own
    weights: Path | None = None  # none: those that the recipe was served with
    cases: Path | None = None  # a folder of cases in place of our own
    record: Path | None = None  # record a reference in this file, and judge nothing
    reference: Path | None = None
    engine: Wanted = "auto"
    on: RemoteHost | None = None
    keep: Path | None = None


OnQuality = Callable[[QualityResult], None]


def judge_quality(
    workspace: Workspace, request: QualityRequest, on_result: OnQuality | None = None
) -> QualityResult | AgreementReference:
    """Compare a server, and state the result; raises QualityFailed where a part fails.

    `on_result` gets the result as soon as it is known, good or bad. With `record`, returns what
    was recorded.
    """
    show, signing = on_result or (lambda result: None), Signing()
    folder = request.keep or workspace.store().root / "quality" / new_id()
    if is_address(request.target):
        url, address = request.target, Address.read(request.target)
        made = _asked(request, url, address, request.weights, folder)
        if isinstance(made, QualityResult):
            show(made)
            run = quality_run(made, folder, recipe=None, inputs={}, machine={"address": url})
            # nobody knows what runs at an address: the statement is about the result's files
            files = {name: sha256_of_file(folder / name) for name in QUALITY_OUTPUTS}
            stated = state_run(folder, files, run, signing)
            log.say(f"statement: {stated.file}, {stated.state}")
            require_quality(made)
        return made
    recipes = recipes_of(workspace, request.folders)
    recipe = recipes.read(request.target)
    with machine_on(workspace, request.on, request.engine, recipe.name) as (site, containers):
        context = ServeContext(workspace.checkout(), workspace.store(), ServeOptions(), site)
        server = find_server(containers, context, recipe)
        served = server.context.options.weights
        weights = request.weights or (Path(served) if served and not request.on else None)
        plan = request.plan.model_copy(update={"model": request.plan.model or server.status.model})
        made = _asked(replace(request, plan=plan), server.url, server.address(), weights, folder)
        if isinstance(made, QualityResult):
            show(made)
            state_recipe_run(server, recipes, partial(quality_run, made, folder), signing)
            require_quality(made)
        return made


def _asked(
    request: QualityRequest, url: str, address: Address, weights: Path | None, folder: Path
) -> QualityResult | AgreementReference:
    """Record a reference, or run the parts."""
    plan = request.plan
    # before any question: reports a wrong path at once
    text = served_text(weights) if weights else None
    why = "the weights are not known here: name their folder with --weights"
    jobs = {name: job for name, job in _jobs(request, text, why).items() if name in plan.parts}
    session = QualitySession(ChatClient(address, plan.limits, api_headers()), plan)
    log.say(f"Comparing {url}")

    async def run() -> QualityResult | AgreementReference:
        if request.record is None:
            return await run_quality(session, url, jobs, folder)
        await session.find_model()
        chosen = probes(text, plan.texts, plan.places, plan.seed)
        with log.step(f"Recording {log.count(sum(len(p.places) for p in chosen), 'place')}"):
            return await record_agreement(session, url, chosen)

    try:
        made = asyncio.run(run())
    except Gone as error:
        raise errors.ServerGone(f"{url}: {error}") from error
    except Unsound as error:
        raise errors.QualityFailed(f"{url}: {error}") from error
    if isinstance(made, AgreementReference) and request.record:
        write_reference(request.record, made)
    return made


def _jobs(request: QualityRequest, text: ModelText | None, why: str) -> dict[PartName, PartJob]:
    """Each part with what it needs, or why it has nothing to do."""
    plan, reference = request.plan, request.reference
    known = read_reference(reference) if reference else None
    cases = read_tool_cases(request.cases) if request.cases else tool_cases(plan.cases, plan.seed)
    files = sorted(request.cases.rglob("*.jsonl")) if request.cases else []
    return {
        "tokens": PartJob(
            (lambda session: judge_tokens(session, text, conversations())) if text else None,
            text.inputs if text else {},
            why,
        ),
        "schema": PartJob(
            lambda session: judge_schema(session, cases),
            {f"cases/{path.name}": sha256_of_file(path) for path in files[:100]},
        ),
        "agreement": PartJob(
            (lambda session: judge_agreement(session, *known)) if known else None,
            {"reference": known[1]} if known else {},
            "no reference: record one with --record FILE on a server that you trust",
        ),
    }


def import_scores(
    path: Path, published: PublishedScore | None, metric: str | None
) -> tuple[ImportedScores, FileStatement]:
    """Compare another program's scores with a published one; state it next to the file.

    The statement names the file, and says that the server is not known.
    """
    found = read_scores(path, published, metric)
    beside = f", published {published.value} - {published.tolerance}" if published else ""
    tests = [
        RunTest(
            name=f"{score.task}: {score.metric}",
            verdict=score.verdict if published else "skipped",
            message=f"{score.estimate.value:.4f} [{score.estimate.low:.4f},"
            f" {score.estimate.high:.4f}] of {score.samples or 'unknown'} samples{beside}",
        )
        for score in found.scores
    ]
    details = {"program": found.program, "model": found.model, **found.parameters}
    if published:
        details["source"] = str(published.source)
    run = ImageRun(
        kind="quality-address",
        inputs={path.name: found.digest},
        machine={name: log.redacted(value) for name, value in details.items()},
        made_by={"sm120-pipeline": __version__},
        tests=tests,
    )
    return found, state_run(path.parent, {path.name: found.digest}, run, Signing())


def require_quality(result: QualityResult) -> None:
    """Raise the error of the first part that failed, else of the first that is unknown."""
    kinds: dict[TestVerdict, type[errors.PipelineError]] = {
        "failed": errors.QualityFailed,
        "unknown": errors.QualityUnknown,
    }
    for verdict, kind in kinds.items():
        for part in result.parts:
            if part.verdict == verdict:
                raise kind(f"{result.url}: {part.name}: {part.message[:300]}")
    if result.verdict == "unknown":
        raise errors.QualityUnknown(f"{result.url}: {result.parts[0].message}")
