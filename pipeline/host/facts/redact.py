"""Takes out of a captured machine what tells who or which one it is: the facts stay readable.

The same value gets the same stand-in everywhere, so that what belonged together still does.
"""

from __future__ import annotations

import base64
import re

from pipeline.host.facts.pci import extended_capability
from pipeline.host.facts.source import Capture, FileSaid, ProgramSaid

_TAGS = (
    *("serial", "uuid", "pdi", "board_id", "chassis_serial_number", "host_id", "gpu_fabric_guid"),
    *("clusterUuid", "process_name", "imex_channel", "board_serial", "hostname"),
)
_TAG = re.compile(rf"<({'|'.join(_TAGS)})>([^<]+)</\1>")
_UUID = re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
_MAC = re.compile(r"\b[0-9a-f]{2}(?::[0-9a-f]{2}){5}\b")
_SERIAL_WORDS = re.compile(r"(?i)\b(serial(?: ?number)?[:=] ?)(\S+)")
_PROCESS = re.compile(r"\b(name=)[^,\s]+")
_JOURNAL = re.compile(r"(?m)^(\S+ )\S+( kernel:)")
_KEPT_VALUES = re.compile(
    r"^(amd_iommu|intel_iommu|iommu|iommu\..*|pci|pcie_.*|mitigations|nvme_core\..*|nvidia.*"
    r"|hugepages.*|default_hugepagesz|isolcpus|nohz_full|numa_balancing|transparent_hugepage"
    r"|swiotlb|processor\..*|intel_idle\..*|modprobe\.blacklist|rd\.driver\.blacklist)$"
)
_NO_VALUE = ("N/A", "None", "Unknown Error", "[N/A]")
_SERIAL_NUMBER = 0x0003  # an extended capability
_IDENTITIES = ("/etc/machine-id", "/proc/sys/kernel/hostname")


class _Cover:
    """Stand-ins by value."""

    def __init__(self) -> None:
        self._given: dict[str, str] = {}

    def name(self, kind: str, value: str) -> str:
        return self._given.setdefault(value, f"redacted-{kind}-{len(self._given)}")

    def text(self, text: str) -> str:
        text = _TAG.sub(self._tag, text)
        text = _SERIAL_WORDS.sub(lambda m: m[1] + self.name("serial", m[2]), text)
        text = _UUID.sub(lambda m: self.name("uuid", m[0]), text)
        text = _MAC.sub(lambda m: self.name("mac", m[0]), text)
        text = _PROCESS.sub(r"\1redacted", text)
        return _JOURNAL.sub(r"\1host\2", text)

    def _tag(self, found: re.Match[str]) -> str:
        tag, value = found[1], found[2].strip()
        if value in _NO_VALUE or _UUID.search(value):
            return found[0]
        return f"<{tag}>{self.name(tag, value)}</{tag}>"


def redact(capture: Capture) -> Capture:
    """The same machine, without serial numbers, UUIDs, names, addresses and foreign arguments."""
    cover = _Cover()
    files = {cover.text(p): _file(cover, p, said) for p, said in capture.files.items()}
    commands = {n: _program(cover, said) for n, said in capture.commands.items()}
    return capture.model_copy(update={"files": files, "commands": commands})


def _file(cover: _Cover, path: str, said: FileSaid) -> FileSaid:
    if said.base64 is not None:
        return _without_serial(said.base64)
    if said.text is None:
        return said
    if path in _IDENTITIES:
        return FileSaid(text="redacted\n")
    if path == "/proc/cmdline":
        return FileSaid(text=_command_line(said.text))
    return FileSaid(text=cover.text(said.text))


def _without_serial(text: str) -> FileSaid:
    """Registers with the device's serial number, where it has one, set to zero."""
    try:
        data = bytearray(base64.b64decode(text, validate=True))
    except ValueError:
        return FileSaid(unknown="its registers were captured damaged")
    at = extended_capability(bytes(data), _SERIAL_NUMBER)
    if isinstance(at, int):
        end = min(at + 12, len(data))
        data[at + 4 : end] = bytes(max(0, end - at - 4))
    return FileSaid(base64=base64.b64encode(bytes(data)).decode())


def _program(cover: _Cover, said: ProgramSaid) -> ProgramSaid:
    return said.model_copy(update={"out": cover.text(said.out), "err": cover.text(said.err)})


def _command_line(text: str) -> str:
    """Names stay; values only where they are about devices."""
    words = []
    for word in text.partition(" -- ")[0].split():
        name, equals, _ = word.partition("=")
        keep = not equals or _KEPT_VALUES.match(name)
        words.append(word if keep else f"{name}=redacted")
    return " ".join(words) + "\n"
