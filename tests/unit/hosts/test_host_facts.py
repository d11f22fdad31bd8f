"""Facts of whole machines: real, without cards, damaged, redacted, and as a record carries them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.artifacts.attest.names import HOST_FACTS
from pipeline.artifacts.attest.predicates import check_predicate
from pipeline.core.errors import FactsUnreadable
from pipeline.core.known import Unknown
from pipeline.hosts.facts import capture
from pipeline.hosts.facts.drift import read_recorded_facts
from pipeline.hosts.facts.gather import gather_facts
from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.facts.pci import extended_capability
from pipeline.hosts.facts.redact import redact_capture
from pipeline.hosts.facts.source import Capture, CapturedCommand, CapturedFile, read_capture
from pipeline.hosts.facts.summary import summarise
from tests.unit.hosts.machines import H200, blackwell, changed, facts, h200

EMPTY = Capture(version=1, taken_at=0, root="tree", files={}, links={}, commands={})


def test_a_real_machine_is_read() -> None:
    result = facts()
    assert result.driver.version == "580.159.04"
    assert result.driver.is_open is True
    assert result.driver.cuda == "13.0"
    assert result.driver.modules == ["nvidia", "nvidia_uvm"]
    assert result.driver.registry == {}
    assert result.driver.hmm_disabled is False
    assert result.cpu.threads == 16
    assert result.software.os == "ubuntu 24.04"
    assert result.software.cuda_toolkit == "13.0"
    assert result.kernel.memlock == "unlimited"
    assert result.xids == []
    assert result.pci.iommu == "off"


ARM = """processor\t: {}
BogoMIPS\t: 243.75
Features\t: fp asimd
CPU implementer\t: {}
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: {}
CPU revision\t: 1
"""
TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"


def arm(kinds: list[tuple[str, str]], package: str | None = "0") -> Capture:
    """A machine as arm64's kernel shows it, with a core for each implementer and part."""
    info = "\n".join(ARM.format(i, *kind) for i, kind in enumerate(kinds))
    files: dict[str, str | bytes] = {"/proc/cpuinfo": info}
    for i in range(len(kinds) if package else 0):
        files[TOPOLOGY.format(i, "physical_package_id")] = f"{package}\n"
        files[TOPOLOGY.format(i, "thread_siblings_list")] = f"{i}\n"
    return changed(EMPTY, files=files)


def test_an_arm_processor_is_named_as_lscpu_names_it() -> None:
    cpu = gather_facts(arm([("0x41", "0xd0c")] * 2)).cpu
    assert (cpu.name, cpu.vendor) == ("ARM Neoverse-N1", "ARM")
    assert (cpu.sockets, cpu.cores, cpu.threads) == (1, 2, 2)


def test_fast_and_small_cores_and_unnamed_parts_are_all_named() -> None:
    cpu = gather_facts(arm([("0x41", "0xd85"), ("0x41", "0xd87"), ("0x41", "0xd87")])).cpu
    assert cpu.name == "ARM Cortex-X925 + ARM Cortex-A725"
    assert gather_facts(arm([("0xc0", "0xac3")])).cpu.name == "Ampere part 0xac3"
    assert gather_facts(arm([("0x99", "0x001")])).cpu.name == "implementer 0x99 part 0x001"


@pytest.mark.parametrize("package", [None, "-1"])
def test_what_a_kernel_does_not_say_of_a_processor_has_a_reason_without_python(
    package: str | None,
) -> None:
    cpu = gather_facts(arm([("0x41", "0xd0c")], package)).cpu
    for value in (cpu.family, cpu.model, cpu.microcode, cpu.sockets):
        assert value == Unknown(unknown="the kernel does not say it on this processor")
    nameless = gather_facts(changed(EMPTY, files={"/proc/cpuinfo": "processor : 0\n"}))
    assert isinstance(nameless.cpu.name, Unknown)
    assert isinstance(nameless.cpu.cores, Unknown)
    assert "Error" not in nameless.model_dump_json() + cpu.model_dump_json()


def test_facts_survive_being_written() -> None:
    result = facts(blackwell(8))
    assert HostFacts.model_validate_json(result.model_dump_json()) == result


def test_a_machine_that_says_nothing_has_only_reasons() -> None:
    result = gather_facts(EMPTY)
    assert isinstance(result.gpus, Unknown)
    assert isinstance(result.driver.version, Unknown)
    assert isinstance(result.xids, Unknown)
    assert isinstance(result.pci.iommu, Unknown)
    assert result.host == "unnamed"


def test_empty_files_are_unknown_and_not_zero() -> None:
    files = {path: CapturedFile(text="") for path in h200().files}
    commands = {name: CapturedCommand(code=0, out="") for name in capture.COMMANDS}
    result = gather_facts(EMPTY.model_copy(update={"files": files, "commands": commands}))
    assert isinstance(result.memory_bytes, Unknown)
    assert isinstance(result.cpu.name, Unknown)
    assert isinstance(result.kernel.command_line, Unknown)
    assert isinstance(result.software.os, Unknown)


def test_files_full_of_noise_are_unknown() -> None:
    files = {path: CapturedFile(text="\x00ÿ ¿qué?\n= : ;") for path in h200().files}
    commands = {name: CapturedCommand(code=0, out="\x1b[31mnada: {[") for name in capture.COMMANDS}
    result = gather_facts(EMPTY.model_copy(update={"files": files, "commands": commands}))
    assert isinstance(result.gpus, Unknown)
    assert isinstance(result.memory_bytes, Unknown)
    assert isinstance(result.disks, Unknown)
    assert isinstance(result.driver.is_open, Unknown)


def test_a_program_that_failed_is_quoted() -> None:
    lost = CapturedCommand(
        code=9, err="Unable to determine the device handle for GPU: Unknown Error"
    )
    result = h200().model_copy(update={"commands": {**h200().commands, "nvidia-smi": lost}})
    gpus = gather_facts(result).gpus
    assert isinstance(gpus, Unknown)
    assert "code 9: Unable to determine" in gpus.unknown


def test_registry_keys_are_read_from_where_the_driver_keeps_them() -> None:
    line = 'RegistryDwords: "ForceP2P=0x11;RMForceP2PType=1;EnableResizableBar=1"\n'
    result = facts(changed(h200(), files={"/proc/driver/nvidia/params": line}))
    assert result.driver.registry == {
        "ForceP2P": "0x11",
        "RMForceP2PType": "1",
        "EnableResizableBar": "1",
    }


def test_the_proprietary_module_is_told_from_the_open_one() -> None:
    message = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.288.01  Release Build\n"
    result = facts(changed(h200(), files={"/proc/driver/nvidia/version": message}))
    assert result.driver.is_open is False
    assert result.driver.version == "535.288.01"


XIDS = """\
[  100.1] NVRM: Xid (PCI:0000:23:00): 79, GPU has fallen off the bus.
[  100.2] NVRM: Xid (PCI:0000:23:00): 79, pid=1122, GPU has fallen off the bus.
[  200.0] NVRM: Xid (PCI:0000:0f:00): 119, pid=31, name=python3, Timeout after 6s of waiting
[  300.0] usb 1-1: new device
"""


def test_xids_are_counted_by_card_and_kind() -> None:
    result = facts(changed(h200(), outputs={"journal": XIDS})).xids
    assert not isinstance(result, Unknown)
    assert [(x.code, x.address, x.times) for x in result] == [
        (79, "0000:23:00", 2),
        (119, "0000:0f:00", 1),
    ]


def test_a_bus_number_is_not_taken_for_an_xid() -> None:
    log = "Xid (PCI:0000:79:00)\nNVRM: Xid (PCI:0000:79:00): oops"
    assert facts(changed(h200(), outputs={"journal": log})).xids == []


def test_a_journal_without_matches_means_no_xid() -> None:
    quiet = CapturedCommand(code=1)
    denied = CapturedCommand(unknown="Operation not permitted")
    commands = {"journal": quiet, "dmesg": denied}
    assert gather_facts(EMPTY.model_copy(update={"commands": commands})).xids == []


def test_logs_that_may_not_be_read_are_unknown() -> None:
    denied = CapturedCommand(
        code=1, err="dmesg: read kernel buffer failed: Operation not permitted"
    )
    commands = {"journal": denied, "dmesg": denied}
    result = gather_facts(EMPTY.model_copy(update={"commands": commands})).xids
    assert isinstance(result, Unknown)
    assert "not permitted" in result.unknown


def test_secrets_of_a_command_line_are_never_kept() -> None:
    line = "root=/dev/vda quiet my.token=abc123 luks_password=x iommu=pt -- --auth hunter2"
    kept = facts(changed(h200(), files={"/proc/cmdline": line}))
    assert kept.kernel.command_line == (
        "root=/dev/vda quiet my.token=[secret] luks_password=[secret] iommu=pt"
        " -- [arguments of init]"
    )


def test_redaction_takes_out_what_tells_machines_apart() -> None:
    uuid = "3f0e1a52-1111-2222-3333-444455556666"
    named = changed(
        h200(),
        files={
            "/etc/machine-id": "0123456789abcdef0123456789abcdef\n",
            "/proc/sys/kernel/hostname": "secret-rig\n",
            "/proc/cmdline": f"root=UUID={uuid} iommu=pt ip=10.1.2.3 -- --token x\n",
        },
        outputs={
            "nvidia-smi": h200()
            .commands["nvidia-smi"]
            .out.replace("<uuid>GPU-", f"<uuid>GPU-{uuid}")
            .replace("<board_part_number>", "<board_serial>123</board_serial><board_part_number>"),
            "journal": "2026-11-15T07:00:00+0000 secret-rig kernel: NVRM: Xid (PCI:0000:23:00): 79,"
            " pid=1, name=my-model, x\n",
        },
    )
    text = redact_capture(named).model_dump_json()
    for secret in ("secret-rig", uuid, "0123456789abcdef", "10.1.2.3", "--token", "my-model"):
        assert secret not in text
    assert "iommu=pt" in text
    assert "Xid (PCI:0000:23:00): 79" in text


def test_redaction_keeps_what_belongs_together() -> None:
    uuid = "3f0e1a52-1111-2222-3333-444455556666"
    twice = changed(h200(), outputs={"dmesg": f"NVRM {uuid}\nnvidia {uuid}\n"})
    lines = redact_capture(twice).commands["dmesg"].out.splitlines()
    assert lines[0].split()[1] == lines[1].split()[1] != uuid


def test_redaction_takes_a_serial_number_out_of_registers() -> None:
    bridge = "/sys/bus/pci/devices/0000:00:01.1/config"
    before, after = blackwell(1).data(bridge), redact_capture(blackwell(1)).data(bridge)
    assert not isinstance(before, Unknown)
    assert not isinstance(after, Unknown)
    at = extended_capability(before, 3)
    assert isinstance(at, int)
    assert before[at + 4 : at + 12] != bytes(8)
    assert after[at + 4 : at + 12] == bytes(8)
    assert after[:at] == before[:at]


def test_redacted_twice_is_redacted_once() -> None:
    assert (
        redact_capture(redact_capture(h200())).model_dump() == redact_capture(h200()).model_dump()
    )


def test_the_committed_capture_is_redacted() -> None:
    gpus = facts().gpus
    assert not isinstance(gpus, Unknown)
    assert str(gpus[0].serial).startswith("redacted-serial-")
    assert str(gpus[0].uuid).startswith("GPU-redacted-uuid-")


def test_a_host_is_called_by_a_digest_of_its_machine_id() -> None:
    identity = "0123456789abcdef0123456789abcdef"
    name = facts(changed(h200(), files={"/etc/machine-id": f"{identity}\n"})).host
    assert name.startswith("sha256:")
    assert identity not in name


def test_a_statement_carries_a_summary_of_the_facts() -> None:
    body = summarise(facts(blackwell(2))).model_dump(mode="json")
    check_predicate(HOST_FACTS, body)
    assert body["acs_redirect"] is False
    assert len(body["gpus"]) == 2
    assert body["container_runtime"] == {"unknown": "neither docker nor podman answers"}
    json.dumps(body)


def test_a_bridge_that_cannot_be_read_leaves_acs_unknown_in_the_record() -> None:
    result = blackwell(2)
    files = {
        p: s for p, s in result.files.items() if p != "/sys/bus/pci/devices/0000:00:02.1/config"
    }
    summary = summarise(facts(result.model_copy(update={"files": files})))
    assert isinstance(summary.acs_redirect, Unknown)


def test_a_tree_is_read_without_asking_programs(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 1024 kB\n")
    result = gather_facts(read_capture(tmp_path))
    assert result.memory_bytes == 1 << 20
    assert isinstance(result.gpus, Unknown)
    assert "copied tree" in result.gpus.unknown


def test_a_folder_in_the_place_of_a_file_says_why(tmp_path: Path) -> None:
    (tmp_path / "proc" / "cmdline").mkdir(parents=True)
    output = read_capture(tmp_path).text("/proc/cmdline")
    assert isinstance(output, Unknown)
    assert "directory" in output.unknown


def test_a_program_that_does_not_answer_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "nvidia-smi"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(capture, "_TIME_LIMIT_S", 0.3)
    monkeypatch.setattr(capture, "COMMANDS", {"nvidia-smi": ["nvidia-smi", "-q", "-x"]})
    text = read_capture(None).output("nvidia-smi")
    assert isinstance(text, Unknown)
    assert "did not answer within 0.3 s" in text.unknown


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version": 1}', "[" * 100000, "\x00"])
def test_what_is_no_capture_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "capture.json"
    path.write_text(text)
    with pytest.raises(FactsUnreadable):
        read_capture(path)


def test_a_capture_is_taken_by_a_bare_python(tmp_path: Path) -> None:
    import subprocess
    import sys

    script = Path(capture.__file__)
    out = tmp_path / "out.json"
    subprocess.run([sys.executable, "-I", "-S", str(script), str(out)], check=True)
    assert read_capture(out).version == 1


def test_the_fixture_is_what_our_redaction_leaves() -> None:
    assert "GPU-redacted-uuid" in H200.read_text("utf-8")


@pytest.mark.parametrize("read", [read_recorded_facts, read_capture])
def test_facts_without_end_are_refused_at_once(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    large = tmp_path / "large.json"
    with large.open("wb") as out:
        out.truncate(50 << 30)
    with pytest.raises(FactsUnreadable, match="it is larger than"):
        read(large)
    with pytest.raises(FactsUnreadable, match="is not a plain file"):
        read(Path("/dev/zero"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FactsUnreadable, match="is not a plain file"):
        read(tmp_path / "pipe")
