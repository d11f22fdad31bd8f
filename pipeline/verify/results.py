"""Results of gates and runs against today's files, and bills of materials against provenance."""

from __future__ import annotations

from collections.abc import Collection
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
from pipeline.verify.verdict import Node, Verdict


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
    counts = f"{result.summary()}: {len(result.passed)} passed, {len(result.skipped)} skipped"
    if result.verdict == "unknown":
        first = result.unknown[0]
        return Node(title, Verdict.INCOMPLETE, f"unknown: {first.test}: {first.why}")
    if result.verdict == "failed":
        worst = Verdict.BROKEN if result.kind == "start" else Verdict.INCOMPLETE
        return Node(title, worst, f"{result.summary()}: failed: {', '.join(result.failed[:3])}")
    if result.behind:
        behind = [Node(k, Verdict.INCOMPLETE, v.unknown) for k, v in result.behind.items()]
        return Node(title, message=counts, children=tuple(behind))
    moved = _moved_inputs(result, checkout) if checkout else []
    if moved:
        return Node(title, Verdict.STALE, f"{counts}, but has changed since: {', '.join(moved)}")
    return Node(title, message=counts)


def _moved_inputs(result: RunResult, checkout: Checkout) -> list[str]:
    """Recipes and lists of flags that are not what the run saw."""
    # weights and what was asked and answered are not in the checkout
    inputs = [x for x in result.configuration if x.name.startswith(("recipes/", "lockfiles/"))]
    return [x.name for x in inputs if not _is_same(checkout, x.name, x.digest.sha256)]


def _is_same(checkout: Checkout, name: str, sha256: str) -> bool:
    try:
        return sha256_of((checkout.root / stays_below(name)).read_bytes()) == f"sha256:{sha256}"
    except (OSError, ValueError):
        return False


def judge_tests(
    result: TestResult,
    image: str | None,
    checkout: Checkout | None,
    cards: Collection[str] | None = None,
    platform: str = "",
) -> Node:
    """A gate that failed breaks the chain; one that could not judge leaves it incomplete.

    A result for a card that the image is not for decides nothing, here as at publishing.
    """
    title = f"gate {result.gate} on {result.card}"
    if cards is not None and result.card not in cards:
        return Node(title, message=f"{result.verdict}; the image is not for this card")
    counts = f"{len(result.passed)} passed, {len(result.warned)} accepted"
    if not result.passed and not result.warned:
        # a gate may pass without a case, which must not look like many that passed
        counts = "nothing in it to judge"
    if result.verdict == "failed":
        return Node(title, Verdict.BROKEN, f"failed: {', '.join(result.failed[:3])}")
    if result.verdict == "unknown":
        first = result.unknown[0]
        return Node(title, Verdict.INCOMPLETE, f"unknown: {first.test}: {first.why}")
    moved = _moved(result, image, checkout, platform) if image and checkout else []
    if moved:
        return Node(title, Verdict.STALE, f"{counts}, but has changed since: {', '.join(moved)}")
    return Node(title, message=counts)


def _moved(result: TestResult, image: str, checkout: Checkout, platform: str) -> list[str]:
    """Case files and patches that are not what the gate saw, and cases that it did not see."""
    saw = {item.name for item in result.configuration}
    files = gate_files(checkout, image, result.gate, platform)
    moved = sorted(files.keys() - saw)
    for item in result.configuration:
        # wheels and the like are materials: the provenance and the lock answer for them
        if not item.name.startswith(("gates/", "common/gates/", "patches/")):
            continue
        try:
            path = files.get(item.name) or checkout.folder(image) / stays_below(item.name)
            same = sha256_of(path.read_bytes()) == f"sha256:{item.digest.sha256}"
        except (OSError, ValueError):
            same = False
        if not same:
            moved.append(item.name)
    return moved


Package = tuple[str, str]  # package URL and sha256


def judge_bill(predicate_type: str, predicate: dict[str, Any], made: Provenance | None) -> Node:
    """Whether a bill lists exactly what went in."""
    title = "bill of materials"
    read = _cyclonedx if predicate_type == CYCLONEDX else _spdx
    try:
        listed = read(predicate)
    # a format of others, too large to model: only its packages are read
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise RecordInvalid(f"{title}: is not in the format it claims ({error!r})") from error
    for package in listed:
        # sets of them are sorted and shown below
        if not all(isinstance(part, str) for part in package):
            raise RecordInvalid(f"{title}: lists a package by {package[0]}, which is not a name")
    if made is None:
        return Node(title, Verdict.INCOMPLETE, "there is no provenance to compare it with")
    # files of the checkout are components without a package URL
    resources = (*made.bases, *made.packages("pypi"), *made.packages("deb"))
    recorded = {(x.uri, x.sha256) for x in resources}
    made_from = (*made.trees, *made.archives, *made.toolchains, *made.build_time)
    recorded |= {(str(x.annotations.get("purl")), x.sha256) for x in made_from}
    if extra := sorted(listed - recorded):
        return Node(title, Verdict.BROKEN, f"lists {extra[0][0]}, which is not in the provenance")
    if missing := sorted(recorded - listed):
        return Node(title, Verdict.BROKEN, f"leaves out {missing[0][0]}")
    count = log.count(len(listed) - len(made.bases), "package")
    if not made.bases and not made.trees:
        return Node(title, message=f"{count}, the same as in the provenance")
    if _claims_all(predicate):
        what = "a base image" if made.bases else "compiled sources"
        return Node(title, Verdict.BROKEN, f"claims to be complete, but contains {what}")
    message = f"{count} and a base image whose contents are not listed" if made.bases else count
    if made.trees:
        message += f", with all that {log.count(len(made.trees), 'compiled tree')} came from"
    return Node(title, message=f"{message}, the same as in the provenance")


def _claims_all(bill: dict[str, Any]) -> bool:
    """Whether a bill claims to list everything; SPDX has no field for that."""
    compositions = bill.get("compositions", [])
    return not isinstance(compositions, list) or any(
        not isinstance(x, dict) or x.get("aggregate") == "complete" for x in compositions
    )


def _cyclonedx(bill: dict[str, Any]) -> set[Package]:
    if bill["specVersion"] != "1.6":
        raise RecordInvalid(f"bill of materials: CycloneDX {bill['specVersion']!r}, not 1.6")
    return {
        (x["purl"], {h["alg"]: h["content"] for h in x["hashes"]}["SHA-256"])
        for x in bill["components"]
        if x["type"] != "file"  # whatever else it calls itself must have gone in
    }


def _spdx(bill: dict[str, Any]) -> set[Package]:
    if bill["spdxVersion"] != "SPDX-2.3":
        raise RecordInvalid(f"bill of materials: {bill['spdxVersion']!r}, not SPDX-2.3")
    return {
        (ref["referenceLocator"], x["checksums"][0]["checksumValue"])
        for x in bill["packages"]
        if x["SPDXID"] != IMAGE_ID
        for ref in x.get("externalRefs", [])
    }
