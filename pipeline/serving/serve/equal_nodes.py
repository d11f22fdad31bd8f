"""Whether machines can share one engine: what must be equal on all of them, and free on each.

Ranks with other code, other weights or other cards start, and then hang or compute something else;
so all of it is compared before the first one starts.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.core.known import Known, Unknown, first_unknown, unknown
from pipeline.core.model import Frozen
from pipeline.core.verdict import RuleResult, not_applicable, result, unknown_result

# Logs of all ranks are laid side by side, and an engine's timeouts end minutes after a start.
_MOST_SECONDS_APART = 2.0
_RULE = "nodes"


class NodeFacts(Frozen):
    """The facts of one machine that matter, as far as known."""

    host: str
    address: str  # as the other ranks reach it
    platform: Known[str]
    image: Known[str]  # by digest, as it would be started
    weights: Known[str]  # by digest
    driver: Known[str] | None = None  # none: the recipe needs no card
    cards: Known[list[str]] | None = None  # their names, those that would be used
    # why a port cannot be used, by number; empty where it is free
    ports: Known[dict[int, str]]
    clock_s: Known[float]  # ahead of this machine's


# Property, what to do where it differs. The order is that of the rows.
_EQUAL = {
    "platform": "Take machines with the same processors.",
    "image": "Build the image for one platform, and load it on every node.",
    "weights": "`sm120 weights verify DIR` on each node; fetch the same set.",
    "driver": "`sm120 host provision` brings all to the locked driver.",
    "cards": "Take machines with the same cards, or name equal ones with --gpus.",
}


def compare_nodes(nodes: Sequence[NodeFacts]) -> list[RuleResult]:
    """A row for each property: equal on all nodes, or who has what."""
    rows = []
    for name, fix in _EQUAL.items():
        values = {node.host: getattr(node, name) for node in nodes}
        missing = [
            unknown(f"{h}: {v.unknown}") for h, v in values.items() if isinstance(v, Unknown)
        ]
        if missing:
            rows.append(unknown_result(_RULE, name, missing[0]))
            continue
        texts = {h: ", ".join(v) if isinstance(v, list) else str(v) for h, v in values.items()}
        if all(value is None for value in values.values()):
            rows.append(not_applicable(_RULE, name, "the recipe needs no card"))
            continue
        good, same = len({*texts.values()}) == 1, f"all have {next(iter(texts.values()))}"
        differing = "; ".join(f"{host}: {text}" for host, text in texts.items())
        rows.append(result(_RULE, name, good, differing, fix, passed=same))
    addresses = [node.address for node in nodes]
    twice = sorted({each for each in addresses if addresses.count(each) > 1})
    rows.append(
        result(
            *(_RULE, "addresses", not twice, f"{', '.join(twice)} is named for two nodes"),
            "Name an address of each node, in the order of their ranks: --hosts.",
            passed="each node has its own",
        )
    )
    taken, unread = [], first_unknown(*(node.ports for node in nodes))
    for node in nodes:
        ports = {} if isinstance(node.ports, Unknown) else node.ports
        taken += [f"{node.host}: {port}: {why}" for port, why in ports.items() if why]
    fix = "`ss -ltnp` shows which program it is; --port names another one for clients."
    # a port that is taken is known, also where another node says nothing
    free = False if taken else (unread or True)
    rows.append(result(_RULE, "ports", free, "; ".join(taken), fix, passed="free on every node"))
    clocks = [node.clock_s for node in nodes]
    known = [clock for clock in clocks if not isinstance(clock, Unknown)]
    apart = max(known) - min(known) if known else 0.0
    near = first_unknown(*clocks) or apart <= _MOST_SECONDS_APART
    fix = "`timedatectl` on each node; the role host_tuning sets up a time service."
    far, passed = f"are {apart:.1f} s apart", f"within {_MOST_SECONDS_APART:g} s"
    rows.append(result(_RULE, "clocks", near, far, fix, passed=passed))
    return rows
