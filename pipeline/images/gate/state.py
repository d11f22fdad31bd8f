"""Whether an image may be published: the results of its gates, and how far it was proved."""

from __future__ import annotations

from typing import Literal

from pipeline.artifacts.store.store import Store
from pipeline.core.errors import PublishRefused, StoreDamaged
from pipeline.core.model import Frozen
from pipeline.images.assemble.image import Built
from pipeline.images.gate.evidence import Evidence, evidence_path, read_evidence
from pipeline.images.gate.runs import read_runs
from pipeline.images.spec.image import ImageSpec, required_results

_GOOD = ("passed", "accepted")
_GATES = {"passed": "gated", "no gates": "has no gates", "not passed": "not gated"}


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
    platform = built.platform
    if not spec.gates:
        return GateState(platform=platform, state="no gates")
    wrong: list[str] = []
    counted: list[Evidence] = []
    try:
        gates = read_evidence(store, built.name, platform, built.digest)
        if gates is None:
            # after a rebuild with other inputs the results are of the image before
            was_run = evidence_path(store, built.name, platform).exists()
            wrong = [f"its gates were {'run on another image' if was_run else 'not run'}"]
    # a damaged result is none: publishing is refused like without one
    except StoreDamaged:
        gates, wrong = None, ["the record of its gates is damaged"]
    if gates is not None:
        # results for a card that the image is not for decide nothing
        # kernels are compiled for the card, whichever variant of its machine code is promised
        meant = {card for each in spec.promised_archs for card in (each, each.rstrip("af"))}
        counted = [result for result in gates.results if result.arch in meant]
        wrong = [_line(result) for result in counted if result.verdict not in _GOOD]
        judged = {(result.gate, result.arch) for result in counted}
        patched = bool(spec.patches) if has_patches is None else has_patches
        wanted = required_results(spec.gates, spec.promised_archs, patched=patched)
        wrong += [
            f"{gate} on {card}: not run" for gate, card in wanted if (gate, card) not in judged
        ]
    if wrong:
        return GateState(platform=platform, state="not passed", message="; ".join(wrong))
    message = "; ".join(_line(result) for result in counted)
    return GateState(platform=platform, state="passed", message=message)


def _line(result: Evidence) -> str:
    return f"{result.gate} on {result.arch}: {result.verdict}"


def require_gates(name: str, states: list[GateState], forced: str | None) -> None:
    """Refuse what did not pass, unless a reason was given."""
    bad = [s for s in states if s.state == "not passed"]
    if bad and not forced:
        raise PublishRefused(f"{name} for {bad[0].platform}: {bad[0].message}")


class Proof(Frozen):
    """What is known of an image for one platform, from its bytes up to its answers."""

    platform: str
    steps: list[str]

    def sentence(self) -> str:
        """For people."""
        return f"{self.platform}: {', '.join(self.steps)}"


def passed_steps(store: Store, built: Built, gates: GateState) -> Proof:
    """The steps that an image passed; a step that was not tried is named as such."""
    try:
        runs = read_runs(store, built.name, built.platform, built.digest)
        started = [run.summary() for run in runs if run.kind == "start"]
        smoked = [run.summary() for run in runs if run.kind == "smoke"]
    except StoreDamaged:
        started, smoked = ["the record of its runs is damaged"], []
    steps = ["assembled", _GATES[gates.state], *(started or ["start not tried"])]
    return Proof(platform=built.platform, steps=[*steps, *(smoked or ["no smoke ladder"])])
