"""Judges the hosts of a fleet in parallel: promises, drift, rules over facts, function tests.

The result of each host has rows, and the verdict over all of them.

Keeps host records on the controller: the facts of each host as of its last provisioning run.
"""

from __future__ import annotations

import base64
import io
import json
import shlex
import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import computed_field

from pipeline.core import proc
from pipeline.core.errors import FactsUnreadable
from pipeline.core.files import write_bytes
from pipeline.core.known import Known, Unknown, then, unknown
from pipeline.core.model import FILE_VERSION, Frozen
from pipeline.core.verdict import RuleResult, RuleVerdict, Verdict, worst
from pipeline.hosts.facts import capture
from pipeline.hosts.facts.drift import Difference, compare_facts, read_recorded_facts
from pipeline.hosts.facts.gather import gather_facts
from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.facts.source import Capture, read_capture
from pipeline.hosts.fleet.promised import Promised
from pipeline.hosts.fleet.remote import CommandResult, Remote, Unreached, one_line
from pipeline.hosts.probes import runner
from pipeline.hosts.rules.issues import IssueFinding, issue_findings, match_lines, match_rules
from pipeline.hosts.rules.judge import judge_rules

# of a play, in the folder of records
CAPTURES = "captures"
# nvidia-smi alone is asked four times, and may take seconds each on many cards
_CAPTURE_S = 300.0
# the script's own limit comes first, so that it can clean up
_CLEAN_UP_S = 60.0
# unlike /tmp, only root writes to it, and a boot empties it
_FOLDER = Path("/run/sm120/probes")


class Row(Frozen):
    """One promise of one role, kept or not."""

    role: str
    promise: str
    verdict: RuleVerdict
    why: str = ""
    fix: str = ""
    # the name of the rule over facts by which known issues refer to this promise
    rule: str = ""


class HostResult(Frozen):
    """One host. A host that was not reached has no rows, and is never called passed."""

    host: str
    unreached: str | None = None
    rows: list[Row] = []
    rules: list[RuleResult] = []
    functions: list[runner.ProbeRow] = []
    drift: list[Difference] | None = None  # None: there is no record to compare with
    output: list[str] = []  # of function tests; known issues are recognised in it

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> Verdict:
        """`not reached`, else the worst of all verdicts; unknown if there are none."""
        if self.unreached is not None:
            return "not reached"
        return worst(self._verdicts(), "unknown")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def findings(self) -> list[IssueFinding]:
        """Known issues that explain what failed."""
        judged = [
            RuleResult(rule=r.rule, subject=r.role, verdict=r.verdict, why=r.why)
            for r in self.rows
            if r.rule
        ]
        return issue_findings(
            [match_rules([*judged, *self.rules]), match_lines("tests", self.output)]
        )

    def count(self, verdict: RuleVerdict) -> int:
        """How many rows have this verdict."""
        return self._verdicts().count(verdict)

    def _verdicts(self) -> list[RuleVerdict]:
        rows = [r.verdict for r in self.rows]
        return rows + [r.verdict for r in self.rules] + [r.verdict for r in self.functions]


class FleetResult(Frozen):
    """All hosts of one verification."""

    version: Annotated[Literal[1], FILE_VERSION] = 1
    hosts: list[HostResult]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> Verdict:
        """The worst of all hosts."""
        return worst([host.verdict for host in self.hosts], "unknown")


# hosts.promises.run.judge_promises
Judge: TypeAlias = Callable[[Promised, Remote, Known[HostFacts], Sequence[str]], list[Row]]


class HostVerifyOptions(Frozen):
    """Which promises to judge, and what else."""

    roles: tuple[str, ...] = ()
    rules: bool = False
    image: str | None = None
    cuda: str | None = None
    probe_arguments: tuple[str, ...] = ()
    records: Path | None = None
    save: Path | None = None


def verify_fleet(
    fleet: Sequence[Promised],
    options: HostVerifyOptions,
    judge_promises: Judge,
    *,
    jobs: int,
    on_result: Callable[[HostResult], None],
) -> FleetResult:
    """Every host, some in parallel; one that is down does not hold up the others."""
    remotes = [Remote(promised.connection) for promised in fleet]

    def one(promised: Promised, remote: Remote) -> HostResult:
        result = verify_host(promised, remote, options, judge_promises)
        on_result(result)
        return result

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        try:
            return FleetResult(hosts=list(pool.map(one, fleet, remotes)))
        except BaseException:
            # Ctrl-C reaches this thread alone, and the pool waits for all others
            for remote in remotes:
                remote.hang_up()
            raise


def verify_host(
    promised: Promised, remote: Remote, options: HostVerifyOptions, judge_promises: Judge
) -> HostResult:
    """One host."""
    if promised.unreached is not None:
        reason = promised.unreached.removeprefix("Task failed: ")
        return HostResult(host=promised.host, unreached=_one_line(reason))
    try:
        with remote:
            # the first command: a host that is down is reported once, not by every check
            read = captured_facts(promised.host, partial(remote.run, limit_s=_CAPTURE_S))
            rows = judge_promises(promised, remote, read, options.roles)
            facts = None if isinstance(read, Unknown) else read
            functions, output = run_functions(
                remote, promised, facts, options.image, options.probe_arguments
            )
    except Unreached as why:
        return HostResult(host=promised.host, unreached=_one_line(str(why)))
    if options.save and facts:
        # for `host drift` and `host outliers`
        write_bytes(host_record_path(options.save, facts.host), _json(facts))
        if functions:
            rows_of = {"rows": [r.model_dump(mode="json") for r in functions]}
            text = json.dumps({"functions": rows_of}, indent=2, sort_keys=True) + "\n"
            write_bytes(options.save / "checks" / f"{facts.host}.json", text.encode())
    before = recorded(options.records, promised.host)
    return HostResult(
        host=promised.host,
        rows=rows,
        rules=judge_rules(facts, options.cuda) if options.rules and facts else [],
        functions=functions,
        output=output,
        drift=compare_facts(before, facts) if before and facts else None,
    )


def captured_facts(host: str, run: Callable[[str], CommandResult]) -> Known[HostFacts]:
    """Read the host's facts with the code that captures this machine."""
    done = run(f"python3 -c {shlex.quote(one_line(Path(capture.__file__)))}")
    if done.code != 0:
        return unknown(f"the facts cannot be read: {done.message}")
    return then(done.out, lambda data: gather_facts(Capture.model_validate_json(data), host))


def _one_line(text: str) -> str:
    # Ansible and ssh may report many lines; a host has one row in the table
    return " ".join(text.split())[:300]


def not_tested(why: str) -> runner.ProbeRow:
    """Make the row for function tests that did not run."""
    return runner.ProbeRow(
        check="functions", subject="cards", verdict="unknown", why=why, measured={}
    )


def run_functions(
    remote: Remote,
    promised: Promised,
    facts: HostFacts | None,
    image: str | None,
    arguments: Sequence[str],
) -> tuple[list[runner.ProbeRow], list[str]]:
    """Run the function tests on a host, in a container of an engine image that the host has.

    Returns rows, and output to search for known issues; nothing if no image is named.
    """
    if image is None:
        return [], []
    if facts is not None and not facts.pci.gpus:
        return [not_tested("no GPU is on the bus of this host: the function tests did not run")], []
    runtime = promised.roles.container_runtime
    engine = runtime.engine if runtime else "docker"
    cards = runner.card_options(engine, facts.software.docker if facts is not None else None)
    packed = io.BytesIO()
    # an argument has at most 128 KiB, see execve(2); the script is one
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=9) as tar:
        for path in sorted(runner.WORKER.glob("*.py")):
            tar.add(path, arcname=path.name)
    code, folder = _FOLDER / "code", _FOLDER / "report"
    command = runner.container_command(
        image, folder, arguments, {}, worker=code, cards=cards, nccl=["@NCCL@"]
    )
    # the lines before check on the host whether it has NCCL settings
    run = shlex.join([engine, *command[1:]]).replace("@NCCL@", '"$@"')
    limit, settings, library = f"{runner.LIMIT_S:.0f}", runner.NCCL_SETTINGS, runner.NCCL_LIBRARY
    script = [
        f"{_clean_up(engine)}; mkdir -p {code} {folder} || exit 1",
        f"trap '{_clean_up(engine)}' EXIT",
        # the image's user is not root, so the folder of the report is open while the tests run
        f"chmod 755 {_FOLDER} {code} && chmod 777 {folder}",
        f"echo {base64.b64encode(packed.getvalue()).decode()} | base64 -d"
        f" | tar -xz -C {code} || exit 1",
        # the same settings and library that an engine on this host gets
        f"set --; [ ! -f {settings} ] || set -- --env-file {settings}",
        f'[ ! -d {library} ] || set -- "$@" --volume {library}:{library}:ro',
        # stdout is for the report alone
        f"timeout --kill-after=10 {limit} {run} >&2",
        f'[ $? -ne 124 ] || echo "did not finish within {limit} s"  >&2',
        # stderr above has the reason where there is no report
        f"cat {folder}/{runner.REPORT_NAME} 2>/dev/null",
    ]
    done = remote.run("\n".join(script), runner.LIMIT_S + _CLEAN_UP_S)
    try:
        report = runner.parse_report(done.out, "the function tests")
    except FactsUnreadable:
        # a killed script could not do it itself
        remote.run(_clean_up(engine), _CLEAN_UP_S)
        output = (done.err.strip() or done.out).decode(errors="replace")
        reason = proc.last_line(output, runner.NO_OUTPUT)
        return [not_tested(f"the function tests gave no report: {reason}")], []
    return report.rows, report.lines()


def _clean_up(engine: str) -> str:
    """Commands that remove the tests' container and folder, even an earlier run's."""
    return f"{engine} rm --force {runner.CONTAINER} >/dev/null 2>&1; rm -rf {_FOLDER}"


class HostChanges(Frozen):
    """One host and what a run changed on it; empty where nothing was captured before the run."""

    host: str
    changes: list[Difference]


def host_record_path(folder: Path, host: str) -> Path:
    """The file of a host's record."""
    return folder / f"{host}.json"


def recorded(folder: Path | None, host: str) -> HostFacts | None:
    """A host's record, where there is one."""
    path = host_record_path(folder, host) if folder else None
    return read_recorded_facts(path) if path and path.exists() else None


def keep_records(folder: Path) -> list[HostChanges]:
    """Turn the captures of a play into records and delete them; returns the changes of each host.

    A host whose run did not finish keeps the record of the run before.
    """
    hosts = []
    for after in sorted((folder / CAPTURES).glob("*.after.json")):
        host = after.name.removesuffix(".after.json")
        now = gather_facts(read_capture(after), host)
        write_bytes(host_record_path(folder, host), _json(now))
        before = after.with_name(f"{host}.before.json")
        changes = (
            compare_facts(gather_facts(read_capture(before), host), now) if before.exists() else []
        )
        hosts.append(HostChanges(host=host, changes=changes))
        # a capture that stayed would be taken for one of the next run
        after.unlink()
        before.unlink(missing_ok=True)
    return hosts


def _json(facts: HostFacts) -> bytes:
    return (facts.model_dump_json(indent=2) + "\n").encode()
