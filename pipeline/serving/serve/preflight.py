"""Whether a machine is ready for a recipe: checked before anything starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import TypeVar

from pipeline.core import log
from pipeline.core.errors import PreflightFailed
from pipeline.core.known import Known, Unknown, first_unknown, then, unknown
from pipeline.core.verdict import RuleResult, not_applicable, result, unknown_result
from pipeline.hosts.facts.gather import gather_facts
from pipeline.hosts.facts.model import Gpu, HostFacts
from pipeline.hosts.facts.smi import read_memory_used
from pipeline.hosts.facts.source import Capture
from pipeline.hosts.rules.judge import driver_branch
from pipeline.hosts.rules.judge import judge_cards as cards_answer
from pipeline.images.gate.state import GateState
from pipeline.serving.fit import placement
from pipeline.serving.recipe.model import Recipe
from pipeline.serving.serve.fits import FitPlan, shortfall
from pipeline.serving.serve.weights import WeightsFolder
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
# Vendor and family, as /proc/cpuinfo has them; ansible/roles/nccl asks for the same.
PROCESSORS = {"amd-zen-5": ("AuthenticAMD", 26)}
# We cannot calculate many models yet, and an engine without enough memory says so itself.
_ONLY_REPORTED = ("fit", "unknown")
_NO_CARD = "the recipe needs no card"


@dataclass(frozen=True)
class PreflightMachine:
    """What checks look at; gathered once, and most of it only where a recipe depends on it."""

    facts: Known[HostFacts]
    memory_used: Known[list[int]]  # bytes of each card
    port_problem: Known[str]  # why the port cannot be used; empty where it is free
    hugepages_bytes: Known[int]  # free ones


@dataclass(frozen=True)
class PlannedStart:
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
    fit: FitPlan | None = None
    port_holder: str = ""  # another recipe that is served at the port


Value = TypeVar("Value")
Check = Callable[[PlannedStart, PreflightMachine], Iterator[RuleResult]]
CHECKS: dict[str, Check] = {}  # by name, in the order in which they run


class _Missing(Exception):
    """A check needs a value that is not known."""

    def __init__(self, why: Unknown) -> None:
        self.why = why


def _known(value: Known[Value]) -> Value:
    if isinstance(value, Unknown):
        raise _Missing(value)
    return value


def _check(
    subject: str = "", *, of: tuple[str, ...] = (), why: str = "the recipe says nothing about it"
) -> Callable[[Check], Check]:
    """Registers a check. Its verdict is unknown where it needs what is not known.

    Without a subject it is about the model. It does not apply to a recipe that wants none `of`
    these of its hardware.
    """

    def register(check: Check) -> Check:
        name = check.__name__

        @wraps(check)
        def judged(plan: PlannedStart, machine: PreflightMachine) -> Iterator[RuleResult]:
            about, wanted = subject or plan.recipe.model.name, plan.recipe.hardware
            try:
                if of and not any(getattr(wanted, field) for field in of):
                    yield not_applicable(name, about, why)
                else:
                    yield from check(plan, machine)
            except _Missing as missing:
                yield unknown_result(name, about, missing.why)

        CHECKS[name] = judged
        return judged

    return register


def _gpus(plan: PlannedStart, machine: PreflightMachine) -> list[Gpu]:
    gpus = _known(_known(machine.facts).gpus)
    return [gpu for gpu in gpus if gpu.index in plan.cards] if plan.cards else gpus


def _gib(size_bytes: Known[int], digits: int = 0) -> str:
    return "" if isinstance(size_bytes, Unknown) else f"{size_bytes / _GIB:.{digits}f} GiB"


@_check()
def port(plan: PlannedStart, machine: PreflightMachine) -> Iterator[RuleResult]:
    """No other program listens at it."""
    failed = f"cannot be used: {machine.port_problem}"
    fix = "`ss -ltnp` shows which program it is; --port names another one."
    # a recipe of ours can be ended by name, other programs cannot
    if plan.port_holder:
        failed += f": {plan.port_holder} is served there"
        fix = f"`sm120 recipe stop {plan.port_holder}` ends it; --port names another port."
    free = then(machine.port_problem, lambda problem: not problem)
    yield result("port", str(plan.port), free, failed, fix, passed="is free")


@_check()
def image(plan: PlannedStart, machine: PreflightMachine) -> Iterator[RuleResult]:
    """The store has it, built from today's checkout."""
    name = plan.recipe.image or ""
    failed = "is not in the store as this checkout builds it"
    fix = f"Run `sm120 build {name}` first."
    yield result("image", name, plan.image_is_built, failed, fix, passed="is in the store")


@_check()
def flags(plan: PlannedStart, machine: PreflightMachine) -> Iterator[RuleResult]:
    """The engine's own argument parser takes them."""
    good = then(plan.flags, lambda problems: not problems)
    failed = "" if good else _known(plan.flags)[0]
    fix = f"`sm120 recipe flags {plan.recipe.image}` shows what the engine accepts."
    passed = "the engine knows all of them"
    yield result("flags", plan.recipe.name, good, failed, fix, passed=passed)


@_check()
def weights(plan: PlannedStart, machine: PreflightMachine) -> Iterator[RuleResult]:
    """Every byte was proved, and nothing has changed since."""
    where = plan.weights
    if where is None:
        fix = "Name their folder with --weights DIR."
        yield result("weights", plan.recipe.name, False, "no folder is named", fix, passed="")
        return
    fix = f"`sm120 weights verify {where.folder}` (--repair where it is damaged)."
    if plan.recipe.model.tiny and where.digest and where.place is None:
        yield result("weights", "tiny model", True, "", "", passed="made on the spot")
    elif where.proof is not None:
        proof, subject = where.proof, str(where.folder)
        fix = f"On that host: {fix}"
        yield result("weights", subject, proof.good, proof.why, fix, passed=proof.why)
    elif where.file and not (where.folder / where.file).is_file():
        fix = "Name the folder that holds it with --weights DIR."
        yield result("weights", where.file, False, f"is not in {where.folder}", fix, passed="")
    elif where.place is None:
        yield unknown_result("weights", str(where.folder), unknown("no lock is of these files"))
    else:
        check = check_by_receipt(where.place)
        damage = [finding.path for finding in check.findings if finding.damage]
        proved, unproved, subject = len(check.proved), len(check.unknown), where.place.lock.name
        failed = f"{unproved} of {proved + unproved} files are not proved"
        if damage:
            subject, failed = damage[0], f"{len(damage)} files are damaged"
        passed, good = f"{log.count(proved, 'file')} proved", not (damage or unproved)
        yield result("weights", subject, good, failed, f"Run {fix}", passed=passed)


@_check("all", of=("cards",), why=_NO_CARD)
def cards(plan: PlannedStart, machine: PreflightMachine) -> Iterator[RuleResult]:
    """As many as the recipe is for, of that kind, with that memory; and all of them answer."""
    wanted, gpus = plan.recipe.hardware, _gpus(plan, machine)
    fix = "Take a recipe for this machine: `sm120 recipe list`."
    passed = f"{len(gpus)}, and the recipe needs {wanted.cards}"
    is_enough = len(gpus) >= wanted.cards
    yield result("cards", "all", is_enough, f"only {passed}", fix, passed=passed)
    # with more cards than it needs, an engine takes the first ones
    name = CARD_NAMES[wanted.card] if wanted.card else ""
    least = (wanted.memory_gib or 0) * _GIB * _SHORT
    for gpu in gpus[: wanted.cards]:
        subject, passed = f"GPU {gpu.index}", f"is an {gpu.name}"
        is_kind = then(gpu.name, lambda found: name in found)
        failed = f"{passed}, and the recipe is for {name}"
        yield result("cards", subject, is_kind, failed, fix, passed=passed)
        if wanted.memory_gib:
            has_memory = then(gpu.memory_bytes, lambda held: held >= least)
            passed = f"has {_gib(gpu.memory_bytes)}"
            failed = f"{passed}, and the recipe is for {wanted.memory_gib} GiB"
            yield result("cards", subject, has_memory, failed, fix, passed=passed)
    yield from cards_answer(_known(machine.facts))


@_check("cards", of=("cards",), why=_NO_CARD)
def idle(plan: PlannedStart, machine: PreflightMachine) -> Iterator[RuleResult]:
    """No other program uses the cards: an engine plans with all of their memory."""
    fix = "`nvidia-smi` names the processes; `sm120 recipe stop` ends what was served here."
    for index, used in enumerate(_known(machine.memory_used)):
        if not plan.cards or index in plan.cards:
            passed, failed = (f"is {x}: {_gib(used, 1)} in use" for x in ("free", "busy"))
            is_free = used < _IDLE_BYTES
            yield result("idle", f"GPU {index}", is_free, failed, fix, passed=passed)


@_check("cards", of=("same_numa_node", "peer_to_peer"))
def topology(plan: PlannedStart, machine: PreflightMachine) -> Iterator[RuleResult]:
    """The cards hang on one node and reach each other, where the recipe counts on it."""
    wanted = plan.recipe.hardware
    used, facts = _gpus(plan, machine)[: wanted.cards], _known(machine.facts)
    if wanted.same_numa_node:
        on_bus = {card.address: card.numa_node for card in facts.pci.gpus}
        of_gpus = {g.index: then(g.address, lambda place: on_bus.get(place, -1)) for g in used}
        # the kernel says -1 where the firmware says nothing, also on machines with one node
        unnamed = [index for index, node in of_gpus.items() if node == -1]
        nodes: Known[list[int]] = sorted({n for n in of_gpus.values() if isinstance(n, int)})
        if unnamed:
            nodes = unknown(f"the kernel names no NUMA node for GPU {unnamed[0]}")
        nodes = first_unknown(*of_gpus.values()) or nodes
        listed = "" if isinstance(nodes, Unknown) else ", ".join(f"node {node}" for node in nodes)
        good = then(nodes, lambda found: len(found) == 1)
        failed = f"the cards are on {listed}, and the recipe counts on one node"
        fix = "Name cards of one node with --gpus; `nvidia-smi topo -m` shows them."
        passed = f"all cards are on {listed}"
        yield result("topology", "NUMA", good, failed, fix, passed=passed)
    if wanted.peer_to_peer:
        # only what the driver claims: `sm120 host check` proves that it is true
        pairs = [f"{a.index}-{b.index}" for a in used for b in used if a.index != b.index]
        refused = then(facts.topology.peers_claimed, lambda claimed: _refused(pairs, claimed))
        fix = "`sm120 host check` tries it; the role pcie sets it up. Or NCCL_P2P_DISABLE=1."
        good, passed = then(refused, lambda found: not found), "claimed by the driver"
        yield result("topology", "peers", good, str(refused), fix, passed=passed)


def _refused(pairs: Collection[str], claimed: Mapping[str, str]) -> Known[str]:
    """The first pair of cards that the driver does not let reach each other; empty for none."""
    for pair in pairs:
        if pair not in claimed:
            return unknown(f"nvidia-smi says nothing about GPUs {pair}")
    return next((f"GPUs {pair}: {claimed[pair]}" for pair in pairs if claimed[pair] != "OK"), "")


@_check(of=("cards",), why=_NO_CARD)
def fit(plan: PlannedStart, machine: PreflightMachine) -> Iterator[RuleResult]:
    """The model, with this context and these flags, has room on the cards."""
    sizes = [_known(g.memory_bytes) for g in _gpus(plan, machine)[: plan.recipe.hardware.cards]]
    if plan.fit is None or not sizes:
        raise _Missing(unknown("there is no card" if plan.fit else "the plan does not ask for it"))
    host = then(machine.facts, lambda facts: facts.memory_bytes)
    # the smallest card decides, since all get the same share
    # no headroom of ours: what a document's command leaves free is the document's choice
    host_bytes = None if isinstance(host, Unknown) else host
    # of all nodes, which have equal cards
    cards = len(sizes) * plan.recipe.nodes
    room = placement.FitMachine(cards, min(sizes), 0, host_bytes)
    short = shortfall(plan.fit, room)
    good = then(short, lambda text: not text)
    model = plan.recipe.model
    named = model.weights or model.repository or "MODEL"
    fix = f"`sm120 weights fit {named}` shows the sum, and which options would make it fit."
    yield result("fit", model.name, good, str(short), fix, passed="has room on each card")


@_check("host", of=("cards",), why=_NO_CARD)
def driver(plan: PlannedStart, machine: PreflightMachine) -> Iterator[RuleResult]:
    """It can load what the image's compilers make at run time."""
    facts = _known(machine.facts)
    if plan.cuda is None:
        yield not_applicable("driver", "host", "the image has no CUDA of its own")
    else:
        yield from driver_branch(facts, plan.cuda)


@_check("image", of=("cards",), why=_NO_CARD)
def gate(plan: PlannedStart, machine: PreflightMachine) -> Iterator[RuleResult]:
    """The image's kernels were judged for the card, on these very bytes."""
    if plan.gates is None:
        raise _Missing(unknown("the image is not built"))
    if plan.gates.state == "no gates":
        yield not_applicable("gate", "image", "the image names no gates")
    else:
        fix = f"`sm120 build {plan.recipe.image} --gate` judges it."
        good, why = plan.gates.state == "passed", plan.gates.message
        yield result("gate", plan.recipe.image or "", good, why, fix, passed=why)


@_check("host", of=("processor",), why="the recipe runs on any")
def processor(plan: PlannedStart, machine: PreflightMachine) -> Iterator[RuleResult]:
    """The one that the image's own code was made for; on others that code changes nothing."""
    wanted = plan.recipe.hardware.processor or ""
    cpu = _known(machine.facts).cpu
    vendor, family = _known(cpu.vendor), _known(cpu.family)
    found = f"{cpu.name if isinstance(cpu.name, str) else vendor}, family {family}"
    fix = f"Take a recipe that does not need the image {plan.recipe.image}: `sm120 recipe list`."
    good, failed = (vendor, family) == PROCESSORS[wanted], f"{found}; the recipe is for {wanted}"
    yield result("processor", "host", good, failed, fix, passed=f"{found}: is {wanted}")


@_check("host", of=("host_memory_gib", "numa_nodes"))
def memory(plan: PlannedStart, machine: PreflightMachine) -> Iterator[RuleResult]:
    """The machine's own memory and its nodes, where the recipe counts on them."""
    wanted = plan.recipe.hardware
    facts = _known(machine.facts)
    if wanted.host_memory_gib:
        least, size = wanted.host_memory_gib * _GIB * _SHORT, _gib(facts.memory_bytes)
        good = then(facts.memory_bytes, lambda held: held >= least)
        failed = f"only {size}, and the recipe needs {wanted.host_memory_gib} GiB"
        fix = "Take a recipe that keeps more on the cards, or a smaller quantization."
        yield result("memory", "host", good, failed, fix, passed=size)
    if wanted.numa_nodes:
        nodes = then(facts.cpu.numa_nodes, len)
        count = "" if isinstance(nodes, Unknown) else log.count(nodes, "node")
        failed = f"{count}, and the recipe counts on {wanted.numa_nodes}"
        fix = "The firmware sets it (NPS on AMD); the recipe's threads and pinning count on it."
        good = then(nodes, lambda found: found == wanted.numa_nodes)
        yield result("memory", "NUMA", good, failed, fix, passed=count)


@_check("host", of=("hugepages_gib",), why="the recipe says nothing about them")
def hugepages(plan: PlannedStart, machine: PreflightMachine) -> Iterator[RuleResult]:
    """Set aside at boot, as many as the recipe counts on."""
    wanted = plan.recipe.hardware.hugepages_gib or 0
    good = then(machine.hugepages_bytes, lambda free: free >= wanted * _GIB)
    passed = f"{_gib(machine.hugepages_bytes, 1)} are free"
    failed = f"only {passed}, and the recipe needs {wanted} GiB"
    fix = "Boot with hugepages= on the kernel's command line, or raise vm.nr_hugepages."
    yield result("hugepages", "host", good, failed, fix, passed=passed)


def machine_for(
    recipe: Recipe, port_problem: Known[str], capture: Callable[[], Known[Capture]]
) -> PreflightMachine:
    """The parts of a machine that a recipe depends on: a capture takes seconds."""
    wanted = recipe.hardware
    if wanted.cards or wanted.host_memory_gib or wanted.numa_nodes or wanted.hugepages_gib:
        captured = capture()
        used = then(captured, lambda c: then(c.output("nvidia-smi"), read_memory_used))
        # of the usual size: /proc/meminfo does not list others
        row = re.compile(r"^(HugePages_Free|Hugepagesize):\s+(\d+)", re.MULTILINE)
        rows = then(
            captured, lambda c: then(c.text("/proc/meminfo"), lambda t: dict(row.findall(t)))
        )
        pages = then(rows, lambda r: int(r["HugePages_Free"]) * int(r["Hugepagesize"]) * 1024)
        return PreflightMachine(then(captured, gather_facts), used, port_problem, pages)
    why = unknown("the recipe does not depend on it")
    return PreflightMachine(why, why, port_problem, why)


def run_checks(
    plan: PlannedStart, machine: PreflightMachine, skipped: Collection[str]
) -> list[RuleResult]:
    """Runs every check that is not skipped, in order."""
    return [
        row for name, check in CHECKS.items() if name not in skipped for row in check(plan, machine)
    ]


def require_ready(rows: Iterable[RuleResult]) -> None:
    """Stops at what failed and at what is unknown, which never counts as passed."""
    bad = []
    for row in rows:
        if (row.rule, row.verdict) == _ONLY_REPORTED:
            log.say(f"Whether {row.subject} fits is not known: {row.why}")
        elif row.verdict in ("failed", "unknown"):
            bad.append(row)
    if bad:
        table = [(row.rule, row.subject, row.verdict, row.why, row.fix) for row in bad]
        log.say(log.table(("check", "of", "verdict", "why", "fix"), table))
        raise PreflightFailed(f"{bad[0].rule}: {bad[0].subject}: {bad[0].why}")
