"""Whether this machine is ready for a recipe: asked before anything is started."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from pipeline import log
from pipeline.errors import PreflightFailed
from pipeline.host.facts.gather import gather
from pipeline.host.facts.model import Gpu, HostFacts
from pipeline.host.facts.smi import read_memory_used
from pipeline.host.facts.source import read_capture
from pipeline.host.rules.cards import cards as cards_answer
from pipeline.host.rules.machine import driver_branch
from pipeline.host.rules.verdict import RuleResult, first_unknown, not_applicable, result
from pipeline.known import Known, Unknown, then, unknown
from pipeline.publish.gates import GateState
from pipeline.recipe.model import Recipe
from pipeline.serve.weights import WeightsFolder
from pipeline.weights.disk.receipt import check_by_receipt

_GIB = 1 << 30
# Drivers keep some of a card's memory, and kernels some of the machine's.
_SHORT = 0.9
# A display and its programs take less; an engine that still runs takes gigabytes.
_IDLE_BYTES = 2 * _GIB
# What nvidia-smi calls the cards that recipes name.
CARD_NAMES = {
    "rtx-pro-6000": "RTX PRO 6000",
    "rtx-5090": "RTX 5090",
    "gb10": "GB10",
    "b200": "B200",
    "h200": "H200",
}


@dataclass(frozen=True)
class Machine:
    """What checks look at; gathered once, and only where a recipe has cards."""

    facts: Known[HostFacts]
    memory_used: Known[list[int]]  # bytes of each card


@dataclass(frozen=True)
class Plan:
    """What is going to be started."""

    recipe: Recipe
    port: int
    image_is_built: bool
    weights: WeightsFolder | None
    cuda: str | None  # the branch of the image, such as 13.0
    gates: GateState | None = None  # of the image; none where it is not built
    cards: tuple[int, ...] = ()
    # what the engine's own parser would refuse
    flags: Known[tuple[str, ...]] = ()


Check = Callable[[Plan, Machine], Iterator[RuleResult]]


def port(plan: Plan, machine: Machine) -> Iterator[RuleResult]:
    """Nobody else listens there."""
    fix = "`ss -ltnp` shows which program it is; --port names another one."
    try:
        with socket.socket() as probe:
            # as Docker binds it: a connection that is just closing does not hold the port
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", plan.port))
        yield result("port", str(plan.port), True, "is free", fix)
    except OSError as error:
        yield result("port", str(plan.port), False, f"cannot be used: {error.strerror}", fix)


def image(plan: Plan, machine: Machine) -> Iterator[RuleResult]:
    """It was built here from today's checkout."""
    name = plan.recipe.image or ""
    yield result(
        "image", name, plan.image_is_built, "is in the store", f"Run `sm120 build {name}` first."
    )


def flags(plan: Plan, machine: Machine) -> Iterator[RuleResult]:
    """The engine's own argument parser takes them."""
    name, problems = plan.recipe.name, plan.flags
    if isinstance(problems, Unknown):
        yield result("flags", name, problems, "", "")
        return
    fix = f"`sm120 recipe flags {plan.recipe.image}` shows what the engine accepts."
    why = problems[0] if problems else "the engine knows all of them"
    yield result("flags", name, not problems, why, fix)


def weights(plan: Plan, machine: Machine) -> Iterator[RuleResult]:
    """Every byte was proved, and nothing has changed since."""
    where = plan.weights
    if where is None:
        fix = "Name their folder with --weights DIR."
        yield result("weights", plan.recipe.name, False, "no folder is named", fix)
    elif plan.recipe.model.tiny and where.digest:
        yield result("weights", "tiny model", True, "made on the spot", "")
    elif where.file and not (where.folder / where.file).is_file():
        fix = "Name the folder that holds it with --weights DIR."
        yield result("weights", where.file, False, f"is not in {where.folder}", fix)
    elif where.place is None:
        yield result("weights", str(where.folder), unknown("no lock is of these files"), "", "")
    else:
        yield _proved(where)


def _proved(where: WeightsFolder) -> RuleResult:
    assert where.place is not None
    check = check_by_receipt(where.place)
    damage = [finding.path for finding in check.findings if finding.damage]
    fix = f"Run `sm120 weights verify {where.folder}` (--repair where it is damaged)."
    if damage:
        return result("weights", damage[0], False, f"{len(damage)} files are damaged", fix)
    unproved = len(check.unknown)
    why = f"{len(check.proved)} of {len(check.proved) + unproved} files are proved"
    return result("weights", where.place.lock.name, not unproved, why, fix)


def cards(plan: Plan, machine: Machine) -> Iterator[RuleResult]:
    """As many as the recipe is for, of that kind, with that memory; and all of them answer."""
    wanted = plan.recipe.hardware
    if not wanted.cards:
        yield not_applicable("cards", "all", "the recipe needs none")
        return
    gpus = _gpus(plan, machine)
    if isinstance(gpus, Unknown):
        yield result("cards", "all", gpus, "", "")
        return
    fix = "Take a recipe for this machine: `sm120 recipe list`."
    why = f"{len(gpus)} of {wanted.cards}"
    yield result("cards", "all", len(gpus) >= wanted.cards, why, fix)
    for gpu in gpus[: wanted.cards]:
        yield from _card(plan, gpu, fix)
    if not isinstance(machine.facts, Unknown):
        yield from cards_answer(machine.facts)


def _card(plan: Plan, gpu: Gpu, fix: str) -> Iterator[RuleResult]:
    wanted, subject = plan.recipe.hardware, f"GPU {gpu.index}"
    name = CARD_NAMES[wanted.card] if wanted.card else ""
    is_kind = gpu.name if isinstance(gpu.name, Unknown) else name in gpu.name
    yield result("cards", subject, is_kind, f"{gpu.name}; the recipe is for {name}", fix)
    if wanted.memory_gib:
        held = gpu.memory_bytes
        enough = held if isinstance(held, Unknown) else held >= wanted.memory_gib * _GIB * _SHORT
        size = held if isinstance(held, Unknown) else f"{held / _GIB:.0f} GiB"
        yield result("cards", subject, enough, f"{size} of {wanted.memory_gib} GiB", fix)


def idle(plan: Plan, machine: Machine) -> Iterator[RuleResult]:
    """Nobody else uses the cards: an engine plans with all of their memory."""
    if not plan.recipe.hardware.cards:
        yield not_applicable("idle", "cards", "the recipe needs none")
        return
    if isinstance(machine.memory_used, Unknown):
        yield result("idle", "cards", machine.memory_used, "", "")
        return
    fix = "`nvidia-smi` names the processes; `sm120 recipe stop` ends what was served here."
    for index, used in enumerate(machine.memory_used):
        if not plan.cards or index in plan.cards:
            why = f"{used / _GIB:.1f} GiB are in use"
            yield result("idle", f"GPU {index}", used < _IDLE_BYTES, why, fix)


def driver(plan: Plan, machine: Machine) -> Iterator[RuleResult]:
    """It can load what the image's compilers make at run time."""
    if not plan.recipe.hardware.cards:
        yield not_applicable("driver", "host", "the recipe needs no card")
    elif isinstance(machine.facts, Unknown):
        yield result("driver", "host", machine.facts, "", "")
    elif plan.cuda is None:
        yield not_applicable("driver", "host", "the image has no CUDA of its own")
    else:
        yield from driver_branch(machine.facts, plan.cuda)


def gate(plan: Plan, machine: Machine) -> Iterator[RuleResult]:
    """The image's kernels were judged for the card, on these very bytes."""
    if not plan.recipe.hardware.cards:
        yield not_applicable("gate", "image", "the recipe needs no card")
    elif plan.gates is None:
        yield result("gate", "image", unknown("the image is not built"), "", "")
    elif plan.gates.state == "no gates":
        yield not_applicable("gate", "image", "the image names no gates")
    else:
        fix = f"`sm120 build {plan.recipe.image} --gate` judges it."
        passed = plan.gates.state == "passed"
        yield result("gate", plan.recipe.image or "", passed, plan.gates.message, fix)


def memory(plan: Plan, machine: Machine) -> Iterator[RuleResult]:
    """The machine's own memory and its nodes, where the recipe counts on them."""
    wanted = plan.recipe.hardware
    if wanted.host_memory_gib is None and wanted.numa_nodes is None:
        yield not_applicable("memory", "host", "the recipe says nothing about it")
        return
    if isinstance(machine.facts, Unknown):
        yield result("memory", "host", machine.facts, "", "")
        return
    if wanted.host_memory_gib:
        held = machine.facts.memory_bytes
        least = wanted.host_memory_gib * _GIB * _SHORT
        good = first_unknown(held) or (isinstance(held, int) and held >= least)
        size = held if isinstance(held, Unknown) else f"{held / _GIB:.0f} GiB"
        fix = "Take a recipe that keeps more on the cards, or a smaller quantization."
        yield result("memory", "host", good, f"{size} of {wanted.host_memory_gib} GiB", fix)
    if wanted.numa_nodes:
        nodes = machine.facts.cpu.numa_nodes
        same = first_unknown(nodes) or len(nodes) == wanted.numa_nodes  # type: ignore[arg-type]
        count = 0 if isinstance(nodes, Unknown) else len(nodes)
        fix = "The firmware sets it (NPS on AMD); the recipe's threads and pinning count on it."
        yield result("memory", "NUMA", same, f"{count} nodes, wanted {wanted.numa_nodes}", fix)


CHECKS: dict[str, Check] = {
    "port": port,
    "image": image,
    "flags": flags,
    "weights": weights,
    "cards": cards,
    "idle": idle,
    "driver": driver,
    "gate": gate,
    "memory": memory,
}


def _gpus(plan: Plan, machine: Machine) -> Known[list[Gpu]]:
    if isinstance(machine.facts, Unknown):
        return machine.facts
    gpus = machine.facts.gpus
    if isinstance(gpus, Unknown) or not plan.cards:
        return gpus
    return [gpu for gpu in gpus if gpu.index in plan.cards]


def look(recipe: Recipe) -> Machine:
    """This machine as far as the recipe depends on it."""
    hardware = recipe.hardware
    if not (hardware.cards or hardware.host_memory_gib or hardware.numa_nodes):
        # it takes seconds, and nothing would be asked of it
        why = unknown("the recipe does not depend on it")
        return Machine(why, why)
    capture = read_capture(None)
    return Machine(gather(capture), then(capture.output("nvidia-smi"), read_memory_used))


def run_checks(plan: Plan, machine: Machine, skipped: Collection[str]) -> list[RuleResult]:
    """Every check that is not skipped, in order."""
    return [
        row for name, check in CHECKS.items() if name not in skipped for row in check(plan, machine)
    ]


def require_ready(rows: Iterable[RuleResult]) -> None:
    """Stop at what failed and at what nobody knows: unknown never counts as passed."""
    bad = [row for row in rows if row.verdict in ("failed", "unknown")]
    if not bad:
        return
    table = [(row.rule, row.subject, row.verdict, row.why, row.fix) for row in bad]
    log.say(log.table(("check", "of", "verdict", "why", "fix"), table))
    first = bad[0]
    raise PreflightFailed(f"{first.rule}: {first.subject}: {first.why}")
