"""This machine: its facts, what changed since, known issues, and what its GPUs really do."""

from __future__ import annotations

import json
import os
import select
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pipeline.app.statements import without_statements
from pipeline.app.workspace import Workspace
from pipeline.core import errors, log
from pipeline.core.files import FIRST_BYTES_S, bounded_lines, opened_log, write_bytes
from pipeline.hosts.facts.drift import Difference, compare_facts, read_recorded_facts
from pipeline.hosts.facts.gather import gather_facts
from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.facts.redact import redact_capture
from pipeline.hosts.facts.source import Capture, read_capture
from pipeline.hosts.fleet.verify import HostResult
from pipeline.hosts.probes.runner import ProbeReport, read_probe_rows, run_in_image, run_probes
from pipeline.hosts.probes.tune import Setting, Tuning, plan, sweep, workloads
from pipeline.hosts.rules.issues import IssueFinding, issue_findings, match_lines, match_rules
from pipeline.hosts.rules.judge import judge_rules
from pipeline.hosts.rules.outliers import FleetComparison, find_outliers
from pipeline.images.gate.tracebacks import KnownKernel, Overrun, TracebackReader, known_kernels

_STDIN = Path("-")
# The first bytes of rotated logs: gzip, xz and zstd.
_UNPACKERS = {b"\x1f\x8b\x08": "zcat", b"\xfd7z": "xzcat", b"\x28\xb5\x2f": "zstdcat"}


@dataclass(frozen=True)
class Probes:
    """Where function tests run, and on what."""

    python: str = sys.executable
    image: str | None = None
    device: str = "cuda"
    # a collective over all cards takes seconds; on a bus that hangs it never ends
    step_limit_s: float = 60.0

    def run(self, arguments: list[str], settings: dict[str, str] | None = None) -> ProbeReport:
        """Run the function tests with the user's options and these."""
        given = ["--device", self.device, "--step-limit-s", str(self.step_limit_s), *arguments]
        if self.image:
            return run_in_image(self.image, given, settings)
        return run_probes(self.python, given, settings)


def capture_of(root: Path | None, *, redacted: bool = False) -> Capture:
    """Read this machine, or a captured one, without judging it."""
    capture = read_capture(root)
    return redact_capture(capture) if redacted else capture


def read_host_facts(
    root: Path | None, *, redacted: bool = False, name: str | None = None
) -> HostFacts:
    """This machine's facts, or those of a captured one."""
    return gather_facts(capture_of(root, redacted=redacted), name)


def drift(
    old: Path, new: Path | None = None, root: Path | None = None
) -> tuple[list[Difference], errors.HostDrifted | None]:
    """Compare facts with recorded ones; return the changes and the error that follows."""
    before = read_recorded_facts(old)
    after = read_recorded_facts(new) if new else read_host_facts(root, name=before.host)
    differences = compare_facts(before, after)
    # a field that has become readable is no drift
    bad = [d for d in differences if d.kind != "gained"]
    if not bad:
        return differences, None
    changed = log.count(len(bad), "field")
    error = errors.HostDrifted(f"{before.host}: {changed} changed, such as {bad[0].field}")
    return differences, error


def outliers(
    files: Sequence[Path], checks: Sequence[Path] = ()
) -> tuple[FleetComparison, errors.HostOutlier | None]:
    """The host or GPU that differs from the rest; and the error that follows."""
    files = without_statements(files)
    hosts = {f.stem: read_recorded_facts(f) for f in files}
    if len(hosts) != len(files):
        raise errors.FactsUnreadable(
            "two of the files have the same name", "Name each after its host."
        )
    if checks and len(checks) != len(files):
        raise errors.FactsUnreadable(
            f"{log.count(len(files), 'host')}, but {log.count(len(checks), 'check')}",
            "Give --checks once for each host, in the same order.",
        )
    probes = {f.stem: read_probe_rows(c) for f, c in zip(files, checks, strict=False)}
    result = find_outliers(hosts, probes)
    if not result.outliers:
        return result, None
    first = result.outliers[0]
    message = f"{first.subject}: {first.field} is {first.value}, not {first.others}"
    return result, errors.HostOutlier(message)


def check_host(
    root: Path | None = None,
    *,
    cuda: str | None = None,
    rules: bool = True,
    functions: bool = True,
    probes: Probes | None = None,
    arguments: Sequence[str] = (),
) -> tuple[HostResult, ProbeReport | None]:
    """Judge a host by rules over its facts, then test what its GPUs do."""
    judged = judge_rules(read_host_facts(root), cuda) if rules else []
    answer = None
    # a capture has no GPUs that could be tested
    if functions and root is None:
        with log.step("Testing the GPUs"):
            answer = (probes or Probes()).run(list(arguments))
    tests, output = (answer.rows, answer.lines()) if answer else ([], [])
    name = root.name if root else "this host"
    return HostResult(host=name, rules=judged, functions=tests, output=output), answer


def tune_nccl(
    out: Path,
    ranks: int,
    *,
    hidden: int = 7168,
    concurrency: tuple[int, int] = (1, 32),
    graph_file: str | None = None,
    full: bool = False,
    rounds: int = 50,
    probes: Probes | None = None,
) -> tuple[Tuning, errors.NothingTuned | None]:
    """Measure NCCL settings at the sizes that engines use, and write what was tried to `out`."""
    probes = probes or Probes()
    settings = plan(full=full, graph_file=graph_file)
    common = ["--rounds", str(rounds), "--only", "all_reduce"]
    common += ["--ranks", str(ranks), "--from-ranks", str(ranks)]
    # settings are compared at the sizes of the workloads; large copies would only take time
    common += ["--bulk-bytes", "0"]

    def measure(setting: Setting, sizes: list[int]) -> ProbeReport:
        log.say(f"  trying {setting.label}")
        # the host's own nccl.conf would override the compared settings
        variables = {"NCCL_CONF_FILE": "/dev/null", **setting.variables}
        arguments = [*common, "--sizes-kib", ",".join(map(str, sizes))]
        return probes.run(arguments, variables)

    with log.step(f"Trying {len(settings)} settings on {ranks} ranks"):
        loads = workloads(hidden, *concurrency)
        tuning = sweep(settings, loads, measure, ranks=ranks, device=probes.device)
    text = json.dumps(tuning.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"
    # written whether or not something won: it is the record of what was tried
    write_bytes(out, text.encode())
    count = len(settings)
    error = (
        None if tuning.winners else errors.NothingTuned(f"none of the {count} settings finished")
    )
    return tuning, error


class Diagnosis(NamedTuple):
    """Known issues, and what the gates know about kernels that need too much shared memory."""

    issues: list[IssueFinding]
    kernels: list[tuple[Overrun, list[KnownKernel] | None]]  # none: no checkout to look in


def diagnose(
    workspace: Workspace, logs: Sequence[Path], *, machine: bool = True, root: Path | None = None
) -> Diagnosis:
    """Recognise known issues in logs and in the facts of this machine."""
    reader = TracebackReader()
    matches = []
    for path in logs:
        with _opened(path) as lines:
            name = "stdin" if path == _STDIN else path.name
            matches.append(match_lines(name, reader.watch(lines)))
    if machine:
        capture = read_capture(root)
        # either may be closed to users, or already have dropped the line
        texts = {name: capture.output(name) for name in ("dmesg", "journal")}
        matches.append(match_rules(judge_rules(gather_facts(capture))))
        matches += [
            match_lines(name, text.splitlines())
            for name, text in texts.items()
            if isinstance(text, str)
        ]
    overruns = reader.overruns
    checkout = workspace.checkout_or_none() if overruns else None
    if checkout is None:
        return Diagnosis(issue_findings(matches), [(each, None) for each in overruns])
    store = workspace.store_to_read()
    known: list[tuple[Overrun, list[KnownKernel] | None]] = [
        (each, known_kernels(checkout, store, each)) for each in overruns
    ]
    return Diagnosis(issue_findings(matches), known)


def piped_log() -> tuple[Path, ...]:
    """Return standard input if a log comes through it; a terminal or /dev/null has none."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:  # closed
        return ()
    # sshd gives a command a socket; either may be open, with nobody who writes
    may_be_silent = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
    if stat.S_ISREG(mode) or (may_be_silent and select.select([0], [], [], 0)[0]):
        return (_STDIN,)
    if not may_be_silent:
        return ()
    wait = log.seconds(FIRST_BYTES_S)
    log.say(f"Waiting {wait} for a log in standard input (`-` waits for as long as it takes)")
    if select.select([0], [], [], FIRST_BYTES_S)[0]:
        return (_STDIN,)
    log.say("Nothing came: standard input is not read")
    return ()


@contextmanager
def _opened(path: Path) -> Iterator[Iterable[str]]:
    # a pipe (`<(docker logs NAME)`) can be read only once
    if path.is_file():
        with path.open("rb") as file:
            program = _UNPACKERS.get(file.read(3))
        if program:
            # a compressed log has no known line; finding nothing in it would mislead
            hint = f"Unpack it on the way: `{program} {path} | sm120 doctor -`."
            raise errors.SpecInvalid(f"{path}: is compressed", hint)
    # line by line, and whatever its encoding: engines write logs of gigabytes
    if path == _STDIN:
        log.say("Reading the log from standard input, to its end")
        with open(0, "rb", closefd=False) as file:
            yield bounded_lines(file)
    else:
        with opened_log(path) as file:
            yield bounded_lines(file)
