#!/usr/bin/python3
"""Writes what nvidia-smi says of each GPU, and the Xids of this boot, for the node exporter.

    sm120-gpu-metrics FILE.prom

The file is replaced whole. Where nvidia-smi fails or hangs, the numbers of the GPUs are left out
and sm120_gpu_collector_success is 0: an old number is never shown as a new one.
"""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# fields of nvidia-smi, our name for each, what one unit of nvidia-smi is in the unit of the name
NUMBERS = {
    "utilization.gpu": ("sm120_gpu_utilization_ratio", 0.01),
    "utilization.memory": ("sm120_gpu_memory_utilization_ratio", 0.01),
    "memory.total": ("sm120_gpu_memory_total_bytes", 1 << 20),
    "memory.used": ("sm120_gpu_memory_used_bytes", 1 << 20),
    "power.draw": ("sm120_gpu_power_draw_watts", 1),
    "power.limit": ("sm120_gpu_power_limit_watts", 1),
    "power.default_limit": ("sm120_gpu_power_default_limit_watts", 1),
    "clocks.sm": ("sm120_gpu_sm_clock_hertz", 1_000_000),
    "clocks.mem": ("sm120_gpu_memory_clock_hertz", 1_000_000),
    "clocks.max.sm": ("sm120_gpu_sm_clock_max_hertz", 1_000_000),
    "clocks.max.mem": ("sm120_gpu_memory_clock_max_hertz", 1_000_000),
    "temperature.gpu": ("sm120_gpu_temperature_celsius", 1),
    "temperature.memory": ("sm120_gpu_memory_temperature_celsius", 1),
    "fan.speed": ("sm120_gpu_fan_ratio", 0.01),
    "pcie.link.gen.current": ("sm120_gpu_pcie_link_generation", 1),
    "pcie.link.width.current": ("sm120_gpu_pcie_link_width", 1),
    # since the driver was loaded
    "ecc.errors.corrected.volatile.total": ("sm120_gpu_ecc_corrected_errors_total", 1),
    "ecc.errors.uncorrected.volatile.total": ("sm120_gpu_ecc_uncorrected_errors_total", 1),
}
# Bits of nvml.h (nvmlClocksEventReasons); an idle card is not held.
REASONS = {
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
# drivers before 535 have clocks_throttle_reasons.active; SM120 needs 570
_MASK = "clocks_event_reasons.active"
_LABELS = ("index", "uuid", "pci.bus_id", "name", "driver_version")
FIELDS = (*_LABELS, _MASK, *NUMBERS)
OTHERS = {
    "sm120_gpu_info": "Its name, UUID, address and driver.",
    "sm120_gpu_clocks_held": "Whether the clocks are held down for this reason.",
    "sm120_gpu_xids_total": "Xids in the kernel's log since boot.",
    "sm120_gpu_collector_success": "Whether nvidia-smi answered.",
    "sm120_gpu_collector_time_seconds": "When the file was written.",
    "sm120_host_out_of_service": "Whether the role health has taken the host out of service.",
}
_XID = re.compile(
    r"(?m)^NVRM: Xid \(PCI:([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})\S*: (\d{1,4})\b"
)
_OUT = Path("/run/sm120/out-of-service")
# nvidia-smi that a hanging driver keeps: it ignores SIGKILL, and no second one is started
_STUCK = Path("/run/sm120/nvidia-smi.stuck")
_TIME_LIMIT_S = 20.0


def output_of(argv: list[str]) -> str:
    """The output of a program; OSError where it fails or does not end."""
    process = subprocess.Popen(
        argv,
        env={"PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"), "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=_TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            _STUCK.parent.mkdir(parents=True, exist_ok=True)
            _STUCK.write_text(f"{process.pid}\n", encoding="ascii")
        raise OSError(f"{argv[0]} did not answer within {_TIME_LIMIT_S:g} s") from None
    # journalctl --grep ends with 1 where nothing matches, and says nothing
    if process.returncode and (err.strip() or argv[0] != "journalctl"):
        lines = (err or out).decode("utf-8", "replace").strip().splitlines()
        raise OSError(f"{argv[0]} ended with {process.returncode}: {lines[-1] if lines else ''}")
    return out.decode("utf-8", "replace")


def labels(**values: str) -> str:
    """As Prometheus writes them."""
    escaped = {
        name: value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        for name, value in values.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"


def gpu_samples(text: str) -> Iterator[tuple[str, str, float]]:
    """Name, labels and value of each number of each card; what a card does not have is left out."""
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != len(FIELDS):
            raise OSError(f"nvidia-smi gave {len(row)} fields of {len(FIELDS)}")
        card = dict(zip(FIELDS, row, strict=True))
        # 00000000:C1:00.0 as Xids have it: 0000:c1:00
        domain, _, place = card["pci.bus_id"].lower().partition(":")
        address = f"{domain[-4:]}:{place.partition('.')[0]}"
        own = {"gpu": card["index"], "address": address}
        more = {"uuid": card["uuid"], "name": card["name"], "driver": card["driver_version"]}
        yield "sm120_gpu_info", labels(**own, **more), 1
        for field, (name, unit) in NUMBERS.items():
            # [N/A], [Not Supported], [Unknown Error], [GPU requires reset]
            with suppress(ValueError):
                yield name, labels(**own), float(card[field]) * unit
        with suppress(ValueError):
            mask = int(card[_MASK], 16)
            for bit, reason in REASONS.items():
                yield "sm120_gpu_clocks_held", labels(**own, reason=reason), float(bool(mask & bit))


def collect() -> Iterator[tuple[str, str, float]]:
    """All samples; the cards' as far as nvidia-smi answers."""
    answered = 1.0
    try:
        stuck = _STUCK.read_text(encoding="ascii").strip() if _STUCK.exists() else "none"
        name = Path("/proc", stuck, "comm")
        # another program may have got its number since
        if name.exists() and name.read_text(encoding="utf-8").strip() == "nvidia-smi":
            raise OSError(f"nvidia-smi (process {stuck}) still hangs")
        _STUCK.unlink(missing_ok=True)
        query = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
        yield from list(gpu_samples(output_of(query)))
    except OSError as error:
        print(f"sm120-gpu-metrics: {error}", file=sys.stderr)
        answered = 0.0
    yield "sm120_gpu_collector_success", "", answered
    yield "sm120_gpu_collector_time_seconds", "", float(int(time.time()))
    yield "sm120_host_out_of_service", "", float(_OUT.exists())
    journal = ["journalctl", "--boot", "--quiet", "--no-pager", "--output=cat"]
    try:
        log = output_of([*journal, "--grep=NVRM: Xid", "_TRANSPORT=kernel"])
    except OSError as error:
        print(f"sm120-gpu-metrics: {error}", file=sys.stderr)
        return
    times = Counter((match[1].lower(), match[2]) for match in _XID.finditer(log))
    for (address, code), count in sorted(times.items()):
        yield "sm120_gpu_xids_total", labels(address=address, xid=code), float(count)


def main(path: Path) -> None:
    """Samples of one name stand together, below their help and type."""
    texts = {name: f"{field} of nvidia-smi." for field, (name, _) in NUMBERS.items()} | OTHERS
    found: dict[str, list[str]] = {}
    for name, marks, value in collect():
        found.setdefault(name, []).append(f"{name}{marks} {value:.12g}\n")
    lines = []
    for name, samples in found.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {name} {texts[name]}\n", f"# TYPE {name} {kind}\n", *samples]
    # the exporter reads names that end in .prom only, so never a half of one
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(lines), encoding="utf-8")
    fresh.chmod(0o644)
    fresh.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
