"""Rules over facts, each with its fix: what is known to break or slow SM120 machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from pipeline.core.known import Unknown, first_unknown, unknown
from pipeline.core.verdict import RuleResult, not_applicable, result, unknown_result
from pipeline.hosts.facts.model import HostFacts, gpus_of

# Watts that each edition is made for (local-inference-lab/rtx6kpro, gpu-configs.md); for other
# cards the range that the driver accepts counts.
POWER_RANGES_W = {"Max-Q": (250.0, 325.0), "Server": (300.0, 600.0), "Workstation": (150.0, 600.0)}
_BLACKWELL = ("10", "12")  # major compute capabilities: data centre, and SM120/SM121
# Minor version compatibility does not cover PTX that is compiled at run time
# (NVIDIA/nvbandwidth#61). The pairs are those that people report to work; NVIDIA has no such table.
DRIVER_OF_CUDA = {"13.0": 580, "13.1": 590, "13.2": 595, "13.3": 610}
# Xids after which a card or its link is gone or failing; others are faults of programs (NVIDIA: Xid
# catalogue). The role `health` takes a host out of service at those that need a reset.
# Reported on Blackwell: 79, 109, 62 with 119 and 154 (NVIDIA/open-gpu-kernel-modules#1151, #1243,
# #1045).
GRAVE_XIDS = {
    *(46, 48, 54, 62, 63, 64, 74, 79, 92, 94, 95, 109, 110, 119, 120, 136, 140, 143, 154, 155),
    *(156, 158),
}

RULES: list[Callable[[HostFacts], Iterator[RuleResult]]] = []
Rule = TypeVar("Rule", bound=Callable[[HostFacts], Iterator[RuleResult]])


def rule(check: Rule) -> Rule:
    """Adds a rule to those that `judge` applies, in the order of this file."""
    RULES.append(check)
    return check


def judge_rules(facts: HostFacts, cuda: str | None = None) -> list[RuleResult]:
    """Apply every rule, for a host that must run images of that CUDA version (13.0 …)."""
    return [
        row
        for each in RULES
        for row in (driver_branch(facts, cuda) if each is driver_branch else each(facts))
    ]


@rule
def judge_cards(facts: HostFacts) -> Iterator[RuleResult]:
    """The bus and the driver must agree on how many cards there are."""
    on_bus, seen = len(facts.pci.gpus), len(gpus_of(facts))
    good: object = seen >= on_bus and seen > 0
    # reported with several drivers (NVIDIA/open-gpu-kernel-modules#1151)
    fix = "A card is lost: look for Xid 79 in dmesg, reseat it, check its power."
    answer = f"{seen} of {on_bus} answer"
    why = f"only {answer}"
    if isinstance(facts.gpus, Unknown):
        good = unknown("no GPU on the bus, none reported") if not on_bus else False
        why = f"{on_bus} on the bus, but {facts.gpus.unknown}"
        fix = "Install the driver, then look at dmesg."
    yield result("cards", "all", good, why, fix, passed=answer)


@rule
def open_module(facts: HostFacts) -> Iterator[RuleResult]:
    """Blackwell runs only with the open kernel modules (NVIDIA/open-gpu-kernel-modules#872)."""
    fix = "Install the -open packages of the driver and reboot."
    for gpu in gpus_of(facts):
        capability, subject = gpu.compute_capability, f"GPU {gpu.index}"
        if isinstance(capability, str) and capability.split(".")[0] not in _BLACKWELL:
            yield not_applicable("open module", subject, "this card runs with either kernel module")
        else:
            good = first_unknown(capability) or facts.driver.is_open
            why, passed = "the proprietary module is loaded", "the open module is loaded"
            yield result("open module", subject, good, why, fix, passed=passed)


@rule
def bar1(facts: HostFacts) -> Iterator[RuleResult]:
    """Peers reach all of a card's memory only through a window as large as it."""
    fix = "Enable Above 4G Decoding and Resizable BAR in the firmware, and headless display mode."
    for gpu in gpus_of(facts):
        window, memory = gpu.bar1_bytes, gpu.memory_bytes
        good: object = first_unknown(window, memory)
        sizes = ""
        if isinstance(window, int) and isinstance(memory, int):
            # firmware rounds to a power of two; the driver keeps some memory for itself
            sizes, good = f"{window >> 20} MiB for {memory >> 20} MiB", window >= memory * 0.95
        why = f"only {sizes} of memory"
        yield result("BAR1", f"GPU {gpu.index}", good, why, fix, passed=sizes)


@rule
def firmware_windows(facts: HostFacts) -> Iterator[RuleResult]:
    """Whether the firmware gave each card the window that it can have, where there is room for it.

    Some firmware starts with 256 MiB (local-inference-lab/rtx6kpro).
    """
    memory = {gpu.address: gpu.memory_bytes for gpu in gpus_of(facts)}
    for card in facts.pci.gpus:
        most, now, base = card.rebar_max_bytes, card.bar1_bytes, card.bar1_base
        if most == 0:
            yield not_applicable("ReBAR", card.address, "the card's window has one size")
        else:
            good: object = first_unknown(most, now)
            sizes = ""
            if isinstance(most, int) and isinstance(now, int):
                own = memory.get(card.address)
                # a window may be larger than the memory behind it, which then is enough
                need = min(most, own * 0.95) if isinstance(own, int) else most
                good, sizes = now >= need, f"{now >> 20} of {most >> 20} MiB"
            fix = "Enable Resizable BAR (ReBAR, Smart Access Memory) in the firmware."
            why = f"only {sizes}"
            yield result("ReBAR", card.address, good, why, fix, passed=sizes)
        above = base if isinstance(base, Unknown) else base >= 1 << 32
        fix = "Enable Above 4G Decoding in the firmware; a large window has room there only."
        why = f"the card's window begins at {base:#x}" if isinstance(base, int) else ""
        yield result("Above 4G", card.address, above, f"{why}, below 4 GiB", fix, passed=why)


@rule
def iommu_and_acs(facts: HostFacts) -> Iterator[RuleResult]:
    """A translating IOMMU with ACS redirection hangs the first all_reduce.

    vllm-project/vllm#33041, NVIDIA/nccl#1999 and #2079, local-inference-lab/rtx6kpro#15.
    """
    if len(gpus_of(facts)) < 2:
        yield not_applicable("IOMMU", "host", "there are not two cards")
        return
    mode = facts.pci.iommu
    good = first_unknown(mode) or mode != "translated"
    fix = "Boot with iommu=pt, or with amd_iommu=off (intel_iommu=off); the role `pcie` sets it."
    why = "the IOMMU translates addresses"
    yield result("IOMMU", "host", good, why, fix, passed=f"the IOMMU is in mode {mode}")
    if not facts.pci.bridges:
        yield unknown_result("ACS", "host", unknown("there is no bridge above a card"))
    for bridge in facts.pci.bridges:
        off = first_unknown(bridge.acs_redirect) or not bridge.acs_redirect
        why = f"ACS redirects (control {bridge.acs_control})"
        passed = f"ACS control is {bridge.acs_control}" if bridge.has_acs is True else "no ACS"
        fix = "Disable ACS at each boot (`setpci -s BDF ECAP_ACS+6.w=0000`; the role `pcie`)."
        yield result("ACS", bridge.address, off, why, fix, passed=passed)


@rule
def aspm(facts: HostFacts) -> Iterator[RuleResult]:
    """Links that sleep come back late or not at all."""
    fix = "Boot with pcie_aspm=off pcie_port_pm=off; the role `pcie` sets it."
    policy, line = facts.pci.aspm_policy, facts.kernel.command_line
    if not isinstance(line, Unknown) and "pcie_aspm=off" in line.split():
        yield result("ASPM", "host", True, "", "", passed="pcie_aspm=off")
        return
    links = [b.aspm for b in facts.pci.bridges] + [g.aspm for g in facts.pci.gpus]
    asleep = any(isinstance(x, str) and x != "off" for x in links)
    good = first_unknown(policy) or policy == "performance"
    # powersave and powersupersave let them sleep; the default leaves it to the firmware, so the
    # links themselves count
    if not good and not str(policy).startswith("power") and not asleep:
        no_link = unknown("the policy is default, and no link can be read")
        good = first_unknown(*links) or (True if links else no_link)
    why = f"links may sleep: the policy is {policy}"
    passed = f"links stay awake: the policy is {policy}"
    yield result("ASPM", "host", good, why, fix, passed=passed)


@rule
def hmm(facts: HostFacts) -> Iterator[RuleResult]:
    """HMM locks up peer-to-peer, and with KASLR keeps CUDA from starting (pytorch#159207)."""
    if len(gpus_of(facts)) < 2:
        yield not_applicable("HMM", "host", "there are not two cards")
        return
    fix = "Write `options nvidia_uvm uvm_disable_hmm=1` to a file in /etc/modprobe.d, then reboot."
    why, passed = "nvidia_uvm runs with HMM", "nvidia_uvm runs without HMM"
    yield result("HMM", "host", facts.driver.hmm_disabled, why, fix, passed=passed)


@rule
def driver_branch(facts: HostFacts, cuda: str | None = None) -> Iterator[RuleResult]:
    """Code compiled at run time needs a driver of at least the image's CUDA branch."""
    if cuda is None:
        yield not_applicable("driver", "host", "no CUDA version was named (--cuda)")
        return
    least, version = DRIVER_OF_CUDA.get(cuda), facts.driver.version
    good: object = version
    if least is None:
        good = unknown(f"the driver that CUDA {cuda} needs is not in the table")
    elif not isinstance(version, Unknown):
        good = int(version.split(".")[0]) >= least
    fix = f"Install a driver of branch {least} or later."
    why = f"{version} is too old for CUDA {cuda} (needs {least})"
    passed = f"{version} for CUDA {cuda} (needs {least})"
    yield result("driver", "host", good, why, fix, passed=passed)


@rule
def persistence(facts: HostFacts) -> Iterator[RuleResult]:
    """Without it the driver forgets its settings whenever the last program ends."""
    why, passed = "persistence mode is off", "persistence mode is on"
    fix = "Enable nvidia-persistenced."
    for gpu in gpus_of(facts):
        yield result("persistence", f"GPU {gpu.index}", gpu.persistence, why, fix, passed=passed)


@rule
def power(facts: HostFacts) -> Iterator[RuleResult]:
    """A limit outside of what the board is made for."""
    for gpu in gpus_of(facts):
        board = next((k for k in POWER_RANGES_W if k in str(gpu.name)), "the driver")
        limit = gpu.power.limit_w
        low, high = POWER_RANGES_W.get(board, (gpu.power.min_w, gpu.power.max_w))
        good: object = first_unknown(limit, low, high)
        if isinstance(limit, float) and isinstance(low, float) and isinstance(high, float):
            good = low <= limit <= high
        why = f"{limit} W is outside of what {board} allows: {low} to {high}"
        passed = f"{limit} W; {board} allows {low} to {high}"
        fix = "nvidia-smi -pl WATTS, or the role `host_tuning`."
        yield result("power", f"GPU {gpu.index}", good, why, fix, passed=passed)


@rule
def link_width(facts: HostFacts) -> Iterator[RuleResult]:
    """Fewer lanes than the card has: because of a slot, a riser or bifurcation."""
    fix = "Reseat the card and riser; check the slot's bifurcation in the firmware."
    for gpu in gpus_of(facts):
        # an idle card lowers its generation, but keeps its width
        now, most = gpu.link.width, gpu.link.width_max
        good = first_unknown(now, most) or now == most
        lanes = f"x{now} of x{most}"
        yield result("link width", f"GPU {gpu.index}", good, f"only {lanes}", fix, passed=lanes)


@rule
def link_generation(facts: HostFacts) -> Iterator[RuleResult]:
    """A slower link than the card can have."""
    fix = "Check the slot's generation in the firmware, and the riser or cable."
    for gpu in gpus_of(facts):
        link = gpu.link
        now, both, card = link.generation, link.generation_max, link.generation_device_max
        passed = f"gen {now}; the slot allows {both}, the card {card}"
        why = f"gen {now}; the slot allows only {both}, the card {card}"
        good = first_unknown(now, both, card) or both == card
        if good is True and now != both:
            good = unknown(f"{passed}: an idle card slows its link, look again under load")
        yield result("link generation", f"GPU {gpu.index}", good, why, fix, passed=passed)


@rule
def health(facts: HostFacts) -> Iterator[RuleResult]:
    """Memory errors, and clocks held down by heat or power."""
    for gpu in gpus_of(facts):
        subject, count = f"GPU {gpu.index}", gpu.ecc_errors.uncorrectable_ever
        # without ECC errors are not counted: nothing to judge
        if gpu.ecc is not False:
            good = first_unknown(count) or count == 0
            fix = "Take the card out of service and contact its vendor."
            why, passed = f"{count} uncorrectable errors", "no uncorrectable error"
            yield result("ECC", subject, good, why, fix, passed=passed)
        held = gpu.slowed_by
        # a person sets a software power cap; with these the board protects itself
        bad = {"hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}
        reasons = [] if isinstance(held, Unknown) else held
        fine = first_unknown(held) or not bad & set(reasons)
        fix = "Check the cooling and the power cables."
        why = f"held down by: {', '.join(reasons)}"
        yield result("clocks", subject, fine, why, fix, passed="not held down")


@rule
def xids(facts: HostFacts) -> Iterator[RuleResult]:
    """Errors of cards in the kernel log."""
    fix = "`sm120 doctor` names what each one means."
    found = [] if isinstance(facts.xids, Unknown) else facts.xids
    grave = [f"{x.code} at {x.address} ({x.times}x)" for x in found if x.code in GRAVE_XIDS]
    good = first_unknown(facts.xids) or not grave
    yield result("Xid", "host", good, ", ".join(grave), fix, passed="no severe one")


@rule
def service(facts: HostFacts) -> Iterator[RuleResult]:
    """Whether the role `health` has taken the host out of service."""
    why = facts.out_of_service
    fix = "Repair or replace the card, reboot, then `sm120-health return` as root on the host."
    reason = f"out of service: {why}"
    yield result("service", "host", why is None, reason, fix, passed="not taken out of service")


@rule
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
        yield result("memlock", "host", lock, "", "", passed=f"{lock}")
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
