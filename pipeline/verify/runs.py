"""A benchmark's run: its statement, its numbers computed again, and what stood behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipeline import log
from pipeline.attest.fields import ChangedField, changed_fields, fields_of
from pipeline.attest.names import BENCHMARK_RUN
from pipeline.attest.predicates import BenchmarkRun
from pipeline.attest.statement import RECORDED, Statement
from pipeline.attest.strict import plain
from pipeline.bench.model import Run
from pipeline.bench.place import MOST_REQUESTS_BYTES, REQUESTS_FILE, RUN_FILE, requests_digest
from pipeline.bench.record import read_run_value, run_of, workload_digest
from pipeline.bench.results.recompute import (
    RecomputedTrial,
    left_out,
    recomputed,
    recomputed_intervals,
)
from pipeline.errors import RunInvalid
from pipeline.model import sha256_of
from pipeline.verify.behind import Behind, judge_behind
from pipeline.verify.chain import Judge
from pipeline.verify.evidence import EvidenceItem, distinct
from pipeline.verify.signature import TrustedStatement
from pipeline.verify.statement import judge_statement
from pipeline.verify.verdict import Code, Node, Verdict
from pipeline.verify.walk import Walk

_MOST_SHOWN = 10


@dataclass(frozen=True)
class _Files:
    """A run as it lies on the disk; nothing in it is believed yet."""

    folder: Path
    digest: str
    json: Any
    requests: str | None  # digest of the raw requests; none where they are not there


def judge_run(folder: Path, items: Sequence[EvidenceItem], judge: Judge, behind: Behind) -> Walk:
    """From the numbers of a run to who signed them, and to all that they depend on."""
    try:
        files = _read(folder)
    except RunInvalid as error:
        return Walk(Node(str(folder), Verdict.BROKEN, str(error)), ())
    compare = partial(_compared, files)
    walks = [
        judge_statement(item, BENCHMARK_RUN, "benchmark", judge, compare)
        for item in distinct(items)
    ]
    nodes = [walked.node for walked in walks]
    believed = tuple(each for walked in walks for each in walked.believed)
    if not items:
        message = "there is none: nobody says that this was measured"
        nodes.append(Node("statement", Verdict.INCOMPLETE, message))
    try:
        run = run_of(folder / RUN_FILE, files.json)
    except RunInvalid as error:
        nodes.append(Node("result", Verdict.BROKEN, str(error)))
    else:
        nodes += [_numbers(files, run, believed), _workload(run)]
        more = judge_behind(run, behind, judge)
        nodes += [walked.node for walked in more]
        believed += tuple(each for walked in more for each in walked.believed)
    return Walk(Node(f"{folder / RUN_FILE} {files.digest}", children=tuple(nodes)), believed)


def _read(folder: Path) -> _Files:
    data, value = read_run_value(folder / RUN_FILE)
    return _Files(folder, sha256_of(data), value, requests_digest(folder, MOST_REQUESTS_BYTES))


def claims_of(statement: Statement) -> BenchmarkRun:
    """What a statement says of a run."""
    # the time is beside the fields of the model
    body = {k: v for k, v in statement.predicate.items() if k != RECORDED}
    return BenchmarkRun.model_validate(body)


def _compared(files: _Files, statement: Statement, how: str) -> list[Node]:
    """The files of a run against what was signed or only stated of them."""
    claims = claims_of(statement)
    nodes = []
    if statement.is_about(files.digest):
        count = log.count(len(claims.fields), "value")
        nodes.append(Node("result", message=f"{count}, each as {how}"))
    else:
        changed = changed_fields(fields_of(files.json), claims.fields)
        nodes.append(changed_node("result", changed, f"{how} as", files.json))
    if files.requests is None:
        message = f"{REQUESTS_FILE} is not beside the run"
        nodes.append(Node("requests", Verdict.INCOMPLETE, message, code=Code.NO_REQUESTS))
    elif statement.is_about(files.requests):
        nodes.append(Node("requests", message=f"every byte as {how}"))
    else:
        message = f"{REQUESTS_FILE} has {files.requests}, which was not {how}"
        nodes.append(Node("requests", Verdict.CHANGED, message))
    return nodes


def changed_node(
    title: str, changed: Sequence[ChangedField], how: str, document: Any = None
) -> Node:
    """Fields that are not what they were; the first of them one by one."""
    if not changed:
        return Node(title, Verdict.CHANGED, "other bytes, although each value is the same")
    children = [
        Node(
            plain(f"{c.place}{_cell_of(c.place, document)}"),
            Verdict.CHANGED,
            plain(f"is {c.now}, {how} {c.then}"),
        )
        for c in changed[:_MOST_SHOWN]
    ]
    message = f"{log.count(len(changed), 'value')} changed"
    if len(changed) > _MOST_SHOWN:
        message += f", the first {_MOST_SHOWN} are shown"
    return Node(title, message=message, children=tuple(children))


def _cell_of(place: str, document: Any) -> str:
    """The name of the cell that a place is in: people know it by that."""
    parts = place.split("/")
    if len(parts) < 3 or parts[1] != "cells" or not isinstance(document, dict):
        return ""
    try:
        return f" (cell {document['cells'][int(parts[2])]['cell']['name']})"
    except (LookupError, TypeError, ValueError):
        return ""


def _numbers(files: _Files, run: Run, believed: Sequence[TrustedStatement]) -> Node:
    """Every metric computed again from the raw requests."""
    title = "numbers"
    if files.requests is None:
        message = f"cannot be computed again: {REQUESTS_FILE} is not beside the run"
        return Node(title, Verdict.INCOMPLETE, message, code=Code.NO_REQUESTS)
    try:
        trials = list(recomputed(files.folder, run))
        missing = left_out(files.folder, run)
    except RunInvalid as error:
        return Node(title, Verdict.CHANGED, str(error))
    nodes = [node for trial in trials for node in _lines(trial, believed)]
    changed = [change for trial in trials for change in trial.changed]
    changed += recomputed_intervals(run, trials)
    if changed:
        how = "by its requests and samples it is"
        nodes.append(changed_node("recomputed", changed, how, files.json))
    nodes += [Node("left out", Verdict.CHANGED, plain(each)) for each in missing[:_MOST_SHOWN]]
    if nodes:
        return Node(title, children=tuple(nodes))
    requests = sum(t.requests.lines for cell in run.cells for t in cell.trials)
    counts = f"{log.count(requests, 'request')} of {log.count(len(trials), 'trial')}"
    return Node(title, message=f"the same again from {counts}")


def _lines(trial: RecomputedTrial, believed: Sequence[TrustedStatement]) -> list[Node]:
    """Raw requests that are not those which the run names."""
    if trial.is_as_named:
        return []
    signed = [
        claims_of(each.statement).lines.get(trial.place, "")
        for each in believed
        if each.statement.predicate_type == BENCHMARK_RUN
    ]
    where = _first_changed(trial.sums, signed[0]) if signed else ""
    message = f"the requests have {trial.digest}, the run names {trial.named}{where}"
    return [Node(f"{trial.place}/requests ({trial.name})", Verdict.CHANGED, message)]


def _first_changed(now: str, then: str) -> str:
    pairs = [(now[i : i + 8], then[i : i + 8]) for i in range(0, max(len(now), len(then)), 8)]
    wrong = [number for number, (one, other) in enumerate(pairs) if one != other]
    if not then or not wrong:
        return ""
    shown = ", ".join(map(str, wrong[:_MOST_SHOWN]))
    return f"; changed since it was signed: {log.count(len(wrong), 'request')} ({shown})"


def _workload(run: Run) -> Node:
    now, named = workload_digest(run.workload), run.inputs.workload
    if now != named:
        message = f"is {now}, the run names {named}"
        return Node("workload", Verdict.CHANGED, message, part="workload")
    message = f"{named}, part of the run"
    return Node(f"workload {run.workload.name}", message=message, part="workload")
