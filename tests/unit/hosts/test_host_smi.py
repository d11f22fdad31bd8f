"""Output of nvidia-smi: real, damaged and hostile."""

from __future__ import annotations

import pytest

from pipeline.core.known import Unknown, unknown
from pipeline.hosts.facts.smi import plain_address, read_field, read_gpus, read_matrix
from tests.unit.hosts.machines import card_xml, h200, log_of, matrix, xml

CAPABILITIES = {"0000:00:06.0": "9.0"}


def why(value: object) -> str:
    assert isinstance(value, Unknown), value
    return value.unknown


def test_a_real_card_is_read_whole() -> None:
    gpus = read_gpus(xml(), CAPABILITIES)
    assert not isinstance(gpus, Unknown)
    [gpu] = gpus
    assert (gpu.name, gpu.compute_capability, gpu.vbios) == (
        "NVIDIA H200",
        "9.0",
        "96.00.A5.00.1A",
    )
    assert gpu.memory_bytes == 143771 << 20
    assert gpu.bar1_bytes == 262144 << 20
    assert (gpu.link.width, gpu.link.width_max, gpu.link.generation_max) == (16, 16, 5)
    assert (gpu.power.limit_w, gpu.power.min_w, gpu.clocks.sm_max_mhz) == (700.0, 200.0, 1980)
    assert gpu.persistence is True
    assert gpu.slowed_by == []


@pytest.mark.parametrize("cut", [0, 1, 100, 5000, 20000])
def test_a_truncated_answer_is_unknown(cut: int) -> None:
    assert "broken XML" in why(read_gpus(xml()[:cut], CAPABILITIES))


def test_entities_are_refused() -> None:
    bomb = (
        '<!DOCTYPE nvidia_smi_log [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'
        "<nvidia_smi_log><driver_version>&b;</driver_version></nvidia_smi_log>"
    )
    assert "entities" in why(read_gpus(bomb, CAPABILITIES))


def test_a_file_named_as_an_entity_is_refused() -> None:
    thief = (
        '<!DOCTYPE x [<!ENTITY f SYSTEM "file:///etc/passwd">]>'
        "<nvidia_smi_log><driver_version>&f;</driver_version></nvidia_smi_log>"
    )
    assert "entities" in why(read_field(thief, "driver_version"))


def test_deep_nesting_does_no_harm() -> None:
    deep = 100_000
    assert "a document" in why(read_gpus("<a>" * deep + "</a>" * deep, CAPABILITIES))


def test_great_size_is_refused() -> None:
    assert "16 MiB" in why(read_gpus(" " * (17 << 20), CAPABILITIES))


def test_another_document_is_not_taken_for_an_answer() -> None:
    assert "html" in why(read_gpus("<html/>", CAPABILITIES))


@pytest.mark.parametrize(
    "word", ["N/A", "[N/A]", "[Not Supported]", "[Unknown Error]", "Unknown Error", "ERR!", ""]
)
def test_words_in_the_place_of_a_value_are_unknown(word: str) -> None:
    gpus = read_gpus(log_of([card_xml("00000000:01:00.0", vbios_version=word)]), CAPABILITIES)
    assert not isinstance(gpus, Unknown)
    assert "vbios_version" in why(gpus[0].vbios)


@pytest.mark.parametrize("word", ["seventeen", "16x16", "-", "16 Spuren?"])
def test_a_number_that_is_none_is_unknown(word: str) -> None:
    text = log_of([card_xml("00000000:01:00.0", current_link_width=word)])
    gpus = read_gpus(text, CAPABILITIES)
    assert not isinstance(gpus, Unknown)
    if word == "16 Spuren?":  # a number with words behind it is a number
        assert gpus[0].link.width == 16
    else:
        assert isinstance(gpus[0].link.width, Unknown)


def test_a_field_that_a_driver_does_not_have_says_so() -> None:
    text = xml().replace("vbios_version>", "vbios_was>")
    gpus = read_gpus(text, CAPABILITIES)
    assert not isinstance(gpus, Unknown)
    assert why(gpus[0].vbios) == "nvidia-smi has no vbios_version"


def test_a_card_less_than_promised_is_no_answer() -> None:
    text = xml().replace("<attached_gpus>1<", "<attached_gpus>2<")
    assert "2 GPUs and describes 1" in why(read_gpus(text, CAPABILITIES))


def test_older_drivers_name_power_otherwise() -> None:
    text = (
        xml().replace("gpu_power_readings", "power_readings").replace("current_power_l", "power_l")
    )
    gpus = read_gpus(text, CAPABILITIES)
    assert not isinstance(gpus, Unknown)
    assert gpus[0].power.limit_w == 700.0


def test_a_capability_that_was_not_asked_stays_unknown() -> None:
    gpus = read_gpus(xml(), unknown("nvidia-smi is not installed"))
    assert not isinstance(gpus, Unknown)
    assert why(gpus[0].compute_capability) == "nvidia-smi is not installed"


def test_addresses_are_written_as_the_kernel_does() -> None:
    assert plain_address("00000000:C1:00.0") == "0000:c1:00.0"
    assert plain_address("00010000:01:00.0") == "10000:01:00.0"


def test_a_real_matrix_of_one_card_has_no_pair() -> None:
    output = h200().commands["nvidia-smi topo"].out
    assert read_matrix(output) == {}


def test_eight_cards_are_near_within_a_socket() -> None:
    links = read_matrix(matrix(8))
    assert not isinstance(links, Unknown)
    assert len(links) == 56
    assert (links["0-3"], links["0-4"], links["7-4"]) == ("NODE", "SYS", "NODE")


def test_claims_of_peers_are_read() -> None:
    assert read_matrix(matrix(2, word="OK"), peers=True) == {"0-1": "OK", "1-0": "OK"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Failed to initialize NVML",
        matrix(4).replace("SYS", "???"),
        "\n".join(matrix(4).splitlines()[:3]),
        matrix(2).replace("NODE", "X").replace("SYS", "X"),
        matrix(2).replace("GPU1\tSYS", "GPU1\tPIX"),
    ],
)
def test_a_broken_matrix_is_unknown(text: str) -> None:
    assert isinstance(read_matrix(text), Unknown)
