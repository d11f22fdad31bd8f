"""Rules over facts: what is known to break or slow SM120 machines, each with its cure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

from pipeline.host.facts import Gpu, HostFacts
from pipeline.host.known import Unknown, unknown
from pipeline.model import Frozen

Verdict: TypeAlias = Literal["passed", "failed", "unknown", "not applicable"]

# Inferred from which pairs people report to work, not from a table of NVIDIA's.
DRIVER_OF_CUDA = {"13.0": 580, "13.1": 590, "13.2": 595, "13.3": 610}
_MIB = 1 << 20
# Xids that say a card or its link is gone or going.
_GRAVE = {48, 62, 63, 64, 74, 79, 92, 94, 95, 109, 119, 120, 140, 154}
# Watts that each board is made for; the driver itself reports the range it accepts.
_POWER = {"Max-Q": (250.0, 325.0), "Server": (300.0, 600.0), "Workstation": (150.0, 600.0)}
_BLACKWELL = ("10", "12")


class Judged(Frozen):
    """One rule's answer about one thing of a host."""

    rule: str
    subject: str
    verdict: Verdict
    why: str
    cure: str = ""


Rule = Callable[[HostFacts, str | None], Iterator[Judged]]


def _row(rule: str, subject: str, good: object, why: str, cure: str) -> Judged:
    """Passed when good; a value that is not known is not judged."""
    if isinstance(good, Unknown):
        return Judged(rule=rule, subject=subject, verdict="unknown", why=good.unknown)
    verdict: Verdict = "passed" if good else "failed"
    return Judged(rule=rule, subject=subject, verdict=verdict, why=why, cure="" if good else cure)


def judge(facts: HostFacts, cuda: str | None = None) -> list[Judged]:
    """Every rule, for a host that shall run images of that CUDA version (13.0 …)."""
    return [row for rule in RULES for row in rule(facts, cuda)]


def _gpus(facts: HostFacts) -> list[Gpu]:
    return [] if isinstance(facts.gpus, Unknown) else facts.gpus


def _is_blackwell(gpu: Gpu) -> bool | Unknown:
    if isinstance(gpu.compute_capability, Unknown):
        return gpu.compute_capability
    return gpu.compute_capability.split(".")[0] in _BLACKWELL


def _several(facts: HostFacts) -> bool:
    return len(_gpus(facts)) > 1


def cards(facts: HostFacts, cuda: str | None) -> Iterator[Judged]:
    """The bus and the driver must agree on how many cards there are."""
    on_bus = len(facts.pci.gpus)
    if isinstance(facts.gpus, Unknown):
        if on_bus:
            why = f"{on_bus} on the bus, but {facts.gpus.unknown}"
            yield _row("cards", "all", False, why, "Install the driver, then look at dmesg.")
        else:
            yield Judged(rule="cards", subject="all", verdict="unknown", why="no GPU is seen")
        return
    seen = len(facts.gpus)
    cure = "A card is lost: look for Xid 79 in dmesg, reseat it, check its power."
    yield _row("cards", "all", seen >= on_bus and seen > 0, f"{seen} of {on_bus} answer", cure)


def open_module(facts: HostFacts, cuda: str | None) -> Iterator[Judged]:
    """Blackwell runs with the open kernel modules only."""
    cure = "Install the -open packages of the driver and reboot."
    for gpu in _gpus(facts):
        needs = _is_blackwell(gpu)
        subject = f"GPU {gpu.index}"
        if needs is False:
            why = "this card runs with either flavour"
            yield Judged(rule="open module", subject=subject, verdict="not applicable", why=why)
        else:
            good = needs if isinstance(needs, Unknown) else facts.driver.is_open
            yield _row("open module", subject, good, "the loaded module's flavour", cure)


def bar1(facts: HostFacts, cuda: str | None) -> Iterator[Judged]:
    """Peers reach all of a card's memory only through a window as large as it."""
    cure = "Switch on Above 4G Decoding and Resizable BAR in the firmware; headless display mode."
    for gpu in _gpus(facts):
        window, memory = gpu.bar1_bytes, gpu.memory_bytes
        if isinstance(window, Unknown) or isinstance(memory, Unknown):
            good: object = window if isinstance(window, Unknown) else memory
            yield _row("BAR1", f"GPU {gpu.index}", good, "", cure)
            continue
        # firmware rounds to a power of two; the driver keeps some memory for itself
        why = f"{window // _MIB} MiB for {memory // _MIB} MiB"
        yield _row("BAR1", f"GPU {gpu.index}", window >= memory * 0.95, why, cure)


def iommu_and_acs(facts: HostFacts, cuda: str | None) -> Iterator[Judged]:
    """A translating IOMMU with ACS that redirects hangs the first all_reduce."""
    if not _several(facts):
        why = "one card talks to no other"
        yield Judged(rule="IOMMU", subject="host", verdict="not applicable", why=why)
        return
    mode = facts.pci.iommu
    good = mode if isinstance(mode, Unknown) else mode != "translated"
    cure = "Boot with iommu=pt, or with amd_iommu=off (intel_iommu=off); the role `pcie` does."
    yield _row("IOMMU", "host", good, f"is {mode}", cure)
    if not facts.pci.bridges:
        why = "no bridge lies above a card"
        yield Judged(rule="ACS", subject="host", verdict="unknown", why=why)
    for bridge in facts.pci.bridges:
        redirect = bridge.acs_redirect
        off = redirect if isinstance(redirect, Unknown) else not redirect
        why = f"ACS control is {bridge.acs_control}" if bridge.has_acs is True else "has no ACS"
        cure = "Switch ACS off at each boot (`setpci -s BDF ECAP_ACS+6.w=0000`; the role `pcie`)."
        yield _row("ACS", bridge.address, off, why, cure)


def aspm(facts: HostFacts, cuda: str | None) -> Iterator[Judged]:
    """Links that sleep come back late or not at all."""
    cure = "Boot with pcie_aspm=off pcie_port_pm=off; the role `pcie` does."
    policy, line = facts.pci.aspm_policy, facts.kernel.command_line
    if not isinstance(line, Unknown) and "pcie_aspm=off" in line.split():
        yield _row("ASPM", "host", True, "pcie_aspm=off", cure)
        return
    yield _row("ASPM", "host", _links_stay_up(facts), f"the policy is {policy}", cure)


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
    cure = "options nvidia_uvm uvm_disable_hmm=1 in /etc/modprobe.d, then reboot."
    yield _row("HMM", "host", facts.driver.hmm_disabled, "uvm_disable_hmm", cure)


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
    cure = f"Install a driver of branch {least} or later."
    yield _row("driver", "host", good, f"{version} for CUDA {cuda} (needs {least})", cure)


def persistence(facts: HostFacts, cuda: str | None) -> Iterator[Judged]:
    """Without it the driver forgets settings whenever the last program ends."""
    for gpu in _gpus(facts):
        cure = "Enable nvidia-persistenced."
        yield _row("persistence", f"GPU {gpu.index}", gpu.persistence, "persistence mode", cure)


def power(facts: HostFacts, cuda: str | None) -> Iterator[Judged]:
    """A limit outside of what the board is made for."""
    for gpu in _gpus(facts):
        kind = next((k for k in _POWER if k in str(gpu.name)), None)
        limit, low, high = gpu.power.limit_w, gpu.power.min_w, gpu.power.max_w
        if kind is not None:
            low, high = _POWER[kind]
        bad = next((x for x in (limit, low, high) if isinstance(x, Unknown)), None)
        good: object = bad
        if not isinstance(limit, Unknown) and bad is None:
            assert not isinstance(low, Unknown)
            assert not isinstance(high, Unknown)
            good = low <= limit <= high
        why = f"{limit} W; {kind or 'the driver'} allows {low} to {high}"
        cure = "nvidia-smi -pl WATTS, or the role `host_tuning`."
        yield _row("power", f"GPU {gpu.index}", good, why, cure)


def link_width(facts: HostFacts, cuda: str | None) -> Iterator[Judged]:
    """Fewer lanes than the card has: a slot, a riser or bifurcation."""
    cure = "Reseat the card and riser; look at the slot's bifurcation in the firmware."
    for gpu in _gpus(facts):
        now, most = gpu.link.width, gpu.link.width_max
        good: object = next((x for x in (now, most) if isinstance(x, Unknown)), None)
        if good is None:
            good = now == most
        yield _row("link width", f"GPU {gpu.index}", good, f"x{now} of x{most}", cure)


def health(facts: HostFacts, cuda: str | None) -> Iterator[Judged]:
    """Memory errors, failed remapping, and clocks held down by heat or power."""
    for gpu in _gpus(facts):
        errors, subject = gpu.ecc_errors, f"GPU {gpu.index}"
        cure = "Take the card out of service and ask its maker."
        if gpu.ecc is not False:
            count = errors.uncorrectable_ever
            good = count if isinstance(count, Unknown) else count == 0
            yield _row("ECC", subject, good, f"{count} uncorrectable errors", cure)
        held = gpu.slowed_by
        bad = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
        fine = held if isinstance(held, Unknown) else not set(held) & set(bad)
        cure = "Look at cooling and at the power cables."
        yield _row("clocks", subject, fine, f"held down by: {held or 'nothing'}", cure)


def xids(facts: HostFacts, cuda: str | None) -> Iterator[Judged]:
    """Errors that the driver has written down."""
    if isinstance(facts.xids, Unknown):
        yield _row("Xid", "host", facts.xids, "", "")
        return
    grave = [x for x in facts.xids if x.code in _GRAVE]
    words = (
        ", ".join(f"{x.code} at {x.address} ({x.times}x)" for x in grave) or "none that is grave"
    )
    yield _row("Xid", "host", not grave, words, "`sm120 host doctor` names what each one means.")


def tuning(facts: HostFacts, cuda: str | None) -> Iterator[Judged]:
    """The host's own settings."""
    governors, lock = facts.cpu.governors, facts.kernel.memlock
    good = governors if isinstance(governors, Unknown) else governors == ["performance"]
    yield _row("governor", "host", good, f"{governors}", "Set it to performance (`host_tuning`).")
    free = lock if isinstance(lock, Unknown) else lock == "unlimited"
    cure = "Raise memlock to unlimited for the service and its containers."
    yield _row("memlock", "host", free, f"{lock}", cure)
    line = facts.kernel.command_line
    safe = line if isinstance(line, Unknown) else "mitigations=off" not in line.split()
    cure = "Take mitigations=off away: it buys little and opens the machine."
    yield _row("mitigations", "host", safe, "the kernel's mitigations", cure)


RULES: tuple[Rule, ...] = (
    *(cards, open_module, bar1, iommu_and_acs, aspm, hmm, driver_branch, persistence, power),
    *(link_width, health, xids, tuning),
)


def overall(rows: list[Judged]) -> Verdict:
    """The worst of all; nothing judged is unknown."""
    seen = {row.verdict for row in rows}
    order: tuple[Verdict, ...] = ("failed", "unknown", "passed")
    return next((v for v in order if v in seen), "unknown")
