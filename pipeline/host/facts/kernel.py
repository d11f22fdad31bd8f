"""The kernel's side: driver modules and parameters, boot settings, and Xid errors of cards."""

from __future__ import annotations

import re
from collections import Counter

from pipeline.host.facts.model import Driver, Kernel, Xid
from pipeline.host.facts.smi import read_field
from pipeline.host.facts.source import Capture
from pipeline.known import Known, Unknown, then, unknown

# 580.126 and 595.58.03
_VERSION = re.compile(r"\b(\d{3}\.\d+(?:\.\d+)?)\b")
# NVRM: Xid (PCI:0000:c1:00): 79, pid=1, GPU has fallen off the bus.
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)(.*)")
# Arguments of the boot loader may hold passwords, and facts are published.
_SECRET = re.compile(
    r"(?i)\b([\w.-]*(?:pass(?:word|wd)?|secret|token|key|credential)[\w.-]*)=(\S+)"
)


def read_driver(capture: Capture) -> Driver:
    """Module, flavour and parameters, from where the driver itself keeps them."""
    loaded = capture.text("/proc/driver/nvidia/version")
    log = capture.output("nvidia-smi")
    parameters = then(capture.text("/proc/driver/nvidia/params"), _parameters)
    # the loaded module's own version; nvidia-smi reports that of the library
    version = then(loaded, _version)
    if isinstance(version, Unknown):
        reported = then(log, lambda x: read_field(x, "driver_version"))
        version = version if isinstance(reported, Unknown) else reported
    return Driver(
        version=version,
        cuda=then(log, lambda x: read_field(x, "cuda_version")),
        is_open=then(loaded, _is_open),
        modules=then(capture.text("/proc/modules"), _modules),
        parameters=parameters,
        registry=then(parameters, lambda p: _registry(p["RegistryDwords"])),
        hmm_disabled=then(capture.text("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm"), _yes),
    )


def _version(text: str) -> Known[str]:
    match = _VERSION.search(text.splitlines()[0])
    return match[1] if match else unknown(f"names no version: {text.splitlines()[0]}")


def _is_open(text: str) -> Known[bool]:
    first = text.splitlines()[0]
    if "Open Kernel Module" in first:
        return True
    return False if "Kernel Module" in first else unknown(f"names no kernel module: {first}")


def _modules(text: str) -> Known[list[str]]:
    return sorted(x.split()[0] for x in text.splitlines() if x.startswith("nvidia"))


def _parameters(text: str) -> Known[dict[str, str]]:
    pairs = [x.partition(":") for x in text.splitlines() if ":" in x]
    parameters = {name.strip(): value.strip().strip('"') for name, _, value in pairs}
    return parameters or unknown("/proc/driver/nvidia/params holds no parameter")


def _registry(text: str) -> Known[dict[str, str]]:
    pairs = [x.partition("=") for x in text.split(";") if x.strip()]
    return {name.strip(): value.strip() for name, _, value in pairs}


def _yes(text: str) -> Known[bool]:
    return {"Y": True, "1": True, "N": False, "0": False}[text]


def read_xids(capture: Capture) -> Known[list[Xid]]:
    """Errors by card and kind: from the journal where it is kept, else since boot."""
    logs = [capture.output(name) for name in ("journal", "dmesg")]
    readable = [x for x in logs if not isinstance(x, Unknown)]
    journal = capture.commands.get("journal")
    # journalctl --grep ends with 1 and without output when nothing matches: there are no Xids
    none = journal is not None and journal.code == 1 and not (journal.out.strip() or journal.err)
    if not readable and not none:
        return logs[-1] if isinstance(logs[-1], Unknown) else unknown("no kernel log can be read")
    # the first alone: dmesg repeats what the journal has, and errors are counted
    return find_xids("\n".join(readable[:1]))


def find_xids(text: str) -> list[Xid]:
    """Every kind of Xid in a kernel log."""
    times: Counter[tuple[int, str]] = Counter()
    last: dict[tuple[int, str], str] = {}
    # a failing card repeats one Xid thousands of times: count them, and keep the last text
    for match in _XID.finditer(text):
        key = (int(match[2]), match[1].lower())
        times[key] += 1
        last[key] = match[3].lstrip(", ").strip()[:200]
    return [
        Xid(
            code=code, address=address, times=times[code, address], last_message=last[code, address]
        )
        for code, address in sorted(times)
    ]


def read_kernel(capture: Capture) -> Kernel:
    """The kernel's command line, and the limits it sets."""
    return Kernel(
        release=capture.text("/proc/sys/kernel/osrelease"),
        command_line=then(capture.text("/proc/cmdline"), without_secrets),
        swappiness=then(capture.text("/proc/sys/vm/swappiness"), int),
        numa_balancing=then(capture.text("/proc/sys/kernel/numa_balancing"), int),
        memlock=then(capture.text("/proc/self/limits"), _memlock),
        shm_bytes=then(capture.output("shm"), lambda x: int(x.split()[-1])),
    )


def without_secrets(text: str) -> Known[str]:
    """A kernel command line without passwords and tokens; --redact removes more.

    What follows `--` is for init, not for the kernel, and is left out.
    """
    kernel, _, init = text.partition(" -- ")
    return _SECRET.sub(r"\1=[secret]", kernel) + (" -- [arguments of init]" if init else "")


def _memlock(text: str) -> Known[str]:
    line = next((x for x in text.splitlines() if x.startswith("Max locked memory")), None)
    return line.split()[3] if line else unknown("/proc/self/limits names no locked memory")
