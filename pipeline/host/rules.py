"""Rules over facts: what is known to break or slow SM120 machines, each with its cure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipeline.host import card_rules, host_rules
from pipeline.host.facts import HostFacts
from pipeline.host.verdicts import Judged

Rule = Callable[[HostFacts, str | None], Iterator[Judged]]

RULES: tuple[Rule, ...] = (
    *(card_rules.cards, card_rules.open_module, card_rules.bar1),
    *(host_rules.iommu_and_acs, host_rules.aspm, host_rules.hmm, host_rules.driver_branch),
    *(card_rules.persistence, card_rules.power, card_rules.link_width),
    *(card_rules.link_generation, card_rules.health),
    *(host_rules.xids, host_rules.tuning),
)


def judge(facts: HostFacts, cuda: str | None = None) -> list[Judged]:
    """Every rule, for a host that shall run images of that CUDA version (13.0 …)."""
    return [judged for rule in RULES for judged in rule(facts, cuda)]
