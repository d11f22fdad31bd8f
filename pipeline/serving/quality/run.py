"""Runs the parts one after the other; finished ones are kept, so that a stopped run goes on."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from pipeline import __version__
from pipeline.artifacts.attest.statement import stamp
from pipeline.core import log
from pipeline.core.errors import ScoresInvalid
from pipeline.core.files import sha256_of_file, write_bytes
from pipeline.core.model import Digest, Frozen, canonical_json, sha256_of
from pipeline.core.verdict import TestVerdict, worst
from pipeline.images.gate.runs import (
    QUALITY_EXCHANGES,
    QUALITY_OUTPUTS,
    QUALITY_RESULT,
    ImageRun,
    RunTest,
)
from pipeline.serving.quality.model import (
    PartName,
    QualityPart,
    QualityPlan,
    QualityResult,
)
from pipeline.serving.quality.session import QualitySession
from pipeline.serving.report.model import QualityLine
from pipeline.serving.smoke.ladder import exchanges_file


class PartJob(NamedTuple):
    """A part to run: what it asks, and the digests of what it asks with."""

    ask: Callable[[QualitySession], Awaitable[QualityPart]] | None
    inputs: Mapping[str, str]
    why_not: str = ""  # why there is nothing to ask


class _Finished(Frozen):
    """A part in the folder of a run that was stopped."""

    key: Digest
    part: QualityPart


async def run_quality(
    session: QualitySession, url: str, jobs: Mapping[PartName, PartJob], folder: Path
) -> QualityResult:
    """Runs every part, even after one fails; writes the result and all exchanges to a folder."""
    started, begin = stamp(), time.monotonic()
    await session.find_model()
    parts: list[QualityPart] = []
    for name, job in jobs.items():
        done, exchanges_path = folder / f"{name}.part.json", folder / f"{name}.part.jsonl"
        asked = {**session.plan.model_dump(mode="json"), "url": url, "model": session.model}
        key = sha256_of(canonical_json({**asked, "part": name, "inputs": dict(job.inputs)}))
        with suppress(OSError, ValidationError):
            earlier = _Finished.model_validate_json(done.read_bytes())
            if earlier.key == key and exchanges_path.is_file():
                log.say(f"  {earlier.part.verdict:8} {name}: kept from the run that was stopped")
                parts.append(earlier.part)
                continue
        session.client.check, session.client.exchanges[:] = name, []
        part_begin = time.monotonic()
        if job.ask is None:
            part = QualityPart(name=name, verdict="skipped", message=job.why_not)
        else:
            part = await job.ask(session)
        exchanges = session.client.exchanges
        took = round(time.monotonic() - part_begin, 3)
        update = {"requests": len(exchanges), "seconds": took}
        part = part.model_copy(update={**update, "inputs": {**job.inputs, **part.inputs}})
        log.say(f"  {part.verdict:8} {name}: {part.message} ({log.seconds(took)})")
        # the exchanges first: a part counts as finished once its own file is there
        write_bytes(exchanges_path, exchanges_file(exchanges))
        finished = _Finished(key=key, part=part).model_dump(mode="json")
        write_bytes(done, canonical_json(log.redacted(finished)) + b"\n")
        parts.append(part)
    judged: list[TestVerdict] = [part.verdict for part in parts if part.verdict != "skipped"]
    result = QualityResult(
        url=url,
        model=session.model,
        started=started,
        verdict=worst(judged, "unknown"),
        parts=parts,
        exchanges=sum(part.requests for part in parts),
        seconds=round(time.monotonic() - begin, 3),
        plan=session.plan,
    )
    files = [folder / f"{part.name}.part.jsonl" for part in parts]
    write_bytes(folder / QUALITY_EXCHANGES, b"".join(path.read_bytes() for path in files))
    shown = log.redacted(result.model_dump(mode="json"))
    write_bytes(folder / QUALITY_RESULT, canonical_json(shown) + b"\n")
    for path in (*files, *(folder / f"{part.name}.part.json" for part in parts)):
        path.unlink(missing_ok=True)
    return result


def quality_lines(path: Path) -> list[QualityLine]:
    """A kept result as a report shows it: each part, then its numbers."""
    file = path / QUALITY_RESULT if path.is_dir() else path
    try:
        data = file.read_bytes()
        result = QualityResult.model_validate_json(data)
    except (OSError, ValidationError) as error:
        hint = "Name the folder of `sm120 quality run --output`."
        raise ScoresInvalid(f"{file}: is no result of `sm120 quality`", hint) from error
    about = {"model": result.model, "digest": sha256_of(data)}
    lines = []
    for part in result.parts:
        common = {**about, "part": part.name, "verdict": part.verdict}
        lines.append(QualityLine(**common, what="verdict", value=part.message, bar="–"))
        for number in part.numbers:
            shown = {"what": number.name, "value": number.text(), "bar": number.bar_text()}
            lines.append(QualityLine(**common, **shown, vendor=number.vendor))
    return lines


def plan_sentence(plan: QualityPlan) -> str:
    """The bars, for people and for statements."""
    return (
        f"bars: valid calls ≥ {plan.least_valid:.0%}, top-1 agreement ≥ {plan.least_agreement:.0%},"
        f" mean |Δlogprob| ≤ {plan.most_nats:g} nats; a tie is within {plan.tie_nats:g} nats"
    )


def quality_run(
    result: QualityResult,
    folder: Path,
    *,
    recipe: str | None,
    inputs: Mapping[str, str],
    machine: Mapping[str, str],
) -> ImageRun:
    """A result as a statement about the image that served; without a recipe, about an address."""
    tests = [
        RunTest(name=f"{part.name}: verdict", verdict=part.verdict, message=part.message)
        for part in result.parts
    ]
    for part in result.parts:
        for number in part.numbers:
            beside = f"; {number.vendor}" if number.vendor else ""
            message = f"{number.text()}, bar {number.bar_text()}{beside}"
            verdict: TestVerdict = "skipped" if number.bar is None else part.verdict
            if number.bar is not None:
                estimate = number.estimate
                is_share = number.unit == "share"
                verdict = (estimate.at_least if is_share else estimate.at_most)(number.bar)
            name = f"{part.name}: {number.name}"
            tests.append(RunTest(name=name, verdict=verdict, message=message))
    own = {
        f"{part.name}/{name}": digest
        for part in result.parts
        for name, digest in part.inputs.items()
    }
    return ImageRun(
        kind="quality" if recipe else "quality-address",
        recipe=recipe,
        inputs={
            **inputs,
            **own,
            **{name: sha256_of_file(folder / name) for name in QUALITY_OUTPUTS},
        },
        machine={**machine, "plan": plan_sentence(result.plan)},
        made_by={"sm120-pipeline": __version__},
        tests=[test.model_copy(update={"message": log.redacted(test.message)}) for test in tests],
    )
