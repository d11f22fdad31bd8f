"""The statement about a page: its digest, and the runs that its numbers came from."""

from __future__ import annotations

from pipeline.artifacts.attest.names import REPORT
from pipeline.artifacts.attest.predicates import Report
from pipeline.artifacts.attest.statement import Moment, Statement, make_statement
from pipeline.artifacts.attest.strict import plain
from pipeline.core.model import sha256_of
from pipeline.serving.report.model import ReportData
from pipeline.serving.report.page import data_digest


def report_statement(
    name: str, page: bytes, data: ReportData, when: Moment | None = None
) -> Statement:
    """What is claimed of a page."""
    claims = Report(
        title=plain(data.title),
        runs=[run.digest for run in data.runs],
        data=data_digest(data),
    )
    body = claims.model_dump(mode="json", exclude_unset=True)
    return make_statement(name, sha256_of(page), REPORT, body, when)
