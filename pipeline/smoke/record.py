"""A climb on a disk, and as a statement that can be signed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.attest.statement import DigestSet
from pipeline.attest.strict import plain
from pipeline.files import write_bytes
from pipeline.model import canonical_json, sha256_of
from pipeline.smoke.model import Check, Exchange, SmokeResult, Verdict

RESULT, EXCHANGES = "smoke.json", "exchanges.jsonl"


def exchanges_file(exchanges: Sequence[Exchange]) -> bytes:
    """A line for each request and its answer, in order."""
    return b"".join(canonical_json(e.model_dump(mode="json")) + b"\n" for e in exchanges)


def keep_climb(folder: Path, result: SmokeResult, exchanges: Sequence[Exchange]) -> None:
    """Write what was asked and answered, and what follows from it."""
    write_bytes(folder / EXCHANGES, exchanges_file(exchanges))
    write_bytes(folder / RESULT, canonical_json(result.model_dump(mode="json")) + b"\n")


def as_test_result(
    result: SmokeResult, exchanges: Sequence[Exchange], inputs: dict[str, str]
) -> dict[str, Any]:
    """An in-toto test result; `inputs` are digests of what ran: image, weights, recipe.

    What was skipped is neither passed nor failed: it stands apart, with its reason.
    https://github.com/in-toto/attestation/blob/main/spec/predicates/test-result.md
    """
    inputs = {**inputs, EXCHANGES: sha256_of(exchanges_file(exchanges))}
    return {
        "result": "PASSED" if result.verdict == "passed" else "FAILED",
        "configuration": [
            {"name": name, "digest": DigestSet(sha256=digest.removeprefix("sha256:")).model_dump()}
            for name, digest in sorted(inputs.items())
        ],
        "passedTests": _named(result, "passed"),
        "warnedTests": [],
        "failedTests": _named(result, "failed"),
        "sm120_smoke": {
            "model": plain(result.model or "unknown"),
            "last_good": result.last_good or "none",
            "tolerance": result.plan.tolerance.sentence(),
            "skipped": [
                {"test": _title(rung.name, c), "why": plain(c.message)}
                for rung in result.rungs
                for c in rung.checks
                if c.verdict == "skipped"
            ],
            "why": [
                {"test": _title(rung.name, c), "why": plain(c.message)}
                for rung in result.rungs
                for c in rung.checks
                if c.verdict == "failed"
            ],
        },
    }


def _named(result: SmokeResult, verdict: Verdict) -> list[str]:
    return sorted(
        _title(rung.name, check)
        for rung in result.rungs
        for check in rung.checks
        if check.verdict == verdict
    )


def _title(rung: str, check: Check) -> str:
    return plain(f"{rung}: {check.name}")
