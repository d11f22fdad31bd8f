"""Registers of the bus: ACS, ASPM, and devices that hide or answer nothing."""

from __future__ import annotations

import struct

import pytest

from pipeline.core.known import Unknown
from pipeline.hosts.facts.capture import PCI
from pipeline.hosts.facts.pci import acs_control, aspm_of, extended_capability, read_pci
from tests.unit.hosts.machines import ACS_OFF, ACS_ON, blackwell, changed, h200, registers


@pytest.mark.parametrize("control", [ACS_ON, ACS_OFF, 0x0011])
def test_the_control_register_is_found_at_the_end_of_the_list(control: int) -> None:
    assert acs_control(registers(control)) == control


def test_a_bridge_without_acs_has_none() -> None:
    assert acs_control(registers(None)) is None


def test_a_user_who_sees_64_bytes_knows_nothing() -> None:
    result = acs_control(registers(ACS_ON)[:64])
    assert isinstance(result, Unknown)
    assert "only 64 bytes" in result.unknown
    assert isinstance(aspm_of(registers(None)[:64]), Unknown)


def test_a_list_that_bites_its_tail_is_unknown() -> None:
    data = bytearray(registers(ACS_ON))
    struct.pack_into("<I", data, 0xFB4, 0x01 | 1 << 16 | 0x100 << 20)
    result = acs_control(bytes(data))
    assert isinstance(result, Unknown)
    assert "broken" in result.unknown


def test_a_register_cut_off_is_unknown() -> None:
    assert isinstance(acs_control(registers(ACS_ON)[: 0xF24 + 5]), Unknown)
    assert isinstance(acs_control(registers(ACS_ON)[:0xE02]), Unknown)


def test_a_device_that_answers_only_ones_is_unknown() -> None:
    assert isinstance(acs_control(b"\xff" * 4096), Unknown)


def test_a_real_list_with_hidden_members_is_followed() -> None:
    config = h200().data(f"{PCI}/0000:00:06.0/config")
    assert not isinstance(config, Unknown)
    # a card passed through to a guest: the host hides members by setting their kind to zero
    assert struct.unpack_from("<I", config, 0x100)[0] & 0xFFFF == 0
    assert extended_capability(config, 0x0003) == 0x2F0
    assert acs_control(config) is None
    assert aspm_of(config) == "off"


@pytest.mark.parametrize(("bits", "message"), [(0, "off"), (1, "L0s"), (2, "L1"), (3, "L0s L1")])
def test_sleep_states_are_read(bits: int, message: str) -> None:
    assert aspm_of(registers(None, aspm=bits)) == message


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("identity", "passthrough"), ("DMA", "translated"), ("DMA-FQ", "translated"), (None, "off")],
)
def test_the_iommu_is_judged_by_the_groups_of_the_cards(kind: str | None, mode: str) -> None:
    assert read_pci(blackwell(2, iommu=kind)).iommu == mode


def test_one_translated_card_among_others_counts() -> None:
    mixed = changed(
        blackwell(2, iommu="identity"), files={"/sys/kernel/iommu_groups/1/type": "DMA-FQ\n"}
    )
    assert read_pci(mixed).iommu == "translated"


def test_a_group_whose_kind_cannot_be_read_is_unknown() -> None:
    result = blackwell(2, iommu="identity")
    files = {p: s for p, s in result.files.items() if "iommu_groups" not in p}
    assert isinstance(read_pci(result.model_copy(update={"files": files})).iommu, Unknown)


def test_bridges_above_cards_are_found_by_where_sysfs_hangs_them() -> None:
    pci = read_pci(blackwell(2, ACS_ON))
    assert [b.address for b in pci.bridges] == ["0000:00:01.1", "0000:00:02.1"]
    assert [b.acs_redirect for b in pci.bridges] == [True, True]
    assert pci.bridges[0].acs_control == "0x001d"


def test_source_validation_alone_does_not_redirect() -> None:
    assert read_pci(blackwell(1, 0x0011)).bridges[0].acs_redirect is False


def test_registers_that_may_not_be_read_say_so() -> None:
    result = blackwell(1)
    files = {p: s for p, s in result.files.items() if not p.endswith("/config")}
    bridge = read_pci(result.model_copy(update={"files": files})).bridges[0]
    assert isinstance(bridge.acs_redirect, Unknown)
    assert isinstance(bridge.aspm, Unknown)


def test_the_window_of_a_real_card_is_read_from_the_bus() -> None:
    [gpu] = read_pci(h200()).gpus
    assert gpu.bar1_bytes == 256 << 30
    assert isinstance(gpu.numa_node, Unknown)
