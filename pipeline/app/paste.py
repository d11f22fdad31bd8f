"""One redacted block for an issue tracker: what ran on what, what it said, and what is not known.

The last part names what nobody recorded, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import ValidationError

from pipeline.app.host import read_host_facts
from pipeline.app.recipes import recipes_of
from pipeline.app.report import ReportRequest, measured_data
from pipeline.app.workspace import Workspace
from pipeline.artifacts.attest.statement import stamp
from pipeline.artifacts.store.store import Store
from pipeline.core.errors import PipelineError, RunInvalid, StoreUnusable
from pipeline.core.files import read_limited
from pipeline.core.known import Unknown
from pipeline.hosts.facts.drift import read_recorded_facts
from pipeline.hosts.facts.model import HostFacts, gpus_of
from pipeline.images.gate.runs import RESULT, RunTest, read_runs
from pipeline.serving.recipe.model import merged_flags
from pipeline.serving.report.build import TOOL, place_of
from pipeline.serving.report.from_host import HOST, host_tables
from pipeline.serving.report.model import ReportData
from pipeline.serving.report.redact import Redactor, own_names
from pipeline.serving.report.text import PasteSection, render_paste, series_rows
from pipeline.serving.serve.attempts import Attempt
from pipeline.serving.serve.engine_log import kernel_choices
from pipeline.serving.serve.run import attempts_of, recipe_digest
from pipeline.serving.smoke.model import SmokeResult

_MOST_SMOKE_BYTES = 64 << 20
_LAST_ATTEMPTS = 5
_PLATFORMS = ("linux/amd64", "linux/arm64")
_SKIPPED = "skipped"

Rows = list[list[str]]


class Pasted(NamedTuple):
    """The block, and what it lacks with the reason."""

    text: str
    skipped: Rows


def paste_report(workspace: Workspace, request: ReportRequest) -> Pasted:
    """One redacted block about a recipe: host, image, kernels, smoke test, benchmark."""
    data, attempts = measured_data(workspace, request)
    try:
        store: Store | None = workspace.store_to_read()
    except StoreUnusable:
        store = None  # what was measured elsewhere can be pasted without one
    named = [request.recipe, *(each.recipe for run in data.runs for each in run.series)]
    named += [attempt.begun.recipe for attempt in attempts[-1:]]
    name = next(filter(None, named), None)
    tried = [attempt for attempt in attempts if attempt.begun.recipe == name]
    if name and name == request.recipe and not tried and name not in named[1:]:
        # a name without any record is a typo, unless there is such a recipe
        recipes_of(workspace, request.folders).read(name)
    # this machine, unless the server ran on another one
    is_here = not data.runs and not (tried and tried[-1].begun.host)
    facts = read_recorded_facts(request.host_path) if request.host_path else None
    facts = read_host_facts(None) if facts is None and is_here else facts
    gathered = _PasteFacts(workspace, request, data, name, tried, store, facts)
    tests = gathered.tests
    judged = Counter(test.verdict for test in tests)
    counts = ", ".join(f"{number} {verdict}" for verdict, number in sorted(judged.items()))
    bad = [[t.verdict, t.name, t.message] for t in tests if t.verdict in ("failed", "unknown")]
    parts = {
        "host": gathered.host,
        "image": gathered.image,
        "recipe": gathered.recipe,
        "last starts": gathered.starts,
        "kernels the engine named": gathered.kernels,
        "smoke": [["checks", counts]] if tests else gathered.no_smoke,
        "bench": [] if data.runs else _missing("no RUN was named"),
    }
    sections = [PasteSection("made by", [["tool", TOOL], ["at", stamp()]])]
    sections += [
        PasteSection(title, [row for row in rows if row[0] != _SKIPPED])
        for title, rows in parts.items()
    ]
    sections.append(PasteSection("smoke checks that did not pass", bad))
    for series in (series for run in data.runs for series in run.series):
        head, cells = series_rows(series, is_exact=False)
        # a row for each number: two dozen columns are wider than any issue
        numbers = [[*row] for row in zip(head, *cells, strict=True) if {*row[1:]} != {"–"}]
        sections.append(PasteSection(f"bench {series.name}: {series.workload}", numbers, True))
    findings = [[f.kind, f.sentence()] for f in data.findings if f.kind == "flag"]
    sections.append(PasteSection("warnings", findings))
    gaps = [[title, row[1]] for title, rows in parts.items() for row in rows if row[0] == _SKIPPED]
    gaps += [[f"smoke {t.name}", t.message] for t in tests if t.verdict == _SKIPPED]
    gaps += gathered.void_cells
    sections.append(PasteSection("skipped, and why", gaps))
    verdict = f"smoke: {counts}" if tests else "no smoke test"
    redactor = gathered.redactor
    text = render_paste(f"sm120 report: {name or 'no recipe'}, {verdict}", sections, redactor)
    return Pasted(text, [[redactor.text(cell) for cell in row] for row in gaps])


def _missing(why: str) -> Rows:
    return [[_SKIPPED, why]]


@dataclass(frozen=True)
class _PasteFacts:
    """What is known about one recipe; a property for each part of the block."""

    workspace: Workspace
    request: ReportRequest
    data: ReportData
    recipe_name: str | None
    attempts: list[Attempt]  # of this recipe
    store: Store | None
    facts: HostFacts | None

    @property
    def host(self) -> Rows:
        """Its hardware and software, without its name."""
        measured = [run for run in self.data.runs if any(f.name == HOST for f in run.hardware)]
        tables = host_tables(self.facts) if self.facts else None
        if measured and not tables:
            tables = measured[0].hardware, measured[0].software
        if not tables:
            return _missing("nobody recorded the server's machine; --host-facts FILE names it")
        return [[fact.name, fact.value] for table in tables for fact in table if fact.name != HOST]

    @property
    def image(self) -> Rows:
        """The image of the recipe's last start, else the one that a run names."""
        begun = self.attempts[-1].begun if self.attempts else None
        if begun and begun.image:
            return [["name", begun.image], ["digest", begun.image_digest or "not recorded"]]
        links = [link for run in self.data.runs for link in run.evidence if link.name == "image"]
        known = [["digest", link.digest] for link in links if link.digest]
        return known[:1] or _missing("no start of the recipe is recorded, and no run names one")

    @property
    def recipe(self) -> Rows:
        """What the engine is started with."""
        if self.recipe_name is None:
            return _missing("nothing was started by a recipe; --recipe names one")
        try:
            recipe = recipes_of(self.workspace, self.request.folders).read(self.recipe_name)
        except PipelineError as error:
            # yesterday's start is worth reporting even if its recipe was removed since
            return [["name", self.recipe_name], *_missing(f"it cannot be read: {error}")]
        cards, digest = recipe.hardware, recipe_digest(recipe)
        rows = [
            ["name", f"{recipe.name} ({recipe.backing})"],
            ["digest", digest],
            ["engine", recipe.engine],
            ["model", recipe.model.repository or recipe.model.name],
            ["cards", f"{cards.cards} x {cards.card}" if cards.cards else "none"],
            ["flags", " ".join(merged_flags(recipe).arguments()) or "none"],
        ]
        rows += [["environment", f"{name}={value}"] for name, value in recipe.variables().items()]
        for begun in (attempt.begun for attempt in self.attempts[-1:]):
            if begun.recipe_digest != digest:
                rows.append(["changed", f"was last started as {begun.recipe_digest}"])
            given = begun.options.overrides.model_dump(exclude_none=True) if begun.options else {}
            rows += [["override", f"{name} = {value}"] for name, value in given.items()]
        return rows

    @property
    def starts(self) -> Rows:
        """The last attempts, with the reason of each failure and the known issues."""
        rows = []
        for attempt in self.attempts[-_LAST_ATTEMPTS:]:
            issues = sorted({issue for end in attempt.ends for issue in end.issues})
            known = f" (known issues: {', '.join(issues)})" if issues else ""
            what = f"{attempt.begun.kind} {attempt.begun.id}"
            rows.append([what, attempt.outcome, f"{attempt.failure}{known}".strip()])
        return rows or _missing("no start of it is recorded in this store")

    @property
    def kernels(self) -> Rows:
        """The kernels that the engine's log names, from the last start that names any."""
        chosen = [end.kernels for attempt in self.attempts for end in attempt.ends if end.kernels]
        logs = [self.request.log_path] if self.request.log_path else []
        if self.store and not logs:
            attempts = attempts_of(self.store)
            logs = [attempts.log_path(attempt.begun.id) for attempt in self.attempts[-1:]]
        if self.request.log_path or not chosen:
            chosen += [kernel_choices(log) for log in logs if log.is_file()]
        lines = chosen[-1] if chosen else []
        return [[line] for line in lines] or _missing("no log of a start names any; --log FILE")

    @property
    def tests(self) -> list[RunTest]:
        """Every check of the ladder, from the named result, else from the store."""
        begun = self.attempts[-1].begun if self.attempts else None
        if path := self.request.smoke_path:
            file = path / RESULT if path.is_dir() else path
            data = read_limited(file, _MOST_SMOKE_BYTES, RunInvalid)
            try:
                rungs = SmokeResult.model_validate_json(data).rungs
            except ValidationError as error:
                hint = "Name the folder of `sm120 smoke --output`, or its smoke.json."
                raise RunInvalid(f"{file}: is no result of `sm120 smoke`", hint) from error
            checks = [(rung.name, check) for rung in rungs for check in rung.checks]
            return [
                RunTest(name=f"{rung}: {c.name}", verdict=c.verdict, message=c.message)
                for rung, c in checks
            ]
        if not (self.store and begun and begun.image and begun.image_digest):
            return []
        found = [
            run
            for platform in _PLATFORMS
            for run in read_runs(self.store, begun.image, platform, begun.image_digest)
        ]
        ladders = [r.tests for r in found if (r.kind, r.recipe) == ("smoke", self.recipe_name)]
        return ladders[0] if ladders else []

    @property
    def no_smoke(self) -> Rows:
        return _missing("no smoke test of this recipe and image is kept; --smoke names a result")

    @property
    def void_cells(self) -> Rows:
        """Void or unfinished steps of a sweep."""
        cells = [c for run in self.data.runs for series in run.series for c in series.cells]
        return [
            [f"bench {cell.name} is {cell.state}", note.message]
            for cell in cells
            if cell.state != "good"
            for note in cell.notes
        ]

    @property
    def redactor(self) -> Redactor:
        """Knows the names of this machine, of other hosts, and what identifies the cards."""
        cards = gpus_of(self.facts) if self.facts else []
        known: Iterable[object] = [
            *(each for card in cards for each in (card.uuid, card.serial)),
            *([self.facts.host] if self.facts else []),
            *(f.value for run in self.data.runs for f in run.hardware if f.name == HOST),
            *(attempt.begun.host for attempt in self.attempts),
        ]
        texts = [str(each) for each in known if each and not isinstance(each, Unknown)]
        # as it tells runs of one name apart
        folders = [f"({place_of(run)})" for run in self.data.runs]
        return Redactor({*own_names(), *texts, *folders})
