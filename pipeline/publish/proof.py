"""How far an image was proved: assembled, gated, started, served and smoked."""

from __future__ import annotations

from pipeline.assemble.image import Built
from pipeline.errors import StoreDamaged
from pipeline.evidence.runs import read_runs
from pipeline.model import Frozen
from pipeline.publish.gates import GateState
from pipeline.store.store import Store

_GATES = {"passed": "gated", "no gates": "has no gates", "not passed": "not gated"}


class Proof(Frozen):
    """What is known of an image for one platform, from its bytes up to its answers."""

    platform: str
    steps: list[str]

    def sentence(self) -> str:
        """For people."""
        return f"{self.platform}: {', '.join(self.steps)}"


def how_far(store: Store, built: Built, gates: GateState) -> Proof:
    """The steps that an image went; what nobody tried is said so."""
    try:
        runs = read_runs(store, built.name, built.platform, built.digest)
        started = [run.summary() for run in runs if run.kind == "start"]
        smoked = [run.summary() for run in runs if run.kind == "smoke"]
    except StoreDamaged:
        started, smoked = ["the record of its runs is damaged"], []
    steps = ["assembled", _GATES[gates.state], *(started or ["start not tried"])]
    return Proof(platform=built.platform, steps=[*steps, *(smoked or ["no smoke ladder"])])
