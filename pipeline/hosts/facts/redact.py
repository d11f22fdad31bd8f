"""Removes what identifies a captured machine or its owner; the facts stay readable.

The same value gets the same placeholder everywhere, so that what belonged together still does.
"""

from __future__ import annotations

import base64
import re

from pipeline.core.known import Unknown, then
from pipeline.hosts.facts.pci import extended_capability
from pipeline.hosts.facts.source import Capture, CapturedFile

_TAGS = (
    *("serial", "uuid", "pdi", "board_id", "chassis_serial_number", "host_id", "gpu_fabric_guid"),
    *("clusterUuid", "process_name", "imex_channel", "board_serial", "hostname"),
)
_TAG = re.compile(rf"<({'|'.join(_TAGS)})>([^<]+)</\1>")
_UUID = re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
_MAC = re.compile(r"\b[0-9a-f]{2}(?::[0-9a-f]{2}){5}\b")
_SERIAL = re.compile(r"(?i)\b(serial(?: ?number)?[:=] ?)(\S+)")
# an Xid names the program that was running
_PROCESS = re.compile(r"\b(name=)[^,\s]+")
# between the time and `kernel:` journalctl prints the name of the host
_JOURNAL = re.compile(r"(?m)^(\S+ )\S+( kernel:)")
# Arguments about devices; others name disks, addresses and people.
_KEPT_VALUES = re.compile(
    r"^(amd_iommu|intel_iommu|iommu|iommu\..*|pci|pcie_.*|mitigations|nvme_core\..*|nvidia.*"
    r"|hugepages.*|default_hugepagesz|isolcpus|nohz_full|numa_balancing|transparent_hugepage"
    r"|swiotlb|processor\..*|intel_idle\..*|modprobe\.blacklist|rd\.driver\.blacklist)$"
)
_NO_VALUE = ("N/A", "None", "Unknown Error", "[N/A]")
_SERIAL_NUMBER = 0x0003  # an extended capability
_IDENTITIES = ("/etc/machine-id", "/proc/sys/kernel/hostname")


class _Placeholders:
    """Placeholders by the value that they replace."""

    def __init__(self) -> None:
        self._given: dict[str, str] = {}

    def name(self, kind: str, value: str) -> str:
        return self._given.setdefault(value, f"redacted-{kind}-{len(self._given)}")

    def text(self, text: str) -> str:
        def tag(match: re.Match[str]) -> str:
            name, value = match[1], match[2].strip()
            # replaced below, by the UUID's placeholder from other places
            if value in _NO_VALUE or _UUID.search(value):
                return match[0]
            return f"<{name}>{self.name(name, value)}</{name}>"

        text = _TAG.sub(tag, text)
        text = _SERIAL.sub(lambda m: m[1] + self.name("serial", m[2]), text)
        text = _UUID.sub(lambda m: self.name("uuid", m[0]), text)
        text = _MAC.sub(lambda m: self.name("mac", m[0]), text)
        text = _PROCESS.sub(r"\1redacted", text)
        return _JOURNAL.sub(r"\1host\2", text)


def redact_capture(capture: Capture) -> Capture:
    """Remove serial numbers, UUIDs, names, addresses and other arguments."""
    placeholders = _Placeholders()
    files = {}
    for path, file in capture.files.items():
        name = placeholders.text(path)
        if file.base64 is not None:
            clean_file, data = file, capture.data(path)
            at = then(data, lambda registers: extended_capability(registers, _SERIAL_NUMBER))
            if isinstance(data, Unknown):
                clean_file = CapturedFile(unknown="the captured registers are damaged")
            elif isinstance(at, int):
                # the device's serial number, eight bytes after the head, becomes zero
                zeros = bytes(len(data[at + 4 : at + 12]))
                clean = data[: at + 4] + zeros + data[at + 12 :]
                clean_file = CapturedFile(base64=base64.b64encode(clean).decode())
        elif file.text is None:
            clean_file = file
        elif path in _IDENTITIES:
            clean_file = CapturedFile(text="redacted\n")
        elif path == "/proc/cmdline":
            # names stay; values only where they are about devices
            pairs = [x.partition("=") for x in file.text.partition(" -- ")[0].split()]
            words = [
                f"{n}{sign}{value if not sign or _KEPT_VALUES.match(n) else 'redacted'}"
                for n, sign, value in pairs
            ]
            clean_file = CapturedFile(text=" ".join(words) + "\n")
        else:
            clean_file = CapturedFile(text=placeholders.text(file.text))
        files[name] = clean_file
    commands = {}
    for name, command in capture.commands.items():
        texts = {"out": placeholders.text(command.out), "err": placeholders.text(command.err)}
        commands[name] = command.model_copy(update=texts)
    return capture.model_copy(update={"files": files, "commands": commands})
