"""Drift of one host, and outliers among many."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.core.known import Unknown, unknown
from pipeline.hosts.facts.drift import compare_facts
from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.facts.source import Capture
from pipeline.hosts.probes.runner import ProbeRow
from pipeline.hosts.rules.outliers import find_outliers
from tests.unit.hosts.machines import ACS_ON, blackwell, changed, facts, h200


def test_the_same_host_has_not_moved() -> None:
    assert compare_facts(facts(), facts()) == []


def test_what_moves_by_itself_is_no_drift() -> None:
    text = h200().commands["nvidia-smi"].out
    for old, new in (
        ("375 MHz", "1980 MHz"),
        ("84.14 W", "512.00 W"),
        ("<current_link_gen>5", "<current_link_gen>1"),
    ):
        text = text.replace(old, new)
    later = changed(h200(), outputs={"nvidia-smi": text}).model_copy(update={"taken_at": 9})
    assert text != h200().commands["nvidia-smi"].out
    assert compare_facts(facts(), facts(later)) == []


@pytest.mark.parametrize(
    ("before", "after", "field"),
    [
        ("96.00.A5.00.1A", "96.00.A5.00.1B", "gpus[0000:00:06.0].vbios"),
        ("<current_link_width>16x", "<current_link_width>8x", "gpus[0000:00:06.0].link.width"),
        ("current_power_limit>700", "current_power_limit>600", "gpus[0000:00:06.0].power.limit_w"),
        ("<cuda_version>13.0", "<cuda_version>13.1", "driver.cuda"),
    ],
)
def test_what_somebody_changed_is_drift(before: str, after: str, field: str) -> None:
    text = h200().commands["nvidia-smi"].out.replace(before, after)
    result = compare_facts(facts(), facts(changed(h200(), outputs={"nvidia-smi": text})))
    assert [(d.field, d.kind) for d in result] == [(field, "changed")]


@pytest.mark.parametrize(("left", "fields"), [(0.995, []), (0.9375, ["memory_bytes"])])
def test_a_kernel_that_takes_more_memory_is_no_drift_and_a_dead_module_is(
    left: float, fields: list[str]
) -> None:
    had = facts().model_copy(update={"memory_bytes": 512 << 30})
    has = facts().model_copy(update={"memory_bytes": int(left * (512 << 30))})
    assert [d.field for d in compare_facts(had, has)] == fields
    assert [d.field for d in compare_facts(has, had)] == fields


def test_a_value_that_can_no_longer_be_read_is_lost() -> None:
    text = h200().commands["nvidia-smi"].out.replace("96.00.A5.00.1A", "[Unknown Error]")
    [result] = compare_facts(facts(), facts(changed(h200(), outputs={"nvidia-smi": text})))
    assert result.kind == "lost"
    [back] = compare_facts(facts(changed(h200(), outputs={"nvidia-smi": text})), facts())
    assert back.kind == "gained"


def test_other_words_for_not_knowing_are_no_drift() -> None:
    one, two = (facts().model_copy(update={"bios": unknown(w)}) for w in ("no file", "no right"))
    assert compare_facts(one, two) == []


def test_reasons_survive_being_written_and_read() -> None:
    result = facts(Capture(version=1, taken_at=0, root="tree", files={}, links={}, commands={}))
    again = HostFacts.model_validate_json(result.model_dump_json())
    assert isinstance(again.topology.links, Unknown)
    assert compare_facts(result, again) == []


def test_a_card_that_is_gone_is_named_and_the_others_are_not() -> None:
    result = compare_facts(facts(blackwell(3)), facts(blackwell(2)))
    fields = {d.field.split("]")[0] for d in result if d.field.startswith("gpus")}
    assert fields == {"gpus[0000:03:00.0"}


def test_acs_that_came_back_after_a_boot_is_drift() -> None:
    result = compare_facts(facts(blackwell(2)), facts(blackwell(2, ACS_ON)))
    assert "pci.bridges[0000:00:01.1].acs_redirect" in {d.field for d in result}


def test_a_new_xid_is_drift() -> None:
    lost = "NVRM: Xid (PCI:0000:23:00): 79, GPU has fallen off the bus.\n"
    [result] = compare_facts(facts(), facts(changed(h200(), outputs={"dmesg": lost})))
    assert result.field == "xids[79 0000:23:00]"


def fleet(count: int, odd: HostFacts | None = None) -> dict[str, HostFacts]:
    hosts = {f"node{i}": facts(blackwell(4), name=f"node{i}") for i in range(count)}
    return {**hosts, **({"odd": odd} if odd else {})}


def test_equals_have_no_outlier() -> None:
    result = find_outliers(fleet(4))
    assert result.outliers == []
    assert result.compared > 10


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"current_link_width": "8x"}, "link.width"),
        ({"current_power_limit": "300.00 W"}, "power.limit_w"),
        ({"vbios_version": "1.2.3"}, "vbios"),
    ],
)
def test_the_node_with_other_cards_is_found(fields: dict[str, Any], field: str) -> None:
    result = find_outliers(fleet(3, facts(blackwell(4, **fields))))
    assert {o.field for o in result.outliers} == {field}
    assert {o.subject for o in result.outliers} == {f"odd GPU {i}" for i in range(4)}


def test_memory_of_equals_may_differ_by_what_their_kernels_take() -> None:
    sizes = [512 << 30, (512 << 30) - (9 << 20), (512 << 30) + (7 << 20), 480 << 30]
    hosts = {
        name: result.model_copy(update={"memory_bytes": size})
        for (name, result), size in zip(fleet(4).items(), sizes, strict=True)
    }
    [result] = find_outliers(hosts).outliers
    assert (result.subject, result.field, result.value) == ("node3", "memory_bytes", str(480 << 30))
    del hosts["node3"]
    assert find_outliers(hosts).outliers == []
    hosts["node3"] = fleet(4)["node3"].model_copy(update={"memory_bytes": unknown("no file")})
    assert [o.value for o in find_outliers(hosts).outliers] == ["unknown: no file"]


def test_memory_of_equal_cards_is_equal() -> None:
    odd = facts(blackwell(4))
    assert not isinstance(odd.gpus, Unknown)
    [first, *others] = odd.gpus
    size = first.memory_bytes
    assert isinstance(size, int)
    less = first.model_copy(update={"memory_bytes": size - (size >> 8)})
    hosts = fleet(3, odd.model_copy(update={"gpus": [less, *others]}))
    assert [(o.subject, o.field) for o in find_outliers(hosts).outliers] == [
        ("odd GPU 0", "memory_bytes")
    ]


def test_one_card_among_its_neighbours_is_found() -> None:
    capture = blackwell(4)
    text = capture.commands["nvidia-smi"].out
    head, mark, tail = text.rpartition("<current_link_width>16x")
    lame = changed(capture, outputs={"nvidia-smi": f"{head}<current_link_width>4x{tail}"})
    assert mark
    [result] = find_outliers({"one": facts(lame)}).outliers
    assert (result.subject, result.field, result.value) == ("one GPU 3", "link.width", "4")


def test_two_hosts_that_differ_accuse_nobody() -> None:
    hosts = {"a": facts(h200()), "b": facts(changed(h200(), files={"/etc/os-release": "ID=x\n"}))}
    result = find_outliers(hosts)
    assert result.outliers == []
    assert any("software.os" in message for message in result.unjudged)


def test_hosts_with_other_cards_are_no_equals() -> None:
    hosts = {**fleet(3), "small": facts(blackwell(2), name="small")}
    assert [o for o in find_outliers(hosts).outliers if o.subject == "small"] == []


def probe(latency: float, rate: float = 40.0) -> list[ProbeRow]:
    def row(check: str, subject: str, **measured: float) -> ProbeRow:
        return ProbeRow(check=check, subject=subject, verdict="passed", why="", measured=measured)

    return [
        row("latency", "4 ranks, 32 KiB", in_a_row_us=latency),
        row("bandwidth", "4 ranks", bus_gb_per_s=rate),
        row("all_reduce", "4 ranks"),
    ]


def test_the_slow_node_is_found_by_what_was_measured() -> None:
    probes = {"node0": probe(30), "node1": probe(31), "node2": probe(29), "node3": probe(60)}
    [result] = find_outliers(fleet(4), probes).outliers
    assert (result.subject, result.field) == ("node3", "latency 4 ranks, 32 KiB")
    probes["node3"] = probe(30, rate=20.0)
    [result] = find_outliers(fleet(4), probes).outliers
    assert result.subject == "node3"


def test_a_faster_node_and_a_little_noise_are_no_outliers() -> None:
    probes = {"node0": probe(30), "node1": probe(33), "node2": probe(29), "node3": probe(10)}
    assert find_outliers(fleet(4), probes).outliers == []


def test_measurements_of_two_hosts_are_not_judged() -> None:
    result = find_outliers(fleet(2), {"node0": probe(30), "node1": probe(90)})
    assert result.outliers == []
    assert len(result.unjudged) == 2
