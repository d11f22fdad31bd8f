"""Report what every host of an inventory is and serves, over one connection each, in parallel."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from pydantic import computed_field

from pipeline.app.hosts import Fleet
from pipeline.app.workspace import Workspace
from pipeline.artifacts.attest.statement import stamp
from pipeline.artifacts.containers.container_engine import ContainerEngine, find_engine
from pipeline.artifacts.store.store import Store
from pipeline.core import errors, log
from pipeline.core.known import Known, Unknown, then, unknown
from pipeline.core.model import Frozen
from pipeline.hosts.facts.drift import compare_facts
from pipeline.hosts.facts.gather import gather_facts
from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.fleet.playbook import promises_of
from pipeline.hosts.fleet.promised import Promised
from pipeline.hosts.fleet.tunnel import Tunnel, open_tunnel
from pipeline.hosts.fleet.verify import captured_facts, recorded
from pipeline.serving.bench.model import BenchRun
from pipeline.serving.bench.place import RUN_FILE
from pipeline.serving.bench.record import read_run
from pipeline.serving.report.markup import Child, Column, html_table, tag
from pipeline.serving.report.page import table_page
from pipeline.serving.serve.attempts import Attempt
from pipeline.serving.serve.run import ServedStatus, attempts_of, status_of
from pipeline.serving.serve.site import HERE, Site, find_remote_site

# nvidia-smi alone is asked four times, and may take seconds each on many cards
_CAPTURE_S = 300.0
_MOST_RUNS = 1000  # of the folders that are looked through
COLUMNS = ("host", "driver", "recipe", "image", "health", "last smoke", "last number", "drift")
_GOOD_SMOKE = ("passed", "unfinished")
ProblemKind: TypeAlias = Literal[
    "service", "image", "health", "smoke", "address", "unreached", "drift", "unknown"
]
# The worst first: what is served wrongly outweighs what is not known.
_ERRORS: dict[ProblemKind, type[errors.PipelineError]] = {
    "service": errors.HostUnfit,
    "image": errors.ImageDiffers,
    "health": errors.ServerGone,
    "smoke": errors.SmokeFailed,
    "address": errors.FleetUnready,
    "unreached": errors.HostUnreached,
    "drift": errors.HostDrifted,
    "unknown": errors.HostUnknown,
}
_HINTS: dict[ProblemKind, str] = {
    "service": "Repair the card, reboot, then `sm120-health return` as root on the host.",
    "health": "`sm120 recipe logs RECIPE --on HOST` shows why; serve it again.",
    "smoke": "`sm120 smoke RECIPE --on HOST` tests it again.",
    "address": "Give each name of the inventory an address (ansible_host) of its own.",
}


class LastSmoke(Frozen):
    """The last smoke test of a recipe on a host, as this store knows it."""

    outcome: str
    at: str
    attempt: str


class LastNumber(Frozen):
    """The highest output rate of a recipe's last benchmark on a host."""

    output_tok_s: float
    cell: str
    workload: str
    at: str
    same_image: bool  # what is served now was measured


class ServedLine(Frozen):
    """A recipe on a host."""

    status: ServedStatus
    smoke: LastSmoke | None = None
    number: LastNumber | None = None


class HostProblem(Frozen):
    """What somebody should look at."""

    kind: ProblemKind
    why: str


class StatusSources(NamedTuple):
    """What this machine knows about the hosts."""

    store: Store
    records: Path
    attempts: list[Attempt]
    runs: list[BenchRun]


class HostStatus(Frozen):
    """One host; an unreached one is a row like the others."""

    host: str
    unreached: str | None = None
    twin: str | None = None  # another name of the inventory for the same address
    driver: str | None = None
    out_of_service: str | None = None  # why the role `health` took it out of service
    unknown: list[str] = []  # what the host could not be asked, and why
    served: list[ServedLine] = []
    drift: list[str] | None = None  # fields that changed since the record; none without one

    @computed_field  # type: ignore[prop-decorator]
    @property
    def problems(self) -> list[HostProblem]:
        """What somebody should look at, the worst first."""
        found: list[tuple[ProblemKind, str]] = []
        if self.out_of_service:
            found.append(("service", f"is out of service: {self.out_of_service}"))
        for status, smoke in ((line.status, line.smoke) for line in self.served):
            if status.built == "other":
                found.append(("image", f"{status.recipe}: {status.why}"))
            if not status.healthy:
                found.append(("health", f"{status.recipe}: is {status.status}, with no answer"))
            if smoke and smoke.outcome not in _GOOD_SMOKE:
                found.append(("smoke", f"{status.recipe}: its last smoke test {smoke.outcome}"))
        if self.twin:
            found.append(("address", f"has the address of {self.twin}, and was not asked"))
        if self.unreached is not None:
            found.append(("unreached", f"is not reached: {self.unreached}"))
        if self.drift:
            changed = log.count(len(self.drift), "fact")
            why = f"{changed} changed since it was recorded, such as {self.drift[0]}"
            found.append(("drift", why))
        found += [("unknown", why) for why in self.unknown]
        ordered = sorted(found, key=lambda each: [*_ERRORS].index(each[0]))
        return [HostProblem(kind=kind, why=why) for kind, why in ordered]

    @classmethod
    def asked(
        cls,
        promised: Promised,
        facts: Known[HostFacts],
        served: Known[list[ServedStatus]],
        known: StatusSources,
    ) -> HostStatus:
        """What a host said, beside what was recorded, tested and measured of it."""
        to = promised.connection
        unsaid = [x.unknown for x in (facts, served) if isinstance(x, Unknown)]
        # by whichever name a user typed after --on
        names = {promised.host, to.address, f"{to.user}@{to.address}"}
        lines = []
        for status in [] if isinstance(served, Unknown) else served:
            smokes = [
                LastSmoke(outcome=each.outcome, at=each.begun.at, attempt=each.begun.id)
                for each in known.attempts
                if each.begun.kind == "smoke"
                and (each.begun.host in names, each.begun.recipe) == (True, status.recipe)
            ]
            numbers = [
                LastNumber(
                    output_tok_s=most[0],
                    cell=most[1],
                    workload=run.workload.name,
                    at=run.ended,
                    same_image=run.inputs.image == status.digest,
                )
                for run in known.runs
                if (run.inputs.host_name in names, run.inputs.recipe_name) == (True, status.recipe)
                for most in sorted(
                    (cell.intervals["output_tok_s"].mean, cell.cell.name)
                    for cell in run.cells
                    if cell.state == "good" and "output_tok_s" in cell.intervals
                )[-1:]
            ]
            last = max(numbers, key=lambda number: number.at, default=None)
            smoke = max(smokes, key=lambda smoke: smoke.at, default=None)
            lines.append(ServedLine(status=status, smoke=smoke, number=last))
        driver = then(facts, lambda found: found.driver.version)
        if isinstance(driver, Unknown) and not isinstance(facts, Unknown) and facts.pci.gpus:
            unsaid.append(f"the driver: {driver.unknown}")
        before = recorded(known.records, promised.host)
        drift = None
        if before and not isinstance(facts, Unknown):
            moved = compare_facts(before, facts)
            # that a field can be read now which could not be before is no drift
            drift = [each.field for each in moved if each.kind == "changed"]
        return cls(
            host=promised.host,
            driver=None if isinstance(driver, Unknown) else driver,
            out_of_service=None if isinstance(facts, Unknown) else facts.out_of_service,
            unknown=unsaid,
            served=lines,
            drift=drift,
        )

    def cells(self) -> list[list[str | None]]:
        """The rows of the table, one for each recipe, in the order of COLUMNS."""
        drift = None if self.drift is None else "as recorded"
        drift = log.count(len(self.drift), "fact") if self.drift else drift
        if self.unreached is not None or self.twin:
            health = "not asked" if self.twin else "not reached"
            return [[self.host, None, None, None, health, None, None, None]]
        rows: list[list[str | None]] = []
        for status, smoke, number in ((x.status, x.smoke, x.number) for x in self.served):
            health = "answers" if status.healthy else status.status
            health += ", another image" if status.built == "other" else ""
            health += ", out of service" if self.out_of_service else ""
            shown = f"{number.output_tok_s:,.1f} tok/s, {number.cell}" if number else None
            if number and not number.same_image:
                shown = f"{shown}, another image"
            tested = f"{smoke.outcome}, {smoke.at[:10]}" if smoke else None
            recipe = f"{status.recipe} ({status.rank})" if status.rank else status.recipe
            image = f"{status.image}@{status.digest[:19]}"
            rows.append([self.host, self.driver, recipe, image, health, tested, shown, drift])
        out = "out of service" if self.out_of_service else None
        return rows or [[self.host, self.driver, None, None, out, None, None, drift]]


def host_status(
    workspace: Workspace, fleet: Fleet, benches: Sequence[Path] = ()
) -> tuple[list[HostStatus], errors.PipelineError | None]:
    """Ask every host of an inventory; return the worst error. `benches` hold results of `bench`."""
    fleet.require_inventories()
    store, runs = workspace.store_to_read(), list[BenchRun]()
    for file in islice((f for place in benches for f in place.rglob(RUN_FILE)), _MOST_RUNS):
        try:
            runs.append(read_run(file.parent))
        except errors.PipelineError as error:
            log.say(f"{error}; it is left out")
    known = StatusSources(store, fleet.records_folder, attempts_of(store).read().attempts, runs)
    with (
        log.step("Asking Ansible how the hosts are reached"),
        fleet.password_files() as passwords,
        promises_of(
            workspace.checkout(), [*fleet.arguments(), *passwords], "connection.yml"
        ) as promised,
    ):
        hosts = [fleet.reach(each) for each in promised]
    seen: dict[tuple[object, ...], str] = {}
    tunnels: list[Tunnel] = []

    def one(promised: Promised, first: str) -> HostStatus:
        name, to = promised.host, promised.connection
        if first != name:
            return HostStatus(host=name, twin=first)

        def served(site: Site, engine: ContainerEngine) -> list[ServedStatus]:
            return status_of(engine, store, site)

        try:
            if to.kind == "local":
                facts = then(HERE.captured(), lambda found: gather_facts(found, name))
                return HostStatus.asked(promised, facts, served(HERE, find_engine("auto")), known)
            with open_tunnel(to) as tunnel:
                tunnels.append(tunnel)
                facts = captured_facts(
                    name, lambda line: tunnel.read(["sh", "-c", line], limit_s=_CAPTURE_S)
                )
                try:
                    found: Known[list[ServedStatus]] = served(
                        *find_remote_site(tunnel, name, "auto")
                    )
                except errors.DockerUnavailable as error:
                    found = unknown(str(error).removeprefix(f"{name}: "))
                return HostStatus.asked(promised, facts, found, known)
        except errors.PipelineError as error:
            return HostStatus(host=name, unreached=str(error).removeprefix(f"{to.address}: "))

    # the same private address behind two gateways is two machines
    firsts = [
        seen.setdefault((to.kind, to.address, to.port, to.arguments), each.host)
        for each, to in ((each, each.connection) for each in hosts)
    ]
    with (
        log.step(f"Looking at {log.count(len(hosts), 'host')}"),
        ThreadPoolExecutor(max(1, fleet.jobs)) as pool,
    ):
        try:
            rows = list(pool.map(one, hosts, firsts))
        except BaseException:
            # Ctrl-C reaches this thread alone, and the pool waits for all others
            pool.shutdown(wait=False, cancel_futures=True)
            for tunnel in tunnels:
                tunnel.hang_up()
            raise
    bad = [(row.host, problem) for row in rows for problem in row.problems]
    for kind, make in _ERRORS.items():
        for host, problem in bad:
            if problem.kind == kind:
                return rows, make(f"{host}: {problem.why}", _HINTS.get(kind, ""))
    return rows, None


def render_status(rows: Sequence[HostStatus]) -> bytes:
    """The table as one HTML file."""
    kinds = {row.host: row.problems[0].kind if row.problems else None for row in rows}
    table: list[list[Child]] = []
    problems: list[list[Child]] = []
    for row in rows:
        look = "good" if kinds[row.host] is None else "bad"
        table += [[tag(cells[0], look), *(x or "–" for x in cells[1:])] for cells in row.cells()]
        problems += [[row.host, tag(each.kind, "bad"), each.why] for each in row.problems]
    parts = [html_table("Hosts", [Column(name.capitalize()) for name in COLUMNS], table)]
    if problems:
        heads = [Column("Host"), Column("What"), Column("Why", is_wide=True)]
        parts.append(html_table("To look at", heads, problems))
    count = log.count(len(rows), "host")
    return table_page(f"Status of {count}", f"Looked at {stamp()}.", parts)
