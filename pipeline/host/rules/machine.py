"""Rules about the machine around the cards: bus, driver, kernel."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.host.facts.model import HostFacts
from pipeline.host.rules.verdict import Judged, gpus_of, row
from pipeline.known import Unknown, unknown

# Inferred from which pairs people report to work, not from a table of NVIDIA's.
DRIVER_OF_CUDA = {"13.0": 580, "13.1": 590, "13.2": 595, "13.3": 610}
# Xids that say a card or its link is gone or going.
_GRAVE = {48, 62, 63, 64, 74, 79, 92, 94, 95, 109, 119, 120, 140, 154}


def _several(facts: HostFacts) -> bool:
    return len(gpus_of(facts)) > 1


def iommu_and_acs(facts: HostFacts, cuda: str | None) -> Iterator[Judged]:
    """A translating IOMMU with ACS that redirects hangs the first all_reduce."""
    if not _several(facts):
        why = "one card talks to no other"
        yield Judged(rule="IOMMU", subject="host", verdict="not applicable", why=why)
        return
    mode = facts.pci.iommu
    good = mode if isinstance(mode, Unknown) else mode != "translated"
    fix = "Boot with iommu=pt, or with amd_iommu=off (intel_iommu=off); the role `pcie` does."
    yield row("IOMMU", "host", good, f"is {mode}", fix)
    if not facts.pci.bridges:
        why = "no bridge lies above a card"
        yield Judged(rule="ACS", subject="host", verdict="unknown", why=why)
    for bridge in facts.pci.bridges:
        redirect = bridge.acs_redirect
        off = redirect if isinstance(redirect, Unknown) else not redirect
        why = f"ACS control is {bridge.acs_control}" if bridge.has_acs is True else "has no ACS"
        fix = "Switch ACS off at each boot (`setpci -s BDF ECAP_ACS+6.w=0000`; the role `pcie`)."
        yield row("ACS", bridge.address, off, why, fix)


def aspm(facts: HostFacts, cuda: str | None) -> Iterator[Judged]:
    """Links that sleep come back late or not at all."""
    fix = "Boot with pcie_aspm=off pcie_port_pm=off; the role `pcie` does."
    policy, line = facts.pci.aspm_policy, facts.kernel.command_line
    if not isinstance(line, Unknown) and "pcie_aspm=off" in line.split():
        yield row("ASPM", "host", True, "pcie_aspm=off", fix)
        return
    yield row("ASPM", "host", _links_stay_up(facts), f"the policy is {policy}", fix)


def _links_stay_up(facts: HostFacts) -> bool | Unknown:
    """What the policy leaves open, the links themselves say."""
    policy = facts.pci.aspm_policy
    links = [b.aspm for b in facts.pci.bridges] + [g.aspm for g in facts.pci.gpus]
    if isinstance(policy, Unknown):
        return policy
    if policy == "performance":
        return True
    if policy.startswith("power") or any(isinstance(x, str) and x != "off" for x in links):
        return False
    lost = next((x for x in links if isinstance(x, Unknown)), None)
    return lost or (True if links else unknown("the policy is default, and no link can be read"))


def hmm(facts: HostFacts, cuda: str | None) -> Iterator[Judged]:
    """HMM locks up peer-to-peer, and with KASLR keeps CUDA from starting."""
    if not _several(facts):
        why = "one card has no peer"
        yield Judged(rule="HMM", subject="host", verdict="not applicable", why=why)
        return
    fix = "options nvidia_uvm uvm_disable_hmm=1 in /etc/modprobe.d, then reboot."
    yield row("HMM", "host", facts.driver.hmm_disabled, "uvm_disable_hmm", fix)


def driver_branch(facts: HostFacts, cuda: str | None) -> Iterator[Judged]:
    """Code compiled at run time needs a driver of at least the image's CUDA branch."""
    if cuda is None:
        why = "no image was named (--cuda)"
        yield Judged(rule="driver", subject="host", verdict="not applicable", why=why)
        return
    least, version = DRIVER_OF_CUDA.get(cuda), facts.driver.version
    if least is None:
        why = f"which driver CUDA {cuda} needs is not in the table"
        yield Judged(rule="driver", subject="host", verdict="unknown", why=why)
        return
    good = version if isinstance(version, Unknown) else int(version.split(".")[0]) >= least
    fix = f"Install a driver of branch {least} or later."
    yield row("driver", "host", good, f"{version} for CUDA {cuda} (needs {least})", fix)


def xids(facts: HostFacts, cuda: str | None) -> Iterator[Judged]:
    """Errors that the driver has written down."""
    if isinstance(facts.xids, Unknown):
        yield row("Xid", "host", facts.xids, "", "")
        return
    grave = [x for x in facts.xids if x.code in _GRAVE]
    words = (
        ", ".join(f"{x.code} at {x.address} ({x.times}x)" for x in grave) or "none that is grave"
    )
    yield row("Xid", "host", not grave, words, "`sm120 host doctor` names what each one means.")


def tuning(facts: HostFacts, cuda: str | None) -> Iterator[Judged]:
    """The host's own settings."""
    governors = facts.cpu.governors
    good = governors if isinstance(governors, Unknown) else governors == ["performance"]
    yield row("governor", "host", good, f"{governors}", "Set it to performance (`host_tuning`).")
    yield locked_memory(facts)
    line = facts.kernel.command_line
    safe = line if isinstance(line, Unknown) else "mitigations=off" not in line.split()
    fix = "Take mitigations=off away: it buys little and opens the machine."
    yield row("mitigations", "host", safe, "the kernel's mitigations", fix)


def locked_memory(facts: HostFacts) -> Judged:
    """What engines may lock: containers have a limit of their own, programs that of their login."""
    lock, software = facts.kernel.memlock, facts.software
    engines = (software.docker, software.podman)
    if lock != "unlimited" and any(not isinstance(engine, Unknown) for engine in engines):
        why = "containers have their own limit; the role `container_runtime` sets it"
        return Judged(rule="memlock", subject="host", verdict="not applicable", why=why)
    free = lock if isinstance(lock, Unknown) else lock == "unlimited"
    fix = "LimitMEMLOCK=infinity in the engine's unit, or `ulimit -l unlimited` before it starts."
    return row("memlock", "host", free, f"{lock}", fix)
