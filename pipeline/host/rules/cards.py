"""Rules about cards: what each of them must be and have."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.host.facts.model import Gpu, HostFacts
from pipeline.host.rules.verdict import Judged, gpus_of, row
from pipeline.known import Unknown, unknown

_MIB = 1 << 20
# Watts that each board is made for; the driver itself reports the range it accepts.
_POWER = {"Max-Q": (250.0, 325.0), "Server": (300.0, 600.0), "Workstation": (150.0, 600.0)}
_BLACKWELL = ("10", "12")


def _is_blackwell(gpu: Gpu) -> bool | Unknown:
    if isinstance(gpu.compute_capability, Unknown):
        return gpu.compute_capability
    return gpu.compute_capability.split(".")[0] in _BLACKWELL


def cards(facts: HostFacts, cuda: str | None) -> Iterator[Judged]:
    """The bus and the driver must agree on how many cards there are."""
    on_bus = len(facts.pci.gpus)
    if isinstance(facts.gpus, Unknown):
        if on_bus:
            why = f"{on_bus} on the bus, but {facts.gpus.unknown}"
            yield row("cards", "all", False, why, "Install the driver, then look at dmesg.")
        else:
            yield Judged(rule="cards", subject="all", verdict="unknown", why="no GPU is seen")
        return
    seen = len(facts.gpus)
    fix = "A card is lost: look for Xid 79 in dmesg, reseat it, check its power."
    yield row("cards", "all", seen >= on_bus and seen > 0, f"{seen} of {on_bus} answer", fix)


def open_module(facts: HostFacts, cuda: str | None) -> Iterator[Judged]:
    """Blackwell runs with the open kernel modules only."""
    fix = "Install the -open packages of the driver and reboot."
    for gpu in gpus_of(facts):
        needs = _is_blackwell(gpu)
        subject = f"GPU {gpu.index}"
        if needs is False:
            why = "this card runs with either flavour"
            yield Judged(rule="open module", subject=subject, verdict="not applicable", why=why)
        else:
            good = needs if isinstance(needs, Unknown) else facts.driver.is_open
            yield row("open module", subject, good, "the loaded module's flavour", fix)


def bar1(facts: HostFacts, cuda: str | None) -> Iterator[Judged]:
    """Peers reach all of a card's memory only through a window as large as it."""
    fix = "Switch on Above 4G Decoding and Resizable BAR in the firmware; headless display mode."
    for gpu in gpus_of(facts):
        window, memory = gpu.bar1_bytes, gpu.memory_bytes
        if isinstance(window, Unknown) or isinstance(memory, Unknown):
            good: object = window if isinstance(window, Unknown) else memory
            yield row("BAR1", f"GPU {gpu.index}", good, "", fix)
            continue
        # firmware rounds to a power of two; the driver keeps some memory for itself
        why = f"{window // _MIB} MiB for {memory // _MIB} MiB"
        yield row("BAR1", f"GPU {gpu.index}", window >= memory * 0.95, why, fix)


def persistence(facts: HostFacts, cuda: str | None) -> Iterator[Judged]:
    """Without it the driver forgets settings whenever the last program ends."""
    for gpu in gpus_of(facts):
        fix = "Enable nvidia-persistenced."
        yield row("persistence", f"GPU {gpu.index}", gpu.persistence, "persistence mode", fix)


def power(facts: HostFacts, cuda: str | None) -> Iterator[Judged]:
    """A limit outside of what the board is made for."""
    for gpu in gpus_of(facts):
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
        fix = "nvidia-smi -pl WATTS, or the role `host_tuning`."
        yield row("power", f"GPU {gpu.index}", good, why, fix)


def link_width(facts: HostFacts, cuda: str | None) -> Iterator[Judged]:
    """Fewer lanes than the card has: a slot, a riser or bifurcation."""
    fix = "Reseat the card and riser; look at the slot's bifurcation in the firmware."
    for gpu in gpus_of(facts):
        now, most = gpu.link.width, gpu.link.width_max
        good: object = next((x for x in (now, most) if isinstance(x, Unknown)), None)
        if good is None:
            good = now == most
        yield row("link width", f"GPU {gpu.index}", good, f"x{now} of x{most}", fix)


def link_generation(facts: HostFacts, cuda: str | None) -> Iterator[Judged]:
    """A slower link than card and slot could have; an idle card slows its link by itself."""
    fix = "Look at the slot's generation in the firmware, and at the riser or cable."
    for gpu in gpus_of(facts):
        now, both, card = (
            gpu.link.generation,
            gpu.link.generation_max,
            gpu.link.generation_device_max,
        )
        subject, why = f"GPU {gpu.index}", f"gen {now}; the slot allows {both}, the card {card}"
        lost = next((x for x in (now, both, card) if isinstance(x, Unknown)), None)
        if lost is not None:
            yield row("link generation", subject, lost, why, fix)
        elif both == card and now != both:
            idle = unknown(f"{why}: an idle card slows its link, look again under load")
            yield row("link generation", subject, idle, why, fix)
        else:
            yield row("link generation", subject, both == card, why, fix)


def health(facts: HostFacts, cuda: str | None) -> Iterator[Judged]:
    """Memory errors, failed remapping, and clocks held down by heat or power."""
    for gpu in gpus_of(facts):
        errors, subject = gpu.ecc_errors, f"GPU {gpu.index}"
        fix = "Take the card out of service and ask its maker."
        if gpu.ecc is not False:
            count = errors.uncorrectable_ever
            good = count if isinstance(count, Unknown) else count == 0
            yield row("ECC", subject, good, f"{count} uncorrectable errors", fix)
        held = gpu.slowed_by
        bad = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
        fine = held if isinstance(held, Unknown) else not set(held) & set(bad)
        fix = "Look at cooling and at the power cables."
        yield row("clocks", subject, fine, f"held down by: {held or 'nothing'}", fix)
