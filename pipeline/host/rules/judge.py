"""Rules over facts: what is known to break or slow SM120 machines, each with its fix."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipeline.host.facts.model import HostFacts
from pipeline.host.rules import cards, machine
from pipeline.host.rules.verdict import Judged

Rule = Callable[[HostFacts, str | None], Iterator[Judged]]

RULES: tuple[Rule, ...] = (
    *(cards.cards, cards.open_module, cards.bar1),
    *(machine.iommu_and_acs, machine.aspm, machine.hmm, machine.driver_branch),
    *(cards.persistence, cards.power, cards.link_width),
    *(cards.link_generation, cards.health),
    *(machine.xids, machine.tuning),
)


def judge(facts: HostFacts, cuda: str | None = None) -> list[Judged]:
    """Every rule, for a host that shall run images of that CUDA version (13.0 …)."""
    return [judged for rule in RULES for judged in rule(facts, cuda)]
