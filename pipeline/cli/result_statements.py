"""Statements that verbs leave beside benchmarks and reports."""

from __future__ import annotations

from pathlib import Path

from pipeline.attest.envelope import SUFFIX
from pipeline.attest.statement import moment
from pipeline.bench.place import RUN_FILE
from pipeline.bench.results.statement import benchmark_statement
from pipeline.cli.file_statements import LeftBeside, keep_beside
from pipeline.cli.signing import Signing
from pipeline.report.model import ReportData
from pipeline.report.statement import report_statement


def leave_run_statement(folder: Path, signing: Signing, *, is_all: bool = False) -> LeftBeside:
    """State a benchmark with all of its values, beside its result."""
    statement = benchmark_statement(folder, moment())
    return keep_beside(folder / f"{RUN_FILE}{SUFFIX}", statement, signing, is_all=is_all)


def leave_report_statement(path: Path, data: ReportData, signing: Signing) -> LeftBeside:
    """State a page with all of its values, beside it."""
    statement = report_statement(path.name, path.read_bytes(), data, moment())
    return keep_beside(path.with_name(f"{path.name}{SUFFIX}"), statement, signing)
