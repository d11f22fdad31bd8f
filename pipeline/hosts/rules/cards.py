"""Rules about cards: what each of them must be and have."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.core.known import Unknown, unknown
from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.rules.verdict import RuleResult, first_unknown, gpus_of, not_applicable, result

_MIB = 1 << 20
# Watts that each edition is made for (local-inference-lab/rtx6kpro, gpu-configs.md); for other
# cards the range that the driver accepts counts.
POWER_RANGES_W = {"Max-Q": (250.0, 325.0), "Server": (300.0, 600.0), "Workstation": (150.0, 600.0)}
_BLACKWELL = ("10", "12")  # major compute capabilities: data centre, and SM120/SM121


def cards(facts: HostFacts) -> Iterator[RuleResult]:
    """The bus and the driver must agree on how many cards there are."""
    on_bus = len(facts.pci.gpus)
    if isinstance(facts.gpus, Unknown):
        if not on_bus:
            yield result("cards", "all", unknown("no GPU on the bus, none reported"), "", "")
            return
        why = f"{on_bus} on the bus, but {facts.gpus.unknown}"
        yield result("cards", "all", False, why, "Install the driver, then look at dmesg.")
        return
    seen = len(facts.gpus)
    # reported with several drivers (NVIDIA/open-gpu-kernel-modules#1151)
    fix = "A card is lost: look for Xid 79 in dmesg, reseat it, check its power."
    why, passed = f"only {seen} of {on_bus} answer", f"{seen} of {on_bus} answer"
    yield result("cards", "all", seen >= on_bus and seen > 0, why, fix, passed=passed)


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


def bar1(facts: HostFacts) -> Iterator[RuleResult]:
    """Peers reach all of a card's memory only through a window as large as it."""
    fix = "Enable Above 4G Decoding and Resizable BAR in the firmware, and headless display mode."
    for gpu in gpus_of(facts):
        window, memory = gpu.bar1_bytes, gpu.memory_bytes
        good: object = first_unknown(window, memory)
        sizes = ""
        if isinstance(window, int) and isinstance(memory, int):
            # firmware rounds to a power of two; the driver keeps some memory for itself
            sizes, good = f"{window // _MIB} MiB for {memory // _MIB} MiB", window >= memory * 0.95
        why = f"only {sizes} of memory"
        yield result("BAR1", f"GPU {gpu.index}", good, why, fix, passed=sizes)


def persistence(facts: HostFacts) -> Iterator[RuleResult]:
    """Without it the driver forgets its settings whenever the last program ends."""
    for gpu in gpus_of(facts):
        why, fix = "persistence mode is off", "Enable nvidia-persistenced."
        passed = "persistence mode is on"
        yield result("persistence", f"GPU {gpu.index}", gpu.persistence, why, fix, passed=passed)


def power(facts: HostFacts) -> Iterator[RuleResult]:
    """A limit outside of what the board is made for."""
    for gpu in gpus_of(facts):
        kind = next((k for k in POWER_RANGES_W if k in str(gpu.name)), None)
        limit, low, high = gpu.power.limit_w, gpu.power.min_w, gpu.power.max_w
        if kind is not None:
            low, high = POWER_RANGES_W[kind]
        good: object = first_unknown(limit, low, high)
        if isinstance(limit, float) and isinstance(low, float) and isinstance(high, float):
            good = low <= limit <= high
        board = kind or "the driver"
        why = f"{limit} W is outside of what {board} allows: {low} to {high}"
        passed = f"{limit} W; {board} allows {low} to {high}"
        fix = "nvidia-smi -pl WATTS, or the role `host_tuning`."
        yield result("power", f"GPU {gpu.index}", good, why, fix, passed=passed)


def link_width(facts: HostFacts) -> Iterator[RuleResult]:
    """Fewer lanes than the card has: because of a slot, a riser or bifurcation."""
    fix = "Reseat the card and riser; check the slot's bifurcation in the firmware."
    for gpu in gpus_of(facts):
        # an idle card lowers its generation, but keeps its width
        now, most = gpu.link.width, gpu.link.width_max
        good = first_unknown(now, most) or now == most
        lanes = f"x{now} of x{most}"
        yield result("link width", f"GPU {gpu.index}", good, f"only {lanes}", fix, passed=lanes)


def link_generation(facts: HostFacts) -> Iterator[RuleResult]:
    """A slower link than the card can have."""
    fix = "Check the slot's generation in the firmware, and the riser or cable."
    for gpu in gpus_of(facts):
        link = gpu.link
        now, both, card = link.generation, link.generation_max, link.generation_device_max
        passed = f"gen {now}; the slot allows {both}, the card {card}"
        why = f"gen {now}; the slot allows only {both}, the card {card}"
        good: object = first_unknown(now, both, card)
        if good is None and both == card and now != both:
            good = unknown(f"{passed}: an idle card slows its link, look again under load")
        elif good is None:
            good = both == card
        yield result("link generation", f"GPU {gpu.index}", good, why, fix, passed=passed)


def health(facts: HostFacts) -> Iterator[RuleResult]:
    """Memory errors, and clocks held down by heat or power."""
    for gpu in gpus_of(facts):
        subject, count = f"GPU {gpu.index}", gpu.ecc_errors.uncorrectable_ever
        # without ECC errors are not counted: nothing to judge
        if gpu.ecc is not False:
            good = first_unknown(count) or count == 0
            fix = "Take the card out of service and contact its vendor."
            yield result(
                *("ECC", subject, good, f"{count} uncorrectable errors", fix),
                passed="no uncorrectable error",
            )
        held = gpu.slowed_by
        # a software power cap is a limit that a person set; these are the board protecting itself
        bad = {"hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}
        reasons = [] if isinstance(held, Unknown) else held
        fine = first_unknown(held) or not bad & set(reasons)
        fix = "Check the cooling and the power cables."
        why = f"held down by: {', '.join(reasons)}"
        yield result("clocks", subject, fine, why, fix, passed="not held down")
