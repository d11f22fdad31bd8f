"""The promises as testinfra tests: `pytest --hosts=ansible://GROUP … pipeline/hosts/promises`.

What each host was promised comes from the play `ansible/promises.yml` over the same inventory, or
from the files that `--promises FOLDER` names. `sm120 host verify` runs the same checks in parallel.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.hosts.fleet.playbook import promises_of
from pipeline.hosts.fleet.promised import Promised, read_promised
from pipeline.hosts.fleet.remote import CommandResult
from pipeline.hosts.fleet.verify import captured_facts
from pipeline.hosts.promises.checks import Host, locked_target
from pipeline.hosts.promises.run import MODULES, Check, checks_of, judge_check, passed_over
from pipeline.images.spec.checkout import Checkout

_ROOT = Path(__file__).resolve().parents[3]
# the names by which -k chooses: role, check, part of the lock
CHECKS = [
    pytest.param(role, check, part, id="-".join(filter(None, (role, check.__name__, part))))
    for role in MODULES
    for check, part in checks_of(role)
]


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
def seen() -> dict[str, dict[str, Any]]:
    """What checks ask for, by host, read once."""
    return {}


@pytest.fixture
def given(
    host: Host, all_promised: dict[str, Promised], seen: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """What the checks of this host may ask for."""
    name = host.backend.get_hostname()
    if name not in all_promised:
        pytest.fail(f"nothing was promised to {name}", pytrace=False)
    if name not in seen:
        if host.run("id -u").stdout.strip() != "0":
            hint = "--sudo, or --force-ansible with ansible_become where sudo asks for a password"
            pytest.fail(f"promises are judged as root on {name}: {hint}", pytrace=False)

        def run(command: str) -> CommandResult:
            done = host.run(command)
            return CommandResult(code=done.rc, out=done.stdout_bytes, err=done.stderr_bytes)

        promised = all_promised[name]
        lock = locked_target(promised.lock_file, promised.target)
        facts = captured_facts(name, run)
        seen[name] = {"promised": promised, "facts": facts, "lock": lock}
    return {**seen[name], "host": host}


@pytest.mark.parametrize(("role", "check", "part"), CHECKS)
def test_promise(given: dict[str, Any], role: str, check: Check, part: str) -> None:
    """A broken promise fails with its reason and fix; an undecided one does not pass either."""
    if why := passed_over(role, check, part, given["promised"].roles):
        pytest.skip(why)
    row = judge_check(role, check, part, given)
    if row.verdict == "not applicable":
        pytest.skip(row.why)
    if row.verdict != "passed":
        pytest.fail(f"{row.verdict}: {row.why}\n{row.fix}".strip(), pytrace=False)
