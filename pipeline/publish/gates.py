"""Whether an image may be published: the results of its gates for exactly these bytes."""

from __future__ import annotations

from typing import Literal

from pipeline.assemble.image import Built
from pipeline.errors import PublishRefused, StoreDamaged
from pipeline.gate.evidence import Evidence, evidence_path, read_evidence
from pipeline.model import Frozen
from pipeline.spec.image import ImageSpec, required_results
from pipeline.store.store import Store

_GOOD = ("passed", "accepted")


class GateState(Frozen):
    """Whether an image's gates passed, and which did not."""

    platform: str
    state: Literal["passed", "no gates", "not passed"]
    message: str = ""


def gate_state(
    store: Store, spec: ImageSpec, built: Built, *, has_patches: bool | None = None
) -> GateState:
    """The kept results, if they are of this digest; every gate that the image names must pass.

    A series may be named and hold no patch: then there is none to prove.
    """
    patched = bool(spec.patches) if has_patches is None else has_patches
    if not spec.gates:
        return GateState(platform=built.platform, state="no gates")
    try:
        gates = read_evidence(store, built.name, built.platform, built.digest)
    # a damaged result is none: publishing is refused like without one
    except StoreDamaged:
        return _not_passed(built, "the record of its gates is damaged")
    if gates is None:
        # after a rebuild with other inputs the results are of the image before
        was_run = evidence_path(store, built.name, built.platform).exists()
        return _not_passed(
            built, "its gates were run on another image" if was_run else "its gates were not run"
        )
    # results for a card that the image is not for decide nothing
    # kernels are compiled for the card, whichever variant of its machine code is promised
    meant = {card for each in spec.promised_archs for card in (each, each.rstrip("af"))}
    counted = [result for result in gates.results if result.arch in meant]
    wrong = [_line(result) for result in counted if result.verdict not in _GOOD]
    judged = {(result.gate, result.arch) for result in counted}
    wrong += [
        f"{gate} on {card}: not run"
        for gate, card in required_results(spec.gates, spec.promised_archs, patched=patched)
        if (gate, card) not in judged
    ]
    if wrong:
        return _not_passed(built, "; ".join(wrong))
    message = "; ".join(_line(result) for result in counted)
    return GateState(platform=built.platform, state="passed", message=message)


def _line(result: Evidence) -> str:
    return f"{result.gate} on {result.arch}: {result.verdict}"


def _not_passed(built: Built, message: str) -> GateState:
    return GateState(platform=built.platform, state="not passed", message=message)


def require_gates(name: str, states: list[GateState], forced: str | None) -> None:
    """Refuse what did not pass, unless a reason was given."""
    bad = [s for s in states if s.state == "not passed"]
    if bad and not forced:
        raise PublishRefused(f"{name} for {bad[0].platform}: {bad[0].message}")
