"""Whether this machine is ready for a recipe: asked before anything is started."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from pipeline import log
from pipeline.errors import PreflightFailed
from pipeline.host.facts.gather import gather
from pipeline.host.facts.model import Gpu, HostFacts
from pipeline.host.facts.smi import read_memory_used
from pipeline.host.facts.source import Capture
from pipeline.host.rules.cards import cards as cards_answer
from pipeline.host.rules.machine import driver_branch
from pipeline.host.rules.verdict import RuleResult, first_unknown, not_applicable, result
from pipeline.known import Known, Unknown, then, unknown
from pipeline.publish.gates import GateState
from pipeline.recipe.model import Recipe
from pipeline.serve.fits import FitPlan, Room, shortfall
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
# Vendor and family, as /proc/cpuinfo has them; ansible/roles/nccl asks for the same.
PROCESSORS = {"amd-zen-5": ("AuthenticAMD", 26)}


@dataclass(frozen=True)
class Machine:
    """What checks look at; gathered once, and most of it only where a recipe depends on it."""

    facts: Known[HostFacts]
    memory_used: Known[list[int]]  # bytes of each card
    port_problem: Known[str]  # why the port cannot be used; empty where it is free
    hugepages_bytes: Known[int]  # free ones


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
    fit: FitPlan | None = None
    port_holder: str = ""  # another recipe that is served at the port


Check = Callable[[Plan, Machine], Iterator[RuleResult]]


def _row(
    check: str, subject: str, good: object, *, passed: str, failed: str, fix: str
) -> RuleResult:
    """A check with a text for each outcome: one text for both would be false in one of them."""
    return result(check, subject, good, passed if good else failed, fix)


def port(plan: Plan, machine: Machine) -> Iterator[RuleResult]:
    """Nobody else listens there."""
    fix = "`ss -ltnp` shows which program it is; --port names another one."
    if plan.port_holder:
        fix = f"`sm120 recipe stop {plan.port_holder}` ends it; --port names another port."
    problem = machine.port_problem
    free = problem if isinstance(problem, Unknown) else not problem
    failed = f"cannot be used: {problem}"
    failed += f": {plan.port_holder} is served there" if plan.port_holder else ""
    yield _row("port", str(plan.port), free, passed="is free", failed=failed, fix=fix)


def image(plan: Plan, machine: Machine) -> Iterator[RuleResult]:
    """It was built here from today's checkout."""
    name = plan.recipe.image or ""
    yield _row(
        "image",
        name,
        plan.image_is_built,
        passed="is in the store",
        failed="is not in the store as this checkout builds it",
        fix=f"Run `sm120 build {name}` first.",
    )


def flags(plan: Plan, machine: Machine) -> Iterator[RuleResult]:
    """The engine's own argument parser takes them."""
    name, problems = plan.recipe.name, plan.flags
    if isinstance(problems, Unknown):
        yield result("flags", name, problems, "", "")
        return
    fix = f"`sm120 recipe flags {plan.recipe.image}` shows what the engine accepts."
    failed = problems[0] if problems else ""
    passed = "the engine knows all of them"
    yield _row("flags", name, not problems, passed=passed, failed=failed, fix=fix)


def weights(plan: Plan, machine: Machine) -> Iterator[RuleResult]:
    """Every byte was proved, and nothing has changed since."""
    where = plan.weights
    if where is None:
        fix = "Name their folder with --weights DIR."
        yield result("weights", plan.recipe.name, False, "no folder is named", fix)
    elif plan.recipe.model.tiny and where.digest and where.place is None:
        yield result("weights", "tiny model", True, "made on the spot", "")
    elif where.proof is not None:
        fix = f"On that host: `sm120 weights verify {where.folder}` (--repair where it is damaged)."
        yield result("weights", str(where.folder), where.proof.good, where.proof.why, fix)
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
    return _row(
        "weights",
        where.place.lock.name,
        not unproved,
        passed=f"{log.count(len(check.proved), 'file')} proved",
        failed=f"{unproved} of {len(check.proved) + unproved} files are not proved",
        fix=fix,
    )


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
    yield _row(
        "cards",
        "all",
        len(gpus) >= wanted.cards,
        passed=f"{len(gpus)}, and the recipe needs {wanted.cards}",
        failed=f"only {len(gpus)}, and the recipe needs {wanted.cards}",
        fix=fix,
    )
    for gpu in gpus[: wanted.cards]:
        yield from _card(plan, gpu, fix)
    if not isinstance(machine.facts, Unknown):
        yield from cards_answer(machine.facts)


def _card(plan: Plan, gpu: Gpu, fix: str) -> Iterator[RuleResult]:
    wanted, subject = plan.recipe.hardware, f"GPU {gpu.index}"
    name = CARD_NAMES[wanted.card] if wanted.card else ""
    is_kind = gpu.name if isinstance(gpu.name, Unknown) else name in gpu.name
    passed, failed = f"is an {gpu.name}", f"is an {gpu.name}, and the recipe is for {name}"
    yield _row("cards", subject, is_kind, passed=passed, failed=failed, fix=fix)
    if wanted.memory_gib:
        held = gpu.memory_bytes
        enough = held if isinstance(held, Unknown) else held >= wanted.memory_gib * _GIB * _SHORT
        size = "" if isinstance(held, Unknown) else f"has {held / _GIB:.0f} GiB"
        failed = f"{size}, and the recipe is for {wanted.memory_gib} GiB"
        yield _row("cards", subject, enough, passed=size, failed=failed, fix=fix)


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
            yield _row(
                "idle",
                f"GPU {index}",
                used < _IDLE_BYTES,
                passed=f"is free: {used / _GIB:.1f} GiB in use",
                failed=f"is busy: {used / _GIB:.1f} GiB in use",
                fix=fix,
            )


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


def fit(plan: Plan, machine: Machine) -> Iterator[RuleResult]:
    """The model, with this context and these flags, has room on the cards."""
    wanted, name = plan.recipe.hardware, plan.recipe.model.name
    if not wanted.cards:
        yield not_applicable("fit", name, "the recipe needs no card")
        return
    gpus = _gpus(plan, machine)
    if isinstance(gpus, Unknown) or plan.fit is None:
        why = gpus if isinstance(gpus, Unknown) else unknown("nobody planned it")
        yield result("fit", name, why, "", "")
        return
    used = gpus[: wanted.cards]
    sizes = [gpu.memory_bytes for gpu in used]
    if (missing := first_unknown(*sizes)) or not used:
        yield result("fit", name, missing or unknown("there is no card"), "", "")
        return
    # the smallest card decides, since all get the same share
    room = Room(len(used), min(size for size in sizes if isinstance(size, int)), _host(machine))
    short = shortfall(plan.fit, room)
    good = short if isinstance(short, Unknown) else not short
    passed = "has room on each card"
    model = plan.recipe.model.weights or plan.recipe.model.repository or "MODEL"
    fix = f"`sm120 weights fit {model}` shows the sum, and which options would make it fit."
    yield _row("fit", name, good, passed=passed, failed=str(short), fix=fix)


def _host(machine: Machine) -> int | None:
    held = machine.facts if isinstance(machine.facts, Unknown) else machine.facts.memory_bytes
    return held if isinstance(held, int) else None


def topology(plan: Plan, machine: Machine) -> Iterator[RuleResult]:
    """Where the cards hang, and whether they reach each other, as the recipe counts on it."""
    wanted = plan.recipe.hardware
    if not (wanted.same_numa_node or wanted.peer_to_peer):
        yield not_applicable("topology", "cards", "the recipe says nothing about it")
        return
    gpus = _gpus(plan, machine)
    if isinstance(gpus, Unknown) or isinstance(machine.facts, Unknown):
        yield result("topology", "cards", first_unknown(gpus, machine.facts), "", "")
        return
    used = gpus[: wanted.cards]
    if wanted.same_numa_node:
        nodes = numa_nodes_of(machine.facts, used)
        good = nodes if isinstance(nodes, Unknown) else len(nodes) == 1
        fix = "Name cards of one node with --gpus; `nvidia-smi topo -m` shows them."
        passed = f"all cards are on {_listed(nodes)}"
        failed = f"the cards are on {_listed(nodes)}, and the recipe counts on one node"
        yield _row("topology", "NUMA", good, passed=passed, failed=failed, fix=fix)
    if wanted.peer_to_peer:
        yield _peers(machine.facts, used)


def _listed(nodes: Known[list[int]]) -> str:
    return "" if isinstance(nodes, Unknown) else ", ".join(f"node {node}" for node in nodes)


def numa_nodes_of(facts: HostFacts, gpus: Collection[Gpu]) -> Known[list[int]]:
    """The nodes that cards hang on."""
    on_bus = {card.address: card.numa_node for card in facts.pci.gpus}
    nodes: set[int] = set()
    for gpu in gpus:
        address = gpu.address
        node = address if isinstance(address, Unknown) else on_bus.get(address)
        if isinstance(node, Unknown):
            return node
        # the kernel says -1 where the firmware says nothing, also on machines with one node
        if node is None or node < 0:
            return unknown(f"the kernel names no NUMA node for GPU {gpu.index}")
        nodes.add(node)
    return sorted(nodes)


def _peers(facts: HostFacts, gpus: Collection[Gpu]) -> RuleResult:
    """Only what the driver claims: that it is true is proved by `sm120 host check`."""
    claimed = facts.topology.peers_claimed
    fix = "`sm120 host check` tries it; the role pcie sets it up. Or NCCL_P2P_DISABLE=1."
    if isinstance(claimed, Unknown):
        return result("topology", "peers", claimed, "", "")
    pairs = [f"{a.index}-{b.index}" for a in gpus for b in gpus if a.index != b.index]
    missing = [pair for pair in pairs if pair not in claimed]
    if missing:
        why = unknown(f"nvidia-smi says nothing about GPUs {missing[0]}")
        return result("topology", "peers", why, "", "")
    refused = [pair for pair in pairs if claimed[pair] != "OK"]
    return _row(
        "topology",
        "peers",
        not refused,
        passed="claimed by the driver",
        failed=f"GPUs {refused[0]}: {claimed[refused[0]]}" if refused else "",
        fix=fix,
    )


def hugepages(plan: Plan, machine: Machine) -> Iterator[RuleResult]:
    """Set aside at boot, as many as the recipe counts on."""
    wanted = plan.recipe.hardware.hugepages_gib
    if wanted is None:
        yield not_applicable("hugepages", "host", "the recipe says nothing about them")
        return
    free = machine.hugepages_bytes
    good = free if isinstance(free, Unknown) else free >= wanted * _GIB
    size = "" if isinstance(free, Unknown) else f"{free / _GIB:.1f} GiB are free"
    failed = f"only {size}, and the recipe needs {wanted} GiB"
    fix = "Boot with hugepages= on the kernel's command line, or raise vm.nr_hugepages."
    yield _row("hugepages", "host", good, passed=size, failed=failed, fix=fix)


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
        size = "" if isinstance(held, Unknown) else f"{held / _GIB:.0f} GiB"
        failed = f"only {size}, and the recipe needs {wanted.host_memory_gib} GiB"
        fix = "Take a recipe that keeps more on the cards, or a smaller quantization."
        yield _row("memory", "host", good, passed=size, failed=failed, fix=fix)
    if wanted.numa_nodes:
        nodes = machine.facts.cpu.numa_nodes
        same = first_unknown(nodes) or len(nodes) == wanted.numa_nodes  # type: ignore[arg-type]
        count = log.count(0 if isinstance(nodes, Unknown) else len(nodes), "node")
        failed = f"{count}, and the recipe counts on {wanted.numa_nodes}"
        fix = "The firmware sets it (NPS on AMD); the recipe's threads and pinning count on it."
        yield _row("memory", "NUMA", same, passed=count, failed=failed, fix=fix)


def processor(plan: Plan, machine: Machine) -> Iterator[RuleResult]:
    """The one that the image's own code was made for; on others that code changes nothing."""
    wanted = plan.recipe.hardware.processor
    if wanted is None:
        yield not_applicable("processor", "host", "the recipe runs on any")
        return
    if isinstance(machine.facts, Unknown):
        yield result("processor", "host", machine.facts, "", "")
        return
    cpu = machine.facts.cpu
    missing = first_unknown(cpu.vendor, cpu.family)
    found = f"{cpu.name if isinstance(cpu.name, str) else cpu.vendor}, family {cpu.family}"
    is_wanted = (cpu.vendor, cpu.family) == PROCESSORS[wanted]
    why = f"{found}: is {wanted}" if is_wanted else f"{found}; the recipe is for {wanted}"
    fix = f"Take a recipe that does not need the image {plan.recipe.image}: `sm120 recipe list`."
    yield result("processor", "host", missing or is_wanted, why, fix)


CHECKS: dict[str, Check] = {
    "port": port,
    "image": image,
    "flags": flags,
    "weights": weights,
    "cards": cards,
    "idle": idle,
    "topology": topology,
    "fit": fit,
    "driver": driver,
    "gate": gate,
    "processor": processor,
    "memory": memory,
    "hugepages": hugepages,
}


def _gpus(plan: Plan, machine: Machine) -> Known[list[Gpu]]:
    if isinstance(machine.facts, Unknown):
        return machine.facts
    gpus = machine.facts.gpus
    if isinstance(gpus, Unknown) or not plan.cards:
        return gpus
    return [gpu for gpu in gpus if gpu.index in plan.cards]


def depends_on_machine(recipe: Recipe) -> bool:
    """Whether facts are asked for at all: they take seconds."""
    hardware = recipe.hardware
    about_host = (hardware.host_memory_gib, hardware.numa_nodes, hardware.hugepages_gib)
    return bool(hardware.cards or any(about_host))


def unasked_machine(port_problem: Known[str]) -> Machine:
    """For a recipe that would run on any machine."""
    why = unknown("the recipe does not depend on it")
    return Machine(why, why, port_problem, why)


def machine_of(capture: Known[Capture], port_problem: Known[str]) -> Machine:
    """A captured machine."""
    used = then(capture, lambda c: then(c.output("nvidia-smi"), read_memory_used))
    pages = then(capture, lambda c: then(c.text("/proc/meminfo"), free_hugepages))
    return Machine(then(capture, gather), used, port_problem, pages)


def free_hugepages(text: str) -> Known[int]:
    """From /proc/meminfo, in bytes; of the usual size, as others are not listed there."""
    rows = dict(re.findall(r"^(HugePages_Free|Hugepagesize):\s+(\d+)", text, re.MULTILINE))
    return int(rows["HugePages_Free"]) * int(rows["Hugepagesize"]) * 1024


def run_checks(plan: Plan, machine: Machine, skipped: Collection[str]) -> list[RuleResult]:
    """Every check that is not skipped, in order."""
    return [
        row for name, check in CHECKS.items() if name not in skipped for row in check(plan, machine)
    ]


# Many models of today cannot be calculated yet, and an engine without enough memory says so itself.
_ONLY_SAID = ("fit", "unknown")


def require_ready(rows: Iterable[RuleResult]) -> None:
    """Stop at what failed and at what nobody knows: unknown never counts as passed."""
    bad = []
    for row in rows:
        if (row.rule, row.verdict) == _ONLY_SAID:
            log.say(f"Whether {row.subject} fits is not known: {row.why}")
        elif row.verdict in ("failed", "unknown"):
            bad.append(row)
    if not bad:
        return
    table = [(row.rule, row.subject, row.verdict, row.why, row.fix) for row in bad]
    log.say(log.table(("check", "of", "verdict", "why", "fix"), table))
    first = bad[0]
    raise PreflightFailed(f"{first.rule}: {first.subject}: {first.why}")
