"""Reports: benchmark results as one page that people open, and as PDF, Markdown and CSV."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from pipeline.app.signing import Signing, trust_of
from pipeline.app.statements import keep_statement
from pipeline.app.workspace import Workspace
from pipeline.artifacts.attest.envelope import SUFFIX
from pipeline.artifacts.attest.statement import moment, stamp
from pipeline.artifacts.store.store import Store
from pipeline.core import log
from pipeline.core.errors import StoreUnusable
from pipeline.core.files import sha256_of_file, write_bytes
from pipeline.evidence.verify.chain import VerifyContext
from pipeline.evidence.verify.evidence import beside, gather_envelopes
from pipeline.evidence.verify.runs import RunInputs, judge_bench_run
from pipeline.evidence.verify.verdict import Node
from pipeline.hosts.facts.drift import read_recorded_facts
from pipeline.serving.bench.place import RUN_FILE, is_run, run_folder, runs_in
from pipeline.serving.bench.record import read_run
from pipeline.serving.quality.run import quality_lines
from pipeline.serving.report.build import all_references, fitting, named_reference, report_data
from pipeline.serving.report.findings import WRONG
from pipeline.serving.report.from_host import memory_of_log, with_host
from pipeline.serving.report.from_run import read_foreign_data, read_run_data
from pipeline.serving.report.model import EvidenceLink, ReportData, RunData
from pipeline.serving.report.page import render_page, report_statement
from pipeline.serving.report.pdf import print_pdf
from pipeline.serving.report.redact import redact_report
from pipeline.serving.report.text import render_csv, render_markdown
from pipeline.serving.serve.attempts import Attempt
from pipeline.serving.serve.run import attempts_of

_FORMATS: dict[str, Callable[[ReportData], bytes]] = {
    ".html": render_page,
    ".md": render_markdown,
    ".csv": render_csv,
}
_MOST_LOG_BYTES = 64 << 20
_MOST_FILES = 1000  # of a folder, among which the facts of a host are looked for


FORMATS = (*_FORMATS, ".pdf")


@dataclass(frozen=True)
class ReportRequest:
    """Runs to show, what to show next to them, and the files to write."""

    runs: tuple[Path, ...] = ()
    targets: tuple[Path, ...] = (Path("report.html"),)
    references: tuple[str, ...] = ()  # published tables; none: those of the same workload
    title: str | None = None
    log_path: Path | None = None
    host_path: Path | None = None
    is_redacted: bool = False
    quality_paths: tuple[Path, ...] = ()  # results of `sm120 quality`
    folders: tuple[Path, ...] = ()  # where evidence is looked for
    trust_path: Path | None = None
    # of `paste_report` alone; without them, the run's recipe or the last one that was tried, and
    # the ladder that is kept beside its image
    recipe: str | None = None
    smoke_path: Path | None = None

    def named_runs(self) -> list[Path]:
        """Every run, including those in a folder of several."""
        return [each for path in self.runs for each in runs_in(path) or [path]]


def make_report(workspace: Workspace, request: ReportRequest) -> ReportData:
    """Write runs as a page, PDF, Markdown or CSV, and state the page; returns its data."""
    data, attempts = measured_data(workspace, request)
    if request.is_redacted:
        data = redact_report(data, {a.begun.host for a in attempts if a.begun.host})
    for target in request.targets:
        if target.suffix == ".pdf":
            with log.step(f"Printing {target}"):
                print_pdf(render_page(data), target)
        else:
            write_bytes(target, _FORMATS[target.suffix](data))
        # the others are made of the page's data, and hold none that could be compared
        if target.suffix == ".html":
            statement = report_statement(target.name, target.read_bytes(), data, moment())
            path = target.with_name(f"{target.name}{SUFFIX}")
            stated = keep_statement(path, statement, Signing())
            log.say(f"statement: {stated.file}, {stated.state}")
    return data


def measured_data(workspace: Workspace, request: ReportRequest) -> tuple[ReportData, list[Attempt]]:
    """Collect all that a report shows, and the store's attempts."""
    trust = trust_of(workspace, request.trust_path)
    context = VerifyContext(trust, workspace.checkout_or_none(), datetime.now(UTC))
    try:
        store: Store | None = workspace.store_to_read()
    except StoreUnusable:
        store = None  # a report can be made without one
    # the file of `bench --host-facts` is often in the folder where the user types commands
    behind, named = RunInputs(store, (*request.folders, Path.cwd())), request.named_runs()
    read = [_read(path, request, context, behind) for path in named]
    if request.host_path is not None:
        facts, digest = read_recorded_facts(request.host_path), sha256_of_file(request.host_path)
        for at, run in enumerate(read):
            its = next((link.digest for link in run.evidence if link.name == "host facts"), None)
            # facts of other hosts are refused; a run that names none is believed
            if its in (None, digest):
                read[at] = with_host(run, facts)
            else:
                other = f"{run.name}: was measured on a host of other facts, {its}"
                log.say(f"{other}; it keeps its own")
    names = request.references
    references = [named_reference(name) for name in names if name not in ("none", "all")]
    if not names or "all" in names:
        references = list(all_references()) if names else fitting(read)
    attempts = attempts_of(store).read().attempts if store else []
    data = report_data(
        read,
        references,
        attempts,
        made=stamp(),
        title=request.title,
    )
    if request.quality_paths:
        lines = [line for path in request.quality_paths for line in quality_lines(path)]
        data = data.model_copy(update={"quality": lines})
    return data, attempts


def _read(path: Path, request: ReportRequest, context: VerifyContext, behind: RunInputs) -> RunData:
    """Read a run with its memory, checked evidence and, unless the user names them, facts."""
    log_path = request.log_path
    if not is_run(path):
        return _with_memory(read_foreign_data(path), log_path, is_named=True)
    run = read_run_data(path)
    if log_path is None and behind.store and run.started:
        attempts, recipes = attempts_of(behind.store), {series.recipe for series in run.series}
        host = read_run(run_folder(path)).inputs.host_name
        # of the start that was measured: the last one of its recipe before the run
        logs = [
            attempts.log_path(attempt.begun.id)
            for attempt in attempts.read().attempts
            if attempt.begun.recipe in recipes and attempt.begun.at <= run.started
            # a start on another host says nothing of this one's memory
            if attempt.begun.host == host
            if any(end.outcome == "serving" for end in attempt.ends)
        ]
        log_path = next((each for each in reversed(logs) if each.is_file()), None)
    run = _with_memory(run, log_path, is_named=bool(request.log_path))
    folder = run_folder(path)
    within = RunInputs(behind.store, (*behind.folders, folder, folder.parent))
    with log.step(f"Checking {path}"):
        items = gather_envelopes(beside(folder / RUN_FILE))
        judged = judge_bench_run(folder, items, context).with_inputs(within, context)
    links = evidence_links(run.evidence, judged.node.children)
    for link in links:
        if link.state in WRONG:
            log.say(f"{path}: {link.name}: {link.state}: {link.message}")
    run = run.model_copy(update={"evidence": links})
    # the facts that the run names by digest, if a folder here has them
    named = next((link.digest for link in links if link.name == "host facts"), None)
    for place in within.folders if named and request.host_path is None else ():
        for file in islice(sorted(place.glob("*.json")), _MOST_FILES):
            is_small = file.is_file() and file.stat().st_size <= _MOST_LOG_BYTES
            if is_small and sha256_of_file(file) == named:
                return with_host(run, read_recorded_facts(file))
    return run


def _with_memory(run: RunData, path: Path | None, *, is_named: bool) -> RunData:
    if path is None:
        return run
    with path.open("rb") as file:
        lines = file.read(_MOST_LOG_BYTES).decode(errors="replace").splitlines()
    memory = memory_of_log(lines)
    if not memory and is_named:
        # nobody expects it from a log that nobody named: llama.cpp on a CPU writes nothing
        log.say(f"{path}: no line tells how memory was split")
    if not memory:
        return run
    return run.model_copy(update={"memory": memory})


def evidence_links(named: Iterable[EvidenceLink], nodes: Iterable[Node]) -> list[EvidenceLink]:
    """Each check of a run, with the digest that the run names for it."""
    by_name = {link.name: link for link in named}
    judged = []
    for node in nodes:
        name = node.part if node.part in by_name else node.title
        digest = by_name[name].digest if name in by_name else None
        # names only the decisive node of a tree; `sm120 verify` shows the rest
        decisive = node.culprit()
        where = "" if decisive is node else f"{decisive.title}: "
        message = f"{where}{decisive.message.replace(digest or chr(0), '').strip(' ,')}"
        body = {"name": name, "digest": digest, "state": node.verdict.value, "message": message}
        judged.append(EvidenceLink.model_validate(body))
    # what has no check of its own, such as the raw requests
    names = {link.name for link in judged}
    return [*judged, *(link for link in by_name.values() if link.name not in names)]
