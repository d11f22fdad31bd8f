"""The pytest plugin that judges promises: one host, one row for each test.

A test's file names the role, its name is the promise as a sentence. Started by
`pipeline.host.fleet.verify`, never by the test suite of this project.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from testinfra.backend.base import BaseBackend
from testinfra.host import Host

from pipeline.host.facts import capture as capture_module
from pipeline.host.facts.gather import gather
from pipeline.host.facts.model import HostFacts
from pipeline.host.facts.source import Capture
from pipeline.host.fleet.promised import Promised, read_promised
from pipeline.host.fleet.remote import Remote, one_line
from pipeline.host.fleet.result import Row
from pipeline.host.promises.checks import locked_target
from pipeline.host.promises.outcome import Outcome, Undecided
from pipeline.lock.host_model import TargetLock

# parts of the host lock, and the role that installs each
_PARTS = {
    "driver": "nvidia_driver",
    "cuda": "cuda",
    "container_toolkit": "container_runtime",
    "nccl": "nccl",
}
# tests that are made for each role in that state
_BY_ROLE = {"of_role": "present", "undone": "absent"}
# pytest's own place for a plugin's data
_ROWS = pytest.StashKey[list[Row]]()
_FIX = "Run the playbook again; it puts this back (`--tags {role}` for this role alone)."


class RootBackend(BaseBackend):  # type: ignore[misc]
    """testinfra's commands through our own shell, which also knows sudo with a password."""

    NAME = "sm120"

    def __init__(self, name: str, remote: Remote) -> None:
        super().__init__(name)
        self._remote = remote

    def run(self, command: str, *args: str, **kwargs: Any) -> Any:
        full = self.quote(command, *args)
        done = self._remote.run(full)
        return self.result(done.code, full.encode(), done.out, done.err)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options that fleet.verify passes."""
    parser.addoption("--promised", type=Path, required=True, help="what the host was promised")
    parser.addoption("--answers", type=Path, required=True, help="the folder to write rows to")
    parser.addoption("--role", action="append", default=[], help="only these roles")


def promised_of(config: pytest.Config) -> Promised:
    """The one host of this run."""
    return read_promised(config.getoption("--promised"))


def pytest_configure(config: pytest.Config) -> None:
    """Begin with no rows."""
    config.stash[_ROWS] = []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A row for each installed part of the lock, and for each role that is there or undone."""
    states = promised_of(metafunc.config).roles.states()
    if "part" in metafunc.fixturenames:
        metafunc.parametrize("part", _installed_parts(metafunc.config))
    for name, state in _BY_ROLE.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, [n for n, s in states.items() if s == state])


def _installed_parts(config: pytest.Config) -> list[str]:
    roles = promised_of(config).roles
    wanted = [p for p, r in _PARTS.items() if roles.states().get(r) == "present"]
    off = {"cuda"} if roles.cuda and not roles.cuda.toolkit else set()
    off |= {"nccl"} if roles.nccl and not roles.nccl.library else set()
    return [p for p in wanted if p not in off]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Only what was promised is judged."""
    states = promised_of(config).roles.states()
    only = config.getoption("--role")
    kept = [i for i in items if _is_wanted(i, states, only)]
    order = list(states)
    items[:] = sorted(kept, key=lambda i: order.index(role_of(i)) if role_of(i) in states else -1)


def _is_wanted(item: pytest.Item, states: dict[str, Any], only: list[str]) -> bool:
    # without any part or role pytest still makes one test, with a marker in place of a name
    if any(not isinstance(value, str) for value in _parameters(item).values()):
        return False
    role = role_of(item)
    if only and role not in only and role != "host":
        return False
    return role == "host" or "undone" in _parameters(item) or states.get(role) == "present"


def _parameters(item: pytest.Item) -> dict[str, Any]:
    parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    return parameters


def role_of(item: pytest.Item) -> str:
    """The role of a test: its file's, or that of the part or role it was made for."""
    given = _parameters(item)
    if given.get("part") in _PARTS:
        return _PARTS[given["part"]]
    named = [given[name] for name in _BY_ROLE if name in given]
    return str(named[0]) if named else item.path.stem.removeprefix("test_")


def promise_of(item: pytest.Item) -> str:
    """The test's name as a sentence."""
    name = getattr(item, "originalname", item.name).removeprefix("test_").replace("_", " ")
    given = [v for key, v in _parameters(item).items() if key not in _BY_ROLE]
    return f"{name} ({', '.join(given)})" if given else name


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, None, None]:
    """One row for each test: from what it raised, or that it raised nothing."""
    yield
    error = call.excinfo.value if call.excinfo else None
    if call.when == "teardown" or (call.when == "setup" and error is None):
        return
    item.config.stash[_ROWS].append(_row(item, error))


def _row(item: pytest.Item, error: BaseException | None) -> Row:
    role = role_of(item)
    rule = getattr(getattr(item, "function", None), "rule", "")
    names = {"role": role, "promise": promise_of(item), "rule": rule}
    if error is None:
        return Row(**names, verdict="passed")
    if isinstance(error, Outcome):
        fix = error.fix or (_FIX.format(role=role) if error.verdict == "failed" else "")
        return Row(**names, verdict=error.verdict, why=error.why, fix=fix)
    # any other error is ours, and proves nothing about the promise
    message = " ".join(f"{type(error).__name__}: {error}".split())
    return Row(**names, verdict="unknown", why=message[:400])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write all rows; where there is no such file, the run did not finish."""
    rows = [r.model_dump() for r in session.config.stash[_ROWS]]
    place: Path = session.config.getoption("--answers")
    (place / "rows.json").write_text(json.dumps(rows), encoding="utf-8")


@pytest.fixture(scope="session")
def remote(request: pytest.FixtureRequest) -> Iterator[Remote]:
    """One connection for all tests."""
    with Remote(promised_of(request.config).connection) as remote:
        yield remote


@pytest.fixture(scope="session")
def host(request: pytest.FixtureRequest, remote: Remote) -> Any:
    """The host, as tests of testinfra expect it."""
    backend = RootBackend(promised_of(request.config).host, remote)
    testinfra_host = Host(backend)
    backend.set_host(testinfra_host)
    return testinfra_host


@pytest.fixture
def wanted(request: pytest.FixtureRequest) -> Any:
    """What the test's role promised."""
    return getattr(promised_of(request.config).roles, role_of(request.node))


@pytest.fixture
def promised(request: pytest.FixtureRequest) -> Promised:
    """All that the host was promised."""
    return promised_of(request.config)


@pytest.fixture(scope="session")
def lock(request: pytest.FixtureRequest) -> TargetLock:
    """The locked packages of the host's system."""
    promised = promised_of(request.config)
    return locked_target(promised.lock_file, promised.target)


@pytest.fixture(scope="session")
def facts(request: pytest.FixtureRequest, remote: Remote) -> HostFacts:
    """The host's facts, captured by the code that captures this machine; kept for the caller."""
    code = one_line(Path(capture_module.__file__))
    done = remote.run(f"python3 -c {shlex.quote(code)}", 300.0)
    if done.code != 0:
        raise Undecided(f"the facts cannot be read: {done.message}")
    place: Path = request.config.getoption("--answers")
    (place / "capture.json").write_bytes(done.out)
    return gather(Capture.model_validate_json(done.out), promised_of(request.config).host)
