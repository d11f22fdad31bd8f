"""Judges the hosts of a fleet in parallel: promises, drift, rules over facts, function tests."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

from pipeline.host.facts import capture
from pipeline.host.facts.drift import compare
from pipeline.host.facts.gather import gather
from pipeline.host.facts.model import HostFacts
from pipeline.host.facts.source import Capture
from pipeline.host.fleet.function_tests import run_functions
from pipeline.host.fleet.promised import Promised
from pipeline.host.fleet.records import recorded, save_facts
from pipeline.host.fleet.remote import Remote, Unreached, one_line
from pipeline.host.fleet.result import FleetResult, HostResult, Row
from pipeline.host.rules.judge import judge
from pipeline.known import Known, Unknown, then, unknown
from pipeline.model import Frozen

# nvidia-smi alone is asked four times, and may take seconds each on many cards
_CAPTURE_S = 300.0
# host.promises.run.judge_promises
Judge: TypeAlias = Callable[[Promised, Remote, Known[HostFacts], Sequence[str]], list[Row]]


class VerifyOptions(Frozen):
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
    options: VerifyOptions,
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
    promised: Promised, remote: Remote, options: VerifyOptions, judge_promises: Judge
) -> HostResult:
    """One host."""
    if promised.unreached is not None:
        reason = promised.unreached.removeprefix("Task failed: ")
        return HostResult(host=promised.host, unreached=_one_line(reason))
    try:
        with remote:
            # the first command: a host that is down is reported once, not by every check
            read = _facts(remote, promised.host)
            rows = judge_promises(promised, remote, read, options.roles)
            facts = None if isinstance(read, Unknown) else read
            functions, output = run_functions(
                remote, promised, facts, options.image, options.probe_arguments
            )
    except Unreached as why:
        return HostResult(host=promised.host, unreached=_one_line(str(why)))
    if options.save and facts:
        save_facts(options.save, facts, functions)
    before = recorded(options.records, promised.host)
    return HostResult(
        host=promised.host,
        rows=rows,
        rules=judge(facts, options.cuda) if options.rules and facts else [],
        functions=functions,
        output=output,
        drift=compare(before, facts) if before and facts else None,
    )


def _facts(remote: Remote, host: str) -> Known[HostFacts]:
    """The host's facts, captured by the code that captures this machine."""
    code = one_line(Path(capture.__file__))
    done = remote.run(f"python3 -c {shlex.quote(code)}", _CAPTURE_S)
    if done.code != 0:
        return unknown(f"the facts cannot be read: {done.message}")
    return then(done.out, lambda data: gather(Capture.model_validate_json(data), host))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
