"""A report: what it shows, the data inside of it, who signed that, and the runs behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from glob import escape
from itertools import islice
from pathlib import Path

from pipeline import log
from pipeline.attest.fields import changed_fields, fields_of
from pipeline.attest.names import REPORT
from pipeline.attest.predicates import Report
from pipeline.attest.statement import RECORDED, Statement
from pipeline.attest.strict import plain
from pipeline.bench.foreign import read_foreign
from pipeline.bench.place import RUN_FILE
from pipeline.errors import ReportInvalid, RunInvalid
from pipeline.files import read_plain, sha256_of_file
from pipeline.model import sha256_of
from pipeline.report.check import OpenedReport, Problem, check_run, open_report
from pipeline.verify.behind import Behind
from pipeline.verify.chain import Judge
from pipeline.verify.evidence import EvidenceItem, beside, distinct, gather
from pipeline.verify.runs import changed_node, judge_run
from pipeline.verify.statement import judge_statement
from pipeline.verify.verdict import Node, Verdict
from pipeline.verify.walk import Walk

_MOST_BYTES = 64 << 20
_MOST_SHOWN = 10
_MOST_FOLDERS = 1000


def judge_report(path: Path, items: Sequence[EvidenceItem], judge: Judge, behind: Behind) -> Walk:
    """From a page to its data, from there to the runs, and from each to all that it names."""
    try:
        page = read_plain(path, _MOST_BYTES)
        if page is None:
            raise ReportInvalid(f"larger than {_MOST_BYTES} bytes")
        report = open_report(page)
    except (ReportInvalid, OSError) as error:
        return Walk(Node(str(path), Verdict.BROKEN, str(error)), ())
    compare = partial(_compared, report)
    walks = [judge_statement(i, REPORT, "report", judge, compare) for i in distinct(items)]
    if not items:
        message = "there is none: nobody says that this report is theirs"
        walks.append(Walk(Node("statement", Verdict.INCOMPLETE, message), ()))
    if problem := report.problem():
        walks.append(Walk(Node("embedded data", Verdict.CHANGED, problem), ()))
    walks += [_run(report, i, path, judge, behind) for i in range(len(report.data.runs))]
    node = Node(f"{path} {sha256_of(page)}", children=tuple(w.node for w in walks))
    return Walk(node, tuple(each for walked in walks for each in walked.believed))


def _compared(report: OpenedReport, statement: Statement, how: str) -> list[Node]:
    """The bytes of a page against what was signed or only stated of them.

    They hold the data and all that people see. Where they differ, the statement's own list of
    values names those of the data that did.
    """
    if statement.is_about(sha256_of(report.page)):
        return [Node("page", message=f"every byte as {how}")]
    # the time is beside the fields of the model
    body = {k: v for k, v in statement.predicate.items() if k != RECORDED}
    claims = Report.model_validate(body)
    changed = changed_fields(fields_of(report.json), claims.fields)
    if changed:
        return [changed_node("data", changed, f"{how} as")]
    message = f"what it shows is not as {how}, although each value of its data is"
    return [Node("page", Verdict.CHANGED, message)]


def _problems(title: str, problems: Sequence[Problem], otherwise: str) -> Node:
    if not problems:
        return Node(title, message=otherwise)
    children = [
        Node(plain(each.where) or "data", Verdict.CHANGED, plain(each.message).replace("\n", " "))
        for each in problems[:_MOST_SHOWN]
    ]
    message = f"{log.count(len(problems), 'place')} changed"
    return Node(title, message=message, children=tuple(children))


def _run(report: OpenedReport, index: int, path: Path, judge: Judge, behind: Behind) -> Walk:
    """One run of a report, compared with it and then walked back."""
    named = report.data.runs[index]
    title = f"run {plain(named.name)}"
    folder = _find(named.file, named.digest, path, behind)
    foreign = folder is None and _find_foreign(named.file, named.digest, path, behind)
    if foreign:
        return Walk(_foreign(report, index, foreign, title), ())
    if folder is None:
        message = f"{named.digest} is in none of the folders here (--look-in DIR)"
        return Walk(Node(title, Verdict.INCOMPLETE, message), ())
    same = _same_numbers(report, index, folder)
    within = Behind(behind.store, (*behind.folders, folder, folder.parent, path.parent))
    walked = judge_run(folder, gather(beside(folder / RUN_FILE)), judge, within)
    return Walk(Node(title, children=(same, walked.node)), walked.believed)


def _same_numbers(report: OpenedReport, index: int, place: Path) -> Node:
    return _problems("numbers of the report", check_run(report, index, place), "as in the run")


def _foreign(report: OpenedReport, index: int, file: Path, title: str) -> Node:
    """A result of another program: its numbers can be compared, and nobody signed them."""
    message = f"a result of {plain(report.data.runs[index].tool)} has none"
    unsigned = Node("statement", Verdict.INCOMPLETE, message)
    return Node(title, children=(_same_numbers(report, index, file), unsigned))


def _find_foreign(name: str, digest: str, page: Path, behind: Behind) -> Path | None:
    """The result of another program, by its name and digest."""
    places = (*behind.folders, page.parent)
    if Path(name).name != name:  # a page may be anybody's
        return None
    found = (p for place in places for p in (place / name, *place.glob(f"*/{escape(name)}")))
    return next((p for p in islice(found, _MOST_FOLDERS) if _foreign_digest(p) == digest), None)


def _foreign_digest(path: Path) -> str | None:
    try:
        return read_foreign(path).digest
    except RunInvalid:
        return None


def _find(file: str, digest: str, page: Path, behind: Behind) -> Path | None:
    """The folder of a run by its digest; by its name where the run itself was changed."""
    parts = Path(file).parent.parts
    folders = list(dict.fromkeys(_candidates(page, behind)))
    named = [f for f in folders if parts and f.resolve().parts[-len(parts) :] == parts]
    # the one that was named before a copy of it
    for folder in (*named, *folders):
        if sha256_of_file(folder / RUN_FILE) == digest:
            return folder
    return next(iter(named), None)


def _candidates(page: Path, behind: Behind) -> Iterator[Path]:
    for place in (*behind.folders, page.parent):
        # `sm120 bench` keeps runs as bench/WORKLOAD, and with --out as runs/night/WORKLOAD
        for depth in ("", "*/", "*/*/", "*/*/*/"):
            found = islice(place.glob(f"{depth}{RUN_FILE}"), _MOST_FOLDERS)
            yield from sorted(path.parent for path in found if path.is_file())
