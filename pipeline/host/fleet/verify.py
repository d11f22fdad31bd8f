"""Judges the hosts of a fleet in parallel: promises, drift, rules over facts, function tests."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from pipeline import proc
from pipeline.errors import MissingTool, PipelineError
from pipeline.host.facts.drift import compare
from pipeline.host.facts.gather import gather
from pipeline.host.facts.model import HostFacts
from pipeline.host.facts.source import read_capture
from pipeline.host.fleet.function_tests import run_functions
from pipeline.host.fleet.promised import Promised
from pipeline.host.fleet.records import recorded, save_facts
from pipeline.host.fleet.remote import Remote, Unreached
from pipeline.host.fleet.result import FleetResult, HostResult, Row
from pipeline.host.rules.judge import judge
from pipeline.model import Frozen

PROMISES = Path(__file__).resolve().parents[1] / "promises"
_ROOT = PROMISES.parents[2]
# of all promises of a host; a verification of large weights takes minutes
_LIMIT_S = 1800.0
_ROWS = TypeAdapter(list[Row])


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
    *,
    jobs: int,
    on_result: Callable[[HostResult], None] = lambda _: None,
) -> FleetResult:
    """Every host, some in parallel; one that is down does not hold up the others."""

    def one(promised: Promised) -> HostResult:
        result = verify_host(promised, options)
        on_result(result)
        return result

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        return FleetResult(hosts=list(pool.map(one, fleet)))


def verify_host(promised: Promised, options: VerifyOptions) -> HostResult:
    """One host."""
    if promised.unreached is not None:
        reason = promised.unreached.removeprefix("Task failed: ")
        return HostResult(host=promised.host, unreached=_one_line(reason))
    with tempfile.TemporaryDirectory(prefix="sm120-") as name:
        place = Path(name)
        try:
            with Remote(promised.connection) as remote:
                # a host that is down is reported once, not by every check
                remote.run("true")
                rows = _rows(promised, options, place)
                facts = _facts(promised, place)
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


def _rows(promised: Promised, options: VerifyOptions, place: Path) -> list[Row]:
    """Run the promises' tests and read their rows.

    In a process of their own: pytest changes its interpreter, and a fleet needs one run per host.
    """
    file = place / "promised.json"
    file.touch(mode=0o600)
    file.write_text(promised.model_dump_json(), encoding="utf-8")
    only = [x for role in options.roles for x in ("--role", role)]
    command = [
        *(sys.executable, "-m", "pytest", "--quiet", "-p", "pipeline.host.promises.plugin"),
        *("-p", "no:cacheprovider", "--noconftest", "--rootdir", str(PROMISES)),
        *("-c", str(PROMISES / "pytest.ini"), "--promised", str(file), "--answers", str(place)),
    ]
    names = ("SSH_AUTH_SOCK", "USER")
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = proc.environment(*names, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTHONPATH=path)
    try:
        done = proc.read([*command, *only, str(PROMISES)], env=env, timeout_s=_LIMIT_S)
        return _ROWS.validate_json((place / "rows.json").read_bytes())
    except subprocess.TimeoutExpired:
        return [_unjudged(f"the checks did not finish within {_LIMIT_S:g} s")]
    except (OSError, ValidationError) as error:
        last = proc.last_line((done.stderr + done.stdout).decode(errors="replace"), "no output")
        if "No module named" in last:
            hint = "Run it by nox, or install the group `hosts` of pyproject.toml."
            raise MissingTool(f"pytest-testinfra is not installed: {last}", hint) from error
        return [_unjudged(f"the checks did not run: {last}")]


def _unjudged(why: str) -> Row:
    """In place of rows that could not be made."""
    return Row(role="host", promise="its promises can be judged", verdict="unknown", why=why)


def _facts(promised: Promised, place: Path) -> HostFacts | None:
    """The facts that the promises were judged by."""
    try:
        return gather(read_capture(place / "capture.json"), promised.host)
    except PipelineError:
        return None


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
