"""Rules about the machine around the cards: bus, driver, kernel."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.core.known import Unknown, unknown
from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.rules.verdict import RuleResult, first_unknown, gpus_of, not_applicable, result

# Minor version compatibility does not cover PTX that is compiled at run time
# (NVIDIA/nvbandwidth#61). The pairs are those that people report to work; NVIDIA has no such table.
DRIVER_OF_CUDA = {"13.0": 580, "13.1": 590, "13.2": 595, "13.3": 610}
# Xids after which a card or its link is gone or failing; others are faults of programs.
# Reported on Blackwell: 79, 109, 62 with 119 and 154 (NVIDIA/open-gpu-kernel-modules#1151, #1243,
# #1045).
_GRAVE = {48, 62, 63, 64, 74, 79, 92, 94, 95, 109, 119, 120, 140, 154}


def _has_peers(facts: HostFacts) -> bool:
    return len(gpus_of(facts)) > 1


def iommu_and_acs(facts: HostFacts) -> Iterator[RuleResult]:
    """A translating IOMMU with ACS redirection hangs the first all_reduce.

    vllm-project/vllm#33041, NVIDIA/nccl#1999 and #2079, local-inference-lab/rtx6kpro#15.
    """
    if not _has_peers(facts):
        yield not_applicable("IOMMU", "host", "there are not two cards")
        return
    mode = facts.pci.iommu
    good = first_unknown(mode) or mode != "translated"
    fix = "Boot with iommu=pt, or with amd_iommu=off (intel_iommu=off); the role `pcie` sets it."
    why = "the IOMMU translates addresses"
    yield result("IOMMU", "host", good, why, fix, passed=f"the IOMMU is in mode {mode}")
    if not facts.pci.bridges:
        yield result("ACS", "host", unknown("there is no bridge above a card"), "", "")
    for bridge in facts.pci.bridges:
        off = first_unknown(bridge.acs_redirect) or not bridge.acs_redirect
        why = f"ACS redirects (control {bridge.acs_control})"
        passed = f"ACS control is {bridge.acs_control}" if bridge.has_acs is True else "no ACS"
        fix = "Disable ACS at each boot (`setpci -s BDF ECAP_ACS+6.w=0000`; the role `pcie`)."
        yield result("ACS", bridge.address, off, why, fix, passed=passed)


def aspm(facts: HostFacts) -> Iterator[RuleResult]:
    """Links that sleep come back late or not at all."""
    fix = "Boot with pcie_aspm=off pcie_port_pm=off; the role `pcie` sets it."
    policy, line = facts.pci.aspm_policy, facts.kernel.command_line
    if not isinstance(line, Unknown) and "pcie_aspm=off" in line.split():
        yield result("ASPM", "host", True, "pcie_aspm=off", fix)
        return
    why = f"links may sleep: the policy is {policy}"
    passed = f"links stay awake: the policy is {policy}"
    yield result("ASPM", "host", _links_stay_up(facts), why, fix, passed=passed)


def _links_stay_up(facts: HostFacts) -> bool | Unknown:
    """By the policy; the default one leaves it to the firmware, so the links themselves count."""
    policy = facts.pci.aspm_policy
    links = [b.aspm for b in facts.pci.bridges] + [g.aspm for g in facts.pci.gpus]
    if isinstance(policy, Unknown):
        return policy
    if policy == "performance":
        return True
    # powersave and powersupersave
    if policy.startswith("power") or any(isinstance(x, str) and x != "off" for x in links):
        return False
    no_link = unknown("the policy is default, and no link can be read")
    return first_unknown(*links) or (True if links else no_link)


def hmm(facts: HostFacts) -> Iterator[RuleResult]:
    """HMM locks up peer-to-peer, and with KASLR keeps CUDA from starting (pytorch#159207)."""
    if not _has_peers(facts):
        yield not_applicable("HMM", "host", "there are not two cards")
        return
    fix = "Write `options nvidia_uvm uvm_disable_hmm=1` to a file in /etc/modprobe.d, then reboot."
    why, passed = "nvidia_uvm runs with HMM", "nvidia_uvm runs without HMM"
    yield result("HMM", "host", facts.driver.hmm_disabled, why, fix, passed=passed)


def driver_branch(facts: HostFacts, cuda: str | None) -> Iterator[RuleResult]:
    """Code compiled at run time needs a driver of at least the image's CUDA branch."""
    if cuda is None:
        yield not_applicable("driver", "host", "no CUDA version was named (--cuda)")
        return
    least, version = DRIVER_OF_CUDA.get(cuda), facts.driver.version
    good: object = unknown(f"the driver that CUDA {cuda} needs is not in the table")
    if least is not None:
        good = version if isinstance(version, Unknown) else int(version.split(".")[0]) >= least
    fix = f"Install a driver of branch {least} or later."
    why = f"{version} is too old for CUDA {cuda} (needs {least})"
    passed = f"{version} for CUDA {cuda} (needs {least})"
    yield result("driver", "host", good, why, fix, passed=passed)


def xids(facts: HostFacts) -> Iterator[RuleResult]:
    """Errors of cards in the kernel log."""
    fix = "`sm120 doctor` names what each one means."
    found = [] if isinstance(facts.xids, Unknown) else facts.xids
    grave = [f"{x.code} at {x.address} ({x.times}x)" for x in found if x.code in _GRAVE]
    good = first_unknown(facts.xids) or not grave
    yield result("Xid", "host", good, ", ".join(grave), fix, passed="no severe one")


def tuning(facts: HostFacts) -> Iterator[RuleResult]:
    """Settings of the host itself."""
    governors = facts.cpu.governors
    names = [] if isinstance(governors, Unknown) else governors
    good = first_unknown(governors) or names == ["performance"]
    fix = "Set it to performance (`host_tuning`)."
    why = f"the governor is {', '.join(names)}"
    yield result("governor", "host", good, why, fix, passed="the governor is performance")
    # NCCL and pinned buffers need locked memory; the default of a login is a few MiB
    lock = facts.kernel.memlock
    if isinstance(lock, Unknown) or lock == "unlimited":
        yield result("memlock", "host", lock, f"{lock}", "")
    else:
        # no failure: engines run in containers, and `docker run` sets their limit
        size = f"{int(lock) / 2**20:g} MiB" if lock.isdigit() else lock
        why = f"{size} in this shell; containers get theirs from `docker run --ulimit`"
        yield not_applicable("memlock", "host", why)
    line = facts.kernel.command_line
    # some rigs set it (local-inference-lab/rtx6kpro); engines run code of model repositories
    safe = line if isinstance(line, Unknown) else "mitigations=off" not in line.split()
    fix = "Remove mitigations=off: it gains little and leaves the machine open to attacks."
    why, passed = "the kernel was booted with mitigations=off", "the mitigations are on"
    yield result("mitigations", "host", safe, why, fix, passed=passed)
