"""A run of the ladder on a disk, and as a run of an image that is stated like its gates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline import __version__
from pipeline.core.files import write_bytes
from pipeline.core.log import redacted
from pipeline.core.model import canonical_json, sha256_of
from pipeline.images.gate.runs import EXCHANGES, RESULT, Run, RunTest
from pipeline.serving.smoke.model import Exchange, SmokeResult


def exchanges_file(exchanges: Sequence[Exchange]) -> bytes:
    """A line for each request and its answer, in order."""
    return b"".join(canonical_json(redacted(e.model_dump(mode="json"))) + b"\n" for e in exchanges)


def keep_climb(folder: Path, result: SmokeResult, exchanges: Sequence[Exchange]) -> None:
    """Write every request with its answer, and the result."""
    write_bytes(folder / EXCHANGES, exchanges_file(exchanges))
    write_bytes(folder / RESULT, _result_file(result))


def _result_file(result: SmokeResult) -> bytes:
    return canonical_json(redacted(result.model_dump(mode="json"))) + b"\n"


def as_run(
    result: SmokeResult,
    exchanges: Sequence[Exchange],
    *,
    recipe: str | None,
    inputs: Mapping[str, str],
    machine: Mapping[str, str],
) -> Run:
    """A result as it is stated of the image that served; `inputs` are digests of what else ran.

    Without a recipe it is of an address: what served is not known.
    """
    files = {EXCHANGES: exchanges_file(exchanges), RESULT: _result_file(result)}
    return Run(
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
                message=redacted(check.message),
            )
            for rung in result.rungs
            for check in rung.checks
        ],
    )
