"""All rules over facts: what is known to break or slow SM120 machines, each with its fix."""

from __future__ import annotations

from functools import partial

from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.rules import cards, machine
from pipeline.hosts.rules.verdict import RuleResult


def judge(facts: HostFacts, cuda: str | None = None) -> list[RuleResult]:
    """Every rule, for a host that has to run images of that CUDA version (13.0 …)."""
    rules = (
        *(cards.cards, cards.open_module, cards.bar1),
        *(machine.iommu_and_acs, machine.aspm, machine.hmm),
        partial(machine.driver_branch, cuda=cuda),
        *(cards.persistence, cards.power, cards.link_width, cards.link_generation, cards.health),
        *(machine.xids, machine.tuning),
    )
    return [one for rule in rules for one in rule(facts)]
