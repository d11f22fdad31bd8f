"""Results of gates and runs against today's files, and bills of materials against provenance."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from pipeline import log
from pipeline.attest.names import CYCLONEDX
from pipeline.errors import RecordInvalid
from pipeline.evidence.gate_result import TestResult, read_test_result
from pipeline.evidence.provenance import Provenance
from pipeline.evidence.run_result import RunResult, read_run_result
from pipeline.evidence.runs import MARK, about_run
from pipeline.evidence.sbom_spdx import IMAGE_ID
from pipeline.gate.files import gate_files
from pipeline.model import sha256_of, stays_below
from pipeline.spec.checkout import Checkout
from pipeline.verify.verdict import Node, Verdict, broken, incomplete, stale


def judge_results(
    predicate: dict[str, Any],
    image: str | None,
    checkout: Checkout | None,
    cards: Collection[str] | None = None,
    platform: str = "",
) -> Node:
    """A test result of either kind: of a gate, or of running the image."""
    if MARK in predicate:
        return judge_run(read_run_result(predicate), checkout)
    return judge_tests(read_test_result(predicate), image, checkout, cards, platform)


def judge_run(result: RunResult, checkout: Checkout | None) -> Node:
    """An image that does not start breaks the chain.

    A ladder that failed is of one recipe on one machine, and another may come further: it proves
    the image up to a rung and leaves the chain incomplete.
    """
    title = about_run(result.kind, result.recipe)
    if result.verdict == "unknown":
        first = result.unknown[0]
        return incomplete(title, f"unknown: {first.test}: {first.why}")
    if result.verdict == "failed":
        worst = Verdict.BROKEN if result.kind == "start" else Verdict.INCOMPLETE
        return Node(title, worst, f"{result.summary()}: failed: {', '.join(result.failed[:3])}")
    counts = f"{result.summary()}: {len(result.passed)} passed, {len(result.skipped)} skipped"
    if result.behind:
        behind = tuple(incomplete(k, v.unknown) for k, v in result.behind.items())
        return Node(title, message=counts, children=behind)
    # weights and what was asked and answered are not in the checkout
    inputs = [x for x in result.configuration if x.name.startswith(("recipes/", "lockfiles/"))]
    moved = [
        x.name for x in inputs if checkout and not _is_same(checkout.root, x.name, x.digest.sha256)
    ]
    if moved:
        return stale(title, f"{counts}, but has changed since: {', '.join(moved)}")
    return Node(title, message=counts)


def judge_tests(
    result: TestResult,
    image: str | None,
    checkout: Checkout | None,
    cards: Collection[str] | None = None,
    platform: str = "",
) -> Node:
    """A gate that failed breaks the chain; one that could not judge leaves it incomplete.

    A result for a card that the image is not for decides nothing, as at publishing.
    """
    title = f"gate {result.gate} on {result.card}"
    if cards is not None and result.card not in cards:
        return Node(title, message=f"{result.verdict}; the image is not for this card")
    if result.verdict == "failed":
        return broken(title, f"failed: {', '.join(result.failed[:3])}")
    if result.verdict == "unknown":
        first = result.unknown[0]
        return incomplete(title, f"unknown: {first.test}: {first.why}")
    counts = f"{len(result.passed)} passed, {len(result.warned)} accepted"
    if not result.passed and not result.warned:
        # a gate may pass without a case, which must not look like many that passed
        counts = "nothing in it to judge"
    if image is None or checkout is None:
        return Node(title, message=counts)
    files = gate_files(checkout, image, result.gate, platform)
    # cases that the gate did not see, then case files and patches that it saw otherwise
    moved = sorted(files.keys() - {item.name for item in result.configuration})
    for item in result.configuration:
        # wheels and the like are materials: the provenance and the lock answer for them
        if not item.name.startswith(("gates/", "common/gates/", "patches/")):
            continue
        known = files.get(item.name)
        folder, name = (known.parent, known.name) if known else (checkout.folder(image), item.name)
        if not _is_same(folder, name, item.digest.sha256):
            moved.append(item.name)
    if moved:
        return stale(title, f"{counts}, but has changed since: {', '.join(moved)}")
    return Node(title, message=counts)


def _is_same(folder: Path, name: str, sha256: str) -> bool:
    try:
        return sha256_of((folder / stays_below(name)).read_bytes()) == f"sha256:{sha256}"
    except (OSError, ValueError):
        return False


def judge_bill(predicate_type: str, bill: dict[str, Any], made: Provenance | None) -> Node:
    """Whether a bill lists exactly what went in, each by package URL and hash."""
    title = "bill of materials"
    try:
        if predicate_type == CYCLONEDX:
            if (version := bill["specVersion"]) != "1.6":
                raise RecordInvalid(f"{title}: CycloneDX {version!r}, not 1.6")
            listed = {
                (x["purl"], {h["alg"]: h["content"] for h in x["hashes"]}["SHA-256"])
                for x in bill["components"]
                if x["type"] != "file"  # whatever else it calls itself must have gone in
            }
        else:
            if (version := bill["spdxVersion"]) != "SPDX-2.3":
                raise RecordInvalid(f"{title}: {version!r}, not SPDX-2.3")
            listed = {
                (ref["referenceLocator"], x["checksums"][0]["checksumValue"])
                for x in bill["packages"]
                if x["SPDXID"] != IMAGE_ID
                for ref in x.get("externalRefs", [])
            }
    # a format of others, too large to model: only its packages are read
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise RecordInvalid(f"{title}: is not in the format it claims ({error!r})") from error
    for package in listed:
        # sets of them are sorted and shown below
        if not all(isinstance(part, str) for part in package):
            raise RecordInvalid(f"{title}: lists a package by {package[0]}, which is not a name")
    if made is None:
        return incomplete(title, "there is no provenance to compare it with")
    # files of the checkout are components without a package URL
    resources = (*made.bases, *made.packages("pypi"), *made.packages("deb"))
    recorded = {(x.uri, x.sha256) for x in resources}
    made_from = (*made.trees, *made.archives, *made.toolchains, *made.build_time)
    recorded |= {(str(x.annotations.get("purl")), x.sha256) for x in made_from}
    if extra := sorted(listed - recorded):
        return broken(title, f"lists {extra[0][0]}, which is not in the provenance")
    if missing := sorted(recorded - listed):
        return broken(title, f"leaves out {missing[0][0]}")
    message = log.count(len(listed) - len(made.bases), "package")
    if made.bases or made.trees:
        # a bill may claim to list everything; SPDX has no field for that
        compositions = bill.get("compositions", [])
        if not isinstance(compositions, list) or any(
            not isinstance(x, dict) or x.get("aggregate") == "complete" for x in compositions
        ):
            what = "a base image" if made.bases else "compiled sources"
            return broken(title, f"claims to be complete, but contains {what}")
    message += " and a base image whose contents are not listed" if made.bases else ""
    if made.trees:
        message += f", with all that {log.count(len(made.trees), 'compiled tree')} came from"
    return Node(title, message=f"{message}, the same as in the provenance")
