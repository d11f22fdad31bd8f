"""The promises as testinfra tests: `pytest --hosts=ansible://GROUP … pipeline/hosts/promises`.

What each host was promised comes from the play `ansible/promises.yml` over the same inventory, or
from the files that `--promises FOLDER` names. `sm120 host verify` runs the same checks in parallel.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.known import Known, then, unknown
from pipeline.hosts.facts import capture
from pipeline.hosts.facts.gather import gather
from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.facts.source import Capture
from pipeline.hosts.fleet.playbook import ansible_program, promises_of
from pipeline.hosts.fleet.promised import Promised, read_promised
from pipeline.hosts.fleet.remote import one_line
from pipeline.hosts.promises.checks import Host, NotApplicable, Outcome, known, locked_target
from pipeline.hosts.promises.run import MODULES, PARTS, installs_packages
from pipeline.images.spec.checkout import Checkout

_ROOT = Path(__file__).resolve().parents[3]
# of these a test is run once for each role
_OF_ROLES = ("owned", "pinned_packages")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the promises come from, if not from the inventory."""
    parser.addoption("--promises", help="folder of files that ansible/promises.yml wrote")


def pytest_configure(config: pytest.Config) -> None:
    """Let testinfra find the Ansible of this environment, also where it is not on the path."""
    hosts = config.getoption("--hosts", default=None) or ""
    if "ansible://" in hosts:
        place = Path(ansible_program("ansible-inventory")).parent
        os.environ["PATH"] = f"{place}{os.pathsep}{os.environ['PATH']}"


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """The modules of promises, which have no test_ in their names."""
    if file_path.parent == Path(__file__).parent and file_path.stem in (*MODULES, *_OF_ROLES):
        module: pytest.Module = pytest.Module.from_parent(parent, path=file_path)
        return module
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test about any role is run for each of them."""
    stem = metafunc.module.__name__.rpartition(".")[2]
    roles = {"owned": list(MODULES)[1:], "pinned_packages": list(PARTS)}.get(stem, [stem])
    metafunc.fixturenames.append("promised_role")
    metafunc.parametrize("promised_role", roles, indirect=True)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """A broken promise fails with its reason and fix; an undecided one does not pass either."""
    try:
        return (yield)
    except NotApplicable as outcome:
        pytest.skip(outcome.why)
    except Outcome as outcome:
        pytest.fail(f"{outcome.verdict}: {outcome.why}\n{outcome.fix}".strip(), pytrace=False)


@pytest.fixture(scope="session")
def all_promised(pytestconfig: pytest.Config) -> Iterator[dict[str, Promised]]:
    """What each host of the inventory was promised."""
    if folder := pytestconfig.getoption("--promises"):
        hosts = [read_promised(path) for path in sorted(Path(folder).glob("*.json"))]
        yield {each.host: each for each in hosts}
        return
    inventory = pytestconfig.getoption("--ansible-inventory")
    arguments = ["--inventory", inventory] if inventory else []
    with promises_of(Checkout(_ROOT), arguments) as hosts:
        yield {each.host: each for each in hosts}


@pytest.fixture(scope="session")
def roots() -> set[str]:
    """Hosts on which we are known to be root."""
    return set()


@pytest.fixture
def promised(host: Host, all_promised: dict[str, Promised], roots: set[str]) -> Promised:
    """What this host was promised."""
    name = host.backend.get_hostname()
    if name not in all_promised:
        pytest.fail(f"nothing was promised to {name}", pytrace=False)
    if name not in roots and host.run("id -u").stdout.strip() != "0":
        hint = "--sudo, or --force-ansible with ansible_become where sudo asks for a password"
        pytest.fail(f"promises are judged as root on {name}: {hint}", pytrace=False)
    roots.add(name)
    return all_promised[name]


@pytest.fixture(autouse=True)
def promised_role(request: pytest.FixtureRequest, promised: Promised) -> str:
    """The role that is judged; a host that does not have it is passed over."""
    role = str(request.param)
    state = promised.roles.states().get(role)
    left = request.function.__name__ == "test_nothing_of_the_role_is_left"
    if role != "host" and state != ("absent" if left else "present"):
        pytest.skip(f"the role {role} is {state or 'not chosen'} for this host")
    return role


@pytest.fixture
def role(promised_role: str) -> str:
    """For tests about any role."""
    return promised_role


@pytest.fixture
def part(promised_role: str, promised: Promised) -> str:
    """The part of the lock that the role installs."""
    if not installs_packages(promised_role, promised.roles):
        pytest.skip(f"{promised_role} installs no packages on this host")
    return PARTS[promised_role]


@pytest.fixture
def wanted(promised: Promised, promised_role: str) -> Any:
    """The promise of the role."""
    return getattr(promised.roles, promised_role)


@pytest.fixture
def lock(promised: Promised) -> Any:
    """The packages that the lock names for the host's system."""
    return known(locked_target(promised.lock_file, promised.target))


@pytest.fixture(scope="session")
def facts_of() -> dict[str, Known[HostFacts]]:
    """Facts by host, read once."""
    return {}


@pytest.fixture
def facts(host: Host, promised: Promised, facts_of: dict[str, Known[HostFacts]]) -> HostFacts:
    """The host's facts, captured by the code that captures this machine."""
    if promised.host not in facts_of:
        done = host.run(f"python3 -c {shlex.quote(one_line(Path(capture.__file__)))}")
        facts_of[promised.host] = (
            then(done.stdout, lambda data: gather(Capture.model_validate_json(data), promised.host))
            if done.rc == 0
            else unknown(f"the facts cannot be read: {done.stderr.strip()[-200:]}")
        )
    return known(facts_of[promised.host])
