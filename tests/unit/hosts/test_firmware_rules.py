"""What the firmware gave each card: its window, the place of it, and who may use the host."""

from __future__ import annotations

import struct

import pytest

from pipeline.core.known import Unknown
from pipeline.core.verdict import RuleResult
from pipeline.hosts.facts.capture import PCI
from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.facts.pci import rebar_max
from pipeline.hosts.facts.source import Capture
from pipeline.hosts.rules.judge import judge_rules
from tests.unit.hosts.machines import WINDOWS, blackwell, changed, facts, h200, registers, windows

CARD = f"{PCI}/0000:01:00.0"
HIGH, LOW = 0x60_0000_0000, 0xC0000000
MIB, GIB = 1 << 20, 1 << 30


def with_card(**files: str | bytes) -> Capture:
    return changed(blackwell(1), files={f"{CARD}/{name}": text for name, text in files.items()})


def row(capture: Capture, rule: str) -> RuleResult:
    (found,) = [r for r in judge_rules(facts(capture)) if r.rule == rule]
    return found


def test_a_whole_window_above_four_gib_passes() -> None:
    for rule in ("ReBAR", "Above 4G"):
        assert row(blackwell(1), rule).verdict == "passed"
    assert row(blackwell(1), "ReBAR").why == "262144 of 262144 MiB"
    # a window as large as the memory is enough, though the card offers 512 GiB
    found = row(with_card(config=registers(None, rebar=WINDOWS | 1 << 19)), "ReBAR")
    assert (found.verdict, found.why) == ("passed", "262144 of 524288 MiB")


@pytest.mark.parametrize("size", [256 * MIB, 64 * GIB])
def test_a_window_that_could_be_larger_fails(size: int) -> None:
    found = row(with_card(resource=windows(HIGH, size)), "ReBAR")
    assert found.verdict == "failed"
    assert found.why == f"only {size // MIB} of 262144 MiB"
    assert "Resizable BAR" in found.fix


@pytest.mark.parametrize("base", [LOW, (1 << 32) - 256 * MIB])
def test_a_window_below_four_gib_fails(base: int) -> None:
    found = row(with_card(resource=windows(base, 256 * MIB)), "Above 4G")
    assert found.verdict == "failed"
    assert found.why == f"the card's window begins at {base:#x}, below 4 GiB"
    assert "Above 4G Decoding" in found.fix


def test_without_a_driver_the_largest_window_is_wanted() -> None:
    bare = changed(blackwell(1), outputs={"nvidia-smi": ""})
    assert row(bare, "ReBAR").verdict == "passed"
    small = changed(bare, files={f"{CARD}/resource": windows(HIGH, 128 * GIB)})
    assert row(small, "ReBAR").verdict == "failed"


def test_a_card_with_one_size_is_not_judged() -> None:
    found = row(with_card(config=registers(None)), "ReBAR")
    assert (found.verdict, found.why) == ("not applicable", "the card's window has one size")
    # as the H200 of a virtual machine shows itself
    assert row(h200(), "ReBAR").verdict in ("not applicable", "unknown")
    assert row(h200(), "Above 4G").verdict == "passed"


@pytest.mark.parametrize("length", [64, 256, 0xF44])
def test_registers_that_cannot_be_read_leave_it_unknown(length: int) -> None:
    short = with_card(config=registers(None, rebar=WINDOWS, length=length))
    assert row(short, "ReBAR").verdict == "unknown"


@pytest.mark.parametrize("text", ["", "0x0 0x0 0x0\n" * 6, "rubbish\n"])
def test_a_window_that_cannot_be_read_is_unknown(text: str) -> None:
    for rule in ("ReBAR", "Above 4G"):
        assert row(with_card(resource=text), rule).verdict == "unknown"


def test_the_largest_of_several_windows_counts() -> None:
    data = bytearray(registers(None, rebar=1))
    # two windows, of which the second offers 512 MiB
    struct.pack_into("<IIII", data, 0xF44, 1 << 4, 2 << 5, 1 << (9 + 4), 2)
    assert rebar_max(bytes(data)) == 512 * MIB
    struct.pack_into("<IIII", data, 0xF44, 0, 2 << 5, 0, 2)
    assert rebar_max(bytes(data)) == 0
    assert isinstance(rebar_max(bytes(64)), Unknown)


def test_facts_of_an_older_version_are_read() -> None:
    old = facts(blackwell(1)).model_dump(mode="json")
    del old["out_of_service"]
    for card in old["pci"]["gpus"]:
        del card["bar1_base"], card["rebar_max_bytes"]
    again = HostFacts.model_validate(old)
    rows = {r.rule: r.verdict for r in judge_rules(again)}
    assert (rows["ReBAR"], rows["Above 4G"], rows["service"]) == ("unknown", "unknown", "passed")


@pytest.mark.parametrize(
    "why", ["Xid 79 at 0000:c1:00: the GPU has fallen off the bus", "x" * 9999]
)
def test_a_host_out_of_service_fails_with_the_reason(why: str) -> None:
    out = changed(blackwell(1), files={"/run/sm120/out-of-service": f"{why}\n"})
    found = row(out, "service")
    assert found.verdict == "failed"
    assert found.why == f"out of service: {why[:400]}"
    assert "sm120-health return" in found.fix
    assert row(blackwell(1), "service").verdict == "passed"
