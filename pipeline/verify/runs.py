"""A benchmark's run: its statement, its numbers computed again, and all that they depend on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from pipeline import log
from pipeline.attest.names import BENCHMARK_RUN, kind_of
from pipeline.attest.predicates import check_predicate
from pipeline.attest.statement import Statement
from pipeline.attest.strict import plain
from pipeline.bench.model import Run
from pipeline.bench.place import MOST_REQUESTS_BYTES, REQUESTS_FILE, RUN_FILE, requests_digest
from pipeline.bench.record import read_run_value, run_of, workload_digest
from pipeline.bench.results.recompute import left_out, recomputed, recomputed_intervals
from pipeline.errors import RecordInvalid, RunInvalid
from pipeline.model import sha256_of
from pipeline.verify.behind import Behind, judge_behind
from pipeline.verify.chain import Judge
from pipeline.verify.evidence import EvidenceItem, distinct
from pipeline.verify.signature import TrustedStatement, judge_signatures
from pipeline.verify.verdict import Code, Node, Verdict, broken, changed, incomplete
from pipeline.verify.walk import Walk

_MOST_SHOWN = 10
# Judges the files by a statement; the text is "signed" or "stated".
Compare = Callable[[Statement, str], list[Node]]


def judge_run(folder: Path, items: Sequence[EvidenceItem], judge: Judge, behind: Behind) -> Walk:
    """From the numbers of a run to who signed them, and to all that they depend on."""
    path = folder / RUN_FILE
    try:
        data, value = read_run_value(path)
        requests = requests_digest(folder, MOST_REQUESTS_BYTES)
    except RunInvalid as error:
        return Walk(broken(str(folder), str(error)), ())
    digest = sha256_of(data)
    compare = partial(_compared, digest, requests)
    walks = [
        judge_file_statement(item, BENCHMARK_RUN, "benchmark", judge, compare)
        for item in distinct(items)
    ]
    if not items:
        message = "there is none: nobody says that this was measured"
        walks.append(Walk(incomplete("statement", message), ()))
    try:
        run = run_of(path, value)
    except RunInvalid as error:
        walks.append(Walk(broken("result", str(error)), ()))
    else:
        walks.append(Walk(_numbers(folder, run, has_requests=requests is not None), ()))
        now, named = workload_digest(run.workload), run.inputs.workload
        title, message = f"workload {run.workload.name}", f"{named}, part of the run"
        workload = Node(title, message=message, part="workload")
        if now != named:
            message = f"is {now}, the run names {named}"
            workload = Node("workload", Verdict.CHANGED, message, part="workload")
        walks += [Walk(workload, ()), *judge_behind(run, behind, judge)]
    believed = tuple(each for walked in walks for each in walked.believed)
    return Walk(Node(f"{path} {digest}", children=tuple(w.node for w in walks)), believed)


def judge_file_statement(
    item: EvidenceItem, predicate_type: str, about: str, judge: Judge, compare: Compare
) -> Walk:
    """One envelope beside a file that must be of this type; `about` names what such state."""
    if item.envelope is None:
        return Walk(broken(item.name, item.error), ())
    statement = item.envelope.statement
    kind = kind_of(statement.predicate_type)
    title = f"{kind} ({item.name})"
    signature, keys = judge_signatures(item.envelope, judge.trust, judge.now)
    try:
        if statement.predicate_type != predicate_type:
            raise RecordInvalid(f"is no statement about a {about}")
        check_predicate(predicate_type, statement.predicate)
    except RecordInvalid as error:
        return Walk(Node(title, children=(signature, broken("predicate", str(error)))), ())
    nodes = [signature]
    # what an unbelieved statement says was changed may be its own lie: then it counts for nothing
    if signature.verdict is not Verdict.BROKEN:
        nodes += compare(statement, "signed" if item.envelope.signatures else "stated")
    believed = (TrustedStatement(item.name, statement, tuple(keys)),) if keys else ()
    return Walk(Node(title, children=tuple(nodes), subject=kind), believed)


def _compared(result: str, requests: str | None, statement: Statement, how: str) -> list[Node]:
    """The files of a run, by their digests, against a statement."""
    nodes = []
    for title, file, digest in (
        ("result", RUN_FILE, result),
        ("requests", REQUESTS_FILE, requests),
    ):
        if digest is None:
            message = f"{file} is not beside the run"
            nodes.append(Node(title, Verdict.INCOMPLETE, message, code=Code.NO_REQUESTS))
        elif statement.is_about(digest):
            nodes.append(Node(title, message=f"every byte as {how}"))
        else:
            nodes.append(changed(title, f"{file} has {digest}, which was not {how}"))
    return nodes


def _numbers(folder: Path, run: Run, *, has_requests: bool) -> Node:
    """Every metric computed again from the raw requests."""
    title = "numbers"
    if not has_requests:
        message = f"cannot be computed again: {REQUESTS_FILE} is not beside the run"
        return Node(title, Verdict.INCOMPLETE, message, code=Code.NO_REQUESTS)
    try:
        trials = list(recomputed(folder, run))
        missing = left_out(folder, run)
    except RunInvalid as error:
        return changed(title, str(error))
    nodes = []
    for trial in (trial for trial in trials if not trial.is_as_named):
        message = f"the requests have {trial.digest}, the run names {trial.named}"
        nodes.append(changed(f"{trial.place}/requests ({trial.name})", message))
    wrong = [change for trial in trials for change in trial.changed]
    if wrong := wrong + recomputed_intervals(run, trials):
        children = []
        for each in wrong[:_MOST_SHOWN]:
            # people know a cell by its name, and each place begins with /cells/NUMBER
            cell = run.cells[int(each.place.split("/")[2])].cell.name
            message = f"is {each.now}, by its requests and samples it is {each.then}"
            children.append(changed(plain(f"{each.place} (cell {cell})"), plain(message)))
        message = f"{log.count(len(wrong), 'value')} changed"
        if len(wrong) > _MOST_SHOWN:
            message += f", the first {_MOST_SHOWN} are shown"
        nodes.append(Node("recomputed", message=message, children=tuple(children)))
    nodes += [changed("left out", plain(each)) for each in missing[:_MOST_SHOWN]]
    if nodes:
        return Node(title, children=tuple(nodes))
    requests = sum(t.requests.lines for cell in run.cells for t in cell.trials)
    counts = f"{log.count(requests, 'request')} of {log.count(len(trials), 'trial')}"
    return Node(title, message=f"the same again from {counts}")
