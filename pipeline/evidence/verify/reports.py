"""A report: its page, the data inside of it, who signed that, and the runs it was made from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from glob import escape
from itertools import islice
from pathlib import Path

from pipeline.artifacts.attest.names import REPORT
from pipeline.artifacts.attest.statement import Statement
from pipeline.artifacts.attest.strict import plain
from pipeline.core import log
from pipeline.core.errors import ReportInvalid, RunInvalid
from pipeline.core.files import read_plain, sha256_of_file
from pipeline.core.model import sha256_of
from pipeline.evidence.verify.chain import Judge
from pipeline.evidence.verify.evidence import EvidenceItem, beside, distinct, gather
from pipeline.evidence.verify.runs import Behind, judge_file_statement, judge_run
from pipeline.evidence.verify.verdict import Node, broken, changed, incomplete
from pipeline.evidence.verify.walk import Walk
from pipeline.serving.bench.foreign import read_foreign
from pipeline.serving.bench.place import RUN_FILE
from pipeline.serving.report.check import OpenedReport, check_run, open_report

_MOST_BYTES = 64 << 20
_MOST_SHOWN = 10
_MOST_FOLDERS = 1000


def judge_report(path: Path, items: Sequence[EvidenceItem], judge: Judge, sources: Behind) -> Walk:
    """From a page to its data, from there to the runs, and from each to all that it names."""
    try:
        page = read_plain(path, _MOST_BYTES)
        if page is None:
            raise ReportInvalid(f"larger than {_MOST_BYTES} bytes")
        report = open_report(page)
    except (ReportInvalid, OSError) as error:
        return Walk(broken(str(path), str(error)))
    digest = sha256_of(page)

    def compare(statement: Statement, how: str) -> list[Node]:
        # the bytes of the page hold the data and all that people see
        if statement.is_about(digest):
            return [Node("page", message=f"every byte as {how}")]
        return [changed("page", f"has {digest}, which was not {how}")]

    walks = [judge_file_statement(i, REPORT, "report", judge, compare) for i in distinct(items)]
    if not items:
        message = "there is none: nobody says that this report is theirs"
        walks.append(Walk(incomplete("statement", message)))
    if problem := report.problem():
        walks.append(Walk(changed("embedded data", problem)))
    walks += [_run(report, i, path, judge, sources) for i in range(len(report.data.runs))]
    node = Node(f"{path} {digest}", children=tuple(w.node for w in walks))
    return Walk(node, tuple(each for walked in walks for each in walked.believed))


def _run(report: OpenedReport, index: int, page: Path, judge: Judge, sources: Behind) -> Walk:
    """One run of a report, compared with it and then with all that the run depends on."""
    named, places = report.data.runs[index], (*sources.folders, page.parent)
    title = f"run {plain(named.name)}"
    found = _find(named.file, named.digest, places)
    if found is None:
        message = f"{named.digest} is in none of the folders here (--look-in DIR)"
        return Walk(incomplete(title, message))
    problems = check_run(report, index, found)
    children = tuple(
        changed(plain(each.where) or "data", plain(each.message).replace("\n", " "))
        for each in problems[:_MOST_SHOWN]
    )
    message = f"{log.count(len(problems), 'place')} changed" if problems else "as in the run"
    same = Node("numbers of the report", message=message, children=children)
    if not (found / RUN_FILE).is_file():
        # the numbers of another program can be compared, but have no signature
        unsigned = incomplete("statement", f"a result of {plain(named.tool)} has none")
        return Walk(Node(title, children=(same, unsigned)))
    within = Behind(sources.store, (*sources.folders, found, found.parent, page.parent))
    walked = judge_run(found, gather(beside(found / RUN_FILE)), judge, within)
    return Walk(Node(title, children=(same, walked.node)), walked.believed)


def _find(file: str, digest: str, places: Sequence[Path]) -> Path | None:
    """The folder of a run, or the result of another program, by its digest.

    A run that was changed itself is found by its name.
    """
    folders: list[Path] = []
    for place in places:
        # `sm120 bench` keeps runs as bench/WORKLOAD, and with --out as runs/night/WORKLOAD
        for depth in ("", "*/", "*/*/", "*/*/*/"):
            runs = islice(place.glob(f"{depth}{RUN_FILE}"), _MOST_FOLDERS)
            folders += sorted(path.parent for path in runs if path.is_file())
    parts = Path(file).parent.parts
    named = [f for f in folders if parts and f.resolve().parts[-len(parts) :] == parts]
    # the folder of that name before a copy of it, and each once
    for folder in dict.fromkeys((*named, *folders)):
        if sha256_of_file(folder / RUN_FILE) == digest:
            return folder
    if named or Path(file).name != file:  # a page may be anybody's: no path leads elsewhere
        return next(iter(named), None)
    found = (p for place in places for p in (place / file, *place.glob(f"*/{escape(file)}")))
    for path in islice(found, _MOST_FOLDERS):
        with suppress(RunInvalid):
            if read_foreign(path).digest == digest:
                return path
    return None
