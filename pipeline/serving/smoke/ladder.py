"""Runs the ladder, rung after rung until one fails; keeps the result, and states it as a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pipeline import __version__
from pipeline.artifacts.attest.statement import stamp
from pipeline.core import log
from pipeline.core.files import write_bytes
from pipeline.core.model import canonical_json, sha256_of
from pipeline.core.verdict import LadderVerdict, worst
from pipeline.images.gate.runs import EXCHANGES, RESULT, ImageRun, RunTest
from pipeline.serving.smoke.client import WAIT, Gone, NotOffered, Unsound
from pipeline.serving.smoke.model import Check, Exchange, RungResult, SmokeResult
from pipeline.serving.smoke.rungs.agents import AGENTS
from pipeline.serving.smoke.rungs.answers import ANSWERS
from pipeline.serving.smoke.rungs.first import FIRST
from pipeline.serving.smoke.rungs.length import LENGTH
from pipeline.serving.smoke.rungs.memory import MEMORY
from pipeline.serving.smoke.rungs.pictures import PICTURES
from pipeline.serving.smoke.rungs.responses import RESPONSES
from pipeline.serving.smoke.rungs.speculation import SPECULATION
from pipeline.serving.smoke.rungs.streams import STREAMS
from pipeline.serving.smoke.rungs.tools import TOOLS_RUNG
from pipeline.serving.smoke.session import Rung, SmokeSession

# In the order in which a person would trust a server: each rung leans on those before it.
LADDER = (
    FIRST,
    ANSWERS,
    TOOLS_RUNG,
    STREAMS,
    LENGTH,
    AGENTS,
    RESPONSES,
    MEMORY,
    PICTURES,
    SPECULATION,
)


async def run_ladder(
    session: SmokeSession,
    url: str,
    rungs: Sequence[Rung] = LADDER,
    say: Callable[[str], None] = log.say,
) -> SmokeResult:
    """Runs every rung until one fails; the result leaves out those after it."""
    started, begin = stamp(), time.monotonic()
    results: list[RungResult] = []
    last_good: str | None = None
    for rung in rungs:
        result = await _run_rung(session, rung)
        results.append(result)
        say(f"  {result.verdict:8} {rung.name}: {result.message} ({log.seconds(result.seconds)})")
        if result.verdict == "failed":
            break
        if result.verdict == "passed":
            last_good = rung.name
    return SmokeResult(
        url=url,
        model=session.model or None,
        context_tokens=session.context_tokens,
        started=started,
        verdict=worst([r.verdict for r in results], "skipped"),
        rungs=results,
        last_good=last_good,
        exchanges=len(session.client.exchanges),
        seconds=round(time.monotonic() - begin, 3),
        plan=session.plan,
    )


async def _run_rung(session: SmokeSession, rung: Rung) -> RungResult:
    begin, client = time.monotonic(), session.client
    checks: list[Check] = []
    is_gone = False
    for spec in rung.checks(session):
        before = len(client.exchanges)
        verdict: LadderVerdict = "skipped"
        if is_gone:
            ever = any(exchange.status for exchange in client.exchanges)
            message = "the server no longer answers" if ever else "the server does not answer"
        elif spec.kind == "quality" and not session.plan.quality:
            message = session.plan.why_no_quality or "--no-quality"
        elif not (message := spec.skip(session)):
            client.check = f"{rung.name}: {spec.name}"
            try:
                verdict, message = "passed", await spec.run(session)
            except NotOffered as error:
                message = str(error)
            except Unsound as error:
                verdict, message, is_gone = "failed", str(error), isinstance(error, Gone)
        if waits := sum(exchange.status == WAIT for exchange in client.exchanges[before:]):
            message += f"; the server asked to wait {log.count(waits, 'time')} (status {WAIT})"
        checks.append(
            Check(
                name=spec.name,
                kind=spec.kind,
                verdict=verdict,
                message=" ".join(message.split()) or "no reason given",
                evidence=list(range(before, len(client.exchanges))),
            )
        )
    verdicts = [check.verdict for check in checks]
    counts = [(verdicts.count(v), v) for v in ("passed", "failed", "skipped")]
    first = next((c for c in checks if c.verdict == "failed"), None)
    message = ", ".join(f"{number} {name}" for number, name in counts if number)
    return RungResult(
        name=rung.name,
        title=rung.title,
        verdict=worst(verdicts, "skipped"),
        checks=checks,
        seconds=round(time.monotonic() - begin, 3),
        message=f"{first.name}: {first.message}" if first else message,
    )


def exchanges_file(exchanges: Sequence[Exchange]) -> bytes:
    """A line for each request and its answer, in order."""
    return b"".join(map(_line, exchanges))


def keep_ladder(folder: Path, result: SmokeResult, exchanges: Sequence[Exchange]) -> None:
    """Write every request with its answer, and the result."""
    write_bytes(folder / EXCHANGES, exchanges_file(exchanges))
    write_bytes(folder / RESULT, _line(result))


def _line(value: Exchange | SmokeResult) -> bytes:
    # a server may repeat the key that it was sent
    return canonical_json(log.redacted(value.model_dump(mode="json"))) + b"\n"


def as_run(
    result: SmokeResult,
    exchanges: Sequence[Exchange],
    *,
    recipe: str | None,
    inputs: Mapping[str, str],
    machine: Mapping[str, str],
) -> ImageRun:
    """A result as a statement about the image that served; `inputs` are digests of what else ran.

    Without a recipe it is about an address: nobody knows what served.
    """
    files = {EXCHANGES: exchanges_file(exchanges), RESULT: _line(result)}
    return ImageRun(
        kind="smoke" if recipe else "address",
        recipe=recipe,
        last_good=result.last_good,
        inputs={**inputs, **{name: sha256_of(data) for name, data in files.items()}},
        machine={**machine, "tolerance": result.plan.tolerance.sentence()},
        made_by={"sm120-pipeline": __version__},
        tests=[
            RunTest(
                name=f"{rung.name}: {check.name}",
                verdict=check.verdict,
                message=log.redacted(check.message),
            )
            for rung in result.rungs
            for check in rung.checks
        ],
    )
