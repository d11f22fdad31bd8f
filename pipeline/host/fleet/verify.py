"""Judges every host of a fleet at once: promises, drift, rules over facts, function tests."""

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
from pipeline.host.fleet.functions import run_functions
from pipeline.host.fleet.promised import Promised
from pipeline.host.fleet.records import recorded, save_look
from pipeline.host.fleet.remote import Remote, Unreached
from pipeline.host.fleet.result import FleetResult, HostResult, Row
from pipeline.host.rules.judge import judge
from pipeline.model import Frozen

PROMISES = Path(__file__).resolve().parents[1] / "promises"
_ROOT = PROMISES.parents[2]
_LIMIT_S = 1800.0
_ROWS = TypeAdapter(list[Row])


class Asked(Frozen):
    """What to look at beside the promises."""

    roles: tuple[str, ...] = ()
    rules: bool = False
    image: str | None = None
    cuda: str | None = None
    probe_arguments: tuple[str, ...] = ()
    records: Path | None = None
    save: Path | None = None


def verify_fleet(
    fleet: Sequence[Promised],
    asked: Asked,
    *,
    at_once: int,
    told: Callable[[HostResult], None] = lambda _: None,
) -> FleetResult:
    """Every host, some at once; one that is down keeps no other from its turn."""

    def one(promised: Promised) -> HostResult:
        found = verify_host(promised, asked)
        told(found)
        return found

    with ThreadPoolExecutor(max(1, at_once)) as pool:
        return FleetResult(hosts=list(pool.map(one, fleet)))


def verify_host(promised: Promised, asked: Asked) -> HostResult:
    """One host."""
    if promised.unreached is not None:
        why_not = promised.unreached.removeprefix("Task failed: ")
        return HostResult(host=promised.host, unreached=_one_line(why_not))
    with tempfile.TemporaryDirectory(prefix="sm120-") as name:
        place = Path(name)
        try:
            with Remote(promised.connection) as remote:
                remote.run("true")
                rows = _rows(promised, asked, place)
                facts = _facts(promised, place)
                functions, words = run_functions(
                    remote, promised, facts, asked.image, asked.probe_arguments
                )
        except Unreached as why:
            return HostResult(host=promised.host, unreached=_one_line(str(why)))
    if asked.save and facts:
        save_look(asked.save, facts, functions)
    before = recorded(asked.records, promised.host)
    return HostResult(
        host=promised.host,
        rows=rows,
        rules=judge(facts, asked.cuda) if asked.rules and facts else [],
        functions=functions,
        words=words,
        drift=compare(before, facts) if before and facts else None,
    )


def _rows(promised: Promised, asked: Asked, place: Path) -> list[Row]:
    """Run the promises' tests in a process of their own and read its rows."""
    file = place / "promised.json"
    file.touch(mode=0o600)
    file.write_text(promised.model_dump_json(), encoding="utf-8")
    only = [x for role in asked.roles for x in ("--role", role)]
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
        return [_unjudged(f"the checks did not end within {_LIMIT_S:g} s")]
    except (OSError, ValidationError) as error:
        words = (done.stderr + done.stdout).decode(errors="replace").strip().splitlines()
        last = words[-1] if words else "no words"
        if "No module named" in last:
            hint = "Run it by nox, or install the group `hosts` of pyproject.toml."
            raise MissingTool(f"pytest-testinfra is not installed: {last}", hint) from error
        return [_unjudged(f"the checks did not run: {last}")]


def _unjudged(why: str) -> Row:
    """In the place of rows that there are not."""
    return Row(role="host", promise="its promises can be judged", verdict="unknown", why=why)


def _facts(promised: Promised, place: Path) -> HostFacts | None:
    """The facts that the promises were judged by."""
    try:
        return gather(read_capture(place / "capture.json"), promised.host)
    except PipelineError:
        return None


def _one_line(words: str) -> str:
    return " ".join(words.split())[:300]
