"""Machines that are to share one engine: a row for each property, and who has what."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.core.known import unknown
from pipeline.core.verdict import RuleResult
from pipeline.serving.serve.equal_nodes import NodeFacts, compare_nodes

SAME: dict[str, Any] = {
    "platform": "linux/amd64",
    "image": "sha256:" + "1" * 64,
    "weights": "sha256:" + "2" * 64,
    "driver": "580.159.04",
    "cards": ["RTX PRO 6000"] * 8,
    "ports": {8000: "", 29501: ""},
    "clock_s": 0.1,
}
PROPERTIES = ["platform", "image", "weights", "driver", "cards", "addresses", "ports", "clocks"]
NOT_KNOWN = unknown("nobody answers")


def node(number: int, **changes: Any) -> NodeFacts:
    own = {"host": f"rig{number}", "address": f"10.0.0.{number}"}
    return NodeFacts.model_validate({**own, **SAME, **changes})


def rows(*nodes: NodeFacts) -> dict[str, RuleResult]:
    found = compare_nodes(nodes)
    assert {row.rule for row in found} == {"nodes"}
    return {row.subject: row for row in found}


def test_equal_machines_pass_every_row() -> None:
    found = rows(node(1), node(2), node(3))
    assert list(found) == PROPERTIES
    assert {row.verdict for row in found.values()} == {"passed"}
    assert found["driver"].why == "all have 580.159.04"


# Each of these is the one thing that is wrong: two ways to fail for each property.
@pytest.mark.parametrize(
    ("subject", "changes", "why"),
    [
        ("platform", {"platform": "linux/arm64"}, "rig1: linux/amd64; rig2: linux/arm64"),
        ("platform", {"platform": NOT_KNOWN}, "rig2: nobody answers"),
        ("image", {"image": "sha256:" + "3" * 64}, f"rig2: sha256:{'3' * 64}"),
        ("image", {"image": NOT_KNOWN}, "rig2: nobody answers"),
        ("weights", {"weights": "sha256:" + "4" * 64}, f"rig2: sha256:{'4' * 64}"),
        ("weights", {"weights": NOT_KNOWN}, "rig2: nobody answers"),
        ("driver", {"driver": "580.95.05"}, "rig1: 580.159.04; rig2: 580.95.05"),
        ("driver", {"driver": NOT_KNOWN}, "rig2: nobody answers"),
        ("cards", {"cards": ["RTX PRO 6000"] * 7}, "rig2: RTX PRO 6000"),
        ("cards", {"cards": [*["RTX PRO 6000"] * 7, "RTX 5090"]}, "RTX 5090"),
        ("cards", {"cards": NOT_KNOWN}, "rig2: nobody answers"),
        ("addresses", {"address": "10.0.0.1"}, "10.0.0.1 is named for two nodes"),
        ("ports", {"ports": {8000: "", 29501: "in use"}}, "rig2: 29501: in use"),
        ("ports", {"ports": {8000: "in use", 29501: ""}}, "rig2: 8000: in use"),
        ("ports", {"ports": NOT_KNOWN}, "nobody answers"),
        ("clocks", {"clock_s": 2.2}, "are 2.1 s apart"),
        ("clocks", {"clock_s": -60.0}, "are 60.1 s apart"),
        ("clocks", {"clock_s": NOT_KNOWN}, "nobody answers"),
    ],
)
def test_one_machine_that_differs_fails_its_row_alone(
    subject: str, changes: dict[str, Any], why: str
) -> None:
    found = rows(
        node(1), node(2, **changes), node(3, **(changes if subject != "addresses" else {}))
    )
    wrong = {name: row for name, row in found.items() if row.verdict != "passed"}
    assert list(wrong) == [subject]
    is_unknown = NOT_KNOWN in changes.values()
    assert wrong[subject].verdict == ("unknown" if is_unknown else "failed")
    assert why in wrong[subject].why
    assert bool(wrong[subject].fix) is not is_unknown


def test_two_addresses_that_are_each_named_twice_are_both_named() -> None:
    nodes = [node(n, address=f"10.0.0.{n % 2}") for n in range(4)]
    assert rows(*nodes)["addresses"].why == "10.0.0.0, 10.0.0.1 is named for two nodes"


def test_a_port_that_is_taken_fails_also_where_another_node_is_silent() -> None:
    found = rows(node(1, ports={8000: "in use"}), node(2, ports=NOT_KNOWN))
    assert found["ports"].verdict == "failed"


def test_clocks_of_two_nodes_may_both_be_ahead_of_this_machine() -> None:
    assert rows(node(1, clock_s=90.0), node(2, clock_s=91.5))["clocks"].verdict == "passed"


def test_a_recipe_without_cards_compares_none() -> None:
    found = rows(*(node(n, driver=None, cards=None) for n in (1, 2)))
    assert [found[name].verdict for name in ("driver", "cards")] == ["not applicable"] * 2


def test_a_card_on_one_machine_alone_is_a_difference() -> None:
    found = rows(node(1), node(2, driver=None, cards=None))
    assert [found[name].verdict for name in ("driver", "cards")] == ["failed"] * 2
